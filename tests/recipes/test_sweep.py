import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import comera
from comera.checkpoint.archive import FolderInUseError
from comera.recipes.cli import main
from comera.recipes.jobs import Job, Launcher, Started, resolve, run_jobs
from comera.recipes.parse import merged, nested
from comera.recipes.run import run
from comera.recipes.run_config import RunConfig
from comera.recipes.run_folder import lock, settings_of
from comera.recipes.sweep import make_jobs, read_sweep, run_sweep, show_progress
from comera.train.step import TrainStep
from tests.recipes.conftest import wait_for
from tests.texts import write_functions

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def content(tmp_path, monkeypatch) -> dict:
    """A sweep of runs of a moment on a little text."""
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    write_functions(text, 6, 40)
    return {
        "out": str(tmp_path / "out"),
        "seeds": [0],
        "reference": "dense",
        "base": {
            "out": "elsewhere",
            "twin": True,
            "masked_text": {"folder": str(text), "vocab_size": 300, "length": 16, "heldout": 0.2},
            "model": {"d_model": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32},
            "tensorize": {"rank": 4, "order": 2, "target_modules": "all-linear"},
            "train": {"steps": 6, "batch_size": 4, "eval_batches": 2, "log_every": 2},
        },
        "variants": {"dense": {"tensorize": None}, "tt": {}},
    }


def written(content: dict, tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def sweep_of(content: dict, tmp_path: Path):
    return read_sweep(written(content, tmp_path))


def carried_out(content: dict, tmp_path: Path, **options) -> tuple[int, str]:
    """Exit status and what was printed."""
    console = Console(width=200, record=True, file=(tmp_path / "printed").open("w"))
    status = run_sweep(sweep_of(content, tmp_path), console=console, **options)
    console.file.close()
    return status, console.export_text()


def finish(job, seconds: float = 1.0, steps: int = 6) -> None:
    """Leave the folder of a job as its run would."""
    settings = yaml.safe_dump(settings_of(job.config), sort_keys=False)
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "config.yaml").write_text(settings)
    facts = {
        "params": 10,
        "metrics": {"loss": 2.0},
        "steps": steps,
        "seconds": seconds,
        "layers": [],
    }
    (job.folder / "result.json").write_text(json.dumps(facts))


def interrupted_at(step: int, config) -> list[str]:
    """Begin a run and press Ctrl-C in a step; returns its log."""
    real = TrainStep.__call__

    def call(self, batch):
        if self.steps_done == step:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", call)
        assert run(config, Console(quiet=True), quiet=True) == []
    return (Path(config.out) / "metrics.jsonl").read_text().splitlines()


def test_merging_goes_deep_and_null_replaces():
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": {"f": 3}}
    over = {"a": {"c": {"g": 4}}, "e": None, "h": {"i": 5}}
    assert merged(base, over) == {"a": {"b": 1, "c": {"d": 2, "g": 4}}, "e": None, "h": {"i": 5}}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": {"f": 3}}
    assert merged(base, {"a": {}, "e": {}}) == base  # sections
    assert merged(base, {"a": {"c": {}}})["a"] == {"b": 1, "c": {}}  # a setting that is a mapping
    dotted = nested(
        {"train.steps": 3, "train": {"batch_size": 2}, "tensorize.rank_pattern": {"a.b": 1}}
    )
    assert dotted == {
        "train": {"steps": 3, "batch_size": 2},
        "tensorize": {"rank_pattern": {"a.b": 1}},
    }


def test_variants_take_over_what_they_extend(content, tmp_path):
    content["variants"] |= {
        "tt-8": {"tensorize.rank": 8, "optimizer": {"lr": "2e-3"}},
        "tt-8-wide": {"extends": "tt-8", "model": {"ffn_dim": 64}},
        "again-dense": {"extends": "tt-8-wide", "tensorize": None},
    }
    variants = sweep_of(content, tmp_path).variants
    assert variants["dense"].tensorize is None
    assert variants["tt"].tensorize.rank == 4
    wide = variants["tt-8-wide"]
    assert (wide.tensorize.rank, wide.tensorize.order, wide.model.ffn_dim) == (8, 2, 64)
    assert (wide.optimizer.lr, wide.model.d_model, wide.twin) == (2e-3, 16, False)
    assert variants["again-dense"].tensorize is None
    assert variants["again-dense"].model.ffn_dim == 64


