"""Train variants of a run over seeds, and compare them (``comera sweep FILE``)."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from comera._command import INTERRUPTED
from comera.extras import check_known, did_you_mean, error_prefix
from comera.files import local_folder
from comera.recipes.jobs import Job, LauncherName, make_launcher, resolve, run_jobs
from comera.recipes.parse import file_of, merged, nested, parse_settings, read_yaml
from comera.recipes.report import sweep_report
from comera.recipes.report.page import show_metric
from comera.recipes.run import planned_memory
from comera.recipes.run_config import TASKS, RunConfig
from comera.recipes.run_folder import begun_run, lock, missing_data, with_whole_paths
from comera.recipes.search import Search, SearchConfig, extremes, read_search
from comera.train.log import last_logged, print_text, progress_bar

_KEYS = (
    "out", "base", "seeds", "reference", "variants", "metric", "published", "search", "submitit",
)  # fmt: skip
"""``published``, what a paper claims, is for ``python -m benchmarks reproduce`` to read."""
_OF_THE_SWEEP = ("out", "seed", "twin", "overwrite")
"""Settings of a run that a sweep makes itself: those of the base are not used."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file."""

    out: Path
    seeds: tuple[int, ...]
    reference: str  # name of the variant that the others are compared with
    metric: str  # key of the last evaluation
    variants: dict[str, RunConfig]  # in the order of the file, for any seed
    submitit: dict[str, Any]
    search: SearchConfig | None
    base: dict[str, Any]  # settings that all variants share, as given
    given: Mapping[str, Any]  # what each variant changes of them, as given


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file and check all of it, down to the settings of each variant.

    Raises ``ValueError`` with the variant and the first fault, and ``FileNotFoundError`` without
    the file or its base.
    """
    content = read_yaml(path)
    if not {"base", "variants", "search"} & content.keys() and "train" in content:
        raise ValueError(f"{path} is no sweep but a run: comera train trains it")
    for key in content:
        check_known(key, _KEYS, f"{path}: {key} is no key of a sweep")
    searched = content.get("search") is not None
    for key in _KEYS[: 3 if searched else 5]:
        if content.get(key) is None:
            raise ValueError(f"{path} lacks the key {key}")
    base = _read_base(content["base"], path.parent)
    # Trials of a search without variants are compared with the base as it is.
    given = content.get("variants") or ({"base": {}} if searched else content["variants"])
    _check_variants(given)
    variants = {name: variant_of(name, base, given) for name in given}
    reference = content.get("reference") or next(iter(variants))
    _check_named(reference, variants, "reference=")
    seeds = content["seeds"]
    if not isinstance(seeds, list) or not all(type(s) is int and s >= 0 for s in seeds or [None]):
        raise ValueError(f"seeds={seeds!r} must be a list of whole numbers from 0 on")
    for twice in [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ValueError(f"seeds={seeds} has {twice} more than once")
    if not isinstance(submitit := content.get("submitit"), Mapping | None):
        raise ValueError(f"submitit={submitit!r} must be a mapping of settings of submitit")
    return Sweep(
        out=local_folder(str(content["out"])),
        seeds=tuple(seeds),
        reference=reference,
        metric=_read_metric(content.get("metric"), variants),
        variants=variants,
        submitit=dict(submitit or {}),
        search=_read_search(content["search"], base, given) if searched else None,
        base=base,
        given=given,
    )


def _check_named(name: Any, variants: Mapping[str, Any], said: str) -> None:
    if not isinstance(name, str) or name not in variants:
        raise ValueError(f"{said}{name} is no variant{did_you_mean(name, variants)}")


def _read_base(given: Any, folder: Path) -> dict[str, Any]:
    if isinstance(given, str):
        given = read_yaml(file_of(given, beside=folder))
    if not isinstance(given, Mapping):
        raise ValueError(
            f"base={given!r} must be the path of a run's file, a configuration's name, or settings"
        )
    with error_prefix("base: "):
        settings = nested(given)
    return {key: value for key, value in settings.items() if key not in _OF_THE_SWEEP}


def _check_variants(given: Any) -> None:
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
        if (other := (settings or {}).get("extends")) is not None:
            _check_named(other, given, f"variant {name}: extends=")


def variant_of(name: str, base: dict[str, Any], given: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a variant; raise ``ValueError`` if they do not go together."""
    with error_prefix(f"variant {name}: "):
        config = parse_settings(RunConfig, merged(base, overrides(name, given)))
        config.check()
    return config


