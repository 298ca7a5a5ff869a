"""Launch the kernels that contract chains: all layers in one launch forward, two backward.

A kernel contracts the cores of a factor from the outer end to the middle bond (:class:`Walk`), as
``kernels/contract.cuh`` describes. A descriptor on the card tells it about one factor: addresses of
cores and bias, sizes, and offsets of gates and output. Descriptors are written once, and again when
a parameter has moved; addresses of gates and outputs are arguments of the launch. CUDA graphs can
capture the writing as well as the launch.
"""

import ctypes
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comera.ops.cores import Chains
from comera.ops.kernels.choose import CONTRACT
from comera.ops.kernels.launch import MOST_SHARED, launch

MOST_CORES = 8  # cores on one side of a tensor train

_MOST_BOND, _MOST_BLOCKS = 64, 1 << 16
_COLUMNS, _APART, _ALONE = 64, 68, 4096

_DESCRIBED, _GATES = 560, 256
"""Bytes of them that the descriptor of a factor takes, and the gates of a bond."""

_STAGED, _STAGED_BACK = 12 * 1024, 16 * 1024
"""Numbers of a core, and of the gradient beside it, that a block has in shared memory at once."""


class Walk:
    """How kernels contract one factor, core by core from its outer end to the middle bond.

    ``modes`` and ``bonds`` are those of each core, bonds on the side towards the middle.

    Attributes:
        rows: Rows of the product of the cores up to each core.
        blocks: Number of thread blocks that share the columns of the last core.
        share: Numbers that a block writes for the second backward launch.
        room: Offsets in shared memory of the partial products, and the end of their room. Partial
            products alternate between both ends of the room: each is needed for the next one only.
        room_back: Offsets like ``room`` of the second backward launch, which keeps all products;
            the gradient of each overwrites the next one.
        at_once: How many values of each inner core's mode are loaded to shared memory at once.
        at_once_back: The counts of the second backward launch, which loads gradients as well.
        shared: Bytes of shared memory of a block in the forward and the two backward launches.
    """

    def __init__(self, modes: tuple[int, ...], bonds: tuple[int, ...], right: bool) -> None:
        self.modes, self.bonds, self.right = modes, bonds, right
        self.rows = list(itertools.accumulate(modes, operator.mul))
        is_alone = len(modes) == 1
        self.columns = modes[-1] * bonds[-1]
        self.blocks = max(1, -(-self.columns // (_ALONE if is_alone else _COLUMNS)))
        described = _DESCRIBED + _GATES * (len(modes) - 1)
        self.share, self.shared = 0, (described,) * 3
        self.at_once, self.at_once_back = list[int](), list[int]()
        if is_alone:
            return
        self.share = bonds[-2] * self.rows[-2] + _COLUMNS
        sizes = [bond * _up_to_four(rows) for bond, rows in zip(bonds, self.rows, strict=True)]
        products = sizes[:-2]  # those that are made whole
        end = max(map(sum, itertools.pairwise([0, *products])), default=0)
        self.room = [end - size if s % 2 else 0 for s, size in enumerate(products)] + [end]
        both = itertools.zip_longest(products, [0, *(products or sizes[:1])], fillvalue=0)
        self.room_back = list(itertools.accumulate(map(max, both), initial=0))
        # The widest bond there may be before the last core, and how many rows are made at once.
        bond, rows = (32, 128) if bonds[-2] <= 32 else (64, 64)
        before = bond * _APART + rows * (bond + 4) + self.room[-1]
        most = (MOST_SHARED - described) // 4
        self.at_once = self._most(self.staged, min(_STAGED, most - before))
        self.at_once_back = self._most(self._beside, min(_STAGED_BACK, most - self.room_back[-1]))
        staged = max(map(self.staged, itertools.count(1), self.at_once), default=0)
        beside = max(map(self._beside, itertools.count(1), self.at_once_back), default=0)
        numbers = before + staged, before + max(staged, rows * _APART), self.room_back[-1] + beside
        self.shared = tuple(described + 4 * each for each in numbers)  # type: ignore[assignment]

    @functools.cached_property
    def unfit(self) -> str | None:
        """Why no kernel can contract this factor; None if one can."""
        if len(self.modes) > MOST_CORES:
            return f"a side of a tensor train has {len(self.modes)} cores, not 1 to {MOST_CORES}"
        widest = max((*self.bonds[:-1], 0))
        if widest > _MOST_BOND:
            return f"a bond is {widest} wide, more than {_MOST_BOND}"
        if self.blocks >= _MOST_BLOCKS:
            return f"a core has {self.columns:,} columns, too many for a launch"
        needed = max(self.shared)
        if needed > MOST_SHARED:
            return (
                f"modes {self.modes} with bonds {self.bonds} need {needed} bytes of shared memory"
            )
        return None

    def _most(self, numbers: Callable[[int, int], int], most: int) -> list[int]:
        """List how many values of each inner core's mode may be loaded at once, at least one."""
        return [
            max(m for m in range(1, mode + 1) if m == 1 or numbers(core, m) <= most)
            for core, mode in list(enumerate(self.modes))[1:-1]
        ]

    def staged(self, core: int, modes: int) -> int:
        """Count the numbers in shared memory of a core's slices at ``modes`` values of its mode."""
        outer, inner = self.bonds[core - 1 : core + 1]
        if self.right:
            outer, inner = inner, outer
        return _up_to_four(outer * (modes * inner + self.right))

    def _beside(self, core: int, modes: int) -> int:
        """Count the numbers of :meth:`staged` and, beside them, those of the slices' gradient."""
        spans = max(1, -(-self.bonds[core] // 32))
        grad = modes * self.rows[core - 1] * (32 * spans + 4)
        return self.staged(core, modes) + max(grad, 256)


def walks(chains: Chains) -> tuple[Walk, Walk]:
    return _walks(tuple(chains.modes), tuple(chains.bonds), chains.split)


@functools.cache
def _walks(modes: tuple[int, ...], bonds: tuple[int, ...], split: int) -> tuple[Walk, Walk]:
    left = Walk(modes[:split], bonds[1 : split + 1], False)
    return left, Walk(modes[split:][::-1], bonds[split:-1][::-1], True)


def _up_to_four(n: int) -> int:
    return -(-n // 4) * 4


# As in contract.cuh.
_MOST_FACTORS, _THREADS, _AT_ONCE = 64, 256, 16384

_MOST_SHARES = 1 << 24  # numbers of all blocks' shares of gradients that a launch may write: 64 MiB

_MOST_KEPT = 1024
"""Plans that are kept, beside those that captured graphs need: two for each layer by itself."""


class _Descriptor(ctypes.Structure):
    _fields_ = (
        ("core", ctypes.c_void_p * MOST_CORES), ("bias", ctypes.c_void_p),
        ("gate_at", ctypes.c_int64 * MOST_CORES),
        ("core_grad", ctypes.c_int64 * MOST_CORES), ("gate_grad", ctypes.c_int64 * MOST_CORES),
        ("place", ctypes.c_int64), ("share", ctypes.c_int64),
        ("mode", ctypes.c_int * MOST_CORES), ("bond", ctypes.c_int * MOST_CORES),
        ("room", ctypes.c_int * MOST_CORES), ("room_back", ctypes.c_int * MOST_CORES),
        ("at_once", ctypes.c_int * (MOST_CORES - 2)),
        ("at_once_back", ctypes.c_int * (MOST_CORES - 2)),
        ("cores", ctypes.c_int), ("right", ctypes.c_int), ("factor", ctypes.c_int),
        ("width", ctypes.c_int), ("bias_width", ctypes.c_int), ("blocks", ctypes.c_int),
        ("gated", ctypes.c_int), ("threshold", ctypes.c_float),
    )  # fmt: skip


class _Factors(ctypes.Structure):
    _fields_ = (("of", ctypes.c_void_p * _MOST_FACTORS),)


class _Bytes(ctypes.Structure):
    _fields_ = (("of", ctypes.c_char * _AT_ONCE),)


def unfit(groups: Sequence[Chains]) -> str | None:
    """Return why kernels cannot contract these chains on any card, or None."""
    for group in groups:
        if {gate.dtype for gate in group.gates} - {torch.float32}:
            return f"gates are {group.gates[0].dtype}, not torch.float32"
        if group.factor_dtype != groups[0].factor_dtype:
            return "factors are wanted in several dtypes"
        if set(map(type, group.modes + group.bonds)) == {int}:  # else traced: asked when it runs
            for walk in walks(group):
                if walk.unfit is not None:
                    return walk.unfit
    tensors = [t for group in groups for of in (group.cores, group.biases) for t in of]
    kinds = {(t.dtype, t.device) for t in tensors}
    return "cores and biases are of several dtypes or devices" if len(kinds) > 1 else None


def contract(groups: Sequence[Chains]) -> list[Tensor]:
    """Compute :func:`~comera.ops.contract_cores.contract_groups` by the kernel."""
    like, dtype = groups[0].cores[0], groups[0].factor_dtype
    groups = list(map(_contiguous, groups))
    shapes = [shape for group in groups for shape in group.factor_shapes]
    factors = [like.new_empty(shape, dtype=dtype) for shape in shapes]
    file = CONTRACT[like.dtype, dtype]
    for plan in _plans(file, groups, [group.width for group in groups], backward=False):
        launch(
            file, file, like.device, plan.blocks.shape[0], _THREADS, plan.shared[0],
            plan.descriptors, plan.blocks, _first_gate(groups), plan.addresses(factors),
        )  # fmt: skip
    return factors


def contract_backward(groups: Sequence[Chains], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients of all cores in one flat tensor, and those of all gates in another.

    ``grads`` are gradients of the factors, two for each group.
    """
    like, dtype = groups[0].cores[0], groups[0].factor_dtype
    groups = list(map(_contiguous, groups))
    grads = [grad.to(dtype).contiguous() for grad in grads]
    core_grads = like.new_empty(sum(core.numel() for group in groups for core in group.cores))
    gate_numbers = sum(gate.numel() for group in groups for gate in group.gates)
    gate_grads = like.new_empty(gate_numbers, dtype=torch.float32)
    file, gates = CONTRACT[like.dtype, dtype], _first_gate(groups)
    plans = _plans(file, groups, [grad.shape[2] for grad in grads[::2]], backward=True)
    shares = like.new_empty(max(plan.shares for plan in plans), dtype=torch.float32)
    last, first = (
        file.replace("contract", f"contract_back_{which}") for which in ("last", "first")
    )
    for plan in plans:
        addresses = plan.addresses(grads)
        launch(
            file, last, like.device, plan.blocks.shape[0], _THREADS, plan.shared[1],
            plan.descriptors, plan.blocks, gates, addresses, core_grads, shares,
        )  # fmt: skip
        launch(
            file, first, like.device, plan.count, _THREADS, plan.shared[2], plan.descriptors, gates,
            addresses, shares, core_grads, gate_grads,
        )  # fmt: skip
    return core_grads, gate_grads


@dataclass
class _Plan:
    """Arguments of a launch for ``count`` factors, with their ``descriptors`` on the card.

    ``blocks`` are for each block the number of its factor and, in the low 16 bits, of its columns;
    ``groups`` are numbers of the factors' groups of layers. ``shared`` are the bytes that a block
    shares in the forward and the two backward launches; ``shares`` counts the numbers that the
    first backward launch writes for the second.
    """

    descriptors: Tensor
    blocks: Tensor
    count: int
    groups: list[int]
    shared: tuple[int, ...]
    shares: int

    def addresses(self, factors: Sequence[Tensor]) -> _Factors:
        """Return the addresses of the groups' factors, or of their gradients if these are given."""
        found = [factors[2 * g + right].data_ptr() for g in self.groups for right in (0, 1)]
        addresses = _Factors()
        addresses.of[: len(found)] = found
        return addresses


_kept: dict[object, list[_Plan]] = {}
"""Launch plans by shapes and data pointers: another pointer is another key, so no plan is stale."""

_captured: set[object] = set()  # keys of those that graphs hold


def _plans(
    file: str, groups: Sequence[Chains], widths: Sequence[int], backward: bool
) -> list[_Plan]:
    """Return the launches for these groups or their gradients, from the cache if it has them."""
    device = groups[0].cores[0].device
    tensors = [t for g in groups for of in (g.cores, g.biases) for t in of]
    # In numbers from the first gate: the same wherever all lie together.
    places = [gate.data_ptr() for group in groups for gate in group.gates]
    gates = [(place - places[0]) // 4 for place in places]
    sizes = tuple(
        (*g.modes, -1, *g.bonds, g.split, g.num_layers, len(g.gates), len(g.biases), g.threshold,
         width, g.biases[0].shape[0] if g.biases else 0)
        for g, width in zip(groups, widths, strict=True)
    )  # fmt: skip
    key = (file, device, backward, sizes, *gates, *(t.data_ptr() for t in tensors))
    on_card = device.type == "cuda"
    captured = on_card and torch.cuda.is_current_stream_capturing()
    if key in _kept:
        if captured:
            _captured.add(key)
        return _kept[key]
    plans = [draft.on_card(file, device) for draft in _drafts(groups, widths, gates, backward)]
    if captured:  # it is written when the graph runs, not before
        return plans
    if on_card:  # another stream, of another thread, may read it from now on
        torch.cuda.current_stream(device).synchronize()
    if len(_kept) - len(_captured) >= _MOST_KEPT:
        if on_card:
            torch.cuda.synchronize(device)  # another stream may still read the plans that go
        for old in [old for old in _kept if old not in _captured][: _MOST_KEPT // 2]:
            del _kept[old]
    _kept[key] = plans
    return plans


class _Draft:
    """Descriptors of the layers of one launch, while they are collected on the host."""

    def __init__(self) -> None:
        self.descriptors: list[_Descriptor] = []
        self.walks: list[Walk] = []
        self.groups: list[int] = []
        self.shares = 0

    def on_card(self, file: str, device: torch.device) -> _Plan:
        """Write the descriptors to the card by kernels, which a CUDA graph can capture."""
        # Long ones first.
        numbers = sorted(range(len(self.walks)), key=lambda n: -self.walks[n].share)
        codes = [n << 16 | block for n in numbers for block in range(self.walks[n].blocks)]
        descriptors = bytes((_Descriptor * len(self.descriptors))(*self.descriptors))
        data = descriptors + bytes((ctypes.c_int32 * len(codes))(*codes))
        table = torch.empty(len(data) // 4, dtype=torch.int32, device=device)
        for start in range(0, len(data), _AT_ONCE):
            piece = data[start : start + _AT_ONCE]
            launch(
                file, "contract_describe", device, 1, _THREADS, 0,
                _Bytes.from_buffer_copy(piece.ljust(_AT_ONCE, b"\0")), table, start // 4,
                len(piece) // 4,
            )  # fmt: skip
        end = len(descriptors) // 4
        shared = tuple(map(max, zip(*(walk.shared for walk in self.walks), strict=True)))
        count = len(self.descriptors)
        return _Plan(table[:end], table[end:], count, self.groups, shared, self.shares)


def _drafts(
    groups: Sequence[Chains], widths: Sequence[int], gates: Sequence[int], backward: bool
) -> Iterator[_Draft]:
    """Yield the descriptors of each launch that these groups need: nearly always one launch."""
    draft = _Draft()
    core_grad = gate_grad = first_gate = 0
    for number, (group, width) in enumerate(zip(groups, widths, strict=True)):
        both = walks(group)
        more = sum(walk.blocks * walk.share for walk in both)
        for layer in range(group.num_layers):
            full = number not in draft.groups and 2 * len(draft.groups) == _MOST_FACTORS
            too_many = backward and draft.shares + more > _MOST_SHARES
            if draft.descriptors and (full or too_many):
                yield draft
                draft = _Draft()
            if number not in draft.groups:
                draft.groups.append(number)
            one = group.layer(layer)
            for walk in both:
                descriptor = _describe(one, walk, width, core_grad, gate_grad, gates[first_gate:])
                descriptor.place = layer * width * walk.rows[-1]
                descriptor.factor = 2 * draft.groups.index(number) + walk.right
                descriptor.share = draft.shares
                draft.shares += walk.blocks * walk.share
                draft.descriptors.append(descriptor)
                draft.walks.append(walk)
            core_grad += sum(core.numel() for core in one.cores)
            gate_grad += sum(gate.numel() for gate in one.gates)
            first_gate += len(one.gates)
    yield draft


def _describe(
    one: Chains, walk: Walk, width: int, core_grad: int, gate_grad: int, gates_at: Sequence[int]
) -> _Descriptor:
    """Return the descriptor of a factor of one layer, with the offsets of its gradients."""
    descriptor = _Descriptor(
        cores=len(walk.modes), right=walk.right, width=width, blocks=walk.blocks,
        threshold=one.threshold,
    )  # fmt: skip
    descriptor.mode[: len(walk.modes)], descriptor.bond[: len(walk.bonds)] = walk.modes, walk.bonds
    if len(walk.modes) > 1:
        for name in ("room", "room_back", "at_once", "at_once_back"):
            sizes = getattr(walk, name)
            getattr(descriptor, name)[: len(sizes)] = sizes
    if walk.right and one.biases:
        descriptor.bias, descriptor.bias_width = one.biases[0].data_ptr(), one.biases[0].shape[0]
    cores, gates = (
        list(itertools.accumulate((t.numel() for t in tensors), initial=first))
        for tensors, first in ((one.cores, core_grad), (one.gates, gate_grad))
    )
    for s in range(len(walk.modes)):
        core = one.length - 1 - s if walk.right else s
        descriptor.core[s], descriptor.core_grad[s] = one.cores[core].data_ptr(), cores[core]
        gate = core - 1 if walk.right else core
        if one.gates and not (walk.right and s == len(walk.modes) - 1):  # the left factor's
            descriptor.gate_at[s], descriptor.gate_grad[s] = gates_at[gate], gates[gate]
            descriptor.gated |= 1 << s
    return descriptor


def _first_gate(groups: Sequence[Chains]) -> Tensor | None:
    """Return the first gate, to which offsets of all gates are relative; None without gates."""
    return next((group.gates[0] for group in groups if group.gates), None)


def _contiguous(group: Chains) -> Chains:
    """Return the group with contiguous tensors; keep it until the launch is enqueued."""
    lists = group.cores, group.gates, group.biases
    if all(tensor.is_contiguous() for tensors in lists for tensor in tensors):
        return group
    cores, gates, biases = ([tensor.contiguous() for tensor in tensors] for tensors in lists)
    return replace(group, cores=cores, gates=gates, biases=biases)