def test_a_base_may_be_a_file_beside_the_sweep(content, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "base.yaml").write_text(yaml.safe_dump(content["base"]))
    content["base"] = "runs/base.yaml"
    assert sweep_of(content, tmp_path).variants["tt"].train.steps == 6
    content["base"] = "runs/bse.yaml"
    with pytest.raises(FileNotFoundError, match=r"runs/bse\.yaml"):
        sweep_of(content, tmp_path)


def test_every_seed_and_variant_is_a_job(content, tmp_path):
    content["seeds"] = [3, 5]
    jobs = make_jobs(sweep_of(content, tmp_path))
    assert [job.name for job in jobs] == [
        f"{name}, seed {seed}" for seed in (3, 5) for name in ("dense", "tt")
    ]
    assert [job.config.seed for job in jobs] == [3, 3, 5, 5]
    assert jobs[3].folder == tmp_path / "out" / "tt" / "seed-5"


def assert_refused(content: dict, tmp_path: Path, path: str, value, message: str) -> None:
    """With another value at a path of keys the sweep is refused, before anything is written."""
    *outer, last = path.split("/")
    place = content
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = value
    with pytest.raises(ValueError, match=message) as caught:
        run_sweep(sweep_of(content, tmp_path), console=Console(quiet=True))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("variant", {}, "variant is no key of a sweep: did you mean variants?"),
        ("seeds", None, "lacks the key seeds"),
        ("seeds", [0, 1, 0], r"seeds=\[0, 1, 0\] has 0 more than once"),
        ("seeds", 3, "seeds=3 must be a list"),
        ("seeds", [0, -1], "must be a list of whole numbers from 0"),
        ("reference", "denes", "reference=denes is no variant: did you mean dense?"),
        ("variants", {}, "variants={} must be mappings"),
        ("variants/a b", {}, "variant 'a b' must have a name"),
        ("variants/../x", {}, "variant '..' must have a name"),
        ("variants/tt", 3, "variant tt: 3 must be a mapping"),
        ("variants/tt", {"modell": {}}, "variant tt: modell is not a setting: did you mean model?"),
        ("variants/tt", {"model.d_modl": 3}, "variant tt: model.d_modl is not .* mean d_model?"),
        (
            "variants/tt",
            {"train.steps": 1.5},
            "variant tt: train.steps=1.5 must be a whole number",
        ),
        (
            "variants/tt",
            {"optimizer.weight_decay": None},
            "weight_decay=(null|None) must be a number",
        ),
        ("variants/tt", {"tensorize": 5}, "variant tt: tensorize=5 must be a section"),
        ("variants/tt", {"train.steps": 0}, "variant tt: train.steps=0 must be at least 1"),
        ("variants/tt", {"train.epochs": 2}, "variant tt: give exactly one of train.steps, "),
        ("variants/tt", {"seed": 2}, "variant tt: seed is not for a variant to set"),
        ("variants/tt", {"train.steps": 1, "train": {"steps": 2}}, "steps is given twice: 1 and 2"),
        ("variants/tt", {"tensorize.rank": [4, 4]}, "variant tt: .*rank"),
        ("variants/tt", {"extends": "dens"}, "extends=dens is no variant: did you mean dense?"),
        (
            "variants/tt",
            {"train": {"steps": None, "seconds": 0}},
            "variant tt: train.seconds=0.0 must be above 0",
        ),
        ("variants/tt", {"train.seconds": 9}, "as null: not steps and seconds"),
        ("variants/tt", {"extends": "tt"}, "extends goes round in a circle: tt -> tt"),
        (
            "metric",
            "accurcy",
            "metric=accurcy is not measured in variant dense; all variants have loss",
        ),
        ("metric", "accuracy", "metric=accuracy is not measured in variant dense"),
        ("base", 3, "base=3 must be the path"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(content, tmp_path, path, value, message):
    assert_refused(content, tmp_path, path, value, message)


def test_a_name_given_twice_is_not_lost(content, tmp_path):
    path = written(content, tmp_path)
    path.write_text(path.read_text() + "  tt: {tensorize.rank: 8}\n")
    with pytest.raises(ValueError, match=r"the key tt in line .* is there already"):
        read_sweep(path)


@pytest.mark.slow
def test_a_folder_with_other_settings_is_refused_or_begun_anew(content, tmp_path):
    for job in make_jobs(sweep_of(content, tmp_path)):
        finish(job)
    content["variants"]["tt"] = {"optimizer.lr": 1e-3}
    jobs = make_jobs(sweep_of(content, tmp_path))
    with pytest.raises(ValueError, match=r"out/tt/seed-0 holds .* \(optimizer.lr: 0.0007 -> 0.001"):
        resolve(jobs)
    jobs = make_jobs(sweep_of(content, tmp_path))
    resolve(jobs, overwrite=True)
    assert [(job.state, job.config.overwrite) for job in jobs] == [
        ("finished", False),
        ("waiting", True),
    ]


def test_a_finished_sweep_trains_nothing_and_shows_its_table(content, tmp_path):
    for job in make_jobs(sweep_of(content, tmp_path)):
        finish(job)
    status, printed = carried_out(content, tmp_path)
    assert status == 0
    assert "2 runs in" in printed
    assert "2 of them finished" in printed
    assert re.search(r"tt +│ +1/1 │ +10 │ 1\.00x │ 2\.0000 ± –", printed)


def test_what_is_finished_is_compared_though_it_is_skipped(content, tmp_path):
    content["seeds"] = [0, 1]
    jobs = make_jobs(sweep_of(content, tmp_path))
    for job in jobs[:3]:
        finish(job)
    status, printed = carried_out(content, tmp_path, skip=["dense/seed-0", "tt/seed-1"])
    assert status == 0
    assert "2 runs in" in printed
    facts = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["variant"], row["seeds"]) for row in facts["summary"]] == [
        ("dense", [0, 1]),
        ("tt", [0]),
    ]


