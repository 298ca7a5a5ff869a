"""Define operators that are one node to ``torch.compile`` and run fast in eager mode.

``torch.library`` is slow at many arguments, so eager mode runs a plain ``torch.autograd.Function``
around the same functions: forward, setup of the context, and backward.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from comera.ops.context import without_autocast

NOT_PLAIN = (
    "{0} cannot read a {1}: comera.{2}(copy.deepcopy(model)) makes a model of torch's own "
    "layers, which it can"
)


class Operator:
    """A torch operator, usually with its own backward pass; see :func:`operator`.

    The annotations of ``run`` are the schema. No output is an input or a view of one; of several
    none is a view, which could not be changed in place. Name and tags are those of ``custom_op``.
    """

    def __init__(self, name: str, run: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> None:
        self.custom_op = torch.library.custom_op(name, run, mutates_args=(), tags=tags)
        self.name, self.run = name, run
        self.backward: Callable[..., Any] | None = None
        self.returns_list = run.__annotations__["return"] == list[Tensor]
        self.__doc__ = run.__doc__

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register, as a decorator, the function that makes an empty result of the right shape."""

        @functools.wraps(fake)
        def traced(*args: Any) -> Any:
            if torch.onnx.is_in_onnx_export():  # the exporter would find no function for the node
                raise TypeError(NOT_PLAIN.format("torch.onnx.export", "tensor train", "to_plain_"))
            return fake(*args)

        self.custom_op.register_fake(traced)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register a backward pass as torch.library does; gradients are nested like arguments."""
        self.backward, self.setup_context = backward, setup_context
        self.custom_op.register_autograd(backward, setup_context=setup_context)

    def register_gradients(
        self, gradients: Callable[..., list[Tensor]], plainly: Callable[..., Any], kept: int = 0
    ) -> None:
        """Register a backward pass that is one node to ``torch.compile``, too.

        Args:
            gradients: Function of the gradients of all results, the kept outputs, the inputs,
                tensors before settings, and for each tensor whether its gradient is needed. It
                returns those that are, contiguous. Its annotations are a schema as well.
            plainly: A list of the results by operations of torch, for gradients that are
                differentiated again or come in batches.
            kept: Number of last outputs that only the backward pass reads.
        """
        backward = Operator(f"{self.name}_backward", gradients)

        @backward.register_fake
        def _(grads, kept, *args):
            tensors = _flat(*_tensors_of(args))
            pairs = zip(tensors, args[-1], strict=True)
            return [tensor.new_empty(tensor.shape) for tensor, need in pairs if need]

        def setup_context(ctx, inputs, output):
            ctx.layout, tensors = _tensors_of(inputs)
            ctx.settings = inputs[len(tensors) :]
            outputs = [output] if isinstance(output, Tensor) else output
            count = len(outputs) - kept
            ctx.results = [(y.shape, y.dtype) for y in outputs[:count]]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*_flat(ctx.layout, tensors), *outputs[count:])

        def back(ctx, *given):
            lengths, settings, saved = ctx.layout, ctx.settings, list(ctx.saved_tensors)
            needs = _flat(lengths, ctx.needs_input_grad[: len(lengths)])
            tensors, held = saved[: len(needs)], saved[len(needs) :]
            pairs = zip(given[0] if self.returns_list else given, ctx.results, strict=False)
            grads = [
                saved[0].new_zeros(shape, dtype=dtype) if grad is None else grad
                for grad, (shape, dtype) in pairs
            ]
            with without_autocast(saved[0]):
                if torch.is_grad_enabled() or any(map(is_batched, grads)):

                    def again(*tensors: Tensor) -> Any:
                        return plainly(*_nested(lengths, tensors), *settings)

                    found = gradients_again(again, tensors, grads)
                else:
                    run = gradients if is_concrete(saved[0]) else backward
                    made = iter(run(grads, held, *_nested(lengths, tensors), *settings, needs))
                    found = [next(made) if need else None for need in needs]
            return *_nested(lengths, found), *(None for _ in settings)

        self.register_autograd(back, setup_context=setup_context)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.custom_op(*args)
        lengths = _lengths(args)
        flat = _flat(lengths, args)
        if not all(map(is_concrete, flat)):
            return self.custom_op(*args)
        if self.backward is None:
            return self.run(*args)
        output = _Eager.apply(self, args, lengths, *flat)  # type: ignore[no-untyped-call]
        return list(output) if self.returns_list else output


def operator(name: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], Operator]:
    return lambda run: Operator(name, run, tags)


class _Eager(torch.autograd.Function):
    """Autograd function that runs an operator on flat arguments, as autograd needs them.

    Transforms of ``torch.func`` refuse it: a backward pass that calls torch anew would find no
    graph after them. Where :func:`is_recorded`, callers compute the same by plain operations.
    """

    @staticmethod
    def forward(ctx: Any, made: Operator, args: Any, lengths: Any, *flat: Any) -> Any:
        ctx.made, ctx.lengths = made, lengths
        output = made.run(*args)
        output = tuple(output) if made.returns_list else output
        made.setup_context(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        nested = _Context(ctx, _nested(ctx.lengths, ctx.needs_input_grad[3:]))
        given = (grads,) if ctx.made.returns_list else grads
        found = ctx.made.backward(nested, *given)
        found = found if isinstance(found, tuple) else (found,)
        return None, None, None, *_flat(ctx.lengths, found)


class _Context:
    """Autograd's context, but with ``needs_input_grad`` nested like the arguments."""

    def __init__(self, ctx: Any, needs_input_grad: list[Any]) -> None:
        self._ctx = ctx
        self.needs_input_grad = needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def gradients_again(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Tensor | Sequence[Tensor]
) -> list[Any]:
    """Return gradients of ``function``, the plain reference, by operations of torch.

    ``grads`` are those of its outputs. The result can be differentiated again if autograd is on. It
    is None for inputs that are None or, outside of a custom operator, need no gradient.
    """
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality):
        # Inside a custom operator, where autograd records nothing.
        pullback: Any = torch.func.vjp(function, *inputs)[1]
        return list(pullback(grads))
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Of views: one input may depend on another, as the second pass through a layer's factors
        # does on the first, and the gradient by way of that one does not belong here.
        views = [each if each is None else each.view_as(each) for each in inputs]
        results = function(*views)
    leaves = [each if each is not None and each.requires_grad else None for each in views]
    wanted = [each for each in leaves if each is not None]
    options: dict[str, bool] = {"create_graph": create_graph, "materialize_grads": True}
    found = iter(torch.autograd.grad(results, wanted, grads, **options) if wanted else ())
    return [each if each is None else next(found) for each in leaves]


