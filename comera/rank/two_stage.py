"""Learn ranks in two stages: converge first, then shrink to a target.

Early stage (CoMERA, arXiv 2405.14377, equation 7): ``loss + gamma * size + beta * |cores|^2``,
the size relative to that at the start. Late stage (equation 9, achievement scalarisation)::

    max(w1 * (loss - goal), w2 * (size - target)) + rho_loss * loss + beta * |cores|^2

with ``w1 = 1 / loss`` and ``w2 = 1 / size`` of each step; the goal is the running mean of the loss
at the end of the early stage. So each step follows the loss or the size, whichever is further from
its goal in proportion. The comparison uses the exact size, the gradient the relaxed size. Three
things differ from the paper: the whole is multiplied by the present loss, so that the optimizer's
moments stay valid; the size has no term outside the maximum; and a size that has met its target is
regularised no further, and does not fall below it.
"""

import logging
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.extras import say_once
from comera.optim.muon import MuonAdamW
from comera.optim.state_layout import AnyOptimizer, unwrap
from comera.rank.learning import OPEN, AllGates, RankLearning, Stage, check_steps
from comera.shapes import check_min_rank, is_number

log = logging.getLogger("comera")

_WORTH_SAYING = 0.02
"""Share of the live ranks that were closed while open above which a warning is logged."""
_HIGHEST_RATE = 0.02
"""Highest rate advised for gates: at 0.06 a small GPT ended at 3.03, at 0.02 at 2.94."""
_FEWEST_STEPS = 200
"""Late steps below which a cut by importance ended better by AdamW, at half of the size: a small
GPT with 20, 60, 150 at 2.77, 2.55, 2.44, and in two stages at 2.94, 2.57, 2.51; a BERT on SNLI at
1.03 and 1.10 with 150. By Muon both end alike with 104 (docs/experiments.md)."""
_LONGER = "give the stages more steps, or cut by comera.ImportancePruning"


def advised_gate_lr(target: float, late_steps: int) -> float:
    """Return a rate at which Adam closes enough gates, at most 0.02."""
    return max(RankLearning.gate_lr, min(1.5 / (target * late_steps), _HIGHEST_RATE))


@dataclass
class TwoStageSettings:
    """Settings of :class:`TwoStage`, and of the section ``two_stage`` of a run.

    Args:
        gamma: Weight of the size in the early stage.
        beta: Weight of the cores' squared norm in both stages. It stops the gates from shrinking
            while the cores grow to make up for it.
        rho_loss: Weight of the loss in late steps that shrink the size; 0.1 in the authors' code.
            At 1 the loss is never trained more slowly than in the early stage.
        min_rank: Ranks that every bond keeps: 1, or 0 to let whole layers vanish but for their
            bias.
    """

    gamma: float = 0.01
    beta: float = 0.0
    rho_loss: float = 1.0
    min_rank: int = 1

    def check(self) -> None:
        """Raise ``ValueError`` for a setting out of range."""
        check_min_rank(self.min_rank)
        for name in ("gamma", "beta", "rho_loss"):
            weight = getattr(self, name)
            if not is_number(weight) or not weight >= 0:
                raise ValueError(f"{name}={weight!r} must be a number of at least 0")


