"""Time one linear layer, forward and backward; or a curve of them.

Beside dense stand a tensor train, blocks of no more parameters (or of rank 1) and tensorly-torch.
A curve shows where dense or the tensor train wins, and what the planner predicted.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.checks import check_model
from benchmarks.session import (
    DTYPES,
    Session,
    add_peers,
    add_rank,
    add_repeats,
    add_several,
    count,
    positive,
    rank_of,
)
from benchmarks.timing import Timings
from comera.calibrate.ways import in_turn
from comera.nn.linear import BTTLinear, TTLinear
from comera.ops.context import static_shapes
from comera.planning.planner import plan_layer

DEFAULT_POINTS = {
    "tokens": [1, 4, 16, 64, 256, 1024, 4096, 16384],
    "rank": [4, 8, 16, 32, 64, 128, 256, 512],
    "width": [256, 512, 1024, 2048, 4096, 8192],
}
_TOKENS, _WIDTH_TOKENS = 4096, 512
"""Default rows of the batch."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--shape", nargs=2, type=positive, default=[768, 3072], metavar=("IN", "OUT"),
        help="Input and output width of the layer.",
    )  # fmt: skip
    add_rank(parser)
    add_several(
        parser, "--tokens", [],
        "Rows that the layer is given at once; several make a curve. By default 4096, and 512 on "
        "the curve of widths.",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="Type of all numbers.")
    parser.add_argument(
        "--curve", choices=list(DEFAULT_POINTS),
        help="Show times against this quantity, comera beside dense.",
    )  # fmt: skip
    add_several(parser, "--points", [], "Values of it; by default doubling steps.")
    add_peers(parser)
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Time one layer, or draw a curve; raises ``ValueError`` for options that contradict."""
    shape, rank, tokens = tuple(options.shape), rank_of(options.rank), options.tokens
    dtype = getattr(torch, options.dtype)
    axis = options.curve or ("tokens" if len(tokens) > 1 else None)
    if axis is None:
        if options.points:
            axes = ", ".join(DEFAULT_POINTS)
            raise ValueError(f"points={options.points} needs --curve, one of {axes}")
        one_layer(session, shape, rank, (tokens or [_TOKENS])[0], dtype, options.peers == "all")
        return
    if axis != "tokens" and len(tokens) > 1:
        raise ValueError(f"tokens={tokens} must be one number beside --curve={axis}")
    fixed = (tokens or [_WIDTH_TOKENS if axis == "width" else _TOKENS])[0]
    points = options.points or (tokens if len(tokens) > 1 else DEFAULT_POINTS[axis])
    curve(session, axis, points, shape, rank, fixed, dtype)


def one_layer(
    session: Session,
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
    with_peers: bool,
) -> None:
    """Time dense, comera's two formats and tensorly-torch side by side."""
    layer, dense = make_layers(session, shape, rank, dtype)
    blocks = _blocks_beside(layer)
    x = make_input(session, tokens, shape[0], dtype)
    session.print(_check(layer, x))
    made = {"dense": dense, "comera": layer, f"comera blocks, rank {blocks.ranks[0]}": blocks}
    runs = {name: forward_backward(each, x) for name, each in made.items()}
    parameters = {name: count(each) for name, each in made.items()}

    def peer(name: str, implementation: str) -> Callable[[], object]:
        other = peers.tensorly_linear(layer, implementation)
        parameters[name] = count(other)
        return forward_backward(other, x)

    with peers.tensorly_on_torch():
        for way in ("factorized", "reconstructed") if with_peers else ():
            name = f"tensorly-torch {way}, rank {max(layer.ranks)}"
            session.add_peer(runs, name, partial(peer, name, way))
        title = (
            f"linear {shape[0]} -> {shape[1]}, modes {layer.shape.describe_modes()}, ranks "
            f"{' '.join(map(str, layer.ranks))}, {tokens} tokens, forward + backward"
        )
        session.measure(title, runs, "dense", {name: parameters[name] for name in runs})


def make_layers(
    session: Session, shape: tuple[int, int], rank: int | Sequence[int], dtype: torch.dtype
) -> tuple[TTLinear, nn.Linear]:
    torch.manual_seed(0)
    layer = TTLinear(*shape, rank=rank, dtype=dtype).to(session.device)
    return layer, nn.Linear(*shape, dtype=dtype).to(session.device)


def _check(layer: TTLinear, x: Tensor) -> str:
    return check_model(f"TTLinear {layer.in_features} -> {layer.out_features}", layer, (x,))


