"""Handle Ctrl-C while the command ``comera`` starts. Imports nothing slow."""

import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType

INTERRUPTED = 130
"""Exit status of a command that was interrupted."""

_MODULE = re.compile(r"-[bBdEiIOPqRsSuvx]*m(.*)", re.DOTALL)


def is_command(words: list[str]) -> bool:
    """Return whether a command line, as in ``sys.orig_argv``, runs ``comera`` or its modules."""
    rest = iter(words[1:])
    for word in rest:
        if module := _MODULE.fullmatch(word):
            return (module[1] or next(rest, "")).split(".")[0] == "comera"
        if word in ("-W", "-X"):
            next(rest, None)
        elif not word.startswith("-"):
            return Path(word).name in ("comera", "comera.exe")
        elif word.startswith("-c"):
            return False
    return False


def end_in_one_line(
    kind: type[BaseException], problem: BaseException, trace: TracebackType | None
) -> None:
    """End the process with one line on an uncaught Ctrl-C; installed as ``sys.excepthook``."""
    if issubclass(kind, KeyboardInterrupt):
        end_now()
    sys.__excepthook__(kind, problem, trace)


def end_now(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    """End the process on Ctrl-C without an exception, as torch swallows one during imports."""
    sys.stdout.flush()
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if is_command(sys.orig_argv):  # a program that only imports comera keeps its own
    sys.excepthook = end_in_one_line
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, end_now)
