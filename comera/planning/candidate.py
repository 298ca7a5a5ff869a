"""Candidates: ways to compute a layer, with the time and memory added up over their steps."""

import functools
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from comera.planning.machine import Machine, item_size
from comera.shapes import Shape, TTMShape, TTShape


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a layer, which ``reads`` tensors and makes the ``result``, all by name.

    Attributes:
        what: The einsum equation of a product, or words that describe any other step.
        size: Numbers in the result.
        operations: Multiply-adds.
        moved: Numbers read or written in the order in which they lie in memory.
        copied: Numbers that are permuted, gathered or scattered: read once, written once.
        calls: Kernels started; a fraction if several layers share a kernel.
        operators: Python operators entered; a fraction if several layers share an operator.
        modules: Modules of torch that are called: a half in each pass.
        product: ``(batch, rows, depth, columns)`` of a matrix product, None for anything else.
    """

    result: str
    reads: tuple[str, ...]
    what: str
    size: int
    operations: int = 0
    moved: int = 0
    copied: int = 0
    calls: float = 1
    operators: float = 0
    modules: float = 0
    product: tuple[int, int, int, int] | None = None

    @property
    def label(self) -> str:
        """Text such as ``core0·core1``, or ``y = t × B`` if the result has a name of its own."""
        if self.product is None or self.result == "·".join(self.reads):
            return self.result
        return f"{self.result} = {' × '.join(self.reads)}"

    def bytes(self, dtype: str) -> int:
        """Return the bytes that the step reads and writes, including rearrangement."""
        return (self.moved + 2 * self.copied) * item_size(dtype)

    def seconds(self, machine: Machine, dtype: str) -> float:
        """Predict the seconds of this step: of its work and of its start."""
        return machine.in_all(self.working(machine, dtype), self.starting(machine))

    def starting(self, machine: Machine) -> float:
        """Predict the seconds to start the step's kernels, including Python."""
        return (
            self.calls * machine.call_overhead
            + self.operators * machine.operator_overhead
            + self.modules * machine.module_overhead
        )

    def working(self, machine: Machine, dtype: str) -> float:
        """Predict the seconds of the step's work: a matrix product, or one pass over memory."""
        item = item_size(dtype)
        rearranging = 2 * self.copied * item / machine.strided_bandwidth
        if self.product is not None:
            return product_seconds(machine, dtype, *self.product) + rearranging
        computing = 2 * self.operations / machine.rate(dtype)
        return max(computing, machine.moving(self.moved * item)) + rearranging


def product(
    result: str,
    reads: tuple[str, ...],
    equation: str,
    dims: tuple[int, int, int, int],
    copied: int = 0,
) -> Step:
    """Return the step of a batched matrix product of ``dims = (batch, rows, depth, columns)``."""
    batch, rows, depth, columns = dims
    return Step(
        result=result,
        reads=reads,
        what=equation,
        size=batch * rows * columns,
        operations=batch * rows * depth * columns,
        moved=batch * (rows * depth + depth * columns + rows * columns),
        copied=copied,
        product=dims,
    )


def product_seconds(
    machine: Machine, dtype: str, batch: int, rows: int, depth: int, columns: int
) -> float:
    """Predict the seconds of a batched ``(rows, depth) @ (depth, columns)`` without its start.

    They are the larger of computing and moving time; a product with a vector takes moving time.
    """
    numbers = batch * (rows * depth + depth * columns + rows * columns)
    moving = machine.moving(numbers * item_size(dtype))
    narrow = rows if rows < columns else columns
    if narrow == 1:
        return moving
    share = machine.share(narrow, depth)
    each = rows * depth * columns
    rate = machine.rate(dtype) if batch > 1 else machine.product_rate(dtype, each)
    computing = 2 * batch * each / (rate * share)
    return computing if computing > moving else moving


OUTPUT_GRADIENT = "gy"
"""Name of the gradient of a layer's output among the tensors that steps read."""


