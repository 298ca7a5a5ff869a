"""Learn ranks inside a ``Trainer`` of ``lightning.pytorch`` or ``pytorch_lightning``."""

import logging
from typing import Any

from torch import Tensor

from comera.extras import needed_by
from comera.integrations.rank_steps import RankSteps
from comera.nn.module import tensor_trains
from comera.rank.learning import RankLearning
from comera.train.host_state import random_state, set_random_state

with needed_by("comera.integrations.lightning"):
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

log = logging.getLogger("comera")

__all__ = ["RankCallback"]


class RankCallback(RankSteps, Callback):
    """Callback of Lightning that learns the ranks of a model.

    The callback adds the terms of ``ranks`` to the loss that ``training_step`` returns; the logged
    loss is unchanged. When ``ranks`` is due, the callback cuts ranks and the optimizer's state,
    before checkpoints of that step. Checkpoints hold the state of rank learning and the random
    state of host and GPUs, so ``trainer.fit(module, ckpt_path=...)`` resumes exactly if the data
    loader does. With ``strategy="ddp"`` each resumed process has the random state of the first.
    ``configure_optimizers`` should use :func:`comera.param_groups`; the log warns if gates decay.

    Args:
        ranks: A :class:`~comera.TwoStage` or :class:`~comera.ImportancePruning` of the module, or
            of a part of it; its numbers of steps count optimizer steps.

    Raises:
        ValueError: By ``trainer.fit``: if ``ranks`` belongs to another model, the checkpoint holds
            no state of rank learning, or the trainer is sharded, has manual optimization, several
            optimizers or ``precision="16-mixed"``.

    Example::

        comera.tensorize_(module.net, comera.TTConfig(rank=16))
        ranks = comera.TwoStage(module.net, 0.3, early_steps=600, late_steps=300)
        Trainer(callbacks=[RankCallback(ranks)]).fit(module, data)
    """

    def __init__(self, ranks: RankLearning) -> None:
        super().__init__(ranks)
        self._random: dict[str, Any] | None = None  # of a checkpoint, until training starts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank learning and the random state, for a checkpoint."""
        return {"ranks": self.ranks.state_dict(), "random": random_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict` from a checkpoint."""
        self.ranks.load_state_dict(state_dict["ranks"])
        self._random = state_dict["random"]

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        """Raise if a checkpoint to resume from holds no state of rank learning."""
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise ValueError(
                "the checkpoint holds no state of rank learning: it was written by a trainer "
                "without this RankCallback, and ranks cannot go on from there"
            )

    def on_fit_start(self, trainer, pl_module):
        """Check the model, the trainer and the optimizer; restore the random state."""
        self.ranks.check_is_of(pl_module)
        kind = type(trainer.strategy).__name__
        if kind in ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"):
            raise ValueError(
                f"ranks are learned of whole parameters, and {kind} cuts them into shards: take "
                'strategy="ddp" or one device'
            )
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            how = f"{len(trainer.optimizers)} optimizers"
            if not pl_module.automatic_optimization:
                how = "automatic_optimization=False"
            raise ValueError(
                "RankCallback counts the steps of one optimizer that Lightning takes, and the "
                f"module has {how}: call ranks.objective, ranks.step and ranks.finish_ in "
                "training_step"
            )
        if trainer.precision == "16-mixed":
            raise ValueError(
                'precision="16-mixed" skips steps whose gradients are not finite, and RankCallback '
                'would count them: take precision="bf16-mixed"'
            )
        gates = {id(gate) for layer in tensor_trains(pl_module).values() for gate in layer.gates}
        for group in trainer.optimizers[0].param_groups:
            decay = group.get("weight_decay", 0.0)
            if decay and any(id(param) in gates for param in group["params"]):
                log.warning(
                    "the optimizer decays gates by weight_decay=%g, which closes ranks whatever "
                    "they are worth: let configure_optimizers hand over "
                    "comera.param_groups(self, lr)",
                    decay,
                )
                break
        if self._random is not None:  # before the data loader draws the order of an epoch
            set_random_state(self._random)
            self._random = None

    def on_train_start(self, trainer, pl_module):
        """Override ``strategy.backward`` to differentiate the objective."""
        self._taken = trainer.global_step  # optimizer steps counted
        self.begin(trainer.estimated_stepping_batches - trainer.global_step)
        backward = trainer.strategy.backward

        def of_objective(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # Read each time: a GradientAccumulationScheduler changes it.
            objective = self.objective(closure_loss, trainer.accumulate_grad_batches)
            return backward(objective, *args, **kwargs)

        trainer.strategy.backward = of_objective

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Count an optimizer step, if this batch ended one, and cut ranks if they are due."""
        if trainer.global_step == self._taken:
            return
        self._taken = trainer.global_step
        self.end_step(trainer.optimizers[0])
        outcome = self.cut_if_due(trainer.optimizers[0])
        if outcome is not None:
            pl_module.log_dict({f"ranks_{key}": float(value) for key, value in outcome.items()})
        if outcome is not None or self.ranks.turned:
            for each in trainer.callbacks:  # averages of weights begin again
                if average := getattr(each, "_average_model", None):
                    getattr(average, "module", average).load_state_dict(pl_module.state_dict())
                    of = average if hasattr(average, "n_averaged") else each
                    if of.n_averaged is not None:
                        of.n_averaged.zero_()

    def on_train_end(self, trainer, pl_module):
        """Restore the trainer's ``backward``; warn if no rank was cut."""
        self.on_exception(trainer, pl_module, None)
        self.end()

    def on_exception(self, trainer, pl_module, exception):
        """Restore the trainer's ``backward``."""
        vars(trainer.strategy).pop("backward", None)
