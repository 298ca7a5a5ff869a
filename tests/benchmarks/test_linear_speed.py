import json

import pytest

from benchmarks.curve import Point, hits
from benchmarks.timing import Timings
from comera.nn.linear import TTLinear
from tests.benchmarks.calling import LAYER, bench, results
from tests.peers import peer


def test_linear_writes_its_times_and_settings(tmp_path, capsys):
    out = tmp_path / "out" / "linear.json"
    assert bench("linear", *LAYER, "--tokens", "20", "--threads", "1", f"--json={out}") == 0
    written = json.loads(out.read_text())
    assert written["machine"]["threads"] == 1
    assert written["machine"]["freed_memory"] == "kept"
    assert written["settings"]["tokens"] == ["20"]
    (result,) = written["results"]
    assert {"dense", "comera"} <= set(result["summary"])
    assert result["parameters"]["dense"] == 48 * 32 + 32
    assert all(len(values) == 2 for values in result["seconds"].values())
    shown = capsys.readouterr().out
    assert "TTLinear 48 -> 32 agrees with dense in float64" in shown
    assert "threads 1, torch" in shown


def test_tensorly_stands_beside_and_its_backend_is_restored(tmp_path):
    peer("tltorch")
    import tensorly

    before = tensorly.get_backend()
    out = tmp_path / "linear.json"
    assert bench("linear", *LAYER, "--tokens", "20", f"--json={out}") == 0
    (result,) = results(out)
    assert len([name for name in result["summary"] if name.startswith("tensorly-torch")]) == 2
    assert tensorly.get_backend() == before


def test_a_wrong_layer_is_not_timed(monkeypatch, tmp_path, capsys):
    right = TTLinear.forward
    monkeypatch.setattr(TTLinear, "forward", lambda self, x: right(self, x) + 0.01)
    out = tmp_path / "out.json"
    assert bench("linear", *LAYER, "--tokens", "20", f"--json={out}") == 1
    shown = capsys.readouterr().out
    assert "refused: TTLinear 48 -> 32 is not timed" in shown
    assert "Off are the output by" in shown
    assert "median" not in shown
    assert results(out) == []
    assert bench("linear", *LAYER, "--curve", "tokens", "--points", "4") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "axis", "at"),
    [
        (["--tokens", "1,8", "32"], "tokens", [1, 8, 32]),
        (["--curve", "rank", "--points", "2", "4", "--tokens", "8"], "rank", [2, 4]),
        (["--curve", "width", "--points", "16,32", "--tokens", "8"], "width", [16, 32]),
    ],
)
def test_curves_are_written_and_drawn(options, axis, at, tmp_path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "pictures" / "curve.png"
    assert bench("linear", *LAYER, *options, f"--json={out}", f"--plot={plot}") == 0
    (result,) = results(out)
    assert result["axis"] == axis
    assert [point["at"] for point in result["points"]] == at
    assert all(point["predicted_ratio"] > 0 for point in result["points"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "the planner named the winner at" in capsys.readouterr().out


def test_a_curve_that_is_interrupted_shows_what_there_is(monkeypatch, tmp_path, capsys):
    from benchmarks import curve

    right = curve.make_layers
    widths = []

    def stops(session, shape, rank, dtype):
        widths.append(shape)
        if len(widths) == 3:
            raise KeyboardInterrupt
        return right(session, shape, rank, dtype)

    monkeypatch.setattr(curve, "make_layers", stops)
    out = tmp_path / "out.json"
    options = ["--curve", "width", "--points", "16", "32", "48", "--tokens", "4"]
    assert bench("linear", *LAYER, *options, f"--json={out}") == 130
    assert [point["at"] for point in results(out)[0]["points"]] == [16, 32]
    assert "interrupted" in capsys.readouterr().out


def test_the_hit_rate_leaves_even_points_out():
    def point(ratios, predicted):
        return Point(1, Timings({"dense": ratios, "comera": [1.0] * 3}, "dense"), predicted)

    won, lost, even = point([2, 2, 3], 1.5), point([0.5, 0.5, 0.4], 1.1), point([0.9, 1, 1.1], 2)
    assert [p.winner for p in (won, lost, even)] == ["comera", "dense", "even"]
    assert hits([won, lost, even]) == (
        "the planner named the winner at 1 of 2 points (1 even left out)"
    )
