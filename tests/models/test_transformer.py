import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.models.transformer import PAD, Encoder, MaskedLanguageModel, SequenceClassifier
from comera.nn import fused
from comera.nn.module import tensor_trains
from tests.train.counting import Launches


def encoder(norm="pre", segments=0) -> Encoder:
    return Encoder(50, 16, 2, 2, 32, 12, dropout=0.0, num_segments=segments, norm=norm)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_changes_nothing(norm):
    model = encoder(norm)
    tokens = torch.randint(1, 50, (3, 7))
    padded = torch.cat([tokens, torch.full((3, 4), PAD)], 1)
    torch.testing.assert_close(model(padded)[:, :7], model(tokens))


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_a_batch_without_padding_needs_no_mask(kind, monkeypatch):
    """The same numbers; said of a padded batch it is an error."""
    model = encoder()
    if kind == "tt":
        comera.tensorize_(model, comera.TTConfig(rank=4))
    seen = []
    real = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *a: seen.append(a[3]) or real(*a))
    tokens = torch.randint(1, 50, (3, 7))
    want = model(tokens)
    assert [mask.shape for mask in seen] == [(3, 7)] * 2
    got = model(tokens, padded=False)
    assert seen[2:] == [None] * 2
    torch.testing.assert_close(got, want)
    params = list(model.blocks.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), params),
        torch.autograd.grad(want.square().sum(), params),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    tokens[1, 6] = PAD
    with pytest.raises(
        ValueError, match="padded=False, but there are tokens 0, which stand for pad"
    ):
        model(tokens, padded=False)


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_normed_queries_and_keys_are_bounded(kind):
    """As written out, whatever the size of their weights."""
    model = Encoder(50, 16, 1, 2, 32, 12, dropout=0.0, qk_norm=True)
    if kind == "tt":
        comera.tensorize_(model, comera.TTConfig(rank=4, target_modules=r"blocks\..*"))
    attention = model.blocks[0].attention
    with torch.no_grad():
        for norm in (attention.query_norm, attention.key_norm):
            norm.weight.uniform_(0.5, 1.5)
        for layer in (attention.query, attention.key):
            (layer.cores[0] if kind == "tt" else layer.weight).mul_(1e3)
    x = torch.randn(3, 7, 16, requires_grad=True)
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[1, 4:] = False
    found = attention(x, keep)

    def heads(name):
        return getattr(attention, name)(x).unflatten(2, (2, 8)).transpose(1, 2)

    def normed(name):
        y = heads(name)
        mean_square = y.square().mean(3, keepdim=True)
        return y / (mean_square + 1e-6).sqrt() * getattr(attention, f"{name}_norm").weight

    scores = normed("query") @ normed("key").mT / 8**0.5
    assert scores.abs().max() < 1.5**2 * 8**0.5
    weights = scores.masked_fill(~keep[:, None, None], -torch.inf).softmax(3)
    want = attention.out((weights @ heads("value")).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, want)
    params = [x, *attention.parameters()]
    grad = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(found, params, grad),
        torch.autograd.grad(want, params, grad),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_post_norm_block_equals_torch():
    """The same weights in torch's own encoder layer give the same output."""
    ours = encoder("post").blocks[0]
    theirs = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
    attention = ours.attention
    parts = [attention.query, attention.key, attention.value]
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    theirs.self_attn.out_proj.load_state_dict(attention.out.state_dict())
    for name, mine in (("linear1", ours.fc1), ("linear2", ours.fc2), ("norm1", ours.norm1),
                       ("norm2", ours.norm2)):  # fmt: skip
        getattr(theirs, name).load_state_dict(mine.state_dict())
    x = torch.randn(2, 5, 16)
    keep = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(ours(x, keep), theirs(x))


def test_heads_give_what_they_say():
    tokens = torch.randint(1, 50, (3, 7))
    language_model = MaskedLanguageModel(encoder(), 50)
    positions = torch.tensor([[1, 4], [0, 6], [2, 3]])
    assert language_model(tokens, positions).shape == (3, 2, 50)
    classifier = SequenceClassifier(encoder(segments=2), 3)
    segments = torch.zeros_like(tokens)
    assert classifier(tokens, segments).shape == (3, 3)


def test_every_large_layer_can_be_tensorised():
    with torch.device("meta"):
        model = SequenceClassifier(Encoder(30522, 768, 6, 12, 3072), 3)
    comera.tensorize_(model, comera.TTConfig(rank=30, exclude_modules=["output"]))
    assert len(tensor_trains(model)) == 6 * 6 + 2


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="d_model=10 is not a multiple of num_heads=4"):
        Encoder(50, 10, 1, 4)
    with pytest.raises(ValueError, match="13 tokens exceeds max_length=12"):
        encoder()(torch.ones(1, 13, dtype=torch.long))


def test_segments_are_read_as_by_an_index(monkeypatch):
    """The same numbers; sums of gradients to rounding."""
    model = encoder(segments=3)
    tokens, segments = torch.randint(1, 50, (3, 7)), torch.randint(0, 3, (3, 7))

    def run():
        out = model(tokens, segments)
        return out, *torch.autograd.grad(out.square().mean(), model.segments)

    out, grad = run()
    monkeypatch.setattr(F, "embedding", lambda indices, table, *others: table[indices])
    want, grad_by_index = run()
    assert torch.equal(out, want)
    torch.testing.assert_close(grad, grad_by_index)


def test_an_encoder_reads_no_table_by_an_index():
    """Which takes a GPU longest of all that a step does, where a table has two rows."""
    tokens = torch.ones(2, 5, dtype=torch.long)
    with Launches() as counter:
        encoder(segments=2)(tokens, tokens).sum().backward()
    assert not [name for name in counter.log if name in ("index", "_index_put_impl_", "index_put")]
