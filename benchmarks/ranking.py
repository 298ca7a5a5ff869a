"""Measure whether the planner puts the ways to compute a layer in their true order."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.linear import make_input, make_layers
from benchmarks.session import Session
from benchmarks.timing import Timings, milliseconds
from comera.nn.linear import TTLinear
from comera.ops.linear.tt_linear import factorized_linears, reconstructed_linear
from comera.planning.planner import plan_linear

_DENSE = "nn.Linear"
_APART = 1.15
"""Medians closer than this are even: neither order would be wrong."""


@dataclass(frozen=True)
class Case:
    """One layer at one batch: predicted and measured seconds of every way to compute it."""

    title: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    def pairs(self) -> list[bool]:
        """Tell of each pair with measured times apart whether the predicted order is right."""
        return [
            (self.predicted[a] < self.predicted[b]) == (self.measured[a] < self.measured[b])
            for a, b in itertools.combinations(self.measured, 2)
            if max(self.measured[a], self.measured[b])
            > _APART * min(self.measured[a], self.measured[b])
        ]

    def loss(self) -> float:
        """Return the time of the way the planner would run, over the best of those it can run."""
        can_run = {name: self.measured[name] for name in ("factorized", "reconstructed")}
        chosen = min(can_run, key=lambda name: self.predicted[name])
        return can_run[chosen] / min(can_run.values())


def ranking(
    session: Session,
    shapes: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    tokens: Sequence[int],
) -> None:
    """Measure all candidates and nn.Linear on a grid; on Ctrl-C what there is by then is shown."""
    cases: list[Case] = []
    try:
        for shape, rank, rows in itertools.product(shapes, ranks, tokens):
            cases.append(_measure(session, shape, rank, rows))
    finally:
        if cases:
            _show(session, cases)


def _measure(session: Session, shape: tuple[int, int], rank: int, tokens: int) -> Case:
    layer, dense = make_layers(session, shape, rank, torch.float32)
    x = make_input(session, tokens, shape[0], torch.float32)
    plan = plan_linear(layer.at(tokens), **layer.planner_setting())
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "factorized": lambda x: _factorized(layer, x),
        "reconstructed": lambda x: reconstructed_linear(x, layer.factors()),
        _DENSE: dense,
    }
    torch.testing.assert_close(
        ways["reconstructed"](x), ways["factorized"](x), rtol=1e-3, atol=1e-4
    )
    title = f"{shape[0]} -> {shape[1]}, rank {rank}, {tokens} tokens"
    runs = {name: _forward_backward(way, [layer, dense], x) for name, way in ways.items()}
    timings: Timings = session.time(title, runs, _DENSE)
    predicted = {one.name: one.seconds for one in plan.candidates}
    predicted[_DENSE] = plan.dense.seconds
    return Case(title, predicted, {name: timings.median(name) for name in runs})


def _forward_backward(
    way: Callable[[Tensor], Tensor], modules: Sequence[nn.Module], x: Tensor
) -> Callable[[], object]:
    with torch.no_grad():
        grad = torch.randn_like(way(x))

    def run() -> None:
        x.grad = None
        for module in modules:
            module.zero_grad()
        way(x).backward(grad)

    return run


def _factorized(layer: TTLinear, x: Tensor) -> Tensor:
    left, right, _ = layer.factors()
    return factorized_linears(x, [left], [right], bias=True)[0]


def _show(session: Session, cases: Sequence[Case]) -> None:
    table = Table(caption="milliseconds, measured / predicted", caption_justify="left")
    names = list(cases[0].measured)
    for heading in ("layer", *names, "pairs in order"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for case in cases:
        pairs = case.pairs()
        cells = [
            f"{milliseconds(1e3 * case.measured[n])} / {milliseconds(1e3 * case.predicted[n])}"
            for n in names
        ]
        table.add_row(case.title, *cells, f"{sum(pairs)} of {len(pairs)}")
    session.show_table("candidates of a linear layer, forward + backward", table)
    session.note(summary(cases))
    session.results.append({"cases": [_as_dict(case) for case in cases]})


def summary(cases: Sequence[Case]) -> str:
    """Say how often predicted and measured order agree, and what the planner's choices cost."""
    pairs = [right for case in cases for right in case.pairs()]
    losses = sorted(case.loss() for case in cases)
    exact = sum(loss == 1 for loss in losses)
    share = sum(pairs) / max(1, len(pairs))
    return (
        f"predicted order right for {sum(pairs)} of {len(pairs)} pairs ({share:.0%}) that are "
        f"more than {_APART - 1:.0%} apart; of factorized and reconstructed "
        f"the planner runs the faster one in "
        f"{exact} of {len(losses)} cases and is at most {losses[-1]:.2f}x slower than it"
    )


def _as_dict(case: Case) -> dict[str, Any]:
    return {
        "title": case.title,
        "predicted": dict(case.predicted),
        "measured": dict(case.measured),
    }