def test_runs_that_failed_are_among_those_that_have_ended(content, tmp_path):
    jobs = [*make_jobs(sweep_of(content, tmp_path)), Job("x", 0, RunConfig())]
    finish(jobs[0])
    console = Console(file=io.StringIO(), width=200)
    with show_progress(jobs, "loss", console, 4) as show:
        for job, state in zip(jobs, ("finished", "failed", "stopped"), strict=True):
            job.state = state
            show()
    assert "2/4 1 failed" in console.file.getvalue()


def test_a_pattern_that_no_file_matches_is_said_once_before_anything_starts(content, tmp_path):
    content["base"]["masked_text"]["pattern"] = "**/*.rst"
    said = r"^no run can begin without its data: no file matches '\*\*/\*\.rst' under \S+text$"
    with pytest.raises(FileNotFoundError, match=said):
        run_sweep(sweep_of(content, tmp_path), console=Console(quiet=True))
    assert not list((tmp_path / "out").glob("*/*"))


def test_a_run_whose_result_is_damaged_is_not_finished(content, tmp_path):
    jobs = make_jobs(sweep_of(content, tmp_path))
    for job in jobs:
        finish(job)
    (jobs[1].folder / "result.json").write_text('{"params": 1')
    resolve(jobs)
    assert [job.state for job in jobs] == ["finished", "waiting"]


def test_a_sweep_in_the_folder_of_another_is_refused(content, tmp_path):
    for job in make_jobs(sweep_of(content, tmp_path)):
        finish(job)
    refused = "out is being written to by another process: let that sweep end, or choose another"
    with lock(tmp_path / "out"), pytest.raises(FolderInUseError, match=refused):
        run_sweep(sweep_of(content, tmp_path), console=Console(quiet=True))
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.slow
def test_another_folder_than_the_file_names(content, tmp_path, capsys):
    other = tmp_path / "other"
    for job in make_jobs(dataclasses.replace(sweep_of(content, tmp_path), out=other)):
        finish(job)
    assert main(["sweep", str(written(content, tmp_path)), f"--out={other}"]) == 0
    assert "2 of them finished" in capsys.readouterr().out
    assert (other / "results.md").is_file()
    assert not Path(content["out"]).exists()


