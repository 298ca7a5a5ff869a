import copy
import math

import pytest
import tensorly
import torch
from tensorly.decomposition import tensor_train
from torch import nn

import comera
from comera.nn.fused import feed_forward, linears
from comera.nn.linear import BTTLinear, TTLinear
from comera.shapes import BTTShape, TTShape

SHAPES = [
    (4, 3, TTShape((4,), (3,), (2,))),
    (6, 6, TTShape((2, 3), (3, 2), (1, 1, 1))),  # pruned to the bone
    (6, 6, TTShape((2, 3), (3, 2), (2, 3, 2))),
    (24, 24, TTShape((2, 3, 4), (4, 3, 2), (2, 5, 6, 5, 2))),
    (24, 24, TTShape((2, 2, 2, 3), (3, 2, 2, 2), (2, 3, 4, 5, 4, 3, 2))),
    (24, 10, TTShape((2, 3, 4), (5, 2), (2, 3, 3, 2))),
]
BLOCKS = [
    (6, 12, BTTShape((2, 3), (3, 4), (1,))),
    (6, 12, BTTShape((2, 3), (3, 4), (3,))),
    (12, 6, BTTShape((3, 4), (2, 3), (2,))),
    (11, 7, BTTShape((3, 4), (2, 4), (2,))),  # padded on both sides
    (7, 6, BTTShape((1, 7), (1, 6), (4,))),  # one block: plain low rank
]
FORMATS = pytest.mark.parametrize("kind", [TTLinear, BTTLinear])


def shape_name(case):
    return f"{case[0]}->{case[1]} {case[2].ranks}"


@pytest.fixture(params=[*SHAPES, *BLOCKS], ids=shape_name)
def layer(request, device):
    *widths, shape = request.param
    kind = BTTLinear if isinstance(shape, BTTShape) else TTLinear
    layer = kind(*widths, shape=shape, device=device, dtype=torch.float64)
    with torch.no_grad():
        for gate in layer.gates:
            gate.uniform_(0.5, 1.5)[1:2] = 0.001  # pruned, wherever there is a second rank
    return layer


def error(got, want):
    return float((got.detach() - want.detach()).double().norm() / want.detach().double().norm())


def test_equals_its_dense_twin(layer, device):
    x = torch.randn(2, 5, layer.in_features, device=device, dtype=torch.float64, requires_grad=True)
    got, want = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(layer.to_dense()(x), want)
    torch.testing.assert_close(layer(x[:0]), want[:0])
    torch.testing.assert_close(layer(x[0, 0]), want[0, 0])
    params = [x, *layer.parameters()]
    grads = (torch.autograd.grad(y.square().sum(), params) for y in (got, want))
    torch.testing.assert_close(*grads)


@pytest.mark.usefixtures("tensorly_on_numpy")
@pytest.mark.parametrize("layer", SHAPES, ids=shape_name, indirect=True)
def test_weight_equals_that_of_tensorly(layer):
    arrays = [core.detach().cpu().numpy() for core in layer.gated_cores()]
    want = tensorly.tt_to_tensor(arrays).reshape(layer.in_features, layer.out_features).T
    torch.testing.assert_close(layer.weight.detach().cpu(), torch.from_numpy(want.copy()))


@pytest.mark.parametrize(
    ("kind", "sizes", "rank", "init"),
    [
        (TTLinear, (768, 3072), 16, "orthogonal"),
        (TTLinear, (256, 10), 16, "orthogonal"),
        *((BTTLinear, (64, 256), 2, init) for init in ("orthogonal", "normal")),
        *((BTTLinear, (256, 64), 2, init) for init in ("orthogonal", "normal")),
        *((BTTLinear, (60, 90), 2, init) for init in ("orthogonal", "normal")),
    ],
)
def test_dense_weight_starts_with_the_spread_of_torchs(kind, sizes, rank, init):
    layer = kind(*sizes, rank=rank)
    layer.reset_parameters(init=init)
    got = float(layer.weight.detach().square().mean().sqrt())
    rel = 0.04 if kind is TTLinear else 0.05
    assert got == pytest.approx(float(nn.Linear(*sizes).weight.detach().std()), rel=rel)
    assert layer.bias.abs().max() <= 1 / math.sqrt(sizes[0])


