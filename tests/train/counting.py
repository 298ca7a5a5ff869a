"""Counts what a function would start on a GPU, from what PyTorch dispatches on a CPU."""

import contextlib

import torch
from torch._library import custom_ops
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from comera.ops import attention

PREPARE = {
    "view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "slice", "select",
    "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided",
    "_reshape_alias", "view_as", "lift_fresh", "_local_scalar_dense", "empty", "empty_like",
    "empty_strided", "new_empty", "resolve_conj", "resolve_neg", "result_type", "promote_types",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
"""Operations that compute nothing: on a GPU they would start no kernel."""


class Calls(TorchDispatchMode):
    """Counts all that autograd and Python call, views included: what the host is busy with."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Launches:
    """Counts operations that compute something, those inside this package's own ops included.

    Each counts as one launch. An operation that only calls others counts as these.

    Fused attention is counted as a GPU takes it. With a mask and dropout, in four dimensions and at
    widths that are multiples of eight, torch 2.11 to 2.13 take
    ``_scaled_dot_product_efficient_attention`` (``sdp_utils.cpp``): one kernel forward, two more
    where the mask's rows are padded to multiples of eight; at most four backward
    (``attention_backward.cu``): product and sum for ``delta``, zeros, and the kernel. Attention in
    three dimensions has no fused kernel there, and counts as all its operations.

    Attributes:
        log: Names of what was started.
    """

    def __init__(self):
        self.log = []
        self._counts = True
        self._modes = [_Attention(self), _Operations(self)]

    @property
    def count(self):
        return len(self.log)

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *problem):
        for mode in reversed(self._modes):
            mode.__exit__(*problem)

    def add(self, *names):
        if self._counts:
            self.log += names

    @contextlib.contextmanager
    def paused(self):
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before


@contextlib.contextmanager
def attention_as_on_a_card():
    """Attention takes the way that it takes on a card, wherever the tensors are."""
    before = attention._in_pieces, attention._as_one_head
    attention._in_pieces = attention._as_one_head = attention._by_torch
    try:
        yield
    finally:
        attention._in_pieces, attention._as_one_head = before


class _Operations(TorchDispatchMode):
    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        with self:
            if namespace == "comera":
                return custom_ops.OPDEFS[f"comera::{name}"]._init_fn(*args, **kwargs)
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if name not in PREPARE:
            self.launches.add(name)
        return func(*args, **kwargs)


class _Attention(TorchFunctionMode):
    def __init__(self, launches):
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args
        if any(t.dim() != 4 or t.shape[3] % 8 or t.stride(3) != 1 for t in args):
            return func(*args, **kwargs)
        mask = kwargs["attn_mask"]
        assert q.dtype == k.dtype == v.dtype  # nothing is cast
        assert mask is None or mask.dtype == q.dtype
        return _Fused.apply(self.launches, kwargs, q, k, v)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, launches, kwargs, *qkv):
        ctx.launches = launches
        mask = kwargs["attn_mask"]
        padded = mask is not None and any(stride % 8 for stride in mask.stride()[:-1])
        launches.add("attention", *(["pad", "pad"] if padded else []))
        with launches.paused(), torch.enable_grad():
            ctx.qkv = [t.detach().requires_grad_() for t in qkv]
            ctx.out = F.scaled_dot_product_attention(*ctx.qkv, **kwargs)
            return _as_on_a_gpu(ctx.out.detach())

    @staticmethod
    def backward(ctx, grad):
        if not grad.transpose(1, 2).is_contiguous():
            ctx.launches.add("clone")
        ctx.launches.add(*["attention_backward"] * 4)
        with ctx.launches.paused():
            grads = torch.autograd.grad(ctx.out, ctx.qkv, grad)
            return None, None, *map(_as_on_a_gpu, grads)


def _as_on_a_gpu(x):
    """Heads inside of positions."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
