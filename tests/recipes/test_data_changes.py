"""A run goes on with the data that it was begun with, or says which of them have changed."""

import dataclasses
import json
import os
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

import comera
from comera.data.clicks import ClickData
from comera.data.nli import NliData
from comera.data.text import TextData
from comera.recipes.cli import main
from comera.recipes.parse import parse_settings
from comera.recipes.run import run
from comera.recipes.run_config import DlrmConfig, ModelConfig, RunConfig, TrainConfig
from comera.recipes.run_folder import NAME, DataRecord, changed_data
from comera.recipes.sweep import read_sweep, run_sweep
from tests.data.test_clicks import table
from tests.data.test_nli import pairs, write_plain, write_snli
from tests.recipes.test_folder import contents
from tests.recipes.test_sweep import interrupted_at
from tests.texts import write_functions

pytestmark = pytest.mark.slow  # Runs and fresh processes.

STEPS = 6


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))


def run_of(tmp_path: Path, **data) -> RunConfig:
    return RunConfig(
        out=str(tmp_path / "run"),
        model=ModelConfig(d_model=16, num_layers=1, num_heads=2, ffn_dim=32),
        dlrm=DlrmConfig(embedding_dim=4, bottom=[8], top=[8]),
        train=TrainConfig(steps=STEPS, batch_size=4, eval_batches=1, save_every=2),
        **data,
    )


def text(tmp_path: Path) -> TextData:
    write_functions(tmp_path / "text", 6, 30)
    return TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2)


def masked(tmp_path: Path) -> tuple[RunConfig, Path, str]:
    config = run_of(tmp_path, masked_text=text(tmp_path))
    file = sorted((tmp_path / "text").iterdir())[2]
    return config, file, file.name


def causal(tmp_path: Path) -> tuple[RunConfig, Path, str]:
    config = run_of(tmp_path, causal_text=text(tmp_path))
    file = sorted((tmp_path / "text").iterdir())[4]
    return config, file, file.name


def nli(tmp_path: Path) -> tuple[RunConfig, Path, str]:
    write_snli(tmp_path / "train.jsonl", pairs(60))
    write_plain(tmp_path / "dev.jsonl.gz", pairs(20, seed=1))
    files = str(tmp_path / "train.jsonl"), str(tmp_path / "dev.jsonl.gz")
    data = NliData(*files, vocab_size=120, length=16)
    return run_of(tmp_path, nli=data), tmp_path / "train.jsonl", files[0]


def clicks(tmp_path: Path) -> tuple[RunConfig, Path, str]:
    path = tmp_path / "clicks.csv"
    table(100).to_csv(path, index=False)
    return run_of(tmp_path, clicks=ClickData(str(path), label="rating")), path, str(path)


def quiet_run(config: RunConfig, **changes):
    console = Console(file=(Path(config.out).parent / "said").open("w"), width=300)
    try:
        return run(dataclasses.replace(config, **changes), console, quiet=True)
    finally:
        console.file.close()


def weights(config: RunConfig) -> bytes:
    return (Path(config.out) / "model.safetensors").read_bytes()


def changed_in_place(path: Path) -> None:
    """Turn a word round in some places; neither size nor time of modification tells."""
    times, data = path.stat(), path.read_bytes()
    word = next(word for word in (b"outside", b"Bonn", b"return") if word in data)
    path.write_bytes(data.replace(word, word[::-1], 5))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (len(data), times.st_mtime_ns)


@pytest.mark.parametrize("make", [masked, causal, nli, clicks])
def test_changed_data_are_named_and_nothing_is_lost(tmp_path, make):
    config, file, name = make(tmp_path)
    quiet_run(config, out=str(tmp_path / "whole"))
    interrupted_at(3, config)
    kept, before = file.read_bytes(), contents(Path(config.out))
    changed_in_place(file)
    with pytest.raises(ValueError, match=r"run that was begun with other data \(1 file: ") as said:
        quiet_run(config)
    assert f"{name} changed); restore them" in str(said.value)
    assert "choose another --out, or start again with --overwrite=true" in str(said.value)
    assert contents(Path(config.out)) == before
    file.write_bytes(kept)
    quiet_run(config)
    uninterrupted = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert weights(config) == uninterrupted
    changed_in_place(file)
    quiet_run(config, overwrite=True)
    assert json.loads((Path(config.out) / NAME).read_text())["files"][name]
    assert weights(config) != uninterrupted


