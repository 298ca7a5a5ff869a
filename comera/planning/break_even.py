"""Find where a tensor train stops paying against nn.Linear, and a shape that would pay."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from comera.block_shape import BTTShape
from comera.planning.crossover import first_where
from comera.planning.linear_ways import factorized, reconstructed, torch_linear
from comera.planning.machine import Machine, load_machine
from comera.planning.planner import plan_linear
from comera.planning.products import Layer
from comera.shapes import LinearShape, TTShape

_MOST_ORDER = 4
_KEPT = 1024


@dataclass(frozen=True)
class Suggestion:
    """Another shape that is predicted to be faster than the dense layer.

    Attributes:
        shape: Modes and ranks with the change.
        change: What to change, as one would type it: ``"rank=24"``.
        time_ratio: Predicted time in units of the dense layer's.
    """

    shape: LinearShape
    change: str
    time_ratio: float


@dataclass(frozen=True)
class BreakEven:
    """Whether a tensor train pays at a batch; ``str`` says it in a sentence or two.

    Attributes:
        tokens: Rows of the batch.
        time_ratio: Predicted time in units of nn.Linear's; above 1 loses.
        memory_ratio: The same for the most memory held at once.
        suggestion: A shape that is faster than nn.Linear; None if this one is, or if none is.
        eager_ratio: ``time_ratio`` in eager mode on a GPU, where that is of a captured step; None
            on a CPU, which has one mode.
        blocks: Whether it is a block tensor train.
    """

    tokens: int
    time_ratio: float
    memory_ratio: float
    suggestion: Suggestion | None
    eager_ratio: float | None = None
    blocks: bool = False

    @property
    def loses_time(self) -> bool:
        return self.time_ratio > 1

    @property
    def worst(self) -> float:
        """The largest of all ratios."""
        return max(self.time_ratio, self.memory_ratio, self.eager_ratio or 0.0)

    def __str__(self) -> str:
        kind = "block tensor train" if self.blocks else "tensor train"
        text = f"at {self.tokens} tokens this {kind} takes {self.time_ratio:.2g}x the time "
        text += "of nn.Linear "
        if self.eager_ratio is not None:
            text += f"in a captured step, {self.eager_ratio:.2g}x in eager mode, "
        text += f"and {self.memory_ratio:.2g}x its memory"
        if self.suggestion is not None:
            return f"{text}; {self.suggestion.change} would take {self.suggestion.time_ratio:.2g}x"
        if self.loses_time:
            none = "rank" if self.blocks else "rank or order"
            return f"{text}; no {none} is faster than nn.Linear at this batch"
        if self.eager_ratio is not None and self.eager_ratio > 1:
            return f"{text}: run it in comera.TrainStep, which captures the step"
        return text


def break_even(
    layer: Layer, *, dtype: str = "float32", machine: Machine | None = None
) -> BreakEven:
    """Predict whether a tensor train, computed the faster of its ways, beats nn.Linear at a batch.

    Args:
        layer: The layer and its batch.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        machine: The machine on which it will run; the profile of this computer's CPU if None.

    Raises:
        ValueError: If the machine has no rate for ``dtype``.
    """
    return _break_even(layer, dtype, machine or load_machine())


@functools.lru_cache(maxsize=_KEPT)
def _break_even(layer: Layer, dtype: str, machine: Machine) -> BreakEven:
    plan = plan_linear(layer, dtype=dtype, machine=machine)
    loses = plan.time_ratio > 1
    return BreakEven(
        layer.tokens,
        plan.time_ratio,
        plan.memory_ratio,
        _suggest(layer, dtype, machine) if loses else None,
        None if plan.eager is None else plan.eager.time_ratio,
        isinstance(layer.shape, BTTShape),
    )


def suggest(
    layer: Layer, *, dtype: str = "float32", machine: Machine | None = None
) -> Suggestion | None:
    """Find the largest rank at which a tensor train beats nn.Linear at a batch.

    First the modes of ``shape`` with one bound on all bonds; if no rank of these is fast enough,
    the balanced modes of other orders, fewest cores first. No order of contraction is searched:
    what counts is the faster of multiplying by two factors and by the dense weight.

    Args:
        layer: The layer and its batch.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        machine: The machine on which it will run; the profile of this computer's CPU if None.

    Returns:
        The suggestion, or None if nn.Linear is faster than any of them.

    Raises:
        ValueError: If the machine has no rate for ``dtype``.
    """
    return _suggest(layer, dtype, machine or load_machine())


@functools.lru_cache(maxsize=_KEPT)
def _suggest(layer: Layer, dtype: str, machine: Machine) -> Suggestion | None:
    machine.rate(dtype)
    if isinstance(layer.shape, BTTShape):
        return _suggest_blocks(layer, dtype, machine)
    target = torch_linear(layer, machine, dtype).seconds

    def ratio(shape: TTShape) -> float:
        here = replace(layer, shape=shape)
        return (
            min(way(here, machine, dtype).seconds for way in (factorized, reconstructed)) / target
        )

    assert isinstance(layer.shape, TTShape), "there are two formats"
    kept = replace(layer.shape, ranks=(1,) * len(layer.shape.ranks))
    shapes = {"": kept}
    for order in range(1, _MOST_ORDER + 1):
        other = TTShape.fit(layer.in_features, layer.out_features, order=order, rank=1)
        if other != kept:
            shapes[f"order={order}, "] = other
    for change, shape in shapes.items():
        if ratio(shape.with_rank(1)) >= 1:
            continue
        widest = max(shape.max_ranks)
        slower = functools.partial(_slower, shape, ratio)
        rank = widest if not slower(widest) else first_where(slower, widest) - 1
        best = shape.with_rank(rank)
        return Suggestion(best, f"{change}rank={rank}", ratio(best))
    return None


def _suggest_blocks(layer: Layer, dtype: str, machine: Machine) -> Suggestion | None:
    """Find the largest rank of the blocks at which a block tensor train beats nn.Linear."""
    for rank in range(layer.shape.max_ranks[0], 0, -1):
        shape = layer.shape.with_rank(rank)
        found = plan_linear(replace(layer, shape=shape), dtype=dtype, machine=machine)
        if found.time_ratio < 1:
            return Suggestion(shape, f"rank={rank}", found.time_ratio)
    return None


def _slower(shape: TTShape, ratio: Callable[[TTShape], float], rank: int) -> bool:
    return ratio(shape.with_rank(rank)) >= 1
