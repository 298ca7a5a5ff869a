"""Define embeddings and bags on tensor-train matrices, and output layers that share their cores."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from comera.nn.dense_weight import WeightByAssignment
from comera.nn.module import PRUNE_BELOW, dtype_name, dtype_of, linear_of
from comera.nn.table import TTTable
from comera.ops.dispatch import is_eager, may_read_values
from comera.ops.operator import is_traced
from comera.ops.table.distinct_rows import bag_of_entries, check_integers, check_range
from comera.ops.table.tt_embedding import Request, tt_embedding
from comera.shapes import TTMShape


class TTEmbedding(TTTable):
    """Drop-in for :class:`torch.nn.Embedding` that stores its table as rank-gated TTM cores.

    Args:
        num_embeddings: Number of rows. Row modes may multiply to more, which indices may not reach.
        embedding_dim: Width of a row.
        padding_idx: A row that reads as zeros and gets no gradient.
        max_norm: Not supported: rows share cores, so one row cannot be renormalised.
        norm_type: Has no effect; it keeps the order of torch's arguments.
        scale_grad_by_freq: Not supported.
        sparse: Not supported: the gradients of the cores are small and dense.
        rank: Bound on every bond, or a list of all inner bonds; 32 if no size is given.
        shape: ``(row_modes, col_modes)``, e.g. ``((16, 20, 10, 10), (4, 4, 8, 6))`` for 30522 rows
            of 768, or a :class:`~comera.TTMShape`; if None, modes chosen for fast lookups.
        order: Number of cores if ``shape`` is None.
        compression: Ratio of the entries of dense rows, without the hot ones, to those of the
            cores; replaces ``rank``.
        hot_rows: How many of the first rows, the most frequent ones, to keep densely beside the
            train.
        hot_rank: Hold each hot row as so many coordinates in a shared basis, instead of densely.
        scatter_rows: Whether to put neighbouring indices far apart in the train, as neighbouring
            rows share most parameters. Default: if there are no hot rows. Give False if
            neighbouring indices mean similar things.
        prune_below: A gate at or below this is a pruned rank.
        device: Device of the parameters.
        dtype: Type of the cores; gates are float32 or wider.

    Shapes:
        input: integers of any shape; output ``(*input.shape, embedding_dim)``.

    Raises:
        ValueError: If modes or ranks do not fit the table.
        TypeError: If indices are no whole numbers.
        NotImplementedError: For ``max_norm``, ``scale_grad_by_freq`` and ``sparse``.

    Source: CoMERA, arXiv 2405.14377, section 3.
    """

    _dense_class = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        self._check_there(input)
        rows = nn.functional.embedding(input, self.weight) if input.is_nested else self._rows(input)
        if self.output_scale != 1:
            rows = rows * self.output_scale
        if self.padding_idx is None or input.is_nested:
            return rows
        return rows.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)


class TTEmbeddingBag(TTTable):
    """Drop-in for :class:`torch.nn.EmbeddingBag` that stores its table as rank-gated TTM cores.

    ``forward`` has torch's arguments: bags as rows of a 2-d input, or a 1-d input with ``offsets``;
    ``per_sample_weights`` with ``mode="sum"``. With ``include_last_offset``, entries after the last
    offset are in no bag; on a GPU, and when compiled, there must be no such entries.

    Args:
        mode: ``"sum"``, ``"mean"`` or ``"max"`` of the rows of a bag.
        include_last_offset: Whether the last offset is the end of the last bag.
        padding_idx: A row whose entries are left out of their bags.

    Other arguments are those of :class:`TTEmbedding`.

    Shapes:
        output ``(bags, embedding_dim)``.

    Raises:
        ValueError: If offsets decrease, do not begin at 0 or pass the end of the input (on the
            CPU), weights do not fit the input, or there are entries and no bags.
        IndexError: If an index is no row (on the CPU).
        TypeError: If indices or offsets are no whole numbers.
    """

    _dense_class = nn.EmbeddingBag
    _own_settings = ("mode", "include_last_offset")
    _settings = (*TTTable._settings, *_own_settings)

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
        scatter_rows: bool | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r} must be 'sum', 'mean' or 'max'")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            sparse, device, dtype, rank=rank, shape=shape, order=order, compression=compression,
            hot_rows=hot_rows, hot_rank=hot_rank, scatter_rows=scatter_rows,
            prune_below=prune_below,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        self._check_there(input)
        flat, starts, bags = self._request(input, offsets, per_sample_weights)
        return self._maxima(flat, starts, bags) if self.mode == "max" else tt_embedding(bags)

    def _request(
        self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Request]:
        """Return the indices of all entries, the starts of bags, and the request of the bags."""
        with_end = self.include_last_offset
        if input.is_nested:  # rows of any length, which torch's bags take as offsets
            jagged: Any = input
            with_end, offsets, input = True, jagged.offsets(), jagged.values()
            weights = None if weights is None else weights.values()
        check_integers(input)
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    "offsets are for a 1-d input; the bags of this 2-d input are its "
                    f"{input.shape[0]} rows"
                )
            flat = input.reshape(-1)
            starts = torch.arange(input.shape[0], device=input.device) * input.shape[1]
        elif input.dim() != 1:
            raise ValueError(f"input has shape {tuple(input.shape)}; it must be 1-d or 2-d")
        elif offsets is None:
            raise ValueError("a 1-d input needs offsets: where each bag begins in it")
        else:
            flat, starts = input, offsets.contiguous()
            known = _check_offsets(offsets, input.shape[0], with_end)
            if with_end:
                flat, starts = input[: int(offsets[-1])] if known else input, starts[:-1]
        check_range(input if input.dim() == 2 else flat, self.num_embeddings)
        if weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(
                    f"per_sample_weights need mode='sum', this bag has mode={self.mode!r}"
                )
            if weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights have shape {tuple(weights.shape)}, "
                    f"the input {tuple(input.shape)}"
                )
            dtype = self.cores[0].dtype
            if weights.dtype != dtype:
                raise ValueError(f"per_sample_weights are {weights.dtype}, the table {dtype}")
            weights = weights.reshape(-1)[: flat.shape[0]]
        if self.mode != "max":
            weights = self._weights(flat, starts, weights)
        rows, train, checked = self._kept_at(flat), self._train(), is_eager()
        bags = Request(rows, **train, weights_N=weights, offsets_B=starts, checked=checked)
        return flat, starts, bags

    def _weights(self, flat: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return the weight of each entry in the sum of its bag; None if all are one."""
        if self.padding_idx is None and self.mode == "sum":
            return weights
        dtype = self.cores[0].dtype
        counted = torch.ones_like(flat, dtype=dtype)
        if self.padding_idx is not None:
            counted = (flat != self.padding_idx).to(dtype)
        if self.mode == "sum":
            return counted if weights is None else weights * counted
        bag = bag_of_entries(starts, flat.shape[0]) + 1
        wide = counted.double() if flat.device.type == "cpu" else counted.float()
        sizes = wide.new_zeros(starts.shape[0] + 1).index_add_(0, bag, wide)
        return counted / sizes.clamp(min=1).index_select(0, bag).to(dtype)

    def _maxima(self, flat: Tensor, starts: Tensor, bags: Request) -> Tensor:
        rows = tt_embedding(bags._replace(offsets_B=None))
        # Every entry gets a row of its own, so torch's bag arithmetic serves unchanged.
        count, padding = flat.shape[0], None
        entries = torch.arange(count, device=flat.device)
        if not is_eager() or is_traced():  # torch's bags bind a graph to one number of entries
            if self.padding_idx is not None:
                rows = rows.masked_fill((flat == self.padding_idx).unsqueeze(1), -math.inf)
            bag = bag_of_entries(starts, count).unsqueeze(1).expand_as(rows)
            most = rows.new_full((starts.shape[0], rows.shape[1]), -math.inf)
            most = most.scatter_reduce(0, bag, rows, "amax")
            return most.masked_fill(most == -math.inf, 0)
        if self.padding_idx is not None or not count:  # torch refuses an empty table
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        if self.padding_idx is not None:
            padding = count
            entries = torch.where(flat == self.padding_idx, padding, entries)
        return nn.functional.embedding_bag(
            entries, rows, starts.long(), mode="max", padding_idx=padding
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _check_offsets(offsets: Tensor, entries: int, with_end: bool) -> bool:
    """Raise an error for invalid offsets; return whether values could be read."""
    if offsets.dtype == torch.bool or offsets.is_floating_point() or offsets.is_complex():
        raise TypeError(f"offsets are {offsets.dtype}; they must be whole numbers, such as int64")
    if offsets.dim() != 1:
        raise ValueError(f"offsets have shape {tuple(offsets.shape)}; they must be 1-d")
    if with_end and not offsets.shape[0]:
        raise ValueError("offsets are empty; with include_last_offset the end of the input is one")
    known = may_read_values(offsets)
    if offsets.shape[0] == int(with_end) and not (known and with_end) and entries:
        # torch reads past the end of such offsets
        raise ValueError(f"offsets begin no bag, and the input has {entries} entries for bags")
    if not offsets.numel() or not known:
        return False
    if offsets[0] != 0:
        raise ValueError(f"offsets[0]={int(offsets[0])} must be 0, where the first bag begins")
    falling = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falling):
        k = int(falling[0])
        raise ValueError(
            f"offsets must not decrease: offsets[{k + 1}]={int(offsets[k + 1])} comes after "
            f"offsets[{k}]={int(offsets[k])}"
        )
    if offsets[-1] > entries:
        k = int((offsets > entries).nonzero()[0])
        raise ValueError(
            f"offsets[{k}]={int(offsets[k])} is past the end of an input of {entries} entries"
        )
    return True