def test_rows_of_a_data_set_of_the_hub_are_compared_too(tmp_path, monkeypatch):
    rows = [{"premise": p, "hypothesis": h, "label": y} for p, h, y in pairs(60)]
    fake = types.SimpleNamespace(load_dataset=lambda name, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = "datasets:stanfordnlp/snli"
    config = run_of(tmp_path, nli=NliData(source, source, vocab_size=120, length=16))
    interrupted_at(3, config)
    rows[7] = rows[7] | {"label": (rows[7]["label"] + 1) % 3}
    with pytest.raises(ValueError, match=r"other data \(1 file: datasets:stanfordnlp/snli changed"):
        quiet_run(config)
    rows[7] = rows[7] | {"label": (rows[7]["label"] - 1) % 3}
    assert quiet_run(config)[0].steps == STEPS


def test_a_vocabulary_is_part_of_the_data(tmp_path):
    config, _, _ = nli(tmp_path)
    vocab = tmp_path / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "man", "dog", "runs"]
    vocab.write_text("\n".join(words))
    config.nli.vocab = str(vocab)
    interrupted_at(3, config)
    vocab.write_text("\n".join([*words, "woman"]))
    with pytest.raises(ValueError, match=r"1 file: .*vocab\.txt changed"):
        quiet_run(config)


def test_new_files_and_such_as_are_gone_are_named(tmp_path):
    config, file, name = masked(tmp_path)
    interrupted_at(3, config)
    file.unlink()
    (file.parent / "another.py").write_text("x = 1\n")
    said = rf"\(2 files: another\.py new, {name} no longer read\)"
    with pytest.raises(ValueError, match=said):
        quiet_run(config)


def test_of_many_changes_a_few_are_named():
    there = DataRecord({f"{k}.py": "old" for k in range(9)})
    here = DataRecord({f"{k}.py": "new" for k in range(9)})
    said = "9 files: 0.py changed, 1.py changed, 2.py changed, 3.py changed and 5 more"
    assert changed_data(there, here) == said
    assert changed_data(there, there) is None


def test_a_file_may_have_another_name(tmp_path, capsys):
    config, file, _ = clicks(tmp_path)
    interrupted_at(3, config)
    renamed = file.rename(file.with_stem("the-log"))
    assert main(["train", config.out, f"--clicks.file={renamed}"]) == 0
    there = DataRecord({"/a/train.csv": "1", "/a/dev.csv": "2"}, prepared="rows")
    swapped = DataRecord({"/b/dev.csv": "1", "/b/train.csv": "2"}, prepared="other rows")
    assert "in another order" in changed_data(there, swapped)
    gone = DataRecord({"/b/dev.csv": "2", "/b/x.csv": "2"})
    assert changed_data(there, gone) == "1 file: /a/train.csv no longer read"


def test_files_that_are_not_read_may_change(tmp_path):
    config, file, _ = masked(tmp_path)
    config.masked_text.max_megabytes = 1e-6  # the first file alone
    config.masked_text.length = 8
    interrupted_at(3, config)
    (noted,) = json.loads((Path(config.out) / NAME).read_text())["files"]
    for path in file.parent.iterdir():
        if path.name != noted:
            path.write_text("other\n")
    assert quiet_run(config)[0].steps == STEPS


def test_data_may_be_touched_copied_and_packed_anew(tmp_path):
    config, file, _ = masked(tmp_path)
    interrupted_at(3, config)
    shutil.copytree(file.parent, tmp_path / "copy")
    shutil.rmtree(file.parent)
    shutil.copytree(tmp_path / "copy", file.parent, copy_function=shutil.copyfile)
    assert quiet_run(config)[0].steps == STEPS


