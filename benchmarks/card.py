"""Test and time everything on one card: ``python -m benchmarks.card``, or ``make gpu``.

Every stage is a process of its own with a share of the time; the results of one that fails, hangs
or is cut off are kept as far as they are. All tables are written into one page and one JSON file.
"""

import argparse
import contextlib
import datetime
import importlib.util
import itertools
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

from comera._command import INTERRUPTED
from comera.files import replacing

SECONDS = 600  # default time of all stages together
_CHECKOUT = Path(__file__).parents[1]
_TOOLS = 2
_TAIL = 3  # last lines of a test's output that are put into the page
_STEP = "step --peers=none --repeats=5"
_WIDE = "--layers=2 --width=4096 --ffn=16384 --heads=64 --vocab=8192 --rank=64"
_MIDDLE = "--layers=4 --width=2048 --ffn=8192 --heads=32 --vocab=8192 --rank=64"
_TINY_MODEL = "--batch=2 --layers=1 --width=16 --ffn=32 --heads=2 --vocab=40 --length=6 --rank=4"
_TINY = f"{_TINY_MODEL} --repeats=1"


@dataclass(frozen=True)
class Stage:
    """A process with a share of the time.

    Attributes:
        name: One word.
        share: Seconds out of ``SECONDS``; unused time is shared among later stages.
        words: Benchmark and its options; empty if it is no benchmark.
        tiny: Options for a trial on any machine, which override these.
    """

    name: str
    share: float
    words: str = ""
    tiny: str = ""


STAGES = (
    Stage("doctor", 20),
    Stage("calibrate", 120),
    Stage("steps", 85, f"{_STEP} --batch 32 8 128 --precision bf16 fp32 tf32", _TINY),
    Stage("steps-compiled", 110, f"{_STEP} --batch 32 8 --precision bf16 --compile", _TINY),
    Stage("steps-4096", 40, f"{_STEP} --batch 32 8 --precision bf16 fp32 {_WIDE}", _TINY),
    Stage("steps-2048", 35, f"{_STEP} --batch 32 8 --precision bf16 fp32 {_MIDDLE}", _TINY),
    Stage("layers", 20, "linear --curve=width --points 768 2048 4096 8192 --tokens=4096 "
          "--dtype=bfloat16 --rank=30 --repeats=5", "--points=16 --tokens=8"),
    Stage("tables", 15, "embedding --peers=none --rank=30 --repeats=5",
          "--rows=60 --width=16 --indices=24 --rank=4 --repeats=1"),
    Stage("memory", 40, "memory --batch 1 32", _TINY_MODEL),
    Stage("tests", 80),
    Stage("sanitize", 35),
)  # fmt: skip
"""In this order: measurements use the times that ``calibrate`` has found."""

GROUPS = {
    "times": ("doctor", "calibrate", "steps", "layers", "tables"),
    "more": ("steps-compiled", "steps-4096", "steps-2048", "memory"),
    "checks": ("tests", "sanitize"),
}
"""Names for several stages, of at most five minutes together."""

_WORSE = 1.1  # times what a row took in the last survey, above which the page names it


