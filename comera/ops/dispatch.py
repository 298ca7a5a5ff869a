"""Operators that ``torch.compile`` sees as one node and eager mode runs without a detour.

``torch.library`` flattens and checks every argument in Python, forward and backward: 0.4 ms for
the cores of one layer, as much as joining them takes. Eager mode needs none of that and goes
through a plain ``torch.autograd.Function`` around the same three functions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from comera.planning.machine import Machine, load_machine


class Operator:
    """A function of tensors, as a rule with its own backward pass; what :func:`operator` makes.

    Args:
        name: With its namespace, e.g. ``"comera::merge_halves"``.
        run: Computes it. Its annotations are the schema; no output is an input or a view of one.
        tags: As in :func:`torch.library.custom_op`.
    """

    def __init__(self, name: str, run: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> None:
        self.custom_op = torch.library.custom_op(name, run, mutates_args=(), tags=tags)
        self.run = run
        self.backward: Callable[..., Any] | None = None
        self.returns_list = run.__annotations__["return"] == list[Tensor]
        self.__doc__ = run.__doc__

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Shapes and dtypes of the result; a decorator."""
        self.custom_op.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """As :func:`torch.library.register_autograd`; gradients are nested as the arguments are."""
        self.backward, self.setup_context = backward, setup_context
        self.custom_op.register_autograd(backward, setup_context=setup_context)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.custom_op(*args)
        lengths = [len(arg) if _is_opened(arg) else None for arg in args]
        flat = _flat(lengths, args)
        if not all(map(is_plain, flat)):
            return self.custom_op(*args)
        if self.backward is None:
            return self.run(*args)
        transformed = torch._C._are_functorch_transforms_active()
        function = _Transformed if transformed else _Eager
        output = function.apply(self, lengths, *flat)  # type: ignore[no-untyped-call]
        return list(output) if self.returns_list else output


def operator(name: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Make an :class:`Operator` of a function; a decorator."""
    return lambda run: Operator(name, run, tags)


class _Eager(torch.autograd.Function):
    """An operator on its arguments, those in lists one by one, as autograd wants them."""

    @staticmethod
    def forward(ctx: Any, made: Operator, lengths: list[int | None], *flat: Any) -> Any:
        output = _run(made, lengths, *flat)
        _prepare(ctx, (made, lengths, *flat), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        nested = _Context(ctx, _nested(ctx.lengths, ctx.needs_input_grad[2:]))
        found = (
            ctx.made.backward(nested, grads)
            if ctx.made.returns_list
            else ctx.made.backward(nested, *grads)
        )
        found = found if isinstance(found, tuple) else (found,)
        return None, None, *_flat(ctx.lengths, found)


class _Transformed(_Eager):
    """The same for ``torch.func``; in plain calls autograd would inspect a signature each time."""

    @staticmethod
    def forward(made: Operator, lengths: list[int | None], *flat: Any) -> Any:  # type: ignore[override]
        return _run(made, lengths, *flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _prepare(ctx, inputs, output)


def _run(made: Operator, lengths: list[int | None], *flat: Any) -> Any:
    output = made.run(*_nested(lengths, flat))
    return tuple(output) if made.returns_list else output


def _prepare(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.made, ctx.lengths, *flat = inputs
    ctx.made.setup_context(ctx, _nested(ctx.lengths, flat), output)


class _Context:
    """Autograd's context, with ``needs_input_grad`` nested as the arguments are."""

    def __init__(self, ctx: Any, needs_input_grad: list[Any]) -> None:
        self._ctx = ctx
        self.needs_input_grad = needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def is_plain(value: Any) -> bool:
    """Not a tensor without numbers: on the meta device, or while a graph is compiled."""
    if not isinstance(value, Tensor):
        return True
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def _is_opened(value: Any) -> bool:
    """A list, but not one of numbers."""
    return isinstance(value, list | tuple) and (not value or isinstance(value[0], Tensor))


def _flat(lengths: Sequence[int | None], nested: Sequence[Any]) -> list[Any]:
    """Lists opened."""
    pairs = zip(lengths, nested, strict=True)
    return [v for length, value in pairs for v in ([value] if length is None else value)]


def _nested(lengths: Sequence[int | None], flat: Sequence[Any]) -> list[Any]:
    """Undo :func:`_flat`."""
    nested, values = [], iter(flat)
    for length in lengths:
        nested.append(next(values) if length is None else [next(values) for _ in range(length)])
    return nested


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Autocast off on the tensor's device; the meta device has none to switch off."""
    if _is_on(like):
        return torch.autocast(like.device.type, enabled=False)
    return nullcontext()


def autocast_together(
    x: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """All in autocast's dtype where autocast is on; float64 is left as it is."""
    if not _is_on(x) or lefts[0].dtype == torch.float64:
        return x, list(lefts), list(rights)
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), [left.to(dtype) for left in lefts], [right.to(dtype) for right in rights]


def autocast_dtype(like: Tensor) -> torch.dtype:
    """That of products with the tensor: autocast's where it is on, but float64 is left as it is."""
    if like.dtype == torch.float64 or not _is_on(like):
        return like.dtype
    return torch.get_autocast_dtype(like.device.type)


def _is_on(like: Tensor) -> bool:
    kind = like.device.type
    return _is_available(kind) and torch.is_autocast_enabled(kind)


def _is_available(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# What torch.compiler.assume_constant_result does; the compiler of torch 2.11 cannot look inside.
_is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


_depth = 0  # one for all threads: in another one it only costs time


@contextlib.contextmanager
def fixed_sizes() -> Iterator[None]:
    """Inside, forward and backward passes are such as a CUDA graph can hold."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def sizes_are_fixed(like: Tensor) -> bool:
    """Inside of :func:`fixed_sizes`, and while anybody captures a graph on the tensor's device."""
    return _depth > 0 or (like.is_cuda and torch.cuda.is_current_stream_capturing())


def is_free_on_cpu(tensor: Tensor) -> bool:
    """Whether what only a CPU does well may be done: loops over pieces, looks at numbers."""
    return tensor.device.type == "cpu" and _depth == 0


def machine_of(device: torch.device) -> Machine:
    """The measured profile of the device, else rough defaults; a CPU's unless it is a GPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        return load_machine("cuda", torch.cuda.get_device_name(device))
    return load_machine("cpu", threads=torch.get_num_threads())


_scaled_depth = 0  # one for all threads, as that of fixed_sizes


@contextlib.contextmanager
def scaled_products() -> Iterator[None]:
    """Inside, tensor-train linears of bfloat16 multiply in eight bits, backward included."""
    global _scaled_depth
    _scaled_depth += 1
    try:
        yield
    finally:
        _scaled_depth -= 1


def products_are_scaled() -> bool:
    """Inside of :func:`scaled_products`."""
    return _scaled_depth > 0
