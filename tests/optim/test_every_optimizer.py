"""What holds of every optimizer: exact resume, copies, closures, gradients that are refused."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import comera

from .updating import OPTIMIZERS, assert_same, decayed, galore_groups, make_model, train


def around(inner, **settings):
    """GaLore around an optimizer, on all matrices of a model."""

    def make(model):
        matrices = [param for param in model.parameters() if param.dim() == 2]
        groups = [{"params": matrices, "rank": 4, "update_proj_gap": 3}]
        return comera.GaLore(groups, inner, lr=1e-2, **settings)

    return make


ALL = OPTIMIZERS | {
    "CAME, corrected": lambda m: comera.CAME(decayed(m), bias_correction=True),
    "Muon": lambda m: comera.MuonAdamW(
        comera.param_groups(m, 1e-2, weight_decay=0.1, muon_modules="all-linear"), momentum=0.8
    ),
    "GaLore around Adagrad": around(torch.optim.Adagrad),
    "GaLore around NAdam": around(torch.optim.NAdam),
    "GaLore around RMSprop": around(torch.optim.RMSprop, momentum=0.9),
    "GaLore around torch's Muon": around(torch.optim.Muon),
    "GaLore around CAME, 8 bits": lambda m: comera.GaLore(
        galore_groups(m, rank=60), comera.CAME, state_dtype="8bit"
    ),
}
OURS = ["CAME", "CAME, 8 bits", "Muon", "GaLoreAdamW", "GaLoreAdafactor", "GaLore around CAME"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ALL
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        if "NAdam" not in name or dtype == torch.float32  # torch rounds its products of momenta
    ],
    ids=str,
)
def test_a_run_resumed_from_a_file_is_the_same_bit_for_bit(name, dtype):
    a, b = make_model(dtype=dtype), make_model(dtype=dtype)
    first, second = ALL[name](a), ALL[name](b)
    train(a, first, 0, 7)
    file = io.BytesIO()
    torch.save((a.state_dict(), first.state_dict()), file)
    before = copy.deepcopy(a)
    train(a, first, 7, 12)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    b.load_state_dict(weights)
    second.load_state_dict(state)
    train(b, second, 7, 12)
    assert_same(a, first, b, second)
    assert not torch.equal(a.wide.weight, before.wide.weight)
    if name.startswith("CAME"):
        kinds = {x.dtype for entries in first.state.values() for x in entries.values()}
        assert kinds <= {torch.promote_types(dtype, torch.float32), torch.float32, torch.int8}
        assert (torch.int8 in kinds) == ("8 bits" in name and dtype != torch.float64)


@pytest.mark.parametrize("name", ["CAME", "CAME, 8 bits", "Muon"])
def test_distributed_checkpoints_bring_it_back(name):
    model = make_model(dtype=torch.bfloat16)
    optimizer = ALL[name](model)
    train(model, optimizer, 0, 2)
    twin = copy.deepcopy(model)
    other = ALL[name](twin)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(twin, other, saved)
    assert_same(model, optimizer, twin, other)
    train(model, optimizer, 2, 4)
    train(twin, other, 2, 4)
    assert_same(model, optimizer, twin, other)


MAKERS = {
    "CAME": lambda *params: comera.CAME([{"params": [p]} for p in params], weight_decay=0.5),
    "MuonAdamW": lambda *params: comera.MuonAdamW(
        [{"params": [p], "muon": p.dim() > 1} for p in params]
    ),
    "GaLore": lambda *params: comera.GaLoreAdamW(
        [{"params": [p], **({"rank": 2} if p.dim() > 1 else {})} for p in params], weight_decay=0.5
    ),
}
"""Optimizers of a group for each parameter."""

REFUSED = {
    "sparse": r"sparse gradient .* shape \(8, 9\): .*sparse=False",
    "complex": r"complex gradient .* shape \(8, 9\): .*view_as_real",
}


@pytest.mark.parametrize("shape", [(3,), (9, 8)], ids=str)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_that_cannot_be_used_are_refused_before_anything_changes(name, kind, shape):
    dtype = torch.complex64 if kind == "complex" else None
    param = nn.Parameter(torch.randn(8, 9, dtype=dtype))
    param.grad = torch.ones_like(param).to_sparse() if kind == "sparse" else torch.ones_like(param)
    other = nn.Parameter(torch.ones(shape))
    other.grad = torch.ones(shape)
    optimizer = MAKERS[name](other, param)
    with pytest.raises(RuntimeError, match=f"{name} cannot use the {REFUSED[kind]}"):
        optimizer.step()
    assert torch.equal(other, torch.ones(shape))
    assert not (optimizer.state and name == "GaLore")


@pytest.mark.parametrize("shape", [(8, 9), (8,)], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_maximize_is_descent_of_the_negative(name, shape):
    up, down = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    climb, descend = MAKERS[name](up), MAKERS[name](down)
    for optimizer, param in ((climb, up), (descend, down)):
        for group in optimizer.param_groups:
            group |= {"maximize": param is up, "weight_decay": 0.0}
    for _ in range(3):
        up.grad = torch.randn(shape)
        down.grad = -up.grad
        climb.step()
        descend.step()
    assert torch.equal(up, down)
    assert not torch.equal(up, torch.ones(shape))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", ["CAME", "MuonAdamW"])
def test_a_tensor_as_learning_rate_steps_as_a_number(name, shape):
    ends = []
    for lr in (0.25, torch.full(shape, 0.25)):
        params = [nn.Parameter(torch.ones(8, 9)), nn.Parameter(torch.ones(8))]
        groups = MAKERS[name](*params).param_groups
        optimizer = getattr(comera, name)(
            [group | {"lr": lr, "weight_decay": 0.5} for group in groups], lr
        )
        for _ in range(3):
            for param in params:
                param.grad = torch.arange(1.0, param.numel() + 1).view(param.shape)
            optimizer.step()
        ends.append(torch.cat([param.detach().flatten() for param in params]))
    torch.testing.assert_close(ends[1], ends[0])
