"""What the blocks of a model are given, found without running them.

Blocks follow each other, each given what the one before has returned; what else they are given, as
masks and positions, does not depend on that. So a model whose blocks return their input unchanged
shows how each of them is called.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Calls:
    """How the blocks are called, for each batch.

    Attributes:
        states: What the first block is given.
        others: For each block and batch the other arguments and the keywords.
    """

    states: list[Tensor]
    others: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]


class _Reached(Exception):
    """The last block was called: the rest of the model need not run."""


def find_blocks(model: nn.Module, name: str | None, targets: Iterable[str]) -> str:
    """Return the name of the list of blocks that holds most of the targeted layers.

    Raises:
        ValueError: If there is none, or the name given is not that of one.
    """
    lists = {
        key: module
        for key, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)
    }
    if name is not None:
        if name not in lists:
            raise ValueError(
                f"blocks={name!r} is no nn.ModuleList or nn.Sequential of the model; it has "
                f"{', '.join(map(repr, lists)) or 'none'}"
            )
        return name
    names = list(targets)
    alike = {
        key: sum(target.startswith(f"{key}.") for target in names)
        for key, module in lists.items()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    }
    if not any(alike.values()):
        raise ValueError(
            "the model has no nn.ModuleList of blocks of one class that holds layers to compress: "
            "say with blocks= which list it is"
        )
    return max(alike, key=lambda key: alike[key])


@torch.no_grad()
def record_calls(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Iterable[Any],
    filled: Callable[[nn.Module], AbstractContextManager[None]],
) -> Calls:
    """Run batches through a model without its blocks, and note how these are called.

    Args:
        model: What is not in a block has its numbers.
        blocks: In order.
        batches: A mapping is given to the model as keywords, a tuple or list as arguments, anything
            else as the only one; labels are not needed.
        filled: Lets a block have its numbers for a while: the first one is run once, to see whether
            it returns a tensor or a tuple.

    Raises:
        ValueError: If there is no batch, or the blocks do not follow each other so.
    """
    found = Calls([], [[] for _ in blocks])
    form: list[Any] = []
    last: list[Tensor] = []
    count = len(blocks)

    def recorder(k: int) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                raise ValueError(f"block {k} is given no tensor as its first argument")
            state = args[0]
            if k and state is not last[0]:
                raise ValueError(
                    f"block {k} is not given what block {k - 1} returns: blocks that do not simply "
                    "follow each other cannot be compressed one by one"
                )
            found.others[k].append((args[1:], kwargs))
            if not k:
                found.states.append(state.clone())  # a block may write into what it is given
                if not form:
                    del blocks[0].forward
                    with filled(blocks[0]):
                        form.append(blocks[0](*args, **kwargs))
                    blocks[0].forward = recorder(0)  # type: ignore[method-assign]
            if k == count - 1:
                raise _Reached
            last[:] = [state.clone()]
            tail = form[0][1:] if isinstance(form[0], tuple) else None
            return last[0] if tail is None else (last[0], *tail)

        return record

    config = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    for k, block in enumerate(blocks):
        block.forward = recorder(k)  # type: ignore[method-assign]
    try:
        if caches:
            config.use_cache = False  # type: ignore[union-attr]
        for batch in batches:
            with suppress(_Reached):
                if isinstance(batch, Mapping):
                    model(**{key: value for key, value in batch.items() if key != "labels"})
                elif isinstance(batch, tuple | list):
                    model(*batch)
                else:
                    model(batch)
    finally:
        if caches:
            config.use_cache = caches  # type: ignore[union-attr]
        for block in blocks:
            vars(block).pop("forward", None)
    counts = {len(found.states), *map(len, found.others)}
    if counts == {0}:
        raise ValueError("calibration has no batch that reaches the blocks")
    if len(counts) > 1:
        raise ValueError(
            "some blocks are called more often than others: they cannot be compressed one by one"
        )
    return found
