"""The quality of a run's checkpoints: evaluated as they are read, and trained on from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from comera.checkpoint.chain import CheckpointChain
from comera.recipes.build import build_step, find_device, make_model, without_remarks
from comera.recipes.folder import other_data
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task_kinds import prepare_task
from comera.train.log import read_metrics
from comera.train.run_state import load_checkpoint
from comera.train.run_under_way import evaluated


@dataclass(frozen=True)
class Replayed:
    """A metric of one checkpoint beside that of the run itself.

    Attributes:
        step: Step of the checkpoint.
        logged: The run's figure there, if it was evaluated there.
        read: The figure of the model that is read.
        later: The step up to which training went on from what was read; ``step`` if it did not.
        logged_later: The run's figure there.
        read_later: The figure of the model trained on.
    """

    step: int
    logged: float | None
    read: float
    later: int
    logged_later: float | None
    read_later: float


def replay(
    run: Path,
    chain: CheckpointChain,
    steps: list[int],
    train_on: int,
    progress: Callable[[int], None],
) -> Iterator[Replayed]:
    """Evaluate checkpoints by the loss of a run.

    Args:
        run: Folder of the run, which holds the settings and what was logged.
        chain: Checkpoints of that run, kept in whatever way.
        steps: Steps whose checkpoints are evaluated.
        train_on: Optimizer steps to go on from each, but no further than the run's end.
        progress: Called after every step trained.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If its data have changed since.
    """
    logged = {line["step"]: line["eval/loss"] for line in read_metrics(run) if "eval/loss" in line}
    config = parse_settings(RunConfig, read_yaml(run / "config.yaml"))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    device = find_device(config.device)
    task = prepare_task(config, device)
    difference = other_data(run, task.record)
    if difference is not None:
        raise ValueError(f"{run} was trained on other data ({difference}): restore them")
    for number in steps:
        with without_remarks():  # the run made them
            step = build_step(make_model(config, task, device), config, task)
        load_checkpoint(chain, step, number)
        loss = later = evaluated(step, task.evaluate)["loss"]
        end = min(task.steps, number + train_on)
        while step.steps_done < end:
            step(task.get_batch(step.steps_done))
            if step.ranks is not None and step.ranks.due:
                step.ranks.finish_(step.optimizer)
            progress(1)
        if end > number:
            later = evaluated(step, task.evaluate)["loss"]
        yield Replayed(number, logged.get(number), loss, end, logged.get(end), later)
