"""A run between two of its steps: losses not yet logged, figures, what is saved."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comera.checkpoint.chain import CheckpointChain
from comera.train.data_parallel import unwrapped_model
from comera.train.log import RunLog, SilentLog, StepClock
from comera.train.processes import Processes
from comera.train.run_state import restore_, save_checkpoint
from comera.train.step import NonFiniteLossError, TrainStep

Evaluate = Callable[[nn.Module], dict[str, float]]
"""Takes the model in evaluation mode, and returns named figures."""


@dataclass
class LoopResult:
    """How a run ended.

    Attributes:
        steps: Optimizer steps in all, earlier sessions included.
        seconds: Time spent in training steps, evaluation and saving left out; on a GPU how long it
            ran them, however soon they were launched.
        interrupted: Whether it was stopped by a signal; it is then saved and can be resumed.
        metrics: What the last evaluation returned.
        ranks: What ``finish_`` of rank learning returned, if it ran.
    """

    steps: int
    seconds: float
    interrupted: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, Any] | None = None


class RunUnderWay:
    """What one session of a run counts, writes and saves.

    Args:
        step: The training step.
        chain: Receives the checkpoints.
        evaluate: What measures the model, if anything does.
        processes: Those that train the model together.

    Attributes:
        device: The device on which the steps run.
        log: Receives the figures; to be set before the first of them.
        clock: Seconds of the steps so far.
        result: How the run has gone so far.
    """

    log: RunLog | SilentLog

    def __init__(
        self,
        step: TrainStep,
        chain: CheckpointChain,
        evaluate: Evaluate | None,
        processes: Processes,
    ) -> None:
        self._step, self._chain, self._processes = step, chain, processes
        self._evaluate = evaluate
        self.device = next(step.model.parameters()).device
        self.clock = StepClock(self.device)
        self.result = LoopResult(0, 0.0)
        self._saved_at = -1
        # The sum and number of losses since the last line of the log are part of a checkpoint, so
        # that the lines of a resumed run are those of one that was never stopped.
        self._total, self._count = torch.zeros(()), 0

    def restore_(self) -> None:
        """Go on from the last checkpoint that is sound, if there is one."""
        chain = self._chain
        saved = self._processes.from_first(lambda: chain.load() if chain.steps() else None)
        if saved is None:
            return
        extra = restore_(self._step, saved, chain.folder)
        self._saved_at = self._step.steps_done
        self.clock.add(extra["seconds"])
        self.result.ranks, self.result.metrics = extra["ranks"], extra["metrics"]
        self._total, self._count = extra["unlogged"]

    def save(self) -> None:
        """Write a checkpoint; nothing if that of this step is written."""
        # Several reasons to save may meet at one step, such as its turn and the end.
        if self._step.steps_done == self._saved_at:
            return
        extra = {
            "seconds": self.clock.seconds(),
            "ranks": self.result.ranks,
            "metrics": self.result.metrics,
            "unlogged": (self._total, self._count),
        }
        save_checkpoint(self._chain, self._step, extra, writes=self._processes.is_first)
        self._saved_at = self._step.steps_done

    def train_on(self, batch: Any) -> None:
        """Do one step.

        Raises:
            NonFiniteLossError: If the loss is known not to be finite; the state before is saved.
        """
        try:
            with self.clock.step():
                loss = self._step(batch)
        except NonFiniteLossError as problem:
            self.save()  # nothing was updated: the state is worth keeping
            self._note_failure(self._step.steps_done + 1, problem)
            raise
        self._add(loss)

    def _add(self, loss: Tensor) -> None:
        # Losses are added up where they are: reading each would wait for the device.
        self._total, self._count = self._total.to(loss.device) + loss, self._count + 1

    def log_loss(self) -> float:
        """Write the mean loss since this was last done, and return it.

        Raises:
            NonFiniteLossError: If it is not finite.
        """
        # Reading the sum waits for a GPU, so only here is a loss there found not to be finite.
        step, mean = self._step, float(self._total) / max(1, self._count)
        self._total, self._count = torch.zeros(()), 0
        if not math.isfinite(mean):
            problem = NonFiniteLossError(
                f"the loss is {mean} at or before step {step.steps_done},{step.watch.advice()}"
            )
            self._note_failure(step.steps_done, problem)
            raise problem
        seconds = round(self.clock.seconds(), 3)  # it has waited for the loss
        self.log.write(step.steps_done, loss=mean, seconds=seconds, **_figures(step))
        return mean

    def _note_failure(self, at: int, problem: NonFiniteLossError) -> None:
        # The step is beyond the last checkpoint: a run that goes on drops the line.
        self.log.write(at, failed=str(problem))

    def cut_ranks_(self, *, at_end: bool) -> None:
        """Cut the ranks where rank learning has got to its end.

        Args:
            at_end: Whether this was the last step, after which they are cut in any case.
        """
        step, ranks = self._step, self._step.ranks
        if ranks is not None and (ranks.due or (at_end and ranks.forced is None)):
            self.result.ranks = ranks.finish_(step.optimizer)
            self.log.write(step.steps_done, stage="done", **self.result.ranks)

    def measure(self) -> None:
        """Evaluate the model; if that fails, save what has been trained before it is said."""
        if self._evaluate is None:
            return
        try:
            self.result.metrics = evaluated(self._step, self._evaluate)
            figures = {f"eval/{key}": value for key, value in self.result.metrics.items()}
            self.log.write(self._step.steps_done, **figures)
        except Exception:
            self.result.metrics = {}
            self.save()
            raise

    def end(self, *, interrupted: bool) -> None:
        """Note how the steps have ended, and have figures of the end."""
        self.result.interrupted = interrupted
        if not interrupted and not self.result.metrics:  # the last time it failed
            self.measure()


def _figures(step: TrainStep) -> dict[str, Any]:
    group = step.optimizer.param_groups[0]  # its rate without the factor of its layers
    figures: dict[str, Any] = {"lr": float(group["lr"]) / group.get("rate_scale", 1.0)}
    if step.ranks is not None:
        size = step.ranks.size
        figures |= {
            "stage": step.ranks.stage,
            "size": int(size.exact()),
            "relaxed_size": round(float(size.relaxed().detach()), 1),
            "live_ranks": {name: list(layer.live_ranks) for name, layer in size.layers.items()},
        }
    return figures


def evaluated(step: TrainStep, evaluate: Evaluate) -> dict[str, float]:
    """Evaluate the model in evaluation mode; it is back in training mode afterwards."""
    step.model.eval()
    try:
        with torch.no_grad(), step.contracted:  # the cores are contracted once for all batches
            # Without its wrapper, whose forward pass waits for other processes.
            found = evaluate(unwrapped_model(step.model))
        return {name: float(value) for name, value in found.items()}
    finally:
        step.model.train()
