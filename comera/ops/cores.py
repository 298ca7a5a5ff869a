"""Apply gates to the cores of tensor trains, and contract chains of cores.

The chains of a layer are contracted before they meet the batch (CoMERA, arXiv 2405.14377, section
4), chains of equal shape together.

Shape suffixes: G = layers, L and R = left and right bond of a core, N = its mode, I = input width,
O = output width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.shapes import padded_rank


@dataclass(slots=True)
class Chains:
    """The cores, gates and biases of layers with equal modes and bonds, listed layer by layer.

    Cores are ``(left bond, mode, right bond)`` each; a layer's first ``split`` carry the input.
    Gates are one vector for each inner bond, or none at all; one at or below ``threshold`` is a
    pruned rank. Biases are one for each layer, which may be narrower than the output modes, or none
    at all. If ``padded``, the bond between the factors is, for a bias and for fast products;
    ``dtype`` is that of the factors, None for that of the cores.
    """

    cores: Sequence[Tensor]
    gates: Sequence[Tensor]
    biases: Sequence[Tensor]
    num_layers: int
    split: int
    threshold: float
    padded: bool = True
    dtype: torch.dtype | None = None

    @property
    def factor_dtype(self) -> torch.dtype:
        return self.cores[0].dtype if self.dtype is None else self.dtype

    @property
    def length(self) -> int:
        return len(self.cores) // self.num_layers

    @property
    def modes(self) -> list[int]:
        return [core.shape[1] for core in self.cores[: self.length]]

    @property
    def bonds(self) -> list[int]:
        return [core.shape[0] for core in self.cores[: self.length]] + [1]

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the factors ``left (G, I, R)`` and ``right (G, R, O)``."""
        modes, split = self.modes, self.split
        return (
            (self.num_layers, math.prod(modes[:split]), self.width),
            (self.num_layers, self.width, math.prod(modes[split:])),
        )

    @property
    def width(self) -> int:
        """Width of the bond between the factors, padding included."""
        rank = self.cores[self.split].shape[0]
        return padded_rank(rank, bool(self.biases)) if self.padded else rank

    def layer(self, number: int) -> "Chains":
        def part(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            each = len(tensors) // self.num_layers
            return tensors[number * each : (number + 1) * each]

        cores, gates, biases = map(part, (self.cores, self.gates, self.biases))
        return replace(self, cores=cores, gates=gates, biases=biases, num_layers=1)


def contract_chain(cores: Sequence[Tensor]) -> Tensor:
    """Contract neighbouring cores into one core ``(first bond, product of modes, last bond)``.

    The differentiable reference of faster contractions. Narrow dtypes are contracted in float32 and
    rounded once. Cores are ``(left bond, mode(s), right bond)``.
    """
    wide = torch.promote_types(cores[0].dtype, torch.float32)
    with without_autocast(cores[0]):
        contracted = cores[0].to(wide)
        for core in cores[1:]:
            contracted = torch.tensordot(contracted, core.to(wide), 1)
        return contracted.flatten(1, -2).to(cores[0].dtype)


def open_gate(gate_R: Tensor, threshold: float) -> Tensor:
    """Return the gate where it is above the threshold, and zero elsewhere; NaN stays."""
    return torch.threshold(gate_R, threshold, 0.0)


def rank_gate(core: Tensor, gate_R: Tensor, threshold: float) -> Tensor:
    """Multiply the last dimension of ``core`` by ``gate_R`` where that is above ``threshold``.

    Elsewhere a rank is pruned: its slice is zero and gets no gradient. The core is
    ``(..., R)`` of any floating dtype, the gate ``(R,)`` of float32 or float64.
    """
    return (core * open_gate(gate_R, threshold)).to(core.dtype)
