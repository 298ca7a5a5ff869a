"""The rows of a table that are read most, as coordinates in one basis they share."""

import torch
from torch import Tensor

from comera.nn.decompose import decompose_matrix
from comera.nn.init import Init
from comera.nn.module import TensorTrainModule
from comera.ops.rank_gate import rank_gate
from comera.shapes import TTShape


class HotRows(TensorTrainModule):
    """A ``(rows, width)`` matrix of low rank: a tensor train of two cores and one gated bond.

    Part of a :class:`~comera.TTEmbedding` or :class:`~comera.TTEmbeddingBag`, which reads it. Its
    rank is learned, pruned and truncated like those of every tensor train.

    Raises:
        ValueError: If the rank is below one, or so high that dense rows would hold fewer numbers.
    """

    shape: TTShape  # type: ignore[assignment]
    _modes: TTShape

    def __init__(
        self,
        rows: int,
        width: int,
        rank: int,
        prune_below: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        most = (rows * width - 1) // (rows + width)
        if not 1 <= rank <= most:
            raise ValueError(
                f"hot_rank={rank} must be 1 to {most}: above that, {rows} rows and their basis "
                f"hold no fewer numbers than dense rows of width {width}"
            )
        self._build(TTShape((rows,), (width,), (rank,)), prune_below, device, dtype)

    def reset_parameters(self, std: float = 1.0, init: Init = "orthogonal") -> None:
        """Draw new rows of standard deviation ``std``."""
        self._init_cores_(std, init)

    @property
    def coordinates(self) -> Tensor:
        """``(rows, rank)``."""
        return self.cores[0].squeeze(0)

    @property
    def basis(self) -> Tensor:
        """``(rank, width)``, the gates multiplied in; differentiable."""
        return rank_gate(self.cores[1].squeeze(-1).T, self.gates[0], self.prune_below).T

    def dense_weight(self) -> Tensor:
        """The dense ``(rows, width)`` matrix, computed anew; differentiable."""
        return self.coordinates @ self.basis

    def _decompose_(self, weight: Tensor, tolerance: float | None) -> None:
        self.set_cores_(decompose_matrix(weight.T, self.shape, tolerance))

    def _weight_size(self) -> tuple[int, int]:
        return self.shape.in_width, self.shape.out_width

    @property
    def num_dense(self) -> int:
        return self.shape.num_dense

    def extra_repr(self) -> str:
        return self._describe_ranks()
