"""Tensors that were made for several modules together, which each of them uses for a while."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class SharedGates(NamedTuple):
    """The gates of one module as parts of all gates of a model in one vector.

    What uses the gates more than once then sums its gradients in one place instead of one a gate.
    """

    flat: Tensor
    start: int
    parts: tuple[Tensor, ...]


@dataclass(slots=True)
class Shared:
    """The parameters behind what is shared with a module while a context is open.

    Attributes:
        params: The parameters.
        versions: How often each had been written to in place by then; None where torch does not
            count, as of parameters made under ``torch.inference_mode``.
        renew: Contracts everything anew, for all modules.
        thread: The only thread to use it, and only in passes that nobody computes again, because
            the context is left before the backward pass; None for any, as of a
            :class:`~comera.BatchedContraction`.
        used: Gathers the ``id`` of each module that asked for it.
    """

    params: tuple[Tensor, ...]
    versions: list[int] | None
    renew: Callable[[], None]
    thread: int | None = None
    used: set[int] = field(default_factory=set)

    @property
    def is_for_now(self) -> bool:
        """Whether it may be used by the pass that runs now."""
        if self.thread is None:
            return True
        # Such hooks are most often activation checkpointing, which computes the same again.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is None and self.thread == threading.get_ident()


def versions_of(params: Sequence[Tensor]) -> list[int] | None:
    """Return how often each was written to in place; None where torch does not count."""
    try:
        return [param._version for param in params]
    except RuntimeError:  # an inference tensor
        return None


def may_share(made: Tensor, param: Tensor) -> bool:
    """Check that a tensor made of a parameter has a gradient, if one is wanted now."""
    return made.requires_grad or not (torch.is_grad_enabled() and param.requires_grad)