def test_reset_parameters_takes_another_spread():
    layer = TTLinear(256, 256, rank=[8, 8, 16, 8, 8], bias=False)
    layer.reset_parameters(std=0.5)
    assert float(layer.weight.detach().square().mean().sqrt()) == pytest.approx(0.5)


def low_rank(out_features, in_features, rank=4, dtype=torch.float32):
    """A layer whose weight decays: a sum of few outer products and a little noise."""
    linear = nn.Linear(in_features, out_features, dtype=dtype)
    with torch.no_grad():
        signal = torch.randn(out_features, rank) @ torch.randn(rank, in_features)
        linear.weight.copy_(signal + 0.1 * torch.randn(out_features, in_features))
    return linear


@pytest.mark.usefixtures("tensorly_on_numpy")
@pytest.mark.parametrize("rank", [1, 3, 8, [4, 12, 8]], ids=str)
def test_decomposes_as_well_as_tensorly(rank):
    linear = low_rank(48, 60)
    layer = TTLinear.from_linear(linear, rank=rank)
    tensor = linear.weight.detach().double().T.reshape(layer.shape.slice_sizes).numpy()
    theirs = tensorly.tt_to_tensor(tensor_train(tensor, [1, *layer.ranks, 1]))
    want = torch.from_numpy(theirs.reshape(60, 48).T.copy())
    assert error(layer.weight, linear.weight) <= 1.05 * error(want, linear.weight) + 1e-6


@pytest.mark.parametrize("tolerance", [0.5, 0.2, 0.05, 1e-3])
@pytest.mark.parametrize("widths", [(48, 60), (47, 61)], ids=["exact", "padded"])
def test_tolerance_is_met(widths, tolerance):
    linear = low_rank(*widths)
    layer = TTLinear.from_linear(linear, tolerance=tolerance)
    assert error(layer.weight, linear.weight) <= tolerance
    if tolerance >= 0.2:  # and not by keeping everything
        assert layer.shape.num_params < linear.weight.numel()


@pytest.mark.parametrize("compression", [2, 5, 20])
def test_compression_is_met(compression):
    layer = TTLinear.from_linear(low_rank(48, 60), compression=compression)
    assert sum(core.numel() for core in layer.cores) * compression <= 48 * 60


def test_decomposing_a_tensor_train_gives_it_back(layer):
    twin = type(layer).from_linear(layer.to_dense(), tolerance=1e-9, shape=layer.shape)
    torch.testing.assert_close(twin.weight, layer.weight)
    assert all(a <= b for a, b in zip(twin.ranks, layer.live_ranks, strict=True))
    assert torch.equal(twin.bias, layer.bias)


@FORMATS
def test_conversion_keeps_mode_device_and_type(kind):
    for dtype in (torch.float64, torch.bfloat16):
        linear = low_rank(48, 60, dtype=dtype).eval()
        layer = kind.from_linear(linear, rank=8)
        back = layer.to_dense()
        assert not layer.training
        assert not back.training
        assert back.weight.dtype == layer.cores[0].dtype == dtype
        assert torch.equal(back.bias, linear.bias)
        assert type(back) is nn.Linear
        assert back.weight.requires_grad
        assert all(param.requires_grad for param in layer.parameters())
    assert kind.from_linear(nn.Linear(12, 12, bias=False), rank=2).bias is None


def test_a_narrow_weight_is_decomposed_in_float32():
    linear = low_rank(48, 60, dtype=torch.bfloat16)
    wide = nn.Linear(60, 48)
    wide.load_state_dict(linear.state_dict())
    got, want = TTLinear.from_linear(linear, rank=8), TTLinear.from_linear(wide, rank=8)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(got.cores, want.cores, strict=True))


