"""The optimizer of a run, by its name in the settings, with the keys that belong to it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from comera.extras import did_you_mean
from comera.optim.came import CAME
from comera.optim.galore import GaLore, GaLoreAdamW8bit
from comera.optim.groups import galore_param_groups, param_groups
from comera.optim.muon import MuonAdamW


@dataclass
class OptimizerConfig:
    """The optimizer and its schedule. ``optimizer: came`` is short for its name alone.

    What is null is the chosen optimizer's default; a key that it does not take is refused.

    Args:
        name: adamw, muon, adamw8bit, adafactor, sgd, came, came8bit, galore_adamw,
            galore_adamw8bit or galore_adafactor. The names with adamw8bit need torchao. muon is
            ``comera.MuonAdamW``, muon for the cores and adamw for everything else. By default
            muon in a run with a section ``tensorize`` (``docs/experiments.md``), else adamw.
        lr: Peak learning rate; by default 5e-4 for adamw, 7e-4 for muon, 5e-4 for came, 1e-2 for
            adafactor, 0.1 for sgd, and 2e-3 for galore_adamw, whose steps are multiplied by
            ``scale``.
        dense_lr: Peak rate of the dense twin; ``lr`` if not given.
        core_lr: Peak rate of the tensor-train cores; ``lr`` if not given.
        scale_rates: contracted multiplies the rate of each linear layer's cores by a factor from
            its shape, so that one rate suits widths, orders and ranks alike; see
            ``comera.param_groups``. By default all cores have one rate.
        gate_lr: Constant rate of the rank gates; by default 2e-3, or what lets a gate fall from
            one to zero in four fifths of the late stage, if that is more.
        weight_decay: Decay of dense matrices only.
        betas: Decay rates of the moments, for adamw and came; came's third one, of the confidence,
            is 0.9999 where two are given.
        eps: A number for adamw; two for came and adafactor, see ``comera.CAME`` and
            ``comera.GaLoreAdafactor``.
        bias_correction: Whether came takes steps of the size of the rate from the first on, see
            ``comera.CAME``; true if not given.
        clip_threshold: Largest root mean square of an update, for came and adafactor.
        beta2_decay: Power of the step by which the moments of adafactor slow down.
        momentum: Momentum of sgd and muon.
        rank: Rank of the subspaces, for galore; a quarter of ``model.d_model`` if not given, about
            what its authors take.
        update_proj_gap: Steps between two subspaces, for galore.
        scale: Factor of every projected step, for galore.
        proj_type: How to project, for galore; see ``comera.GaLore``.
        target_modules: Which dense layers to project, for galore, or to step by muon like cores,
            by default none; a regular expression or names.
        in_backward: Step each parameter inside backward and free its gradient at once, see
            ``comera.OptimizerInBackward``. Needs ``train.clip_norm: null``.
        warmup_share: Share of all steps with a rising rate.
        schedule: How the rate falls afterwards, to zero.
    """

    name: str | None = None
    lr: float | None = None
    dense_lr: float | None = None
    core_lr: float | None = None
    scale_rates: Literal["contracted"] | None = None
    gate_lr: float | None = None
    weight_decay: float = 0.01
    betas: tuple[float, float] | tuple[float, float, float] | None = None
    eps: float | tuple[float | None, float] | None = None
    bias_correction: bool | None = None
    clip_threshold: float | None = None
    beta2_decay: float | None = None
    momentum: float | None = None
    rank: int | None = None
    update_proj_gap: int | None = None
    scale: float | None = None
    proj_type: str | None = None
    target_modules: str | list[str] | None = None
    in_backward: bool = False
    warmup_share: float = 0.05
    schedule: Literal["linear", "cosine", "constant"] = "linear"


@dataclass(frozen=True)
class _Choice:
    """One name: its class, and what it takes with the defaults; ``rank`` makes it a GaLore."""

    make: Callable[..., Optimizer]
    defaults: dict[str, Any]


def _adafactor(groups: Any, clip_threshold: float, **settings: Any) -> Optimizer:
    return torch.optim.Adafactor(groups, d=clip_threshold, **settings)


def _galore_adafactor(groups: Any, clip_threshold: float, **settings: Any) -> Optimizer:
    return GaLore(groups, torch.optim.Adafactor, d=clip_threshold, **settings)


def _fused_adamw(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    return torch.optim.AdamW(groups, fused=_can_fuse(groups), **settings)


def _galore_adamw(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    return GaLore(groups, torch.optim.AdamW, fused=_can_fuse(groups), **settings)


def _muon(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    return MuonAdamW(groups, fused=_can_fuse(groups), **settings)


def _can_fuse(groups: list[dict[str, Any]]) -> bool:
    return not groups[0]["params"][0].is_meta  # torch has no such kernel there


def _adamw8bit(groups: Any, **settings: Any) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(groups, **settings)


_ADAM = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8}
_CAME = {
    "lr": 5e-4, "betas": (0.9, 0.999, 0.9999), "eps": (1e-30, 1e-16), "clip_threshold": 1.0,
    "bias_correction": True,
}  # fmt: skip
_ADAFACTOR = {"lr": 1e-2, "beta2_decay": -0.8, "eps": (1e-15, 1e-3), "clip_threshold": 1.0}
_GALORE = {
    "rank": None, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std",
    "target_modules": "all-linear",
}  # fmt: skip
_CHOICES = {
    "adamw": _Choice(_fused_adamw, _ADAM),
    "muon": _Choice(
        _muon,
        {**_ADAM, "lr": 7e-4, "momentum": 0.95, "target_modules": None},
    ),
    "adamw8bit": _Choice(_adamw8bit, _ADAM),
    "adafactor": _Choice(_adafactor, _ADAFACTOR),
    "sgd": _Choice(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "came": _Choice(CAME, _CAME),
    "came8bit": _Choice(lambda groups, **s: CAME(groups, state_dtype="8bit", **s), _CAME),
    "galore_adamw": _Choice(_galore_adamw, {**_ADAM, "lr": 2e-3, **_GALORE}),
    "galore_adamw8bit": _Choice(GaLoreAdamW8bit, {**_ADAM, "lr": 2e-3, **_GALORE}),
    "galore_adafactor": _Choice(_galore_adafactor, {**_ADAFACTOR, **_GALORE}),
}
_COMMON = (
    "name", "lr", "dense_lr", "core_lr", "scale_rates", "gate_lr", "weight_decay", "in_backward",
    "warmup_share", "schedule",
)  # fmt: skip


def check_optimizer(settings: OptimizerConfig) -> None:
    """Raise ``ValueError`` for an unknown name, a key that does not belong to it, or a value."""
    choice = _choice(settings.name)
    for key, value in vars(settings).items():
        if value is None or key in _COMMON or key in choice.defaults:
            continue
        takers = ", ".join(name for name, other in _CHOICES.items() if key in other.defaults)
        raise ValueError(
            f"optimizer.{key}={value!r} is not a setting of {settings.name}: it belongs to "
            f"{takers}; leave it out (--optimizer.{key}=null), or choose one of them"
        )
    for key in ("lr", "dense_lr", "core_lr", "gate_lr", "weight_decay"):
        value = getattr(settings, key)
        if value is not None and not value >= 0:
            raise ValueError(f"optimizer.{key}={value} must be at least 0")
    if not 0 <= settings.warmup_share <= 1:
        raise ValueError(
            f"optimizer.warmup_share={settings.warmup_share} must be a share of steps, in [0, 1]"
        )
    for key in ("betas", "eps"):
        _check_count(settings.name, key, getattr(settings, key), choice.defaults.get(key))
    if settings.betas is not None and not all(0 <= beta < 1 for beta in settings.betas):
        raise ValueError(f"optimizer.betas={settings.betas} must be decay rates in [0, 1)")
    if isinstance(settings.eps, int | float) and not settings.eps >= 0:
        raise ValueError(f"optimizer.eps={settings.eps} must be at least 0")


def resolved(settings: OptimizerConfig, width: int) -> dict[str, Any]:
    """Return all settings that the chosen optimizer takes, defaults for those not given.

    Args:
        settings: Checked by :func:`check_optimizer`.
        width: Width of the model, for the rank of GaLore.
    """
    choice = _choice(settings.name)
    full = {**choice.defaults, **({"rank": max(1, width // 4)} if _projects(choice) else {})}
    given = {key: value for key, value in vars(settings).items() if value is not None}
    found = {key: given.get(key, full.get(key)) for key in vars(settings)}
    if found["betas"] is not None and "betas" in full:  # came has three
        found["betas"] = (*found["betas"], *full["betas"][len(found["betas"]) :])
    kept = {key: value for key, value in found.items() if key in full or key in _COMMON}
    return {**kept, "name": _plain(settings.name)}


def make_optimizer(model: nn.Module, settings: OptimizerConfig, width: int) -> Optimizer:
    """Make the optimizer of a model, its groups by :func:`~comera.param_groups` or for GaLore.

    Args:
        model: The model, on any device, ``meta`` too.
        settings: Settings of the run.
        width: Width of the model, for the rank of GaLore.

    Raises:
        ValueError: If a setting is out of range, GaLore finds nothing to project, or a package is
            missing.
    """
    check_optimizer(settings)
    choice, values = _choice(settings.name), resolved(settings, width)
    own = {key: values[key] for key in choice.defaults if key not in (*_COMMON, *_GALORE)}
    common = {
        key: values[key]
        for key in ("gate_lr", "core_lr", "scale_rates", "weight_decay")
        if values[key] is not None
    }
    try:
        if _projects(choice):
            groups = _galore_groups(model, values, common)
        else:
            modules = values.get("target_modules")
            try:
                groups = param_groups(model, values["lr"], muon_modules=modules, **common)
            except ValueError:
                raise ValueError(
                    f"target_modules={modules!r} names no dense layer that is trained"
                ) from None
        return choice.make(groups, **own)
    except ImportError:
        raise ValueError(
            f"optimizer.name={settings.name} needs torchao, which is not installed: "
            "pip install torchao"
        ) from None
    except ValueError as problem:
        key, equals, _ = str(problem).partition("=")
        named = f"optimizer.{problem}" if equals and key in values else None
        raise ValueError(named or f"optimizer.name={settings.name}: {problem}") from None


def twin_of(settings: OptimizerConfig) -> OptimizerConfig:
    """Return the optimizer of the dense twin: that of its run if it was named, else adamw."""
    twin = dataclasses.replace(settings, lr=settings.dense_lr or settings.lr)
    if settings.name is None:
        twin = dataclasses.replace(twin, momentum=None, target_modules=None)
    return twin


def gate_rate(late_steps: int) -> float:
    """Return ``gate_lr`` where none is given: under Adam the most that a gate falls in a step."""
    return max(2e-3, 1.25 / late_steps) if late_steps else 2e-3


def _galore_groups(
    model: nn.Module, values: dict[str, Any], common: dict[str, Any]
) -> list[dict[str, Any]]:
    keys = {key: values[key] for key in _GALORE if key != "rank"}
    try:
        return galore_param_groups(model, values["lr"], values["rank"], **keys, **common)
    except ValueError as problem:
        raise ValueError(
            f"there is nothing to project: {problem}. GaLore is for dense layers, tensor-train "
            "cores are small already: keep layers dense with tensorize.exclude_modules, lower "
            "optimizer.rank, or choose another optimizer, such as adamw"
        ) from None


def _check_count(name: str | None, key: str, given: Any, default: Any) -> None:
    """Check a key that takes one number for one optimizer and several for another."""
    if given is None:
        return
    if isinstance(default, float):
        if not isinstance(given, int | float):
            raise ValueError(f"optimizer.{key}={given!r} must be one number for {name}")
        return
    count = len(given) if isinstance(given, tuple | list) else 1
    if not 2 <= count <= len(default):
        wanted = "two numbers" if len(default) == 2 else "two or three numbers"
        raise ValueError(f"optimizer.{key}={given!r} must be {wanted} for {name}")


def _choice(name: str | None) -> _Choice:
    try:
        return _CHOICES[_plain(name)]
    except KeyError:
        raise ValueError(
            f"optimizer.name={name} is no optimizer{did_you_mean(name, _CHOICES)}"
        ) from None


def _plain(name: str | None) -> str:
    """Return a name as it is known here: Hugging Face writes ``galore_adamw_8bit``."""
    return "adamw" if name is None else name.replace("_8bit", "8bit")


def _projects(choice: _Choice) -> bool:
    return "rank" in choice.defaults


OPTIMIZERS = tuple(_CHOICES)
"""All names."""
