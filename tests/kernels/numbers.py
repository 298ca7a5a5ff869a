"""How far numbers are from others."""

import torch
from torch import Tensor

ROUNDING = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4, "tf32": 5e-4}
"""What results in a dtype may be off, relative to their size, where sums are in float32."""

ROUNDED = {torch.bfloat16: "bfloat16", torch.float32: "tf32"}
"""What the products of feed-forward kernels round to, by the dtype of their numbers."""


def taken_by(ways, *args):
    """The name of the way that an operator would run with these arguments."""
    return next(name for name, reason in ways.reasons(*args).items() if reason is None)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative, in the Euclidean norm; NaN where there are any."""
    scale = want.double().norm().item()
    apart = (got.double() - want.double()).norm().item()
    return apart / scale if scale else apart


def assert_near(got, want, dtype, factor=1.0):
    """All of some tensors to the rounding of a dtype."""
    allowed = factor * ROUNDING[str(dtype).removeprefix("torch.")]
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.shape == other.shape
        far = distance(one, other)
        assert far <= allowed, f"tensor {number} of {tuple(one.shape)} is {far:.1e} off"


def displaced(tensor: Tensor) -> Tensor:
    """Return the same numbers where no 16 bytes can be read at once: in a part of a tensor."""
    part = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return part.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
