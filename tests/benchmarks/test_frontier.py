import json
import subprocess

import pytest
from torch import nn

from benchmarks import frontier, session
from comera.nn.module import tensor_trains
from tests.benchmarks.calling import bench, measured
from tests.texts import write_functions


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Words of two models; this process measures them: a new one takes seconds to import."""

    def run(words, **_):
        if words[0] == "git":
            return subprocess.CompletedProcess(words, 0, "abc\n")
        assert words[1:3] == ["-m", "benchmarks.frontier"]
        found = frontier.measure(json.loads(words[3]))
        return subprocess.CompletedProcess(words, 0, json.dumps(found))

    monkeypatch.setattr(session.subprocess, "run", run)
    monkeypatch.setattr(frontier, "_TIMED", 0.1)
    write_functions(tmp_path / "text", 40, 60)
    where = [f"--text={tmp_path / 'text'}", f"--out={tmp_path / 'out'}", "--vocab=270"]
    models = ["--points", "dense:16x1", "blocks1:32x1", "--budgets", "1"]
    return ["frontier", *where, *models, "--rates", "1", "--seeds=1"]


@pytest.mark.slow
def test_points_are_measured_once_and_shown(words, tmp_path, capsys):
    assert bench(*words) == 0
    files = sorted((tmp_path / "out").glob("*/*.json"))
    parts = [file.name.split("-")[0] for file in files]
    assert parts == ["step", "step", "test", "test", "valid", "valid"]
    costs = {p["family"]: p for p in (json.loads(file.read_text()) for file in files[:2])}
    for point in (json.loads(file.read_text()) for file in files[2:]):
        cost = costs[point["family"]]["seconds"]
        assert point["steps"] == round(1 / cost)
        assert point["seconds"] == pytest.approx(1, abs=cost)
        assert point["tokens"] == 1024 * point["steps"]
        assert point["loss"] < 5
        assert point["trained"]["commit"] == point["timed"]["commit"] == "abc"
        table = 270 * point["width"]
        assert point["parameters"] - point["body"] == table
        if not point["compressed"]:
            numbers = table + 10 * 16**2 + 2 * 64 * 16
            assert point["operations"] == 6 * 1024 * numbers * point["steps"]
    times = [file.stat().st_mtime_ns for file in files]
    assert bench(*words) == 0
    assert [file.stat().st_mtime_ns for file in files] == times
    models, leads = measured(tmp_path, "frontier", f"--out={tmp_path / 'out'}", "--show")
    assert {row["model"] for row in models["rows"]} == {"dense 16x1, 1s", "blocks1 32x1, 1s"}
    assert len({row["budget, axis"] for row in leads["rows"]}) == len(frontier.AXES)
    assert (tmp_path / "out" / f"{files[0].parent.name}.png").read_bytes().startswith(b"\x89PNG")


def test_blocks_of_the_feed_forward_parts_leave_attention_to_muon():
    setting = frontier.settings_of("ffnblocks2:64x2")[0]
    model = frontier.make_model(setting, 270)
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is nn.Linear
    assert len(tensor_trains(layer.mlp)) == 3
    assert not tensor_trains(layer.self_attn)
    stepped = frontier._stepper(setting, model, 8).optimizer.param_groups
    muon = {id(p) for group in stepped if group["muon"] for p in group["params"]}
    assert muon == {id(p) for name, p in model.model.layers.named_parameters() if p.ndim > 1}


def test_a_point_that_another_process_measures_is_left_to_it(words, monkeypatch, capsys):
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(frontier.FileLock, "acquire", taken)
    assert bench(*words) == 0
    assert capsys.readouterr().out.count("is being measured by another process") == 2


def taken(lock, *_, **__):
    raise frontier.Timeout(lock.lock_file)


def point(family, seed, loss, seconds=1, part="test", **costs):
    compressed = family.startswith("blocks")
    about = {"family": family, "width": 8, "depth": 1, "budget": seconds, "compressed": compressed}
    return about | {
        "part": part, "seed": seed, "text": "t", "vocab": 9, "rate": 0.1, "steps": 1, "loss": loss,
        **{axis: costs.get(axis, 1) for axis in frontier.AXES},
    }  # fmt: skip


def test_leads_have_their_crossings_and_standard_errors(tmp_path):
    points = [point("dense", k, 3.0 + 0.1 * k, parameters=100) for k in (1, 2, 3)]
    points += [point("blocks1", k, 3.4 + 0.1 * k, parameters=20) for k in (1, 2, 3)]
    points += [point("blocks2", k, 2.6 + 0.1 * k, parameters=400) for k in (1, 2, 3)]
    points.append(point("dense", 4, None))
    for each in points:
        file = tmp_path / "out" / frontier._FILE.format(**each)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(each))
    models, leads = measured(tmp_path, "frontier", f"--out={tmp_path / 'out'}", "--show")
    assert [row["loss"] for row in models["rows"]] == pytest.approx([2.8, 3.2, 3.6])
    assert [row["error"] for row in models["rows"]] == pytest.approx([0.1 / 3**0.5] * 3)
    rows = [row for row in leads["rows"] if row["budget, axis"] == "1s, parameters"]
    found = [(row["from"], row["leads"], row["best rival"], row["errors"]) for row in rows]
    apart = pytest.approx(0.4 / 0.1 * 1.5**0.5)
    assert found == [
        ("20", "compressed", "none as cheap", None),
        ("100", "dense", "blocks1 8x1, 1s", apart),
        ("400", "compressed", "dense 8x1, 1s", apart),
    ]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--points", "dense4:16x1"], "points='dense4:16x1' must be as dense:64,96x2,4"),
        (["--points", "blocks4:16x1"], "blocks4 of width 16 would be no smaller than dense"),
        (["--text=nowhere"], "text=nowhere must be a folder or a file"),
        (["--show"], "has no points yet"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, more, problem, capsys):
    assert bench(*words, *more) == 1
    assert problem in " ".join(capsys.readouterr().err.split())
