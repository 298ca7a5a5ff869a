"""Whose a folder is: nothing is deleted that no run has written, nor while one is running."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

import comera
from comera.checkpoint.archive import Archive, FolderInUseError
from comera.checkpoint.chain import CheckpointChain
from comera.data.clicks import ClickData
from comera.data.nli import NliData
from comera.data.text import TextData
from comera.recipes.cli import main
from comera.recipes.run import run
from comera.recipes.run_config import (
    ImportancePruningConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    TwoStageConfig,
)
from comera.recipes.run_folder import lock
from tests.texts import write_functions


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    write_functions(tmp_path / "text", 6, 30)
    return RunConfig(
        out=str(tmp_path / "run"),
        masked_text=TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.2),
        model=ModelConfig(d_model=16, num_layers=1, num_heads=2, ffn_dim=32),
        train=TrainConfig(steps=4, batch_size=4, eval_batches=1, save_every=0),
    )


def quiet_run(config, **changes):
    return run(dataclasses.replace(config, **changes), Console(quiet=True), quiet=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_no_run_has_written_is_not_deleted(config, overwrite):
    folder = Path(config.out)
    with CheckpointChain(folder / "checkpoints") as chain:
        chain.save(1000, torch.nn.Linear(4, 4))
    before = contents(folder)
    with pytest.raises(ValueError, match="run holds checkpoints that no run here has written"):
        quiet_run(config, overwrite=overwrite)
    assert contents(folder) == before


def test_files_of_others_among_those_of_a_run_are_not_deleted(config):
    config.tensorize = comera.TTConfig(rank=4)
    quiet_run(config, twin=True)
    folder = Path(config.out)
    theirs = ["checkpoints/best/step-4.pt", "dense/notes.txt", "tensorboard/mine/x", "mine.txt"]
    for name in theirs:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("theirs")
    quiet_run(config, seed=1, overwrite=True)
    assert set(theirs) <= set(kept := contents(folder))
    assert [name for name in kept if name.startswith("dense")] == ["dense/notes.txt"]
    assert sum("tfevents" in name for name in kept) == 1
    assert Archive(folder / "checkpoints").steps() == [4]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("within", ["", ".."])
def test_a_run_is_not_written_among_the_data_that_it_reads(config, overwrite, within):
    text = Path(config.masked_text.folder)
    before = contents(text.parent)
    with pytest.raises(ValueError, match=r"holds what the run is to read \(masked_text\.folder=/"):
        quiet_run(config, out=str(text / within), overwrite=overwrite)
    assert contents(text.parent) == before
    assert quiet_run(config, out=str(text / "runs"))  # what is read matches a pattern


@pytest.mark.parametrize("overwrite", [True, False])
def test_settings_of_something_else_are_no_run(config, overwrite):
    folder = Path(config.out)
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "events").write_text("theirs")
    (folder / "config.yaml").write_text("train: {lr: 0.1}\nmy: project\n")
    (folder / "result.json").write_text("{}")
    before = contents(folder)
    with pytest.raises(
        ValueError, match=r"holds config\.yaml, result\.json, tensorboard that no run"
    ):
        quiet_run(config, overwrite=overwrite)
    assert contents(folder) == before


def test_stages_are_checked_before_a_run_is_deleted(config):
    config.tensorize = comera.TTConfig(rank=4)
    quiet_run(config)
    before = contents(Path(config.out))
    pruning = ImportancePruningConfig(share=0.1)
    with pytest.raises(ValueError, match=r"importance_pruning\.share=0\.1 of 4 steps is no"):
        quiet_run(config, importance_pruning=pruning, overwrite=True)
    assert contents(Path(config.out)) == before


def test_the_variant_of_a_sweep_is_not_deleted(config):
    """One may be named ``dense``, as the folder of a twin is."""
    quiet_run(config, out=f"{config.out}/dense/seed-0")
    folder = Path(config.out)
    before = contents(folder)
    with pytest.raises(ValueError, match="holds dense that no run here has written"):
        quiet_run(config)
    shutil.copytree(folder / "dense" / "seed-0", folder, dirs_exist_ok=True)  # a run itself
    quiet_run(config, seed=5, overwrite=True)
    with pytest.raises(ValueError, match="holds dense that no run here has written"):
        quiet_run(config, seed=5, overwrite=True, twin=True)
    kept = contents(folder)
    assert {name: kept[name] for name in before} == before


def test_a_second_run_changes_nothing_of_one_that_goes_on(config):
    quiet_run(config)
    before = contents(Path(config.out))
    with lock(Path(config.out)):
        for changes in ({}, {"seed": 7, "overwrite": True}):
            with pytest.raises(FolderInUseError, match="is being written to by another process"):
                quiet_run(config, **changes)
    assert contents(Path(config.out)) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masked_text": TextData("/nowhere/at/all")}, "/nowhere/at/all"),
        ({"model": ModelConfig(d_model=16, num_heads=3)}, "num_heads"),
        pytest.param(
            {"device": "cuda"},
            "device='cuda' cannot be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=["data", "model", "device"],
)
def test_a_run_is_deleted_only_once_another_can_begin(config, changes, message):
    quiet_run(config)
    before = contents(Path(config.out))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        quiet_run(config, overwrite=True, **changes)
    assert contents(Path(config.out)) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"masked_text": TextData("/nowhere/at/all")}, "there is no folder /nowhere/at/all"),
        ({"nli": NliData("/nowhere.txt", "/nowhere.txt")}, "no data file at /nowhere.txt"),
        ({"clicks": ClickData("/nowhere.csv")}, "no data file at /nowhere.csv"),
        (
            {"model": ModelConfig(d_model=16, num_heads=3)},
            "model.d_model=16 is not a multiple of num_heads=3",
        ),
        (
            {"tensorize": comera.TTConfig(rank=2), "two_stage": TwoStageConfig(target=1e-4)},
            "two_stage.target=0.0001 leaves",
        ),
    ],
    ids=["text", "pairs", "clicks", "model", "target"],
)
def test_what_settings_alone_tell_is_said_before_any_work(config, capsys, changes, message):
    data = {name: None for name in ("masked_text",) if {"nli", "clicks"} & changes.keys()}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(dataclasses.replace(config, **data, **changes))
    assert "preparing data" not in capsys.readouterr().out
    assert not Path(config.out).exists()


def test_a_folder_that_cannot_be_written_is_named_before_any_work(config, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path(config.out).parent)
    with pytest.raises(ValueError, match=r"run cannot be written: .* may only be read; choose"):
        run(config)
    assert "preparing data" not in capsys.readouterr().out


def test_home_is_expanded(config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    quiet_run(config, out="~/mine")
    assert (tmp_path / "home" / "mine" / "result.json").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("damaged", ["", "a: [1"])
def test_damaged_settings_are_named_and_can_be_replaced(config, damaged):
    quiet_run(config)
    file = Path(config.out) / "config.yaml"
    file.write_text(damaged)
    with pytest.raises(ValueError, match=r"config\.yaml"):
        quiet_run(config)
    quiet_run(config, overwrite=True)
    assert yaml.safe_load(file.read_text())["seed"] == 0


@pytest.mark.parametrize("damaged", ["", '{"name": "den', "[]"])
def test_a_damaged_result_is_named_and_written_again(config, damaged, capsys):
    quiet_run(config)
    file = Path(config.out) / "result.json"
    before = json.loads(file.read_text())
    file.write_text(damaged)
    assert main(["report", config.out]) == 1
    said = capsys.readouterr().err
    assert f"{file} is damaged" in said
    assert f"comera train {config.out} writes it again" in said
    quiet_run(config)
    assert json.loads(file.read_text())["metrics"] == before["metrics"]


@pytest.mark.parametrize("name", ["[best] run", "[/x]"])
def test_errors_repeat_what_was_typed(tmp_path, capsys, name):
    assert main(["report", str(tmp_path / name)]) == 1
    assert f"there is no folder {tmp_path / name}" in capsys.readouterr().err
    (tmp_path / name).mkdir(parents=True)
    assert main(["report", str(tmp_path / name)]) == 1
    assert f"{name} is not a run" in capsys.readouterr().err


def test_a_file_in_the_place_of_a_folder_is_named(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    settings = dataclasses.asdict(config) | {"out": str(tmp_path / "file")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(tmp_path / "run.yaml")]) == 1
    assert f"{tmp_path / 'file'} is a file, choose a folder" in capsys.readouterr().err


def test_a_run_of_another_task_differs_in_a_few_words(config):
    quiet_run(config)
    with pytest.raises(ValueError, match=r"masked_text: \{...\} -> None, causal_text: ") as raised:
        quiet_run(config, masked_text=None, causal_text=config.masked_text, seed=3)
    assert len(str(raised.value)) < 400
