"""Canonical form, against singular values of dense weights found by torch and tensorly."""

import copy

import pytest
import torch

import comera
from comera.nn.decompose import canonical
from comera.nn.module import tensor_trains
from comera.rank.prune import prune_to_
from tests.states import assert_equal
from tests.surgery.test_optimizer_state import ScheduleFree

from .conftest import loss_fn, make_model, prune_some, train


def product(cores):
    whole = cores[0]
    for core in cores[1:]:
        whole = torch.tensordot(whole, core, 1)
    return whole.squeeze(0).squeeze(-1)


def random_cores(sizes, ranks):
    torch.manual_seed(0)
    bonds = (1, *ranks, 1)
    return [
        torch.randn(bonds[k], size, bonds[k + 1], dtype=torch.float64)
        for k, size in enumerate(sizes)
    ]


@torch.no_grad()
def spread_(model):
    """Cores that are far from canonical, some gates closed and the others unlike."""
    torch.manual_seed(1)
    for layer in tensor_trains(model).values():
        for core in layer.cores:
            core.normal_()
    prune_some(model)


@pytest.mark.parametrize("split", [1, 2, 3, 4])
def test_every_bond_has_the_singular_values_of_its_unfolding(split):
    cores = random_cores((4, 3, 5, 2, 6), (3, 7, 6, 4))
    whole = product(cores)
    found, values = canonical(cores, split)
    torch.testing.assert_close(product(found), whole, rtol=1e-12, atol=1e-12)
    for k, mine in enumerate(values, 1):
        want = torch.linalg.svdvals(whole.flatten(k).flatten(0, k - 1))
        torch.testing.assert_close(mine, want[: len(mine)])
        assert want[len(mine) :].sum() < 1e-10
        # The ranks of the bond are the singular vectors: those that are cut leave the rest alone.
        one = torch.eye(len(mine)).to(whole)
        left, right = product([*found[:k], one[:, :, None]]), product([one[None], *found[k:]])
        for side in (left.reshape(-1, len(mine)).T, right.reshape(len(mine), -1)):
            gram = side @ side.T
            torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-9)


def test_cores_are_orthonormal_towards_the_middle_times_a_factor_each():
    found, values = canonical(random_cores((4, 3, 5, 2, 6), (3, 7, 6, 4)), 2)
    sides = [found[0].flatten(0, 1).T, found[3].flatten(1), found[4].flatten(1)]
    for side in sides:
        gram = side @ side.T
        torch.testing.assert_close(gram / gram[0, 0], torch.eye(len(side)).to(side))
    for half in (found[1].flatten(0, 1), found[2].flatten(1).T):
        carried = (half.T @ half).diagonal()
        torch.testing.assert_close(carried / carried[0], values[1] / values[1][0])


def test_norms_of_cores_stay_in_proportion():
    """A core of many small numbers and one of few large ones: learning rates suit them."""
    cores = random_cores((40, 3, 5, 6), (3, 7, 6))
    cores[0] *= 100
    found, _ = canonical(cores, 2)
    before, after = (torch.stack([core.norm() for core in train]) for train in (cores, found))
    torch.testing.assert_close(after / after[0], before / before[0])


def test_what_is_left_of_a_train_is_as_good_as_tensorlys():
    """Of one decomposed from its dense tensor; cut at a single bond both are the best there is."""
    tensorly = pytest.importorskip("tensorly")
    with tensorly.backend_context("pytorch"):
        cores = random_cores((4, 3, 5, 6), (4, 12, 6))
        whole = product(cores)
        found, _ = canonical(cores, 2)
        for ranks in ((4, 5, 6), (2, 4, 3)):
            bonds = (1, *ranks, 1)
            cut = [core[: bonds[k], :, : bonds[k + 1]] for k, core in enumerate(found)]
            other = tensorly.decomposition.tensor_train(whole, list(bonds))
            mine, theirs = (product(list(c)) - whole for c in (cut, other.factors))
            assert float(mine.norm()) == pytest.approx(float(theirs.norm()), rel=0.05)


