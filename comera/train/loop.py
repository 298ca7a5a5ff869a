"""Run the training loop: evaluate, log, save, resume, stop cleanly."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from comera.checkpoint.chain import CheckpointChain
from comera.nn.swap import evaluation_mode
from comera.train.data_parallel import unwrapped_model
from comera.train.log import (
    MemoryWatch,
    Pace,
    PlainLines,
    RunLog,
    SilentLog,
    StepClock,
    progress_bar,
)
from comera.train.processes import Processes, on_stop_signals
from comera.train.run_state import restore_, save_checkpoint
from comera.train.step import NonFiniteLossError, TrainStep

log = logging.getLogger("comera")

SILENT = 0.01
"""Spread of answers that no shown loss tells: to answer the mean adds half its square, 0.00005."""

Evaluate = Callable[[nn.Module], dict[str, float]]
"""Takes the model in evaluation mode, and returns named figures."""


@dataclass
class LoopResult:
    """Result of a training run, including earlier sessions.

    ``seconds`` is the time of training steps, without evaluation and saving; on a GPU the GPU's.
    ``processor_seconds`` are those of all processors in them, NaN if an earlier version began the
    run. ``peak_memory``, in bytes, is that of the steps before the first evaluation or checkpoint.
    If a signal has ``interrupted`` the run, it is saved and can be resumed. ``metrics`` are of the
    last evaluation, ``ranks`` the result of ``finish_`` of rank learning, if it ran.
    """

    steps: int
    seconds: float
    interrupted: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, Any] | None = None
    processor_seconds: float = 0.0
    peak_memory: int | None = None


class RunUnderWay:
    """A session of a run: its ``result`` so far, the ``clock`` of its steps and its checkpoints.

    ``log`` receives the figures; set it before training. ``watch`` measures the first steps.
    """

    log: SilentLog
    watch: MemoryWatch | None = None

    def __init__(
        self,
        step: TrainStep,
        chain: CheckpointChain,
        evaluate: Evaluate | None,
        processes: Processes,
        spread: Evaluate | None = None,
        by_processor: bool = False,
    ) -> None:
        self._step, self._chain, self._processes = step, chain, processes
        self._evaluate, self._spread = evaluate, spread
        self.clock = StepClock(next(step.model.parameters()).device, by_processor)
        self.result = LoopResult(0, 0.0)
        self._saved_at = -1
        # Sum and number of losses since the last line of the log; part of a checkpoint, so that a
        # resumed run logs the same lines.
        self._total, self._count = torch.zeros(()), 0

    def restore_(self) -> None:
        """Resume from the last sound checkpoint, if there is one."""
        chain = self._chain
        saved = self._processes.from_first(lambda: chain.load() if chain.steps() else None)
        if saved is None:
            return
        extra = restore_(self._step, saved, chain.folder)
        self._saved_at = self._step.steps_done
        self.clock.add(extra["seconds"] - self.clock.seconds())
        self.clock.processor = extra.get("processor_seconds", math.nan)
        self.result.peak_memory = extra.get("peak_memory")
        self.result.ranks, self.result.metrics = extra["ranks"], extra["metrics"]
        self._total, self._count = extra["unlogged"]

    def save(self) -> None:
        """Write a checkpoint, unless this step has one already."""
        if self._step.steps_done == self._saved_at:
            return
        self.weigh()
        extra = {
            "seconds": self.clock.seconds(),
            "processor_seconds": self.clock.processor,
            "peak_memory": self.result.peak_memory,
            "ranks": self.result.ranks,
            "metrics": self.result.metrics,
            "unlogged": (self._total, self._count),
        }
        save_checkpoint(self._chain, self._step, extra, writes=self._processes.is_first)
        self._saved_at = self._step.steps_done

    def weigh(self) -> None:
        """Record the peak memory of the steps so far, once, before anything else takes memory."""
        if self.watch is not None:
            self.result.peak_memory, self.watch = self.watch.peak(), None

    def place(self, steps: int, seconds: float | None) -> float:
        """Return the step at which the run stands, by the clock if its length is ``seconds``."""
        step = self._step
        if seconds is None:
            return step.steps_done
        used, usual = self._processes.from_first(self.clock.reading)
        if usual and step.ranks is not None and step.ranks.forced is None:
            step.ranks.pace = steps * usual / seconds
        return steps * used / seconds

    def train_on(self, batch: Any) -> None:
        """Train for one step; on ``NonFiniteLossError``, save the unchanged state and raise it."""
        try:
            with self.clock.step():
                loss = self._step(batch)
        except NonFiniteLossError as problem:
            self.save()  # nothing was updated: the state is worth keeping
            # The step is beyond the last checkpoint: a resumed run drops the line.
            self.log.write(self._step.steps_done + 1, failed=str(problem))
            raise
        # Losses are added up where they are: reading each would wait for the device.
        self._total, self._count = self._total.to(loss.device) + loss, self._count + 1

    def log_loss(self) -> float:
        """Log and return the mean loss since the last call, or raise ``NonFiniteLossError``."""
        step, mean = self._step, float(self._total) / max(1, self._count)
        self._total, self._count = torch.zeros(()), 0
        if not math.isfinite(mean):
            problem = NonFiniteLossError(
                f"the loss is {mean} at or before step {step.steps_done},{step.watch.advice()}"
            )
            self.log.write(step.steps_done, failed=str(problem))
            raise problem
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
        seconds = round(self.clock.seconds(), 3)
        self.log.write(step.steps_done, loss=mean, seconds=seconds, **figures)
        return mean

    def cut_ranks_(self, *, at_end: bool) -> None:
        """Cut the ranks if rank learning is due, or ``at_end`` of the run in any case."""
        step, ranks = self._step, self._step.ranks
        if ranks is not None and (ranks.due or (at_end and ranks.forced is None)):
            spread = self.spread("before its ranks are cut,")
            self.result.ranks = ranks.finish_(step.optimizer) | spread
            self.log.write(step.steps_done, stage="done", **self.result.ranks)

    def spread(self, when: str) -> dict[str, float]:
        """Return how far the model's answers differ among inputs; warn if they hardly do."""
        self.weigh()
        found = {} if self._spread is None else evaluated(self._step, self._spread)
        if found.get("spread", SILENT) < SILENT and self._processes.is_first:
            log.warning(
                "%s the model answers the same to every input (its probabilities differ by a share "
                "of %.1g): give it more steps, or its cores a higher learning rate",
                when, found["spread"],
            )  # fmt: skip
        return found

    def measure(self, *, at_end: bool) -> None:
        """Evaluate the model; if that fails, save the state before the error is raised."""
        self.weigh()
        if self._evaluate is None:
            return
        try:
            self.result.metrics = evaluated(self._step, self._evaluate)
            figures = {f"eval/{key}": value for key, value in self.result.metrics.items()}
            if at_end:
                figures |= self.spread("after training,")
            self.log.write(self._step.steps_done, **figures)
        except Exception:
            self.result.metrics = {}
            self.save()
            raise


