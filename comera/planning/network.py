"""Tensor networks as index sets: what a layer multiplies, before any order is chosen.

A network is *closed* when its output is empty: every tensor of the layer is in it, the gradient
of the output (``gy``) included. Leaving one tensor out of a closed network gives the network of
that tensor's gradient, and leaving ``gy`` out gives the forward pass.

Indices are single letters, so that equations can be run as they are: ``b`` is the batch, other
lower-case letters are modes, upper-case letters are bonds. The outer bonds, of size one, have no
index.
"""

import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opt_einsum import get_symbol

from comera.shapes import TTMShape, TTShape

BATCH = "b"
OUTPUT_GRADIENT = "gy"

_MODES = string.ascii_lowercase.replace(BATCH, "")
_BONDS = string.ascii_uppercase
_LETTERS = len(string.ascii_letters)


@dataclass(frozen=True)
class Network:
    """Named tensors, each a tuple of indices; an index shared by tensors is multiplied over.

    Args:
        tensors: The indices of each tensor, in the order in which it is stored.
        sizes: The size of each index.
        output: Indices that are kept; all others are summed. Empty: the network is closed.

    Raises:
        ValueError: If an index has no size, repeats in a tensor, or belongs to one tensor alone.
    """

    tensors: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    output: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        holders: dict[str, int] = {}
        for name, indices in (*self.tensors.items(), ("the output", self.output)):
            if len(set(indices)) < len(indices):
                raise ValueError(f"{name} repeats an index: {' '.join(indices)}")
            for index in indices:
                holders[index] = holders.get(index, 0) + 1
        for index, count in holders.items():
            if self.sizes.get(index, 0) < 1:
                raise ValueError(f"index {index} needs a size of at least 1 in {dict(self.sizes)}")
            if count < 2:
                raise ValueError(f"index {index} belongs to one tensor alone; it needs another end")

    def without(self, name: str) -> "Network":
        """Return the network of the gradient of tensor ``name``, whose indices become the output.

        Raises:
            ValueError: If there is no such tensor, or the network is not closed.
        """
        if name not in self.tensors or self.output:
            raise ValueError(
                f"{name!r} can be left out of a closed network that holds it, not of "
                f"{', '.join(self.tensors)} -> ({' '.join(self.output)})"
            )
        rest = {key: indices for key, indices in self.tensors.items() if key != name}
        return Network(rest, self.sizes, self.tensors[name])

    def size_of(self, indices: Iterable[str]) -> int:
        """Count the numbers in a tensor with these indices."""
        return math.prod(self.sizes[index] for index in indices)


def linear_network(shape: TTShape, tokens: int) -> Network:
    """Build the closed network of a linear layer: ``x``, ``core0`` to ``coreN`` and ``gy``.

    ``x`` is ``(batch, *input modes)``, ``gy`` is ``(batch, *output modes)``.
    """
    modes, cores, sizes = _train(shape.slice_sizes, shape.ranks)
    tensors = {
        "x": (BATCH, *modes[: shape.split]),
        **cores,
        OUTPUT_GRADIENT: (BATCH, *modes[shape.split :]),
    }
    return Network(tensors, {BATCH: tokens, **sizes})


def factor_networks(shape: TTShape | TTMShape, names: tuple[str, str]) -> tuple[Network, Network]:
    """Build the closed networks of the left and right factor, each closed by its gradient.

    Args:
        shape: Modes and ranks of a linear layer, split between input and output; or of a table,
            split in the middle, where a core's row and column mode count as one.
        names: What the gradients of the two factors are called.
    """
    modes, cores, sizes = _train(shape.slice_sizes, shape.ranks)
    at, listed = shape.split, list(cores.items())
    middle = _letter(_BONDS, at - 1)
    left = {**dict(listed[:at]), names[0]: (*modes[:at], middle)}
    right = {**dict(listed[at:]), names[1]: (middle, *modes[at:])}
    return _closed(left, sizes), _closed(right, sizes)


def lookup_network(shape: TTMShape, rows: int) -> Network:
    """Build the closed network of a lookup row by row: ``slice0`` to ``sliceN`` and ``gy``.

    The row number picks one slice of each core, so every tensor carries the batch index:
    ``(batch, left bond, column mode, right bond)``, and ``gy`` is ``(batch, *column modes)``.
    """
    modes, cores, sizes = _train(shape.col_modes, shape.ranks)
    tensors = {f"slice{k}": (BATCH, *indices) for k, indices in enumerate(cores.values())}
    return Network({**tensors, OUTPUT_GRADIENT: (BATCH, *modes)}, {BATCH: rows, **sizes})


def _closed(tensors: dict[str, tuple[str, ...]], sizes: Mapping[str, int]) -> Network:
    held = {index for indices in tensors.values() for index in indices}
    return Network(tensors, {index: sizes[index] for index in sizes if index in held})


def _train(
    modes: Sequence[int], ranks: Sequence[int]
) -> tuple[list[str], dict[str, tuple[str, ...]], dict[str, int]]:
    """Name the modes and bonds of a chain: mode indices, indices of each core, and all sizes."""
    mode_letters = [_letter(_MODES, k) for k in range(len(modes))]
    bond_letters = [_letter(_BONDS, k) for k in range(len(ranks))]
    cores = {
        f"core{k}": (*bond_letters[max(0, k - 1) : k], mode, *bond_letters[k : k + 1])
        for k, mode in enumerate(mode_letters)
    }
    sizes = dict(zip([*mode_letters, *bond_letters], [*modes, *ranks], strict=True))
    return mode_letters, cores, sizes


def _letter(alphabet: str, k: int) -> str:
    """Return the k-th letter; past the end, symbols that opt_einsum takes, odd and even apart."""
    if k < len(alphabet):
        return alphabet[k]
    return get_symbol(_LETTERS + 2 * (k - len(alphabet)) + (alphabet is _BONDS))
