"""The kernels that contract chains: all layers of a model in one launch forward, two backward.

The addresses of cores, gates and biases travel as arguments of the launch, by value: nothing is
copied to the card before it, and a CUDA graph keeps them. ``kernels/contract.cu`` says how they
work.
"""

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from comera.ops.cores import Chains
from comera.ops.kernels.choose import CONTRACT, DTYPES
from comera.ops.kernels.launch import launch

# As in contract.cu.
_MOST_GROUPS, _MOST_POINTERS, _MOST_CORES = 16, 1536, 16
_THREADS, _TILE = 128, 8
_SHARED = 4 * (16 * (32 + 1) + 32 * (64 + 1))


class _Group(ctypes.Structure):
    _fields_ = (
        ("first_block", ctypes.c_int), ("first_tile", ctypes.c_int),
        ("layers", ctypes.c_int), ("length", ctypes.c_int), ("split", ctypes.c_int),
        ("gated", ctypes.c_int), ("bias_width", ctypes.c_int), ("width", ctypes.c_int),
        ("first_pointer", ctypes.c_int), ("threshold", ctypes.c_float),
        ("mode", ctypes.c_int * _MOST_CORES), ("bond", ctypes.c_int * (_MOST_CORES + 1)),
        ("kept", ctypes.c_int * 2), ("work", ctypes.c_int * 2),
        ("left", ctypes.c_void_p), ("right", ctypes.c_void_p),
        ("first_work", ctypes.c_int64), ("first_core_grad", ctypes.c_int64),
        ("first_gate_grad", ctypes.c_int64),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        ("groups", ctypes.c_int),
        ("group", _Group * _MOST_GROUPS),
        ("pointer", ctypes.c_void_p * _MOST_POINTERS),
    )


def unfit(groups: Sequence[Chains]) -> str | None:
    """Say why kernels do not contract these chains on any card, or None."""
    like = groups[0].cores[0]
    for group in groups:
        if group.length > _MOST_CORES:
            return f"a tensor train has {group.length} cores, more than {_MOST_CORES}"
        if any(gate.dtype != torch.float32 for gate in group.gates):
            return f"gates are {group.gates[0].dtype}, not torch.float32"
        together = (*group.cores, *group.biases)
        if any(t.dtype != like.dtype or t.device != like.device for t in together):
            return "cores and biases are of several dtypes or devices"
    return None


def contract(groups: Sequence[Chains]) -> list[Tensor]:
    """Return each group's ``left`` and ``right``, as :func:`~comera.ops.factors.contract_cores`."""
    like = groups[0].cores[0]
    factors = [like.new_empty(shape) for group in groups for shape in group.factor_shapes]
    for part in _parts(groups, factors):
        work = like.new_empty(part.work(backward=False), dtype=torch.float32)
        part.launch("contract", part.blocks, part.arguments(backward=False), work)
    return factors


