"""The two stages of rank learning: converge first, then shrink to a target.

Early stage (CoMERA, arXiv 2405.14377, equation 7): ``loss + gamma * size + beta * |cores|^2``,
the size relative to that at the start. Late stage (equation 9, achievement scalarisation)::

    max(w1 * (loss - loss_goal), w2 * (size - size_goal)) + rho * (loss + size) + beta * |cores|^2

with ``w1 = 1 / loss`` and ``w2 = 1 / size`` anew in every step: whichever of the two is further
from its goal, in proportion, gets the step. The comparison uses the exact size, the gradient the
relaxed one, and the choice is made on the device. Two things differ from the paper: the whole is
multiplied by the present loss, so that the loss has the same scale as in the early stage and the
optimizer's moments stay valid; and a size that has met its target is not pressed any further, nor
let fall below it: under Adam many gates reach their threshold in the same few steps.

Or there is no late stage, and what the gradients of the gates have told until then chooses the
ranks (``comera/rank/sensitivity.py``).
"""

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from comera.names import listed
from comera.nn.module import check_whole, tensor_trains
from comera.optim.unwrap import AnyOptimizer, unwrap, unwrap_separable
from comera.params import is_sharded
from comera.rank.agreement import agreed, check_alike, processes_of
from comera.rank.prune import prune_to_
from comera.rank.sensitivity import Sensitivities
from comera.rank.settings import (
    DEFAULTS,
    Choice,
    check_settings,
    check_stages,
    check_steps,
    settled_choice,
    target_entries,
)
from comera.rank.size import Gates, SizeOfRanks
from comera.surgery.canonical import canonicalize_
from comera.surgery.truncate import kept_ranks, truncate_

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("comera")

_SMALLEST_SHARE = 0.1
"""A loss below this share of that at the end of the early stage counts as this much: the size keeps
its weight against the optimizer's memory of larger gradients when a model memorises."""

_OPEN = 0.1
"""A gate above this still carries its rank; one below is on its way out."""

_HEARD = 100
"""Steps before a cut by sensitivity, half of the early stage at most, in which ranks mean the same:
twice as many as its mean looks back."""

_WORTH_SAYING = 0.02
"""Share of the live ranks that have to be closed while open before it is worth a warning."""

Stage = Literal["early", "late", "done"]


