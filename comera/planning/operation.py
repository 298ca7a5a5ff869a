"""One operation on whole tensors: how much it computes, how much it moves, how long it takes."""

from dataclasses import dataclass

from comera.planning.machine import Machine, item_size


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a layer.

    Attributes:
        result: Name of the tensor it makes.
        reads: Names of the tensors it reads.
        what: The einsum equation of a product, words for anything else.
        size: Numbers in the result.
        operations: Multiply-adds.
        moved: Numbers read or written in the order in which they lie in memory.
        copied: Numbers that are rearranged (permuted, gathered, scattered): read once, written
            once.
        calls: Kernels started; a fraction where layers share them.
        operators: Python operators entered; a fraction where layers share them.
        modules: Layers of torch's that are called; a half in each of both passes.
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
        """``core0·core1``, or ``y = t × B`` for a product whose result has a name of its own."""
        if self.product is None or self.result == "·".join(self.reads):
            return self.result
        return f"{self.result} = {' × '.join(self.reads)}"

    def bytes(self, dtype: str) -> int:
        """Return the bytes read and written, rearranging included."""
        return (self.moved + 2 * self.copied) * item_size(dtype)

    def seconds(self, machine: Machine, dtype: str) -> float:
        """Predict the time of the step alone: of its work, and of starting it."""
        return machine.in_all(self.working(machine, dtype), self.starting(machine))

    def starting(self, machine: Machine) -> float:
        """Predict what starting its kernels takes, Python included."""
        return (
            self.calls * machine.call_overhead
            + self.operators * machine.operator_overhead
            + self.modules * machine.module_overhead
        )

    def working(self, machine: Machine, dtype: str) -> float:
        """Predict its work: of products by :func:`product_seconds`, of all else as one pass."""
        item = item_size(dtype)
        rearranging = 2 * self.copied * item / machine.strided_bandwidth
        if self.product is None:
            computing = 2 * self.operations / machine.rate(dtype)
            working = max(computing, machine.moving(self.moved * item))
        else:
            working = product_seconds(machine, dtype, *self.product)
        return working + rearranging


def product(
    result: str,
    reads: tuple[str, ...],
    equation: str,
    dims: tuple[int, int, int, int],
    copied: int = 0,
    calls: int = 1,
) -> Step:
    """Describe a batched matrix product of ``dims = (batch, rows, depth, columns)``."""
    batch, rows, depth, columns = dims
    return Step(
        result=result,
        reads=reads,
        what=equation,
        size=batch * rows * columns,
        operations=batch * rows * depth * columns,
        moved=batch * (rows * depth + depth * columns + rows * columns),
        copied=copied,
        calls=calls,
        product=dims,
    )


def product_seconds(
    machine: Machine, dtype: str, batch: int, rows: int, depth: int, columns: int
) -> float:
    """Predict the time of a batched ``(rows, depth) @ (depth, columns)``, its call not counted.

    The larger of computing and moving, where computing takes longer the further a thin product
    stays below the machine's peak (:meth:`~comera.planning.machine.Machine.share`). A product
    with a vector is nothing but moving.
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
