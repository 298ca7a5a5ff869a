"""GaLore (arXiv 2403.03507): any optimizer, its moments kept in a subspace of the gradient.

A projected parameter has a small stand-in, which is what the inner optimizer trains: before its
step the stand-in is zero and has the projected gradient; afterwards it is the step, which is taken
back out of the subspace. So every optimizer that works element by element or matrix by matrix is
an inner optimizer, and its state is that of the stand-in.

GaLore around the optimizers that people use it with, under the names they know.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.optim import state_layout
from comera.optim.galore_parts import (
    OURS,
    as_groups,
    as_list,
    check_gradient,
    check_group,
    check_not_left_out,
    check_once,
    check_projects_alike,
    check_subspaces,
    for_inner,
    joined,
    merged,
    parted,
    release,
)
from comera.optim.projection import (
    add_out_of_,
    into,
    new_bases,
)
from comera.optim.state_layout import check_keeps_no_count, step_param

# As torch.optim does it: torch.compiler.disable would import the compiler along with this module.
_eagerly = torch._disable_dynamo

_SCHEDULED = ("lr", "betas", "momentum")
"""Settings that a scheduler may change within a step; others change where an optimizer counts."""

_COUPLED = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers of torch whose weight decay is always a part of the gradient."""


class _Begun(NamedTuple):
    """A parameter of a projected group between the two parts of its step.

    Attributes:
        stand_in: What the inner optimizer steps in its place, if anything.
        factor: What that step is multiplied by.
        full_grad: The gradient to give back to a parameter whose own was taken for the step.
    """

    param: Tensor
    stand_in: nn.Parameter | None
    factor: float | Tensor
    full_grad: Tensor | None


