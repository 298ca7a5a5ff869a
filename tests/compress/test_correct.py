import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
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


def test_a_compressed_model_is_the_corrected_one():
    model, batch = make_model(), data(8, 1)
    small, first = (copy.deepcopy(model) for _ in range(2))
    done = comera.compress_(small, batch, budget=0.5, loss_fn=loss_fn, correct=True)
    comera.compress_(first, batch, budget=0.5, loss_fn=loss_fn)
    rows = torch.cat(data(8, 2))
    with torch.no_grad():
        names = [layer.name for layer in done.layers if layer.rank is not None]
        last = nn.Sequential(*list(model)[: int(names[-1]) + 1])
        apart = [
            float((net[: len(last)](rows) - last(rows)).square().mean()) for net in (small, first)
        ]
    assert len(names) > 1
    assert apart[0] < apart[1]
    found = comera.sensitivity(model, batch, loss_fn=loss_fn)
    again = copy.deepcopy(model)
    comera.compress_(again, found, budget=0.5, loss_fn=loss_fn, correct=batch)
    for ours, theirs in zip(again.parameters(), small.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all("forward" not in vars(layer) for layer in model)


def test_a_layer_that_gets_other_rows_is_named(caplog):
    class Routed(nn.Module):
        """Sends to its second layer what is large after the first."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            hidden = self.first(x)
            return self.second(hidden[hidden[:, 0] > 0]).mean(0, keepdim=True).expand(len(x), 4)

    torch.manual_seed(0)
    model = Routed().bfloat16()
    batch = [rows.bfloat16() for rows in data(4, 1)]
    layers, fitted = fitted_layers(model, batch, {"first": 4, "second": 2})
    correct_factors(model, layers, fitted, batch, loss_fn)
    assert "did not correct second by all batches" in caplog.text
    assert all(bool(one.left_OR.isfinite().all()) for one in fitted.values())


def test_what_cannot_be_read_again_is_named():
    model, batch = make_model(), data(4, 1)
    with pytest.raises(ValueError, match="calibration of type list_iterator, which cannot be read"):
        comera.compress_(model, iter(batch), budget=0.5, loss_fn=loss_fn, correct=True)
    with pytest.raises(ValueError, match=r"max_loss=1\.0 is measured with two factors"):
        comera.compress_(model, batch, max_loss=1.0, loss_fn=loss_fn, correct=True)
    overflow = [torch.full((64, 16), 3e38)]
    with pytest.raises(ValueError, match="outputs of layers overflow"):
        comera.compress_(model, batch, budget=0.5, loss_fn=loss_fn, correct=overflow)
    with pytest.raises(ValueError, match="there is no batch to correct"):
        comera.compress_(model, batch, budget=0.5, loss_fn=loss_fn, correct=[])
    assert type(model[0]) is nn.Linear


def test_layers_are_corrected_alike_where_the_model_writes_into_what_they_return():
    made = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 24),
            nn.ReLU(inplace),
            nn.Linear(24, 24),
            nn.ReLU(inplace),
            nn.Linear(24, 4),
        )
        comera.compress_(model, data(4, 1), budget=0.6, loss_fn=loss_fn, correct=True)
        made.append(model.state_dict())
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


def test_under_autocast_layers_are_corrected_in_their_own_numbers():
    def narrow_loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(batch).float(), batch[:, :4])

    batches, ranks = data(8, 1), {"0": 8, "2": 8}
    found = []
    for loss in (loss_fn, narrow_loss):
        model = make_model()
        layers, fitted = fitted_layers(model, batches, ranks)
        correct_factors(model, layers, fitted, batches, loss)
        found.append([product(one) for one in fitted.values()])
    for wide, narrow in zip(*found, strict=True):
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow, wide, rtol=0.01, atol=0.003)
