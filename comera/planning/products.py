"""The matrix products of a linear layer, by shape: with two factors of its weight, or with it."""

from dataclasses import dataclass

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
