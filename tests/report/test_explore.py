import copy
import dataclasses
import json
import logging
import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch import nn
from torch.nn import functional as F

import comera
from comera.report.explore import WHOLE, Exploration, Point


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@torch.no_grad()
def loss_of(model, batch):
    return float(loss_fn(model.eval(), batch))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    batches = [(torch.randn(32, 24), torch.randn(32, 24)) for _ in range(4)]
    return model, batches


@pytest.fixture
def evaluate(trained):
    def evaluate(model):
        evaluate.calls += 1
        return loss_of(model, trained[1][0])

    evaluate.calls = 0
    return evaluate


CONFIGS = [
    comera.TTConfig(compression=2, order=order, target_modules="all-linear") for order in (1, 2)
]


def test_budgets_are_what_compress_makes_and_the_model_stays(trained, evaluate):
    model, batches = trained
    before = copy.deepcopy(model.state_dict())
    explored = comera.explore(model, evaluate, batches, budgets=(0.8, 0.5), loss_fn=loss_fn)
    assert [point.setting for point in explored.points] == ["dense", "budget=0.8", "budget=0.5"]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for point in explored.points[1:]:
        small = copy.deepcopy(model)
        done = comera.compress_(small, batches, budget=float(point.setting[7:]), loss_fn=loss_fn)
        assert point.loss == pytest.approx(loss_of(small, batches[0]))
        assert (point.params, point.bytes) == (done.params, done.bytes)
        assert point.ratio == pytest.approx(1 / done.share)
        assert point.predicted_loss == pytest.approx(sum(layer.loss for layer in done.layers))
        assert point.order == 1
        assert point.predicted_seconds > 0
        assert point.measured_seconds > 0


def test_times_are_predicted_at_the_rows_of_a_batch_of_calibration(trained, evaluate):
    model, batches = trained
    for tokens, rows in ((None, 32), (7, 7)):
        explored = comera.explore(
            model, evaluate, batches, budgets=(0.5,), loss_fn=loss_fn, tokens=tokens
        )
        assert explored.points[1].tokens == rows
        assert f"times at {rows} rows a batch" in explored.tables()[0].title
        small = copy.deepcopy(model)
        comera.compress_(small, batches, budget=0.5, loss_fn=loss_fn)
        seconds = comera.plan(small, tokens=rows).seconds
        assert explored.points[1].predicted_seconds == pytest.approx(seconds)
    assert comera.explore(model, evaluate, configs=CONFIGS[:1]).points[1].tokens == 4096


def test_configurations_are_what_tensorize_makes(trained, evaluate, caplog):
    model, _ = trained
    explored = comera.explore(model, evaluate, configs=CONFIGS)
    assert [point.order for point in explored.points] == [None, 1, 2]
    assert not caplog.records
    for point, config in zip(explored.points[1:], CONFIGS, strict=True):
        small = copy.deepcopy(model)
        comera.tensorize_(small, comera.TTConfig(**{**vars(config), "init": "svd"}))
        assert point.params == sum(param.numel() for param in small.parameters())
        assert point.loss == pytest.approx(loss_of(small, trained[1][0]))
        weights = [(small[k].weight.detach(), model[k].weight.detach()) for k in (0, 2)]
        off = sum(float((new - old).square().sum()) for new, old in weights)
        whole = sum(float(old.square().sum()) for _, old in weights)
        assert point.error == pytest.approx((off / whole) ** 0.5, rel=1e-4)
        assert "approximates the weights" in point.note  # what it said is in the table
    logging.getLogger("comera").warning("heard")
    assert "heard" in caplog.text  # afterwards all is logged as before


@pytest.mark.parametrize("kind", [np.array, torch.tensor, iter])
def test_budgets_and_configurations_are_listed_in_any_way(kind, trained, evaluate):
    model, batches = trained
    found = comera.sensitivity(model, batches, loss_fn=loss_fn)
    explored = comera.explore(
        model, evaluate, found, budgets=kind([0.5, 0.75]), configs=iter(CONFIGS[:1])
    )
    settings = [point.setting for point in explored.points]
    assert settings[:3] == ["dense", "budget=0.5", "budget=0.75"]
    assert len(settings) == explored.planned == 4
    assert not any(point.note.startswith("ValueError") for point in explored.points)


