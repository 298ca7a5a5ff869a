import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import comera
from comera.nn.module import tensor_trains
from comera.rank.learning import SizeOfRanks


def by_hand(model, relaxed: bool) -> torch.Tensor:
    """The sum of the definition, one core at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in tensor_trains(model).values():
        bonds = [torch.ones(())]
        for gate in layer.gates:
            open_gates = gate[gate > layer.prune_below]
            bonds.append(open_gates.sum() if relaxed else torch.tensor(float(len(open_gates))))
        bonds.append(torch.ones(()))
        if not relaxed and any(bond == 0 for bond in bonds):
            continue
        for k, size in enumerate(layer.shape.slice_sizes):
            total = total + size * bonds[k] * bonds[k + 1]
    return total


@pytest.fixture
def pruned(model):
    with torch.no_grad():
        for layer in tensor_trains(model).values():
            for gate in layer.gates:
                gate.uniform_(0.0, 1.0)
                gate[::3] = 0.005
    return model


def test_both_sizes_equal_the_parameters_at_the_start(model):
    size = SizeOfRanks(model)
    cores = sum(c.numel() for layer in tensor_trains(model).values() for c in layer.cores)
    assert size.exact() == cores
    torch.testing.assert_close(size.relaxed(), torch.tensor(float(cores), dtype=torch.float64))


def test_sizes_follow_the_definition(pruned):
    size = SizeOfRanks(pruned)
    torch.testing.assert_close(size.exact(), by_hand(pruned, relaxed=False), check_dtype=False)
    torch.testing.assert_close(size.relaxed(), by_hand(pruned, relaxed=True), check_dtype=False)


def test_gradients_follow_the_definition(pruned):
    gates = [g for layer in tensor_trains(pruned).values() for g in layer.gates]
    got = torch.autograd.grad(SizeOfRanks(pruned).relaxed(), gates)
    want = torch.autograd.grad(by_hand(pruned, relaxed=True), gates)
    torch.testing.assert_close(got, want)


def test_sizes_follow_a_model_that_becomes_another_dtype(pruned):
    size = SizeOfRanks(pruned)
    want = size.exact()
    for dtype in (torch.float64, torch.float32):
        pruned.to(dtype)
        assert size.exact() == want
        torch.testing.assert_close(size.relaxed(), by_hand(pruned, True), check_dtype=False)


def test_layers_of_several_dtypes_have_one_size(pruned):
    want = SizeOfRanks(pruned).exact()
    before = [gate.clone() for gate in pruned[1].gates]
    pruned[1].float()
    size = SizeOfRanks(pruned)
    assert size.exact() == want
    torch.testing.assert_close(size.relaxed(), by_hand(pruned, True), check_dtype=False)
    size.relaxed().backward()
    assert pruned[1].gates[0].grad.dtype == torch.float32
    with torch.no_grad():
        pruned[1].gates[0].zero_()
    size.hold_(size.read().live | True, 0)
    assert (pruned[1].gates[0] > pruned[1].prune_below).any()
    assert [gate.dtype for gate in pruned[1].gates] == [torch.float32] * len(before)


def test_a_layer_with_an_empty_bond_has_no_size(model):
    """Though two of its cores touch only bonds that are open."""
    with torch.no_grad():
        model[1].gates[0].zero_()
    assert len(model[1].cores) == 4
    others = [layer for name, layer in tensor_trains(model).items() if name != "1"]
    exact = SizeOfRanks(model).exact()
    assert exact == sum(layer.shape.num_params for layer in others) == by_hand(model, False)


@pytest.mark.parametrize("min_rank", [0, 1])
def test_the_last_rank_is_pressed_only_where_layers_may_vanish(model, min_rank):
    gate = next(iter(tensor_trains(model).values())).gates[0]
    with torch.no_grad():
        gate[1:] = 0
    (grad,) = torch.autograd.grad(SizeOfRanks(model, min_rank).relaxed(), gate)
    assert (grad[0] > 0) == (min_rank == 0)


@torch.no_grad()
def test_a_dying_bond_keeps_its_largest_gate(model):
    layer = next(iter(tensor_trains(model).values()))
    size = SizeOfRanks(model)
    before = size.read().live
    layer.gates[1].copy_(torch.linspace(0.001, 0.009, len(layer.gates[1])))
    others = [g.clone() for g in layer.gates]
    size.hold_(before, floor=0)
    assert layer.live_ranks[1] == 1
    assert layer.gates[1].argmax() == len(layer.gates[1]) - 1
    torch.testing.assert_close(layer.gates[0], others[0])
    layer.gates[1].zero_()
    SizeOfRanks(model, min_rank=0).hold_(before, floor=0)
    assert (layer.gates[1] == 0).all()


@torch.no_grad()
def test_a_size_does_not_fall_through_its_floor(model):
    size = SizeOfRanks(model)
    start = size.exact()
    layers = list(tensor_trains(model).values())
    layers[0].gates[0][0] = 0.0  # closed earlier
    before = size.read().live
    now = size.exact()
    for layer in layers:
        layer.gates[-1][2:] = 0.001
    assert not size.hold_(before, floor=1)
    assert size.exact() < now < start
    assert size.hold_(before, floor=float(now))
    assert size.exact() == now
    held = layers[1].gates[-1][2:]
    torch.testing.assert_close(held, torch.full_like(held, 0.015))
    assert layers[0].gates[0][0] == 0


def test_ranks_may_change_under_it(model):
    size = SizeOfRanks(model)
    before = size.exact()
    layer = next(iter(tensor_trains(model).values()))
    layer.set_cores_(
        [torch.randn(s, dtype=torch.float64) for s in layer.shape.with_rank(2).core_shapes]
    )
    assert size.exact() < before
    assert size.exact() == by_hand(model, relaxed=False)


def test_the_number_of_operations_does_not_grow_with_the_layers(model):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def calls_for(copies: int) -> int:
        many = torch.nn.ModuleList([model, *(copy.deepcopy(model) for _ in range(copies - 1))])
        size = SizeOfRanks(many)
        size.exact()
        with Count() as count, torch.no_grad():
            size.relaxed()
            size.exact()
        return count.calls

    assert calls_for(1) == calls_for(8) <= 40


def test_nothing_waits_for_the_device():
    with FakeTensorMode():  # raises on every read of a value
        size = SizeOfRanks(nn.Sequential(comera.TTLinear(24, 36), comera.TTLinear(36, 24)))
        (size.relaxed() + size.exact()).backward()
        size.hold_(size.read().live, 3.0)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="tensorize_"):
        SizeOfRanks(torch.nn.Linear(3, 3))
