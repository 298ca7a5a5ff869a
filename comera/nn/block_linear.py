"""Define a linear layer whose weight is a grid of low-rank blocks, with trainable gates."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera.nn.init import Init
from comera.nn.linear import CompressedLinear
from comera.ops.cores import open_gate
from comera.ops.linear.blocks import (
    BlockFactors,
    block_factors,
    block_linears,
    blocks_to_dense,
    split_blocks,
    weight_to_blocks,
)
from comera.ops.linear.tt_linear import check_width
from comera.params import params_of
from comera.shapes import BTTShape


class BTTLinear(CompressedLinear):
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

    is_chain = False
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

    def rank_norms(self) -> Tensor:
        """Return the squared norm of each rank's part of the weight, ``(R,)``, in float64."""
        return _rank_norms(*self.gated_cores())

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
