"""Options, devices, tables and files that all benchmarks share."""

import argparse
import datetime
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.peers import MissingPeerError
from benchmarks.timing import Timings, alternate, milliseconds, watch_neighbours
from comera.allocator import reuse_freed_memory
from comera.files import replacing
from comera.planning.machine import processor_name

PAPER_RANKS = [12, 30, 30, 30, 16]
DTYPES = ("float32", "float64", "bfloat16", "float16")

_SAMPLE_SECONDS = 0.02  # least duration of a sample


def positive(text: str) -> int:
    """Read a whole number above zero."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


class _Several(argparse.Action):
    """Values of one option, which spaces or commas separate."""

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        words = [word for value in values for word in value.split(",") if word]
        try:
            setattr(options, self.dest, [positive(word) for word in words])
        except argparse.ArgumentTypeError as problem:
            raise argparse.ArgumentError(self, str(problem)) from None


def add_several(
    parser: argparse.ArgumentParser, name: str, default: Sequence[int], help: str
) -> None:
    """Add an option of several whole numbers above zero."""
    options: dict[str, Any] = {"nargs": "+", "action": _Several, "metavar": "N"}
    parser.add_argument(name, **options, default=list(default), help=help)


def add_sizes(parser: argparse.ArgumentParser, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Add options of whole numbers above zero: by name the default, and the help."""
    for name, (default, help) in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=help, metavar="N")


def add_rank(parser: argparse.ArgumentParser, default: Sequence[int] = PAPER_RANKS) -> None:
    add_several(parser, "--rank", default, "Ranks of the inner bonds: one bound on all, or each.")


def rank_of(ranks: Sequence[int]) -> int | list[int]:
    """Return one bound on all ranks, or the list of them."""
    return ranks[0] if len(ranks) == 1 else list(ranks)


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", choices=["all", "none"], default="all",
        help="Whether other packages are timed beside comera, where they are installed.",
    )  # fmt: skip


def add_repeats(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, {"repeats": (9, "Number of rounds that are timed.")})


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="Where to run.")
    help = "Number of CPU threads (default: what torch chooses)."
    parser.add_argument("--threads", type=positive, help=help)
    parser.add_argument(
        "--malloc", choices=["keep", "default"], default="keep",
        help="Whether freed memory stays in the process, for everything that is timed.",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="Write all results into this file.")


def machine_facts(device: torch.device, kept: bool) -> dict[str, Any]:
    """Return facts on the machine and this process, in which freed memory may be kept."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "date": datetime.date.today().isoformat(), "processor": processor_name(),
        "cores": cores, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "freed_memory": "kept" if kept else "returned",
    }  # fmt: skip
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def machine_line(facts: dict[str, Any], dtype: str) -> str:
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    return (
        f"{gpu}{facts['processor']}, cores {facts['cores']}, threads {facts['threads']}, torch "
        f"{facts['torch']}, {dtype}, freed memory {facts['freed_memory']}, {facts['date']}"
    )


def cell(value: Any, format: str) -> str:
    """Return a value for a table: None is a dash, and ``"ms"`` about three digits."""
    if value is None:
        return "–"
    return milliseconds(value) if format == "ms" else f"{value:{format}}"


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def in_new_process(module: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run ``python -m module JOB`` and return the JSON of its last line, or raise the error."""
    words = [sys.executable, "-m", module, json.dumps(job)]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        killed = ", most likely for lack of memory" if ended.returncode == -9 else ""
        ending = f"ended with status {ended.returncode}{killed}"
        raise RuntimeError(f"the measuring process {ending}: {last}")
    return json.loads(ended.stdout.splitlines()[-1])


