"""Data that changed, were torn or were no numbers, and went into training without a word."""

import os

import numpy as np
import pytest
from rich.console import Console

from comera.data.clicks import ClickData, Clicks
from comera.data.text import TextData, TextStreams
from comera.recipes.run import run
from comera.recipes.run_config import ModelConfig, RunConfig, TrainConfig
from tests.recipes.test_sweep import interrupted_at
from tests.texts import write_functions


@pytest.fixture
def text(tmp_path, monkeypatch) -> TextData:
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    write_functions(tmp_path / "text", 6, 30)
    return TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2)


def test_a_resumed_run_notices_a_line_added_to_its_text(tmp_path, text):
    model = ModelConfig(d_model=16, num_layers=1, num_heads=2, ffn_dim=32)
    train = TrainConfig(steps=6, batch_size=4, eval_batches=1)
    config = RunConfig(out=str(tmp_path / "run"), masked_text=text, model=model, train=train)
    interrupted_at(3, config)
    with (tmp_path / "text" / "2.py").open("a") as file:
        file.write("\n# one line more\n")
    with pytest.raises(ValueError, match=r"other data \(1 file: 2\.py changed\)"):
        run(config, Console(quiet=True), quiet=True)


def test_prepared_text_is_not_that_of_other_files(tmp_path, text):
    before, path = TextStreams.prepare(text), tmp_path / "text" / "2.py"
    times, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b"return", b"retrun"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not np.array_equal(TextStreams.prepare(text).train, before.train)


def test_a_torn_file_of_prepared_text_is_made_anew(tmp_path, text):
    TextStreams.prepare(text)
    (cache,) = (tmp_path / "cache").glob("text-*.npz")
    cache.write_bytes(cache.read_bytes()[:5000])  # "File is not a zip file"
    assert len(TextStreams.prepare(text).train)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_no_infinite_number_is_taken_for_a_missing_one(tmp_path, monkeypatch, value):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    rows = [f"{k % 2},{k % 5},{value if k == 6 else k}" for k in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["label,user,age", *rows]))
    with pytest.raises(ValueError, match=rf"line 8 of .*: age is '{value}', expected a number"):
        Clicks.prepare(ClickData(str(tmp_path / "a.csv"), label="label", continuous=["age"]))
