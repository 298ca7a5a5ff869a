"""Define CAME, an optimizer like Adam with half of Adam's state, or an eighth in eight bits.

Confidence-guided Adaptive Memory Efficient Optimization, Luo et al., ACL 2023, arXiv 2307.02047,
after the authors' package came-pytorch. Shape suffixes, of tensors stacked along a first dimension:
b = tensors, r = rows and c = columns of each as a matrix, f = r + c, its row means followed by its
column means, n = entries of a tensor that is not factored. Of a sharded matrix r are the rows that
this process holds; its factors are whole in each.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from comera.extras import say_once
from comera.ops.dispatch import is_eager
from comera.optim import state_layout
from comera.params import check_unflattened, is_sharded

log = logging.getLogger("comera")

State = dict[str, Tensor]

_FACTORS = ("exp_avg_sq_factors", "exp_avg_res_factors")
_FULL = ("exp_avg_sq", "exp_avg_res")
"""Names of the same means while they are laid out in full."""

_STACKED = {"cpu": (1 << 16, 1 << 18)}
"""Entries of the largest tensor that is updated together with equal ones, and of all of those."""
_BLOCK = {"cpu": 1 << 20}
"""Entries updated at a time, which bounds the work space; four times those quantized at a time."""

_SCALED = 256
"""Entries that share a scale in eight bits."""
_HIGH_RATE = 1e-2
"""Rate at which uncorrected first steps ended tensor trains: a loss of 1.8 after 32, from 0.7."""
_FIRST_STEPS = (
    "CAME begins with steps of up to 11 times lr=%g, which can destroy compressed layers: give "
    "bias_correction=True, or a rate of 3e-3 or less"
)
_SMALLEST = 4096
"""Tensors of fewer entries stay in full: they weigh nothing and are often sensitive."""


class CAME(Optimizer):
    """Optimizer like Adam that stores second moments of a matrix only as row and column means.

    With g the gradient, one step is ``u = g / sqrt(mean of g^2)``, clipped to a root mean square
    of ``clip_threshold``; ``m = mean of u``; ``p -= lr * m / sqrt(mean of (u - m)^2)``, where the
    two means under roots are factored. Tensors that are not factored step by ``lr * m``. As in
    came-pytorch no mean is corrected for its start at zero: the first steps are up to 11 times
    ``lr`` in size and shrink over ten thousand steps. The authors recommend learning rates of 0.5
    to 0.9 times AdamW's.

    Unlike in came-pytorch, tensors of three and more dimensions are factored as the most balanced
    matrix; matrices too small or narrow to gain by factors are not factored; a first gradient that
    is all zero leaves the state empty, as ``torch.distributed.checkpoint`` needs; moments of
    low-precision parameters survive loading, and their updates are rounded once, to nearest.

    State of a parameter, in float32 or wider: ``step`` ``()``; ``exp_avg_update`` (m), shaped like
    the parameter; and either ``exp_avg_sq``, shaped like it, or ``exp_avg_sq_factors`` and
    ``exp_avg_res_factors``, the row means followed by the column means. In eight bits
    ``exp_avg_update`` is int8, with one float32 of ``exp_avg_update_scale`` for each 256 entries.

    Parameters may be shards by rows, as ``fully_shard`` makes them: means are those of whole
    matrices, and every process has to step.

    Args:
        params: Parameters, named parameters, or groups of them as for any torch optimizer.
        lr: Learning rate, a float or a tensor of one entry.
        betas: Decay rates of the means of u, of g^2 and of (u - m)^2, each in [0, 1).
        eps: Two numbers, added to g^2 and to (u - m)^2.
        clip_threshold: Largest root mean square of u over one parameter.
        weight_decay: Decoupled: the parameter shrinks by ``lr * weight_decay`` of itself.
        state_dtype: ``"8bit"`` keeps m in int8 for tensors of at least 4096 entries, and unpacks
            one tensor, or a few small ones, at a time; None keeps m in full.
        bias_correction: Correct all three means for their start at zero, as Adam does, so that a
            step has the size of ``lr`` from the first to the last.
        maximize: Whether to maximize the loss.
        capturable: Has no effect, as every step can be captured in a CUDA graph; torch's optimizers
            have it. For a schedule in a graph, give ``lr`` as a tensor on the device.
        foreach: Has no effect, as matrices of equal shape are always stepped together.

    Raises:
        ValueError: If a setting is out of range, or a parameter is sharded otherwise than by rows,
            or to be kept in eight bits and sharded.
        TypeError: If a group has a key that is nearly a setting; others are kept.
    """

    needs_whole_matrices = "takes means of whole matrices"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        state_dtype: Literal["8bit"] | None = None,
        bias_correction: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
            "state_dtype": state_dtype,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "capturable": capturable,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; raises the errors of the class."""
        state_layout.check_keys(param_group, self.defaults.keys(), "CAME")
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        check_unflattened(group["params"], "CAME")
        for param in group["params"]:
            _check_shards(param, _is_packed(param, group["state_dtype"]))
        self.param_groups.append(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the loss that ``closure`` computes.

        Raises ``RuntimeError``, with no parameter changed, if a gradient is sparse or complex.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, alike in [(group, self._alike(group)) for group in self.param_groups]:
            lr = group["lr"]
            settings = {**group, "lr": lr.reshape(()) if isinstance(lr, Tensor) else lr}
            for params in alike:
                self._update(params, settings)
        return loss

    def _alike(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Return lists of parameters to update together; create the state of new parameters."""
        kinds: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state_layout.check_gradient(grad, "CAME")
            if param.numel() == 0:
                continue
            state = self.state[param]
            if not state:
                state.update(_empty_state(param, group["state_dtype"]))
                lr, corrected = group["lr"], group["bias_correction"]
                high = not isinstance(lr, Tensor) and lr >= _HIGH_RATE
                if high and not corrected and matrix_view(param.shape) is not None:
                    say_once(log, logging.WARNING, _FIRST_STEPS, lr)
            held = "step" in state, "exp_avg_update_scale" in state
            shards = getattr(param, "device_mesh", None), getattr(param, "placements", None)
            alike = (*held, param.shape, param.dtype, param.device, grad.dtype, *shards)
            kinds.setdefault(alike, []).append(param)
        found = []
        for params in kinds.values():
            size = params[0].numel()
            largest, together = _STACKED.get(params[0].device.type, (1 << 20, 1 << 24))
            count = max(1, together // size) if size <= largest else 1
            found += [params[start : start + count] for start in range(0, len(params), count)]
        return found

    def _update(self, params: list[Tensor], settings: dict[str, Any]) -> None:
        """Take one step of several parameters of equal shape at once."""
        states, part = [self.state[param] for param in params], _part(params[0])
        view = matrix_view(params[0].shape)
        weights = [_local(param) for param in params]
        shape: tuple[int, ...] = (len(params), weights[0].numel())
        if view is not None:
            shape = (len(params), shape[1] // view[1], view[1])
        param = _stack(weights).view(shape)
        grad = _stack([_local(p.grad, p) for p in params if p.grad is not None]).view(shape)
        held = {key: _stack(_every(states, key)) for key in states[0] if key != "step"}
        kept, scales = held["exp_avg_update"], held.get("exp_avg_update_scale")
        average = (kept if scales is None else dequantized(kept, scales)).view(shape)
        corrections = None
        if settings["bias_correction"]:
            # The number of this step: a parameter has no count before its first one.
            steps = torch.stack([state.get("step", param.new_zeros(())) for state in states]) + 1
            steps_b1 = steps.to(average.dtype).unsqueeze(1)
            logs = [math.log(beta) if beta else -math.inf for beta in settings["betas"]]
            first, second, third = (-torch.expm1(steps_b1 * log) for log in logs)  # 1 - beta**steps
            corrections = second.sqrt(), 1 / first if view is None else 1 / first * third.sqrt()
        means = [held[key] for key in (_FULL[:1] if view is None else _FACTORS)]
        if view is None:
            _plain_step_(param, grad, average, means[0], settings, corrections, part)
        else:
            _factored_step_(param, grad, average, means[0], means[1], settings, corrections, part)
        if scales is not None:
            codes, new_scales = quantized(average.reshape(len(states), -1))
            kept.copy_(codes)
            scales.copy_(new_scales)
        if "step" in states[0]:
            torch._foreach_add_(_every(states, "step"), 1.0)
        else:
            # A parameter whose first gradient is all zero stays without state: that is how
            # torch.distributed.checkpoint asks for it to be laid out before it loads.
            live = part.sum_(grad.flatten(1).any(1).to(torch.float32)).clamp(max=1)
            for mean in means:
                mean.mul_(live.to(mean.dtype).unsqueeze(1))
            for state, count in zip(states, live.unbind(), strict=True):
                state["step"] = count.clone()
        for key, stacked in held.items():
            _write(_every(states, key), stacked)
        _write(weights, param)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, bit for bit; the settings of the groups come with it.

        Raises ``ValueError``, with nothing loaded, if the groups differ in number or size, or a
        moment does not have the shape of its parameter.
        """
        saved: dict[Tensor, State] = {}

        def collect(_: Optimizer, given: dict[str, Any]) -> None:
            numbers = [number for group in given["param_groups"] for number in group["params"]]
            params = [param for group in self.param_groups for param in group["params"]]
            for number, param in zip(numbers, params, strict=False):  # torch checks the lengths
                if (state := given["state"].get(number)) is None:
                    continue
                full = state.get("exp_avg_update")
                if full is None or full.shape != param.shape:
                    found = f"keys {sorted(state)}"
                    if full is not None:
                        found = f"a moment of shape {tuple(full.shape)}"
                    raise ValueError(
                        f"the state of a parameter of shape {tuple(param.shape)} has {found}: it "
                        "is another optimizer's, or of a model of other ranks, to be loaded first"
                    )
                saved[param] = {
                    key: value.to(param.device, copy=True) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }

        def restore(_: Optimizer) -> None:  # torch has cast it to the dtype of the parameter
            for param, state in saved.items():
                self.state[param].update(state)

        with state_layout.load_hooks(self, collect, restore):
            super().load_state_dict(state_dict)

    @torch.no_grad()
    def unpack_state_(self, param: Tensor) -> None:
        """Unpack a parameter's state to tensors of the parameter's shape, so that ranks can be cut.

        Row and column means become the tensors ``exp_avg_sq`` and ``exp_avg_res``. The optimizer
        cannot step until :meth:`pack_state_`.
        """
        state = self.state.get(param)
        if not state:
            return
        if (scales := state.pop("exp_avg_update_scale", None)) is not None:
            average = dequantized(state["exp_avg_update"].view(1, -1), scales.unsqueeze(0))
            state["exp_avg_update"] = average.view(param.shape)
        if (view := matrix_view(param.shape)) is not None:
            for key, full in zip(_FACTORS, _FULL, strict=True):
                state[full] = product(state.pop(key).unsqueeze(0), view[0]).view(param.shape)

    @torch.no_grad()
    def pack_state_(self, param: Tensor) -> None:
        """Undo :meth:`unpack_state_`, for the parameter's present shape.

        Second moments of the remaining entries stay the same if the tensor is still split to a
        matrix between the same dimensions; else they become the nearest row and column means.
        """
        state = self.state.get(param)
        if not state:
            return
        if _is_packed(param, state_layout.group_of(self, param)["state_dtype"]):
            codes, scales = quantized(state["exp_avg_update"].view(1, -1))
            state["exp_avg_update"] = codes.view(param.shape)
            state["exp_avg_update_scale"] = scales[0]
        if (view := matrix_view(param.shape)) is None:
            state.pop("exp_avg_res", None)
            return
        for key, full in zip(_FACTORS, _FULL, strict=True):
            full_brc = state.pop(full).view(1, *view)
            state[key] = torch.cat([full_brc.mean(2), full_brc.mean(1)], 1)[0]


def _check(group: dict[str, Any]) -> None:
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}; a tensor lr must have one entry")
    elif not lr >= 0:
        raise ValueError(f"lr={lr} must be at least 0")
    if not _all(betas, 3, lambda beta: 0 <= beta < 1):
        raise ValueError(
            f"betas={betas} must be three decay rates in [0, 1): of the updates, of the squared "
            "gradients and of the confidence"
        )
    if not _all(eps, 2, lambda value: value > 0):
        raise ValueError(
            f"eps={eps} must be two numbers above 0: for squared gradients and for the confidence"
        )
    if not group["clip_threshold"] > 0:
        raise ValueError(f"clip_threshold={group['clip_threshold']} must be above 0")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay={group['weight_decay']} must be at least 0")
    if group["state_dtype"] not in (None, "8bit"):
        raise ValueError(f'state_dtype={group["state_dtype"]!r} must be None or "8bit"')


def _check_shards(param: Any, packed: bool) -> None:
    """Raise ``ValueError`` for a parameter whose shards CAME cannot take means of."""
    shards = [p.is_shard(0) for p in getattr(param, "placements", ()) if not p.is_replicate()]
    if packed:
        state_layout.check_whole(param, "CAME keeps eight bits of", "it without state_dtype='8bit'")
    elif shards not in ([], [True]):
        state_layout.check_whole(param, "CAME takes means of shards by rows and of")


def _all(values: Any, count: int, fits: Callable[[float], bool]) -> bool:
    return isinstance(values, Sequence) and len(values) == count and all(map(fits, values))


def _is_packed(param: Tensor, state_dtype: str | None) -> bool:
    wanted = state_dtype is not None and param.numel() >= _SMALLEST
    return wanted and param.dtype != torch.float64


def _empty_state(param: Tensor, state_dtype: str | None) -> State:
    """Return the state before the first step, all zero and without ``step``."""
    wide = torch.promote_types(param.dtype, torch.float32)
    packed, view = _is_packed(param, state_dtype), matrix_view(param.shape)
    dtype = torch.int8 if packed else wide
    state = {"exp_avg_update": param.new_zeros(param.shape, dtype=dtype)}
    if packed:
        scales = -(-param.numel() // _SCALED)
        state["exp_avg_update_scale"] = param.new_zeros(scales, dtype=torch.float32)
    if view is None:
        return state | {"exp_avg_sq": param.new_zeros(param.shape, dtype=wide)}
    return state | {key: param.new_zeros(sum(view), dtype=wide) for key in _FACTORS}


class _Part(NamedTuple):
    """Part of a tensor in this process: entries before it and in all, and the processes."""

    before: int
    entries: int
    group: Any = None

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up, in place, what all of them have."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


def _part(param: Any) -> _Part:
    for dim, placement in enumerate(getattr(param, "placements", ())):
        if placement.is_shard():  # the only one, see _check_shards
            mesh, (rows, *others) = param.device_mesh, param.shape
            first = min(rows, -(-rows // mesh.size(dim)) * mesh.get_local_rank(dim))
            return _Part(first * math.prod(others), param.numel(), mesh.get_group(dim))
    return _Part(0, param.numel())


def _local(tensor: Any, param: Any = None) -> Tensor:
    if is_sharded(tensor):
        places = tensor.placements if param is None else param.placements
        return tensor.redistribute(placements=places).to_local()
    return tensor


def _every(states: Sequence[State], key: str) -> list[Tensor]:
    return [_local(state[key]) for state in states]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack ``b`` tensors of equal shape to ``(b, n)``: a copy, or a view of a single tensor."""
    if len(tensors) == 1:
        return tensors[0].detach().reshape(1, -1)
    return torch.stack([tensor.detach() for tensor in tensors]).reshape(len(tensors), -1)


def _write(tensors: list[Tensor], stacked: Tensor) -> None:
    """Write stacked tensors back; the memory of a single tensor has already changed."""
    if len(tensors) > 1:
        torch._foreach_copy_(tensors, stacked.view(len(tensors), *tensors[0].shape).unbind())
    elif not tensors[0].is_contiguous():
        tensors[0].copy_(stacked.view(tensors[0].shape))


def matrix_view(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the rows and columns of the matrix as which a tensor's second moments are factored.

    The dimensions are split where rows + columns is least: ``(30, 8, 1)`` is ``30 x 8`` and
    ``(64, 3, 3, 3)`` is ``64 x 27``. None if the factors would not be smaller than the tensor.
    """
    pairs = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    rows, columns = min(pairs, key=sum, default=(0, 0))
    return (rows, columns) if 2 * (rows + columns) < rows * columns else None


def product(factors_bf: Tensor, rows: int) -> Tensor:
    """Return matrices ``(b, r, c)`` from row and column means: ``row * column / mean``."""
    row, column = factors_bf[:, :rows], factors_bf[:, rows:]
    share = row / row.mean(1, keepdim=True)
    return share.nan_to_num(0.0).unsqueeze(2) * column.unsqueeze(1)


def _factored_step_(
    param_brc: Tensor,
    grad_brc: Tensor,
    average_brc: Tensor,
    square_bf: Tensor,
    residual_bf: Tensor,
    settings: dict[str, Any],
    corrections: tuple[Tensor, Tensor] | None,
    held: _Part,
) -> None:
    """Take one step of CAME on matrices, in place and in the dtype of the moments.

    ``average_brc`` is the mean of the clipped updates u; ``square_bf`` and ``residual_bf`` are
    means of the squared gradients and of ``(u - mean of u)^2``, of all rows; ``corrections`` are
    factors ``(b, 1)`` of u and of the step, for means that started at zero.
    """
    beta1, beta2, beta3 = settings["betas"]
    batch, here, columns = grad_brc.shape
    rows, first = held.entries // columns, held.before // columns
    most = _BLOCK.get(grad_brc.device.type, 1 << 26)
    # The compiler blocks its own loops.
    count = max(1, min(here, -(-batch * here * columns // most))) if is_eager() else 1
    blocks = [slice(here * k // count, here * (k + 1) // count) for k in range(count)]
    work_brc = square_bf.new_empty(batch, -(-here // count), columns)
    parts = [work_brc[:, : block.stop - block.start] for block in blocks]
    of_all = slice(first, first + here)
    places = [slice(first + block.start, first + block.stop) for block in blocks]

    means_bf = torch.zeros_like(square_bf)
    for block, place, part in zip(blocks, places, parts, strict=True):
        grad = grad_brc[:, block].to(square_bf.dtype)
        torch.mul(grad, grad, out=part)
        means_bf[:, place] = part.mean(2)
        means_bf[:, rows:] += part.sum(1)
    held.sum_(means_bf)[:, rows:] /= rows
    square_bf.lerp_(means_bf + settings["eps"][0], 1 - beta2)
    row, column = _inverse_roots(square_bf, rows)
    if corrections is not None:
        row = row * corrections[0].unsqueeze(2)

    # u = row * gradient * column / max(1, its root mean square / clip_threshold). The norm is
    # taken before the rows are scaled, so that a huge factor meets its zeros before it is squared.
    norms = torch.zeros_like(row)
    for block, place, part in zip(blocks, places, parts, strict=True):
        torch.mul(grad_brc[:, block], column, out=part)
        norms[:, place] = torch.linalg.vector_norm(part, dim=2, keepdim=True)
    norm = torch.linalg.vector_norm(held.sum_(norms) * row, dim=1, keepdim=True)
    row = row / (norm / (math.sqrt(rows * columns) * settings["clip_threshold"])).clamp(min=1.0)
    row = (-row if settings["maximize"] else row)[:, of_all]

    means_bf.zero_()
    for block, place, part in zip(blocks, places, parts, strict=True):
        if count > 1:  # one block's part is still there
            torch.mul(grad_brc[:, block], column, out=part)
        average = average_brc[:, block]
        torch.addcmul(average, part, row[:, block], value=-1, out=part)  # mean - u
        average.add_(part, alpha=beta1 - 1)
        torch.mul(part, part, out=part)
        means_bf[:, place] = part.mean(2)
        means_bf[:, rows:] += part.sum(1)
    held.sum_(means_bf)[:, rows:] /= rows
    # u - new mean = beta1 * (u - old mean)
    residual_bf.lerp_(means_bf * beta1**2 + settings["eps"][1], 1 - beta3)

    row, column = _inverse_roots(residual_bf, rows)
    row = row[:, of_all] * -settings["lr"]
    if corrections is not None:
        row = row * corrections[1].unsqueeze(2)
    for block, part in zip(blocks, parts, strict=True):
        torch.mul(average_brc[:, block], column, out=part)
        _step_to_(param_brc[:, block], part, row[:, block], settings)


def _inverse_roots(factors_bf: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``(b, r, 1)`` and ``(b, 1, c)``, whose product is ``1 / sqrt(product(factors))``."""
    roots = factors_bf.rsqrt()
    size = factors_bf[:, :rows].mean(1, keepdim=True).sqrt()
    return (roots[:, :rows] * size).unsqueeze(2), roots[:, rows:].unsqueeze(1)


def _plain_step_(
    param_bn: Tensor,
    grad_bn: Tensor,
    average_bn: Tensor,
    square_bn: Tensor,
    settings: dict[str, Any],
    corrections: tuple[Tensor, Tensor] | None,
    held: _Part,
) -> None:
    """Take one step of CAME on tensors that are not factored, without the term of (u - m)^2."""
    beta1, beta2, _ = settings["betas"]
    grad_bn = grad_bn.to(square_bn.dtype)
    square_bn.lerp_(grad_bn.square() + settings["eps"][0], 1 - beta2)
    update = square_bn.rsqrt() * grad_bn
    if corrections is not None:
        update = update * corrections[0]
    norm = torch.linalg.vector_norm(update, dim=1, keepdim=True)
    if held.group is not None:
        norm = held.sum_(norm.square()).sqrt()
    clip = (norm / (math.sqrt(held.entries) * settings["clip_threshold"])).clamp(min=1.0)
    if settings["maximize"]:
        clip = -clip
    average_bn.lerp_(update / clip, 1 - beta1)
    one = torch.ones_like(clip) if corrections is None else corrections[1]
    _step_to_(param_bn, average_bn, one * -settings["lr"], settings)


def _step_to_(param: Tensor, direction: Tensor, scale: Tensor, settings: dict[str, Any]) -> None:
    """Decay ``param`` and add ``direction * scale``, in the dtype of ``direction``; round once."""
    decay = settings["weight_decay"]
    left = 1 - settings["lr"] * decay if decay else 1.0
    if param.dtype == direction.dtype:
        if decay:
            param.mul_(left)
        param.addcmul_(direction, scale)
    else:
        param.copy_(torch.addcmul(param.to(direction.dtype) * left, direction, scale))


def quantized(values_bn: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float32 values to codes ``(b, n)`` int8 and scales ``(b, k)`` float32.

    Codes are linear, from -127 to 127; the scale is the largest magnitude in a block of 256. If
    a value is not finite, its whole block becomes so.
    """
    blocks = _in_blocks(values_bn)
    batch, count, size = blocks.shape
    codes = torch.empty_like(blocks, dtype=torch.int8)
    scales = blocks.new_empty(batch, count)
    step = max(1, _BLOCK.get(blocks.device.type, 1 << 26) // 4 // (batch * size))
    if not is_eager():  # the compiler needs no work space
        step = count
    for start in range(0, count, step):
        some = slice(start, start + step)
        part = blocks[:, some]
        scale = scales[:, some] = part.abs().amax(2)
        inverse = torch.where(scale == 0, 0, 127 / scale)
        codes[:, some] = (part * inverse.unsqueeze(2)).round_()
    return codes.flatten(1)[:, : values_bn.shape[1]], scales


def dequantized(codes_bn: Tensor, scales_bk: Tensor) -> Tensor:
    """Return the values ``(b, n)`` float32 that codes and scales stand for."""
    values = _in_blocks(codes_bn) * (scales_bk / 127).unsqueeze(2)
    return values.flatten(1)[:, : codes_bn.shape[1]].contiguous()


def _in_blocks(values_bn: Tensor) -> Tensor:
    missing = -values_bn.shape[1] % _SCALED
    return (F.pad(values_bn, (0, missing)) if missing else values_bn).unflatten(1, (-1, _SCALED))
