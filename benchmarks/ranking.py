"""Measure all ways to compute a layer, and whether the planner's order is right.

All combinations of widths, ranks and tokens are measured; on Ctrl-C those that are there are shown.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.linear import forward_backward, make_input, make_layers
from benchmarks.session import Session, add_repeats, add_several, tuple_of
from benchmarks.timing import milliseconds
from comera.ops.linear.tt_linear import factorized_linears, reconstructed_linear
from comera.planning.planner import plan_linear

_WAYS = ("factorized", "reconstructed", "nn.Linear")
_APART = 1.15
"""Medians closer than this are even: neither order would be wrong."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    widths = [(256, 256), (768, 768), (768, 3072), (2048, 512)]
    add_several(
        parser, "--widths", widths, "Pairs of input and output width.", tuple_of(2, "768:3072"),
        "IN:OUT",
    )  # fmt: skip
    add_several(parser, "--rank", [8, 32, 128, 512], "Bounds on the ranks.")
    add_several(parser, "--tokens", [8, 128, 2048], "Numbers of rows of a batch.")
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Measure all candidates and nn.Linear on a grid."""
    cases: list[Case] = []

    def rows() -> Iterator[tuple[str, ...]]:
        for given in itertools.product(options.widths, options.rank, options.tokens):
            case = _measure(session, *given)
            cases.append(case)
            pairs = case.pairs()
            times = [
                f"{milliseconds(1e3 * case.measured[way])} / "
                f"{milliseconds(1e3 * case.predicted[way])}"
                for way in _WAYS
            ]
            yield case.title, *times, f"{sum(pairs)} of {len(pairs)}"

    columns = {"layer": "", **dict.fromkeys(_WAYS, ">"), "pairs in order": ">"}
    title = "candidates of a linear layer, forward + backward"
    try:
        session.table(title, columns, rows(), "milliseconds, measured / predicted")
    finally:
        if cases:
            session.note(summary(cases))
            session.results.append({"cases": [vars(case) for case in cases]})


@dataclass(frozen=True)
class Case:
    """One layer at one batch: predicted and measured seconds of every way to compute it."""

    title: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]

    def pairs(self) -> list[bool]:
        """Return for each pair with measured times apart whether the predicted order is right."""
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


def _measure(session: Session, shape: tuple[int, int], rank: int, tokens: int) -> Case:
    layer, dense = make_layers(session, shape, rank, torch.float32)
    x = make_input(session, tokens, shape[0], torch.float32)
    plan = plan_linear(layer.at(tokens), **layer.planner_setting())

    def factorized(x: Tensor) -> Tensor:
        left, right, _ = layer.factors()
        return factorized_linears(x, [left], [right], bias=True)[0]

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "factorized": factorized,
        "reconstructed": lambda x: reconstructed_linear(x, layer.factors()),
        "nn.Linear": dense,
    }
    torch.testing.assert_close(ways["reconstructed"](x), factorized(x), rtol=1e-3, atol=1e-4)
    title = f"{shape[0]} -> {shape[1]}, rank {rank}, {tokens} tokens"
    runs = {name: forward_backward(way, x, layer, dense) for name, way in ways.items()}
    timings = session.time(title, runs, "nn.Linear")
    predicted = {name: plan.candidate(name).seconds for name in _WAYS[:-1]}
    predicted["nn.Linear"] = plan.dense.seconds
    return Case(title, predicted, {name: timings.median(name) for name in runs})


def summary(cases: Sequence[Case]) -> str:
    """Return a line: how often the order is right, and what the planner's choices cost."""
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
