"""What is predicted of one layer at one batch: the ways to compute it, timed, and against dense."""

import html
from collections.abc import Iterable
from dataclasses import dataclass

from comera.planning.candidate import Candidate
from comera.planning.contraction import Schedule
from comera.planning.machine import Machine
from comera.planning.operation import Step
from comera.planning.printing import show_bytes, show_count, show_seconds, table_html
from comera.planning.text_table import text_table

_STEP_HEADER = ("pass", "step", "what", "operations", "bytes", "time", "share")
_CANDIDATE_HEADER = (
    "candidate", "operations", "time", "time / dense", "saved", "peak", "peak / dense"
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Plan:
    """The candidates of one layer at one batch on one machine; prints itself, also in Jupyter.

    Attributes:
        title: The layer in words.
        tokens: Rows or indices in the batch.
        dtype: Dtype of all numbers.
        machine: The machine on which times are predicted.
        candidates: The ways to compute the layer, fastest first by prediction.
        runs: Names of those that the layer has code for; the others are there for comparison.
        dense: The torch layer it replaces.
        search: The tree with the fewest operations, forward and all gradients planned together;
            the candidate ``sequential`` follows it. None for a layer whose weight has vanished.
        eager: On a GPU, where all else is of a captured step, the plan of eager mode; else None.
    """

    title: str
    tokens: int
    dtype: str
    machine: Machine
    candidates: tuple[Candidate, ...]
    runs: tuple[str, ...]
    dense: Candidate
    search: Schedule | None
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

    def __str__(self) -> str:
        """Lay out two tables and the verdict, as wide as the terminal at most."""
        steps, candidates = _step_rows(self), _candidate_rows(self)
        return "\n".join(
            [
                f"{self.title}\n{_setting(self)}",
                text_table(
                    f"{self.chosen.name}, step by step",
                    _STEP_HEADER,
                    steps,
                    left=range(3),
                    spare=[_STEP_HEADER.index("bytes")],
                ),
                text_table("candidates", _CANDIDATE_HEADER, candidates),
                *verdict(self),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Lay out both tables and the verdict for a notebook."""
        chosen = f"{self.chosen.name}, step by step"
        return "".join(
            [
                f"<p>{html.escape(self.title)}<br>{html.escape(_setting(self))}</p>",
                table_html(_STEP_HEADER, _step_rows(self), caption=chosen),
                table_html(_CANDIDATE_HEADER, _candidate_rows(self), caption="candidates"),
                f"<p>{'<br>'.join(map(html.escape, verdict(self)))}</p>",
            ]
        )


def verdict(plan: Plan) -> list[str]:
    """Compare the chosen candidate with the dense layer and with the best tree, in a few lines."""
    lines = [
        f"against {plan.dense.name}{' in a captured step' if plan.eager else ''}: {_times(plan)}, "
        f"{plan.memory_ratio:.2f}x the memory "
        f"({show_bytes(plan.chosen.peak_bytes)} for {show_bytes(plan.dense.peak_bytes)})"
    ]
    if plan.eager is not None:
        lines.append(f"in eager mode: {_times(plan.eager)}")
        lines.append(f"the fastest: captured {plan.winner}, eager {plan.eager.winner}")
    if plan.search is not None:
        side = "more" if plan.excess >= 0 else "fewer"
        lines.append(
            f"best tree by operations: {show_count(plan.search.operations)}; {plan.chosen.name} "
            f"takes {abs(plan.excess):.1%} {side}"
        )
        if plan.search.gradients:
            separate = plan.search.separate_operations
            lines.append(
                f"each gradient planned by itself: {show_count(separate)}, "
                f"{separate / plan.search.operations:.2f}x"
            )
    return lines


def _times(plan: Plan) -> str:
    return (
        f"{plan.time_ratio:.2f}x the time "
        f"({show_seconds(plan.chosen.seconds)} for {show_seconds(plan.dense.seconds)})"
    )


def _setting(plan: Plan) -> str:
    return f"{plan.tokens} tokens, {plan.dtype}, {plan.machine.title}"


def _step_rows(plan: Plan) -> Iterable[tuple[str, ...]]:
    total = plan.chosen.seconds
    for name, steps in (("forward", plan.chosen.forward), ("backward", plan.chosen.backward)):
        for step in steps:
            yield (name, *_step_cells(plan, step, total))


def _step_cells(plan: Plan, step: Step, total: float) -> tuple[str, ...]:
    seconds = step.seconds(plan.machine, plan.dtype)
    return (
        step.label,
        step.what,
        show_count(step.operations),
        show_bytes(step.bytes(plan.dtype)),
        show_seconds(seconds),
        f"{seconds / total:.0%}",
    )


def _candidate_rows(plan: Plan) -> Iterable[tuple[str, ...]]:
    for one in (*plan.candidates, plan.dense):
        note = " (chosen)" if one is plan.chosen else ""
        if one is not plan.dense and one.name not in plan.runs:
            note = " (not run)"
        name = one.name + note
        yield (name, *_candidate_cells(one, plan.dense))


def _candidate_cells(one: Candidate, dense: Candidate) -> tuple[str, ...]:
    return (
        show_count(one.operations),
        show_seconds(one.seconds),
        f"{one.seconds / dense.seconds:.2f}x",
        show_bytes(one.saved_bytes),
        show_bytes(one.peak_bytes),
        f"{one.peak_bytes / dense.peak_bytes:.2f}x",
    )
