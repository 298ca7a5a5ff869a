"""Run a training step by one call: forward, rank objective, backward, clipping, optimizer."""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.allocator import return_freed_memory, reuse_by_default
from comera.nn.batched_contraction import BatchedContraction
from comera.nn.module import check_model, check_unsharded
from comera.ops.context import fp8_products, shapes_are_static
from comera.ops.dispatch import may_read_values
from comera.ops.linear.fp8 import why_not_fp8
from comera.ops.product import onednn_shapes
from comera.optim.in_backward import OptimizerInBackward
from comera.optim.state_layout import AnyOptimizer, unwrap
from comera.params import is_sharded
from comera.rank.agreement import mean_over
from comera.rank.learning import RankLearning, check_holds
from comera.shapes import check_whole_numbers, is_number
from comera.train.capture import WARM_UP, Capture, StepDescription
from comera.train.data_parallel import WARM_UP_TOGETHER, DataParallel, Together
from comera.train.graphs import CudaGraphs
from comera.train.host_state import HostState
from comera.train.rate_watch import EVERY, RateWatch
from comera.train.sharded import Sharded

log = logging.getLogger("comera")


class NonFiniteLossError(RuntimeError):
    """Raised if a loss or gradient is NaN or infinite; parameters are as before the step."""


class TrainStep:
    """A training step as a callable: ``loss = step(batch)``.

    Args:
        model: The model, in training mode: put it back if you evaluate in between. It may be in a
            ``DistributedDataParallel``; then all processes make the same calls.
        loss_fn: Function ``loss_fn(model, batch)`` that returns a scalar, the batch's mean loss.
        optimizer: The optimizer, which steps once in each call; in a
            :class:`~comera.OptimizerInBackward`, in the last backward pass of a call.
        ranks: A :class:`~comera.TwoStage` or :class:`~comera.ImportancePruning` of the model, if
            ranks are learned.
        accumulate: Number of parts to split each batch into along its first dimension; their
            gradients are added up before the optimizer's step.
        clip_norm: Largest norm of all gradients together.
        precision: Precision of the forward pass: ``"fp32"``; ``"bf16"`` for mixed precision, by
            ``torch.autocast``; or ``"fp8"``, in which tensor-train linears multiply in eight bits
            and all else is as in ``"bf16"``. If torch or the GPU cannot do that, ``"bf16"`` is
            used, and a warning says why.
        scheduler: A learning-rate scheduler, which steps once in each call.
        compile: Run forward and loss through ``torch.compile``.
        graph: Whether to replay the step as one CUDA graph, from the fifth step on; by default on a
            GPU. False runs every step eagerly, as a CPU does in any case.
        watch: Steps between two checks of the weights, which wait for the device; 0 for none. The
            checks warn once of a learning rate at which a step replaces a weight or attention
            scores grow out of bounds, before the loss is NaN. The first checks come sooner.

    Attributes:
        autocast: Dtype of the forward pass, ``torch.bfloat16``; None in ``"fp32"``.
        scaled: Whether tensor-train linears multiply in eight bits.
        contracted: The context in which layers contract their cores together; each step enters it.
        watch: Checks the weights; ``watch.last`` is the result of the last check.

    Raises:
        NonFiniteLossError: On the CPU, if the loss is not finite or, with ``clip_norm``, a gradient
            is not; nothing has been updated then. Without ``clip_norm``, and always with per-layer
            updates, such a gradient is applied.
        Exception: Any error of ``loss_fn``, backward or the optimizer, and Ctrl-C. Gradients are
            dropped and rank learning is as before the call, so that the next call starts clean;
            changes by the optimizer stay.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a setting is out of range or does not go with per-layer updates, or a tensor
            train is sharded, as by ``fully_shard``.

    Note:
        On a CPU under Linux, making this object enables the cache of freed memory for the whole
        process, see :func:`~comera.reuse_freed_memory`, unless a call has decided before.

        A graph replays only the work of the GPU: hooks, prints and branches of ``loss_fn`` run only
        while it is captured. A batch must be tensors on the model's device, and plain values. The
        graph is captured again when stage or ranks of rank learning, an optimizer setting, training
        mode or repeatedly the batch shape changes; a single short batch runs eagerly. The optimizer
        becomes ``capturable=True``, with rates in tensors, which schedulers fill. Steps that cannot
        be captured run eagerly with a warning: see :meth:`describe`. Processes capture only if all
        of them can, which they check over the CPU before every step.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        optimizer: AnyOptimizer,
        ranks: RankLearning | None = None,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: Literal["fp32", "bf16", "fp8"] = "fp32",
        scheduler: LRScheduler | None = None,
        compile: bool = False,
        graph: bool | None = None,
        watch: int = EVERY,
    ) -> None:
        _check_kinds(model, loss_fn, optimizer)
        check_whole_numbers(0, watch=watch)
        check_whole_numbers(1, accumulate=accumulate)
        if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm={clip_norm!r} must be above 0, or None for no clipping")
        if isinstance(optimizer, OptimizerInBackward):
            _check_in_backward(model, clip_norm)
        if graph not in (None, True, False):
            raise TypeError(f"graph={graph!r} must be True, False, or None for a graph on a GPU")
        if precision not in ("fp32", "bf16", "fp8"):
            raise ValueError(f"precision={precision!r} must be 'fp32', 'bf16' or 'fp8'")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau is stepped by a metric, not by steps: leave scheduler out, and "
                "call scheduler.step(metric) after each evaluation"
            )
        if scheduler is not None and not hasattr(scheduler, "step"):
            raise TypeError(f"scheduler={scheduler!r} must be a scheduler of torch.optim")
        scheduled = getattr(scheduler, "optimizer", None)
        if scheduled is not None and unwrap(scheduled) is not unwrap(optimizer):
            raise ValueError(
                f"the {type(scheduler).__name__} sets the rates of another "
                f"{type(scheduled).__name__}, not of the optimizer given: make it of this one"
            )
        # BatchedContraction checks this too, but its error would not name TrainStep.
        check_unsharded(model, "TrainStep")
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.accumulate, self.clip_norm = accumulate, clip_norm
        self.autocast = None if precision == "fp32" else torch.bfloat16
        self.scheduler = scheduler
        self._device = next(model.parameters()).device
        self.contracted = self._together = BatchedContraction(model, self.autocast)
        if self._device.type == "cpu" and not compile:
            self._together = BatchedContraction(model, self.autocast, sparing=True)
        self.steps_done = 0
        self.counts = True  # else the caller moves schedule and rank learning on, by stand_at_
        self._compiled = compile
        self._loss_fn = torch.compile(loss_fn) if compile else loss_fn
        why_not = why_not_fp8(self._device) if precision == "fp8" else None
        if why_not is not None:
            log.warning("precision='fp8' trains in 'bf16' here: %s", why_not)
        elif precision == "fp8" and self._device.type == "cpu":
            log.info("precision='fp8' on a CPU shows the losses of eight bits, not their speed")
        self.scaled = precision == "fp8" and why_not is None
        check_holds(optimizer, model)
        self._unreduced = False  # whether averages over processes are under way
        # DistributedDataParallel averages gradients itself, OptimizerInBackward by its own group;
        # either way losses and rank learning take the mean over the same processes.
        is_copied = isinstance(model, nn.parallel.DistributedDataParallel)
        self.parallel = DataParallel(model) if is_copied else None  # type: ignore[arg-type]
        # None, or for a model whose dense matrices are shared out by fully_shard.
        shared = any(map(is_sharded, model.parameters()))
        self._sharded = Sharded(model, optimizer) if shared else None
        averaging = self.parallel or self._sharded
        self._group: dist.ProcessGroup | None = None if averaging is None else averaging.group
        if averaging is None and isinstance(optimizer, OptimizerInBackward):
            self._group = optimizer.process_group
        if ranks is not None:
            if not isinstance(ranks, RankLearning):
                raise TypeError(
                    f"ranks={ranks!r} must be a comera.TwoStage or comera.ImportancePruning"
                )
            ranks.check_is_of(model)
            ranks.check_schedule(optimizer)
            if self._group is not None:
                ranks.process_group = self._group
        warns = self._group is None or dist.get_rank(self._group) == 0
        self.watch = RateWatch(model, optimizer, watch, warns)
        return_freed_memory()  # such as that of the dense weights, which conversion has freed
        if self._device.type == "cpu":
            reuse_by_default()
        onednn_shapes.clear()
        self._capture: Capture | None = None
        graphs = graphs_on(self._device)
        if graph is False or graphs is None:
            self._why_eager = "graph=False" if graph is False else f"the model is on {self._device}"
            if graph:
                log.warning("graph=True captures a CUDA graph, but %s", self._why_eager)
            return
        # Last: it asks at once whether model, optimizer and processes can be captured.
        warm_up = WARM_UP if self.parallel is None else WARM_UP_TOGETHER
        host, together = HostState(self), Together(self._group)
        self._capture = Capture(self._update, host, graphs, self._device, warm_up, together)

    def __call__(self, batch: Any) -> Tensor:
        """Drop earlier gradients, train on one batch, and return its mean loss over all processes.

        Args:
            batch: A tensor, or tensors in nested lists, tuples and dicts; ``loss_fn`` gets it as it
                is, or in parts of equal structure when accumulating.

        Returns:
            The loss before the update, detached and without the rank objective.
        """
        with self.watch.checked(self.steps_done + 1):
            try:
                total = self._update(batch) if self._capture is None else self._capture(batch)
            except BaseException as problem:  # Ctrl-C too: the caller may catch it and go on
                if "backward through the graph a second time" in str(problem):
                    problem.add_note(
                        "A step contracts cores once, for one backward pass: inside the loss take "
                        "torch.autograd.grad(loss, inputs), and checkpoints of use_reentrant=False"
                    )
                if isinstance(self.optimizer, OptimizerInBackward):
                    self.optimizer.discard_()
                self.optimizer.zero_grad(set_to_none=True)
                if self.ranks is not None:
                    self.ranks.discard_()
                if self.parallel is not None and self._unreduced:
                    self.parallel.forget()  # its buffers wait for the gradients that did not come
                raise
        if self.scheduler is not None and self.counts:
            self.scheduler.step()
        if self.ranks is not None and self.counts:
            self.ranks.count_(self.optimizer)
        self.steps_done += 1
        return total

    def stand_at_(self, place: float) -> None:
        """Put schedule and rank learning where they are after ``place`` steps, whole or not."""
        if self.scheduler is not None:
            self.scheduler.last_epoch = place - 1  # type: ignore[assignment]
            self.scheduler.step()
        if self.ranks is not None:
            self.ranks.count_(self.optimizer, place - self.ranks.steps_done)

    def describe(self) -> StepDescription:
        """Return how the step runs: eagerly, and why, or as which CUDA graph."""
        if self._capture is not None:
            return self._capture.describe()
        return StepDescription(False, self._why_eager)

    def _update(self, batch: Any) -> Tensor:
        """Run all work of a step on the device; a CUDA graph can hold it."""
        self._unreduced = False  # one that was broken off has been seen to
        self.optimizer.zero_grad(set_to_none=True)  # gradients from before the step
        self.model.zero_grad(set_to_none=True)  # and of parameters that the optimizer lacks
        if self.parallel is not None:
            self.parallel.prepare_()
        total = torch.zeros((), device=self._device)
        parts = self._parts(batch)
        for number, (part, share) in enumerate(parts, 1):
            # From the last part's forward pass on, whatever backward comes next is averaged.
            self._unreduced = 1 < number == len(parts)
            quiet = _without_compiler_warnings() if self._compiled else nullcontext()
            with self._together, self._updates(last=number == len(parts)), quiet:
                # The rank objective uses the mean loss, so that all processes learn the same ranks.
                loss = self._loss(part)
                seen = mean_over(self._group, loss.detach())
                self._check_finite("loss", seen)
                objective = loss if self.ranks is None else self.ranks.objective(loss, seen)
                self._unreduced = True
                (objective * share).backward()
                self._unreduced = False
            total = total + seen * share  # of the wider dtype
        if self._sharded is not None:
            self._sharded.average_()
        # Before the optimizer's step: a norm that is not finite leaves parameters as they were.
        if self.clip_norm is not None:
            clipped = (
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
                if self._sharded is None
                else self._sharded.clip_(self.clip_norm)
            )
            self._check_finite("gradient norm", clipped)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ranks is not None:
            self.ranks.follow_(total)
        return total

    def _loss(self, part: Any) -> Tensor:
        enabled = self.autocast is not None
        cached = not shapes_are_static(next(self.model.parameters()))  # a graph casts each time
        with (
            fp8_products() if self.scaled else nullcontext(),
            torch.autocast(self._device.type, self.autocast, enabled=enabled, cache_enabled=cached),
        ):
            loss = self._loss_fn(self.model, part)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn must return a scalar tensor that depends on the model, got {shown}"
                f"{' without a gradient' if isinstance(loss, Tensor) and not loss.dim() else ''}"
            )
        return loss

    def _updates(self, last: bool) -> AbstractContextManager[None]:
        if not last and isinstance(self.optimizer, OptimizerInBackward):
            return self.optimizer.accumulate()
        if last or not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def _parts(self, batch: Any) -> list[tuple[Any, float]]:
        """Split a batch into ``accumulate`` parts, each with its share of the rows."""
        if self.accumulate == 1:
            return [(batch, 1.0)]
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        rows = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        if len(rows) != 1:
            raise ValueError(
                f"accumulate={self.accumulate} splits a batch along its first dimension, but its "
                f"tensors have {sorted(rows)} rows"
            )
        (count,) = rows
        if count < self.accumulate:
            raise ValueError(
                f"a batch of {count} rows cannot be split into accumulate={self.accumulate} parts"
            )
        bounds = [count * k // self.accumulate for k in range(self.accumulate + 1)]

        def rows_of(start: int, end: int) -> Any:
            return tree_map_only(Tensor, lambda x: x[start:end] if x.dim() else x, batch)

        return [
            (rows_of(start, end), (end - start) / count)
            for start, end in itertools.pairwise(bounds)
        ]

    def _check_finite(self, what: str, value: Tensor) -> None:
        """Raise ``NonFiniteLossError`` if a value is on the CPU and not finite."""
        if may_read_values(value) and not bool(torch.isfinite(value)):
            raise NonFiniteLossError(
                f"the {what} is {float(value)} at step {self.steps_done + 1},{self.watch.advice()}"
            )


@contextmanager
def _without_compiler_warnings() -> Iterator[None]:
    """Ignore warnings of torch.compile, forward and backward, that users cannot avoid."""
    with warnings.catch_warnings():
        # It looks at .grad of all tensors that it is given, shared factors included.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled")
        yield


def graphs_on(device: torch.device) -> CudaGraphs | None:
    """Return an object that records work on a device; None unless it is a GPU."""
    return CudaGraphs(device) if device.type == "cuda" else None


def _check_kinds(model: object, loss_fn: object, optimizer: Any) -> None:
    check_model(model)
    if not callable(loss_fn):
        kind = type(loss_fn).__name__
        raise TypeError(
            f"loss_fn is no function, but of type {kind}: TrainStep(model, loss_fn, optimizer)"
        )
    if isinstance(loss_fn, _Loss):
        raise TypeError(
            f"loss_fn={loss_fn} would be called with the model and a batch: give a function of "
            "these, such as lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    unwrap(optimizer)


def _check_in_backward(model: nn.Module, clip_norm: float | None) -> None:
    if clip_norm is not None:
        raise ValueError(
            f"clip_norm={clip_norm} needs all gradients at once, and OptimizerInBackward frees "
            "each in backward: leave clip_norm out and take an optimizer that bounds its own steps "
            "(comera.CAME, torch.optim.Adafactor), or give TrainStep the optimizer itself"
        )
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "OptimizerInBackward steps before the gradients of tensor trains, which every process "
            "holds whole, are averaged: give TrainStep the optimizer itself, or leave all of the "
            "model whole and give OptimizerInBackward the process group"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "OptimizerInBackward would step before DistributedDataParallel has averaged: give the "
            "model unwrapped, and OptimizerInBackward(optimizer, "
            "process_group=torch.distributed.group.WORLD)"
        )