@dataclass(frozen=True)
class Ended:
    """The end of a stage.

    ``problem`` is why it failed, ``found`` the content of the JSON file of a benchmark, ``lines``
    its output: all of a benchmark, the last lines of a test.
    """

    name: str
    seconds: float
    problem: str | None
    found: dict[str, Any] | None
    lines: list[str]

    def outcome(self) -> str:
        if self.found is not None:
            tables = f"{len(self.found['results'])} tables"
            return f"{self.problem}, {tables}" if self.problem else tables
        last = f": {self.lines[-1].strip()}" if self.lines else ""
        return f"{self.problem or 'ended'}{last}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages one after the other, and return the exit status."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse("device='cuda' needs a GPU that torch can see; --device cpu runs here")
    named = sorted([*GROUPS, *(stage.name for stage in STAGES)])
    unknown = [name for name in options.only or () if name not in named]
    if unknown:
        return _refuse(f"only={unknown[0]!r} must be some of {', '.join(named)}")
    wanted = {stage for name in options.only or () for stage in GROUPS.get(name, (name,))}
    before = _last(options.out)
    taken = {each["name"]: 5 + 1.25 * each["seconds"] for each in before if not each["problem"]}
    chosen = [stage for stage in STAGES if not wanted or stage.name in wanted]
    shares = [taken.get(stage.name, stage.share) for stage in chosen]
    ended: list[Ended] = []
    seconds = options.seconds or min(SECONDS, sum(shares))
    deadline, status = time.monotonic() + seconds, 0
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for number, stage in enumerate(chosen):
            left = deadline - time.monotonic()
            allowed = left * shares[number] / sum(shares[number:])
            print(f"{stage.name}: at most {allowed:.0f} s", flush=True)
            ended.append(_run(stage, allowed, options))
            _write(options.out, ended, before)
            print(f"  {ended[-1].outcome()}", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
        status = INTERRUPTED
    print(f"wrote {options.out}.md and {options.out}.json")
    return status or int(any(each.problem for each in ended))


def _refuse(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Test and time everything on one card.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--seconds", type=float, help="Time for all stages; by default what they take."
    )
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE",
        help=f"Only these stages, or groups of them: {', '.join(GROUPS)}.",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes, to try the stages out.")
    parser.add_argument(
        "--out", type=Path,
        default=Path("runs") / f"gpu-{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M}",
        help="Folder for the output of stages; the page and the JSON file stand beside it.",
    )  # fmt: skip
    return parser


def _run(stage: Stage, allowed: float, options: argparse.Namespace) -> Ended:
    """Run a stage; its output goes to a file."""
    log, table = options.out / f"{stage.name}.txt", options.out / f"{stage.name}.json"
    began = time.monotonic()
    with log.open("w") as output:
        status = _wait_for(_command(stage, allowed, table, options), output, allowed)
    problem = f"ended with status {status}" if status else None
    if status is None:
        problem = f"did not end within {allowed:.0f} s"
    found = json.loads(table.read_text()) if table.exists() else None
    lines = [line.rstrip() for line in log.read_text().splitlines() if line.strip()]
    whole = stage.words or stage.name == "calibrate"
    seconds = time.monotonic() - began
    return Ended(stage.name, seconds, problem, found, lines if whole else lines[-_TAIL:])


def _command(stage: Stage, allowed: float, table: Path, options: argparse.Namespace) -> list[str]:
    python, device = sys.executable, options.device
    if stage.words:
        words = stage.words.split() + (stage.tiny.split() if options.tiny else [])
        words += [f"--device={device}", f"--json={table.absolute()}"]
        return [python, "-m", "benchmarks", *words]
    if stage.name == "doctor":
        return [python, "-m", "comera.recipes.doctor"]
    if stage.name == "calibrate":
        code = f"from comera.calibrate.machine import calibrate; calibrate({device!r})"
        return [python, "-c", code]
    if stage.name == "tests":
        where = ["-m", "gpu"] if device == "cuda" else ["tests/test_shapes.py"]
        together = ["-n", "6"] if importlib.util.find_spec("xdist") else []
        return [python, "-m", "pytest", "-q", "-p", "no:benchmark", *together, *where]
    lines = (_CHECKOUT / "Makefile").read_text().splitlines()
    sanitized = next(line for line in lines if line.startswith("SANITIZED"))
    seconds = int(allowed / (_TOOLS * len(re.findall(r"\w+:\w+", sanitized))))
    return [
        "make", "--no-print-directory", "sanitize", f"GPU_PYTHON={python}",
        f"SANITIZER_SECONDS={max(1, seconds)}",
    ]  # fmt: skip


def _wait_for(command: Sequence[str], output: Any, allowed: float) -> int | None:
    """Run a command and return its status; None if it ran out of time and was ended."""
    process = subprocess.Popen(
        command, cwd=_CHECKOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=output,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(allowed)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of a process, by Ctrl-C first: a benchmark then writes the tables it has, and
    pytest names the tests that have failed, for which pytest-xdist needs ten seconds.
    """
    for number, seconds in ((signal.SIGINT, 15), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _last(out: Path) -> list[dict[str, Any]]:
    """Return what the last survey beside this one wrote; nothing if there is none."""
    others = [path for path in out.parent.glob("gpu-*.json") if path.stem != out.name]
    return json.loads(max(others).read_text()) if others else []


def _figures(ended: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the milliseconds and MiB of all rows by table and name."""
    for table in (table for each in ended for table in (each["found"] or {}).get("results", ())):
        for name, times in table.get("summary", {}).items():
            yield f"{table['title']}: {name}", times["median_ms"]
        for row in table.get("rows", ()):
            name = " ".join(map(str, itertools.takewhile(_is_label, row.values())))
            for heading, value in row.items():
                if heading.startswith(("dense", "comera")) and "/" not in heading:
                    yield f"{table['title']}: {name}, {heading}", value


def _is_label(value: object) -> bool:
    return not isinstance(value, float)


def _write(out: Path, ended: Sequence[Ended], before: Sequence[dict[str, Any]]) -> None:
    """Write all outcomes as one page and one JSON file."""
    now, then = [vars(each) for each in ended], dict(_figures(before))
    pairs = [(name, then[name], value) for name, value in _figures(now) if then.get(name)]
    worse = [f"* {name}: {a:.4g}, now {b:.4g}" for name, a, b in pairs if b > _WORSE * a]
    since = ["", f"## {len(worse)} of {len(pairs)} rows are worse than last time", "", *worse]
    page = [*_page(ended), *(since if before else ())]
    for suffix, text in {".json": json.dumps(now, indent=1), ".md": "\n".join(page)}.items():
        with replacing(out.with_name(out.name + suffix)) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")


def _page(ended: Sequence[Ended]) -> Iterator[str]:
    yield f"# One card, {datetime.date.today().isoformat()}"
    yield from ("", "| stage | s | outcome |", "|---|---|---|")
    for each in ended:
        outcome = each.outcome().replace("|", "\\|")
        yield f"| {each.name} | {each.seconds:.0f} | {outcome} |"
    for each in ended:
        if len(each.lines) > _TAIL:
            yield from ("", f"## {each.name}", "", "```", *each.lines, "```")


if __name__ == "__main__":
    sys.exit(main())
