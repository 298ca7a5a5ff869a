"""Groups that comera and torch make, in the optimizers that look at their keys."""

import pytest
import torch
from torch import nn

import comera

GALORE = {"rank": 4, "scale_rates": "contracted"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return comera.tensorize_(model, comera.TTConfig(rank=4, target_modules="0"))


def trained(model, optimizer):
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    return not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("inner", [torch.optim.AdamW, comera.CAME, comera.MuonAdamW])
def test_galore_takes_groups_with_scaled_rates(model, inner):
    optimizer = comera.GaLore(comera.galore_param_groups(model, 1e-3, **GALORE), inner)
    cores = [group for group in optimizer.param_groups if group["name"] == "cores"]
    assert all(group["lr"] == 1e-3 * group["rate_scale"] for group in cores)
    assert cores
    assert trained(model, optimizer)


def test_came_takes_groups_with_scaled_rates(model):
    groups = comera.param_groups(model, 1e-3, scale_rates="contracted")
    assert any("rate_scale" in group for group in groups)
    assert trained(model, comera.CAME(groups))


def test_groups_of_another_optimizer_keep_their_names(model):
    named = torch.optim.AdamW(model[1].named_parameters()).param_groups[0]
    group = {key: named[key] for key in ("params", "param_names")}
    optimizer = comera.GaLoreAdamW([group])
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_groups_for_muon_are_for_muonadamw(model):
    def groups():
        return comera.param_groups(model, 1e-3, muon_modules="1")

    with pytest.raises(TypeError, match=r"no setting 'muon'; .* are made for comera.MuonAdamW"):
        comera.CAME(groups())
    with pytest.raises(ValueError, match=r"keys \['muon'\] .* are made for comera.MuonAdamW"):
        comera.GaLoreAdamW(groups())
    assert trained(model, comera.GaLore(groups(), comera.MuonAdamW))


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
