"""Distil the dense model into a compressed one, to lower the loss again."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comera.compress.layer_moments import training_only
from comera.nn.module import TensorTrainModule, check_model
from comera.nn.swap import evaluation_mode

log = logging.getLogger("comera")

Outputs = Callable[[nn.Module, Any], Tensor]
"""Takes the model and a batch, and returns its answers, such as logits."""

_WARM = 0.05
"""Share of the training in which the learning rate rises."""
_AT_ONCE = 1 << 21
"""Logits whose divergence is computed in one go, so that it stays in a processor's cache."""


@dataclass(frozen=True)
class Healing:
    """Result of :func:`heal_`; prints itself.

    It took ``steps`` batches. ``first`` and ``last`` are the mean distance from the dense model's
    answers over the first and the last tenth of them.
    """

    steps: int
    seconds: float
    first: float
    last: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.seconds:.0f} s, distance from the dense model "
            f"{self.first:.4g} -> {self.last:.4g}"
        )


def heal_(
    model: nn.Module,
    dense: nn.Module,
    batches: Iterable[Any],
    *,
    seconds: float | None = None,
    lr: float = 2e-4,
    outputs: Outputs | None = None,
    distance: Callable[[Tensor, Tensor], Tensor] | None = None,
    progress: bool = False,
) -> Healing:
    """Distil the dense model into the tensor-train layers of a model, in place.

    Both models get the same batches, which need no labels. Only cores, hot rows and biases of
    tensor-train layers are trained, with AdamW; gates and ranks stay as they are. The learning rate
    rises for the first twentieth of the training and falls to zero at the end. Under
    ``torch.autocast`` both models compute in its dtype; cores and optimizer state keep theirs.

    Args:
        model: The compressed model; its dropout is off.
        dense: The model before compression, or any other teacher with answers of the same shape.
        batches: The batches, read once, or again and again until ``seconds`` are over.
        seconds: Time after which to stop. None stops after one pass over ``batches``, which need a
            length.
        lr: Highest learning rate.
        outputs: Function ``outputs(model, batch)`` that returns the answers. If None, batches are
            mappings as models of Hugging Face take them, and the answers are ``logits``.
        distance: Function ``distance(mine, theirs)`` that returns a mean. If None, the
            Kullback-Leibler divergence of the distributions that logits in the last dimension give.
        progress: Whether to show a progress bar.

    Returns:
        Steps, seconds, and the distance at the beginning and at the end.

    Raises:
        ValueError: If the model has no tensor-train layer that may be trained, an option is out of
            range, the teacher is the model itself, there is no batch, the answers have other
            shapes, or a distance is not finite.
        TypeError: If either model is no module.

    Example::

        dense = copy.deepcopy(model)
        comera.compress_(model, loader, budget=0.6)
        print(comera.heal_(model, dense, loader, seconds=600))

    Source: distillation, arXiv 1503.02531, at temperature 1 and without labels.
    """
    for each in (model, dense):
        check_model(each)
    if dense is model:
        raise ValueError(
            "dense is the model itself, which learns nothing from its own answers: give a copy of "
            "it from before it was compressed"
        )
    if not lr > 0:
        raise ValueError(f"lr={lr!r} must be above 0")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds={seconds!r} must be above 0")
    if seconds is None and not hasattr(batches, "__len__"):
        raise ValueError(
            f"batches of type {type(batches).__name__} have no length: say how long with seconds="
        )
    layers = [module for module in model.modules() if isinstance(module, TensorTrainModule)]
    gates = {gate for layer in layers for gate in layer.gates}
    unique = dict.fromkeys(param for layer in layers for param in layer.parameters())
    params = [param for param in unique if param.requires_grad and param not in gates]
    if not params:
        raise ValueError(
            f"{type(model).__name__} has no tensor-train layer that may be trained: compress_ or "
            "tensorize_ it first"
        )
    narrow = next((param.dtype for param in params if param.dtype.itemsize < 4), None)
    if narrow is not None:
        log.warning(
            "heal_ trains parameters of %s, in which most of its steps are too small to be seen: "
            "model.float() before, and the dtype again after, heals further",
            str(narrow).removeprefix("torch."),
        )
    answers, apart = outputs or _logits, distance or _Divergence.apply
    optimizer = torch.optim.AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.zero_grad()
    found: list[float] = []
    begun = time.monotonic()
    try:
        with training_only(model, set(params)), evaluation_mode(dense):
            for batch, done in _until(batches, seconds, begun, progress):
                with torch.no_grad():
                    theirs = answers(dense, batch)
                with torch.enable_grad():
                    mine = answers(model, batch)
                    if mine.shape != theirs.shape:
                        raise ValueError(
                            f"the model answers with shape {tuple(mine.shape)}, the dense one with "
                            f"{tuple(theirs.shape)}"
                        )
                    loss = apart(mine, theirs)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise ValueError(
                        f"the distance is {value} in step {len(found)}: lower lr={lr}, or look at "
                        "the answers"
                    )
                loss.backward()
                optimizer.param_groups[0]["lr"] = lr * min(1.0, (done + 1e-2) / _WARM, 1.0 - done)
                optimizer.step()
                optimizer.zero_grad()
                found.append(value)
    finally:
        optimizer.zero_grad()
    if not found:
        raise ValueError("batches is empty: there is nothing to heal with")
    tenth = max(1, len(found) // 10)
    first, last = (sum(part) / tenth for part in (found[:tenth], found[-tenth:]))
    return Healing(len(found), time.monotonic() - begun, first, last)


def _until(
    batches: Iterable[Any], seconds: float | None, begun: float, progress: bool
) -> Iterator[tuple[Any, float]]:
    """Yield batches, each with the share of the training that is done, in [0, 1)."""
    from rich.progress import Progress  # not needed before somebody heals

    with Progress(disable=not progress) as bars:
        bar = bars.add_task("healing", total=1.0)
        done, before, count = 0.0, -1, 0
        while before < count and done < 1 and (seconds is not None or count == 0):
            before = count  # a pass over nothing ends it
            for batch in batches:
                if seconds is None:
                    done = count / len(batches)  # type: ignore[arg-type]
                else:
                    done = (time.monotonic() - begun) / seconds
                if done >= 1:
                    break
                bars.update(bar, completed=done)
                yield batch, done
                count += 1
        bars.update(bar, completed=1.0)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch of type {type(batch).__name__} needs outputs(model, batch); without it, "
            "batches are mappings as models of Hugging Face take them"
        )
    return model(**{key: value for key, value in batch.items() if key != "labels"}).logits


class _Divergence(torch.autograd.Function):
    """Mean Kullback-Leibler divergence between rows of logits ``(*, V)``, in float32."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, theirs: Tensor) -> Tensor:
        width = mine.shape[-1]
        ours_NV, theirs_NV = mine.reshape(-1, width), theirs.reshape(-1, width)
        grad_NV = torch.empty_like(ours_NV)
        total = torch.zeros((), dtype=torch.float32, device=mine.device)
        count = max(1, _AT_ONCE // width)
        for ours, wanted, grad in zip(
            ours_NV.split(count), theirs_NV.split(count), grad_NV.split(count), strict=True
        ):
            mine_log, their_log = (x.float().log_softmax(-1) for x in (ours, wanted))
            their_share = their_log.exp()
            total += (their_share * (their_log - mine_log)).sum()
            grad.copy_(mine_log.exp_().sub_(their_share).div_(len(ours_NV)))
        ctx.save_for_backward(grad_NV.view_as(mine))
        return (total / len(ours_NV)).clamp(min=0)  # rounding may take it below

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (of_mine,) = ctx.saved_tensors
        return of_mine * grad.to(of_mine.dtype), None