def test_other_tokens_of_the_same_files_are_named(tmp_path):
    config, _, _ = masked(tmp_path)
    interrupted_at(3, config)
    path = Path(config.out) / NAME
    noted = json.loads(path.read_text())
    path.write_text(json.dumps(noted | {"prepared": "of another version"}))
    before = contents(Path(config.out))
    with pytest.raises(ValueError, match="the files are the same, but comera or tokenizers"):
        quiet_run(config)
    assert contents(Path(config.out)) == before
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{NAME} is not readable"):
        quiet_run(config)


@pytest.mark.parametrize("make", [masked, nli, clicks])
def test_a_finished_run_and_its_report_need_no_data(tmp_path, make):
    config, file, _ = make(tmp_path)
    config.twin = True
    before = quiet_run(config)
    shutil.rmtree(tmp_path / "cache")
    for path in (file, *file.parent.glob("*.py")):
        path.unlink(missing_ok=True)
    assert quiet_run(config) == before
    assert "is finished" in (tmp_path / "said").read_text()
    assert main(["report", config.out]) == 0
    with pytest.raises((FileNotFoundError, ValueError)):
        quiet_run(config, overwrite=True)
    (Path(config.out) / "model.safetensors").unlink()  # to be written once more
    with pytest.raises((FileNotFoundError, ValueError)):
        quiet_run(config)


def relative(config: RunConfig) -> RunConfig:
    """Say from the working directory where its data are."""
    here = f"{os.getcwd()}/"
    return parse_settings(RunConfig, json.loads(json.dumps(config.settings()).replace(here, "")))


@pytest.mark.parametrize("make", [masked, nli, clicks])
def test_a_run_is_resumed_from_any_folder(tmp_path, monkeypatch, make):
    config, _, _ = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    interrupted_at(3, relative(config))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert main(["train", "../run"]) == 0
    monkeypatch.chdir(tmp_path)
    (again,) = quiet_run(relative(config), out="run")
    assert again.steps == STEPS
    assert "is finished" in (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("make", "key"), [(masked, "masked_text.folder"), (nli, "nli.train"), (clicks, "clicks.file")]
)
def test_data_that_have_moved_are_named_and_may_be_given_anew(tmp_path, capsys, make, key):
    config, file, _ = make(tmp_path)
    interrupted_at(3, config)
    old = file.parent if make is masked else file
    # The name of a folder is not that of a file in it.
    new = tmp_path / "elsewhere" / ("texts" if make is masked else old.name)
    new.parent.mkdir()
    old.rename(new)
    assert main(["train", config.out]) == 1
    said = capsys.readouterr().err
    assert str(old) in said
    assert f"if it is elsewhere now, give its new place, --{key}=..." in said
    moved = ["train", config.out, f"--{key}={new}"]
    data = new / file.name if make is masked else new
    kept = data.read_bytes()
    changed_in_place(data)
    assert main(moved) == 1
    assert "was begun with other data (" in capsys.readouterr().err
    data.write_bytes(kept)
    assert main(moved) == 0
    assert main(["train", config.out]) == 0  # the new place is noted
    assert f"the run in {config.out} is finished" in capsys.readouterr().out
    shutil.copytree(new.parent, tmp_path / "copy")
    shutil.rmtree(new.parent)
    changed_in_place(tmp_path / "copy" / data.relative_to(new.parent))
    assert main(["train", config.out, f"--{key}={tmp_path / 'copy' / new.name}"]) == 1


