"""A model without its numbers, parts of which are filled from files for a while."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from comera.names import listed
from comera.saved.shards import Shards


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Make models whose parameters hold no numbers; their buffers do.

    Each parameter goes to the ``meta`` device as soon as a module has it, ties included.
    """
    before = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        before(module, name, param)
        if param is not None and not param.is_meta:
            empty = nn.Parameter(param.to("meta"), param.requires_grad)
            vars(empty).update(vars(param))
            module._parameters[name] = empty

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]


class Filler:
    """Fills parts of a model on the ``meta`` device from files.

    Args:
        model: Its parameters, and buffers on ``meta``, are looked for by name. Buffers with numbers
            get those of the files, where they have any.
        shards: The files.

    Raises:
        ValueError: If a tensor is missing or of another shape, or a buffer has numbers nowhere.
    """

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        self.shards = shards
        self.name_of: dict[int, str] = {}
        self.unused = set(shards.file_of)
        for name, buffer in model.named_buffers():
            if not buffer.is_meta and name in shards.file_of:
                buffer.copy_(shards.read(name))
                self.unused.discard(name)
        missing = []
        wanted: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            if tensor.is_meta:
                wanted.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor  # keeps the id its own
        for key, names in wanted.items():
            found = [name for name in names if name in shards.file_of]
            if found:
                self.name_of[key] = found[0]
                self.unused -= set(names)
            else:
                missing.append(names[0])
        buffers = [name for name, buffer in model.named_buffers() if name in missing]
        if buffers:
            raise ValueError(
                f"{listed(buffers)}: buffers without numbers, which are in no file either: give a "
                "function that makes the model, instead of a model on the meta device"
            )
        if missing:
            raise ValueError(
                f"{shards.folder} has no tensor for {listed(missing)}; it has "
                f"{listed(sorted(self.unused)) or 'no others'}: the files are of another model"
            )
        self._held = tensors

    def read(self, like: Tensor) -> Tensor:
        """Read the numbers of a parameter or buffer, in its own dtype.

        Raises:
            ValueError: If they are of another shape.
        """
        name = self.name_of[id(like)]
        found = self.shards.read(name)
        if found.shape != like.shape:
            raise ValueError(
                f"{name} is {tuple(found.shape)} in {self.shards.file_of[name]} and "
                f"{tuple(like.shape)} in the model: the files are of another model"
            )
        return found.to(like.dtype)

    @contextmanager
    def filled(self, module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
        """Let a module have its numbers for a while; afterwards it has none again.

        Layers that were put in the place of others meanwhile go to the ``meta`` device too.
        """
        places: list[tuple[Any, str, Tensor]] = []
        made: dict[int, Tensor] = {}
        for part in module.modules() if recurse else [module]:
            for kind in (part._parameters, part._buffers):
                for key, tensor in kind.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        real = self.read(tensor)
                        if isinstance(tensor, nn.Parameter):
                            real = nn.Parameter(real, tensor.requires_grad)
                        made[id(tensor)] = real
                    kind[key] = made[id(tensor)]  # type: ignore[assignment]
                    places.append((kind, key, tensor))
        try:
            yield
        finally:
            for kind, key, tensor in places:
                kind[key] = tensor

    @contextmanager
    def filled_when_called(self, modules: list[nn.Module]) -> Iterator[None]:
        """Fill each of these modules, without those inside it, once it is called."""
        with ExitStack() as stack:

            def fill(module: nn.Module, _: Any) -> None:
                stack.enter_context(self.filled(module, recurse=False))

            handles = [module.register_forward_pre_hook(fill) for module in modules]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()


def empty_layers_(block: nn.Module) -> None:
    """Move parameters that still have numbers to the ``meta`` device, in place."""
    moved: dict[int, nn.Parameter] = {}
    for part in block.modules():
        for key, param in part._parameters.items():
            if param is not None and not param.is_meta:
                if id(param) not in moved:
                    empty = torch.empty_like(param, device="meta")
                    moved[id(param)] = nn.Parameter(empty, param.requires_grad)
                part._parameters[key] = moved[id(param)]