def contract_backward(groups: Sequence[Chains], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return gradients of all cores, one after the other in one tensor, and those of all gates.

    Args:
        groups: What was contracted.
        grads: Gradients of the factors, two for each group.
    """
    like = groups[0].cores[0]
    grads = [grad.to(like.dtype).contiguous() for grad in grads]
    core_grads = like.new_empty(sum(core.numel() for group in groups for core in group.cores))
    gate_numbers = sum(gate.numel() for group in groups for gate in group.gates)
    gate_grads = like.new_empty(gate_numbers, dtype=torch.float32)
    for part in _parts(groups, grads):
        work = like.new_empty(part.work(backward=True), dtype=torch.float32)
        arguments = part.arguments(backward=True)
        part.launch("contract_back_factors", part.blocks, arguments, work)
        part.launch("contract_back_cores", part.tiles, arguments, work, core_grads, gate_grads)
    return core_grads, gate_grads


@dataclass
class _Member:
    """Layers of one group that a launch takes along.

    Attributes:
        chains: The layers.
        left: Their left factors or the gradients of these.
        right: Their right factors or the gradients of these.
        core_grad: Place of their first core's gradient among all.
        gate_grad: Place of their first gate's gradient among all.
    """

    chains: Chains
    left: Tensor
    right: Tensor
    core_grad: int
    gate_grad: int

    def kept(self, right: bool) -> tuple[int, int]:
        """Count the entries of partial products that a factor keeps, without and with gradients."""
        chains = self.chains
        modes, bonds = chains.modes, chains.bonds
        if right:
            modes, inner = modes[chains.split :][::-1], bonds[chains.split :][:-1][::-1]
        else:
            modes, inner = modes[: chains.split], bonds[1 : chains.split + 1]
        rows = itertools.accumulate(modes, lambda a, b: a * b)
        sizes = [count * bond for count, bond in zip(rows, inner, strict=True)][:-1]
        return sum(sizes[1:]), sum(sizes[1:]) + sum(sizes)

    @property
    def blocks(self) -> int:
        modes = self.chains.modes
        return self.chains.num_layers * (modes[0] + modes[-1])

    @property
    def tiles(self) -> int:
        bonds, split = self.chains.bonds, self.chains.split
        inner = [bonds[k + (k < split)] for k in range(self.chains.length)]
        return self.chains.num_layers * sum(-(-bond // _TILE) for bond in inner)


class _Part:
    """What one launch works on."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self.members = members
        self.blocks = sum(member.blocks for member in members)
        self.tiles = sum(member.tiles for member in members)

    def work(self, backward: bool) -> int:
        """Count the entries of scratch memory that a launch needs."""
        return sum(
            member.chains.num_layers * member.kept(right)[backward]
            for member in self.members
            for right in (False, True)
        )

    def arguments(self, backward: bool) -> _Model:
        """Collect sizes and addresses, as the kernels want them."""
        model = _Model(groups=len(self.members))
        pointers: list[int] = []
        block = tile = work = 0
        for place, member in zip(model.group, self.members, strict=False):
            chains = member.chains
            place.first_block, place.first_tile, place.first_work = block, tile, work
            place.layers, place.length, place.split = (
                chains.num_layers, chains.length, chains.split
            )  # fmt: skip
            place.gated = bool(chains.gates)
            place.bias_width = chains.biases[0].shape[0] if chains.biases else 0
            place.width = member.left.shape[2]
            place.first_pointer = len(pointers)
            place.threshold = chains.threshold
            place.mode[: chains.length] = chains.modes
            place.bond[: chains.length + 1] = chains.bonds
            left, right = member.kept(False), member.kept(True)
            place.kept[:] = left[0], right[0]
            place.work[:] = left[backward], right[backward]
            place.left, place.right = member.left.data_ptr(), member.right.data_ptr()
            place.first_core_grad = member.core_grad
            place.first_gate_grad = member.gate_grad
            for layer in range(chains.num_layers):
                one = chains.of_layers(layer, 1)
                pointers += [t.data_ptr() for t in (*one.cores, *one.gates, *one.biases)]
            block += member.blocks
            tile += member.tiles
            work += chains.num_layers * (left[backward] + right[backward])
        model.pointer[: len(pointers)] = pointers
        return model

    def launch(self, name: str, blocks: int, *arguments: _Model | Tensor) -> None:
        like = self.members[0].left
        launch(
            CONTRACT, f"{name}_{DTYPES[like.dtype]}", like.device, blocks, _THREADS, _SHARED,
            *arguments,
        )  # fmt: skip


def _parts(groups: Sequence[Chains], factors: Sequence[Tensor]) -> Iterator[_Part]:
    """Split groups into as many launches as addresses and shapes need: nearly always one."""
    members: list[_Member] = []
    room = _MOST_POINTERS
    core_grad = gate_grad = 0
    for group, left, right in zip(groups, factors[::2], factors[1::2], strict=True):
        group = _contiguous(group)
        each = group.pointers // group.num_layers
        first = 0
        while first < group.num_layers:
            count = min(group.num_layers - first, room // each)
            if not count or len(members) == _MOST_GROUPS:
                yield _Part(members)
                members, room = [], _MOST_POINTERS
                continue
            some = group.of_layers(first, count)
            end = first + count
            members.append(_Member(some, left[first:end], right[first:end], core_grad, gate_grad))
            core_grad += sum(core.numel() for core in some.cores)
            gate_grad += sum(gate.numel() for gate in some.gates)
            room -= count * each
            first = end
    yield _Part(members)


def _contiguous(group: Chains) -> Chains:
    """Copy tensors that are not contiguous; a launch is enqueued before the copies are freed."""
    cores, gates, biases = (
        [tensor.contiguous() for tensor in tensors]
        for tensors in (group.cores, group.gates, group.biases)
    )
    return replace(group, cores=cores, gates=gates, biases=biases)
