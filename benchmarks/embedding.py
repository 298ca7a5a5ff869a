"""An embedding table: lookup, backward and the optimizer's step."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, SparseAdam

from benchmarks import peers
from benchmarks.linear import count
from benchmarks.numerics import compare_table, rows_by_cores
from benchmarks.session import Session
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag

_LEARNING_RATE = 1e-4
_COPIES = {"dense, fused AdamW": 4, "dense, AdamW": 4, "sparse, SparseAdam": 3}
"""Weight, gradient unless it is sparse, and two moments, each as large as the table. What is not
called fused is torch's default."""
TRAINED, _PLAIN = "comera, fused AdamW", "the same cores row by row, fused AdamW"


def embedding(
    session: Session,
    rows: int,
    width: int,
    indices: int,
    bag: int,
    rank: int | Sequence[int],
    zipf: float,
    dtype: torch.dtype,
    dense_limit: float,
    with_peers: bool,
) -> None:
    """Time dense, sparse, comera and tensorly-torch side by side.

    Args:
        session: Where to run.
        rows: Rows of the table.
        width: Width of a row.
        indices: Number of indices in a batch.
        bag: Indices that are summed to one output; 0 for plain lookups.
        rank: Rank of the tensor train.
        zipf: Exponent of the distribution of indices; 0 for a uniform one.
        dtype: Dtype of the table.
        dense_limit: GiB that a dense table may take with its gradient and moments.
        with_peers: Whether tensorly-torch is measured too.
    """
    torch.manual_seed(0)
    if bag and indices % bag:
        raise ValueError(f"indices={indices} is not a multiple of bag={bag}")
    picked = draw(rows, indices, zipf).to(session.device)
    picked = picked.view(-1, bag) if bag else picked
    layer = _train(rows, width, rank, bag, dtype).to(session.device)
    session.check(compare_table(layer, picked))

    layers: dict[str, nn.Module] = {}
    for name, copies in _COPIES.items():
        needed = copies * rows * width * dtype.itemsize / 2**30
        if needed <= dense_limit:
            layers[name] = _table(rows, width, bag, dtype, sparse=name.startswith("sparse"))
        else:
            session.note(
                f"{name} is left out: {copies} copies of the table take {needed:.1f} GiB, more "
                f"than --dense_limit={dense_limit:g}"
            )
    layers |= {TRAINED: layer, _PLAIN: RowByRow(copy.deepcopy(layer))}  # both will be trained
    baseline = next(iter(layers))  # the first dense table that fits in memory
    grad = torch.randn(picked.shape[0], width).to(session.device, dtype)
    runs = {
        name: train_step(table.to(session.device), picked, grad, fused="fused" in name)
        for name, table in layers.items()
    }
    parameters = {name: count(table) for name, table in layers.items()}
    name = f"tensorly-torch, rank {max(layer.ranks)}, fused AdamW"

    def peer() -> Callable[[], object]:
        table = peers.tensorly_embedding(layer)
        parameters[name] = count(table)
        # It keeps the columns that round the width up.
        return train_step(table, picked, _padded(grad, layer.shape.num_cols), fused=True)

    with peers.tensorly_on_torch():
        if with_peers and not bag:
            session.add_peer(runs, name, peer)
        parameters = {name: parameters[name] for name in runs}
        bags = f" in bags of {bag}" if bag else ""
        law = f"Zipf {zipf:g}" if zipf else "uniform"
        title = (
            f"embedding {rows} x {width}, modes {layer.shape.describe_modes()}, ranks "
            f"{' '.join(map(str, layer.ranks))}, {indices} indices{bags}, {law}, "
            f"{picked.unique().numel()} distinct, lookup + backward + step"
        )
        session.measure(title, runs, baseline, parameters)


def draw(rows: int, count: int, zipf: float) -> Tensor:
    """Draw indices; under Zipf's law row ``i`` has a probability like ``(i + 1)^-zipf``."""
    if not zipf:
        return torch.randint(0, rows, (count,))
    weights = torch.arange(1, rows + 1, dtype=torch.double) ** -zipf
    edges = weights.cumsum(0)
    return torch.searchsorted(edges, torch.rand(count, dtype=torch.double) * edges[-1])


def _train(
    rows: int, width: int, rank: int | Sequence[int], bag: int, dtype: torch.dtype
) -> TTEmbedding | TTEmbeddingBag:
    if bag:
        return TTEmbeddingBag(rows, width, mode="sum", rank=rank, dtype=dtype)
    return TTEmbedding(rows, width, rank=rank, dtype=dtype)


def _table(rows: int, width: int, bag: int, dtype: torch.dtype, sparse: bool) -> nn.Module:
    if bag:
        return nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse, dtype=dtype)
    return nn.Embedding(rows, width, sparse=sparse, dtype=dtype)


class RowByRow(nn.Module):
    """The plain way to read a tensor train: a slice of every core for every index."""

    def __init__(self, layer: TTEmbedding | TTEmbeddingBag) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, indices: Tensor) -> Tensor:
        rows = rows_by_cores(self.layer, indices.flatten())
        return rows if indices.dim() == 1 else rows.unflatten(0, indices.shape).sum(1)


def train_step(
    table: nn.Module, indices: Tensor, grad: Tensor, fused: bool
) -> Callable[[], object]:
    """Return the training step that is timed."""
    optimizer: Optimizer
    if getattr(table, "sparse", False):
        optimizer = SparseAdam(table.parameters(), lr=_LEARNING_RATE)
    else:
        optimizer = AdamW(table.parameters(), lr=_LEARNING_RATE, fused=fused or None)

    def run() -> None:
        optimizer.zero_grad()
        table(indices).backward(grad)
        optimizer.step()

    return run


def _padded(grad: Tensor, width: int) -> Tensor:
    return nn.functional.pad(grad, (0, width - grad.shape[1]))
