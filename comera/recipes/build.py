"""Make of settings and data a model and what trains it."""

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from comera.nn.convert import tensorize_
from comera.nn.init import init_keys_as_queries_
from comera.optim.in_backward import OptimizerInBackward
from comera.recipes.optimizers import OptimizerConfig
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task import Task
from comera.train.processes import Processes
from comera.train.sharded import shard_dense_
from comera.train.step import TrainStep


def find_device(name: str, processes: Processes | None = None) -> torch.device:
    """Return the device of a run's settings; ``auto`` is a GPU where there is one.

    Of several processes each takes a GPU of its own.

    Raises:
        ValueError: If it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if processes is not None and processes.count > 1 and device.type == "cuda":
        device = torch.device("cuda", processes.local_rank)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:  # the latter where torch has no CUDA at all
        raise ValueError(f"device={name!r} cannot be used here: {problem}") from None
    return device


def make_model(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    """Make the model at the start of a run, the same on every device for the same random state.

    Numbers are drawn on the CPU, since a GPU draws others.
    """
    model = _drawn(config, task, device)
    # Here, since fresh cores are drawn one layer after the other.
    return init_keys_as_queries_(model) if config.model.qk_init == "same" else model


def _drawn(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    settings = config.tt_config
    if settings is not None and settings.init is None:
        settings = replace(settings, init="orthogonal")  # nobody loses weights of a fresh model
    if settings is not None and task.lean and settings.init != "svd":
        with torch.device("meta"):
            model = task.make_model()
        tensorize_(model, settings).to_empty(device="cpu")
        model.reset_parameters(settings.init)  # type: ignore[operator]
        return model.to(device)
    with torch.device("cpu"):
        model = task.make_model()
    if settings is None:
        return model.to(device)
    if settings.init == "svd":  # draws nothing, and is the device's work
        return tensorize_(model.to(device), settings)
    return tensorize_(model, settings).to(device)


def build_step(
    model: nn.Module, config: RunConfig, task: Task, processes: Processes | None = None
) -> TrainStep:
    """Make the training step of a run, with its optimizer and schedules.

    Of several processes all call this, each with a model of the same weights.
    """
    group = None if processes is None else processes.group
    share_out = _shard if group is not None and config.parallel.kind == "fsdp" else None
    if share_out is not None:
        share_out(model)  # makes other parameters, which the optimizer has to hold
    settings = config.optimizer_for(task.steps)
    optimizer = settings.build(model)
    falling = _rate(settings, task.steps)
    scheduler = LambdaLR(
        optimizer,
        [_constant if g["name"] == "gates" else falling for g in optimizer.param_groups],
    )
    ranks = None if config.ranks is None else config.ranks.build(model, task.steps)
    in_backward = settings.in_backward  # averages gradients itself, and frees each
    return TrainStep(
        model
        if group is None or share_out is not None or in_backward
        else nn.parallel.DistributedDataParallel(model),
        task.loss_fn,
        OptimizerInBackward(optimizer, process_group=group) if in_backward else optimizer,
        ranks,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        precision=config.train.precision,
        scheduler=scheduler,
        compile=config.train.compile,
        graph=config.train.graph,
    )


def _shard(model: nn.Module) -> nn.Module:
    # Torch warns that what a model returns must not be written to, which no loss here does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    return shard_dense_(model)


def _constant(step: int) -> float:
    return 1.0


def _rate(settings: OptimizerConfig, steps: int):
    """Return the share of the peak rate at each step: rising, then falling to zero."""
    warmup = max(1, round(settings.warmup_share * steps))

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        left = max(0.0, (steps - step) / max(1, steps - warmup))
        if settings.schedule == "linear":
            return left
        return 0.5 - 0.5 * math.cos(math.pi * left) if settings.schedule == "cosine" else 1.0

    return rate


@contextlib.contextmanager
def without_remarks(about: str = "comera") -> Iterator[None]:
    """Run what is inside without remarks about the layers, or of another logger."""
    log = logging.getLogger(about)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
