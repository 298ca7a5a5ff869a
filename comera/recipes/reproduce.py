"""``comera reproduce NAME``: the experiments of the papers, in pieces, collected on one page.

Two steps of a run at its true shapes on drawn data, to see that all of it fits together.
"""

import dataclasses
import datetime
import json
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from comera import __version__
from comera.extras import did_you_mean
from comera.files import replacing
from comera.nn.evaluation_mode import model_size
from comera.planning.machine import processor_name
from comera.planning.printing import show_bytes
from comera.recipes import parse
from comera.recipes.build import build_step, make_model, without_remarks
from comera.recipes.data_record import DataRecord
from comera.recipes.parse import read_yaml
from comera.recipes.report.comparison import comparison_cells, read_comparison
from comera.recipes.run import planned_memory, planned_model
from comera.recipes.run_config import RunConfig
from comera.recipes.sweep import make_jobs, read_sweep, run_sweep, unskipped
from comera.recipes.tasks.task import Batch, Task
from comera.recipes.tasks.task_kinds import kind_of, planned_dense_model

_ROWS = 2
_STEPS = 2
_WHERE_DATA_TELL = 1000
"""Steps of a run that is as long as its data: schedules and stages need a number."""


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found.

    Attributes:
        params: Parameters of the model at the start.
        bytes: Memory of weights, gradients and optimizer state.
        most_bytes: Up to how much of it steps are done.
        losses: The loss of each step; empty where it is more than that, and forward and backward
            went through the shapes alone.
    """

    params: int
    bytes: int
    most_bytes: int
    losses: tuple[float, ...]

    def __str__(self) -> str:
        memory = f"{self.params:,} parameters, {self.bytes / (1 << 20):,.0f} MiB to train them"
        if self.losses:
            return f"{memory}; {len(self.losses)} steps done"
        return (
            f"{memory}: no steps done, as a dry run does them up to {show_bytes(self.most_bytes)}; "
            "forward and backward fit by their shapes"
        )


def dry_run(config: RunConfig, most_bytes: int) -> DryRun:
    """Train a run for two steps of two rows each, with its model, optimizer and rank learning.

    Nothing is read or written. Numbers of a step are drawn, so losses mean nothing.

    Args:
        config: The run.
        most_bytes: Memory of weights, gradients and optimizer state up to which steps are done.

    Raises:
        ValueError: If the settings do not go together.
    """
    needed = planned_memory(dataclasses.replace(config, twin=False))[0].total.total
    train = dataclasses.replace(
        config.train,
        steps=config.train.steps or _WHERE_DATA_TELL,
        epochs=None,
        batch_size=_ROWS,
        accumulate=1,
        compile=False,
    )
    small = dataclasses.replace(config, train=train, device="cpu", twin=False)
    with without_remarks():
        if needed > most_bytes:
            return DryRun(_backward_by_shapes(small), needed, most_bytes, ())
        task = _task(small)
        torch.manual_seed(config.seed)
        model = make_model(small, task, torch.device("cpu"))
    step = build_step(model, small, task)
    params = model_size(model).params
    losses = tuple(float(step(task.get_batch(number))) for number in range(_STEPS))
    return DryRun(params, needed, most_bytes, losses)


def _backward_by_shapes(config: RunConfig) -> int:
    """Go forward and backward without memory; returns the number of parameters."""
    model = planned_model(config)
    with torch.device("meta"):
        batch = _batch(config, 0)
    kind_of(config).loss(model, batch).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise ValueError(f"{missing[0]} gets no gradient")
    return model_size(model).params


def _task(config: RunConfig) -> Task:
    kind = kind_of(config)
    return Task(
        make_model=lambda: planned_dense_model(config),
        get_batch=lambda step: _batch(config, step),
        loss_fn=kind.loss,
        evaluate=lambda model: {},
        steps=config.train.steps or _WHERE_DATA_TELL,
        record=DataRecord({}, ""),
        per_step=(_ROWS, "rows"),
        lean=kind.lean,
    )


def _batch(config: RunConfig, step: int) -> Batch:
    """Draw a batch of the task on torch's default device."""
    torch.manual_seed(step)
    kind = kind_of(config)
    return kind.drawn_batch(_ROWS, kind.planned_sizes())


Scale = Literal["small", "paper"]
_FOLDER = "reproduce"
_STEPPED_UP_TO = 1 << 29
"""Bytes of weights, gradients and optimizer state up to which a dry run does steps."""


