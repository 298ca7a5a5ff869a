"""The command ``comera``: ``train``, ``plan``, ``sweep``, ``report``, ``checkpoint`` and others."""

import contextlib
import difflib
import io
import logging
import os
import re
import sys
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import yaml
from jsonargparse import (
    ActionConfigFile,
    ArgumentParser,
    Namespace,
    get_loader,
    set_loader,
    set_parsing_settings,
)
from rich.console import Console

from comera import __version__
from comera._command import imports_are_done
from comera.allocator import reuse_freed_memory
from comera.bench.calibrate import calibrate
from comera.bench.commands import add_bench, run_bench
from comera.bench.options import check_positive
from comera.checkpoint.archive import FolderInUseError
from comera.extras import MissingPackageError
from comera.recipes.after_training import COMMANDS, add_commands, run_command
from comera.recipes.chains import add_checkpoint, run_checkpoint
from comera.recipes.doctor import examine
from comera.recipes.launchers import LauncherName
from comera.recipes.named import described, file_of, first_sentence
from comera.recipes.parse import parse_settings, read_yaml, spelled_out
from comera.recipes.report.run_report import write_report
from comera.recipes.report.sweep_report import write_sweep_report
from comera.recipes.reproduce import Scale, experiments, reproduce, try_out
from comera.recipes.run import plan, planned_memory, run
from comera.recipes.run_config import RunConfig
from comera.recipes.short_help import short_help
from comera.recipes.sweep import INTERRUPTED, run_sweep
from comera.recipes.typed import first_mistake
from comera.train.processes import OtherProcessError, count_started, joined, rank_started
from comera.train.step import NonFiniteLossError

_MODE = "run"
"""How jsonargparse reads the files of runs: as YAML, with ``optimizer: came`` spelled out."""
set_loader(_MODE, lambda text: spelled_out(get_loader("yaml")(text)), (yaml.YAMLError,))

_FILE_WIDTH = 120
"""Characters of a line where no terminal says how many."""

_ONE_PROCESS = (
    "started as {count} processes (WORLD_SIZE={count}), which only comera train makes use of: "
    "start comera {command} once, without torchrun (or unset WORLD_SIZE)"
)

_REPRODUCE = "Train an experiment of the papers, small or at their scale."

