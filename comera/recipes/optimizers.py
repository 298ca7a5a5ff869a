"""Define the section ``optimizer`` of a run: a dataclass for each one in ``OPTIMIZERS``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.optim import Optimizer

from comera.extras import check_known
from comera.optim.came import CAME
from comera.optim.galore import GaLore, GaLoreAdafactor, GaLoreAdamW8bit
from comera.optim.groups import galore_param_groups, param_groups
from comera.optim.muon import MuonAdamW
from comera.recipes.parse import check_least

Groups = list[dict[str, Any]]

_ADAFACTOR_EPS = (1e-15, 1e-3)
"""Epsilons of ``comera.GaLoreAdafactor``: torch's own keep no scale for small gradients."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule. ``optimizer: came`` is short for a section with this name.

    Null means the optimizer's default; a setting that the optimizer does not have is an error.

    Args:
        name: adamw, muon, adamw8bit, adafactor, sgd, came, came8bit, galore_adamw,
            galore_adamw8bit or galore_adafactor. The names with adamw8bit need torchao; muon is
            ``comera.MuonAdamW``. By default muon in a run with a section ``tensorize``
            (``docs/experiments.md``), else adamw.
        lr: Peak learning rate; by default 5e-4 for adamw and came, 7e-4 for muon, 1e-2 for
            adafactor, also with galore, 0.1 for sgd, and 2e-3 for galore_adamw, whose steps are
            multiplied by ``scale``.
        dense_lr: Peak rate of the dense twin; ``lr`` if not given.
        core_lr: Peak rate of the tensor-train cores; by default ``lr``. In a run by muon or
            adamw with default rates, ``0.125 / steps`` of a late stage if that is more, as in short
            runs: a model whose gates close faster than its cores learn answers nothing.
        scale_rates: contracted multiplies the rate of each linear layer's cores by a factor from
            its shape, see ``comera.param_groups``. By default all cores have one rate.
        gate_lr: Constant rate of the rank gates; by default 2e-3, or ``1.5 / target / steps`` of a
            late stage, from 2e-3 to 0.02, or what lets a gate fall from one to zero in four fifths
            of that stage, if that is more.
        weight_decay: Decay of dense matrices only.
        in_backward: Step each parameter inside backward and free its gradient at once, see
            ``comera.OptimizerInBackward``. Needs ``train.clip_norm: null``.
        warmup_share: Share of the run with a rising rate.
        schedule: How the rate falls to zero afterwards; constant keeps it.
    """

    choices: ClassVar[list[type["OptimizerConfig"]]]  # all optimizers
    default_lr: ClassVar[float]
    optimizer: ClassVar[Any]  # called with parameter groups and ``settings``
    settings: ClassVar[dict[str, Any]] = {}

    name: str | None = None
    lr: float | None = None
    dense_lr: float | None = None
    core_lr: float | None = None
    scale_rates: Literal["contracted"] | None = None
    gate_lr: float | None = None
    weight_decay: float = 0.01
    in_backward: bool = False
    warmup_share: float = 0.05
    schedule: Literal["linear", "cosine", "constant"] = "linear"

    @staticmethod
    def choose(
        given: Mapping[str, Any], run: Mapping[str, Any]
    ) -> tuple[type["OptimizerConfig"], dict[str, Any]]:
        """Return the dataclass of a section ``given``, and its settings without others' nulls.

        Without a name the section ``tensorize`` of ``run`` decides. Raises ``ValueError`` if the
        name is unknown, or a key belongs to another optimizer.
        """
        name = given.get("name")
        chosen = str(name or ("adamw" if run.get("tensorize") is None else "muon"))
        check_known(chosen, OPTIMIZERS, f"optimizer.name={name} is no optimizer")
        shared = keys_of(OptimizerConfig)
        kept = {key: v for key, v in given.items() if v is not None or key in shared}
        for key, value in kept.items():
            takers = [name for name, kind in OPTIMIZERS.items() if key in keys_of(kind)]
            if takers and chosen not in takers:
                raise ValueError(
                    f"optimizer.{key}={value!r} is not a setting of {chosen}: it belongs to "
                    f"{', '.join(takers)}; leave it out (--optimizer.{key}=null), or choose one "
                    "of them"
                )
        return OPTIMIZERS[chosen], kept | {"name": name}

    def check(self) -> None:
        """Raise ``ValueError`` for a value that is out of range."""
        check_least(self, "optimizer.", lr=0, dense_lr=0, core_lr=0, gate_lr=0, weight_decay=0)
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(
                f"optimizer.warmup_share={self.warmup_share} must be a share of steps, in [0, 1]"
            )
        betas = getattr(self, "betas", ())
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"optimizer.betas={betas} must be decay rates in [0, 1)")

    def filled_in(self, width: int) -> Self:
        """Return the settings with name and rate filled in, and GaLore's rank by this width."""
        lr = self.default_lr if self.lr is None else self.lr
        return dataclasses.replace(self, name=type(self).name, lr=lr)

    def of_twin(self) -> "OptimizerConfig":
        """Return the optimizer of the dense twin: this one if it was named, else adamw."""
        twin = dataclasses.replace(self, lr=self.lr if self.dense_lr is None else self.dense_lr)
        if self.name is not None:
            return twin
        return AdamWConfig(**{key: getattr(twin, key) for key in keys_of(AdamWConfig)})

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model; call it on the result of :meth:`filled_in`.

        Raises ``ValueError`` for a setting out of range, a missing package, or no weight for
        GaLore.
        """
        self.check()
        try:
            return self.make(self._groups(model))
        except ImportError:
            raise ValueError(
                f"optimizer.name={self.name} needs torchao, which is not installed: "
                "pip install torchao"
            ) from None
        except ValueError as problem:
            key, equals, _ = str(problem).partition("=")
            named = f"optimizer.{problem}" if equals and key in keys_of(type(self)) else None
            raise ValueError(named or f"optimizer.name={self.name}: {problem}") from None

    def make(self, groups: Groups) -> Optimizer:
        """Make the optimizer with these parameter groups."""
        return self.optimizer(groups, **self.settings)

    def _groups(self, model: nn.Module) -> Groups:
        return param_groups(model, **self._rates())

    def _rates(self) -> dict[str, Any]:
        keys = ("lr", "gate_lr", "core_lr", "scale_rates", "weight_decay")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """torch's AdamW.

    Args:
        betas: Decay rates of the moments.
    """

    default_lr = 5e-4
    optimizer: ClassVar[Any] = torch.optim.AdamW
    name: str | None = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)

    def make(self, groups: Groups) -> Optimizer:
        can_fuse = not groups[0]["params"][0].is_meta  # torch has no such kernel there
        return self.optimizer(groups, betas=self.betas, fused=can_fuse)


@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """``comera.MuonAdamW``.

    Args:
        target_modules: Dense layers that muon steps like cores, or that GaLore projects: a regular
            expression or names; by default none for muon, all for GaLore.
    """

    default_lr = 7e-4
    optimizer = MuonAdamW
    name: str | None = "muon"
    target_modules: str | list[str] | None = None

    def _groups(self, model: nn.Module) -> Groups:
        try:
            return param_groups(model, muon_modules=self.target_modules, **self._rates())
        except ValueError:
            raise ValueError(
                f"target_modules={self.target_modules!r} names no dense layer that is trained"
            ) from None


@dataclass(kw_only=True)
class AdamW8bitConfig(AdamWConfig):
    """torchao's AdamW with moments in eight bits."""

    name: str | None = "adamw8bit"

    def make(self, groups: Groups) -> Optimizer:
        from torchao.optim import AdamW8bit

        return AdamW8bit(groups, betas=self.betas)


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """torch's Adafactor."""

    default_lr = 1e-2
    optimizer, settings = torch.optim.Adafactor, {"eps": _ADAFACTOR_EPS}
    name: str | None = "adafactor"


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """torch's SGD with momentum 0.9."""

    default_lr = 0.1
    optimizer, settings = torch.optim.SGD, {"momentum": 0.9}
    name: str | None = "sgd"


