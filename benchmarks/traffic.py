"""Count the bytes that several processes exchange in a training step, and time it.

One process hands the same tensors to the collective operations as one of many. In a ring of N each
sends 2 (N - 1) / N times their bytes. --processes times steps of so many processes on this CPU over
gloo, each with one thread and as many rows: weak scaling.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.encoders import (
    LEARNING_RATE,
    TARGET,
    Batch,
    Encoders,
    add_encoders,
    encoders_of,
    learned_ranks,
    loss_fn,
)
from benchmarks.rank_learning import cut_ranks_
from benchmarks.session import Session, add_repeats, add_several, add_sizes, count
from comera.optim.groups import param_groups
from comera.rank.two_stage import TwoStage
from comera.surgery.truncate import truncate_
from comera.train.step import TrainStep

_PROCESSES = (2, 4, 8)
_MIB = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_sizes(parser, {"batch": (2, "Number of sequences in a batch; changes no bytes.")})
    help = "Also time steps of so many processes on this CPU, with --batch sequences each."
    add_several(parser, "--processes", [], help)
    add_encoders(parser)
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Count, and time if it is asked for; raises ``ValueError`` on a GPU."""
    encoders, batch = encoders_of(options), options.batch
    if options.processes and session.device.type != "cpu":
        raise ValueError(
            f"processes={options.processes} are timed over gloo on a CPU, and "
            f"device={session.device}: give --device=cpu, or leave --processes out"
        )
    columns = {"": "", "parameters": ",", "operations": ",", "MiB averaged": ".2f"}
    columns["dense / this"] = ".1f"
    columns |= {f"MiB sent by each of {number}": ".2f" for number in _PROCESSES}
    title = f"{encoders}, float32, exchanged in a training step"
    session.table(title, columns, _counted(encoders, batch, session.device))
    if options.processes:
        columns = {"processes": ",", "model": "", "rows": ",", "s a step": ".2f"}
        columns |= {"processor s": ".2f", "exchanging": ".1%", "MiB sent": ".2f"}
        title = f"{encoders}, float32, {batch} rows a process: a step of each process, median"
        session.table(title, columns, _timed(options.processes, encoders, batch, session.repeats))


class Exchanged(TorchDispatchMode):
    """Count the bytes of all tensors that collective operations get."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            self.calls += 1
        return func(*args, **(kwargs or {}))

    def sent(self, processes: int) -> float:
        """Return the MiB that each process sends in a ring."""
        return 2 * (processes - 1) / processes * self.bytes / _MIB


def _models(
    encoders: Encoders, device: torch.device
) -> dict[str, tuple[nn.Module, TwoStage | None]]:
    """Make the models by name, with their rank learning, if any."""
    dense, whole, cut = (encoders.model(kind, device) for kind in ("dense", "comera", "comera"))
    cut_ranks_(cut, TARGET)
    truncate_(cut)
    return {
        "dense": (dense, None),
        "comera, rank objective": (whole, learned_ranks(whole)),
        f"comera, cores cut to {TARGET:g}": (cut, None),
    }


def _trained(model: nn.Module, ranks: TwoStage | None, data: Batch) -> tuple[TrainStep, Exchanged]:
    """Make a step of DDP, and count the third one: DDP rebuilds its buckets in the second."""
    optimizer = torch.optim.AdamW(param_groups(model, LEARNING_RATE), fused=True)
    buffers = [name for name, _ in model.named_buffers()]  # as in runs
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    step = TrainStep(DistributedDataParallel(model), loss_fn, optimizer, ranks, graph=False)
    step(data)
    step(data)
    with Exchanged() as found:
        step(data)
    return step, found


def _counted(encoders: Encoders, batch: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
    data, dense = encoders.batch(batch, device), 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, (model, ranks) in _models(encoders, device).items():
            _, found = _trained(model, ranks, data)
            dense = dense or found.bytes
            sent = [found.sent(number) for number in _PROCESSES]
            averaged = found.bytes / _MIB
            yield name, count(model), found.calls, averaged, dense / found.bytes, *sent
    finally:
        dist.destroy_process_group()


def _timed(
    processes: list[int], encoders: Encoders, batch: int, repeats: int
) -> Iterator[tuple[Any, ...]]:
    """Time steps of several processes.

    Processor time does not depend on other processes on the same core. That of other threads than
    the main one is the exchange: gloo sends, receives and adds up in threads of its own.
    """
    for number in processes:
        with tempfile.TemporaryDirectory() as folder:
            given = (number, encoders, batch, repeats, folder)
            mp.start_processes(_process, given, nprocs=number, start_method="spawn")
            found = [json.loads((Path(folder) / str(k)).read_text()) for k in range(number)]
        for name, (_, sent) in found[0].items():
            times = [times for each in found for times in each[name][0]]
            wall, used, main = ([row[k] for row in times] for k in range(3))
            share = sum(max(0.0, a - b) for a, b in zip(used, main, strict=True)) / sum(used)
            yield number, name, number * batch, median(wall), median(used), share, sent


def _process(
    rank: int, number: int, encoders: Encoders, batch: int, repeats: int, folder: str
) -> None:
    """Write wall, processor and main thread's times of every round, and MiB sent, by model."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", number)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=number)
    cpu = torch.device("cpu")
    data, found, models = encoders.batch(batch, cpu), {}, _models(encoders, cpu)
    for name in list(models):
        step, exchanged = _trained(*models.pop(name), data)  # freed before the next one
        times = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter(), time.process_time(), time.thread_time()
            step(data)
            now = time.perf_counter(), time.process_time(), time.thread_time()
            times.append([after - before for after, before in zip(now, began, strict=True)])
        found[name] = times, exchanged.sent(number)
        del step
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