_OPTIMIZER = re.compile(r"--optimizer=(\w+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Of several processes that torchrun has started, the first one speaks for all.
    """
    imports_are_done()
    words = list(sys.argv[1:] if arguments is None else arguments)
    count, rank = count_started(os.environ), rank_started(os.environ)
    speaks = count == 1 or rank == 0
    logging.basicConfig(format="%(message)s", level=logging.INFO if speaks else logging.ERROR)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    if count > 1 and words[:1] not in (["train"], []):
        # All of them would do the same; the first alone says so.
        if speaks:
            _print_error(_ONE_PROCESS.format(count=count, command=words[0]), console)
        return 1
    try:
        chosen = _parsed(words, speaks)
    except (ValueError, OSError) as problem:
        if speaks:
            _print_error(str(problem), console)
        return 1
    try:
        return _train(chosen, console) if count > 1 else _carried_out(chosen, console)
    except KeyboardInterrupt:  # where there is nothing to save
        if speaks:
            console.print("interrupted")
        return INTERRUPTED
    except (
        ValueError,
        OSError,
        NonFiniteLossError,
        FolderInUseError,
        MissingPackageError,
        OtherProcessError,
    ) as problem:
        # What the processes have found together the first one says; else each its own.
        if speaks or not isinstance(problem, NonFiniteLossError | OtherProcessError):
            _print_error(str(problem) if speaks else f"in process {rank}: {problem}", console)
        return 1


def _parsed(words: Sequence[str], speaks: bool) -> Namespace:
    words = _in_full(words)
    parser = make_parser(words)
    with contextlib.nullcontext() if speaks else contextlib.redirect_stderr(io.StringIO()):
        return parser.parse_args(words)


def _carried_out(chosen: Namespace, console: Console) -> int:
    """Carry out a command in one process; returns the exit status."""
    if chosen.command == "init":
        _show_configuration(chosen.init.name)
        return 0
    if chosen.command == "report":
        folder = Path(chosen.report.folder).expanduser()
        of_a_sweep = (folder / "results.json").is_file()
        written = (write_sweep_report if of_a_sweep else write_report)(folder)
        console.print(f"wrote {written}", markup=False)
        return 0
    if chosen.command == "sweep":
        options = chosen.sweep
        out = Path(options.out) if options.out else None
        path = file_of(options.file)
        return run_sweep(path, options.jobs, options.overwrite, console, out, options.launcher)
    if chosen.command == "reproduce":
        return _reproduce(chosen.reproduce, console)
    if chosen.command == "bench":
        return run_bench(chosen.bench, console)
    if chosen.command in COMMANDS:
        return run_command(chosen.command, chosen[chosen.command], console)
    if chosen.command == "checkpoint":
        return run_checkpoint(chosen.checkpoint, console)
    if chosen.command == "doctor":
        examine(console)
        return 0
    if chosen.command == "calibrate":
        reuse_freed_memory()
        if chosen.calibrate.threads is not None:
            check_positive("threads", chosen.calibrate.threads)
            torch.set_num_threads(chosen.calibrate.threads)
        calibrate(chosen.calibrate.device, console.print)
        return 0
    settings = _settings(chosen)
    if chosen.command == "plan":
        _show_plan(settings, console)
        return 0
    reuse_freed_memory()
    return 0 if run(settings, console) else INTERRUPTED


def _reproduce(options: Namespace, console: Console) -> int:
    """List experiments, try one out, or train what is unfinished of it."""
    if options.name is None:
        for name, scales in experiments().items():
            title = first_sentence(next(iter(reversed(scales.values()))))
            line = f"{name} ({', '.join(sorted(scales, reverse=True))}): {title}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    changes = {}
    for word in options.set:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--set={word} must be KEY=VALUE, such as nli.train=pairs.jsonl")
        changes[key] = yaml.safe_load(value)
    if options.dry_run:
        for line in try_out(options.name, options.scale, changes):
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


def _settings(chosen: Namespace) -> RunConfig:
    """Make the settings of ``train`` and ``plan``, which are given as dataclasses."""
    given = chosen[chosen.command].as_dict()
    given.pop("config")
    settings = parse_settings(RunConfig, given)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        settings.overwrite = False  # torchrun has started the processes again: they go on
    return settings


def _train(chosen: Namespace, console: Console) -> int:
    """Train in one of several processes; returns the exit status."""
    settings = _settings(chosen)
    reuse_freed_memory()
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    with joined(cuda, settings.parallel.timeout_minutes) as processes:
        shown = console if processes.is_first else Console(quiet=True)
        return 0 if run(settings, shown, processes=processes) else INTERRUPTED


def _print_error(text: str, console: Console) -> None:
    console.print("[bold red]error:[/]", end=" ")
    console.print(text, highlight=False, soft_wrap=True, markup=False)


class _Parser(ArgumentParser):
    """Says in one line what was wrong, and which option may have been meant."""

    options: Sequence[str] = ()
    name: str = ""
    words: Sequence[str] = ()

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """Show what is changed first; ``--help_all`` shows every key, ``--SECTION.help`` some."""
        if not self.name:  # jsonargparse makes one for a section
            return super().format_help(formatter)
        return short_help(self.name, self.description or "")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w.]+)", message, re.IGNORECASE)
        near = difflib.get_close_matches(unknown[1], self.options, n=1) if unknown else []
        if near:
            message += f": did you mean {near[0]}?"
        super().error((not unknown and first_mistake(self.words)) or message, ex)


class _ShowEverySetting(Action):
    """Prints what argparse would, a paragraph a key."""

    def __call__(self, parser: Any, *_: object) -> NoReturn:
        print(ArgumentParser.format_help(parser), end="")
        sys.exit(0)


def make_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Make the parser of the ``comera`` command.

    Args:
        words: What it will be given, of which errors name the first mistake.
    """
    set_parsing_settings(add_print_completion_argument=True)  # comera --print_completion SHELL
    parser = ArgumentParser(
        prog="comera",
        description="Train models in compressed form.",
        version=__version__,
        allow_abbrev=False,
        parser_mode=_MODE,
    )
    commands = parser.add_subcommands(dest="command")
    for name, text in (
        ("train", "Train a run, or resume it."),
        ("plan", "Show what a run would train, and what it would be compressed to."),
    ):
        command = _Parser(description=text, allow_abbrev=False)
        command.name, command.words = name, words
        command.add_argument(
            "--help_all",
            action=_ShowEverySetting,
            nargs=0,
            default=SUPPRESS,
            help="Show every setting and exit.",
        )
        command.add_argument(
            "--config",
            action=ActionConfigFile,
            help="YAML file that describes the run; `comera init` lists configurations that can be "
            "given by name instead.",
        )
        # Every field of a run is an option, its help the field's line in the docstring.
        command.add_class_arguments(RunConfig, None)
        # By itself the usage would list every key of a run.
        command.usage = f"comera {name} FILE_OR_NAME [--KEY=VALUE ...]"
        command.options = [s for action in command._actions for s in action.option_strings]
        commands.add_subcommand(name, command, help=text)
    sweep = ArgumentParser(
        description="Train variants of one run over seeds, and compare them; the same command "
        "resumes a sweep.",
        allow_abbrev=False,
    )
    sweep.add_argument(
        "file", type=str, help="YAML file that describes the sweep, or a configuration's name."
    )
    sweep.add_argument(
        "--out",
        type=str,
        default=None,
        help="Folder of the sweep, instead of the one that the file names.",
    )
    sweep.add_argument(
        "--jobs",
        type=int | None,
        default=None,
        help="Number of runs that are trained at a time (default: one on this machine, as many as "
        "the queue takes elsewhere).",
    )
    sweep.add_argument(
        "--launcher",
        type=LauncherName,
        default="local",
        help="Where runs are started: as processes here, through submitit (Slurm), or by Ray; "
        "settings of the latter are the sections submitit and ray of the file.",
    )
    sweep.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="Begin those runs anew whose folders hold other settings or were begun with other "
        "data; the others stay.",
    )
    commands.add_subcommand(
        "sweep", sweep, help="Train variants of one run over seeds, and compare them."
    )
    commands.add_subcommand("reproduce", _reproduce_parser(), help=_REPRODUCE)
    init = ArgumentParser(
        description="Print a configuration to begin with: comera init NAME > mine.yaml"
    )
    init.add_argument(
        "name", type=str, nargs="?", help="Name of a configuration; without it all are listed."
    )
    commands.add_subcommand("init", init, help="Print a configuration to begin with, or list all.")
    text = "Write one HTML file about a run or a sweep."
    report = ArgumentParser(description=text)
    report.add_argument("folder", type=str, help="Folder of the run or the sweep.")
    commands.add_subcommand("report", report, help=text)
    add_commands(commands)
    add_bench(commands)
    add_checkpoint(commands)
    measure = ArgumentParser(description=calibrate.__doc__.splitlines()[0])  # type: ignore[union-attr]
    measure.add_argument(
        "--device", type=Literal["cpu", "cuda"], default="cpu", help="Device to measure."
    )
    measure.add_argument(
        "--threads",
        type=int,
        help="Number of CPU threads to measure with (default: what torch chooses).",
    )
    commands.add_subcommand("calibrate", measure, help="Measure this machine for the planner.")
    text = "Show what was found for CUDA kernels, and which way each operator goes."
    commands.add_subcommand("doctor", ArgumentParser(description=text), help=text)
    return parser