def test_a_product_of_nothing_or_of_no_numbers_stays():
    cores = random_cores((4, 3), (2,))
    assert canonical([cores[0], 0 * cores[1]], 1) is None
    assert canonical([cores[0], cores[1] * float("nan")], 1) is None
    layer = comera.TTLinear(16, 16, rank=4)
    with torch.no_grad():
        layer.cores[0].zero_()
    before = copy.deepcopy(layer.state_dict())
    comera.canonicalize_(layer)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    with torch.no_grad():
        layer.gates[0].zero_()
    comera.truncate_(layer, min_rank=0)
    comera.canonicalize_(layer)
    assert set(layer.ranks) == {0}


def test_the_function_stays_and_so_do_the_parameters(model, batch):
    spread_(model)
    want = loss_fn(model, batch)
    held = [(id(param), param.data_ptr()) for param in model.parameters()]
    before = {name: (layer.ranks, layer.live_ranks) for name, layer in tensor_trains(model).items()}
    comera.canonicalize_(model)
    torch.testing.assert_close(loss_fn(model, batch), want, rtol=1e-10, atol=0)
    assert [(id(param), param.data_ptr()) for param in model.parameters()] == held
    for name, layer in tensor_trains(model).items():
        ranks, live = before[name]
        assert layer.ranks == ranks
        assert all(now <= then for now, then in zip(layer.live_ranks, live, strict=True))
        for gate, mine in zip(layer.gates, layer.live_ranks, strict=True):
            assert gate.tolist() == [1.0] * mine + [0.0] * (len(gate) - mine)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_smallest_direction_stays_open_and_rounding_errors_are_closed(scale):
    torch.manual_seed(0)
    layer = comera.TTLinear(16, 24, rank=5, order=1, dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(n, 3).double())[0] for n in (16, 24))
    mixed = torch.randn(3, 5).double()  # five ranks that carry three directions
    for smallest in (2e-10, 2e-11):
        values = scale * torch.tensor([1.0, 0.5, smallest]).double()
        with torch.no_grad():
            layer.cores[0].copy_((u @ mixed).reshape(layer.cores[0].shape))
            right = torch.linalg.pinv(mixed) * values @ v.T
            layer.cores[1].copy_(right.reshape(layer.cores[1].shape))
            layer.gates[0].fill_(1)
        comera.canonicalize_(layer)
        assert layer.gates[0].tolist() == [1, 1, smallest > 1e-10, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_narrow_numbers_it_is_as_exact_as_they_are(dtype):
    torch.manual_seed(0)
    layer = comera.TTLinear(64, 96, rank=12, dtype=dtype)
    with torch.no_grad():
        for core in layer.cores:
            core.normal_()
    want = layer.to(torch.float64).to_dense().weight.detach().clone()
    layer.to(dtype)
    comera.canonicalize_(layer)
    error = (layer.to(torch.float64).to_dense().weight - want).detach()
    assert float(error.norm() / want.norm()) < 4 * torch.finfo(dtype).eps


def test_a_frozen_layer_stays(model):
    model[1].cores[0].requires_grad_(False)
    model[3].gates[0].requires_grad_(False)
    before = [copy.deepcopy(model[k].state_dict()) for k in (1, 3)]
    comera.canonicalize_(model)
    torch.testing.assert_close([model[k].state_dict() for k in (1, 3)], before, rtol=0, atol=0)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "muon": lambda p: comera.MuonAdamW(p, lr=1e-2),
    "came": lambda p: comera.CAME(p, lr=1e-2, bias_correction=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "schedule-free": lambda p: ScheduleFree(p, lr=1e-2),
}


def cores_and_gates(model):
    return [p for t in tensor_trains(model).values() for p in (*t.cores, *t.gates)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_from_a_new_optimizer(batch, name):
    """Which the optimizer of everything else is not: only cores and gates are forgotten."""
    model = make_model(torch.float32)
    optimizer = OPTIMIZERS[name](comera.param_groups(model, 1e-2))
    train(model, optimizer, batch, 5)
    dense = model[4].weight
    kept = copy.deepcopy(optimizer.state[dense])
    comera.canonicalize_(model, optimizer)
    torch.testing.assert_close(optimizer.state[dense], kept, rtol=0, atol=0)
    assert all(param.grad is None for param in cores_and_gates(model))
    twin = copy.deepcopy(model)
    new = OPTIMIZERS[name](comera.param_groups(twin, 1e-2))
    for optimizer_, of in ((optimizer, model), (new, twin)):
        train(of, optimizer_, batch, 1)
    torch.testing.assert_close(cores_and_gates(model), cores_and_gates(twin))


def test_in_the_backward_pass_too(batch):
    model = make_model(torch.float32)
    optimizer = comera.OptimizerInBackward(torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9))
    loss_fn(model, batch).backward()
    comera.canonicalize_(model, optimizer)
    core = model[1].cores[0]
    assert not optimizer.optimizer.state[core]["momentum_buffer"].any()


@pytest.mark.slow
def test_ranks_that_are_mixed_can_still_be_told_apart():
    """A weight of rank 4 that all 16 ranks carry: without canonical form half of it is lost."""
    torch.manual_seed(0)
    target = torch.randn(48, 4) @ torch.randn(4, 48) / 4
    batch = torch.randn(256, 48)
    left = {}
    for form in (True, False):
        torch.manual_seed(1)
        layer = comera.TTLinear(48, 48, rank=16, order=1, bias=False)
        ranks = comera.ImportancePruning(layer, 0.25, 300, canonical=form)
        optimizer = torch.optim.AdamW(comera.param_groups(layer, 1e-2, gate_lr=0.0))

        def loss_of(model, x):
            return (model(x) - x @ target.T).square().mean() / target.square().sum(1).mean()

        step = comera.TrainStep(layer, loss_of, optimizer, ranks)
        for _ in range(300):
            step(batch)
        ranks.finish_(optimizer)
        assert layer.ranks == (4,)
        left[form] = float(loss_of(layer, batch).detach())
    assert left[True] < 1e-2 < 0.1 < left[False]


@pytest.mark.parametrize(
    ("settings", "after"),
    [
        ({"steps": 6}, 3),
        ({"steps": 400}, 300),
        ({"steps": 1}, None),
        ({"steps": 6, "canonical": False}, None),
    ],
    ids=str,
)
def test_when_ranks_are_turned(model, monkeypatch, settings, after):
    """Once, between two steps; and by loops of one's own as by ``TrainStep``."""
    turned = []
    monkeypatch.setattr(
        "comera.rank.importance_pruning.canonicalize_",
        lambda model, optimizer, process_group: turned.append((ranks.steps_done, optimizer)),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ranks = comera.ImportancePruning(model, 0.5, **settings)
    for number in range(1, settings["steps"] + 1):
        ranks.step(torch.tensor(1.0), optimizer)
        assert ranks.turned == (number == after)  # averages of weights begin again
    assert turned == ([] if after is None else [(after, optimizer)])


def test_a_step_turns_ranks_and_a_resumed_run_does_not_do_it_again(batch):
    model = make_model()
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=0.1))
    ranks = comera.ImportancePruning(model, 0.5, 6)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks)
    for _ in range(3):
        step(batch)
    assert all(
        not optimizer.state[core]["exp_avg"].any()
        for layer in tensor_trains(model).values()
        for core in layer.cores
    )
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(comera.param_groups(twin, 1e-2, gate_lr=0.1))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = comera.ImportancePruning(twin, 0.5, 6)
    others.load_state_dict(copy.deepcopy(ranks.state_dict()))
    again = comera.TrainStep(twin, loss_fn, other, others)
    for _ in range(3):
        assert torch.equal(step(batch), again(batch))
    assert_equal(ranks.state_dict(), others.state_dict())
    assert ranks.finish_(optimizer) == others.finish_(other)
    assert_equal(model.state_dict(), twin.state_dict())


def test_the_weight_that_is_left_is_the_nearest_of_its_rank():
    """Of one bond: by the theorem of Eckart and Young."""
    torch.manual_seed(0)
    layer = comera.TTLinear(24, 36, rank=20, order=1, dtype=torch.float64)
    with torch.no_grad():
        for core in layer.cores:
            core.normal_()
    dense = layer.to_dense().weight.detach()
    comera.canonicalize_(layer)
    prune_to_(tensor_trains(layer), 8 * (24 + 36))
    comera.truncate_(layer)
    assert layer.ranks == (8,)
    error = layer.to_dense().weight.detach() - dense
    best = torch.linalg.svdvals(dense)[8:].square().sum().sqrt()
    torch.testing.assert_close(error.norm(), best)
