"""What linear layers share whose weight is held as cores, whatever its format."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.init import Init
from comera.nn.module import PRUNE_BELOW, TensorTrainModule
from comera.planning.products import Layer
from comera.shapes import LinearShape


class CompressedLinear(TensorTrainModule):
    """A drop-in for :class:`torch.nn.Linear`: cores, gates and a bias.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: ``(out_features,)``, or None.
    """

    __constants__ = ("in_features", "out_features")
    in_features: int
    out_features: int
    bias: nn.Parameter | None
    shape: LinearShape  # type: ignore[assignment]

    def _build_linear(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        shape: LinearShape,
        prune_below: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self._build(shape, prune_below, device, dtype)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None, init: Init = "orthogonal") -> None:
        """Draw new cores; the dense weight they stand for has standard deviation ``std``.

        Args:
            std: By default ``1 / sqrt(3 * in_features)``, that of :class:`torch.nn.Linear`.
            init: ``"orthogonal"`` or ``"normal"``, see :class:`~comera.TTConfig`.
        """
        self._init_cores_(1 / math.sqrt(3 * self.in_features) if std is None else std, init)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def kind(self) -> tuple[object, ...]:
        """Return what layers agree in that cost the same at a batch."""
        raise NotImplementedError

    def at(self, tokens: int, *, together: int = 1) -> Layer:
        """Describe this layer at a batch to the planner.

        Args:
            tokens: Rows of the batch.
            together: How many layers of this kind contract their cores in the same calls.
        """
        raise NotImplementedError

    def _weight_size(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def num_dense(self) -> int:
        return self.in_features * self.out_features

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """Return the :class:`torch.nn.Linear` this layer stands for."""
        like = self.cores[0]
        dense = nn.Linear(  # on meta, where nothing is drawn
            self.in_features, self.out_features, self.bias is not None, "meta", like.dtype
        ).to_empty(device=like.device)
        dense.weight.copy_(self.dense_weight())
        dense.weight.requires_grad_(any(core.requires_grad for core in self.cores))
        if self.bias is not None:
            dense.bias.copy_(self.bias)
            dense.bias.requires_grad_(self.bias.requires_grad)
        return dense.train(self.training)

    @classmethod
    @torch.no_grad()
    def from_cores(
        cls,
        linear: Any,
        shape: LinearShape,
        cores: list[Tensor],
        prune_below: float = PRUNE_BELOW,
    ) -> Any:
        """Make a layer of these cores that takes its bias and all else from a dense one.

        Args:
            linear: The dense layer.
            shape: Modes and ranks.
            cores: Tensors of the sizes ``shape.core_shapes``.
            prune_below: A gate at or below this is a pruned rank.

        Raises:
            ValueError: If the sizes of the cores are others.
        """
        sizes = [tuple(core.shape) for core in cores]
        if sizes != list(shape.core_shapes):
            raise ValueError(f"cores of {sizes} are given, and {shape} has {shape.core_shapes}")
        layer: Any = cls(
            linear.weight.shape[1],
            linear.weight.shape[0],
            linear.bias is not None,
            "meta",  # nothing is drawn there
            linear.weight.dtype,
            shape=shape,
            prune_below=prune_below,
        ).to_empty(device=linear.weight.device)
        layer.set_cores_(cores)
        if layer.bias is not None:
            layer.bias.copy_(linear.bias)
        layer.freeze_like_(linear)
        return layer.train(linear.training)

    def extra_repr(self) -> str:
        widths = f"in_features={self.in_features}, out_features={self.out_features}"
        ranks = self._describe_ranks(self.num_dense / max(1, self.num_stored))
        return f"{widths}, bias={self.bias is not None}, {ranks}"


def check_linear(linear: Any) -> tuple[int, int]:
    """Return the input and output width of a dense layer.

    Raises:
        TypeError: If it has no weight ``(out, in)`` or no ``bias``.
    """
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not hasattr(linear, "bias"):
        raise TypeError(f"a layer with weight (out, in) and bias is needed, not {linear!r}")
    return weight.shape[1], weight.shape[0]