def _reproduce_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description=f"{_REPRODUCE} The same command goes on where it was stopped, and "
        "OUT/REPRODUCTION.md collects what is finished.",
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
    parser.add_argument(
        "--overwrite",
        type=bool,
        default=False,
        help="Begin those runs anew whose folders hold other settings or were begun with other "
        "data; the others stay.",
    )
    parser.add_argument(
        "--dry_run",
        type=bool,
        default=False,
        help="Train nothing, but do two steps of each variant on drawn data, or go through its "
        "shapes where memory does not suffice.",
    )
    return parser


def _in_full(arguments: Sequence[str]) -> list[str]:
    """Spell short forms out as jsonargparse wants them: ``train CONFIG``, ``--optimizer=NAME``."""
    words = list(arguments)
    if words and words[0] in ("train", "plan"):
        for k in range(1, len(words)):
            alone = k == 1 or not words[k - 1].startswith("-") or "=" in words[k - 1]
            if alone and not words[k].startswith("-"):
                path = _file_of_run(words[k]) or file_of(words[k])
                _check_file(path)
                words[k] = f"--config={path}"
                words.insert(1, words.pop(k))  # first, so that keys before it count too
                if _is_of_a_run(path):
                    words.insert(2, f"--out={path.parent}")
                break
    return [_OPTIMIZER.sub(r"--optimizer.name=\1", word) for word in words]


def _file_of_run(word: str) -> Path | None:
    """Return the settings of the run whose folder a word names; None if it names another thing."""
    path = Path(word).expanduser() / "config.yaml"
    return path if _is_of_a_run(path) else None


def _is_of_a_run(path: Path) -> bool:
    """Tell whether a file is what a run has written of its settings, all but where it is."""
    written = path.name == "config.yaml" and (path.parent / "metrics.jsonl").is_file()
    return written and path.is_file() and "out" not in read_yaml(path)


def _check_file(path: Path) -> None:
    """Check what jsonargparse would refuse without naming the file, or without a guess."""
    if {"base", "variants"} & read_yaml(path).keys():
        raise ValueError(f"{path} is no run but a sweep: comera sweep trains it")
    mistake = first_mistake([f"--config={path}"])
    if mistake is not None and " is not a setting" in mistake:
        raise ValueError(f"{path}: {mistake}")


def _show_configuration(name: str | None) -> None:
    """Print as a file, not as to a terminal: no line may be broken."""
    if name is not None:
        print(file_of(name).read_text(encoding="utf-8"), end="")
        return
    listed = described()
    width = max(len(each) for each, _ in listed)
    for each, text in listed:
        print(f"{each:{width}}  {text}")


def _show_plan(config: RunConfig, console: Console) -> None:
    report, layers, target = plan(config)
    memory = planned_memory(config)
    console.print(str(report), soft_wrap=True, highlight=False)
    if layers is not None:
        console.print(str(layers), soft_wrap=True, highlight=False)
    for table in memory:
        console.print(str(table), soft_wrap=True, highlight=False, markup=False)
    if target is not None:
        cores = report.live_params
        rest = report.params - cores
        console.print(
            f"rank learning from {cores:,} to at most {target:,} entries in the cores: "
            f"the whole model then has at most {rest + target:,} parameters, "
            f"{report.dense_params / (rest + target):.1f}x fewer than dense"
        )


if __name__ == "__main__":
    sys.exit(main())
