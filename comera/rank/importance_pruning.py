"""Cut ranks to a target all at once, by their importance for the loss."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from comera.optim.state_layout import AnyOptimizer
from comera.rank.agreement import mean_over, processes_of
from comera.rank.learning import AllGates, RankLearning, check_steps
from comera.rank.prune import check_min_keep
from comera.shapes import check_min_rank
from comera.surgery.canonical import canonicalize_

log = logging.getLogger("comera")


@dataclass
class ImportanceSettings:
    """Settings of :class:`ImportancePruning`, and of the section ``importance_pruning`` of runs.

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

    Attributes and errors are those of :class:`~comera.TwoStage`; ``turned`` is whether the last
    step has made ranks singular vectors, after which averages of weights begin again.
    """

    method: ClassVar[str] = "ImportancePruning"
    _tensors: ClassVar[dict[str, str]] = {"importance": "_mean"}

    def __init__(
        self,
        model: nn.Module,
        target: float,
        steps: int,
        *,
        min_keep: float = ImportanceSettings.min_keep,
        canonical: bool = ImportanceSettings.canonical,
        min_rank: int = ImportanceSettings.min_rank,
        process_group: "dist.ProcessGroup | Literal['auto'] | None" = "auto",
    ) -> None:
        check_steps("steps", steps, 1, ": they tell the importance of ranks")
        self.settings = ImportanceSettings(min_keep, canonical, min_rank)
        self.settings.check()
        super().__init__(model, target, steps, min_rank, process_group)
        # Twice as many steps before the cut as the running mean looks back; not at the very start,
        # when there is nothing to tell ranks apart.
        self._canonical_from = steps - min(100, (steps + 1) // 2)
        self._mean: Tensor | None = None  # running mean, of all gates in turn
        self._lost: dict[int, Tensor] = {}  # gate times gradient since the last step
        self._observed: dict[int, tuple[Tensor, Any]] = {}  # gates with their hooks
        self._observe_()

    def __getstate__(self) -> dict[str, Any]:
        # Gates of a copy have no hooks.
        return {**super().__getstate__(), "_lost": {}, "_observed": {}}

    def _objective(self, loss: Tensor, gates: AllGates, seen: Tensor) -> Tensor:
        self._observe_()
        return loss

    def _observe_(self) -> None:
        """Hook every gate, again if it was replaced; raise ``ValueError`` if a gate is frozen."""
        names = [name for name, layer in self.size.layers.items() for _ in layer.gates]
        for number, (gate, name) in enumerate(zip(self.size.gates, names, strict=True)):
            if not gate.requires_grad:
                raise ValueError(
                    f"the rank gates of {name or 'the layer'} have been frozen "
                    "(requires_grad=False) since rank learning began: without their gradients "
                    "there is no telling the importance of its ranks. Let them train, or make a "
                    "new ImportancePruning, which leaves them"
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

    def count_(self, optimizer: AnyOptimizer | None = None, steps: float = 1) -> None:
        """Count a step on the host, see :meth:`~comera.rank.learning.RankLearning.count_`."""
        super().count_(optimizer, steps)
        passed = self.steps_done - self._canonical_from
        self.turned = self.settings.canonical and 0 <= passed < steps
        if self.turned:
            group = self._processes(min_keep=self.settings.min_keep)
            canonicalize_(self.model, optimizer, process_group=group)
            if self._mean is not None:  # of ranks that are no more
                self._mean.zero_()

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """Follow a step on the device, see :meth:`~comera.rank.learning.RankLearning.follow_`.

        A step with non-finite gradients is left out of the running mean, which restarts after
        truncation. Gradients are averaged over the processes.
        """
        super().follow_(loss)
        if not self._lost:
            return
        gates, group = self.size.gates, self.process_group
        parts = [
            self._lost[k] if k in self._lost else torch.zeros_like(gate)
            for k, gate in enumerate(gates)
        ]
        self._lost.clear()
        if isinstance(group, str):  # in a loop of one's own, which is not of TrainStep
            self.process_group = group = processes_of(self.model)
        square = mean_over(group, torch.cat(parts)).square()
        if self._mean is None or self._mean.shape != square.shape:
            self._mean = torch.zeros_like(square)
        self._mean = self._mean.to(square)
        share = 0.02  # so it looks back some fifty steps
        self._mean.lerp_(torch.where(torch.isfinite(square).all(), square, self._mean), share)

    def discard_(self) -> None:
        """Discard the gradients of a step that is not taken."""
        super().discard_()
        self._lost.clear()

    def finish_(self, optimizer: AnyOptimizer | None = None) -> dict[str, Any]:
        """Cut the least important ranks, see :meth:`~comera.rank.learning.RankLearning.finish_`."""
        group = self._processes(min_keep=self.settings.min_keep)
        importance = None
        if self.forced is None:
            importance = self._importance(group)
            if importance is None:
                log.warning(
                    "no step has told the importance of ranks: those that carry the least of their "
                    "layer are cut"
                )
        outcome = self._cut_(optimizer, group, importance, self.settings.min_keep)
        self._stop_()
        return outcome

    @torch.no_grad()
    def _importance(self, group: "dist.ProcessGroup | None") -> dict[int, Tensor] | None:
        """Return the importance of the ranks of each gate, ``(R,)``, by the gate's ``id``.

        All processes of a group call this and get the same. None without observed gradients.
        """
        gates, mean = self.size.gates, self._mean
        widths = [gate.numel() for gate in gates]
        if mean is None or mean.numel() != sum(widths):
            mean = torch.cat([torch.zeros_like(gate) for gate in gates])
        if group is not None:
            mean = mean.clone()
            dist.all_reduce(mean, group=group)
        if not mean.any():
            return None
        return {id(g): part for g, part in zip(gates, mean.split(widths), strict=True)}

    def _stop_(self) -> None:
        for _, hook in self._observed.values():
            hook.remove()
        self._observed.clear()
        self._lost.clear()
        self._mean = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, to resume a run."""
        super().load_state_dict(state)
        if self.forced is not None:  # nothing left to choose
            self._stop_()
