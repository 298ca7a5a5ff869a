"""The matrix products of a linear layer, by shape: with two factors of its weight, or with it."""

from dataclasses import dataclass

from comera.shapes import TTShape, padded_rank

Dims = tuple[int, int, int]
"""``(rows, depth, columns)`` of one matrix product."""


@dataclass(frozen=True)
class Layer:
    """One linear layer at one batch.

    Args:
        shape: Modes and ranks.
        tokens: Rows of the batch.
        in_features: True input width, at most the product of the input modes.
        out_features: True output width.
        bias: Whether a bias is added.
        train: Whether a backward pass follows.
        input_grad: Whether the input needs a gradient.
        together: How many layers of this shape contract their cores in the same calls.
    """

    shape: TTShape
    tokens: int
    in_features: int
    out_features: int
    bias: bool = True
    train: bool = True
    input_grad: bool = True
    together: int = 1

    @property
    def bond(self) -> int:
        """The bond between the factors as products see it, padded and with room for the bias."""
        return padded_rank(self.shape.ranks[self.shape.split - 1], self.bias)

    @property
    def operators(self) -> float:
        """Python operators in each direction: one contracts the cores, one takes the batch."""
        return 1 + 1 / self.together


def linear_layer(
    shape: TTShape,
    tokens: int,
    in_features: int | None,
    out_features: int | None,
    bias: bool,
    train: bool,
    input_grad: bool = True,
    together: int = 1,
) -> Layer:
    """Check what describes a layer at a batch, and fill in widths that are those of the modes."""
    check_count("tokens", tokens)
    check_count("together", together)
    wide = check_width("in_features", in_features, shape.in_width)
    high = check_width("out_features", out_features, shape.out_width)
    return Layer(shape, tokens, wide, high, bias, train, input_grad, together)


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
