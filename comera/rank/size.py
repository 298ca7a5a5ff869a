"""The size of a model's tensor trains as a function of their gates, exact and relaxed.

All gates of a model are taken together: one concatenation, then a handful of tensor operations
however many layers there are, and no transfer from the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comera.nn.module import TensorTrainModule, tensor_trains


class SizeOfRanks:
    """Entries in the cores of a model, counted through its gates.

    With bonds ``d_k`` and ``n_k`` entries per pair of ranks, the size of a layer is
    ``sum_k n_k d_{k-1} d_k`` (CoMERA, arXiv 2405.14377, equation 5). Exactly, ``d_k`` is the
    number of gates above the threshold, and a layer with an empty bond has size zero. Relaxed,
    ``d_k`` is the sum of those gates, which has a gradient; at gates of one both agree.

    Args:
        model: Its tensor-train layers are found once, here.
        min_rank: The relaxed size does not press on a bond that has no more live gates than this.

    Raises:
        ValueError: If the model holds no tensor-train layer.
    """

    def __init__(self, model: nn.Module, min_rank: int = 1) -> None:
        self.layers: dict[str, TensorTrainModule] = tensor_trains(model)
        if not self.layers:
            raise ValueError(
                f"{type(model).__name__} has no tensor-train layer: call comera.tensorize_ first"
            )
        self.min_rank = min_rank
        self.gates = [gate for layer in self.layers.values() for gate in layer.gates]
        self._device: torch.device | None = None
        self._widths: tuple[int, ...] = ()

    def relaxed(self) -> Tensor:
        """The differentiable size, a scalar in entries, at the gates as they are now."""
        flat, live = self._flat()
        return self._weigh(self._bonds(torch.where(live, flat, 0), live))

    @torch.no_grad()
    def exact(self) -> Tensor:
        """The size after pruning, a float64 scalar on the device; no gradient."""
        return self._count(self._flat()[1])

    @torch.no_grad()
    def live(self) -> Tensor:
        """Which of all gates, one after the other, are above their threshold."""
        return self._flat()[1]

    @torch.no_grad()
    def hold_(self, before: Tensor, floor: float) -> Tensor:
        """Take back gates that closed too many at once: a closed gate does not open by itself.

        A gate that has just closed is lifted to half above its threshold where its bond would
        else have none, or where the whole would fall below ``floor``. At such a value it adds
        next to nothing, and which of them goes first can be chosen later.

        Args:
            before: What :meth:`live` returned before the optimizer step.
            floor: Entries that the size may not fall below.

        Returns:
            Whether the floor was reached, a boolean on the device.
        """
        flat, live = self._flat()
        reached = self._count(live) < floor
        lifted = before & ~live & reached
        if self.min_rank:
            dead = self._sum_by_bond((live | lifted).to(flat.dtype)) == 0
            lowest = flat.new_full(dead.shape, -torch.inf)
            best = lowest.scatter_reduce_(0, self._bond_of_gate, flat, "amax")
            largest = flat == best[self._bond_of_gate]
            lifted = lifted | (dead[self._bond_of_gate] & largest)
        rise = torch.where(lifted, 1.5 * self._threshold - flat, 0)
        parts = zip(rise.split(list(self._widths)), self.gates, strict=True)
        torch._foreach_add_(self.gates, [part.view_as(gate) for part, gate in parts])
        return reached

    def _flat(self) -> tuple[Tensor, Tensor]:
        """All gates in one vector, and which of them are live."""
        widths = tuple(gate.shape[0] for gate in self.gates)
        if widths != self._widths or self.gates[0].device != self._device:
            self._index(widths)
        flat = torch.cat(self.gates)
        return flat, flat > self._threshold

    def _count(self, live: Tensor) -> Tensor:
        counts = self._sum_by_bond(live.double())
        size = counts[self._before] * counts[self._after] * self._slices
        empty = (counts == 0).double()
        holes = torch.zeros_like(counts).index_add_(0, self._layer_of_bond, empty)
        return torch.where(holes[self._layer_of_core] > 0, 0, size).sum()

    def _bonds(self, open_gates: Tensor, live: Tensor) -> Tensor:
        bonds = self._sum_by_bond(open_gates)
        free = self._sum_by_bond(live.to(open_gates.dtype)) > self.min_rank
        return torch.where(free, bonds, bonds.detach())

    def _sum_by_bond(self, values: Tensor) -> Tensor:
        """Slot 0 is the outer bond of every layer, which is one and has no gate."""
        slots = values.new_zeros(self._num_bonds + 1).index_add(0, self._bond_of_gate, values)
        return slots + self._outer.to(values.dtype)

    def _weigh(self, bonds: Tensor) -> Tensor:
        slices = self._slices.to(bonds.dtype)
        return (bonds[self._before] * bonds[self._after] * slices).sum()

    def _index(self, widths: tuple[int, ...]) -> None:
        """Which bond each gate belongs to, and which two bonds each core lies between."""
        self._widths, self._device = widths, self.gates[0].device
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
        self._num_bonds = bond

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        numbered = enumerate(widths, start=1)
        self._bond_of_gate = on_device([k for k, width in numbered for _ in range(width)])
        self._before, self._after = on_device(before), on_device(after)
        self._layer_of_core = on_device(layer_of_core)
        self._layer_of_bond = on_device(layer_of_bond)
        self._slices = on_device(slices, torch.double)
        self._threshold = on_device(thresholds, self.gates[0].dtype)
        self._outer = on_device([1] + [0] * bond, torch.double)
