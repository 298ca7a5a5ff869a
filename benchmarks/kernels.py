"""Time operators that have CUDA kernels beside plain torch and beside their floors.

Each is timed over several inputs in turn, so that none is found in a cache, and on a GPU as a CUDA
graph of all of them. "By torch" is the operator without kernels. The floor is the time to read and
write each number once, or that of the arithmetic if it is more, on the machine's profile.

Shape suffixes: N = entries, V = left and W = right part of a row's number, P and Q = left and right
part of the width, R = bond between the factors, M = tokens, I = width in, O = width out, B = batch,
H = heads.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.checks import agreement
from benchmarks.encoders import PAPER_TABLE
from benchmarks.session import Session, add_repeats, add_several, add_sizes, tuple_of
from comera.calibrate.in_turn import copies_of, in_turn
from comera.calibrate.ways import make_batches, make_factors
from comera.nn.batched_contraction import BatchedContraction
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.ops.attention import attend
from comera.ops.context import machine_of, static_shapes
from comera.ops.cores import contract_chain
from comera.ops.factors import Factors
from comera.ops.linear.feed_forward import factorized_feed_forward
from comera.ops.linear.gated_feed_forward import gated_feed_forward
from comera.ops.linear.tt_linear import factorized_linears
from comera.ops.table.distinct_rows import TableFactors
from comera.ops.table.table_factors import contract_table
from comera.ops.table.tt_embedding import ROWS
from comera.ops.way_order import preferring

_GROUPS = {
    "contract": "contract_cores",
    "lookup": "lookup",
    "linear": "linears",
    "feed_forward": "feed_forward",
    "gated": "gated_feed_forward",
    "attend": "attend",
}
"""Groups of ways, as ``comera.ops.dispatch`` has them, by operator."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--only", nargs="+", choices=list(_GROUPS), default=list(_GROUPS), metavar="NAME",
        help=f"Time only these of {', '.join(_GROUPS)}.",
    )  # fmt: skip
    add_several(parser, "--tokens", [4096], "Numbers of rows of linear layers.")
    add_several(parser, "--indices", [4096, 16384], "Numbers of indices of lookups.")
    widths = [(768, 768), (768, 3072), (3072, 768)]
    add_several(
        parser, "--widths", widths, "Pairs of input and output width.", tuple_of(2, "768:3072"),
        "IN:OUT",
    )  # fmt: skip
    layers = "Number of layers of each width that are contracted together."
    add_sizes(parser, {"rank": (32, "Rank of all tensor trains."), "layers": (12, layers)})
    parser.add_argument(
        "--table", type=tuple_of(2, "30522:768"), default=(30522, 768), metavar="ROWS:WIDTH",
        help="Number of rows and width of the table.",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="Type of all numbers."
    )
    add_repeats(parser)


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes:
        title: The operator and its size in words.
        inputs: Arguments of each of the runs that take turns.
        ours: Runs the operator; returns a list of tensors.
        plain: Runs torch operations in its place.
        nbytes: Bytes read and written at least, by the forward pass and by both passes.
        flops: Operations, likewise.
    """

    title: str
    inputs: Sequence[Sequence[Tensor]]
    ours: Callable[..., list[Tensor]]
    plain: Callable[..., list[Tensor]]
    nbytes: tuple[float, float]
    flops: tuple[float, float]


def run(session: Session, options: argparse.Namespace) -> None:
    """Time the operators.

    Raises:
        DisagreementError: If one does not compute the same as plain torch.
    """
    columns = {
        "operator": "", "comera µs": ",.1f", "by torch µs": ",.1f", "plain µs": ",.1f",
        "plain / comera": ".2f", "floor µs": ",.1f", "comera / floor": ".2f",
    }  # fmt: skip
    with static_shapes():  # as in a captured step
        title = f"operators, each over several inputs in turn, {options.dtype}"
        session.table(title, columns, _rows(session, options))


def _rows(session: Session, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    dtype = getattr(torch, options.dtype)
    machine = machine_of(session.device)
    for name in options.only:
        torch.manual_seed(0)
        for case in CASES[name](session.device, dtype, options):
            with torch.no_grad():
                grads = [torch.randn_like(y) for y in case.ours(*case.inputs[0])]
            for k, passes in enumerate(("forward", "forward + backward")):
                title = f"{case.title}, {passes}"
                ours, plain = (
                    partial(_both if k else _forward, run, grads) for run in (case.ours, case.plain)
                )
                pairs = zip(ours(case.inputs[0]), plain(case.inputs[0]), strict=True)
                compared = {f"result {n}": pair for n, pair in enumerate(pairs)}
                session.print(agreement(title, compared, dtype, "plain torch"))

                def taken(run: Callable[..., object], inputs=case.inputs) -> Callable[[], object]:
                    return in_turn([partial(run, given) for given in inputs], session.device)

                runs = {"comera": taken(ours), "plain": taken(plain)}
                if session.device.type == "cuda":  # a CPU has no kernels
                    with preferring(_GROUPS[name], "torch"):
                        runs["by torch"] = taken(ours)
                timings = session.time(title, runs, "plain")
                us = {run: 1e6 * timings.median(run) / len(case.inputs) for run in runs}
                arithmetic = case.flops[k] / machine.rate(options.dtype)
                floor = 1e6 * max(case.nbytes[k] / machine.bandwidth, arithmetic)
                yield (
                    title, us["comera"], us.get("by torch"), us["plain"],
                    us["plain"] / us["comera"], floor, us["comera"] / floor,
                )  # fmt: skip


@torch.no_grad()
def _forward(
    run: Callable[..., list[Tensor]], grads: list[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    return run(*inputs)


def _both(
    run: Callable[..., list[Tensor]], grads: list[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    return list(torch.autograd.grad(run(*inputs), leaves, grads))


def _contractions(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> Iterator[Case]:
    """Make a case of all layers of a model, whose cores are in the cache in a step, too."""
    model = torch.nn.ModuleList(
        TTLinear(pair[0], pair[1], rank=options.rank, device=device, dtype=dtype)
        for pair in options.widths
        for _ in range(options.layers)
    )
    trains: list[TTLinear] = list(model)  # type: ignore[arg-type]
    together, params = BatchedContraction(model), list(model.parameters())

    def ours(*_: Tensor) -> list[Tensor]:
        with together:
            return [factor for layer in trains for factor in layer.factors()[:2]]

    with torch.no_grad():
        factors = ours()

    def plain(*_: Tensor) -> list[Tensor]:
        found = []
        for layer, left_IR in zip(trains, factors[::2], strict=True):
            split, cores = layer.shape.split, list(layer.cores)
            gates, below = list(layer.gates), layer.prune_below
            left = contract_chain(cores[:split], gates[:split], below)[0]
            right = contract_chain(cores[split:], gates[split:], below)[..., 0]
            # Factors as the operator makes them: padded to its bond, the bias the last row.
            padding = left_IR.shape[1] - left.shape[1] - 1
            assert layer.bias is not None
            right = torch.cat([F.pad(right, (0, 0, 0, padding)), layer.bias[None]])
            found += [F.pad(left, (0, padding + 1)), right]
        return found

    once = sum(t.numel() * t.element_size() for t in (*params, *factors))
    flops = 2 * sum(factor.numel() for factor in factors) * options.rank
    title = f"contract the cores of {len(trains)} layers, rank {options.rank}"
    yield Case(title, [params], ours, plain, (once, 3 * once), (flops, 3 * flops))


def _lookups(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> Iterator[Case]:
    """Make cases beside the plain way to read a tensor train: gather slices, then one einsum."""
    (rows, width), rank = options.table, options.rank
    layer = TTEmbedding(
        rows, width, rank=rank, shape=PAPER_TABLE.get((rows, width)), device=device, dtype=dtype
    )
    with torch.no_grad():
        factors = contract_table(list(layer.cores))
    left_VPR, right_WRQ = (factor.detach().requires_grad_() for factor in factors)
    (_, P, R), (W, _, Q) = left_VPR.shape, right_WRQ.shape

    def ours(indices: Tensor, left_VPR: Tensor, right_WRQ: Tensor) -> list[Tensor]:
        factors = TableFactors(left_VPR, right_WRQ, None, None)
        return [ROWS(indices, factors, None, None, rows, width, True)]

    def plain(indices: Tensor, left_VPR: Tensor, right_WRQ: Tensor) -> list[Tensor]:
        left_NPR, right_NRQ = left_VPR[indices // W], right_WRQ[indices % W]
        return [torch.einsum("npr,nrq->npq", left_NPR, right_NRQ).flatten(1)[:, :width]]

    factor_bytes = (left_VPR.numel() + right_WRQ.numel()) * dtype.itemsize
    for count in options.indices:
        nbytes, flops = count * width * dtype.itemsize, 2 * count * P * Q * R
        picked = [
            torch.randint(0, rows, (count,)).to(device) for _ in range(copies_of(device, nbytes))
        ]
        yield Case(
            f"look up {count:,} rows of {rows:,} x {width}, rank {rank}",
            [(indices, left_VPR, right_WRQ) for indices in picked], ours, plain,
            (nbytes + factor_bytes, 2 * nbytes + 3 * factor_bytes), (flops, 3 * flops),
        )  # fmt: skip


def _plain_linear(x: Tensor, left_IR: Tensor, right_RO: Tensor) -> Tensor:
    return F.linear(F.linear(x, left_IR.T), right_RO.T, right_RO[-1])


def _linears(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> Iterator[Case]:
    """Make cases beside two linear layers of torch's."""
    for count in options.tokens:
        for I, O in options.widths:  # noqa: E741
            left_IR, right_RO, _ = make_factors(I, O, options.rank, device, dtype)
            nbytes, backward = (count * n * dtype.itemsize for n in (I + O, O + 2 * I))
            flops = 2 * count * options.rank * (I + O)
            yield Case(
                f"linear {I} -> {O}, rank {options.rank}, {count:,} tokens",
                [(x, left_IR, right_RO) for x in make_batches(device, dtype, count, I)],
                lambda x, left, right: list(factorized_linears(x, [left], [right], True)),
                lambda *given: [_plain_linear(*given)],
                (nbytes, nbytes + backward), (flops, 3 * flops),
            )  # fmt: skip


