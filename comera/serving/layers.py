"""Define contracted layers, made of torch's layers: two thin linear layers, factored tables.

Cores are contracted in float64, without their pruned ranks.
"""

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from comera.nn.dense_weight import read_only
from comera.nn.embedding import TableHead
from comera.nn.forms import as_torch, from_torch
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, dtype_name, dtype_of, is_open
from comera.nn.table import HotRows, TTTable
from comera.ops.table.distinct_rows import check_integers
from comera.shapes import whole_number

_WRITTEN = (
    "the weight of this {0} is the product of two factors, so that an edit in place would change "
    "nothing. Edit weights, as the merge of an adapter does, before comera.freeze_: "
    "comera.densify_(model) makes layers whose weight can be edited"
)


class PlainWhenPickled(nn.Module):
    """Base of contracted layers; those of :func:`~comera.to_plain_` are pickled as torch's own."""

    is_plain: bool = False

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the layer as one of torch's own, which torch.jit.script puts in its place."""
        own = {key: value for key, value in vars(self).items() if key != "is_plain"}
        new: nn.Module = nn.Sequential()
        if not isinstance(self, nn.Sequential):
            new = fx.GraphModule(self, fx.Tracer().trace(self), type(self).__name__)
            own["_modules"] = new._modules
        vars(new).update(own)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.is_plain:
            return super().__reduce_ex__(protocol)
        new = self.__prepare_scriptable__()
        if isinstance(new, nn.Sequential):  # by itself it would name its class, not that of self
            return nn.Sequential, (), vars(new)
        return new.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = self.__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class ThinLinear(PlainWhenPickled, nn.Sequential):
    """A linear layer as two thin ones, ``(in, rank)`` and ``(rank, out)``; the second has the bias.

    ``dense_form`` names the class of both, if it is one given to :func:`~comera.register_layer`.
    """

    def __init__(self, first: nn.Module, second: nn.Module, dense_form: str | None = None) -> None:
        super().__init__(first, second)
        self.dense_form = dense_form
        self.in_features = as_torch(first).in_features
        self.rank, self.out_features = as_torch(second).in_features, as_torch(second).out_features

    @property
    def weight(self) -> Tensor:
        """The dense ``(out_features, in_features)`` weight, computed in each access; read-only."""
        first, second = map(as_torch, self)
        return read_only(lambda: second.weight @ first.weight, _WRITTEN.format("ThinLinear"))

    @property
    def bias(self) -> Any:
        """The bias of the second layer; None if there is none."""
        return self[1].bias

    def config(self) -> dict[str, Any]:
        """Return the settings from which :meth:`from_config` rebuilds the layer."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rank": self.rank,
            "bias": self.bias is not None,
            "dtype": dtype_name(next(self.parameters())),
            "dense_form": self.dense_form,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None = None) -> Self:
        """Make a layer on the ``meta`` device."""
        rank, form = config["rank"], config["dense_form"]
        to = {"device": "meta", "dtype": dtype_of(config)}
        first = nn.Linear(config["in_features"], rank, False, **to)
        second = nn.Linear(rank, config["out_features"], config["bias"], **to)
        return cls(from_torch(first, form), from_torch(second, form), form)


class FactoredTable(PlainWhenPickled):
    """A table whose row ``v * W + w`` is ``left[v] @ right[w]``, with the first rows kept apart.

    Its inputs are those of :class:`torch.nn.Embedding`, or with a ``mode`` those of
    :class:`torch.nn.EmbeddingBag`. The factors are ``left (V, P, R)`` and ``right (W, R, Q)``, the
    first rows ``hot (hot_rows, embedding_dim)``, or ``(hot_rows, K)`` with a ``basis (K,
    embedding_dim)``. ``row_order (num_embeddings,)`` is the row at which each index is kept;
    without it, index ``i`` is kept at row ``i * step`` modulo the rows.
    """

    row_order: Tensor | None
    _SETTINGS = (
        "num_embeddings", "embedding_dim", "padding_idx", "step", "mode", "include_last_offset",
    )  # fmt: skip
    output_scale: float = 1.0
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False  # as of torch's

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        left: Tensor,
        right: Tensor,
        hot: Tensor | None = None,
        basis: Tensor | None = None,
        padding_idx: int | None = None,
        row_order: Tensor | None = None,
        step: int | None = None,
        mode: str | None = None,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx, self.step = padding_idx, step
        self.inner = tuple(left.shape[1:]), tuple(right.shape[1:])
        self.left = nn.Embedding.from_pretrained(left.flatten(1))
        self.right = nn.Embedding.from_pretrained(right.flatten(1))
        self.hot = None if hot is None else nn.Embedding.from_pretrained(hot)
        self.basis = None if basis is None else nn.Parameter(basis, requires_grad=False)
        self.hot_rows = 0 if hot is None else hot.shape[0]
        self.register_buffer("row_order", row_order)

    @property
    def weight(self) -> Tensor:
        """The dense ``(num_embeddings, embedding_dim)`` table, read-only."""
        every = torch.arange(self.num_embeddings, device=self.left.weight.device)
        return read_only(
            lambda: self._without_padding(self.rows(every), every),
            _WRITTEN.format(type(self).__name__),
        )

    def config(self) -> dict[str, Any]:
        """Return the settings from which :meth:`from_config` rebuilds the table."""
        hot, basis = None if self.hot is None else self.hot.weight, self.basis
        return {
            **{key: getattr(self, key) for key in self._SETTINGS},
            "output_scale": self.output_scale,
            "left": [self.left.num_embeddings, *self.inner[0]],
            "right": [self.right.num_embeddings, *self.inner[1]],
            "hot": None if hot is None else list(hot.shape),
            "basis": None if basis is None else list(basis.shape),
            "row_order": self.row_order is not None,
            "dtype": dtype_name(self.left.weight),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None = None) -> Self:
        """Make a table on the ``meta`` device."""
        settings: dict[str, Any] = {key: config[key] for key in cls._SETTINGS}
        for key in ("left", "right", "hot", "basis"):
            shape = None if config[key] is None else tuple(map(whole_number, config[key]))
            settings[key] = shape and torch.empty(shape, dtype=dtype_of(config), device="meta")
        if config["row_order"]:
            rows = config["num_embeddings"]
            settings["row_order"] = torch.empty(rows, dtype=torch.int32, device="meta")
        table = cls(**settings)
        table.output_scale = config.get("output_scale", 1.0)
        return table

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if self.mode is None:
            rows = self._without_padding(self.rows(input), input)
            return rows if self.output_scale == 1 else rows * self.output_scale
        flat = input.reshape(-1)
        entries = (torch.ones_like(flat).cumsum(0) - 1).reshape(input.shape)
        rows, mode = self.rows(flat), self.mode
        if self.padding_idx is not None:
            # torch's padding_idx would fix the sizes of an exported program
            counted = (flat != self.padding_idx).unsqueeze(-1)
            rows = torch.where(counted, rows, 0 if mode != "max" else -torch.inf)
            rows = torch.cat([rows, counted.to(rows.dtype)], -1)
            mode = "max" if mode == "max" else "sum"
        with_end = self.include_last_offset and isinstance(offsets, Tensor)  # no proxy of a tracer
        bags = F.embedding_bag(
            entries, rows, offsets, None, 2.0, mode=mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset and not with_end,
        )  # fmt: skip
        if with_end:  # torch may count entries after the last offset in the last bag
            bags = bags[:-1]
        if self.padding_idx is None or self.mode == "sum":
            return bags[:, : self.embedding_dim]
        bags, count = bags[:, : self.embedding_dim], bags[:, self.embedding_dim :]
        return bags / count.clamp(min=1) if self.mode == "mean" else torch.where(count > 0, bags, 0)

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows, ``(*indices.shape, embedding_dim)``; the padding row is not set to zero."""
        if isinstance(indices, Tensor):  # no proxy of a tracer
            check_integers(indices)
        outside = (indices < 0) | (indices >= self.num_embeddings)
        places = self._kept_at(torch.where(outside, 0, indices))
        # an index out of range is also past the end of the left factor, and raises there
        end = self.left.num_embeddings * self.right.num_embeddings
        cold = torch.where(outside, end, (places - self.hot_rows).clamp(min=0))
        width = self.right.num_embeddings
        left = self.left(torch.div(cold, width, rounding_mode="floor"))
        right = self.right(torch.remainder(cold, width))
        rows = torch.matmul(left.unflatten(-1, self.inner[0]), right.unflatten(-1, self.inner[1]))
        rows = rows.flatten(-2)[..., : self.embedding_dim]
        if self.hot is None:
            return rows
        is_hot = places < self.hot_rows
        hot = self.hot(torch.where(is_hot, places, 0))
        if self.basis is not None:
            hot = torch.matmul(hot, self.basis)
        return torch.where(is_hot.unsqueeze(-1), hot, rows)

    def _kept_at(self, indices: Tensor) -> Tensor:
        if self.row_order is not None:
            return self.row_order[indices].long()
        return indices if self.step is None else indices.long() * self.step % self.num_embeddings

    def _without_padding(self, rows: Tensor, indices: Tensor) -> Tensor:
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((indices == self.padding_idx).unsqueeze(-1), 0)

    def products(self, x: Tensor) -> Tensor:
        """Return the products of ``x`` ``(*, embedding_dim)`` with all rows, ``(*, rows)``."""
        (p, r), (_, q) = self.inner
        padded = F.pad(x, (0, p * q - self.embedding_dim)).unflatten(-1, (p, q))
        right = self.right.weight.unflatten(-1, (r, q)).flatten(0, 1)  # (W * R, Q)
        half = F.linear(padded, right)  # (*, P, W * R)
        half = half.unflatten(-1, (-1, r)).transpose(-3, -2).flatten(-2)  # (*, W, P * R)
        cold = F.linear(half, self.left.weight).transpose(-2, -1).flatten(-2)  # (*, V * W)
        whole = cold[..., : self.num_embeddings - self.hot_rows]
        if self.hot is not None:
            seen = x if self.basis is None else F.linear(x, self.basis)
            whole = torch.cat([F.linear(seen, self.hot.weight), whole], -1)
        every = torch.arange(self.num_embeddings, device=x.device)
        if self.row_order is not None or self.step is not None:
            whole = whole.index_select(-1, self._kept_at(every))
        if self.padding_idx is not None:
            whole = torch.where(every == self.padding_idx, 0, whole)
        return whole


