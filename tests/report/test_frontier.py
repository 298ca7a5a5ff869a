import math

import pytest

from comera.report.frontier import (
    Front,
    FrontPoint,
    Training,
    chosen_rates,
    is_higher_better,
    points_of,
)


def point(name, quality, size, compressed=False, error=None, family="narrower", **more):
    return FrontPoint(
        name, family, compressed, quality, error, params=size // 4, bytes=size, **more
    )


GIVEN = point("given", 2.0, 4000, family="given", memory=900.0, step_seconds=0.4)
POINTS = (
    GIVEN,
    point("narrower", 1.0, 2000, memory=500.0, step_seconds=0.2),
    point("blocks", 1.01, 1000, True, memory=800.0, step_seconds=0.3),
    point("tiny", 3.0, 500, memory=400.0, step_seconds=0.1),
    point("small", 2.5, 400, True, memory=700.0, step_seconds=0.35),
)


def test_the_answer_names_best_smallest_and_who_leads_where():
    best, as_given, smallest, sizes, *leads = Front(POINTS).answer()
    assert (
        best
        == "Best: narrower, loss 1.000, 500 parameters. As given: loss 2.000, 1,000 parameters."
    )
    assert as_given == (
        "Smallest as good as given: blocks, loss 1.010, 250 parameters; 4.0x smaller on disk."
    )
    assert smallest == (
        "Smallest within 2% of the best: blocks, loss 1.010, 250 parameters; 2.0x smaller on disk "
        "than the best."
    )
    assert sizes == (
        "Best at each size on disk: 400 B small (2.500), 0.977 KiB blocks (1.010), 1.95 KiB "
        "narrower (1.000)."
    )
    assert leads == [
        "Compressed models lead below 500 parameters, 1.95 KiB on disk; dense models lead from "
        "there.",
        "Dense models lead, whatever the limit on memory of training, seconds of a step.",
        "One seed each: no errors are known, and small differences may be chance.",
    ]


def test_models_within_their_errors_are_level():
    near = [point("narrower", 1.0, 2000, error=0.02), point("blocks", 1.04, 1000, True, 0.02)]
    front = Front((GIVEN, *near))
    assert "Level with the best within its error: blocks." in front.answer()[0]
    assert any(
        "models are below 500 parameters, 1.95 KiB on disk; both sides are level" in said
        for said in front.answer()
    )
    far = Front((GIVEN, near[0], point("blocks", 1.06, 1000, True, 0.02)))
    assert "Level" not in far.answer()[0]
    assert any("disk; dense models lead from there" in said for said in far.answer())


def test_higher_is_better_if_said():
    points = [point("given", 0.7, 4000, family="given"), point("blocks", 0.75, 1000, True)]
    front = Front(tuple(points), "accuracy", higher=True)
    assert front.best().name == "blocks"
    assert [p.name for p in front.pareto("bytes")] == ["blocks"]
    assert "accuracy 75.0 %" in front.answer()[0]
    cells = [line.split("│")[1].strip() for line in str(front).splitlines() if "│" in line]
    assert cells == ["* blocks", "given"]


def test_costs_that_were_not_measured_leave_a_point_out_of_their_panel():
    eight = point("given-8-bits", 2.0, 1000, family="8-bits")
    front = Front((*POINTS, eight))
    assert "given-8-bits" not in [p.name for p in front.pareto("memory")]
    assert len(front.panel("memory").dots["dense"]) == 3
    assert len(front.panel("bytes").dots["dense"]) == 4
    figure = front.plot(costs=["params", "bytes", "memory", "step_seconds"])
    drawn = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_xlabel() for axes in drawn] == [
        "parameters", "bytes on disk", "memory of training", "seconds of a step",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="costs holds 'size'"):
        front.plot(costs=["size"])
    with pytest.raises(ValueError, match="no point has such a cost"):
        Front(()).plot()
    assert Front(()).answer() == ["No variant has been trained."]


