import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6, bias=False))
    batches = [(torch.randn(64, 12), torch.randn(64, 6)) for _ in range(4)]
    return model, comera.sensitivity(model, batches, loss_fn=loss_fn)


def test_the_loss_by_rank_is_that_of_the_error_under_the_moments(seen):
    model, found = seen
    frame = found.to_pandas(shares=[0.1, 0.4, 0.8, 1.0])
    assert list(frame) == ["layer", "share", "rank", "loss", "params", "bytes"]
    for name, rows in frame.groupby("layer"):
        size = model.get_submodule(name).weight.numel()
        each = sum(model.get_submodule(name).weight.shape) + 1
        assert rows["rank"].is_monotonic_increasing
        assert rows["loss"].is_monotonic_decreasing
        assert (rows["params"] == rows["rank"] * each).all()
        assert (rows["bytes"] == 4 * rows["params"]).all()
        assert (rows["share"] * size == rows["params"]).all()
    chosen = {layer.name: layer for layer in found.choose(0.6)}
    curve = frame.set_index(["layer", "rank"])["loss"]
    for (name, rank), loss in curve.items():
        if chosen[name].rank == rank:
            assert chosen[name].loss == loss


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_at_its_minimum_is_named(seen, exact, caplog):
    model, _ = seen
    batches = [(x, model(x).detach() + (0 if exact else 1e-6)) for x in torch.randn(2, 64, 12)]
    comera.compress_(copy.deepcopy(model), batches, budget=0.8, loss_fn=loss_fn)
    assert "tells no layers apart. Take labels" in caplog.text
    caplog.clear()

    def projected(model, batch):
        outputs = model(batch[0])
        return (outputs * torch.randn_like(outputs)).sum(-1).mean()

    comera.compress_(copy.deepcopy(model), batches, budget=0.8, loss_fn=projected)
    assert not caplog.text


def test_spectra_are_the_singular_values_of_the_weight_and_of_what_matters(seen):
    model, found = seen
    frame = found.spectra()
    for name, rows in frame.groupby("layer"):
        values = torch.linalg.svdvals(model.get_submodule(name).weight.detach().double())
        torch.testing.assert_close(torch.tensor(rows["plain"].values), values)
        squares = torch.tensor(rows["whitened"].values).square()
        layer = next(one for one in found.layers if one.name == name)
        torch.testing.assert_close(squares / 2, layer.whitened.losses_K)


def test_it_prints(seen):
    _, found = seen
    assert "loss at 25%" in str(found)
    assert "2 layers with 360 of 380 parameters" in found.summary()
    assert found._repr_html_().count("<tr>") == 3
    losses = [line.split("│")[4].strip() for line in str(found).splitlines() if " to " in line]
    assert len({len(loss) for loss in losses}) == 1  # one precision


@pytest.mark.parametrize("count", [2, 60, 130])
def test_a_picture_has_a_row_for_each_layer_by_kind_and_depth(seen, count):
    layers = [
        replace(seen[1].layers[k % 2], name=f"blocks.{k // 2}.{'ab'[k % 2]}") for k in range(count)
    ]
    figure = replace(seen[1], layers=tuple(layers)).plot()
    *axes, _ = figure.axes
    assert [ax.images[0].get_array().shape for ax in axes] == [(count, 100)]
    figure.canvas.draw()
    labels = axes[0].get_yticklabels()
    named = [f"blocks.{k}.{kind}" for kind in "ab" for k in range(count // 2)]
    assert [label.get_text() for label in labels] == named[:: 1 if count < 100 else 2]
    boxes = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    bar = figure.axes[-1].yaxis.label.get_window_extent()
    assert all(figure.bbox.contains(*box.p0) for box in [*boxes, bar])
    assert figure.bbox.contains(*bar.p1)


def test_colours_span_what_is_there(seen):
    _, found = seen
    image = found.plot().axes[0].images[0]
    losses = found.to_pandas(shares=[k / 200 for k in range(1, 200)])["loss"]
    assert image.norm.vmax == pytest.approx(losses.max())
    assert losses.min() / 2 < image.norm.vmin < losses.median()
    assert image.get_array().mask[:, 0].all()  # less than one rank
    nothing = replace(found.layers[0].whitened, losses_K=torch.zeros(12))
    dead = replace(found, layers=(replace(found.layers[0], whitened=nothing),))
    dead.plot().canvas.draw()


def test_another_default_device_draws_the_same_picture(seen):
    _, found = seen
    with torch.device("meta"):
        other = found.plot().axes[0].images[0]
    assert (other.get_array() == found.plot().axes[0].images[0].get_array()).all()


def test_the_least_size_counts_a_layer_dense_where_that_is_smaller():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 1, bias=False))
    batches = [(torch.randn(64, 12), torch.randn(64, 1)) for _ in range(2)]
    found = comera.sensitivity(model, batches, loss_fn=loss_fn)
    least = found.least()
    assert least == (12 + 20 + 1) + 20 + 20  # rank one with its gate, the bias, the dense weight
    assert found.least(in_bytes=True) == 4 * least
    chosen = found.choose((least + 0.5) / found.model_params)
    assert [layer.rank for layer in chosen] == [1, None]


def test_what_is_chosen_prints_as_a_table(seen):
    _, found = seen
    made = found.choose(0.7)
    assert isinstance(made, tuple)
    text = repr(made)
    for layer in made:
        assert f"│ {layer.name} " in text
    assert "CompressedLayer(" not in text
    now = sum(layer.params for layer in made)
    assert text.splitlines()[-1].startswith(f"2 layers: {now:,} parameters of 360, ")
    assert made._repr_html_().count("<tr>") == 3
    assert list(made.to_pandas()["rank"].isna()) == [layer.rank is None for layer in made]
