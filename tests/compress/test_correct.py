import torch
from torch import nn
from torch.nn import functional as F

from comera.compress import correct as module
from comera.compress.correct import FittedLayer, correct_factors
from comera.compress.layer_moments import gather_moments
from comera.compress.whitened import whitened_svd


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)
    )


def loss_fn(model, batch):
    return F.mse_loss(model(batch), batch[:, :4])


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(64 * count, 16, generator=generator).split(64))


def fitted_layers(model, batches, ranks):
    layers = {name: model.get_submodule(name) for name in ranks}
    moments = gather_moments(model, layers, batches, loss_fn)
    return layers, {
        name: FittedLayer(layer, whitened_svd(layer.weight, moments[name]), ranks[name])
        for name, layer in layers.items()
    }


def test_factors_are_those_of_least_squares_on_what_layers_get_now():
    model, batch = make_model(), data(8, 1)
    rows = torch.cat(batch)
    layers, fitted = fitted_layers(model, batch, {"0": 5, "2": 8})
    first = {name: one.first_OR for name, one in fitted.items()}
    correct_factors(model, layers, fitted, [rows], loss_fn)
    with torch.no_grad():
        hidden = torch.tanh(model[0](rows))
        # The first layer gets what it got before, the second what the first one now lets through.
        for name, x, wanted in (
            ("0", rows, rows @ model[0].weight.T),
            ("2", torch.tanh(rows @ product(fitted["0"]).T + model[0].bias),
             hidden @ model[2].weight.T),
        ):  # fmt: skip
            z = x @ fitted[name].right_RI.T
            rank = z.shape[1]
            prior = module._PRIOR_ROWS**0.5
            stacked = torch.cat([z, prior * torch.eye(rank)]).double()
            targets = torch.cat([wanted, prior * first[name].T]).double()
            expected = torch.linalg.lstsq(stacked, targets).solution.T.float()
            torch.testing.assert_close(fitted[name].left_OR, expected, rtol=1e-4, atol=1e-5)


def product(one):
    return one.left_OR @ one.right_RI
