"""Peak memory of one training step, in a process of its own: ``python -m benchmarks.peak JOB``.

The base is the resident size after all imports and one step of an 8 x 8 layer. The peak is the
largest resident size from then on, while the model and its optimizer are built and two steps are
taken. On a GPU it is what torch had allocated there at most.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.embedding import RowByRow, draw
from benchmarks.encoders import Encoders, learned_ranks, train_step
from benchmarks.linear import count
from comera.allocator import reuse_freed_memory
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.train.capture import WARM_UP

Kind = Literal["dense", "plain", "comera"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # man 5 proc_pid_clear_refs
_STEPS = 2


@dataclass(frozen=True)
class LayerShape:
    """A single linear layer and its batch."""

    shape: tuple[int, int]
    rank: int | list[int]
    tokens: int


@dataclass(frozen=True)
class TableShape:
    """A single embedding table and the indices that are looked up in it."""

    rows: int
    width: int
    rank: int
    indices: int
    zipf: float


@dataclass(frozen=True)
class Job:
    """What to measure.

    Args:
        kind: ``"dense"`` or ``"comera"``; of a table ``"plain"`` or ``"comera"``.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Threads that torch uses.
        keep: Whether freed memory is kept in the process.
        batch: Sequences; of ``encoders``.
        captured: Whether the step of ``encoders`` becomes a CUDA graph.
        encoders: The model; one of the three that follow is given.
        layer: The layer.
        table: The table.
    """

    kind: Kind
    device: str
    threads: int
    keep: bool
    batch: int = 0
    captured: bool = False
    encoders: Encoders | None = None
    layer: LayerShape | None = None
    table: TableShape | None = None

    def to_json(self) -> str:
        """Return the job as one word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that such a word describes."""
        content: dict[str, Any] = json.loads(text)
        kinds = {"encoders": Encoders, "layer": LayerShape, "table": TableShape}
        for name, kind in kinds.items():
            if content[name] is not None:
                content[name] = kind(**content[name])
        return cls(**content)


def peak(job: Job) -> dict[str, int]:
    """Return bytes at the peak above the base, on a GPU those reserved, and the parameters."""
    torch.set_num_threads(job.threads)
    if job.keep:
        reuse_freed_memory()
    device = torch.device(job.device)
    read = peak_reader(device)
    if job.table is not None:
        parameters = _train_table(job, device)
    else:
        parameters = _train_layer(job, device) if job.layer else _train_model(job, device)
    found = {"peak": read(), "parameters": parameters}
    if device.type == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found


def peak_reader(device: torch.device) -> Callable[[], int]:
    """Begin to watch, after a step of a tiny layer; the result returns bytes above what was there.

    Raises:
        ValueError: Where the system does not say.
    """
    _train_tiny(device)
    return _cuda_peak(device) if device.type == "cuda" else resident_peak()


def resident_peak() -> Callable[[], int]:
    """Begin to watch; the result returns by how many bytes the resident size rose at most.

    Raises:
        ValueError: Where the system does not say.
    """
    try:
        base = _status("VmRSS")
        _CLEAR.write_text(_FORGET_PEAK)
    except OSError as problem:
        raise ValueError(
            f"device='cpu' needs Linux, where peak memory is read from {_STATUS.parent}; "
            f"here, on {sys.platform}: {problem}"
        ) from None
    return lambda: _status("VmHWM") - base


def _cuda_peak(device: torch.device) -> Callable[[], int]:
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return lambda: torch.cuda.max_memory_allocated(device) - base


def _status(entry: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(entry))
    return int(line.split()[1]) * 1024


def _train_tiny(device: torch.device) -> None:
    layer = nn.Linear(8, 8).to(device)
    layer(torch.ones(8, 8, device=device)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()


def _train_model(job: Job, device: torch.device) -> int:
    assert job.encoders is not None
    model = job.encoders.model("comera" if job.kind == "comera" else "dense", device)
    ranks = learned_ranks(model) if job.kind == "comera" else None
    step = train_step(model, ranks, graph=None if job.captured else False)
    for _ in range(WARM_UP + _STEPS if job.captured else _STEPS):
        step(job.encoders.batch(job.batch, device))
    return count(model)


def _train_layer(job: Job, device: torch.device) -> int:
    """Train a layer without an optimizer; the input and its gradient are included."""
    assert job.layer is not None
    wide, high = job.layer.shape
    layer: nn.Module = nn.Linear(wide, high) if job.kind == "dense" else _train(job.layer)
    layer.to(device)
    x = torch.randn(job.layer.tokens, wide, device=device, requires_grad=True)
    for _ in range(_STEPS):
        x.grad = None
        layer.zero_grad()
        layer(x).sum().backward()
    return count(layer)


def _train_table(job: Job, device: torch.device) -> int:
    """Train a table without an optimizer; rows that are read and their gradient are included."""
    assert job.table is not None
    wanted = job.table
    table = TTEmbedding(wanted.rows, wanted.width, rank=wanted.rank, device=device)
    layer: nn.Module = RowByRow(table) if job.kind == "plain" else table
    indices = draw(wanted.rows, wanted.indices, wanted.zipf).to(device)
    grad = torch.randn(wanted.indices, wanted.width, device=device)
    for _ in range(_STEPS):
        layer.zero_grad()
        layer(indices).backward(grad)
    return count(layer)


def _train(layer: LayerShape) -> TTLinear:
    return TTLinear(*layer.shape, rank=layer.rank)


if __name__ == "__main__":
    print(json.dumps(peak(Job.from_json(sys.argv[1]))))
