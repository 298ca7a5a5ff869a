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

from comera.bench.encoders import (
    LEARNING_RATE,
    TARGET,
    Batch,
    Encoders,
    learned_ranks,
    loss_fn,
)
from comera.bench.linear_speed import count
from comera.bench.session import Session
from comera.nn.module import tensor_trains
from comera.optim.groups import param_groups
from comera.rank.prune import prune_to_
from comera.rank.two_stage import TwoStage
from comera.surgery.truncate import truncate_
from comera.train.step import TrainStep

_PROCESSES = (2, 4, 8)
_MIB = 2**20


class _Exchanged(TorchDispatchMode):
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
    dense, whole = (encoders.model(kind, session.device) for kind in ("dense", "comera"))
    cut = encoders.model("comera", session.device)
    cores = sum(core.numel() for layer in tensor_trains(cut).values() for core in layer.cores)
    prune_to_(tensor_trains(cut), TARGET * cores)
    truncate_(cut)
    models = {
        "dense": (dense, None),
        "comera, rank objective": (whole, learned_ranks(whole)),
        f"comera, cores cut to {TARGET:g}": (cut, None),
    }
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
            sent = [2 * (n - 1) / n * found.bytes for n in _PROCESSES]
            table.add_row(
                name, f"{count(model):,}", str(found.calls), f"{found.bytes / _MIB:.2f}",
                f"{ratio:.1f}x", *(f"{size / _MIB:.2f}" for size in sent),
            )  # fmt: skip
            session.results.append(
                {
                    "name": name, "parameters": count(model), "operations": found.calls,
                    "bytes": found.bytes, "ratio": ratio,
                }
            )  # fmt: skip
    session.show_table(f"{encoders}, float32, exchanged in a training step", table)


def _exchanged(model: nn.Module, ranks: TwoStage | None, data: Batch) -> _Exchanged:
    """Train three steps, and count the third: buckets are as they stay from the second on."""
    optimizer = torch.optim.AdamW(param_groups(model, LEARNING_RATE), fused=True)
    step = TrainStep(DistributedDataParallel(model), loss_fn, optimizer, ranks, graph=False)
    for _ in range(2):
        step(data)
    with _Exchanged() as found:
        step(data)
    return found


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
