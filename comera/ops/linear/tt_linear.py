"""Multiply by matrices stored as tensor trains, without ever forming them.

The input cores contract to a narrow ``(I, R)`` matrix and the output cores to ``(R, O)``; the batch
meets only those two. Cost ``B * R * (I + O)`` instead of ``B * I * O``; the backward pass keeps
x, the narrow ``x @ left`` and the factors, nothing else (CoMERA, arXiv 2405.14377, section 4).

A tensor-train layer by the operations that its arithmetic needs, all known to autograd.

Contracting cores and multiplying a batch by factors are operators of their own elsewhere, which
serve many layers at once, kernels and compilers. A lone layer on a small batch would spend nearly
all its time on getting to them and back.

The thin products of a batch with the left factors of several layers.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import autocast_together, is_autocast_on, products_are_fp8, without_autocast
from comera.ops.contract_cores import contract_cores, multiply_pairs
from comera.ops.cores import contract_chain, open_gate
from comera.ops.dispatch import Case, Times, Ways
from comera.ops.factors import Factors, last_of_each, set_ones_
from comera.ops.operator import is_concrete, is_traced, operator
from comera.ops.product import affine, is_torchs, product


def tt_linear(
    x_BI: Tensor,
    cores: Sequence[Tensor],
    split: int,
    bias_O: Tensor | None = None,
    *,
    gates: Sequence[Tensor] = (),
    threshold: float = 0.0,
    in_features: int | None = None,
    out_features: int | None = None,
) -> Tensor:
    """Return ``x @ W.T + bias`` where ``W`` is a tensor train.

    Args:
        x_BI: ``(*, in_features)``; any leading dimensions, empty ones included.
        cores: ``(left bond, mode, right bond)`` each, the first and last bond being 1.
        split: How many of the cores carry the input.
        bias_O: ``(out_features,)`` or None.
        gates: One vector for each inner bond, or none at all.
        threshold: A gate at or below it is a pruned rank.
        in_features: Width of x if the modes multiply to more: x is zero-padded, without a copy.
        out_features: Width of the result if the modes multiply to more: it is cut.

    Returns:
        ``(*, out_features)`` in the dtype of x; under autocast in autocast's dtype.

    Raises:
        ValueError: If x has another width than the layer.
    """
    biases = [] if bias_O is None else [bias_O]
    left_GIR, right_GRO = contract_cores(list(cores), list(gates), biases, 1, split, threshold)
    left_IR, right_RO = left_GIR[0, :in_features], right_GRO[0, :, :out_features]
    return factorized_linears(x_BI, [left_IR], [right_RO], bias_O is not None)[0]


def factorized_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Compute ``x @ left @ right`` for each pair of factors, all in one pass over x.

    Args:
        x_BI: ``(*, I)``.
        lefts: ``(I, R)`` each, as :func:`~comera.ops.contract_cores.contract_cores` makes them.
        rights: ``(R, O)`` each; O may differ.
        bias: Whether the last row of each right factor is a bias.

    Returns:
        ``(*, O)`` for each pair, at autocast's dtype where autocast is on. As in torch's own
        products, float64 is left as it is.

    Raises:
        ValueError: If x has another width than the layer.
    """
    check_width(x_BI, lefts[0].shape[0])
    x_BI, lefts, rights = autocast_together(x_BI, lefts, rights)
    return _LINEARS(x_BI, lefts, rights, bias)


def _sample(new: Callable[..., Any]) -> tuple[Any, ...]:
    return new(1024, 768), [new(768, 32)], [new(32, 768)], True


def _case(x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], *_: Any) -> Case:
    """Time depends on rows, on the widths of the first pair, and on how many share the input."""
    wide, rank = lefts[0].shape
    rows = x_BI.numel() // max(1, wide)
    return x_BI, x_BI.dtype, (rows, wide, rights[0].shape[1], rank, len(lefts))


_LINEARS = Ways("linears", _sample, Times("linears", _case))


def _not_fp8(x_BI: Tensor, *_: Any) -> str | None:
    if not products_are_fp8():
        return "fp8 is not asked for"
    if x_BI.dtype != torch.bfloat16:
        return "the batch is not bfloat16"
    return None if x_BI.numel() else "the batch is empty"


