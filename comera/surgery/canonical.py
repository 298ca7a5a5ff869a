"""Bring tensor trains into canonical form: the ranks of a bond are the weight's singular vectors.

In canonical form, keeping a bond's first ranks loses least of the weight (docs/experiments.md).
After Vidal (quant-ph/0301063) and Oseledets (SIAM J. Sci. Comput. 33 (2011), algorithm 2).
"""

import torch
import torch.distributed as dist
from torch import nn

from comera.nn.decompose import scaled_as, widened
from comera.nn.module import TensorTrainModule, check_unsharded, tensor_trains
from comera.optim.state_layout import AnyOptimizer, unwrap_separable
from comera.surgery.truncate import reset_state_


@torch.no_grad()
def canonicalize_(
    model: nn.Module,
    optimizer: AnyOptimizer | None = None,
    *,
    process_group: "dist.ProcessGroup | None" = None,
) -> None:
    """Bring all tensor trains into canonical form, in place; the model's function does not change.

    The ranks of every bond become its singular vectors, largest first. Cores become orthonormal
    towards the middle bond, times a factor that keeps the proportions of their norms, so that
    learning rates still suit them. Gates are multiplied into cores and set to one. Ranks of norm
    zero are pruned, except one for each bond. A layer with a frozen core or gate stays as it is.

    Args:
        model: The model with the tensor-train layers.
        optimizer: The optimizer, whose state of cores and gates is reset, as are gradients.
            Averages of weights that are kept elsewhere must be reset too.
        process_group: Processes that hold the same model and call this together: all get the first
            one's result.

    Raises:
        ValueError: If the optimizer is an LBFGS that has stepped, or a tensor train is sharded, as
            by ``fully_shard``. Nothing is changed.
    """
    check_unsharded(model, "canonicalize_", written=True)
    unwrapped = unwrap_separable(optimizer)
    for layer in tensor_trains(model).values():
        params = [*layer.cores, *layer.gates]
        if not all(param.requires_grad for param in params) or not _canonicalize_layer(layer):
            continue
        for param in params:
            if process_group is not None:
                dist.broadcast(param.data, group=process_group, group_src=0)
            reset_state_(param, unwrapped)


def _canonicalize_layer(layer: TensorTrainModule) -> bool:
    """Bring one layer into canonical form; return False if its weight is zero or not finite."""
    if 0 in layer.ranks:
        return False
    # On the CPU in float64: it happens once in a run, and not every device has float64.
    gated = [core.detach().to("cpu", torch.float64) for core in layer.gated_cores()]
    found = layer.canonical_cores(gated)
    if found is None:
        return False
    made, singular_values = found
    cores = [core.flatten(1, -2) for core in scaled_as(gated, made)]
    # Narrower bonds are filled with closed ranks: parameters keep their shapes until truncate_.
    for mine, core in zip(layer.cores, widened(cores, layer.ranks), strict=True):
        mine.copy_(core.reshape(mine.shape))
    for gate, carried in zip(layer.gates, singular_values, strict=True):
        gate.zero_()
        # Below this share of the largest, a singular value is a rounding error of float64.
        gate[: int((carried > 1e-10 * carried[0]).sum())] = 1
    return True
