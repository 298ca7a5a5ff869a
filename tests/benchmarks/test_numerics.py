import pytest
import torch

from benchmarks.encoders import Encoders, loss_of_rows
from benchmarks.numerics import (
    DisagreementError,
    compare,
    compare_linear,
    compare_model,
    compare_table,
)
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.nn.linear import TTLinear

TINY = Encoders(layers=1, width=16, ffn=32, heads=2, vocab=40, length=6, rank=4, embedding_rank=4)


def linear(rows=300):
    return TTLinear(48, 40, rank=6), torch.randn(rows, 48, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_that_are_right_pass(dtype):
    layer, x = linear()
    layer, x = layer.to(dtype), x.detach().to(dtype).requires_grad_()
    assert "TTLinear 48 -> 40 agrees with dense" in compare_linear(layer, x).verdict()
    table = TTEmbedding(90, 30, rank=5).to(dtype)
    compare_table(table, torch.randint(0, 90, (64,))).verdict()
    bags = TTEmbeddingBag(90, 30, mode="sum", rank=5).to(dtype)
    compare_table(bags, torch.randint(0, 90, (16, 4))).verdict()


def test_every_parameter_is_compared():
    layer, x = linear()
    found = set(compare_linear(layer, x).errors)
    names = {f"the gradient of {name}" for name, _ in layer.named_parameters()}
    assert found == names | {"the output", "the gradient of the input"}


def test_a_wrong_output_is_named(monkeypatch):
    layer, x = linear()
    right = TTLinear.forward
    monkeypatch.setattr(TTLinear, "forward", lambda self, x: 1.01 * right(self, x))
    with pytest.raises(DisagreementError, match=r"Off are the output by 1\.0e-02, .*cores\.0"):
        compare_linear(layer, x).verdict()


def test_a_gradient_that_is_wrong_alone_is_named():
    layer, x = linear()
    layer.cores[1].register_hook(lambda grad: grad * 1.5)
    off = compare_linear(layer, x).errors
    assert off.pop("the gradient of cores.1") == pytest.approx(0.5, abs=1e-3)
    assert max(off.values()) < 1e-5


def test_tables_are_compared_row_by_row_too(monkeypatch):
    table = TTEmbedding(90, 30, rank=5)
    right = TTEmbedding.forward
    monkeypatch.setattr(TTEmbedding, "forward", lambda self, i: right(self, i.clamp(max=80)))
    off = compare_table(table, torch.arange(90)).errors
    assert off["the output"] > 0.1
    assert off["the output, from the dense table,"] > 0.1


def test_a_model_is_compared_in_loss_and_all_gradients():
    model = TINY.model("comera", torch.device("cpu"))
    batch = TINY.batch(5, torch.device("cpu"))
    comparison = compare_model("tiny", model, loss_of_rows, batch)
    comparison.verdict()
    assert len(comparison.errors) == 1 + len(list(model.parameters()))
    assert model.training
    assert all(param.grad is None for param in model.parameters())


def test_what_is_not_finite_or_of_another_shape_disagrees():
    one = torch.ones(3)
    for other in (one * torch.nan, one * torch.inf, torch.ones(1)):
        assert compare("x", {"t": (other, one)}, torch.float32).errors["t"] == float("inf")


def test_a_vanishing_reference_is_measured_by_the_others():
    ones, zeros = torch.ones(4, dtype=torch.double), torch.zeros(2, dtype=torch.double)
    pairs = {"a": (ones, ones), "b": (ones, ones), "key": (zeros + 1e-9, zeros + 1e-17)}
    compare("x", pairs, torch.float32).verdict()
    pairs["key"] = (zeros + 1e-3, zeros + 1e-17)
    with pytest.raises(DisagreementError, match="key"):
        compare("x", pairs, torch.float32).verdict()
