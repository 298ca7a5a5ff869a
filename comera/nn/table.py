"""An embedding table held as a tensor-train matrix, the base of lookups and of bags.

Rows that are read most may be kept apart: dense, or as coordinates in one basis that they share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from comera.nn.decompose import decompose_at, decompose_table, widened
from comera.nn.init import Init
from comera.nn.module import TensorTrainModule, whole_numbers
from comera.ops.cores import rank_gate
from comera.ops.dispatch import is_eager
from comera.ops.table.distinct_rows import check_range
from comera.ops.table.tt_embedding import Request, tt_embedding, ttm_to_dense
from comera.shapes import TTMShape, TTShape, only_one


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
        """One row of coordinates a row of the matrix, ``(rows, rank)``."""
        return self.cores[0].squeeze(0)

    @property
    def basis(self) -> Tensor:
        """Basis of all rows, ``(rank, width)``, with the gates multiplied in; differentiable."""
        return rank_gate(self.cores[1].squeeze(-1).T, self.gates[0], self.prune_below).T

    def dense_weight(self) -> Tensor:
        """Compute the dense ``(rows, width)`` matrix anew; differentiable."""
        return self.coordinates @ self.basis

    def _decompose_(self, weight: Tensor, tolerance: float | None) -> None:
        self.set_cores_(decompose_at(weight.T, self.shape, tolerance))

    def _weight_size(self) -> tuple[int, int]:
        return self.shape.in_width, self.shape.out_width

    @property
    def num_dense(self) -> int:
        return self.shape.num_dense

    def extra_repr(self) -> str:
        return self._describe_ranks(self.num_dense / max(1, self.num_stored))


class TTTable(TensorTrainModule):
    """Base of the embeddings: a table as a tensor-train matrix, its first rows apart if wanted.

    Attributes:
        hot: The first ``hot_rows`` rows: a dense parameter or, of a ``hot_rank``,
            :class:`~comera.nn.table.HotRows`. None if there are none.
        row_order: ``(num_embeddings,)`` int32, the row at which each index is kept, where
            :func:`~comera.update_hot_rows_` has moved some; None
            where each is at its own, or scattered.
        scatter_rows: Whether index ``i`` is kept at row ``i * k modulo num_embeddings``, k near the
            golden section, which costs no memory. It is extra state of a state dict.
        twins: The other tables that were tied to this one and read the same cores and hot rows.
    """

    row_order: Tensor | None
    twins: "tuple[TTTable, ...]" = ()
    hot: nn.Parameter | HotRows | None
    shape: TTMShape  # type: ignore[assignment]
    _modes: TTMShape
    _shapes = TTMShape
    _settings: ClassVar[tuple[str, ...]] = (
        "num_embeddings", "embedding_dim", "padding_idx", "sparse", "hot_rows", "hot_rank",
        "scatter_rows", "prune_below",
    )  # fmt: skip

    def _build_table(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        hot_rows: int,
        hot_rank: int | None,
        scatter_rows: bool | None,
        prune_below: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **fit: Any,
    ) -> None:
        if num_embeddings < 1:
            raise ValueError(f"num_embeddings={num_embeddings} must be at least 1")
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq}
        for name, value in refused.items():
            if value not in (None, False):
                raise NotImplementedError(
                    f"{type(self).__name__} does not support {name}={value}: rows share their "
                    "cores, so one row cannot be scaled by itself"
                )
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx={padding_idx} is outside a table of {num_embeddings} rows"
                )
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.hot_rows = hot_rows
        self.hot_rank = hot_rank
        if scatter_rows and hot_rows:
            raise ValueError(
                f"scatter_rows=True moves all rows, and hot_rows={hot_rows} are the first: give one"
            )
        self.scatter_rows = not hot_rows if scatter_rows is None else scatter_rows
        self._step = _golden_step(num_embeddings) if self.scatter_rows else None
        self.register_buffer("row_order", None)
        shape = TTMShape.fit(_cold_rows(num_embeddings, hot_rows), embedding_dim, **fit)
        self._build(shape, prune_below, device, dtype)
        if hot_rank is not None:
            if not hot_rows:
                raise ValueError(f"hot_rank={hot_rank} is of hot rows: give hot_rows too")
            self.hot = HotRows(hot_rows, embedding_dim, hot_rank, prune_below, device, dtype)
        elif hot_rows:
            rows = torch.empty(hot_rows, embedding_dim, device=device, dtype=dtype)
            self.hot = nn.Parameter(rows)
        else:
            self.register_parameter("hot", None)
        self.reset_parameters()

    def reset_parameters(self, std: float = 1.0, init: Init = "orthogonal") -> None:
        """Draw new rows of standard deviation ``std``; 1 is that of :class:`torch.nn.Embedding`."""
        self._init_cores_(std, init)
        if isinstance(self.hot, HotRows):
            self.hot.reset_parameters(std, init)
        elif self.hot is not None:
            nn.init.normal_(self.hot, std=std)

    def _rows(self, indices: Tensor) -> Tensor:
        """Look rows up, ``(*indices.shape, embedding_dim)``, the padding row like any other."""
        checked = check_range(indices, self.num_embeddings)
        return tt_embedding(Request(self._kept_at(indices), **self._train(), checked=checked))

    def _train(self) -> dict[str, Any]:
        """Return attributes of a :class:`~comera.ops.table.tt_embedding.Request`."""
        train = {
            "cores": list(self.cores), "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim, "gates": self.bond_gates(),
            "threshold": self.prune_below, "hot_HK": self.hot,
        }  # fmt: skip
        if isinstance(self.hot, HotRows):
            train |= {"hot_HK": self.hot.coordinates, "basis_KD": self.hot.basis}
        return train

    def share_parameters_(self, lead: "TTTable") -> None:
        """Share the cores and hot rows of another table of the same modes.

        Raises:
            ValueError: If that has other modes or ranks, or keeps other rows apart.
        """
        alike = isinstance(lead, TTTable) and lead.hot_rows == self.hot_rows
        if not alike or lead.hot_rank != self.hot_rank:
            raise ValueError(f"a table of {self.hot_rows} hot rows cannot share rows of {lead!r}")
        super().share_parameters_(lead)
        self.hot = lead.hot  # type: ignore[assignment]
        group = (lead, *lead.twins)
        self.twins = group
        for table in group:
            table.twins = (*table.twins, self)

    def keep_rows_at_(self, places: Tensor) -> None:
        """Set ``row_order`` of this table and of those that are tied to it."""
        for table in (self, *self.twins):
            table.row_order = places

    @property
    def row_step(self) -> int | None:
        """Distance between neighbours, k of ``scatter_rows``; None where rows are not scattered."""
        return self._step if self.row_order is None else None

    def _kept_at(self, indices: Tensor) -> Tensor:
        """Return the rows at which indices are kept.

        An index out of range stays one: it must not become a row that there is.
        """
        if self.row_order is not None:
            return self.row_order.index_select(0, indices.reshape(-1)).view(indices.shape)
        if self._step is not None:
            scattered = indices.long() * self._step % self.num_embeddings
            if not is_eager():  # else they have been looked at
                outside = (indices < 0) | (indices >= self.num_embeddings)
                scattered = torch.where(outside, indices, scattered)
            return scattered
        return indices

    def _every_row_kept_at(self) -> Tensor | None:
        """Return the rows at which all indices are kept; None where each is at its own."""
        if self.row_order is None and self._step is None:
            return None
        return self._kept_at(torch.arange(self.num_embeddings, device=self.cores[0].device))

    def dense_weight(self) -> Tensor:
        """Compute the dense ``(num_embeddings, embedding_dim)`` table anew; differentiable.

        The padding row is zero.
        """
        table = ttm_to_dense(self.gated_cores())
        table = table[: self.num_embeddings - self.hot_rows, : self.embedding_dim]
        if self.hot is not None:
            hot = self.hot.dense_weight() if isinstance(self.hot, HotRows) else self.hot
            table = torch.cat([hot, table])
        rows = self._every_row_kept_at()
        if rows is not None:
            table = table.index_select(0, rows)
        return self._as_read(table)

    def _as_read(self, weight: Tensor) -> Tensor:
        if self.padding_idx is None:
            return weight
        keep = torch.arange(self.num_embeddings, device=weight.device) != self.padding_idx
        return weight * keep[:, None]

    def _decompose_(self, weight: Tensor, tolerance: float | None) -> None:
        rows = self._every_row_kept_at()
        kept = weight
        if rows is not None:
            kept = torch.empty_like(weight).index_copy_(0, rows.long(), weight)
        cores = decompose_table(kept[self.hot_rows :], self.shape, tolerance)
        self._set_rows_(kept, cores if tolerance is not None else widened(cores, self.ranks))

    def _set_rows_(self, weight: Tensor, cores: list[Tensor]) -> None:
        """Take over cores for the rows of the train, and the hot rows of a weight."""
        self.set_cores_(cores)
        hot = weight[: self.hot_rows]
        if isinstance(self.hot, HotRows):
            self.hot.set_cores_(decompose_at(hot.T, self.hot.shape, None))
        elif self.hot is not None:
            self.hot.copy_(hot)

    def _weight_size(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def get_extra_state(self) -> Tensor:
        """Return how far apart neighbours are kept, k of ``scatter_rows`` or 1; int64, ``()``."""
        return torch.tensor(self._step or 1)

    def set_extra_state(self, state: Tensor) -> None:
        """Set how far apart neighbours are kept; ``state`` may have been cast with its state dict.

        Raises:
            ValueError: If no table of that many rows keeps them so.
        """
        if state.is_meta:
            return
        golden = _golden_step(self.num_embeddings)
        known = [step for step in (1, golden) if state == torch.tensor(step).to(state.dtype)]
        if not known:
            raise ValueError(
                f"the state dict keeps row i at i * {state.item()}, and a table of "
                f"{self.num_embeddings} rows keeps it at i or at i * {golden}"
            )
        self.scatter_rows = known[0] != 1
        self._step = known[0] if self.scatter_rows else None

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        """Load rows that were moved in the file and not here, or the other way round."""
        saved = state_dict.get(f"{prefix}row_order")
        if isinstance(saved, Tensor) and saved.shape == (self.num_embeddings,):
            self.row_order = torch.empty_like(saved, device=self.cores[0].device)
        elif saved is None and f"{prefix}cores.0" in state_dict:
            self.row_order = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def num_dense(self) -> int:
        return (self.num_embeddings - self.hot_rows) * self.embedding_dim

    def config(self) -> dict[str, Any]:
        hot = self.hot.config() if isinstance(self.hot, HotRows) else None
        return {**super().config(), "row_order": self.row_order is not None, "hot": hot}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None = None) -> Self:
        table = super().from_config(config, lead)
        if config["row_order"]:
            table.row_order = torch.empty(table.num_embeddings, dtype=torch.int32, device="meta")
        if isinstance(table.hot, HotRows):
            table.hot.resize_ranks_(whole_numbers(config["hot"], "ranks"))
            table.hot.start_ranks = whole_numbers(config["hot"], "start_ranks")
            table.hot.prune_below = config["hot"]["prune_below"]
        return table

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
        if not isinstance(dense, (nn.Embedding, nn.EmbeddingBag)):
            raise TypeError(f"nn.Embedding or nn.EmbeddingBag is needed, not {dense!r}")
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
            scatter_rows=False,
            **settings,
        ).to_empty(device=dense.weight.device)
        layer._set_rows_(dense.weight, cores)
        layer.freeze_like_(dense)
        return layer.train(dense.training)

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
            dense.weight.copy_(self.dense_weight())
        dense.weight.requires_grad_(any(param.requires_grad for param in self.parameters()))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.hot_rows:
            parts.append(f"hot_rows={self.hot_rows}")
        if self.hot_rank is not None:
            parts.append(f"hot_rank={self.hot_rank}")
        stored = sum(param.numel() for param in self.parameters())
        dense = self.num_embeddings * self.embedding_dim
        return ", ".join([*parts, self._describe_ranks(dense / max(1, stored))])


def _golden_step(rows: int) -> int:
    """Find the number nearest to the golden section of the rows that shares no factor with them.

    Its multiples modulo the rows take each value once, and no few that follow each other are close.
    Of more than 3,037 million rows the step is smaller, so that no multiple passes 64 bits.
    """
    step = max(1, round(min(rows, (2**63 - 1) // rows) * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, rows) != 1:
        step += 1
    return step


def _cold_rows(num_embeddings: int, hot_rows: int) -> int:
    if not 0 <= hot_rows < num_embeddings:
        raise ValueError(
            f"hot_rows={hot_rows} must leave rows for the tensor train: "
            f"0 to {num_embeddings - 1} of {num_embeddings}"
        )
    return num_embeddings - hot_rows
