"""``comera sweep`` and ``comera reproduce``: many runs, and how they compare."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console

from comera.recipes.jobs import LauncherName
from comera.recipes.parse import file_of, first_sentence
from comera.recipes.reproduce import Scale, experiments, reproduce, try_out
from comera.recipes.run_commands import changes_of
from comera.recipes.sweep import run_sweep

SWEEP_COMMANDS = {
    "sweep": "Train variants of one run over seeds, and compare them.",
    "reproduce": "Train an experiment of the papers, small or at their scale.",
}


def add_sweep_commands(commands: Any) -> None:
    """Add the commands to those of ``comera``."""
    for name, parser in (("sweep", _sweep_parser()), ("reproduce", _reproduce_parser())):
        commands.add_subcommand(name, parser, help=SWEEP_COMMANDS[name])


def run_sweep_command(command: str, options: Namespace, console: Console) -> int:
    """Carry one of them out; returns the exit status."""
    if command == "reproduce":
        return _reproduce(options, console)
    out = Path(options.out) if options.out else None
    path = file_of(options.file)
    return run_sweep(path, options.jobs, options.overwrite, console, out, options.launcher)


def _reproduce(options: Namespace, console: Console) -> int:
    """List experiments, try one out, or train what is unfinished of it."""
    if options.name is None:
        for name, scales in experiments().items():
            title = first_sentence(next(iter(reversed(scales.values()))))
            line = f"{name} ({', '.join(sorted(scales, reverse=True))}): {title}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    changes = changes_of(options.set)
    if options.dry_run:
        for line in try_out(options.name, options.scale, changes, skip=options.skip):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    return reproduce(
        options.name,
        options.scale,
        out=Path(options.out),
        changes=changes,
        skip=options.skip,
        minutes=options.minutes,
        jobs=options.jobs,
        overwrite=options.overwrite,
        console=console,
    )


def _sweep_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description=f"{SWEEP_COMMANDS['sweep']} The same command resumes a sweep.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", type=str, help="YAML file that describes the sweep, or a configuration's name."
    )
    parser.add_argument(
        "--out",
        type=str,
        default=None,
        help="Folder of the sweep, instead of the one that the file names.",
    )
    parser.add_argument(
        "--jobs",
        type=int | None,
        default=None,
        help="Number of runs that are trained at a time (default: one on this machine, as many as "
        "the queue takes elsewhere).",
    )
    parser.add_argument(
        "--launcher",
        type=LauncherName,
        default="local",
        help="Where runs are started: as processes here, through submitit (Slurm), or by Ray; "
        "settings of the latter are the sections submitit and ray of the file.",
    )
    _add_overwrite(parser)
    return parser


def _reproduce_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description=f"{SWEEP_COMMANDS['reproduce']} The same command goes on where it was "
        "stopped, and OUT/REPRODUCTION.md collects what is finished.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", type=str, nargs="?", help="Name of the experiment; without it all are listed."
    )
    parser.add_argument(
        "--scale",
        type=Scale,
        default="small",
        help="small takes minutes on a few CPU cores, paper has the paper's shapes.",
    )
    parser.add_argument(
        "--out", type=str, default="runs/reproduce", help="Folder of all experiments."
    )
    parser.add_argument(
        "--set",
        type=list[str],
        default=[],
        help="Settings that every run gets, such as where its data are: "
        "--set='[nli.train=pairs.jsonl,nli.dev=dev.jsonl]'.",
    )
    parser.add_argument(
        "--skip",
        type=list[str],
        default=[],
        help="Variants, or runs as VARIANT/seed-K, to leave out this time: --skip='[galore]'.",
    )
    parser.add_argument(
        "--minutes", type=float | None, default=None, help="Save and stop after so long."
    )
    parser.add_argument(
        "--jobs", type=int | None, default=None, help="Number of runs at a time (default: one)."
    )
    _add_overwrite(parser)
    parser.add_argument(
        "--dry_run",
        type=bool,
        default=False,
        help="Train nothing, but do two steps of each variant on drawn data, or go through the "
        "shapes of one that takes more than 512 MiB.",
    )
    return parser


def _add_overwrite(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="Begin those runs anew whose folders hold other settings or were begun with other "
        "data; the others stay.",
    )
