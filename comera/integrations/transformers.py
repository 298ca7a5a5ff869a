"""Compressed models in transformers: its ``Trainer`` learns their ranks, its folders hold them.

Importing this module imports transformers and registers compressed models with
``from_pretrained``, see :mod:`comera.integrations.pretrained`. Here are the groups of the optimizer
that a ``Trainer`` makes, and rank learning inside it: both stages, the cut, and resumed runs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.allocator import reuse_by_default
from comera.extras import needed_by
from comera.integrations.pretrained import TensorTrainConfig, attach_
from comera.integrations.rank_steps import RankSteps, check_model
from comera.nn.module import tensor_trains
from comera.rank.learning import RankLearning
from comera.shapes import is_number

with needed_by("comera.integrations.transformers"):
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.trainer_callback import ExportableState

__all__ = ["RankCallback", "TensorTrainConfig", "attach_", "learn_ranks_", "set_optimizer_groups_"]


def set_optimizer_groups_(trainer: Any, gate_lr: float = 1e-3) -> None:
    """Give a trainer a rate of its own for rank gates, and no decay of gates and cores.

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


def learn_ranks_(trainer: Any, ranks: RankLearning, *, gate_lr: float = 1e-3) -> "RankCallback":
    """Add rank learning to a trainer; beside :func:`comera.tensorize_` nothing else is needed.

    The loss is differentiated together with the terms of ``ranks``, by whatever way the trainer
    gets it; what is logged and evaluated stays the loss alone. When ``ranks`` is due, ranks and the
    optimizer's state are cut, and training goes on. Checkpoints hold where rank learning was:
    ``trainer.train(resume_from_checkpoint=True)``, with model, ``ranks`` and trainer made as the
    first time, goes on as if it had not been interrupted.

    Args:
        trainer: A ``transformers.Trainer``, or one of a subclass, that has not begun to train.
        ranks: A :class:`~comera.TwoStage` or :class:`~comera.ImportancePruning` of its model; its
            steps are optimizer steps.
        gate_lr: Learning rate of the gates, see
            :func:`~comera.integrations.transformers.set_optimizer_groups_`.

    Returns:
        The callback that was added to the trainer.

    Raises:
        ValueError: If ``ranks`` is of another model, the trainer learns ranks already, or it trains
            in a way in which parameters cannot change their shapes.

    Example::

        comera.tensorize_(model, comera.TTConfig(rank=16))
        trainer = transformers.Trainer(model, args, train_dataset=data)
        learn_ranks_(trainer, comera.TwoStage(model, 0.3, early_steps=600, late_steps=300))
        trainer.train()
    """
    _check(trainer, ranks)
    set_optimizer_groups_(trainer, gate_lr)
    if isinstance(trainer.model, PreTrainedModel):
        attach_(trainer.model)
    callback = RankCallback(trainer, ranks)
    trainer.add_callback(callback)
    return callback


class RankCallback(TrainerCallback, ExportableState):
    """Callback that :func:`learn_ranks_` adds; its state is part of ``trainer_state.json``.

    Args:
        trainer: The trainer that it is added to.
        ranks: Rank learning of the trainer's model.

    Attributes:
        ranks: Rank learning, as it was given.
    """

    def __init__(self, trainer: Any, ranks: RankLearning) -> None:
        self.ranks = ranks
        self._trainer = trainer
        self._steps = RankSteps(ranks)

    @property
    def outcome(self) -> dict[str, Any] | None:
        """Result of :meth:`~comera.TwoStage.finish_`; None before ranks are cut."""
        return self._steps.outcome

    def state(self) -> dict[str, Any]:
        """Return the state of rank learning in numbers, strings and lists."""
        return {"args": {}, "attributes": {"ranks": _plain(self.ranks.state_dict())}}

    def on_train_begin(self, args, state, control, **kwargs):
        """Go on from the checkpoint, if there is one, and differentiate the objective."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise ValueError(
                "the checkpoint holds no state of rank learning: it was written by a trainer "
                "without learn_ranks_, and ranks cannot go on from there"
            )
        self.ranks.load_state_dict(_tensors(saved["attributes"]["ranks"]))
        self._steps.begin(state.max_steps - state.global_step)
        self._trainer.accelerator.backward = self._backward
        if args.device.type == "cpu":
            reuse_by_default()

    def on_train_end(self, args, state, control, **kwargs):
        """Leave the trainer's accelerator as it was."""
        del self._trainer.accelerator.backward
        self._steps.end()

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Count an optimizer step, unless it was skipped for gradients that were not finite."""
        skipped = self._trainer.accelerator.optimizer_step_was_skipped
        self._steps.end_step(self._trainer.optimizer, skipped)

    def on_step_end(self, args, state, control, **kwargs):
        """Cut ranks when it is time: before this step is evaluated or saved."""
        outcome = self._steps.cut_if_due(self._trainer.optimizer)
        if outcome is None:
            return
        # The best model from here on: one from before the cut would bring its ranks back.
        state.best_metric, state.best_global_step, state.best_model_checkpoint = None, None, None
        still = control.should_log  # the loss of this step; logging unsets it
        self._trainer.log({f"ranks_{key}": value for key, value in outcome.items()})
        control.should_log = still

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate the objective of a loss, which is one of the parts of a step's loss.

        The trainer has divided it by their number, or weighed it by its tokens; either way their
        sum is the loss of the step.
        """
        accelerator = self._trainer.accelerator
        parts = self._trainer.current_gradient_accumulation_steps
        type(accelerator).backward(accelerator, self._steps.objective(loss, parts), **kwargs)


def _check(trainer: Any, ranks: RankLearning) -> None:
    check_model(ranks, trainer.model)
    if any(isinstance(known, RankCallback) for known in trainer.callback_handler.callbacks):
        raise ValueError("this trainer learns ranks already: learn_ranks_ is called once")
    if trainer.model_init is not None:
        raise ValueError(
            "Trainer(model_init=...) makes another model when it begins to train than the one "
            "whose ranks are learned: give it the model"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "ranks are learned of whole parameters, and DeepSpeed and FSDP cut them into shards: "
            "start the script by torchrun or accelerate launch with plain data parallelism"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this process has {trainer.args.n_gpu} GPUs, which Trainer would use by copying the "
            "model in each step: start the script by torchrun, a process for each"
        )
    if trainer.args.restore_callback_states_from_checkpoint:
        raise ValueError(
            "restore_callback_states_from_checkpoint=True makes all callbacks anew, this one too, "
            "and it would know of no model: leave it out, ranks go on from a checkpoint without it"
        )


# ── tensors in JSON ──────────────────────────────────────────────────────────────────────────────


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without tensors; doubles hold whatever narrower numbers do, bit for bit."""
    return {
        key: {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`_plain` was given."""
    return {
        key: torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
        if isinstance(value, dict)
        else value
        for key, value in state.items()
    }