class TableHead(WeightByAssignment):
    """Base of output layers ``x @ table.T + bias`` on the table that the module ``embedding`` owns.

    The input is ``(*, embedding_dim)``, the output ``(*, num_embeddings)``.
    """

    _table_class: ClassVar[type]

    def __init__(self, embedding: Any, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.embedding = embedding
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The embedding's dense weight, ``(out_features, in_features)``; can be assigned."""
        return self.embedding.weight

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.embedding.weight = value

    def config(self) -> dict[str, Any]:
        """Return the settings from which :meth:`from_config` rebuilds the layer."""
        return {"dtype": None if self.bias is None else dtype_name(self.bias)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None) -> Self:
        """Make a layer on the table ``lead``, a bias being on ``meta``; or raise ``ValueError``."""
        if not isinstance(lead, cls._table_class):
            name = cls._table_class.__name__
            raise ValueError(
                f"it works on the parameters of a {name}, not of {type(lead).__name__}"
            )
        if config["dtype"] is None:
            return cls(lead)
        table: Any = lead
        bias = torch.empty(table.num_embeddings, dtype=dtype_of(config), device="meta")
        return cls(lead, nn.Parameter(bias))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class TiedTTLinear(TableHead):
    """Output layer on a tensor-train embedding; each forward pass forms the dense table."""

    _table_class = TTTable

    def set_weight_(self, weight: Tensor, *, tolerance: float | None = None) -> float:
        """Call ``set_weight_`` of the embedding, see :class:`~comera.TTEmbedding`."""
        return self.embedding.set_weight_(weight, tolerance=tolerance)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.embedding.dense_weight(), self.bias)

    @torch.no_grad()
    def to_dense(self, weight: nn.Parameter) -> nn.Linear:
        """Return a :class:`torch.nn.Linear` with the given ``weight`` and this layer's bias."""
        return linear_of(weight, self.bias).train(self.training)
