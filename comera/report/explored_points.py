"""Points of an exploration: made on a copy, measured, and kept in a file."""

import copy
import dataclasses
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from comera.compress.target_loss import measured
from comera.files import replacing
from comera.nn.block_linear import BTTLinear
from comera.nn.forms import as_torch
from comera.nn.linear import TTLinear
from comera.nn.linear_base import CompressedLinear
from comera.nn.model_size import model_size
from comera.nn.module import tensor_trains
from comera.nn.table import TTTable
from comera.report.exploration import WHOLE, Point
from comera.report.model_plan import ModelPlan, plan

log = logging.getLogger("comera")

Make = Callable[[nn.Module], float | None]
"""Makes a copy of the model smaller, and returns the rise of the loss that is predicted, if any."""


class Explorer:
    """Measures points, or takes them from the file where they are there already.

    Args:
        keep: The file, if there is one.
        model: The dense model; it is copied for each point.
        tokens: Rows of the batch that times are predicted for.

    Raises:
        ValueError: If the file is none of these, or of another model or batch.
    """

    def __init__(self, keep: str | Path | None, model: nn.Module, tokens: int) -> None:
        self.path = None if keep is None else Path(keep)
        self.model, self.tokens = model, tokens
        self.about = {"comera_exploration": 1, "weights": _digest(model), "tokens": tokens}
        self.known: dict[tuple[str, str], Point] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def dense(self, evaluate: Callable[[nn.Module], float]) -> Point:
        """Measure the dense model itself."""
        if known := self._known("dense", WHOLE):
            return known
        small = copy.deepcopy(self.model)  # evaluate may put it into another mode
        loss, seconds = _timed(evaluate, small)
        params, size = model_size(small)
        return self._add(
            Point("dense", ratio=1.0, params=params, bytes=size, loss=loss,
                  measured_seconds=seconds)
        )  # fmt: skip

    def point(
        self,
        setting: str,
        layer: str,
        make: Make,
        evaluate: Callable[[nn.Module], float],
        dense: Point,
    ) -> Point:
        """Measure one setting; what it raises is its note."""
        if known := self._known(setting, layer):
            return known
        point = Point(setting, layer)
        small = copy.deepcopy(self.model)
        with _what_is_said() as said:
            try:
                predicted = make(small)
                point = dataclasses.replace(
                    point, predicted_loss=predicted, **self._facts(small, dense)
                )
                loss, seconds = _timed(evaluate, small)
                point = dataclasses.replace(point, loss=loss, measured_seconds=seconds)
            except Exception as problem:  # of whatever kind: the others are still worth measuring
                said.append(f"{type(problem).__name__}: {problem}")
                return self._add(dataclasses.replace(point, note=said[-1]))
        return self._add(dataclasses.replace(point, note="; ".join(dict.fromkeys(said))))

    def _facts(self, small: nn.Module, dense: Point) -> dict[str, Any]:
        params, size = model_size(small)
        assert dense.params is not None, "the dense model was measured"
        facts: dict[str, Any] = {"params": params, "bytes": size, "ratio": dense.params / params}
        layers = {
            name: layer
            for name, layer in tensor_trains(small).items()
            if isinstance(layer, CompressedLinear | TTTable)
        }
        if not layers:
            return facts
        orders = {_order(layer) for layer in layers.values()}
        facts["order"] = orders.pop() if len(orders) == 1 else None
        facts["ranks"] = _ranks([layer.ranks for layer in layers.values()])
        facts["error"] = _error(self.model, layers)
        planned = plan(small, tokens=self.tokens)
        assert isinstance(planned, ModelPlan), "a layer inside a model"
        facts["predicted_seconds"] = planned.seconds
        facts["predicted_ratio"] = planned.seconds / planned.dense_seconds
        return facts

    def _known(self, setting: str, layer: str) -> Point | None:
        known = self.known.get((setting, layer))
        return known if known is not None and known.loss is not None else None

    def _add(self, point: Point) -> Point:
        self.known[point.setting, point.layer] = point
        if self.path is not None:
            points = [dataclasses.asdict(point) for point in self.known.values()]
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps({**self.about, "points": points}, indent=1))
        return point

    def _read(self, path: Path) -> None:
        try:
            there = json.loads(path.read_text())
            kept = {key: there[key] for key in self.about}
            points = [Point(**point) for point in there["points"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"keep={str(path)!r} is no file of explore: remove it, or name another"
            ) from None
        for key, words in (("weights", "another model or other weights"), ("tokens", "tokens")):
            if kept[key] != self.about[key]:
                what = words if key == "weights" else f"tokens={kept[key]}, not {self.tokens}"
                raise ValueError(
                    f"keep={str(path)!r} is of {what}: remove it, or name another file"
                )
        self.known = {(point.setting, point.layer): point for point in points}


def _timed(evaluate: Callable[[nn.Module], float], model: nn.Module) -> tuple[float, float]:
    begun = time.perf_counter()
    loss = measured(evaluate, model)
    return loss, time.perf_counter() - begun


def _ranks(each: Sequence[tuple[int, ...]]) -> str:
    """Write the bonds of layers, or where they differ what they lie between."""
    if len(set(each)) == 1:
        return " ".join(map(str, each[0]))
    bonds = [bond for ranks in each for bond in ranks]
    least, most = min(bonds), max(bonds)
    return str(least) if least == most else f"{least} to {most}"


def _order(layer: CompressedLinear | TTTable) -> int | None:
    """Return how many modes a side has; None of blocks."""
    if isinstance(layer, BTTLinear):
        return None
    return len(layer.cores) // (2 if isinstance(layer, TTLinear) else 1)


@torch.no_grad()
def _error(model: nn.Module, layers: Mapping[str, CompressedLinear | TTTable]) -> float | None:
    """Return the relative error of all weights that were replaced, of those that are one layer."""
    off = whole = 0.0
    for name, layer in layers.items():
        try:
            old = as_torch(model.get_submodule(name)).weight
        except AttributeError:  # an expert, which is no layer in the dense model
            continue
        off += float((layer.to_dense().weight - old).double().square().sum())
        whole += float(old.double().square().sum())
    return (off / whole) ** 0.5 if whole else None


def _digest(model: nn.Module) -> int:
    """Return a checksum of names and bytes of all parameters and buffers."""
    found = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        found = zlib.crc32(data, zlib.crc32(name.encode(), found))
    return found


@contextmanager
def _what_is_said() -> Iterator[list[str]]:
    """Gather what is logged meanwhile, instead of printing it: the table has it once a point."""
    said: list[str] = []

    def gather(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    log.addFilter(gather)
    try:
        yield said
    finally:
        log.removeFilter(gather)
