"""A tensor-train layer by the operations that its arithmetic needs, all known to autograd.

Contracting cores and multiplying a batch by factors are operators of their own elsewhere, which
serve many layers at once, kernels and compilers. A lone layer on a small batch would spend nearly
all its time on getting to them and back.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from comera.ops.context import autocast_together, is_autocast_on, without_autocast
from comera.ops.cores import open_gate
from comera.ops.linear.tt_linear import check_width
from comera.ops.operator import is_concrete, is_traced
from comera.ops.plain_factors import multiply_pairs


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
