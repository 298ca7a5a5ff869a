"""What GaLore refuses, in the words of the user, and the keys of its groups and state."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from comera.optim.projection import PROJ_TYPES, ProjType, matrix_shape, sides

DEFAULTS: dict[str, Any] = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
"""Keys of a projected group, beside ``rank``."""

OURS = "galore_"
"""Before the names of GaLore's own entries in a parameter's state."""


def check_group(group: dict[str, Any], inner: Optimizer) -> None:
    """Raise ValueError for unknown keys and settings out of range."""
    known = {*inner.defaults, "params", "name", "initial_lr", "rank", *DEFAULTS}
    unknown = sorted(set(group) - known)
    if unknown:
        raise ValueError(
            f"unknown keys {unknown} in a parameter group; {type(inner).__name__} in "
            f"GaLore takes {sorted(known - {'params'})}"
        )
    if "rank" not in group:
        misplaced = sorted(set(group) & set(DEFAULTS))
        if misplaced:
            raise ValueError(f"a parameter group has {misplaced} but no rank")
        return
    gap, scale = group.get("update_proj_gap", 1), group.get("scale", 1.0)
    if not isinstance(gap, int) or gap < 1:
        raise ValueError(f"update_proj_gap={gap!r} must be a whole number of at least 1")
    if not scale > 0:
        raise ValueError(f"scale={scale!r} must be above 0")


def projection_of(param: Tensor, group: dict[str, Any]) -> tuple[int, ProjType, tuple[int, int]]:
    """Rank, side and shape as a matrix of a parameter in a projected group.

    Raises:
        ValueError: If it is a vector, or the group's rank or side does not exist.
    """
    if param.dim() < 2:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is in a group with "
            f"rank={group['rank']}: only matrices and tensors of more dimensions are projected"
        )
    rank, proj_type = group["rank"], group.get("proj_type", "std")
    if proj_type not in PROJ_TYPES:
        raise ValueError(f"proj_type={proj_type!r} must be one of {listed(PROJ_TYPES)}")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank!r} must be a whole number of at least 1")
    return rank, proj_type, matrix_shape(param)


def check_gradient(grad: Tensor) -> None:
    """Raise RuntimeError for what cannot be projected."""
    if grad.is_sparse or grad.is_complex():
        kind = "sparse" if grad.is_sparse else "complex"
        raise RuntimeError(
            f"a {kind} gradient of shape {tuple(grad.shape)} cannot be projected: leave its "
            "parameter out of the groups with a rank"
        )


def check_fit(
    param: Tensor, group: dict[str, Any], projected: bool, entries: dict[str, Any]
) -> None:
    """Raise ValueError where a parameter's saved state has subspaces that are not of its shape."""
    there = {key.removeprefix(OURS): v for key, v in entries.items() if key.startswith(OURS)}
    there.pop("step", None)
    if not projected:
        if there:
            raise ValueError(
                f"the state holds a subspace for a parameter of shape {tuple(param.shape)}, "
                "which is not projected here"
            )
        return
    shape = matrix_shape(param)
    left, right = sides(shape, group["proj_type"])
    wanted = {}
    if left:
        wanted["left"] = (shape[0], group["rank"])
    if right:
        wanted["right"] = (group["rank"], shape[1])
    found = {side: tuple(basis.shape) for side, basis in there.items()}
    if found and found != wanted:
        raise ValueError(
            f"the state's subspaces {found} do not fit a parameter of shape "
            f"{tuple(param.shape)} at rank={group['rank']}, "
            f"proj_type={group['proj_type']!r}, which needs {wanted}"
        )


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
