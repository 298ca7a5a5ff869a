"""The task on click logs: binary prediction by a DLRM."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.click_files import CRITEO_CONTINUOUS, fields_named
from comera.data.clicks import Clicks
from comera.extras import did_you_mean
from comera.models.dlrm import DLRM, click_metrics, replace_tables_
from comera.recipes.folder import DataRecord
from comera.recipes.tasks.task import (
    Batch,
    Digests,
    Place,
    Task,
    TaskKind,
    Trained,
    logits_of,
)

_EVALUATED = 16_384
"""Rows that are evaluated at a time."""


class ClicksKind(TaskKind):
    """Clicks are predicted by a DLRM."""

    inputs = ("continuous", "fields")
    lean = True

    @property
    def is_told_by_data(self) -> bool:
        return self.config.dlrm.table_sizes is None

    def planned_sizes(self) -> Mapping[str, Any]:
        if self.is_told_by_data:
            with torch.device("cpu"):
                return self._sizes(Clicks.prepare(self.data))
        data, given = self.data, self.config.dlrm.table_sizes
        assert given is not None, "else the data tell them"
        _check_fields(given, fields_named(data.format, data.fields) or list(given))
        continuous = CRITEO_CONTINUOUS if data.format == "criteo" else data.continuous
        return {"table_sizes": given, "num_continuous": len(continuous)}

    def _sizes(self, data: Clicks) -> dict[str, Any]:
        """Return the checked table sizes of the settings; those of the data if none are given."""
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
        made = DLRM(
            sizes["table_sizes"],
            sizes["num_continuous"],
            model.embedding_dim,
            model.bottom,
            model.top,
        )
        if model.small_tables is not None:
            try:
                replace_tables_(made.tables, **dataclasses.asdict(model.small_tables))
            except ValueError as problem:
                raise ValueError(f"dlrm.small_tables.{problem}") from None
        return made

    def prepare(self, place: Place, digests: Digests) -> Task:
        data = Clicks.prepare(self.data, digests)
        train, size = self.config.train, self.config.train.batch_size
        limit = train.eval_batches and train.eval_batches * size
        sizes = self._sizes(data)

        def evaluate(batches: Iterable[Batch], model: nn.Module) -> dict[str, float]:
            found = [
                torch.stack([self.logits(model, batch), batch["labels"]])
                for batch in place.own(batches)
            ]
            mine = torch.cat(found, 1) if found else torch.empty(2, 0)
            logits, labels = place.gathered(mine.T).T
            return click_metrics(logits, labels)

        def test(model: nn.Module) -> dict[str, float]:
            return evaluate(data.test_batches(_EVALUATED), model)

        return Task(
            make_model=lambda: self.dense_model(sizes),
            get_batch=lambda step: place.share_of(data.batch(step, size, self.config.seed)),
            loss_fn=self.loss,
            evaluate=lambda model: evaluate(data.valid_batches(_EVALUATED, limit), model),
            steps=self.count_steps(data.steps_per_epoch(size)),
            record=DataRecord(data.digests, data.prepared),
            per_step=(size, "clicks"),
            test=test if self.data.test else None,
            categories=lambda: data.categories,
            sizes=sizes,
            lean=self.lean,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits(model, batch), batch["labels"])

    def drawn_batch(self, rows: int, sizes: Mapping[str, Any]) -> Batch:
        fields = [torch.randint(size, (rows,)) for size in sizes["table_sizes"].values()]
        return {
            "continuous": torch.randn(rows, sizes["num_continuous"]),
            "fields": torch.stack(fields, 1),
            "labels": torch.randint(2, (rows,)).float(),
        }

    def predict(self, run: Trained, line: str, new_tokens: int) -> dict[str, Any]:
        assert run.categories is not None, "a run of clicks has them"
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(
                f'{line!r} must be a JSON object, such as {{"user": "ann", "age": 31}}'
            )
        *inputs, unknown = run.categories.encode([row])
        probability = float(logits_of(run, *inputs)[0].sigmoid())
        found: dict[str, Any] = {"probability": round(probability, 4)}
        return found | ({"unknown": unknown[0]} if unknown[0] else {})


def _check_fields(given: Mapping[str, int], fields: Sequence[str]) -> None:
    """Raise ``ValueError`` unless table sizes are given for just the fields of the data."""
    for name in given:
        if name not in fields:
            raise ValueError(
                f"dlrm.table_sizes has {name}, which is no field of the data"
                f"{did_you_mean(name, fields)}"
            )
    for name in fields:
        if name not in given:
            raise ValueError(
                f"dlrm.table_sizes has nothing for {name}: give the rows of every field, or null "
                "for those of the data"
            )
