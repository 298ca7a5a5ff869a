"""Measure how far a step of an optimizer moves the weight of a layer.

The weight is the one that the cores contract to, and stands beside that of a dense layer. A layer
learns a fixed random one of its shape from fresh batches, so that steps agree in direction as they
do early in a run. Activations and attention scores feel the spectral norm of the change; the rows
of a table feel its root mean square. All combinations of the options are measured.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.session import Session, add_several, tuple_of
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.nn.table import HotRows
from comera.optim.groups import param_groups
from comera.optim.muon import MuonAdamW

_STEPS = 20
"""Steps in about one direction, all together."""
_ROWS = 512
"""Rows of a batch."""
_GATE_LR = 2e-3
"""Rate of the gates, as that of runs."""

_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": MuonAdamW,
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.0),
}
"""Optimizers of the cores, by their names in a run."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    widths = [(256, 256), (768, 768), (768, 3072), (3072, 768)]
    add_several(
        parser, "--widths", widths, "Pairs of input and output width.", tuple_of(2, "768:3072"),
        "IN:OUT",
    )  # fmt: skip
    add_several(parser, "--order", [1, 2, 3, 4], "Modes a side.")
    add_several(parser, "--rank", [8, 32, 128], "Bounds on the ranks.")
    parser.add_argument(
        "--optimizer", nargs="+", choices=list(_OPTIMIZERS), default=list(_OPTIMIZERS),
        help="Optimizers of the cores.",
    )  # fmt: skip
    parser.add_argument("--lr", type=float, default=7e-4, help="Learning rate of the cores.")
    hot_rows = [(2000, 256, 48), (4000, 512, 48)]
    add_several(
        parser, "--hot_rows", hot_rows, "Tables of hot rows; none after the bare option.",
        tuple_of(3, "2000:256:48"), "ROWS:WIDTH:RANK", nargs="*",
    )  # fmt: skip


def run(session: Session, options: argparse.Namespace) -> None:
    """Measure steps of layers of all combinations, of their gates, and of hot rows.

    Raises:
        ValueError: If the learning rate is not above zero.
    """
    lr = options.lr
    if not lr > 0:
        raise ValueError(f"lr={lr} must be above 0")
    title = (
        f"learning rate {lr:g}; dense: Muon on nn.Linear of that shape; spectral norms unless it "
        "says otherwise"
    )
    columns = {"layer": "", "|W|": ".2f", "dense |W|": ".2f", "cores, 1 step, x dense": ".2f"}
    columns |= {"% of |W|": ".2f", f"{_STEPS} steps, %": ".0f", "RMS, x dense": ".2f"}
    columns["gates, 1 step, %"] = ".2f"
    session.table(title, columns, _layers(session.device, options))
    if options.hot_rows:
        title = (
            f"rows that a step has read, learning rate {lr:g}; AdamW changes an entry of a dense "
            "row by one rate in its first step"
        )
        columns = {"table": "", "RMS of a row": ".3f", "changed by 1 step, x rate": ".2f"}
        columns |= {"%": ".2f", f"{_STEPS} steps, %": ".0f"}
        session.table(title, columns, _tables(session.device, options))


def _layers(device: torch.device, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    lr = options.lr
    for wide, high in options.widths:
        torch.manual_seed(0)
        dense = nn.Linear(wide, high, device=device)
        groups = param_groups(nn.Sequential(dense), lr, muon_modules="all-linear")
        optimizer = MuonAdamW(_only(groups, "matrices"))
        dense_start, dense_first, dense_rms, _ = _moved(dense, optimizer)
        for rank in options.rank:
            for order in options.order:
                for name in options.optimizer:

                    def moved(part: str, rank=rank, order=order, name=name) -> tuple[float, ...]:
                        torch.manual_seed(0)
                        layer = TTLinear(wide, high, rank=rank, order=order, device=device)  # noqa: B023
                        groups = _only(param_groups(layer, lr, gate_lr=_GATE_LR), part)
                        return _moved(layer, _OPTIMIZERS[name](groups))

                    start, first, rms, last = moved("cores")
                    gates_start, gates_first, *_ = moved("gates")
                    yield (
                        f"{wide} -> {high}, order {order}, rank {rank}, {name}", start,
                        dense_start, first / dense_first, 100 * first / start,
                        100 * last / start, rms / dense_rms, 100 * gates_first / gates_start,
                    )  # fmt: skip


def _only(groups: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [group for group in groups if group["name"] == name]


def _moved(layer: nn.Linear | TTLinear, optimizer: Optimizer) -> tuple[float, float, float, float]:
    """Return the spectral norms of the weight and of what one step changes, the root mean square of
    the latter, and the spectral norm of what all steps change."""

    def weight() -> Tensor:
        found = layer.dense_weight() if isinstance(layer, TTLinear) else layer.weight
        return found.detach().T.clone()

    before = weight()
    teacher = torch.randn_like(before) / (3 * before.shape[0]) ** 0.5
    first = torch.zeros_like(before)
    for number in range(_STEPS):
        x = torch.randn(_ROWS, before.shape[0], device=before.device)
        layer.zero_grad()
        nn.functional.mse_loss(layer(x), x @ teacher).backward()
        optimizer.step()
        if not number:
            first = weight() - before
    last = weight() - before
    return spectral_norm(before), spectral_norm(first), _rms(first), spectral_norm(last)


def _tables(device: torch.device, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    for rows, width, rank in options.hot_rows:
        for name in options.optimizer:
            start, first, last = _hot(device, rows, width, rank, name, options.lr)
            yield (
                f"{rows} hot rows of {width}, rank {rank}, {name}", start, first / options.lr,
                100 * first / start, 100 * last / start,
            )  # fmt: skip


def _hot(
    device: torch.device, rows: int, width: int, rank: int, name: str, lr: float
) -> tuple[float, float, float]:
    """Return the root mean squares of read rows, of their change in a step, and in all steps.

    Rows are those of words: their standard deviation is 0.02, and the k-th is read one k-th as
    often as the first.
    """
    torch.manual_seed(0)
    table = TTEmbedding(2 * rows, width, rank=4, hot_rows=rows, hot_rank=rank, device=device)
    table.reset_parameters(std=0.02)
    hot = table.hot
    assert isinstance(hot, HotRows), "a rank was given"
    optimizer = _OPTIMIZERS[name](_only(param_groups(hot, lr), "cores"))
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
