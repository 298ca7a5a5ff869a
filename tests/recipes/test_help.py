"""``--help`` can be read on one screen, and leads to the rest."""

import re
import subprocess
import sys

import pytest

from comera.recipes.cli import main
from comera.recipes.run_commands import FIRST
from comera.recipes.run_config import RunConfig


def printed(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_what_is_changed_first_is_shown_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = printed(capsys, "train", "--help")
    first = text[text.index("changed first") : text.index("sections of settings")]
    entries = [" ".join(entry.split()) for entry in first.split("\n  --")[1:]]
    assert len(entries) == len(FIRST)
    says = r"\[[\w/.]+\]$|[Bb]y default|have to be given|where it has an end|32 if neither"
    assert [entry for entry in entries if not re.search(says, entry)] == []
    assert "train.batch_size= Rows a step, of all processes together. [32]" in entries


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_help_of_a_run_fits_on_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = printed(capsys, command, "--help")
    assert text.startswith(f"usage: comera {command} FILE_OR_NAME")
    assert len(text.splitlines()) < 50
    assert max(map(len, text.splitlines())) <= 100
    for word in ("--train.steps=", "--tensorize.rank=", "  importance_pruning  ", "--help_all"):
        assert word in text


def test_every_key_is_one_option_away(capsys):
    text = printed(capsys, "train", "--help_all")
    assert "--checkpoints.keep_last" in text
    assert all(f"--{name}" in text for name in RunConfig.__dataclass_fields__)


def test_so_is_one_section(capsys):
    text = printed(capsys, "train", "--tensorize.help")
    assert "--tensorize.embedding_rank" in text
    assert "FILE_OR_NAME" not in text


def test_shells_can_complete_the_commands(capsys):
    pytest.importorskip("shtab")
    text = printed(capsys, "--print_completion", "bash")
    assert "calibrate" in text
    assert "--train.batch_size" in text


def test_help_does_not_load_what_only_the_work_needs():
    code = (
        "import contextlib, sys\n"
        "from comera.recipes.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):\n"
        "    main(['--help'])\n"
        "print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ended.stdout.split()
    assert not [name for name in loaded if name.startswith(("comera.calibrate", "pandas."))]


def test_every_command_has_its_own_options(capsys):
    for words in (["calibrate"], ["checkpoint"], ["checkpoint", "inspect"]):
        assert "--help" in printed(capsys, *words, "--help")
