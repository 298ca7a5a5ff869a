"""What a plan says is kept for the backward pass is what torch keeps, byte by byte."""

import pytest
import torch
from torch import nn

import comera
from comera.ops import contract_cores
from comera.ops.context import static_shapes


def kept(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes of all memory that autograd holds on to after a forward pass, parameters left out."""
    found, own = {}, {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(found.values())


class Contracted(nn.Module):
    """A layer whose cores are contracted as those of many layers are, in its own pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with comera.BatchedContraction(self.layer):
            return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("widths", "rank", "order"), [
    ((64, 96), 8, 2), ((768, 768), 30, 3), ((768, 3072), 30, 3), ((64, 64), 12, 1),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [16, 512])
def test_linear_layers(tokens, widths, rank, order, bias, dtype):
    """Of layers of a model in training, whose cores one operator contracts; and in eager mode."""
    layer = comera.TTLinear(*widths, rank=rank, order=order, bias=bias, dtype=dtype)
    plan = comera.plan(layer, tokens=tokens)
    x = torch.randn(tokens, widths[0], dtype=dtype, requires_grad=True)
    in_eager_mode = kept(Contracted(layer), x)
    with static_shapes():
        assert kept(layer, x) == plan.chosen.saved_bytes
    assert kept(nn.Linear(*widths, bias=bias, dtype=dtype), x) == plan.dense.saved_bytes
    # Autograd keeps cores stacked and gated, in the dtype of the gates, and what some have made.
    cores = 4 * 4 * sum(core.numel() for core in layer.cores) * max(1, dtype.itemsize // 4)
    gates = 4 * 4 * sum(gate.numel() for gate in layer.gates) * max(1, dtype.itemsize // 4)
    assert plan.chosen.saved_bytes < in_eager_mode < plan.chosen.saved_bytes + cores + gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [16, 512])
def test_tables(tokens, dtype, monkeypatch):
    """Of a small one, whose factors are contracted whole; in eager mode with copies of cores."""
    table = comera.TTEmbedding(1000, 64, rank=8, dtype=dtype)
    plan = comera.plan(table, tokens=tokens)
    indices = torch.randint(0, 1000, (tokens,))
    in_eager_mode = kept(table, indices)
    monkeypatch.setattr(
        contract_cores, "_FEW", 0
    )  # as of large cores, which one operator contracts
    assert kept(table, indices) == plan.chosen.saved_bytes
    assert kept(nn.Embedding(1000, 64, dtype=dtype), indices) == plan.dense.saved_bytes
    # Autograd keeps cores gated, in the dtype of the gates.
    cores = 4 * 4 * sum(core.numel() for core in table.cores) * max(1, dtype.itemsize // 4)
    assert plan.chosen.saved_bytes < in_eager_mode < plan.chosen.saved_bytes + cores


def test_a_model_lists_them_beside_dense():
    made = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1000))
    model = comera.tensorize_(made, comera.TTConfig(rank=8, init="orthogonal"))
    plan = comera.plan(model, tokens=512)
    layers = {name: comera.plan(model[int(name)], tokens=512) for name in "012"}
    assert plan.kept_bytes == sum(one.chosen.saved_bytes for one in layers.values())
    assert plan.dense_kept == sum(one.dense.saved_bytes for one in layers.values())
    assert [row[0] for row in plan.tables()[1].rows] == ["0 and 1 more", "2", "total"]
    text = str(plan)
    assert "kept for the backward pass at 512 tokens" in text
    assert plan.tables()[1].rows[-1][-1] in text
    assert "kept for the backward pass" in plan._repr_html_()
