"""One operator at one size, run in two ways, for ``python -m benchmarks kernels``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[int], list[Tensor]]
"""Runs on the input of a number and returns what is compared."""


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes:
        title: The operator and its size in words.
        ours: Runs the operator.
        plain: Runs torch operations in its place.
        copies: How many inputs there are.
        nbytes: Bytes read and written at least, for each of them.
        flops: Operations of each of them.
    """

    title: str
    ours: Run
    plain: Run
    copies: int
    nbytes: float
    flops: float


def both_ways(
    title: str,
    forward: tuple[Run, Run],
    inputs: Callable[[int], Sequence[Tensor]],
    copies: int,
    nbytes: tuple[float, float],
    flops: tuple[float, float],
) -> Iterator[Case]:
    """Make a case of the forward pass and one of both passes, whose results are gradients.

    Args:
        title: Title of both rows.
        forward: By the operator and by torch operations.
        inputs: What gradients are wanted of, by the number of the input.
        copies: Inputs.
        nbytes: Bytes of the forward pass and of both passes.
        flops: Operations, likewise.
    """
    with torch.no_grad():
        grads = [torch.randn_like(y) for y in forward[0](0)]

    def alone(run: Run) -> Run:
        return torch.no_grad()(run)

    def both(run: Run) -> Run:
        return lambda k: list(torch.autograd.grad(run(k), list(inputs(k)), grads))

    ours, plain = forward
    yield Case(f"{title}, forward", alone(ours), alone(plain), copies, nbytes[0], flops[0])
    title = f"{title}, forward + backward"
    yield Case(title, both(ours), both(plain), copies, nbytes[1], flops[1])
