"""Linear layers that are block tensor trains: what they compute, approximate, prune and keep."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import comera
from comera.nn.fused import feed_forward, gated_feed_forward, linears
from comera.ops.linear import blocks
from comera.rank.prune import prune_to_
from comera.shapes import BTTShape
from tests.nn.test_linear import BLOCKS, shape_name


@pytest.fixture(params=BLOCKS, ids=shape_name)
def layer(request, device):
    wide, high, shape = request.param
    made = comera.BTTLinear(wide, high, shape=shape, device=device, dtype=torch.float64)
    with torch.no_grad():
        made.gates[0].uniform_(0.5, 1.5)[1:2] = 0.001  # pruned, where there is a second rank
    return made


def by_definition(layer):
    """The weight as a product of matrices with blocks along their diagonals, rank by rank."""
    (a, b), (c, d) = layer.shape.in_modes, layer.shape.out_modes
    left, right = (core.detach() for core in layer.gated_cores())
    shuffle = torch.eye(a * c, dtype=left.dtype).view(a, c, a, c)
    shuffle = shuffle.permute(0, 1, 3, 2).reshape(a * c, a * c)  # (a, c) to (c, a)
    total = torch.zeros(a * b, c * d, dtype=left.dtype)
    for r in range(layer.ranks[0]):
        first = torch.block_diag(*left[0, ..., r].cpu())  # a blocks (b, c)
        second = torch.block_diag(*right[r, ..., 0].cpu())  # c blocks (a, d)
        total += first @ shuffle @ second
    return total.T[: layer.out_features, : layer.in_features]


def test_the_weight_is_what_the_paper_defines(layer):
    torch.testing.assert_close(layer.weight.detach().cpu(), by_definition(layer))


@pytest.mark.parametrize("up", [True, False], ids=["gated", "plain"])
def test_pieces_of_rows_give_what_all_rows_give(up, monkeypatch):
    layers = [comera.BTTLinear(*n, dtype=torch.float64) for n in ((12, 24), (12, 24), (24, 12))]
    x = torch.randn(2, 700, 12, dtype=torch.float64, requires_grad=True)

    def run():
        one = linears(x, layers[:2])
        y = gated_feed_forward(x, *layers) if up else feed_forward(x, *layers[1:], "gelu")
        loss = y.square().sum() + sum(each.sin().sum() for each in one)
        return loss, *torch.autograd.grad(loss, (x, *layers[1].parameters()))

    whole = run()
    monkeypatch.setattr(blocks, "_HIDDEN_NUMBERS", 1)
    torch.testing.assert_close(run(), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("up", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("hidden", [96, 40], ids=["equal blocks", "other blocks"])
def test_contiguous_matrices_give_what_plain_strides_give(bias, up, hidden, monkeypatch):
    """Matrices are contiguous where oneDNN multiplies, strided views elsewhere."""
    sizes = ((72, hidden), (72, hidden), (hidden, 72))
    layers = [comera.BTTLinear(*n, rank=3, bias=bias) for n in sizes]
    if hidden == 40:  # blocks of another size meet
        shape = ((4, 10), (8, 9))
        layers[2] = comera.BTTLinear(hidden, 72, rank=2, bias=bias, shape=shape)
        assert layers[1].shape.out_modes != layers[2].shape.in_modes
    x = torch.randn(2, 700, 72, requires_grad=True)
    params = [param for layer in layers for param in layer.parameters()]

    def run():
        one = linears(x, layers[:2])
        y = gated_feed_forward(x, *layers) if up else feed_forward(x, *layers[1:], "gelu")
        loss = y.square().sum() + sum(each.sin().sum() for each in one)
        return y, *one, *torch.autograd.grad(loss, (x, *params), materialize_grads=True)

    monkeypatch.setattr(blocks, "computes_by_onednn", lambda x: False)
    plain = run()
    packed = []
    monkeypatch.setattr(blocks, "BATCHED_FROM", 1)
    monkeypatch.setattr(blocks, "PACKED_FROM", 1)
    monkeypatch.setattr(blocks, "computes_by_onednn", lambda x: packed.append(x) or True)
    torch.testing.assert_close(run(), plain, rtol=1e-4, atol=1e-4)
    assert packed


@pytest.mark.parametrize("up", [True, False], ids=["gated", "plain"])
def test_large_blocks_are_one_node_of_a_graph_where_that_is_faster(up, monkeypatch):
    layers = [comera.BTTLinear(*n, dtype=torch.float64) for n in ((12, 24), (12, 24), (24, 12))]
    layers[0].requires_grad_(False)
    x = torch.randn(70, 12, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(param for layer in layers[1:] for param in layer.parameters())]

    def run(x):
        y = gated_feed_forward(x, *layers) if up else feed_forward(x, *layers[1:], "gelu")
        return y.square().sum() + linears(x, layers[:2])[1].sin().sum()  # of one result alone

    monkeypatch.setattr(blocks, "_LARGE", 1)
    monkeypatch.setattr(blocks, "computes_by_onednn", lambda x: True)
    passes = []

    def record(graph, _):
        passes.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    losses = torch.compile(run, backend=backend, fullgraph=True)(x), run(x)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))
    for targets, ending in zip(passes, ("", "_backward"), strict=True):
        assert {f"comera.{n}{ending}.default" for n in ("blocks", "block_feed_forward")} < targets
        assert "aten.bmm.default" not in targets


@pytest.mark.slow
def test_operators_are_registered_soundly():
    x = torch.randn(9, 12, requires_grad=True)
    sizes = (12, 24), (12, 24), (24, 12)
    factors = [tensor.detach() for n in sizes for tensor in comera.BTTLinear(*n).factors()[:2]]
    several = torch.cat([factors[0], factors[2]], 1), factors[1], factors[3]
    for given in (factors[:2], several):
        given = [factor.clone().requires_grad_() for factor in given]
        torch.library.opcheck(blocks._blocks.custom_op, (x, given))
    given = [factor.clone().requires_grad_() for factor in (*several, *factors[4:])]
    torch.library.opcheck(blocks._feed_forward.custom_op, (x, given, 3, "silu"))


def test_a_feed_forward_keeps_its_input_alone():
    layers = [comera.BTTLinear(*n) for n in ((16, 64), (16, 64), (64, 16))]
    x, kept = torch.randn(33, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        gated_feed_forward(x, *layers)
    assert [shape for shape in kept if 33 in shape] == [(33, 16)]


@pytest.mark.parametrize("biases", [(True, False), (False, True)])
def test_parts_of_a_feed_forward_have_biases_of_their_own(biases):
    sizes = zip(((12, 24), (24, 12)), biases, strict=True)
    first, second = (comera.BTTLinear(*n, bias=b, dtype=torch.float64) for n, b in sizes)
    for param in (*first.parameters(), *second.parameters()):
        nn.init.uniform_(param, 0.5, 1.0)
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    inputs = (x, *first.parameters(), *second.parameters())
    y, want = feed_forward(x, first, second, "gelu"), second(nn.functional.gelu(first(x)))
    torch.testing.assert_close(y, want)
    grads = (torch.autograd.grad(each.sin().sum(), inputs) for each in (y, want))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("sizes", [(64, 128, 67), (67, 128, 64), (64, 67, 64)], ids=str)
def test_a_feed_forward_of_padded_blocks_has_the_width_of_its_layers(sizes):
    wide, hidden, high = sizes
    up, gate, down = (
        comera.BTTLinear(*n) for n in ((wide, hidden), (wide, hidden), (hidden, high))
    )
    x = torch.randn(5, wide)
    torch.testing.assert_close(feed_forward(x, up, down, "gelu"), down(nn.functional.gelu(up(x))))
    torch.testing.assert_close(
        gated_feed_forward(x, gate, up, down), down(nn.functional.silu(gate(x)) * up(x))
    )


def test_layers_without_ranks_run_together():
    up, gate, down = (comera.BTTLinear(*size, rank=1) for size in ((32, 64), (32, 64), (64, 32)))
    x = torch.randn(20, 32)
    for layer in (up, gate):
        with torch.no_grad():
            layer.gates[0].zero_()
        comera.truncate_(layer, min_rank=0)
    first, second = linears(x, [up, gate])
    assert torch.equal(first, up.bias.expand(20, 64))
    assert torch.equal(second, gate.bias.expand(20, 64))
    y = gated_feed_forward(x, gate, up, down)
    torch.testing.assert_close(y, down(nn.functional.silu(second) * first))
    y.sum().backward()
    assert gate.bias.grad.any()


def test_only_the_gradients_that_are_wanted():
    layer = comera.BTTLinear(12, 6)
    layer.cores[0].requires_grad_(False)
    x = torch.randn(5, 12)
    layer(x).square().sum().backward()
    assert layer.cores[0].grad is None
    dense = nn.functional.linear(x, layer.weight, layer.bias)
    (want,) = torch.autograd.grad(dense.square().sum(), layer.cores[1])
    torch.testing.assert_close(layer.cores[1].grad, want)


def test_gradients_of_many_rows_keep_the_digits_of_a_narrow_dtype(monkeypatch):
    monkeypatch.setattr(blocks, "_HIDDEN_NUMBERS", 1)
    layer, x = comera.BTTLinear(8, 8, bias=False), torch.rand(1 << 15, 8)
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)(x.to(dtype)).float().sum().backward()
        grads.append([core.grad.float() for core in layer.cores])
        layer.zero_grad()
    for wide, narrow in zip(*grads, strict=True):
        assert (narrow - wide).norm() / wide.norm() < 0.01


def test_orthogonal_blocks_give_a_weight_of_full_rank_and_equal_singular_values():
    layer = comera.BTTLinear(64, 64, rank=1)
    values = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(values, values[:1].expand(64), rtol=1e-4, atol=0)


def test_a_weight_of_zeros_can_still_learn():
    dense = nn.Linear(16, 16)
    nn.init.zeros_(dense.weight)
    config = comera.TTConfig(linear_format="btt", init="orthogonal", rank=1)
    layer = comera.tensorize_(nn.Sequential(dense), config)[0]
    assert not layer.weight.any()
    layer(torch.randn(4, 16)).square().sum().backward()
    assert layer.cores[1].grad.any()


def test_a_weight_is_approximated_as_well_as_blocks_of_that_rank_can():
    dense = nn.Linear(20, 15, dtype=torch.float64)
    layer = comera.BTTLinear.from_linear(dense, shape=((4, 5), (3, 5)), rank=2)
    left_out = 0.0
    for rows in dense.weight.detach().split(5, 0):
        for block in rows.split(5, 1):
            left_out += float(torch.linalg.svdvals(block)[2:].square().sum())
    error = float((layer.weight - dense.weight).detach().square().sum())
    assert error == pytest.approx(left_out)
    torch.testing.assert_close(layer.bias, dense.bias)


def test_the_full_rank_of_blocks_is_exact_and_a_tolerance_takes_what_it_needs():
    dense = nn.Linear(20, 15, dtype=torch.float64)
    exact = comera.BTTLinear.from_linear(dense, rank=99)
    torch.testing.assert_close(exact.dense_weight(), dense.weight)
    errors = []
    for rank in range(1, exact.ranks[0]):
        rough = comera.BTTLinear.from_linear(dense, rank=rank)
        errors.append(float(((rough.weight - dense.weight).norm() / dense.weight.norm()).detach()))
    tolerance = (errors[0] + errors[1]) / 2
    assert comera.BTTLinear.from_linear(dense, tolerance=tolerance).ranks == (2,)
    assert exact.set_weight_(dense.weight.detach() * 2, tolerance=tolerance) == pytest.approx(
        errors[1]
    )
    assert exact.ranks == (2,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_tolerance_takes_the_ranks_that_are_there_and_none_of_rounding(dtype):
    torch.manual_seed(0)
    weight = comera.BTTLinear(64, 64, rank=2, dtype=dtype).weight.detach()
    layer = comera.BTTLinear(64, 64, rank=8, dtype=dtype)
    assert layer.set_weight_(weight, tolerance=0) < 1e-6
    assert layer.ranks == (2,)


def test_blocks_of_zeros_can_learn():
    dense = nn.Linear(64, 64)
    with torch.no_grad():
        dense.weight[:32] = 0
    for layer in (comera.BTTLinear.from_linear(dense), comera.BTTLinear(64, 64)):
        layer.set_weight_(dense.weight.detach())
        assert not layer.weight[:32].any()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (layer(torch.randn(16, 64)) - 1).square().mean().backward()
            optimizer.step()
        assert (layer.weight[:32].detach().abs() > 0).any(1).all()
    layer.set_weight_(torch.zeros(64, 64))
    layer(torch.randn(4, 64)).sum().backward()
    assert layer.cores[1].grad.any()


def test_truncation_and_canonical_form_leave_the_function(layer):
    x = torch.randn(5, layer.in_features, dtype=torch.float64, device=layer.cores[0].device)
    before, live, cut = layer(x), layer.live_ranks, copy.deepcopy(layer)
    comera.truncate_(cut)
    comera.canonicalize_(layer)
    torch.testing.assert_close((cut(x), layer(x)), (before, before))
    assert cut.ranks == live
    norms = layer.rank_norms()[0].tolist()
    assert norms == sorted(norms, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_closed_ranks_stay_closed_in_canonical_form(dtype):
    layer = comera.BTTLinear(256, 256, rank=4, dtype=dtype)
    with torch.no_grad():
        layer.gates[0][2:] = 0
        layer.cores[0].mul_(3)
    before = [float(core.detach().double().norm()) for core in layer.gated_cores()]
    comera.canonicalize_(layer)
    assert layer.live_ranks == (2,)
    after = [float(core.detach().double().norm()) for core in layer.cores]
    assert after[0] / after[1] == pytest.approx(before[0] / before[1], rel=0.01)


def test_a_small_rank_stays_open_in_canonical_form():
    layer = comera.BTTLinear(64, 64, rank=2, dtype=torch.float64)
    with torch.no_grad():
        layer.cores[0][..., 1] *= 1e-7
    before = layer.weight.detach()
    comera.canonicalize_(layer)
    assert layer.live_ranks == (2,)
    torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=1e-12)


def test_a_rank_is_cut_to_what_a_block_can_have():
    layer = comera.BTTLinear(64, 48, shape=BTTShape((4, 16), (24, 2), (6,)))
    assert layer.ranks == (2,)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        layer(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        comera.canonicalize_(layer, optimizer)


def test_the_rank_that_carries_least_goes_first():
    layer = comera.BTTLinear(12, 12, rank=3)
    with torch.no_grad():
        layer.gates[0].copy_(torch.tensor([1.0, 0.1, 1.0]))
    prune_to_({"layer": layer}, 2 * layer.shape.size_at((1,)))
    assert layer.gates[0].tolist() == [1.0, 0.0, 1.0]


def test_numbers_that_are_not_finite_are_named():
    layer = comera.BTTLinear(12, 12, rank=3)
    layer.cores[0].data.flatten()[0] = math.inf
    with pytest.raises(ValueError, match="cores of first hold numbers"):
        prune_to_({"first": layer}, layer.shape.size_at((1,)))


def test_ranks_are_learned_to_a_target():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    comera.tensorize_(model, comera.TTConfig(linear_format="btt", rank=3, init="orthogonal"))
    before = sum(core.numel() for layer in (model[0], model[2]) for core in layer.cores)
    optimizer = comera.MuonAdamW(comera.param_groups(model, lr=1e-3, gate_lr=0.05))
    ranks = comera.TwoStage(model, target=0.7, early_steps=2, late_steps=30)
    step = comera.TrainStep(model, lambda model, x: model(x).square().mean(), optimizer, ranks)
    while not ranks.due:
        step(torch.randn(8, 64))
    ranks.finish_(optimizer)
    after = sum(core.numel() for layer in (model[0], model[2]) for core in layer.cores)
    assert after <= 0.7 * before
    step(torch.randn(8, 64))  # the optimizer's state has been cut with the ranks


def model_of_two():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.Linear(64, 16))


CONFIG = comera.TTConfig(
    linear_format="btt", rank=1, embedding_rank=2, init="orthogonal", target_modules="all"
)


def test_linear_layers_become_blocks_and_tables_tensor_trains():
    model = comera.tensorize_(model_of_two(), CONFIG)
    kinds = [type(layer) for layer in model]
    assert kinds == [comera.TTEmbedding, comera.BTTLinear, comera.BTTLinear]
    dense = comera.densify_(copy.deepcopy(model))
    x = torch.arange(6)
    torch.testing.assert_close(dense(x), model(x))


def test_a_saved_model_comes_back(tmp_path):
    model = comera.tensorize_(model_of_two(), CONFIG)
    comera.save_model(model, tmp_path)
    again = comera.load_model(tmp_path, model_of_two())
    x = torch.arange(6)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 2}, "order=2"),
        ({"linear_format": "monarch"}, "linear_format='monarch' must be one of 'tt', 'btt'"),
        ({"rank": [1, 2]}, "give one int or 1 of them"),
        ({"rank": None, "compression": 100}, "use fewer blocks .shape=. or a compression up to"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        comera.tensorize_(
            nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(**{"linear_format": "btt"} | change)
        )


def test_the_reports_know_it():
    model = comera.tensorize_(model_of_two(), CONFIG)
    report = comera.compression_report(model, tokens=100)
    first = next(layer for layer in report.layers if layer.name == "1")
    stored = 16 * model[1].shape.out_modes[0] + 64 * model[1].shape.in_modes[0]
    assert (first.kind, first.live_params) == ("BTTLinear", stored)
    assert first.operations == pytest.approx(3 * 100 * stored)  # forward and both gradients
    plan = comera.plan(model[1], tokens=4096)
    assert plan.chosen.name == "blocks"
    assert "blocks" in str(comera.plan(model, tokens=4096))


def test_tables_have_a_rank_of_their_own():
    config = comera.TTConfig(linear_format="btt", rank=2, init="orthogonal")
    model = comera.tensorize_(nn.Sequential(nn.Embedding(30_000, 64), nn.Linear(64, 64)), config)
    assert max(model[0].ranks) == 32


def test_what_has_no_blocks_stays_dense_and_is_named(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 1), nn.Linear(64, 1))
    config = comera.TTConfig(linear_format="btt", compression=1.5, init="orthogonal")
    comera.tensorize_(model, config)
    assert [type(layer) for layer in model] == [comera.BTTLinear, nn.Conv2d, nn.Linear]
    assert "leaves 1 dense: linear_format" in caplog.text
    assert "leaves 2 dense: as a block tensor train it would hold" in caplog.text


def test_freezing_leaves_it_and_an_exported_program_knows_torch_alone(caplog):
    model = comera.tensorize_(model_of_two()[1:], CONFIG).eval()
    x = torch.randn(5, 16)
    want = model(x)
    assert type(comera.freeze_(copy.deepcopy(model))[0]) is comera.BTTLinear
    plain = comera.to_plain_(model)
    assert "leaves 1, 2 as block tensor trains" in caplog.text
    program = torch.export.export(plain, (x,))
    named = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("comera" in name for name in named)
    torch.testing.assert_close(program.module()(x), want)


def test_layers_of_one_model_in_one_context():
    model = comera.tensorize_(model_of_two(), CONFIG)
    x, contracted = torch.arange(6), comera.BatchedContraction(model)
    want = model(x)
    with contracted:
        torch.testing.assert_close(model(x), want)
        model(x).sum().backward()
    assert all(gate.grad is not None for layer in model for gate in layer.gates)


@pytest.mark.parametrize("optimizer", [comera.CAME, torch.optim.AdamW])
def test_other_optimizers_step_it(optimizer):
    layer = comera.BTTLinear(16, 16)
    before = layer.weight.detach().clone()
    stepper = optimizer(comera.param_groups(layer, lr=1e-2))
    layer(torch.randn(4, 16)).square().sum().backward()
    stepper.step()
    assert layer.weight.isfinite().all()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    ("wide", "high", "modes"),
    [
        (256, 1024, ((8, 32), (32, 32))),
        (1024, 256, ((32, 32), (8, 32))),
        (768, 3072, ((16, 48), (48, 64))),
        (128, 512, ((8, 16), (16, 32))),
        (256, 256, ((16, 16), (16, 16))),
    ],
)
def test_blocks_of_rank_one_are_of_full_rank_and_no_more_than_that_takes(wide, high, modes):
    shape = BTTShape.fit(wide, high, rank=1)
    assert (shape.in_modes, shape.out_modes) == modes
    layer = comera.BTTLinear(wide, high, rank=1, dtype=torch.float64)
    assert int(torch.linalg.matrix_rank(layer.weight.detach())) == min(wide, high)
