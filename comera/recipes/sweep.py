"""``comera sweep FILE``: variants of one run, over seeds, compared with one of them.

Show how far the runs of a sweep are: bars while they run, a line for each that ends.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from comera.extras import did_you_mean
from comera.recipes.data_record import missing_data, with_whole_paths
from comera.recipes.folder import lock
from comera.recipes.jobs import (
    Job,
    Watcher,
    find_finished,
    reopen_other_data,
    resolve,
    run_jobs,
)
from comera.recipes.launchers import LauncherName, make_launcher
from comera.recipes.report.comparison import (
    Failed,
    compare,
    comparison_text,
    read_trained,
    show_metric,
    write_comparison,
)
from comera.recipes.report.sweep_report import write_sweep_report
from comera.recipes.run import planned_memory
from comera.recipes.run_config import RunConfig
from comera.recipes.search import Search, SearchConfig
from comera.recipes.sweep_file import Sweep, read_sweep, variant_of
from comera.recipes.tasks.task_kinds import kind_of
from comera.train.log import last_logged, progress_bar


@contextlib.contextmanager
def show_progress(
    jobs: Sequence[Job], metric: str, console: Console, expected: int
) -> Iterator[Watcher]:
    """Show one bar for all jobs, which finished or failed, and one for each that runs.

    Args:
        jobs: All jobs that are known, finished or not.
        metric: Key of the metric that is shown for each that finishes.
        console: The console to print on; bars are shown only if it is a terminal.
        expected: How many jobs there are to be in the end.
    """
    width = max(len(job.name) for job in jobs)
    bars: dict[Job, TaskID] = {}
    with progress_bar(console=console) as progress:
        finished = sum(job.state == "finished" for job in jobs)
        overall = progress.add_task("all runs", total=expected, completed=finished, figures="")

        def began(job: Job) -> None:
            bars[job] = progress.add_task(job.name.ljust(width), total=None, figures="starting")

        def ended(job: Job) -> None:
            if job in bars:
                progress.remove_task(bars.pop(job))
            if job.state != "stopped":
                progress.advance(overall)
            failed = sum(job.state == "failed" for job in jobs)
            progress.update(overall, figures=f"{failed} failed" if failed else "")
            line = f"{escape(job.name.ljust(width))}  {escape(_ending(job, metric))}"
            progress.console.print(line, highlight=False, soft_wrap=True)

        def looked(running: Sequence[Job]) -> None:
            for job in running:
                if job.steps is None:  # it is still reading its data
                    continue
                logged = last_logged(job.folder, "loss")
                step, figures = (0, "") if logged is None else (logged[0], f"loss {logged[1]:.4f}")
                progress.update(bars[job], total=job.steps, completed=step, figures=figures)

        yield Watcher(began, ended, looked)


def _ending(job: Job, metric: str) -> str:
    if job.state == "failed":
        return f"failed: {job.reason}"
    if job.state != "finished":
        return "stopped; it can be resumed"
    run = read_trained(job.variant, job.seed, job.folder)
    return (
        f"{metric} {show_metric(metric, run.metrics[metric])}, {run.params:,} parameters, "
        f"{run.steps:,} steps in {run.seconds:,.1f} s"
    )


INTERRUPTED = 130


def run_sweep(
    path: Path,
    at_once: int | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    out: Path | None = None,
    launcher: LauncherName = "local",
    changes: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
) -> int:
    """Train what is unfinished of a sweep, and compare what is finished.

    Args:
        path: The sweep file.
        at_once: Runs at a time; None for one here, and as many as a queue takes elsewhere.
        overwrite: Begin the runs anew whose folders hold other settings or were begun with other
            data; the others stay.
        console: The console that progress and the table go to.
        out: Folder of everything, instead of the one that the file names.
        launcher: Where runs are started: ``local``, ``submitit`` or ``ray``.
        changes: Settings by dotted names that every run gets, whatever the file says.
        skip: Variants, or runs as ``VARIANT/seed-K``, that are not trained this time; those that
            are finished are compared all the same.

    Returns:
        Exit status: 0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        ValueError: If the file is wrong, or a folder holds a run with other settings or of other
            data. Nothing has been trained then.
        FileNotFoundError: If the file or its base is not there, or data that runs were begun with,
            or those of all runs.
        FolderInUseError: If another sweep writes to the folder; a RuntimeError.
        MissingPackageError: If the launcher's package is not installed.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"jobs={at_once} must be at least 1")
    console = console or Console()
    sweep = read_sweep(path, changes or {})
    if out is not None:
        sweep = dataclasses.replace(sweep, out=out.expanduser())
    if sweep.search is not None and launcher != "local" and at_once is None:
        raise ValueError(
            f"--launcher={launcher} would begin all {sweep.search.trials} trials at once, and "
            "those that run side by side learn nothing from each other: give --jobs"
        )
    for name, config in sweep.variants.items():
        _check_model(name, config)
    with lock(sweep.out, "sweep"):
        search = None if sweep.search is None else _make_search(sweep, sweep.search, overwrite)
        return _carry_out(sweep, search, at_once, overwrite, console, launcher, skip)