def test_conversion_leaves_the_random_state_alone():
    linear = low_rank(300, 300)
    before = torch.get_rng_state()
    first = TTLinear.from_linear(linear, rank=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    again = TTLinear.from_linear(linear, rank=4)
    assert all(torch.equal(a, b) for a, b in zip(first.cores, again.cores, strict=True))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_training_keeps_nothing_as_large_as_the_dense_weight(bias):
    layer = TTLinear(64, 64, bias, rank=2)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        layer(torch.randn(8, 64))
    assert max(sizes) < 64 * 64 / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4, "compression": 10}, r"rank=4 and compression=10 say the same thing twice"),
        ({"rank": [4, 4]}, r"rank=\[4, 4\] names 2 bonds.* join at 3"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"shape": ((5, 5), (48,))}, "5 x 5 multiply to 25, less than in_features=60"),
        ({"shape": ((60,), (7, 8))}, "7 x 8 multiply to 56, more than out_features=48 needs"),
        ({"compression": 0.5}, "compression=0.5 must be above 1"),
        ({"order": 0}, "order=0 must be at least 1"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_settings_are_repeated(settings, message):
    for make in (
        lambda **kw: TTLinear(60, 48, **kw),
        lambda **kw: TTLinear.from_linear(nn.Linear(60, 48), **kw),
    ):
        with pytest.raises(ValueError, match=message):
            make(**settings)


@FORMATS
@pytest.mark.parametrize("tolerance", [-1, 1, 1.5, 5, math.nan, True, "x"])
def test_a_tolerance_that_is_none_is_named(kind, tolerance):
    dense = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"rank=4 and tolerance=0\.1"):
        kind.from_linear(dense, rank=4, tolerance=0.1)
    with pytest.raises(ValueError, match=r"tolerance=.* must be in \[0, 1\)"):
        kind.from_linear(dense, tolerance=tolerance)
    with pytest.raises(ValueError, match=r"tolerance=.* must be in \[0, 1\)"):
        kind(16, 16).set_weight_(dense.weight.detach(), tolerance=tolerance)


@FORMATS
def test_what_cannot_be_approximated(kind):
    with pytest.raises(TypeError, match="bias is needed"):
        kind.from_linear(nn.Embedding(3, 4))
    dense = nn.Linear(4, 4)
    dense.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"not finite|NaN or infinite"):
        kind.from_linear(dense)


@FORMATS
def test_no_bias_and_a_wrong_width(kind):
    layer = kind(6, 4, bias=False)
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)
    with pytest.raises(RuntimeError, match=r"width 5.* 6"):
        layer(torch.randn(3, 5))
    for rank in (1, 6):  # fewer operations by the factors, and perhaps by the dense weight
        with pytest.raises(RuntimeError, match="the input is one number"):
            comera.TTLinear(6, 6, rank=rank)(torch.tensor(1.0))


@FORMATS
def test_autocast(kind, device):
    layer = kind(64, 96, rank=2, device=device)
    x = torch.randn(32, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.03)


