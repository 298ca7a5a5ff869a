"""``comera sweep FILE``: variants of one run, over seeds, compared with one of them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from comera.recipes.jobs import Job, reopen_other_data, resolve, run_jobs
from comera.recipes.named import file_of
from comera.recipes.parse import did_you_mean, merged, nested, parse_settings, read_yaml
from comera.recipes.progress import show_progress
from comera.recipes.report.comparison import compare, read_trained
from comera.recipes.report.comparison_table import comparison_text, write_comparison
from comera.recipes.report.sweep_report import write_sweep_report
from comera.recipes.run import planned_memory
from comera.recipes.run_config import RunConfig

INTERRUPTED = 130

_KEYS = ("out", "base", "seeds", "reference", "metric", "variants")
_NEEDED = ("out", "base", "seeds", "reference", "variants")
_OF_THE_SWEEP = ("out", "seed", "twin", "overwrite")
"""Settings of a run that a sweep makes itself: those of the base are not used."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: Name of the variant and of its folder.
        config: Settings of the variant, for any seed.
        clock: Name of the variant whose time it may take, instead of a number of steps.
        pace: Name of the variant whose seconds a step say how many steps those are.
    """

    name: str
    config: RunConfig
    clock: str | None = None
    pace: str | None = None


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Attributes:
        out: Folder of everything.
        seeds: Each variant is trained with each of them.
        reference: Name of the variant that the others are compared with.
        metric: Key of the last evaluation to compare.
        variants: The variants by name, in the order of the file.
    """

    out: Path
    seeds: tuple[int, ...]
    reference: str
    metric: str
    variants: dict[str, Variant]


def run_sweep(
    path: Path,
    at_once: int = 1,
    overwrite: bool = False,
    console: Console | None = None,
    out: Path | None = None,
) -> int:
    """Train what is unfinished of a sweep, and compare what is finished.

    Args:
        path: The sweep file.
        at_once: Runs at a time.
        overwrite: Begin the runs anew whose folders hold other settings or were begun with other
            data; the others stay.
        console: The console that progress and the table go to.
        out: Folder of everything, instead of the one that the file names.

    Returns:
        Exit status: 0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        ValueError: If the file is wrong, or a folder holds a run with other settings or of other
            data. Nothing has been trained then.
        FileNotFoundError: If the file or its base is not there, or data that runs were begun with.
    """
    if at_once < 1:
        raise ValueError(f"jobs={at_once} must be at least 1")
    console = console or Console()
    sweep = read_sweep(path)
    if out is not None:
        sweep = dataclasses.replace(sweep, out=out.expanduser())
    for variant in sweep.variants.values():
        _check_model(variant)
    jobs = make_jobs(sweep)
    resolve(jobs, overwrite)
    reopen_other_data(jobs, overwrite)
    done = sum(job.state == "finished" for job in jobs)
    console.print(
        f"{len(jobs)} runs in {sweep.out}, {done} of them finished", highlight=False, markup=False
    )
    with show_progress(jobs, sweep.metric, console) as watcher:
        completed = run_jobs(jobs, at_once, overwrite, watcher)
    _report(sweep, jobs, console)
    if not completed:
        console.print("interrupted; the same command goes on from here")
        return INTERRUPTED
    return 1 if any(job.state == "failed" for job in jobs) else 0


