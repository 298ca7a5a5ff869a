"""The plan of a layer at a batch: the ways to compute it, timed, and compared with the dense layer.

:func:`break_even` compares one linear layer with ``nn.Linear``, and :func:`suggest` searches a rank
at which it would be faster.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from comera.planning import linear_ways, lookup_ways
from comera.planning.candidate import Candidate
from comera.planning.contraction import Search
from comera.planning.linear_ways import factorized, reconstructed, torch_linear
from comera.planning.lookup_ways import Lookup, torch_embedding
from comera.planning.machine import Machine, load_machine
from comera.planning.printing import Report, Table, show_bytes, show_count, show_seconds
from comera.planning.products import Layer, first_where
from comera.shapes import BTTShape, LinearShape, TTShape

_KEPT = 1024
"""Plans that are cached."""


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """The candidates of one layer at one batch on one machine; prints itself, also in Jupyter.

    Attributes:
        title: The layer in words.
        tokens: Rows or indices in the batch.
        dtype: Dtype of all numbers.
        machine: The machine on which times are predicted.
        candidates: The ways to compute the layer, fastest first by prediction.
        runs: Names of those that the layer has code for; the others are there for comparison.
        dense: The torch layer it replaces.
        search: The contraction tree with the fewest operations, forward and all gradients planned
            together. None for blocks, and for a layer whose weight has vanished.
        eager: On a GPU, where all else is of a captured step, the plan of eager mode; else None.
    """

    title: str
    tokens: int
    dtype: str
    machine: Machine
    candidates: tuple[Candidate, ...]
    runs: frozenset[str]
    dense: Candidate
    search: Search | None
    eager: "Plan | None" = None

    @property
    def chosen(self) -> Candidate:
        """The fastest by prediction of those that the layer runs."""
        return next(one for one in self.candidates if one.name in self.runs)

    @property
    def time_ratio(self) -> float:
        """Predicted time of the chosen candidate in units of the dense layer's; below 1 wins."""
        return self.chosen.seconds / self.dense.seconds

    @property
    def winner(self) -> str:
        """Name what is predicted to be the fastest: the chosen candidate, or the dense layer."""
        return self.chosen.name if self.time_ratio < 1 else self.dense.name

    @property
    def memory_ratio(self) -> float:
        """Most memory held at once by the chosen candidate, in units of the dense layer's."""
        return self.chosen.peak_bytes / self.dense.peak_bytes

    @property
    def excess(self) -> float:
        """Operations of the chosen candidate above those of the best tree, as a share of these.

        Negative where modes multiply to more than a width (the tree works on the padded ones),
        and where rows of a table share their factors (the tree makes each row by itself).
        """
        if self.search is None:
            return 0.0
        return self.chosen.operations / self.search.operations - 1

    def candidate(self, name: str) -> Candidate:
        """Return the candidate of that name.

        Raises:
            ValueError: If there is none.
        """
        for one in self.candidates:
            if one.name == name:
                return one
        known = ", ".join(repr(one.name) for one in self.candidates)
        raise ValueError(f"{name!r} is no candidate of this plan; it must be one of {known}")

    @property
    def heading(self) -> str:  # type: ignore[override]
        return f"{self.title}\n{self.tokens} tokens, {self.dtype}, {self.machine.title}"

    def tables(self) -> list[Table]:
        """Return the steps of the chosen candidate, and all candidates."""
        steps = [
            (
                name,
                step.label,
                step.what,
                show_count(step.operations),
                show_bytes(step.bytes(self.dtype)),
                show_seconds(seconds := step.seconds(self.machine, self.dtype)),
                f"{seconds / self.chosen.seconds:.0%}",
            )
            for name in ("forward", "backward")
            for step in getattr(self.chosen, name)
        ]
        candidates = [
            (
                one.name + self._note_of(one),
                show_count(one.operations),
                show_seconds(one.seconds),
                f"{one.seconds / self.dense.seconds:.2f}x",
                show_bytes(one.saved_bytes),
                show_bytes(one.peak_bytes),
                f"{one.peak_bytes / self.dense.peak_bytes:.2f}x",
            )
            for one in (*self.candidates, self.dense)
        ]
        return [
            Table(
                f"{self.chosen.name}, step by step",
                ("pass", "step", "what", "operations", "bytes", "time", "share"),
                steps, left=range(3), spare=["bytes"],
            ),
            Table(
                "candidates",
                ("candidate", "operations", "time", "time / dense", "saved", "peak",
                 "peak / dense"),
                candidates,
            ),
        ]  # fmt: skip

    def _note_of(self, one: Candidate) -> str:
        if one is self.chosen:
            return " (chosen)"
        return "" if one is self.dense or one.name in self.runs else " (not run)"

    def summary(self) -> str:
        """Compare the chosen candidate with the dense layer and with the best tree."""
        memory = show_bytes(self.chosen.peak_bytes), show_bytes(self.dense.peak_bytes)
        lines = [
            f"against {self.dense.name}{' in a captured step' if self.eager else ''}: "
            f"{self._times()}, {self.memory_ratio:.2f}x the memory ({memory[0]} for {memory[1]})"
        ]
        if self.eager is not None:
            lines.append(f"in eager mode: {self.eager._times()}")
            lines.append(f"the fastest: captured {self.winner}, eager {self.eager.winner}")
        if self.search is not None:
            side = "more" if self.excess >= 0 else "fewer"
            lines.append(
                f"best tree by operations: {show_count(self.search.operations)}; "
                f"{self.chosen.name} takes {abs(self.excess):.1%} {side}"
            )
            if self.search.gradients:
                separate = self.search.separate_operations
                lines.append(
                    f"each gradient planned by itself: {show_count(separate)}, "
                    f"{separate / self.search.operations:.2f}x"
                )
        return "\n".join(lines)

    def _times(self) -> str:
        ours, dense = show_seconds(self.chosen.seconds), show_seconds(self.dense.seconds)
        return f"{self.time_ratio:.2f}x the time ({ours} for {dense})"


