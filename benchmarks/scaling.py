"""Time steps of several processes on one CPU, each on as many rows: weak scaling."""

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table

from benchmarks.encoders import Encoders
from benchmarks.session import Session
from benchmarks.traffic import MIB, Exchanged, models_of, parallel_step, sent


@dataclass
class _Rounds:
    """Steps of one model in one process; lists have an entry a step.

    Attributes:
        bytes: What the process sends in a step, in a ring.
        wall: Seconds.
        used: Seconds of the processor, of all threads.
        exchanging: Those of them in gloo's threads, which send, receive and add up.
    """

    bytes: float
    wall: list[float]
    used: list[float]
    exchanging: list[float]


def scaling(session: Session, encoders: Encoders, batch: int, processes: list[int]) -> None:
    """Time steps of so many processes over gloo, with one thread each and ``batch`` rows each.

    The time of the processor is that of a process itself, however many others wait for the same
    core, which the time by the clock is not. What a process uses beside its main thread, which
    computes everything, is the exchange: gloo sends, receives and adds up in threads of its own.
    Copies between gradients and buffers are the main thread's.

    Raises:
        ValueError: If the device is not the CPU.
    """
    if session.device.type != "cpu":
        raise ValueError(
            f"processes={processes} are timed over gloo on a CPU, and device={session.device}: "
            "give --device=cpu, or leave --processes out"
        )
    table = Table()
    names = ("processes", "model", "rows", "s a step", "processor s", "exchanging", "MiB sent")
    for name in names:
        table.add_column(name, justify="left" if name == "model" else "right")
    for count in processes:
        for name, found in _measured(count, encoders, batch, session.repeats).items():
            wall = statistics.median(s for each in found for s in each.wall)
            used = statistics.median(s for each in found for s in each.used)
            share = sum(sum(each.exchanging) for each in found) / sum(
                sum(each.used) for each in found
            )
            table.add_row(
                str(count), name, str(count * batch), f"{wall:.2f}", f"{used:.2f}",
                f"{share:.1%}", f"{found[0].bytes / MIB:.2f}",
            )  # fmt: skip
            session.results.append(
                {
                    "name": name, "processes": count, "rows": count * batch, "wall": wall,
                    "processor": used, "exchanging": share, "bytes": found[0].bytes,
                }
            )  # fmt: skip
    title = f"{encoders}, float32, {batch} rows a process: a step of each process, median"
    session.show_table(title, table)


def _measured(count: int, encoders: Encoders, batch: int, repeats: int) -> dict[str, list[_Rounds]]:
    """Return what each of so many processes found, by model."""
    with tempfile.TemporaryDirectory() as folder:
        given = (count, encoders, batch, repeats, folder)
        mp.start_processes(_process, given, nprocs=count, start_method="spawn")
        texts = [(Path(folder) / str(rank)).read_text() for rank in range(count)]
    found: list[dict[str, Any]] = [json.loads(text) for text in texts]
    return {name: [_Rounds(**each[name]) for each in found] for name in found[0]}


def _process(
    rank: int, count: int, encoders: Encoders, batch: int, repeats: int, folder: str
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    data = encoders.batch(batch, torch.device("cpu"))
    found = {}
    models = models_of(encoders, torch.device("cpu"))
    for name in list(models):
        step = parallel_step(*models.pop(name))  # with which it is freed, and its optimizer
        step(data)
        step(data)  # with buckets as they stay
        with Exchanged() as exchanged:
            step(data)
        rounds = _Rounds(sent(exchanged, count), [], [], [])
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter(), time.process_time(), time.thread_time()
            step(data)
            wall, used, main = (
                now - before
                for now, before in zip(
                    (time.perf_counter(), time.process_time(), time.thread_time()),
                    began, strict=True,
                )
            )  # fmt: skip
            rounds.wall.append(wall)
            rounds.used.append(used)
            rounds.exchanging.append(max(0.0, used - main))
        found[name] = asdict(rounds)
        del step
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
