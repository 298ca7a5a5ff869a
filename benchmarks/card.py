"""All there is to know of one card, in ten minutes: ``python -m benchmarks.card``.

Every stage is a process of its own with a share of the time: one that fails, hangs or is cut off
takes nothing from the others, and what it had found by then is kept. All tables are put together
in one page and one JSON file. Needs neither the command line's packages nor pandas.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.card_parts import FULL, PARTS, TINY, Cell, Part, Sizes
from benchmarks.session import machine_facts, machine_line
from comera.files import replacing

SECONDS = 600
"""What all stages take together at most, by default."""

_CHECKOUT = Path(__file__).parents[1]
_INTERRUPTED = 130
_TOOLS = 2
_TAIL = 3
"""Last lines of a stage's output that are put into the page."""


@dataclass(frozen=True)
class Stage:
    """A process with a share of the time.

    Attributes:
        name: One word.
        share: Seconds out of ``SECONDS``; what stages before it leave is shared out again.
    """

    name: str
    share: float


STAGES = (
    Stage("doctor", 40),
    Stage("calibrate", 80),
    Stage("operators", 45),
    Stage("steps", 205),
    Stage("layers", 20),
    Stage("tables", 15),
    Stage("memory", 40),
    Stage("runs", 30),
    Stage("tests", 85),
    Stage("sanitize", 40),
)
"""In this order: what is measured goes by the times that ``calibrate`` has found."""


@dataclass(frozen=True)
class Ended:
    """How a stage went.

    Attributes:
        name: Of the stage.
        seconds: What it took.
        problem: Why it did not come to its end, or None.
        table: What a measured part found so far: rows, and jobs that were skipped or failed.
        lines: The last lines it printed.
    """

    name: str
    seconds: float
    problem: str | None
    table: dict[str, Any] | None
    lines: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages, or one of them in this process; returns the exit status."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "error: device='cuda' needs a GPU that torch can see; --device cpu runs here",
            file=sys.stderr,
        )
        return 1
    if options.part:
        deadline = time.monotonic() + options.seconds
        measure(PARTS[options.part], device, TINY if options.tiny else FULL, options.out, deadline)
        return 0
    named = {stage.name for stage in STAGES}
    unknown = [name for name in options.only or () if name not in named]
    if unknown:
        print(
            f"error: only={unknown[0]!r} must be some of {', '.join(sorted(named))}",
            file=sys.stderr,
        )
        return 1
    return run_stages(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Test and time everything on one card.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="Time for all stages.")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="Only these stages.")
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes, to try the stages out.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs") / f"gpu-{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M}",
        help="Folder for the page, the JSON file and what stages print.",
    )
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    return parser


def measure(part: Part, device: torch.device, sizes: Sizes, path: Path, deadline: float) -> None:
    """Do the jobs of a part until the time is up; what is done is written after each of them."""
    found: dict[str, Any] = {
        "title": part.title,
        "columns": list(part.columns),
        "machine": machine_facts(device, kept=False),
        "rows": [],
        "skipped": [],
        "failed": [],
    }
    for job in part.jobs(device, sizes):
        if time.monotonic() >= deadline:
            found["skipped"].append(job.what)
        else:
            found["skipped"].append(f"{job.what} (begun)")  # if this process is ended meanwhile
            _write_json(path, found)
            try:
                found["rows"] += job.run()
            except Exception as problem:  # whatever it is, the next job may do
                lines = str(problem).strip().splitlines() or [""]
                found["failed"].append(f"{job.what}: {type(problem).__name__}: {lines[0]}")
            found["skipped"].pop()
            gc.collect()  # graphs and models hold each other
        _write_json(path, found)


