"""The part that sees no batch: cores joined to half-chains, rank gates, and their gradients."""

import functools
from dataclasses import dataclass

from comera.planning.network import Network, half_networks
from comera.planning.schedule import Tree, schedule
from comera.planning.step import Step
from comera.shapes import TTMShape, TTShape

_GATES = "gates, dispatch"


@dataclass(frozen=True)
class HalfChain:
    """How the cores of one half are joined, outermost first.

    Attributes:
        name: Of the product: ``A`` or ``B``, or that of its only core.
        forward: The products.
        backward: The gradients of the cores, from that of the product. The partial products are
            made anew: they are small, and keeping them would take memory until the backward pass.
    """

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


@functools.lru_cache(maxsize=1024)
def half_chains(shape: TTShape | TTMShape) -> tuple[HalfChain, HalfChain]:
    """The half-chains of a linear layer, or of a table split in the middle."""
    cores = [f"core{k}" for k in range(len(shape.slice_sizes))]
    left = "A" if shape.split > 1 else cores[0]
    right = "B" if len(cores) - shape.split > 1 else cores[-1]
    networks = half_networks(shape, (f"grad({left})", f"grad({right})"))
    return (
        _half_chain(left, networks[0], cores[: shape.split], from_left=True),
        _half_chain(right, networks[1], cores[shape.split :], from_left=False),
    )


def _half_chain(name: str, network: Network, cores: list[str], from_left: bool) -> HalfChain:
    tree: Tree = cores[0] if from_left else cores[-1]
    for core in cores[1:] if from_left else cores[-2::-1]:
        tree = (tree, core) if from_left else (core, tree)
    plan = schedule(network, tree, root=f"grad({name})", result=name, wanted=cores)
    return HalfChain(name, plan.forward, (*plan.forward[:-1], *plan.backward))


def gates(shape: TTShape | TTMShape, operators: float) -> list[Step]:
    """Each core times the gate of its right bond.

    Args:
        shape: For the cores.
        operators: Python operators of the layer; their overhead is counted here.
    """
    calls, moved = 3 + len(shape.ranks), 2 * shape.num_params
    return [Step("gates", (), _GATES, 0, moved=moved, calls=calls, operators=operators)]


def gate_gradients(shape: TTShape | TTMShape, operators: float) -> list[Step]:
    """The cores gated anew, then the gradients of cores and gates."""
    calls, moved = 5 + 4 * len(shape.ranks), 6 * shape.num_params
    return [Step("grad(gates)", (), _GATES, 0, moved=moved, calls=calls, operators=operators)]
