"""Sums, means and maxima over bags of rows of a table held as a tensor-train matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera.nn.module import PRUNE_BELOW
from comera.nn.table import TTTable
from comera.shapes import TTMShape


class TTEmbeddingBag(TTTable):
    """Drop-in for :class:`torch.nn.EmbeddingBag` over a table held as rank-gated TTM cores.

    Arguments beyond torch's are those of :class:`TTEmbedding`. ``forward`` takes what torch's
    takes: bags as rows of a 2-d input, or a 1-d input with ``offsets``; ``per_sample_weights``
    with ``mode="sum"``; padding entries are left out of their bags.

    Shapes:
        output ``(bags, embedding_dim)``.
    """

    __constants__ = (
        "num_embeddings", "embedding_dim", "padding_idx", "hot_rows", "hot_rank", "mode",
    )  # fmt: skip

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | Sequence[int] | None = None,
        shape: TTMShape | Sequence[Sequence[int]] | None = None,
        order: int = 4,
        compression: float | None = None,
        hot_rows: int = 0,
        hot_rank: int | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r} must be 'sum', 'mean' or 'max'")
        super().__init__()
        self._build_table(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            sparse, hot_rows, hot_rank, prune_below, device, dtype,
            rank=rank, shape=shape, order=order, compression=compression,
        )  # fmt: skip
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        flat = input.reshape(-1)
        rows = self._rows(flat)
        # Every entry gets a row of its own, so torch's bag arithmetic serves unchanged.
        entries = torch.arange(flat.shape[0], device=flat.device, dtype=input.dtype)
        padding = None
        if self.padding_idx is not None or not flat.shape[0]:  # torch refuses an empty table
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        if self.padding_idx is not None:
            padding = flat.shape[0]
            entries = torch.where(flat == self.padding_idx, padding, entries)
        return nn.functional.embedding_bag(
            entries.reshape(input.shape),
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    @classmethod
    def from_embedding_bag(
        cls,
        embedding_bag: nn.EmbeddingBag,
        *,
        rank: int | Sequence[int] | None = None,
        shape: TTMShape | Sequence[Sequence[int]] | None = None,
        order: int = 4,
        compression: float | None = None,
        tolerance: float | None = None,
        hot_rows: int = 0,
        hot_rank: int | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> "TTEmbeddingBag":
        """Approximate a dense table by TT-SVD; arguments as in :meth:`TTLinear.from_linear`."""
        return cls._from_dense(
            embedding_bag,
            rank=rank,
            compression=compression,
            tolerance=tolerance,
            hot_rows=hot_rows,
            hot_rank=hot_rank,
            fit={"shape": shape, "order": order},
            prune_below=prune_below,
            mode=embedding_bag.mode,
            include_last_offset=embedding_bag.include_last_offset,
        )

    def to_dense(self) -> nn.EmbeddingBag:
        """The :class:`torch.nn.EmbeddingBag` this layer stands for."""
        return self._to(
            nn.EmbeddingBag, mode=self.mode, include_last_offset=self.include_last_offset
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
