import pytest
import torch

from benchmarks.checks import (
    DisagreementError,
    agreement,
    check_model,
    check_table,
    relative_errors,
)
from benchmarks.encoders import Encoders
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear

TINY = Encoders(layers=1, width=16, ffn=32, heads=2, vocab=40, length=6, rank=4, embedding_rank=4)


def linear(rows=300):
    return TTLinear(48, 40, rank=6), torch.randn(rows, 48, requires_grad=True)


@pytest.fixture
def pairs(monkeypatch):
    """All pairs that are compared."""
    seen = {}

    def noted(what, pairs, *rest):
        seen.update(pairs)
        return agreement(what, pairs, *rest)

    monkeypatch.setattr("benchmarks.checks.agreement", noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_that_are_right_pass(dtype):
    layer, x = linear()
    layer, x = layer.to(dtype), x.detach().to(dtype).requires_grad_()
    assert check_model("a layer", layer, (x,)).startswith("a layer agrees with dense in float64")
    check_table(TTEmbedding(90, 30, rank=5).to(dtype), torch.randint(0, 90, (64,)))


def test_every_parameter_of_a_layer_is_compared(pairs):
    layer, x = linear()
    check_model("a layer", layer, (x,))
    names = {f"the gradient of {name}" for name, _ in layer.named_parameters()}
    assert set(pairs) == names | {"the output", "the gradient of the input"}


def test_a_wrong_output_is_named(monkeypatch):
    layer, x = linear()
    right = TTLinear.forward
    monkeypatch.setattr(TTLinear, "forward", lambda self, x: 1.01 * right(self, x))
    with pytest.raises(DisagreementError, match=r"Off are the output by 1\.0e-02, .*cores\.0"):
        check_model("a layer", layer, (x,))


def test_a_gradient_that_is_wrong_alone_is_named(pairs):
    layer, x = linear()
    layer.cores[1].register_hook(lambda grad: grad * 1.5)
    with pytest.raises(DisagreementError, match=r"Off are the gradient of cores\.1 by 5\.0e-01 "):
        check_model("a layer", layer, (x,))


def test_tables_are_compared_row_by_row(monkeypatch):
    table = TTEmbedding(90, 30, rank=5)
    right = TTEmbedding.forward
    monkeypatch.setattr(TTEmbedding, "forward", lambda self, i: right(self, i.clamp(max=80)))
    with pytest.raises(DisagreementError, match=r"TTEmbedding 90 x 30 .* Off are the output by"):
        check_table(table, torch.arange(90))


def test_rows_by_cores_are_those_of_the_dense_table():
    from benchmarks.checks import RowByRow

    table = TTEmbedding(90, 30, rank=5, hot_rows=9, hot_rank=3)
    indices = torch.arange(90)
    torch.testing.assert_close(RowByRow(table)(indices), table.to_dense()(indices))


def test_a_model_is_compared_in_its_output_and_all_gradients(pairs):
    model = TINY.model("comera", torch.device("cpu"))
    batch = TINY.batch(5, torch.device("cpu"))
    check_model("tiny", model, batch[:2], most=2, padded=False)
    assert len(pairs) == 1 + len(list(model.parameters()))
    assert pairs["the output"][0].shape == (2, 3)
    assert model.training
    assert all(param.grad is None for param in model.parameters())


def test_numbers_that_are_not_finite_or_of_another_shape_disagree():
    one = torch.ones(3)
    for other in (one * torch.nan, one * torch.inf, torch.ones(1)):
        assert relative_errors({"t": (other, one)})["t"] == float("inf")


def test_a_vanishing_reference_is_measured_by_the_others():
    ones, zeros = torch.ones(4, dtype=torch.double), torch.zeros(2, dtype=torch.double)
    pairs = {"a": (ones, ones), "b": (ones, ones), "key": (zeros + 1e-9, zeros + 1e-17)}
    agreement("x", pairs, torch.float32)
    pairs["key"] = (zeros + 1e-3, zeros + 1e-17)
    with pytest.raises(DisagreementError, match="key"):
        agreement("x", pairs, torch.float32)