class Work:
    """Base of a layer or table at one batch size, for which the planner predicts costs."""

    shape: Shape
    tokens: int

    def sizes(self, dtype: str) -> tuple[dict[str, int], int]:
        """Return the size of each input by name, and the size of the output."""
        raise NotImplementedError

    def fill_width(self, name: str, modes: int) -> None:
        """Set the attribute ``name`` to the product of the modes if it is None."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, modes)  # the subclasses are frozen

    def cores(self) -> dict[str, int]:
        """Return the size of each core by name."""
        return {f"core{k}": math.prod(size) for k, size in enumerate(self.shape.core_shapes)}


@dataclass(frozen=True)
class Candidate:
    """One way to compute a layer, with its predicted time and memory.

    Attributes:
        forward: Steps of the forward pass; ``backward`` may be empty.
        seconds: Predicted time of both passes.
        saved_bytes: Bytes kept from the forward to the backward pass, without parameters and the
            copies of small cores in eager mode.
        peak_bytes: The most bytes held at once: parameters, the layer's input and output, the
            gradients of all these, saved tensors and transient ones.
    """

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    seconds: float
    saved_bytes: int
    peak_bytes: int

    @property
    def operations(self) -> int:
        """Multiply-adds of both passes."""
        return sum(step.operations for step in (*self.forward, *self.backward))


def candidate(
    name: str,
    work: Work,
    machine: Machine,
    dtype: str,
    forward: Sequence[Step],
    backward: Sequence[Step],
    parameters: Mapping[str, int],
) -> Candidate:
    """Return a candidate with the time and memory of all its steps; ``parameters`` are sizes."""
    inputs, output = work.sizes(dtype)
    sizes = {**inputs, **{step.result: step.size for step in forward}}
    made, read_first = set[str](), set[str]()
    for step in backward:
        read_first.update(name for name in step.reads if name not in made)
        made.add(step.result)
    saved = {name: sizes[name] for name in read_first if name in sizes}
    start = {**saved, OUTPUT_GRADIENT: output} if backward else {}
    peak = max(
        _peak(forward, inputs, {*saved, *inputs, "y"}, parameters),
        _peak(backward, start, set(), parameters),
    )
    steps = (*forward, *backward)
    # Work and starts are added up apart: where the host runs ahead, the longer of both counts.
    seconds = machine.in_all(
        sum(step.working(machine, dtype) for step in steps),
        sum(step.starting(machine) for step in steps),
    )
    item = item_size(dtype)
    saved_bytes = item * sum(saved.values())
    peak_bytes = item * (sum(parameters.values()) + peak)
    return Candidate(name, tuple(forward), tuple(backward), seconds, saved_bytes, peak_bytes)


def _peak(
    steps: Sequence[Step], start: Mapping[str, int], keep: set[str], parameters: Mapping[str, int]
) -> int:
    """Return the most numbers held at once; tensors not in ``keep`` end with their last read."""
    last = {name: k for k, step in enumerate(steps) for name in step.reads}
    held = dict(start)
    most = sum(held.values())
    for k, step in enumerate(steps):
        before = held.pop(step.result, 0)  # one of the same name is replaced, but read meanwhile
        held[step.result] = step.size
        most = max(most, sum(held.values()) + before + step.copied)
        for name in {*step.reads} - {step.result, *keep, *parameters}:
            if last[name] == k:
                held.pop(name, None)
    return most


# Past the end of the alphabet, modes and bonds take turns; b is the letter of the batch.
_MODES = [*string.ascii_lowercase.replace("b", ""), *map(chr, range(ord("À"), 1 << 12, 2))]
_BONDS = [*string.ascii_uppercase, *map(chr, range(ord("Á"), 1 << 12, 2))]


Core = Sequence[int]
"""Sizes of left bond, mode and right bond."""

_WORTH_ANOTHER = 0.9
"""Share of the usual multiply-adds below which cores are contracted in another order."""


def outermost_first(cores: Sequence[Core]) -> tuple[int, ...]:
    """Return the order of contraction from the end of the chain whose bond is one."""
    from_left = cores[0][0] == 1
    return tuple(0 if from_left else k for k in range(len(cores) - 2, -1, -1))


@functools.lru_cache(4096)
def contraction_order(cores: tuple[Core, ...]) -> tuple[int, ...]:
    """Return in which order neighbouring cores of a chain are contracted.

    A number k stands for the core k, of those there are then, and the next one. The outermost core
    is first, which is the best order for balanced ranks, unless opt_einsum finds an order with a
    tenth fewer multiply-adds.
    """
    usual = outermost_first(cores)
    if len(cores) < 3:
        return usual
    import opt_einsum

    letters = [opt_einsum.get_symbol(k) for k in range(2 * len(cores) + 1)]
    terms = ["".join(letters[2 * k : 2 * k + 3]) for k in range(len(cores))]
    equation = f"{','.join(terms)}->{letters[0]}{''.join(letters[1::2])}{letters[-1]}"
    path, _ = opt_einsum.contract_path(equation, *cores, shapes=True, optimize="dp")
    found, there = list[int](), list(range(len(cores)))  # the first core in each operand
    for pair in path:
        first, second = sorted(there[k] for k in pair)
        found.append(sum(other < first for other in there))
        there = [other for k, other in enumerate(there) if k not in pair] + [first]
        if any(first < other < second for other in there):
            return usual  # no neighbours, which bonds of one allow
    less = _multiply_adds(cores, found) < _WORTH_ANOTHER * _multiply_adds(cores, usual)
    return tuple(found) if less else usual


def _multiply_adds(cores: Sequence[Core], order: Sequence[int]) -> int:
    left, total = list(cores), 0
    for k in order:
        (one, n, bond), (_, m, other) = left[k : k + 2]
        total += one * n * bond * m * other
        left[k : k + 2] = [(one, n * m, other)]
    return total


class FactorChain(NamedTuple):
    """The contraction of the factor ``name`` (``A``, ``B`` or its only core).

    ``forward`` are the products; ``backward`` computes the gradients of the cores from the factor's
    gradient, and small partial products again. ``outermost_first`` are the multiply-adds of the
    products in that order.
    """

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    outermost_first: int


@functools.lru_cache(maxsize=1024)
def factor_chains(shape: TTShape | TTMShape) -> tuple[FactorChain, FactorChain]:
    """Plan the contraction of both factors of a linear layer or a table.

    In equations modes are lower-case letters, bonds upper-case ones; the outer bonds have none.
    """
    modes, bonds = _MODES[: len(shape.slice_sizes)], _BONDS[: len(shape.ranks)]
    sizes = dict(zip([*modes, *bonds], [*shape.slice_sizes, *shape.ranks], strict=True))
    letters = zip(["", *bonds], modes, [*bonds, ""], strict=True)
    cores = [(f"core{k}", each) for k, each in enumerate(letters)]
    chains = ("A", cores[: shape.split]), ("B", cores[shape.split :])
    left, right = (_factor_chain(name, of, sizes) for name, of in chains)
    return left, right


def _factor_chain(
    name: str, cores: list[tuple[str, tuple[str, str, str]]], sizes: Mapping[str, int]
) -> FactorChain:
    def size(letters: str) -> int:
        return math.prod(sizes[letter] for letter in letters)

    shapes = tuple((size(a), size(b), size(c)) for _, (a, b, c) in cores)
    order, usual = contraction_order(shapes), _multiply_adds(shapes, outermost_first(shapes))
    forward, backward = list[Step](), list[Step]()
    for k in order:
        (one, (start, mode, bond)), (two, (_, other, end)) = cores[k : k + 2]
        result = name if len(cores) == 2 else f"{one}·{two}"
        left, right = f"{start}{mode}{bond}", f"{bond}{other}{end}"
        made, whole = f"{start}{mode}{other}{end}", f"grad({result})"
        n, inner, m = size(start + mode), size(bond), size(other + end)
        forward.append(product(result, (one, two), f"{left},{right}->{made}", (1, n, inner, m)))
        backward = [
            product(f"grad({one})", (whole, two), f"{made},{right}->{left}", (1, n, m, inner)),
            product(f"grad({two})", (one, whole), f"{left},{made}->{right}", (1, inner, n, m)),
            *backward,
        ]
        cores = [*cores[:k], (result, (start, mode + other, end)), *cores[k + 2 :]]
    return FactorChain(cores[0][0], tuple(forward), (*forward[:-1], *backward), usual)


def gates(shape: Shape, operators: float, backward: bool = False) -> Step:
    """Return the step that multiplies cores by gates, or its backward step, which does so again."""
    bonds, moved = len(shape.ranks), shape.num_params * (6 if backward else 2)
    calls, name = (5 + 4 * bonds, "grad(gates)") if backward else (3 + bonds, "gates")
    return Step(name, (), "gates, dispatch", 0, moved=moved, calls=calls, operators=operators)
