"""Operators that have CUDA kernels, beside plain torch and the least time they could take.

Every one is timed over several inputs in turn, so that none is found in a cache, and on a GPU as a
CUDA graph of all of them. The floor is what reading and writing each number once takes, or the
arithmetic if that is more, on the machine's profile.

Shape suffixes: N = entries, V = left and W = right part of a row's number, P and Q = left and right
part of the width, R = bond between the factors, M = tokens, I = width in, O = width out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.feed_forward_cases import feed_forwards, gated_feed_forwards
from benchmarks.kernel_case import Case, both_ways
from benchmarks.numerics import compare
from benchmarks.session import Session, machine_facts, machine_line
from comera.calibrate.in_turn import copies_of, in_turn
from comera.files import replacing
from comera.nn.batched_contraction import BatchedContraction
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.ops.attention import attend
from comera.ops.context import machine_of, static_shapes
from comera.ops.cores import contract_chain
from comera.ops.linear.tt_linear import factorized_linears
from comera.ops.table.distinct_rows import TableFactors
from comera.ops.table.table_factors import contract_table
from comera.ops.table.tt_embedding import ROWS
from comera.planning.machine import Machine

OPERATORS = ("contract", "lookup", "linear", "feed_forward", "gated", "attend")

GROUPS = {
    "contract": "contract_cores",
    "lookup": "lookup",
    "feed_forward": "feed_forward",
    "gated": "gated_feed_forward",
    "attend": "attend",
}
"""Groups of ways, as ``comera.ops.dispatch`` has them, by operator; linear layers have one way."""

_OURS, _PLAIN = "comera", "plain torch"
_TABLE_MODES = {(30522, 768): [[16, 20, 10, 10], [4, 4, 8, 6]]}


@dataclass(frozen=True)
class Row:
    """Seconds of one case."""

    title: str
    ours: float
    plain: float
    floor: float

    def cells(self) -> list[str]:
        """Return microseconds and ratios for a table."""
        times = [f"{1e6 * seconds:,.1f}" for seconds in (self.ours, self.plain)]
        ratios = [f"{self.plain / self.ours:.2f}", f"{self.ours / self.floor:.2f}"]
        return [self.title, *times, ratios[0], f"{1e6 * self.floor:,.1f}", ratios[1]]


HEADINGS = ["", "comera µs", "plain µs", "plain / comera", "floor µs", "comera / floor"]


def kernels(
    session: Session,
    operators: Sequence[str],
    tokens: Sequence[int],
    indices: Sequence[int],
    widths: Sequence[tuple[int, int]],
    rank: int,
    layers: int,
    table: tuple[int, int],
    dtype: torch.dtype,
    markdown: Path | None,
) -> list[Row]:
    """Time operators and say how far they are from their floors.

    Args:
        session: Where to run.
        operators: Some of ``OPERATORS``.
        tokens: Sizes of the batches of linear layers.
        indices: Numbers of indices of lookups, drawn evenly.
        widths: Input and output widths of linear layers.
        rank: Rank of all tensor trains.
        layers: Layers of each of the widths, whose factors are contracted together.
        table: Rows and width of the table.
        dtype: Dtype of everything.
        markdown: A file for the table, dated.
    """
    rows = []
    with static_shapes():  # as in a captured step
        for case in cases(
            session.device, operators, tokens, indices, widths, rank, layers, table, dtype
        ):
            rows.append(_measure(session, case, dtype))
    shown = Table(caption="floor: each number read and written once, or the arithmetic")
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row.cells())
    session.show_table("operators, each over several inputs in turn", shown)
    if markdown is not None:
        _write(session, rows, dtype, markdown)
    return rows


def cases(
    device: torch.device,
    operators: Sequence[str],
    tokens: Sequence[int],
    indices: Sequence[int],
    widths: Sequence[tuple[int, int]],
    rank: int,
    layers: int,
    table: tuple[int, int],
    dtype: torch.dtype,
) -> Iterator[Case]:
    """Make the cases of :func:`kernels`, one after the other."""
    torch.manual_seed(0)
    made = {
        "contract": lambda: _contractions(device, dtype, widths, rank, layers),
        "lookup": lambda: _lookups(device, dtype, indices, table, rank),
        "linear": lambda: _linears(device, dtype, tokens, widths, rank),
        "feed_forward": lambda: feed_forwards(device, dtype, tokens, widths, rank),
        "gated": lambda: gated_feed_forwards(device, dtype, tokens, widths, rank),
        "attend": lambda: _attentions(device, dtype, tokens, rank),
    }
    for name in operators:
        yield from made[name]()


def floor_of(case: Case, machine: Machine, dtype: torch.dtype) -> float:
    """Return the least seconds a case can take: moving its numbers, or its arithmetic."""
    arithmetic = case.flops / machine.rate(str(dtype).removeprefix("torch."))
    return max(case.nbytes / machine.bandwidth, arithmetic)


def _measure(session: Session, case: Case, dtype: torch.dtype) -> Row:
    pairs = zip(case.ours(0), case.plain(0), strict=True)
    compared = {f"result {k}": pair for k, pair in enumerate(pairs)}
    session.check(compare(case.title, compared, dtype, _PLAIN))
    runs = {
        name: in_turn([lambda k=k, run=run: run(k) for k in range(case.copies)], session.device)  # type: ignore[misc]
        for name, run in ((_OURS, case.ours), (_PLAIN, case.plain))
    }
    timings = session.time(case.title, runs, _PLAIN)
    for name in runs:
        each = [seconds / case.copies for seconds in timings.seconds[name]]
        timings = timings.with_seconds(name, each)
    floor = floor_of(case, machine_of(session.device), dtype)
    row = Row(case.title, timings.median(_OURS), timings.median(_PLAIN), floor)
    session.results.append({"title": case.title, **timings.as_dict(), "floor": floor})
    return row


def _write(session: Session, rows: Sequence[Row], dtype: torch.dtype, path: Path) -> None:
    facts = machine_facts(session.device, session.kept)
    lines = [
        f"# Operators beside plain torch, {facts['date']}",
        "",
        machine_line(facts, str(dtype).removeprefix("torch.")),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    session.print(f"wrote {path}")


def _contractions(
    device: torch.device, dtype: torch.dtype, widths: Sequence[tuple[int, int]], rank: int,
    layers: int,
) -> Iterator[Case]:  # fmt: skip
    """Make cases of all layers of a model, whose cores are in the cache in a step, too."""
    model = torch.nn.ModuleList(
        TTLinear(*pair, rank=rank, device=device, dtype=dtype)
        for pair in widths
        for _ in range(layers)
    )
    trains: list[TTLinear] = list(model)  # type: ignore[arg-type]
    together = BatchedContraction(model)

    def ours(_: int) -> list[Tensor]:
        with together:
            return [factor for layer in trains for factor in layer.factors()[:2]]

    def plain(_: int) -> list[Tensor]:
        found = []
        for layer, left_IR in zip(trains, lefts, strict=True):
            split, cores = layer.shape.split, list(layer.cores)
            gates, below = list(layer.gates), layer.prune_below
            left = contract_chain(cores[:split], gates[:split], below)[0]
            right = contract_chain(cores[split:], gates[split:], below)[..., 0]
            # Factors as the operator makes them: padded to its bond, the bias the last row.
            padding = left_IR.shape[1] - left.shape[1] - 1
            assert layer.bias is not None
            bias = layer.bias[None]
            found += [
                F.pad(left, (0, padding + 1)),
                torch.cat([F.pad(right, (0, 0, 0, padding)), bias]),
            ]
        return found

    with torch.no_grad():
        factors = ours(0)
    lefts = factors[::2]
    params = list(model.parameters())
    once = sum(t.numel() * t.element_size() for t in (*params, *factors))
    flops = 2 * sum(factor.numel() for factor in factors) * rank
    yield from both_ways(
        f"contract the cores of {len(trains)} layers, rank {rank}", (ours, plain),
        lambda k: params, 1, (once, 3 * once), (flops, 3 * flops),
    )  # fmt: skip


def _lookups(
    device: torch.device, dtype: torch.dtype, indices: Sequence[int], table: tuple[int, int],
    rank: int,
) -> Iterator[Case]:  # fmt: skip
    """Make cases beside the plain way to read a tensor train: gather slices, then one einsum."""
    rows, width = table
    layer = TTEmbedding(
        rows, width, rank=rank, shape=_TABLE_MODES.get(table), device=device, dtype=dtype
    )
    with torch.no_grad():
        factors = contract_table(list(layer.cores))
    left_VPR, right_WRQ = (factor.detach().requires_grad_() for factor in factors)
    table_factors = TableFactors(left_VPR, right_WRQ, None, None)
    (_, P, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape
    for count in indices:
        nbytes = count * width * dtype.itemsize
        copies = copies_of(device, nbytes)
        picked = [torch.randint(0, rows, (count,)).to(device) for _ in range(copies)]

        def ours(k: int, picked: list[Tensor] = picked) -> list[Tensor]:
            return [ROWS(picked[k], table_factors, None, None, rows, width, True)]

        def plain(k: int, picked: list[Tensor] = picked) -> list[Tensor]:
            left_NPR, right_NRQ = left_VPR[picked[k] // W], right_WRQ[picked[k] % W]
            return [torch.einsum("npr,nrq->npq", left_NPR, right_NRQ).flatten(1)[:, :width]]

        factor_bytes = (left_VPR.numel() + right_WRQ.numel()) * dtype.itemsize
        flops = 2 * count * P * Q * R
        yield from both_ways(
            f"look up {count:,} rows of {rows:,} x {width}, rank {rank}", (ours, plain),
            lambda k: [left_VPR, right_WRQ], copies,
            (nbytes + factor_bytes, 2 * nbytes + 3 * factor_bytes), (flops, 3 * flops),
        )  # fmt: skip


def _linears(
    device: torch.device, dtype: torch.dtype, tokens: Sequence[int],
    widths: Sequence[tuple[int, int]], rank: int,
) -> Iterator[Case]:  # fmt: skip
    """Make cases beside two linear layers of torch's."""
    for count in tokens:
        for I, O in widths:  # noqa: E741
            layer = TTLinear(I, O, rank=rank, device=device, dtype=dtype)
            with torch.no_grad():
                factors = layer.factors()[:2]
            left_IR, right_RO = (factor.detach().requires_grad_() for factor in factors)
            nbytes = count * (I + O) * dtype.itemsize
            copies = copies_of(device, nbytes)
            xs = [
                torch.randn(count, I, device=device, dtype=dtype).requires_grad_()
                for _ in range(copies)
            ]

            def ours(k: int, xs=xs, left_IR=left_IR, right_RO=right_RO) -> list[Tensor]:
                return factorized_linears(xs[k], [left_IR], [right_RO], True)

            def plain(k: int, xs=xs, left_IR=left_IR, right_RO=right_RO) -> list[Tensor]:
                return [F.linear(F.linear(xs[k], left_IR.T), right_RO.T, right_RO[-1])]

            def inputs(k: int, xs=xs, left_IR=left_IR, right_RO=right_RO) -> list[Tensor]:
                return [xs[k], left_IR, right_RO]

            backward = count * (O + 2 * I) * dtype.itemsize
            flops = 2 * count * rank * (I + O)
            yield from both_ways(
                f"linear {I} -> {O}, rank {rank}, {count:,} tokens", (ours, plain), inputs, copies,
                (nbytes, nbytes + backward), (flops, 3 * flops),
            )  # fmt: skip


