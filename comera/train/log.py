"""What a run writes down: JSON lines, TensorBoard curves, a progress bar."""

import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from comera.extras import needed_by
from comera.files import replacing
from comera.train.json_figures import from_json, to_json

_log = logging.getLogger("comera")

_TAIL_BYTES = 1 << 16


class SilentLog:
    """Write nothing: the log of a process that is not the one that writes."""

    def write(self, step: int, **values: Any) -> None:
        """Drop a line."""

    def close(self) -> None:
        """Do nothing."""


class RunLog(SilentLog):
    """``metrics.jsonl`` and TensorBoard files of one run.

    Args:
        folder: Made if it does not exist.
        resume_step: Lines after this step, left by an interrupted run, are dropped.
        tensorboard: Whether to write TensorBoard files too.
    """

    def __init__(self, folder: Path, resume_step: int = 0, tensorboard: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        _drop_after(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            with needed_by("tensorboard=True"):
                from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=resume_step + 1)

    def write(self, step: int, **values: Any) -> None:
        """Append one line; numbers also go to TensorBoard."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(to_json(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``, up to one that is cut short or damaged.

    Raises:
        FileNotFoundError: If the folder holds no run.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run: it has no metrics.jsonl")
    return list(itertools.takewhile(bool, _parsed(path)))


def _parsed(path: Path) -> list[dict[str, Any]]:
    """Parse each line of a log; empty ones in the place of what is cut short or damaged."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = from_json(text)
        except json.JSONDecodeError:
            line = {}
        lines.append(line if isinstance(line, dict) and "step" in line else {})
    return lines


def last_logged(folder: Path, key: str) -> tuple[int, Any] | None:
    """Find the last step that has a value under ``key``, and that value; None if there is none.

    Only the end of the file is read: cheap enough to watch a long run.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for text in reversed(lines):
        try:
            line = from_json(text)
        except json.JSONDecodeError:  # cut short by where reading began, or being written
            continue
        if isinstance(line, dict) and key in line:
            return line["step"], line[key]
    return None


def _drop_after(path: Path, step: int) -> None:
    if not path.is_file():
        return
    lines = _parsed(path)
    if not all(lines[:-1]):  # the last one may have been cut short when the run was
        damaged = sum(not line for line in lines[:-1])
        _log.warning("%s: drops %d of %d lines, as damaged ones", path, damaged, len(lines))
    kept = [line for line in lines if line and line["step"] <= step]
    with replacing(path) as temporary:
        temporary.write_text("".join(to_json(line) + "\n" for line in kept), encoding="utf-8")


class FiguresColumn(TextColumn):
    """Shows the latest figures, as many of them as there is room for beside the other columns."""

    def __init__(self) -> None:
        # Narrowed before the others, whose columns cannot be broken.
        column = Column(no_wrap=False, overflow="ellipsis")
        super().__init__("{task.fields[figures]}", table_column=column)

    def render(self, task: Task) -> Text:
        """Return one line."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class LeftColumn(ProgressColumn):
    """Says what the time beside it is."""

    def render(self, task: Task) -> Text:
        """Return the word."""
        return Text("taken" if task.finished else "left")


class PlainLines:
    """Prints a line now and then where output is a file, which a bar leaves empty to the end.

    Args:
        bar: Made for the same output.
        title: What every line begins with.
        total: Steps of the run.
    """

    EVERY = 10.0
    """Seconds between two lines at least."""

    def __init__(self, bar: Progress, title: str, total: int) -> None:
        console = bar.console
        self._console = console
        self._shown = not (bar.disable or console.is_terminal or console.is_jupyter)
        self._title, self._total, self._last = title, total, time.monotonic()

    def show(self, done: int, figures: str) -> None:
        """Print the figures of a step, unless a line was printed only just before."""
        now = time.monotonic()
        if self._shown and now - self._last >= self.EVERY:
            self._last = now
            line = f"{self._title} {done}/{self._total}: {figures}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_bar(disable: bool = False, console: Console | None = None) -> Progress:
    """Make a bar with the step count, the latest figures and the time left; at its end, taken."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        FiguresColumn(),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        LeftColumn(table_column=Column(no_wrap=True)),
        console=console,
        disable=disable,
    )