def is_concrete(value: Any) -> bool:
    """Return whether a tensor has values: it is neither traced nor on the meta device."""
    if not isinstance(value, Tensor):
        return True
    return type(value) in (Tensor, torch.nn.Parameter) and not value.is_meta


def is_traced() -> bool:
    """Return whether ``torch.func``, forward-mode AD or a tracer has to see all operations."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def is_batched(grad: Tensor) -> bool:
    """Return whether a gradient is one of many that ``vmap`` or ``is_grads_batched`` handles."""
    return is_legacy_batchedtensor(grad) or (is_concrete(grad) and is_traced())


def is_recorded() -> bool:
    """Return whether eager code is traced, for which operators have no rules."""
    return not torch.compiler.is_compiling() and is_traced()


def _lengths(args: Sequence[Any]) -> list[int | None]:
    """Return the lengths of the arguments that are lists of tensors, None for others."""
    return [
        len(arg)
        if isinstance(arg, list | tuple) and (not arg or isinstance(arg[0], Tensor))
        else None
        for arg in args
    ]


def _tensors_of(args: Sequence[Any]) -> tuple[list[int | None], list[Any]]:
    """Return lengths and values of the arguments that are tensors or lists of them."""
    pairs = zip(_lengths(args), args, strict=True)
    found = [(n, arg) for n, arg in pairs if n is not None or isinstance(arg, Tensor)]
    return [n for n, _ in found], [arg for _, arg in found]


def _flat(lengths: Sequence[int | None], nested: Sequence[Any]) -> list[Any]:
    pairs = zip(lengths, nested, strict=True)
    return [v for length, value in pairs for v in ([value] if length is None else value)]


def _nested(lengths: Sequence[int | None], flat: Sequence[Any]) -> list[Any]:
    nested, values = [], iter(flat)
    for length in lengths:
        nested.append(next(values) if length is None else [next(values) for _ in range(length)])
    return nested
