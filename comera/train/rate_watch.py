"""Warn of a learning rate that is too high, before the loss is NaN or infinite.

Two signs come before that: a step replaces a large part of a weight, and query and key grow
together until attention looks at one position alone (the known failure of Muon: Kimi K2, arXiv
2507.20534, section 2.1). Shape suffixes: H = heads, E = head width, D = width of the input.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comera.nn.module import TensorTrainModule, tensor_trains
from comera.optim.state_layout import AnyOptimizer
from comera.params import is_sharded

log = logging.getLogger("comera")

EVERY = 50
"""Steps between two checks; the first ones are sooner."""
_FIRST = (1, 5, 10, 20)
"""Not the second: it doubles weights that were zero before the first."""
_LARGEST_CHANGE = 1.0
"""Share of a weight that one step may change; those that learn have some hundredths."""
_SHORT_ROW = 0.1
"""Norm that a row of a dense matrix counts as at least. Rows have norms near one at any width; of
those that start near zero, as of a table before a norm, a share of their own size says nothing."""
_USUAL_CHANGE = 0.03
"""Change of a weight in a step for which the advised rate is computed."""
_LARGEST_SCORE = 30.0
"""Standard deviation of attention scores, whose softmax is one position alone; 1/3 at the start."""
_SAMPLE = 1 << 14
"""Entries of a parameter from which its change is estimated."""
_PAIRS = (("query", "key"), ("q_proj", "k_proj"))
_NORMS = ("query_norm", "q_norm")


@dataclass(frozen=True)
class Seen:
    """Result of one check of the weights.

    ``change`` is the largest relative change of a weight in a step, for a layer the sum over its
    cores, or 0; ``weight`` names that weight. ``score`` is the largest standard deviation of
    attention scores, or 0 without attention; ``attention`` names that module.
    """

    change: float
    weight: str
    score: float
    attention: str


class RateWatch:
    """Checks an optimizer's weights; warns once of each sign that the learning rate is too high.

    ``every`` is the number of steps between checks after the first checks, 0 for none at all;
    ``warns`` is whether this process warns. ``last`` is the result of the last check, or None.
    """

    def __init__(
        self, model: nn.Module, optimizer: AnyOptimizer, every: int = EVERY, warns: bool = True
    ) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self._warns = warns
        self.last: Seen | None = None
        self._said: set[str] = set()

    def advice(self) -> str:
        """Return the likely cause of a non-finite loss, to end an error message."""
        rate = _rate(self.optimizer)
        seen, score = self.last, ""
        if seen is not None and seen.score:
            score = (
                f"; attention scores had a standard deviation of {seen.score:.2g} at the last look"
            )
        return f" at a learning rate of {rate:.2g}{score}: if the data are sound, halve the rate"

    @contextmanager
    def checked(self, step: int) -> Iterator[None]:
        """Compare samples of the weights before and after step number ``step``, if it is its turn.

        The comparison waits for the device.
        """
        if not self.every or (step not in _FIRST and step % self.every):
            yield
            return
        before: dict[str, list[tuple[Tensor, Tensor]]] = {
            name: [(param, _some(param).clone()) for param in params]
            for name, params in self._weights()
        }
        yield
        seen = self.last = self._look(before)
        if not self._warns:
            return
        rate = _rate(self.optimizer)
        if _LARGEST_CHANGE < seen.change < math.inf and "change" not in self._said:
            self._said.add("change")
            log.warning(
                "the learning rate is too high: step %d, at a rate of %.2g, has changed %s by "
                "%.0f %% of its size, where some percent are usual; set it to %.1g or less",
                step, rate, seen.weight, 100 * seen.change, rate * _USUAL_CHANGE / seen.change,
            )  # fmt: skip
        if seen.score > _LARGEST_SCORE and "score" not in self._said:
            self._said.add("score")
            log.warning(
                "the learning rate is too high: after step %d, at a rate of %.2g, attention scores "
                "of %s have a standard deviation of %.0f, where 1/3 is usual at the start; the "
                "loss may end in NaN. Halve the rate, or normalise queries and keys "
                "(qk_norm=True of comera's models, model.qk_norm: true in a run)",
                step, rate, seen.attention, seen.score,
            )  # fmt: skip

    @torch.no_grad()
    def _look(self, before: dict[str, list[tuple[Tensor, Tensor]]]) -> Seen:
        changes = {name: _changed(pairs) for name, pairs in before.items()}
        scores = dict(_attention_scores(self.model))
        # One copy to the host for all.
        found = torch.stack([*changes.values(), *scores.values()]).tolist() if before else []
        change, weight = _largest(found[: len(changes)], list(changes))
        score, attention = _largest(found[len(changes) :], list(scores))
        return Seen(change, weight, score, attention)

    def _weights(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        cores: set[int] = set()
        for name, layer in tensor_trains(self.model).items():
            own = [core for core in layer.cores if id(core) in held and id(core) not in cores]
            cores |= {id(core) for core in layer.cores}
            if own and all(core.numel() for core in own):
                yield name or type(layer).__name__, own
        for name, param in self.model.named_parameters():
            whole = param.dim() > 1 and param.numel() and not is_sharded(param)
            if whole and id(param) in held and id(param) not in cores:
                yield name, [param]


def _rate(optimizer: AnyOptimizer) -> float:
    groups = [group for group in optimizer.param_groups if group.get("name") != "gates"]
    rates = (float(group["lr"]) / group.get("rate_scale", 1.0) for group in groups)
    return max(rates, default=0.0)


def _some(param: Tensor) -> Tensor:
    rows = max(1, _SAMPLE * param.shape[0] // max(1, param.numel()))
    return param.detach()[:rows].float()


def _changed(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of the parameters' relative changes in norm; a zero parameter adds 0."""
    total = torch.zeros((), device=pairs[0][1].device)
    for param, before in pairs:
        if _some(param).shape != before.shape:  # cut meanwhile
            continue
        size = before.norm()
        least = _SHORT_ROW * before.shape[0] ** 0.5 if len(pairs) == 1 else 0.0  # cores are no rows
        share = (_some(param) - before).norm() / size.clamp_min(least)
        total = total + torch.where(size > 0, share, 0.0)
    return total