_HEADS, _POSITIONS = 12, 128


def _attentions(
    device: torch.device, dtype: torch.dtype, tokens: Sequence[int], rank: int
) -> Iterator[Case]:
    """Make cases of 12 heads that share keys of the width of a rank, beside keys that are copied.

    Shape suffixes: B = batch, H = heads, M = positions, R = rank.
    """
    rank = -(-rank // 8) * 8
    for count in tokens:
        batch, positions = max(1, count // _POSITIONS), min(count, _POSITIONS)
        nbytes = 2 * (_HEADS + 1) * batch * positions * rank * dtype.itemsize
        copies = copies_of(device, nbytes)

        def drawn(heads: int, batch: int = batch, positions: int = positions) -> Tensor:
            x_BHMR = torch.randn(batch, heads, positions, rank).to(device, dtype)
            return x_BHMR.requires_grad_()

        trios = [[drawn(_HEADS), drawn(1), drawn(1)] for _ in range(copies)]

        def ours(k: int, trios: list[list[Tensor]] = trios) -> list[Tensor]:
            q, key, value = trios[k]
            return [attend(q, key, value, None, rank**-0.5, 0.0)]

        def plain(k: int, trios: list[list[Tensor]] = trios) -> list[Tensor]:
            q, key, value = trios[k]
            key, value = (x.repeat(1, _HEADS, 1, 1) for x in (key, value))
            return [F.scaled_dot_product_attention(q, key, value, scale=rank**-0.5)]

        def inputs(k: int, trios: list[list[Tensor]] = trios) -> list[Tensor]:
            return trios[k]

        flops = 4 * batch * _HEADS * positions**2 * rank
        yield from both_ways(
            f"attend with {_HEADS} heads on shared keys of {rank}, {batch} x {positions}",
            (ours, plain), inputs, copies, (nbytes, 3 * nbytes), (flops, 3.5 * flops),
        )  # fmt: skip
