"""Pruning to a target at once, by the importance of ranks: what the loss would lose with each."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from comera.nn.module import TensorTrainModule
from comera.optim.state_layout import AnyOptimizer
from comera.rank.learning import RankLearning, check_steps
from comera.rank.prune import check_min_keep
from comera.rank.size import AllGates
from comera.surgery.canonical import canonicalize_
from comera.surgery.truncate import check_min_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_NEW_SHARE = 0.02
"""Share of the present step in the running mean, which so looks back some fifty steps."""


class ImportanceScores:
    """Running mean, over training steps, of the square of gate times gradient, for every rank.

    Gate times gradient is what the loss of a batch would lose with the rank, to first order; its
    mean nearly vanishes where a model has converged, its mean square does not (Molchanov et al.,
    arXiv 1906.10771, equation 8).

    Args:
        layers: The layers whose gates are observed, by name.

    Attributes:
        mean: Running mean of all gates, one after the other, ``(all ranks,)``; None before the
            first step.
    """

    def __init__(self, layers: Mapping[str, TensorTrainModule]) -> None:
        self._layers = dict(layers)
        self._lost: dict[int, Tensor] = {}
        self._observed: dict[int, tuple[nn.Parameter, Any]] = {}
        self.mean: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lost": {}, "_observed": {}}  # gates of a copy have no hooks

    @property
    def _gates(self) -> list[nn.Parameter]:
        """Return each gate once, shared ones too."""
        layers = self._layers.values()
        return list({id(gate): gate for layer in layers for gate in layer.gates}.values())

    def observe_(self) -> None:
        """Observe every gate's gradient from the next backward pass on.

        Raises:
            ValueError: If a gate is frozen.
        """
        for number, gate in enumerate(self._gates):
            if not gate.requires_grad:
                raise ValueError(
                    f"the rank gates of {self._owner(gate)} have been frozen (requires_grad=False) "
                    "since rank learning began: without their gradients there is no telling the "
                    "importance of its ranks. Let them train, or make a new ImportancePruning, "
                    "which leaves them"
                )
            observed, hook = self._observed.get(number, (None, None))
            if observed is gate:
                continue
            if hook is not None:  # the parameter has been replaced
                hook.remove()
            add = unserializable_hook(partial(self._add, number))
            self._observed[number] = gate, gate.register_hook(add)

    def _owner(self, gate: nn.Parameter) -> str:
        for name, layer in self._layers.items():
            if any(held is gate for held in layer.gates):
                return name or "the layer"
        raise AssertionError("a gate of none of the layers")

    def _add(self, number: int, grad: Tensor) -> None:
        """Add gate times gradient of one part of a batch, while the gate is still what it was."""
        lost = grad.detach() * self._observed[number][0].detach()
        before = self._lost.get(number)
        self._lost[number] = lost if before is None else before + lost

    @torch.no_grad()
    def follow_(self, group: "dist.ProcessGroup | None" = None) -> None:
        """Take in one step, after its backward pass: on the device, in place.

        A step whose gradients are not finite is left out; after truncation the mean starts anew.
        What the processes of a group observe, each on rows of its own, is averaged.
        """
        if not self._lost:
            return
        parts = [
            self._lost[k] if k in self._lost else torch.zeros_like(gate)
            for k, gate in enumerate(self._gates)
        ]
        self._lost.clear()
        lost = torch.cat(parts)
        if group is not None:
            lost /= dist.get_world_size(group)
            dist.all_reduce(lost, group=group)
        square = lost.square()
        if self.mean is None or self.mean.shape != square.shape:
            self.mean = torch.zeros_like(square)
        elif (self.mean.device, self.mean.dtype) != (square.device, square.dtype):
            self.mean = self.mean.to(square)
        sound = torch.isfinite(square).all()
        self.mean.lerp_(torch.where(sound, square, self.mean), _NEW_SHARE)

    def discard_(self) -> None:
        """Leave out the gradients observed since the last step: the step is not taken."""
        self._lost.clear()

    def reset_(self) -> None:
        """Start anew, after ranks have come to mean something else."""
        if self.mean is not None:
            self.mean.zero_()

    def stop_(self) -> None:
        """Observe gates no longer."""
        for _, hook in self._observed.values():
            hook.remove()
        self._observed.clear()
        self._lost.clear()

    @torch.no_grad()
    def importance(self, group: "dist.ProcessGroup | None" = None) -> dict[int, Tensor] | None:
        """Return the importance of the ranks of each gate, ``(R,)``, by the gate's ``id``.

        Alike in all processes of a group, which call it together. None if no gradient has been
        observed.
        """
        gates = self._gates
        widths = [gate.numel() for gate in gates]
        mean = self.mean
        if mean is None or mean.numel() != sum(widths):
            mean = torch.cat([torch.zeros_like(gate) for gate in gates])
        if group is not None:
            mean = mean.clone()
            dist.all_reduce(mean, group=group)
        if not mean.any():
            return None
        return {id(g): part for g, part in zip(gates, mean.split(widths), strict=True)}


log = logging.getLogger("comera")

_OBSERVED = 100
"""Steps before the cut, half of all at most, in which ranks mean the same: twice as many as the
running mean looks back."""


@dataclass
class ImportanceSettings:
    """Settings by which :class:`ImportancePruning` chooses among ranks.

    Args:
        min_keep: What every layer keeps at least, as a share of what it would have if all were cut
            alike, in ``[0, 1]``. Early in training the loss hardly depends on layers that are
            needed later, such as feed-forward ones.
        canonical: Bring the tensor trains into canonical form, in which ranks can be told apart,
            a hundred steps before they are cut, or half way if there are fewer than two hundred.
        min_rank: Ranks that every bond keeps: 1, or 0 to let whole layers vanish and leave their
            bias.
    """

    min_keep: float = 0.5
    canonical: bool = True
    min_rank: int = 1

    def check(self) -> None:
        """Raise ``ValueError`` for a setting that is out of range."""
        check_min_rank(self.min_rank)
        check_min_keep(self.min_keep)
        if not isinstance(self.canonical, bool):
            raise ValueError(f"canonical={self.canonical!r} must be True or False")


class ImportancePruning(RankLearning):
    """Train the loss alone for some steps, then prune to a target those ranks that matter least.

    The importance of a rank is the mean square of its gate times the gate's gradient, over the last
    fifty steps or so: what the loss of a batch would lose with it, to first order (Molchanov et
    al., arXiv 1906.10771). Ranks go by their importance for each entry they cost, over all layers
    together. Nothing regularises the gates.

    Call :meth:`objective` on each loss before its backward pass, :meth:`step` after each
    optimizer step, and :meth:`finish_` once, when it is :attr:`due`; ``TrainStep`` makes the first
    two calls. Training goes on afterwards, with the small model.

    Args:
        model: Holds tensor-train layers; those it holds now are the ones that are learned, but for
            those whose gates are frozen.
        target: Size of their cores at the end, as a share of their size now, in (0, 1].
        steps: Steps before ranks are cut, at least one.
        min_keep: What every layer keeps at least, as a share of what an equal cut of all would
            leave it.
        canonical: Whether to bring the tensor trains into canonical form before, by
            :func:`~comera.canonicalize_`.
        min_rank: 1, or 0 to let whole layers vanish; for these three see
            :class:`~comera.rank.importance_pruning.ImportanceSettings`.
        process_group: Processes that train copies of the model together, each on its own rows. They
            cut the same ranks or, with an error, none, and all of them make the same calls of
            :meth:`step` and :meth:`finish_`. ``"auto"`` finds them: those of the model's
            ``DistributedDataParallel``, else all that ``torch.distributed`` knows of. None where
            each trains a model of its own.

    Attributes:
        start_size: Entries of the cores when this object was made.
        target_size: Entries allowed at the end.
        forced: Gates above 0.1 that :meth:`finish_` has closed, None before it ran.

    Raises:
        ValueError: If the model has no tensor-train layer to learn, one is sharded, as by
            ``fully_shard``, or a setting is out of range.
    """

    method: ClassVar[str] = "ImportancePruning"

    def __init__(
        self,
        model: nn.Module,
        target: float,
        steps: int,
        *,
        min_keep: float = ImportanceSettings.min_keep,
        canonical: bool = ImportanceSettings.canonical,
        min_rank: int = ImportanceSettings.min_rank,
        process_group: "ProcessGroup | Literal['auto'] | None" = "auto",
    ) -> None:
        check_steps("steps", steps, 1, ": they tell the importance of ranks")
        self.settings = ImportanceSettings(min_keep, canonical, min_rank)
        self.settings.check()
        super().__init__(model, target, steps, min_rank, process_group)
        self._scores: ImportanceScores | None = self._observe()

    def _observe(self) -> ImportanceScores:
        scores = ImportanceScores(self.size.layers)
        scores.observe_()
        return scores

    def _objective(self, loss: Tensor, gates: AllGates, seen: Tensor) -> Tensor:
        if self._scores is not None:
            self._scores.observe_()  # gates that have been replaced since the last step, too
        return loss

    def count_(self, optimizer: AnyOptimizer | None = None) -> None:
        """Do the part of :meth:`step` that is the host's, between two steps."""
        super().count_(optimizer)
        if self.settings.canonical and self.steps_done == self._canonical_from:
            group = self._processes(min_keep=self.settings.min_keep)
            canonicalize_(self.model, optimizer, process_group=group)
            if self._scores is not None:
                self._scores.reset_()

    @property
    def _canonical_from(self) -> int:
        """Return after how many steps; at the very start there is nothing to tell ranks apart."""
        return self._steps - min(_OBSERVED, (self._steps + 1) // 2)

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """Do the part of :meth:`step` that is the device's, in place: a CUDA graph can hold it."""
        if self._scores is not None:
            group = self.process_group  # in a loop of one's own it may not have been looked for yet
            self._scores.follow_(None if isinstance(group, str) else group)
        super().follow_(loss)

    def discard_(self) -> None:
        """Forget what came since the last :meth:`step`, whose gradients are thrown away."""
        super().discard_()
        if self._scores is not None:
            self._scores.discard_()

    def finish_(self, optimizer: AnyOptimizer | None = None) -> dict[str, Any]:
        """End with at most ``target_size`` entries: cut the least important ranks, in place.

        Args:
            optimizer: Its state is cut along with the parameters; that of the last step, if it is
                not given.

        Returns:
            ``size``, ``target_size`` and ``start_size`` in entries; ``forced``, how many gates
            above 0.1 have been closed; ``reached``, the size before any was.

        Raises:
            ValueError: If processes that train together hold different gates or would cut different
                ranks; then none of them has changed anything. If the cores hold what is not finite,
                or the optimizer's state cannot be cut.
            RuntimeError: If another process cannot cut its ranks.
        """
        group = self._processes(min_keep=self.settings.min_keep)
        importance = None if self._scores is None else self._scores.importance(group)
        if importance is None and self._scores is not None:
            log.warning(
                "no step has told the importance of ranks: those that carry the least of their "
                "layer are cut"
            )
        outcome = self._cut_(
            optimizer or self._optimizer, group, importance, self.settings.min_keep
        )
        self._stop()
        return outcome

    def _stop(self) -> None:
        if self._scores is not None:
            self._scores.stop_()
            self._scores = None

    def check_schedule(self, optimizer: AnyOptimizer) -> None:
        """Warn of nothing: no gate has to fall, whatever its learning rate."""

    def identity(self) -> tuple[object, ...]:
        """Return all that a recorded CUDA graph has fixed: host values on which the objective
        branches, and addresses of the tensors it reads.
        """
        mean = None if self._scores is None else self._scores.mean
        return (*super().identity(), None if mean is None else mean.data_ptr())

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs; tensors and plain values only."""
        mean = None if self._scores is None else self._scores.mean
        return {**super().state_dict(), "importance": mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; ``ValueError`` for another method's."""
        super().load_state_dict(state)
        if self.forced is not None:  # nothing left to choose
            self._stop()
            return
        mean = state["importance"]
        self._scores = self._scores or self._observe()
        self._scores.mean = None if mean is None else self._own(mean)