def _attention_scores(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the largest standard deviation of a head's scores in each attention, from its weights.

    For inputs x and y of independent entries of variance one, the score ``x A y / sqrt(E)`` has the
    standard deviation ``|A| / sqrt(E)`` in the Frobenius norm, A the product of the head's query
    and key weights. Attention that normalises queries and keys is left out.
    """
    for name, module in model.named_modules():
        if any(isinstance(getattr(module, norm, None), nn.Module) for norm in _NORMS):
            continue
        for pair in _PAIRS:
            query, key = (_weight(getattr(module, side, None)) for side in pair)
            if query is None or key is None:
                continue
            rows, keys = query.shape[0], key.shape[0]
            width, heads = getattr(module, "head_dim", None), getattr(module, "num_heads", None)
            if not isinstance(width, int) and isinstance(heads, int) and heads > 0:
                width = rows // heads
            if not isinstance(width, int) or width <= 0 or keys % width or not keys or rows % keys:
                continue
            query_HED, key_HED = query.unflatten(0, (-1, width)), key.unflatten(0, (-1, width))
            query_HEE, key_HEE = query_HED @ query_HED.mT, key_HED @ key_HED.mT
            groups = query_HEE.shape[0] // key_HEE.shape[0]  # of heads that share their keys
            squares_H = (query_HEE * key_HEE.repeat_interleave(groups, 0)).sum((1, 2))
            yield name, squares_H.amax().clamp(min=0).sqrt() / math.sqrt(width)


def _weight(layer: object) -> Tensor | None:
    if isinstance(layer, TensorTrainModule):
        whole = 0 not in layer.ranks and hasattr(layer, "out_features")
        return layer.dense_weight().detach().float() if whole else None
    whole = isinstance(layer, nn.Linear) and not is_sharded(layer.weight)
    return layer.weight.detach().float() if whole else None  # type: ignore[attr-defined]


def _largest(values: list[float], names: list[str]) -> tuple[float, str]:
    """Return the largest value and its name; non-finite values count as infinite."""
    finite = [value if math.isfinite(value) else math.inf for value in values]
    return max(zip(finite, names, strict=True), default=(0.0, ""))