def test_the_command_ends_in_one_line(tmp_path, capsys):
    config, file, name = masked(tmp_path)
    interrupted_at(3, config)
    settings = json.loads(json.dumps(config.settings()))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    with file.open("a") as out:
        out.write("# one line more\n")
    assert main(["train", str(tmp_path / "run.yaml")]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: {config.out} holds a run that was begun with other data")
    assert f"(1 file: {name} changed)" in last


def test_checkpoints_are_not_evaluated_on_other_data(tmp_path, capsys):
    config, file, name = masked(tmp_path)
    quiet_run(config)
    assert main(["checkpoint", "evaluate", config.out]) == 0
    changed_in_place(file)
    assert main(["checkpoint", "evaluate", config.out]) == 1
    assert f"was trained on other data (1 file: {name} changed)" in capsys.readouterr().err


# ── sweeps ───────────────────────────────────────────────────────────────────────────────────────


def sweep(tmp_path: Path, config: RunConfig, seeds: list[int], **options) -> tuple[int, str]:
    base = {k: v for k, v in config.settings().items() if k not in ("out", "seed", "twin")}
    content = {
        "out": str(tmp_path / "out"),
        "base": json.loads(json.dumps(base)),
        "seeds": seeds,
        "reference": "one",
        "variants": {"one": {}, "two": {"optimizer.lr": 1e-3}},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    console = Console(file=(tmp_path / "said").open("w"), width=300)
    try:
        status = run_sweep(read_sweep(tmp_path / "sweep.yaml"), console=console, **options)
    finally:
        console.file.close()
    return status, (tmp_path / "said").read_text()


def test_a_sweep_goes_on_with_the_same_data_alone(tmp_path):
    config, file, name = masked(tmp_path)
    place = tmp_path / "out" / "one" / "seed-0"
    place.parent.mkdir(parents=True)
    interrupted_at(3, dataclasses.replace(config, out=str(place)))
    before = contents(place)
    changed_in_place(file)
    with pytest.raises(ValueError, match=rf"one/seed-0 .* other data \(1 file: {name} changed\)"):
        sweep(tmp_path, config, [0])
    assert contents(tmp_path / "out") == {f"one/seed-0/{k}": v for k, v in before.items()}


def test_runs_of_a_sweep_are_of_the_same_data(tmp_path, runs_here):
    config, file, name = masked(tmp_path)
    assert sweep(tmp_path, config, [0])[0] == 0
    before = contents(tmp_path / "out")
    changed_in_place(file)
    assert sweep(tmp_path, config, [0])[0] == 0  # all are finished
    with pytest.raises(ValueError, match=rf"one/seed-0 .* other data \(1 file: {name} changed\)"):
        sweep(tmp_path, config, [0, 1])
    model = "one/seed-0/model.safetensors"
    assert contents(tmp_path / "out")[model] == before[model]
    status, said = sweep(tmp_path, config, [0, 1], overwrite=True)
    assert status == 0
    assert "0 of them finished" in said
    after = contents(tmp_path / "out")
    assert after[model] != before[model]
    noted = {after[f"{name}/seed-{seed}/{NAME}"] for name in ("one", "two") for seed in (0, 1)}
    assert len(noted) == 1


def test_a_sweep_that_is_finished_needs_no_data(tmp_path, runs_here):
    config, file, _ = masked(tmp_path)
    assert sweep(tmp_path, config, [0])[0] == 0
    shutil.rmtree(file.parent)
    assert sweep(tmp_path, config, [0])[0] == 0


def test_numbers_compare_as_they_are():
    """Of equal values in another layout the digests differ, of other values always."""
    from comera.data.vocabulary import array_digest

    one = {"a": np.arange(6, dtype=np.int32)}
    assert array_digest(one) == array_digest({"a": np.arange(6, dtype=np.int32)})
    assert array_digest(one) != array_digest({"b": one["a"]})
    assert array_digest(one) != array_digest({"a": one["a"].reshape(2, 3)})
    assert array_digest(one) != array_digest({"a": one["a"][::-1]})
    assert array_digest({"a": np.asarray(3), "e": np.empty(0)}) == array_digest(
        {"e": np.empty(0), "a": np.asarray(3)}
    )


def test_a_finished_model_that_is_damaged_is_written_again(tmp_path, monkeypatch):
    config, _, _ = masked(tmp_path)
    settings, of_all = Path(config.out) / "config.yaml", comera.recipes.run.whole_state

    def without_settings(state):
        settings.unlink()  # as by another program
        return of_all(state)

    monkeypatch.setattr("comera.recipes.run.whole_state", without_settings)
    quiet_run(config)
    whole, text = weights(config), settings.read_text()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:100], b""):
        (Path(config.out) / "model.safetensors").write_bytes(damaged)
        quiet_run(config)
        said = (tmp_path / "said").read_text()
        assert "model.safetensors is damaged" in said.replace("\n", " ")
        assert "the last step writes it again" in said
        assert (weights(config), settings.read_text()) == (whole, text)
    quiet_run(config)
    assert "is finished" in (tmp_path / "said").read_text()
