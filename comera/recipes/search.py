"""Run the section ``search`` of a sweep's file: variants whose settings Optuna proposes."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from comera.extras import error_prefix, needed_by
from comera.recipes.jobs import Job
from comera.recipes.parse import check_least, parse_settings
from comera.recipes.report.sweep_report import read_trained
from comera.recipes.run_config import HIGHER_IS_BETTER

JOURNAL = "search.journal"
"""Optuna's storage in the folder of a sweep: every trial, its settings and its result."""


@dataclass(frozen=True)
class SearchConfig:
    """Settings of a search, from the section ``search`` of a sweep's file."""

    trials: int = 0
    over: dict[str, Any] = field(default_factory=dict)  # domains of settings, by dotted names
    sampler: Literal["tpe", "random"] = "tpe"  # tpe learns from earlier trials
    seed: int = 0
    extends: str | None = None  # the variant that trials change; None for the base


def read_search(given: Any) -> SearchConfig:
    """Parse the section ``search``, in which ``over`` has the domains of settings.

    Domains are lists of values, or keywords of Optuna's distributions of numbers, such as
    ``{low: 4, high: 32, log: true}``; they become Optuna's distributions. Raises ``ValueError``
    with the first fault, and ``MissingPackageError`` if Optuna is not installed.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"search={given!r} must be a section: trials, and over what settings")
    over = given.get("over")
    if not isinstance(over, Mapping) or not over:
        raise ValueError(
            f"search.over={over!r} must name settings and what they may be, such as "
            "optimizer.lr: {low: 1.0e-4, high: 1.0e-2, log: true}"
        )
    over = {str(name): _distribution(f"search.over.{name}", value) for name, value in over.items()}
    config = parse_settings(SearchConfig, {**given, "over": over}, "search.")
    check_least(config, "search.", trials=1, seed=0)
    return config


def _distribution(key: str, given: Any) -> Any:
    with needed_by("search"):
        from optuna import distributions
    if isinstance(given, list) and len(given) > 1:
        # As text: Optuna takes no lists, and takes 1 and true for the same.
        return distributions.CategoricalDistribution([json.dumps(value) for value in given])
    if not isinstance(given, Mapping) or not {"low", "high"} <= given.keys():
        raise ValueError(
            f"{key}={given!r} must be a list of two values or more, or a range such as "
            "{low: 4, high: 32}"
        )
    whole = all(type(value) is int for name, value in given.items() if name != "log")
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    with error_prefix(f"{key}={given!r}: ", (TypeError, ValueError)):
        # YAML takes 1e-4, which has no point, for a text.
        ends: dict[str, Any] = {k: float(v) if isinstance(v, str) else v for k, v in given.items()}
        for name, value in ends.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}={given[name]!r} must be a number")
        return kind(**ends)


def extremes(distribution: Any) -> list[Any]:
    """Return the values at the ends of a range, or all values of a list."""
    if hasattr(distribution, "choices"):
        return [json.loads(choice) for choice in distribution.choices]
    return [distribution.low, distribution.high]


class Search:
    """Trials of a search, each a variant of the sweep with a run for every seed.

    Proposals depend only on the seed and on earlier results, so a stopped search resumes exactly if
    runs are sequential. Raises ``ValueError`` if the folder holds another search and ``anew`` is
    False, and ``MissingPackageError`` if Optuna is not installed. This process has locked
    ``folder``, that of the sweep. The mean of ``metric`` over ``seeds`` counts for a trial.
    ``make_jobs`` makes the jobs of a trial from its name and settings, or raises ``ValueError``.
    """

    def __init__(
        self,
        config: SearchConfig,
        folder: Path,
        metric: str,
        seeds: Sequence[int],
        make_jobs: Callable[[str, dict[str, Any]], list[Job]],
        anew: bool = False,
    ) -> None:
        with needed_by("search"):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._config, self._metric = optuna, config, metric
        self._make_jobs, self._path = make_jobs, folder / JOURNAL
        to_json = optuna.distributions.distribution_to_json
        self._asked = {
            "over": {name: to_json(distribution) for name, distribution in config.over.items()},
            "sampler": config.sampler, "seed": config.seed, "extends": config.extends,
            "metric": metric, "seeds": list(seeds),
        }  # fmt: skip
        self._open()
        before = self._study.user_attrs.get("asked", self._asked)
        if before != self._asked and not anew:
            other = next(key for key in self._asked if before.get(key) != self._asked[key])
            raise ValueError(
                f"{folder} holds a search with other settings (search.{other}: "
                f"{before.get(other)} -> {self._asked[other]}); choose another out, or start it "
                "again with --overwrite=true"
            )
        if before != self._asked:
            self.begin_anew()
        self._study.set_user_attr("asked", self._asked)
        for trial in self._study.trials:
            if trial.state.name in ("COMPLETE", "RUNNING"):
                self._add(trial)

    @property
    def jobs(self) -> list[Job]:
        """Jobs of all trials so far, except failed trials."""
        return [job for number in sorted(self._of) for job in self._of[number]]

    def begin_anew(self) -> None:
        self._path.unlink()
        self._open()
        self._study.set_user_attr("asked", self._asked)

    def more(self) -> list[Job]:
        """Report ended trials, and return the jobs of the next trial; none after the last one."""
        self.tell()
        while len(self._study.trials) < self._config.trials:
            trial = self._study.ask()
            self._add(self._study.trials[trial.number])
            if self._of.get(trial.number):
                return self._of[trial.number]
        return []

    def tell(self) -> None:
        """Report to Optuna the results of the trials whose runs have all ended."""
        for number in [t.number for t in self._study.trials if t.state.name == "RUNNING"]:
            jobs = self._of[number]
            if failed := [job.reason for job in jobs if job.state == "failed"]:
                self._fail(number, failed[0])
            elif all(job.state == "finished" for job in jobs):
                runs = [read_trained(job.variant, job.seed, job.folder) for job in jobs]
                value = statistics.mean(run.metrics[self._metric] for run in runs)
                if math.isfinite(value):
                    self._study.tell(number, value)
                else:
                    self._fail(number, f"its {self._metric} is {value}")

    def summary(self) -> str:
        """Return a line with the best trial so far and the number of failed trials."""
        trials = self._study.trials
        done, failed = ([t for t in trials if t.state.name == s] for s in ("COMPLETE", "FAIL"))
        text = f"search: {len(done)} of {self._config.trials} trials finished"
        if failed:
            number = failed[-1].number
            reason = self._study.user_attrs.get(f"failed {number}", "")
            text += f", {len(failed)} failed (the last one, {trial_name(number)}: {reason})"
        if done:
            best = self._study.best_trial
            shown = {k: v if isinstance(v, str) else f"{v:.6g}" for k, v in best.params.items()}
            settings = ", ".join(f"{key}={value}" for key, value in shown.items())
            value = f"{self._metric} {best.value:.6g}"
            text += f"; best: {trial_name(best.number)}, {value}: {settings}"
        return text

    def _open(self) -> None:
        storages = self._optuna.storages
        Path(f"{self._path}.lock").unlink(missing_ok=True)  # the folder is this process' alone
        if self._path.is_file():  # cut a last line that was being written when the machine crashed
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                self._path.write_bytes(whole)
        storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(self._path)))
        self._study = self._optuna.create_study(
            storage=storage,
            study_name="search",
            load_if_exists=True,
            direction="maximize" if self._metric in HIGHER_IS_BETTER else "minimize",
        )
        self._of: dict[int, list[Job]] = {}  # jobs by the number of their trial

    def _add(self, frozen: Any) -> None:
        # By the search's seed and the trial's number alone.
        seed = int(np.random.SeedSequence([self._config.seed, frozen.number]).generate_state(1)[0])
        samplers = self._optuna.samplers
        if self._config.sampler == "random":
            self._study.sampler = samplers.RandomSampler(seed=seed)
        else:
            # constant_liar: running trials count as bad ones, so that others go elsewhere.
            self._study.sampler = samplers.TPESampler(seed=seed, constant_liar=True)
        params = frozen.params
        if frozen.state.name == "RUNNING":  # what was drawn before is only read
            trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
            params = {name: trial._suggest(name, each) for name, each in self._config.over.items()}
        settings = {k: json.loads(v) if isinstance(v, str) else v for k, v in params.items()}
        try:
            self._of[frozen.number] = self._make_jobs(trial_name(frozen.number), settings)
        except ValueError as problem:
            if frozen.state.name != "RUNNING":
                raise
            self._fail(frozen.number, str(problem))

    def _fail(self, number: int, reason: str) -> None:
        self._study.set_user_attr(f"failed {number}", reason)
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)


def trial_name(number: int) -> str:
    return f"trial-{number:03d}"