def test_points_are_kept_in_a_folder_of_the_user(trained, evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    comera.explore(trained[0], evaluate, configs=CONFIGS[:1], keep="~/points.json")
    assert (tmp_path / "points.json").exists()


def test_blocks_are_a_configuration_without_an_order(trained, evaluate):
    config = comera.TTConfig(linear_format="btt", rank=1, target_modules="all-linear")
    explored = comera.explore(trained[0], evaluate, configs=[config])
    point = explored.points[1]
    assert (point.setting, point.order) == ("rank=1, linear_format='btt'", None)
    assert 0 < point.error < 1


def test_tensor_trains_are_no_blocks_where_orders_differ_between_layers():
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    configs = [comera.TTConfig(order=2, rank=4), comera.TTConfig(linear_format="btt", rank=1)]
    explored = comera.explore(model, lambda small: 1.0, configs=configs)
    assert [point.order for point in explored.points] == [None] * 3
    assert [point.kind for point in explored.points] == ["dense", "order 2", "blocks"]


@pytest.mark.parametrize(
    ("order", "rank", "ranks"), [(1, 4, "4"), (1, [3], "3 to 4"), (2, [4, 4, 4], "4")]
)
def test_ranks_are_written_once_where_all_are_of_one_size(order, rank, ranks):
    model = nn.Sequential(nn.Embedding(60, 24), nn.Linear(24, 40))
    config = comera.TTConfig(order=order, rank=rank, embedding_rank=4, embedding_order=2)
    explored = comera.explore(model, lambda model: 1.0, configs=[config])
    assert explored.points[1].ranks == ranks


def test_layers_are_tried_alone_too(trained, evaluate):
    model, batches = trained
    explored = comera.explore(
        model, evaluate, batches, budgets=(0.5,), configs=CONFIGS[:1], loss_fn=loss_fn,
        each_layer=True,
    )  # fmt: skip
    frame = explored.to_pandas().set_index(["setting", "layer"])
    assert len(frame) == 7
    whole = sum(param.numel() for param in model.parameters())
    for name in ("0", "2"):
        for setting in ("budget=0.5", "order=1, compression=2"):
            saved = whole - frame.loc[(setting, name), "params"]
            assert saved == pytest.approx(24 * 40 / 2, abs=65)
            assert frame.loc[(setting, name), "error"] > 0


def test_a_budget_of_one_layer_that_is_too_small_is_told_the_smallest(trained, evaluate):
    model, batches = trained
    found = comera.sensitivity(model, batches, loss_fn=loss_fn)
    for budget, note in ((0.01, "ValueError: budget=0.01: "), (65 / 960, "")):
        explored = comera.explore(model, evaluate, found, budgets=[budget], each_layer=True)
        for point in explored.points[2:]:
            assert point.note.startswith(note)
            assert (f"budget={math.ceil(1e4 * 65 / 960) / 1e4} is" in point.note) == bool(note)
            assert point.ranks == ("" if note else "1")


def test_budgets_for_some_layers_say_so(trained, evaluate):
    model, batches = trained
    explored = comera.explore(
        model, evaluate, batches, budgets=(0.8,), loss_fn=loss_fn, target_modules=["2"]
    )
    assert explored.points[1].setting == "budget=0.8, target_modules=['2']"


def test_points_of_other_layers_that_sensitivity_looked_at_are_others(trained, evaluate, tmp_path):
    model, batches = trained
    file = tmp_path / "points.json"
    settings, params = [], []
    for targets in (["2"], "all-linear", ["0"], "all"):
        found = comera.sensitivity(model, batches, loss_fn=loss_fn, target_modules=targets)
        explored = comera.explore(model, evaluate, found, budgets=(0.8,), keep=file)
        settings.append(explored.points[1].setting)
        params.append(explored.points[1].params)
        small = copy.deepcopy(model)
        assert comera.compress_(small, found, budget=0.8).params == params[-1]
    assert settings == [
        "budget=0.8, target_modules=['2']", "budget=0.8", "budget=0.8, target_modules=['0']",
        "budget=0.8",  # there is no table
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"target_modules=\['0'\]: with what sensitivity found"):
        comera.explore(model, evaluate, found, budgets=(0.8,), target_modules=["0"])


def test_what_fails_is_noted_and_the_others_go_on(trained, evaluate):
    model, batches = trained

    def picky(model):
        if sum(param.numel() for param in model.parameters()) < 1000:
            raise RuntimeError("too small")
        return evaluate(model)

    explored = comera.explore(model, picky, batches, budgets=("9GB", 0.8, 0.4), loss_fn=loss_fn)
    _, large, fine, small = explored.points
    assert large.note.startswith("ValueError: budget='9GB' is no less")
    assert small.note == "RuntimeError: too small"
    assert small.params < 1000
    assert fine.loss is not None
    assert "2 of 4 points have a loss, 2 failed" in str(explored)
    with pytest.raises(ValueError, match="evaluate gave nan"):
        comera.explore(model, lambda model: float("nan"), configs=CONFIGS)


def test_a_file_is_gone_on_from_and_failures_are_tried_again(trained, evaluate, tmp_path):
    model, _ = trained
    file = tmp_path / "points.json"
    fails = [True]

    def sometimes(model):
        if isinstance(model[0], comera.TTLinear) and len(model[0].cores) == 4 and fails[0]:
            raise RuntimeError("not now")
        return evaluate(model)

    first = comera.explore(model, sometimes, configs=CONFIGS, keep=file)
    assert [point.loss is None for point in first.points] == [False, False, True]
    assert evaluate.calls == 2
    fails[0] = False
    again = comera.explore(model, sometimes, configs=CONFIGS, keep=file)
    assert evaluate.calls == 3
    assert again.points[:2] == first.points[:2]
    assert again.points[2].loss is not None
    with pytest.raises(ValueError, match=r"is of tokens=None, not 8"):
        comera.explore(model, evaluate, configs=CONFIGS, keep=file, tokens=8)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    with pytest.raises(ValueError, match="is of another model or other weights"):
        comera.explore(other, evaluate, configs=CONFIGS, keep=file)
    with torch.no_grad():
        other[0].weight.copy_(model[0].weight)
    other.register_buffer("shift", torch.zeros(1))
    with pytest.raises(ValueError, match="is of another model or other weights"):
        comera.explore(other, evaluate, configs=CONFIGS, keep=file)
    file.write_text(json.dumps({"points": []}))
    with pytest.raises(ValueError, match="is no file of explore"):
        comera.explore(model, evaluate, configs=CONFIGS, keep=file)


def test_ctrl_c_leaves_what_was_measured(trained, evaluate, caplog):
    def interrupted(model):
        if evaluate.calls == 2:
            raise KeyboardInterrupt
        return evaluate(model)

    explored = comera.explore(trained[0], interrupted, configs=CONFIGS)
    assert len(explored.points) == 2
    assert "2 of 3 points have a loss" in explored.summary()
    assert "broken off; 2 points are measured" in caplog.text


def test_wrong_settings_are_named(trained, evaluate):
    model, batches = trained
    with pytest.raises(ValueError, match=r"budgets=\[0.5\] needs calibration"):
        comera.explore(model, evaluate, budgets=(0.5,))
    with pytest.raises(ValueError, match="there is nothing to try"):
        comera.explore(model, evaluate, configs=[])
    with pytest.raises(ValueError, match="there is nothing to try"):
        comera.explore(model, evaluate, batches, budgets=(), loss_fn=loss_fn)
    alone = comera.explore(nn.Linear(8, 8), lambda model: 0.0, configs=CONFIGS[:1])
    assert "the model is itself the layer" in alone.points[1].note
    with pytest.raises(ValueError, match="init='normal' draws new weights"):
        comera.explore(model, evaluate, configs=[comera.TTConfig(init="normal")])
    with pytest.raises(TypeError, match="configs holds 3"):
        comera.explore(model, evaluate, configs=[3])
    with pytest.raises(ValueError, match="tokens=0"):
        comera.explore(model, evaluate, batches, tokens=0)
    with pytest.raises(ValueError, match=r"tokens=2\.5 must be a whole number"):
        comera.explore(model, evaluate, batches, tokens=2.5)


# ── the table ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def explored():
    made = [
        ("dense", WHOLE, 100, 1.0),
        ("budget=0.5", WHOLE, 50, 1.005),
        ("budget=0.4", WHOLE, 40, 2.0),
    ]
    made += [("order=2, compression=2", WHOLE, 50, 3.0), ("order=2, compression=2", "a", 70, 1.2)]
    points = [
        Point(
            setting, layer, order=1, params=params, bytes=4 * params, ratio=100 / params, loss=loss
        )
        for setting, layer, params, loss in made
    ]
    return Exploration((*points, Point("budget=0.01", note="out of reach")), 7)


def test_the_front_has_no_point_that_another_beats(explored):
    front = explored.pareto().points
    assert [(point.params, point.loss) for point in front] == [(100, 1.0), (50, 1.005), (40, 2.0)]
    for point in explored.points[:-1]:
        assert any(one.params <= point.params and one.loss <= point.loss for one in front)
    frame = explored.to_pandas()
    assert len(frame) == 6
    assert frame["loss"].isna().sum() == 1


def test_it_prints(explored):
    text = str(explored)
    assert "* budget=0.5" in text
    cells = [line.split("│")[-3].strip() for line in text.splitlines() if "x │" in line]
    assert cells == ["1.000", "1.005", "2.000", "3.000", "1.200"]
    assert "failed: budget=0.01: out of reach" in text
    assert max(len(line) for line in text.splitlines() if "│" in line) <= 80
    assert "5 of 7 points have a loss, 1 failed" in text
    assert "budget=0.5, whole model, 2.00x smaller, 1.005" in text
    assert explored._repr_html_().count("<tr>") == 7


@pytest.mark.parametrize("times", [1, 12_345])
def test_a_still_picture_names_settings_and_nothing_touches(explored, times, tmp_path):
    points = [
        dataclasses.replace(point, params=times * point.params, loss=5.15 + 1e-4 * point.loss)
        for point in explored.points[:-1]
    ]
    figure = dataclasses.replace(explored, points=tuple(points)).plot()
    (axes,), (legend,) = figure.axes, figure.legends
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["dense", "budget", "order 2", "order 2, one layer", "Pareto front"]
    assert {text.get_text() for text in axes.texts} == {"0.5", "0.4", "compression=2"}
    figure.canvas.draw()
    assert not legend.get_window_extent().overlaps(axes.bbox)
    assert not axes.yaxis.get_offset_text().get_text()  # ticks say the whole loss
    ticks = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    assert not any(one.overlaps(other) for one, other in pairwise(ticks))
    for one, other in combinations([Text.get_window_extent(text) for text in axes.texts], 2):
        assert not one.overlaps(other)
    figure.savefig(tmp_path / "picture.png")
    with pytest.raises(ValueError, match="library='gnuplot' must be"):
        explored.plot("gnuplot")
    with pytest.raises(ValueError, match="none of 1 points has a loss"):
        Exploration((Point("dense"),), 1).plot()


def test_it_draws_a_picture_to_zoom_into_if_asked(explored):
    plotly = pytest.importorskip("plotly.graph_objects")
    figure = explored.plot("plotly")
    assert isinstance(figure, plotly.Figure)
    front, *groups = figure.data
    assert list(front.x) == [40, 50, 100]
    assert sum(len(group.x) for group in groups) == 5
    assert "<b>budget=0.5</b>" in groups[1].text[0]
