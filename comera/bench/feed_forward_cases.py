"""Feed-forward parts, plain and gated, beside linear layers of torch, for ``kernel_speed``."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from comera.bench.in_turn import copies_of
from comera.bench.kernel_case import Case, both_ways
from comera.nn.linear import TTLinear
from comera.ops.factors import Factors
from comera.ops.linear.feed_forward import factorized_feed_forward, gated_feed_forward


def feed_forwards(
    device: torch.device, dtype: torch.dtype, tokens: Sequence[int],
    widths: Sequence[tuple[int, int]], rank: int,
) -> Iterator[Case]:  # fmt: skip
    """Make cases beside four linear layers of torch's and its GELU, which keep all they make."""
    width, hidden = max(widths, key=lambda pair: pair[1])
    pair = [
        _factors(wide, high, rank, device, dtype)
        for wide, high in ((width, hidden), (hidden, width))
    ]
    weights = [factor for factors in pair for factor in factors[:2]]
    for count in tokens:
        nbytes = 2 * count * width * dtype.itemsize
        copies = copies_of(device, nbytes)
        xs = [torch.randn(count, width).to(device, dtype).requires_grad_() for _ in range(copies)]

        def ours(k: int, xs: list[Tensor] = xs) -> list[Tensor]:
            return [factorized_feed_forward(xs[k], pair[0], pair[1], "gelu")]

        def plain(k: int, xs: list[Tensor] = xs) -> list[Tensor]:
            (left1, right1, _), (left2, right2, _) = pair
            hidden = F.gelu(F.linear(F.linear(xs[k], left1.T), right1.T, right1[-1]))
            return [F.linear(F.linear(hidden, left2.T), right2.T, right2[-1])]

        def inputs(k: int, xs: list[Tensor] = xs) -> list[Tensor]:
            return [xs[k], *weights]

        flops = 4 * count * weights[0].shape[1] * (width + hidden)
        yield from both_ways(
            f"feed-forward {width} -> {hidden} -> {width}, rank {rank}, {count:,} tokens",
            (ours, plain), inputs, copies, (nbytes, 2.5 * nbytes), (flops, 3 * flops),
        )  # fmt: skip


def gated_feed_forwards(
    device: torch.device, dtype: torch.dtype, tokens: Sequence[int],
    widths: Sequence[tuple[int, int]], rank: int,
) -> Iterator[Case]:  # fmt: skip
    """Make cases beside six linear layers of torch's, its SiLU and its product."""
    width, hidden = max(widths, key=lambda pair: pair[1])
    sizes = (width, hidden), (width, hidden), (hidden, width)
    trio = [_factors(wide, high, rank, device, dtype) for wide, high in sizes]
    weights = [factor for factors in trio for factor in factors[:2]]

    def layer(x: Tensor, factors: Factors) -> Tensor:
        return F.linear(F.linear(x, factors.left.T), factors.right.T, factors.right[-1])

    for count in tokens:
        nbytes = 2 * count * width * dtype.itemsize
        copies = copies_of(device, nbytes)
        xs = [torch.randn(count, width).to(device, dtype).requires_grad_() for _ in range(copies)]

        def ours(k: int, xs: list[Tensor] = xs) -> list[Tensor]:
            return [gated_feed_forward(xs[k], *trio)]

        def plain(k: int, xs: list[Tensor] = xs) -> list[Tensor]:
            gate, up, down = trio
            return [layer(F.silu(layer(xs[k], gate)) * layer(xs[k], up), down)]

        def inputs(k: int, xs: list[Tensor] = xs) -> list[Tensor]:
            return [xs[k], *weights]

        flops = 6 * count * weights[0].shape[1] * (width + hidden)
        yield from both_ways(
            f"gated feed-forward {width} -> {hidden} -> {width}, rank {rank}, {count:,} tokens",
            (ours, plain), inputs, copies, (nbytes, 2.5 * nbytes), (flops, 3 * flops),
        )  # fmt: skip


def _factors(wide: int, high: int, rank: int, device: torch.device, dtype: torch.dtype) -> Factors:
    """Make the factors of a layer, as leaves."""
    layer = TTLinear(wide, high, rank=rank, device=device, dtype=dtype)
    with torch.no_grad():
        left, right, has_bias = layer.factors()
    left, right = left.detach().requires_grad_(), right.detach().requires_grad_()
    return Factors(left, right, has_bias)