def overrides(name: str, given: Mapping[str, Any], inner: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the changes to the base by a variant and by the variants it extends."""
    if name in inner:
        raise ValueError(f"extends goes round in a circle: {' -> '.join((*inner, name))}")
    own = nested({key: value for key, value in (given[name] or {}).items() if key != "extends"})
    for key in _OF_THE_SWEEP:
        if key in own:
            raise ValueError(f"{key} is not for a variant to set: the sweep does")
    other = (given[name] or {}).get("extends")
    return own if other is None else merged(overrides(other, given, (*inner, name)), own)


def _read_metric(given: Any, variants: Mapping[str, RunConfig]) -> str:
    """Return the requested metric, which every variant's task must have; by default the first."""
    measured = {name: TASKS[config.task].better for name, config in variants.items()}
    first, *others = measured.values()
    shared = [metric for metric in first if all(metric in found for found in others)]
    if given is None:
        return shared[0]
    if given not in shared:
        lacking = next(name for name, found in measured.items() if given not in found)
        raise ValueError(
            f"metric={given} is not measured in variant {lacking}; all variants have "
            f"{', '.join(shared)}"
        )
    return given


def _read_search(given: Any, base: dict[str, Any], variants: Mapping[str, Any]) -> SearchConfig:
    """Parse the section ``search``, and check settings at the ends of each domain."""
    search = read_search(given)
    if search.extends is not None:
        _check_named(search.extends, variants, "search.extends=")
        base = merged(base, overrides(search.extends, variants))
    taken = next((name for name in variants if name.startswith("trial-")), None)
    if taken is not None:
        raise ValueError(f"variant {taken}: such names are those of the search's trials")
    for key, domain in search.over.items():
        if key.split(".")[0] in _OF_THE_SWEEP:
            raise ValueError(f"search.over.{key}: {key} is not for a search to set: the sweep does")
        for value in extremes(domain):
            with error_prefix(f"search.over.{key}: "):
                parse_settings(RunConfig, merged(base, nested({key: value})))
    return search


def sweep(
    file: str,
    /,
    *,
    out: str | None = None,
    jobs: int | None = None,
    launcher: LauncherName = "local",
    overwrite: bool = False,
    console: Console,
) -> int:
    """Train variants of one run over seeds, and compare them. The same command resumes a sweep.

    Args:
        file: YAML file that describes the sweep, or a configuration's name.
        out: Folder of the sweep, instead of the one that the file names.
        jobs: Number of runs that are trained at a time (default: one on this machine, as many as
            the queue takes elsewhere).
        launcher: Where runs are started: as processes here, or through submitit (Slurm), whose
            settings are in the section submitit of the file.
        overwrite: Restart runs whose folders hold other settings or data; the others stay.
    """
    found = read_sweep(file_of(file))
    if out:
        found = dataclasses.replace(found, out=local_folder(out))
    return run_sweep(found, console, jobs, overwrite, launcher)


def run_sweep(
    sweep: Sweep,
    console: Console,
    at_once: int | None = None,
    overwrite: bool = False,
    launcher: LauncherName = "local",
    skip: Sequence[str] = (),
) -> int:
    """Train the unfinished runs of a sweep, and compare the finished ones; see :func:`sweep`.

    ``skip`` are variants, or runs as ``VARIANT/seed-K``, not to train this time. Returns 0, 1 if a
    run failed, 130 after Ctrl-C. Raises ``ValueError`` if a folder holds a run with other settings
    or data, ``FileNotFoundError`` if data of a started run or all data are missing, and
    ``FolderInUseError`` if another sweep writes to the folder. Nothing has been trained then.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"jobs={at_once} must be at least 1")
    trials = 0 if sweep.search is None else sweep.search.trials
    if trials and launcher != "local" and at_once is None:
        raise ValueError(
            f"--launcher={launcher} would begin all {trials} trials at once, and "
            "those that run side by side learn nothing from each other: give --jobs"
        )
    for name, config in sweep.variants.items():
        with error_prefix(f"variant {name}: "):
            planned_memory(config)

    def make_trial(name: str, own: dict[str, Any]) -> list[Job]:
        if sweep.search is not None and sweep.search.extends is not None:
            own = {"extends": sweep.search.extends, **own}
        variant = variant_of(name, sweep.base, {**sweep.given, name: own})
        with error_prefix(f"variant {name}: "):
            planned_memory(variant)
        return make_jobs(dataclasses.replace(sweep, variants={name: variant}))

    with lock(sweep.out, "sweep"):
        search = None
        everything = make_jobs(sweep)
        jobs = unskipped(everything, skip)
        expected = len(jobs) + trials * len(sweep.seeds)
        if sweep.search is not None:
            search = Search(
                sweep.search, sweep.out, sweep.metric, sweep.seeds, make_trial, overwrite
            )
            jobs += search.jobs
        resolve(jobs, overwrite)
        if search is not None:
            if overwrite and any(job.config.overwrite for job in search.jobs):
                console.print("the search is begun anew")
                jobs = [job for job in jobs if job not in search.jobs]
                search.begin_anew()
            search.tell()
        _check_data(jobs)
        done = sum(job.state == "finished" for job in jobs)
        print_text(console, f"{expected} runs in {sweep.out}, {done} of them finished")

        def more() -> list[Job]:
            added = [] if search is None else search.more()
            if overwrite:  # folders of a search that was begun anew
                resolve(added, overwrite)
            return added

        completed = True
        if done < expected:
            starts = make_launcher(launcher, sweep.submitit, sweep.out, at_once, console)
            bars = show_progress(jobs, sweep.metric, console, expected)
            with contextlib.closing(starts), bars as watch:
                completed = run_jobs(jobs, starts, watch, more)
        for job in everything:  # those skipped this time may have been trained before
            found = None if job in jobs else begun_run(job.config)
            if found and found.is_finished(job.folder):
                job.state = "finished"
        _report(sweep, [*everything, *(job for job in jobs if job not in everything)], console)
        if search is not None:
            search.tell()
            print_text(console, search.summary())
    if not completed:
        console.print("interrupted; the same command goes on from here")
        return INTERRUPTED
    return 1 if any(job.state == "failed" for job in jobs) else 0


def _check_data(jobs: Sequence[Job]) -> None:
    """Raise ``FileNotFoundError`` if all waiting runs lack data; if only some do, these fail."""
    problems: dict[str, None] = {}
    for config in [job.config for job in jobs if job.state == "waiting"]:
        if missing := missing_data(config):
            named = ", no ".join(f"{path} ({key})" for key, path in missing.items())
            said = (
                f"there is no {named}; put the data there, or say by those settings where they are"
            )
        else:
            try:
                config.data.find()
            except (FileNotFoundError, ValueError) as error:  # as of a pattern without a file
                said = str(error)
            else:
                return
        problems[said] = None
    if problems:
        raise FileNotFoundError(f"no run can begin without its data: {'; '.join(problems)}")


def make_jobs(sweep: Sweep) -> list[Job]:
    jobs = []
    for seed in sweep.seeds:
        for name, variant in sweep.variants.items():
            out = str(sweep.out / name / f"seed-{seed}")
            config = dataclasses.replace(with_whole_paths(variant), seed=seed, out=out)
            jobs.append(Job(name, seed, config))
    return jobs


def unskipped(jobs: Sequence[Job], skip: Sequence[str]) -> list[Job]:
    """Return the jobs without skipped runs and variants; ``ValueError`` for an unknown word."""
    names = {job: (job.variant, f"{job.variant}/seed-{job.seed}") for job in jobs}
    known = list(dict.fromkeys(name for both in zip(*names.values(), strict=True) for name in both))
    for word in skip:
        check_known(word, known, f"skip={word} is neither a variant nor a run")
    return [job for job in jobs if not {*names[job]} & {*skip}]


def _report(sweep: Sweep, jobs: Sequence[Job], console: Console) -> None:
    finished = [job for job in jobs if job.state == "finished"]
    runs = [sweep_report.read_trained(job.variant, job.seed, job.folder) for job in finished]
    failed = [
        sweep_report.Failed(job.variant, job.seed, " ".join(job.reason.split()))
        for job in jobs
        if job.state == "failed"
    ]
    if runs or failed:
        names = list(dict.fromkeys([*sweep.variants, *(job.variant for job in jobs)]))
        comparison = sweep_report.compare(
            runs, names, sweep.seeds, sweep.reference, sweep.metric, failed
        )
        sweep_report.write_comparison(comparison, sweep.out)
        sweep_report.write_sweep_report(sweep.out)
        if runs:
            print_text(console, sweep_report.comparison_text(comparison))
        print_text(console, f"wrote results.json, results.md and report.html to {sweep.out}")
    for run in failed:
        console.print("[bold red]failed:[/] ", end="")
        print_text(console, str(run))


@contextlib.contextmanager
def show_progress(
    jobs: Sequence[Job], metric: str, console: Console, expected: int
) -> Iterator[Callable[[], None]]:
    """Show a bar for all jobs, a bar for each running job, and a line for each ended one.

    Yields a function that updates them; jobs may be added, up to the expected number.
    """
    width = max(len(job.name) for job in jobs)
    bars: dict[Job, TaskID] = {}
    shown = {job for job in jobs if job.state == "finished"}
    with progress_bar(console=console) as progress:
        overall = progress.add_task("all runs", total=expected, completed=len(shown), figures="")

        def show() -> None:
            for job in jobs:
                name = job.name.ljust(width)
                if job.state == "running":
                    if job not in bars:
                        bars[job] = progress.add_task(name, total=None, figures="starting")
                    if (logged := last_logged(job.folder, "loss")) is not None:
                        done, text = logged[0], f"loss {logged[1]:.4f}"
                        if job.config.train.seconds is not None:
                            done = (last_logged(job.folder, "seconds") or logged)[1]
                        progress.update(bars[job], total=job.length, completed=done, figures=text)
                elif job.state != "waiting" and job not in shown:
                    shown.add(job)
                    if job in bars:
                        progress.remove_task(bars[job])
                    line = f"{escape(name)}  {escape(_ending(job, metric))}"
                    progress.console.print(line, highlight=False, soft_wrap=True)
            failed = sum(job.state == "failed" for job in jobs)
            done = failed + sum(job.state == "finished" for job in jobs)
            figures = f"{failed} failed" if failed else ""
            progress.update(overall, completed=done, figures=figures)

        yield show


def _ending(job: Job, metric: str) -> str:
    if job.state == "failed":
        return f"failed: {job.reason}"
    if job.state != "finished":
        return "stopped; it can be resumed"
    run = sweep_report.read_trained(job.variant, job.seed, job.folder)
    return (
        f"{metric} {show_metric(metric, run.metrics[metric])}, {run.params:,} parameters, "
        f"{run.steps:,} steps in {run.seconds:,.1f} s"
    )
