"""Split the parameters of models with tensor-train layers into optimizer groups.

The factor of a layer's learning rate (``scale_rates``) follows from shapes. With K cores of
spectral norm g each, a step of norm s of one core moves the contracted weight by
``s * g ** (K - 1)``. Activations need a change of spectral norm ``sqrt(out / in)`` at any width
(Yang, Simon and Bernstein, arXiv 2310.17813), and widths 128 to 512 need one that also falls with
the root of ``in`` (``docs/experiments.md``). The factor is this change divided by a step's.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comera.nn.linear import CompressedLinear
from comera.nn.module import check_model, tensor_trains
from comera.nn.targets import matches
from comera.optim.galore import matrix_shape
from comera.optim.muon import STEP_SIZE, block_step, core_matrix
from comera.shapes import check_whole_numbers, is_number

_TARGET, _OF_BLOCKS, _AT_WIDTH = 12.0, 6.0, 256
"""Spectral norm of a step of a square layer of this width, in learning rates, all cores together:
about that of a chain with bonds of 8, 16, 52, 16 and 8 without a factor. Blocks do best at half."""


def contracted_scale(layer: CompressedLinear) -> float:
    """Return the factor of the learning rate of a layer's cores.

    It depends on modes, initial ranks and the norm of fresh cores; truncation does not change it.
    """
    started = layer.shape.of_ranks(layer.start_ranks)
    if 0 in started.ranks:  # a weight that has vanished moves by no rate
        return 1.0
    shapes = [torch.Size(shape) for shape in started.core_shapes]
    if len(shapes[0]) == 5:  # blocks, as Muon tells them
        rank = min(layer.in_features, layer.out_features)
        target, steps = _OF_BLOCKS, [block_step(shape) for shape in shapes]
    else:
        rank = started.ranks[started.split - 1]
        target, steps = _TARGET, [math.sqrt(max(core_matrix(shape))) for shape in shapes]
    norm = math.sqrt(layer.out_features / (3 * rank))  # of the weight, see TTLinear
    others = norm ** (1 - 1 / len(shapes))
    # Changes by different cores hardly agree in direction: their squares add up.
    moved = STEP_SIZE * math.sqrt(sum(step * step for step in steps)) * others
    return target * math.sqrt(_AT_WIDTH * layer.out_features) / layer.in_features / moved


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    gate_lr: float = 1e-3,
    core_lr: float | None = None,
    weight_decay: float | None = None,
    muon_modules: str | list[str] | None = None,
    scale_rates: Literal["contracted"] | None = None,
) -> list[dict[str, Any]]:
    """Split the parameters into optimizer groups; rank gates get their own rate.

    Args:
        model: Any model; frozen parameters are left out.
        lr: Learning rate of everything else.
        gate_lr: Rate of the gates, which are never decayed. Under Adam a gate falls from one to
            zero, and its rank is pruned, in ``1 / gate_lr`` steps at best;
            :attr:`TwoStage.gate_lr <comera.TwoStage>` is a good one.
        core_lr: Rate of the tensor-train cores; ``lr`` if None.
        weight_decay: Decay of dense matrices only: not of cores, biases, norms or gates. If None,
            the decay given to the optimizer.
        muon_modules: Dense layers whose weights :class:`~comera.MuonAdamW` steps by Muon like
            cores, at ``core_lr``: ``"all-linear"``, a regular expression or names, as in
            :class:`~comera.TTConfig`. Embeddings and output layers train better without Muon.
        scale_rates: ``"contracted"`` multiplies the rate of each linear layer's cores by a factor
            from its widths, modes and ranks, so that a step moves the contracted weight equally
            at every order and rank, and less in wider layers; the factor is about 1 at width 256.
            None leaves all cores at one rate. Tables and hot rows keep their rate.

    Returns:
        Groups with ``name``, ``params``, ``lr`` and ``weight_decay``; groups of dense matrices have
        no ``weight_decay`` if that is None. Empty groups are left out. With ``scale_rates`` each
        factor has a group ``"cores"``, with the factor as ``rate_scale``.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If a rate or the decay is negative or no number, ``muon_modules`` names no dense
            layer, or ``scale_rates`` is neither of the two.
    """
    layers = tensor_trains(model).values()
    given: dict[str, Any] = {
        "lr": lr,
        "gate_lr": gate_lr,
        "core_lr": core_lr,
        "weight_decay": weight_decay,
    }
    for name, number in given.items():  # optimizers do not check them in groups
        if number is None and name not in ("lr", "gate_lr"):
            continue
        if not isinstance(number, Tensor) and not (is_number(number) and number >= 0):
            raise ValueError(f"{name}={number!r} must be a number from 0")
    if scale_rates not in ("contracted", None):
        raise ValueError(f"scale_rates={scale_rates!r} must be 'contracted', or None for one rate")
    kind = {id(gate): "gates" for layer in layers for gate in layer.gates}
    kind |= {id(core): "cores" for layer in layers for core in layer.cores}
    if muon_modules is not None:
        weights = _dense_weights(model, muon_modules)
        if not weights:
            raise ValueError(f"muon_modules={muon_modules!r} names no dense layer that is trained")
        kind |= {id(weight): "matrices" for weight in weights}
    scale_of: dict[int, float] = {}  # tables keep their rate
    scaled = scale_rates is not None
    for layer in layers:
        if scaled and isinstance(layer, CompressedLinear):
            scale = float(f"{contracted_scale(layer):.3g}")  # few groups: neighbours are as good
            for core in layer.cores:
                scale_of.setdefault(id(core), scale)
    members: dict[str, dict[float, list[nn.Parameter]]] = {}
    for param in model.parameters():
        if param.requires_grad:
            name = kind.get(id(param), "dense" if param.dim() > 1 else "vectors")
            scale = scale_of.get(id(param), 1.0)
            members.setdefault(name, {}).setdefault(scale, []).append(param)
    core_lr = lr if core_lr is None else core_lr
    rates = {"gates": gate_lr, "cores": core_lr, "matrices": core_lr}
    return [
        {
            "name": name,
            "params": params,
            "lr": rates.get(name, lr),
            **_decay(weight_decay if name in ("dense", "matrices") else 0.0),
            **({"muon": True} if name == "matrices" else {}),
            **({"lr": scale * core_lr, "rate_scale": scale} if scaled and name == "cores" else {}),
        }
        for name in ("cores", "gates", "matrices", "dense", "vectors")
        for scale, params in members.get(name, {}).items()
    ]


def _decay(weight_decay: float | None) -> dict[str, float]:
    return {} if weight_decay is None else {"weight_decay": weight_decay}


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
    weight_decay: float | None = None,
    scale_rates: Literal["contracted"] | None = None,
) -> list[dict[str, Any]]:
    """Split the parameters as :func:`param_groups` does, with dense weights in a group for GaLore.

    Tensor-train cores, gates, biases, norms and embeddings are never projected, nor is a weight
    that an embedding shares, nor one with a side that is not above the rank.

    Args:
        model: Any model; frozen parameters are left out.
        lr: Learning rate of everything else, the projected weights included.
        rank: Rank of the subspaces.
        target_modules: ``"all-linear"`` for every ``nn.Linear`` and convolution, or as in
            :class:`~comera.TTConfig`: a regular expression over the whole name, or names.
        update_proj_gap: Steps between two subspaces.
        scale: Factor of every projected step.
        proj_type: Sides to project, as in :class:`~comera.GaLore`.

    Other arguments are those of :func:`param_groups`. Raises ``ValueError`` if no weight is left to
    project.
    """
    check_model(model)
    check_whole_numbers(rank=rank)
    projected = {
        id(weight): weight
        for weight in _dense_weights(model, target_modules)
        if min(matrix_shape(weight)) > rank
    }
    if not projected:
        raise ValueError(
            f"target_modules={target_modules!r} names no dense layer with both sides above "
            f"rank={rank}"
        )
    groups = param_groups(
        model, lr, gate_lr=gate_lr, core_lr=core_lr, weight_decay=weight_decay,
        scale_rates=scale_rates,
    )  # fmt: skip
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in projected]
    galore = {
        "name": "galore", "params": list(projected.values()), "lr": lr,
        **_decay(weight_decay), "rank": rank, "update_proj_gap": update_proj_gap,
        "scale": scale, "proj_type": proj_type,
    }  # fmt: skip
    return [group for group in (*groups, galore) if group["params"]]


def _dense_weights(model: nn.Module, modules: str | list[str]) -> list[Tensor]:
    """Return the trained weights of linear and convolution layers that no embedding shares."""
    shared = {
        id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    found: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        is_matrix = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if is_matrix and (modules == "all-linear" or matches(name, modules)):
            weight = module.weight
            if weight.requires_grad and id(weight) not in shared:
                found[id(weight)] = weight
    return list(found.values())
