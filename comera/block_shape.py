"""Mode and rank arithmetic of block tensor trains. Pure Python, as ``shapes.py``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from comera.modes import balanced_modes
from comera.shapes import LinearShape, check_cover, check_whole_numbers, only_one, sized, two_sides

DEFAULT_RANK = 2
"""The rank of the blocks of a layer whose user names none."""


@dataclass(frozen=True)
class BTTShape(LinearShape):
    """The block tensor train of an ``(out, in)`` matrix: a grid of blocks, each of low rank.

    With the input split into ``a`` blocks of ``b`` numbers and the output into ``c`` blocks of
    ``d``, every one of the ``a c`` blocks is a ``b x d`` matrix of rank R of its own. So the whole
    may be of full rank, however small R is, with ``R (in c + out a)`` numbers; rank 1 is a Monarch
    matrix (Dao et al., arXiv 2204.00595). Source: Qiu et al., arXiv 2406.06248.

    Args:
        in_modes: ``(a, b)``: blocks of the input and the numbers in each.
        out_modes: ``(c, d)``, those of the output.
        ranks: ``(R,)``. ``(0,)``: the weight is zero.

    Raises:
        ValueError: If a side has not two modes, or a mode or the rank is below one.
    """

    in_modes: tuple[int, int]
    out_modes: tuple[int, int]
    ranks: tuple[int, ...]
    _to_be_smaller = "use fewer blocks (shape=)"

    def __post_init__(self) -> None:
        if (len(self.in_modes), len(self.out_modes)) != (2, 2):
            raise ValueError(
                f"each side needs two modes, blocks and the numbers in each, got {self}"
            )
        self._check()

    @classmethod
    def fit(
        cls,
        in_features: int,
        out_features: int,
        *,
        rank: int | Sequence[int] | None = None,
        shape: "BTTShape | Sequence[Sequence[int]] | None" = None,
        compression: float | None = None,
    ) -> "BTTShape":
        """Choose the blocks and their rank from what a layer's user says.

        Args:
            in_features: True input width; modes that multiply to more mean zero padding.
            out_features: True output width.
            rank: Rank of the blocks; 2 if nothing is said. Cut to what a block can have.
            shape: ``(in_modes, out_modes)``, or a whole ``BTTShape``; otherwise about the root of
                the width in blocks of about that size, but no more blocks than full rank takes.
            compression: Instead of ``rank``: how many times fewer entries than the dense matrix.

        Raises:
            ValueError: If the modes do not fit the widths, or rank and compression are both given.
        """
        only_one(rank=rank, compression=compression)
        check_whole_numbers(in_features=in_features, out_features=out_features)
        if isinstance(shape, BTTShape):
            given = replace(shape, ranks=shape._clip(shape.ranks))
        else:
            if shape is None:
                shape = _blocks_of(in_features, out_features)
            given = cls(*two_sides(shape, "in_modes", "out_modes"), (1,))  # type: ignore[arg-type]
        check_cover("in_features", in_features, given.in_modes)
        check_cover("out_features", out_features, given.out_modes)
        keep = isinstance(shape, BTTShape)
        if rank is None and compression is None and not keep:
            rank = DEFAULT_RANK
        return sized(given, rank, compression, keep=keep)

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        return self.in_width * self.out_modes[0], self.out_width * self.in_modes[0]

    @property
    def num_dense(self) -> int:
        return self.in_width * self.out_width

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """The largest useful rank: that of a whole block."""
        return (min(self.in_modes[1], self.out_modes[1]),)

    def _clip(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (min(wanted[0], self.max_ranks[0]),)

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """``(1, a, b, c, R)`` and ``(R, c, a, d, 1)``."""
        (a, b), (c, d), (rank,) = self.in_modes, self.out_modes, self.ranks
        return (1, a, b, c, rank), (rank, c, a, d, 1)

    @property
    def split(self) -> int:
        """How many cores carry the input."""
        return 1


_Modes = tuple[tuple[int, int], tuple[int, int]]
"""Blocks and the numbers in each, of the input and of the output."""


def _blocks_of(in_features: int, out_features: int) -> _Modes:
    """Split both sides: as many blocks of rank 1 as the narrower one is wide make full rank."""
    (a, b), (c, d) = balanced_modes(in_features, 2), balanced_modes(out_features, 2)
    balanced = (a, b), (c, d)
    enough = min(in_features, out_features)
    if a * c <= enough:
        return balanced
    exact: list[_Modes] = [
        ((a, in_features // a), (c, out_features // c))
        for a in _divisors(in_features)
        for c in _divisors(out_features)
        if a * c >= enough
    ]

    def order(modes: _Modes) -> tuple[int, int]:
        (a, b), (c, d) = modes
        return a * b * c + c * d * a, abs(a - balanced[0][0])

    return min([balanced, *exact], key=order)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