@_LINEARS.way("fp8", _not_fp8, timed_as="fp8")
def _in_fp8(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    from comera.ops.linear.fp8 import fp8_linears  # few cards ever multiply so

    return fp8_linears(x_BI, lefts, rights, bias)


def _not_torchs(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> str | None:
    widest = max(part.shape[1] for part in (*lefts, *rights))
    return None if is_torchs(x_BI, widest) else "oneDNN multiplies faster"


@_LINEARS.way("plain", _not_torchs, timed_as="plain")
def _plainly(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Multiply by operations that autograd knows: it calls them without a detour over Python."""
    x = x_BI if x_BI.dim() == 2 else x_BI.reshape(-1, x_BI.shape[-1])
    left, widths = _beside(lefts), [left.shape[1] for left in lefts]
    t = torch.addmm(last_of_each(widths, x), x, left) if bias else torch.mm(x, left)
    ts = [t] if len(lefts) == 1 else t.split(widths, 1)
    ys = [torch.mm(each, right) for each, right in zip(ts, rights, strict=True)]
    return ys if x_BI.dim() == 2 else [y.view(*x_BI.shape[:-1], y.shape[1]) for y in ys]


@_LINEARS.way("one operator", timed_as="one operator")
def _by_operator(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    return _factorized_linears(x_BI, lefts, rights, bias)[:-1]


def check_width(x_BI: Tensor, width: int) -> None:
    """Raise ``ValueError`` if x has another width than the layer."""
    if x_BI.dim() == 0:
        raise ValueError(f"the input is one number, but this layer takes tensors of width {width}")
    if x_BI.shape[-1] != width:
        raise ValueError(
            f"the input has width {x_BI.shape[-1]} (shape {tuple(x_BI.shape)}), "
            f"but this layer takes {width}"
        )


def reconstructed_linear(x_BI: Tensor, factors: Factors) -> Tensor:
    """Do the same as :func:`factorized_linears` of one pair, through the dense matrix.

    The faster way where the bond is so large that ``R * (I + O) > I * O`` and the batch is large.
    """
    left_IR, right_RO, has_bias = factors
    check_width(x_BI, left_IR.shape[0])
    weight_IO = affine(left_IR, right_RO)  # a bias' row of right meets a column of zeros in left
    y = affine(x_BI.reshape(-1, x_BI.shape[-1]), weight_IO, right_RO[-1] if has_bias else None)
    return y.view(*x_BI.shape[:-1], y.shape[-1])


@operator("comera::factorized_linears")
def _factorized_linears(
    x_BI: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    """Return every ``y``, then ``t = x @ left`` of all pairs side by side, with ones for a bias."""
    *ys, t = _multiply(x_BI.reshape(-1, x_BI.shape[-1]), lefts, rights, bias)
    return [*(y.view(*x_BI.shape[:-1], y.shape[1]) for y in ys), t]


def _multiply(
    x: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], bias: bool
) -> list[Tensor]:
    t = product(x, _beside(lefts)).contiguous()  # as all results are promised to be
    ys, end = [], 0
    for right in rights:
        begin, end = end, end + right.shape[0]
        tj = t[:, begin:end]
        set_ones_(tj, bias)
        ys.append(product(tj.contiguous(), right))
    return [*ys, t]


@_factorized_linears.register_fake
def _(x_BI, lefts, rights, bias):
    batch = x_BI.shape[:-1]
    ys = [x_BI.new_empty(*batch, right.shape[1]) for right in rights]
    return [*ys, x_BI.new_empty(math.prod(batch), sum(right.shape[0] for right in rights))]


def _setup_context(ctx, inputs, output) -> None:
    x_BI, lefts, rights, _ = inputs
    ctx.count = len(lefts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x_BI, output[-1], *lefts, *rights)


def _backward(ctx, grads: Sequence[Tensor | None]):
    x_BI, t, *factors = ctx.saved_tensors
    lefts, rights = factors[: ctx.count], factors[ctx.count :]
    *grad_ys, grad_t = grads
    need_x, need_lefts, need_rights, _ = ctx.needs_input_grad
    needs = need_x, any(need_lefts), any(need_rights)
    with without_autocast(x_BI):
        x = x_BI.reshape(-1, x_BI.shape[-1])
        gys = [
            x.new_zeros(x.shape[0], right.shape[1])
            if gy is None
            else gy.reshape(-1, gy.shape[-1]).to(x.dtype)
            for gy, right in zip(grad_ys, rights, strict=True)
        ]
        found = _gradients(x, lefts, rights, gys, grad_t, t, *needs)
        grad_x, *grads_of_factors = found
        grad_lefts = grads_of_factors[: ctx.count] if needs[1] else [None] * ctx.count
        grad_rights = grads_of_factors[ctx.count :] if needs[2] else [None] * ctx.count
        return grad_x.reshape(x_BI.shape) if need_x else None, grad_lefts, grad_rights, None


def _gradients(
    x: Tensor,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
    gys: Sequence[Tensor],
    grad_t: Tensor | None,
    t: Tensor,
    need_x: bool,
    need_lefts: bool,
    need_rights: bool,
) -> list[Tensor]:
    """Return those of x, then of all left and all right factors; empty ones for what is not wanted.

    ``grad_t`` is given only where this backward pass is itself differentiated.
    """
    u = _beside([product(gy, right.T) for gy, right in zip(gys, rights, strict=True)])
    if grad_t is not None:
        u = u + grad_t
    widths = [right.shape[0] for right in rights]
    nothing = [x.new_empty(0)] * len(lefts)
    return [
        product(u, _beside(lefts).T) if need_x else x.new_empty(0),
        # Transposed: faster that way.
        *([g.T for g in product(u.T, x).split(widths)] if need_lefts else nothing),
        *(
            [product(tj.T, gy) for tj, gy in zip(t.split(widths, 1), gys, strict=True)]
            if need_rights
            else nothing
        ),
    ]


_factorized_linears.register_autograd(_backward, setup_context=_setup_context)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def tt_to_dense(cores: Sequence[Tensor], split: int) -> Tensor:
    """Contract all cores of a tensor train to its ``(out, in)`` matrix; differentiable."""
    left = contract_chain(cores[:split])
    right = contract_chain(cores[split:])
    return (left[0] @ right[..., 0]).T


def plain_linear(
    x_BI: Tensor,
    cores: Sequence[Tensor],
    gates: Sequence[Tensor],
    bias_O: Tensor | None,
    split: int,
    threshold: float,
    in_features: int,
    out_features: int,
) -> Tensor:
    """Return ``x @ W.T + bias`` where ``W`` is a tensor train.

    Args:
        x_BI: ``(*, in_features)``.
        cores: ``(left bond, mode, right bond)`` each, the first and last bond being 1.
        gates: One vector for each inner bond, float32 or wider.
        bias_O: ``(out_features,)`` or None.
        split: How many of the cores carry the input.
        threshold: A gate at or below it is a pruned rank.
        in_features: Width of x, at most what the input modes multiply to.
        out_features: Width of the result, likewise.

    Returns:
        ``(*, out_features)``, at autocast's dtype where autocast is on. It can be differentiated as
        often as one likes.

    Raises:
        ValueError: If x has another width than the layer.
    """
    if is_autocast_on(x_BI):
        with without_autocast(x_BI):
            left_IR, right_RO = _factors(cores, gates, split, threshold)
        biases = [] if bias_O is None else [bias_O]
        x_BI, (left_IR, right_RO), biases = autocast_together(x_BI, [left_IR, right_RO], biases)
        bias_O = biases[0] if biases else None
    else:
        left_IR, right_RO = _factors(cores, gates, split, threshold)
    if left_IR.shape[0] != in_features:
        left_IR = left_IR[:in_features]
    if right_RO.shape[1] != out_features:
        right_RO = right_RO[:, :out_features]
    check_width(x_BI, in_features)
    flat = x_BI.dim() == 2
    t = torch.mm(x_BI if flat else x_BI.reshape(-1, in_features), left_IR)
    y = torch.mm(t, right_RO) if bias_O is None else torch.addmm(bias_O, t, right_RO)
    return y if flat else y.view(*x_BI.shape[:-1], out_features)


def _factors(
    cores: Sequence[Tensor], gates: Sequence[Tensor], split: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """Contract cores to ``(I, R)`` and ``(R, O)``, narrow dtypes in that of the gates."""
    last, wide = cores[-1], gates[0].dtype
    if not _are_all_open(gates, threshold):
        gates = [open_gate(gate, threshold) for gate in gates]
    gated = multiply_pairs(cores[:-1], gates)
    if last.dtype == wide:
        gated.append(last)
        return _from_left(gated[:split]), _from_right(gated[split:])
    gated.append(last.to(wide))
    return _from_left(gated[:split]).to(last.dtype), _from_right(gated[split:]).to(last.dtype)


def _are_all_open(gates: Sequence[Tensor], threshold: float) -> bool:
    """Say whether :func:`open_gate` is sure to change no gate.

    To read so few numbers takes an eighth of the time that as many operations of autograd take.
    False where they cannot be read, or are others when what is recorded now is run again.
    """
    if not (gates[0].is_cpu and is_concrete(gates[0])) or is_traced():
        return False
    surely = 2 * threshold  # which may be rounded up to the dtype of the gates
    return min(chain.from_iterable(map(Tensor.tolist, gates)), default=1.0) > surely


def _from_left(cores: Sequence[Tensor]) -> Tensor:
    """Contract the cores of the input to ``(I, R)``."""
    made = cores[0].squeeze(0)
    rows = made.shape[0]
    for core in cores[1:]:
        _, modes, bond = core.shape
        rows *= modes
        made = torch.mm(made, core.flatten(1)).view(rows, bond)
    return made


def _from_right(cores: Sequence[Tensor]) -> Tensor:
    """Contract the cores of the output to ``(R, O)``."""
    made = cores[-1].squeeze(2)
    columns = made.shape[1]
    for core in cores[-2::-1]:
        bond, modes, _ = core.shape
        columns *= modes
        made = torch.mm(core.flatten(0, 1), made).view(bond, columns)
    return made


def times_left(x: Tensor, lefts: Sequence[Tensor], bias: bool) -> Tensor:
    """Return all ``x @ left`` side by side, ones in the last column of each if there is a bias."""
    left = lefts[0] if len(lefts) == 1 else torch.cat(list(lefts), 1)
    if not bias:
        return affine(x, left)
    return affine(x, left, last_of_each([each.shape[1] for each in lefts], x))