def evaluated(step: TrainStep, evaluate: Evaluate) -> dict[str, float]:
    """Evaluate the model in evaluation mode."""
    # The cores are contracted once for all batches.
    with evaluation_mode(step.model), torch.no_grad(), step.contracted:
        # Without its wrapper, whose forward pass waits for other processes.
        found = evaluate(unwrapped_model(step.model))
    return {name: float(value) for name, value in found.items()}


def forward_seconds(step: TrainStep, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> float:
    """Return the seconds of a pass in evaluation mode, loss included, the least of five."""
    model, times = unwrapped_model(step.model), []
    with evaluation_mode(model), torch.no_grad(), step.contracted:
        for _ in range(6):
            began = time.perf_counter()
            float(loss_fn(model, batch))  # waits for the device
            times.append(time.perf_counter() - began)
    return min(times[1:])


def train(
    step: TrainStep,
    get_batch: Callable[[int], Any],
    *,
    steps: int,
    seconds: float | None = None,
    by_processor: bool = False,
    folder: Path,
    evaluate: Evaluate | None = None,
    spread: Evaluate | None = None,
    eval_every: int = 0,
    save_every: int = 0,
    log_every: int = 10,
    resume: bool = False,
    chain: CheckpointChain | None = None,
    restart: bool = False,
    title: str = "train",
    per_step: tuple[int, str] | None = None,
    quiet: bool = False,
    tensorboard: bool = True,
    processes: Processes | None = None,
    watch: MemoryWatch | None = None,
) -> LoopResult:
    """Train for so many steps or ``seconds``, from the start or from the last checkpoint.

    When rank learning ends, ranks and optimizer state are cut, and the rest of the run trains
    the small model. Ctrl-C, SIGTERM or a closed terminal ends training after the present step and a
    checkpoint; a second Ctrl-C stops at once.

    Args:
        step: The training step.
        get_batch: Function that makes a batch from the number of the step, counted from 0, and
            nothing else, so that a resumed run sees the same batches.
        steps: Optimizer steps in all; with ``seconds`` those that rank learning and a scheduler
            such as ``LambdaLR`` are made for, at whose share they stand that the clock has used.
        seconds: Length of the run instead, in training steps.
        by_processor: Whether seconds are those of all processors in a step on a CPU, which other
            work on the machine does not lengthen, and not those on the wall.
        folder: Folder for ``metrics.jsonl``, ``tensorboard/`` and ``checkpoints/``.
        spread: Function that returns, as ``spread``, how far answers differ among inputs; it is
            asked before ranks are cut and at the end, and warns of a model that answers nothing.
        eval_every: Steps between evaluations; 0 for only one at the end, as ``save_every``.
        resume: Whether to resume from the last sound checkpoint, if any; False deletes checkpoints.
        chain: The chain of checkpoints; None keeps the last two, lossless, in ``folder``.
        restart: Whether training continues from the state read back from each checkpoint.
        per_step: Size of a step in all processes, and its unit, for the speed that the progress
            bar shows: say ``(4096, "tokens")``.
        processes: The processes that train the model together and all call this; None for a single
            process. The first one writes the folder and reads its checkpoints for all; all stop
            after the same step. Random numbers, such as dropout's, then follow from torch's seed,
            the number of the step and that of the process.
        watch: Begun before the model was made, to measure the peak memory of training.

    Raises:
        NonFiniteLossError: If the loss is not finite; it names the step, and the state before is
            saved.
        FolderInUseError: If another process trains into the folder; a RuntimeError.
    """
    if chain is None:
        chain = CheckpointChain(folder / "checkpoints", mode="lossless", key_every=1, keep_last=2)
    together = processes or Processes()
    seed = torch.initial_seed()
    # Before anything in the folder is touched that another process may write.
    together.from_first(chain.lock)
    with contextlib.ExitStack() as at_end:
        at_end.callback(chain.close)  # it writes the checkpoints that are under way
        run = RunUnderWay(step, chain, evaluate, together, spread, by_processor)
        if not resume:
            together.from_first(lambda: chain.rewind(-1))
        peaks = getattr(step.scheduler, "base_lrs", [])
        run.restore_()
        if step.steps_done and together.is_first:
            log.info("%s: going on after step %s", title, f"{step.steps_done:,}")
        if watch is not None and not step.steps_done:  # else an earlier session has measured it
            watch.begin()
            run.watch = watch
        # After loading: lines of steps beyond the checkpoint are dropped.
        run.log = RunLog(folder, step.steps_done, tensorboard) if together.is_first else SilentLog()
        at_end.callback(run.log.close)
        device = next(step.model.parameters()).device
        pace = Pace(device, per_step, step.steps_done, run.clock.seconds())
        stopped = threading.Event()

        def stop(number: int) -> None:
            log.warning("stopping after this step; once more stops at once, without saving")
            stopped.set()
            give_back()  # a second signal acts as usual

        with on_stop_signals(stop) as give_back, progress_bar(quiet) as bar:
            step.model.train()
            step.counts = seconds is None
            title += "" if seconds is None else ", seconds"
            total, at = steps if seconds is None else round(seconds), run.place(steps, seconds)
            if step.steps_done and isinstance(schedule := step.scheduler, LambdaLR):
                # The checkpoint's rates are those of a run of its length, which may be another.
                schedule.base_lrs = peaks
                schedule.last_epoch = (schedule.last_epoch if step.counts else at) - 1  # type: ignore[assignment]
                schedule._step_count -= 1  # a resumed run has the state of an uninterrupted one
                schedule.step()
            task = bar.add_task(title, total=total, completed=round(at * total / steps), figures="")
            lines = PlainLines(bar, title, total)
            # A session whose time was up may have been broken off before its ranks were cut.
            uncut = step.ranks is not None and step.ranks.forced is None
            ended = at >= steps and (seconds is None or not uncut)
            while not ended and not together.any(stopped.is_set()):
                batch = get_batch(step.steps_done)
                together.draw_(seed, step.steps_done)
                run.train_on(batch)
                done, at = step.steps_done, max(at, run.place(steps, seconds))
                if seconds is not None:
                    step.stand_at_(at)
                ended, shown = at >= steps, round(at * total / steps)
                if ended or done % log_every == 0:
                    figures = f"loss {run.log_loss():.4f}, {pace.show(done, run.clock.seconds())}"
                    bar.update(task, figures=f"{figures},")
                    lines.show(shown, figures)
                bar.update(task, completed=shown)
                # Before the model is measured or saved: the run goes on with the small model.
                run.cut_ranks_(at_end=ended)
                if ended or (eval_every and done % eval_every == 0):
                    run.measure(at_end=ended)
                if save_every and done % save_every == 0 and not ended:
                    run.save()
                    if restart:
                        chain.wait()
                        run.restore_()
            run.result.interrupted = not ended
            if ended and not run.result.metrics:  # the last evaluation failed
                run.measure(at_end=True)
        run.save()  # the end of the run, or the step at which it was interrupted
    together.any(False)  # one that ended early would have its launcher end the one that writes
    run.result.steps, run.result.seconds = step.steps_done, run.clock.seconds()
    run.result.processor_seconds = run.clock.processor
    return run.result
