"""Define the base of the methods of rank learning, and count a model's size by its gates."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.extras import listed, say_once
from comera.nn.batched_contraction import gates_together
from comera.nn.module import TensorTrainModule, check_unsharded, is_open, tensor_trains
from comera.optim.state_layout import AnyOptimizer
from comera.params import is_sharded
from comera.rank.agreement import agreed, check_copies, processes_of
from comera.rank.prune import prune_to_
from comera.shapes import is_number
from comera.surgery.truncate import check_can_be_cut, kept_ranks, truncate_

log = logging.getLogger("comera")

Stage = Literal["early", "late", "done"]

OPEN = 0.1
"""A gate above this still carries its rank; one below is on its way out."""


def check_target(target: Any) -> None:
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


class AllGates(NamedTuple):
    """All gates of a model in one vector, which of them are open, and how many in each bond."""

    values: Tensor
    live: Tensor
    counts: Tensor


class SizeOfRanks:
    """Counts the entries of a model's cores from its gates.

    With ranks ``d_k`` and ``n_k`` entries per pair of ranks, the size of a layer is
    ``sum_k n_k d_{k-1} d_k`` (CoMERA, arXiv 2405.14377, equation 5). In the exact size ``d_k`` is
    the number of open gates, which are above ``prune_below``; a layer with an empty bond has size
    zero. In the relaxed size ``d_k`` is the sum of the open gates, which has a gradient. Both agree
    if open gates are one. A bond with no more than ``min_rank`` open gates gets no gradient of the
    relaxed size. ``layers`` are the model's present tensor trains by name, without those of a
    frozen gate, whose names are ``frozen``. Raises ``ValueError`` if there is none whose gates
    train.
    """

    def __init__(self, model: nn.Module, min_rank: int = 1) -> None:
        found = tensor_trains(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no tensor-train layer: call comera.tensorize_ first"
            )
        self.layers: dict[str, TensorTrainModule] = {
            name: layer
            for name, layer in found.items()
            if all(gate.requires_grad for gate in layer.gates)
        }
        self.frozen = [name for name in found if name not in self.layers]
        if not self.layers:
            raise ValueError(
                f"the rank gates of {listed(self.frozen)} are frozen (requires_grad=False), as "
                "they are where a frozen layer is tensorised, and there are no others to learn"
            )
        self.min_rank = min_rank
        self._indexed: tuple[Any, ...] = ()
        self._widths: tuple[int, ...] = ()

    @property
    def gates(self) -> list[Tensor]:
        """All gates, layer by layer; loading a state may replace them."""
        return [gate for layer in self.layers.values() for gate in layer.gates]

    def read(self) -> AllGates:
        values = gates_together(list(self.layers.values()))
        widths = tuple(gate.shape[0] for gate in self.gates)
        if (widths, values.device, values.dtype) != self._indexed:
            self._index(widths, values.device, values.dtype)
        live = is_open(values.detach(), self._prune_below)
        return AllGates(values, live, self._sum_by_bond(live.double()))

    def relaxed(self, gates: AllGates | None = None) -> Tensor:
        """Return the relaxed size, a differentiable scalar; by default of the present gates."""
        values, live, counts = gates or self.read()
        bonds = self._sum_by_bond(values * live)
        bonds = torch.where(counts > self.min_rank, bonds, bonds.detach())
        before, after = self._ends_of_cores(bonds)
        return torch.dot(before * after, self._slices[bonds.dtype])

    @torch.no_grad()
    def exact(self, gates: AllGates | None = None) -> Tensor:
        """Return the exact size, a float64 scalar on the device without a gradient."""
        return self._size_at((gates or self.read()).counts)

    @torch.no_grad()
    def hold_(self, before: Tensor, floor: float) -> Tensor:
        """Reopen gates if too many closed in one step: a closed gate never opens by itself.

        If the size is below ``floor``, gates that have just closed are set to 1.5 times
        ``prune_below``; so is the largest gate of a bond without an open one, unless ``min_rank``
        is 0. ``before`` is whether each gate was open before the optimizer step. Returns whether
        the size was below the floor, a boolean on the device.
        """
        values, live, counts = self.read()
        reached = self._size_at(counts) < floor
        lifted = (before > live) & reached
        if self.min_rank:
            dead = self._sum_by_bond((live | lifted).to(values.dtype)) == 0
            best = self._lowest.scatter_reduce(0, self._bond_of_gate, values, "amax")
            largest = values == best[self._bond_of_gate]
            lifted = lifted | (dead[self._bond_of_gate] & largest)
        rise = (self._lifted_to - values) * lifted
        gates = self.gates
        parts = zip(rise.split(list(self._widths)), gates, strict=True)
        torch._foreach_add_(gates, [part.view_as(gate) for part, gate in parts])
        return reached

    def _size_at(self, counts: Tensor) -> Tensor:
        before, after = self._ends_of_cores(counts)
        least = self._most.scatter_reduce(0, self._layer_of_bond, counts, "amin")
        whole = least[self._layer_of_core] > 0
        return torch.dot(before * after * whole, self._slices[counts.dtype])

    def _sum_by_bond(self, values: Tensor) -> Tensor:
        """Sum values of gates by bond; entry 0 is for the outer bonds, which are one."""
        return self._outer[values.dtype].index_add(0, self._bond_of_gate, values)

    def _ends_of_cores(self, bonds: Tensor) -> tuple[Tensor, Tensor]:
        # Unlike that of indexing by brackets, its gradient needs no sorting.
        return bonds.index_select(0, self._ends).chunk(2)  # type: ignore[return-value]

    def _index(self, widths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self._indexed, self._widths = (widths, device, dtype), widths
        layers = list(self.layers.values())
        slices = [size for layer in layers for size in layer.shape.slice_sizes]
        thresholds = [layer.prune_below for layer in layers for _ in range(sum(layer.ranks))]
        layer_of_core = [k for k, layer in enumerate(layers, start=1) for _ in layer.cores]
        layer_of_bond = [0, *(k for k, layer in enumerate(layers, start=1) for _ in layer.gates)]
        before, after, bond = list[int](), list[int](), 0
        for layer in layers:
            inner = range(bond + 1, bond + 1 + len(layer.gates))
            before += [0, *inner]
            after += [*inner, 0]
            bond += len(inner)

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        numbered = enumerate(widths, start=1)
        self._bond_of_gate = on_device([k for k, width in numbered for _ in range(width)])
        self._ends = on_device(before + after)
        self._layer_of_core = on_device(layer_of_core)
        self._layer_of_bond = on_device(layer_of_bond)
        self._slices = {kind: on_device(slices, kind) for kind in (dtype, torch.double)}
        self._outer = {kind: on_device([1] + [0] * bond, kind) for kind in (dtype, torch.double)}
        self._prune_below = on_device(thresholds, dtype)
        self._lifted_to = 1.5 * self._prune_below
        self._lowest = self._outer[dtype].new_full((bond + 1,), -torch.inf)
        self._most = self._outer[torch.double].new_full((bond + 1,), torch.inf)


class RankLearning(ABC):
    """Learn the ranks of one model in one training run; base of all methods.

    ``method`` is the name of the class in states and errors, ``steps_done`` counts steps, and
    ``forced`` the gates above 0.1 that :meth:`finish_` has closed; None before it ran.
    ``process_group`` was given, or is that of the ``DistributedDataParallel`` in ``TrainStep``.
    """

    method: ClassVar[str]
    _tensors: ClassVar[dict[str, str]]
    """Attributes, by name in states, of tensors that are None at the start."""
    gate_lr: float = 2e-3  # advised for the gates, under Adam
    pace: float = 1  # what a usual step counts for: not 1 in a run by the clock
    turned: bool = False  # whether the last step has put other cores of the same weights

    def __init__(
        self,
        model: nn.Module,
        target: float,
        steps: int,
        min_rank: int,
        process_group: "dist.ProcessGroup | Literal['auto'] | None",
    ) -> None:
        check_target(target)
        if isinstance(process_group, str) and process_group != "auto":
            raise ValueError(
                f"process_group={process_group!r} must be a group of torch.distributed, 'auto' to "
                "find it, or None for a process that trains a model of its own"
            )
        check_unsharded(model, self.method, written=True)
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
        try:
            self.target_size = target_entries(layers, target, self.start_size, min_rank)
        except ValueError:
            if all(layer.ranks == layer.start_ranks for layer in layers):
                raise
            self.target_size = 0  # it was cut before: load_state_dict may say so
        self.steps_done: float = 0
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
        return max(0, math.ceil(self._steps - self.steps_done))

    def check_is_of(self, model: nn.Module) -> None:
        """Raise ``ValueError`` unless these are the ranks of a model or of a part of it."""
        there = {id(param) for param in model.parameters()}
        if not any(id(gate) in there for gate in self.size.gates):
            raise ValueError(
                f"ranks is a {self.method} of another model: make it of the one that is trained"
            )

    def objective(self, loss: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the scalar to differentiate instead of the ``loss`` of a batch.

        ``seen`` is the loss to compare the size with, by default ``loss``; several processes give
        their mean loss, so that all make the same choice.
        """
        if self.stage == "done":
            return loss
        if not self.target_size:
            target_entries(self.size.layers.values(), self.target, self.start_size, self.min_rank)
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
        """Count one optimizer step whose loss, the mean over its batches, was ``loss`` (detached).

        The state of the optimizer that has stepped is cut along with the ranks, and reset for cores
        that are brought into canonical form. Raises ``ValueError`` if the optimizer holds no core,
        or keeps state that cannot be cut with them.
        """
        if not isinstance(loss, Tensor):
            loss = torch.as_tensor(loss, device=self.size.gates[0].device)
        if optimizer is not None and optimizer is not self._optimizer:
            self.check_schedule(optimizer)  # TrainStep does so before the first step
        self.follow_(loss)
        self.count_(optimizer)

    def count_(self, optimizer: AnyOptimizer | None = None, steps: float = 1) -> None:
        """Count a step, or one as so many: the part of :meth:`step` that runs on the host."""
        if optimizer is not None and optimizer is not self._optimizer:
            check_holds(optimizer, self.model)
            check_can_be_cut(tensor_trains(self.model), optimizer)
        self.steps_done += steps
        self._optimizer = optimizer

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """Reopen gates if a step closed too many; a CUDA graph holds this part of :meth:`step`."""
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

        The state of the optimizer, by default that of the last step, is cut with the parameters.
        Returns ``size``, ``target_size`` and ``start_size`` in entries; ``forced``, the number of
        gates above 0.1 that were closed; ``reached``, the size before gates were closed.

        Raises ``ValueError`` if processes hold different gates or would cut different ranks (then
        no process changes anything), cores are not finite, optimizer state cannot be cut, or layers
        were replaced, as by ``densify_``; ``RuntimeError`` if another process cannot cut its ranks.
        """

    def check_schedule(self, optimizer: AnyOptimizer) -> None:  # noqa: B027  not all close gates
        """Warn if the remaining steps are too few for the optimizer to close gates."""

    def identity(self) -> tuple[object, ...]:
        """Return the host values and tensor addresses that a CUDA graph of the objective fixes."""
        sizes = self.target_size, self.start_size, self.min_rank
        tensors = (self._target_met, *(getattr(self, key) for key in self._tensors.values()))
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return self.method, self.stage, *sizes, *addresses

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank learning as tensors and plain values, to resume a run."""
        return {
            "method": self.method,
            "steps_done": self.steps_done,
            "pace": self.pace,
            "start_size": self.start_size,
            "target_size": self.target_size,
            "forced": self.forced,
            "target_met": self._target_met,
            **{name: getattr(self, key) for name, key in self._tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`, but keep the target of this object.

        Raises ``ValueError``, with nothing changed, if the state belongs to another method, or the
        target is out of reach.
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
        self.start_size, self.target_size, self.pace = start_size, target_size, state.get("pace", 1)
        self._target_met = self._own(state["target_met"]) & (target_size == state["target_size"])
        self.discard_()
        for name, key in self._tensors.items():
            setattr(self, key, None if state[name] is None else self._own(state[name]))

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.size.gates[0].device, copy=True)

    @property
    def _cores(self) -> list[Tensor]:
        return [core for layer in self.size.layers.values() for core in layer.cores]

    def _processes(self, **settings: object) -> "dist.ProcessGroup | None":
        """Return the process group; ``ValueError`` if ranks, gates or settings differ in it."""
        check_unsharded(self.model, self.method, written=True)
        there = set(self.model.modules())
        if gone := [name for name, layer in self.size.layers.items() if layer not in there]:
            raise ValueError(
                f"{self.method} learns the ranks of {listed(gone)}, which the model no longer has, "
                "as after densify_ or freeze_: call finish_ before layers are replaced, or make a "
                f"new {self.method} of the model"
            )
        given = self.process_group
        group = processes_of(self.model) if isinstance(given, str) else given
        layers = tensor_trains(self.model)
        known = {
            "method": self.method, "target_size": self.target_size, "min_rank": self.min_rank,
            **settings, "due": self.forced is None,
            "prune_below": {name: layer.prune_below for name, layer in layers.items()},
        }  # fmt: skip
        check_copies(group, known, layers)
        return group

    @torch.no_grad()
    def _cut_(
        self,
        optimizer: AnyOptimizer | None,
        group: "dist.ProcessGroup | None",
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
        self.forced = sum(value > OPEN for value in closed)
        truncate_(self.model, optimizer, min_rank=self.min_rank)
        return {
            "size": sum(core.numel() for core in self._cores),
            "target_size": self.target_size,
            "start_size": self.start_size,
            "forced": self.forced,
            "reached": reached,
        }


def check_holds(optimizer: AnyOptimizer, model: nn.Module) -> None:
    """Raise ``ValueError`` if the optimizer holds none of the model's trainable cores.

    Other trainable parameters that it does not hold are logged, once in a process.
    """
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    cores = [core for layer in tensor_trains(model).values() for core in layer.cores]
    training = [core for core in cores if core.requires_grad]
    if training and not any(id(core) in held for core in training):
        raise ValueError(
            "the optimizer holds none of the model's tensor-train cores: build it after "
            "tensorize_, from comera.param_groups(model, lr=...)"
        )
    trained = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
    if still := [name for name, number in trained.items() if number not in held]:
        say_once(
            log, logging.WARNING,
            "%d of %d trainable parameters never move, as the optimizer does not hold them: %s. "
            "Build it after what replaces layers (tensorize_, densify_), or freeze them by "
            "requires_grad_(False)", len(still), len(trained), listed(still),
        )  # fmt: skip
