"""Define the base of the methods of rank learning, which decides when and how ranks are cut.

Processes that average their gradients must cut the same ranks: their settings, ranks and gates are
compared, and by :func:`agreed` their plans, before anything is changed.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.extras import listed
from comera.nn.module import TensorTrainModule, check_unsharded, tensor_trains
from comera.optim.state_layout import AnyOptimizer
from comera.params import is_sharded
from comera.rank.prune import prune_to_
from comera.rank.size import AllGates, SizeOfRanks
from comera.shapes import is_number
from comera.surgery.truncate import check_can_be_cut, kept_ranks, truncate_, wrappers_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("comera")


Stage = Literal["early", "late", "done"]

_SAME = 1e-3
"""Tolerance of equal gates: machines of several kinds round differently."""
_OPEN = 0.1
"""A gate above this still carries its rank; one below is on its way out."""
_WAY_OUT = (
    "Nothing has been changed. Processes that train one model start with equal weights and average "
    "their gradients, as DistributedDataParallel does; where each trains a model of its own, give "
    "TwoStage or ImportancePruning process_group=None"
)


def processes_of(model: nn.Module) -> "dist.ProcessGroup | None":
    """Return the group of processes that train a model: its DDP's or the default; None if alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for wrapper in wrappers_of(model):
        return wrapper.process_group
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def agreed(group: "dist.ProcessGroup | None", plan: Callable[[], Any]) -> None:
    """Check that a function returns the same in all processes.

    ``plan`` is the function, which returns plain values; ``group`` is None for a single process.

    Raises:
        Exception: The error of the function in this process.
        RuntimeError: If the function raised an error in another process.
        ValueError: If the function returned different values; raised in all processes.
    """
    mine, problem = None, None
    try:
        mine = plan()
    except Exception as error:
        problem = error
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    gathered = _gathered(group, (mine, text))
    if problem is not None:
        raise problem
    for process, (_, text) in gathered.items():
        if text is not None:
            raise RuntimeError(
                f"process {process} cannot cut its ranks, so that no other does: {text}"
            )
    (first, _), *others = gathered.items()
    for process, (theirs, _) in others:
        if theirs != gathered[first][0]:
            raise ValueError(
                f"processes {first} and {process} would cut other ranks: their gates are the "
                f"same, but their cores are not. {_WAY_OUT}"
            )


def _gathered(group: "dist.ProcessGroup | None", mine: Any) -> dict[int, Any]:
    """Return the object ``mine`` of every process of a group, by the process' number."""
    if group is None:
        return {0: mine}
    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, mine, group=group)
    return dict(zip(ranks, found, strict=True))


def _difference(one: tuple[Any, Any], other: tuple[Any, Any]) -> str | None:
    """Return the first difference between the settings and gates of two processes, or None."""
    (settings, gates), (other_settings, other_gates) = one, other
    for name, value in settings.items():
        if value != other_settings[name]:
            return f"{name} is {value!r} and {other_settings[name]!r}"
    if gates.keys() != other_gates.keys():
        return f"the tensor-train layers are {list(gates)} and {list(other_gates)}"
    for name, of_layer in gates.items():
        ranks, other_ranks = ([len(g) for g in gs] for gs in (of_layer, other_gates[name]))
        where = f"of {name or 'the layer'}"
        if ranks != other_ranks:
            return f"the ranks {where} are {ranks} and {other_ranks}"
        flat, other_flat = torch.cat(of_layer), torch.cat(other_gates[name])
        if not torch.allclose(flat, other_flat, rtol=0, atol=_SAME, equal_nan=True):
            return f"gates {where} differ by up to {float((flat - other_flat).abs().max()):.2g}"
    return None


def check_target(target: Any) -> None:
    """Raise ``ValueError`` unless ``target`` is in (0, 1]."""
    if not is_number(target) or not 0 < target <= 1:
        raise ValueError(
            f"target={target!r} must be in (0, 1]: the share of the present size to end at"
        )


def check_steps(name: str, steps: Any, least: int, why: str = "") -> None:
    """Raise ``ValueError`` unless ``steps`` is a whole number from ``least``; add ``why``."""
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < least:
        raise ValueError(f"{name}={steps!r} must be a whole number of steps, from {least}{why}")


def target_entries(
    layers: Collection[TensorTrainModule], target: float, start_size: int, min_rank: int
) -> int:
    """Return how many entries cores may have at ``target``, a share of ``start_size``.

    Raises ``ValueError`` if the layers need more at ``min_rank``.
    """
    allowed = math.floor(target * start_size)
    smallest = sum(
        layer.shape.size_at((min_rank,) * len(layer.ranks))
        for layer in layers
        if 0 not in layer.ranks  # else it has vanished
    )
    if allowed < smallest:
        raise ValueError(
            f"target={target} leaves {allowed} of {start_size} entries, but at "
            f"min_rank={min_rank} the cores need {smallest}: the smallest target is "
            f"{math.ceil(1e4 * smallest / start_size) / 1e4:g}"
        )
    return allowed