@pytest.mark.slow
def test_a_sweep_side_by_side_outlives_a_run_that_fails_and_goes_on_later(
    content, tmp_path, runs_here
):
    content["variants"] |= {
        "fails": {"masked_text.folder": str(tmp_path / "nowhere")},
    }
    begun = interrupted_at(3, make_jobs(sweep_of(content, tmp_path))[0].config)
    status, printed = carried_out(content, tmp_path, at_once=2)
    assert status == 1
    assert re.search(r"failed: fails, seed 0: .*nowhere", printed)
    out = tmp_path / "out"
    runs = {run["variant"]: run for run in json.loads((out / "results.json").read_text())["runs"]}
    assert set(runs) == {"dense", "tt"}
    assert "* fails, seed 0: " in (out / "results.md").read_text()
    assert runs["tt"]["params"] < runs["dense"]["params"]
    assert "preparing data" in (out / "tt" / "seed-0" / "log.txt").read_text()
    assert not (out / "tt" / "seed-0" / "dense").exists()  # no twins
    log = (out / "dense" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert log[: len(begun)] == begun  # what was stopped went on from there
    assert len(log) > len(begun)
    # Later: another variant, and what failed taken out; what is finished stays as it was.
    before = (out / "tt" / "seed-0" / "result.json").stat().st_mtime_ns
    del content["variants"]["fails"]
    content["variants"]["long"] = {"extends": "tt", "train.steps": 8}
    status, printed = carried_out(content, tmp_path)
    assert status == 0
    assert "3 runs in" in printed
    assert "2 of them finished" in printed
    assert (out / "tt" / "seed-0" / "result.json").stat().st_mtime_ns == before
    rows = json.loads((out / "results.json").read_text())["summary"]
    assert [row["variant"] for row in rows] == ["dense", "tt", "long"]
    assert rows[2]["steps"] == 8


@pytest.mark.parametrize(
    ("status", "state"),
    [(0, "finished"), (130, "stopped"), (-signal.SIGINT, "stopped"), (-signal.SIGTERM, "stopped"),
     (1, "failed"), (-signal.SIGKILL, "failed")],
)  # fmt: skip
def test_a_run_that_a_signal_ends_was_stopped(content, tmp_path, status, state):
    (job, *_) = make_jobs(sweep_of(content, tmp_path))
    launcher = Launcher(lambda folder, overwrite: Started(lambda: status, lambda: None), 1)
    assert run_jobs([job], launcher)
    assert job.state == state
    assert bool(job.reason) == (state == "failed")


@pytest.mark.slow
def test_ctrl_c_saves_every_run_and_the_same_command_goes_on(content, tmp_path):
    content["base"]["train"] |= {"steps": 100_000, "log_every": 5}
    content["seeds"] = [0, 1]
    del content["variants"]["tt"]
    command = [sys.executable, "-m", "comera", "sweep"]
    environment = {**os.environ, "PYTHONPATH": str(Path(comera.__file__).parents[1])}
    with subprocess.Popen(
        [*command, str(written(content, tmp_path)), "--jobs=2"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        folders = [tmp_path / "out" / "dense" / f"seed-{seed}" for seed in (0, 1)]
        logs = [folder / "metrics.jsonl" for folder in folders]
        wait_for(lambda: all(log.is_file() and log.stat().st_size for log in logs), process)
        os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert printed.count("stopped; it can be resumed") == 2
    assert "the same command goes on" in printed
    assert all(any((folder / "checkpoints").glob("step-*")) for folder in folders)
    assert not any((folder / "result.json").is_file() for folder in folders)


def test_the_command_line_names_what_is_wrong(content, tmp_path, capsys):
    path = str(written(content, tmp_path))
    assert main(["sweep", path, "--jobs=0"]) == 1
    assert "jobs=0 must be at least 1" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path / "absent.yaml")]) == 1
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*sweep.yaml")), ids=lambda p: p.stem)
def test_the_sweeps_that_come_along_can_be_read(path):
    sweep = read_sweep(path)
    metrics = {"nli": "accuracy", "lm": "perplexity", "dlrm": "auc"}
    assert sweep.metric == metrics[path.parent.name]
    assert sweep.variants[sweep.reference].tensorize is None


def test_a_run_is_no_sweep(tmp_path):
    (tmp_path / "run.yaml").write_text("masked_text: {}\ntrain: {steps: 3}\n")
    with pytest.raises(ValueError, match=r"run\.yaml is no sweep but a run: comera train trains"):
        read_sweep(tmp_path / "run.yaml")