def _write_json(path: Path, content: object) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def run_stages(options: argparse.Namespace) -> int:
    """Run the chosen stages one after the other and write what they found after each."""
    chosen = [stage for stage in STAGES if not options.only or stage.name in options.only]
    ended: list[Ended] = []
    deadline = time.monotonic() + options.seconds
    status = 0
    try:
        for number, stage in enumerate(chosen):
            left = deadline - time.monotonic()
            allowed = left * stage.share / sum(later.share for later in chosen[number:])
            print(f"{stage.name}: at most {allowed:.0f} s", flush=True)
            ended.append(_run(stage.name, allowed, options))
            _write_page(options.out, ended)
            print(f"  {_outcome(ended[-1])}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
        status = _INTERRUPTED
    print(f"wrote {options.out}.md and {options.out}.json")
    return status or int(any(each.problem for each in ended))


def _run(name: str, allowed: float, options: argparse.Namespace) -> Ended:
    """Run a stage; its output goes to a file, whose end is looked at."""
    log, table = options.out / f"{name}.txt", options.out / f"{name}.json"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = _command(name, allowed, table, options)
    if command is None:
        return Ended(name, 0.0, None, None, [f"skipped: {_CHECKOUT} is no checkout"])
    began = time.monotonic()
    with log.open("w") as output:
        status = _wait_for(command, output, allowed)
    problem = None
    if status is None:
        problem = f"did not end within {allowed:.0f} s"
    elif status:
        problem = f"ended with status {status}"
    found = json.loads(table.read_text()) if table.exists() else None
    words = [re.sub(r"\s+", " ", line).strip() for line in log.read_text().splitlines()]
    lines = [line for line in words if line][-_TAIL:]
    return Ended(name, time.monotonic() - began, problem, found, lines)


def _command(
    name: str, allowed: float, table: Path, options: argparse.Namespace
) -> list[str] | None:
    """Return the words of a stage's command; None where it needs a checkout and there is none."""
    python, device = sys.executable, options.device
    if name in PARTS:
        words = [python, "-m", "benchmarks.card", "--part", name, "--device", device]
        # A job that has begun may end: what is left of the time is for starting and ending.
        words += ["--seconds", f"{0.8 * allowed:.1f}", "--out", str(table)]
        return words + (["--tiny"] if options.tiny else [])
    if name == "doctor":
        return [python, "-m", "comera.recipes.doctor"]
    if name == "calibrate":
        code = f"from comera.calibrate.machine import calibrate; calibrate({device!r})"
        return [python, "-c", code]
    if not (_CHECKOUT / "Makefile").is_file():
        return None
    if name == "tests":
        where = ["-m", "gpu"] if device == "cuda" else ["tests/test_shapes.py"]
        together = ["-n", "6"] if importlib.util.find_spec("xdist") else []
        return [python, "-m", "pytest", "-q", "-p", "no:benchmark", *together, *where]
    kernels = len(re.findall(r"\w+:\w+", _makefile_line("SANITIZED")))
    return [
        "make", "--no-print-directory", "sanitize", f"GPU_PYTHON={python}",
        f"SANITIZER_SECONDS={max(1, int(allowed / (_TOOLS * kernels)))}",
    ]  # fmt: skip


def _makefile_line(name: str) -> str:
    lines = (_CHECKOUT / "Makefile").read_text().splitlines()
    return next(line for line in lines if line.startswith(name))


def _wait_for(command: Sequence[str], output: Any, allowed: float) -> int | None:
    """Run a command to its end and return its status; None where it was ended for its time."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    cwd = _CHECKOUT if (_CHECKOUT / "Makefile").is_file() else None
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(allowed)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process, asked="pytest" in command)


def _end(process: subprocess.Popen[bytes], asked: bool) -> None:
    """End a process and what it has started, which share a group.

    Args:
        process: The process.
        asked: Whether to send Ctrl-C first, upon which pytest names the tests that have failed.
    """
    first = ((signal.SIGINT, 15),) if asked else ()  # pytest-xdist waits ten seconds for workers
    for number, seconds in (*first, (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _write_page(out: Path, ended: Sequence[Ended]) -> None:
    """Write all tables as one page and as one JSON file, beside the folder of the stages."""
    _write_json(out.with_name(out.name + ".json"), [vars(each) for each in ended])
    text = "\n".join(_page(ended)) + "\n"
    with replacing(out.with_name(out.name + ".md")) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _page(ended: Sequence[Ended]) -> Iterator[str]:
    tables = [each for each in ended if each.table is not None]
    yield f"# One card, {datetime.date.today().isoformat()}"
    if tables:
        assert tables[0].table is not None
        yield ""
        yield machine_line(tables[0].table["machine"], "several precisions")
    yield from ("", "| stage | s | outcome |", "|---|---|---|")
    for each in ended:
        yield f"| {each.name} | {each.seconds:.0f} | {_cell(_outcome(each))} |"
    for each in tables:
        yield from _table(each)


def _outcome(ended: Ended) -> str:
    """Say in a line how a stage went."""
    last = f": {ended.lines[-1]}" if ended.lines and ended.table is None else ""
    if ended.problem:
        return f"{ended.problem}{last}"
    if ended.table is None:
        return f"ended{last}"
    counts = {name: len(ended.table[name]) for name in ("rows", "skipped", "failed")}
    more = [f"{counts[name]} {name}" for name in ("skipped", "failed") if counts[name]]
    return ", ".join([f"{counts['rows']} rows", *more])


def _table(ended: Ended) -> Iterator[str]:
    """Yield a part's table, then what is not in it and why."""
    found = ended.table
    assert found is not None
    yield from ("", f"## {found['title']}", "")
    yield f"| {' | '.join(found['columns'])} |"
    yield "|" + "---|" * len(found["columns"])
    for row in found["rows"]:
        yield f"| {' | '.join(map(_cell, row))} |"
    if found["skipped"]:
        yield from ("", f"No time was left for: {'; '.join(found['skipped'])}.")
    for line in found["failed"]:
        yield from ("", f"Failed: {line}")


def _cell(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
