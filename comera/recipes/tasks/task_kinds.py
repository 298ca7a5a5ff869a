"""The kinds of tasks by the section of a recipe that describes their data."""

from collections.abc import Mapping

import torch
from torch import nn

from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.click_logs import ClicksKind
from comera.recipes.tasks.task import Digests, Place, Task, TaskKind
from comera.recipes.tasks.text_tasks import CausalTextKind, MaskedTextKind, NliKind
from comera.train.processes import Processes

KINDS: Mapping[str, type[TaskKind]] = {
    "masked_text": MaskedTextKind,
    "causal_text": CausalTextKind,
    "nli": NliKind,
    "clicks": ClicksKind,
}


def kind_of(config: RunConfig) -> TaskKind:
    """Return the kind of task that a run trains."""
    return KINDS[config.task](config)


def prepare_task(
    config: RunConfig,
    device: torch.device,
    digests: Digests = None,
    processes: Processes | None = None,
) -> Task:
    """Read the data of a run; raises what the readers raise.

    Args:
        config: The run.
        device: The device that batches go to.
        digests: Those of ``config.data.digests()``, if they are known already.
        processes: Those that train the model together; None for this one alone.
    """
    alone = config.parallel.kind == "ddp"
    place = Place(device, processes or Processes(), alone)
    return kind_of(config).prepare(place, digests)


def planned_dense_model(config: RunConfig) -> nn.Module:
    """Make the dense model of a run, on torch's default device; data are read if they tell sizes.

    Raises:
        ValueError: If data are needed and not there.
    """
    kind = kind_of(config)
    return kind.dense_model(kind.planned_sizes())
