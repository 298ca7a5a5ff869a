"""Count what several processes that train a model exchange in a step: compressed and dense."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.encoders import (
    LEARNING_RATE,
    TARGET,
    Batch,
    Encoders,
    learned_ranks,
    loss_fn,
)
from benchmarks.linear import count
from benchmarks.session import Session
from comera.nn.module import tensor_trains
from comera.optim.groups import param_groups
from comera.rank.prune import prune_to_
from comera.rank.two_stage import TwoStage
from comera.surgery.truncate import truncate_
from comera.train.step import TrainStep

_PROCESSES = (2, 4, 8)
MIB = 2**20


class Exchanged(TorchDispatchMode):
    """Adds up the bytes of all tensors that are given to collective operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            self.calls += 1
        return func(*args, **(kwargs or {}))


def traffic(session: Session, encoders: Encoders, batch: int) -> None:
    """Count the bytes that each process has averaged in a step, and sends for it.

    A process alone is counted: it hands the same tensors to the same operations as one of many.
    Of N processes each sends 2 (N - 1) / N times their bytes in a ring.
    """
    data = encoders.batch(batch, session.device)
    models = models_of(encoders, session.device)
    table, dense_bytes = Table(), 0
    for name in ("", "parameters", "operations", "MiB averaged", "dense / this"):
        table.add_column(name, justify="left" if not name else "right")
    for number in _PROCESSES:
        table.add_column(f"MiB sent by each of {number}", justify="right")
    with _group_of_one():
        for name, (model, ranks) in models.items():
            found = _exchanged(model, ranks, data)
            dense_bytes = dense_bytes or found.bytes
            ratio = dense_bytes / found.bytes
            table.add_row(
                name, f"{count(model):,}", str(found.calls), f"{found.bytes / MIB:.2f}",
                f"{ratio:.1f}x", *(f"{sent(found, n) / MIB:.2f}" for n in _PROCESSES),
            )  # fmt: skip
            session.results.append(
                {
                    "name": name, "parameters": count(model), "operations": found.calls,
                    "bytes": found.bytes, "ratio": ratio,
                }
            )  # fmt: skip
    session.show_table(f"{encoders}, float32, exchanged in a training step", table)


def models_of(
    encoders: Encoders, device: torch.device
) -> dict[str, tuple[nn.Module, TwoStage | None]]:
    """Make the models that are compared, by name, with rank learning where there is any."""
    dense, whole, cut = (encoders.model(kind, device) for kind in ("dense", "comera", "comera"))
    cores = sum(core.numel() for layer in tensor_trains(cut).values() for core in layer.cores)
    prune_to_(tensor_trains(cut), TARGET * cores)
    truncate_(cut)
    return {
        "dense": (dense, None),
        "comera, rank objective": (whole, learned_ranks(whole)),
        f"comera, cores cut to {TARGET:g}": (cut, None),
    }


def parallel_step(model: nn.Module, ranks: TwoStage | None) -> TrainStep:
    """Make a training step whose gradients are averaged over all processes."""
    optimizer = torch.optim.AdamW(param_groups(model, LEARNING_RATE), fused=True)
    return TrainStep(DistributedDataParallel(model), loss_fn, optimizer, ranks, graph=False)


def sent(found: Exchanged, processes: int) -> float:
    """Return the bytes that each of so many processes sends in a ring."""
    return 2 * (processes - 1) / processes * found.bytes


def _exchanged(model: nn.Module, ranks: TwoStage | None, data: Batch) -> Exchanged:
    """Train three steps, and count the third: buckets are as they stay from the second on."""
    step = parallel_step(model, ranks)
    for _ in range(2):
        step(data)
    with Exchanged() as found:
        step(data)
    return found


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
