"""Compute the size of a model's tensor trains from their gates, exactly and differentiably."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera.extras import listed
from comera.nn.batched_contraction import gates_together
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.ops.cores import is_open


class AllGates(NamedTuple):
    """All gates of a model in one vector, which of them are open, and how many in each bond."""

    values: Tensor
    live: Tensor
    counts: Tensor


class SizeOfRanks:
    """Counts the entries of a model's cores from its gates.

    With ranks ``d_k`` and ``n_k`` entries per pair of ranks, the size of a layer is
    ``sum_k n_k d_{k-1} d_k`` (CoMERA, arXiv 2405.14377, equation 5). In the exact size ``d_k`` is
    the number of open gates, which are above ``prune_below``; a layer with an empty bond has size
    zero. In the relaxed size ``d_k`` is the sum of the open gates, which has a gradient. Both agree
    if open gates are one. Raises ``ValueError`` if the model has no tensor train whose gates train.

    Args:
        model: The model, whose present tensor-train layers count, except any with a frozen gate.
        min_rank: A bond with no more open gates than this gets no gradient of the relaxed size.

    Attributes:
        layers: Layers that are counted, by name.
        frozen: Names of layers that are not counted, as a gate is frozen.
    """

    def __init__(self, model: nn.Module, min_rank: int = 1) -> None:
        found = tensor_trains(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no tensor-train layer: call comera.tensorize_ first"
            )
        self.layers: dict[str, TensorTrainModule] = {
            name: layer
            for name, layer in found.items()
            if all(gate.requires_grad for gate in layer.gates)
        }
        self.frozen = [name for name in found if name not in self.layers]
        if not self.layers:
            raise ValueError(
                f"the rank gates of {listed(self.frozen)} are frozen (requires_grad=False), as "
                "they are where a frozen layer is tensorised, and there are no others to learn"
            )
        self.min_rank = min_rank
        self._indexed: tuple[Any, ...] = ()
        self._widths: tuple[int, ...] = ()

    @property
    def gates(self) -> list[Tensor]:
        """All gates, layer by layer; loading a state may replace them."""
        return [gate for layer in self.layers.values() for gate in layer.gates]

    def read(self) -> AllGates:
        """Return the present gates as :class:`AllGates`."""
        values = gates_together(list(self.layers.values()))
        widths = tuple(gate.shape[0] for gate in self.gates)
        if (widths, values.device, values.dtype) != self._indexed:
            self._index(widths, values.device, values.dtype)
        live = is_open(values.detach(), self._prune_below)
        return AllGates(values, live, self._sum_by_bond(live.double()))

    def relaxed(self, gates: AllGates | None = None) -> Tensor:
        """Return the relaxed size, a differentiable scalar; by default of the present gates."""
        values, live, counts = gates or self.read()
        bonds = self._sum_by_bond(values * live)
        bonds = torch.where(counts > self.min_rank, bonds, bonds.detach())
        before, after = self._ends_of_cores(bonds)
        return torch.dot(before * after, self._slices[bonds.dtype])

    @torch.no_grad()
    def exact(self, gates: AllGates | None = None) -> Tensor:
        """Return the exact size, a float64 scalar on the device without a gradient."""
        return self._size_at((gates or self.read()).counts)

    @torch.no_grad()
    def hold_(self, before: Tensor, floor: float) -> Tensor:
        """Reopen gates if too many closed in one step: a closed gate never opens by itself.

        A gate that has just closed is set to 1.5 times ``prune_below`` if its bond has no open gate
        left, or if the size is below ``floor``. Returns whether the size was below the floor, a
        boolean on the device.

        Args:
            before: Whether each gate was open before the optimizer step.
            floor: Entries that the size may not fall below.
        """
        values, live, counts = self.read()
        reached = self._size_at(counts) < floor
        lifted = (before > live) & reached
        if self.min_rank:
            dead = self._sum_by_bond((live | lifted).to(values.dtype)) == 0
            best = self._lowest.scatter_reduce(0, self._bond_of_gate, values, "amax")
            largest = values == best[self._bond_of_gate]
            lifted = lifted | (dead[self._bond_of_gate] & largest)
        rise = (self._lifted_to - values) * lifted
        gates = self.gates
        parts = zip(rise.split(list(self._widths)), gates, strict=True)
        torch._foreach_add_(gates, [part.view_as(gate) for part, gate in parts])
        return reached

    def _size_at(self, counts: Tensor) -> Tensor:
        """Return the exact size at the given ranks of all bonds."""
        before, after = self._ends_of_cores(counts)
        least = self._most.scatter_reduce(0, self._layer_of_bond, counts, "amin")
        whole = least[self._layer_of_core] > 0
        return torch.dot(before * after * whole, self._slices[counts.dtype])

    def _sum_by_bond(self, values: Tensor) -> Tensor:
        """Sum values of gates by bond; entry 0 is for the outer bonds, which are one."""
        return self._outer[values.dtype].index_add(0, self._bond_of_gate, values)

    def _ends_of_cores(self, bonds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank before each core, and the rank after each core."""
        # Unlike that of indexing by brackets, its gradient needs no sorting.
        return bonds.index_select(0, self._ends).chunk(2)  # type: ignore[return-value]

    def _index(self, widths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        """Record the bond of each gate, and the two bonds of each core, as tensors."""
        self._indexed, self._widths = (widths, device, dtype), widths
        before: list[int] = []
        after: list[int] = []
        slices: list[int] = []
        thresholds: list[float] = []
        layer_of_core: list[int] = []
        layer_of_bond, bond = [0], 0
        for number, layer in enumerate(self.layers.values(), start=1):
            inner = list(range(bond + 1, bond + 1 + len(layer.gates)))
            before += [0, *inner]
            after += [*inner, 0]
            slices += layer.shape.slice_sizes
            layer_of_core += [number] * len(layer.cores)
            layer_of_bond += [number] * len(inner)
            thresholds += [layer.prune_below] * sum(layer.ranks)
            bond += len(inner)

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        numbered = enumerate(widths, start=1)
        self._bond_of_gate = on_device([k for k, width in numbered for _ in range(width)])
        self._ends = on_device(before + after)
        self._layer_of_core = on_device(layer_of_core)
        self._layer_of_bond = on_device(layer_of_bond)
        self._slices = {kind: on_device(slices, kind) for kind in (dtype, torch.double)}
        self._outer = {kind: on_device([1] + [0] * bond, kind) for kind in (dtype, torch.double)}
        self._prune_below = on_device(thresholds, dtype)
        self._lifted_to = 1.5 * self._prune_below
        self._lowest = self._outer[dtype].new_full((bond + 1,), -torch.inf)
        self._most = self._outer[torch.double].new_full((bond + 1,), torch.inf)
