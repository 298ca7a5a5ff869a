"""Define GaLore (arXiv 2403.03507): any optimizer, with moments in a subspace of the gradient.

A projected parameter has a small stand-in that the inner optimizer trains. Before the inner step
the stand-in is zero and has the projected gradient. Afterwards its value is the step in the
subspace, which is mapped back and added to the parameter.

Leading singular vectors of the gradient span a subspace. The bases are ``left (M, R)`` and
``right (R, N)``, where M and N are the gradient's rows and columns and R is the rank.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.extras import needed_by
from comera.ops.context import without_autocast
from comera.optim import state_layout
from comera.optim.muon import MuonAdamW
from comera.shapes import check_whole_numbers

# As torch.optim does it: torch.compiler.disable would import the compiler along with this module.
_eagerly = torch._disable_dynamo

ProjType = Literal["std", "full"]
PROJ_TYPES = get_args(ProjType)

_DEFAULTS: dict[str, Any] = {"update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_KEYS = {"rank", *_DEFAULTS}
"""Settings of a projected group that the inner optimizer does not know."""

_OURS = "galore_"
"""Prefix of GaLore's own entries in the state of a parameter: ``step``, ``left``, ``right``."""

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
            ``inner`` is that optimizer, of stand-ins and all parameters that are not projected; it
            borrows its state from this one.
        **settings: Settings of the inner optimizer: ``lr``, ``betas``, ...; groups may differ.

    Note:
        An inner optimizer that keeps counts or sums in its groups, as Prodigy and schedule-free
        ones do, is refused in the first step: it would sum over stand-ins, not parameters.
        Weight decay acts on the parameter itself, decoupled if the inner optimizer's is, and
        before the step as in :class:`torch.optim.AdamW`; galore-torch decays after the step.
        Subspaces and projected moments are float32, or wider if parameters are. A gradient that is
        zero or not finite gives no subspace: the last one stays until the next gradient, and before
        its first one a parameter waits.

    Raises:
        ValueError: If a group has a setting out of range, if a projected group holds a vector, or
            if a parameter is given twice.
        TypeError: If a group has a key that is nearly a setting; others are kept.

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
        given = params if isinstance(params, Tensor) else list(params)
        if isinstance(given, Tensor) or not given:
            inner(given, **settings)  # raises
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        groups = [{**group, "params": _as_list(group["params"])} for group in groups]
        self.stand_ins: dict[Tensor, nn.Parameter] = {}
        self.inner = inner([_for_inner(g, self.stand_ins) for g in groups], **settings)
        # torchao's eight-bit optimizers compile their step and take a rate in a tensor only.
        self._tensor_lr = any(isinstance(g["lr"], Tensor) for g in self.inner.param_groups)
        super().__init__(groups, dict(self.inner.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, projected if it has a ``rank``; errors are those of the class."""
        group = {**param_group, "params": _as_list(param_group["params"])}
        inner, name = self.inner, type(self.inner).__name__
        known = {*inner.defaults, *_KEYS, *(["muon"] if isinstance(inner, MuonAdamW) else [])}
        state_layout.check_keys(group, known, f"{name} in GaLore")
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
                inner.add_param_group(_for_inner(group, stand_ins))
            own = _DEFAULTS if "rank" in group else {}
            super().add_param_group({**theirs[number], **own, **group})
        except BaseException:
            del theirs[number:]
            raise
        self.stand_ins |= stand_ins
        self._take_back(self.param_groups[-1]["params"])  # what Adagrad has made at once

    def __repr__(self) -> str:
        inner = type(self.inner).__name__
        return super().__repr__().replace(" (", f" around {inner} (", 1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every parameter that has a gradient.

        Raises ``RuntimeError`` if a gradient to be projected is sparse or complex (nothing has
        changed then); ``TypeError`` if the inner optimizer keeps counts in its groups: projected
        parameters have then been decayed, but not stepped.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        begun, settings = self._begin_all()
        try:
            inner: Any = self.inner  # hooks of all optimizers run once, for this one
            for hook in inner._optimizer_step_pre_hooks.values():
                hook(inner, (inner,), {})
            state_layout.plain_step(type(inner))(inner)
            inner._opt_called = True  # what its scheduler, if any, looks for
            for hook in inner._optimizer_step_post_hooks.values():
                hook(inner, (inner,), {})
        finally:
            self._restore(begun)
        self._end_all(begun, settings)
        return loss

    @_eagerly
    def _begin_all(self) -> tuple[list[_Begun], list[dict[str, Any]]]:
        """Give stand-ins the projected gradients; return what :meth:`_end_all` needs."""
        live = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        projected = [(param, group) for param, group in live if "rank" in group]
        for param, _ in projected:
            state_layout.check_gradient(param.grad, "GaLore")
        for position in range(len(self.param_groups)):
            self._pass_settings(position)
        begun = [self._begin(param, group) for param, group in projected]
        self._lend(param for param, _ in live)
        return begun, [dict(group) for group in self.inner.param_groups]

    @_eagerly
    def _restore(self, begun: list[_Begun]) -> None:
        for param, *_, grad in begun:
            param.grad = grad
        for group in self.param_groups:
            self._take_back(group["params"])

    @_eagerly
    def _end_all(self, begun: list[_Begun], settings: list[dict[str, Any]]) -> None:
        name = type(self.inner).__name__
        instead = f"use {name} without GaLore, or GaLore around torch.optim.AdamW"
        for old, new in zip(settings, self.inner.param_groups, strict=True):
            scheduled = "lr", "betas", "momentum"  # within a step; a change of others is a counter
            state_layout.check_keeps_no_count(self.inner, old, new, instead, scheduled)
        self._end(begun)

    @torch.no_grad()
    def step_param_(self, param: Tensor, position: int) -> None:
        """Step one parameter, of group number ``position``; raises the errors of :meth:`step`."""
        self._pass_settings(position)
        group, grad = self.param_groups[position], param.grad
        begun = []
        if "rank" in group and grad is not None:
            state_layout.check_gradient(grad, "GaLore")
            begun.append(self._begin(param, group))
        self._lend([param])
        try:
            state_layout.step_param(self.inner, self.stand_ins.get(param, param), position)
        finally:
            param.grad = grad
            self._take_back([param])
        self._end(begun)

    def _lend(self, params: Iterable[Tensor]) -> None:
        """Lend the state of parameters for one step to the inner optimizer, which keeps none."""
        for param in params:
            if theirs := _split(self.state.get(param, {}))[0]:
                self.inner.state[self.stand_ins.get(param, param)] = theirs

    def _take_back(self, params: Iterable[Tensor]) -> None:
        for param in params:
            theirs = self.inner.state.pop(self.stand_ins.get(param, param), None)
            if theirs is not None:
                self.state[param] = theirs | _split(self.state[param])[1]

    def _pass_settings(self, position: int) -> None:
        mine, theirs = self.param_groups[position], self.inner.param_groups[position]
        theirs |= {key: mine[key] for key in mine.keys() - _KEYS - {"params"}}
        if self._tensor_lr and not isinstance(mine["lr"], Tensor):
            theirs["lr"] = torch.tensor(mine["lr"], dtype=torch.float32)
        if "rank" in mine:
            theirs["weight_decay"] = 0.0

    def _begin(self, param: Tensor, group: dict[str, Any]) -> _Begun:
        """Decay a parameter; give its stand-in, if any, the projected gradient."""
        grad = param.grad
        assert grad is not None
        stand_in = self.stand_ins.get(param)
        factor: float | Tensor = group["scale"]
        if isinstance(self.inner, torch.optim.Adafactor) and stand_in is not None:
            # Its steps are relative to the size of the parameter: eps[1] for a stand-in of zeros.
            least = group["eps"][1]
            wide = param.to(torch.promote_types(param.dtype, torch.float32))
            factor = wide.square().mean().sqrt().clamp(min=least) * (factor / least)
        decayed = self._decayed(param, grad, group)
        if stand_in is None:
            param.grad = decayed
            return param, None, factor, grad
        matrix = decayed.flatten(1)
        self._refresh(param, matrix, group)
        bases = _bases(self.state[param])
        if bases:
            with without_autocast(matrix):
                low = into_subspace(matrix, bases)
            stand_in.data, stand_in.grad = torch.zeros_like(low), low
        return param, stand_in, factor, grad

    def _end(self, begun: list[_Begun]) -> None:
        for param, stand_in, factor, _ in begun:
            if stand_in is not None and stand_in.grad is not None:
                with without_autocast(param):
                    add_out_of_subspace_(param, stand_in.data * factor, _bases(self.state[param]))
                _release(stand_in)

    def _refresh(self, param: Tensor, grad_MN: Tensor, group: dict[str, Any]) -> None:
        """Count a step of a parameter; recompute its subspace every ``update_proj_gap`` steps."""
        state = self.state[param]
        old = _bases(state)
        count = state.setdefault(f"{_OURS}step", torch.zeros((), dtype=torch.int64, device="cpu"))
        steps = int(count)  # on the CPU: nothing waits for the device
        if old and steps % group["update_proj_gap"]:
            count += 1
            return
        if not torch.isfinite(grad_MN).all():
            return
        if not grad_MN.any():
            if not old and not group["lr"]:  # torch.distributed.checkpoint asks what is to load
                shapes = basis_shapes(param, group["rank"], group["proj_type"])
                dtype = torch.promote_types(param.dtype, torch.float32)
                for side, shape in shapes.items():
                    state[_OURS + side] = grad_MN.new_zeros(shape, dtype=dtype)
            return
        count += 1
        bases = new_bases(grad_MN, group["rank"], group["proj_type"], steps)
        state.update({_OURS + side: basis for side, basis in bases.items()})

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises ``ValueError``, with nothing changed, if a subspace does not fit its parameter or is
        missing after some steps, or if the state's optimizer did not project the same groups.
        """
        subspaces: dict[Tensor, dict[str, Any]] = {}

        def load_inner(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            state, params = given["state"], self._check_loadable(given)
            theirs = {}
            for number, param in params.items():
                if number in state:
                    theirs[number], ours = _split(state[number])
                    wide = param.device, torch.promote_types(param.dtype, torch.float32)
                    subspaces[param] = {
                        key: x.to(*(("cpu",) if key == f"{_OURS}step" else wide), copy=True)
                        for key, x in ours.items()
                    }
            groups = [{k: g[k] for k in g.keys() - _KEYS} for g in given["param_groups"]]
            self.inner.load_state_dict({"state": theirs, "param_groups": groups})
            # Without what the base class would round to the dtype of the parameters.
            return {**given, "state": {k: x for k, x in state.items() if k not in params}}

        def restore(_: Optimizer) -> None:
            self.state.update(subspaces)
            for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
                own = _DEFAULTS if "rank" in mine else {}
                mine |= {**self.defaults, **own, **theirs, **mine}  # keys that it may lack
                self._take_back(mine["params"])

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
                found = {side: tuple(basis.shape) for side, basis in _bases(entries).items()}
                wanted, here = {}, "where it is not projected"
                if param in self.stand_ins:
                    projected.append(entries)
                    rank, proj_type = mine["rank"], mine["proj_type"]
                    wanted = basis_shapes(param, rank, proj_type)
                    here = f"at rank={rank}, proj_type={proj_type!r}, which needs {wanted}"
                if found and found != wanted:
                    raise ValueError(
                        f"the state's subspaces {found} do not fit a parameter of shape "
                        f"{tuple(param.shape)} {here}"
                    )
        # Of an optimizer that has stepped without gradients alone, torch.distributed.checkpoint
        # loads no more than the numbers of steps.
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
        self._lend([param])
        state_layout.unpack_state_(self.inner, param)
        self._take_back([param])

    def pack_state_(self, param: Tensor) -> None:
        """Pack the inner optimizer's state again after :meth:`unpack_state_`."""
        self._lend([param])
        state_layout.pack_state_(self.inner, param)
        self._take_back([param])

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
    """:class:`GaLore` around torchao's ``AdamW8bit``; arguments are those of both."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        with needed_by("GaLoreAdamW8bit"):
            from torchao.optim import AdamW8bit
        super().__init__(params, AdamW8bit, lr=lr, **settings)


def _split(entries: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the inner optimizer keeps in a state, and what GaLore does."""
    ours = {key: x for key, x in entries.items() if key.startswith(_OURS)}
    return {key: x for key, x in entries.items() if key not in ours}, ours


def _bases(entries: dict[str, Any]) -> dict[str, Tensor]:
    return {side: entries[_OURS + side] for side in ("left", "right") if _OURS + side in entries}


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, set):
        raise TypeError("optimizer parameters need to be organized in ordered collections: no set")
    return [params] if isinstance(params, Tensor) else list(params)


def _for_inner(group: dict[str, Any], stand_ins: dict[Tensor, nn.Parameter]) -> dict[str, Any]:
    """Check a group; return the inner optimizer's group. Adds to ``stand_ins``."""
    counts = Counter(one[1] if isinstance(one, tuple) else one for one in group["params"])
    if twice := [tuple(param.shape) for param, count in counts.items() if count > 1]:
        raise ValueError(
            f"a parameter of shape {twice[0]} is twice in a parameter group: give GaLore each "
            "parameter once"
        )
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
    check_whole_numbers(1, rank=rank, update_proj_gap=gap)
    if not scale > 0:
        raise ValueError(f"scale={scale!r} must be above 0")

    def stand_in_of(param: Tensor) -> Tensor:
        state_layout.check_whole(param, "GaLore projects")
        if param.dim() < 2:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is in a group with rank={rank}: only "
                "matrices and tensors of more dimensions are projected"
            )
        if rank >= min(matrix_shape(param)):
            return param
        wide = torch.promote_types(param.dtype, torch.float32)
        size = low_shape(param, rank, proj_type)
        stand_ins[param] = nn.Parameter(torch.zeros(size, device=param.device, dtype=wide))
        _release(stand_ins[param])
        return stand_ins[param]

    params = [  # those of a user may be named
        (one[0], stand_in_of(one[1])) if isinstance(one, tuple) else stand_in_of(one)
        for one in group["params"]
    ]
    return {**own, "params": params}


def _release(stand_in: nn.Parameter) -> None:
    stand_in.data = stand_in.data.new_zeros(()).expand(stand_in.shape)
    stand_in.grad = None


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return the shape of a tensor taken as a matrix: its first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // max(1, rows)


def basis_shapes(tensor: Tensor, rank: int, proj_type: ProjType) -> dict[str, tuple[int, int]]:
    """Return the shapes of the bases: for the shorter side (``std``) or for both (``full``)."""
    rows, columns = matrix_shape(tensor)
    shapes = {"left": (rows, rank), "right": (rank, columns)}
    if proj_type == "std":
        del shapes["right" if rows < columns else "left"]
    return shapes


def low_shape(tensor: Tensor, rank: int, proj_type: ProjType) -> tuple[int, int]:
    """Return the shape of a gradient projected into the subspace."""
    rows, columns = matrix_shape(tensor)
    bases = basis_shapes(tensor, rank, proj_type)
    return rank if "left" in bases else rows, rank if "right" in bases else columns


def new_bases(grad_MN: Tensor, rank: int, proj_type: ProjType, seed: int) -> dict[str, Tensor]:
    """Compute orthonormal bases of a gradient's leading subspaces, in float32 or wider.

    A randomized range finder with one power iteration (Halko, Martinsson and Tropp, arXiv
    0909.4061, algorithm 4.4) is many times faster than a singular value decomposition. ``rank`` is
    below both sides of the matrix; ``seed`` is that of the sketch, not of torch's random state.
    """
    shapes = basis_shapes(grad_MN, rank, proj_type)
    grad_MN = _widened(grad_MN)
    if grad_MN.is_meta:  # no numbers, but the shapes are right for counting memory
        return {side: grad_MN.new_empty(shape) for side, shape in shapes.items()}
    # Exactly, so that no square is more than float32 holds; the bases are the same.
    grad_MN = torch.ldexp(grad_MN, -torch.frexp(grad_MN.abs().max())[1])
    bases = {}
    with torch.autocast(grad_MN.device.type, enabled=False):
        generator = torch.Generator(grad_MN.device).manual_seed(seed)
        if "left" in shapes:
            bases["left"] = _range(grad_MN, rank, generator)
        if "right" in shapes:
            bases["right"] = _range(grad_MN.T, rank, generator).T.contiguous()
    return bases


def into_subspace(grad_MN: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Project a gradient into the subspace, in float32 or wider."""
    grad_MN = _widened(grad_MN)
    if "left" in bases:
        grad_MN = bases["left"].T @ grad_MN
    if "right" in bases:
        grad_MN = grad_MN @ bases["right"].T
    return grad_MN


def out_of_subspace(low: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """Map a step in the subspace back to a step of the whole matrix."""
    if "left" in bases:
        low = bases["left"] @ low
    if "right" in bases:
        low = low @ bases["right"]
    return low


def add_out_of_subspace_(param: Tensor, low: Tensor, bases: dict[str, Tensor]) -> None:
    """Add ``out_of_subspace(low)`` to ``param``, if possible without allocating the whole step."""
    if param.dtype != low.dtype or not param.is_contiguous():
        param.add_(out_of_subspace(low, bases).reshape(param.shape).to(param.dtype))
    elif "right" in bases:
        left = bases["left"] @ low if "left" in bases else low
        param.view(left.shape[0], -1).addmm_(left, bases["right"])
    else:
        param.view(-1, low.shape[1]).addmm_(bases["left"], low)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _range(grad_MN: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Approximate the leading left singular vectors, ``(M, R)``."""
    width = min(rank + 8, *grad_MN.shape)  # some more than are kept
    sketch = torch.randn(grad_MN.shape[1], width, generator=generator, device=grad_MN.device)
    basis = torch.linalg.qr(grad_MN @ sketch.to(grad_MN.dtype)).Q
    basis = torch.linalg.qr(grad_MN.T @ basis).Q
    basis = torch.linalg.qr(grad_MN @ basis).Q
    # the leading directions within the sketch, from a small symmetric problem
    inner = basis.T @ grad_MN
    _, vectors = torch.linalg.eigh(inner @ inner.T)
    return basis @ vectors.flip(1)[:, :rank]
