"""Log a run: seconds of its steps, speed, JSON lines, TensorBoard curves, progress bar."""

import collections
import contextlib
import itertools
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import get_console, progress
from rich.console import Console
from rich.table import Column
from rich.text import Text
from torch import nn
from torch.utils._pytree import tree_map_with_path

from comera.allocator import return_freed_memory
from comera.extras import needed_by
from comera.files import write_text
from comera.planning.printing import show_count


class StepClock:
    """Sums the seconds of training steps; GPU steps are timed by events, without waiting.

    ``processor`` are the seconds of all processors that this process took in them, which count as
    the seconds of a step ``by_processor``.
    """

    def __init__(self, device: torch.device, by_processor: bool = False) -> None:
        self._device, self._seconds, self.processor = device, 0.0, 0.0
        self._by_processor = by_processor
        self._latest = collections.deque[float](maxlen=9)
        self._open = collections.deque[tuple[torch.cuda.Event, torch.cuda.Event]]()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        used = time.process_time()
        if self._device.type != "cuda":
            now = time.process_time if self._by_processor else time.perf_counter
            began = now()
            yield
            self.add(now() - began)
        else:
            start = self._event()
            yield
            self._open.append((start, self._event()))
        self.processor += time.process_time() - used
        while self._open and self._open[0][1].query():
            self._close()

    def add(self, seconds: float) -> None:
        """Add the seconds of a step, or of earlier ones, as those before a run was resumed."""
        self._seconds += seconds
        self._latest.append(seconds)

    def seconds(self) -> float:
        """Return the seconds of all steps so far; waits until the device has finished them."""
        while self._open:
            self._open[0][1].synchronize()
            self._close()
        return self._seconds

    def reading(self) -> tuple[float, float]:
        """Return seconds so far, the last step's as usual ones, and those, 0 until nine tell."""
        while len(self._open) > 1:
            self._open[0][1].synchronize()
            self._close()
        usual = sorted(self._latest)[4] if len(self._latest) == 9 else 0.0
        return self._seconds + usual * len(self._open), usual

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _close(self) -> None:
        start, end = self._open.popleft()
        self.add(start.elapsed_time(end) / 1e3)


@dataclass
class Pace:
    """Shows steps a second since the last call, and peak memory.

    ``per_step`` is the size of a step in all processes, and its unit: say ``(4096, "tokens")``.
    ``steps`` is the number of steps done before, which took ``seconds``.
    """

    device: torch.device
    per_step: tuple[int, str] | None = None
    steps: int = 0
    seconds: float = 0.0

    def show(self, steps: int, seconds: float) -> str:
        """Return speeds since the last call and peak memory as text, given totals so far."""
        new, took = steps - self.steps, seconds - self.seconds
        self.steps, self.seconds = steps, seconds
        parts = []
        if new > 0 and took > 0:
            parts.append(f"{show_count(new / took)} steps/s")
            if self.per_step is not None:
                count, unit = self.per_step
                parts.append(f"{show_count(count * new / took)} {unit}/s")
        parts.append(f"peak {peak_memory(self.device) / (1 << 20):,.0f} MiB")
        return ", ".join(parts)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest << 10


class MemoryWatch:
    """Peak memory above what there was when the watch was made, in bytes.

    That of tensors on a GPU, the resident one of this process on a CPU, less the pages of files at
    the time of asking: mapped data, and code of libraries, which grows with what is called. A tiny
    layer is stepped before, for what libraries allocate. Raises ``OSError`` on a system that does
    not tell.
    """

    def __init__(self, device: torch.device) -> None:
        layer = nn.Linear(8, 8).to(device)
        layer(torch.ones(8, 8, device=device)).sum().backward()
        torch.optim.AdamW(layer.parameters(), fused=True).step()
        self._device, self._of_gpu = device, device.type == "cuda"
        self.begin()
        self._base = torch.cuda.memory_allocated(device) if self._of_gpu else _own("VmRSS")

    def begin(self) -> None:
        """Forget the peak so far."""
        if self._of_gpu:
            return torch.cuda.reset_peak_memory_stats(self._device)
        return_freed_memory()  # else what comes would take that, and not count
        (_PROCESS / "clear_refs").write_text("5")  # man 5 proc_pid_clear_refs

    def peak(self) -> int:
        now = torch.cuda.max_memory_allocated(self._device) if self._of_gpu else _own("VmHWM")
        return now - self._base


_PROCESS = Path("/proc/self")


def _own(resident: str) -> int:
    """Return the bytes of an entry of the process's status, without pages of files."""
    lines = (_PROCESS / "status").read_text().splitlines()
    kib = {words[0]: int(words[1]) for line in lines if (words := line.split())[2:] == ["kB"]}
    return (kib[f"{resident}:"] - kib["RssFile:"]) << 10


_KEY = "not_finite"


def _name(path: Any) -> str:
    """Return a place in nested facts as its keys and numbers, with dots between them."""
    return ".".join(str(getattr(part, "key", getattr(part, "idx", None))) for part in path)


