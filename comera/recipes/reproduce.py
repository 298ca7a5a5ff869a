"""Run the experiments of the papers and collect the results (``comera reproduce NAME``)."""

import contextlib
import dataclasses
import datetime
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from comera import __version__
from comera.extras import check_known
from comera.files import write_text
from comera.params import model_size
from comera.planning.machine import processor_name
from comera.planning.printing import show_bytes
from comera.recipes import parse
from comera.recipes.cli import changes_of
from comera.recipes.parse import read_yaml
from comera.recipes.report.sweep_report import comparison_cells, read_comparison
from comera.recipes.run import (
    build_step,
    make_model,
    planned_memory,
    planned_model,
    without_remarks,
)
from comera.recipes.run_config import RunConfig
from comera.recipes.sweep import make_jobs, read_sweep, run_sweep, unskipped
from comera.recipes.tasks.task import Batch, task_of

Scale = Literal["small", "paper"]

_FOLDER = "reproduce"
_FACTS = "machine.txt"
_ROWS, _STEPS = 2, 2
_STEPPED_UP_TO = 1 << 29
"""Bytes of weights, gradients and optimizer state up to which a dry run does steps."""
_WHERE_DATA_TELL = 1000  # steps of a run that is as long as its data, for schedules and stages


def experiments() -> dict[str, dict[str, Path]]:
    """Return the files of the experiments by name and scale, in the order of their names."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((parse.folder() / _FOLDER).glob("*.yaml")):
        name, _, scale = path.stem.rpartition("-")
        found.setdefault(name, {})[scale] = path
    return found


def file_of(name: str, scale: Scale) -> Path:
    """Return the sweep file of an experiment; raise ``ValueError`` if it is unknown."""
    known = experiments()
    listed = "among those that `comera reproduce` lists"
    check_known(name, known, f"there is no experiment {name!r} {listed}")
    if scale not in known[name]:
        raise ValueError(f"{name} has no --scale={scale}, only {', '.join(known[name])}")
    return known[name][scale]


def reproduce(
    name: str | None = None,
    /,
    *,
    scale: Scale = "small",
    out: str = "runs/reproduce",
    set: list[str] = [],  # noqa: B006
    skip: list[str] = [],  # noqa: B006
    jobs: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    console: Console,
) -> int:
    """Train an experiment of the papers, small or at their scale.

    The same command resumes it, and OUT/REPRODUCTION.md collects the finished results.

    Args:
        name: Name of the experiment; without it all are listed.
        scale: small takes minutes on a few CPU cores, paper has the paper's shapes.
        out: Folder of all experiments.
        set: Settings that every run gets, such as the paths of its data:
            --set='[nli.train=pairs.jsonl,nli.dev=dev.jsonl]'.
        skip: Variants, or runs as VARIANT/seed-K, to leave out this time: --skip='[galore]'.
        jobs: Number of runs at a time (default: one).
        overwrite: Restart runs whose folders hold other settings or data; the others stay.
        dry_run: Only train two steps of each variant on random data, or compute only the shapes of
            variants that take more than 512 MiB.
    """

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if name is None:
        for each, scales in experiments().items():
            title = parse.first_sentence(next(iter(reversed(scales.values()))))
            show(f"{each} ({', '.join(sorted(scales, reverse=True))}): {title}")
        return 0
    changes, path = changes_of(set), file_of(name, scale)
    if dry_run:
        for line in try_out(name, scale, changes, skip=skip):
            show(line)
        return 0
    folder = Path(out) / path.stem
    try:
        status = run_sweep(path, jobs, overwrite, console, folder, changes=changes, skip=skip)
    except FileNotFoundError as problem:
        base = read_yaml(path)["base"]
        source = f"`comera init {base}` says where they come from, and " * isinstance(base, str)
        raise FileNotFoundError(
            f"{problem}: {source}--set='[KEY=PLACE]' sets one for all runs"
        ) from None
    if (folder / "results.json").is_file():
        write_facts(folder, changes)
    write_reproduction(Path(out))
    return status


def write_reproduction(out: Path) -> Path:
    """Write ``REPRODUCTION.md`` with the results below ``out`` beside those of the papers."""
    parts = ["# Reproduction", "What the papers report, and what came out here."]
    for name, scales in experiments().items():
        parts += [_section(name, s, scales[s], out) for s in get_args(Scale) if s in scales]
    path = out / "REPRODUCTION.md"
    write_text(path, "\n\n".join(parts) + "\n")
    return path


def _section(name: str, scale: str, path: Path, out: Path) -> str:
    content = read_yaml(path)  # checked where it is run
    published = content.get("published", {"source": "", "figures": {}})
    head = f"## {name}, {scale}\n\n{parse.first_sentence(path)}."
    if published["source"]:
        head += f" Published: {published['source']}."
    folder = out / path.stem
    found: dict[str, list[str]] = {}
    failed: set[str] = set()
    header = ["variant", "published", "here"]
    facts = "Not run."
    if (folder / "results.json").is_file():
        comparison = read_comparison(folder)
        failed = {run.variant for run in comparison.failed}
        columns, rows = comparison_cells(comparison)
        header, found = ["variant", "published", *columns[1:]], {row[0]: row[1:] for row in rows}
        with contextlib.suppress(FileNotFoundError):
            facts = (folder / _FACTS).read_text(encoding="utf-8")
    lines = [header, ["---"] * len(header)]
    for variant in content["variants"]:
        missing = "failed" if variant in failed else "not run"
        mine = found.get(variant, [missing, *[""] * (len(header) - 3)])
        lines.append([variant, str(published["figures"].get(variant, "")), *mine])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{head}\n\n{table}\n\n{facts}"


def write_facts(folder: Path, changes: Mapping[str, Any]) -> None:
    """Write date, machine, versions and changed settings of the results in a folder."""
    cuda = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if cuda else processor_name() or platform.machine()
    root, commit = Path(__file__).parents[2], ""
    if (root / ".git").exists():  # a checkout
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
        with contextlib.suppress(OSError):
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    facts = f"{datetime.date.today().isoformat()}, {machine}, comera {__version__}"
    facts += f" at {commit}" * bool(commit) + f", torch {torch.__version__}."
    if changes:
        changed = ", ".join(f"{key}={value}" for key, value in changes.items())
        facts += f" Of its settings these are others (--set): {changed}."
    write_text(folder / _FACTS, facts)


def try_out(
    name: str,
    scale: Scale,
    changes: Mapping[str, Any] | None = None,
    most: int = _STEPPED_UP_TO,
    skip: Sequence[str] = (),
) -> list[str]:
    """Train every variant for two steps, see :func:`dry_run`; return a line for each."""
    lines = []
    sweep = read_sweep(file_of(name, scale), changes)
    for variant in dict.fromkeys(job.variant for job in unskipped(make_jobs(sweep), skip)):
        try:
            lines.append(f"{variant}: {dry_run(sweep.variants[variant], most)}")
        except ValueError as problem:
            raise ValueError(f"{name}, {scale}, variant {variant}: {problem}") from None
    return lines


def dry_run(config: RunConfig, most_bytes: int) -> str:
    """Train a run for two steps of two random rows, with its optimizer and rank learning.

    Nothing is read or written. Above ``most_bytes`` of weights, gradients and optimizer state only
    shapes are computed. Returns a sentence on parameters, memory and steps. Raises ``ValueError``
    if settings contradict each other.
    """
    needed = planned_memory(dataclasses.replace(config, twin=False))[0].total.total
    steps = config.train.steps or _WHERE_DATA_TELL
    train = dataclasses.replace(config.train, steps=steps, epochs=None, seconds=None, compile=False)
    train.batch_size, train.accumulate = _ROWS, 1
    small = dataclasses.replace(config, train=train, device="cpu", twin=False)
    task = task_of(small)
    task.sizes, task.steps = task.planned_sizes(), steps

    def batch(step: int) -> Batch:
        torch.manual_seed(step)
        return task.drawn_batch(_ROWS, task.sizes)

    with without_remarks():
        if needed > most_bytes:
            model = planned_model(small)
            with torch.device("meta"):
                data = batch(0)
            task.loss(model, data).backward()
            missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
            if missing:
                raise ValueError(f"{missing[0]} gets no gradient")
            params = model_size(model).params
            done = (
                f": no steps done, as a dry run does them up to {show_bytes(most_bytes)}; "
                "forward and backward fit by their shapes"
            )
        else:
            torch.manual_seed(config.seed)
            model = make_model(small, task, torch.device("cpu"))
            params, step = model_size(model).params, build_step(model, small, task)
            for number in range(_STEPS):
                step(batch(number))
            done = f"; {_STEPS} steps done"
    return f"{params:,} parameters, {needed / (1 << 20):,.0f} MiB to train them{done}"
