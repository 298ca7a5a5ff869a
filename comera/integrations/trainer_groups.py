"""The optimizer that a ``Trainer`` of transformers makes, with groups that suit tensor trains."""

from typing import Any

from torch.optim import Optimizer

from comera.nn.module import tensor_trains
from comera.shapes import is_number


def set_optimizer_groups_(trainer: Any, gate_lr: float = 1e-3) -> None:
    """Let a trainer train rank gates at a rate of their own, and decay neither gates nor cores.

    The optimizer is still the one of ``TrainingArguments.optim``. One that was handed over as
    ``Trainer(optimizers=...)`` stays as it is: :func:`comera.param_groups` makes its groups.

    Args:
        trainer: A ``transformers.Trainer``, or one of a subclass, that has not begun to train.
        gate_lr: Learning rate of the gates, which follows the schedule of the others. It bounds
            how fast a rank can be pruned: under Adam a gate falls from one to zero in
            ``1 / gate_lr`` steps at best.

    Raises:
        ValueError: If ``gate_lr`` is no positive number.
    """
    if not is_number(gate_lr) or not gate_lr > 0:
        raise ValueError(f"gate_lr={gate_lr!r} must be a number above 0")
    create = trainer.create_optimizer

    def create_optimizer(*args: Any, **options: Any) -> Optimizer:
        given = trainer.optimizer is not None
        optimizer = create(*args, **options)
        if not given:
            _split_groups_(optimizer, trainer.model, gate_lr)
        return optimizer

    trainer.create_optimizer = create_optimizer


def _split_groups_(optimizer: Optimizer, model: Any, gate_lr: float) -> None:
    """Give gates, and cores that are decayed, groups of their own; else as the one they were in."""
    layers = tensor_trains(model).values()
    gates = {id(gate) for layer in layers for gate in layer.gates}
    cores = {id(core) for layer in layers for core in layer.cores}
    for group in list(optimizer.param_groups):
        for kind, rate in ((gates, gate_lr), (cores, group["lr"])):
            taken = [param for param in group["params"] if id(param) in kind]
            if taken:
                group["params"] = [param for param in group["params"] if id(param) not in kind]
                own = {"params": taken, "lr": rate, "weight_decay": 0.0}
                optimizer.add_param_group({**group, **own})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
