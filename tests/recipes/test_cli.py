"""The command line: files and options that cannot be used are named, and the help fits a screen."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from comera.recipes import cli
from comera.recipes.cli import FIRST, main, typed_settings
from comera.recipes.parse import read_yaml
from comera.recipes.run_config import RunConfig
from tests.texts import write_functions


def test_what_is_merged_may_be_merged_again(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "a: &a {x: 1}\nb: {c: {d: &d {<<: *a, x: 2}}}\ne: {<<: *d, y: 3}\n"
    )
    assert read_yaml(tmp_path / "x.yaml")["e"] == {"x": 2, "y": 3}


def test_of_several_that_are_merged_the_first_counts(tmp_path):
    (tmp_path / "x.yaml").write_text("a: &a {lr: 1}\nb: &b {lr: 2, d: 3}\ne: {<<: [*a, *b]}\n")
    assert read_yaml(tmp_path / "x.yaml")["e"] == {"lr": 1, "d": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tarin: {steps: 3}\n", "run.yaml: tarin is not a setting: did you mean train?"),
        ("base: {}\nseeds: [0]\n", "run.yaml is no run but a sweep: comera sweep trains it"),
        ("train: {stepz: 3}\n", "run.yaml: train.stepz is not a setting: did you mean steps?"),
        ("two_stage: {late_steps: 3}\n", "two_stage.late_steps is not a setting: did you mean lat"),
        ("model.d_modle: 3\n", "run.yaml: model.d_modle is not a setting: did you mean d_model?"),
        ("train: [1\n", "run.yaml is not readable as YAML"),
        ("[seed, twin]: 1\n", "run.yaml is not readable as YAML: while constructing a mapping"),
        ("train:\n", "run.yaml: train=null must be a section, with keys of its own: steps, "),
        ("seed: 1\nseed: 2\n", "the key seed in line 2 is there already"),
        ("just words\n", "run.yaml must hold keys and values, not 'just words'"),
        ("train: {steps: 3}\n", "causal_text, nli and clicks, in the file of the run or as"),
        ("masked_text: {folder: /no/such}\ntrain: {steps: 3}\n", "there is no folder /no/such"),
        (
            "two_stage: {target: half}\n",
            "error: run.yaml: two_stage.target='half' must be a number",
        ),
        ("optimizer: {lr: .inf}\n", "optimizer.lr=inf must be a number"),
        ("optimizer: {lr: true}\n", "optimizer.lr=True must be a number"),
        ("two_stage: {early_share: .nan}\n", "two_stage.early_share=nan must be a number"),
        (
            "a: " + "[" * 3000 + "]" * 3000,
            "not readable as YAML: it is nested too deep",
        ),
        (
            "- &a [x, x, x, x, x, x, x, x]\n- &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
            "- &c [*b, *b, *b, *b, *b, *b, *b, *b]\n",
            "run.yaml must hold keys and values, not [['x', 'x', 'x', 'x', 'x', 'x', ...], ",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, capsys, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(content)
    assert main(["train", "run.yaml"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_environment_that_no_launcher_has_set_is_named(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "x")
    assert main(["list"]) == 1
    assert "LOCAL_RANK=x, in the environment, must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "x.yaml"], "comera has no command trian: did you mean train?"),
        ([], "comera needs a command; there are train, plan, front, sweep, "),
        (["checkpoint"], "comera checkpoint needs a command; there are "),
        (["sweep", "x.yaml", "--job=2"], "comera sweep has no option --job: did you mean --jobs?"),
        (["sweep", "x.yaml", "--over-writ=1"], "comera sweep has no option --over-writ"),
        (["plan", "quickstart", "--over-writ=1"], "--over-writ=1 is not a setting"),
        (["calibrate", "--device=gpu"], "--device=gpu must be cpu or cuda\n"),
        (["calibrate", "--device", "gpu"], "--device=gpu must be cpu or cuda\n"),
        (["sweep", "x.yaml", "--jobs=many"], "--jobs=many must be a whole number or null\n"),
        (["evaluate", "x", "--set=a"], "--set=a must be a list of texts: --set='[a]'\n"),
        (["checkpoint", "zzz"], "comera checkpoint has no command zzz; there are "),
        (["plan", "a.yaml", "b.yaml"], "b.yaml cannot stand beside a.yaml: a run is one file"),
        (["plan", "seed=3"], "seed=3 is no file: if it is a setting, type --seed=3"),
        (["plan", "quickstart", "--twin"], "--twin needs a value: --twin=..."),
        (["plan", "quickstart", "--twin", "--seed=3"], "--twin needs a value: --twin=..."),
        (["plan", "quickstart", "-seed=3"], "-seed=3 is not a setting: did you mean --seed?"),
        (["plan", "quickstart", "--qqq=3"], "--qqq=3 is not a setting; `comera train --help_all`"),
        (
            ["plan", "quickstart", "--out="],
            "--out= is empty: give a value, or leave it out\n",
        ),
        (
            ["plan", "quickstart", "--masked_text.folder="],
            "--masked_text.folder= is empty: ",
        ),
        (["plan", "quickstart", "--seed=" + "9" * 23], "seed=99999999999999999999999 must be from"),
        (["train", "quickstart", "--out=x", "--seed=-1"], "seed=-1 must be from 0 to 2^63 - 1\n"),
        (["train", "quickstart", "--out=x", "--device=mps"], "device='mps' cannot be used here: "),
        (["export", "x"], "comera export: the following arguments are required: file\n"),
        (
            ["plan", "quickstart", "--clicks.numbers=[a]"],
            "--clicks.numbers=[a] is not a setting; clicks has file, format, label, ",
        ),
        *(
            (["plan", "quickstart", *words.split()], message)
            for words, message in (
                (
                    "--train.step=3",
                    "--train.step=3 is not a setting: did you mean --train.steps?\n",
                ),
                (
                    "--two_stage.targt=3",
                    "--two_stage.targt=3 is not a setting: did you mean --two_",
                ),
                ("--two_stage.late_steps=3", "--two_stage.late_steps=3 is not a setting: did you "),
                ("--two_stage.target=half", "two_stage.target='half' must be a number"),
                ("--two_stage.target half", "two_stage.target='half' must be a number"),
                ("--train.steps=many", "train.steps='many' must be a whole number or null"),
                ("--train.precision=fp17", "train.precision='fp17' must be fp32, bf16 or fp8"),
                ("--train.compile=maybe", "train.compile='maybe' must be true or false"),
                ("--model.d_model=64.5", "model.d_model=64.5 must be a whole number"),
                (
                    "--tensorize.rank=[8,x]",
                    "tensorize.rank=[8, 'x'] must be a whole number, a list of whole numbers or ",
                ),
                (
                    '--tensorize.hot_pattern={"x":5}',
                    "tensorize.hot_pattern={'x': 5} must be a mapping, each to a list of whole ",
                ),
                ("--tensorize.rank=-1", "tensorize.rank=-1 must be at least 1 on every bond\n"),
                (
                    "--two_stage=yes",
                    "two_stage=True must be a section, with keys of its own or null: gamma, ",
                ),
                ("--nli=snli", "nli='snli' must be a section, with keys of its own or null: "),
            )
        ),
        (["report", "."], ". is not a run"),
        (["plan", "."], ". is a folder, and not that of a run: it has no config.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_what_the_system_refuses_is_said_without_its_number(tmp_path, capsys):
    assert main(["predict", "x" * 300]) == 1
    assert capsys.readouterr().err.endswith("xxx/config.yaml: File name too long\n")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--out=2024", ("out", "2024")),
        ("--device cuda:1", ("device", "cuda:1")),
        ("--seed 7", ("seed", 7)),
        ("--twin=yes", ("twin", True)),
        ("--optimizer=came", ("optimizer.name", "came")),
        ("--optimizer={name: came}", ("optimizer.name", "came")),
        ("--optimizer.lr=1e-8", ("optimizer.lr", 1e-8)),
        ("--optimizer.betas=[9e-1,1e-3]", ("optimizer.betas", (0.9, 1e-3))),
        ("--tensorize.exclude_modules=[fc1,fc2]", ("tensorize.exclude_modules", ["fc1", "fc2"])),
        (r"--tensorize.exclude_modules=fc\d", ("tensorize.exclude_modules", r"fc\d")),
        ("--tensorize.exclude_modules=null", ("tensorize.exclude_modules", None)),
        ("--train.batch-size=3", ("train.batch_size", 3)),
        ("--nli.vocab-size 9", ("nli.vocab_size", 9)),
        ("--dlrm.table_sizes.user-id=3", ("dlrm.table_sizes", {"user-id": 3})),
        ("--dlrm.table-sizes.user-id=3", ("dlrm.table_sizes", {"user-id": 3})),
        ("--dlrm.table_sizes.user=3", ("dlrm.table_sizes", {"user": 3})),
        ("--tensorize.rank_pattern={a.b: 3}", ("tensorize.rank_pattern", {"a.b": 3})),
        ("--tensorize.rank_pattern.0.fc-1=3", ("tensorize.rank_pattern", {"0.fc-1": 3})),
        ("--nli.train=7", ("nli.train", ["7"])),
        ("--two_stage=null --two_stage.target=0.25", ("two_stage.target", 0.25)),
        ("nli/snli-small --seed=2", ("seed", 2)),
    ],
)
def test_values_are_read_as_what_they_are_for(words, value):
    split = words.split() if "{" not in words else [words]
    found = typed_settings(split)
    for name in value[0].split("."):
        found = getattr(found, name)
    assert found == value[1]


def test_the_configuration_may_stand_anywhere():
    first, second, third = map(
        typed_settings,
        (
            ["quickstart", "--model.d_model=64", "--train.steps", "7"],
            ["--model.d_model=64", "quickstart", "--train.steps", "7"],
            ["--train.steps", "7", "--model.d_model=64", "quickstart"],
        ),
    )
    assert first == second == third
    assert (first.model.d_model, first.train.steps, first.twin) == (64, 7, True)


def test_what_is_piped_is_as_wide_as_columns_says(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor", "--all"]) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "│┃┏├└"]
    assert tables
    assert max(map(len, tables)) <= 80


def test_hyphens_are_as_good_as_underscores(tmp_path, capsys):
    assert main(["checkpoint", "compress", "a", "b", "--key-every=many"]) == 1
    assert "--key_every=many must be a whole number\n" in capsys.readouterr().err


def test_the_file_of_a_run_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("masked_text: {}\ntrain: {steps: 3}\n")
    read = []
    monkeypatch.setattr(cli.parse, "read_yaml", lambda path: read.append(path) or read_yaml(path))
    assert typed_settings([str(path), "--seed=2"]).train.steps == 3
    assert read == [path]


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none.yaml")]) == 1
    assert f"there is no file {tmp_path}/none.yaml" in capsys.readouterr().err


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


@pytest.mark.parametrize("word", ["--help_all", "--help-all"])
def test_every_key_is_one_option_away(word, capsys):
    text = printed(capsys, "train", word)
    assert "--checkpoints.keep_last" in text
    assert all(f"--{name}" in text for name in RunConfig.__dataclass_fields__)
    assert text.index("--overwrite=") < text.index("masked_text:")  # which it is no setting of
    assert ":class:" not in text
    assert "[]" not in text


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
    assert printed(capsys, "checkpoint", "--help").startswith(
        "usage: comera checkpoint COMMAND ...\n\n  checkpoint inspect "
    )
