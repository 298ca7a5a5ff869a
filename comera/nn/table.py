"""An embedding table held as a tensor-train matrix: what look-ups and bags have in common."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from comera.nn.decompose import decompose_table, tt_svd
from comera.nn.init import Init, orthonormal
from comera.nn.module import TensorTrainModule
from comera.ops.tt_embedding import tt_embedding, ttm_to_dense
from comera.shapes import TTMShape, only_one


class TTTable(TensorTrainModule):
    """Base of :class:`TTEmbedding` and :class:`TTEmbeddingBag`.

    Attributes:
        hot: The first ``hot_rows`` rows as a parameter: dense, or ``hot_rank`` coordinates each.
            None if there are no hot rows.
        hot_basis: The ``(hot_rank, embedding_dim)`` basis of the hot rows, or None.
    """

    hot: nn.Parameter | None
    hot_basis: nn.Parameter | None
    shape: TTMShape  # type: ignore[assignment]
    _modes: TTMShape

    def _build_table(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        hot_rows: int,
        hot_rank: int | None,
        prune_below: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **fit: Any,
    ) -> None:
        _refuse(type(self).__name__, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.hot_rows = hot_rows
        self.hot_rank = hot_rank
        shape = TTMShape.fit(_cold_rows(num_embeddings, hot_rows), embedding_dim, **fit)
        _check_hot_rank(hot_rank, hot_rows, embedding_dim)
        self._build(shape, prune_below, device, dtype)
        sizes = {
            "hot": (hot_rows, self.hot_rank or embedding_dim) if hot_rows else None,
            "hot_basis": (self.hot_rank, embedding_dim) if self.hot_rank else None,
        }
        for name, size in sizes.items():
            empty = None if size is None else torch.empty(size, device=device, dtype=dtype)
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 1.0, init: Init = "orthogonal") -> None:
        """Draw new rows of standard deviation ``std``; 1 is that of :class:`torch.nn.Embedding`."""
        self._init_cores_(std, init)
        if self.hot is not None:
            # Coordinates in an orthonormal basis, so that a row is as long as a dense one.
            nn.init.normal_(self.hot, std=std * math.sqrt(self.embedding_dim / self.hot.shape[1]))
        if self.hot_basis is not None:
            self.hot_basis.copy_(orthonormal(self.hot_basis, to_the_right=False))

    @property
    def factors(self) -> list[nn.Parameter]:
        if self.hot is None or self.hot_basis is None:
            return super().factors
        return [*super().factors, self.hot, self.hot_basis]

    def _rows(self, indices: Tensor) -> Tensor:
        return tt_embedding(
            indices,
            list(self.cores),
            self.num_embeddings,
            self.embedding_dim,
            gates=list(self.gates),
            threshold=self.prune_below,
            hot_HK=self.hot,
            basis_KD=self.hot_basis,
        )

    @property
    def weight(self) -> Tensor:
        """The dense ``(num_embeddings, embedding_dim)`` table, computed anew; differentiable.

        Read-only. The padding row is zero.
        """
        table = ttm_to_dense(self.gated_cores())
        table = table[: self.num_embeddings - self.hot_rows, : self.embedding_dim]
        if self.hot is not None:
            hot = self.hot if self.hot_basis is None else self.hot @ self.hot_basis
            table = torch.cat([hot, table])
        if self.padding_idx is None:
            return table
        keep = torch.arange(self.num_embeddings, device=table.device) != self.padding_idx
        return table * keep[:, None]

    @property
    def num_dense(self) -> int:
        return (self.num_embeddings - self.hot_rows) * self.embedding_dim

    @classmethod
    @torch.no_grad()
    def _from_dense(
        cls,
        dense: nn.Embedding | nn.EmbeddingBag,
        *,
        rank: int | Sequence[int] | None,
        compression: float | None,
        tolerance: float | None,
        hot_rows: int,
        hot_rank: int | None,
        fit: dict[str, Any],
        **settings: Any,
    ) -> Self:
        only_one(rank=rank, compression=compression, tolerance=tolerance)
        num_rows, width = dense.weight.shape
        cold = _cold_rows(num_rows, hot_rows)
        shape = TTMShape.fit(cold, width, rank=rank, compression=compression, **fit)
        cores = decompose_table(dense.weight[hot_rows:], shape, tolerance)
        layer = cls(
            num_rows,
            width,
            max_norm=dense.max_norm,
            scale_grad_by_freq=dense.scale_grad_by_freq,
            sparse=dense.sparse,
            device="meta",  # nothing is drawn there
            dtype=dense.weight.dtype,
            padding_idx=dense.padding_idx,
            shape=replace(shape, ranks=tuple(core.shape[-1] for core in cores[:-1])),
            hot_rows=hot_rows,
            hot_rank=hot_rank,
            **settings,
        ).to_empty(device=dense.weight.device)
        layer.set_cores_(cores)
        layer._set_hot_(dense.weight[:hot_rows])
        return layer.train(dense.training)

    def _set_hot_(self, rows: Tensor) -> None:
        """Take dense rows, or the nearest ones of the hot rows' rank."""
        if self.hot is None:
            return
        if self.hot_basis is None:
            self.hot.copy_(rows)
            return
        basis, coordinates = tt_svd(rows.T, ranks=(self.hot_basis.shape[0],))
        self.hot_basis.copy_(basis[0].T)
        self.hot.copy_(coordinates[..., 0].T)

    def _to(self, dense_class: type, **settings: Any) -> Any:
        like = self.cores[0]
        dense = dense_class(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            sparse=self.sparse,
            device="meta",  # nothing is drawn there
            dtype=like.dtype,
            **settings,
        ).to_empty(device=like.device)
        with torch.no_grad():
            dense.weight.copy_(self.weight)
        return dense.train(self.training)

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.hot_rows:
            parts.append(f"hot_rows={self.hot_rows}")
        if self.hot_rank is not None:
            parts.append(f"hot_rank={self.hot_rank}")
        return ", ".join([*parts, self._describe_ranks()])


def _cold_rows(num_embeddings: int, hot_rows: int) -> int:
    if not 0 <= hot_rows < num_embeddings:
        raise ValueError(
            f"hot_rows={hot_rows} must leave rows for the tensor train: "
            f"0 to {num_embeddings - 1} of {num_embeddings}"
        )
    return num_embeddings - hot_rows


def _check_hot_rank(hot_rank: int | None, hot_rows: int, embedding_dim: int) -> None:
    if hot_rank is None:
        return
    if not hot_rows:
        raise ValueError(f"hot_rank={hot_rank} is of hot rows: give hot_rows too")
    most = (hot_rows * embedding_dim - 1) // (hot_rows + embedding_dim)
    if not 1 <= hot_rank <= most:
        raise ValueError(
            f"hot_rank={hot_rank} must be 1 to {most}: above that, {hot_rows} rows and their basis "
            f"hold no fewer numbers than dense rows of width {embedding_dim}"
        )


def _padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"padding_idx={padding_idx} is outside a table of {num_embeddings} rows")
    return padding_idx % num_embeddings


def _refuse(who: str, **settings: Any) -> None:
    for name, value in settings.items():
        if value not in (None, False):
            raise NotImplementedError(
                f"{who} does not support {name}={value}: rows share their cores, "
                "so one row cannot be scaled by itself"
            )
