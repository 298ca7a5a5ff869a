"""Call ``python -m benchmarks`` in this process, on models that take no time."""

import json

from benchmarks.__main__ import main

LAYER = ["--shape", "48", "32", "--rank", "4", "--repeats", "2"]
TABLE = ["--rows", "60", "--width", "16", "--indices", "24", "--rank", "4", "--repeats", "2"]
SIZES = "layers=1 width=16 ffn=32 heads=2 vocab=40 length=6 rank=4 embedding_rank=4"
MODEL = [f"--{size}" for size in SIZES.split()]


def bench(*words):
    return main(words)


def measured(path, *words):
    """Run a benchmark, which succeeds, and return its results."""
    assert main([*words, f"--json={path / 'out.json'}"]) == 0
    return results(path)


def results(path):
    return json.loads((path / "out.json").read_text())["results"]
