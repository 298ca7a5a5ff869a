"""Cut ranks to a target all at once, by their importance for the loss."""

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


log = logging.getLogger("comera")

_NEW_SHARE = 0.02
"""Share of the present step in the running mean, which so looks back some fifty steps."""
_OBSERVED = 100
"""Steps between canonical form and the cut: twice as many as the running mean looks back."""


class ImportanceScores:
    """Running mean, over training steps, of the square of gate times gradient, for every rank.

    Gate times gradient is, to first order, how much a batch's loss would change without the rank
    (Molchanov et al., arXiv 1906.10771, equation 8).

    Args:
        layers: The layers whose gates are observed, by name.

    Attributes:
        mean: Running mean for the gates of all layers, concatenated; None before the first step.
    """

    def __init__(self, layers: Mapping[str, TensorTrainModule]) -> None:
        self._layers = dict(layers)
        self._lost: dict[int, Tensor] = {}
        self._observed: dict[int, tuple[nn.Parameter, Any]] = {}
        self.mean: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lost": {}, "_observed": {}}  # gates of a copy have no hooks

    @property
    def _gates(self) -> dict[nn.Parameter, str]:
        """Return each gate once, with the name of the first layer that has it."""
        gates: dict[nn.Parameter, str] = {}
        for name, layer in self._layers.items():
            for gate in layer.gates:
                gates.setdefault(gate, name or "the layer")
        return gates

    def observe_(self) -> None:
        """Hook every gate, again if it was replaced; raise ``ValueError`` if a gate is frozen."""
        for number, (gate, owner) in enumerate(self._gates.items()):
            if not gate.requires_grad:
                raise ValueError(
                    f"the rank gates of {owner} have been frozen (requires_grad=False) "
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

    def _add(self, number: int, grad: Tensor) -> None:
        lost = grad.detach() * self._observed[number][0].detach()
        before = self._lost.get(number)
        self._lost[number] = lost if before is None else before + lost

    @torch.no_grad()
    def follow_(self, group: "dist.ProcessGroup | None" = None) -> None:
        """Add a step to the running mean after its backward pass, on the device.

        A step with non-finite gradients is skipped; the mean restarts after truncation. Gradients
        are averaged over the processes of ``group``.
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
        """Discard the gradients observed since the last step."""
        self._lost.clear()

    def stop_(self) -> None:
        """Remove the hooks and drop all scores."""
        for _, hook in self._observed.values():
            hook.remove()
        self._observed.clear()
        self._lost.clear()
        self.mean = None

    @torch.no_grad()
    def importance(self, group: "dist.ProcessGroup | None" = None) -> dict[int, Tensor] | None:
        """Return the importance of the ranks of each gate, ``(R,)``, by the gate's ``id``.

        All processes of ``group`` call this and get the same. None if no gradient was observed.
        """
        gates = list(self._gates)
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


@dataclass
class ImportanceSettings:
    """Settings of :class:`ImportancePruning`, and of the section ``importance`` of a run.

    Args:
        min_keep: Entries that every layer keeps at least, as a share of what it would have if all
            layers were cut alike, in ``[0, 1]``. Early in training the loss hardly depends on
            layers that are needed later, such as feed-forward layers.
        canonical: Bring the tensor trains into canonical form, in which ranks can be told apart,
            a hundred steps before the cut, or half way if there are fewer than two hundred steps.
        min_rank: Ranks that every bond keeps: 1, or 0 to let whole layers vanish but for their
            bias.
    """

    min_keep: float = 0.5
    canonical: bool = True
    min_rank: int = 1

    def check(self) -> None:
        """Raise ``ValueError`` for a setting out of range."""
        check_min_rank(self.min_rank)
        check_min_keep(self.min_keep)
        if not isinstance(self.canonical, bool):
            raise ValueError(f"canonical={self.canonical!r} must be True or False")


class ImportancePruning(RankLearning):
    """Train the loss alone for some steps, then prune to a target those ranks that matter least.

    The importance of a rank is the mean square of its gate times the gate's gradient, over about
    fifty steps (Molchanov et al., arXiv 1906.10771). Ranks of all layers are pruned by importance
    per entry of the cores. Gates are not regularised. Call the methods as those of
    :class:`~comera.TwoStage`.

    Args:
        model: As of :class:`~comera.TwoStage`.
        target: As of :class:`~comera.TwoStage`.
        steps: Steps before ranks are cut, at least one.
        min_keep: See :class:`~comera.rank.importance_pruning.ImportanceSettings`.
        canonical: Whether ranks are made singular vectors before the cut.
        min_rank: Ranks that every bond keeps: 1, or 0 to let whole layers vanish.
        process_group: As of :class:`~comera.TwoStage`.

    Attributes and errors are those of :class:`~comera.TwoStage`.
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
        # At the very start there is nothing to tell ranks apart.
        self._canonical_from = steps - min(_OBSERVED, (steps + 1) // 2)
        self._scores = ImportanceScores(self.size.layers)
        self._scores.observe_()

    def _objective(self, loss: Tensor, gates: AllGates, seen: Tensor) -> Tensor:
        self._scores.observe_()  # gates that have been replaced since the last step, too
        return loss

    def count_(self, optimizer: AnyOptimizer | None = None) -> None:
        """Count a step on the host, see :meth:`~comera.rank.learning.RankLearning.count_`."""
        super().count_(optimizer)
        if self.settings.canonical and self.steps_done == self._canonical_from:
            group = self._processes(min_keep=self.settings.min_keep)
            canonicalize_(self.model, optimizer, process_group=group)
            if self._scores.mean is not None:  # of ranks that are no more
                self._scores.mean.zero_()

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """Follow a step on the device, see :meth:`~comera.rank.learning.RankLearning.follow_`."""
        group = self.process_group  # in a loop of one's own it may not have been looked for yet
        self._scores.follow_(None if isinstance(group, str) else group)
        super().follow_(loss)

    def discard_(self) -> None:
        """Discard the gradients of a step that is not taken."""
        super().discard_()
        self._scores.discard_()

    def finish_(self, optimizer: AnyOptimizer | None = None) -> dict[str, Any]:
        """Cut the least important ranks, see :meth:`~comera.rank.learning.RankLearning.finish_`."""
        group = self._processes(min_keep=self.settings.min_keep)
        importance = None
        if self.forced is None:
            importance = self._scores.importance(group)
            if importance is None:
                log.warning(
                    "no step has told the importance of ranks: those that carry the least of their "
                    "layer are cut"
                )
        outcome = self._cut_(optimizer, group, importance, self.settings.min_keep)
        self._scores.stop_()
        return outcome

    def check_schedule(self, optimizer: AnyOptimizer) -> None:
        """Do nothing: this method needs no gate to close in training, at any learning rate."""

    def identity(self) -> tuple[object, ...]:
        """Return the host values and tensor addresses that a CUDA graph of the objective fixes."""
        mean = self._scores.mean
        return (*super().identity(), None if mean is None else mean.data_ptr())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank learning as tensors and plain values, to resume a run."""
        return {**super().state_dict(), "importance": self._scores.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, to resume a run."""
        super().load_state_dict(state)
        mean = state["importance"]
        if self.forced is not None:  # nothing left to choose
            self._scores.stop_()
        else:
            self._scores.mean = None if mean is None else self._own(mean)
