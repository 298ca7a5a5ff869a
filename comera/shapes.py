"""Mode and rank arithmetic of the tensor formats. Pure Python: nothing here imports torch.

A *mode* is a factor of a width or row count, a *bond* (or rank) connects two neighbouring cores.
The formats: ``TTShape`` for the matrix of a linear layer, whose first cores carry the input modes
and whose last cores carry the output modes; ``TTMShape`` for an embedding table, each of whose
cores carries one factor of the row count and one of the width; ``BTTShape`` for a linear layer that
is a grid of low-rank blocks.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self, TypeVar

_GOOD_BALANCE = 1.25
"""An exact factorisation is kept when its modes sum to at most this times the ideal sum."""
_LEFT_SLICES = 8
"""Left slices of a table for each right one. Rows of one right slice are made in groups: of few
right slices the groups of a batch fill, and what is gathered row by row, left slices, is narrow."""
_MOST_RIGHT_SLICES = 2000
"""Right slices of a table at most, however large it is: of the left factor, which then has more,
only the slices that a batch reads are contracted."""
_LEFT_COLS = 1 / 3
"""Exponent of a table's width that the left factor gets."""


def balanced_modes(width: int, order: int) -> tuple[int, ...]:
    """Split ``width`` into ``order`` factors as equal as possible, smallest first.

    A width without a good factorisation is rounded up to the next one that has it: the result
    then multiplies to a little more than ``width``.

    >>> balanced_modes(768, 3)
    (8, 8, 12)
    >>> balanced_modes(30522, 4)
    (12, 13, 14, 14)

    Raises:
        ValueError: If ``width`` or ``order`` is below one.
    """
    if width < 1 or order < 1:
        raise ValueError(f"cannot split a width of {width} into {order} modes")
    ideal_sum = order * width ** (1 / order)
    exact = min(_factorisations(width, order), key=sum)
    if sum(exact) <= _GOOD_BALANCE * ideal_sum:
        return exact

    def cost(modes: tuple[int, ...]) -> float:
        return sum(modes) / ideal_sum * (math.prod(modes) / width) ** 2

    return min((exact, *_roundings(width, order)), key=cost)


def order_for(width: int, order: int) -> int:
    """Return fewer modes for a narrow side: splitting 10 into 1 x 2 x 5 saves nothing."""
    if order < 1:
        raise ValueError(f"order={order} must be at least 1")
    return min(order, max(1, int(math.log2(max(2, width)) / 2)))


