"""Parameter groups: the factors of their rates, and the optimizers that take their keys."""

import copy
import math

import pytest
import torch
from torch import nn

import comera
from comera.nn.module import tensor_trains
from comera.optim.groups import contracted_scale
from comera.optim.muon import core_matrix

SHAPES = [
    (64, 64, 1, 8), (64, 64, 1, 32), (64, 64, 3, 8), (256, 256, 1, 16), (256, 256, 3, 32),
    (256, 256, 4, 8), (512, 512, 2, 32), (512, 512, 3, 48), (128, 512, 3, 16), (512, 128, 3, 16),
]  # fmt: skip


def made(width_in, width_out, order, rank):
    torch.manual_seed(0)
    return comera.TTLinear(width_in, width_out, bias=False, rank=rank, order=order)


def made_of_blocks(width_in, width_out, rank):
    torch.manual_seed(0)
    return comera.BTTLinear(width_in, width_out, bias=False, rank=rank)


def moved(layer, optimizer):
    """Return the spectral norm of what the first step changes, in units of sqrt(out) / in."""
    before = layer.dense_weight().detach().clone()
    x = torch.randn(256, layer.in_features)
    teacher = torch.randn(layer.in_features, layer.out_features) / layer.in_features**0.5
    (layer(x) - x @ teacher).square().mean().backward()
    optimizer.step()
    change = torch.linalg.matrix_norm(layer.dense_weight().detach() - before, 2)
    return change * layer.in_features / math.sqrt(layer.out_features)


@pytest.mark.parametrize("optimizer", [comera.MuonAdamW, torch.optim.AdamW])
def test_one_rate_moves_all_shapes_alike(optimizer):
    spread = {}
    for scale_rates in (None, "contracted"):
        found = []
        for shape in SHAPES:
            layer = made(*shape)
            groups = comera.param_groups(layer, 1e-4, scale_rates=scale_rates)
            cores = [group for group in groups if group["name"] == "cores"]
            found.append(moved(layer, optimizer(cores)))
        spread[scale_rates] = max(found) / min(found)
    assert spread["contracted"] < 2.6
    assert spread[None] > 2.5 * spread["contracted"]


def test_blocks_move_by_half_of_what_tensor_trains_do():
    found = {}
    for scale_rates in (None, "contracted"):
        for shape in ((64, 64, 1), (256, 256, 2), (512, 512, 1), (128, 512, 2), (512, 128, 1)):
            layer = made_of_blocks(*shape)
            groups = comera.param_groups(layer, 1e-4, scale_rates=scale_rates)
            cores = [group for group in groups if group["name"] == "cores"]
            found.setdefault(scale_rates, []).append(moved(layer, comera.MuonAdamW(cores)))
    trains = made(256, 256, 3, 32)
    groups = comera.param_groups(trains, 1e-4, scale_rates="contracted")
    usual = moved(trains, comera.MuonAdamW(groups[:1]))
    assert all(0.35 < size / usual < 0.55 for size in found["contracted"])
    assert max(found[None]) / min(found[None]) > 3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_factor_is_what_fresh_cores_say(shape):
    layer = made(*shape)
    norm = torch.linalg.matrix_norm(layer.dense_weight().detach(), 2)
    count = len(layer.cores)
    squares = 0.0
    for core in layer.cores:
        rows, cols = core_matrix(core.shape)
        # The step of a core, 0.6 rates in root mean square, times all other cores, of one norm.
        squares += (0.6 * math.sqrt(max(rows, cols)) * norm ** ((count - 1) / count)) ** 2
    wanted = 12 * math.sqrt(256 * shape[1]) / shape[0] / math.sqrt(squares)
    assert contracted_scale(layer) == pytest.approx(wanted, rel=1e-3)


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Embedding(60, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 32),
        nn.LayerNorm(32), nn.Linear(32, 3),
    )  # fmt: skip
    config = comera.TTConfig(
        rank=6, hot_rows=10, hot_rank=4, target_modules=["0", "1", "3", "4"], init="orthogonal"
    )
    return comera.tensorize_(layers, config)


def test_groups_hold_every_parameter_once_and_tables_keep_their_rate():
    compressed = model()
    groups = comera.param_groups(compressed, 1e-3, core_lr=2e-3, scale_rates="contracted")
    held = [param for group in groups for param in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, compressed.parameters()))
    rate = {id(param): group["lr"] for group in groups for param in group["params"]}
    for name, layer in tensor_trains(compressed).items():
        factor = contracted_scale(layer) if isinstance(layer, comera.TTLinear) else 1
        for core in layer.cores:
            assert rate[id(core)] == pytest.approx(2e-3 * factor, rel=0.01), name
    for group in groups:
        if group["name"] == "cores":
            assert group["lr"] == pytest.approx(2e-3 * group["rate_scale"])
        else:
            assert "rate_scale" not in group
    plain = comera.param_groups(compressed, 1e-3, core_lr=2e-3)
    assert [group["name"] for group in plain].count("cores") == 1
    assert [g["lr"] for g in groups if g["name"] != "cores"] == [g["lr"] for g in plain[1:]]


