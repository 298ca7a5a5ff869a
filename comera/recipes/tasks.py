"""The tasks a recipe can train: what differs between them, behind one interface."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.click_files import CRITEO_CONTINUOUS, find_file
from comera.data.click_rows import ClickRows
from comera.data.clicks import Clicks, click_digests
from comera.data.nli import LABELS, NliPairs, find_pairs, nli_digests
from comera.data.text import TextData, TextStreams, find_text, text_digests
from comera.data.token_batches import CausalText, MaskedText
from comera.data.vocabulary import Tokenizer
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.dlrm import DLRM, click_metrics
from comera.models.small_tables import replace_tables_
from comera.models.transformer import PAD, Encoder, MaskedLanguageModel, SequenceClassifier
from comera.recipes.data_record import DataRecord
from comera.recipes.run_config import ModelConfig, RunConfig
from comera.train.processes import Processes

Batch = dict[str, Any]
"""Tensors by name, and plain values."""

_LARGEST_LOSS = 700.0
"""Loss above which a perplexity is too large for a float."""
_EVALUATED = 16_384
"""Rows of a click log that are evaluated at a time."""
_TESTED = 128
"""Batches with masked words that a test draws; of other data it takes all."""


@dataclass
class Task:
    """Data and model of one run.

    Attributes:
        make_model: Builds the dense model; the same for the same random state.
        get_batch: Step number to batch, or to this process' rows of it.
        loss_fn: ``(model, batch)`` to mean loss.
        evaluate: Model to named figures, ``loss`` among them; the same in all processes, each of
            which sees a part of the data.
        steps: Optimizer steps of the whole run.
        record: What the data are.
        per_step: What a step trains on: how many, of all processes, and what they are called.
        test: As ``evaluate``, on data by which nothing is chosen; None if there are none.
        sizes: Sizes of the dense model that the data tell, see :func:`dense_model`.
        tokenizer: What has made tokens of text, if anything has.
        categories: Returns what makes inputs of raw rows; of a click log.
        lean: The model can be made without ever being dense: built without memory, tensorised, and
            then drawn by its ``reset_parameters(init)``.
    """

    make_model: Callable[[], nn.Module]
    get_batch: Callable[[int], Batch]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    steps: int
    record: DataRecord
    per_step: tuple[int, str]
    test: Callable[[nn.Module], dict[str, float]] | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    categories: Callable[[], ClickRows] | None = None
    lean: bool = False


def prepare_task(
    config: RunConfig,
    device: torch.device,
    digests: Mapping[str, str] | None = None,
    processes: Processes | None = None,
) -> Task:
    """Read the data of a run; raises what the readers raise.

    Args:
        config: The run.
        device: The device that batches go to.
        digests: What :func:`data_digests` has just found, so as not to read it once more.
        processes: Those that train the model together; None for this one alone.
    """
    whole = config.parallel.kind == "ddp"
    place = _Place(device, processes or Processes(), whole)
    if config.clicks is not None:
        return _clicks(config, place, digests)
    if config.nli is not None:
        return _nli(config, place, digests)
    if config.masked_text is not None:
        return _masked_text(config, place, digests)
    return _causal_text(config, place, digests)


@dataclass(frozen=True)
class _Place:
    """Where a batch is trained on: a device, and one of several processes."""

    device: torch.device
    processes: Processes
    alone: bool
    """Whether a process can run the model without the others, which may hold parts of it."""

    def share_of(self, batch: Batch) -> Batch:
        """Move this process' rows of a batch to the device."""
        return _to(self.processes.share_of(batch), self.device)

    def own(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Move those of many batches that this process evaluates to the device, one by one."""
        number, count = self.processes.rank, self.processes.count
        own = islice(batches, number, None, count) if self.alone else batches
        return (_to(batch, self.device) for batch in own)

    def sums(self, *numbers: float) -> list[float]:
        """Add up what processes have found on their own batches."""
        return self.processes.sums(*numbers) if self.alone else list(numbers)

    def gathered(self, rows: Tensor) -> Tensor:
        """Put together what processes have found on their own batches."""
        return self.processes.gathered(rows) if self.alone else rows


def find_data(config: RunConfig) -> None:
    """Make sure that the files of a run are there, before one is read; raises what readers do."""
    if config.clicks is not None:
        find_file(config.clicks.file)
    elif config.nli is not None:
        find_pairs(config.nli)
    else:
        find_text(_text_of(config))


def data_digests(config: RunConfig) -> dict[str, str]:
    """Return digests of all that a run reads, by name; raises what the readers raise."""
    if config.clicks is not None:
        return click_digests(config.clicks)
    if config.nli is not None:
        return nli_digests(config.nli)
    return text_digests(_text_of(config))


def _text_of(config: RunConfig) -> TextData:
    text = config.masked_text or config.causal_text
    assert text is not None, "RunConfig.check allows exactly one task"
    return text


def is_told_by_data(config: RunConfig) -> bool:
    """Tell whether the sizes of the model are those of the data."""
    return config.clicks is not None and config.dlrm.table_sizes is None


def planned_dense_model(config: RunConfig) -> nn.Module:
    """Make the dense model, on torch's default device; of the data only a click log is read.

    Raises:
        ValueError: If a click log is needed and not there.
    """
    if config.text is not None:
        return dense_model(config, {"vocab_size": config.text.vocab_size})
    assert config.clicks is not None, "RunConfig.check allows exactly one task"
    if not is_told_by_data(config):
        sizes = config.dlrm.table_sizes
        criteo = config.clicks.format == "criteo"
        continuous = CRITEO_CONTINUOUS if criteo else config.clicks.continuous
        return dense_model(config, {"table_sizes": sizes, "num_continuous": len(continuous)})
    with torch.device("cpu"):
        data = Clicks.prepare(config.clicks)
    found = _table_sizes(config, data)
    return dense_model(config, {"table_sizes": found, "num_continuous": data.num_continuous})


def dense_model(config: RunConfig, sizes: Mapping[str, Any]) -> nn.Module:
    """Make the dense model of a run, on torch's default device.

    Args:
        config: The run.
        sizes: What its data tell: ``vocab_size``; of a click log ``table_sizes`` by the names of
            fields, and ``num_continuous``.
    """
    if config.clicks is not None:
        return _dlrm(config, sizes["table_sizes"], sizes["num_continuous"])
    try:
        return _transformer(config, int(sizes["vocab_size"]))
    except ValueError as problem:  # it begins with the name of a setting
        raise ValueError(f"model.{problem}") from None


def _transformer(config: RunConfig, vocab_size: int) -> nn.Module:
    model = config.model
    if config.causal_text is not None:
        decoder = Decoder(
            vocab_size,
            model.d_model,
            model.num_layers,
            model.num_heads,
            model.ffn_dim,
            model.dropout,
            model.qk_norm,
        )
        return CausalLanguageModel(decoder, vocab_size)
    if config.masked_text is not None:
        encoder = _encoder(model, vocab_size, config.masked_text.length, 0)
        return MaskedLanguageModel(encoder, vocab_size)
    assert config.nli is not None, "RunConfig.check allows exactly one task"
    encoder = _encoder(model, vocab_size, config.nli.length, 2)
    return SequenceClassifier(encoder, len(LABELS), model.dropout)


def _encoder(model: ModelConfig, vocab_size: int, length: int, segments: int) -> Encoder:
    return Encoder(
        vocab_size,
        model.d_model,
        model.num_layers,
        model.num_heads,
        model.ffn_dim,
        length,
        model.dropout,
        segments,
        model.norm,
        model.qk_norm,
        model.position_std,
    )


def _dlrm(config: RunConfig, table_sizes: Mapping[str, int], num_continuous: int) -> nn.Module:
    model = config.dlrm
    made = DLRM(table_sizes, num_continuous, model.embedding_dim, model.bottom, model.top)
    if model.small_tables is not None:
        try:
            replace_tables_(made.tables, **dataclasses.asdict(model.small_tables))
        except ValueError as problem:
            raise ValueError(f"dlrm.small_tables.{problem}") from None
    return made


def _table_sizes(config: RunConfig, data: Clicks) -> Mapping[str, int]:
    """Return the table sizes of the settings, or of the data where none are given; check them."""
    found = dict(zip(data.field_names, data.table_sizes, strict=True))
    given = config.dlrm.table_sizes
    if given is None:
        return found
    for name, size in found.items():
        if given.get(name, 0) < size:
            raise ValueError(
                f"dlrm.table_sizes has {given.get(name, 'nothing')} for {name}, whose "
                f"categories in {data.settings.file} take {size} rows"
            )
    return {name: given[name] for name in found}


_Digests = Mapping[str, str] | None


def _masked_text(config: RunConfig, place: _Place, digests: _Digests) -> Task:
    assert config.masked_text is not None
    data = MaskedText(TextStreams.prepare(config.masked_text, digests))
    size = config.train.batch_size
    return _text_task(
        config,
        place,
        masked_loss,
        lambda step: _say_padding(data.batch(step, size, config.seed)),
        _padding_said(data.valid_batches(config.train.eval_batches or 32, size)),
        _padding_said(data.test_batches(_TESTED, size)),
        data.streams,
    )


def _causal_text(config: RunConfig, place: _Place, digests: _Digests) -> Task:
    assert config.causal_text is not None
    data = CausalText(TextStreams.prepare(config.causal_text, digests))
    size = config.train.batch_size
    return _text_task(
        config,
        place,
        causal_loss,
        lambda step: data.batch(step, size, config.seed),
        data.valid_batches(config.train.eval_batches, size),
        data.test_batches(None, size),
        data.streams,
    )


def _text_task(
    config: RunConfig,
    place: _Place,
    loss_fn: Callable[[nn.Module, Batch], Tensor],
    get_batch: Callable[[int], Batch],
    valid: Sequence[Batch],
    test: Sequence[Batch],
    data: TextStreams,
) -> Task:
    """Make a task without end, judged by its loss on held-out batches."""
    assert config.train.steps is not None, "RunConfig.check asks for steps here"

    def evaluate(batches: Sequence[Batch], model: nn.Module) -> dict[str, float]:
        total = sum(float(loss_fn(model, b)) * b["targets"].numel() for b in place.own(batches))
        (total,) = place.sums(total)
        loss = total / sum(batch["targets"].numel() for batch in batches)
        return {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_LOSS))}

    return Task(
        make_model=lambda: dense_model(config, {"vocab_size": data.vocab_size}),
        get_batch=lambda step: place.share_of(get_batch(step)),
        loss_fn=loss_fn,
        evaluate=partial(evaluate, valid),
        steps=config.train.steps,
        record=_record(data),
        per_step=(config.train.batch_size * data.settings.length, "tokens"),
        test=partial(evaluate, test) if test else None,
        sizes={"vocab_size": data.vocab_size},
        tokenizer=data.tokenizer,
    )


def _record(data: TextStreams | NliPairs | Clicks) -> DataRecord:
    return DataRecord(data.digests, data.prepared)


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of masked words, at their positions."""
    logits = model(batch["tokens"], batch["positions"], batch["padded"])
    return _token_loss(logits, batch["targets"])


def causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of next words."""
    return _token_loss(model(batch["tokens"]), batch["targets"])


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def pair_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return what a classifier says of pairs."""
    return model(batch["tokens"], batch["segments"], batch["padded"]).float()


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of pairs' labels."""
    return F.cross_entropy(pair_logits(model, batch), batch["labels"])


def click_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return what a click predictor says."""
    return model(batch["continuous"], batch["fields"]).float()


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of clicks."""
    return F.binary_cross_entropy_with_logits(click_logits(model, batch), batch["labels"])


def _nli(config: RunConfig, place: _Place, digests: _Digests) -> Task:
    assert config.nli is not None
    data = NliPairs.prepare(config.nli, digests)
    size = config.train.batch_size
    limit = config.train.eval_batches and config.train.eval_batches * size
    dev = _padding_said(data.dev_batches(4 * size, limit))
    test = _padding_said(data.test_batches(4 * size) or ())
    # A CUDA graph takes batches of one shape alone.
    graph = place.device.type == "cuda" and config.train.graph is not False
    length = config.nli.length if graph else None

    def evaluate(batches: Sequence[Batch], model: nn.Module) -> dict[str, float]:
        right, loss, rows = 0.0, 0.0, 0.0
        for batch in place.own(batches):
            logits = pair_logits(model, batch)
            loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            right += float((logits.argmax(-1) == batch["labels"]).sum())
            rows += len(logits)
        right, loss, rows = place.sums(right, loss, rows)
        return {"loss": loss / rows, "accuracy": right / rows}

    return Task(
        make_model=lambda: dense_model(config, {"vocab_size": data.vocab_size}),
        get_batch=lambda step: place.share_of(
            _say_padding(data.batch(step, size, config.seed, length))
        ),
        loss_fn=pair_loss,
        evaluate=partial(evaluate, dev),
        steps=count_steps(config, data.steps_per_epoch(size)),
        record=_record(data),
        per_step=(size, "pairs"),
        test=partial(evaluate, test) if test else None,
        sizes={"vocab_size": data.vocab_size},
        tokenizer=data.tokenizer,
    )


def _clicks(config: RunConfig, place: _Place, digests: _Digests) -> Task:
    assert config.clicks is not None
    data = Clicks.prepare(config.clicks, digests)
    size = config.train.batch_size
    limit = config.train.eval_batches and config.train.eval_batches * size
    sizes = {
        "table_sizes": dict(_table_sizes(config, data)),
        "num_continuous": data.num_continuous,
    }

    def evaluate(batches: Iterable[Batch], model: nn.Module) -> dict[str, float]:
        found = [
            torch.stack([click_logits(model, batch), batch["labels"]])
            for batch in place.own(batches)
        ]
        mine = torch.cat(found, 1) if found else torch.empty(2, 0)
        logits, labels = place.gathered(mine.T).T
        return click_metrics(logits, labels)

    return Task(
        make_model=lambda: dense_model(config, sizes),
        get_batch=lambda step: place.share_of(data.batch(step, size, config.seed)),
        loss_fn=click_loss,
        evaluate=lambda model: evaluate(data.valid_batches(_EVALUATED, limit), model),
        steps=count_steps(config, data.steps_per_epoch(size)),
        record=_record(data),
        per_step=(size, "clicks"),
        test=(lambda model: evaluate(data.test_batches(_EVALUATED), model))
        if config.clicks.test
        else None,
        categories=lambda: data.categories,
        sizes=sizes,
        lean=True,
    )


def count_steps(config: RunConfig, per_epoch: int) -> int:
    """Count the optimizer steps of a run over data with an end.

    Raises:
        ValueError: If there is not one.
    """
    if not per_epoch:
        raise ValueError(f"train.batch_size={config.train.batch_size} exceeds the training rows")
    if config.train.steps is not None:
        return config.train.steps
    steps = round((config.train.epochs or 0) * per_epoch)
    if steps < 1:
        raise ValueError(
            f"train.epochs={config.train.epochs} is no step: an epoch has {per_epoch} of them"
        )
    return steps


def _to(batch: Batch, device: torch.device) -> Batch:
    return {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }


def _say_padding(batch: dict[str, Tensor]) -> Batch:
    """Add whether any token is padding, while asking waits for no GPU."""
    return batch | {"padded": bool((batch["tokens"] == PAD).any())}


def _padding_said(batches: Iterable[Batch]) -> list[Batch]:
    return [_say_padding(batch) for batch in batches]