class TwoStage(RankLearning):
    """Rank learning of the CoMERA paper: first convergence, then pruning to a target.

    Call :meth:`objective` on each loss before its backward pass, :meth:`step` after each
    optimizer step, and :meth:`finish_` once, when it is :attr:`due`; ``TrainStep`` makes the first
    two calls. Training then goes on with the small model.

    Args:
        model: The model, whose tensor trains learn their ranks, unless their gates are frozen.
        target: Size of these layers' cores at the end, as a share of their size now, in (0, 1].
        early_steps: Steps before the late stage begins.
        late_steps: Steps of the late stage, at least one; afterwards the objective is the loss
            alone.
        gamma: Weight of the size in the early stage.
        beta: Weight of the cores' squared norm in both stages.
        rho_loss: Weight of the loss in late steps that shrink the size.
        min_rank: Ranks that every bond keeps: 1, or 0 to let whole layers vanish.
        process_group: Processes that train copies of the model together, each on its own rows. They
            all call :meth:`step` and :meth:`finish_` alike and cut the same ranks or, with an
            error, none. ``"auto"`` is the group of the model's ``DistributedDataParallel``, or else
            all processes of ``torch.distributed``. None if each process trains its own model.

    Attributes:
        start_size: Entries of the cores when this object was made.
        target_size: Entries allowed at the end.
        gate_lr: Learning rate of the gates for :func:`~comera.param_groups`, from the target and
            the late steps: under Adam it lets enough ranks close by themselves.
        forced: Number of gates above 0.1 that :meth:`finish_` has closed; None before it ran.

    Raises:
        ValueError: If the model has no tensor-train layer to learn, a layer is sharded, as by
            ``fully_shard``, or a setting is out of range.

    Note:
        In your own training loop, each of several processes would compare the size with its own
        loss. Call ``objective(loss, seen)`` with the mean of their losses, as ``TrainStep`` does,
        so that all make the same choice. When ranks are cut, the ``DistributedDataParallel`` around
        the model is renewed for the new shapes; other wrappers that average must be made again.
    """

    method: ClassVar[str] = "TwoStage"
    _tensors: ClassVar[dict[str, str]] = {
        "running_loss": "_running_loss", "late_goal": "_late_goal"
    }  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        target: float,
        early_steps: int,
        late_steps: int,
        *,
        gamma: float = TwoStageSettings.gamma,
        beta: float = TwoStageSettings.beta,
        rho_loss: float = TwoStageSettings.rho_loss,
        min_rank: int = TwoStageSettings.min_rank,
        process_group: "dist.ProcessGroup | Literal['auto'] | None" = "auto",
    ) -> None:
        check_steps("early_steps", early_steps, 0)
        why = "; comera.ImportancePruning cuts ranks without a late stage"
        check_steps("late_steps", late_steps, 1, why)
        self.settings = TwoStageSettings(gamma, beta, rho_loss, min_rank)
        self.settings.check()
        super().__init__(model, target, early_steps + late_steps, min_rank, process_group)
        self.early_steps, self.late_steps = early_steps, late_steps
        self.gate_lr = advised_gate_lr(target, late_steps)
        self._running_loss: Tensor | None = None
        self._late_goal: Tensor | None = None
        self._least_loss: Tensor | None = None  # follows from it

    @property
    def stage(self) -> Stage:
        """Stage of the next step: ``"early"``, ``"late"`` or ``"done"``."""
        stage = super().stage
        return "late" if stage == "early" and self.steps_done >= self.early_steps else stage

    def _objective(self, loss: Tensor, gates: AllGates, seen: Tensor) -> Tensor:
        weights, total = self.settings, loss
        if self.stage == "late":
            total = self._late_objective(loss, gates, seen)
        elif weights.gamma:
            size = self.size.relaxed(gates).to(loss.device)
            total = total + weights.gamma / self.start_size * size
        if weights.beta:
            norms = torch.stack(torch._foreach_norm(self._cores))
            total = total + weights.beta * norms.square().sum()
        return total

    def _late_objective(self, loss: Tensor, gates: AllGates, seen: Tensor) -> Tensor:
        if self._late_goal is None:  # the first loss is the goal if there was no early stage
            self._late_goal = (seen if self._running_loss is None else self._running_loss).clone()
        if self._least_loss is None:
            # When a model memorises, the size keeps its weight against the optimizer's memory of
            # larger gradients.
            self._least_loss = 0.1 * self._late_goal.abs()
        relaxed = self.size.relaxed(gates).to(loss.device)
        # Not in the dtype of the loss: in float16 a size may be infinite.
        exact = self.size.exact(gates).clamp_min(1).to(relaxed)
        scale = seen.abs().maximum(self._least_loss)  # some losses are negative
        too_much = exact - self.target_size
        # Both distances are relative; multiplied out, so that nothing is divided by what may be 0.
        size_is_worse = (seen - self._late_goal) * exact <= scale * too_much
        # Once the target was met the size never has a step again: gates taken back stay open, for
        # finish_ to choose among them.
        regularised = (size_is_worse & ((too_much > 0) > self._target_met)).to(relaxed)
        # The maximum has the gradient of its larger argument: 1 for one of the two, 0 for the other
        # one, picked without a transfer to the host. Times the loss, w1 is one and w2 loss / size.
        for_loss = 1 + self.settings.rho_loss - regularised
        return for_loss * loss + regularised * scale * (relaxed / exact)

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """Follow a step on the device, see :meth:`~comera.rank.learning.RankLearning.follow_`."""
        if self._live is None and self.steps_done == 0 and self.stage != "done":
            log.warning(
                "TwoStage counts a step without its objective: nothing closes gates where the loss "
                "alone is differentiated, instead of ranks.objective(loss)"
            )
        super().follow_(loss)
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32), copy=True)
        if self._running_loss is None:
            self._running_loss = loss
        else:
            self._running_loss.lerp_(loss, 0.05)

    def discard_(self) -> None:
        """Discard the objective of a step that is not taken."""
        super().discard_()
        if self.steps_done <= self.early_steps:  # the goal was set by that step
            self._late_goal, self._least_loss = None, None

    def finish_(self, optimizer: AnyOptimizer | None = None) -> dict[str, Any]:
        """Cut ranks, see :meth:`~comera.rank.learning.RankLearning.finish_`.

        If too many ranks are open, gates are closed greedily until the target is met, first gates
        with the smallest share in their layer. A warning tells if many of these were above 0.1, or
        if most open gates are below. The result also has the running loss, ``came_to``, and its
        ``goal``.
        """
        group = self._processes()
        rate = max(self._gate_rates(optimizer or self._optimizer), default=0.0)
        advice = f"(TwoStage.gate_lr advises {self.gate_lr:.2g})"
        gates = self.size.read()
        live, weak = int(gates.live.sum()), int((gates.live & (gates.values <= OPEN)).sum())
        if 2 * weak > live:
            log.warning(
                "%d of the %d gates that are still open are at %g or below, so that their layers "
                "answer next to nothing, as they fell faster than the model could learn: %s",
                weak, live, OPEN,
                _LONGER if rate <= self.gate_lr else f"give them a lower learning rate {advice}",
            )  # fmt: skip
        outcome = self._cut_(optimizer, group)
        for name, loss in (("came_to", self._running_loss), ("goal", self._late_goal)):
            outcome[name] = None if loss is None else float(loss)
        if outcome["forced"] > _WORTH_SAYING * live:
            log.warning(
                "the rank objective did not bring the cores to the target of %d entries by "
                "itself: %d ranks that were still open were closed, and the loss may have jumped. "
                "Train on; next time: %s", self.target_size, outcome["forced"],
                _LONGER if rate >= self.gate_lr else f"give them a higher learning rate {advice}",
            )  # fmt: skip
        return outcome

    def check_schedule(self, optimizer: AnyOptimizer) -> None:
        """Warn if gates cannot close in the remaining steps; Adam takes ``1 / lr`` steps."""
        if self.forced is not None:
            return  # they need not
        fewest = 100 if isinstance(unwrap(optimizer), MuonAdamW) else _FEWEST_STEPS
        if self.target < 1 and self.late_steps < fewest:
            say_once(
                log, logging.WARNING,
                "TwoStage: %d late steps are few for gates to close in turn; runs as short as that "
                "ended better with comera.ImportancePruning", self.late_steps,
            )  # fmt: skip
        rates = self._gate_rates(optimizer)
        if not rates:
            log.warning("the optimizer does not train the rank gates: no rank will be learned")
            return
        steps = self.late_steps + (self.early_steps if self.settings.gamma else 0)
        if self.target < 1 and steps * max(rates) < 1:
            log.warning(
                "the gates' learning rate %g lets a gate fall by at most %.2g in the %d steps that "
                "regularise it, and none can be pruned: %s", max(rates), steps * max(rates), steps,
                _LONGER if steps * _HIGHEST_RATE < 1 else f"raise it above {1 / steps:.2g}",
            )  # fmt: skip

    def _gate_rates(self, optimizer: AnyOptimizer | None) -> list[float]:
        gates = {id(gate) for gate in self.size.gates}
        return [
            float(group.get("initial_lr", group["lr"]))  # a schedule may begin with less
            for group in (unwrap(optimizer).param_groups if optimizer is not None else ())
            if any(id(param) in gates for param in group["params"])
        ]

    def identity(self) -> tuple[object, ...]:
        least = None if self._least_loss is None else self._least_loss.data_ptr()
        return (*super().identity(), *astuple(self.settings), least)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, to resume a run."""
        super().load_state_dict(state)
        self._least_loss = None
