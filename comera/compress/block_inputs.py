"""Handle a model block by block: record block inputs, load parameters, store finished blocks.

A block's input is the previous block's output; its other arguments, such as masks and positions,
do not depend on it. The model is on the ``meta`` device.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from comera.compress.allocate import CompressedLayer
from comera.extras import listed
from comera.files import replacing
from comera.nn.swap import call
from comera.params import checksum
from comera.saved.description import describe_layers
from comera.saved.model_folder import Shards, opened, read_tensor


@dataclass
class Calls:
    """Arguments of blocks: ``states`` has the first argument of the next block for each batch.

    ``others`` has the other arguments and the keywords for each block and batch.
    """

    states: list[Tensor]
    others: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]


class _Reached(Exception):
    """Exception raised at the last block, to skip the rest of the model."""


def find_blocks(model: nn.Module, name: str | None, targets: Iterable[str]) -> str:
    """Return the name of the list of blocks: ``name`` or, if None, the list with most targets."""
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
    """Run batches through a model while its blocks only record their arguments.

    Modules outside the blocks must be loaded. The context ``filled`` loads a block: only the first
    block runs, once, to see whether it returns a tensor or a tuple. Raises ``ValueError`` if there
    is no batch, or a block's input is not the previous block's output.
    """
    found = Calls([], [[] for _ in blocks])
    tail: list[Any] = []  # what the first block returns besides its first output, once it ran
    last: list[Tensor] = []

    def record(k: int, *args: Any, **kwargs: Any) -> Any:
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
            if last:
                raise ValueError(
                    "blocks that a model calls several times cannot be compressed one by one: use "
                    "compress_"
                )
            found.states.append(state.clone())  # a block may write into its input
        if not tail:
            del blocks[0].forward
            with filled(blocks[0]):
                output = blocks[0](*args, **kwargs)
            tail.append(output[1:] if isinstance(output, tuple) else None)
            watch(0)
        if k == len(blocks) - 1 and len(found.states) > 1:  # the first batch runs to its end
            raise _Reached
        last[:] = [state.clone()]
        return last[0] if tail[0] is None else (last[0], *tail[0])

    def watch(k: int) -> None:
        blocks[k].forward = lambda *args, **kwargs: record(k, *args, **kwargs)  # type: ignore[method-assign]

    for k in range(len(blocks)):
        watch(k)
    try:
        for batch in batches:
            last.clear()
            with suppress(_Reached):
                if isinstance(batch, Mapping):
                    batch = {key: value for key, value in batch.items() if key != "labels"}
                call(model, batch)
    finally:
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


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put new parameters, but not buffers, on the ``meta`` device inside; keep ties."""
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
    """Loads parts of a model on the ``meta`` device from the files of ``shards``, by name.

    Buffers that are not on ``meta`` are overwritten at once. Raises ``ValueError`` if a tensor is
    missing or has another shape, or a buffer on ``meta`` is in no file.
    """

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        self.shards, self.unused = shards, set(shards.file_of)
        for name, buffer in model.named_buffers():
            if not buffer.is_meta and name in shards.file_of:
                buffer.copy_(shards.read(name))
                self.unused.discard(name)
        names_of: dict[Tensor, list[str]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            if tensor.is_meta:
                names_of.setdefault(tensor, []).append(name)
        self._name_of: dict[Tensor, str] = {}
        missing = []
        for tensor, names in names_of.items():
            if there := [name for name in names if name in shards.file_of]:
                self._name_of[tensor] = there[0]
                self.unused -= set(names)
            else:
                missing.append(names[0])
        if buffers := [name for name, _ in model.named_buffers() if name in missing]:
            raise ValueError(
                f"{listed(buffers)}: buffers without numbers, which are in no file either: give a "
                "function that makes the model, instead of a model on the meta device"
            )
        if missing:
            raise ValueError(
                f"{shards.folder} has no tensor for {listed(missing)}; it has "
                f"{listed(sorted(self.unused)) or 'no others'}: files or names of another model"
            )

    def read(self, like: Tensor) -> Tensor:
        """Read the numbers of a parameter or buffer ``like``, in the dtype of ``like``."""
        name = self._name_of[like]
        found = self.shards.read(name)
        if found.shape != like.shape:
            raise ValueError(
                f"{name} is {tuple(found.shape)} in {self.shards.file_of[name]} and "
                f"{tuple(like.shape)} in the model: the files are of another model"
            )
        return found.to(like.dtype)

    @contextmanager
    def filled(self, module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
        """Load a module's tensors inside the context, and drop them afterwards."""
        places: list[tuple[Any, str, Tensor]] = []
        made: dict[Tensor, Tensor] = {}
        for part in module.modules() if recurse else [module]:
            tensors: Any
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if tensor not in made:
                        real = self.read(tensor)
                        if isinstance(tensor, nn.Parameter):
                            real = nn.Parameter(real, tensor.requires_grad)
                        made[tensor] = real
                    tensors[key] = made[tensor]
                    places.append((tensors, key, tensor))
        try:
            yield
        finally:
            for tensors, key, tensor in places:
                tensors[key] = tensor

    @contextmanager
    def filled_when_called(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Load each module's own tensors when it is called inside; drop all of them afterwards."""
        with ExitStack() as stack:

            def fill(module: nn.Module, _: Any) -> None:
                stack.enter_context(self.filled(module, recurse=False))

            for module in modules:
                stack.enter_context(module.register_forward_pre_hook(fill))
            yield


def empty_layers_(block: nn.Module) -> None:
    moved: dict[Tensor, nn.Parameter] = {}
    for part in block.modules():
        for key, param in part._parameters.items():
            if param is not None and not param.is_meta:
                empty = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
                part._parameters[key] = moved.setdefault(param, empty)


_KEY = "comera_blocks"


class UnfinishedBlocks:
    """A folder with a file for each compressed block, and the inputs of the next one.

    The first block makes the folder; ``about`` are settings that all blocks depend on, for JSON.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.about = folder, json.loads(json.dumps(about))
        self._states = folder / "states.safetensors"
        self._noted: dict[int, dict[str, Any]] = {}

    def resume(self, states: list[Tensor]) -> int:
        """Return the number of compressed blocks, and put the next block's inputs in ``states``."""
        if not self._states.exists():
            return 0
        try:
            with safe_open(self._states, "pt") as file:
                noted = json.loads((file.metadata() or {})[_KEY])
                if wrong := [k for k, v in self.about.items() if noted["about"].get(k) != v]:
                    raise ValueError(
                        f"{self.folder} is of a call with another {wrong[0]}: repeat that call to "
                        "go on with it, or remove the folder"
                    )
                states[:] = [file.get_tensor(str(k)).clone() for k in range(len(states))]
            damaged: Any = noted["checksums"] != [checksum(state) for state in states]
        except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as problem:
            damaged = problem
        if damaged:
            raise ValueError(f"{self._states} is damaged: remove {self.folder}")
        return noted["done"]

    def add(
        self, k: int, block: nn.Module, layers: Sequence[CompressedLayer], after: Sequence[Tensor]
    ) -> None:
        """Write block number ``k`` with its layers' results, and then its outputs ``after``."""
        tensors: dict[Tensor, str] = {}
        for name, tensor in block.state_dict(keep_vars=True).items():
            tensors.setdefault(tensor, name)
        noted = {"layers": [asdict(one) for one in layers], "described": describe_layers(block)}
        content = {name: tensor.detach().contiguous() for tensor, name in tensors.items()}
        noted["checksums"] = {name: checksum(tensor) for name, tensor in content.items()}
        text = json.dumps(noted)
        with replacing(self._file(k)) as temporary:
            save_file(content, temporary, {_KEY: text, "checksum": str(zlib.crc32(text.encode()))})
        states = {str(number): state.contiguous() for number, state in enumerate(after)}
        about: dict[str, Any] = {"about": self.about, "done": k + 1}
        about["checksums"] = [checksum(state) for state in states.values()]
        with replacing(self._states) as temporary:
            save_file(states, temporary, {_KEY: json.dumps(about)})

    def tensor(self, k: int, name: str) -> Tensor:
        """Return a tensor of a compressed block; raise ``ValueError`` if it is damaged."""
        found = read_tensor(self._file(k), name)
        if checksum(found) != self.noted(k)["checksums"][name]:
            raise ValueError(f"{self._file(k)} is damaged: remove {self.folder}")
        return found

    def noted(self, k: int) -> dict[str, Any]:
        """Return what was noted of a compressed block; raise ``ValueError`` if it is damaged."""
        if k in self._noted:
            return self._noted[k]
        with opened(self._file(k)) as file:
            held = file.metadata()
        if str(zlib.crc32(held[_KEY].encode())) != held.get("checksum"):
            raise ValueError(f"{self._file(k)} is damaged: remove {self.folder}")
        self._noted[k] = json.loads(held[_KEY])
        return self._noted[k]

    def _file(self, k: int) -> Path:
        return self.folder / f"block-{k:04d}.safetensors"
