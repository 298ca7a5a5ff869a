"""The matrix products of a linear layer: with two factors of its weight, or with the weight.

:func:`dense_from` is the number of rows from which the dense weight is faster than its factors.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from comera.planning.candidate import product_seconds
from comera.planning.machine import Machine, item_size, load_machine
from comera.shapes import LinearShape, padded_rank

Dims = tuple[int, int, int]
"""``(rows, depth, columns)`` of one matrix product."""


@dataclass(frozen=True)
class Layer:
    """One linear layer at one batch.

    Args:
        shape: Modes and ranks.
        tokens: Rows of the batch: all dimensions of the input but the last, multiplied.
        in_features: Width of the input if the modes multiply to more.
        out_features: Width of the output if the modes multiply to more.
        bias: Whether a bias is added.
        train: Whether a backward pass follows.
        input_grad: Whether the input needs a gradient; the first layer's does not.
        together: How many layers of this shape contract their cores in the same calls.

    Raises:
        ValueError: If ``tokens`` or ``together`` is below one, or a width does not fit the modes.
    """

    shape: LinearShape
    tokens: int
    in_features: int = None  # type: ignore[assignment]  # of the modes, once it is made
    out_features: int = None  # type: ignore[assignment]
    bias: bool = True
    train: bool = True
    input_grad: bool = True
    together: int = 1

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens)
        check_count("together", self.together)
        for name, modes in (("in", self.shape.in_width), ("out", self.shape.out_width)):
            width = check_width(f"{name}_features", getattr(self, f"{name}_features"), modes)
            object.__setattr__(self, f"{name}_features", width)

    def __str__(self) -> str:
        return (
            f"linear {self.in_features} -> {self.out_features}, modes "
            f"{self.shape.describe_modes()}, ranks {' '.join(map(str, self.shape.ranks))}"
        )

    @property
    def bond(self) -> int:
        """The bond between the factors as products see it, padded and with room for the bias."""
        return padded_rank(self.shape.ranks[self.shape.split - 1], self.bias)

    @property
    def operators(self) -> float:
        """Python operators in each direction: one contracts the cores, one takes the batch."""
        return 1 + 1 / self.together


def factorized_products(layer: Layer) -> tuple[Dims, Dims, Dims, Dims, Dims, Dims]:
    """List the products of the batch with both factors: t, y, and gradients of t, x, A and B."""
    batch, bond = layer.tokens, layer.bond
    wide, high = layer.in_features, layer.out_features
    return (
        (batch, wide, bond),
        (batch, bond, high),
        (batch, high, bond),
        (batch, bond, wide),
        (wide, batch, bond),
        (bond, batch, high),
    )


def reconstructed_products(layer: Layer) -> tuple[Dims, Dims, Dims, Dims, Dims, Dims]:
    """List the products once the weight is dense: W, y, and gradients of x, W, A and B."""
    batch, bond = layer.tokens, layer.bond
    wide, high = layer.in_features, layer.out_features
    return (
        (wide, bond, high),
        (batch, wide, high),
        (batch, high, wide),
        (wide, batch, high),
        (wide, high, bond),
        (bond, wide, high),
    )


def check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise ValueError(f"{name}={count!r} must be a whole number")
    if count < 1:
        raise ValueError(f"{name}={count} must be at least 1")


def check_width(name: str, width: int | None, modes: int) -> int:
    if width is None:
        return modes
    if not 1 <= width <= modes:
        raise ValueError(
            f"{name}={width} must be between 1 and {modes}, what the modes multiply to"
        )
    return width


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
