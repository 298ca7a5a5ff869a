import copy

import pytest
import torch
from torch import nn

import comera
from comera.nn.module import tensor_trains
from comera.ops import product
from comera.optim.muon import core_matrix, orthogonalize
from tests.train.counting import Calls

from .updating import assert_same, loss_of, make_model


def tensorized(dtype=torch.float32, **settings):
    config = comera.TTConfig(
        rank=6, order=2, hot_rows=20, hot_rank=6, target_modules=["tokens", "wide", "narrow"]
    )
    model = make_model(dtype=dtype)
    model.narrow.weight = nn.Parameter(model.narrow.weight.detach().clone())
    return comera.tensorize_(model, config)


def muon(model, **settings):
    return comera.MuonAdamW(comera.param_groups(model, 1e-2, weight_decay=0.1), **settings)


def train(model, optimizer, first, last):
    for k in range(first, last):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        optimizer.step()


@pytest.mark.parametrize("shape", [(24, 24), (7, 40), (40, 7), (1, 5)], ids=str)
def test_singular_values_become_one_and_vectors_stay(shape, device):
    x = torch.randn(4, *shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalize(x.to(device), 5).cpu()
    inside = u.mT @ found @ v.mT  # in the basis of x's own singular vectors
    clear = s > 0.02 * s.norm(dim=1, keepdim=True)  # far smaller ones have not arrived yet
    diagonal = inside.diagonal(dim1=1, dim2=2)
    assert ((diagonal > 0.5) & (diagonal < 1.25) | ~clear).all()
    close = 1e-10 if device == "cpu" else 0.05  # bfloat16 elsewhere
    torch.testing.assert_close(inside, torch.diag_embed(diagonal), atol=close, rtol=0)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)], ids=str)
def test_large_matrices_are_multiplied_by_onednn(shape, monkeypatch):
    if not product.has_onednn():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(product, "prefers_onednn", lambda: True)
    monkeypatch.setattr(product, "onednn_shapes", shapes := set())
    x = torch.randn(4, *shape)
    want = orthogonalize(x.double(), 5).float()
    torch.testing.assert_close(orthogonalize(x, 5), want, rtol=0, atol=1e-5)
    assert len(shapes) == 1
    torch.compiler.reset()
    compiled = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, 5), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("power", [-13, -27, -40, -50])
@pytest.mark.parametrize("shape", [(4, 8, 4), (1, 8, 4, 6, 4), (128, 96)], ids=str)
def test_steps_do_not_depend_on_the_scale_of_small_gradients(shape, power, device):
    """Powers of two, by which bfloat16 rounds alike."""
    grad = torch.randn(shape)
    found = []
    for factor in (1.0, 2.0**power, 1e-30, 0.0):
        param = nn.Parameter(torch.zeros(shape, device=device))
        optimizer = comera.MuonAdamW([{"params": [param], "muon": True}], lr=1e-2)
        param.grad = (grad * factor).to(device)
        optimizer.step()
        found.append(param.detach().cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)
    assert found[2].abs().max() < 1e-6  # below the least norm, and finite
    assert found[3].eq(0).all()


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((1, 8, 6), (8, 6)),
        ((8, 4, 48), (32, 48)),
        ((48, 4, 16), (48, 64)),
        ((16, 8, 16), (128, 16)),
        ((6, 8, 1), (6, 8)),
        ((4, 3, 5, 6), (60, 6)),
        ((24, 40), (24, 40)),
        ((40, 24), (40, 24)),
    ],
    ids=str,
)
def test_a_core_is_a_matrix_at_its_wider_bond(shape, matrix):
    assert core_matrix(torch.Size(shape)) == matrix


