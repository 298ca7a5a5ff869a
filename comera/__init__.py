"""Train models in compressed form: tensor-train layers that learn their own ranks.

The public names, in the order one meets them::

    comera.tensorize_(model, comera.TTConfig(rank=30, target_modules=r"encoder\\..*"))
    print(comera.compression_report(model), comera.plan(model, tokens=4096))
    optimizer = comera.MuonAdamW(comera.param_groups(model, lr=7e-4, gate_lr=1e-3))
    ranks = comera.TwoStage(model, target=0.2, early_steps=2000, late_steps=1000)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks)
    for batch in loader:
        loss = step(batch)
        if ranks.due:
            ranks.finish_(optimizer)
"""

from comera import _command  # noqa: F401  (first: Ctrl-C during the imports below)
from comera.allocator import reuse_freed_memory
from comera.checkpoint.chain import CheckpointChain
from comera.nn.collection import TTEmbeddingBagCollection
from comera.nn.config import TTConfig
from comera.nn.convert import densify_, tensorize_
from comera.nn.embedding import TTEmbedding
from comera.nn.embedding_bag import TTEmbeddingBag
from comera.nn.grouped import GroupedMerge
from comera.nn.linear import TTLinear
from comera.optim.came import CAME
from comera.optim.galore import GaLore
from comera.optim.galore_named import GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit
from comera.optim.groups import galore_param_groups, param_groups
from comera.optim.in_backward import OptimizerInBackward
from comera.optim.muon import MuonAdamW
from comera.rank.importance_pruning import ImportancePruning
from comera.rank.two_stage import TwoStage
from comera.report.compression import compression_report
from comera.report.memory_use import memory_report
from comera.report.model_plan import plan
from comera.shapes import TTMShape, TTShape
from comera.surgery.canonical import canonicalize_
from comera.surgery.rows import order_rows_, update_hot_rows_
from comera.surgery.truncate import truncate_
from comera.train.step import TrainStep

__version__ = "0.1.0"

__all__ = [
    "CAME",
    "CheckpointChain",
    "GaLore",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "GroupedMerge",
    "ImportancePruning",
    "MuonAdamW",
    "OptimizerInBackward",
    "TTConfig",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTEmbeddingBagCollection",
    "TTLinear",
    "TTMShape",
    "TTShape",
    "TrainStep",
    "TwoStage",
    "canonicalize_",
    "compression_report",
    "densify_",
    "galore_param_groups",
    "memory_report",
    "order_rows_",
    "param_groups",
    "plan",
    "reuse_freed_memory",
    "tensorize_",
    "truncate_",
    "update_hot_rows_",
]
