"""Whether what only a CPU does well may be done."""

from torch import Tensor

from comera.ops.context import shapes_are_static


def may_read_values(tensor: Tensor) -> bool:
    """Say whether what only a CPU does well may be done: loops over pieces, looks at numbers."""
    return tensor.device.type == "cpu" and not shapes_are_static(tensor)
