"""``python -m benchmarks NAME``: a benchmark is a module with ``add_options`` and ``run``.

Its docstring is the help. ``reproduce``, which trains runs of the command ``comera``, shares no
options with them; ``card`` and ``language_model`` have command lines of their own.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.checks import DisagreementError
from benchmarks.session import Session, add_common
from comera._command import INTERRUPTED
from comera.checkpoint.archive import FolderInUseError
from comera.extras import MissingPackageError
from comera.train.step import NonFiniteLossError

NAMES = (
    "linear", "embedding", "step", "memory", "rank_learning", "traffic", "checkpoints",
    "optimizers", "serve",
)  # fmt: skip

_FILE_WIDTH = 120  # characters of a line without a terminal


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all benchmarks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and weigh compressed layers beside dense ones and other packages, in one "
        "process and in turn. Compare the ratios, not the milliseconds.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name in (*NAMES, "reproduce"):
        try:
            module = importlib.import_module(f"benchmarks.{name}")
        except ImportError:  # reproduce trains runs, which needs what the command line needs
            continue
        text = module.__doc__ or ""
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )  # fmt: skip
        module.add_options(command)
        if name in NAMES:
            add_common(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    options = make_parser().parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    for each in (console, errors):
        if not each.is_terminal:
            each.width = _FILE_WIDTH
    status, settings = 0, {name: value for name, value in vars(options).items() if name != "run"}
    try:
        if options.benchmark == "reproduce":
            return options.run(console, options)
        session = Session.of(options, console)
        try:
            options.run(session, options)
        except DisagreementError as problem:
            console.print(f"[bold red]refused:[/] {problem}", highlight=False, soft_wrap=True)
            status = 1
        except KeyboardInterrupt:
            session.print("interrupted")
            status = INTERRUPTED
        finally:
            if options.json is not None:
                session.write(options.json, options.benchmark, settings)
    except KeyboardInterrupt:  # before there is a session
        console.print("interrupted")
        return INTERRUPTED
    except (
        ValueError, OSError, MissingPackageError, FolderInUseError, NonFiniteLossError,
    ) as problem:  # fmt: skip
        errors.print("[bold red]error:[/]", end=" ")
        errors.print(str(problem), highlight=False, soft_wrap=True, markup=False)
        return 1
    return status or int(session.failed)


if __name__ == "__main__":
    sys.exit(main())
