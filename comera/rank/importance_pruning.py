"""Prune ranks at once, by the importance that their gates' gradients tell while a model trains."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from comera.optim.unwrap import AnyOptimizer
from comera.rank.importance import ImportanceScores
from comera.rank.learning import RankLearning
from comera.rank.prune import check_min_keep
from comera.rank.settings import check_steps
from comera.rank.size import AllGates
from comera.surgery.canonical import canonicalize_
from comera.surgery.truncate import check_min_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("comera")

_OBSERVED = 100
"""Steps before the cut, half of all at most, in which ranks mean the same: twice as many as the
running mean looks back."""


@dataclass
class ImportanceSettings:
    """How :class:`ImportancePruning` chooses among ranks.

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
        """Return what a step depends on beside the numbers in tensors; these by their addresses."""
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
