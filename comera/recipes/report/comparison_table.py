"""The table of a sweep: for a terminal, as Markdown, as JSON."""

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from comera.files import replacing
from comera.planning.printing import show_bytes
from comera.recipes.report.comparison import Comparison, Failed, Trained, compare
from comera.train.log import from_json, to_json

_NONE = "–"
_WIDEST = 200


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison for a terminal; its lines are not broken, however narrow that is."""
    header, rows = comparison_cells(comparison)
    table = Table(title=comparison_title(comparison))
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    out = io.StringIO()
    Console(file=out, width=_WIDEST, color_system=None).print(table)
    return out.getvalue().rstrip()


def write_comparison(comparison: Comparison, runs: Sequence[Trained], folder: Path) -> None:
    """Write ``results.json`` and ``results.md`` into the folder of a sweep."""
    facts = {
        "metric": comparison.metric,
        "higher_is_better": comparison.higher_is_better,
        "reference": comparison.reference,
        "tested": comparison.tested,
        "seeds": comparison.seeds,
        "summary": [asdict(row) for row in comparison.rows],
        "runs": [_flat(run) for run in runs],
        "failed": [asdict(run) for run in comparison.failed],
    }
    with replacing(folder / "results.json") as temporary:
        temporary.write_text(to_json(facts, indent=2), encoding="utf-8")
    with replacing(folder / "results.md") as temporary:
        temporary.write_text(_markdown(comparison), encoding="utf-8")


def read_comparison(folder: Path) -> Comparison:
    """Compare again what ``results.json`` in the folder of a sweep lists.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged.
    """
    path = folder / "results.json"
    names = ("variant", "seed", "params", "metrics", "steps", "seconds")
    try:
        facts = from_json(path.read_text(encoding="utf-8"))
        runs = [
            Trained(
                **{name: run[name] for name in names},
                test=run.get("test", {}),
                checkpoint_bytes=run.get("checkpoint_bytes"),
            )
            for run in facts["runs"]
        ]
        variants = [row["variant"] for row in facts["summary"]]
        failed = [Failed(**run) for run in facts.get("failed", ())]
        return compare(runs, variants, facts["seeds"], facts["reference"], facts["metric"], failed)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path} is damaged ({problem!r}): comera sweep FILE writes it again, and trains "
            "nothing that is finished"
        ) from None


def _flat(run: Trained) -> dict[str, Any]:
    facts = asdict(run)
    return {**facts, **facts.pop("more")}


def comparison_title(comparison: Comparison) -> str:
    """Say what is compared, and with which variant."""
    better = "higher" if comparison.higher_is_better else "lower"
    where = " on test data" if comparison.tested else ""
    return f"{comparison.metric}{where} ({better} is better), compared with {comparison.reference}"


def comparison_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table as text."""
    percent = comparison.metric == "accuracy"
    scale, digits = (100, 2) if percent else (1, 4)
    named = f"{comparison.metric}{' %' if percent else ''}"
    header = [
        "variant", "seeds", "parameters", "fewer", f"test {named}" if comparison.tested else named,
        "difference, points" if percent else "difference", "steps", "seconds", "speed a step",
    ]  # fmt: skip
    if comparison.tested:
        header.append(f"dev {named}")
    sizes = [_size(row.checkpoint_bytes) for row in comparison.rows]
    sizes_differ = len(set(sizes)) > 1
    if sizes_differ:
        header.append("a checkpoint")
    rows = []
    for row, size in zip(comparison.rows, sizes, strict=True):
        itself = row.variant == comparison.reference
        rows.append(
            [
                row.variant,
                f"{len(row.seeds)}/{len(comparison.seeds)}",
                f"{row.params:,.0f}",
                _NONE if row.fewer is None else f"{row.fewer:.2f}x",
                _plus_minus(row.mean, row.deviation, scale, f".{digits}f"),
                _NONE
                if itself
                else _plus_minus(row.difference, row.difference_error, scale, f"+.{digits}f"),
                f"{row.steps:,.0f}",
                f"{row.seconds:,.1f}",
                _NONE if row.speed is None else f"{row.speed:.2f}x",
            ]
            + ([] if row.dev_mean is None else [f"{scale * row.dev_mean:.{digits}f}"])
            + ([size] if sizes_differ else [])
        )
    return header, rows


def _size(number: float | None) -> str:
    return _NONE if number is None else show_bytes(number)


def _plus_minus(value: float | None, error: float | None, scale: int, form: str) -> str:
    if value is None:
        return _NONE
    spread = _NONE if error is None else f"{scale * error:{form.removeprefix('+')}}"
    return f"{scale * value:{form}} ± {spread}"


def _markdown(comparison: Comparison) -> str:
    header, rows = comparison_cells(comparison)
    lines = [
        header,
        ["---", *["---:"] * (len(header) - 1)],
        *rows,
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [f"# {comparison_title(comparison)}", table, comparison_note(comparison)]
    if comparison.failed:
        parts += ["Failed:", "\n".join(f"* {run}" for run in comparison.failed)]
    return "\n\n".join(parts) + "\n"


def comparison_note(comparison: Comparison) -> str:
    """Say what is in the columns of the table."""
    seeds = ", ".join(map(str, comparison.seeds))
    note = (
        f"Seeds {seeds}. {comparison.metric}: mean ± sample standard deviation over the finished "
        f"seeds. Difference: to {comparison.reference}, paired by seed, ± its standard error. "
        "Fewer: times fewer parameters than the reference. Seconds: in training steps. Speed: of a "
        "step, against one of the reference with the same seeds. A checkpoint: the mean size "
        "of those kept, the optimizer's state among it."
    )
    if comparison.tested:
        note += (
            " All figures are of test data, but those named dev: they are of the data "
            "that settings and variants may be chosen by."
        )
    return note