def test_dense_matrices_step_as_by_torchs_muon():
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")
    start = torch.randn(48, 32)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = comera.MuonAdamW([{"params": [mine], "muon": True}], lr=1e-2, weight_decay=0.3)
    torchs = muon([theirs], lr=3e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        grad = torch.randn(48, 32)
        mine.grad, theirs.grad = grad.clone(), grad.clone()
        ours.step()
        torchs.step()
    # torch iterates in bfloat16, whose rounding is some percent of a step.
    assert (mine - theirs).norm() < 0.03 * (theirs - start).norm()


@pytest.mark.parametrize("own", [False, True])
def test_blocks_of_a_block_tensor_train_step_one_by_one(own):
    layer = comera.BTTLinear(12, 20, shape=((3, 4), (4, 5)), rank=2)
    before = [core.detach().clone() for core in layer.cores]
    layer(torch.randn(6, 12)).square().sum().backward()
    groups = comera.param_groups(layer, 1e-2)
    if own:  # groups of the user's own, without names
        groups = [{"params": list(layer.cores), "muon": True, "lr": 1e-2, "weight_decay": 0}]
    comera.MuonAdamW(groups).step()
    for core, old in zip(layer.cores, before, strict=True):
        one, blocks, width, others, two = core.shape
        for k in range(blocks):
            # The first step is in the direction of the gradient.
            grad = core.grad[:, k].reshape(1, one * width, others * two)
            whole = max(blocks * one * width, blocks * others * two)
            want = orthogonalize(grad, 5) * 1e-2 * 0.6 * whole**0.5 / 2
            moved = (old - core.detach())[:, k].reshape(want.shape)
            torch.testing.assert_close(moved, want, rtol=1e-4, atol=1e-6)


def test_a_step_of_blocks_is_about_that_of_a_dense_layer():
    sizes = []
    for made in (comera.BTTLinear(64, 64, rank=1), nn.Linear(64, 64)):
        before = made.weight.detach().clone()
        groups = comera.param_groups(made, 1e-2, muon_modules=None)
        if isinstance(made, nn.Linear):
            groups = [{"params": [made.weight], "muon": True}]
        optimizer = comera.MuonAdamW(groups, lr=1e-2)
        made(torch.randn(256, 64)).square().sum().backward()
        optimizer.step()
        sizes.append(float((made.weight.detach() - before).norm()))
    assert 0.5 < sizes[0] / sizes[1] < 1.5


def test_weights_of_convolutions_are_no_blocks():
    conv = nn.Conv3d(4, 6, 3)
    twin = nn.Parameter(conv.weight.detach().flatten(1).clone())
    conv.weight.grad = torch.randn_like(conv.weight)
    twin.grad = conv.weight.grad.flatten(1).clone()
    for param in (conv.weight, twin):
        comera.MuonAdamW([{"params": [param], "muon": True}], lr=1e-2).step()
    torch.testing.assert_close(conv.weight.flatten(1), twin, rtol=1e-4, atol=1e-6)


def test_a_convolution_with_one_plane_is_no_core_of_blocks():
    conv = nn.Conv3d(4, 6, (3, 3, 1), bias=False)  # its weight has five dimensions, the last of one
    twin = nn.Parameter(conv.weight.detach().flatten(1).clone())
    conv.weight.grad = torch.randn_like(conv.weight)
    twin.grad = conv.weight.grad.flatten(1).clone()
    groups = comera.param_groups(nn.Sequential(conv), 1e-2, muon_modules="all-linear")
    for given in (groups, [{"params": [twin], "muon": True}]):
        comera.MuonAdamW(given, lr=1e-2, weight_decay=0.0).step()
    torch.testing.assert_close(conv.weight.flatten(1), twin, rtol=1e-4, atol=1e-6)


def test_other_groups_step_as_by_adamw():
    model, twin = tensorized(), tensorized()
    ours = muon(model)
    rest = [g for g in comera.param_groups(twin, 1e-2, weight_decay=0.1) if g["name"] != "cores"]
    adamw = torch.optim.AdamW(rest)
    for k in range(3):
        loss_of(model, k).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        ours.step()
        adamw.step()
        model.zero_grad()
    cores = {id(core) for layer in tensor_trains(model).values() for core in layer.cores}
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs) == (id(mine) not in cores), name


