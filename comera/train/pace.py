"""How fast a run is and how much memory it has needed, for its progress bar."""

import resource
import sys

import torch

_MIB = 1 << 20
_KIB = 1 << 10


class Pace:
    """Shows steps a second since it was last asked, and the peak of memory.

    Args:
        device: The device on which the steps run.
        per_step: How much a step trains on, of all processes, and what that is called: say
            ``(4096, "tokens")``.
        steps: Steps done before the first that counts.
        seconds: Seconds that those took.
    """

    def __init__(
        self,
        device: torch.device,
        per_step: tuple[int, str] | None = None,
        steps: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self._device, self._per_step = device, per_step
        self._steps, self._seconds = steps, seconds

    def show(self, steps: int, seconds: float) -> str:
        """Return speeds and memory as text.

        Args:
            steps: Steps done in all.
            seconds: Seconds that those took in all, evaluations and saving left out.
        """
        new, took = steps - self._steps, seconds - self._seconds
        self._steps, self._seconds = steps, seconds
        parts = []
        if new > 0 and took > 0:
            parts.append(f"{short(new / took)} steps/s")
            if self._per_step is not None:
                count, unit = self._per_step
                parts.append(f"{short(count * new / took)} {unit}/s")
        parts.append(f"peak {peak_memory(self._device) / _MIB:,.0f} MiB")
        return ", ".join(parts)


def peak_memory(device: torch.device) -> int:
    """Return the bytes that tensors on a GPU have taken at most, or this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * _KIB


def short(value: float) -> str:
    """Write a figure with three digits or so, as ``0.042``, ``45.6``, ``7,890`` or ``12.3k``."""
    if value < 100:
        return f"{value:.3g}"
    if value < 10_000:
        return f"{value:,.0f}"
    return f"{value / 1e6:.3g}M" if value >= 1e6 else f"{value / 1e3:.3g}k"
