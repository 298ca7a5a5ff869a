"""The two tasks a recipe can train: what differs between them, behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.data.masked_text import MaskedText
from comera.data.nli import LABELS, NliPairs
from comera.models.transformer import Encoder, MaskedLanguageModel, SequenceClassifier
from comera.recipes.config import ModelConfig, RunConfig


@dataclass
class Task:
    """Data and model of one run.

    Attributes:
        make_model: Builds the dense model; the same for the same random state.
        get_batch: Step number to batch.
        loss_fn: ``(model, batch)`` to mean loss.
        evaluate: Model to named figures, ``loss`` among them.
        steps: Optimizer steps of the whole run.
    """

    make_model: Callable[[], nn.Module]
    get_batch: Callable[[int], dict[str, Tensor]]
    loss_fn: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    steps: int


def prepare_task(config: RunConfig, device: torch.device) -> Task:
    """Read the data of a run; raises what the readers raise."""
    if config.masked_text is not None:
        return _masked_text(config, device)
    return _nli(config, device)


def make_model(config: RunConfig, vocab_size: int) -> nn.Module:
    """The dense model of a run, on torch's default device."""
    if config.masked_text is not None:
        encoder = _encoder(config.model, vocab_size, config.masked_text.length, 0)
        return MaskedLanguageModel(encoder, vocab_size)
    assert config.nli is not None, "RunConfig.check allows exactly one task"
    encoder = _encoder(config.model, vocab_size, config.nli.length, 2)
    return SequenceClassifier(encoder, len(LABELS), config.model.dropout)


def planned_vocab_size(config: RunConfig) -> int:
    """Tokens of the vocabulary, known without reading the data."""
    if config.masked_text is not None:
        return config.masked_text.vocab_size
    assert config.nli is not None, "RunConfig.check allows exactly one task"
    return config.nli.vocab_size


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
    )


def _masked_text(config: RunConfig, device: torch.device) -> Task:
    assert config.masked_text is not None
    assert config.train.steps is not None, "RunConfig.check asks for steps here"
    data = MaskedText.prepare(config.masked_text)
    size = config.train.batch_size
    valid = data.valid_batches(config.train.eval_batches or 32, size)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"], batch["positions"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())

    def evaluate(model: nn.Module) -> dict[str, float]:
        losses = [loss_fn(model, _to(batch, device)) for batch in valid]
        return {"loss": float(torch.stack(losses).mean())}

    return Task(
        make_model=lambda: make_model(config, data.vocab_size),
        get_batch=lambda step: _to(data.batch(step, size, config.seed), device),
        loss_fn=loss_fn,
        evaluate=evaluate,
        steps=config.train.steps,
    )


def _nli(config: RunConfig, device: torch.device) -> Task:
    assert config.nli is not None
    data = NliPairs.prepare(config.nli)
    size = config.train.batch_size
    limit = config.train.eval_batches and config.train.eval_batches * size
    dev = data.dev_batches(4 * size, limit)
    steps = config.train.steps
    if steps is None:
        steps = round(config.train.epochs * data.steps_per_epoch(size))  # type: ignore[operator]

    def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["tokens"], batch["segments"]).float()

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits_of(model, batch), batch["labels"])

    def evaluate(model: nn.Module) -> dict[str, float]:
        right, loss, rows = 0, 0.0, 0
        for batch in dev:
            batch = _to(batch, device)
            logits = logits_of(model, batch)
            loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            right += int((logits.argmax(-1) == batch["labels"]).sum())
            rows += len(logits)
        return {"loss": loss / rows, "accuracy": right / rows}

    return Task(
        make_model=lambda: make_model(config, data.vocab_size),
        get_batch=lambda step: _to(data.batch(step, size, config.seed), device),
        loss_fn=loss_fn,
        evaluate=evaluate,
        steps=steps,
    )


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) for key, value in batch.items()}
