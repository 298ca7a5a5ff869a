"""Rank learning inside the training loop of another library, one optimizer step after the other."""

import logging
from typing import Any

from torch import Tensor

from comera.optim.state_layout import unwrap
from comera.rank.learning import RankLearning, processes_of
from comera.train.data_parallel import mean_over

log = logging.getLogger("comera")


class RankSteps:
    """The common part of callbacks of other libraries, in the order of their calls.

    Args:
        ranks: Rank learning of the model that is trained.

    Attributes:
        ranks: The same.
        outcome: What :meth:`~comera.TwoStage.finish_` has returned; None before ranks are cut.
    """

    def __init__(self, ranks: RankLearning) -> None:
        self.ranks = ranks
        self.outcome: dict[str, Any] | None = None
        self._seen: Tensor | None = None  # the loss of the optimizer step that is under way
        self._parts = 0, 0  # of it that came, and of a whole step
        self._group: Any = None

    def begin(self, steps_left: float) -> None:
        """Begin or go on, with so many optimizer steps to come; warn where they are too few."""
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
        """Return what to differentiate instead of a loss that is one of the parts of a step's.

        Args:
            loss: Divided by the number of parts, or weighed by tokens, so that the sum of all is
                the loss of the step.
            parts: How many there are.
        """
        if self.ranks.stage == "done":
            return loss
        seen = mean_over(self._group, loss.detach() * parts)
        objective = self.ranks.objective(loss * parts, seen) / parts
        share = seen / parts
        self._seen = share if self._seen is None else self._seen + share
        self._parts = self._parts[0] + 1, parts
        return objective

    def end_step(self, optimizer: Any, skipped: bool = False) -> None:
        """Count an optimizer step, unless there was no loss, or gradients were not finite."""
        seen, self._seen = self._seen, None
        (came, parts), self._parts = self._parts, (0, 0)
        if seen is None:
            return
        if came < parts:  # an epoch ended before
            seen = seen * (parts / came)
        if skipped:
            self.ranks.discard_()
        else:
            self.ranks.step(seen, unwrap(optimizer))

    def cut_if_due(self, optimizer: Any) -> dict[str, Any] | None:
        """Cut ranks when it is time, and return what came of it; None at all other times."""
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


def check_model(ranks: RankLearning, model: Any) -> None:
    """Check that ranks are those of a model or of a part of it.

    Raises:
        ValueError: If not.
    """
    there = {id(param) for param in model.parameters()}
    if not any(id(gate) in there for gate in ranks.size.gates):
        raise ValueError(
            f"ranks is a {ranks.method} of another model: make it of the one that the trainer has"
        )