class TwoStage:
    """Rank learning for one training run.

    Call :meth:`objective` on each loss before its backward pass, :meth:`step` after each
    optimizer step, and :meth:`finish_` once, when it is :attr:`due`; ``TrainStep`` makes the first
    two calls. Training goes on afterwards, with the small model.

    Args:
        model: Holds tensor-train layers; those it holds now are the ones that are learned, but for
            those whose gates are frozen.
        target: Size of their cores at the end, as a share of their size now, in (0, 1].
        early_steps: Steps before the late stage begins.
        late_steps: Steps of the late stage; afterwards the objective is the loss alone.
        choose: Which ranks go. ``"sensitivity"``, the default without late stage and ``gamma``:
            when the early stage ends, those go at once that matter least to the loss for each
            entry they cost, by the mean square of gate times gradient in its last fifty steps or
            so. ``"objective"``, the default with either: those whose gates it closes. Under Adam,
            gates of all prices fall alike; sensitivities tell a layer of few dear ranks from one of
            many cheap ones.
        gamma: Weight of the size in the early stage: 0.01, and 0 with ``choose="sensitivity"``,
            which would hear of it in the gradients.
        beta: Weight of the cores' squared norm in both. It stops the gates from shrinking while
            the cores grow to make up for it.
        rho_loss: Weight of the loss when the size has the step; 0.1 in the
            authors' code. At 1 the loss is never trained more slowly than in the early stage.
        rho_size: Weight of the size when the loss has the step; 0.01 in the authors' code, which
            goes on pruning below the target.
        loss_goal: What the late stage measures the loss against; by default the running mean of
            the loss at the end of the early stage.
        min_rank: 1, or 0 to let whole layers vanish and leave their bias.
        canonical: Call :func:`~comera.canonicalize_` before ranks are chosen: a hundred steps
            before the cut by sensitivity, where that is the default, or when the late stage begins.
        spare: What every layer keeps at least, as a share of what it would have if all were cut
            alike, in ``[0, 1]``: 0.5 with ``choose="sensitivity"``, else 0. Early in training the
            loss hardly depends on layers that are needed later, such as feed-forward ones.
        process_group: Processes that train copies of the model together, each on its own rows. They
            cut the same ranks or, with an error, none, and all of them make the same calls of
            :meth:`step` and :meth:`finish_`. ``"auto"`` finds them: those of the model's
            ``DistributedDataParallel``, else all that ``torch.distributed`` knows of. None where
            each trains a model of its own.

    Attributes:
        start_size: Entries of the cores when this object was made.
        target_size: Entries allowed at the end.
        forced: Gates above 0.1 that :meth:`finish_` has closed, None before it ran.
        process_group: As given. ``TrainStep`` puts that of its ``DistributedDataParallel`` here.

    Raises:
        ValueError: If the model has no tensor-train layer to learn, one is sharded, as by
            ``fully_shard``, or a setting is out of range.

    Note:
        In a loop of one's own each of several processes weighs the size against its own loss, and
        the mean of their gradients is the mean of their choices; ``objective(loss, seen)`` with
        the mean of their losses makes it one choice, as ``TrainStep`` does. The
        ``DistributedDataParallel`` around the model, which averages gradients of the shapes it has
        seen, is told of the new ones when ranks are cut. Other wrappers that average must be made
        anew.
    """

    def __init__(
        self,
        model: nn.Module,
        target: float,
        early_steps: int,
        late_steps: int = 0,
        *,
        choose: Choice | None = None,
        gamma: float | None = None,
        beta: float = 0.0,
        rho_loss: float = 1.0,
        rho_size: float = 0.0,
        loss_goal: float | None = None,
        min_rank: int = 1,
        canonical: bool | None = None,
        spare: float | None = None,
        process_group: "ProcessGroup | Literal['auto'] | None" = "auto",
    ) -> None:
        check_steps("early_steps", early_steps)
        check_steps("late_steps", late_steps)
        choose = settled_choice(choose, late_steps, gamma)
        defaults = DEFAULTS[choose]
        gamma = defaults.gamma if gamma is None else gamma
        canonical = defaults.canonical if canonical is None else canonical
        spare = defaults.spare if spare is None else spare
        check_settings(
            target=target, min_rank=min_rank, canonical=canonical, spare=spare,
            gamma=gamma, beta=beta, rho_loss=rho_loss, rho_size=rho_size,
        )  # fmt: skip
        check_stages(choose, early_steps, late_steps, gamma, canonical)
        if isinstance(process_group, str) and process_group != "auto":
            raise ValueError(
                f"process_group={process_group!r} must be a group of torch.distributed, 'auto' to "
                "find it, or None for a process that trains a model of its own"
            )
        check_whole(model, "TwoStage")
        self.model = model
        self.target, self.early_steps, self.late_steps = target, early_steps, late_steps
        self.gamma, self.beta = gamma, beta
        self.rho_loss, self.rho_size = rho_loss, rho_size
        self.loss_goal, self.min_rank = loss_goal, min_rank
        self.canonical, self.spare, self.choose = canonical, spare, choose
        self.size = SizeOfRanks(model, min_rank)
        if self.size.frozen:
            log.warning(
                "TwoStage leaves the ranks of %s as they are: their gates are frozen",
                listed(self.size.frozen),
            )
        self.process_group = process_group
        self._sensitivities: Sensitivities | None = None
        if choose == "sensitivity":
            self._sensitivities = self._watch()
        self.start_size = sum(
            layer.shape.size_at(layer.live_ranks) for layer in self.size.layers.values()
        )
        layers = self.size.layers.values()
        self.target_size = target_entries(layers, target, self.start_size, min_rank)
        self.steps_done = 0
        self.forced: int | None = None
        self._running_loss: Tensor | None = None
        self._reached = torch.zeros((), dtype=torch.bool, device=self.size.gates[0].device)
        self._optimizer: AnyOptimizer | None = None  # of the last step
        self._live: Tensor | None = None  # before the optimizer step that is under way
        self._late_goal: Tensor | None = None
        self._least_loss: Tensor | None = None  # follows from it
        self._goal_is_new = False  # set by the step that is under way

    def _watch(self) -> Sensitivities:
        sensitivities = Sensitivities(self.size.layers)
        sensitivities.watch_()
        return sensitivities

    def __getstate__(self) -> dict[str, Any]:
        group = None if self.process_group is None else "auto"  # a group is of this process alone
        return {**vars(self), "process_group": group, "_optimizer": None}

    def _processes(self) -> "ProcessGroup | None":
        """The group that was given or is found, once its processes hold the same ranks and gates.

        Raises:
            ValueError: In all of them, if they do not.
        """
        check_whole(self.model, "TwoStage")
        given = self.process_group
        group = processes_of(self.model) if isinstance(given, str) else given
        settings = {
            name: getattr(self, name) for name in ("choose", "target_size", "min_rank", "spare")
        }
        settings["due"] = self.forced is None
        check_alike(group, self.model, settings)
        return group

    @property
    def _cores(self) -> list[Tensor]:
        return [core for layer in self.size.layers.values() for core in layer.cores]

    @property
    def stage(self) -> Stage:
        """``"early"``, ``"late"`` or ``"done"``, for the next step."""
        if self.forced is not None or self.due:
            return "done"
        return "early" if self.steps_done < self.early_steps else "late"

    @property
    def due(self) -> bool:
        """Whether the stages are over and it is time for :meth:`finish_`, which has not run yet."""
        return self.forced is None and self.steps_done >= self.early_steps + self.late_steps

    def objective(self, loss: Tensor, seen: Tensor | None = None) -> Tensor:
        """What to differentiate instead of ``loss``: a scalar on the same device.

        Args:
            loss: Of the batch.
            seen: What the size is weighed against, where that is not ``loss``: of several processes
                the mean of theirs, so that all make the same choice.
        """
        stage = self.stage
        if stage == "done":
            return loss
        if any(map(is_sharded, self.size.gates)):
            check_whole(self.model, "TwoStage")  # it was made before the model was sharded
        if self._sensitivities is not None:
            self._sensitivities.watch_()
        gates = self.size.read()
        self._live = gates.live
        if stage == "early":
            total = loss
            if self.gamma:
                size = self.size.relaxed(gates).to(loss.device)
                total = total + self.gamma / self.start_size * size
        else:
            total = self._late_objective(loss, gates, loss.detach() if seen is None else seen)
        if self.beta:
            total = total + self.beta * torch.stack(torch._foreach_norm(self._cores)).square().sum()
        return total

    def _late_objective(self, loss: Tensor, gates: Gates, seen: Tensor) -> Tensor:
        relaxed = self.size.relaxed(gates).to(loss.device)
        # Not in the dtype of the loss: in float16 a size may be infinite.
        exact = self.size.exact(gates).clamp_min(1).to(relaxed)
        early, least = self._early_loss(seen)
        scale = seen.abs().maximum(least)  # some losses are negative
        goal = early if self.loss_goal is None else self.loss_goal
        too_much = exact - self.target_size
        size_is_worse = (seen - goal) * exact <= scale * too_much  # both relative, multiplied out
        press = (size_is_worse & ((too_much > 0) > self._reached)).to(relaxed)  # and not reached
        for_loss = 1 + self.rho_loss - press
        for_size = self.rho_size + press
        return for_loss * loss + for_size * scale * (relaxed / exact)

    def _early_loss(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Running mean at the end of the early stage; the first loss if there was none.

        And the least that a loss is weighed as.
        """
        if self._late_goal is None:
            seen = value if self._running_loss is None else self._running_loss
            self._late_goal, self._goal_is_new = seen.clone(), True
        if self._least_loss is None:
            self._least_loss = _SMALLEST_SHARE * self._late_goal.abs()
        return self._late_goal, self._least_loss

    def step(self, loss: Tensor, optimizer: AnyOptimizer | None = None) -> None:
        """Count one optimizer step whose mean loss was ``loss`` (detached).

        Args:
            loss: Of the batch.
            optimizer: What it has gathered about cores and gates starts anew when these are
                brought into canonical form. Without it that is left as it was, which costs some
                steps.
        """
        self.follow_(loss)
        self.count_(optimizer)

    def count_(self, optimizer: AnyOptimizer | None = None) -> None:
        """What :meth:`step` does on the host, between two steps."""
        self.steps_done += 1
        self._optimizer = optimizer
        if self.canonical and self.steps_done == self._canonical_from:
            canonicalize_(self.model, optimizer, process_group=self._processes())
            if self._sensitivities is not None:
                self._sensitivities.forget_()

    @property
    def _canonical_from(self) -> int:
        """After how many steps; at the very start there is nothing to tell ranks apart."""
        if self._sensitivities is None:
            return self.early_steps
        return self.early_steps - min(_HEARD, (self.early_steps + 1) // 2)

    def discard_(self) -> None:
        """Forget losses since the last :meth:`step`: their gradients are thrown away.

        Loops of one's own call it, with ``zero_grad``, after a step that raised before its end.
        """
        self._live = None
        if self._goal_is_new:
            self._late_goal, self._least_loss, self._goal_is_new = None, None, False
        if self._sensitivities is not None:
            self._sensitivities.discard_()

    @torch.no_grad()
    def follow_(self, loss: Tensor) -> None:
        """What :meth:`step` does on the device, in place, so that a CUDA graph can hold it."""
        if self._sensitivities is not None:
            self._sensitivities.follow_()
        if self._live is not None:
            self._reached |= self.size.hold_(self._live, self.target_size)
            self._live = None
        self._goal_is_new = False
        if self._running_loss is None:
            self._running_loss = loss.detach().clone()
        else:
            self._running_loss.lerp_(loss.detach(), 0.05)

    def finish_(self, optimizer: AnyOptimizer | None = None) -> dict[str, Any]:
        """End with at most ``target_size`` entries: prune what is left to prune, then truncate.

        Ranks the objective left above their threshold are closed greedily until the target is
        met, those that carry the least of their layer first. Most of them are held just above it
        by then; a warning says how many were not, if those were more than a few. With
        ``choose="sensitivity"`` all that go are closed here.

        Args:
            optimizer: Its state is cut along with the parameters; that of the last step, if it is
                not given.

        Returns:
            ``size``, ``target_size`` and ``start_size`` in entries; ``forced``, how many gates
            above 0.1 had to be closed; ``reached``, the size before any was.

        Raises:
            ValueError: If processes that train together hold different gates or would cut different
                ranks; then none of them has changed anything. If the cores hold what is not finite,
                or the optimizer's state cannot be cut.
            RuntimeError: If another process cannot cut its ranks.
        """
        optimizer = optimizer or self._optimizer
        group = self._processes()
        reached = int(self.size.exact())
        live = int(self.size.read().live.sum())
        worth = None
        if self._sensitivities is not None:
            worth = self._sensitivities.worth(group)
            if worth is None:
                log.warning(
                    "no step has told what a rank is worth: those that carry the least of their "
                    "layer are cut"
                )
        closed = self._close_(worth, optimizer, group)
        if self._sensitivities is not None:
            self._sensitivities.stop_()
            self._sensitivities = None
        self.forced = sum(value > _OPEN for value in closed)
        truncate_(self.model, optimizer, min_rank=self.min_rank)
        size = sum(core.numel() for core in self._cores)
        if worth is None and self.forced > _WORTH_SAYING * live:
            log.warning(
                "the rank objective did not bring the cores to the target of %d entries by "
                "itself: %d ranks that were still open were closed, and the loss may have jumped. "
                "Train on, or give the stages more steps or a higher gate learning rate",
                self.target_size, self.forced,
            )  # fmt: skip
        return {
            "size": size,
            "target_size": self.target_size,
            "start_size": self.start_size,
            "forced": self.forced,
            "reached": reached,
        }

    @torch.no_grad()
    def _close_(
        self,
        worth: "dict[int, Tensor] | None",
        optimizer: AnyOptimizer | None,
        group: "ProcessGroup | None",
    ) -> list[float]:
        """Close gates until the target is met: the same in all processes, or none in any."""
        gates = self.size.gates
        before, closed = [gate.detach().clone() for gate in gates], list[float]()

        def choose() -> dict[str, list[list[int]]]:
            unwrap_separable(optimizer)  # raises where its state could not be cut
            closed.extend(
                prune_to_(
                    self.size.layers, self.target_size,
                    min_rank=self.min_rank, worth=worth, spare=self.spare,
                )
            )  # fmt: skip
            layers = tensor_trains(self.model)
            return {
                name: [keep.tolist() for keep in kept_ranks(layer, self.min_rank)]
                for name, layer in layers.items()
            }

        try:
            agreed(group, choose)
        except BaseException:
            for gate, was in zip(gates, before, strict=True):
                gate.copy_(was)
            raise
        return closed

    def check_schedule(self, optimizer: AnyOptimizer) -> None:
        """Warn when the gates cannot reach their threshold in the steps there are.

        Under Adam a gate falls by at most its learning rate in a step, so nothing is pruned before
        ``1 / lr`` steps.
        """
        if self.choose == "sensitivity" or self.forced is not None:
            return  # they need not
        gates = {id(gate) for gate in self.size.gates}
        rates = [
            float(group.get("initial_lr", group["lr"]))  # a schedule may begin with less
            for group in unwrap(optimizer).param_groups
            if any(id(param) in gates for param in group["params"])
        ]
        if not rates:
            log.warning("the optimizer does not train the rank gates: no rank will be learned")
            return
        steps = self.late_steps + (self.early_steps if self.gamma else 0)
        if self.target < 1 and steps * max(rates) < 1:
            log.warning(
                "the gates' learning rate %g lets a gate fall by at most %.2g in the %d steps that "
                "press on it, and none can be pruned: raise it above %.2g, or let them be more",
                max(rates), steps * max(rates), steps, 1 / max(steps, 1),
            )  # fmt: skip

    def identity(self) -> tuple[object, ...]:
        """What :meth:`objective` and :meth:`follow_` depend on beside the numbers in tensors."""
        seen = None if self._sensitivities is None else self._sensitivities.mean
        held = (self._running_loss, self._late_goal, self._least_loss, self._reached, seen)
        return (
            self.stage, self.target_size, self.start_size, self.loss_goal, self.min_rank,
            self.gamma, self.beta, self.rho_loss, self.rho_size,
            tuple(None if tensor is None else tensor.data_ptr() for tensor in held),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs; tensors and plain numbers only."""
        return {
            "steps_done": self.steps_done,
            "start_size": self.start_size,
            "target_size": self.target_size,
            "forced": self.forced,
            "running_loss": self._running_loss,
            "late_goal": self._late_goal,
            "reached": self._reached,
            "sensitivities": None if self._sensitivities is None else self._sensitivities.mean,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_done = state["steps_done"]
        self.start_size, self.target_size = state["start_size"], state["target_size"]
        self.forced = state["forced"]
        device = self.size.gates[0].device
        self._reached = state["reached"].to(device, copy=True)  # it is changed in place
        self.discard_()
        if self._sensitivities is not None and self.forced is not None:  # nothing left to choose
            self._sensitivities.stop_()
            self._sensitivities = None
        elif self.choose == "sensitivity" and self.forced is None:
            self._sensitivities = self._sensitivities or self._watch()
            seen = state.get("sensitivities")
            self._sensitivities.mean = None if seen is None else seen.to(device, copy=True)
        self._least_loss = None
        for name in ("running_loss", "late_goal"):
            value = state[name]
            setattr(self, f"_{name}", None if value is None else value.to(device, copy=True))
