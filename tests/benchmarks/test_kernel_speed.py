import re

import pytest
import torch

from benchmarks import kernels
from comera.ops.context import machine_of
from tests.benchmarks.calling import bench, results

KERNELS = ["--rank", "4", "--layers", "2", "--table", "60", "16", "--widths", "24:36", "40:20"]

KERNELS += ["--tokens", "9", "--indices", "20,50", "--repeats", "2", "--threads", "1"]

TITLES = [
    f"{title}, forward{also}"
    for title in (
        "contract the cores of 4 layers, rank 4",
        "look up 20 rows of 60 x 16, rank 4",
        "look up 50 rows of 60 x 16, rank 4",
        "linear 24 -> 36, rank 4, 9 tokens",
        "linear 40 -> 20, rank 4, 9 tokens",
        "feed-forward 24 -> 36 -> 24, rank 4, 9 tokens",
        "gated feed-forward 24 -> 36 -> 24, rank 4, 9 tokens",
        "attend with 12 heads on shared keys of 8, 1 x 9",
    )
    for also in ("", " + backward")
]


def titles_in(table):
    _, _, *rows = [line for line in table.read_text().splitlines() if line.startswith("|")]
    return [row.strip("| ").split(" | ")[0] for row in rows]


def test_kernels_stand_beside_plain_torch_and_their_floors(tmp_path, capsys):
    out, table = tmp_path / "out.json", tmp_path / "tables" / "kernels.md"
    assert bench("kernels", *KERNELS, f"--json={out}", f"--markdown={table}") == 0
    measured = results(out)
    assert [one["title"] for one in measured] == titles_in(table) == TITLES
    heading, _, machine, _, columns, rule, *rows = table.read_text().splitlines()
    assert re.fullmatch(r"# Operators beside plain torch, \d{4}-\d\d-\d\d", heading)
    assert "threads 1, torch" in machine
    assert columns.count("|") == rule.count("|") == 7
    for row, title, one in zip(rows, TITLES, measured, strict=True):
        name, ours, plain, ratio, floor, over = row.strip("| ").split(" | ")
        assert name == title
        times = {k: float(v.replace(",", "")) for k, v in (("comera", ours), ("plain", plain))}
        assert times["comera"] == pytest.approx(
            1e3 * one["summary"]["comera"]["median_ms"], rel=0.1, abs=0.1
        )
        assert float(ratio) == pytest.approx(times["plain"] / times["comera"], rel=0.1, abs=0.1)
        assert float(floor.replace(",", "")) == pytest.approx(1e6 * one["floor"], abs=0.06)
        assert float(over) > 1
    shown = capsys.readouterr().out
    assert shown.count("agrees with plain torch") == len(TITLES)
    assert "comera / floor" in shown


def test_the_floor_of_a_linear_layer_is_that_of_its_batch(tmp_path):
    """Each number read and written once: x and y, then dy, x and dx."""
    out = tmp_path / "out.json"
    options = ["--only", "linear", "--widths", "768:3072", "--tokens", "64", "--repeats", "1"]
    assert bench("kernels", *options, f"--json={out}") == 0
    forward, both = (one["floor"] for one in results(out))
    machine = machine_of(torch.device("cpu"))
    bytes_of = 64 * 4 * (768 + 3072), 64 * 4 * (2 * (768 + 3072) + 768)
    flops = 2 * 64 * 32 * (768 + 3072)
    for floor, nbytes, operations in (
        (forward, bytes_of[0], flops),
        (both, bytes_of[1], 3 * flops),
    ):
        expected = max(nbytes / machine.bandwidth, operations / machine.rate("float32"))
        assert floor == pytest.approx(expected)


def test_a_wrong_operator_is_not_timed(monkeypatch, capsys):
    right = kernels.factorized_linears
    monkeypatch.setattr(
        kernels, "factorized_linears", lambda *arguments: [1.01 * y for y in right(*arguments)]
    )
    assert bench("kernels", *KERNELS, "--only", "linear") == 1
    assert "is not timed: it disagrees with plain torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "contract", "look"], "only='look' must be some of contract, lookup, linear"),
        (["--widths", "768"], "must be pairs of widths, such as 768:3072"),
        (["--tokens", "many"], "tokens='many' must be whole numbers"),
        (["--rank", "0"], "rank=0 must be at least 1"),
        (["--table", "60", "0"], "table=0 must be at least 1"),
    ],
)
def test_bad_options_of_kernels_are_refused(options, message, capsys):
    assert bench("kernels", *KERNELS, *options) == 1
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_are_replayed_on_a_gpu(tmp_path, dtype):
    table = tmp_path / "kernels.md"
    options = ["--device", "cuda", "--dtype", dtype, f"--markdown={table}"]
    assert bench("kernels", *KERNELS, *options) == 0
    assert titles_in(table) == TITLES
