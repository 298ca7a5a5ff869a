"""Define the task on click logs: binary prediction by a DLRM."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.click_files import CATEGORIES, CRITEO_CONTINUOUS, ClickRows, fields_named
from comera.data.clicks import Clicks
from comera.extras import check_known, error_prefix
from comera.models.dlrm import DLRM, click_metrics, replace_tables_
from comera.recipes.tasks.task import Batch, Digests, Task, logits_of

_EVALUATED = 16_384  # rows that are evaluated at a time


class ClicksTask(Task):
    """Task in which a DLRM predicts clicks."""

    inputs = ("continuous", "fields")
    lean = True

    def planned_sizes(self) -> Mapping[str, Any]:
        data, given = self.data, self.config.dlrm.table_sizes
        if given is None:
            with torch.device("cpu"):
                return self._sizes(Clicks.prepare(data))
        _check_fields(given, fields_named(data.format, data.fields) or list(given))
        continuous = CRITEO_CONTINUOUS if data.format == "criteo" else data.continuous
        return {"table_sizes": given, "num_continuous": len(continuous)}

    def _sizes(self, data: Clicks) -> dict[str, Any]:
        """Return the model's sizes, with table sizes of the settings, checked, or of the data."""
        found = dict(zip(data.field_names, data.table_sizes, strict=True))
        given = self.config.dlrm.table_sizes
        if given is not None:
            _check_fields(given, list(found))
            for name, size in found.items():
                if given[name] < size:
                    raise ValueError(
                        f"dlrm.table_sizes has {given[name]} for {name}, whose "
                        f"categories in {data.settings.file} take {size} rows"
                    )
            found = {name: given[name] for name in found}
        return {"table_sizes": found, "num_continuous": data.num_continuous}

    def dense_model(self, sizes: Mapping[str, Any]) -> nn.Module:
        model = self.config.dlrm
        tables, continuous = sizes["table_sizes"], sizes["num_continuous"]
        made = DLRM(tables, continuous, model.embedding_dim, model.bottom, model.top)
        if model.small_tables is not None:
            with error_prefix("dlrm.small_tables."):
                replace_tables_(made.tables, **dataclasses.asdict(model.small_tables))
        return made

    def prepare(self, digests: Digests) -> None:
        self._clicks = data = Clicks.prepare(self.data, digests)
        train, size, seed = self.config.train, self.config.train.batch_size, self.config.seed
        top = train.eval_batches and train.eval_batches * size
        self.sizes, self.per_step = self._sizes(data), (size, "clicks")
        self._prepared(data, lambda step: data.batch(step, size, seed), len(data.splits["train"]))
        self.evaluate = lambda model: self._measure(model, data.held_out("valid", _EVALUATED, top))
        if self.data.test:
            self.test = lambda model: self._measure(model, data.held_out("test", _EVALUATED))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits(model, batch), batch["labels"])

    def _measure(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        found = [
            torch.stack([self.logits(model, batch), batch["labels"]])
            for batch in self._own(batches)
        ]
        rows = (torch.cat(found, 1) if found else torch.empty(2, 0)).T
        return click_metrics(*self._evaluators.gathered(rows).T)

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        fields = [torch.randint(size, (rows,)) for size in sizes["table_sizes"].values()]
        return {
            "continuous": torch.randn(rows, sizes["num_continuous"]),
            "fields": torch.stack(fields, 1),
            "labels": torch.randint(2, (rows,)).float(),
        }

    def save_vocabulary(self, folder: Path) -> None:
        self._clicks.categories.save(folder / CATEGORIES)

    def load_vocabulary(self, folder: Path) -> None:
        path = folder / CATEGORIES
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {CATEGORIES}: comera train writes it again")
        self.vocabulary = ClickRows.load(path)

    def predict(self, model: nn.Module, line: str, new_tokens: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(
                f'{line!r} must be a JSON object, such as {{"user": "ann", "age": 31}}'
            )
        *inputs, unknown = self.vocabulary.encode([row])
        probability = float(logits_of(model, *inputs)[0].sigmoid())
        found: dict[str, Any] = {"probability": float(f"{probability:.4g}")}  # clicks may be rare
        return found | ({"unknown": unknown[0]} if unknown[0] else {})


def _check_fields(given: Mapping[str, int], fields: Sequence[str]) -> None:
    for name in given:
        check_known(name, fields, f"dlrm.table_sizes has {name}, which is no field of the data")
    for name in fields:
        if name not in given:
            raise ValueError(
                f"dlrm.table_sizes has nothing for {name}: give the rows of every field, or null "
                "for those of the data"
            )
