"""Notice that tensors are written to while they are saved, as by a thread that trains on."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comera.names import listed


class Undisturbed:
    """Tensors that nobody is to write to from now on.

    Writes that torch does not count, such as those through ``.data``, go unnoticed.

    Args:
        tensors: By name; what is no tensor is left out.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._noted = {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not tensor.is_inference()
        }

    def check(self) -> None:
        """Refuse what was saved of tensors that were written to meanwhile.

        Raises:
            RuntimeError: With their names and what to do.
        """
        written = [name for name, (tensor, count) in self._noted.items() if tensor._version > count]
        if written:
            raise RuntimeError(
                f"written to while the model was being saved: {listed(written)}. That would save a "
                "mixture of before and after; save between two steps, or save a copy that was made "
                "between them: copy.deepcopy(model)"
            )
