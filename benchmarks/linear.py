"""One linear layer, forward and backward, the gradient of its input included."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks import peers
from benchmarks.numerics import compare_linear
from benchmarks.session import Session
from comera.nn.block_linear import BTTLinear
from comera.nn.linear import TTLinear


def linear(
    session: Session,
    shape: tuple[int, int],
    rank: int | Sequence[int],
    tokens: int,
    dtype: torch.dtype,
    with_peers: bool,
) -> None:
    """Time dense, comera's two formats and tensorly-torch side by side."""
    layer, dense = make_layers(session, shape, rank, dtype)
    blocks = _blocks_beside(layer)
    x = make_input(session, tokens, shape[0], dtype)
    session.check(compare_linear(layer, x))
    made = {"dense": dense, "comera": layer, f"comera blocks, rank {blocks.ranks[0]}": blocks}
    runs = {name: forward_backward(each, x) for name, each in made.items()}
    parameters = {name: count(each) for name, each in made.items()}

    def peer(name: str, implementation: str) -> Callable[[], object]:
        other = peers.tensorly_linear(layer, implementation)
        parameters[name] = count(other)
        return forward_backward(other, x)

    with peers.tensorly_on_torch():
        for way in ("factorized", "reconstructed") if with_peers else ():
            name = f"tensorly-torch {way}, rank {max(layer.ranks)}"
            session.add_peer(runs, name, lambda name=name, way=way: peer(name, way))  # type: ignore[misc]
        parameters = {name: parameters[name] for name in runs}
        title = (
            f"linear {shape[0]} -> {shape[1]}, modes {layer.shape.describe_modes()}, ranks "
            f"{' '.join(map(str, layer.ranks))}, {tokens} tokens, forward + backward"
        )
        session.measure(title, runs, "dense", parameters)


def make_layers(
    session: Session, shape: tuple[int, int], rank: int | Sequence[int], dtype: torch.dtype
) -> tuple[TTLinear, nn.Linear]:
    """Make both layers with fresh weights."""
    torch.manual_seed(0)
    layer = TTLinear(*shape, rank=rank, dtype=dtype).to(session.device)
    return layer, nn.Linear(*shape, dtype=dtype).to(session.device)


def _blocks_beside(layer: TTLinear) -> BTTLinear:
    """Make a block tensor train of the highest rank that holds no more than a layer does.

    It may hold more at rank one, of which there is no less.
    """
    core, size = layer.cores[0], (layer.in_features, layer.out_features)
    one = BTTLinear(*size, rank=1, device=core.device, dtype=core.dtype)
    rank = layer.num_stored // one.num_stored
    return BTTLinear(*size, rank=rank, device=core.device, dtype=core.dtype) if rank > 1 else one


def make_input(session: Session, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw a random batch that needs a gradient."""
    x = torch.randn(tokens, width).to(session.device, dtype)
    return x.requires_grad_()


def forward_backward(layer: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Return what is timed: one pass there and back, gradients dropped before."""
    with torch.no_grad():
        grad = torch.randn_like(layer(x))

    def run() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(grad)

    return run


def count(model: nn.Module) -> int:
    """Count the parameters."""
    return sum(param.numel() for param in model.parameters())
