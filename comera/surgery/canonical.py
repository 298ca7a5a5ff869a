"""Bring tensor trains into canonical form: the ranks of a bond are the weight's singular vectors.

In canonical form, keeping a bond's first ranks loses least of the weight (docs/experiments.md).
After Vidal (quant-ph/0301063) and Oseledets (SIAM J. Sci. Comput. 33 (2011), algorithm 2).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.nn.decompose import widened
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
    if layer.is_chain:
        found = canonical([core.flatten(1, -2) for core in gated], layer.shape.split)
    else:
        found = layer.canonical_cores(gated)
    if found is None:
        return False
    made, singular_values = found
    cores = [core.flatten(1, -2) for core in _scaled_as(gated, made)]  # already so of a chain
    # Narrower bonds are filled with closed ranks: parameters keep their shapes until truncate_.
    for mine, core in zip(layer.cores, widened(cores, layer.ranks), strict=True):
        mine.copy_(core.reshape(mine.shape))
    for gate, carried in zip(layer.gates, singular_values, strict=True):
        gate.zero_()
        # Below this share of the largest, a singular value is a rounding error of float64.
        gate[: int((carried > 1e-10 * carried[0]).sum())] = 1
    return True


def canonical(cores: Sequence[Tensor], split: int) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return cores of the same product in canonical form, and each bond's singular values.

    Of at least two cores ``(left bond, mode, right bond)`` the first ``split`` become orthonormal
    over everything but their right bond, the others over everything but their left bond. Each is
    then scaled; both sides of the bond between the two parts get the roots of its singular values.
    Bonds are no wider than either side allows. None if the product is zero or not finite.
    """
    left = _orthonormal_to_the_right(cores[:split])
    right = _mirrored(_orthonormal_to_the_right(_mirrored(cores[split:])))
    # All else is orthonormal towards the middle bond, so the singular values of this matrix are
    # those of the whole weight there.
    middle = left.pop().flatten(1) @ right.pop(0).flatten(1)
    if not bool(middle.isfinite().all()) or not bool(middle.any()):
        return None
    u, s, vh = torch.linalg.svd(middle, full_matrices=False)
    left[-1] = left[-1] @ u
    right[0] = (vh @ right[0].flatten(1)).reshape(-1, *right[0].shape[1:])
    # From the middle outwards, each bond by the singular values of the one before it.
    left, before = _by_singular_vectors(left, s)
    right, behind = _by_singular_vectors(_mirrored(right), s)
    right = _mirrored(right)
    left[-1] = left[-1] * s.sqrt()
    right[0] = right[0] * s.sqrt()[:, None, None]
    return _scaled_as(cores, [*left, *right]), [*before[::-1], s, *behind]


def _orthonormal_to_the_right(cores: Sequence[Tensor]) -> list[Tensor]:
    """Return cores of the same product, orthonormal towards the right, and a last remainder."""
    done, rest = [], cores[0].new_ones(1, 1)
    for core in cores:
        core = (rest @ core.flatten(1)).reshape(-1, *core.shape[1:])
        q, rest = torch.linalg.qr(core.flatten(0, 1))
        done.append(q.reshape(core.shape[0], -1, q.shape[1]))
    return [*done, rest[:, None]]


def _by_singular_vectors(cores: Sequence[Tensor], s: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rotate inner bonds to singular vectors; return cores and, from the right, singular values."""
    cores, found = list(cores), []
    for k in range(len(cores) - 1, 0, -1):
        u, s, _ = torch.linalg.svd((cores[k] * s).flatten(1), full_matrices=False)
        cores[k] = (u.T @ cores[k].flatten(1)).reshape(-1, *cores[k].shape[1:])
        cores[k - 1] = cores[k - 1] @ u
        found.append(s)
    return cores, found


def _scaled_as(like: Sequence[Tensor], cores: Sequence[Tensor]) -> list[Tensor]:
    theirs, mine = ([core.norm().log() for core in train] for train in (like, cores))
    rest = (sum(mine) - sum(theirs)) / len(cores)
    return [core * (a - b + rest).exp() for a, b, core in zip(theirs, mine, cores, strict=True)]


def _mirrored(cores: Sequence[Tensor]) -> list[Tensor]:
    return [core.transpose(0, 2) for core in reversed(cores)]
