"""Configurations come with the package, and are found by their names."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import comera
from comera.recipes.cli import main
from comera.recipes.parse import file_of, first_sentence, folder, names, read_yaml

ROOT = Path(__file__).parents[2]


def test_every_file_has_a_name_and_says_what_it_is():
    assert folder() == ROOT / "configs"
    assert len(names()) == len(list(folder().rglob("*.yaml")))
    assert names()[0] == "quickstart"
    assert all(first_sentence(folder() / f"{name}.yaml") for name in names())
    assert len({Path(name).name for name in names()}) == len(names())


@pytest.mark.parametrize("word", ["nli/snli-small", "snli-small"])
def test_a_name_stands_for_a_file(word):
    assert file_of(word) == ROOT / "configs" / "nli" / "snli-small.yaml"


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("seed: 1\n")
    assert file_of("quickstart") == Path("quickstart")


@pytest.mark.parametrize(
    ("word", "rest"),
    [
        ("snli-smal.yaml", "snli-smal.yaml: did you mean snli-small?"),
        ("zzz", "zzz; `comera init` lists the configurations"),
    ],
)
def test_what_is_neither_is_named(word, rest):
    with pytest.raises(FileNotFoundError, match="there is no file") as caught:
        file_of(word)
    assert rest in str(caught.value)


def test_init_lists_them_and_prints_one_as_it_is(capsys, tmp_path):
    assert main(["init"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == names()
    assert main(["init", "criteo-kaggle"]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    assert path.read_bytes() == (ROOT / "configs/dlrm/criteo-kaggle.yaml").read_bytes()
    assert main(["init", "criteo"]) == 1
    out, err = capsys.readouterr()
    assert "there is no file criteo" in err
    assert not out  # which goes into a file


def test_a_printed_sweep_finds_its_base(tmp_path, capsys):
    assert main(["init", "lm/masked-words-sweep"]) == 0
    content = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(content)
    assert file_of(read_yaml(tmp_path / "mine.yaml")["base"], beside=tmp_path).is_file()


def test_a_name_can_be_planned(capsys):
    assert main(["plan", "quickstart", "--model.num_layers=1"]) == 0
    assert "rank learning from" in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"comera {comera.__version__}\n"


@pytest.mark.slow
def test_a_wheel_brings_them(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path]
    subprocess.run([*pip, ROOT], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("comera-*.whl"))) as wheel:
        inside = {name.removeprefix("comera/_configs/") for name in wheel.namelist()}
    assert {f"{name}.yaml" for name in names()} <= inside


def test_settings_that_are_no_text_are_named(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"out: caf\xe9\n")
    with pytest.raises(ValueError, match=r"mine\.yaml must be text in UTF-8: the byte 0xe9"):
        read_yaml(tmp_path / "mine.yaml")
