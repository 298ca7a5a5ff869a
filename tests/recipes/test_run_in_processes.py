"""One run in one, two and four processes: the same losses, ranks and weights."""

import dataclasses
import functools
import itertools
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from comera.data.clicks import ClickData
from comera.data.nli import NliData
from comera.data.text import TextData
from comera.nn.targets import TTConfig
from comera.recipes.optimizers import AdamWConfig, CAMEConfig, MuonConfig
from comera.recipes.run import _check_same_data, run
from comera.recipes.run_config import (
    CheckpointConfig,
    DlrmConfig,
    ImportancePruningConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    TwoStageConfig,
)
from comera.recipes.run_folder import DataRecord, lock
from comera.train.log import read_metrics
from tests.data.test_clicks import table
from tests.data.test_nli import pairs, write_snli
from tests.processes import in_processes, this_process
from tests.texts import write_functions

pytestmark = pytest.mark.slow  # interpreters have to start

STEPS, SAVED = 15, 5
"""Of the runs through all stages: they are in their first stage when they are saved first."""

STAGED = ("stages", "shared out")
"""Runs through all stages, which are resumed too."""


def cases() -> dict[str, RunConfig]:
    """Runs by name, over data in the folder that the environment names."""
    folder = Path(os.environ["FOLDER"])
    text = TextData(str(folder / "text"), vocab_size=300, length=16, heldout=0.2)
    nli = NliData(*[str(folder / name) for name in ("train.jsonl", "dev.jsonl")], vocab_size=120)
    clicks = ClickData(str(folder / "clicks.csv"), label="rating")
    ranks = TTConfig(rank=6, embedding_rank=6, order=2)
    small = ModelConfig(d_model=16, num_layers=1, num_heads=2, ffn_dim=32, dropout=0.0)

    def config(steps, **settings):
        loop = {"steps": steps, "batch_size": 8, "eval_batches": 3, "log_every": 2}
        always = {
            "model": small, "tensorize": ranks, "train": TrainConfig(**loop, save_every=0)
        }  # fmt: skip
        return RunConfig(
            dlrm=DlrmConfig(embedding_dim=4, bottom=[8], top=[8]),
            checkpoints=CheckpointConfig(keep_last=None),
            **always | settings,
        )

    every = functools.partial(TrainConfig, batch_size=8, eval_batches=3, log_every=2)
    return {
        "stages": config(
            STEPS, masked_text=text, two_stage=TwoStageConfig(target=0.6),
            optimizer=MuonConfig(gate_lr=0.1), twin=True,
            train=every(steps=STEPS, save_every=SAVED),
        ),
        "shared out": config(
            STEPS, masked_text=text, two_stage=TwoStageConfig(target=0.6),
            tensorize=dataclasses.replace(ranks, exclude_modules=["fc1"]),
            optimizer=MuonConfig(gate_lr=0.1), parallel="fsdp",
            train=every(steps=STEPS, save_every=SAVED),
        ),
        "importance": config(
            10, causal_text=text, importance_pruning=ImportancePruningConfig(target=0.6),
            optimizer=AdamWConfig(), train=every(steps=10, accumulate=2),
        ),
        "in backward": config(
            8, masked_text=text, optimizer=CAMEConfig(in_backward=True),
            train=every(steps=8, clip_norm=None),
        ),
        "pairs": config(8, nli=nli),
        "clicks": config(8, clicks=clicks),
        "clicks shared out": config(
            8, clicks=clicks, parallel="fsdp",
            tensorize=TTConfig(rank=2, embedding_rank=2, order=2, target_modules=["tables.user"]),
        ),
        "dense": config(8, masked_text=text, tensorize=None),
    }  # fmt: skip


def trained(name, out, processes=None, **changes):
    settings = vars(cases()[name]) | {"out": str(Path(os.environ["FOLDER"]) / out)} | changes
    return run(RunConfig(**settings), Console(quiet=True), quiet=True, processes=processes)


