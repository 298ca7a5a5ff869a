"""Against the Adafactor of galore-torch, on the gradients of a small transformer."""

import io
import pickle

import pytest
import torch
from torch import nn

from comera.optim.galore import GaLoreAdafactor
from tests.optim.test_galore import backward, bases_by_svd, groups, make_model, train_alike
from tests.peers import peer


@pytest.fixture
def theirs():
    package = peer("galore_torch")

    def make(listed, lr):
        return package.GaLoreAdafactor(listed, lr=lr, relative_step=False, scale_parameter=True)

    return make


def listed(model, lr, **settings):
    return [{**group, "lr": lr} for group in groups(model, **settings)]


@pytest.mark.slow
@pytest.mark.parametrize("proj_type", ["std", "full"])
def test_trajectory_equals_that_of_galore_torch(theirs, proj_type, monkeypatch):
    """Once the randomized range finder has made way for the exact decomposition they take."""
    monkeypatch.setattr("comera.optim.galore.new_bases", bases_by_svd)
    a, b = make_model(), make_model()
    start = [p.detach().clone() for p in a.parameters()]
    other = theirs(listed(a, 1e-2, proj_type=proj_type), 1e-2)
    ours = GaLoreAdafactor(listed(b, 1e-2, proj_type=proj_type))
    train_alike(a, other, b, ours, 50)
    for mine, its, before in zip(b.parameters(), a.parameters(), start, strict=True):
        assert (mine - its).norm() <= 1e-3 * (its - before).norm()


def test_torchs_own_eps_loses_the_scale_of_small_gradients():
    """Which is why ours is another: the step of a tiny gradient is no longer its direction's."""
    moved = {}
    for scale in (1.0, 1e-6):
        for eps in ((1e-15, 1e-3), (None, 1e-3)):
            torch.manual_seed(0)
            param = nn.Parameter(torch.randn(20, 30))
            start = param.detach().clone()
            optimizer = GaLoreAdafactor([{"params": [param], "rank": 4}], lr=0.1, eps=eps)
            torch.manual_seed(1)
            param.grad = scale * torch.randn(20, 30)
            optimizer.step()
            moved[scale, eps[0]] = param.detach() - start
    torch.testing.assert_close(moved[1.0, 1e-15], moved[1e-6, 1e-15])
    torch.testing.assert_close(moved[1.0, 1e-15], moved[1.0, None])
    off = (moved[1e-6, None] - moved[1e-6, 1e-15]).norm() / moved[1e-6, 1e-15].norm()
    assert off > 0.1


def test_weight_decay_is_decoupled_where_theirs_depends_on_the_size_of_the_parameter(theirs):
    """Theirs multiplies the decay by the root mean square too: small parameters never decay."""
    small = 0.01 * torch.ones(20, 30)
    left = []
    for make in (theirs, GaLoreAdafactor):
        param = nn.Parameter(small.clone())
        group = {
            "params": [param], "rank": 4, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std",
            "weight_decay": 0.5,
        }  # fmt: skip
        optimizer = make([group], lr=0.1)
        param.grad = torch.zeros(20, 30)  # no step is taken, but the decay is
        optimizer.step()
        left.append(param.detach() / small)
    torch.testing.assert_close(left[0], torch.full((20, 30), 1 - 0.1 * 0.5 * 0.01))
    torch.testing.assert_close(left[1], torch.full((20, 30), 1 - 0.1 * 0.5))


def test_the_state_is_data_where_theirs_is_code(theirs):
    for make, fine in ((theirs, False), (GaLoreAdafactor, True)):
        model = make_model()
        optimizer = make(listed(model, 1e-2), lr=1e-2)
        backward(model, 0)
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        if fine:
            torch.load(file, weights_only=True)
        else:
            with pytest.raises(pickle.UnpicklingError, match="GaLoreProjector"):
                torch.load(file, weights_only=True)


def test_a_step_is_relative_to_the_whole_parameter_and_not_rounded_to_it():
    torch.manual_seed(0)
    grad = torch.randn(20, 30, dtype=torch.float64)
    moved = []
    for dtype in (torch.float32, torch.float64):
        param = nn.Parameter(torch.zeros(20, 30, dtype=dtype))
        optimizer = GaLoreAdafactor([{"params": [param], "rank": 4}], lr=1e-6)
        param.grad = grad.to(dtype)
        optimizer.step()
        moved.append(param.detach().double())
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-15)


def test_a_size_that_nothing_is_relative_to_is_refused():
    with pytest.raises(ValueError, match=r"eps=\(None, 0.0\) must have a second number above 0"):
        GaLoreAdafactor([{"params": [nn.Parameter(torch.ones(9, 8))], "rank": 4}], eps=(None, 0.0))