def test_cores_of_one_shape_step_together_as_they_would_alone():
    cores = [nn.Parameter(torch.randn(6, 8, 5)) for _ in range(3)]
    alone = [nn.Parameter(core.detach().clone()) for core in cores]
    together = comera.MuonAdamW([{"params": cores, "muon": True}], lr=1e-2)
    each = [comera.MuonAdamW([{"params": [core], "muon": True}], lr=1e-2) for core in alone]
    for _ in range(4):
        for one, other in zip(cores, alone, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        together.step()
        for optimizer in each:
            optimizer.step()
    torch.testing.assert_close(cores, alone)


def test_more_cores_of_one_shape_take_no_more_calls():
    """Python's share of a step: a call for all of a shape, however many there are."""
    counts = []
    for count in (2, 20):
        cores = [torch.nn.Parameter(torch.randn(3, 4, 5)) for _ in range(count)]
        optimizer = comera.MuonAdamW([{"name": "cores", "params": cores}], weight_decay=0.1)
        for core in cores:
            core.grad = torch.randn_like(core)
        optimizer.step()
        with Calls() as counter:
            optimizer.step()
        counts.append(counter.count)
    assert counts[0] == counts[1]


def test_truncation_cuts_its_averages():
    model = tensorized(torch.float64)
    optimizer = muon(model)
    train(model, optimizer, 0, 2)
    with torch.no_grad():
        for layer in tensor_trains(model).values():
            for gate in layer.gates:
                gate[1] = 0
    before = loss_of(model, 5)
    comera.truncate_(model, optimizer)
    torch.testing.assert_close(loss_of(model, 5), before)
    for layer in tensor_trains(model).values():
        for core in layer.cores:
            assert optimizer.state[core]["momentum_buffer"].shape == core.shape
    train(model, optimizer, 2, 4)


def test_a_vanished_layer_is_passed_over():
    model = tensorized()
    optimizer = muon(model)
    train(model, optimizer, 0, 1)
    with torch.no_grad():
        model.wide.gates[0].zero_()
    comera.truncate_(model, optimizer, min_rank=0)
    assert 0 in model.wide.ranks
    train(model, optimizer, 1, 3)


def test_steps_in_backward_are_the_same():
    model, twin = tensorized(), tensorized()
    optimizer, other = muon(model), muon(twin)
    updates = comera.OptimizerInBackward(other)
    for k in range(3):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        optimizer.step()
        loss_of(twin, k).backward()
        updates.step()
    # One by one instead of stacked: equal up to rounding.
    torch.testing.assert_close(dict(twin.named_parameters()), dict(model.named_parameters()))


def test_a_tensor_as_learning_rate_follows_a_schedule():
    model, twin = tensorized(), tensorized()
    plain = muon(model)
    groups = comera.param_groups(twin, 1e-2, weight_decay=0.1)
    for group in groups:
        group["lr"] = torch.tensor(group["lr"])
    held = comera.MuonAdamW(groups)
    train(model, plain, 0, 3)
    train(twin, held, 0, 3)
    torch.testing.assert_close(dict(twin.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in GaLore"])
@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        (torch.optim.lr_scheduler.OneCycleLR, {"total_steps": 5}),
        (torch.optim.lr_scheduler.CyclicLR, {"base_lr": 0.1, "step_size_up": 2}),
    ],
)
def test_schedules_move_its_momentum_as_that_of_torchs_muon(schedule, settings, around):
    averages = []
    for kind in (torch.optim.Muon, comera.MuonAdamW):
        param = nn.Parameter(torch.ones(8, 9))
        mine = {"muon": True} if kind is comera.MuonAdamW else {}
        groups = [{"params": [param], **mine}]
        optimizer = comera.GaLore(groups, kind, lr=0.1) if around else kind(groups, lr=0.1)
        cycle = schedule(optimizer, max_lr=0.2, **settings)
        for k in range(4):
            param.grad = torch.full_like(param, 1.0 + k)
            optimizer.step()
            cycle.step()
        averages.append(optimizer.state[param]["momentum_buffer"])
    torch.testing.assert_close(*averages)


def test_wrong_settings_are_named():
    core, vector = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match=r"momentum=1\.0 must be in \[0, 1\)"):
        comera.MuonAdamW([core], momentum=1.0)
    with pytest.raises(ValueError, match="ns_steps=0 must be at least 1"):
        comera.MuonAdamW([core], ns_steps=0)
    with pytest.raises(ValueError, match=r"of shape \(3,\) is in a group with muon=True"):
        comera.MuonAdamW([{"params": [core, vector], "muon": True}])
    for setting, message in (("momentum", r"momentum=2 must"), ("ns_steps", "ns_steps=-1 must")):
        group = {"params": [core], setting: 2 if setting == "momentum" else -1}
        with pytest.raises(ValueError, match=message):
            comera.MuonAdamW([group])


def test_the_state_of_another_optimizer_is_refused():
    model = tensorized()
    other = torch.optim.AdamW(comera.param_groups(model, 1e-2))
    optimizer = muon(model)
    for given in (other, optimizer):
        train(model, given, 0, 1)
    same, kept = copy.deepcopy((model, optimizer))
    named = copy.deepcopy(other.state_dict())
    for group in named["param_groups"]:
        group["muon"] = group["name"] == "cores"
    for state in (other.state_dict(), named):
        with pytest.raises(ValueError, match="the state of another optimizer, not of MuonAdamW"):
            optimizer.load_state_dict(state)
    assert_same(model, optimizer, same, kept)
    train(model, optimizer, 1, 2)


def test_parameters_in_no_groups_leave_nothing_to_muon(caplog):
    comera.MuonAdamW(comera.param_groups(torch.nn.Linear(2, 3), 1e-3))
    assert not caplog.text
    comera.MuonAdamW(torch.nn.Linear(2, 3).parameters())
    assert "of parameters in no groups is AdamW" in caplog.text
