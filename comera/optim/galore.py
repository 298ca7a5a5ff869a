"""GaLore (arXiv 2403.03507): any optimizer, its moments kept in a subspace of the gradient.

A projected parameter has a small stand-in, which is what the inner optimizer trains: before its
step the stand-in is zero and has the projected gradient; afterwards it is the step, which is taken
back out of the subspace. So every optimizer that works element by element or matrix by matrix is
an inner optimizer, and its state is that of the stand-in.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.optim import galore_checks
from comera.optim.galore_checks import DEFAULTS, OURS
from comera.optim.partial import step_on
from comera.optim.projection import (
    METHODS,
    Method,
    into,
    low_shape,
    new_bases,
    out_of,
    rotate,
)

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")

_Taken = tuple[Tensor, nn.Parameter, Tensor | None, dict[str, Any]]
"""A parameter, its stand-in, that one's value before the step unless zero, and the group."""


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
        projection: ``"randomized"`` or ``"svd"``, see
            :func:`~comera.optim.projection.new_bases`.
        stagger: Spread the refreshes of the subspaces over the steps between two of them, so that
            no single step takes long. The first step finds them all.
        rotate_moments: Carry the first moment over into each new subspace. The paper does not.
        **settings: Of the inner optimizer: ``lr``, ``betas``, ...; groups may replace them.

    Note:
        Weight decay acts on the parameter itself, decoupled where the inner optimizer's is, and
        before the step as in :class:`torch.optim.AdamW`; galore-torch decays after it.
        Subspaces and projected moments are float32 whatever the parameters are. A gradient that
        is not finite leaves the subspace as it was; one of zeros finds none, and the parameter
        waits.

    Raises:
        ValueError: If a group has an unknown key or a setting out of range, or holds a vector.

    Example::

        groups = comera.galore_param_groups(model, lr=1e-2, rank=128, weight_decay=0.01)
        optimizer = comera.GaLore(groups, torch.optim.AdamW, betas=(0.9, 0.95))
    """

    def __init__(
        self,
        params: Iterable[Any],
        inner: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        projection: Method = "randomized",
        stagger: bool = True,
        rotate_moments: bool = False,
        **settings: Any,
    ) -> None:
        if projection not in METHODS:
            raise ValueError(
                f"projection={projection!r} must be one of {galore_checks.listed(METHODS)}"
            )
        groups = [g if isinstance(g, dict) else {"params": [g]} for g in params]
        groups = [{**g, "params": _as_list(g["params"])} for g in groups]
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        self._numbers: dict[Tensor, int] = {}  # of projected groups, from 1: seeds and staggering
        self._inner = inner([self._for_inner(g) for g in groups], **settings)
        self._inner_keys = set(self._inner.defaults)
        for group in groups:
            galore_checks.check_group(group, self._inner)
        self.projection, self.stagger, self.rotate_moments = projection, stagger, rotate_moments
        self._built = False
        theirs = self._inner.param_groups
        super().__init__([_merged(*pair) for pair in zip(groups, theirs, strict=True)], {})
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's; a group with the key ``rank`` is projected."""
        if self._built:
            param_group = {**param_group, "params": _as_list(param_group["params"])}
            galore_checks.check_group(param_group, self._inner)
            self._inner.add_param_group(self._for_inner(param_group))
            param_group = _merged(param_group, self._inner.param_groups[-1])
        super().add_param_group(param_group)
        if "rank" in self.param_groups[-1]:
            for param in self.param_groups[-1]["params"]:
                self._numbers[param] = len(self._numbers) + 1

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self._inner!r}"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Raises:
            RuntimeError: If a gradient to be projected is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        taken: list[_Taken] = []
        for position in range(len(self.param_groups)):
            group = self._hand_over(position)
            if "rank" in group:
                for param in group["params"]:
                    taken += self._project(param, group)
        self._inner.step()
        for group in self.param_groups:
            for param in group["params"]:
                self._show_state(param)
        self._lift(taken)
        return loss

    @torch.no_grad()
    def step_on_(self, param: Tensor, position: int) -> None:
        """One step of one parameter, in group number ``position``, as :meth:`step` would take it.

        Raises:
            RuntimeError: As :meth:`step`.
        """
        group = self._hand_over(position)
        taken = self._project(param, group) if "rank" in group else []
        step_on(self._inner, self._stand_ins.get(param, param), position)
        self._show_state(param)
        self._lift(taken)

    def unpack_state_(self, param: Tensor) -> None:
        """For :func:`~comera.truncate_`, where the inner optimizer's state needs it."""
        if hasattr(self._inner, "unpack_state_"):
            self._inner.unpack_state_(param)

    def pack_state_(self, param: Tensor) -> None:
        """Undo :meth:`unpack_state_`."""
        if hasattr(self._inner, "pack_state_"):
            self._inner.pack_state_(param)

    def _hand_over(self, position: int) -> dict[str, Any]:
        """A group, once the inner optimizer has its settings: schedulers and users change ours."""
        mine, theirs = self.param_groups[position], self._inner.param_groups[position]
        for key in self._inner_keys:
            theirs[key] = mine[key]
        if "rank" in mine:
            theirs["weight_decay"] = 0.0
        return mine

    def _lift(self, taken: list[_Taken]) -> None:
        """Take the steps that the stand-ins took."""
        for param, stand_in, before, group in taken:
            moved = stand_in.data if before is None else stand_in.data - before
            step = out_of(moved, self._bases(param)).reshape(param.shape)
            param.add_(step.to(param.dtype), alpha=group["scale"])
            _release(stand_in)

    def _project(self, param: Tensor, group: dict[str, Any]) -> list[_Taken]:
        """Decay, and give the stand-in its gradient; nothing without one or while it waits."""
        if param.grad is None:
            return []
        galore_checks.check_gradient(param.grad)
        self._decay_(param, group)
        stand_in = self._stand_ins.get(param)
        if stand_in is None:
            return []
        matrix = param.grad.reshape(param.grad.shape[0], -1)
        self._refresh(param, matrix, group, self._numbers[param])
        bases = self._bases(param)
        if not bases:
            stand_in.grad = None
            return []
        low = into(matrix, bases)
        start = None
        if isinstance(self._inner, torch.optim.Adafactor):  # its steps are relative to the weight
            start = torch.full_like(low, 1.0) * param.float().square().mean().sqrt()
            stand_in.data = start.clone()
        else:
            stand_in.data = torch.zeros_like(low)
        stand_in.grad = low
        return [(param, stand_in, start, group)]

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
        seed = (number << 32) + steps
        new = new_bases(grad_MN, group["rank"], group["proj_type"], self.projection, seed)
        if not old:
            count += 1
        elif self.rotate_moments:
            moments = self._inner.state[self._stand_ins[param]]
            for key in _FIRST_MOMENTS:
                if key in moments:
                    moments[key] = rotate(moments[key], old, new)
        for side, basis in new.items():
            state[OURS + side] = basis

    def _show_state(self, param: Tensor) -> None:
        """What is not projected has the inner optimizer's state, the very same, as its own."""
        if param not in self._stand_ins and param in self._inner.state:
            self.state[param] = self._inner.state[param]

    def _bases(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state.get(param, {})
        return {side: state[OURS + side] for side in ("left", "right") if OURS + side in state}

    def _decay_(self, param: Tensor, group: dict[str, Any]) -> None:
        """Weight decay of a projected group, as the inner optimizer would."""
        rate = group.get("weight_decay", 0.0)
        if not rate:
            return
        if self._decoupled(group):
            param.mul_(1 - group["lr"] * rate)
        else:
            sign = -1 if group.get("maximize") else 1
            param.grad = param.grad.add(param, alpha=sign * rate)  # type: ignore[union-attr]

    def _decoupled(self, group: dict[str, Any]) -> bool:
        if "decoupled_weight_decay" in group:  # torch's Adam and what is made of it
            return bool(group["decoupled_weight_decay"])
        coupled = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)
        return not isinstance(self._inner, coupled)

    def _for_inner(self, group: dict[str, Any]) -> dict[str, Any]:
        """The inner optimizer's group: stand-ins for what is projected, no keys of ours."""
        own = {key: value for key, value in group.items() if key not in ("rank", *DEFAULTS)}
        if "rank" not in group:
            return own
        members = [self._stand_in(param, group) for param in group["params"]]
        return {**own, "params": members}

    def _stand_in(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        rank, proj_type, shape = galore_checks.projection_of(param, group)
        if rank >= min(shape):
            return param
        size = low_shape(shape, rank, proj_type)
        wide = torch.promote_types(param.dtype, torch.float32)
        stand_in = nn.Parameter(torch.zeros(size, device=param.device, dtype=wide))
        _release(stand_in)
        self._stand_ins[param] = stand_in
        return stand_in

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only; the inner optimizer's state beside the subspaces."""
        mine, theirs = super().state_dict(), self._inner.state_dict()
        state = {k: dict(v) for k, v in theirs["state"].items()}
        for k, entries in mine["state"].items():
            state.setdefault(k, {}).update(entries)
        return {**mine, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: If a subspace does not fit its parameter; nothing is changed.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [k for group in state_dict["param_groups"] for k in group["params"]]
        state = state_dict["state"]
        if len(numbers) == len(params):  # else the base class says what differs
            for k, param in zip(numbers, params, strict=True):
                group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
                galore_checks.check_fit(param, group, param in self._stand_ins, state.get(k, {}))
        split: dict[bool, dict[int, dict[str, Any]]] = {True: {}, False: {}}
        for k, entries in state.items():
            for key, value in entries.items():
                split[key.startswith(OURS)].setdefault(k, {})[key] = value
        own = {"rank", *DEFAULTS}
        inner_groups = [
            {key: value for key, value in group.items() if key not in own}
            for group in state_dict["param_groups"]
        ]
        self._inner.load_state_dict({"state": split[False], "param_groups": inner_groups})
        # Without the state, which the base class would round to the dtype of the parameters.
        super().load_state_dict({**state_dict, "state": {}})
        for param in params:
            self._show_state(param)
        by_number = dict(zip(numbers, params, strict=True))
        for k, entries in split[True].items():
            device = by_number[k].device
            self.state[by_number[k]] = {
                key: value.clone() if key == f"{OURS}step" else value.to(device, copy=True)
                for key, value in entries.items()
            }


class GaLoreAdamW(GaLore):
    """:class:`GaLore` around :class:`torch.optim.AdamW`; arguments as there."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        super().__init__(params, torch.optim.AdamW, lr=lr, **settings)


class GaLoreAdafactor(GaLore):
    """:class:`GaLore` around :class:`torch.optim.Adafactor`; arguments as there.

    Adafactor's steps are relative to the size of the parameter, here to that of the whole one.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-2, **settings: Any) -> None:
        super().__init__(params, torch.optim.Adafactor, lr=lr, **settings)


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


def _merged(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A group with all settings: the inner optimizer's, ours, and what the user said."""
    return {**theirs, **(DEFAULTS if "rank" in mine else {}), **mine}


def _release(stand_in: nn.Parameter) -> None:
    """Nothing is kept between two steps but what the optimizer keeps."""
    stand_in.data = stand_in.data.new_zeros(0)
    stand_in.grad = None


def _as_list(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
