"""Copies of a GaLore optimizer, the gradients it leaves behind, and eight-bit state."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import comera
from comera.optim.galore import GaLore, GaLoreAdafactor, GaLoreAdamW
from tests.optim.test_galore import groups, make_model, train
from tests.peers import peer

KINDS = {
    "adamw": GaLoreAdamW,
    "adafactor": GaLoreAdafactor,
    "came": lambda listed: GaLore(listed, comera.CAME, state_dtype="8bit"),
    "sgd": lambda listed: GaLore(listed, torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def eight_bit():
    """torchao's optimizer, its steps not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own making
        peer("torchao.optim")
        with torch.compiler.set_stance("force_eager"):
            yield comera.GaLoreAdamW8bit


def copies(pair, deep=True):
    """As a user would make them, model and optimizer together."""
    if deep:
        yield copy.deepcopy(pair)
    yield pickle.loads(pickle.dumps(pair))
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def check_copies(model, optimizer, steps, deep=True):
    listed = list(copies((model, optimizer), deep))
    train(model, optimizer, steps, steps + 8)
    for other, theirs in listed:
        held = {id(p) for group in theirs.param_groups for p in group["params"]}
        assert held == {id(p) for p in other.parameters()}
        train(other, theirs, steps, steps + 8)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert mine is not its


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 13])
def test_copies_train_on_alike_and_apart(kind, steps):
    model = make_model()
    optimizer = kind(groups(model))
    train(model, optimizer, 0, steps)
    check_copies(model, optimizer, steps)


def test_a_state_without_subspaces_is_refused(kind):
    """As torch.distributed.checkpoint reads one, into what a step without gradients has made."""
    model = make_model()
    optimizer = kind(groups(model))
    train(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    projected = [k for k, entries in state["state"].items() if "galore_step" in entries]
    state["state"] |= {k: {"galore_step": state["state"][k]["galore_step"]} for k in projected}
    with pytest.raises(ValueError, match="the state is of 3 steps, and no subspace and no moments"):
        kind(groups(make_model())).load_state_dict(state)


@pytest.mark.slow
def test_copies_in_eight_bits(eight_bit):
    model = make_model()
    optimizer = eight_bit(groups(model))
    train(model, optimizer, 0, 5)
    check_copies(model, optimizer, 5, deep=False)  # torchao's tensors have no deepcopy


def test_a_copy_beside_a_scheduler_is_its_own():
    model = make_model()
    optimizer = GaLoreAdamW(groups(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 0, 2)
    other, theirs = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    train(other, theirs, 2, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    schedule.step()
    assert theirs.param_groups[0]["lr"] == 2 * optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("rank", [4, 1000])
def test_gradients_are_left_as_they_were(rank):
    """A coupled penalty written into them would count twice in a second step, and thrice."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(20, 30))
    optimizer = GaLore(
        [{"params": [param], "rank": rank, "scale": 1.0}],
        torch.optim.SGD, lr=0.1, weight_decay=0.5,
    )  # fmt: skip
    grad = torch.randn(20, 30)
    param.grad = grad
    plain = param.detach().clone()
    basis = None
    for _ in range(3):
        optimizer.step()
        assert param.grad is grad
        basis = optimizer.state[param].get("galore_left", torch.eye(20))
        plain -= 0.1 * basis @ basis.T @ (grad + 0.5 * plain)
    torch.testing.assert_close(param.detach(), plain)


@pytest.mark.parametrize("make", [lambda p: GaLoreAdamW([{"params": [p], "rank": 2}]),
                                  lambda p: comera.CAME([p])])  # fmt: skip
def test_gradients_that_are_no_matrix_are_refused_as_torch_does(make):
    param = nn.Parameter(torch.randn(8, 9))
    param.grad = torch.randn(8, 9).to_sparse()
    with pytest.raises(RuntimeError, match=r"sparse gradient .*\(8, 9\)"):
        make(param).step()
    with pytest.raises(RuntimeError, match="sparse"):
        torch.optim.AdamW([param]).step()
    param = nn.Parameter(torch.randn(8, 9, dtype=torch.complex64))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"complex gradient .*\(8, 9\)"):
        make(param).step()


def test_eight_bits_follow_rates_in_groups_and_schedules(eight_bit):
    """torchao wants the rate in a tensor; groups and schedulers give numbers."""
    model = make_model()
    optimizer = eight_bit(groups(model))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    before = model.output.weight.detach().clone()
    train(model, optimizer, 0, 1)
    assert not torch.equal(model.output.weight, before)
    schedule.step()
    before = model.output.weight.detach().clone()
    train(model, optimizer, 1, 2)
    assert torch.equal(model.output.weight, before)


@pytest.mark.parametrize("within", [True, False], ids=["galore", "plain"])
def test_eight_bit_state_is_cut_with_the_cores(eight_bit, within):
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    layer = comera.TTLinear(256, 256, rank=64, order=2)
    model = nn.Sequential(layer, nn.Linear(256, 64))
    if within:
        optimizer = eight_bit(comera.galore_param_groups(model, 1e-2, 8))
        inner = optimizer.inner
    else:
        optimizer = inner = AdamW8bit(comera.param_groups(model, 1e-2))

    def step():
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    core = layer.cores[1]
    full = inner.state[core]["exp_avg"].dequantize()
    assert full.shape == core.shape
    with torch.no_grad():
        layer.gates[1][48:] = 0
    comera.truncate_(model, optimizer)
    packed = inner.state[core]["exp_avg"]
    assert packed.shape == core.shape
    assert core.shape[-1] == 48
    assert type(packed).__name__ == "OptimState8bit"
    assert torch.allclose(packed.dequantize(), full[..., :48], atol=0.02 * float(full.abs().max()))
    step()
    assert all(p.isfinite().all() for p in model.parameters())