def test_factors_stay_after_truncation_and_in_another_process(tmp_path):
    compressed = model()
    groups = comera.param_groups(compressed, 1e-3, scale_rates="contracted")
    optimizer = comera.MuonAdamW(groups)
    compressed(torch.arange(60)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        for layer in tensor_trains(compressed).values():
            layer.gates[0][:2] = 0
    comera.truncate_(compressed, optimizer)
    comera.save_model(compressed, tmp_path / "model")
    again = comera.load_model(tmp_path / "model", model())
    other = comera.MuonAdamW(comera.param_groups(again, 1e-3, scale_rates="contracted"))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert one["lr"] == two["lr"]
        assert [p.shape for p in one["params"]] == [p.shape for p in two["params"]]


def test_a_factor_of_another_name_is_refused():
    with pytest.raises(ValueError, match="scale_rates='mup' must be 'contracted', or None"):
        comera.param_groups(model(), 1e-3, scale_rates="mup")


@pytest.fixture
def half():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return comera.tensorize_(model, comera.TTConfig(rank=4, target_modules="0"))


def trained(model, optimizer):
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    return not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("inner", [torch.optim.AdamW, comera.CAME, comera.MuonAdamW])
def test_galore_takes_groups_with_scaled_rates(half, inner):
    groups = comera.galore_param_groups(half, 1e-3, rank=4, scale_rates="contracted")
    optimizer = comera.GaLore(groups, inner)
    assert groups[-1]["name"] == "galore"
    cores = [group for group in optimizer.param_groups if group["name"] == "cores"]
    assert all(group["lr"] == 1e-3 * group["rate_scale"] for group in cores)
    assert cores
    assert trained(half, optimizer)


def test_came_takes_groups_with_scaled_rates(half):
    groups = comera.param_groups(half, 1e-3, scale_rates="contracted")
    assert any("rate_scale" in group for group in groups)
    assert trained(half, comera.CAME(groups))


def test_groups_of_another_optimizer_keep_their_names(half):
    named = torch.optim.AdamW(half[1].named_parameters()).param_groups[0]
    group = {key: named[key] for key in ("params", "param_names")}
    optimizer = comera.GaLoreAdamW([group])
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_weight_that_an_embedding_shares_is_neither_projected_nor_stepped_by_muon():
    table, body, head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
    head.weight = table.weight
    for tied in (nn.ModuleList([table, body, head]), nn.ModuleList([head, body, table])):
        for name, groups in {
            "galore": comera.galore_param_groups(tied, 1e-3, rank=4),
            "matrices": comera.param_groups(tied, 1e-3, muon_modules="all-linear"),
        }.items():
            params = {group["name"]: group["params"] for group in groups}
            assert [id(param) for param in params[name]] == [id(body.weight)]
            assert [id(param) for param in params["dense"]] == [id(table.weight)]


def test_groups_for_muon_are_for_muonadamw(half):
    def groups():
        return comera.param_groups(half, 1e-3, muon_modules="1")

    with pytest.raises(TypeError, match=r"no setting 'muon': .* are made for comera.MuonAdamW"):
        comera.CAME(groups())
    with pytest.raises(TypeError, match=r"no setting 'muon': .* are made for comera.MuonAdamW"):
        comera.GaLoreAdamW(groups())
    with pytest.raises(TypeError, match=r"no setting 'rank': .* are made for comera.GaLore"):
        comera.CAME([{"params": list(half.parameters()), "rank": 4}])
    assert trained(half, comera.GaLore(groups(), comera.MuonAdamW))


def decays(optimizer):
    return {group["name"]: group["weight_decay"] for group in optimizer.param_groups}


@pytest.mark.parametrize("make", [comera.MuonAdamW, torch.optim.AdamW])
def test_the_optimizers_weight_decay_is_that_of_dense_matrices(make):
    model = nn.Sequential(comera.TTLinear(16, 16, rank=2), nn.Linear(16, 16))
    none = {"cores": 0.0, "gates": 0.0, "vectors": 0.0}
    optimizer = make(comera.param_groups(model, 1e-3), weight_decay=0.1)
    assert decays(optimizer) == {**none, "dense": 0.1}
    optimizer = make(comera.param_groups(model, 1e-3, weight_decay=0.2), weight_decay=0.1)
    assert decays(optimizer) == {**none, "dense": 0.2}
    groups = comera.galore_param_groups(model, 1e-3, 4)
    optimizer = comera.GaLoreAdamW(groups, weight_decay=0.1)
    assert decays(optimizer) == {**none, "galore": 0.1}


@pytest.mark.parametrize(
    "wrong", [{"lr": -1}, {"lr": None}, {"lr": "1e-3"}, {"gate_lr": "x"}, {"core_lr": float("nan")},
              {"weight_decay": -0.1}],
)  # fmt: skip
def test_what_is_no_rate_is_refused(wrong):
    """torch looks at the numbers of an optimizer, not at those of its groups."""
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r} must be a number from 0"):
        comera.param_groups(comera.TTLinear(8, 8, rank=2), **{"lr": 1e-3, **wrong})


def test_groups_are_of_a_model():
    with pytest.raises(TypeError, match="is no model, but of type generator"):
        comera.param_groups(nn.Linear(2, 2).parameters(), 1e-3)
