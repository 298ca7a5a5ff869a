"""What ``comera`` says of a file or an option that it cannot use: in one line, by name."""

import json
from pathlib import Path

import pytest

from comera.recipes.cli import main
from tests.texts import write_functions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tarin: {steps: 3}\n", "run.yaml: tarin is not a setting: did you mean train?"),
        ("base: {}\nseeds: [0]\n", "run.yaml is no run but a sweep: comera sweep trains it"),
        ("train: {stepz: 3}\n", "run.yaml: train.stepz is not a setting: did you mean steps?"),
        ("two_stage: {late_steps: 3}\n", "two_stage.late_steps is not a setting: did you mean lat"),
        ("model.d_modle: 3\n", "run.yaml: model.d_modle is not a setting: did you mean d_model?"),
        ("train: [1\n", "run.yaml is not readable as YAML"),
        ("seed: 1\nseed: 2\n", "the key seed in line 2 is there already"),
        ("just words\n", "run.yaml must hold keys and values, not 'just words'"),
        ("train: {steps: 3}\n", "causal_text, nli and clicks, in the file of the run or as"),
        ("masked_text: {folder: /no/such}\ntrain: {steps: 3}\n", "there is no folder /no/such"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, capsys, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(content)
    assert main(["train", "run.yaml"]) == 1
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none.yaml")]) == 1
    assert f"there is no file {tmp_path}/none.yaml" in capsys.readouterr().out


def test_the_folder_of_a_run_stands_for_the_run(tmp_path, monkeypatch, capsys):
    """By its own name or that of its settings, which do not say where it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    write_functions(tmp_path / "text", 4, 30)
    (tmp_path / "mine.yaml").write_text(
        "masked_text: {folder: text, vocab_size: 300, length: 16, heldout: 0.3}\n"
        "model: {d_model: 16, num_layers: 1, num_heads: 2, ffn_dim: 32}\n"
        "train: {steps: 2, batch_size: 4, eval_batches: 1}\n"
    )
    assert main(["train", "mine.yaml", "--out=runs/mine"]) == 0
    for word, steps in (("runs/mine", 3), ("runs/mine/config.yaml", 4)):
        capsys.readouterr()
        assert main(["train", word, f"--train.steps={steps}"]) == 0
        assert json.loads(Path("runs/mine/result.json").read_text())["steps"] == steps
    assert not Path("runs/run").exists()
