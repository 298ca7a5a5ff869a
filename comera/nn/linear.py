"""Define linear layers whose weight is a tensor train, or a grid of low-rank blocks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from comera.nn.decompose import decompose_matrix
from comera.nn.init import Init
from comera.nn.module import PRUNE_BELOW, TensorTrainModule, linear_of
from comera.ops.context import autocast_dtype, is_ordinary, products_are_fp8
from comera.ops.contract_cores import contract_groups, contract_layer
from comera.ops.cores import Chains, open_gate
from comera.ops.linear.blocks import (
    BlockFactors,
    block_factors,
    block_feed_forward,
    block_linears,
    blocks_to_dense,
    split_blocks,
    weight_to_blocks,
)
from comera.ops.linear.feed_forward import factorized_feed_forward, gated_feed_forward
from comera.ops.linear.tt_linear import (
    Factors,
    check_width,
    factorized_linears,
    low_rank_linear,
    reconstructed_linear,
    tt_to_dense,
)
from comera.ops.operator import is_recorded
from comera.params import may_share, params_of
from comera.planning.ways import Layer
from comera.shapes import BTTShape, LinearShape, TTShape, check_tolerance, only_one, padded_rank

FORMATS: "dict[str, type[CompressedLinear]]" = {}
"""The formats by the name that ``TTConfig(linear_format=)`` takes."""


class CompressedLinear(TensorTrainModule):
    """Base of compressed drop-ins for :class:`torch.nn.Linear`, with cores, gates and a bias.

    A format is a subclass with a name, ``class Mine(CompressedLinear, format="mine")``. It has to
    define ``_shapes``, ``forward``, ``dense_weight`` and ``_cores_of``; the other methods make it
    faster, or say more of it.

    Attributes:
        noun: Name of the format in messages.
        pointwise: Class that acts along another dimension than the last, if there is one.
        together_from: Layers of one kind from which a step on a CPU calls ``stacked_factors``.
    """

    noun: ClassVar[str] = "tensor train"
    own_forward: ClassVar[Any] = None
    pointwise: "ClassVar[type[CompressedLinear] | None]" = None
    together_from: ClassVar[int] = 1
    bias: nn.Parameter | None
    shared_factors: tuple[Tensor, Tensor] | None = None
    shape: LinearShape  # type: ignore[assignment]
    _modes: LinearShape
    _settings: ClassVar[tuple[str, ...]] = ("in_features", "out_features", "bias", "prune_below")

    def __init_subclass__(cls, format: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.own_forward = vars(cls).get("forward", cls.own_forward)  # it may be patched later
        if format is not None:
            FORMATS[format] = cls

    @torch.inference_mode(False)  # else the parameters could never be trained
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | Sequence[int] | None = None,
        shape: LinearShape | Sequence[Sequence[int]] | None = None,
        order: int | None = None,
        compression: float | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> None:
        super().__init__()
        fit: Any = {} if order is None else {"order": order}  # blocks have no order
        fitted = self._shapes.fit(
            in_features, out_features, rank=rank, shape=shape, compression=compression, **fit
        )
        self.in_features, self.out_features = in_features, out_features
        self._build(fitted, prune_below, device, dtype)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None, init: Init = "orthogonal") -> None:
        """Draw new cores for a dense weight of standard deviation ``std``, by default as torch's.

        ``init`` is ``"orthogonal"`` or ``"normal"``, see :class:`~comera.TTConfig`.
        """
        self._init_cores_(1 / math.sqrt(3 * self.in_features) if std is None else std, init)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def kind(self) -> tuple[object, ...]:
        """Return a key; layers with equal keys have the same cost at any batch."""
        core = self.cores[0]
        return (
            self.stacked_factors, self._modes.in_modes, self._modes.out_modes, self.ranks,
            self.prune_below, core.dtype, core.device,
            self.in_features, self.out_features, self.bias is not None,
        )  # fmt: skip

    def at(self, tokens: int, *, together: int = 1) -> Layer:
        widths = self.in_features, self.out_features
        return Layer(self.shape, tokens, *widths, self.bias is not None, together=together)

    def _shared_factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the factors that a BatchedContraction cached, if they fit the present use."""
        if self.shared_factors is None or not self.renew_shared():
            return None
        shared, core = self.shared_factors, self.cores[0]
        fits = shared[0].dtype in (core.dtype, autocast_dtype(core)) if shared else False
        return shared if shared and fits and may_share(shared[0], core) else None

    @staticmethod
    def stacked_factors(
        groups: Sequence[Sequence[Any]], autocast: torch.dtype | None = None
    ) -> list[Tensor]:
        """Contract the cores of groups of layers, those of a group being of one :meth:`kind`.

        Returns ``left (G, ...)`` and ``right (G, ...)`` of each group of G layers, in the dtype
        ``autocast`` if given. A :class:`~comera.BatchedContraction` caches them in
        ``shared_factors`` of each layer. A format without this contracts its cores in ``forward``.
        """
        raise NotImplementedError

    @staticmethod
    def multiply(x: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
        """Return ``[layer(x) for layer in layers]`` in one pass over x; None if that is no gain."""
        return None

    @staticmethod
    def feed_forward(x: Tensor, layers: Sequence[Any], activation: str) -> Tensor | None:
        """Return ``act(x @ W1) @ W2``, or of three layers ``(silu(x @ W1) * (x @ W2)) @ W3``.

        The hidden activation is computed again in backward. None if that cannot be.
        """
        return None

    def _weight_size(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """Return a :class:`torch.nn.Linear` with this layer's dense weight and bias."""
        weight, bias = self.weight.clone(), self.bias
        if bias is not None:
            bias = nn.Parameter(bias.to(weight, copy=True), bias.requires_grad)
        trained = any(core.requires_grad for core in self.cores)
        return linear_of(nn.Parameter(weight, trained), bias).train(self.training)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        rank: int | Sequence[int] | None = None,
        shape: LinearShape | Sequence[Sequence[int]] | None = None,
        compression: float | None = None,
        tolerance: float | None = None,
        prune_below: float = PRUNE_BELOW,
        **fit: Any,
    ) -> Self:
        """Approximate the weight of a dense layer by TT-SVD, or block by block; copy the bias.

        ``linear`` is any module with ``weight (out, in)`` and ``bias``. Other arguments are those
        of the constructor. ``tolerance``, a bound on the relative Frobenius error, can replace the
        rank. Trained weights become smallest with ``order=1``. Raises ``ValueError`` if more than
        one of rank, compression and tolerance is given, and ``TypeError`` if ``linear`` has no
        matrix ``weight`` or no attribute ``bias``.
        """
        only_one(rank=rank, compression=compression, tolerance=tolerance)
        check_tolerance(tolerance)
        in_features, out_features = check_linear(linear)
        fitted = cls._shapes.fit(
            in_features, out_features, rank=rank, shape=shape, compression=compression, **fit
        )
        cores = cls._cores_of(linear.weight, fitted, tolerance)
        ranks = tuple(core.shape[-1] for core in cores[:-1])
        return cls.from_cores(linear, replace(fitted, ranks=ranks), cores, prune_below)

    @classmethod
    @torch.no_grad()
    def from_cores(
        cls,
        linear: Any,
        shape: LinearShape,
        cores: Sequence[Tensor],
        prune_below: float = PRUNE_BELOW,
    ) -> Self:
        """Make a layer of these cores, with bias, dtype, device and mode of ``linear``."""
        sizes = [tuple(core.shape) for core in cores]
        if sizes != list(shape.core_shapes):
            raise ValueError(f"cores of {sizes} are given, and {shape} has {shape.core_shapes}")
        layer: Any = cls(
            *check_linear(linear), linear.bias is not None,
            "meta", linear.weight.dtype,  # on meta nothing is drawn
            shape=shape, prune_below=prune_below,
        ).to_empty(device=linear.weight.device)  # fmt: skip
        layer.set_cores_(cores)
        if layer.bias is not None:
            layer.bias.copy_(linear.bias)
        layer.freeze_like_(linear)
        return layer.train(linear.training)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "bias": self.bias is not None}

    def extra_repr(self) -> str:
        widths = f"in_features={self.in_features}, out_features={self.out_features}"
        ranks = self._describe_ranks(self.num_dense / max(1, self.num_stored))
        return f"{widths}, bias={self.bias is not None}, {ranks}"