@pytest.mark.parametrize("norm_first", [False, True])
def test_inside_torchs_encoder_layer(norm_first):
    dense = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    thin = copy.deepcopy(dense)
    thin.linear1 = TTLinear.from_linear(dense.linear1, tolerance=1e-6)
    thin.linear2 = TTLinear.from_linear(dense.linear2, tolerance=1e-6)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(thin(x), dense(x))
    trained = thin(x).detach()
    thin.eval()
    torch.testing.assert_close(thin(x), trained)
    with torch.no_grad():  # here torch reads the weights itself, in one fused call
        torch.testing.assert_close(thin(x), trained)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: TTLinear(24, 18, rank=4), 11),
        (lambda: TTLinear(64, 64, rank=32), 100_000),  # for which W would be formed here
        (lambda: BTTLinear(100, 37), 3),
    ],
    ids=["tt", "dense", "btt"],
)
def test_programs_take_any_batch(make, rows):
    layer = make().eval()
    first, x = torch.randn(6, layer.in_features), torch.randn(rows, layer.in_features)
    assert rows < 100_000 or not layer.is_factorized(x)
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    for strict in (False, True):
        program = torch.export.export(layer, (first,), dynamic_shapes=shapes, strict=strict)
        torch.testing.assert_close(program.module()(x), layer(x))
    traced = torch.jit.trace(layer, (first,), check_trace=False)
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("widths", [(24, 24), (23, 22)], ids=str)
def test_the_dense_branch_gives_the_same(widths, bias, monkeypatch):
    """Forming the dense matrix, as is done at high ranks, changes only the time."""
    layer = TTLinear(*widths, bias, dtype=torch.float64, rank=24, shape=((6, 4), (4, 6)))
    with torch.no_grad():
        for gate in layer.gates:
            gate.uniform_(0.5, 1.5)
            gate[1] = 0.001  # pruned
    x = torch.randn(2, 5, widths[0], dtype=torch.float64, requires_grad=True)
    results = []
    for factorized in (False, True):
        monkeypatch.setattr(TTLinear, "is_factorized", lambda *_, it=factorized: it)
        y = layer(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        results.append([y.detach(), *grads])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_rank_and_batch_decide_whether_the_dense_matrix_is_formed():
    low, high = TTLinear(768, 768, rank=30), TTLinear(768, 768, rank=768)
    many = torch.empty(1, 768).expand(1 << 20, 768)  # one row in memory
    assert low.is_factorized(many)
    assert not high.is_factorized(many)
    assert high.is_factorized(many[:1])


@pytest.mark.parametrize("rank", [64, 100, 128])
def test_the_dense_matrix_is_formed_from_where_it_takes_fewer_operations(rank):
    layer = TTLinear(128, 192, bias=False, rank=rank, order=1)
    bond = layer.factor_width
    x = torch.empty(1, 128).expand(1 << 20, 128)
    if bond * (128 + 192) <= 128 * 192:
        assert layer.is_factorized(x)
        return
    rows = bond * 128 * 192 / (bond * (128 + 192) - 128 * 192)
    assert layer.is_factorized(x[: math.floor(rows)])
    assert not layer.is_factorized(x[: math.floor(rows) + 1])


def test_what_it_returns_lies_as_from_nn_linear():
    layer = comera.TTLinear(256, 256, rank=16)
    assert layer(torch.randn(256, 1024).T).is_contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_results_lie_in_memory_as_graphs_are_promised(turned):
    """Where products are large enough for oneDNN, whose results may lie transposed."""
    query, key = TTLinear(256, 256, rank=16), TTLinear(256, 256, rank=16)
    wide, narrow = TTLinear(256, 1024, rank=16), TTLinear(1024, 256, rank=16)
    x = torch.randn(256, 1024).T if turned else torch.randn(1024, 256)

    def run(x):
        hidden = feed_forward(x, wide, narrow, "relu")
        return [*linears(x, [query, key]), hidden]

    compiled = torch.compile(run, backend="aot_eager")  # what a graph is told ...
    for made, found in zip(compiled(x), run(x), strict=True):
        assert made.is_contiguous()
        assert found.is_contiguous()  # ... and what it gets
        torch.testing.assert_close(made, found)


@pytest.mark.parametrize("prune_below", [1.5, -0.1, "0.1"])
def test_a_threshold_that_would_close_every_gate_is_refused(prune_below):
    with pytest.raises(ValueError, match=r"prune_below=.* must be in \[0, 1\): gates start at 1"):
        comera.TTLinear(24, 36, rank=3, prune_below=prune_below)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@FORMATS
def test_a_vanished_layer_is_its_bias(kind, bias):
    layer = kind(6, 6, bias, shape=((2, 3), (3, 2)))
    with torch.no_grad():
        layer.gates[0].zero_()
    comera.truncate_(layer, min_rank=0)
    assert not any(layer.ranks)
    x = torch.randn(4, 6, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer.bias.expand(4, 6) if bias else torch.zeros(4, 6))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(param.grad.shape == param.shape for param in layer.parameters())


def test_layers_of_cores_need_those_of_their_shape():
    dense = nn.Linear(64, 64).double()
    layer = comera.TTLinear.from_linear(dense, rank=5)
    cores = [core.detach().clone() for core in layer.gated_cores()]
    again = comera.TTLinear.from_cores(dense, layer.shape, cores)
    x = torch.randn(3, 64, dtype=torch.float64)
    torch.testing.assert_close(again(x), layer(x))
    for wrong in (cores[:-1], cores[::-1]):
        with pytest.raises(ValueError, match=r"cores of \[.* are given, and .* has"):
            comera.TTLinear.from_cores(dense, layer.shape, wrong)
