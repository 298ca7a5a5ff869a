import contextlib

import pytest
import torch

from comera.ops.context import static_shapes
from comera.ops.contract_cores import (
    _contract_groups,
    arguments_of,
    contract_groups,
)
from comera.ops.cores import Chains, contract_chain, rank_gate
from comera.ops.kernels import choose
from comera.shapes import padded_rank

SHAPES = {  # bonds of a train, its modes, and how many of them carry the input
    "1+1": ((1, 2, 1), (4, 3), 1),
    "2+1": ((1, 2, 5, 1), (3, 2, 7), 2),
    "3+3": ((1, 2, 5, 6, 5, 2, 1), (2, 3, 4, 4, 3, 2), 3),
    "no padding": ((1, 2, 8, 4, 1), (3, 4, 2, 5), 2),
    "rank one": ((1, 1, 1, 1), (3, 2, 4), 2),
    "vanished": ((1, 0, 0, 1), (3, 2, 4), 2),
}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(params=["plain", "one operator"])
def way(request):
    """What eager mode takes, and what a graph takes."""
    with contextlib.nullcontext() if request.param == "plain" else static_shapes():
        yield


class Group:
    """Layers of one shape."""

    def __init__(self, name, num_layers, gated=True, bias=True, dtype=torch.float64, cut=1):
        bonds, modes, self.split = SHAPES[name]
        wide = torch.promote_types(dtype, torch.float32)
        self.length, self.num_layers = len(modes), num_layers
        self.cores, self.gates, self.biases = [], [], []
        out_width = torch.Size(modes[self.split :]).numel()
        for _ in range(num_layers):
            for k, mode in enumerate(modes):
                self.cores.append(torch.randn(bonds[k], mode, bonds[k + 1], dtype=dtype))
            if gated:
                self.gates += [0.5 + torch.rand(rank, dtype=wide) for rank in bonds[1:-1]]
            if bias:
                self.biases.append(torch.randn(out_width - cut, dtype=dtype))
        for gate in self.gates:
            gate[1:2] = 0.001  # pruned, wherever there is a second rank
        self.params = [*self.cores, *self.gates, *self.biases]
        for param in self.params:
            param.requires_grad_()

    def arguments(self):
        return self.cores, self.gates, self.biases, self.num_layers, self.split, 0.01

    def layer(self, number):
        cores = self.cores[number * self.length :][: self.length]
        gates = self.gates[number * (self.length - 1) :][: self.length - 1] if self.gates else []
        return cores, gates

    def reference(self):
        """Each half by itself, core by core, then padded."""
        lefts, rights = [], []
        for number in range(self.num_layers):
            cores, gates = self.layer(number)
            split = self.split
            pairs = zip(cores, gates, strict=False)
            wide = torch.promote_types(cores[0].dtype, torch.float32)
            opened = [rank_gate(core.to(wide), gate, 0.01) for core, gate in pairs]
            opened += [core.to(wide) for core in cores[len(opened) :]]
            left = contract_chain(opened[:split])[0].to(cores[0].dtype)
            right = contract_chain(opened[split:])[..., 0].to(cores[0].dtype)
            width = padded_rank(right.shape[0], bool(self.biases))
            more = width - right.shape[0]
            lefts.append(torch.nn.functional.pad(left, (0, more)))
            if self.biases:
                bias = self.biases[number]
                bias = torch.nn.functional.pad(bias, (0, right.shape[1] - bias.shape[0]))
                zeros = right.new_zeros(more - 1, right.shape[1])
                rights.append(torch.cat([right, zeros, bias[None]]))
            else:
                rights.append(torch.nn.functional.pad(right, (0, 0, 0, more)))
        return torch.stack(lefts), torch.stack(rights)


def grads(halves, params):
    total = sum((h * torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype)).sum() for h in halves)
    return torch.autograd.grad(total, params)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_match_each_layer_by_itself(name, num_layers, gated, bias):
    group = Group(name, num_layers, gated, bias)
    got, want = tuple(contract_groups([Chains(*group.arguments())])), group.reference()
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(grads(got, group.params), grads(want, group.params), **CLOSE)


@pytest.mark.usefixtures("way")
def test_several_groups_are_what_each_is_by_itself():
    groups = [Group("2+1", 2, bias=False), Group("3+3", 1), Group("1+1", 3, gated=False)]
    got = contract_groups([Chains(*group.arguments()) for group in groups])
    want = [half for group in groups for half in group.reference()]
    torch.testing.assert_close(got, want, **CLOSE)
    params = [param for group in groups for param in group.params]
    torch.testing.assert_close(grads(got, params), grads(want, params), **CLOSE)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", SHAPES)
def test_without_padding_the_bond_is_as_wide_as_it_is(name):
    group = Group(name, 2, bias=False)
    left, right = contract_groups([Chains(*group.arguments(), padded=False)])
    rank = SHAPES[name][0][group.split]
    assert (left.shape[2], right.shape[1]) == (rank, rank)
    want_left, want_right = contract_groups([Chains(*group.arguments())])
    torch.testing.assert_close((left, right), (want_left[..., :rank], want_right[:, :rank]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_layers", [1, 2])
def test_gradients_can_be_differentiated_again(num_layers):
    group = Group("2+1", num_layers)
    counts = len(group.cores), len(group.cores) + len(group.gates)

    def run(*params):
        cores, gates, biases = (
            list(params[: counts[0]]), list(params[counts[0] : counts[1]]),
            list(params[counts[1] :]),
        )  # fmt: skip
        chains = Chains(cores, gates, biases, num_layers, group.split, 0.01)
        return tuple(contract_groups([chains]))

    assert torch.autograd.gradcheck(run, group.params)
    assert torch.autograd.gradgradcheck(run, group.params, fast_mode=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_cores_are_rounded_once(dtype, monkeypatch):
    monkeypatch.setattr(choose, "mode", lambda: "ref")  # a kernel sums in another order
    group, wide = Group("3+3", 2, dtype=dtype), Group("3+3", 2, dtype=torch.float32)
    for narrow, other in zip(group.params, wide.params, strict=True):
        other.data.copy_(narrow.data)
        narrow.data = narrow.data if narrow.dtype == torch.float32 else other.data.to(dtype)
    got = contract_groups([Chains(*group.arguments())])
    for half, want in zip(got, contract_groups([Chains(*wide.arguments())]), strict=True):
        assert half.dtype == dtype
        assert torch.equal(half, want.to(dtype))
    grads_got = grads(got, group.params)
    assert [g.dtype for g in grads_got] == [p.dtype for p in group.params]


@pytest.mark.parametrize(
    ("name", "num_layers", "bias"),
    [
        ("1+1", 1, True), ("1+1", 2, False), ("no padding", 2, True),
        pytest.param("3+3", 1, False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_registered_soundly(name, num_layers, bias):
    group = Group(name, num_layers, bias=bias, dtype=torch.float32)
    arguments = arguments_of([Chains(*group.arguments())])
    torch.library.opcheck(_contract_groups.custom_op, arguments)


@pytest.mark.parametrize(
    ("rank", "bias", "want"),
    [(30, True, 32), (31, True, 32), (32, True, 40), (32, False, 32), (0, True, 8), (0, False, 0)],
)
def test_the_padded_rank_has_room_for_a_bias(rank, bias, want):
    assert padded_rank(rank, bias) == want


def test_what_kernels_keep_stays_out_of_the_compilers_graphs():
    for name in ("contract_cores", "contract_cores_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.comera, name).default.tags
