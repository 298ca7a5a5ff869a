"""Compressed models in transformers: its ``Trainer`` learns their ranks.

Importing this module imports transformers.
"""

from comera.integrations.trainer_groups import set_optimizer_groups_
from comera.integrations.trainer_ranks import RankCallback, learn_ranks_

__all__ = ["RankCallback", "learn_ranks_", "set_optimizer_groups_"]
