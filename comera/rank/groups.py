"""Parameter groups for models with tensor-train layers."""

from typing import Any

from torch import nn

from comera.nn.module import tensor_trains
from comera.nn.targets import matches
from comera.optim.projection import matrix_shape

_PROJECTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    gate_lr: float = 1e-3,
    core_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Split the parameters for an optimizer, each once: rank gates have a rate of their own.

    Args:
        model: Any model; frozen parameters are left out.
        lr: Learning rate of everything else.
        gate_lr: Rate of the gates. It bounds how fast a rank can be pruned: under Adam a gate
            falls from one to zero in ``1 / gate_lr`` steps at best. They are never decayed.
        core_lr: Rate of the tensor-train cores; ``lr`` if None.
        weight_decay: Of dense matrices only: not of cores, biases, norms or gates.

    Returns:
        Groups with ``name``, ``params``, ``lr`` and ``weight_decay``; empty ones are left out.
    """
    layers = tensor_trains(model).values()
    kind = {id(gate): "gates" for layer in layers for gate in layer.gates}
    kind |= {id(core): "cores" for layer in layers for core in layer.cores}
    members: dict[str, list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.requires_grad:
            default = "dense" if param.dim() > 1 else "vectors"
            members.setdefault(kind.get(id(param), default), []).append(param)
    rates = {"gates": gate_lr, "cores": lr if core_lr is None else core_lr}
    return [
        {
            "name": name,
            "params": members[name],
            "lr": rates.get(name, lr),
            "weight_decay": weight_decay if name == "dense" else 0.0,
        }
        for name in ("cores", "gates", "dense", "vectors")
        if name in members
    ]


def galore_param_groups(
    model: nn.Module,
    lr: float,
    rank: int,
    *,
    target_modules: str | list[str] = "all-linear",
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
    gate_lr: float = 1e-3,
    core_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """As :func:`param_groups`, with the weights of dense layers in a group for GaLore.

    Tensor-train cores, gates, biases, norms and embeddings are never projected, nor is a weight
    that an embedding shares, nor one whose sides are not above the rank.

    Args:
        model: Any model; frozen parameters are left out.
        lr: Learning rate of everything else, the projected weights included.
        rank: Of the subspaces.
        target_modules: ``"all-linear"`` for every ``nn.Linear`` and convolution, or as in
            :class:`~comera.TTConfig`: a regular expression over the whole name, or names.
        update_proj_gap: Steps between two subspaces.
        scale: Factor of every projected step.
        proj_type: See :class:`~comera.GaLore`.
        gate_lr: See :func:`param_groups`.
        core_lr: See :func:`param_groups`.
        weight_decay: See :func:`param_groups`.

    Raises:
        ValueError: If no weight is left to project.
    """
    shared = {
        id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    projected: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        chosen = target_modules == "all-linear" or matches(name, target_modules)
        if not chosen or not isinstance(module, _PROJECTED):
            continue
        weight: nn.Parameter = module.weight  # type: ignore[assignment]
        wide_enough = min(matrix_shape(weight)) > rank
        if weight.requires_grad and id(weight) not in shared and wide_enough:
            projected[id(weight)] = weight
    if not projected:
        raise ValueError(
            f"target_modules={target_modules!r} names no dense layer with both sides above "
            f"rank={rank}"
        )
    groups = param_groups(model, lr, gate_lr=gate_lr, core_lr=core_lr, weight_decay=weight_decay)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in projected]
    galore = {
        "name": "galore", "params": list(projected.values()), "lr": lr,
        "weight_decay": weight_decay, "rank": rank, "update_proj_gap": update_proj_gap,
        "scale": scale, "proj_type": proj_type,
    }  # fmt: skip
    return [group for group in (*groups, galore) if group["params"]]
