"""Lookups in a table held as a tensor-train matrix with trainable ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera.nn.module import PRUNE_BELOW
from comera.nn.table import TTTable
from comera.shapes import TTMShape


class TTEmbedding(TTTable):
    """Drop-in for :class:`torch.nn.Embedding` that stores its table as rank-gated TTM cores.

    Args:
        num_embeddings: Number of rows. Row modes may multiply to more; indices may not reach there.
        embedding_dim: Width of a row.
        padding_idx: A row that reads as zeros and gets no gradient.
        max_norm: Not supported: rows share cores, so one row cannot be renormalised.
        norm_type: Only here to keep torch's positional order.
        scale_grad_by_freq: Not supported.
        sparse: Accepted and without effect: the gradients of the cores are small and dense.
        rank: Bound on every bond, or a list of all inner bonds. 32 if nothing is said.
        shape: ``(row_modes, col_modes)``, e.g. ``((16, 20, 10, 10), (4, 4, 8, 6))`` for 30522 rows
            of 768, or a :class:`~comera.TTMShape`. If not given, modes that lookups are fast with.
        order: Number of cores when ``shape`` does not say.
        compression: Instead of ``rank``: how many times fewer parameters than the dense rows.
        hot_rows: The first rows kept as a plain dense table, the train standing for the others.
            Pays when indices are sorted by frequency: few rows take most of the lookups.
        hot_rank: Instead of dense, hold the hot rows as so many coordinates each in one basis they
            share, so that the same memory keeps more of them apart.
        scatter_rows: Keep indices that follow each other far apart in the train, by arithmetic that
            costs no memory: rows next to each other share most of their parameters, which the
            first, most frequent ones of a sorted vocabulary should not. By default where there are
            no hot rows. False where neighbours are alike.
        prune_below: A gate at or below this is a pruned rank.
        device: Device of the parameters.
        dtype: Type of the cores; gates are float32 or wider.

    Shapes:
        input: integers of any shape; output ``(*input.shape, embedding_dim)``.

    Raises:
        ValueError: If modes or ranks do not fit the table.
        TypeError: If indices are no whole numbers.
        NotImplementedError: For ``max_norm`` and ``scale_grad_by_freq``.

    Source: CoMERA, arXiv 2405.14377, section 3.
    """

    __constants__ = ("num_embeddings", "embedding_dim", "padding_idx", "hot_rows", "hot_rank")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | Sequence[int] | None = None,
        shape: TTMShape | Sequence[Sequence[int]] | None = None,
        order: int = 4,
        compression: float | None = None,
        hot_rows: int = 0,
        hot_rank: int | None = None,
        scatter_rows: bool | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> None:
        super().__init__()
        self._build_table(
            num_embeddings, embedding_dim, padding_idx=padding_idx, max_norm=max_norm,
            norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse,
            hot_rows=hot_rows, hot_rank=hot_rank, scatter_rows=scatter_rows,
            prune_below=prune_below, device=device, dtype=dtype,
            rank=rank, shape=shape, order=order, compression=compression,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        self._check_there(input)
        rows = self._rows(input)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        rank: int | Sequence[int] | None = None,
        shape: TTMShape | Sequence[Sequence[int]] | None = None,
        order: int = 4,
        compression: float | None = None,
        tolerance: float | None = None,
        hot_rows: int = 0,
        hot_rank: int | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> "TTEmbedding":
        """Approximate a dense table by TT-SVD.

        Every index is kept at its own row. The padding row, whatever it holds, reads as zeros
        afterwards.

        Args:
            embedding: The dense table.
            rank: Bound on every bond, or a list of all inner bonds; 32 if no size is given.
            shape: ``(row_modes, col_modes)`` or a :class:`~comera.TTMShape`; modes that lookups are
                fast with if None.
            order: Number of cores when ``shape`` does not say.
            compression: Instead of a rank: how many times fewer parameters than the dense rows.
            tolerance: Instead of a rank: bound on the relative Frobenius error of those rows.
            hot_rows: The first rows, kept as a plain dense table; the train stands for the others.
            hot_rank: Instead of dense, hold the hot rows as so many coordinates each in one basis.
            prune_below: A gate at or below this is a pruned rank.

        Raises:
            ValueError: If more than one of rank, compression and tolerance is given, or modes or
                ranks do not fit the table.
            TypeError: If ``embedding`` is no torch embedding.
            NotImplementedError: If it has a ``max_norm`` or ``scale_grad_by_freq``.
        """
        return cls._from_dense(
            embedding,
            rank=rank,
            compression=compression,
            tolerance=tolerance,
            hot_rows=hot_rows,
            hot_rank=hot_rank,
            fit={"shape": shape, "order": order},
            prune_below=prune_below,
        )

    def to_dense(self) -> nn.Embedding:
        """Return the :class:`torch.nn.Embedding` this layer stands for."""
        return self._to(nn.Embedding)