@dataclass(kw_only=True)
class CAMEConfig(OptimizerConfig):
    """``comera.CAME``, with bias correction.

    Args:
        betas: Decay rates of the moments and of the confidence, which is 0.9999 if only two are
            given.
    """

    default_lr = 5e-4
    state_dtype: ClassVar[Literal["8bit"] | None] = None
    name: str | None = "came"
    betas: tuple[float, float] | tuple[float, float, float] = (0.9, 0.999, 0.9999)

    def __post_init__(self) -> None:
        if len(self.betas) == 2:
            self.betas = (*self.betas, 0.9999)

    def make(self, groups: Groups) -> Optimizer:
        betas: Any = self.betas
        return CAME(groups, betas=betas, bias_correction=True, state_dtype=self.state_dtype)


@dataclass(kw_only=True)
class CAME8bitConfig(CAMEConfig):
    """``comera.CAME`` with its state in eight bits."""

    state_dtype = "8bit"
    name: str | None = "came8bit"


@dataclass(kw_only=True)
class GaLoreConfig(OptimizerConfig):
    """Settings of the projection of ``comera.GaLore``, for the optimizers below.

    Args:
        rank: Rank of the subspaces of GaLore; by default a quarter of ``model.d_model``, for clicks
            of ``dlrm.embedding_dim``; about that of its authors.
        update_proj_gap: Steps between two subspaces of GaLore.
        scale: Factor of every projected step of GaLore.
        target_modules: Dense layers to project, a regular expression or names; by default all.
    """

    rank: int | None = None
    update_proj_gap: int = 200
    scale: float = 0.25
    target_modules: str | list[str] = "all-linear"

    def filled_in(self, width: int) -> Self:
        rank = max(1, width // 4) if self.rank is None else self.rank
        return dataclasses.replace(super().filled_in(width), rank=rank)

    def _groups(self, model: nn.Module) -> Groups:
        own = {key: getattr(self, key) for key in keys_of(GaLoreConfig) - keys_of(OptimizerConfig)}
        try:
            return galore_param_groups(model, **own, **self._rates())
        except ValueError as problem:
            raise ValueError(
                f"there is nothing to project: {problem}. GaLore is for dense layers, tensor-train "
                "cores are small already: keep layers dense with tensorize.exclude_modules, lower "
                "optimizer.rank, or choose another optimizer, such as adamw"
            ) from None


@dataclass(kw_only=True)
class GaLoreAdamWConfig(GaLoreConfig, AdamWConfig):
    """``comera.GaLore`` around AdamW."""

    default_lr = 2e-3
    optimizer = GaLore
    name: str | None = "galore_adamw"


@dataclass(kw_only=True)
class GaLoreAdamW8bitConfig(GaLoreAdamWConfig):
    """``comera.GaLoreAdamW8bit``."""

    name: str | None = "galore_adamw8bit"

    def make(self, groups: Groups) -> Optimizer:
        return GaLoreAdamW8bit(groups, betas=self.betas)


@dataclass(kw_only=True)
class GaLoreAdafactorConfig(GaLoreConfig):
    """``comera.GaLoreAdafactor``."""

    default_lr = 1e-2
    optimizer = GaLoreAdafactor
    name: str | None = "galore_adafactor"


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    str(kind.name): kind
    for kind in (
        AdamWConfig, MuonConfig, AdamW8bitConfig, AdafactorConfig, SGDConfig, CAMEConfig,
        CAME8bitConfig, GaLoreAdamWConfig, GaLoreAdamW8bitConfig, GaLoreAdafactorConfig,
    )
}  # fmt: skip
"""Registry of the optimizers by name."""

OptimizerConfig.choices = list(OPTIMIZERS.values())


def keys_of(kind: type[OptimizerConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}