def test_a_line_is_flat_up_to_where_a_better_one_is():
    panel = Front(POINTS).panel("bytes")
    assert panel.lines["dense"] == [(500, 3.0), (2000, 1.0), (4000, 1.0)]
    assert panel.lines["compressed"] == [(400, 2.5), (1000, 1.01), (4000, 1.01)]


def test_plotly_shows_one_cost_at_a_time():
    pytest.importorskip("plotly")
    figure = Front(POINTS).plot("plotly", ["bytes", "memory"])
    assert [trace.visible for trace in figure.data] == [True] * 4 + [False] * 4
    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["bytes on disk", "memory of training"]
    assert menu.buttons[1].args[0]["visible"] == [False] * 4 + [True] * 4
    assert any("<b>blocks</b>" in text for trace in figure.data for text in trace.text or ())


def trained(variant, rate, seed, dev, test=None):
    costs = {"params": 10, "bytes": 40, "steps": 100 + seed}
    return Training(variant, "blocks", True, rate, seed, dev, test, costs)


def test_rates_are_chosen_by_development_data_and_means_are_of_test_data():
    runs = [
        trained("a", 0.1, 0, 1.0, 9.0), trained("a", 0.2, 0, 2.0, 1.0),
        trained("a", 0.1, 1, 1.5, 7.0),
        trained("b", 0.1, 0, math.nan, math.nan), trained("b", 0.2, 0, 3.0, 4.0),
        trained("c", 0.1, 0, math.nan, math.nan),
    ]  # fmt: skip
    assert chosen_rates(runs, higher=False) == {"a": 0.1, "b": 0.2}
    a, b = points_of(runs, higher=False)
    assert (a.quality, a.seeds, a.rate, a.steps) == (8.0, 2, 0.1, 100.5)
    assert a.error == pytest.approx(1.0)  # variance 2, of two seeds
    assert b.error == pytest.approx(4 / 8 * math.sqrt(2))  # as large a share of its mean
    plain = points_of([run for run in runs if run.rate == 0.1 and run.variant == "a"], True)
    assert [p.error for p in plain] == [pytest.approx(1.0)]
    assert (b.quality, b.note) == (4.0, "diverged at rate 0.1, seed 0")
    assert chosen_rates(runs, higher=True) == {"a": 0.2, "b": 0.2}
    assert [p.error for p in points_of(runs[:2], False)] == [None]


def test_who_is_as_small_is_chosen_by_quality():
    even = [point("table", 1.01, 401, True), point("fewer", 1.02, 400), point("wide", 1.0, 800)]
    front = Front((GIVEN, *even))
    assert front.smallest(0.05).name == "table"
    assert [each.name for each in front.pareto("bytes")] == ["table", "wide"]
    assert not any("Only" in said for said in front.answer())


def test_a_model_that_made_few_steps_is_named():
    few = [point("given", 2.0, 4000, family="given", steps=40), point("narrow", 1.0, 900, steps=90)]
    said = "In these seconds the model as given made 40 steps, narrow 90: with more seconds another"
    assert any(each.startswith(said) for each in Front(tuple(few)).answer())
    assert not any("made" in each for each in Front((few[1], few[0])).answer())


@pytest.mark.parametrize(
    ("metric", "higher"),
    [("accuracy", True), ("test AUC", True), ("f1_macro", True), ("loss", False), ("map", True)],
)
def test_names_of_metrics_tell_which_end_is_better(metric, higher):
    assert is_higher_better(metric) == higher


def test_a_front_of_nothing_says_why():
    front = Front((), left_out={"given": "given: RuntimeError: no"})
    assert str(front).split("\n") == [
        "No variant has been trained, for the reasons below.", "left out: given: RuntimeError: no",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no variant has been trained: left out: given: Runtime"):
        front.smallest()
    with pytest.raises(ValueError, match="name='x' is no variant"):
        front.load("x")
