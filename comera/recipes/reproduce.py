"""``comera reproduce NAME``: the experiments of the papers, in pieces, collected on one page."""

import datetime
import json
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from comera import __version__
from comera.files import replacing
from comera.misspelt import did_you_mean
from comera.planning.machine import processor_name
from comera.recipes import named
from comera.recipes.dry_run import dry_run
from comera.recipes.parse import read_yaml
from comera.recipes.report.comparison_table import comparison_cells, read_comparison
from comera.recipes.sweep import make_jobs, run_sweep, unskipped
from comera.recipes.sweep_file import read_sweep

Scale = Literal["small", "paper"]
_FOLDER = "reproduce"
_STEPPED_UP_TO = 1 << 29
"""Bytes of weights, gradients and optimizer state up to which a dry run does steps."""


def experiments() -> dict[str, dict[str, Path]]:
    """Return the files of the experiments by name and scale, in the order of their names."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((named.folder() / _FOLDER).glob("*.yaml")):
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
    """Train every variant for two steps on drawn data; see :func:`~comera.recipes.dry_run.dry_run`.

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
    for variant in sweep.variants.values():
        if variant.name not in kept:
            continue
        try:
            found = dry_run(variant.config, most)
        except ValueError as problem:
            raise ValueError(f"{name}, {scale}, variant {variant.name}: {problem}") from None
        lines.append(f"{variant.name}: {found}")
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
    head = f"## {name}, {scale}\n\n{named.first_sentence(path)}."
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
