"""Mode and rank arithmetic of the tensor formats. Pure Python: nothing here imports torch.

A *mode* is a factor of a width or row count, a *bond* (or rank) connects two neighbouring cores.
"""

import functools
import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self

_MOST = 2**40
"""Largest width: the search for its modes takes 0.4 seconds, and grows with its root."""
_GOOD_BALANCE = 1.25
"""An exact factorisation is kept when its modes sum to at most this times the ideal sum."""
_LEFT_SLICES, _MOST_RIGHT_SLICES = 8, 2000
"""Left slices of a table for each right one, and right ones at most. Rows of one right slice are
made in groups, which few right slices fill; left slices are gathered row by row."""
_LEFT_COLS = 1 / 3
"""Exponent of a table's width that the left factor gets."""

DEFAULT_RANK = 32
"""The largest bond of a layer without a given rank."""
_FAST_MULTIPLE = 8

Modes = tuple[int, ...]


@functools.lru_cache(4096)
def balanced_modes(width: int, order: int) -> Modes:
    """Split ``width`` into ``order`` factors as equal as possible, smallest first.

    A width without a good factorisation is rounded up to the next one that has it: the result
    then multiplies to a little more than ``width``.

    >>> balanced_modes(768, 3)
    (8, 8, 12)
    >>> balanced_modes(30522, 4)
    (12, 13, 14, 14)
    """
    if width < 1 or order < 1:
        raise ValueError(f"cannot split a width of {width} into {order} modes")
    root = width ** (1 / order)
    exact = min(_factorisations(width, order), key=sum)
    if sum(exact) <= _GOOD_BALANCE * order * root:
        return exact
    near = range(max(1, math.floor(root) - 3), math.ceil(root) + 4)
    rounded = (
        tuple(sorted((*head, -(-width // math.prod(head)))))
        for head in itertools.combinations_with_replacement(near, order - 1)
    )
    return min(
        (exact, *rounded),
        key=lambda modes: sum(modes) / (order * root) * (math.prod(modes) / width) ** 2,
    )


def _factorisations(width: int, order: int, smallest: int = 1) -> Iterator[Modes]:
    if order == 1:
        yield (width,)
        return
    most = round(width ** (1 / order)) + 1
    for factor in range(smallest, most + 1):
        if width % factor == 0 and factor**order <= width:
            for rest in _factorisations(width // factor, order - 1, factor):
                yield (factor, *rest)


def _order_for(width: int, order: int) -> int:
    """Return ``order``, or less for a narrow side, for which more modes save nothing."""
    return min(order, max(1, int(math.log2(max(2, width)) / 2)))


@functools.lru_cache(256)
def _table_modes(rows: int, width: int, order: int) -> tuple[Modes, Modes]:
    """Choose a table's row and column modes for fast lookups: large modes at the ends."""
    left, right = order // 2, order - order // 2
    right_slices = min(max(1, round(math.sqrt(rows / _LEFT_SLICES))), _MOST_RIGHT_SLICES)
    right_rows = balanced_modes(right_slices, right)
    left_rows = balanced_modes(-(-rows // math.prod(right_rows)), left)
    # The left columns stand in the first core alone, where the bond beside them is narrow.
    wanted = width**_LEFT_COLS
    left_cols = min(_divisors(width), key=lambda n: abs(math.log(n / wanted)))
    if not 0.5 <= left_cols / wanted <= 2:  # no good factor
        left_cols = round(wanted)
    right_cols = balanced_modes(-(-width // left_cols), right)
    return (
        _tightened((*left_rows[::-1], *right_rows), rows),
        _tightened((left_cols, *(1,) * (left - 1), *right_cols), width),
    )


def _tightened(modes: Modes, width: int) -> Modes:
    """Shrink modes as long as they still multiply to at least ``width``."""
    for k, mode in enumerate(modes):
        needed = max(1, -(-width // (math.prod(modes) // mode)))
        if needed < mode:
            return _tightened((*modes[:k], needed, *modes[k + 1 :]), width)
    return modes


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class Shape:
    """Base of all formats: a chain of cores, each of shape ``(left bond, *modes, right bond)``."""

    ranks: tuple[int, ...]
    _to_be_smaller = "use more modes (order=)"
    _default_rank = DEFAULT_RANK
    _bonds: ClassVar[Any]  # the number of bonds of a shape with two given sides

    @property
    def sides(self) -> tuple[Modes, Modes]:
        """The modes of the input and of the output, or of rows and columns."""
        raise NotImplementedError

    @property
    def core_modes(self) -> tuple[Modes, ...]:
        """The dimensions of each core except its bonds."""
        raise NotImplementedError

    @property
    def split(self) -> int:
        """Number of cores in the left factor: the input's cores, or half of a table's cores."""
        raise NotImplementedError

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        """How many numbers each core has for a pair of ranks: the product of the core's modes."""
        return tuple(map(math.prod, self.core_modes))

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape ``(left bond, *modes, right bond)`` of each core."""
        bonds = (1, *self.ranks, 1)
        return tuple((bonds[k], *n, bonds[k + 1]) for k, n in enumerate(self.core_modes))

    @property
    def num_params(self) -> int:
        """The exact number of entries in the cores; gates and biases are not counted."""
        return self.size_at(self.ranks)

    @property
    def num_dense(self) -> int:
        """Entries of the (padded) dense matrix."""
        return math.prod(map(math.prod, self.sides))

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """The largest useful ranks: none can exceed the product of the modes on either side."""
        sizes = self.slice_sizes
        return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))

    def describe_modes(self) -> str:
        """Write the modes as people read them, such as ``12x8x8 | 8x8x12``."""
        return " | ".join("x".join(map(str, side)) for side in self.sides)

    def size_at(self, ranks: Sequence[int]) -> int:
        """Count the entries of the cores at other ranks; return 0 if a rank is zero."""
        if 0 in ranks:
            return 0
        bonds = (1, *ranks, 1)
        return sum(n * bonds[k] * bonds[k + 1] for k, n in enumerate(self.slice_sizes))

    def of_ranks(self, ranks: Sequence[int]) -> Self:
        """Return a shape with the same modes and exactly these ranks."""
        return replace(self, ranks=tuple(ranks))  # type: ignore[type-var]

    def with_rank(self, rank: int | Sequence[int]) -> Self:
        """Return a shape with the same modes and other ranks, cut to what the modes allow.

        ``rank`` bounds all ranks or lists them. Raises ValueError for a wrong length, a rank below
        one, or anything but whole numbers.
        """
        bonds, wanted = len(self.core_modes) - 1, whole_ranks("rank", rank)
        wanted = wanted if isinstance(rank, Sequence) else wanted * bonds
        if len(wanted) != bonds:
            raise ValueError(
                f"rank={list(wanted)} names {len(wanted)} bonds, but {bonds + 1} "
                f"cores ({self.describe_modes()}) join at {bonds}; "
                f"give one int or {bonds} of them"
            )
        return self.of_ranks(self._clip(wanted))

    def _clip(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        sizes, bonds = self.slice_sizes, [1, *wanted, 1]
        for k in range(1, len(sizes)):
            bonds[k] = min(bonds[k], bonds[k - 1] * sizes[k - 1])
        for k in range(len(sizes) - 1, 0, -1):
            bonds[k] = min(bonds[k], bonds[k + 1] * sizes[k])
        return tuple(bonds[1:-1])

    def with_compression(self, compression: float, num_dense: int | None = None) -> Self:
        """Return the shape at the largest uniform rank that compresses at least so many times.

        ``num_dense`` are the entries of the dense matrix, by default with padding. Raises
        ValueError if rank one is too large, or ``compression`` is not above 1.
        """
        if not (is_number(compression) and compression > 1):
            raise ValueError(
                f"compression={compression!r} must be above 1: 10 means ten times fewer parameters"
            )
        num_dense = num_dense or self.num_dense
        budget = num_dense / compression
        smallest = self.with_rank(1)
        if smallest.num_params > budget:
            raise ValueError(
                f"compression={compression} leaves {int(budget)} parameters of {num_dense}, "
                f"but rank 1 over the modes {self.describe_modes()} already needs "
                f"{smallest.num_params}; {self._to_be_smaller} or a compression up to "
                f"{num_dense / smallest.num_params:.4g}"
            )
        ranks = range(1, max(self.max_ranks, default=1) + 1)
        fitting = bisect_right(ranks, budget, key=lambda rank: self.with_rank(rank).num_params)
        return self.with_rank(fitting)

    @classmethod
    def _fit(
        cls,
        widths: Mapping[str, int],
        shape: "Self | Sequence[Sequence[int]] | None",
        choose: Callable[[], tuple[Modes, Modes]],
        rank: int | Sequence[int] | None,
        compression: float | None,
    ) -> Self:
        """Implement ``fit`` of all formats; ``choose`` returns the modes if ``shape`` is None."""
        only_one(rank=rank, compression=compression)
        check_whole_numbers(1, **widths)
        for name, width in widths.items():
            if width > _MOST:  # the search for modes would take minutes
                raise ValueError(f"{name}={width} must be at most {_MOST}")
        given: Any = shape
        if not isinstance(shape, cls):
            modes = choose() if shape is None else cls._two_sides(shape)  # type: ignore[arg-type]
            given = cls(*modes, (1,) * cls._bonds(*modes))  # type: ignore[call-arg]
        for (name, width), modes in zip(widths.items(), given.sides, strict=True):
            _check_cover(name, width, modes)
        if compression is not None:
            return given.with_compression(compression, math.prod(widths.values()))
        if rank is None and isinstance(shape, cls):
            return given
        return given.with_rank(cls._default_rank if rank is None else rank)

    @classmethod
    def _two_sides(cls, shape: Sequence[Sequence[int]]) -> tuple[Modes, Modes]:
        try:
            one, two = (tuple(map(whole_number, side)) for side in shape)
        except (TypeError, ValueError):
            names = ", ".join(list(cls.__annotations__)[:2])
            raise ValueError(f"shape={shape!r} is not a pair ({names}) of lists") from None
        return one, two

    def _check(self) -> None:
        for name, given in list(vars(self).items()):
            if not isinstance(given, tuple):  # a list has no hash, and shapes are keys of caches
                object.__setattr__(self, name, tuple(given))
        want = len(self.core_modes) - 1
        if len(self.ranks) != want:
            raise ValueError(
                f"{want + 1} cores ({self.describe_modes()}) join at {want} bonds, "
                f"but {len(self.ranks)} ranks were given: {self.ranks}"
            )
        if min(map(min, self.sides)) < 1:
            raise ValueError(f"every mode must be at least 1, got {self.describe_modes()}")
        if min(self.ranks, default=1) < 1 and any(self.ranks):
            raise ValueError(
                f"every rank must be at least 1, got {self.ranks} "
                "(all zeros stand for a layer whose weight has vanished)"
            )


class LinearShape(Shape):
    """Base of the formats of linear layers, with modes of the input and of the output."""

    in_modes: Modes
    out_modes: Modes
    orders: ClassVar[Sequence[int]] = ()
    """Orders that :meth:`fit` may be asked for; none if the format has none."""

    @property
    def sides(self) -> tuple[Modes, Modes]:
        return self.in_modes, self.out_modes

    @property
    def in_width(self) -> int:
        return math.prod(self.in_modes)

    @property
    def out_width(self) -> int:
        return math.prod(self.out_modes)


@dataclass(frozen=True)
class TTShape(LinearShape):
    """The tensor train of an ``(out, in)`` matrix: a core for each input mode, then output mode.

    Args:
        in_modes: Factors of the input width, e.g. ``(12, 8, 8)`` for 768.
        out_modes: Factors of the output width; their number may differ from that of ``in_modes``.
        ranks: The inner ranks, one fewer than there are cores. If all are zero, the weight is zero.
    """

    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    orders = (1, 2, 3, 4)
    _bonds = staticmethod(lambda one, two: len(one) + len(two) - 1)

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
        """Choose the modes and ranks of a layer.

        Args:
            in_features: True input width; modes that multiply to more mean zero padding.
            out_features: True output width.
            rank: Bound on every bond, or a list of all inner bonds.
            shape: ``(in_modes, out_modes)``, or a whole ``TTShape``; balanced modes otherwise.
            order: Number of modes of a side if ``shape`` is not given. A narrow side gets fewer, so
                that no mode falls much below 4.
            compression: How many times fewer entries than the dense matrix; replaces ``rank``.

        Raises:
            ValueError: If the modes do not fit the widths, or rank and compression are both given.
        """
        check_whole_numbers(1, order=order)

        def choose() -> tuple[Modes, Modes]:
            one = balanced_modes(in_features, _order_for(in_features, order))
            return one[::-1], balanced_modes(out_features, _order_for(out_features, order))

        widths = {"in_features": in_features, "out_features": out_features}
        return cls._fit(widths, shape, choose, rank, compression)

    @property
    def core_modes(self) -> tuple[Modes, ...]:
        return tuple((n,) for n in self.in_modes + self.out_modes)

    @property
    def split(self) -> int:
        return len(self.in_modes)


@dataclass(frozen=True)
class TTMShape(Shape):
    """The tensor-train matrix of a ``(rows, columns)`` table: a factor of both in each core.

    Args:
        row_modes: Factors of the number of rows, most significant first.
        col_modes: Factors of the width, as many as there are row modes.
        ranks: The inner ranks, one fewer than there are cores. If all are zero, the table is zero.
    """

    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]
    _bonds = staticmethod(lambda rows, cols: len(rows) - 1)

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
        """Choose the modes and ranks of a table, as :meth:`TTShape.fit` does of a layer.

        A row count that does not factor well is rounded up: 30522 rows may become
        ``(16, 20, 10, 10)``, that is 32000. ``shape`` is ``(row_modes, col_modes)``, ``order`` the
        number of cores; a short table gets fewer.
        """
        check_whole_numbers(order=order)

        def choose() -> tuple[Modes, Modes]:
            check_whole_numbers(2, order=order)
            cores = min(order, max(2, int(math.log2(max(2, num_embeddings)) / 2)))
            return _table_modes(num_embeddings, embedding_dim, cores)

        widths = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        return cls._fit(widths, shape, choose, rank, compression)

    @property
    def sides(self) -> tuple[Modes, Modes]:
        return self.row_modes, self.col_modes

    @property
    def core_modes(self) -> tuple[Modes, ...]:
        return tuple(zip(self.row_modes, self.col_modes, strict=True))

    @property
    def num_rows(self) -> int:
        return math.prod(self.row_modes)

    @property
    def num_cols(self) -> int:
        return math.prod(self.col_modes)

    @property
    def split(self) -> int:
        return len(self.row_modes) // 2

    def describe_modes(self) -> str:
        return "  ".join(f"{p}x{q}" for p, q in self.core_modes)


@dataclass(frozen=True)
class BTTShape(LinearShape):
    """The block tensor train of an ``(out, in)`` matrix: a grid of blocks, each of low rank.

    The input has ``a`` blocks of ``b`` numbers, the output ``c`` of ``d``, and each of the ``a c``
    blocks is a ``b x d`` matrix of rank R. The whole may have full rank at any R, with
    ``R (in c + out a)`` numbers; R = 1 is a Monarch matrix (Dao et al., arXiv 2204.00595). Source:
    Qiu et al., arXiv 2406.06248.

    Args:
        in_modes: ``(a, b)``: blocks of the input and the numbers in each.
        out_modes: ``(c, d)``, those of the output.
        ranks: ``(R,)``. If it is ``(0,)``, the weight is zero.
    """

    in_modes: tuple[int, int]
    out_modes: tuple[int, int]
    ranks: tuple[int, ...]
    _to_be_smaller = "use fewer blocks (shape=)"
    _default_rank = 2
    _bonds = staticmethod(lambda one, two: 1)

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
        """Choose the blocks of a layer and their rank, as :meth:`TTShape.fit` does.

        By default a side has about as many blocks as the root of its width, and no more than full
        rank takes; the rank is 2, or less if a block has less.
        """
        if isinstance(shape, BTTShape):
            shape = shape.of_ranks(shape._clip(shape.ranks))
        widths = {"in_features": in_features, "out_features": out_features}
        choose = functools.partial(_block_modes, in_features, out_features)
        return cls._fit(widths, shape, choose, rank, compression)

    @property
    def core_modes(self) -> tuple[Modes, ...]:
        (a, b), (c, d) = self.sides
        return (a, b, c), (c, a, d)

    @property
    def max_ranks(self) -> tuple[int, ...]:
        """The largest useful rank: that of a whole block."""
        return (min(self.in_modes[1], self.out_modes[1]),)

    def _clip(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (min(wanted[0], self.max_ranks[0]),)

    @property
    def split(self) -> int:
        return 1


def _block_modes(in_features: int, out_features: int) -> tuple[Modes, Modes]:
    """Choose the blocks of both sides: as few as suffice for full rank with blocks of rank 1."""
    balanced = balanced_modes(in_features, 2), balanced_modes(out_features, 2)
    blocks, enough = balanced[0][0], min(in_features, out_features)
    if blocks * balanced[1][0] <= enough:
        return balanced
    exact = [
        ((i, in_features // i), (o, out_features // o))
        for i in _divisors(in_features)
        for o in _divisors(out_features)
        if i * o >= enough
    ]

    def order(modes: tuple[Modes, Modes]) -> tuple[int, int]:
        (i, b), (o, d) = modes
        return i * o * (b + d), abs(i - blocks)

    return min([balanced, *exact], key=order)


def _check_cover(name: str, width: int, modes: Modes) -> None:
    """Check that modes multiply to ``width`` or more, and that no mode could be smaller."""
    product = math.prod(modes)
    if product < width:
        problem = f"less than {name}={width}"
    elif any(n > 1 and product // n * (n - 1) >= width for n in modes):
        problem = f"more than {name}={width} needs"
    else:
        return
    shown, better = (" x ".join(map(str, m)) for m in (modes, balanced_modes(width, len(modes))))
    raise ValueError(f"the modes {shown} multiply to {product}, {problem}; {better} would do")


def is_number(value: object) -> bool:
    """Return whether a value is a real number, also of numpy, and neither a boolean nor text."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(value: Any) -> int:
    """Return a number of any integer type as an int; TypeError for others, ``True`` and ``2.0``."""
    if isinstance(value, bool):
        raise TypeError("a boolean is no number")
    return operator.index(value)


def check_whole_numbers(least: float = -math.inf, /, **given: Any) -> None:
    """Raise ``ValueError`` unless all are whole numbers, and at least ``least``."""
    for name, value in given.items():
        try:
            number = whole_number(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} must be a whole number") from None
        if number < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def whole_ranks(name: str, rank: Any) -> Modes:
    """Return one rank or a list of ranks as ints; ``ValueError`` for others or one below 1."""
    try:
        listed = isinstance(rank, Sequence) and not isinstance(rank, str)
        bonds = tuple(map(whole_number, rank if listed else (rank,)))
    except TypeError:
        raise ValueError(f"{name}={rank!r} must be an int or a list of ints") from None
    if any(bond < 1 for bond in bonds):
        raise ValueError(f"{name}={rank} must be at least 1 on every bond")
    return bonds


def check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not (is_number(tolerance) and 0 <= tolerance < 1):
        raise ValueError(f"tolerance={tolerance!r} must be in [0, 1): a relative Frobenius error")


def check_min_rank(min_rank: Any) -> None:
    if min_rank not in (0, 1):
        raise ValueError(f"min_rank={min_rank!r} must be 0 (layers may vanish) or 1")


def only_one(**given: object) -> None:
    """Raise ValueError when more than one of the named settings is given."""
    named = [f"{key}={value}" for key, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} say the same thing twice; give one of them")


def padded_rank(rank: int, bias: bool) -> int:
    """Return the rank of the factors, plus one for a bias, rounded up to a multiple of 8."""
    # int: a size that torch's compiler leaves open does not add to a truth value.
    return -(-(rank + int(bias)) // _FAST_MULTIPLE) * _FAST_MULTIPLE
