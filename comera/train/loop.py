"""The training loop: evaluate, log, save, resume, stop cleanly."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from comera.checkpoint.chain import CheckpointChain
from comera.train.log import Pace, PlainLines, RunLog, SilentLog, progress_bar
from comera.train.processes import Processes
from comera.train.run_under_way import Evaluate, LoopResult, RunUnderWay
from comera.train.step import TrainStep
from comera.train.stop_signals import on_stop_signals

log = logging.getLogger("comera")


def train(
    step: TrainStep,
    get_batch: Callable[[int], Any],
    *,
    steps: int,
    seconds: float | None = None,
    folder: Path,
    evaluate: Evaluate | None = None,
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
        seconds: End before that, at the first line of the log with so many seconds in training
            steps; None for no limit.
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
        run = RunUnderWay(step, chain, evaluate, together)
        if not resume:
            together.from_first(lambda: chain.rewind(-1))
        run.restore_()
        if step.steps_done and together.is_first:
            log.info("%s: going on after step %s", title, f"{step.steps_done:,}")
        # After loading: lines of steps beyond the checkpoint are dropped, they will come again.
        run.log = RunLog(folder, step.steps_done, tensorboard) if together.is_first else SilentLog()
        at_end.callback(run.log.close)
        pace = Pace(run.device, per_step, step.steps_done, run.clock.seconds())
        with _stop_signals() as stopped, progress_bar(quiet) as bar:
            task = bar.add_task(title, total=steps, completed=step.steps_done, figures="")
            lines = PlainLines(bar, title, steps)
            step.model.train()

            def time_is_up() -> bool:
                if seconds is None or step.steps_done % log_every:
                    return False
                return together.from_first(lambda: run.clock.seconds() >= seconds)

            ended = step.steps_done >= steps or time_is_up()
            while not ended and not together.any(stopped.is_set()):
                batch = get_batch(step.steps_done)
                together.draw_(seed, step.steps_done)
                run.train_on(batch)
                done = step.steps_done
                ended = done == steps
                if ended or done % log_every == 0:
                    figures = f"loss {run.log_loss():.4f}, {pace.show(done, run.clock.seconds())}"
                    bar.update(task, figures=f"{figures},")
                    lines.show(done, figures)
                if not ended and time_is_up():
                    ended = True
                    if together.is_first:
                        log.info(
                            "%s: ends after step %d of %d, as its %g seconds are up",
                            title,
                            done,
                            steps,
                            seconds,
                        )
                bar.update(task, completed=done)
                # Ranks are cut before the model is measured or saved, so that a figure or a
                # checkpoint of this step is of the small model, with which the run goes on.
                run.cut_ranks_(at_end=ended)
                if ended or (eval_every and done % eval_every == 0):
                    run.measure()
                # Last, so that the figures of this step are in it.
                if save_every and done % save_every == 0 and not ended:
                    run.save()
            run.end(interrupted=not ended)
        run.save()  # the end of the run, or the step at which it was interrupted
    together.wait()  # one that ended early would have its launcher end the one that writes
    run.result.steps, run.result.seconds = step.steps_done, run.clock.seconds()
    return run.result


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
