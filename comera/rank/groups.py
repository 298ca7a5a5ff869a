"""Parameter groups for models with tensor-train layers."""

from typing import Any

from torch import nn

from comera.nn.module import tensor_trains


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
