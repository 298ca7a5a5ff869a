"""The training loop: evaluate, log, save, resume, stop cleanly."""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comera.checkpoint.chain import CheckpointChain
from comera.train.clock import StepClock
from comera.train.data_parallel import unwrapped_model
from comera.train.log import PlainLines, RunLog, SilentLog, progress_bar
from comera.train.pace import Pace
from comera.train.processes import Processes
from comera.train.run_state import restore_, save_checkpoint
from comera.train.step import NonFiniteLossError, TrainStep
from comera.train.stop_signals import on_stop_signals

log = logging.getLogger("comera")


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


def train(
    step: TrainStep,
    get_batch: Callable[[int], Any],
    *,
    steps: int,
    folder: Path,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    eval_every: int = 0,
    save_every: int = 0,
    log_every: int = 10,
    resume: bool = False,
    chain: CheckpointChain | None = None,
    title: str = "train",
    per_step: tuple[int, str] | None = None,
    quiet: bool = False,
    tensorboard: bool = True,
    processes: Processes | None = None,
) -> LoopResult:
    """Train for ``steps`` optimizer steps, from the start or from the last checkpoint.

    When the rank schedule ends, ranks are truncated, the optimizer is cut along, and the rest of
    the steps train the small model. Interrupted by Ctrl-C, SIGTERM or a terminal that is
    closed it finishes the step, saves and returns; a second Ctrl-C stops at once.

    Args:
        step: The training step.
        get_batch: Makes a batch of the number of the step, counted from 0. It must depend on
            nothing else, so that a resumed run sees the same batches.
        steps: Optimizer steps in all.
        folder: Receives ``metrics.jsonl``, ``tensorboard/`` and ``checkpoints/``.
        evaluate: Called with the model in evaluation mode; returns named figures.
        eval_every: Steps between evaluations; 0 for only one at the end.
        save_every: Steps between checkpoints; 0 for only one at the end.
        log_every: Steps whose mean loss makes one line of the log.
        resume: Go on from the last checkpoint that is sound, if there is one; else delete those
            there are.
        chain: The checkpoints; None for the last two, lossless, in ``folder``.
        title: Shown beside the progress bar.
        per_step: How much a step trains on, of all processes, and what that is called, so that the
            progress bar shows how much that is a second: say ``(4096, "tokens")``.
        quiet: Whether to show no progress bar.
        tensorboard: Whether to write TensorBoard files.
        processes: Those that train the model together, all of which call this; None for this one
            alone. The first one writes the folder and reads its checkpoints for all; all of them
            stop after the same step. Random numbers, such as dropout's, then follow from torch's
            seed, the number of the step and that of the process.

    Raises:
        NonFiniteLossError: If the loss is not finite; the state before is saved, the step named.
        FolderInUseError: If another process trains into the folder; a RuntimeError.
    """
    if chain is None:
        chain = CheckpointChain(folder / "checkpoints", mode="lossless", key_every=1, keep_last=2)
    together = processes or Processes()
    seed = torch.initial_seed()
    # Before anything in the folder is touched that another process may write.
    together.from_first(chain.lock)
    with contextlib.ExitStack() as at_end:
        at_end.callback(chain.close)  # whatever happened: what was handed over is written
        # The sum and number of losses since the last line of the log are part of a checkpoint, so
        # that the lines of a resumed run are those of one that was never stopped.
        device = next(step.model.parameters()).device
        clock, saved_at = StepClock(device), -1
        result = LoopResult(0, 0.0)
        total, count = torch.zeros(()), 0
        if not resume:
            together.from_first(lambda: chain.rewind(-1))
        saved = together.from_first(lambda: chain.load() if chain.steps() else None)
        if saved is not None:
            extra = restore_(step, saved, chain.folder)
            saved_at = step.steps_done
            clock.add(extra["seconds"])
            result.ranks, result.metrics = extra["ranks"], extra["metrics"]
            total, count = extra["unlogged"]
        # After loading: lines of steps beyond the checkpoint are dropped, they will come again.
        run_log = RunLog(folder, step.steps_done, tensorboard) if together.is_first else SilentLog()
        at_end.callback(run_log.close)

        def save() -> None:
            nonlocal saved_at
            # Several reasons to save may meet at one step, such as its turn and the end.
            if step.steps_done == saved_at:
                return
            extra = {
                "seconds": clock.seconds(),
                "ranks": result.ranks,
                "metrics": result.metrics,
                "unlogged": (total, count),
            }
            save_checkpoint(chain, step, extra, writes=together.is_first)
            saved_at = step.steps_done

        def note_loss() -> float:
            nonlocal total, count
            # Reading the sum waits for a GPU, so only here is a loss there found not to be finite.
            mean = float(total) / max(1, count)
            total, count = torch.zeros(()), 0
            if not math.isfinite(mean):
                problem = NonFiniteLossError(
                    f"the loss is {mean} at or before step {step.steps_done},{step.watch.advice()}"
                )
                note_failure(step.steps_done, problem)
                raise problem
            seconds = round(clock.seconds(), 3)  # it has waited for the loss
            run_log.write(step.steps_done, loss=mean, seconds=seconds, **_figures(step))
            return mean

        def note_failure(at: int, problem: NonFiniteLossError) -> None:
            # The step is beyond the last checkpoint: a run that goes on drops the line.
            run_log.write(at, failed=str(problem))

        def measure() -> None:
            assert evaluate is not None, "asked for only where there is one"
            try:
                result.metrics = evaluated(step, evaluate)
                figures = {f"eval/{key}": value for key, value in result.metrics.items()}
                run_log.write(step.steps_done, **figures)
            except Exception:  # what has been trained is not lost with it
                result.metrics = {}
                save()
                raise

        pace = Pace(device, per_step, step.steps_done, clock.seconds())
        with _stop_signals() as stopped, progress_bar(quiet) as bar:
            task = bar.add_task(title, total=steps, completed=step.steps_done, figures="")
            lines = PlainLines(bar, title, steps)
            step.model.train()
            while step.steps_done < steps and not together.any(stopped.is_set()):
                batch = get_batch(step.steps_done)
                together.draw_(seed, step.steps_done)
                try:
                    with clock.step():
                        loss = step(batch)
                except NonFiniteLossError as problem:
                    save()  # nothing was updated: the state is worth keeping
                    note_failure(step.steps_done + 1, problem)
                    raise
                # Losses are added up where they are: reading each would wait for the device.
                total, count = total.to(loss.device) + loss, count + 1
                done = step.steps_done
                if done % log_every == 0 or done == steps:
                    mean = note_loss()
                    speed = pace.show(done, clock.seconds())
                    bar.update(task, figures=f"loss {mean:.4f}, {speed},")
                    lines.show(done, f"loss {mean:.4f}, {speed}")
                bar.update(task, completed=done)
                # Ranks are cut before the model is measured or saved, so that a figure or a
                # checkpoint of this step is of the small model, with which the run goes on.
                ranks = step.ranks
                if ranks is not None and (ranks.due or (done == steps and ranks.forced is None)):
                    result.ranks = ranks.finish_(step.optimizer)
                    run_log.write(done, stage="done", **result.ranks)
                if evaluate and ((eval_every and done % eval_every == 0) or done == steps):
                    measure()
                # Last, so that the figures of this step are in it.
                if save_every and done % save_every == 0 and done < steps:
                    save()
            result.interrupted = step.steps_done < steps
            if evaluate and not result.interrupted and not result.metrics:  # it failed last time
                measure()
        save()  # the end of the run, or the step at which it was interrupted
    together.wait()  # one that ended early would have its launcher end the one that writes
    result.steps, result.seconds = step.steps_done, clock.seconds()
    return result


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


def evaluated(
    step: TrainStep, evaluate: Callable[[nn.Module], dict[str, float]]
) -> dict[str, float]:
    """Evaluate the model in evaluation mode; it is back in training mode afterwards."""
    step.model.eval()
    try:
        with torch.no_grad(), step.contracted:  # the cores are contracted once for all batches
            # Without its wrapper, whose forward pass waits for other processes.
            found = evaluate(unwrapped_model(step.model))
        return {name: float(value) for name, value in found.items()}
    finally:
        step.model.train()


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that the first signal to stop sets; a second one acts as usual."""
    stopped = threading.Event()

    def stop(number: int) -> None:
        log.warning("stopping after this step; once more stops at once, without saving")
        stopped.set()
        give_back()

    with on_stop_signals(stop) as give_back:
        yield stopped