def check_linear(linear: Any) -> tuple[int, int]:
    """Return input and output width; raise ``TypeError`` without matrix ``weight`` or ``bias``."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not hasattr(linear, "bias"):
        raise TypeError(f"a layer with weight (out, in) and bias is needed, not {linear!r}")
    return weight.shape[1], weight.shape[0]


class TTLinear(CompressedLinear, format="tt"):
    """Drop-in for :class:`torch.nn.Linear` that stores its weight as rank-gated tensor-train cores.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether to add a bias.
        rank: Bound on every bond, or a list of all inner bonds; 32 if no size is given.
        shape: ``(in_modes, out_modes)``, e.g. ``((12, 8, 8), (8, 8, 12))`` for 768 to 768, or a
            :class:`~comera.TTShape`; balanced modes if None. Modes may multiply to more than the
            width; the rest is zero padding that is never stored or computed with.
        order: How many modes a side is split into if ``shape`` is None, 3 by default.
        compression: Ratio of the dense weight's entries to those of the cores; replaces
            ``rank``.
        prune_below: A gate at or below this is a pruned rank.
        device: Device of the parameters; ``"meta"`` allocates nothing.
        dtype: Type of the cores and the bias; gates are float32 or wider.

    Shapes:
        input ``(*, in_features)``, output ``(*, out_features)``.

    Raises:
        ValueError: If modes or ranks do not fit the widths.

    Example::

        layer = TTLinear(768, 3072, rank=30)
        y = layer(torch.randn(32, 768))

    Source: CoMERA, arXiv 2405.14377, section 3.
    """

    # A step on a CPU takes 0.95 times as long with 12 of them contracted together as with each
    # alone, with 2 to 8 of them 1.00 to 1.05 times; blocks 0.95 times with 4 and with 12.
    together_from = 12
    shape: TTShape  # type: ignore[assignment]
    _modes: TTShape
    _shapes = TTShape

    def forward(self, input: Tensor) -> Tensor:
        self._check_there(input)
        if input.is_nested:
            return nn.functional.linear(input, self.weight, self.bias)
        if not self.is_factorized(input):
            return reconstructed_linear(input, self.factors())
        if self.shared_factors is None and is_ordinary(input):
            parts: Any = self._modules
            left, right = contract_layer(
                params_of(parts["cores"]), params_of(parts["gates"]), self._split, self.prune_below,
                self.in_features, self.out_features,
            )  # fmt: skip
            return low_rank_linear(input, left, right, self.bias)
        left, right, has_bias = self.factors()
        return factorized_linears(input, [left], [right], has_bias)[0]

    def is_factorized(self, input: Tensor) -> bool:
        """Return whether this batch is multiplied by the two factors, not by the dense weight."""
        widths, dense = self.in_features + self.out_features, self.in_features * self.out_features
        if 2 * self._middle_rank * widths <= dense:
            return True  # the factors need fewer operations at any number of rows
        if torch.compiler.is_exporting() or is_recorded():
            return True  # what is recorded may run anywhere
        # The way with fewer operations; W takes `width * dense`. Of 48 cases (3 widths, 4 ranks
        # around break-even, 4 numbers of rows, both passes timed on a CPU) the mean time is 1.012
        # of the faster way's without padding of the width, and 1.011 by predictions of the planner;
        # with it, timed again, both choose alike, at 1.002.
        rows, width = input.numel() // max(1, math.prod(input.shape[-1:])), self.factor_width
        return rows * width * widths <= (width + rows) * dense

    def factors(self) -> Factors:
        """Return the left and right factors, ``(in_features, R)`` and ``(R, out_features)``.

        R is the padded bond between them; a bias is the last row of the right factor. Inside a
        :class:`~comera.BatchedContraction` the factors are cached, in its dtype ``autocast`` if
        given.
        """
        shared = self._shared_factors()
        if shared is not None:
            left, right = shared
        else:
            left, right = (factor.flatten(0, 1) for factor in self.stacked_factors([[self]]))
        if left.shape[0] != self.in_features:
            left = left[: self.in_features]
        if right.shape[1] != self.out_features:
            right = right[:, : self.out_features]
        return Factors(left, right, self.bias is not None)

    @staticmethod
    def stacked_factors(
        groups: Sequence[Sequence[Any]], autocast: torch.dtype | None = None
    ) -> list[Tensor]:
        chains = []
        for layers in groups:
            cores = [core for layer in layers for core in params_of(layer.cores)]
            gates = [gate for layer in layers for gate in layer.bond_gates()]
            biases = [layer.bias for layer in layers if layer.bias is not None]
            dtype = None if cores[0].dtype == torch.float64 else autocast
            split, threshold = layers[0]._split, layers[0].prune_below
            chains.append(Chains(cores, gates, biases, len(layers), split, threshold, dtype=dtype))
        return contract_groups(chains)

    @staticmethod
    def multiply(x: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
        factors = factors_that_win(x, layers)
        if factors is None:
            return None
        lefts, rights, has_bias = zip(*factors, strict=True)
        return factorized_linears(x, lefts, rights, has_bias[0])

    @staticmethod
    def feed_forward(x: Tensor, layers: Sequence[Any], activation: str) -> Tensor | None:
        factors = None if products_are_fp8() or is_recorded() else factors_that_win(x, layers)
        if factors is None:
            return None
        if len(layers) == 3:
            return gated_feed_forward(x, *factors)
        return factorized_feed_forward(x, factors[0], factors[1], activation)

    @property
    def factor_width(self) -> int:
        """The padded bond between the two factors."""
        return padded_rank(self._middle_rank, self.bias is not None)

    @property
    def _middle_rank(self) -> int:
        parts: Any = self._modules  # as an attribute, it would be another call of Python
        return params_of(parts["cores"])[self._split].shape[0]

    def dense_weight(self) -> Tensor:
        dense = tt_to_dense(self.gated_cores(), self._split)
        return dense[: self.out_features, : self.in_features]

    _cores_of = staticmethod(decompose_matrix)


def factors_that_win(x: Tensor, layers: Sequence[TTLinear]) -> list[Factors] | None:
    """Return the factors of tensor trains that are faster by them in one pass over x, else None."""
    bias = layers[0].bias is not None
    if any((m.bias is not None) != bias or not m.is_factorized(x) for m in layers):
        return None
    if torch.is_grad_enabled() and not all(c.requires_grad for m in layers for c in m.cores):
        return None  # a frozen layer needs fewer products by itself
    return [layer.factors() for layer in layers]


class TTPointwise(TTLinear):
    """A :class:`~comera.TTLinear` that acts along the dimension ``feature_dim``, from the end.

    Shapes:
        if it is -3: input ``(*, in_features, H, W)``, output ``(*, out_features, H, W)``,
        contiguous if the input is.
    """

    _settings = (*TTLinear._settings, "feature_dim")

    def __init__(self, *linear: Any, feature_dim: int = -1, **more: Any) -> None:
        super().__init__(*linear, **more)
        if type(feature_dim) is not int or feature_dim >= 0:
            raise ValueError(f"feature_dim={feature_dim!r} must be a whole number below 0")
        self.feature_dim = feature_dim

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input.movedim(self.feature_dim, -1)).movedim(-1, self.feature_dim)
        # As of a convolution: the next module may take a view.
        return output.contiguous() if input.is_contiguous() else output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_dim={self.feature_dim}"


TTLinear.pointwise = TTPointwise


class BTTLinear(CompressedLinear, format="btt"):
    """Drop-in for :class:`torch.nn.Linear` that stores its weight as a block tensor train.

    The weight is a grid of blocks of rank R. The whole weight may have full rank, while the weight
    of a :class:`~comera.TTLinear` has at most the rank of the middle bond. A row of the input takes
    ``2 R (in c + out a)`` operations with ``a`` blocks of the input and ``c`` of the output.

    Args:
        rank: Rank R of the blocks; 2 if no size is given.
        shape: ``((a, b), (c, d))``: blocks of a side and the numbers in each, e.g.
            ``((24, 32), (48, 64))`` for 768 to 3072, or a :class:`~comera.BTTShape`. If None, a
            side has about as many blocks as the root of its width. Modes may multiply to more than
            the width.
        compression: Ratio of the dense weight's entries to those of the cores; replaces
            ``rank``. Few sizes are possible; fewer blocks make smaller layers.

    Other arguments are those of :class:`~comera.TTLinear`, except ``order``.

    Example::

        layer = BTTLinear(768, 3072, rank=2)
        y = layer(torch.randn(32, 768))

    Source: Qiu et al., Compute Better Spent, arXiv 2406.06248, section 4.
    """

    noun = "block tensor train"
    has_plain_form = False
    shape: BTTShape  # type: ignore[assignment]
    _modes: BTTShape  # type: ignore[assignment]
    _shapes = BTTShape

    def forward(self, input: Tensor) -> Tensor:
        self._check_there(input)
        if input.is_nested:
            return nn.functional.linear(input, self.weight, self.bias)
        check_width(input, self.in_features)
        return block_linears(input, [self.factors()])[0]

    def factors(self) -> BlockFactors:
        """Return the cores as both products read them, ``(a, R c, b)`` and ``(c, a R, d)``.

        A bias is one more row of the right factor, ``(c, a R + 1, d)``. Inside a
        :class:`~comera.BatchedContraction` they are cached, in its dtype ``autocast`` if given.
        """
        shared = self._shared_factors()
        if shared is None:
            left, right = params_of(self.cores)
            biases = [] if self.bias is None else [self.bias]
            shared = block_factors([left], self.bond_gates(), [right], biases, self.prune_below)
        return BlockFactors(*shared, self.out_features)

    @staticmethod
    def stacked_factors(
        groups: Sequence[Sequence[Any]], autocast: torch.dtype | None = None
    ) -> list[Tensor]:
        made: list[Tensor] = []
        for layers in groups:
            lefts, rights = zip(*(params_of(layer.cores) for layer in layers), strict=True)
            gates = [layer.bond_gates()[0] for layer in layers]
            biases = [layer.bias for layer in layers if layer.bias is not None]
            dtype = None if lefts[0].dtype == torch.float64 else autocast
            pair = block_factors(lefts, gates, rights, biases, layers[0].prune_below, dtype)
            made += [each.unflatten(0, (len(layers), -1)) for each in pair]
        return made

    @staticmethod
    def multiply(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
        for layer in layers:
            check_width(x, layer.in_features)
        return block_linears(x, [layer.factors() for layer in layers])

    @staticmethod
    def feed_forward(x: Tensor, layers: Sequence[Any], activation: str) -> Tensor | None:
        for layer in layers[:-1]:
            check_width(x, layer.in_features)
        return block_feed_forward(x, [layer.factors() for layer in layers], activation)

    def gated_cores(self) -> list[Tensor]:
        (gate,), (left, right) = self.bond_gates(), params_of(self.cores)
        return [left * open_gate(gate, self.prune_below).to(left.dtype), right]

    def dense_weight(self) -> Tensor:
        return blocks_to_dense(*self.gated_cores())[: self.out_features, : self.in_features]

    def canonical_cores(self, gated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return cores whose ranks are singular vectors of every block, and the singular values."""
        weight = blocks_to_dense(*gated)[: self.out_features, : self.in_features]
        if not bool(weight.isfinite().all()) or not bool(weight.any()):
            return None
        modes = self._modes
        blocks = weight_to_blocks(weight, modes.in_modes, modes.out_modes)
        cores = split_blocks(blocks, self.ranks[0])
        return list(cores), [_rank_norms(*cores).sqrt()]

    def rank_norms(self) -> list[Tensor]:
        norms = _rank_norms(*self.gated_cores())
        return [norms / norms.sum().clamp(min=1e-300)]

    @staticmethod
    def _cores_of(
        weight: Tensor, shape: BTTShape, tolerance: float | None
    ) -> tuple[Tensor, Tensor]:
        blocks = weight_to_blocks(weight, shape.in_modes, shape.out_modes)
        return split_blocks(blocks, shape.ranks[0], tolerance)

    def _draw_cores_(self, cores: list[Tensor], std: float, init: Init) -> None:
        left, right = cores
        draw = nn.init.orthogonal_ if init == "orthogonal" else nn.init.normal_
        wide = torch.promote_types(left.dtype, torch.float32)
        for block in (*left.unbind(1), *right.unbind(1)):  # each is drawn as a matrix
            rows = block.shape[0] * block.shape[1]
            drawn = draw(block.new_empty(rows, block.numel() // rows, dtype=wide))
            block.copy_(drawn.view(block.shape))
        of_left = torch.einsum("zabcr,zabcs->acrs", left.double(), left.double())
        of_right = torch.einsum("rcadz,scadz->acrs", right.double(), right.double())
        now = ((of_left * of_right).sum() / self._modes.num_dense).sqrt()
        for core in (left, right):
            core.mul_((std / now).sqrt())


def _rank_norms(left_1abcR: Tensor, right_Rcad1: Tensor) -> Tensor:
    left, right = left_1abcR.double().square(), right_Rcad1.double().square()
    return torch.einsum("acr,rca->r", left.sum((0, 2)), right.sum((3, 4)))
