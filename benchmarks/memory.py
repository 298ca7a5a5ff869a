"""Peak memory of a training step, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.table import Table

from benchmarks.encoders import Encoders
from benchmarks.peak import Job, Kind, LayerShape, TableShape, resident_peak
from benchmarks.session import Session

Subject = LayerShape | TableShape


def memory(
    session: Session,
    encoders: Encoders | None,
    batches: Sequence[int],
    subject: Subject | None,
) -> None:
    """Weigh a training step of the model at every batch size, or of one layer or table.

    Beside dense layers, and for a table beside the plain way to read it, which gathers a slice of
    every core for every index.
    """
    if session.device.type == "cpu":
        resident_peak()  # where it cannot be read, say so before anything starts
    blank = Job("dense", str(session.device), torch.get_num_threads(), session.kept)
    kinds: tuple[Kind, ...] = ("dense", "comera")
    if isinstance(subject, LayerShape):
        wide, high = subject.shape
        title = f"linear {wide} -> {high}, {subject.tokens} tokens, its input included"
        jobs = {f"{subject.tokens} tokens": replace(blank, layer=subject)}
    elif subject is not None:
        kinds = ("plain", "comera")
        title = f"embedding {subject.rows} x {subject.width}, its rows and gradient included"
        jobs = {f"{subject.indices} indices": replace(blank, table=subject)}
    else:
        assert encoders is not None
        title = f"{encoders}, sequences of {encoders.length} tokens, AdamW"
        jobs = {f"batch {size}": replace(blank, encoders=encoders, batch=size) for size in batches}
    done: list[dict[str, object]] = []
    try:
        with session.console.status("") as status:
            for name, job in jobs.items():
                row: dict[str, object] = {"at": name}
                for kind in kinds:
                    status.update(f"{name}, {kind}")
                    row[kind] = _measure(session, name, replace(job, kind=kind))
                done.append(row)
    finally:
        if done:
            _show(session, f"peak memory of {title}, MiB", kinds, done)


def _measure(session: Session, name: str, job: Job) -> float | None:
    """Return MiB; None, and a note, if the process did not come to its end."""
    words = [sys.executable, "-m", "benchmarks.peak", job.to_json()]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        killed = ", most likely for lack of memory" if ended.returncode == -9 else ""
        session.note(
            f"{name}, {job.kind}: the measuring process ended with status "
            f"{ended.returncode}{killed}: {last}"
        )
        session.failed = True
        return None
    return json.loads(ended.stdout.splitlines()[-1])["peak"] / 2**20


def _show(
    session: Session, title: str, kinds: tuple[Kind, ...], rows: Sequence[dict[str, object]]
) -> None:
    table = Table()
    theirs, ours = kinds
    for heading in ("", *kinds, f"{theirs} / {ours}"):
        table.add_column(heading, justify="right")
    for row in rows:
        dense, own = row[theirs], row[ours]
        known = isinstance(dense, float) and isinstance(own, float)
        ratio = f"{dense / own:.2f}" if known and own else "–"  # type: ignore[operator]
        table.add_row(str(row["at"]), _mebibytes(dense), _mebibytes(own), ratio)
    session.show_table(title, table)
    session.results.append({"title": title, "rows": list(rows)})


def _mebibytes(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else "–"
