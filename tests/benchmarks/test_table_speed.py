import pytest

from tests.benchmarks.calling import bench, results
from tests.peers import peer

TABLE = ["--rows", "60", "--width", "16", "--indices", "24", "--rank", "4", "--repeats", "2"]


def test_tensorly_stands_beside_and_its_backend_is_restored(tmp_path):
    peer("tltorch")
    import tensorly

    before = tensorly.get_backend()
    out = tmp_path / "table.json"
    assert bench("embedding", *TABLE, f"--json={out}") == 0
    (result,) = results(out)
    assert "tensorly-torch, rank 4, fused AdamW" in result["summary"]
    assert tensorly.get_backend() == before


@pytest.mark.parametrize("more", [[], ["--zipf", "0"], ["--bag", "4"]])
def test_embedding_times_every_way_to_train_a_table(more, tmp_path):
    out = tmp_path / "out.json"
    assert bench("embedding", *TABLE, *more, "--peers=none", f"--json={out}") == 0
    (result,) = results(out)
    assert list(result["summary"]) == [
        "dense, fused AdamW",
        "dense, AdamW",
        "sparse, SparseAdam",
        "comera, fused AdamW",
        "the same cores row by row, fused AdamW",
    ]


@pytest.mark.parametrize(("axis", "points"), [("rows", [40, 90]), ("indices", [8, 32])])
def test_embedding_times_a_curve_at_its_points(axis, points, tmp_path):
    out = tmp_path / "out.json"
    words = ["--curve", axis, "--points", *map(str, points), f"--json={out}"]
    assert bench("embedding", *TABLE, *words) == 0
    (result,) = results(out)
    assert [point["at"] for point in result["points"]] == points


def test_points_of_a_table_need_a_curve(capsys):
    assert bench("embedding", *TABLE, "--points", "8") == 1
    assert "needs --curve, one of indices, rows" in capsys.readouterr().err


def test_a_dense_table_that_is_too_large_is_left_out(tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--peers=none", f"--json={out}"]
    size = 60 * 16 * 4 / 2**30
    assert bench("embedding", *TABLE, *options, f"--dense_limit={3.5 * size}") == 0
    (result,) = results(out)
    assert result["baseline"] == "sparse, SparseAdam"
    assert len(result["summary"]) == 3
    assert bench("embedding", *TABLE, *options, f"--dense_limit={2 * size}") == 0
    (result,) = results(out)
    assert result["baseline"] == "comera, fused AdamW"
    assert "sparse, SparseAdam is left out: 3 copies" in capsys.readouterr().out
