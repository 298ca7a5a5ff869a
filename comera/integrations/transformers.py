"""Compressed models in transformers: its ``Trainer`` learns their ranks, its folders hold them.

Importing this module imports transformers, and lets ``from_pretrained`` know compressed models.
"""

from comera.integrations.pretrained import TensorTrainConfig, attach_
from comera.integrations.trainer_ranks import RankCallback, learn_ranks_, set_optimizer_groups_

__all__ = ["RankCallback", "TensorTrainConfig", "attach_", "learn_ranks_", "set_optimizer_groups_"]
