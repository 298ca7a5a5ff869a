"""Hand out factors that were contracted together, each layer its own.

With torch's own ``unbind``, a layer that no gradient reaches, as behind ``detach()`` or under
``no_grad``, would get zeros for a gradient, with which optimizers go on moving it; by itself it
gets none.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from comera.ops.dispatch import is_eager, shapes_are_static


def hand_out(
    groups: Sequence[Sequence[nn.Module]], factors: Sequence[Tensor]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the factors of each layer of each group, ``(I, R)`` and ``(R, O)``.

    Where graphs are captured or functions transformed, layers that no gradient reaches get zeros.

    Args:
        groups: The layers, all of which were contracted in one call.
        factors: The left factors ``(G, I, R)`` and the right factors ``(G, R, O)`` of the first
            group of G layers, then those of the second, and so on.
    """
    plain = (
        not (factors[0].requires_grad and is_eager())
        or shapes_are_static(factors[0])
        or torch._C._are_functorch_transforms_active()
    )
    if plain:
        apart = [factor.unbind(0) for factor in factors]
    else:
        unbind: Callable[..., tuple[Tensor, ...]] = _HandOut.apply
        flat = iter(unbind(groups, *factors))
        apart = [tuple(islice(flat, len(factor))) for factor in factors]
    return [list(zip(*pair, strict=True)) for pair in zip(apart[::2], apart[1::2], strict=True)]


class _HandOut(torch.autograd.Function):
    """Unbind all factors; one node of all groups, since those behind it share one, too."""

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Sequence[nn.Module]], *factors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.groups = groups
        return tuple(part for factor in factors for part in factor.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        flat = iter(grads)
        apart = [list(islice(flat, len(layers))) for layers in ctx.groups for _ in range(2)]
        if any(grad is None for grad in grads):
            _keep_none(ctx.groups, apart)
        return None, *map(_stacked, apart)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        counts = [len(layers) for layers in ctx.groups for _ in range(2)]
        return tuple(
            part
            for tangent, count in zip(tangents, counts, strict=True)
            for part in ([None] * count if tangent is None else tangent.unbind(0))
        )


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


def _keep_none(
    groups: Sequence[Sequence[nn.Module]], apart: Sequence[Sequence[Tensor | None]]
) -> None:
    """Let layers that no gradient has reached have none after this backward pass, if not before."""
    without = [
        param
        for layers, lefts, rights in zip(groups, apart[::2], apart[1::2], strict=True)
        for layer, left, right in zip(layers, lefts, rights, strict=True)
        if left is None and right is None
        for param in layer.parameters()
        if param.requires_grad and param.grad is None
    ]

    def drop_zeros() -> None:
        for param in without:
            if param.grad is not None and not param.grad.any():
                param.grad = None

    if without:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(drop_zeros)