def _feed_forwards(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace, gated: bool
) -> Iterator[Case]:
    """Make cases beside linear layers of torch's and its activations, which keep all they make."""
    width, hidden = max(options.widths, key=lambda pair: pair[1])
    sizes = [(width, hidden), *([(width, hidden)] if gated else []), (hidden, width)]
    factors = [make_factors(*size, options.rank, device, dtype) for size in sizes]
    weights = [weight for each in factors for weight in each[:2]]

    def layers(weights: tuple[Tensor, ...]) -> list[Factors]:
        return [Factors(weights[k], weights[k + 1], True) for k in range(0, len(weights), 2)]

    def ours(x: Tensor, *weights: Tensor) -> list[Tensor]:
        if gated:
            return [gated_feed_forward(x, *layers(weights))]
        first, second = layers(weights)
        return [factorized_feed_forward(x, first, second, "gelu")]

    def plain(x: Tensor, *weights: Tensor) -> list[Tensor]:
        inner = _plain_linear(x, *weights[:2])
        inner = F.silu(inner) * _plain_linear(x, *weights[2:4]) if gated else F.gelu(inner)
        return [_plain_linear(inner, *weights[-2:])]

    name = "gated feed-forward" if gated else "feed-forward"
    for count in options.tokens:
        nbytes = 2 * count * width * dtype.itemsize
        flops = 2 * len(sizes) * count * weights[0].shape[1] * (width + hidden)
        yield Case(
            f"{name} {width} -> {hidden} -> {width}, rank {options.rank}, {count:,} tokens",
            [(x, *weights) for x in make_batches(device, dtype, count, width)], ours, plain,
            (nbytes, 2.5 * nbytes), (flops, 3 * flops),
        )  # fmt: skip


