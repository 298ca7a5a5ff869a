"""A linear format in one file: a sum of Kronecker products, as CONTRIBUTING describes formats.

W is the sum of R products of ``A (c, a)`` and ``B (d, b)`` (Van Loan and Pitsianis, 1993).
"""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comera
from comera.nn.linear import FORMATS, CompressedLinear
from comera.nn.module import tensor_trains
from comera.planning import ways
from comera.planning.candidate import candidate, gates, product
from comera.shapes import LinearShape, balanced_modes


@dataclass(frozen=True)
class KroneckerShape(LinearShape):
    in_modes: tuple[int, int]
    out_modes: tuple[int, int]
    ranks: tuple[int, ...]
    _bonds = staticmethod(lambda one, two: 1)

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def fit(cls, in_features, out_features, *, rank=None, shape=None, compression=None):
        def choose():
            return balanced_modes(in_features, 2), balanced_modes(out_features, 2)

        widths = {"in_features": in_features, "out_features": out_features}
        return cls._fit(widths, shape, choose, rank, compression)

    @property
    def core_modes(self):
        return tuple(zip(*self.sides, strict=True))

    @property
    def split(self) -> int:
        return 1


class KroneckerLinear(CompressedLinear, format="kronecker"):
    noun = "sum of Kronecker products"
    has_plain_form = False
    _shapes = KroneckerShape

    def forward(self, input: Tensor) -> Tensor:
        left, right = self.gated_cores()
        x = F.pad(input, (0, self.shape.in_width - self.in_features))
        x = x.unflatten(-1, self.shape.in_modes)
        y = torch.einsum("...ab,acr,rbd->...cd", x, left.squeeze(0), right.squeeze(3))
        y = y.flatten(-2)[..., : self.out_features]
        return y if self.bias is None else y + self.bias

    def dense_weight(self) -> Tensor:
        left, right = self.gated_cores()
        whole = torch.einsum("acr,rbd->cdab", left.squeeze(0), right.squeeze(3))
        return whole.flatten(2).flatten(0, 1)[: self.out_features, : self.in_features]

    @staticmethod
    def _cores_of(weight, shape, tolerance):
        (a, b), (c, d) = shape.sides
        padded = F.pad(weight, (0, a * b - weight.shape[1], 0, c * d - weight.shape[0]))
        matrix = padded.float().view(c, d, a, b).permute(2, 0, 3, 1).reshape(a * c, b * d)
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        rank = shape.ranks[0]
        if tolerance is not None:
            tail = s.square().flip(0).cumsum(0).flip(0)
            rank = max(1, int((tail > (tolerance * s.norm()) ** 2).sum()))
        root = s[:rank].sqrt()
        left, right = u[:, :rank] * root, vh[:rank] * root[:, None]
        return left.reshape(1, a, c, -1), right.reshape(-1, b, d, 1)


def planned(layer, machine, dtype):
    (a, b), (c, d) = layer.shape.sides
    rank, tokens = layer.shape.ranks[0], layer.tokens
    dims = (1, tokens * a, b, rank * d), (1, tokens * d, a * rank, c)
    forward = [gates(layer.shape, 1), product("h", ("x", "core1"), "tab,rbd->tard", dims[0])]
    forward.append(product("y", ("h", "core0"), "tard,acr->tcd", dims[1]))
    backward = [product("grad(h)", ("gy", "core0"), "tcd,acr->tard", dims[1])]
    backward.append(product("grad(x)", ("grad(h)", "core1"), "tard,rbd->tab", dims[0]))
    return candidate("kronecker", layer, machine, dtype, forward, backward, layer.cores())


@pytest.fixture(autouse=True)
def _the_format(monkeypatch):
    monkeypatch.setitem(FORMATS, "kronecker", KroneckerLinear)
    monkeypatch.setitem(ways.BY_FORMAT, KroneckerShape, (planned,))


FORMATS.pop("kronecker")  # other tests know the formats that the package has


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 96), nn.GELU(), nn.Linear(96, 60))


def converted(**settings):
    given = {"rank": 6, "init": "orthogonal", **settings}
    return comera.tensorize_(net(), comera.TTConfig(linear_format="kronecker", **given))


X = torch.randn(20, 60, generator=torch.Generator().manual_seed(1))


def test_outputs_and_gradients_are_those_of_the_dense_weight():
    model = converted()
    dense = comera.densify_(copy.deepcopy(model))
    assert [type(layer) for layer in dense] == [nn.Linear, nn.GELU, nn.Linear]
    x, y = (X.clone().requires_grad_() for _ in range(2))
    torch.testing.assert_close(model(x), dense(y))
    model(x).square().sum().backward()
    dense(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_a_weight_is_approximated_and_found_again():
    dense = net()[0]
    layer = KroneckerLinear.from_linear(dense, rank=60)
    torch.testing.assert_close(layer(X), dense(X), rtol=1e-4, atol=1e-5)
    weight = torch.kron(torch.randn(8, 6), torch.randn(12, 10))
    assert layer.set_weight_(weight, tolerance=1e-5) < 1e-5
    assert layer.ranks == (1,)


def test_plans_reports_and_refusals(caplog):
    model = converted()
    assert "kronecker" in str(comera.plan(model, tokens=64))
    assert comera.compression_report(model).layers[0].ranks == (6,)
    caplog.clear()
    converted(rank=60)
    assert "as a sum of Kronecker products it would hold no fewer numbers (rank=" in caplog.text
    with pytest.raises(ValueError, match='linear_format="kronecker" have none'):
        converted(order=2)


def test_folders_bring_it_back(tmp_path):
    model = converted()
    comera.save_model(model, tmp_path)
    assert torch.equal(comera.load_model(tmp_path, net)(X), model(X))
    before = model(X)
    comera.canonicalize_(model)
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(comera.freeze_(model)(X), before.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [
        lambda model: comera.TwoStage(model, 0.6, 2, 6),
        lambda model: comera.ImportancePruning(model, 0.6, 6),
    ],
)
@pytest.mark.parametrize("make", [torch.optim.AdamW, comera.MuonAdamW])
def test_ranks_are_learned_and_cut(method, make):
    model = converted()
    ranks, sizes = method(model), [layer.num_stored for layer in tensor_trains(model).values()]
    optimizer = make(comera.param_groups(model, 1e-2, gate_lr=0.2))
    step = comera.TrainStep(model, lambda m, x: F.mse_loss(m(x), x), optimizer, ranks)
    losses = [float(step(X)) for _ in range(8)]
    assert ranks.due
    ranks.finish_(optimizer)
    left = [layer.num_stored for layer in tensor_trains(model).values()]
    assert sum(left) <= 0.6 * sum(sizes)
    losses += [float(step(X)) for _ in range(20)]
    assert losses[-1] < losses[8]


def test_layers_of_the_format_run_each_by_itself_where_others_run_as_one():
    model = converted()
    with comera.BatchedContraction(model):
        first = model(X)
    assert torch.equal(first, model(X))
    assert functools.reduce(lambda x, layer: layer(x), model, X).equal(first)
