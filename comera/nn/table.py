"""Define the base of embeddings and bags: a table held as a tensor-train matrix."""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from comera.extras import say_once
from comera.nn.decompose import decompose_matrix, decompose_table, widened
from comera.nn.init import Init
from comera.nn.module import PRUNE_BELOW, TensorTrainModule, log
from comera.ops.cores import rank_gate
from comera.ops.dispatch import is_eager
from comera.ops.operator import is_traced
from comera.ops.table.distinct_rows import check_range
from comera.ops.table.tt_embedding import Request, tt_embedding, ttm_to_dense
from comera.planning.ways import Lookup
from comera.shapes import TTMShape, TTShape, check_whole_numbers, only_one, whole_number

_PLACES = {True: "rows_scattered", False: "rows_in_order"}
"""Buffer that holds the number of rows; its name says where they are kept."""


class HotRows(TensorTrainModule):
    """The hot rows of a table as a ``(rows, width)`` matrix of low rank, with one gated bond.

    Raises ``ValueError`` if the rank is below one, or so high that dense rows have no more numbers.
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
        check_whole_numbers(hot_rank=rank)
        most = (rows * width - 1) // (rows + width)
        if not 1 <= rank <= most:
            raise ValueError(
                f"hot_rank={rank} must be 1 to {most}: above that, {rows} rows and their basis "
                f"hold no fewer numbers than dense rows of width {width}"
            )
        self._build(TTShape((rows,), (width,), (rank,)), prune_below, device, dtype)

    def reset_parameters(self, std: float = 1.0, init: Init = "orthogonal") -> None:
        self._init_cores_(std, init)

    @property
    def coordinates(self) -> Tensor:
        """The coordinates of each hot row in the basis, ``(rows, rank)``."""
        return self.cores[0].squeeze(0)

    @property
    def basis(self) -> Tensor:
        """The shared basis of the rows, ``(rank, width)``, multiplied by the gates."""
        return rank_gate(self.cores[1].squeeze(-1).T, self.gates[0], self.prune_below).T

    def dense_weight(self) -> Tensor:
        return self.coordinates @ self.basis

    @staticmethod
    def _cores_of(weight: Tensor, shape: TTShape, tolerance: float | None) -> list[Tensor]:
        return decompose_matrix(weight.T, shape, tolerance)

    def _weight_size(self) -> tuple[int, int]:
        return self.shape.in_width, self.shape.out_width

    def extra_repr(self) -> str:
        return self._describe_ranks(self.num_dense / max(1, self.num_stored))


class TTTable(TensorTrainModule):
    """Base of the embeddings: a table as a tensor-train matrix, with hot rows beside the train.

    Attributes:
        hot: The first ``hot_rows`` rows: a dense parameter or, with a ``hot_rank``,
            :class:`~comera.nn.table.HotRows`. None if there are none.
        row_order: ``(num_embeddings,)`` int32, the row at which each index is kept after
            :func:`~comera.update_hot_rows_`; None before.
        scatter_rows: Whether index ``i`` is kept at row ``i * k modulo num_embeddings``, with k
            near the golden section; a state dict has it in the name of a buffer.
        twins: The tables tied to this one, which share its cores and hot rows.
        output_scale: Number that multiplies the rows of an embedding after the lookup.
        sparse: False: gradients of cores are dense, and small.
        dense_sparse: Whether the dense table, which :meth:`to_dense` makes, has sparse gradients.
    """

    row_order: Tensor | None
    rows_scattered: Tensor
    rows_in_order: Tensor
    twins: "tuple[TTTable, ...]" = ()
    output_scale: float = 1.0
    dense_sparse: bool = False
    hot: nn.Parameter | HotRows | None
    shape: TTMShape  # type: ignore[assignment]
    _modes: TTMShape
    _shapes = TTMShape
    _settings: ClassVar[tuple[str, ...]] = (
        "num_embeddings", "embedding_dim", "padding_idx", "hot_rows", "hot_rank", "scatter_rows",
        "prune_below",
    )  # fmt: skip
    _dense_class: ClassVar[Any]
    _own_settings: ClassVar[tuple[str, ...]] = ()
    """Class of torch's table, and the settings it has beside those of ``nn.Embedding``."""

    @torch.inference_mode(False)  # else the parameters could never be trained
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
        check_whole_numbers(1, num_embeddings=num_embeddings)
        refused = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        for name, value in refused.items():
            if value not in (None, False):
                raise NotImplementedError(
                    f"{type(self).__name__} does not support {name}={value}: rows share their "
                    "cores, whose gradients are dense, so one row cannot be changed by itself"
                )
        if padding_idx is not None:
            check_whole_numbers(padding_idx=padding_idx)
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx={padding_idx} is outside a table of {num_embeddings} rows"
                )
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, False
        self.hot_rows, self.hot_rank = hot_rows, hot_rank
        if scatter_rows and hot_rows:
            raise ValueError(
                f"scatter_rows=True moves all rows, and hot_rows={hot_rows} are the first: give one"
            )
        self._scatter_(not hot_rows if scatter_rows is None else scatter_rows, device)
        self.register_buffer("row_order", None)
        fitted = TTMShape.fit(
            _cold_rows(num_embeddings, hot_rows), embedding_dim,
            rank=rank, shape=shape, order=order, compression=compression,
        )  # fmt: skip
        self._build(fitted, prune_below, device, dtype)
        if hot_rank is not None:
            if not hot_rows:
                raise ValueError(f"hot_rank={hot_rank} is of hot rows: give hot_rows too")
            self.hot = HotRows(hot_rows, embedding_dim, hot_rank, prune_below, device, dtype)
        else:
            hot = torch.empty(hot_rows, embedding_dim, device=device, dtype=dtype)
            self.register_parameter("hot", nn.Parameter(hot) if hot_rows else None)
        self.reset_parameters()

    def reset_parameters(self, std: float = 1.0, init: Init = "orthogonal") -> None:
        """Draw new rows with standard deviation ``std``; the default is that of torch's tables."""
        self._init_cores_(std, init)
        if isinstance(self.hot, HotRows):
            self.hot.reset_parameters(std, init)
        elif self.hot is not None:
            nn.init.normal_(self.hot, std=std)

    def _rows(self, indices: Tensor) -> Tensor:
        """Look up rows, ``(*indices.shape, embedding_dim)``; the padding row is not set to zero."""
        checked = check_range(indices, self.num_embeddings)
        return tt_embedding(Request(self._kept_at(indices), **self._train(), checked=checked))

    def _train(self) -> dict[str, Any]:
        """Return the table's tensors and sizes as arguments of a :class:`Request`."""
        train = {
            "cores": list(self.cores), "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim, "gates": self.bond_gates(),
            "threshold": self.prune_below, "hot_HK": self.hot,
        }  # fmt: skip
        if isinstance(self.hot, HotRows):
            train |= {"hot_HK": self.hot.coordinates, "basis_KD": self.hot.basis}
        return train

    def at(self, tokens: int, *, together: int = 1) -> Lookup:
        rows = self.num_embeddings - self.hot_rows
        return Lookup(self.shape, tokens, num_embeddings=rows, embedding_dim=self.embedding_dim)

    def share_parameters_(self, lead: "TTTable") -> None:
        """Share the cores and hot rows of another table; raise ``ValueError`` if sizes differ."""
        alike = isinstance(lead, TTTable) and lead.hot_rows == self.hot_rows
        if not alike or lead.hot_rank != self.hot_rank:
            raise ValueError(f"a table of {self.hot_rows} hot rows cannot share rows of {lead!r}")
        super().share_parameters_(lead)
        self.hot = lead.hot  # type: ignore[assignment]
        self.twins = (lead, *lead.twins)
        for table in self.twins:
            table.twins = (*table.twins, self)

    def keep_rows_at_(self, places: Tensor) -> None:
        """Set ``row_order`` of this table and of the tables tied to it."""
        for table in (self, *self.twins):
            table.row_order = places

    def _kept_at(self, indices: Tensor) -> Tensor:
        """Return the row at which each index is kept; indices out of range stay out of range."""
        if self.row_order is not None:
            return self.row_order.index_select(0, indices.reshape(-1)).view(indices.shape)
        if self._step is not None:
            scattered = indices.long() * self._step % self.num_embeddings
            if not is_eager() or is_traced():  # else their range is checked
                outside = (indices < 0) | (indices >= self.num_embeddings)
                scattered = torch.where(outside, indices, scattered)
            return scattered
        return indices

    def _every_row_kept_at(self) -> Tensor | None:
        """Return the row at which each index of the table is kept; None if at the index itself."""
        if self.row_order is None and self._step is None:
            return None
        return self._kept_at(torch.arange(self.num_embeddings, device=self.cores[0].device))

    def dense_weight(self) -> Tensor:
        """Compute the dense table ``(num_embeddings, embedding_dim)``, with a zero padding row."""
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
        self.set_cores_(cores)
        hot = weight[: self.hot_rows]
        if isinstance(self.hot, HotRows):
            self.hot._decompose_(hot, None)
        elif self.hot is not None:
            self.hot.copy_(hot)

    def _weight_size(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def _scatter_(self, scattered: bool, device: torch.device | str | None) -> None:
        self.scatter_rows = scattered
        self._step = _golden_step(self.num_embeddings) if scattered else None
        self._buffers.pop(_PLACES[not scattered], None)
        on_meta = torch.device(device or "cpu").type == "meta"  # of tensors without numbers only
        count = torch.tensor(self.num_embeddings, device=None if on_meta else device)
        self.register_buffer(_PLACES[scattered], count)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        count = destination[prefix + _PLACES[self.scatter_rows]]
        if not count.is_meta:  # it is not what to_empty found in memory
            count.fill_(self.num_embeddings)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        """Load also rows that are kept elsewhere; raise ``ValueError`` for another table's."""
        rows, old = self.num_embeddings, state_dict.pop(f"{prefix}_extra_state", None)
        if isinstance(old, Tensor):  # of files before 0.1: a step, and 64 times the rows
            step = 1 - 64 * rows if old < 0 else _golden_step(rows) + 64 * rows
            count = rows if old == step else int(old) // 64
            state_dict[prefix + _PLACES[bool(old > 0)]] = torch.tensor(count)
        for scattered, name in _PLACES.items():
            count = state_dict.get(prefix + name)
            if not isinstance(count, Tensor):
                continue
            like = float(torch.tensor(rows).to(count.dtype))  # it may be cast with the rest,
            near = 5e-7 if count.is_floating_point() else 0.0  # or be a mean
            if not count.is_meta and not math.isclose(count, like, rel_tol=near):
                raise ValueError(
                    f"the state dict's {prefix}{name} is {count.item()}, and this table has {rows} "
                    "rows: it is of a table with another number of rows"
                )
            if scattered != self.scatter_rows:
                self._scatter_(scattered, self.cores[0].device)
        saved = state_dict.get(f"{prefix}row_order")
        if isinstance(saved, Tensor) and saved.shape == (rows,):
            self.row_order = torch.empty_like(saved, device=self.cores[0].device)
        elif saved is None and f"{prefix}cores.0" in state_dict:
            self.row_order = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def num_dense(self) -> int:
        return (self.num_embeddings - self.hot_rows) * self.embedding_dim

    def config(self) -> dict[str, Any]:
        hot = self.hot.config() if isinstance(self.hot, HotRows) else None
        config = {**super().config(), "row_order": self.row_order is not None, "hot": hot}
        return {**config, "sparse": self.dense_sparse, "output_scale": self.output_scale}

    def freeze_like_(self, dense: Any) -> None:
        """Copy what a dense table is beside its weight: frozen, sparse, of scaled output."""
        super().freeze_like_(dense)
        self.dense_sparse, self.output_scale = dense.sparse, getattr(dense, "output_scale", 1.0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None = None) -> Self:
        table = super().from_config(config, lead)
        table.dense_sparse = config["sparse"]
        table.output_scale = config.get("output_scale", 1.0)
        if config["row_order"]:
            table.row_order = torch.empty(table.num_embeddings, dtype=torch.int32, device="meta")
        if isinstance(table.hot, HotRows):
            table.hot.resize_ranks_(tuple(map(whole_number, config["hot"]["ranks"])))
            table.hot.start_ranks = tuple(map(whole_number, config["hot"]["start_ranks"]))
            table.hot.prune_below = config["hot"]["prune_below"]
        return table

    @classmethod
    @torch.no_grad()
    def from_embedding(
        cls,
        embedding: Any,
        *,
        rank: int | Sequence[int] | None = None,
        shape: TTMShape | Sequence[Sequence[int]] | None = None,
        order: int = 4,
        compression: float | None = None,
        tolerance: float | None = None,
        hot_rows: int = 0,
        hot_rank: int | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> Self:
        """Approximate a dense table by TT-SVD, without scattered rows.

        Arguments are those of the constructor. ``tolerance``, a bound on the relative Frobenius
        error of the rows that are not hot, can replace the rank. An ``nn.Embedding`` reads its
        padding row, whatever it holds: if that is not zero, the result has no ``padding_idx``, and
        a warning says so. Raises the constructor's errors, and ``TypeError`` if ``embedding`` is of
        another class, or has a forward pass of its own.
        """
        only_one(rank=rank, compression=compression, tolerance=tolerance)
        if getattr(type(embedding), "forward", None) is not cls._dense_class.forward:
            raise TypeError(f"nn.{cls._dense_class.__name__} is needed, not {embedding!r}")
        weight = embedding.weight
        fitted = TTMShape.fit(
            _cold_rows(weight.shape[0], hot_rows), weight.shape[1],
            rank=rank, shape=shape, order=order, compression=compression,
        )  # fmt: skip
        cores = decompose_table(weight[hot_rows:], fitted, tolerance)
        make: Any = cls
        layer = make(
            *weight.shape, max_norm=embedding.max_norm,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            device="meta", dtype=weight.dtype, padding_idx=padding_to_keep(embedding),  # not drawn
            shape=replace(fitted, ranks=tuple(core.shape[-1] for core in cores[:-1])),
            hot_rows=hot_rows, hot_rank=hot_rank, scatter_rows=False, prune_below=prune_below,
            **{name: getattr(embedding, name) for name in cls._own_settings},
        ).to_empty(device=weight.device)  # fmt: skip
        layer._set_rows_(weight, cores)
        layer.freeze_like_(embedding)
        return layer.train(embedding.training)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, *args: Any, **settings: Any
    ) -> Self:
        """Approximate a dense ``(rows, width)`` tensor by :meth:`from_embedding`.

        Arguments are those of ``from_pretrained`` of torch's table, which freezes by default, and
        by keyword those of :meth:`from_embedding`.
        """
        ours = inspect.signature(TTTable.from_embedding).parameters.keys() & settings.keys()
        own = {name: settings.pop(name) for name in ours}
        dense = cls._dense_class.from_pretrained(embeddings, freeze, *args, **settings)
        return cls.from_embedding(dense, **own)

    @torch.no_grad()
    def to_dense(self) -> Any:
        """Return an ``nn.Embedding`` or ``nn.EmbeddingBag`` with this layer's dense table."""
        like = self.cores[0]
        weight = like.new_empty(self.num_embeddings, self.embedding_dim).copy_(self.weight)
        dense = self._dense_class(
            self.num_embeddings, self.embedding_dim, padding_idx=self.padding_idx,
            sparse=self.dense_sparse, _weight=weight,  # nothing is drawn
            **{name: getattr(self, name) for name in self._own_settings},
        )  # fmt: skip
        if self.output_scale != 1:  # for what from_torch makes of it
            dense.output_scale = self.output_scale
        dense.weight.requires_grad_(any(param.requires_grad for param in self.parameters()))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        shown = {"padding_idx": self.padding_idx, "hot_rows": self.hot_rows or None}
        shown["hot_rank"] = self.hot_rank
        parts += [f"{name}={value}" for name, value in shown.items() if value is not None]
        stored = sum(param.numel() for param in self.parameters())
        dense = self.num_embeddings * self.embedding_dim
        return ", ".join([*parts, self._describe_ranks(dense / max(1, stored))])


def padding_to_keep(table: Any) -> int | None:
    """Return the padding row of a dense table; None if torch reads it as other than zeros."""
    row, weight = table.padding_idx, table.weight
    if row is None or isinstance(table, nn.EmbeddingBag) or weight.is_meta or not weight[row].any():
        return row
    say_once(
        log, logging.WARNING,
        "row %d of a table of %d is its padding_idx and not zero: it keeps its numbers, is trained "
        "like any other, and padding_idx is None now",
        row, len(weight),
    )  # fmt: skip
    return None


def _golden_step(rows: int) -> int:
    """Return a number near the golden section of ``rows`` that is coprime to it."""
    # Its multiples modulo rows take each value once; neighbours are far apart, and fit 64 bits.
    step = max(1, round(min(rows, (2**63 - 1) // rows) * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, rows) != 1:
        step += 1
    return step


def _cold_rows(num_embeddings: int, hot_rows: int) -> int:
    check_whole_numbers(hot_rows=hot_rows)
    if not 0 <= hot_rows < num_embeddings:
        raise ValueError(
            f"hot_rows={hot_rows} must leave rows for the tensor train: "
            f"0 to {num_embeddings - 1} of {num_embeddings}"
        )
    return num_embeddings - hot_rows
