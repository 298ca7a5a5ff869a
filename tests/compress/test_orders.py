import copy

import pytest
import torch
from torch import nn

import comera
from comera.compress.allocate import CompressedLayer
from comera.compress.correct import better_train
from comera.compress.layer_moments import LayerMoments
from comera.compress.sensitivity import LayerSensitivity
from comera.compress.whitened import raised_loss, whitened_svd


def with_structure():
    """A layer whose weight is a short train, beside one whose weight is anything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with torch.no_grad():
        short = comera.TTLinear(64, 64, shape=((8, 8), (8, 8)), rank=[2, 16, 2])
        model[0].weight.copy_(short.dense_weight())
    return model


def loss_fn(model, x):
    return model(x).square().mean()


def batches():
    return list(torch.randn(2000, 64).split(250))


def test_a_train_is_taken_where_it_loses_less_than_two_factors_of_its_size():
    model, data = with_structure(), batches()
    small = copy.deepcopy(model)
    done = comera.compress_(small, data, budget=0.25, loss_fn=loss_fn, order="auto")
    by_name = {layer.name: layer for layer in done.layers}
    assert by_name["0"].order in (2, 3)
    assert by_name["2"].order == 1
    for layer in done.layers:
        module = small.get_submodule(layer.name)
        assert layer.params == sum(p.numel() for p in (*module.cores, *module.gates))
        assert layer.rank in module.ranks
    plain = copy.deepcopy(model)
    two = comera.compress_(plain, data, budget=0.25, loss_fn=loss_fn)
    assert done.params <= two.params
    x = torch.randn(500, 64)
    with torch.no_grad():
        apart = [float((m[0](x) - model[0](x)).norm()) for m in (small, plain)]
    assert apart[0] < 0.8 * apart[1]


@pytest.mark.parametrize("size", [(24, 60), (60, 24)])
def test_of_two_factors_the_loss_is_the_one_predicted(size):
    x, g = torch.randn(200, size[1]), torch.randn(200, size[0])
    of = LayerMoments(x.T @ x / 200, g.T @ g / 200, 200)
    weight = torch.randn(size)
    found = whitened_svd(weight, of)
    left, right = found.factors(9)
    assert raised_loss(weight - left @ right, of) == pytest.approx(found.loss(9), rel=1e-4)
    layer = LayerSensitivity("a", found, of)
    assert better_train(layer, CompressedLayer("a", 1440, 85 * 9, 9, found.loss(9))) is None


def test_what_is_wrong_is_named():
    model, data = with_structure(), batches()
    with pytest.raises(
        ValueError, match="order=3 must be 1, two factors for each layer, or 'auto'"
    ):
        comera.compress_(model, data, budget=0.25, loss_fn=loss_fn, order=3)
    found = comera.sensitivity(model, data, loss_fn=loss_fn)
    with pytest.raises(ValueError, match="moments that sensitivity did not keep: say order='auto'"):
        comera.compress_(model, found, budget=0.25, order="auto")
    found = comera.sensitivity(model, data, loss_fn=loss_fn, order="auto")
    assert comera.compress_(model, found, budget=0.25, order="auto").layers[0].order > 1
