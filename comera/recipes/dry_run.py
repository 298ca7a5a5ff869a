"""Two steps of a run at its true shapes on drawn data, to see that all of it fits together."""

import dataclasses
from dataclasses import dataclass

import torch

from comera.nn.model_size import model_size
from comera.planning.printing import show_bytes
from comera.recipes.build import build_step, make_model, without_remarks
from comera.recipes.data_record import DataRecord
from comera.recipes.run import planned_memory, planned_model
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import Batch, Task
from comera.recipes.tasks.task_kinds import kind_of, planned_dense_model

_ROWS = 2
_STEPS = 2
_WHERE_DATA_TELL = 1000
"""Steps of a run that is as long as its data: schedules and stages need a number."""


@dataclass(frozen=True)
class DryRun:
    """What a dry run has found.

    Attributes:
        params: Parameters of the model at the start.
        bytes: Memory of weights, gradients and optimizer state.
        most_bytes: Up to how much of it steps are done.
        losses: The loss of each step; empty where it is more than that, and forward and backward
            went through the shapes alone.
    """

    params: int
    bytes: int
    most_bytes: int
    losses: tuple[float, ...]

    def __str__(self) -> str:
        memory = f"{self.params:,} parameters, {self.bytes / (1 << 20):,.0f} MiB to train them"
        if self.losses:
            return f"{memory}; {len(self.losses)} steps done"
        return (
            f"{memory}: no steps done, as a dry run does them up to {show_bytes(self.most_bytes)}; "
            "forward and backward fit by their shapes"
        )


def dry_run(config: RunConfig, most_bytes: int) -> DryRun:
    """Train a run for two steps of two rows each, with its model, optimizer and rank learning.

    Nothing is read or written. Numbers of a step are drawn, so losses mean nothing.

    Args:
        config: The run.
        most_bytes: Memory of weights, gradients and optimizer state up to which steps are done.

    Raises:
        ValueError: If the settings do not go together.
    """
    needed = planned_memory(dataclasses.replace(config, twin=False))[0].total.total
    train = dataclasses.replace(
        config.train,
        steps=config.train.steps or _WHERE_DATA_TELL,
        epochs=None,
        batch_size=_ROWS,
        accumulate=1,
        compile=False,
    )
    small = dataclasses.replace(config, train=train, device="cpu", twin=False)
    with without_remarks():
        if needed > most_bytes:
            return DryRun(_backward_by_shapes(small), needed, most_bytes, ())
        task = _task(small)
        torch.manual_seed(config.seed)
        model = make_model(small, task, torch.device("cpu"))
    step = build_step(model, small, task)
    params = model_size(model).params
    losses = tuple(float(step(task.get_batch(number))) for number in range(_STEPS))
    return DryRun(params, needed, most_bytes, losses)


def _backward_by_shapes(config: RunConfig) -> int:
    """Go forward and backward without memory; returns the number of parameters."""
    model = planned_model(config)
    with torch.device("meta"):
        batch = _batch(config, 0)
    kind_of(config).loss(model, batch).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        raise ValueError(f"{missing[0]} gets no gradient")
    return model_size(model).params


def _task(config: RunConfig) -> Task:
    kind = kind_of(config)
    return Task(
        make_model=lambda: planned_dense_model(config),
        get_batch=lambda step: _batch(config, step),
        loss_fn=kind.loss,
        evaluate=lambda model: {},
        steps=config.train.steps or _WHERE_DATA_TELL,
        record=DataRecord({}, ""),
        per_step=(_ROWS, "rows"),
        lean=kind.lean,
    )


def _batch(config: RunConfig, step: int) -> Batch:
    """Draw a batch of the task on torch's default device."""
    torch.manual_seed(step)
    return kind_of(config).drawn_batch(config, _ROWS)
