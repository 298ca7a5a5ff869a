"""How far one step of an optimizer moves the weight that cores contract to, beside a dense layer.

A layer learns a fixed random one of its shape from fresh batches, so that steps agree in direction
as they do early in a run. What activations and attention scores feel is the spectral norm of the
change; what a table's rows feel is its root mean square.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.session import Session
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.nn.table import HotRows
from comera.optim.groups import param_groups
from comera.optim.muon import MuonAdamW

_STEPS = 20
"""How many steps in about one direction are taken after the first."""
_ROWS = 512
"""Rows of a batch."""
_GATE_LR = 2e-3
"""Rate of the gates, as that of runs."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": MuonAdamW,
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.0),
}
"""What steps the cores, by its name in a run."""


@dataclass(frozen=True)
class Moved:
    """A weight before and after steps: spectral norms, and the root mean square of the change.

    Args:
        start: Spectral norm of the weight before the first step.
        first: Spectral norm of what one step changes.
        first_rms: Root mean square of what one step changes.
        all: Spectral norm of what all steps change.
    """

    start: float
    first: float
    first_rms: float
    all: float


def updates(
    session: Session,
    widths: Sequence[tuple[int, int]],
    orders: Sequence[int],
    ranks: Sequence[int],
    names: Sequence[str],
    lr: float,
    hot_rows: Sequence[tuple[int, int, int]],
) -> None:
    """Measure steps of layers of all combinations, of their gates, and of hot rows.

    Args:
        session: Where to run and print.
        widths: Input and output widths.
        orders: Modes a side.
        ranks: Bounds on the bonds.
        names: Optimizers of the cores, some of :data:`OPTIMIZERS`.
        lr: Learning rate of the cores; gates have the 2e-3 of runs.
        hot_rows: Rows, width and rank of each table of hot rows.
    """
    table = _heading(
        "|W|", "dense |W|", "cores, 1 step, x dense", "% of |W|", f"{_STEPS} steps, %",
        "RMS, x dense", "gates, 1 step, %",
    )  # fmt: skip
    shown: list[dict[str, Any]] = []
    for width_in, width_out in widths:
        dense = _dense(session, width_in, width_out, lr)
        for rank, order, name in _combined(ranks, orders, names):
            cores = _linear(session, width_in, width_out, rank, order, name, lr, "cores")
            gates = _linear(session, width_in, width_out, rank, order, name, lr, "gates")
            title = f"{width_in} -> {width_out}, order {order}, rank {rank}, {name}"
            ratio, rms = cores.first / dense.first, cores.first_rms / dense.first_rms
            table.add_row(
                title,
                f"{cores.start:.2f}",
                f"{dense.start:.2f}",
                f"{ratio:.2f}",
                f"{100 * cores.first / cores.start:.2f}",
                f"{100 * cores.all / cores.start:.0f}",
                f"{rms:.2f}",
                f"{100 * gates.first / gates.start:.2f}",
            )
            shown.append({"layer": title, "dense": vars(dense), "cores": vars(cores),
                          "gates": vars(gates)})  # fmt: skip
    heading = (
        f"learning rate {lr:g}; dense: Muon on nn.Linear of that shape; spectral norms where "
        "nothing is said"
    )
    session.show_table(heading, table)
    session.results.append({"title": heading, "rows": shown})
    if hot_rows:
        _show_hot_rows(session, hot_rows, names, lr)


def _show_hot_rows(
    session: Session, hot_rows: Sequence[tuple[int, int, int]], names: Sequence[str], lr: float
) -> None:
    table = _heading("RMS of a row", "changed by 1 step, x rate", "%", f"{_STEPS} steps, %")
    shown = []
    for (rows, width, rank), name in ((sizes, name) for sizes in hot_rows for name in names):
        start, first, last = _hot(session, rows, width, rank, name, lr)
        title = f"{rows} hot rows of {width}, rank {rank}, {name}"
        table.add_row(
            title, f"{start:.3f}", f"{first / lr:.2f}", f"{100 * first / start:.2f}",
            f"{100 * last / start:.0f}",
        )  # fmt: skip
        shown.append({"table": title, "start": start, "first": first, "all": last})
    heading = (
        f"rows that a step has read, learning rate {lr:g}; AdamW changes an entry of a dense row "
        "by one rate in its first step"
    )
    session.show_table(heading, table)
    session.results.append({"title": heading, "rows": shown})


