"""What GaLore asks of its groups and state: checks, and taking them apart and together.

Make the smaller parameters that GaLore's inner optimizer trains instead of matrices.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.optim.muon import MuonAdamW
from comera.optim.projection import PROJ_TYPES, basis_shapes, low_shape, matrix_shape
from comera.optim.state_layout import COMMON_KEYS, made_for

DEFAULTS: dict[str, Any] = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
KEYS = ("rank", *DEFAULTS)
"""Settings of a projected group that the inner optimizer has no use for."""

OURS = "galore_"
"""Prefix of the names of GaLore's own entries in a parameter's state."""


def check_group(group: dict[str, Any], inner: Optimizer) -> None:
    """Raise for a parameter group that does not fit.

    Args:
        group: The group as the user wrote it.
        inner: The optimizer that takes all keys but GaLore's.

    Raises:
        ValueError: If nobody takes a key, or a setting is out of range.
    """
    known = {*inner.defaults, *COMMON_KEYS, *KEYS}
    if isinstance(inner, MuonAdamW):
        known.add("muon")
    unknown = sorted(set(group) - known)
    if unknown:
        raise ValueError(
            f"unknown keys {unknown} in a parameter group; {type(inner).__name__} in "
            f"GaLore takes {sorted(known - {'params'})}{made_for(unknown)}"
        )
    if "rank" not in group:
        misplaced = sorted(set(group) & set(KEYS))
        if misplaced:
            raise ValueError(f"a parameter group has {misplaced} but no rank")
        return
    gap, scale = group.get("update_proj_gap", 1), group.get("scale", 1.0)
    if not isinstance(gap, int) or gap < 1:
        raise ValueError(f"update_proj_gap={gap!r} must be a whole number of at least 1")
    if not scale > 0:
        raise ValueError(f"scale={scale!r} must be above 0")
    settings: dict[str, Any] = {"eps": None, **inner.defaults, **group}
    eps = settings["eps"]
    if isinstance(inner, torch.optim.Adafactor) and not eps[1] > 0:
        raise ValueError(
            f"eps={eps} must have a second number above 0: the least size of a parameter to which "
            "a projected step is relative"
        )


def check_once(params: Iterable[Any], groups: Iterable[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if a new parameter, maybe named, is there twice or in a group already.

    torch warns only of the one, and tells of the other when a stand-in has been replaced.
    """
    seen = {id(param) for group in groups for param in group["params"]}
    for one in params:
        param = one[1] if isinstance(one, tuple) else one
        if id(param) in seen:
            raise ValueError(
                f"some parameters appear in more than one parameter group, or twice in one: one "
                f"of shape {tuple(param.shape)}. Give GaLore each parameter once"
            )
        seen.add(id(param))


def check_projected(param: Tensor, rank: int, proj_type: str) -> None:
    """Raise ``ValueError`` for a parameter, rank or way that cannot be projected."""
    if param.dim() < 2:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is in a group with rank={rank}: only "
            "matrices and tensors of more dimensions are projected"
        )
    if proj_type not in PROJ_TYPES:
        raise ValueError(f"proj_type={proj_type!r} must be one of {quoted(PROJ_TYPES)}")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank!r} must be a whole number of at least 1")


def check_gradient(grad: Tensor) -> None:
    """Raise ``RuntimeError``, as torch's optimizers do, for a gradient that is not a matrix."""
    if grad.is_sparse or grad.is_complex():
        kind = "sparse" if grad.is_sparse else "complex"
        raise RuntimeError(
            f"a {kind} gradient of shape {tuple(grad.shape)} cannot be projected: leave its "
            "parameter out of the groups with a rank"
        )


def check_subspaces(param: Tensor, group: dict[str, Any] | None, found: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` if subspaces to load do not fit.

    Args:
        param: The parameter whose subspaces they are.
        group: The parameter's group; None if it is not projected.
        found: ``left`` and ``right`` bases.
    """
    if group is None:
        if found:
            raise ValueError(
                f"the state holds a subspace for a parameter of shape {tuple(param.shape)}, "
                "which is not projected here"
            )
        return
    rank = group["rank"]
    wanted = basis_shapes(matrix_shape(param), rank, group["proj_type"])
    shapes = {side: tuple(basis.shape) for side, basis in found.items()}
    if shapes and shapes != wanted:
        raise ValueError(
            f"the state's subspaces {shapes} do not fit a parameter of shape "
            f"{tuple(param.shape)} at rank={rank}, proj_type={group['proj_type']!r}, which needs "
            f"{wanted}"
        )


def check_not_left_out(states: list[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if none of the projected parameters has more than a number of steps.

    :mod:`torch.distributed.checkpoint` loads what an optimizer has after a step without gradients,
    which finds no subspace, and leaves out the rest.
    """
    steps = [int(state.get(f"{OURS}step", 0)) for state in states]
    if max(steps, default=0) > 1 and all(set(state) <= {f"{OURS}step"} for state in states):
        raise ValueError(
            f"the state is of {max(steps)} steps, and no subspace and no moments are in it. "
            "torch.distributed.checkpoint leaves them out as it loads: read it with torch.load, or "
            "save and load by comera.train.run_state"
        )


def check_projects_alike(saved: list[dict[str, Any]], mine: list[dict[str, Any]]) -> None:
    """Raise ``ValueError`` if groups to load project what these do not, or the other way round."""
    for number, (theirs, ours) in enumerate(zip(saved, mine, strict=False)):
        if ("rank" in theirs) != ("rank" in ours):
            there, here = ("is", "is not") if "rank" in theirs else ("is not", "is")
            raise ValueError(
                f"group {number} {there} projected in the state and {here} here: it comes from "
                "another optimizer, or from GaLore with other groups"
            )


def quoted(names: Iterable[str]) -> str:
    """Put names in quotes, for an error."""
    return ", ".join(map(repr, names))


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups as torch has them: parameters without a group are one together."""
    given = list(params)
    if not any(isinstance(one, dict) for one in given):
        return [{"params": given}]
    groups = [one if isinstance(one, dict) else {"params": [one]} for one in given]
    return [{**group, "params": as_list(group["params"])} for group in groups]


def as_list(params: Any) -> list[Tensor]:
    """Return the parameters of one group in a list."""
    return [params] if isinstance(params, Tensor) else list(params)


def replaced(params: Iterable[Any], by: Callable[[Tensor], Tensor]) -> list[Any]:
    """Replace each parameter of one group; of ``(name, parameter)`` the name stays."""
    return [(one[0], by(one[1])) if isinstance(one, tuple) else by(one) for one in params]


def merged(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return a group with all settings: the inner optimizer's, ours, and what the user said."""
    return {**theirs, **(DEFAULTS if "rank" in mine else {}), **mine}


def joined(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return our state dict with the inner optimizer's state beside the subspaces."""
    state = {number: dict(entries) for number, entries in theirs["state"].items()}
    for number, entries in mine["state"].items():
        state.setdefault(number, {}).update(entries)
    return {**mine, "state": state}


def parted(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the inner optimizer's state dict, and what is ours by number of the parameter."""
    theirs: dict[int, dict[str, Any]] = {}
    ours: dict[int, dict[str, Any]] = {}
    for number, entries in state_dict["state"].items():
        for key, value in entries.items():
            (ours if key.startswith(OURS) else theirs).setdefault(number, {})[key] = value
    groups = [
        {key: value for key, value in group.items() if key not in KEYS}
        for group in state_dict["param_groups"]
    ]
    return {"state": theirs, "param_groups": groups}, ours


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