def to_json(facts: dict[str, Any], indent: int | None = None) -> str:
    """Return facts as JSON, with null for numbers that are not finite.

    The numbers that are not finite are listed under ``not_finite``:
    ``{"metrics": {"auc": null}, "not_finite": {"metrics.auc": "nan"}}``.
    """
    odd: dict[str, str] = {}

    def plain(path: Any, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            odd[_name(path)] = str(value)
            return None
        return value

    found = tree_map_with_path(plain, facts)
    return json.dumps(found | ({_KEY: odd} if odd else {}), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """Parse the result of :func:`to_json`; raises ``ValueError`` if it is not JSON."""
    found = json.loads(text)
    odd: dict[str, str] = found.pop(_KEY, {}) if isinstance(found, dict) else {}

    def restored(path: Any, value: Any) -> Any:
        return float(odd[_name(path)]) if value is None and _name(path) in odd else value

    return tree_map_with_path(restored, found) if odd else found


_log = logging.getLogger("comera")

_NEVER = 1_000_000  # seconds until TensorBoard's thread writes by itself, whose errors none sees
_TAIL_BYTES = 1 << 16


class SilentLog:
    """A log that writes nothing, for all processes except the first."""

    def write(self, step: int, **values: Any) -> None: ...

    def close(self) -> None: ...


class RunLog(SilentLog):
    """Log of a run, ``metrics.jsonl`` and TensorBoard files; drops lines after ``resume_step``."""

    def __init__(self, folder: Path, resume_step: int = 0, tensorboard: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            lines = _parsed(self.path.read_bytes())
            if not all(lines[:-1]):  # the last one may have been cut short when the run was
                damaged = sum(not line for line in lines[:-1])
                _log.warning(
                    "%s: drops %d of %d lines, as damaged ones", self.path, damaged, len(lines)
                )
            kept = [line for line in lines if line and line["step"] <= resume_step]
            write_text(self.path, "".join(to_json(line) + "\n" for line in kept))
        self.path.touch()
        self._board = None
        if tensorboard:
            with needed_by("tensorboard=True"):
                from torch.utils.tensorboard import SummaryWriter
            board = folder / "tensorboard"
            self._board = SummaryWriter(board, purge_step=resume_step + 1, flush_secs=_NEVER)

    def write(self, step: int, **values: Any) -> None:
        if not self.path.is_file():
            if not self.path.parent.is_dir():
                raise FileNotFoundError(
                    f"{self.path.parent} is gone: it was removed or renamed while the run wrote "
                    "into it"
                )
            _log.warning("%s was removed while the run goes on: a new one begins here", self.path)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_json({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        if self._board is not None:
            with contextlib.suppress(FileNotFoundError):  # the folder is gone
                self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``, up to one that is cut short or damaged."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run: it has no metrics.jsonl")
    return list(itertools.takewhile(bool, _parsed(path.read_bytes())))


def _parsed(raw: bytes) -> list[dict[str, Any]]:
    """Parse each line of a log; damaged lines are empty dicts."""
    lines = []
    for text in raw.decode("utf-8", errors="replace").splitlines():
        try:
            line = from_json(text)
        except (ValueError, TypeError, RecursionError):
            line = {}
        lines.append(line if isinstance(line, dict) and type(line.get("step")) is int else {})
    return lines


def last_logged(folder: Path, key: str) -> tuple[int, Any] | None:
    """Return the last step that logged ``key``, and the value; None if no step did."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = _parsed(file.read())  # the first one may lack its beginning, the last its end
    return next(((line["step"], line[key]) for line in reversed(lines) if key in line), None)


_WIDE = 100
_BESIDE_FIGURES = 38  # columns of a title, the steps and the time


class _FiguresColumn(progress.TextColumn):
    """Column of a progress bar with the latest figures, the first ones that have room."""

    def __init__(self, width: int) -> None:
        self._room = width - _BESIDE_FIGURES
        # Narrowed before the others, whose columns cannot be broken.
        super().__init__("", table_column=Column(no_wrap=False, overflow="ellipsis"))

    def render(self, task: progress.Task) -> Text:
        figures = task.fields["figures"]
        while ", " in figures and len(figures) > self._room:
            figures = figures.rpartition(", ")[0] + ","
        return Text(figures, no_wrap=True, overflow="ellipsis")


class _TimeColumn(progress.TimeRemainingColumn):
    """Column of a progress bar with the time left or, once finished, taken."""

    def render(self, task: progress.Task) -> Text:
        return Text.assemble(super().render(task), " taken" if task.finished else " left")


def print_text(console: Console, text: str) -> None:
    """Print a text as it is: without markup and colours, and with no line broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class PlainLines:
    """Prints a line at intervals in place of a progress bar, if output goes to a file."""

    EVERY = 10.0
    """Seconds between two lines at least."""

    def __init__(self, bar: progress.Progress, title: str, total: int) -> None:
        console = bar.console
        self._console = console
        self._shown = not (bar.disable or console.is_terminal or console.is_jupyter)
        self._title, self._total, self._last = title, total, time.monotonic()

    def show(self, done: int, figures: str) -> None:
        now = time.monotonic()
        if self._shown and now - self._last >= self.EVERY:
            self._last = now
            print_text(self._console, f"{self._title} {done}/{self._total}: {figures}")


def progress_bar(disable: bool = False, console: Console | None = None) -> progress.Progress:
    """Return a progress bar with step count, latest figures and time, without a bar if narrow."""
    width = (console or get_console()).width
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        *([progress.BarColumn(20)] if width >= _WIDE else []),
        progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _FiguresColumn(width - 21 if width >= _WIDE else width),
        _TimeColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        console=console,
        disable=disable,
    )