def make_jobs(sweep: Sweep) -> list[Job]:
    """List all runs of a sweep: seed by seed, those that others wait for before those others."""
    jobs: list[Job] = []
    for seed in sweep.seeds:
        made: dict[str, Job] = {}

        def make(name: str, seed: int = seed, made: dict[str, Job] = made) -> Job:
            if name not in made:
                variant = sweep.variants[name]
                folder = sweep.out / name / f"seed-{seed}"
                made[name] = Job(
                    name,
                    seed,
                    dataclasses.replace(variant.config, seed=seed, out=str(folder)),
                    clock=make(variant.clock) if variant.clock else None,
                    pace=make(variant.pace) if variant.pace else None,
                )
                jobs.append(made[name])
            return made[name]

        for name in sweep.variants:
            make(name)
    return jobs


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file and check all of it, down to the settings of each variant.

    Raises:
        ValueError: If something is wrong; names the variant and the first such thing.
        FileNotFoundError: If the file or its base is not there.
    """
    content = read_yaml(path)
    for key in content:
        if key not in _KEYS:
            raise ValueError(f"{path}: {key} is no key of a sweep{did_you_mean(key, _KEYS)}")
    for key in _NEEDED:
        if content.get(key) is None:
            raise ValueError(f"{path} lacks the key {key}")
    variants = _variants(_base(content["base"], path.parent), content["variants"])
    reference = content["reference"]
    if not isinstance(reference, str) or reference not in variants:
        raise ValueError(f"reference={reference} is no variant{did_you_mean(reference, variants)}")
    return Sweep(
        out=Path(str(content["out"])).expanduser(),
        seeds=_seeds(content["seeds"]),
        reference=reference,
        metric=_metric(content.get("metric"), variants),
        variants=variants,
    )


def _base(given: Any, folder: Path) -> dict[str, Any]:
    """Return the settings that all variants share."""
    if isinstance(given, str):
        given = read_yaml(file_of(given, beside=folder))
    if not isinstance(given, Mapping):
        raise ValueError(
            f"base={given!r} must be the path of a run's file, a configuration's name, or settings"
        )
    try:
        settings = nested(given)
    except ValueError as problem:
        raise ValueError(f"base: {problem}") from None
    return {key: value for key, value in settings.items() if key not in _OF_THE_SWEEP}


def _variants(base: dict[str, Any], given: Any) -> dict[str, Variant]:
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"variants={given!r} must be mappings of settings, by name")
    for name, settings in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"variant {name!r} must have a name that can be a folder's: letters, digits and "
                "any of . _ + = - (in quotes where it looks like a number)"
            )
        if not isinstance(settings, Mapping | None):
            raise ValueError(f"variant {name}: {settings!r} must be a mapping of settings")
        for key in ("extends", "same_time_as"):
            other = (settings or {}).get(key)
            if other is not None and (not isinstance(other, str) or other not in given):
                raise ValueError(
                    f"variant {name}: {key}={other} is no variant{did_you_mean(other, given)}"
                )
    variants = {name: _variant(name, base, given) for name in given}
    _check_waiting(variants)
    return variants


def _variant(name: str, base: dict[str, Any], given: Mapping[str, Any]) -> Variant:
    own = dict(given[name] or {})
    pace, clock = own.pop("extends", None), own.pop("same_time_as", None)
    if clock is not None and pace is None:
        raise ValueError(
            f"variant {name}: same_time_as={clock} needs extends, the variant whose seconds a "
            "step say how many steps fit in that time"
        )
    try:
        train = nested(own).get("train")
        for key in ("steps", "epochs"):
            if clock is not None and isinstance(train, dict) and train.get(key) is not None:
                raise ValueError(f"same_time_as sets the steps, so train.{key} cannot")
        config = parse_settings(RunConfig, merged(base, _overrides(name, given, ())))
        config.check()
    except ValueError as problem:
        raise ValueError(f"variant {name}: {problem}") from None
    return Variant(name, config, clock, pace if clock is not None else None)


def _overrides(name: str, given: Mapping[str, Any], inner: tuple[str, ...]) -> dict[str, Any]:
    """Return what a variant changes of the base, with what it extends."""
    if name in inner:
        raise ValueError(f"extends goes round in a circle: {' -> '.join((*inner, name))}")
    own = {k: v for k, v in (given[name] or {}).items() if k not in ("extends", "same_time_as")}
    own = nested(own)
    for key in _OF_THE_SWEEP:
        if key in own:
            raise ValueError(f"{key} is not for a variant to set: the sweep does")
    other = (given[name] or {}).get("extends")
    return own if other is None else merged(_overrides(other, given, (*inner, name)), own)


def _check_waiting(variants: Mapping[str, Variant]) -> None:
    """Check that no variant waits for its own time, by however many others."""

    def walk(name: str, inner: tuple[str, ...]) -> None:
        if name in inner:
            raise ValueError(
                f"variant {name} waits for its own time: {' -> '.join((*inner, name))}"
            )
        for other in (variants[name].clock, variants[name].pace):
            if other is not None:
                walk(other, (*inner, name))

    for name in variants:
        walk(name, ())


def _seeds(given: Any) -> tuple[int, ...]:
    fine = isinstance(given, list) and given
    if not fine or any(type(seed) is not int or seed < 0 for seed in given):
        raise ValueError(f"seeds={given!r} must be a list of whole numbers from 0 on")
    twice = next((seed for seed in given if given.count(seed) > 1), None)
    if twice is not None:
        raise ValueError(f"seeds={given} has {twice} more than once")
    return tuple(given)


def _metric(given: Any, variants: Mapping[str, Variant]) -> str:
    """Return the requested metric, if every variant's task has it; by default the first of them."""
    measured = [(name, variant.config.metrics) for name, variant in variants.items()]
    shared = [m for m in measured[0][1] if all(m in found for _, found in measured)]
    if given is None:
        return shared[0]
    if given not in shared:
        lacking = next(name for name, found in measured if given not in found)
        raise ValueError(
            f"metric={given} is not measured in variant {lacking}; all variants have "
            f"{', '.join(shared)}"
        )
    return given


def _check_model(variant: Variant) -> None:
    """Make the model of a variant without memory: ranks, layers and optimizer must fit it."""
    try:
        planned_memory(variant.config)
    except ValueError as problem:
        raise ValueError(f"variant {variant.name}: {problem}") from None


def _report(sweep: Sweep, jobs: Sequence[Job], console: Console) -> None:
    """Show the table and write its files, if anything is finished; then say what failed."""
    finished = [job for job in jobs if job.state == "finished"]
    runs = [read_trained(job.variant, job.seed, job.folder) for job in finished]
    if runs:
        comparison = compare(runs, list(sweep.variants), sweep.seeds, sweep.reference, sweep.metric)
        write_comparison(comparison, runs, sweep.out)
        write_sweep_report(sweep.out)
        console.print(comparison_text(comparison), markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"wrote results.json, results.md and report.html to {sweep.out}", markup=False
        )
    for job in jobs:
        if job.state == "failed":
            console.print(f"[bold red]failed:[/] {job.name}: ", end="")
            console.print(job.reason, markup=False, highlight=False, soft_wrap=True)
