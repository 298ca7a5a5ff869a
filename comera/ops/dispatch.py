"""Whether what only a CPU does well may be done."""

from torch import Tensor

from comera.ops.context import sizes_are_fixed


def is_free_on_cpu(tensor: Tensor) -> bool:
    """Say whether what only a CPU does well may be done: loops over pieces, looks at numbers."""
    return tensor.device.type == "cpu" and not sizes_are_fixed(tensor)
