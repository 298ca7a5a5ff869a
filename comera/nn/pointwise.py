"""Linear tensor trains along another dimension than the last, such as 1 x 1 convolutions."""

from typing import Any

from torch import Tensor

from comera.nn.linear import TTLinear


class TTPointwise(TTLinear):
    """A :class:`~comera.TTLinear` along the dimension ``feature_dim``, counted from the last.

    Args:
        feature_dim: Where the features are in input and output; below zero.
        linear: What :class:`~comera.TTLinear` takes.

    Shapes:
        for -3: input ``(*, in_features, H, W)``, output ``(*, out_features, H, W)``, contiguous
        where the input is.
    """

    def __init__(self, *linear: Any, feature_dim: int = -1, **more: Any) -> None:
        super().__init__(*linear, **more)
        self.feature_dim = feature_dim

    def forward(self, input: Tensor) -> Tensor:
        return along(self.feature_dim, super().forward, input)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_dim={self.feature_dim}"


def along(feature_dim: int, function: Any, input: Tensor) -> Tensor:
    """Call a function of tensors whose features are last on one that has them elsewhere."""
    output = function(input.movedim(feature_dim, -1)).movedim(-1, feature_dim)
    # As of a convolution: what comes after may take a view.
    return output.contiguous() if input.is_contiguous() else output
