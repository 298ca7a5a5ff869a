"""An embedding table: look-up, backward and the optimizer's step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, SparseAdam

from comera.bench import peers
from comera.bench.linear import count
from comera.bench.numerics import compare_table
from comera.bench.session import Session
from comera.nn.embedding import TTEmbedding
from comera.nn.embedding_bag import TTEmbeddingBag

_LEARNING_RATE = 1e-4
_DENSE_COPIES = 4
"""Weight, gradient and two moments, each as large as the table."""


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
    """Dense, sparse, comera and tensorly-torch side by side.

    Args:
        session: Where to run.
        rows: Of the table.
        width: Of a row.
        indices: In a batch.
        bag: Indices that are summed to one output; 0 for plain look-ups.
        rank: Of the tensor train.
        zipf: Exponent of the distribution of indices; 0 for a uniform one.
        dtype: Of the table.
        dense_limit: GiB that the dense table may take with its gradient and moments.
        with_peers: Whether tensorly-torch is measured too.
    """
    torch.manual_seed(0)
    if bag and indices % bag:
        raise ValueError(f"indices={indices} is not a multiple of bag={bag}")
    picked = _draw(rows, indices, zipf).to(session.device)
    picked = picked.view(-1, bag) if bag else picked
    layer = _train(rows, width, rank, bag, dtype).to(session.device)
    session.check(compare_table(layer, picked))

    baseline = "sparse, SparseAdam"
    layers: dict[str, tuple[nn.Module, type[Optimizer]]] = {}
    needed = _DENSE_COPIES * rows * width * dtype.itemsize / 2**30
    if needed <= dense_limit:
        baseline = "dense, AdamW"
        layers[baseline] = _table(rows, width, bag, dtype, sparse=False), AdamW
    else:
        session.note(
            f"dense with AdamW is left out: weight, gradient and moments take {needed:.1f} GiB, "
            f"more than --dense_limit={dense_limit:g}"
        )
    layers["sparse, SparseAdam"] = _table(rows, width, bag, dtype, sparse=True), SparseAdam
    layers["comera, AdamW"] = layer, AdamW
    grad = torch.randn(picked.shape[0], width).to(session.device, dtype)
    runs = {
        name: _step(table.to(session.device), picked, grad, optimizer)
        for name, (table, optimizer) in layers.items()
    }
    parameters = {name: count(table) for name, (table, _) in layers.items()}
    name = f"tensorly-torch, rank {max(layer.ranks)}, AdamW"

    def peer() -> Callable[[], object]:
        table = peers.tensorly_embedding(layer)
        parameters[name] = count(table)
        # It keeps the columns that round the width up.
        return _step(table, picked, _padded(grad, layer.shape.num_cols), AdamW)

    with peers.tensorly_on_torch():
        if with_peers and not bag:
            session.add_peer(runs, name, peer)
        parameters = {name: parameters[name] for name in runs}
        bags = f" in bags of {bag}" if bag else ""
        law = f"Zipf {zipf:g}" if zipf else "uniform"
        title = (
            f"embedding {rows} x {width}, modes {layer.shape.describe_modes()}, ranks "
            f"{' '.join(map(str, layer.ranks))}, {indices} indices{bags}, {law}, "
            f"{picked.unique().numel()} distinct, look-up + backward + step"
        )
        session.measure(title, runs, baseline, parameters)


def _draw(rows: int, count: int, zipf: float) -> Tensor:
    """Indices; under Zipf's law row ``i`` has a probability in proportion to ``(i + 1)^-zipf``."""
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


def _step(
    table: nn.Module, indices: Tensor, grad: Tensor, kind: type[Optimizer]
) -> Callable[[], object]:
    """What is timed."""
    settings = {"fused": True} if kind is AdamW else {}
    optimizer = kind(table.parameters(), lr=_LEARNING_RATE, **settings)  # type: ignore[arg-type,call-arg]

    def run() -> None:
        optimizer.zero_grad()
        table(indices).backward(grad)
        optimizer.step()

    return run


def _padded(grad: Tensor, width: int) -> Tensor:
    return nn.functional.pad(grad, (0, width - grad.shape[1]))
