"""How the kernels that contract chains walk through one factor: sizes, and what a block needs.

``kernels/contract.cuh`` says what is walked.
"""

import functools
import math
from dataclasses import dataclass

from comera.ops.cores import Chains

MOST_CORES = 4
"""Cores on one side of a tensor train."""

_MOST_BOND, _MOST_BLOCKS = 64, 1 << 16
_COLUMNS, _APART, _ALONE = 64, 68, 4096

_MOST_SHARED = 96 * 1024
"""Bytes of shared memory a block may have on every card that kernels run on."""

_DESCRIBED = 1040
"""Bytes of them that the descriptor of a factor and its gates take."""

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
    def at_once(self) -> list[int]:
        """List how many values of an inner core's mode are staged at once."""
        return [
            max(m for m in range(1, mode + 1) if m == 1 or self._staged(core, m) <= _STAGED)
            for core, mode in self._inner
        ]

    @functools.cached_property
    def at_once_back(self) -> list[int]:
        """List the same for the second backward launch, which has a gradient beside them."""
        return [
            max(m for m in range(1, mode + 1) if m == 1 or self._beside(core, m) <= _STAGED_BACK)
            for core, mode in self._inner
        ]

    @functools.cached_property
    def shared(self) -> tuple[int, int, int]:
        """Count the bytes of shared memory of a block: forward, then backward."""
        if len(self.modes) == 1:
            return (_DESCRIBED,) * 3
        bond, rows = (32, 128) if self.bonds[-2] <= 32 else (64, 64)
        staged = max(
            (self._staged(core, self.at_once[core - 1]) for core, _ in self._inner), default=0
        )
        beside = max(
            (self._beside(core, self.at_once_back[core - 1]) for core, _ in self._inner), default=0
        )
        products = [self.bonds[s] * _up_to_four(self.rows(s)) for s in range(len(self.modes) - 2)]
        before = bond * _APART + rows * (bond + 4) + sum(products)
        both = (
            2 * sum(products)
            if len(self.modes) > 2
            else 2 * self.bonds[0] * _up_to_four(self.modes[0])
        )
        numbers = before + staged, before + max(staged, rows * _APART), both + beside
        return tuple(_DESCRIBED + 4 * each for each in numbers)  # type: ignore[return-value]

    @property
    def _inner(self) -> list[tuple[int, int]]:
        """List number and mode of the cores that are staged: all but the first and the last."""
        return list(enumerate(self.modes))[1:-1]

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
