"""Find from how many rows on a batch is multiplied faster by the dense weight than by factors."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from comera.planning.machine import Machine, item_size, load_machine
from comera.planning.operation import product_seconds
from comera.planning.products import (
    Dims,
    Layer,
    factorized_products,
    reconstructed_products,
)

_MOST_TOKENS = 1 << 24
_KEPT = 1024


def dense_from(
    layer: Layer, *, dtype: str = "float32", machine: Machine | None = None
) -> int | None:
    """Find the number of tokens from which multiplying by the dense weight beats its two factors.

    The dense weight is made anew in each pass, a cost that does not depend on the batch; in
    return each token is cheaper where ``r (in + out) > in * out``. Only those products are
    compared in which the two ways differ; nothing is searched, and the result is kept.

    Args:
        layer: The layer; its own number of tokens does not count.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        machine: The machine on which it will run; the profile of this computer's CPU if None.

    Returns:
        The smallest such number, or None if dense is slower at any batch (up to 2**24 tokens), or
        if the layer's weight has vanished.

    Raises:
        ValueError: If the machine has no rate for ``dtype``.
    """
    return _dense_from(replace(layer, tokens=1), dtype, machine or load_machine())


@functools.lru_cache(maxsize=_KEPT)
def _dense_from(layer: Layer, dtype: str, machine: Machine) -> int | None:
    machine.rate(dtype)
    if 0 in layer.shape.ranks:
        return None

    item, call = item_size(dtype), machine.call_overhead
    train, bias, high = layer.train, layer.bias, layer.out_features

    def seconds(products: Iterable[Dims]) -> float:
        return sum(product_seconds(machine, dtype, 1, *dims) for dims in products)

    w, _, _, _, grad_a, grad_b = reconstructed_products(layer)
    fixed = seconds([w, grad_a, grad_b] if train else [w])

    def dense_wins(tokens: int) -> bool:
        here = replace(layer, tokens=tokens)
        factorized = seconds(factorized_products(here)[: 6 if train else 2])
        reconstructed = seconds(reconstructed_products(here)[1 : 4 if train else 2]) + fixed
        if bias:  # a column of ones in one way, a sum over rows in the other
            factorized += call + machine.moving(tokens * item)
            reconstructed += call + machine.moving(tokens * high * item) if train else 0.0
        return reconstructed < factorized

    return first_where(dense_wins, _MOST_TOKENS) if dense_wins(_MOST_TOKENS) else None


def first_where(holds: Callable[[int], bool], most: int) -> int:
    """Find the smallest number up to ``most`` at which ``holds``, given that it does at ``most``.

    Doubling finds the power of two, halving the number; below the result it holds nowhere as long
    as it does not come and go.
    """
    high = 1
    while high < most and not holds(high):
        high *= 2
    low, high = high // 2, min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