class GaLore(Optimizer):
    """Low-rank projection of gradients around any optimizer.

    Args:
        params: Parameter groups. A group with the key ``rank`` is projected; the others are the
            inner optimizer's as they are. Keys of a projected group, those of galore-torch:
            ``rank``; ``update_proj_gap``, steps between two subspaces, 200; ``scale``, factor of
            every step, 0.25; ``proj_type``: ``"std"`` (the shorter side), ``"reverse_std"`` (the
            longer), ``"left"``, ``"right"``, ``"full"`` (both) or ``"random"`` (a random subspace).
            A tensor of more than two dimensions is taken as ``(first, all others)``. One whose
            sides are not above the rank is not projected, and neither scaled.
        inner: Class of the inner optimizer, e.g. :class:`torch.optim.AdamW`.
        stagger: Spread the refreshes of the subspaces over the steps between two of them, so that
            no single step takes long. The first step finds them all.
        **settings: Of the inner optimizer: ``lr``, ``betas``, ...; groups may replace them.

    Note:
        An inner optimizer that keeps count in its groups, as Prodigy and schedule-free ones do, is
        refused in the first step: it sums over parameters, of which it would see the stand-ins.
        Weight decay acts on the parameter itself, decoupled where the inner optimizer's is, and
        before the step as in :class:`torch.optim.AdamW`; galore-torch decays after it.
        Subspaces and projected moments are float32, or wider where parameters are. A gradient that
        is not finite leaves the subspace as it was; one of zeros finds none, and the parameter
        waits. A step can be captured in a CUDA graph after one eager step, if the inner
        optimizer's can; see :meth:`refresh_`.

    Raises:
        ValueError: If a group has an unknown key or a setting out of range, or holds a vector, or a
            parameter is there twice.

    Example::

        groups = comera.galore_param_groups(model, lr=1e-2, rank=128, weight_decay=0.01)
        optimizer = comera.GaLore(groups, torch.optim.AdamW, betas=(0.9, 0.95))
    """

    needs_whole_matrices = "finds its subspaces from whole matrices"
    not_capturable = "finds its subspaces anew every so many steps, which the host decides"

    def __init__(
        self,
        params: Iterable[Any],
        inner: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        stagger: bool = True,
        **settings: Any,
    ) -> None:
        groups = as_groups(params)
        check_once([param for group in groups for param in group["params"]], ())
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        self._numbers: dict[Tensor, int] = {}  # of projected groups, from 1: seeds and staggering
        self._inner = inner([for_inner(g, self._stand_ins) for g in groups], **settings)
        self._inner_keys = set(self._inner.defaults)
        # torchao's eight-bit optimizers compile their step and take a rate in a tensor only.
        self._tensor_lr = any(isinstance(g["lr"], Tensor) for g in self._inner.param_groups)
        for group in groups:
            check_group(group, self._inner)
        self.stagger = stagger
        self._built = False
        theirs = self._inner.param_groups
        together = [merged(*pair) for pair in zip(groups, theirs, strict=True)]
        super().__init__(together, dict(self._inner.defaults))
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as to any optimizer; one with the key ``rank`` is projected.

        Raises:
            ValueError: As the class; no group is added.
        """
        if self._built:
            self._add(param_group)
        else:  # the base class's constructor, once the inner optimizer has all groups
            super().add_param_group(param_group)
        if "rank" in self.param_groups[-1]:
            for param in self.param_groups[-1]["params"]:
                self._numbers[param] = len(self._numbers) + 1

    def _add(self, group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer and here, or to none."""
        group = {**group, "params": as_list(group["params"])}
        check_group(group, self._inner)
        check_once(group["params"], self.param_groups)
        stand_ins: dict[Tensor, nn.Parameter] = {}
        theirs = self._inner.param_groups
        count = len(theirs)
        try:
            self._inner.add_param_group(for_inner(group, stand_ins))
            super().add_param_group(merged(group, theirs[-1]))
        except BaseException:
            del theirs[count:]
            raise
        self._stand_ins |= stand_ins

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self._inner!r}"

    @property
    def inner(self) -> Optimizer:
        """Return the optimizer that trains the stand-ins, and all that is not projected."""
        return self._inner

    def stand_in(self, param: Tensor) -> nn.Parameter | None:
        """Return what the inner optimizer trains in place of a parameter, if that is projected."""
        return self._stand_ins.get(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every parameter that has a gradient.

        Raises:
            RuntimeError: If a gradient to be projected is sparse or complex, or the first step of a
                parameter is captured in a CUDA graph.
            TypeError: If the inner optimizer keeps count in its groups. What is projected has not
                moved, but for its weight decay.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun = []
        for position in range(len(self.param_groups)):
            group = self._hand_over(position)
            if "rank" in group:
                begun += [self._begin(param, group) for param in group["params"]]
        settings = self._settings()
        try:
            self._inner.step()
        finally:
            _give_back(begun)
        self._check_keeps_no_count(settings)
        for group in self.param_groups:
            for param in group["params"]:
                self._show_state(param)
        self._lift(begun)
        return loss

    @torch.no_grad()
    def step_param_(self, param: Tensor, position: int) -> None:
        """Take one step of one parameter, in group number ``position``, as :meth:`step` would.

        Raises:
            RuntimeError: For the reasons for which :meth:`step` raises it.
            TypeError: Likewise.
        """
        group = self._hand_over(position)
        begun = [self._begin(param, group)] if "rank" in group else []
        try:
            step_param(self._inner, self._stand_ins.get(param, param), position)
        finally:
            _give_back(begun)
        self._show_state(param)
        self._lift(begun)

    @torch.no_grad()
    def refresh_(self) -> None:
        """Count a step, and find those subspaces anew that are due, from the gradients at hand.

        For steps that are replayed from a CUDA graph, where nothing of this can happen: call it
        after each replay. Subspaces keep their memory, so the next replay uses the new ones.
        """
        for group in self.param_groups:
            for param in group["params"] if "rank" in group else ():
                if param in self._stand_ins and param.grad is not None:
                    self._refresh(param, param.grad.flatten(1), group, self._numbers[param])

    def unpack_state_(self, param: Tensor) -> None:
        """Unpack the inner optimizer's state for :func:`~comera.truncate_`, where it needs that."""
        state_layout.unpack_state_(self._inner, param)

    def pack_state_(self, param: Tensor) -> None:
        """Undo :meth:`unpack_state_`."""
        state_layout.pack_state_(self._inner, param)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything, so that a copy's stand-ins are those of its own parameters."""
        return {
            **state_layout.whole(self),
            "_inner": (type(self._inner), state_layout.whole(self._inner)),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state.get("_inner"), tuple):  # torch comes here with less, to load a state
            kind, whole = state["_inner"]
            inner = kind.__new__(kind)
            inner.__setstate__(whole)
            state = {**state, "_inner": inner}
        super().__setstate__(state)

    def _factor(self, param: Tensor, group: dict[str, Any]) -> float | Tensor:
        """Return what the stand-in's step is multiplied by."""
        if not isinstance(self._inner, torch.optim.Adafactor) or param not in self._stand_ins:
            return group["scale"]
        # Its steps are relative to the size of the parameter, for which it takes eps[1] while the
        # stand-in is zero.
        least = group["eps"][1]
        wide = param.to(torch.promote_types(param.dtype, torch.float32))
        return wide.square().mean().sqrt().clamp(min=least) * (group["scale"] / least)

    @_eagerly
    def _hand_over(self, position: int) -> dict[str, Any]:
        """Return a group once the inner optimizer has its settings: schedulers change ours."""
        mine, theirs = self.param_groups[position], self._inner.param_groups[position]
        for key in self._inner_keys:
            theirs[key] = mine[key]
        if self._tensor_lr and not isinstance(mine["lr"], Tensor):
            theirs["lr"] = torch.tensor(mine["lr"], dtype=torch.float32)
        if "rank" in mine:
            theirs["weight_decay"] = 0.0
        return mine

    @_eagerly
    def _settings(self) -> list[dict[str, Any]]:
        return [dict(group) for group in self._inner.param_groups]

    @_eagerly
    def _check_keeps_no_count(self, before: list[dict[str, Any]]) -> None:
        name = type(self._inner).__name__
        instead = f"use {name} without GaLore, or GaLore around torch.optim.AdamW"
        for old, new in zip(before, self._inner.param_groups, strict=True):
            check_keeps_no_count(self._inner, old, new, instead, _SCHEDULED)

    @_eagerly
    def _begin(self, param: Tensor, group: dict[str, Any]) -> _Begun | None:
        """Decay, and give the stand-in its gradient; None without one or while it waits."""
        grad = param.grad
        if grad is None:
            return None
        check_gradient(grad)
        factor = self._factor(param, group)
        decayed = self._decayed(param, grad, group)
        stand_in = self._stand_ins.get(param)
        if stand_in is None:
            param.grad = decayed
            return _Begun(param, None, factor, grad)
        matrix = decayed.flatten(1)
        captured = _captured()
        if not captured:
            self._refresh(param, matrix, group, self._numbers[param])
        bases = self._bases(param)
        if not bases:
            if captured:
                raise RuntimeError(
                    f"GaLore has no subspace yet for a parameter of shape {tuple(param.shape)}, "
                    "and none can be found in a CUDA graph: take a step before it is captured"
                )
            stand_in.grad = None
            return None
        low = into(matrix, bases)
        stand_in.data = torch.zeros_like(low)
        stand_in.grad = low
        return _Begun(param, stand_in, factor, None)

    @_eagerly
    def _lift(self, begun: list[_Begun | None]) -> None:
        """Take the steps that the stand-ins took."""
        for one in begun:
            if one is not None and one.stand_in is not None:
                add_out_of_(one.param, one.stand_in.data * one.factor, self._bases(one.param))
                release(one.stand_in)

    def _refresh(self, param: Tensor, grad_MN: Tensor, group: dict[str, Any], number: int) -> None:
        """Find the subspace anew when it is time."""
        state, gap = self.state[param], group["update_proj_gap"]
        count = state.setdefault(f"{OURS}step", torch.zeros((), dtype=torch.int64))
        steps = int(count)  # a number on the CPU: nothing waits for the device
        old = self._bases(param)
        # Golden-ratio steps spread any number of parameters evenly over the gap.
        offset = int(number * 0.6180339887 % 1 * gap) if self.stagger else 0
        count += 1 if old else 0
        if old and (steps + offset) % gap:
            return
        if not torch.isfinite(grad_MN).all() or (not old and not grad_MN.any()):
            return
        # Another for each parameter and step; torch's generator on the CPU looks at 32 bits.
        seed = (number * 0x9E3779B1 + steps) % 2**32
        new = new_bases(grad_MN, group["rank"], group["proj_type"], seed)
        if not old:
            count += 1
        for side, basis in new.items():
            if side in old:
                old[side].copy_(basis)  # a captured step looks for it there
            else:
                state[OURS + side] = basis

    @_eagerly
    def _show_state(self, param: Tensor) -> None:
        """Give what is not projected the inner optimizer's state, the very same, as its own."""
        if param not in self._stand_ins and param in self._inner.state:
            self.state[param] = self._inner.state[param]

    def _bases(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state.get(param, {})
        return {side: state[OURS + side] for side in ("left", "right") if OURS + side in state}

    def _decayed(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Decay a projected parameter as the inner optimizer would; return the gradient to use."""
        rate = group.get("weight_decay", 0.0)
        if not rate:
            return grad
        if self._decoupled(group):
            param.mul_(1 - group["lr"] * rate)
            return grad
        return grad.add(param, alpha=-rate if group.get("maximize") else rate)

    def _decoupled(self, group: dict[str, Any]) -> bool:
        if "decoupled_weight_decay" in group:  # torch's Adam and what is made of it
            return bool(group["decoupled_weight_decay"])
        return not isinstance(self._inner, _COUPLED)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values only: the inner optimizer's state and the subspaces."""
        return joined(super().state_dict(), self._inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If a subspace does not fit its parameter, none is there after several
                steps, or the state is one of an optimizer that does not project the same groups;
                nothing is changed.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._load_inner(given))
            # Without the state, which the base class would round to the dtype of the parameters.
            return {**given, "state": {}}

        def show(_: Optimizer) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    self._show_state(param)
            self.state.update(loaded)

        # Registered last and first: after whatever changes the dict, before whatever reads it.
        before = self.register_load_state_dict_pre_hook(take)
        after = self.register_load_state_dict_post_hook(show, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _load_inner(self, given: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Let the inner optimizer load its part, if all fits; return ours for each parameter."""
        check_projects_alike(given["param_groups"], self.param_groups)
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [k for group in given["param_groups"] for k in group["params"]]
        state = given["state"]
        if len(numbers) == len(params):  # else the inner optimizer says what differs
            for k, param in zip(numbers, params, strict=True):
                self._check_fit(param, state.get(k, {}))
            of_projected = [
                state.get(k, {})
                for k, param in zip(numbers, params, strict=True)
                if param in self._stand_ins
            ]
            check_not_left_out(of_projected)
        theirs, subspaces = parted(given)
        self._inner.load_state_dict(theirs)
        return {
            param: {
                key: value.clone() if key == f"{OURS}step" else value.to(param.device, copy=True)
                for key, value in subspaces[k].items()
            }
            for k, param in zip(numbers, params, strict=True)
            if k in subspaces
        }

    def _check_fit(self, param: Tensor, entries: dict[str, Any]) -> None:
        found = {k.removeprefix(OURS): v for k, v in entries.items() if k.startswith(OURS)}
        found.pop("step", None)
        group = state_layout.group_of(self, param) if param in self._stand_ins else None
        check_subspaces(param, group, found)


def _captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _give_back(begun: list[_Begun | None]) -> None:
    """Restore the own gradients, without penalty, of parameters that are not projected."""
    for one in begun:
        if one is not None and one.full_grad is not None:
            one.param.grad = one.full_grad


class GaLoreAdamW(GaLore):
    """:class:`GaLore` around :class:`torch.optim.AdamW`; arguments as there."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        super().__init__(params, torch.optim.AdamW, lr=lr, **settings)


class GaLoreAdafactor(GaLore):
    """:class:`GaLore` around :class:`torch.optim.Adafactor`; arguments as there, but for ``eps``.

    Adafactor's steps are relative to the size of the parameter, here to that of the whole one.
    Torch's own ``eps`` keeps no scale for gradients below 1e-5; this one is that of the paper.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: tuple[float | None, float] = (1e-15, 1e-3),
        **more: Any,
    ) -> None:
        super().__init__(params, torch.optim.Adafactor, lr=lr, eps=eps, **more)


class GaLoreAdamW8bit(GaLore):
    """:class:`GaLore` around torchao's ``AdamW8bit``; arguments as there.

    Raises:
        ImportError: If torchao is not installed.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            raise ImportError(
                "GaLoreAdamW8bit needs torchao: pip install torchao; or give GaLore another 8-bit "
                "optimizer as inner="
            ) from None
        super().__init__(params, AdamW8bit, lr=lr, **settings)
