"""An interrupted run goes on, and to more steps than it was begun with where that is sound."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import comera
from comera._command import INTERRUPTED
from comera.checkpoint.archive import Archive
from comera.data.text import TextData
from comera.nn.targets import TTConfig
from comera.recipes.after_training import runs_table
from comera.recipes.optimizers import AdamWConfig, MuonConfig, SGDConfig
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run import planned_memory, run
from comera.recipes.run_config import ModelConfig, RunConfig, TrainConfig, TwoStageConfig
from comera.recipes.run_folder import begun_run
from comera.train.log import last_logged, read_metrics
from comera.train.step import NonFiniteLossError, TrainStep
from tests.recipes.conftest import wait_for
from tests.recipes.test_folder import contents
from tests.recipes.test_sweep import interrupted_at
from tests.texts import write_functions


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    """A run of 20 steps: 8 of the early stage, 8 of the late one, 4 afterwards."""
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    write_functions(tmp_path / "text", 4, 30)
    return RunConfig(
        out=str(tmp_path / "runs" / "mine"),
        masked_text=TextData(str(tmp_path / "text"), vocab_size=300, length=16, heldout=0.3),
        model=ModelConfig(d_model=16, num_layers=1, num_heads=2, ffn_dim=32),
        tensorize=TTConfig(rank=4, order=2, target_modules="transform"),
        two_stage=TwoStageConfig(target=0.7),
        train=TrainConfig(steps=20, batch_size=2, eval_batches=1, log_every=1),
    )


def longer(config: RunConfig, steps: int) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def test_before_the_late_stage_and_after_it_there_may_be_more_steps(config):
    interrupted_at(3, config)
    interrupted_at(15, longer(config, 30))  # its late stage is from 12 to 24
    with pytest.raises(ValueError, match="mine holds a run with other settings") as caught:
        run(longer(config, 40))
    assert "(train.steps: 30 -> 40: it was interrupted in the late stage" in str(caught.value)
    assert "let it end with the old one, and give it more" in str(caught.value)
    interrupted_at(25, longer(config, 30))  # its ranks are cut
    (outcome,) = run(longer(config, 32), Console(quiet=True), quiet=True)
    assert outcome.steps == 32
    assert outcome.ranks["size"] <= outcome.ranks["target_size"]
    lines = [line for line in read_metrics(Path(config.out)) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 33))


def test_the_late_stage_is_known_though_no_line_of_the_log_is_of_it(config):
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, log_every=100))
    assert not interrupted_at(11, config)  # its late stage is from 8 to 16
    with pytest.raises(ValueError, match="it was interrupted in the late stage"):
        run(longer(config, 40))


@pytest.mark.parametrize("removed", ["checkpoints", "checkpoints/step-000000020"])
@pytest.mark.parametrize("model", ["", "dense"])
def test_a_trained_run_without_checkpoints_is_not_begun_anew_by_more_steps(config, removed, model):
    config = dataclasses.replace(config, twin=True)
    run(config, Console(quiet=True), quiet=True)
    shutil.rmtree(Path(config.out) / model / removed)
    before = contents(Path(config.out))
    with pytest.raises(ValueError, match=r"steps: 20 -> 30: its checkpoints, .* are gone\)"):
        run(longer(config, 30), Console(quiet=True), quiet=True)
    assert contents(Path(config.out)) == before
    assert len(run(config, Console(quiet=True), quiet=True)) == 2  # as it was


def test_a_longer_run_trains_its_twin_for_longer_too(config):
    config = longer(dataclasses.replace(config, twin=True, two_stage=None), 2)
    run(config, Console(quiet=True), quiet=True)
    calls, real = itertools.count(), TrainStep.__call__

    def call(step, batch):
        if next(calls) == 2:  # after two more steps of the model itself, in the first of its twin
            os.kill(os.getpid(), signal.SIGINT)
        return real(step, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", call)
        assert run(longer(config, 4), Console(quiet=True), quiet=True) == []
    outcomes = run(longer(config, 4), Console(quiet=True), quiet=True)
    assert [outcome.steps for outcome in outcomes] == [4, 4]


@pytest.mark.parametrize("length", ["steps", "seconds"])
def test_a_longer_run_goes_on_with_the_rates_of_its_length(config, monkeypatch, length):
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    rates, call = [], TrainStep.__call__

    def noted(step, batch):
        rates.append([group["lr"] for group in step.optimizer.param_groups])
        return call(step, batch)

    def of(number):
        train = dataclasses.replace(config.train, **{"steps": None, length: number})
        return dataclasses.replace(config, train=train)

    interrupted_at(3, of(20))  # whose gates have to close sooner
    monkeypatch.setattr(TrainStep, "__call__", noted)
    interrupted_at(5, of(300))
    config.out += "-whole"
    interrupted_at(5, of(300))
    assert rates[:2] == rates[-2:]


@pytest.mark.slow
@pytest.mark.usefixtures("hears_hang_ups")
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_run_whose_terminal_is_closed_is_saved(config, tmp_path, command):
    config = longer(config, 100_000)
    settings = json.loads(json.dumps(config.settings()))
    folder = Path(config.out)
    if command == "sweep":
        folder = tmp_path / "runs/mine/seed-0"
        about = {"out": str(tmp_path / "runs"), "seeds": [0], "reference": "mine"}
        settings = {**about, "base": settings, "variants": {"mine": {}}}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(settings))
    ours, theirs = os.openpty()
    # The leader of a session gets the first terminal that it opens as its own.
    words = [sys.executable, "-m", "comera", command, str(tmp_path / "file.yaml")]
    shell = ["sh", "-c", f'exec "$@" <{os.ttyname(theirs)} >{os.ttyname(theirs)} 2>&1', "sh"]
    environment = {**os.environ, "PYTHONPATH": str(Path(comera.__file__).parents[1])}
    with subprocess.Popen([*shell, *words], env=environment, start_new_session=True) as process:
        os.close(theirs)
        os.set_blocking(ours, False)

        def ready():
            with contextlib.suppress(OSError):  # a terminal that nobody reads is full at some time
                os.read(ours, 1 << 16)
            return (last_logged(folder, "loss") or (0,))[0] >= 5

        wait_for(ready, process)
        os.close(ours)
        assert process.wait(timeout=300) == INTERRUPTED
    (saved,) = Archive(folder / "checkpoints").steps()
    assert last_logged(folder, "loss")[0] == saved


def test_how_often_a_run_logs_and_saves_may_change(config, capsys):
    config.train.log_every = 5
    interrupted_at(3, config)
    config.train = dataclasses.replace(config.train, log_every=2, save_every=7)
    (outcome,) = run(config, quiet=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "goes on with train.log_every: 5 -> 2, train.save_every: 200 -> 7" in said
    assert outcome.steps == 20
    lines = [line["step"] for line in read_metrics(Path(config.out)) if "loss" in line]
    assert lines == list(range(6, 21, 2))
    config.train.eval_every = 5
    with pytest.raises(ValueError, match=r"other settings \(train.eval_every: 0 -> 5\)"):
        run(config, quiet=True)


def test_a_run_by_its_folder_has_the_optimizers_of_its_file(config):
    """Its twin has another default: what was left open has to be left open in the folder."""
    config.twin = True
    interrupted_at(0, config)
    path = Path(config.out) / "config.yaml"
    again = parse_settings(RunConfig, read_yaml(path) | {"out": config.out})
    assert [*map(str, planned_memory(again))] == [*map(str, planned_memory(config))]
    assert again.optimizer.of_twin() == AdamWConfig(name=None)
    assert begun_run(again).difference is begun_run(longer(again, 30)).difference is None


def test_a_rate_of_the_gates_that_is_no_longer_given_is_another_setting(config):
    given = dataclasses.replace(config, optimizer=MuonConfig(name=None, gate_lr=0.05))
    interrupted_at(0, given)
    assert begun_run(given).difference is begun_run(longer(given, 30)).difference is None
    assert begun_run(longer(config, 30)).difference == "optimizer.gate_lr: 0.05 -> None"


def test_a_finished_model_and_its_unfinished_twin_are_listed_as_such(tmp_path):
    (tmp_path / "mine" / "dense").mkdir(parents=True)
    (tmp_path / "mine" / "config.yaml").write_text(
        "train: {steps: 20}\ntensorize: {rank: 2}\ntwin: true\n"
    )
    (tmp_path / "mine" / "result.json").write_text('{"steps": 20}')

    assert "20 of 20 │ finished, its dense twin not begun │" in listed(tmp_path)
    (tmp_path / "mine" / "dense" / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    assert "20 of 20 │ finished, its dense twin begun │" in listed(tmp_path)
    (tmp_path / "mine" / "dense" / "result.json").write_text('{"st')
    assert "finished, its dense twin result.json is damaged" in listed(tmp_path)
    (tmp_path / "mine" / "dense" / "result.json").write_text('{"steps": 20}')
    assert "20 of 20 │ finished │" in listed(tmp_path)


def test_a_run_that_ended_in_nan_is_listed_as_failed(config):
    config.optimizer = SGDConfig(lr=1e30)
    config.tensorize = config.two_stage = config.train.clip_norm = None
    with pytest.raises(NonFiniteLossError):
        run(config, Console(quiet=True), quiet=True)
    folder = Path(config.out).parent
    assert "failed: the loss is nan at step 2" in listed(folder)
    (Path(config.out) / "metrics.jsonl").unlink()
    assert "not begun" not in listed(folder)  # there is a checkpoint of step 1


def test_a_run_of_a_sweep_that_failed_before_its_settings_were_written_is_listed(tmp_path):
    folder = tmp_path / "tt" / "seed-0"
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    log.write_text("$ comera train tt/seed-0.yaml\nrun folder tt/seed-0: preparing data\n")
    assert "tt/seed-0 │      │     0 │ not begun │" in listed(tmp_path)
    with log.open("a") as file:
        file.write("error: there is no folder [text]: look\n")
    assert "│ failed: there is no folder [text]: look │" in listed(tmp_path)
    with log.open("a") as file:
        file.write("$ comera train tt/seed-0.yaml\n")  # it was started again
    assert "│ not begun │" in listed(tmp_path)


def listed(folder: Path) -> str:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(runs_table(folder))
    return printed.get()
