"""How the kernels that contract chains walk through one factor: sizes, and what a block needs.

``kernels/contract.cuh`` says what is walked.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from comera.ops.cores import Chains

MOST_CORES = 8
"""Cores on one side of a tensor train."""

_MOST_BOND, _MOST_BLOCKS = 64, 1 << 16
_COLUMNS, _APART, _ALONE = 64, 68, 4096

_MOST_SHARED = 96 * 1024
"""Bytes of shared memory a block may have on every card that kernels run on."""

_DESCRIBED, _GATES = 560, 256
"""Bytes of them that the descriptor of a factor takes, and the gates of a bond."""

_STAGED, _STAGED_BACK = 12 * 1024, 16 * 1024
"""Numbers of a core, and of the gradient beside it, that a block has in shared memory at once."""


@dataclass(frozen=True)
class Walk:
    """A factor as it is walked, from its outer end to the middle bond.

    Attributes:
        modes: One for each core.
        bonds: One for each core, that on its inner side.
        right: Whether it is a right factor.
    """

    modes: tuple[int, ...]
    bonds: tuple[int, ...]
    right: bool

    def unfit(self) -> str | None:
        """Say why no kernel walks it, or None."""
        if not 1 <= len(self.modes) <= MOST_CORES:
            return f"a side of a tensor train has {len(self.modes)} cores, not 1 to {MOST_CORES}"
        widest = max((*self.bonds[:-1], 0))
        if widest > _MOST_BOND:
            return f"a bond is {widest} wide, more than {_MOST_BOND}"
        if self.blocks >= _MOST_BLOCKS:
            return f"a core has {self.columns:,} columns, too many for a launch"
        needed = max(self.shared)
        if needed > _MOST_SHARED:
            return (
                f"modes {self.modes} with bonds {self.bonds} need {needed} bytes of shared memory"
            )
        return None

    def rows(self, core: int) -> int:
        """Count the rows of the product of the first cores, up to this one."""
        return math.prod(self.modes[: core + 1])

    @property
    def columns(self) -> int:
        """Count the columns of the last core."""
        return self.modes[-1] * self.bonds[-1]

    @property
    def blocks(self) -> int:
        """Count the blocks that share out those columns."""
        return max(1, -(-self.columns // (_ALONE if len(self.modes) == 1 else _COLUMNS)))

    @property
    def share(self) -> int:
        """Count the numbers that a block leaves for the second backward launch."""
        if len(self.modes) == 1:
            return 0
        return self.bonds[-2] * self.rows(len(self.modes) - 2) + _COLUMNS

    @functools.cached_property
    def room(self) -> list[int]:
        """List where products of the first cores lie in shared memory, and where their room ends.

        They lie at either end of it by turns: each is needed for the next one only.
        """
        end = max(map(sum, itertools.pairwise([0, *self._products])), default=0)
        return [end - size if s % 2 else 0 for s, size in enumerate(self._products)] + [end]

    @functools.cached_property
    def room_back(self) -> list[int]:
        """List the same for the second backward launch, which needs all of them.

        The gradient of each takes the place of the next.
        """
        grads = self._products or [self._product(0)]
        both = itertools.zip_longest(self._products, [0, *grads], fillvalue=0)
        return list(itertools.accumulate(map(max, both), initial=0))

    @functools.cached_property
    def at_once(self) -> list[int]:
        """List how many values of an inner core's mode are staged at once."""
        return self._most(self._staged, _STAGED, self._tiles + self.room[-1])

    @functools.cached_property
    def at_once_back(self) -> list[int]:
        """List the same for the second backward launch, which has a gradient beside them."""
        return self._most(self._beside, _STAGED_BACK, self.room_back[-1])

    @functools.cached_property
    def shared(self) -> tuple[int, int, int]:
        """Count the bytes of shared memory of a block: forward, then backward."""
        if len(self.modes) == 1:
            return (self._described,) * 3
        staged = max(map(self._staged, itertools.count(1), self.at_once), default=0)
        beside = max(map(self._beside, itertools.count(1), self.at_once_back), default=0)
        before, grad = self._tiles + self.room[-1], self._tile[1] * _APART
        numbers = before + staged, before + max(staged, grad), self.room_back[-1] + beside
        return tuple(self._described + 4 * each for each in numbers)  # type: ignore[return-value]

    @property
    def _described(self) -> int:
        """Count the bytes that the descriptor and the gates of all bonds but the last take."""
        return _DESCRIBED + _GATES * (len(self.modes) - 1)

    @property
    def _tile(self) -> tuple[int, int]:
        """The widest bond there may be before the last core, and how many rows are made at once."""
        return (32, 128) if self.bonds[-2] <= 32 else (64, 64)

    @property
    def _tiles(self) -> int:
        """Count the numbers of the last core's columns and of those rows."""
        bond, rows = self._tile
        return bond * _APART + rows * (bond + 4)

    @property
    def _products(self) -> list[int]:
        """Count the numbers of each product of the first cores that is made whole."""
        return [self._product(s) for s in range(len(self.modes) - 2)]

    def _product(self, core: int) -> int:
        return self.bonds[core] * _up_to_four(self.rows(core))

    def _most(self, numbers: Callable[[int, int], int], most: int, beside: int) -> list[int]:
        """List how many values of each inner core's mode may be staged at once, at least one."""
        most = min(most, (_MOST_SHARED - self._described) // 4 - beside)
        return [
            max(m for m in range(1, mode + 1) if m == 1 or numbers(core, m) <= most)
            for core, mode in list(enumerate(self.modes))[1:-1]
        ]

    def _staged(self, core: int, modes: int) -> int:
        """Count the numbers of some values of a core's mode in shared memory."""
        outer, inner = self.bonds[core - 1 : core + 1]
        if self.right:
            outer, inner = inner, outer
        return _up_to_four(outer * (modes * inner + self.right))

    def _beside(self, core: int, modes: int) -> int:
        """Count these and the numbers of the gradient beside them."""
        spans = max(1, -(-self.bonds[core] // 32))
        grad = modes * self.rows(core - 1) * (32 * spans + 4)
        return self._staged(core, modes) + max(grad, 256)


def walks(chains: Chains) -> tuple[Walk, Walk]:
    """Return the walks through the left and the right factor of layers of one shape."""
    return _walks(tuple(chains.modes), tuple(chains.bonds), chains.split)


@functools.cache
def _walks(modes: tuple[int, ...], bonds: tuple[int, ...], split: int) -> tuple[Walk, Walk]:
    left = Walk(modes[:split], bonds[1 : split + 1], False)
    return left, Walk(modes[split:][::-1], bonds[split:-1][::-1], True)


def _up_to_four(n: int) -> int:
    return -(-n // 4) * 4
