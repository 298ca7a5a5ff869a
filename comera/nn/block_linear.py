"""A linear layer whose weight is a grid of blocks of low rank, with trainable rank gates."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from comera.nn.decompose import check_tolerance
from comera.nn.init import Init
from comera.nn.linear import CompressedLinear, check_linear
from comera.nn.module import PRUNE_BELOW, params_of
from comera.ops.cores import open_gate
from comera.ops.linear.blocks import (
    block_linear,
    blocks_to_dense,
    split_blocks,
    weight_to_blocks,
)
from comera.ops.linear.tt_linear import check_width
from comera.planning.linear_ways import Layer
from comera.shapes import BTTShape, only_one


class BTTLinear(CompressedLinear):
    """Drop-in for :class:`torch.nn.Linear` that stores its weight as a block tensor train.

    The weight is a grid of blocks, each a matrix of rank R of its own, so that the whole may be of
    full rank: with as many numbers it learns more than a :class:`~comera.TTLinear`, whose rank is
    that of its middle bond. It always multiplies by its two cores, in
    ``2 R (in c + out a)`` operations a row, where the input is split into ``a`` blocks and the
    output into ``c``.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether to add a bias.
        rank: Rank R of the blocks. 2 if nothing is said.
        shape: ``((a, b), (c, d))``: blocks of a side and the numbers in each, e.g.
            ``((24, 32), (48, 64))`` for 768 to 3072, or a :class:`~comera.BTTShape`. About the root
            of the width in blocks if not given. Modes may multiply to more than the width.
        compression: Instead of ``rank``: how many times fewer parameters than the dense weight.
            Ranks are few, and so are the sizes to choose from; fewer blocks make smaller layers.
        prune_below: A gate at or below this is a pruned rank.
        device: Device of the parameters; ``"meta"`` allocates nothing.
        dtype: Type of the cores and the bias; the gate is float32 or wider.

    Shapes:
        input ``(*, in_features)``, output ``(*, out_features)``.

    Raises:
        ValueError: If modes or the rank do not fit the widths.

    Example::

        layer = BTTLinear(768, 3072, rank=2)
        y = layer(torch.randn(32, 768))

    Source: Qiu et al., Compute Better Spent, arXiv 2406.06248, section 4.
    """

    is_chain = False
    shape: BTTShape  # type: ignore[assignment]
    _modes: BTTShape  # type: ignore[assignment]
    _shapes = BTTShape

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | Sequence[int] | None = None,
        shape: BTTShape | Sequence[Sequence[int]] | None = None,
        compression: float | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> None:
        super().__init__()
        fitted = BTTShape.fit(
            in_features, out_features, rank=rank, shape=shape, compression=compression
        )
        self._build_linear(in_features, out_features, bias, fitted, prune_below, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        self._check_there(input)
        check_width(input, self.in_features)
        left, right = self.gated_cores()
        return block_linear(input, left, right, self.bias, self.out_features)

    def gated_cores(self) -> list[Tensor]:
        """Return the cores with the gate multiplied in; differentiable."""
        (gate,), (left, right) = self.bond_gates(), params_of(self.cores)
        return [left * open_gate(gate, self.prune_below).to(left.dtype), right]

    def dense_weight(self) -> Tensor:
        """Compute the dense ``(out_features, in_features)`` weight anew; differentiable."""
        return blocks_to_dense(*self.gated_cores())[: self.out_features, : self.in_features]

    def canonical_cores(self, gated: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Make the ranks of every block its singular vectors; the bond carries all of them."""
        left, right = gated
        weight = blocks_to_dense(left, right)[: self.out_features, : self.in_features]
        if not bool(weight.isfinite().all()) or not bool(weight.any()):
            return None
        modes = self._modes
        blocks = weight_to_blocks(weight, modes.in_modes, modes.out_modes)
        cores = split_blocks(blocks, self.ranks[0])
        return list(cores), [_rank_norms(*cores).sqrt()]

    def rank_norms(self) -> Tensor:
        """Return the squared norm of what each rank adds to the weight, ``(R,)``, in float64."""
        return _rank_norms(*self.gated_cores())

    def kind(self) -> tuple[object, ...]:
        """Return what layers agree in that cost the same."""
        core = self.cores[0]
        return (
            self.shape,
            core.dtype,
            core.device,
            self.in_features,
            self.out_features,
            self.bias is None,
        )

    def at(self, tokens: int, *, together: int = 1) -> Layer:
        """Describe this layer at a batch to the planner.

        Args:
            tokens: Rows of the batch.
            together: How many layers of this kind the model has; each contracts its own cores.
        """
        bias = self.bias is not None
        return Layer(self.shape, tokens, self.in_features, self.out_features, bias)

    def _decompose_(self, weight: Tensor, tolerance: float | None) -> None:
        check_tolerance(tolerance)
        modes = self._modes
        blocks = weight_to_blocks(weight, modes.in_modes, modes.out_modes)
        self.set_cores_(split_blocks(blocks, self.ranks[0], tolerance))

    @torch.no_grad()
    def _init_cores_(self, std: float, init: Init) -> None:
        """Draw cores whose product has the root mean square ``std``; gates become ones."""
        for gate in self.gates:
            gate.fill_(1)
        left, right = self.cores
        if left.is_meta or 0 in self.ranks:
            return
        if init not in ("orthogonal", "normal"):
            raise ValueError(f"init={init!r} must be 'orthogonal' or 'normal'")
        for core in (left, right):
            _draw_(core, nn.init.orthogonal_ if init == "orthogonal" else nn.init.normal_)
        modes = self._modes
        now = math.sqrt(float(self._squared_norm()) / modes.num_dense)
        if std:
            for core in (left, right):
                core.mul_(math.sqrt(std / now))
        else:  # were both of them zero, neither would ever have a gradient
            left.mul_(modes.num_dense**-0.125 / now**0.5)
            right.zero_()

    def _squared_norm(self) -> Tensor:
        """Return the squared norm of the weight, its padding included, a scalar in float64."""
        left, right = (core.double() for core in self.cores)
        of_left = torch.einsum("zabcr,zabcs->acrs", left, left)
        return (of_left * torch.einsum("rcadz,scadz->acrs", right, right)).sum()

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        rank: int | Sequence[int] | None = None,
        shape: BTTShape | Sequence[Sequence[int]] | None = None,
        compression: float | None = None,
        tolerance: float | None = None,
        prune_below: float = PRUNE_BELOW,
    ) -> "BTTLinear":
        """Approximate the weight of a dense layer, block by block; the bias is copied.

        Args:
            linear: Any module with ``weight (out, in)`` and ``bias``.
            rank: Rank of the blocks; 2 if no size is given.
            shape: ``((a, b), (c, d))`` or a :class:`~comera.BTTShape`.
            compression: Instead of a rank: how many times fewer parameters than the dense weight.
            tolerance: Instead of a rank: bound on the relative Frobenius error.
            prune_below: A gate at or below this is a pruned rank.

        Raises:
            ValueError: If more than one of rank, compression and tolerance is given.
            TypeError: If ``linear`` is something else.
        """
        only_one(rank=rank, compression=compression, tolerance=tolerance)
        check_tolerance(tolerance)
        in_features, out_features = check_linear(linear)
        fitted = BTTShape.fit(
            in_features, out_features, rank=rank, shape=shape, compression=compression
        )
        blocks = weight_to_blocks(linear.weight, fitted.in_modes, fitted.out_modes)
        cores = split_blocks(blocks, fitted.ranks[0], tolerance)
        shape = BTTShape(fitted.in_modes, fitted.out_modes, (cores[0].shape[-1],))
        return cls.from_cores(linear, shape, list(cores), prune_below)


def _draw_(core: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    """Draw each block of a core as a matrix, in float32 or wider."""
    wide = torch.promote_types(core.dtype, torch.float32)
    for block in core.unbind(1):  # (left bond, numbers of the block, other blocks, right bond)
        rows = block.shape[0] * block.shape[1]
        drawn = draw(torch.empty(rows, block.numel() // rows, device=core.device, dtype=wide))
        block.copy_(drawn.view(block.shape))


def _rank_norms(left_1abcR: Tensor, right_Rcad1: Tensor) -> Tensor:
    left, right = left_1abcR.double().square(), right_Rcad1.double().square()
    return torch.einsum("acr,rca->r", left.sum((0, 2)), right.sum((3, 4)))
