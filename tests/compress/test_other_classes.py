"""Layers that tensorize_ takes are compressed too: GPT-2's, convolutions of kernel 1, experts."""

import copy

import pytest
import torch
from torch import nn

import comera
from comera.report.explore import WHOLE

transformers = pytest.importorskip("transformers")


def ids(rows=4):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (rows, 16), generator=draw)
    return {"input_ids": tokens, "labels": tokens}


def gpt2():
    config = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config), ids()


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), ids()


class Pointwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(24, 48, 1), nn.ReLU(), nn.Conv2d(48, 24, 1, bias=False), nn.Flatten(1)
        )

    def forward(self, input_ids, labels):
        loss = (self.layers(input_ids) - labels).square().mean()
        return transformers.utils.ModelOutput(loss=loss)


def pointwise():
    return Pointwise(), {"input_ids": torch.randn(8, 24, 3, 3), "labels": torch.randn(8, 24 * 9)}


@pytest.fixture(params=[gpt2, mixtral, pointwise])
def given(request):
    torch.manual_seed(0)
    model, batch = request.param()
    return model.eval(), batch


def size_of(model):
    return sum(param.numel() for param in model.parameters())


def names_of(model):
    return {name for name, m in model.named_modules() if isinstance(m, comera.TTLinear)}


def test_they_are_compressed_within_the_budget(given, tmp_path):
    model, batch = given
    dense, before = copy.deepcopy(model), size_of(model)
    done = comera.compress_(model, [batch] * 3, budget=0.6)
    assert size_of(model) <= 0.6 * before
    assert names_of(model) == {layer.name for layer in done.layers if layer.rank is not None}
    with torch.no_grad():
        got = model(**batch).loss
        want = comera.densify_(copy.deepcopy(model))(**batch).loss
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    kinds = {type(m) for m in comera.densify_(copy.deepcopy(model)).modules()}
    assert kinds == {type(m) for m in dense.modules()}
    comera.save_model(model, tmp_path)
    again = comera.load_model(tmp_path, copy.deepcopy(dense)).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).loss, got)


def test_the_largest_rank_changes_nothing(given):
    """The products of its factors are the weights, in the order in which the class has them."""
    model, batch = given
    dense = copy.deepcopy(model)
    found = comera.sensitivity(model, [batch])
    assert {type(m) for m in model.modules()} == {type(m) for m in dense.modules()}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss, dense(**batch).loss)
    comera.compress_(model, found, budget=0.95)
    with torch.no_grad():
        change = abs(float(model(**batch).loss - dense(**batch).loss))
    assert names_of(model)
    assert change < 0.05


def test_it_is_searched_for_too(given):
    model, batch = given
    dense = copy.deepcopy(model)
    loss = model(**batch).loss.item()
    comera.compress_(model, [batch] * 2, max_loss=1.02 * loss)
    assert model(**batch).loss.item() <= 1.02 * loss * 1.001
    weights = dict(dense.named_parameters())
    for name, param in model.named_parameters():
        assert name not in weights or torch.equal(param, weights[name])


def test_they_are_explored(given):
    model, batch = given
    experts = comera.TTConfig(rank=4, target_modules=r".*(experts|h\..*|layers\.\d)(\..*)?")
    explored = comera.explore(
        model, lambda small: float(small(**batch).loss.detach()), [batch] * 2,
        budgets=[0.7], configs=[experts], each_layer=True,
    )  # fmt: skip
    assert not [point.note for point in explored.points if "Error" in point.note]
    layers = {layer.name for layer in comera.sensitivity(model, [batch]).layers}
    assert {p.layer for p in explored.points if p.setting == "budget=0.7"} == {WHOLE, *layers}
    dense, by_data, by_config = explored.points[:3]
    assert by_data.params <= 0.7 * dense.params
    assert by_config.params < dense.params
