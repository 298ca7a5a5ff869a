"""What ``comera`` says of a file or an option that it cannot use: in one line, by name."""

import pytest

from comera.recipes.cli import main


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tarin: {steps: 3}\n", "run.yaml: tarin is not a setting: did you mean train?"),
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
