"""State that is wider than its parameter, loaded as it was saved."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@contextlib.contextmanager
def loading_exactly(
    optimizer: Optimizer, exact: Callable[[dict[str, Any], Tensor], dict[str, Any]]
) -> Iterator[None]:
    """Undo, around torch's ``load_state_dict``, that it casts state to its parameter's dtype.

    Args:
        optimizer: The optimizer whose state is loaded.
        exact: Makes, of the given state of a parameter and that parameter, what its state is to
            hold instead of what torch makes of it. What it raises leaves the optimizer as it was.
    """
    found: dict[Tensor, dict[str, Any]] = {}

    def keep(_: Optimizer, given: dict[str, Any]) -> None:
        numbers = [n for group in given["param_groups"] for n in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=False):  # torch checks the lengths
            if number in given["state"]:
                found[param] = exact(given["state"][number], param)

    def restore(_: Optimizer) -> None:
        for param, state in found.items():
            optimizer.state[param].update(state)

    # Registered last and first: after whatever changes the dict, before whatever reads it.
    before = optimizer.register_load_state_dict_pre_hook(keep)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
