"""One way to compute a layer: its steps, and the time and memory they add up to."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from comera.planning.contraction import OUTPUT_GRADIENT, Network, Tree, factor_networks, schedule
from comera.planning.machine import Machine, item_size
from comera.planning.operation import Step
from comera.shapes import Shape, TTMShape, TTShape


@dataclass(frozen=True)
class Candidate:
    """One way to compute a layer, with its predicted time and memory.

    Attributes:
        name: The way to compute the layer, in a word.
        forward: Steps of the forward pass.
        backward: Steps of the backward pass; empty when there is none.
        seconds: Predicted time of both passes.
        saved_bytes: Kept from the forward to the backward pass, parameters not counted; nor small
            cores, of which eager mode keeps copies.
        peak_bytes: The most that is held at once: parameters, their gradients, the layer's input
            and output and the gradients of these, everything saved and everything transient.
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
    machine: Machine,
    dtype: str,
    *,
    forward: Sequence[Step],
    backward: Sequence[Step],
    inputs: Mapping[str, int],
    output_gradient: int,
    parameters: Mapping[str, int],
) -> Candidate:
    """Make a candidate, and add up the time and memory of its steps.

    Args:
        name: The way to compute the layer, in a word.
        machine: The machine on which it runs.
        dtype: Dtype of all numbers.
        forward: Steps of the forward pass in the order in which they run.
        backward: Steps of the backward pass likewise; none if there is no such pass.
        inputs: Numbers in each input of the layer, by name.
        output_gradient: Numbers in ``gy``.
        parameters: Numbers in each parameter, by name.
    """
    sizes = {**inputs, **{step.result: step.size for step in forward}}
    saved = {name: sizes[name] for name in _read_first(backward) if name in sizes}
    start = {**saved, OUTPUT_GRADIENT: output_gradient} if backward else {}
    peak = max(
        _peak(forward, inputs, {*saved, *inputs, "y"}, parameters),
        _peak(backward, start, set(), parameters),
    )
    item = item_size(dtype)
    return Candidate(
        name=name,
        forward=tuple(forward),
        backward=tuple(backward),
        seconds=_seconds((*forward, *backward), machine, dtype),
        saved_bytes=item * sum(saved.values()),
        peak_bytes=item * (sum(parameters.values()) + peak),
    )


def _seconds(steps: Sequence[Step], machine: Machine, dtype: str) -> float:
    """Add up work and starts apart: where the host runs ahead, the longer of both counts."""
    return machine.in_all(
        sum(step.working(machine, dtype) for step in steps),
        sum(step.starting(machine) for step in steps),
    )


def _read_first(steps: Iterable[Step]) -> set[str]:
    """Find the names that are read before any of the steps makes them."""
    made, read = set[str](), set[str]()
    for step in steps:
        read.update(name for name in step.reads if name not in made)
        made.add(step.result)
    return read


def _peak(
    steps: Sequence[Step],
    start: Mapping[str, int],
    keep: set[str],
    parameters: Mapping[str, int],
) -> int:
    """Count the most numbers held at once; a tensor goes after its last reader unless kept."""
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


_GATES = "gates, dispatch"


@dataclass(frozen=True)
class FactorChain:
    """The contraction of one factor from its cores, outermost first.

    Attributes:
        name: The factor: ``A`` or ``B``, or the name of its only core.
        forward: The products.
        backward: The gradients of the cores, from that of the factor. The partial products are
            made anew: they are small, and keeping them would take memory until the backward pass.
    """

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


@functools.lru_cache(maxsize=1024)
def factor_chains(shape: TTShape | TTMShape) -> tuple[FactorChain, FactorChain]:
    """Plan the contraction of both factors of a linear layer, or of a table split in the middle."""
    cores = [f"core{k}" for k in range(len(shape.slice_sizes))]
    left = "A" if shape.split > 1 else cores[0]
    right = "B" if len(cores) - shape.split > 1 else cores[-1]
    networks = factor_networks(shape, (f"grad({left})", f"grad({right})"))
    return (
        _factor_chain(left, networks[0], cores[: shape.split], from_left=True),
        _factor_chain(right, networks[1], cores[shape.split :], from_left=False),
    )


def _factor_chain(name: str, network: Network, cores: list[str], from_left: bool) -> FactorChain:
    tree: Tree = cores[0] if from_left else cores[-1]
    for core in cores[1:] if from_left else cores[-2::-1]:
        tree = (tree, core) if from_left else (core, tree)
    plan = schedule(network, tree, root=f"grad({name})", result=name, wanted=cores)
    return FactorChain(name, plan.forward, (*plan.forward[:-1], *plan.backward))


def gates(shape: Shape, operators: float) -> list[Step]:
    """List the step that multiplies each core by the gate of its right bond.

    Args:
        shape: Modes and ranks of the cores.
        operators: Python operators of the layer; their overhead is counted here.
    """
    calls, moved = 3 + len(shape.ranks), 2 * shape.num_params
    return [Step("gates", (), _GATES, 0, moved=moved, calls=calls, operators=operators)]


def gate_gradients(shape: Shape, operators: float) -> list[Step]:
    """List the step that gates the cores anew and makes the gradients of cores and gates."""
    calls, moved = 5 + 4 * len(shape.ranks), 6 * shape.num_params
    return [Step("grad(gates)", (), _GATES, 0, moved=moved, calls=calls, operators=operators)]