class RankLearning(ABC):
    """Learn the ranks of one model in one training run; base of all methods.

    Attributes:
        method: The name of the class in states and errors.
        steps_done: Steps counted so far.
        process_group: The group that was given, or that of the ``DistributedDataParallel`` in
            ``TrainStep``.
        forced: Number of gates above 0.1 that :meth:`finish_` has closed; None before it ran.
    """

    method: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        target: float,
        steps: int,
        min_rank: int,
        process_group: "ProcessGroup | Literal['auto'] | None",
    ) -> None:
        check_target(target)
        if isinstance(process_group, str) and process_group != "auto":
            raise ValueError(
                f"process_group={process_group!r} must be a group of torch.distributed, 'auto' to "
                "find it, or None for a process that trains a model of its own"
            )
        check_unsharded(model, self.method)
        self.model, self.target, self.min_rank = model, target, min_rank
        self.process_group = process_group
        self.size = SizeOfRanks(model, min_rank)
        if self.size.frozen:
            log.warning(
                "%s leaves the ranks of %s as they are: their gates are frozen",
                self.method, listed(self.size.frozen),
            )  # fmt: skip
        layers = self.size.layers.values()
        self.start_size = sum(layer.shape.size_at(layer.live_ranks) for layer in layers)
        self.target_size = target_entries(layers, target, self.start_size, min_rank)
        self.steps_done = 0
        self.forced: int | None = None
        self._steps = steps
        self._target_met = torch.zeros((), dtype=torch.bool, device=self.size.gates[0].device)
        self._live: Tensor | None = None  # open gates before the present optimizer step
        self._optimizer: AnyOptimizer | None = None  # of the last step

    def __getstate__(self) -> dict[str, Any]:
        group = None if self.process_group is None else "auto"  # a group is of this process alone
        return {**vars(self), "process_group": group, "_optimizer": None}

    @property
    def stage(self) -> Stage:
        """Stage of the next step; ``"done"`` once ranks are due to be cut."""
        return "done" if self.forced is not None or self.due else "early"

    @property
    def due(self) -> bool:
        """Whether :meth:`finish_` is to be called now; False once it has run."""
        return self.forced is None and self.steps_left == 0

    @property
    def steps_left(self) -> int:
        """Number of steps until rank learning is :attr:`due` to cut ranks."""
        return max(0, self._steps - self.steps_done)

    def objective(self, loss: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the scalar to differentiate instead of ``loss``.

        Args:
            loss: Loss of the batch.
            seen: Loss to compare the size with, by default ``loss``; several processes give their
                mean loss, so that all make the same choice.
        """
        if self.stage == "done":
            return loss
        if any(map(is_sharded, self.size.gates)):
            check_unsharded(self.model, self.method)  # the model was sharded afterwards
        gates = self.size.read()
        self._live = gates.live
        return self._objective(loss, gates, loss.detach() if seen is None else seen)

    @abstractmethod
    def _objective(self, loss: Tensor, gates: AllGates, seen: Tensor) -> Tensor:
        """Return the objective. Host code may branch only on values that :meth:`identity` returns.

        ``seen`` is the loss, or the mean loss of several processes, without a gradient.
        """

    def step(self, loss: Tensor | float, optimizer: AnyOptimizer | None = None) -> None:
        """Count one optimizer step whose mean loss was ``loss`` (detached).

        Args:
            loss: Loss of the batch; the mean loss if a step has several batches.
            optimizer: The optimizer that has stepped. Its state is cut along with the ranks, and
                reset for cores that are brought into canonical form.

        Raises:
            ValueError: If the optimizer holds no core, or keeps state that cannot be cut with them.
        """
        if not isinstance(loss, Tensor):
            loss = torch.as_tensor(loss, device=self.size.gates[0].device)
        if optimizer is not None and optimizer is not self._optimizer:
            self.check_schedule(optimizer)  # TrainStep does so before the first step
        self.follow_(loss)
        self.count_(optimizer)

    def count_(self, optimizer: AnyOptimizer | None = None) -> None:
        """Count a step: the part of :meth:`step` that runs on the host."""
        if optimizer is not None and optimizer is not self._optimizer:
            check_holds_cores(optimizer, self.model)
            check_can_be_cut(tensor_trains(self.model), optimizer)
        self.steps_done += 1
        self._optimizer = optimizer

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """Reopen gates if a step closed too many: the part of :meth:`step` in a CUDA graph."""
        if self._live is not None:
            # Many gates may close in one step, and a closed one has no gradient to open again.
            self._target_met |= self.size.hold_(self._live, self.target_size)
            self._live = None

    def discard_(self) -> None:
        """Discard the objective of a step that raised an error; call ``zero_grad`` as well."""
        self._live = None

    @abstractmethod
    def finish_(self, optimizer: AnyOptimizer | None = None) -> dict[str, Any]:
        """Cut ranks in place until the cores have at most ``target_size`` entries.

        Args:
            optimizer: The optimizer whose state is cut along with the parameters; by default that
                of the last step.

        Returns:
            ``size``, ``target_size`` and ``start_size`` in entries; ``forced``, the number of gates
            above 0.1 that were closed; ``reached``, the size before gates were closed.

        Raises:
            ValueError: If processes hold different gates or would cut different ranks; then no
                process changes anything. If cores are not finite or optimizer state cannot be cut.
            RuntimeError: If another process cannot cut its ranks.
        """

    @abstractmethod
    def check_schedule(self, optimizer: AnyOptimizer) -> None:
        """Warn if the remaining steps are too few for the optimizer to close gates."""

    def identity(self) -> tuple[object, ...]:
        """Return the host values and tensor addresses that a CUDA graph of the objective fixes."""
        sizes = self.target_size, self.start_size, self.min_rank
        return self.method, self.stage, *sizes, self._target_met.data_ptr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank learning as tensors and plain values, to resume a run."""
        return {
            "method": self.method,
            "steps_done": self.steps_done,
            "start_size": self.start_size,
            "target_size": self.target_size,
            "forced": self.forced,
            "target_met": self._target_met,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`, but keep the target of this object.

        Raises:
            ValueError: If the state belongs to another method, or the target is out of reach;
                nothing is changed.
        """
        if state.get("method") != self.method:
            raise ValueError(f"this is a state of {state.get('method')}, not of {self.method}")
        start_size, target_size = state["start_size"], state["target_size"]
        if state["forced"] is None:
            layers = self.size.layers.values()
            target_size = target_entries(layers, self.target, start_size, self.min_rank)
            if target_size != state["target_size"]:
                log.warning(
                    "%s goes on with a target of %d entries, the state had one of %d",
                    self.method, target_size, state["target_size"],
                )  # fmt: skip
        self.steps_done, self.forced = state["steps_done"], state["forced"]
        self.start_size, self.target_size = start_size, target_size
        self._target_met = self._own(state["target_met"])
        self.discard_()

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.size.gates[0].device, copy=True)

    @property
    def _cores(self) -> list[Tensor]:
        return [core for layer in self.size.layers.values() for core in layer.cores]

    def _processes(self, **settings: object) -> "ProcessGroup | None":
        """Return the process group; check that all hold the same ranks, gates and settings.

        Raises:
            ValueError: In all processes, if ranks, gates or settings differ; it names the first.
        """
        check_unsharded(self.model, self.method)
        given = self.process_group
        group = processes_of(self.model) if isinstance(given, str) else given
        layers = tensor_trains(self.model)
        known = {
            "method": self.method, "target_size": self.target_size, "min_rank": self.min_rank,
            **settings, "due": self.forced is None,
            "prune_below": {name: layer.prune_below for name, layer in layers.items()},
        }  # fmt: skip
        gates = {name: [gate.detach().cpu() for gate in m.gates] for name, m in layers.items()}
        (first, mine), *others = _gathered(group, (known, gates)).items()
        for process, theirs in others:
            what = _difference(mine, theirs)
            if what is not None:
                raise ValueError(
                    f"processes {first} and {process} do not hold copies of one model: {what}. "
                    f"{_WAY_OUT}"
                )
        return group

    @torch.no_grad()
    def _cut_(
        self,
        optimizer: AnyOptimizer | None,
        group: "ProcessGroup | None",
        importance: Mapping[int, Tensor] | None = None,
        min_keep: float = 0.0,
    ) -> dict[str, Any]:
        """Close the same gates in all processes until the target is met, and truncate."""
        optimizer = optimizer or self._optimizer
        reached, gates = int(self.size.exact()), self.size.gates
        before, closed = [gate.clone() for gate in gates], list[float]()

        def close() -> dict[str, list[list[int]]]:
            layers = tensor_trains(self.model)
            check_can_be_cut(layers, optimizer)
            closed.extend(
                prune_to_(
                    self.size.layers, self.target_size,
                    min_rank=self.min_rank, importance=importance, min_keep=min_keep,
                )
            )  # fmt: skip
            # The cut of every layer: processes must agree on more than the gates.
            return {
                name: [keep.tolist() for keep in kept_ranks(layer, self.min_rank)]
                for name, layer in layers.items()
            }

        try:
            agreed(group, close)
        except BaseException:  # here or in another process: then no copy may be left changed
            for gate, was in zip(gates, before, strict=True):
                gate.copy_(was)
            raise
        self.forced = sum(value > _OPEN for value in closed)
        truncate_(self.model, optimizer, min_rank=self.min_rank)
        return {
            "size": sum(core.numel() for core in self._cores),
            "target_size": self.target_size,
            "start_size": self.start_size,
            "forced": self.forced,
            "reached": reached,
        }


def check_holds_cores(optimizer: AnyOptimizer, model: nn.Module) -> None:
    """Raise ``ValueError`` if the optimizer holds none of the model's trainable cores."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    cores = [core for layer in tensor_trains(model).values() for core in layer.cores]
    training = [core for core in cores if core.requires_grad]
    if training and not any(id(core) in held for core in training):
        raise ValueError(
            "the optimizer holds none of the model's tensor-train cores: build it after "
            "tensorize_, from comera.param_groups(model, lr=...)"
        )
