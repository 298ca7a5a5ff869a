"""Make the smaller parameters that GaLore's inner optimizer trains instead of matrices."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comera.optim.galore_parts import KEYS, check_projected, replaced
from comera.optim.projection import low_shape, matrix_shape


def for_inner(group: dict[str, Any], stand_ins: dict[Tensor, nn.Parameter]) -> dict[str, Any]:
    """Return the inner optimizer's group: stand-ins for what is projected, no keys of ours.

    Args:
        group: The group as the user wrote it.
        stand_ins: Takes up the new stand-ins by their parameters.
    """
    own = {key: value for key, value in group.items() if key not in KEYS}
    if "rank" not in group:
        return own
    make = partial(_make_stand_in, group=group, stand_ins=stand_ins)
    return {**own, "params": replaced(group["params"], make)}


def _make_stand_in(
    param: Tensor, group: dict[str, Any], stand_ins: dict[Tensor, nn.Parameter]
) -> Tensor:
    """Return what the inner optimizer is to train: the parameter itself if it is not projected."""
    proj_type = group.get("proj_type", "std")
    check_projected(param, group["rank"], proj_type)
    shape = matrix_shape(param)
    if group["rank"] >= min(shape):
        return param
    size = low_shape(shape, group["rank"], proj_type)
    wide = torch.promote_types(param.dtype, torch.float32)
    stand_in = nn.Parameter(torch.zeros(size, device=param.device, dtype=wide))
    release(stand_in)
    stand_ins[param] = stand_in
    return stand_in


def release(stand_in: nn.Parameter) -> None:
    """Keep nothing between two steps but its shape, and what the optimizer keeps."""
    stand_in.data = stand_in.data.new_zeros(()).expand(stand_in.shape)
    stand_in.grad = None
