"""Define GaLore (arXiv 2403.03507): any optimizer, with moments in a subspace of the gradient.

A projected parameter has a small stand-in that the inner optimizer trains. Before the inner step
the stand-in is zero and has the projected gradient. Afterwards its value is the step in the
subspace, which is mapped back and added to the parameter.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.optim import state_layout
from comera.optim.muon import MuonAdamW
from comera.optim.projection import (
    PROJ_TYPES,
    add_out_of_,
    basis_shapes,
    into,
    low_shape,
    matrix_shape,
    new_bases,
)
from comera.optim.state_layout import COMMON_KEYS, check_keeps_no_count, made_for, step_param

# As torch.optim does it: torch.compiler.disable would import the compiler along with this module.
_eagerly = torch._disable_dynamo

_DEFAULTS: dict[str, Any] = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_KEYS = {"rank", *_DEFAULTS}
"""Settings of a projected group that the inner optimizer does not know."""

_OURS = "galore_"
"""Prefix of GaLore's own entries in the state of a parameter: ``step``, ``left``, ``right``."""

_SCHEDULED = ("lr", "betas", "momentum")
"""Settings that a scheduler may change within a step; a change of others is a counter."""

_COUPLED = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers of torch whose weight decay is always a part of the gradient."""


_Begun = tuple[Tensor, nn.Parameter | None, float | Tensor, Tensor]
"""A parameter between the two parts of its step: the parameter, its stand-in (None if it is not
projected), the factor of the stand-in's step, and the parameter's own gradient."""


class GaLore(Optimizer):
    """Low-rank projection of gradients around any optimizer.

    Args:
        params: Parameter groups. Groups with the key ``rank`` are projected; the inner optimizer
            steps the others directly. Keys of a projected group are those of galore-torch:
            ``rank``; ``update_proj_gap``, steps between two subspaces, 200; ``scale``, factor of
            every step, 0.25; ``proj_type``: ``"std"`` (the shorter side) or ``"full"`` (both).
            A tensor of more than two dimensions is taken as ``(first, all others)``. A matrix
            with a side that is not above the rank is neither projected nor scaled.
        inner: Class of the inner optimizer, e.g. :class:`torch.optim.AdamW`. The attribute
            ``inner`` is that optimizer, of the stand-ins and all parameters that are not projected.
        **settings: Settings of the inner optimizer: ``lr``, ``betas``, ...; groups may differ.

    Note:
        An inner optimizer that keeps counts or sums in its groups, as Prodigy and schedule-free
        ones do, is refused in the first step: it would sum over stand-ins, not parameters.
        Weight decay acts on the parameter itself, decoupled if the inner optimizer's is, and
        before the step as in :class:`torch.optim.AdamW`; galore-torch decays after the step.
        Subspaces and projected moments are float32, or wider if parameters are. A gradient that is
        not finite leaves the subspace as it was. While the gradient is zero, no first subspace is
        found, and the parameter waits. A step can be captured in a CUDA graph after one eager step,
        if the inner optimizer's can; see :meth:`refresh_`.

    Raises:
        ValueError: If a group has an unknown key or a setting out of range, if a projected group
            holds a vector, or if a parameter is given twice.

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
        **settings: Any,
    ) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        groups = [{**group, "params": _as_list(group["params"])} for group in groups]
        self._stand_ins: dict[Tensor, nn.Parameter] = {}
        seen = set[int]()
        self.inner = inner([_for_inner(g, self._stand_ins, seen) for g in groups], **settings)
        # torchao's eight-bit optimizers compile their step and take a rate in a tensor only.
        self._tensor_lr = any(isinstance(g["lr"], Tensor) for g in self.inner.param_groups)
        super().__init__(groups, dict(self.inner.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, projected if it has a ``rank``; errors are those of the class."""
        group = {**param_group, "params": _as_list(param_group["params"])}
        inner, name = self.inner, type(self.inner).__name__
        known = {*inner.defaults, *COMMON_KEYS, *_KEYS}
        if isinstance(inner, MuonAdamW):
            known.add("muon")
        if unknown := sorted(set(group) - known):
            raise ValueError(
                f"unknown keys {unknown} in a parameter group; {name} in GaLore takes "
                f"{sorted(known - {'params'})}{made_for(unknown)}"
            )
        eps: Any = group.get("eps", inner.defaults.get("eps"))
        if "rank" in group and isinstance(inner, torch.optim.Adafactor) and not eps[1] > 0:
            raise ValueError(
                f"eps={eps} must have a second number above 0: the least size of a parameter to "
                "which a projected step is relative"
            )
        theirs, number = inner.param_groups, len(self.param_groups)
        stand_ins: dict[Tensor, nn.Parameter] = {}
        try:
            if number == len(theirs):  # else the inner optimizer was constructed with it
                seen = {id(param) for known in self.param_groups for param in known["params"]}
                inner.add_param_group(_for_inner(group, stand_ins, seen))
            own = _DEFAULTS if "rank" in group else {}
            super().add_param_group({**theirs[number], **own, **group})
        except BaseException:
            del theirs[number:]
            raise
        self._stand_ins |= stand_ins

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self.inner!r}"

    def stand_in(self, param: Tensor) -> nn.Parameter | None:
        """Return the tensor that the inner optimizer trains in place of a projected parameter."""
        return self._stand_ins.get(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every parameter that has a gradient.

        Raises:
            RuntimeError: If a gradient to be projected is sparse or complex, or the first step of a
                parameter is captured in a CUDA graph.
            TypeError: If the inner optimizer keeps counts in its groups. Projected parameters have
                then been decayed, but not stepped.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        begun, settings = self._begin_all()
        try:
            self.inner.step()
        finally:
            for param, *_, grad in begun:
                param.grad = grad
        self._end_all(begun, settings)
        return loss

    @_eagerly
    def _begin_all(self) -> tuple[list[_Begun], list[dict[str, Any]]]:
        """Give stand-ins the projected gradients; return what :meth:`_end_all` needs."""
        begun = []
        for position, group in enumerate(self.param_groups):
            self._pass_settings(position)
            if "rank" in group:
                begun += [self._begin(p, group) for p in group["params"] if p.grad is not None]
        return begun, [dict(group) for group in self.inner.param_groups]

    @_eagerly
    def _end_all(self, begun: list[_Begun], settings: list[dict[str, Any]]) -> None:
        name = type(self.inner).__name__
        instead = f"use {name} without GaLore, or GaLore around torch.optim.AdamW"
        for old, new in zip(settings, self.inner.param_groups, strict=True):
            check_keeps_no_count(self.inner, old, new, instead, _SCHEDULED)
        self._share_state()
        self._end(begun)

    @torch.no_grad()
    def step_param_(self, param: Tensor, position: int) -> None:
        """Step one parameter, of group number ``position``; raises the errors of :meth:`step`."""
        self._pass_settings(position)
        group = self.param_groups[position]
        stand_in, grad = self._stand_ins.get(param), param.grad
        begun = [self._begin(param, group)] if "rank" in group else []
        try:
            step_param(self.inner, param if stand_in is None else stand_in, position)
        finally:
            param.grad = grad
        if stand_in is None and param in self.inner.state:
            self.state[param] = self.inner.state[param]
        self._end(begun)

    def _pass_settings(self, position: int) -> None:
        """Copy a group's settings, which schedulers change, to the inner optimizer."""
        mine, theirs = self.param_groups[position], self.inner.param_groups[position]
        theirs |= {key: mine[key] for key in self.inner.defaults if key in mine}
        if self._tensor_lr and not isinstance(mine["lr"], Tensor):
            theirs["lr"] = torch.tensor(mine["lr"], dtype=torch.float32)
        if "rank" in mine:
            theirs["weight_decay"] = 0.0

    def _begin(self, param: Tensor, group: dict[str, Any]) -> _Begun:
        """Decay a parameter; give its stand-in, if any, the projected gradient."""
        grad = param.grad
        assert grad is not None
        if grad.is_sparse or grad.is_complex():
            kind = "sparse" if grad.is_sparse else "complex"
            raise RuntimeError(
                f"a {kind} gradient of shape {tuple(grad.shape)} cannot be projected: leave its "
                "parameter out of the groups with a rank"
            )
        stand_in = self._stand_ins.get(param)
        factor = self._factor(param, group)
        decayed = self._decayed(param, grad, group)
        if stand_in is None:
            param.grad = decayed
            return param, None, factor, grad
        matrix = decayed.flatten(1)
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not captured:
            self._refresh(param, matrix, group)
        bases = self._bases(param)
        if bases:
            low = into(matrix, bases)
            stand_in.data, stand_in.grad = torch.zeros_like(low), low
        elif captured:
            raise RuntimeError(
                f"GaLore has no subspace yet for a parameter of shape {tuple(param.shape)}, "
                "and none can be found in a CUDA graph: take a step before it is captured"
            )
        return param, stand_in, factor, grad

    def _end(self, begun: list[_Begun]) -> None:
        """Add the steps of stand-ins to their parameters."""
        for param, stand_in, factor, _ in begun:
            if stand_in is not None and stand_in.grad is not None:
                add_out_of_(param, stand_in.data * factor, self._bases(param))
                _release(stand_in)

    @torch.no_grad()
    def refresh_(self) -> None:
        """Count a step, and recompute the subspaces that are due, from the present gradients.

        Call this after each replay of a CUDA graph, whose next replay uses the new subspaces.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param in self._stand_ins and param.grad is not None:
                    self._refresh(param, param.grad.flatten(1), group)

    def _refresh(self, param: Tensor, grad_MN: Tensor, group: dict[str, Any]) -> None:
        """Count a step of a parameter; recompute its subspace every ``update_proj_gap`` steps."""
        state, old = self.state[param], self._bases(param)
        count = state.setdefault(f"{_OURS}step", torch.zeros((), dtype=torch.int64))
        steps = int(count)  # on the CPU: nothing waits for the device
        if old:
            count += 1
            if steps % group["update_proj_gap"]:
                return
        if not torch.isfinite(grad_MN).all():
            return
        if not old and not grad_MN.any():
            if not group["lr"]:  # so torch.distributed.checkpoint asks what there is to load
                shapes = basis_shapes(matrix_shape(param), group["rank"], group["proj_type"])
                dtype = torch.promote_types(param.dtype, torch.float32)
                for side, shape in shapes.items():
                    state[_OURS + side] = grad_MN.new_zeros(shape, dtype=dtype)
            return
        if not old:
            count += 1
        for side, basis in new_bases(grad_MN, group["rank"], group["proj_type"], steps).items():
            if side in old:
                old[side].copy_(basis)  # a captured step reads this memory
            else:
                state[_OURS + side] = basis

    def _bases(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state.get(param, {})
        return {side: state[_OURS + side] for side in ("left", "right") if _OURS + side in state}

    def _factor(self, param: Tensor, group: dict[str, Any]) -> float | Tensor:
        if not isinstance(self.inner, torch.optim.Adafactor) or param not in self._stand_ins:
            return group["scale"]
        # Its steps are relative to the size of the parameter: eps[1] for a stand-in, which is zero.
        least = group["eps"][1]
        wide = param.to(torch.promote_types(param.dtype, torch.float32))
        return wide.square().mean().sqrt().clamp(min=least) * (group["scale"] / least)

    def _decayed(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Decay a parameter as the inner optimizer would; return the gradient to step by."""
        rate = group.get("weight_decay", 0.0)
        if not rate:
            return grad
        # torch's Adam and its subclasses have a setting for it
        if group.get("decoupled_weight_decay", not isinstance(self.inner, _COUPLED)):
            param.mul_(1 - group["lr"] * rate)
            return grad
        return grad.add(param, alpha=-rate if group.get("maximize") else rate)

    def _share_state(self) -> None:
        """Put the inner optimizer's state of parameters that are not projected in ``state``."""
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self._stand_ins and param in self.inner.state:
                    self.state[param] = self.inner.state[param]

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values only: the inner optimizer's state and the subspaces."""
        mine, theirs = super().state_dict(), self.inner.state_dict()["state"]
        numbers = {**theirs, **mine["state"]}
        state = {k: {**theirs.get(k, {}), **mine["state"].get(k, {})} for k in numbers}
        return {**mine, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            ValueError: If a subspace does not fit its parameter or is missing after some steps, or
                if the state's optimizer did not project the same groups; nothing is changed.
        """
        subspaces: dict[Tensor, dict[str, Any]] = {}

        def load_inner(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            state, params = given["state"], self._check_loadable(given)
            theirs = {
                number: {key: x for key, x in entries.items() if not key.startswith(_OURS)}
                for number, entries in state.items()
            }
            groups = [
                {key: value for key, value in group.items() if key not in _KEYS}
                for group in given["param_groups"]
            ]
            self.inner.load_state_dict({"state": theirs, "param_groups": groups})
            for number, param in params.items():
                for key, value in state.get(number, {}).items():
                    if key.startswith(_OURS):
                        device = value.device if key == f"{_OURS}step" else param.device
                        subspaces.setdefault(param, {})[key] = value.to(device, copy=True)
            # Without the state, which the base class would round to the dtype of the parameters.
            return {**given, "state": {}}

        def restore(_: Optimizer) -> None:
            self._share_state()
            self.state.update(subspaces)

        with state_layout.load_hooks(self, load_inner, restore):
            super().load_state_dict(state_dict)

    def _check_loadable(self, given: dict[str, Any]) -> dict[Any, Tensor]:
        """Raise ``ValueError`` if a state does not fit; return parameters by their keys in it."""
        state, params, projected = given["state"], {}, []
        # Other numbers of groups or parameters are an error of the inner optimizer's loading.
        pairs = zip(given["param_groups"], self.param_groups, strict=False)
        for number, (theirs, mine) in enumerate(pairs):
            if ("rank" in theirs) != ("rank" in mine):
                there, here = ("is", "is not") if "rank" in theirs else ("is not", "is")
                raise ValueError(
                    f"group {number} {there} projected in the state and {here} here: it comes from "
                    "another optimizer, or from GaLore with other groups"
                )
            for k, param in zip(theirs["params"], mine["params"], strict=False):
                params[k], entries = param, state.get(k, {})
                sides = [side for side in ("left", "right") if _OURS + side in entries]
                found = {side: tuple(entries[_OURS + side].shape) for side in sides}
                wanted, here = {}, "where it is not projected"
                if param in self._stand_ins:
                    projected.append(entries)
                    rank, proj_type = mine["rank"], mine["proj_type"]
                    wanted = basis_shapes(matrix_shape(param), rank, proj_type)
                    here = f"at rank={rank}, proj_type={proj_type!r}, which needs {wanted}"
                if found and found != wanted:
                    raise ValueError(
                        f"the state's subspaces {found} do not fit a parameter of shape "
                        f"{tuple(param.shape)} {here}"
                    )
        # torch.distributed.checkpoint loads what an optimizer has after a step without gradients,
        # which finds no subspace, and leaves out the rest.
        steps = max((int(entries.get(f"{_OURS}step", 0)) for entries in projected), default=0)
        if steps > 1 and all(set(entries) <= {f"{_OURS}step"} for entries in projected):
            raise ValueError(
                f"the state is of {steps} steps, and no subspace and no moments are in it. "
                "torch.distributed.checkpoint leaves them out as it loads: read it with "
                "torch.load, or save and load by comera.train.run_state"
            )
        return params

    def unpack_state_(self, param: Tensor) -> None:
        """Unpack the inner optimizer's state, for :func:`~comera.truncate_`."""
        state_layout.unpack_state_(self.inner, param)

    def pack_state_(self, param: Tensor) -> None:
        """Pack the inner optimizer's state again after :meth:`unpack_state_`."""
        state_layout.pack_state_(self.inner, param)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, so that a copy has stand-ins for the copied parameters."""
        inner = (type(self.inner), state_layout.whole(self.inner))
        return {**state_layout.whole(self), "inner": inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inner" in state:  # torch calls this with less, to load a state
            kind, whole = state["inner"]
            inner = kind.__new__(kind)
            inner.__setstate__(whole)
            state = {**state, "inner": inner}
        super().__setstate__(state)


class GaLoreAdamW(GaLore):
    """:class:`GaLore` around :class:`torch.optim.AdamW`; arguments are those of both."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        super().__init__(params, torch.optim.AdamW, lr=lr, **settings)


class GaLoreAdafactor(GaLore):
    """:class:`GaLore` around :class:`torch.optim.Adafactor`; arguments are those of both.

    Steps are relative to the size of the whole parameter. ``eps`` defaults to that of the paper:
    with torch's, gradients below 1e-5 lose their scale.
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
    """:class:`GaLore` around torchao's ``AdamW8bit``; arguments are those of both.

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


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _for_inner(
    group: dict[str, Any], stand_ins: dict[Tensor, nn.Parameter], seen: set[int]
) -> dict[str, Any]:
    """Check a group; return the inner optimizer's group. Adds to ``stand_ins`` and ``seen``."""
    for one in group["params"]:
        param = one[1] if isinstance(one, tuple) else one
        if id(param) in seen:
            raise ValueError(
                f"some parameters appear in more than one parameter group, or twice in one: one "
                f"of shape {tuple(param.shape)}. Give GaLore each parameter once"
            )
        seen.add(id(param))
    own = {key: value for key, value in group.items() if key not in _KEYS}
    if "rank" not in group:
        if misplaced := sorted(_KEYS & set(group)):
            raise ValueError(f"a parameter group has {misplaced} but no rank")
        return own
    rank, settings = group["rank"], {**_DEFAULTS, **group}
    gap, scale, proj_type = (settings[key] for key in _DEFAULTS)
    if proj_type not in PROJ_TYPES:
        names = ", ".join(map(repr, PROJ_TYPES))
        raise ValueError(f"proj_type={proj_type!r} must be one of {names}")
    for name, number in (("rank", rank), ("update_proj_gap", gap)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be a whole number of at least 1")
    if not scale > 0:
        raise ValueError(f"scale={scale!r} must be above 0")

    def stand_in_of(param: Tensor) -> Tensor:
        if param.dim() < 2:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is in a group with rank={rank}: only "
                "matrices and tensors of more dimensions are projected"
            )
        shape = matrix_shape(param)
        if rank >= min(shape):
            return param
        wide = torch.promote_types(param.dtype, torch.float32)
        size = low_shape(shape, rank, proj_type)
        stand_ins[param] = nn.Parameter(torch.zeros(size, device=param.device, dtype=wide))
        _release(stand_ins[param])
        return stand_ins[param]

    params = [  # those of a user may be named
        (one[0], stand_in_of(one[1])) if isinstance(one, tuple) else stand_in_of(one)
        for one in group["params"]
    ]
    return {**own, "params": params}


def _release(stand_in: nn.Parameter) -> None:
    """Free the memory of a stand-in's value and gradient, but keep its shape."""
    stand_in.data = stand_in.data.new_zeros(()).expand(stand_in.shape)
    stand_in.grad = None