@dataclass
class Session:
    """Console, device and results of one benchmark.

    ``repeats`` are the rounds of every timing, ``kept`` whether freed memory is kept in the
    process, ``failed`` whether a measurement could not be made.
    """

    console: Console
    device: torch.device
    repeats: int
    kept: bool
    results: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace, console: Console) -> "Session":
        """Make the session of the common options, and print the machine; raises ``ValueError``."""
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda' needs a GPU that torch can see; --device=cpu runs here")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        kept = reuse_freed_memory(options.malloc == "keep")
        made = cls(console, torch.device(options.device), getattr(options, "repeats", 1), kept)
        dtype = getattr(options, "dtype", "float32")
        made.print(machine_line(machine_facts(made.device, kept), dtype))
        return made

    def print(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def note(self, text: str) -> None:
        """Print one line that belongs to the results, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.print(text)

    def show(
        self,
        title: str,
        columns: Sequence[tuple[str, str]],
        rows: Iterable[Sequence[Any]],
        caption: str | None = None,
    ) -> None:
        """Print a table; columns are headings and formats, none for text."""
        table = Table(caption=caption, caption_justify="left")
        for heading, format in columns:
            table.add_column(heading, justify="right" if format else "left")
        for row in rows:
            table.add_row(*(cell(value, columns[k][1]) for k, value in enumerate(row)))
        self.print(title)
        self.console.print(table)

    def table(
        self,
        title: str,
        columns: Mapping[str, str],
        rows: Iterable[Sequence[Any]],
        caption: str | None = None,
    ) -> None:
        """Measure the rows one by one, print them as a table and record them, also on Ctrl-C.

        ``columns`` are formats by heading: none for text, ``"ms"`` for milliseconds.
        """
        done: list[Sequence[Any]] = []
        try:
            for row in rows:
                done.append(row)
        finally:
            if done:
                self.show(title, list(columns.items()), done, caption)
                found = [dict(zip(columns, row, strict=True)) for row in done]
                self.results.append({"title": title, "rows": found})

    def add_peer(
        self,
        runs: dict[str, Callable[[], object]],
        name: str,
        make: Callable[[], Callable[[], object]],
    ) -> None:
        """Add the result of ``make`` to ``runs``; note it if it is missing or fails."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = make()
                run()
        except MissingPeerError as missing:
            self.note(str(missing))
        except Exception as problem:
            reason = (str(problem).splitlines() or [""])[0]
            self.note(f"{name} fails here and is left out: {type(problem).__name__}: {reason}")
        else:
            runs[name] = run

    def time(self, title: str, runs: Mapping[str, Callable[[], object]], baseline: str) -> Timings:
        """Time rounds of all runs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            neighbours = watch_neighbours()
            try:
                return alternate(runs, self.repeats, baseline, _SAMPLE_SECONDS, self.synchronize)
            finally:
                busy = neighbours(torch.get_num_threads())
                if busy is not None:
                    self.note(f"{title}: {busy}")

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def show_times(self, title: str, timings: Timings, parameters: Mapping[str, int]) -> None:
        """Print a table of times and record it."""
        columns = [("", ""), *([("parameters", ",")] if parameters else []), ("median ms", "ms")]
        columns += [("min – max", ">"), ("ratio", ".2f"), ("min – max", ">")]
        rows = []
        for name, seconds in timings.seconds.items():
            ratios, ms = timings.ratios(name), [1e3 * value for value in seconds]
            counted = [parameters[name]] if parameters else []
            spread = f"{milliseconds(min(ms))} – {milliseconds(max(ms))}"
            ratio_spread = f"{min(ratios):.2f} – {max(ratios):.2f}"
            median_ms = 1e3 * timings.median(name)
            rows.append((name, *counted, median_ms, spread, timings.ratio(name), ratio_spread))
        baseline = timings.baseline
        caption = f"ratio: {baseline} over the run, round by round; above 1 the run is faster"
        self.show(title, columns, rows, caption)
        self.results.append({"title": title, **timings.as_dict(), "parameters": dict(parameters)})

    def measure(
        self,
        title: str,
        runs: Mapping[str, Callable[[], object]],
        baseline: str,
        parameters: Mapping[str, int] | None = None,
    ) -> Timings:
        timings = self.time(title, runs, baseline)
        self.show_times(title, timings, parameters or {})
        return timings

    def write(self, path: Path, benchmark: str, settings: Mapping[str, Any]) -> None:
        """Write machine, settings and results as JSON."""
        content = {
            "benchmark": benchmark,
            "machine": machine_facts(self.device, self.kept),
            "settings": dict(settings),
            "results": self.results,
            "notes": self.notes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2, default=str) + "\n")
        self.print(f"wrote {path}")