def _carry_out(
    sweep: Sweep,
    search: Search | None,
    at_once: int | None,
    overwrite: bool,
    console: Console,
    launcher: LauncherName,
    skip: Sequence[str],
) -> int:
    everything = make_jobs(sweep)
    jobs = unskipped(everything, skip)
    expected = len(jobs)
    if search is not None and sweep.search is not None:
        jobs += search.jobs
        expected += sweep.search.trials * len(sweep.seeds)
    resolve(jobs, overwrite)
    reopen_other_data(jobs, overwrite)
    if search is not None:
        if overwrite and any(job.anew or job.config.overwrite for job in search.jobs):
            console.print("the search is begun anew")
            jobs = [job for job in jobs if job not in search.jobs]
            search.begin_anew()
        search.tell()
    _check_data(jobs)
    done = sum(job.state == "finished" for job in jobs)
    console.print(
        f"{expected} runs in {sweep.out}, {done} of them finished", highlight=False, markup=False
    )
    completed = True
    if done < expected:
        starts = make_launcher(launcher, sweep.launchers, sweep.out, at_once, console)
        with (
            contextlib.closing(starts),
            show_progress(jobs, sweep.metric, console, expected) as watcher,
        ):
            if search is not None:
                watcher = _telling(search, watcher)
            more = search.more if search is not None else tuple
            completed = run_jobs(jobs, starts, overwrite, watcher, more)
    skipped = find_finished([job for job in everything if job not in jobs])
    ordered = [job for job in everything if job in jobs or job in skipped]
    _report(sweep, [*ordered, *(job for job in jobs if job not in ordered)], console)
    if search is not None:
        console.print(search.summary(), markup=False, highlight=False, soft_wrap=True)
    if not completed:
        console.print("interrupted; the same command goes on from here")
        return INTERRUPTED
    return 1 if any(job.state == "failed" for job in jobs) else 0


def _check_data(jobs: Sequence[Job]) -> None:
    """Say which data are missing where no run can begin: else each that has none says so.

    Raises:
        FileNotFoundError: If that is so.
    """
    waiting = [job.config for job in jobs if job.state == "waiting"]
    by_data = {repr(getattr(config, config.task)): config for config in waiting}
    lacking = [_lacking_data(config) for config in by_data.values()]
    if lacking and all(lacking):
        said = "; ".join(text for text in dict.fromkeys(lacking) if text)
        raise FileNotFoundError(f"no run can begin without its data: {said}")


def _lacking_data(config: RunConfig) -> str | None:
    """Say which data of a run are not there, None if all are; no file is read."""
    if missing := missing_data(config):
        named = ", no ".join(f"{path} ({key})" for key, path in missing.items())
        return f"there is no {named}; put the data there, or say by those settings where they are"
    try:
        kind_of(config).find_data(config)
    except (FileNotFoundError, ValueError) as problem:  # as of a pattern that no file matches
        return str(problem)
    return None


def _make_search(sweep: Sweep, config: SearchConfig, overwrite: bool) -> Search:
    base, given = sweep.given

    def make(name: str, settings: dict[str, Any]) -> list[Job]:
        own: dict[str, Any] = {} if config.extends is None else {"extends": config.extends}
        variant = variant_of(name, base, {**given, name: own | settings})
        _check_model(name, variant)
        alone = dataclasses.replace(sweep, variants={name: variant})
        return make_jobs(alone)

    return Search(config, sweep.out, sweep.metric, sweep.seeds, make, overwrite)


def _telling(search: Search, watcher: Watcher) -> Watcher:
    """Return a watcher that tells the search what ended, too."""

    def ended(job: Job) -> None:
        search.tell()
        watcher.ended(job)

    return dataclasses.replace(watcher, ended=ended)


def make_jobs(sweep: Sweep) -> list[Job]:
    """List all runs of a sweep, seed by seed."""
    jobs = []
    for seed in sweep.seeds:
        for name, variant in sweep.variants.items():
            out = str(sweep.out / name / f"seed-{seed}")
            config = dataclasses.replace(with_whole_paths(variant), seed=seed, out=out)
            jobs.append(Job(name, seed, config))
    return jobs


def unskipped(jobs: Sequence[Job], skip: Sequence[str]) -> list[Job]:
    """Leave out runs that are not to be trained this time.

    Raises:
        ValueError: If a word stands for none.
    """
    names = {job: (job.variant, f"{job.variant}/seed-{job.seed}") for job in jobs}
    known = list(dict.fromkeys(name for both in zip(*names.values(), strict=True) for name in both))
    for word in skip:
        if word not in known:
            raise ValueError(
                f"skip={word} is neither a variant nor a run{did_you_mean(word, known)}"
            )
    return [job for job in jobs if not {*names[job]} & {*skip}]


def _check_model(name: str, config: RunConfig) -> None:
    """Make the model of a variant without memory: ranks, layers and optimizer must fit it."""
    try:
        planned_memory(config)
    except ValueError as problem:
        raise ValueError(f"variant {name}: {problem}") from None


def _report(sweep: Sweep, jobs: Sequence[Job], console: Console) -> None:
    """Show the table and write its files, if anything has ended; then say what failed."""
    finished = [job for job in jobs if job.state == "finished"]
    runs = [read_trained(job.variant, job.seed, job.folder) for job in finished]
    failed = [
        Failed(job.variant, job.seed, " ".join(job.reason.split()))
        for job in jobs
        if job.state == "failed"
    ]
    if runs or failed:
        names = list(dict.fromkeys([*sweep.variants, *(job.variant for job in jobs)]))
        comparison = compare(runs, names, sweep.seeds, sweep.reference, sweep.metric, failed)
        write_comparison(comparison, runs, sweep.out)
        write_sweep_report(sweep.out)
        if runs:
            text = comparison_text(comparison)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"wrote results.json, results.md and report.html to {sweep.out}", markup=False
        )
    for run in failed:
        console.print("[bold red]failed:[/] ", end="")
        console.print(str(run), markup=False, highlight=False, soft_wrap=True)