def experiments() -> dict[str, dict[str, Path]]:
    """Return the files of the experiments by name and scale, in the order of their names."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((parse.folder() / _FOLDER).glob("*.yaml")):
        name, _, scale = path.stem.rpartition("-")
        found.setdefault(name, {})[scale] = path
    return found


def file_of(name: str, scale: Scale) -> Path:
    """Return the sweep file of an experiment.

    Raises:
        ValueError: If there is none of that name or scale.
    """
    known = experiments()
    if name not in known:
        raise ValueError(
            f"there is no experiment {name!r} among those that `comera reproduce` lists"
            f"{did_you_mean(name, known)}"
        )
    if scale not in known[name]:
        raise ValueError(f"{name} has no --scale={scale}, only {', '.join(known[name])}")
    return known[name][scale]


def reproduce(
    name: str,
    scale: Scale = "small",
    *,
    out: Path = Path("runs/reproduce"),
    changes: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    minutes: float | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> int:
    """Train what is unfinished of an experiment, and write ``REPRODUCTION.md``.

    Args:
        name: Name of the experiment.
        scale: ``small`` takes minutes on a few CPU cores; ``paper`` has the paper's shapes.
        out: Folder of all experiments.
        changes: Settings that every run gets, such as where its data are, by dotted names.
        skip: Variants, or runs as ``VARIANT/seed-K``, that are left out this time.
        minutes: Save and stop after so long; the same command goes on.
        jobs: Runs at a time; None for one.
        overwrite: Begin runs anew whose folders hold other settings.
        console: The console that progress and the table go to.

    Returns:
        Exit status, as that of a sweep: 130 if it was stopped before all was done.

    Raises:
        ValueError: If a name or setting is wrong. Nothing has been trained then.
    """
    path = file_of(name, scale)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes={minutes} must be above 0")
    timer = None
    if minutes is not None:
        # As Ctrl-C does: runs save and stop.
        timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
    folder = out / path.stem
    before = _written(folder)
    try:
        return run_sweep(
            path, jobs, overwrite, console, folder, changes=changes or {}, skip=tuple(skip)
        )
    except FileNotFoundError as problem:
        base = read_yaml(path)["base"]
        source = (
            f"`comera init {base}` says where they come from, and " if isinstance(base, str) else ""
        )
        raise FileNotFoundError(
            f"{problem}: {source}--set='[KEY=PLACE]' sets one for all runs"
        ) from None
    finally:
        if timer is not None:
            timer.cancel()
        if _written(folder) != before:
            _note_machine(folder, changes or {})
        write_reproduction(out)


def try_out(
    name: str,
    scale: Scale,
    changes: Mapping[str, Any] | None = None,
    most: int = _STEPPED_UP_TO,
    skip: Sequence[str] = (),
) -> list[str]:
    """Train every variant for two steps on drawn data; see :func:`dry_run`.

    Args:
        name: Name of the experiment.
        scale: Which of its sizes.
        changes: Settings that every run gets.
        most: Memory in bytes up to which steps are done.
        skip: Variants, or runs as ``VARIANT/seed-K``, that are left out.

    Returns:
        A line for each variant.

    Raises:
        ValueError: If a variant's settings do not go together; names it.
    """
    lines = []
    sweep = read_sweep(file_of(name, scale), changes or {})
    kept = {job.variant for job in unskipped(make_jobs(sweep), skip)}
    for variant, config in sweep.variants.items():
        if variant not in kept:
            continue
        try:
            lines.append(f"{variant}: {dry_run(config, most)}")
        except ValueError as problem:
            raise ValueError(f"{name}, {scale}, variant {variant}: {problem}") from None
    return lines


def write_reproduction(out: Path) -> Path:
    """Collect what is finished of all experiments in ``REPRODUCTION.md``, the papers' beside it.

    Args:
        out: Folder of all experiments.

    Returns:
        The path of the page.
    """
    parts = ["# Reproduction", "What the papers report, and what came out here."]
    for name, scales in experiments().items():
        for scale in get_args(Scale):
            if scale in scales:
                parts.append(_section(name, scale, scales[scale], out))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "REPRODUCTION.md"
    with replacing(path) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
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
        machine = folder / "machine.json"
        if machine.is_file():
            facts = _facts(json.loads(machine.read_text(encoding="utf-8")))
    lines = [header, ["---"] * len(header)]
    for variant in content["variants"]:
        missing = "failed" if variant in failed else "not run"
        mine = found.get(variant, [missing, *[""] * (len(header) - 3)])
        lines.append([variant, str(published["figures"].get(variant, "")), *mine])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{head}\n\n{table}\n\n{facts}"


def _facts(machine: Mapping[str, Any]) -> str:
    changed = ", ".join(f"{key}={value}" for key, value in machine.get("set", {}).items())
    return (
        f"{machine['date']}, {machine['machine']}, comera {machine['version']}"
        f"{' at ' + machine['commit'] if machine['commit'] else ''}, torch {machine['torch']}."
        + (f" Of its settings these are others (--set): {changed}." if changed else "")
    )


def _written(folder: Path) -> int:
    """Return when the results in a folder were written; 0 if there are none."""
    path = folder / "results.json"
    return path.stat().st_mtime_ns if path.is_file() else 0


def _note_machine(folder: Path, changes: Mapping[str, Any]) -> None:
    """Write down where, when and by which settings the folder's last results came out."""
    cuda = torch.cuda.is_available()
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if cuda else processor_name() or platform.machine(),
        "version": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "set": {key: str(value) for key, value in changes.items()},
    }
    with replacing(folder / "machine.json") as temporary:
        temporary.write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _commit() -> str:
    """Return the commit of a checkout, or nothing."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
