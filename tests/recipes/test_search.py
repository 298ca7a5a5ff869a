"""``search:`` in a sweep's file."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import comera
from comera.checkpoint.archive import FolderInUseError
from comera.recipes.jobs import Job
from comera.recipes.run_config import RunConfig
from comera.recipes.run_folder import lock
from comera.recipes.search import JOURNAL, Search, read_search
from comera.recipes.sweep import make_jobs, run_sweep
from tests.peers import peer
from tests.recipes.conftest import wait_for
from tests.recipes.test_sweep import (
    assert_refused,
    carried_out,
    content,  # noqa: F401
    finish,
    sweep_of,
    written,
)

ROOT = Path(comera.__file__).parents[1]

QUADRATIC = {"trials": 40, "over": {"x": {"low": -5, "high": 5.0}, "k": ["near", "far"]}}


def searched(folder, trials=None, stop_at=None, **given):
    """Search for the least of a function with its least value at x=1.5, near; what was proposed.

    With ``stop_at`` the search ends as if killed while that trial trains.
    """
    proposed = {}

    def make(name, settings):
        proposed[name] = settings
        jobs = [
            Job(name, seed, dataclasses.replace(RunConfig(), out=str(folder / name / str(seed))))
            for seed in (0, 1)
        ]
        return jobs

    config = read_search({**QUADRATIC, **given})
    if trials is not None:
        config = dataclasses.replace(config, trials=trials)
    folder.mkdir(exist_ok=True)
    search = Search(config, folder, "loss", [0, 1], make)
    waiting = [job for job in search.jobs if not job.folder.is_dir()]
    for job in search.jobs:
        job.state = "waiting" if job in waiting else "finished"
    while waiting := waiting or search.more():
        if waiting[0].variant == stop_at:
            break
        settings = proposed[waiting[0].variant]
        for job in waiting:
            loss = (settings["x"] - 1.5) ** 2 + (settings["k"] == "far") + job.seed
            job.folder.mkdir(parents=True)
            facts = {"params": 1, "metrics": {"loss": loss}, "steps": 1, "seconds": 1, "layers": []}
            (job.folder / "result.json").write_text(json.dumps(facts))
            job.state = "finished"
        search.tell()
        waiting = []
    return proposed, search


def test_it_finds_the_least_of_a_function(tmp_path):
    peer("optuna")
    _, search = searched(tmp_path / "out")
    best = search._study.best_trial
    assert abs(best.params["x"] - 1.5) < 0.1
    assert json.loads(best.params["k"]) == "near"
    assert best.value == pytest.approx((best.params["x"] - 1.5) ** 2 + 0.5)  # the mean over seeds
    assert "40 of 40 trials finished; best: trial-0" in search.summary()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path, sampler):
    """In the middle of trial 13, when TPE has begun to learn."""
    peer("optuna")
    whole, _ = searched(tmp_path / "whole", 16, sampler=sampler)
    before, _ = searched(tmp_path / "cut", 16, "trial-013", sampler=sampler)
    with (tmp_path / "cut" / JOURNAL).open("a") as file:
        file.write('{"op_code": 6, "tri')  # as it is where the machine went down
    after, search = searched(tmp_path / "cut", 16, sampler=sampler)
    assert len(before) == 14
    assert after == whole
    assert before.items() <= whole.items()
    assert len({json.dumps(settings) for settings in whole.values()}) == 16
    assert "16 of 16 trials finished" in search.summary()
    more, _ = searched(tmp_path / "cut", 17, sampler=sampler)
    assert len(more) == 17
    with pytest.raises(ValueError, match=r"search\.seed: 0 -> 5\); choose another out"):
        searched(tmp_path / "cut", 17, sampler=sampler, seed=5)
    other, _ = searched(tmp_path / "other", 3, sampler=sampler, seed=5)
    assert other["trial-000"] != whole["trial-000"]


def test_settings_that_do_not_go_together_are_a_failed_trial(tmp_path):
    peer("optuna")

    def make(name, settings):
        raise ValueError(f"{settings['x']} is no good")

    search = Search(read_search({**QUADRATIC, "trials": 3}), tmp_path, "loss", [0], make)
    assert search.more() == []
    assert "0 of 3 trials finished, 3 failed (the last one, trial-002: " in search.summary()
    again = Search(read_search({**QUADRATIC, "trials": 3}), tmp_path, "loss", [0], make)
    assert again.jobs == again.more() == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("search", 3, "search=3 must be a section"),
        ("search/trails", 3, "search.trails is not a setting: did you mean trials?"),
        ("search/trials", 0, "search.trials=0 must be at least 1"),
        ("search/trials", None, "search.trials=(null|None) must be a whole number"),
        ("search/seed", "a", "search.seed='a' must be a whole number"),
        ("search/sampler", "tpee", "search.sampler='tpee' must be tpe or random"),
        ("search/over", {}, "search.over={} must name settings"),
        ("search/over/optimizer.lr", 3, "search.over.optimizer.lr=3 must be a list of two values"),
        ("search/over/optimizer.lr", [1], r"lr=\[1\] must be a list of two values or more"),
        ("search/over/optimizer.lr", {"low": 1, "hihg": 2}, "must be a list of two values"),
        ("search/over/optimizer.lr", {"low": 1, "high": 2, "lgo": True}, "keyword argument 'lgo'"),
        (
            "search/over/optimizer.lr",
            {"low": 2, "high": 1},
            r"lr=\{'low': 2, 'high': 1\}: .*low.*high",  # Optuna's words differ by version
        ),
        ("search/over/optimizer.lr", {"low": "x", "high": 1}, "could not convert string to float"),
        ("search/over/optimizer.lr", {"low": "nan", "high": 1}, "low='nan' must be a number"),
        ("search/over/optimizer.lr", {"low": 0, "high": 1.0, "log": True}, r"True\}: .*low.* 0"),
        ("search/over/model.d_model", {"low": 4, "high": 9, "step": 0.5}, "a whole number"),
        ("search/over/optimizer.rl", [1, 2], "over.optimizer.rl: optimizer.rl is no"),
        ("search/over/model.d_model", [16, 1.5], "d_model=1.5 must be a whole number"),
        ("search/over/seed", [1, 2], "seed is not for a search to set"),
        ("search/extends", "ttt", "search.extends=ttt is no variant: did you mean tt?"),
        ("variants/trial-000", {}, "such names are those of the search's trials"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    content,  # noqa: F811
    tmp_path,
    path,
    value,
    message,
):
    peer("optuna")
    content["search"] = {"trials": 3, "over": {"optimizer.lr": {"low": "1e-4", "high": 1e-2}}}
    assert_refused(content, tmp_path, path, value, message)


def test_a_search_in_a_queue_has_to_say_how_many_at_a_time(content, tmp_path):  # noqa: F811
    peer("optuna")
    content["search"] = {"trials": 9, "over": {"optimizer.lr": [1e-4, 1e-3]}}
    with pytest.raises(ValueError, match=r"would begin all 9 trials at once.* give --jobs"):
        run_sweep(sweep_of(content, tmp_path), console=Console(quiet=True), launcher="submitit")


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on(content, tmp_path, runs_here):  # noqa: F811
    """By kill -9, while its first trial trains; the base that it is compared with is finished."""
    peer("optuna")
    del content["variants"], content["reference"]
    content["base"]["train"] |= {"steps": 120, "save_every": 20}
    content["search"] = {
        "trials": 2,
        "over": {
            "optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True},
            "tensorize.rank": [3, 4],
        },
    }
    (base,) = make_jobs(sweep_of(content, tmp_path))
    finish(base)
    command = [sys.executable, "-m", "comera", "sweep", str(written(content, tmp_path))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "out/trial-000/seed-0/metrics.jsonl"
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        wait_for(lambda: log.is_file() and log.stat().st_size, process)
        process.send_signal(signal.SIGKILL)
    settings = yaml.safe_load((log.parent / "config.yaml").read_text())
    wait_for(lambda: _is_free(log.parent))  # the run sees that, saves and stops
    status, printed = carried_out(content, tmp_path)
    assert status == 0, printed
    assert "search: 2 of 2 trials finished; best: " in printed
    rows = json.loads((tmp_path / "out/results.json").read_text())["summary"]
    assert [row["variant"] for row in rows] == ["base", "trial-000", "trial-001"]
    assert yaml.safe_load((log.parent / "config.yaml").read_text()) == settings
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == sorted(steps)


def _is_free(folder):
    try:
        with lock(folder):
            return True
    except FolderInUseError:
        return False