def table_modes(rows: int, width: int, order: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose row and column modes of a table for fast lookups, the large ones at the ends."""
    left, right = order // 2, order - order // 2
    right_slices = min(max(1, round(math.sqrt(rows / _LEFT_SLICES))), _MOST_RIGHT_SLICES)
    right_rows = balanced_modes(right_slices, right)
    left_rows = balanced_modes(-(-rows // math.prod(right_rows)), left)
    # The left columns stand in the first core alone, where the bond beside them is narrow.
    wanted = width**_LEFT_COLS
    exact = (n for n in range(1, width + 1) if width % n == 0)
    left_cols = min(exact, key=lambda n: abs(math.log(n / wanted)))
    if not 0.5 <= left_cols / wanted <= 2:  # no good factor
        left_cols = round(wanted)
    right_cols = balanced_modes(-(-width // left_cols), right)
    return (
        _tightened((*left_rows[::-1], *right_rows), rows),
        _tightened((left_cols, *(1,) * (left - 1), *right_cols), width),
    )


def _factorisations(width: int, order: int, smallest: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``width`` as ``order`` non-decreasing factors."""
    if order == 1:
        yield (width,)
        return
    most = round(width ** (1 / order)) + 1
    for factor in range(smallest, most + 1):
        if width % factor == 0 and factor**order <= width:
            for rest in _factorisations(width // factor, order - 1, factor):
                yield (factor, *rest)


def _roundings(width: int, order: int) -> Iterator[tuple[int, ...]]:
    """Yield modes near the ``order``-th root whose product is at least ``width``."""
    root = width ** (1 / order)
    near = range(max(1, math.floor(root) - 3), math.ceil(root) + 4)
    for head in itertools.combinations_with_replacement(near, order - 1):
        yield tuple(sorted((*head, -(-width // math.prod(head)))))


def _tightened(modes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Make modes smaller where a smaller one still holds the width."""
    for k, mode in enumerate(modes):
        needed = max(1, -(-width // (math.prod(modes) // mode)))
        if needed < mode:
            return _tightened((*modes[:k], needed, *modes[k + 1 :]), width)
    return modes


DEFAULT_RANK = 32
"""The largest bond of a layer whose user names no rank."""


class Shape:
    """Base of all formats: cores in a row, ``slice_sizes[k]`` numbers for a pair of ranks."""

    ranks: tuple[int, ...]
    _to_be_smaller = "use more modes (order=)"

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    @property
    def split(self) -> int:
        raise NotImplementedError

    @property
    def num_params(self) -> int:
        """The exact number of entries in the cores; gates and biases are not counted."""
        return self.size_at(self.ranks)

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """The largest useful bonds: no bond can exceed the modes on either side of it."""
        sizes = self.slice_sizes
        return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))

    def size_at(self, ranks: Sequence[int]) -> int:
        """Count the entries of the cores at other ranks; none if a bond is at zero."""
        if 0 in ranks:
            return 0
        bonds = (1, *ranks, 1)
        return sum(n * bonds[k] * bonds[k + 1] for k, n in enumerate(self.slice_sizes))

    def with_rank(self, rank: int | Sequence[int]) -> Self:
        """Return the same modes at other bonds, cut to what the modes allow.

        Args:
            rank: One bound for every bond, or one number for each inner bond.

        Raises:
            ValueError: If a rank is below one, or a list has the wrong length.
        """
        most = self.max_ranks
        try:
            listed = isinstance(rank, Sequence) and not isinstance(rank, str)
            given = tuple(rank) if listed else (rank,) * len(most)  # type: ignore[arg-type]
            wanted = tuple(map(whole_number, given))
        except TypeError:
            raise ValueError(f"rank={rank!r} must be an int or a list of ints") from None
        if len(wanted) != len(most):
            raise ValueError(
                f"rank={list(wanted)} names {len(wanted)} bonds, but {len(self.slice_sizes)} "
                f"cores ({self.describe_modes()}) join at {len(most)}; "
                f"give one int or {len(most)} of them"
            )
        if any(r < 1 for r in wanted):
            raise ValueError(f"rank={rank} must be at least 1 everywhere")
        return replace(self, ranks=self._clip(wanted))  # type: ignore[type-var]

    def of_ranks(self, ranks: Sequence[int]) -> Self:
        """Return the same modes at just these bonds."""
        return replace(self, ranks=tuple(ranks))  # type: ignore[type-var]

    def _clip(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Cut each bond to what its neighbours and the modes between them can fill."""
        sizes, bonds = self.slice_sizes, [1, *wanted, 1]
        for k in range(1, len(sizes)):
            bonds[k] = min(bonds[k], bonds[k - 1] * sizes[k - 1])
        for k in range(len(sizes) - 1, 0, -1):
            bonds[k] = min(bonds[k], bonds[k + 1] * sizes[k])
        return tuple(bonds[1:-1])

    def with_compression(self, compression: float) -> Self:
        """Take the largest uniform rank that is at least ``compression`` times smaller than dense.

        Raises:
            ValueError: If even rank one is too large, or ``compression`` is not above 1.
        """
        if not (is_number(compression) and compression > 1):
            raise ValueError(
                f"compression={compression!r} must be above 1: 10 means ten times fewer parameters"
            )
        budget = self.num_dense / compression
        smallest = self.with_rank(1)
        if smallest.num_params > budget:
            raise ValueError(
                f"compression={compression} leaves {int(budget)} parameters of {self.num_dense}, "
                f"but rank 1 over the modes {self.describe_modes()} already needs "
                f"{smallest.num_params}; {self._to_be_smaller} or a compression up to "
                f"{self.num_dense / smallest.num_params:.4g}"
            )
        low, high = 1, max(self.max_ranks, default=1)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.with_rank(middle).num_params <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return self.with_rank(low)

    @property
    def num_dense(self) -> int:
        """Entries of the (padded) dense matrix."""
        return math.prod(self.slice_sizes)

    def describe_modes(self) -> str:
        raise NotImplementedError

    def _check(self) -> None:
        want = len(self.slice_sizes) - 1
        if len(self.ranks) != want:
            raise ValueError(
                f"{len(self.slice_sizes)} cores ({self.describe_modes()}) join at {want} bonds, "
                f"but {len(self.ranks)} ranks were given: {self.ranks}"
            )
        if min(self.slice_sizes) < 1:
            raise ValueError(f"every mode must be at least 1, got {self.describe_modes()}")
        if min(self.ranks, default=1) < 1 and any(self.ranks):
            raise ValueError(
                f"every rank must be at least 1, got {self.ranks} "
                "(all zeros stand for a layer whose weight has vanished)"
            )


class LinearShape(Shape):
    """Base of the formats of linear layers: modes of the input and modes of the output."""

    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]

    @property
    def in_width(self) -> int:
        return math.prod(self.in_modes)

    @property
    def out_width(self) -> int:
        return math.prod(self.out_modes)

    def describe_modes(self) -> str:
        return f"{'x'.join(map(str, self.in_modes))} | {'x'.join(map(str, self.out_modes))}"


@dataclass(frozen=True)
class TTShape(LinearShape):
    """The tensor train of an ``(out, in)`` matrix.

    Args:
        in_modes: Factors of the input width, e.g. ``(12, 8, 8)`` for 768.
        out_modes: Factors of the output width; their number may differ from that of ``in_modes``.
        ranks: The inner bonds, one fewer than there are cores. All zeros: the weight is zero.

    Raises:
        ValueError: If the number of ranks is wrong, or a mode or rank is below one.
    """

    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.in_modes or not self.out_modes:
            raise ValueError(f"each side needs at least one mode, got {self}")
        self._check()

    @classmethod
    def fit(
        cls,
        in_features: int,
        out_features: int,
        *,
        rank: int | Sequence[int] | None = None,
        shape: "TTShape | Sequence[Sequence[int]] | None" = None,
        order: int = 3,
        compression: float | None = None,
    ) -> "TTShape":
        """Choose the modes and ranks of a layer from what its user says.

        Args:
            in_features: True input width; modes that multiply to more mean zero padding.
            out_features: True output width.
            rank: Bound on every bond, or a list of all inner bonds.
            shape: ``(in_modes, out_modes)``, or a whole ``TTShape``; balanced modes otherwise.
            order: How many modes a side is split into when ``shape`` does not say. A narrow side
                gets fewer, so that no mode falls much below 4.
            compression: Instead of ``rank``: how many times fewer entries than the dense matrix.

        Raises:
            ValueError: If the modes do not fit the widths, or rank and compression are both given.
        """
        only_one(rank=rank, compression=compression)
        check_whole_numbers(in_features=in_features, out_features=out_features, order=order)
        if isinstance(shape, TTShape):
            given = shape
        elif shape is not None:
            in_modes, out_modes = two_sides(shape, "in_modes", "out_modes")
            given = cls(in_modes, out_modes, (1,) * (len(in_modes) + len(out_modes) - 1))
        else:
            in_modes = tuple(reversed(balanced_modes(in_features, order_for(in_features, order))))
            out_modes = balanced_modes(out_features, order_for(out_features, order))
            given = cls(in_modes, out_modes, (1,) * (len(in_modes) + len(out_modes) - 1))
        check_cover("in_features", in_features, given.in_modes)
        check_cover("out_features", out_features, given.out_modes)
        return sized(given, rank, compression, keep=isinstance(shape, TTShape))

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        return self.in_modes + self.out_modes

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """``(left bond, mode, right bond)`` of each core."""
        bonds = (1, *self.ranks, 1)
        return tuple((bonds[k], n, bonds[k + 1]) for k, n in enumerate(self.slice_sizes))

    @property
    def split(self) -> int:
        """Number of cores that carry the input."""
        return len(self.in_modes)


@dataclass(frozen=True)
class TTMShape(Shape):
    """The tensor-train matrix of a ``(rows, columns)`` embedding table.

    Args:
        row_modes: Factors of the number of rows, most significant first.
        col_modes: Factors of the width, as many as there are row modes.
        ranks: The inner bonds, one fewer than there are cores. All zeros: the table is zero.

    Raises:
        ValueError: If the two sides differ in length, or ranks or modes are out of range.
    """

    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.row_modes) != len(self.col_modes) or len(self.row_modes) < 2:
            raise ValueError(
                "an embedding needs as many row modes as column modes, and at least two of each; "
                f"got {self.row_modes} and {self.col_modes}"
            )
        self._check()

    @classmethod
    def fit(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rank: int | Sequence[int] | None = None,
        shape: "TTMShape | Sequence[Sequence[int]] | None" = None,
        order: int = 4,
        compression: float | None = None,
    ) -> "TTMShape":
        """Choose the modes and ranks of a table from what its user says, as :meth:`TTShape.fit`.

        A row count that does not factor well is rounded up: 30522 rows may become
        ``(16, 20, 10, 10)``, that is 32000, of which the last 1478 are never read. The left half
        of the cores gets more of the rows and less of the width: lookups are fastest so.

        Args:
            num_embeddings: True number of rows.
            embedding_dim: True width.
            rank: Bound on every bond, or a list of all inner bonds.
            shape: ``(row_modes, col_modes)``, or a whole ``TTMShape``; chosen if None.
            order: How many cores there are when ``shape`` does not say; a short table gets fewer.
            compression: Instead of ``rank``: how many times fewer entries than the dense table.

        Raises:
            ValueError: If the modes do not fit the table, or rank and compression are both given.
        """
        only_one(rank=rank, compression=compression)
        check_whole_numbers(num_embeddings=num_embeddings, embedding_dim=embedding_dim, order=order)
        if isinstance(shape, TTMShape):
            given = shape
        elif shape is not None:
            rows, cols = two_sides(shape, "row_modes", "col_modes")
            given = cls(rows, cols, (1,) * (len(rows) - 1))
        else:
            if order < 2:
                raise ValueError(f"order={order} must be at least 2: a table has two factors")
            order = min(order, max(2, int(math.log2(max(2, num_embeddings)) / 2)))
            given = cls(*table_modes(num_embeddings, embedding_dim, order), (1,) * (order - 1))
        check_cover("num_embeddings", num_embeddings, given.row_modes)
        check_cover("embedding_dim", embedding_dim, given.col_modes)
        return sized(given, rank, compression, keep=isinstance(shape, TTMShape))

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        return tuple(p * q for p, q in zip(self.row_modes, self.col_modes, strict=True))

    @property
    def num_rows(self) -> int:
        return math.prod(self.row_modes)

    @property
    def num_cols(self) -> int:
        return math.prod(self.col_modes)

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """``(left bond, row mode, column mode, right bond)`` of each core."""
        bonds = (1, *self.ranks, 1)
        return tuple(
            (bonds[k], p, q, bonds[k + 1])
            for k, (p, q) in enumerate(zip(self.row_modes, self.col_modes, strict=True))
        )

    @property
    def split(self) -> int:
        """Number of cores that form the left factor of a lookup."""
        return len(self.row_modes) // 2

    def describe_modes(self) -> str:
        return "  ".join(f"{p}x{q}" for p, q in zip(self.row_modes, self.col_modes, strict=True))


def two_sides(
    shape: Sequence[Sequence[int]], first: str, second: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        one, two = (tuple(int(n) for n in side) for side in shape)
    except (TypeError, ValueError):
        raise ValueError(f"shape={shape!r} is not a pair ({first}, {second}) of lists") from None
    return one, two


def check_cover(name: str, width: int, modes: tuple[int, ...]) -> None:
    """Check that modes hold a width, rounded up no further than that none could be smaller."""
    if width < 1:
        raise ValueError(f"{name}={width} must be at least 1")
    product = math.prod(modes)
    shown = " x ".join(map(str, modes))
    better = " x ".join(map(str, balanced_modes(width, len(modes))))
    if product < width:
        raise ValueError(
            f"the modes {shown} multiply to {product}, less than {name}={width}; {better} would do"
        )
    if any(n > 1 and product // n * (n - 1) >= width for n in modes):
        raise ValueError(
            f"the modes {shown} multiply to {product}, more than {name}={width} needs; "
            f"{better} would do"
        )


def is_number(value: object) -> bool:
    """Return whether it is a real number, numpy's too, and neither a boolean nor text."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(value: Any) -> int:
    """Return a number of whatever integer type as an int.

    Raises:
        TypeError: If it is something else; booleans and ``2.0`` are.
    """
    if isinstance(value, bool):
        raise TypeError("a boolean is no number")
    return operator.index(value)


def check_whole_numbers(**given: Any) -> None:
    for name, value in given.items():
        try:
            whole_number(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} must be a whole number") from None


def only_one(**given: object) -> None:
    """Raise ``ValueError`` when more than one of the named settings is given."""
    named = [f"{key}={value}" for key, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} say the same thing twice; give one of them")


_Shape = TypeVar("_Shape", bound=Shape)


def sized(
    given: _Shape, rank: int | Sequence[int] | None, compression: float | None, keep: bool
) -> _Shape:
    if compression is not None:
        return given.with_compression(compression)
    if rank is not None:
        return given.with_rank(rank)
    return given if keep else given.with_rank(DEFAULT_RANK)


FAST_MULTIPLE = 8


def padded_rank(rank: int, bias: bool) -> int:
    """Return the width of the bond between the factors of a linear layer, as products see it.

    One column more for a bias, then rounded up: a product of width 32 takes half the time of one
    of width 30.
    """
    # int: a size that torch's compiler leaves open does not add to a truth value.
    return -(-(rank + int(bias)) // FAST_MULTIPLE) * FAST_MULTIPLE


DEFAULT_BLOCK_RANK = 2
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
            rank = DEFAULT_BLOCK_RANK
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
        """Number of cores that carry the input."""
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