def cut_back(of, to):
    """Copy a run as it was when its first checkpoint had been written."""
    folder = Path(os.environ["FOLDER"])
    shutil.copytree(folder / of, folder / to)
    for gone in ("result.json", "model.safetensors", "dense"):
        path = folder / to / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert (folder / to / "checkpoints" / f"step-{SAVED:09d}").is_dir()
    for path in (folder / to / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > SAVED:
            shutil.rmtree(path)


def said(call):
    try:
        call()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing was raised"


def _found(rank):
    processes = this_process()
    count = processes.count
    names = list(cases()) if count == 2 else STAGED
    outcomes = {name: trained(name, f"{count}/{name}", processes) for name in names}
    for name in STAGED:
        outcomes[f"{name} resumed"] = trained(name, f"{count}/{name} from 1", processes)
    if count > 2:
        return {"outcomes": outcomes}
    folder = Path(os.environ["FOLDER"])
    processes.from_first(lambda: cut_back("2/stages", "2/resumed from 2"))
    outcomes["again"] = trained("stages", "2/resumed from 2", processes)
    outcomes["dropout"] = trained_with_dropout(processes)
    with pytest.MonkeyPatch.context() as patch:  # each process has a clock of its own pace
        patch.setattr(time, "perf_counter", itertools.count(0, 1 + rank).__next__)
        length = TrainConfig(seconds=12, batch_size=8)
        outcomes["by the clock"] = trained("stages", "2/clock", processes, train=length)
    lossy = CheckpointConfig("lossy", keep_last=None)
    outcomes["lossy"] = trained("shared out", "2/lossy", processes, checkpoints=lossy)
    optimizer = CAMEConfig()
    problems = {
        "came": said(lambda: trained("shared out", "came", processes, optimizer=optimizer)),
        "odd": said(lambda: trained("dense", "odd", processes, train=TrainConfig(9, batch_size=9))),
        "other data": said(
            lambda: _check_same_data(DataRecord({"a.txt": str(min(rank, 1))}), processes)
        ),
    }
    if rank == 0:
        with lock(folder / "held"):
            problems["held"] = said(lambda: trained("dense", "held", processes))
    else:
        problems["held"] = said(lambda: trained("dense", "held", processes))
    return {"outcomes": outcomes, "problems": problems}


def trained_with_dropout(processes):
    """Train in one go, and again with a cut; the folders."""
    model = ModelConfig(d_model=16, num_layers=1, num_heads=2, ffn_dim=32, dropout=0.3)
    settings = {"model": model, "train": TrainConfig(2 * SAVED, batch_size=8, save_every=SAVED)}
    whole = trained("dense", "2/dropout", processes, **settings)
    processes.from_first(lambda: cut_back("2/dropout", "2/dropout resumed"))
    return whole, trained("dense", "2/dropout resumed", processes, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything trained: by one process in ``1``, by two in ``2``, by four in ``4``."""
    folder = tmp_path_factory.mktemp("runs")
    write_functions(folder / "text", 8, 40)
    write_snli(folder / "train.jsonl", pairs(60))
    write_snli(folder / "dev.jsonl", pairs(30, seed=1))
    table(100).to_csv(folder / "clicks.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(folder))
        patch.setenv("COMERA_CACHE", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in cases():
            trained(name, f"1/{name}")
        for count in (2, 4):
            for name in STAGED:
                cut_back(f"1/{name}", f"{count}/{name} from 1")
            found = in_processes(count, _found, tmp_path_factory.mktemp("processes"))
            torch.save(found, folder / f"{count}.pt")
        for name in STAGED:
            cut_back(f"4/{name}", f"1/{name} from 4")
            trained(name, f"1/{name} from 4")
        cut_back("2/lossy", "1/lossy from 2")
        trained("shared out", "1/lossy from 2", checkpoints=CheckpointConfig("lossy"))
    return folder


def figures(folder):
    """Numbers of a run's log, but times."""
    return [
        {key: value for key, value in line.items() if key not in ("time", "seconds")}
        for line in read_metrics(folder)
    ]


def assert_alike(one, other):
    mine, theirs = figures(one), figures(other)
    assert [line.keys() for line in mine] == [line.keys() for line in theirs]
    for line, same in zip(mine, theirs, strict=True):
        for key in line:
            exact = not isinstance(line[key], float)
            assert line[key] == (same[key] if exact else pytest.approx(same[key], rel=1e-4)), key
    weights, same = (load_file(path / "model.safetensors") for path in (one, other))
    assert weights.keys() == same.keys()
    for name, weight in weights.items():
        if name.endswith("key.bias"):  # no loss depends on it: its gradient is rounding
            continue
        torch.testing.assert_close(weight, same[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "stages",
        "shared out",
        "importance",
        "in backward",
        "pairs",
        "clicks",
        "clicks shared out",
        "dense",
    ],
)
def test_two_processes_train_as_one(folder, name):
    assert_alike(folder / "2" / name, folder / "1" / name)


def test_four_processes_and_the_twin_train_as_one(folder):
    for name in STAGED:
        assert_alike(folder / "4" / name, folder / "1" / name)
    for count in "24":
        assert_alike(folder / count / "stages" / "dense", folder / "1" / "stages" / "dense")


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize(("count", "of"), [(2, 1), (4, 1), (1, 4)])
def test_a_run_is_resumed_by_another_number_of_processes(folder, name, count, of):
    assert_alike(folder / f"{count}/{name} from {of}", folder / f"1/{name}")


def test_lossy_checkpoints_of_what_is_shared_out_are_read_by_one_process(folder):
    """Nearly: what was left out of a checkpoint changes what follows."""
    whole, resumed = (
        [line["loss"] for line in read_metrics(folder / name) if "loss" in line]
        for name in ("1/shared out", "1/lossy from 2")
    )
    assert resumed == pytest.approx(whole, rel=0.05)
    assert resumed[: SAVED // 2] == pytest.approx(whole[: SAVED // 2], rel=1e-4)


def test_two_processes_resume_exactly_dropout_too(folder):
    for one, other in (("stages", "resumed from 2"), ("dropout", "dropout resumed")):
        whole, again = (folder / "2" / name / "model.safetensors" for name in (one, other))
        assert whole.read_bytes() == again.read_bytes()


def test_all_processes_return_the_same_figures(folder):
    for count in (2, 4):
        first, *others = torch.load(folder / f"{count}.pt", weights_only=False)
        assert all(other["outcomes"] == first["outcomes"] for other in others)
        for outcome in first["outcomes"]["by the clock"] if count == 2 else ():
            assert 12 <= outcome.seconds < 14  # by the clock of the first


def test_what_one_process_finds_wrong_is_said_by_all(folder):
    first, second = (found["problems"] for found in torch.load(folder / "2.pt", weights_only=False))
    assert first["odd"] == second["odd"]
    assert "train.batch_size=9 is that of all processes together, and 2" in first["odd"]
    assert "give 8 or 10" in first["odd"]
    assert first["came"].startswith("ValueError: optimizer.name=came needs whole matrices")
    assert "parallel=ddp" in first["came"]
    assert first["held"].startswith("FolderInUseError")
    assert second["held"].startswith("OtherProcessError: process 0: FolderInUseError: ")
    problem = "it has read other data than process 0 (1 file: a.txt changed): give every machine"
    assert problem in second["other data"]
    assert first["other data"].startswith(f"OtherProcessError: process 1: {problem}")
