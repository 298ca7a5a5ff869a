"""``comera train`` and ``comera plan``: one run, from the words of the command line."""

import os
import re
import sys
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from jsonargparse import ArgumentParser
from rich.console import Console

from comera.allocator import reuse_freed_memory
from comera.recipes.run import plan, planned_memory, run
from comera.recipes.run_config import RunConfig
from comera.recipes.short_help import short_help
from comera.recipes.sweep import INTERRUPTED
from comera.recipes.typed import typed_settings
from comera.train.processes import joined

RUN_COMMANDS = {
    "train": "Train a run, or resume it.",
    "plan": "Show what a run would train, and what it would be compressed to.",
}


def add_run_commands(commands: Any, with_settings: bool) -> None:
    """Add the commands to those of ``comera``, for their help and what shells complete.

    Their words are read by :func:`typed_settings`. Without their settings it takes less time.
    """
    for name, text in RUN_COMMANDS.items():
        command = _Parser(description=text, allow_abbrev=False)
        command.name = name
        command.add_argument(
            "--help_all",
            action=_ShowEverySetting,
            nargs=0,
            default=SUPPRESS,
            help="Show every setting and exit.",
        )
        command.add_argument(
            "--config",
            type=str,
            help="YAML file that describes the run; `comera init` lists configurations that can be "
            "given by name instead.",
        )
        if with_settings:
            # Every field of a run is an option, its help the field's line in the docstring.
            command.add_class_arguments(RunConfig, None)
        # By itself the usage would list every key of a run.
        command.usage = f"comera {name} FILE_OR_NAME [--KEY=VALUE ...]"
        commands.add_subcommand(name, command, help=text)


def asks_for_help(words: Sequence[str]) -> bool:
    """Tell whether one of the words wants to see settings, all or those of a section."""
    return any(
        word in ("-h", "--help") or re.fullmatch(r"--help[_-]all|--[\w.-]+\.help", word)
        for word in words
    )


def run_settings(words: Sequence[str]) -> RunConfig:
    """Return the settings of ``train`` or ``plan``; raises what :func:`typed_settings` does."""
    settings = typed_settings(words)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
        settings.overwrite = False  # torchrun has started the processes again: they go on
    return settings


def run_run_command(command: str, settings: RunConfig, console: Console, count: int) -> int:
    """Carry one of them out, in one of ``count`` processes; returns the exit status."""
    if command == "plan":
        _show_plan(settings, console)
        return 0
    reuse_freed_memory()
    if count == 1:
        return 0 if run(settings, console) else INTERRUPTED
    cuda = settings.device != "cpu" and torch.cuda.is_available()
    with joined(cuda, settings.parallel.timeout_minutes) as processes:
        shown = console if processes.is_first else Console(quiet=True)
        return 0 if run(settings, shown, processes=processes) else INTERRUPTED


class _Parser(ArgumentParser):
    """Shows what is changed first; ``--help_all`` shows every key, ``--SECTION.help`` some."""

    name: str = ""

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """Return the text of ``--help``."""
        if not self.name:  # jsonargparse makes one for a section
            return super().format_help(formatter)
        return short_help(self.name, self.description or "")


class _ShowEverySetting(Action):
    """Prints what argparse would, a paragraph a key."""

    def __call__(self, parser: Any, *_: object) -> NoReturn:
        print(ArgumentParser.format_help(parser), end="")
        sys.exit(0)


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