class FactoredHead(PlainWhenPickled, TableHead):
    """Output layer on a factored table; the dense table is never formed."""

    _table_class = FactoredTable

    def __init__(self, embedding: FactoredTable, bias: nn.Parameter | None = None) -> None:
        super().__init__(embedding, bias)
        self.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        products = self.embedding.products(input)
        return products if self.bias is None else products + self.bias


@torch.no_grad()
def thin_factors(layer: TTLinear | HotRows) -> tuple[Tensor, Tensor]:
    """Return the factors A ``(in, R)`` and B ``(R, out)`` of a layer, in the dtype of the cores."""
    split, dtype = layer.shape.split, layer.cores[0].dtype
    # as the cores of a table whose columns are of width one
    cores = [core.unsqueeze(2) for core in _open_cores(layer)]
    left, right = (_joined(part).squeeze(2) for part in (cores[:split], cores[split:]))
    left, right = left.squeeze(0), right.squeeze(-1)
    if isinstance(layer, TTLinear):
        left, right = left[: layer.in_features], right[:, : layer.out_features]
    return left.to(dtype).contiguous(), right.to(dtype).contiguous()


@torch.no_grad()
def table_factors(table: TTTable) -> tuple[Tensor, Tensor]:
    """Return the factors ``left (V, P, R)`` and ``right (W, R, Q)`` of rows that are not hot."""
    split, dtype = table.shape.split, table.cores[0].dtype
    cores = _open_cores(table)
    left, right = _joined(cores[:split]).squeeze(0), _joined(cores[split:]).squeeze(-1)
    return left.to(dtype).contiguous(), right.transpose(0, 1).to(dtype).contiguous()


def _open_cores(layer: TensorTrainModule) -> list[Tensor]:
    """Return the cores in float64, multiplied by the gates and without pruned ranks."""
    cores = [core.detach().double() for core in layer.cores]
    for k, gate in enumerate(layer.gates):
        open_R = (
            torch.ones(len(gate), device="cpu")
            if gate.is_meta
            else is_open(gate, layer.prune_below)
        )
        keep = open_R.nonzero().flatten().to(gate.device)
        if not len(keep):  # the weight has vanished
            return [core.new_zeros(1, *core.shape[1:-1], 1) for core in cores]
        cores[k] = cores[k].index_select(-1, keep) * gate.detach().double()[keep]
        cores[k + 1] = cores[k + 1].index_select(0, keep)
    return cores


def _joined(cores: list[Tensor]) -> Tensor:
    """Contract cores ``(r, v, p, s)`` to ``(r, product of v, product of p, s)``."""
    whole = cores[0]
    for core in cores[1:]:
        whole = torch.einsum("rvps,swqt->rvwpqt", whole, core).flatten(3, 4).flatten(1, 2)
    return whole
