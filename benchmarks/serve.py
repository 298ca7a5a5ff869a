"""A saved model to be served: its file, and how it loads and generates in fresh processes."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from benchmarks.linear import count
from benchmarks.numerics import DisagreementError
from benchmarks.peak import peak_reader
from benchmarks.serve_job import ServedLlama, ServeJob
from benchmarks.session import Session
from benchmarks.timing import milliseconds, watch_neighbours
from comera.nn.convert import tensorize_
from comera.nn.targets import TTConfig
from comera.saved.model_folder import WEIGHTS, save_model
from comera.serving.freeze import freeze_

_ROWS = ("dense", "compressed", "frozen", "frozen, int8")
_AGREE = 1e-4
"""Largest difference of frozen from compressed logits, in units of the largest one."""


def serving(session: Session, llama: ServedLlama, rank: int) -> None:
    """Load and run one model of random weights, dense and in three compressed forms, in turn.

    Args:
        session: Where to run and print; ``repeats`` rounds of four processes.
        llama: The model, and what it is given.
        rank: Bound on the ranks of its tensor trains.

    Raises:
        DisagreementError: If the frozen model's logits are not the compressed one's.
        MissingPackageError: If transformers or torchao is not installed.
        ValueError: If the peak of memory cannot be read on this system.
    """
    peak_reader(session.device)  # where it cannot be read, say so before anything starts
    with tempfile.TemporaryDirectory() as folder:
        numbers = _save_all(Path(folder), llama, rank)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in _ROWS}
        neighbours = watch_neighbours()
        for _ in track(
            range(session.repeats), "fresh processes", console=session.console, transient=True,
            disable=not session.console.is_terminal,
        ):  # fmt: skip
            for name in _ROWS:
                found[name].append(_measure(session, Path(folder), name, llama))
        busy = neighbours(torch.get_num_threads())
        sizes = {name: _file(Path(folder), name).stat().st_size for name in _ROWS}
    _check(session, found)
    title = (
        f"Llama of {llama.layers} layers of width {llama.width}, {numbers['dense']:,} parameters, "
        f"rank {rank}: {llama.prompt} tokens given, {llama.tokens} generated, median of "
        f"{session.repeats} processes"
    )
    rows = [_row(name, sizes[name], numbers[name], found[name]) for name in _ROWS]
    session.show_table(title, _table(rows))
    session.results.append({"title": title, "rows": rows})
    if busy is not None:
        session.note(busy)


def _file(folder: Path, name: str) -> Path:
    """Return where the weights are: those in eight bits are made of the frozen ones, as loaded."""
    return folder / name.split(",")[0] / WEIGHTS


def _save_all(folder: Path, llama: ServedLlama, rank: int) -> dict[str, int]:
    """Save the model in each of its forms; return its numbers in each."""
    model = llama.model()
    numbers = {}
    for name, change in (
        ("dense", lambda model: model),
        ("compressed", lambda m: tensorize_(m, TTConfig(rank=rank, init="orthogonal"))),
        ("frozen", functools.partial(freeze_, batch=1)),
    ):
        model = change(model)
        numbers[name] = count(model)
        save_model(model, folder / name)
    return {**numbers, "frozen, int8": numbers["frozen"]}


def _measure(session: Session, folder: Path, name: str, llama: ServedLlama) -> dict[str, Any]:
    job = ServeJob(
        str(_file(folder, name).parent), llama, name.endswith("int8"), str(session.device),
        torch.get_num_threads(), session.kept,
    )  # fmt: skip
    out = folder / "found.json"
    words = [sys.executable, "-m", "benchmarks.serve_job", job.to_json(), str(out)]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"{name}: the measuring process ended with status {ended.returncode}: {last}"
        )
    return json.loads(out.read_text())


def _check(session: Session, found: dict[str, list[dict[str, Any]]]) -> None:
    """Compare what the forms compute; say how far eight bits are from it."""
    logits = {name: torch.tensor(rounds[0]["logits"]) for name, rounds in found.items()}
    wanted = logits["compressed"]
    off = {
        name: float((logits[name] - wanted).abs().max() / wanted.abs().max())
        for name in ("frozen", "frozen, int8")
    }
    if not off["frozen"] <= _AGREE:
        raise DisagreementError(
            f"the frozen model's logits are {off['frozen']:.1e} of the largest from those of the "
            f"compressed one, which is more than {_AGREE:.0e}"
        )
    session.print(
        f"frozen agrees with compressed to {off['frozen']:.1e} of the largest logit, in eight "
        f"bits to {off['frozen, int8']:.1e}"
    )


def _row(name: str, size: int, numbers: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": size,
        "parameters": numbers,
        "load": median(found["load"] for found in rounds),
        "first": median(found["first"] for found in rounds),
        "each": median(second for found in rounds for second in found["each"]),
        "peak": median(found["peak"] for found in rounds),
        "rounds": [{key: found[key] for key in ("load", "first", "each", "peak")}
                   for found in rounds],
    }  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    table.add_column("")
    for heading in ("parameters", "file MB", "load ms", "first token ms", "token ms", "peak MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            f"{row['bytes'] / 1e6:,.1f}",
            *(milliseconds(1e3 * row[key]) for key in ("load", "first", "each")),
            f"{row['peak'] / 2**20:,.0f}",
        )
    return table
