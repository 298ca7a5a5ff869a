"""Learn ranks inside a ``Trainer`` of transformers, and set the groups of its optimizer.

Importing this module registers compressed models with ``from_pretrained``, see
:mod:`comera.integrations.pretrained`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.allocator import reuse_by_default
from comera.extras import needed_by
from comera.integrations.pretrained import TensorTrainConfig, attach_
from comera.integrations.rank_steps import RankSteps
from comera.nn.module import dtype_name, dtype_of, tensor_trains
from comera.rank.learning import RankLearning
from comera.shapes import is_number

with needed_by("comera.integrations.transformers"):
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.trainer_callback import ExportableState

__all__ = ["RankCallback", "TensorTrainConfig", "attach_", "learn_ranks_", "set_optimizer_groups_"]


def set_optimizer_groups_(trainer: Any, gate_lr: float = 1e-3) -> None:
    """Set a learning rate for rank gates in a trainer, and no decay of gates and cores.

    Call this before training. It changes the groups of the optimizer that
    ``TrainingArguments.optim`` names; for ``Trainer(optimizers=...)`` use
    :func:`comera.param_groups`. ``gate_lr`` follows the schedule of the other rates; under Adam a
    gate falls from one to zero in ``1 / gate_lr`` steps at best.
    """
    if not is_number(gate_lr) or not gate_lr > 0:
        raise ValueError(f"gate_lr={gate_lr!r} must be a number above 0")
    create = trainer.create_optimizer

    def create_optimizer(*args: Any, **options: Any) -> Optimizer:
        if trainer.optimizer is not None:
            return create(*args, **options)
        optimizer = create(*args, **options)
        layers = tensor_trains(trainer.model).values()
        gates = {id(gate) for layer in layers for gate in layer.gates}
        cores = {id(core) for layer in layers for core in layer.cores}
        for group in list(optimizer.param_groups):
            for kind, rate in ((gates, gate_lr), (cores, group["lr"])):
                if taken := [param for param in group["params"] if id(param) in kind]:
                    group["params"] = [param for param in group["params"] if id(param) not in kind]
                    own = {"params": taken, "lr": rate, "weight_decay": 0.0}
                    optimizer.add_param_group({**group, **own})
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    trainer.create_optimizer = create_optimizer


def learn_ranks_(
    trainer: Any, ranks: RankLearning, *, gate_lr: float | None = None
) -> "RankCallback":
    """Add rank learning to a trainer whose model was converted by :func:`comera.tensorize_`.

    A callback adds the terms of ``ranks`` to the loss; the logged loss is unchanged. When ``ranks``
    is due, the callback cuts ranks and the optimizer's state. Checkpoints hold the state of rank
    learning, so ``trainer.train(resume_from_checkpoint=True)`` resumes exactly.

    Args:
        trainer: A ``transformers.Trainer`` or an instance of a subclass, before training.
        ranks: A :class:`~comera.TwoStage` or :class:`~comera.ImportancePruning` of the trainer's
            model; its numbers of steps count optimizer steps.
        gate_lr: Learning rate of the gates, see :func:`set_optimizer_groups_`; by default what
            ``ranks.gate_lr`` advises.

    Raises:
        ValueError: If ``ranks`` belongs to another model, the trainer learns ranks already, or
            parameters cannot change their shapes, as in sharded training.

    Example::

        comera.tensorize_(model, comera.TTConfig(rank=16))
        trainer = transformers.Trainer(model, args, train_dataset=data)
        learn_ranks_(trainer, comera.TwoStage(model, 0.3, early_steps=600, late_steps=300))
        trainer.train()
    """
    ranks.check_is_of(trainer.model)
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
    set_optimizer_groups_(trainer, ranks.gate_lr if gate_lr is None else gate_lr)
    if isinstance(trainer.model, PreTrainedModel):
        attach_(trainer.model)
    callback = RankCallback(trainer, ranks)
    trainer.add_callback(callback)
    return callback


class RankCallback(RankSteps, TrainerCallback, ExportableState):
    """Callback that :func:`learn_ranks_` adds; its state is part of ``trainer_state.json``."""

    def __init__(self, trainer: Any, ranks: RankLearning) -> None:
        super().__init__(ranks)
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        """Return the state of rank learning for JSON, whose numbers hold all dtypes exactly."""
        ranks = {
            key: {"dtype": dtype_name(value), "values": value.tolist()}
            if isinstance(value, Tensor)
            else value
            for key, value in self.ranks.state_dict().items()
        }
        return {"args": {}, "attributes": {"ranks": ranks}}

    def on_train_begin(self, args, state, control, **kwargs):
        """Load the state of rank learning and override ``accelerator.backward``."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise ValueError(
                "the checkpoint holds no state of rank learning: it was written by a trainer "
                "without learn_ranks_, and ranks cannot go on from there"
            )
        ranks = {
            key: torch.tensor(value["values"], dtype=dtype_of(value))
            if isinstance(value, dict)
            else value
            for key, value in saved["attributes"]["ranks"].items()
        }
        self.ranks.load_state_dict(ranks)
        self.begin(state.max_steps - state.global_step)
        self._trainer.accelerator.backward = self._backward
        if args.device.type == "cpu":
            reuse_by_default()

    def on_train_end(self, args, state, control, **kwargs):
        """Restore the trainer's accelerator."""
        del self._trainer.accelerator.backward
        self.end()

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Count an optimizer step, unless it was skipped for non-finite gradients."""
        skipped = self._trainer.accelerator.optimizer_step_was_skipped
        self.end_step(self._trainer.optimizer, skipped)

    def on_step_end(self, args, state, control, **kwargs):
        """Cut ranks if they are due, before this step is evaluated or saved."""
        outcome = self.cut_if_due(self._trainer.optimizer)
        if outcome is None:
            return
        # A best model from before the cut would bring its ranks back.
        state.best_metric, state.best_global_step, state.best_model_checkpoint = None, None, None
        still = control.should_log  # logging unsets it
        self._trainer.log({f"ranks_{key}": value for key, value in outcome.items()})
        control.should_log = still

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate the objective of one part of a step; the losses of its parts add up."""
        accelerator = self._trainer.accelerator
        parts = self._trainer.current_gradient_accumulation_steps
        type(accelerator).backward(accelerator, self.objective(loss, parts), **kwargs)
