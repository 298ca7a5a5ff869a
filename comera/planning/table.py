"""A plan as text and as HTML: its products, the candidates, and the verdict against dense."""

import html
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from comera.planning.candidate import Candidate
from comera.planning.step import Step

if TYPE_CHECKING:  # a plan prints itself through this file
    from comera.planning.plan import Plan

_WIDTH = 100

_STEP_HEADER = ("pass", "step", "what", "operations", "bytes", "time", "share")
_CANDIDATE_HEADER = (
    "candidate", "operations", "time", "time / dense", "saved", "peak", "peak / dense"
)  # fmt: skip


def plan_text(plan: "Plan") -> str:
    """Two tables and the verdict, at most 100 columns wide."""
    parts = [
        f"{plan.title}\n{_setting(plan)}",
        _text(f"{plan.chosen.name}, step by step", _STEP_HEADER, _step_rows(plan), left=3),
        _text("candidates", _CANDIDATE_HEADER, _candidate_rows(plan), left=1),
        "\n".join(verdict(plan)),
    ]
    return "\n".join(parts)


def plan_html(plan: "Plan") -> str:
    """The same for a notebook."""
    return "".join(
        [
            f"<p>{html.escape(plan.title)}<br>{html.escape(_setting(plan))}</p>",
            table_html(_STEP_HEADER, _step_rows(plan), caption=f"{plan.chosen.name}, step by step"),
            table_html(_CANDIDATE_HEADER, _candidate_rows(plan), caption="candidates"),
            f"<p>{'<br>'.join(map(html.escape, verdict(plan)))}</p>",
        ]
    )


def verdict(plan: "Plan") -> list[str]:
    """Lines that compare the chosen candidate with the dense layer and with the best tree."""
    lines = [
        f"against {plan.dense.name}: {plan.time_ratio:.2f}x the time "
        f"({show_seconds(plan.chosen.seconds)} for {show_seconds(plan.dense.seconds)}), "
        f"{plan.memory_ratio:.2f}x the memory "
        f"({show_bytes(plan.chosen.peak_bytes)} for {show_bytes(plan.dense.peak_bytes)})"
    ]
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


def show_count(number: float) -> str:
    """A count with three digits and a unit: ``94.4M``."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def show_bytes(number: float) -> str:
    """Bytes with three digits and a unit: ``12.1 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def show_seconds(number: float) -> str:
    """A duration with three digits and a unit: ``1.35 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number / 1e-6:.3g} us"


def _setting(plan: "Plan") -> str:
    return f"{plan.tokens} tokens, {plan.dtype}, {plan.machine.title}"


def _step_rows(plan: "Plan") -> Iterable[tuple[str, ...]]:
    total = plan.chosen.seconds
    for name, steps in (("forward", plan.chosen.forward), ("backward", plan.chosen.backward)):
        for step in steps:
            yield (name, *_step_cells(plan, step, total))


def _step_cells(plan: "Plan", step: Step, total: float) -> tuple[str, ...]:
    seconds = step.seconds(plan.machine, plan.dtype)
    return (
        step.label,
        step.what,
        show_count(step.operations),
        show_bytes(step.bytes(plan.dtype)),
        show_seconds(seconds),
        f"{seconds / total:.0%}",
    )


def _candidate_rows(plan: "Plan") -> Iterable[tuple[str, ...]]:
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


def _text(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]], left: int) -> str:
    table = Table(title=title)
    for k, name in enumerate(header):
        table.add_column(
            name,
            justify="left" if k < left else "right",
            no_wrap=k >= left,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, markup=False).print(table)
    return out.getvalue().rstrip()


def table_html(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", note: str = ""
) -> str:
    """A plain HTML table for notebooks; all text is escaped, line breaks of the note kept."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    caption = caption and f"<caption>{html.escape(caption)}</caption>"
    note = note and f"<p>{html.escape(note)}</p>".replace("\n", "<br>")
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
