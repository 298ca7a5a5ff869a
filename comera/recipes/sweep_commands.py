"""``comera sweep`` and ``comera reproduce``: many runs, and how they compare."""

from pathlib import Path

from rich.console import Console

from comera.recipes import reproduce as papers
from comera.recipes.jobs import LauncherName
from comera.recipes.parse import file_of, first_sentence
from comera.recipes.run_commands import changes_of
from comera.recipes.sweep import run_sweep


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
        launcher: Where runs are started: as processes here, through submitit (Slurm), or by Ray;
            settings of the latter are the sections submitit and ray of the file.
        overwrite: Begin those runs anew whose folders hold other settings or were begun with other
            data; the others stay.
    """
    folder = Path(out) if out else None
    return run_sweep(file_of(file), jobs, overwrite, console, folder, launcher)


def reproduce(
    name: str | None = None,
    /,
    *,
    scale: papers.Scale = "small",
    out: str = "runs/reproduce",
    set: list[str] = [],  # noqa: B006
    skip: list[str] = [],  # noqa: B006
    minutes: float | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    console: Console,
) -> int:
    """Train an experiment of the papers, small or at their scale.

    The same command resumes it, and OUT/REPRODUCTION.md collects what is finished.

    Args:
        name: Name of the experiment; without it all are listed.
        scale: small takes minutes on a few CPU cores, paper has the paper's shapes.
        out: Folder of all experiments.
        set: Settings that every run gets, such as where its data are:
            --set='[nli.train=pairs.jsonl,nli.dev=dev.jsonl]'.
        skip: Variants, or runs as VARIANT/seed-K, to leave out this time: --skip='[galore]'.
        minutes: Save and stop after so long.
        jobs: Number of runs at a time (default: one).
        overwrite: Begin those runs anew whose folders hold other settings or were begun with other
            data; the others stay.
        dry_run: Train nothing, but do two steps of each variant on drawn data, or go through the
            shapes of one that takes more than 512 MiB.
    """

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if name is None:
        for each, scales in papers.experiments().items():
            title = first_sentence(next(iter(reversed(scales.values()))))
            show(f"{each} ({', '.join(sorted(scales, reverse=True))}): {title}")
        return 0
    changes = changes_of(set)
    if dry_run:
        for line in papers.try_out(name, scale, changes, skip=skip):
            show(line)
        return 0
    return papers.reproduce(
        name, scale, out=Path(out), changes=changes, skip=skip, minutes=minutes, jobs=jobs,
        overwrite=overwrite, console=console,
    )  # fmt: skip