_HEADS, _POSITIONS = 12, 128


def _attentions(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> Iterator[Case]:
    """Make cases of 12 heads that share keys of the width of a rank, beside copied keys."""
    rank = -(-options.rank // 8) * 8

    def plain(q_BHMR: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        key, value = (x.repeat(1, _HEADS, 1, 1) for x in (key, value))
        return [F.scaled_dot_product_attention(q_BHMR, key, value, scale=rank**-0.5)]

    for count in options.tokens:
        batch, positions = max(1, count // _POSITIONS), min(count, _POSITIONS)
        nbytes = 2 * (_HEADS + 1) * batch * positions * rank * dtype.itemsize
        flops = 4 * batch * _HEADS * positions**2 * rank
        trios = [
            [
                torch.randn(batch, heads, positions, rank).to(device, dtype).requires_grad_()
                for heads in (_HEADS, 1, 1)
            ]
            for _ in range(copies_of(device, nbytes))
        ]
        yield Case(
            f"attend with {_HEADS} heads on shared keys of {rank}, {batch} x {positions}", trios,
            lambda q, key, value: [attend(q, key, value, None, rank**-0.5, 0.0)], plain,
            (nbytes, 3 * nbytes), (flops, 3.5 * flops),
        )  # fmt: skip


CASES: dict[str, Callable[..., Iterator[Case]]] = {
    "contract": _contractions,
    "lookup": _lookups,
    "linear": _linears,
    "feed_forward": partial(_feed_forwards, gated=False),
    "gated": partial(_feed_forwards, gated=True),
    "attend": _attentions,
}
