"""Run rank learning inside the training loop of another library."""

import logging
from typing import Any

from torch import Tensor

from comera.optim.state_layout import unwrap
from comera.rank.agreement import mean_over, processes_of
from comera.rank.learning import RankLearning

log = logging.getLogger("comera")


class RankSteps:
    """Rank learning for callbacks of other libraries; methods are in the order of their calls.

    ``outcome`` is the result of :meth:`~comera.TwoStage.finish_`; None before ranks are cut.
    """

    def __init__(self, ranks: RankLearning) -> None:
        self.ranks = ranks
        self.outcome: dict[str, Any] | None = None
        self._seen: Tensor | None = None  # loss of the present optimizer step
        self._parts = 0, 0  # number of its parts so far, and of a whole step
        self._group: Any = None

    def begin(self, steps_left: float) -> None:
        """Begin or resume training; warn if the steps left are too few to cut ranks."""
        self._seen, self._parts = None, (0, 0)
        given = self.ranks.process_group
        self._group = processes_of(self.ranks.model) if given == "auto" else given
        if self.ranks.forced is None and self.ranks.steps_left > steps_left:
            log.warning(
                "rank learning takes %d more steps and the trainer %d: no rank will be cut; make "
                "early_steps and late_steps fewer, or let the trainer take more",
                self.ranks.steps_left, steps_left,
            )  # fmt: skip

    def objective(self, loss: Tensor, parts: int) -> Tensor:
        """Return the objective of one of ``parts`` batches whose losses sum to a step's loss."""
        if self.ranks.stage == "done":
            return loss
        seen = mean_over(self._group, loss.detach() * parts)
        objective = self.ranks.objective(loss * parts, seen) / parts
        share = seen / parts
        self._seen = share if self._seen is None else self._seen + share
        self._parts = self._parts[0] + 1, parts
        return objective

    def end_step(self, optimizer: Any, skipped: bool = False) -> None:
        """Count an optimizer step, unless it was ``skipped`` for non-finite gradients."""
        seen, self._seen = self._seen, None
        (came, parts), self._parts = self._parts, (0, 0)
        if seen is None:
            return
        if came < parts:  # the epoch ended
            seen = seen * (parts / came)
        if skipped:
            self.ranks.discard_()
        else:
            self.ranks.step(seen, unwrap(optimizer))

    def cut_if_due(self, optimizer: Any) -> dict[str, Any] | None:
        """Cut ranks if rank learning is due, and return the outcome; else return None."""
        if not self.ranks.due:
            return None
        self.outcome = self.ranks.finish_(unwrap(optimizer))
        return self.outcome

    def end(self) -> None:
        """Warn if training has ended before ranks were cut."""
        if self.ranks.forced is None:
            log.warning(
                "training ended after %d steps of rank learning, before its last: no rank was cut",
                self.ranks.steps_done,
            )
