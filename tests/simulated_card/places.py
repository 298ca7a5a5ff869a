"""Which tensors are on the card, and what moves them there and back."""

import collections
import contextlib
import threading

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.train.tape import python_of

CARD = torch.device("cuda", 0)
HOST = torch.device("cpu")

counts: collections.Counter[str] = collections.Counter()
"""How often the host waited for the card, numbers were copied, kernels launched."""

_BASE = torch._C.TensorBase
_storages: dict[int, StorageWeakRef] = {}
_MOST_STORAGES = 20_000
"""Above this many, those that are gone are forgotten."""


random = {"captured": False}
"""The state of the generator: a capture that breaks leaves it as one in a capture."""


class CaptureError(RuntimeError):
    """Error of an operation that no capture of a CUDA graph allows, which breaks the capture."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if capture is not None:
            capture.broken = True


class _State(threading.local):
    """What is going on; the backward pass of a CPU runs in the thread that asks for it."""

    wanted: torch.device | None = None  # where what is being made is to be
    moving = False  # a copy between host and card


_state = _State()
capture = None
"""The recorder of the graph that is being captured, or None."""


def plain(name: str, tensor: Tensor):
    """Return an attribute that torch itself gives a tensor."""
    with torch._C.DisableTorchFunction():
        return getattr(_BASE, name).__get__(tensor)


def _key(tensor: Tensor) -> int | None:
    try:
        if type(tensor).__name__ == "FakeTensor" or tensor.layout != torch.strided:
            return None
        if plain("device", tensor).type != "cpu":
            return None
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return None


def on_card(tensor: Tensor) -> bool:
    """Say whether a tensor is on the card."""
    key = _key(tensor)
    return key is not None and key in _storages


def put_on_card(made: object) -> None:
    """Let all tensors in what was made be on the card."""
    for tensor in tree_leaves(made):
        key = _key(tensor) if isinstance(tensor, Tensor) else None
        if key is None or key in _storages:
            continue
        if len(_storages) > _MOST_STORAGES:
            for old in [old for old, storage in _storages.items() if storage.expired()]:
                del _storages[old]
        _storages[key] = StorageWeakRef(tensor.untyped_storage())


def _take_off_card(made: object) -> None:
    for tensor in tree_leaves(made):
        if isinstance(tensor, Tensor):
            _storages.pop(_key(tensor), None)


def _device_type(value: object) -> str | None:
    if isinstance(value, torch.device):
        return value.type
    is_name = isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu")
    return value.split(":")[0] if is_name else None


def _without_card(value: object) -> object:
    if _device_type(value) != "cuda":
        return value
    return HOST if isinstance(value, torch.device) else "cpu"


@contextlib.contextmanager
def _wanting(device: torch.device):
    before, _state.wanted = _state.wanted, device
    try:
        yield
    finally:
        _state.wanted = before


def to(tensor: Tensor, *args, **kwargs) -> Tensor:
    """Do what ``Tensor.to`` does, and say where the result is."""
    args, kwargs = list(args), dict(kwargs)
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor):  # as that is
            like = CARD if on_card(value) else plain("device", value)
            place = args if isinstance(name, int) else kwargs
            place[name] = like
            kwargs["dtype"] = value.dtype
    types = {_device_type(value) for value in (*args, *kwargs.values())}
    target = "cuda" if "cuda" in types else "cpu" if "cpu" in types else None
    if target is None or _key(tensor) is None or on_card(tensor) == (target == "cuda"):
        args, kwargs = tree_map(_without_card, (args, kwargs))
        with torch._C.DisableTorchFunction():
            return _BASE.to(tensor, *args, **kwargs)
    if capture is not None:
        raise CaptureError("a copy between host and card in a capture")
    counts["copy to the card" if target == "cuda" else "copy to the host"] += 1
    _state.moving = True
    try:
        moved = tensor.clone(memory_format=torch.preserve_format)
    finally:
        _state.moving = False
    (put_on_card if target == "cuda" else _take_off_card)(moved)
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return moved.to(dtypes[0]) if dtypes else moved


def _accumulators(values: object):
    """Yield the accumulators of gradients of leaves on the card."""
    for leaf in tree_leaves(values) if torch.is_grad_enabled() else ():
        is_leaf = isinstance(leaf, Tensor) and plain("is_leaf", leaf) and on_card(leaf)
        if is_leaf and plain("requires_grad", leaf):
            with torch._C.DisableTorchFunction():
                yield get_gradient_edge(leaf).node


class Calls(TorchFunctionMode):
    """Lets calls that name the card make tensors of the CPU, which are noted."""

    _MAKE = ("new_", "empty", "zeros", "ones", "full", "rand", "tensor", "as_tensor", "arange")
    _OF_VALUES = ("tensor", "as_tensor")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, stream = kwargs or {}, torch.cuda.current_stream()
        for node in _accumulators((args, kwargs)):
            if capture is not None and node.metadata.get("stream", stream) != stream:
                raise CaptureError("The AccumulateGrad node's stream does not match")
        made = self._run(func, args, kwargs)
        for node in _accumulators((args, kwargs)):  # which live if a graph now holds them
            node.metadata.setdefault("stream", stream)
        return made

    def _run(self, func, args, kwargs):
        name = getattr(func, "__name__", "")
        passed_on = ("__get__", "__set__", "untyped_storage", "_parse_to", "autocast")
        if func is torch.device or name in passed_on:
            return func(*args, **kwargs)
        if name in ("numpy", "tolist", "__array__") and args and on_card(args[0]):
            self._read(name)
        devices = {_device_type(value) for value in tree_leaves((args, kwargs))}
        if "cuda" in devices:
            target = CARD
        elif "cpu" in devices and name.startswith(self._MAKE):
            target = HOST
        else:
            return func(*args, **kwargs)
        if capture is not None and name in self._OF_VALUES:
            raise CaptureError(f"torch.{name} copies a value from the host in a capture")
        args, kwargs = tree_map(_without_card, (tuple(args), dict(kwargs)))
        with _wanting(target):
            made = func(*args, **kwargs)
        (put_on_card if target is CARD else _take_off_card)(made)
        return made

    @staticmethod
    def _read(name: str) -> None:
        if name != "tolist":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if capture is not None:
            raise CaptureError("Tensor.tolist in a capture")
        counts["wait: tolist"] += 1


class Operations(TorchDispatchMode):
    """Refuses tensors of two devices in one operation, and notes where its results are."""

    _BETWEEN_DEVICES = frozenset({
        "copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_",
        "_foreach_copy_", "set_", "lift_fresh", "_has_compatible_shallow_copy_type",
        "_local_scalar_dense",
    })  # fmt: skip
    _WAITS = frozenset({
        "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2",
        "unique_dim", "unique_consecutive",
    })  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inside = python_of(func)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if _device_type(kwargs.get("device")) == "cuda":
            kwargs = {**kwargs, "device": HOST}
            if name != "_to_copy":
                with _wanting(CARD):
                    return self.__torch_dispatch__(func, types, args, kwargs)
            if capture is not None and not on_card(args[0]):
                raise CaptureError("a copy from the host in a capture")
            made = func(*args, **kwargs)
            put_on_card(made)
            return made
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = [(x, on_card(x)) for x in tensors if _key(x) is not None]
        there = any(on for _, on in places)
        if there and not _state.moving and _state.wanted is not HOST:
            self._check_places(name, places)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded and random["captured"] and capture is None and (there or _state.wanted is CARD):
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        if there and name in self._WAITS:
            counts[f"wait: {name}"] += 1
        if capture is not None and (there or _state.wanted is CARD):
            if name in ("copy_", "_to_copy") and not all(on for _, on in places):
                raise CaptureError(f"aten.{name} between host and card in a capture")
            made = capture.run(func, args, kwargs)
        else:
            made = func(*args, **kwargs)
        stays = name == "_local_scalar_dense" or _state.wanted is HOST or _state.moving
        if not stays and (there or _state.wanted is CARD):
            put_on_card(made)
        return made

    def _check_places(self, name: str, places: list[tuple[Tensor, bool]]) -> None:
        if name in self._BETWEEN_DEVICES:
            return
        # A tensor of the host without dimensions is a number to most operations.
        strict = name.startswith("_foreach")
        fused = name.startswith("_fused")  # which take rates from either
        for tensor, on in places:
            number = tensor.numel() <= 1 if fused else tensor.dim() == 0 or not tensor.numel()
            if not on and (strict or not number):
                raise RuntimeError(
                    f"aten.{name}: Expected all tensors to be on the same device, but found at "
                    f"least two devices, cuda:0 and cpu! {[(tuple(x.shape), p) for x, p in places]}"
                )
        if name.endswith("_") and not places[0][1]:
            raise RuntimeError(f"aten.{name}: a tensor of the card is written to one of the host")
