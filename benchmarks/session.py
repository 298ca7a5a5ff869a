"""What all benchmarks share: where they run, how often, what they say and what they write."""

import datetime
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from benchmarks.numerics import Comparison
from benchmarks.peers import MissingPeerError
from benchmarks.timing import InterruptedTimingError, Timings, alternate, watch_neighbours
from comera.files import replacing
from comera.planning.machine import processor_name, usable_threads


def machine_facts(device: torch.device, kept: bool) -> dict[str, Any]:
    """Return facts on the machine and this process; ``kept`` is whether freed memory is."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": usable_threads(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "freed_memory": "kept" if kept else "returned",
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def machine_line(facts: dict[str, Any], dtype: str) -> str:
    """Return the facts in one line for people."""
    gpu = [facts["gpu"]] if "gpu" in facts else []
    return ", ".join(
        [
            *gpu,
            facts["processor"],
            f"cores {facts['cores']}",
            f"threads {facts['threads']}",
            f"torch {facts['torch']}",
            dtype,
            f"freed memory {facts['freed_memory']}",
            facts["date"],
        ]
    )


_SAMPLE_SECONDS = 0.02
"""A sample takes at least this long, so that the clock and a stray interrupt do not show."""


@dataclass
class Session:
    """One benchmark command.

    Args:
        console: The console to print on.
        device: The device to compute on.
        repeats: Rounds of every timing.
        kept: Whether freed memory is kept in the process.
        results: What the JSON file will hold.
        failed: Whether some measurement could not be made.
    """

    console: Console
    device: torch.device
    repeats: int
    kept: bool
    results: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def introduce(self, dtype: str) -> None:
        """Print the machine."""
        self.print(machine_line(machine_facts(self.device, self.kept), dtype))

    def print(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def show_table(self, title: str, table: Table) -> None:
        """Print a line and a table."""
        self.print(title)
        self.console.print(table)

    def note(self, text: str) -> None:
        """Print one line that belongs to the results; said once."""
        if text not in self.notes:
            self.notes.append(text)
            self.print(text)

    def check(self, comparison: Comparison) -> None:
        """Say how well numbers agree.

        Raises:
            DisagreementError: If they do not.
        """
        self.print(comparison.verdict())

    def add_peer(
        self,
        runs: dict[str, Callable[[], object]],
        name: str,
        make: Callable[[], Callable[[], object]],
    ) -> None:
        """Add what ``make`` returns to ``runs``; if it is missing or fails, one line says so."""
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
        """Time rounds of all runs, with a status line; warnings of peers are not shown."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        # A refreshing thread would take its share of the processor from what is being timed.
        with (
            Progress(
                *columns,
                console=self.console,
                transient=True,
                auto_refresh=False,
                disable=not self.console.is_terminal,
            ) as progress,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            task = progress.add_task(title, total=len(runs) * (self.repeats + 1))
            progress.refresh()

            def tick() -> None:
                progress.advance(task)
                progress.refresh()

            neighbours = watch_neighbours()
            try:
                return alternate(
                    runs,
                    self.repeats,
                    baseline,
                    at_least=_SAMPLE_SECONDS,
                    synchronize=self.synchronize,
                    tick=tick,
                )
            finally:
                busy = neighbours(torch.get_num_threads())
                if busy is not None:
                    self.note(f"{title}: {busy}")

    def synchronize(self) -> None:
        """Wait for the GPU, where there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def show(
        self, title: str, timings: Timings, parameters: Mapping[str, int] | None = None
    ) -> None:
        """Print a table and keep it for the JSON file."""
        self.show_table(title, timings.table(parameters))
        self.results.append(
            {"title": title, **timings.as_dict(), "parameters": dict(parameters or {})}
        )

    def measure(
        self,
        title: str,
        runs: Mapping[str, Callable[[], object]],
        baseline: str,
        parameters: Mapping[str, int] | None = None,
        adjust: Callable[[Timings], Timings] | None = None,
    ) -> Timings:
        """Time, adjust and show; on Ctrl-C what there is by then."""
        adjust = adjust or (lambda timings: timings)
        try:
            timings = adjust(self.time(title, runs, baseline))
        except InterruptedTimingError as interrupted:
            self.show(f"{title} (interrupted)", adjust(interrupted.so_far), parameters)
            raise
        self.show(title, timings, parameters)
        return timings

    def write(self, path: Path, command: str, settings: Mapping[str, Any]) -> None:
        """Write machine, settings and results as JSON."""
        content = {
            "benchmark": command,
            "machine": machine_facts(self.device, self.kept),
            "settings": dict(settings),
            "results": self.results,
            "notes": self.notes,
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")
        self.print(f"wrote {path}")
