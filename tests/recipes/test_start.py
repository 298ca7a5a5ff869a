"""How the command starts: as what, in how many processes, and what Ctrl-C does meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import comera
from comera._command import is_command
from comera.recipes.cli import main

ROOT = Path(__file__).parents[2]
INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            {what}

sys.meta_path.insert(0, Interrupt())
"""
SCRIPT = """
import re
import sys
from comera.__main__ import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script.pyw|.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""


SIGNAL = "os.kill(os.getpid(), signal.SIGINT)"


def started(
    place: Path, words: list[str], interrupt: str | None = None, what: str = SIGNAL, **environment
):
    """Run an interpreter that gets Ctrl-C when it is about to import a module."""
    if interrupt:
        (place / "sitecustomize.py").write_text(INTERRUPT.format(module=interrupt, what=what))
    (place / "comera").write_text(SCRIPT)  # as pip writes it
    path = os.pathsep.join([str(place), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


WAYS = [["comera"], ["-m", "comera"]]


@pytest.mark.parametrize(
    ("words", "module"),
    [
        *((words, "torch") for words in WAYS),
        # Once that is imported, all go the same way.
        pytest.param(["comera"], "numpy", marks=pytest.mark.slow),
        pytest.param(["comera"], "yaml", marks=pytest.mark.slow),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_ctrl_c_while_it_imports_ends_in_one_line(tmp_path, words, module):
    done = started(tmp_path, [*words, "plan"], module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_interrupt_that_nobody_caught_ends_in_one_line_too(tmp_path):
    done = started(tmp_path, ["-m", "comera"], "torch", "raise KeyboardInterrupt")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
def test_where_ctrl_c_is_ignored_it_stays_ignored(tmp_path):
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    (tmp_path / "run.py").write_text(
        "import signal, sys, comera.__main__\n"
        f"{ignore}sys.argv[1:] = ['init']\n"
        "assert comera.__main__.main() == 0\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
    )
    assert started(tmp_path, ["run.py"]).returncode == 0
    (tmp_path / "sitecustomize.py").write_text(f"import os, signal\n{ignore}{SIGNAL}\n")
    assert started(tmp_path, ["comera", "--help"]).returncode == 0


def test_other_programs_are_interrupted_as_ever(tmp_path):
    done = started(tmp_path, ["-c", "import comera"], "torch")
    assert done.returncode not in (0, 130)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert sys.excepthook.__module__ != "comera._command"


def test_an_error_of_the_import_is_shown_whole(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')\n")
    done = started(tmp_path, ["-m", "comera"])
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "this torch is broken" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_every_way_to_start_is_the_command(tmp_path, words):
    done = started(tmp_path, [*words, "--help"])
    assert done.returncode == 0
    assert "usage: comera" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python /usr/bin/comera train", True),
        ("python -W error -X dev -I /usr/bin/comera", True),
        ("python -m comera", True),
        ("python -um comera.recipes.cli train", True),
        ("python -mcomera", True),
        ("python -m pytest -m comera comera", False),
        ("python -m comerado", False),
        ("python train.py comera", False),
        ("python -c import comera", False),
        ("python", False),
        ("", False),
    ],
)
def test_the_command_is_told_by_how_the_interpreter_was_started(words, expected):
    assert is_command(words.split()) == expected


@pytest.mark.parametrize("command", ["sweep", "plan", "report"])
@pytest.mark.parametrize("rank", [0, 3])
def test_one_of_several_processes_refuses_before_anything_is_written(
    tmp_path, monkeypatch, capsys, command, rank
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("out: runs/mine\nmasked_text: {}\ntrain: {steps: 3}\n")
    for name, value in {"WORLD_SIZE": 4, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    assert main([command, "run.yaml"]) == 1
    said = capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    if rank:
        assert said == ""
    else:
        assert said.startswith("error: started as 4 processes (WORLD_SIZE=4), which only comera ")
        assert f"start comera {command} once" in said
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, {"WORLD_SIZE": "8"}, {"RANK": "0"}],
)
def test_one_process_alone_is_not_refused(monkeypatch, capsys, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "/none.yaml"]) == 1
    assert "there is no file /none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("words", "said"), [(["none.yaml"], "no file none.yaml"), (["--seed=x"], "seed")]
)
def test_the_first_process_alone_says_what_was_typed_wrong(monkeypatch, capsys, rank, words, said):
    for name, value in {"WORLD_SIZE": 4, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    try:
        status = main(["train", *words])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status
    assert (said in captured.out + captured.err) == (rank == 0)
    assert (captured.out + captured.err == "") == (rank != 0)


def test_the_package_is_found_where_the_tests_are():
    assert Path(comera.__file__).parents[1] == ROOT