def _heading(*names: str) -> Table:
    table = Table()
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _combined(
    ranks: Sequence[int], orders: Sequence[int], names: Sequence[str]
) -> Iterator[tuple[int, int, str]]:
    for rank in ranks:
        for order in orders:
            for name in names:
                yield rank, order, name


def _dense(session: Session, width_in: int, width_out: int, lr: float) -> Moved:
    torch.manual_seed(0)
    layer = nn.Linear(width_in, width_out, device=session.device)
    root = nn.Sequential(layer)
    groups = param_groups(root, lr, muon_modules="all-linear")
    return _moved(layer, lambda: layer.weight.detach().T, MuonAdamW(_only(groups, "matrices")))


def _linear(
    session: Session,
    width_in: int,
    width_out: int,
    rank: int,
    order: int,
    name: str,
    lr: float,
    part: str,
) -> Moved:
    torch.manual_seed(0)
    layer = TTLinear(width_in, width_out, rank=rank, order=order, device=session.device)
    optimizer = OPTIMIZERS[name](_only(param_groups(layer, lr, gate_lr=_GATE_LR), part))
    return _moved(layer, lambda: layer.dense_weight().detach().T, optimizer)


def _only(groups: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [group for group in groups if group["name"] == name]


def _moved(layer: nn.Module, weight: Callable[[], Tensor], optimizer: Optimizer) -> Moved:
    before = weight().clone()
    teacher = torch.randn_like(before) / (3 * before.shape[0]) ** 0.5
    changes: list[Tensor] = []
    for _ in range(_STEPS):
        x = torch.randn(_ROWS, before.shape[0], device=before.device)
        layer.zero_grad()
        nn.functional.mse_loss(layer(x), x @ teacher).backward()
        optimizer.step()
        if not changes:
            changes.append(weight() - before)
    changes.append(weight() - before)
    first, last = changes
    return Moved(
        spectral_norm(before), spectral_norm(first), _rms(first), spectral_norm(last)
    )  # fmt: skip


def _hot(
    session: Session, rows: int, width: int, rank: int, name: str, lr: float
) -> tuple[float, float, float]:
    """Return the root mean squares of read rows, of their change in a step, and in all steps.

    Rows are those of words: their standard deviation is 0.02, and the k-th is read one k-th as
    often as the first.
    """
    torch.manual_seed(0)
    table = TTEmbedding(
        2 * rows, width, rank=4, hot_rows=rows, hot_rank=rank, device=session.device
    )
    table.reset_parameters(std=0.02)
    hot = table.hot
    assert isinstance(hot, HotRows), "a rank was given"
    optimizer = OPTIMIZERS[name](_only(param_groups(hot, lr), "cores"))
    before = hot.dense_weight().detach().clone()
    teacher = 0.02 * torch.randn_like(before)
    often = 1 / torch.arange(1, rows + 1, device=before.device)
    start = first = 0.0
    for number in range(_STEPS):
        read = torch.multinomial(often, _ROWS, replacement=True)
        table.zero_grad()
        # As of a mean over a batch, whatever is above the table.
        nn.functional.mse_loss(table(read), teacher[read]).backward()
        optimizer.step()
        if not number:
            first = _rms((hot.dense_weight().detach() - before)[read])
            start = _rms(before[read])
    return start, first, _rms((hot.dense_weight().detach() - before)[read])


def spectral_norm(matrix: Tensor) -> float:
    """Return the largest singular value of a matrix ``(rows, columns)``.

    The root of the largest eigenvalue of its Gram matrix, in float64: many times faster than all
    singular values.
    """
    wide = matrix.double()
    gram = wide @ wide.T if wide.shape[0] <= wide.shape[1] else wide.T @ wide
    return float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())


def _rms(matrix: Tensor) -> float:
    return float(matrix.square().mean().sqrt())