def plan_linear(layer: Layer, *, dtype: str = "float32", machine: Machine | None = None) -> Plan:
    """Plan a linear layer; a second call with equal arguments returns the same plan.

    Args:
        layer: The layer and its batch.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        machine: The machine on which it will run; the profile of this computer's CPU if None.

    Returns:
        The plan; on a GPU that of a captured step, with the plan of eager mode in it.

    Raises:
        ValueError: If the machine has no rate for ``dtype``.
    """
    return _plan(layer, machine or load_machine(), dtype)


def plan_embedding(
    lookup: Lookup, *, dtype: str = "float32", machine: Machine | None = None
) -> Plan:
    """Plan the lookups of a table, as :func:`plan_linear` plans a linear layer."""
    return _plan(lookup, machine or load_machine(), dtype)


@functools.lru_cache(maxsize=_KEPT)
def _plan(layer: Layer | Lookup, machine: Machine, dtype: str) -> Plan:
    machine.rate(dtype)
    if isinstance(layer, Lookup):
        made, runs = lookup_ways.candidates(layer, machine, dtype)
        best, dense = lookup_ways.best_tree(layer), torch_embedding(layer, machine, dtype)
    else:
        made, runs = linear_ways.candidates(layer, machine, dtype)
        best, dense = linear_ways.best_tree(layer), torch_linear(layer, machine, dtype)
    return Plan(
        title=str(layer),
        tokens=layer.tokens,
        dtype=dtype,
        machine=machine,
        candidates=tuple(sorted(made, key=lambda one: one.seconds)),  # of equals the first listed
        runs=frozenset(runs),
        dense=dense,
        search=best,
        eager=None if machine.eager is None else _plan(layer, machine.eager, dtype),
    )


_MOST_ORDER = 4


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
    """Comparison of a tensor train with nn.Linear at a batch; ``str`` gives a sentence or two.

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
