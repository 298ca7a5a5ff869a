"""Define Muon for cores, whose steps get equal singular values, with AdamW for the rest.

Muon (K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) replaces the averaged
gradient by the nearest matrix whose singular values are all one. A core is taken as the matrix
between its wider bond and all its other dimensions, a core of a block tensor train as its blocks.
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from comera.ops.context import without_autocast
from comera.ops.product import batched_by
from comera.optim.state_layout import check_gradient, check_keys, check_whole, plain_step
from comera.shapes import check_whole_numbers

log = logging.getLogger("comera")

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""A quintic, steep at zero: singular values end between 0.7 and 1.2 (Jordan)."""

_LEAST_NORM = 1e-16
"""Matrices of a smaller norm get smaller steps: squares of their entries are no float32."""

STEP_SIZE = 0.6
"""Root mean square of a step of full rank, in learning rates; Adam's is about 0.2 (Liu et al.,
arXiv 2502.16982, section 2.2)."""


class MuonAdamW(torch.optim.AdamW):
    """Muon on the cores of tensor trains, AdamW on everything else.

    Args:
        params: Parameter groups. Muon steps a group with ``muon=True``, by default the group named
            ``"cores"`` by :func:`~comera.param_groups`; it may also hold dense matrices. A tensor
            of five dimensions whose first or last is one is taken for a core of blocks, unless the
            group's name is ``"matrices"``.
        lr: Learning rate of AdamW and of Muon, unless a group has another.
        momentum: Decay rate of Muon's average of gradients, with Nesterov's look-ahead.
        ns_steps: Newton-Schulz iterations, which find the orthogonal matrix.
        **settings: Settings of :class:`torch.optim.AdamW`: ``betas``, ``eps``, ``weight_decay``,
            ``fused``, ... Weight decay is decoupled for AdamW and Muon.

    Note:
        The state of a parameter that Muon steps is ``momentum_buffer``, in the parameter's shape
        and dtype, and ``step``, float32 ``()``. Steps are three times those of
        :class:`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, so that one learning rate
        serves AdamW and Muon. They do not depend on the scale of the gradient, as long as the norm
        of its average is above 1e-16. Cores of equal shape are stepped in the same calls, in
        float32 on a CPU and in bfloat16 elsewhere.

    Raises:
        ValueError: If a setting is out of range, or a Muon group holds a vector or a parameter
            that ``fully_shard`` has sharded.
    """

    needs_whole_matrices = "stacks whole matrices of equal shape"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        ns_steps: int = 5,
        **settings: Any,
    ) -> None:
        own = {"momentum": momentum, "ns_steps": ns_steps}
        _check(own)
        params = params if isinstance(params, Tensor) else list(params)  # torch refuses a tensor
        super().__init__(params, lr, **settings)
        self.defaults |= own
        for group in self.param_groups:
            group.update(own | group)
        grouped = isinstance(params[0], dict)
        if not grouped and not any(group["muon"] for group in self.param_groups):
            log.warning(
                "MuonAdamW of parameters in no groups is AdamW: groups say what Muon is to step, "
                "and comera.param_groups(model, lr) makes them"
            )
        # A GradScaler must not count on AdamW's fused step to divide by its scale.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, bit for bit.

        Raises:
            ValueError: If the state is another optimizer's; nothing is changed.
        """
        for group in state_dict["param_groups"]:
            states = [state_dict["state"].get(number) for number in group["params"]]
            lacks = any(state and "momentum_buffer" not in state for state in states)
            if "muon" not in group or (group["muon"] and lacks):
                raise ValueError(
                    "this is the state of another optimizer, not of MuonAdamW, and has no momentum "
                    "of the cores: begin with a new state, or go on with the optimizer that wrote "
                    "it"
                )
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; ``muon=True`` or the name ``"cores"`` chooses Muon for it."""
        if "use_muon" in param_group:
            raise TypeError("MuonAdamW has no setting 'use_muon': did you mean muon?")
        check_keys(param_group, {*self.defaults, "momentum", "ns_steps", "muon"}, "MuonAdamW")
        _check(param_group)
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        group.setdefault("muon", group.get("name") == "cores")
        for param in group["params"] if group["muon"] else ():
            check_whole(param, "MuonAdamW steps")
            if param.dim() < 2:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in a group with muon=True, "
                    "which is for cores and matrices: put it in another group"
                )
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every parameter that has a gradient.

        Raises ``RuntimeError`` if a gradient is sparse or complex; if Muon's, nothing has changed.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        for param in (p for g in groups if g["muon"] for p in g["params"] if p.grad is not None):
            check_gradient(param.grad, "MuonAdamW")
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            plain_step(torch.optim.AdamW)(self)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._step_by_muon(group)
        return loss

    def _step_by_muon(self, group: dict[str, Any]) -> None:
        # OneCycleLR and CyclicLR write a momentum in betas, and leave this key.
        momentum = group["betas"][0] if "max_momentum" in group else group["momentum"]
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        alike: dict[Any, list[tuple[Tensor, Tensor, dict[str, Tensor]]]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None or not param.numel():  # a layer of rank zero
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros(())  # AdamW looks for it wherever there is state
                state["momentum_buffer"] = torch.zeros_like(param)
            key = param.shape, param.dtype, param.device
            alike.setdefault(key, []).append((param, grad, state))
        for (shape, *_), members in alike.items():
            params, grads, states = (list(column) for column in zip(*members, strict=True))
            averages = [state["momentum_buffer"] for state in states]
            torch._foreach_add_([state["step"] for state in states], 1)
            torch._foreach_lerp_(averages, grads, 1 - momentum)
            updates = torch.stack(grads).lerp_(torch.stack(averages), momentum)
            # A core of blocks, not the weight of a 3-d convolution.
            is_core = len(shape) == 5 and 1 in (shape[0], shape[-1])
            blocks = is_core and group.get("name") != "matrices"
            matrices = updates.transpose(1, 2) if blocks else updates
            rows, cols = block_matrix(shape) if blocks else core_matrix(shape)
            size = block_step(shape) if blocks else math.sqrt(max(rows, cols))
            steps = orthogonalize(matrices.reshape(-1, rows, cols), group["ns_steps"])
            steps = steps.mul_(size).view(matrices.shape).mul_(lr * STEP_SIZE)
            steps = steps.transpose(1, 2) if blocks else steps
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            move = torch._foreach_add_ if group["maximize"] else torch._foreach_sub_
            move(params, steps.unbind(0))


def _check(settings: dict[str, Any]) -> None:
    if not 0 <= (momentum := settings.get("momentum", 0.0)) < 1:
        raise ValueError(f"momentum={momentum} must be in [0, 1)")
    check_whole_numbers(1, ns_steps=settings.get("ns_steps", 1))


def block_matrix(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of each block of a core of a block tensor train.

    Such a core is ``(left bond, blocks, block size, blocks of the other side, right bond)``.
    """
    left, _, width, others, right = shape
    return left * width, others * right


def block_step(shape: torch.Size) -> float:
    """Return the spectral norm of a block core's step, before the factor ``lr * STEP_SIZE``."""
    return math.sqrt(shape[1] * max(block_matrix(shape))) / 2


def core_matrix(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a core as a matrix, one of which is the core's wider bond.

    Of other tensors, first and last dimension count as bonds. If both are equal, it is the last.
    """
    left_is_wider = shape[0] > shape[-1]
    split = 1 if len(shape) == 2 or left_is_wider else len(shape) - 1
    return math.prod(shape[:split]), math.prod(shape[split:])


def orthogonalize(matrices_brc: Tensor, steps: int) -> Tensor:
    """Approximate the orthogonal factors ``U V^T`` of stacked matrices ``(b, rows, cols)``.

    Newton-Schulz iterations on the shorter side bring singular values between 0.7 and 1.2; those
    far below the largest stay lower. A zero matrix stays zero.
    """
    a, b, c = _COEFFICIENTS
    wide = matrices_brc.shape[1] <= matrices_brc.shape[2]
    on_cpu = matrices_brc.device.type == "cpu"
    dtype = torch.promote_types(matrices_brc.dtype, torch.float32) if on_cpu else torch.bfloat16
    x = (matrices_brc if wide else matrices_brc.mT).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)  # singular values up to 1
    with without_autocast(x), batched_by(x, x.mT):
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices_brc.dtype)
