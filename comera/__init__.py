"""Compressed training of PyTorch models, beside its simple rivals: how small can a model be?

Importing this package registers the operators, which exported programs and compiled graphs find by
name. Everything else is imported when it is first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from comera import _command  # noqa: F401  (first: Ctrl-C during the imports below)
from comera.extras import after_swap
from comera.ops import attention  # noqa: F401
from comera.ops.linear import blocks, feed_forward, fp8, tt_linear  # noqa: F401
from comera.ops.table import tt_embedding  # noqa: F401

if TYPE_CHECKING:
    from comera.allocator import reuse_freed_memory as reuse_freed_memory
    from comera.checkpoint.chain import CheckpointChain as CheckpointChain
    from comera.compress.compress import compress_ as compress_
    from comera.compress.compress_folder import compress_folder as compress_folder
    from comera.compress.heal import heal_ as heal_
    from comera.compress.sensitivity import sensitivity as sensitivity
    from comera.nn.batched_contraction import BatchedContraction as BatchedContraction
    from comera.nn.collection import TTEmbeddingBagCollection as TTEmbeddingBagCollection
    from comera.nn.convert import densify_ as densify_
    from comera.nn.convert import tensorize_ as tensorize_
    from comera.nn.embedding import TTEmbedding as TTEmbedding
    from comera.nn.embedding import TTEmbeddingBag as TTEmbeddingBag
    from comera.nn.forms import register_layer as register_layer
    from comera.nn.init import init_keys_as_queries_ as init_keys_as_queries_
    from comera.nn.linear import BTTLinear as BTTLinear
    from comera.nn.linear import TTLinear as TTLinear
    from comera.nn.targets import TTConfig as TTConfig
    from comera.optim.came import CAME as CAME
    from comera.optim.galore import GaLore as GaLore
    from comera.optim.galore import GaLoreAdafactor as GaLoreAdafactor
    from comera.optim.galore import GaLoreAdamW as GaLoreAdamW
    from comera.optim.galore import GaLoreAdamW8bit as GaLoreAdamW8bit
    from comera.optim.groups import galore_param_groups as galore_param_groups
    from comera.optim.groups import param_groups as param_groups
    from comera.optim.in_backward import OptimizerInBackward as OptimizerInBackward
    from comera.optim.muon import MuonAdamW as MuonAdamW
    from comera.rank.importance_pruning import ImportancePruning as ImportancePruning
    from comera.rank.two_stage import TwoStage as TwoStage
    from comera.recipes.trained import load_run as load_run
    from comera.recipes.trained import load_sweep as load_sweep
    from comera.report.compression import compression_report as compression_report
    from comera.report.explore import explore as explore
    from comera.report.front import front as front
    from comera.report.memory_use import memory_report as memory_report
    from comera.report.model_plan import plan as plan
    from comera.saved.model_folder import load_model as load_model
    from comera.saved.model_folder import push_to_hub as push_to_hub
    from comera.saved.model_folder import save_model as save_model
    from comera.serving.freeze import freeze_ as freeze_
    from comera.serving.freeze import frozen as frozen
    from comera.serving.freeze import to_plain_ as to_plain_
    from comera.shapes import BTTShape as BTTShape
    from comera.shapes import TTMShape as TTMShape
    from comera.shapes import TTShape as TTShape
    from comera.surgery.canonical import canonicalize_ as canonicalize_
    from comera.surgery.rows import update_hot_rows_ as update_hot_rows_
    from comera.surgery.truncate import truncate_ as truncate_
    from comera.train.step import TrainStep as TrainStep

__version__ = "0.1.0"

_HOMES = {
    "comera.allocator": ("reuse_freed_memory",),
    "comera.checkpoint.chain": ("CheckpointChain",),
    "comera.compress.compress": ("compress_",),
    "comera.compress.compress_folder": ("compress_folder",),
    "comera.compress.heal": ("heal_",),
    "comera.compress.sensitivity": ("sensitivity",),
    "comera.nn.init": ("init_keys_as_queries_",),
    "comera.nn.collection": ("TTEmbeddingBagCollection",),
    "comera.nn.targets": ("TTConfig",),
    "comera.nn.convert": ("densify_", "tensorize_"),
    "comera.nn.embedding": ("TTEmbedding", "TTEmbeddingBag"),
    "comera.nn.forms": ("register_layer",),
    "comera.recipes.trained": ("load_run", "load_sweep"),
    "comera.nn.batched_contraction": ("BatchedContraction",),
    "comera.nn.linear": ("BTTLinear", "TTLinear"),
    "comera.optim.came": ("CAME",),
    "comera.optim.galore": ("GaLore", "GaLoreAdafactor", "GaLoreAdamW", "GaLoreAdamW8bit"),
    "comera.optim.groups": ("galore_param_groups", "param_groups"),
    "comera.optim.in_backward": ("OptimizerInBackward",),
    "comera.optim.muon": ("MuonAdamW",),
    "comera.rank.importance_pruning": ("ImportancePruning",),
    "comera.rank.two_stage": ("TwoStage",),
    "comera.report.compression": ("compression_report",),
    "comera.report.explore": ("explore",),
    "comera.report.front": ("front",),
    "comera.report.memory_use": ("memory_report",),
    "comera.report.model_plan": ("plan",),
    "comera.saved.model_folder": ("load_model", "push_to_hub", "save_model"),
    "comera.serving.freeze": ("freeze_", "frozen", "to_plain_"),
    "comera.shapes": ("BTTShape", "TTMShape", "TTShape"),
    "comera.surgery.canonical": ("canonicalize_",),
    "comera.surgery.rows": ("update_hot_rows_",),
    "comera.surgery.truncate": ("truncate_",),
    "comera.train.step": ("TrainStep",),
}
"""The public names of each module, which is imported when one of them is first used."""


def _attach(model: Any) -> None:
    if "transformers.core_model_loading" in sys.modules:  # of transformers 5
        import_module("comera.integrations.pretrained").attach_parts_(model)


after_swap.append(_attach)

_MODULES = {name: module for module, names in _HOMES.items() for name in names}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and cache it in the module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
