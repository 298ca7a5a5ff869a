"""Layers whose cores have been contracted for good: a few torch operations each, nothing trained.

They hold torch's own layers, which tools that look for ``nn.Linear`` find and may replace.

Contract the cores of a layer once and for all, pruned ranks left out, in float64.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.dense_weight import read_only
from comera.nn.linear import TTLinear, along
from comera.nn.module import TensorTrainModule, dtype_name, dtype_of, whole_numbers
from comera.nn.table import HotRows, TTTable
from comera.ops.cores import is_open

_REFUSED = (
    "this {0} was contracted by comera.freeze_ and has no cores left to train. Train the model "
    "before it is frozen, use it frozen only inside `with comera.frozen(model):`, or call "
    "model.eval() to let gradients pass through it to what comes before"
)

_WRITTEN = (
    "the weight of this FrozenLinear is the product of two thin layers, so that an edit in place "
    "would change nothing. Edit weights, as the merge of an adapter does, before comera.freeze_: "
    "comera.densify_(model) makes layers whose weight can be edited"
)


class Frozen(nn.Module):
    """Base of the frozen layers, whose ``forward`` refuses to be part of a training step."""

    def check_not_training(self) -> None:
        """Raise where the layer is in training mode and gradients are wanted.

        Raises:
            RuntimeError: With what to do instead.
        """
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(_REFUSED.format(type(self).__name__))


class FrozenLinear(nn.Sequential, Frozen):
    """A linear layer as two thin ones, or as one dense one.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        rank: Width between the two; None for a single dense layer.
        bias: Whether there is a bias.
        device: Device of the weights.
        dtype: Type of the weights.
        feature_dim: Where the features are, counted from the last dimension, which is -1.
        dense_form: Class of the dense layer it stands for, where that is not ``nn.Linear``.

    Shapes:
        input ``(*, in_features)``, output ``(*, out_features)``; of another ``feature_dim`` as
        :class:`~comera.nn.linear.TTPointwise`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int | None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        feature_dim: int = -1,
        dense_form: str | None = None,
    ) -> None:
        to: dict[str, Any] = {"device": device, "dtype": dtype}
        if rank is None:
            super().__init__(nn.Linear(in_features, out_features, bias, **to))
        else:
            super().__init__(
                nn.Linear(in_features, rank, False, **to), nn.Linear(rank, out_features, bias, **to)
            )
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.feature_dim, self.dense_form = feature_dim, dense_form

    @property
    def weight(self) -> Tensor:
        """The dense ``(out_features, in_features)`` weight, computed where there are two layers.

        Raises:
            RuntimeError: When it is written in place though it was computed.
        """
        weight: Any = self[0].weight
        if self.rank is None:
            return weight
        return read_only(lambda: self[1].weight @ weight, _WRITTEN)

    @property
    def bias(self) -> Any:
        """The bias of the last layer; None if there is none."""
        return self[-1].bias

    def config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` makes the layer of again, without its numbers."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "rank": self.rank,
            "bias": self.bias is not None,
            "dtype": dtype_name(next(self.parameters())),
            "feature_dim": self.feature_dim,
            "dense_form": self.dense_form,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None = None) -> Self:
        """Make a layer on the ``meta`` device of what :meth:`config` has returned."""
        settings = {key: config[key] for key in cls._SETTINGS}
        return cls(**settings, device="meta", dtype=dtype_of(config))

    _SETTINGS = ("in_features", "out_features", "rank", "bias", "feature_dim", "dense_form")

    def forward(self, input: Tensor) -> Tensor:
        self.check_not_training()
        if self.feature_dim == -1:
            return super().forward(input)
        return along(self.feature_dim, super().forward, input)


class FrozenTable(Frozen):
    """A table of which row ``v * W + w`` is ``left[v] @ right[w]``, its first rows kept apart.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Width of a row.
        left: ``(V, P, R)``.
        right: ``(W, R, Q)``.
        hot: The first rows, ``(hot_rows, embedding_dim)``, or ``(hot_rows, K)`` where there is a
            basis; None for none.
        basis: ``(K, embedding_dim)``, of which the hot rows are made.
        padding_idx: A row that reads as zeros.
        row_order: ``(num_embeddings,)``, the row at which each index is kept.
        step: Instead: index ``i`` is kept at row ``i * step`` modulo the number of rows.
    """

    row_order: Tensor | None
    left: nn.Embedding

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
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.step = padding_idx, step
        self.inner = tuple(left.shape[1:]), tuple(right.shape[1:])
        self.left = nn.Embedding.from_pretrained(left.flatten(1))
        self.right = nn.Embedding.from_pretrained(right.flatten(1))
        self.hot = None if hot is None else nn.Embedding.from_pretrained(hot)
        self.basis = None if basis is None else _linear(basis.T)
        self.hot_rows = 0 if hot is None else hot.shape[0]
        self.register_buffer("row_order", row_order)

    def config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` makes the table of again, without its numbers."""
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "left": [self.left.num_embeddings, *self.inner[0]],
            "right": [self.right.num_embeddings, *self.inner[1]],
            "hot": None if self.hot is None else list(self.hot.weight.shape),
            "basis": self.basis is not None,
            "padding_idx": self.padding_idx,
            "row_order": self.row_order is not None,
            "step": self.step,
            "dtype": dtype_name(self.left.weight),
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], lead: nn.Module | None = None, *more: Any
    ) -> Self:
        """Make a table on the ``meta`` device of what :meth:`config` has returned."""
        dtype = dtype_of(config)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        rows, width, hot = config["num_embeddings"], config["embedding_dim"], config["hot"]
        table_class: Any = cls
        return table_class(
            *more,
            rows,
            width,
            empty(*whole_numbers(config, "left")),
            empty(*whole_numbers(config, "right")),
            None if hot is None else empty(*whole_numbers(config, "hot")),
            empty(hot[1], width) if config["basis"] else None,
            config["padding_idx"],
            empty(rows, dtype=torch.int32) if config["row_order"] else None,
            config["step"],
        )

    @property
    def is_dense(self) -> bool:
        """Whether the left factor is the table itself."""
        return self.right.weight.numel() == 1

    def share_(self, lead: "FrozenTable") -> None:
        """Read the factors and hot rows of another table of the same sizes from now on."""
        self.left, self.right = lead.left, lead.right
        self.hot, self.basis = lead.hot, lead.basis
        self.row_order = lead.row_order

    def rows(self, indices: Tensor) -> Tensor:
        """Look rows up, ``(*indices.shape, embedding_dim)``, the padding row like any other."""
        outside = (indices < 0) | (indices >= self.num_embeddings)
        places = self._kept_at(torch.where(outside, 0, indices))
        # what is no row must not be taken for one: it is past the end of the left factor too
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
            hot = self.basis(hot)
        return torch.where(is_hot.unsqueeze(-1), hot, rows)

    def _kept_at(self, indices: Tensor) -> Tensor:
        if self.row_order is not None:
            return self.row_order[indices].long()
        return indices if self.step is None else indices.long() * self.step % self.num_embeddings

    def products(self, x: Tensor) -> Tensor:
        """Return the inner products of ``x`` ``(*, embedding_dim)`` with all rows, ``(*, rows)``.

        The table is not formed: x meets the right factor first, then the left one.
        """
        (p, r), (_, q) = self.inner
        padded = F.pad(x, (0, p * q - self.embedding_dim)).unflatten(-1, (p, q))
        right = self.right.weight.unflatten(-1, (r, q)).flatten(0, 1)  # (W * R, Q)
        half = F.linear(padded, right)  # (*, P, W * R)
        half = half.unflatten(-1, (-1, r)).transpose(-3, -2).flatten(-2)  # (*, W, P * R)
        cold = F.linear(half, self.left.weight).transpose(-2, -1).flatten(-2)  # (*, V * W)
        whole = cold[..., : self.num_embeddings - self.hot_rows]
        if self.hot is not None:
            seen = x if self.basis is None else F.linear(x, self.basis.weight.T)
            whole = torch.cat([F.linear(seen, self.hot.weight), whole], -1)
        if self.row_order is None and self.step is None and self.padding_idx is None:
            return whole
        every = torch.arange(self.num_embeddings, device=x.device)
        if self.row_order is not None or self.step is not None:
            whole = whole.index_select(-1, self._kept_at(every))
        if self.padding_idx is not None:
            whole = torch.where(every == self.padding_idx, 0, whole)
        return whole


class FrozenEmbedding(FrozenTable):
    """Lookups in a frozen table: integers of any shape to ``(*, embedding_dim)``."""

    def forward(self, input: Tensor) -> Tensor:
        self.check_not_training()
        rows = self.rows(input)
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)


class FrozenEmbeddingBag(FrozenTable):
    """Bags of rows of a frozen table, called as :class:`torch.nn.EmbeddingBag` is.

    Args:
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether the last offset is the end of the last bag.
        table: What :class:`FrozenTable` takes.
    """

    def __init__(self, mode: str, include_last_offset: bool, *table: Any, **more: Any) -> None:
        super().__init__(*table, **more)
        self.mode, self.include_last_offset = mode, include_last_offset

    def config(self) -> dict[str, Any]:
        own = {"mode": self.mode, "include_last_offset": self.include_last_offset}
        return super().config() | own

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], lead: nn.Module | None = None, *more: Any
    ) -> Self:
        return super().from_config(config, lead, config["mode"], config["include_last_offset"])

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        self.check_not_training()
        flat = input.reshape(-1)
        entries = (torch.ones_like(flat).cumsum(0) - 1).reshape(input.shape)
        rows, mode = self.rows(flat), self.mode
        if self.padding_idx is not None:
            # Not left to torch's padding_idx, by which an exported program is one of fixed sizes.
            counted = (flat != self.padding_idx).unsqueeze(-1)
            rows = torch.where(counted, rows, 0 if mode != "max" else -torch.inf)
            rows = torch.cat([rows, counted.to(rows.dtype)], -1)
            mode = "max" if mode == "max" else "sum"
        bags = F.embedding_bag(
            entries,
            rows,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )
        if self.padding_idx is None or self.mode == "sum":
            return bags[:, : self.embedding_dim]
        bags, count = bags[:, : self.embedding_dim], bags[:, self.embedding_dim :]
        if self.mode == "mean":
            return bags / count.clamp(min=1)
        return torch.where(count > 0, bags, 0)


class FrozenHead(Frozen):
    """``x @ table.T + bias``, of a table that a model looks up too.

    Args:
        table: The frozen table.
        bias: ``(num_embeddings,)``, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, table: FrozenTable, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = table.embedding_dim, table.num_embeddings
        self.embedding = table
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` makes the layer of again, beside its table."""
        return {"dtype": None if self.bias is None else dtype_name(self.bias)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], lead: nn.Module | None) -> Self:
        """Make a layer on a frozen table, its bias on the ``meta`` device."""
        if not isinstance(lead, FrozenTable):
            raise ValueError(f"it works on a frozen table, not on {type(lead).__name__}")
        if config["dtype"] is None:
            return cls(lead, None)
        rows = lead.num_embeddings
        return cls(lead, torch.empty(rows, dtype=dtype_of(config), device="meta"))

    def forward(self, input: Tensor) -> Tensor:
        self.check_not_training()
        products = self.embedding.products(input)
        return products if self.bias is None else products + self.bias


def _linear(weight: Tensor) -> nn.Linear:
    """Return a layer of this weight ``(out, in)``, without a bias and not trained."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], False, "meta")
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return layer


@torch.no_grad()
def thin_factors(layer: TTLinear | HotRows) -> tuple[Tensor, Tensor]:
    """Return A ``(in, R)`` and B ``(R, out)`` of a layer that is ``x @ A @ B``.

    R is the bond between the two sides without its pruned ranks, at least one; the dtype is that of
    the cores.
    """
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
    """Return ``left (V, P, R)`` and ``right (W, R, Q)`` of the rows of a table that are not hot.

    Row ``v * W + w`` is ``left[v] @ right[w]``; the dtype is that of the cores.
    """
    split, dtype = table.shape.split, table.cores[0].dtype
    cores = _open_cores(table)
    left, right = _joined(cores[:split]).squeeze(0), _joined(cores[split:]).squeeze(-1)
    return left.to(dtype).contiguous(), right.transpose(0, 1).to(dtype).contiguous()


def _open_cores(layer: TensorTrainModule) -> list[Tensor]:
    """Return the cores in float64 with gates multiplied in, and only the ranks that are open."""
    cores = [core.detach().double() for core in layer.cores]
    for k, gate in enumerate(layer.gates):
        keep = is_open(gate, layer.prune_below).nonzero().flatten()
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
