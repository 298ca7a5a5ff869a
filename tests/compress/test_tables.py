import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera


class Words(nn.Module):
    """Says which of three kinds the words of a sentence are of."""

    def __init__(self, rows=60, width=24):
        super().__init__()
        self.embed = nn.Embedding(rows, width, padding_idx=0)
        self.head = nn.Linear(width, 3)

    def forward(self, words):
        return self.head(torch.tanh(self.embed(words)))


def loss_fn(model, words):
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten() % 3)


def sentences(count, seed, rows=50):
    """Words of which a few make most of the text, and the last ten never occur."""
    generator = torch.Generator().manual_seed(seed)
    often = 1 / torch.arange(1.0, rows + 1)
    words = torch.multinomial(often, count * 32, True, generator=generator)
    return list(words.view(-1, 8, 4))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for words in sentences(120, 1):
        optimizer.zero_grad()
        loss_fn(model, words).backward()
        optimizer.step()
    return model


def test_a_padding_row_that_is_not_zero_keeps_its_numbers(trained):
    model = copy.deepcopy(trained)
    with torch.no_grad():
        model.embed.weight[0] = model.embed.weight[1:].mean(0)
    row = model.embed.weight[0].detach().clone()
    comera.compress_(model, sentences(8, 2), budget=0.9, loss_fn=loss_fn, target_modules="all")
    assert type(model.embed) is comera.TTEmbedding
    assert (model.embed(torch.tensor(0)) - row).norm() < 0.3 * row.norm()


def test_rows_that_are_read_most_are_kept_best(trained):
    words = sentences(40, 2)
    small, plain = copy.deepcopy(trained), copy.deepcopy(trained)
    done = comera.compress_(small, words, budget=0.5, loss_fn=loss_fn, target_modules="all")
    table = small.embed
    assert type(table) is comera.TTEmbedding
    assert done.params == sum(param.numel() for param in small.parameters())
    assert table.padding_idx == 0
    assert not table(torch.tensor([0])).any()
    (rank,) = table.ranks
    u, s, v = torch.linalg.svd(trained.embed.weight.detach(), full_matrices=False)
    plain.embed = nn.Embedding.from_pretrained((u[:, :rank] * s[:rank]) @ v[:rank], freeze=False)
    test = sentences(200, 3)
    with torch.no_grad():
        dense, ours, theirs = (
            sum(float(loss_fn(model, words)) for words in test) / len(test)
            for model in (trained, small, plain)
        )
    assert ours - dense < 0.5 * (theirs - dense)


def test_rows_never_read_are_not_lost(trained):
    small = copy.deepcopy(trained)
    comera.compress_(small, sentences(40, 2), budget=0.6, loss_fn=loss_fn, target_modules="all")
    with torch.no_grad():
        apart = small.embed.dense_weight()[50:] - trained.embed.weight[50:]
    assert float(apart.norm()) < 0.9 * float(trained.embed.weight[50:].detach().norm())


def test_a_table_is_left_alone_unless_it_is_named(trained, caplog):
    small = copy.deepcopy(trained)
    comera.compress_(small, sentences(10, 2), budget=0.99, loss_fn=loss_fn)
    assert type(small.embed) is nn.Embedding
    tied = copy.deepcopy(trained)
    tied.head = nn.Linear(24, 60, bias=False)
    tied.head.weight = tied.embed.weight
    with pytest.raises(ValueError, match=r"embed: another module holds the weight"):
        comera.compress_(tied, [], budget=0.5, loss_fn=loss_fn, target_modules=["embed"])
    scaled = copy.deepcopy(trained)
    scaled.embed.max_norm = 1.0
    comera.compress_(
        scaled, sentences(10, 2), budget=0.99, loss_fn=loss_fn, target_modules=["embed", "head"]
    )
    assert type(scaled.embed) is nn.Embedding
    assert "leaves embed dense: rows that share a basis cannot be scaled" in caplog.text


def test_a_bound_on_the_loss_serves_tables_too(trained):
    small = copy.deepcopy(trained)
    with torch.no_grad():
        words = sentences(40, 2)
        dense = sum(float(loss_fn(trained, batch)) for batch in words) / len(words)
    done = comera.compress_(
        small, words, max_loss=dense + 0.1, loss_fn=loss_fn, target_modules="all"
    )
    assert done.measured <= dense + 0.1
    assert done.share < 0.9