def _blocks_beside(layer: TTLinear) -> BTTLinear:
    """Make a block tensor train of the highest rank that is no larger, or of rank 1."""
    core, size = layer.cores[0], (layer.in_features, layer.out_features)
    make = partial(BTTLinear, *size, device=core.device, dtype=core.dtype)
    return make(rank=max(1, layer.num_stored // make(rank=1).num_stored))


def make_input(session: Session, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, width).to(session.device, dtype).requires_grad_()


def forward_backward(
    layer: Callable[[Tensor], Tensor], x: Tensor, *modules: nn.Module
) -> Callable[[], object]:
    """Return one pass forward and backward, which clears the gradients of ``modules`` before."""
    with torch.no_grad():
        grad = torch.randn_like(layer(x))
    owners = modules or (layer,)

    def run() -> None:
        x.grad = None
        for module in owners:
            module.zero_grad()  # type: ignore[union-attr]
        layer(x).backward(grad)

    return run


@dataclass(frozen=True)
class Point:
    """One place on a curve; ``predicted`` is the planner's dense over comera."""

    at: int
    timings: Timings
    predicted: float
    mode: str = "eager"

    @property
    def winner(self) -> str:
        """The faster one, or ``"even"`` if the middle half of the rounds disagrees."""
        low, high = self.timings.quartiles("comera")
        if low <= 1 <= high:
            return "even"
        return "comera" if low > 1 else "dense"

    @property
    def named(self) -> str:
        """The one that the planner expects to be faster."""
        return "comera" if self.predicted > 1 else "dense"

    def row(self) -> tuple[Any, ...]:
        """Return the values of the columns of a curve."""
        low, high = self.timings.quartiles("comera")
        right = None if self.winner == "even" else "yes" if self.winner == self.named else "no"
        return (
            self.at, self.mode, 1e3 * self.timings.median("dense"),
            1e3 * self.timings.median("comera"), self.timings.ratio("comera"),
            f"{low:.2f} – {high:.2f}", self.winner, self.predicted, right,
        )  # fmt: skip


_COLUMNS = {
    "mode": "", "dense ms": "ms", "comera ms": "ms", "dense / comera": ".2f", "quartiles": ">",
    "winner": "", "predicted": ".2f", "named it": "",
}  # fmt: skip


def curve(
    session: Session,
    axis: str,
    points: Sequence[int],
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
) -> None:
    """Measure every point, on a GPU eagerly and in a CUDA graph."""
    modes = ("eager", "captured") if session.device.type == "cuda" else ("eager",)
    done: list[Point] = []

    def rows() -> Iterator[tuple[Any, ...]]:
        for at in points:
            here: dict[str, Any] = {"shape": shape, "rank": rank, "tokens": tokens}
            here |= {"shape": (at, at)} if axis == "width" else {axis: at}
            for point in _points(session, axis, at, **here, dtype=dtype, modes=modes):
                done.append(point)
                yield point.row()

    ranks = " ".join(map(str, [rank] if isinstance(rank, int) else rank))
    fixed = {
        "width": f"linear, ranks up to {ranks}, {tokens} tokens",
        "rank": f"linear {shape[0]} -> {shape[1]}, {tokens} tokens",
        "tokens": f"linear {shape[0]} -> {shape[1]}, ranks {ranks}",
    }
    title = f"{fixed[axis]}, forward + backward, by {axis}"
    session.table(title, {axis: ",", **_COLUMNS}, rows())
    session.note(f"all {len(points)} layers agree with dense in output and gradients")
    for mode in modes:
        where = f"{mode}: " if len(modes) > 1 else ""
        session.note(where + hits([point for point in done if point.mode == mode]))


def _points(
    session: Session,
    axis: str,
    at: int,
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
    modes: Sequence[str],
) -> Iterator[Point]:
    layer, dense = make_layers(session, shape, rank, dtype)
    x = make_input(session, tokens, shape[0], dtype)
    _check(layer, x)
    plan = plan_layer(layer.at(tokens), **layer.planner_setting())
    for mode in modes:
        with static_shapes() if mode == "captured" else contextlib.nullcontext():
            runs = {"dense": forward_backward(dense, x), "comera": forward_backward(layer, x)}
            if mode == "captured":
                runs = {name: in_turn([run], session.device) for name, run in runs.items()}
            timings = session.time(f"{axis} {at}, {mode}", runs, "dense")
        here = plan.eager if mode == "eager" and plan.eager is not None else plan
        yield Point(at, timings, 1 / here.time_ratio, mode)


def hits(points: Sequence[Point]) -> str:
    """Return a line on how often the planner named the winner."""
    decided = [point for point in points if point.winner != "even"]
    right = sum(point.winner == point.named for point in decided)
    even = len(points) - len(decided)
    aside = f" ({even} even left out)" if even else ""
    return f"the planner named the winner at {right} of {len(decided)} points{aside}"
