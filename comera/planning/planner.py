"""Plan a layer at a batch size: predict the time of each way to compute it and of the dense layer.

Results are cached. All functions raise ValueError if the machine has no rate for ``dtype``:
``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from comera.planning import ways
from comera.planning.candidate import Candidate, factor_chains
from comera.planning.machine import Machine
from comera.planning.printing import Report, Table, show_bytes, show_count, show_seconds
from comera.planning.ways import Layer, Lookup
from comera.shapes import LinearShape, TTMShape, TTShape

_CACHED = 1024


@dataclass(frozen=True)
class Suggestion:
    """Another ``shape`` that is predicted to be faster than the dense layer.

    ``change`` is as one would type it: ``"rank=24"``; ``time_ratio`` is over dense's time.
    """

    shape: LinearShape
    change: str
    time_ratio: float


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """The candidates to compute one layer at one batch size on one machine; prints as a table.

    The ``candidates`` are the ways to compute the layer, fastest first by prediction, and ``dense``
    is the torch layer that it replaces. On a GPU all is for a captured step, and ``eager`` is the
    plan in eager mode.
    """

    layer: Layer | Lookup
    dtype: str
    machine: Machine
    candidates: tuple[Candidate, ...]
    dense: Candidate
    eager: "Plan | None" = None

    @property
    def chosen(self) -> Candidate:
        """The candidate predicted to be fastest."""
        return self.candidates[0]

    @property
    def time_ratio(self) -> float:
        """Predicted time of the chosen candidate over the dense layer's; below 1 is faster."""
        return self.chosen.seconds / self.dense.seconds

    @property
    def winner(self) -> str:
        """Name of the faster of two: the chosen candidate or the dense layer."""
        return self.chosen.name if self.time_ratio < 1 else self.dense.name

    @property
    def memory_ratio(self) -> float:
        """Peak memory of the chosen candidate divided by the dense layer's."""
        return self.chosen.peak_bytes / self.dense.peak_bytes

    @property
    def eager_ratio(self) -> float | None:
        """:attr:`time_ratio` in eager mode on a GPU; None on a CPU, which has one mode."""
        return None if self.eager is None else self.eager.time_ratio

    @property
    def worst_ratio(self) -> float:
        """The largest of the ratios of time, of time in eager mode, and of memory."""
        return max(self.time_ratio, self.memory_ratio, self.eager_ratio or 0.0)

    @functools.cached_property
    def suggestion(self) -> Suggestion | None:
        """A shape faster than nn.Linear; None if the present shape is faster, or no shape is."""
        if self.time_ratio <= 1 or isinstance(self.layer, Lookup):
            return None
        return suggest(self.layer, machine=self.machine, dtype=self.dtype)

    @property
    def heading(self) -> str:  # type: ignore[override]
        return f"{self.layer}\n{self.layer.tokens} tokens, {self.dtype}, {self.machine.title}"

    def tables(self) -> list[Table]:
        """Return a table of the steps of the chosen candidate, and a table of all candidates."""
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
                one.name + " (chosen)" * (one is self.chosen),
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

    def summary(self) -> str:
        """Return lines that compare the chosen candidate with the dense layer."""
        memory = show_bytes(self.chosen.peak_bytes), show_bytes(self.dense.peak_bytes)
        lines = [
            f"against {self.dense.name}{' in a captured step' if self.eager else ''}: "
            f"{self._times()}, {self.memory_ratio:.2f}x the memory ({memory[0]} for {memory[1]})"
        ]
        if isinstance(self.layer.shape, TTShape | TTMShape):
            chains = factor_chains(self.layer.shape)
            found = sum(step.operations for chain in chains for step in chain.forward)
            usual = sum(chain.outermost_first for chain in chains)
            if found < usual:
                counts = show_count(found), show_count(usual)
                lines.append(
                    "cores contracted in {} operations, outermost first in {}".format(*counts)
                )
        if self.eager is not None:
            lines.append(f"in eager mode: {self.eager._times()}")
            lines.append(f"the fastest: captured {self.winner}, eager {self.eager.winner}")
        return "\n".join(lines)

    def sentence(self) -> str:
        """Compare the layer with torch's, and name a shape that would be faster."""
        text = f"{self.time_ratio:.2g}x the time of {self.dense.name} "
        if self.eager_ratio is not None:
            text += f"in a captured step, {self.eager_ratio:.2g}x in eager mode, "
        text += f"and {self.memory_ratio:.2g}x its memory"
        if self.suggestion is not None:
            return f"{text} ({self.suggestion.change}: {self.suggestion.time_ratio:.2g}x)"
        if self.time_ratio > 1 and isinstance(self.layer, Layer):
            none = "rank or order" if self.layer.shape.orders else "rank"
            return f"{text} (no {none} is faster)"
        if self.time_ratio <= 1 and (self.eager_ratio or 0.0) > 1:
            return f"{text} (comera.TrainStep captures the step)"
        return text

    def _times(self) -> str:
        ours, dense = show_seconds(self.chosen.seconds), show_seconds(self.dense.seconds)
        return f"{self.time_ratio:.2f}x the time ({ours} for {dense})"


@functools.lru_cache(_CACHED)
def plan_layer(layer: Layer | Lookup, *, machine: Machine, dtype: str = "float32") -> Plan:
    """Plan a layer or lookups at a batch size; on a GPU for captured steps and for eager mode."""
    machine.rate(dtype)
    made = ways.candidates(layer, machine, dtype)
    if isinstance(layer, Lookup):
        dense = ways.torch_embedding(layer, machine, dtype)
    else:
        dense = ways.torch_linear(layer, machine, dtype)
    eager = plan_layer(layer, machine=machine.eager, dtype=dtype) if machine.eager else None
    made.sort(key=lambda one: one.seconds)  # of equals the first listed
    return Plan(layer, dtype, machine, tuple(made), dense, eager)


@functools.lru_cache(_CACHED)
def suggest(layer: Layer, *, machine: Machine, dtype: str = "float32") -> Suggestion | None:
    """Find the largest rank at which a tensor train or blocks beat nn.Linear at a batch.

    The search tries the modes of ``shape`` with one bound on all bonds; if no rank is fast enough,
    balanced modes of other orders, fewest cores first; those of blocks stay. Returns None if
    nn.Linear is fastest.
    """
    machine.rate(dtype)
    shape = layer.shape

    def ratio(shape: LinearShape) -> float:
        return plan_layer(replace(layer, shape=shape), machine=machine, dtype=dtype).time_ratio

    kept = shape.with_rank(1)
    shapes = {"": kept}
    for order in shape.orders:
        fitted = TTShape.fit(layer.in_features, layer.out_features, order=order, rank=1)
        if fitted != kept:
            shapes[f"order={order}, "] = fitted
    for change, each in shapes.items():

        def slower(rank: int, each: LinearShape = each) -> bool:
            return ratio(each.with_rank(rank)) >= 1

        if not slower(1):
            widest = max(each.max_ranks)
            rank = _first_where(slower, widest) - 1 if slower(widest) else widest
            best = each.with_rank(rank)
            return Suggestion(best, f"{change}rank={rank}", ratio(best))
    return None


def _first_where(holds: Callable[[int], bool], most: int) -> int:
    """Find the smallest number for which ``holds``, which is monotonic and true at ``most``."""
    high = 1
    while high < most and not holds(high):
        high *= 2
    low, high = high // 2, min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
