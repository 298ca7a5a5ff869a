"""Models of transformers that train in seconds, and data that they can learn."""

import importlib
from typing import Any

import pytest
import torch

import comera

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
hf = importlib.import_module("comera.integrations.transformers")

_HIDDEN, _WORDS, _ROWS, _LENGTH = 32, 128, 48, 12


def bert() -> Any:
    """A classifier of the shape of BERT, compressed from numbers that depend on nothing."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=_WORDS, hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    wanted = r"bert\.(embeddings\.word_embeddings|encoder\..*)"
    return comera.tensorize_(model, comera.TTConfig(rank=6, order=2, target_modules=wanted))


def llama(tied: str = "share", **settings: Any) -> Any:
    """A language model of the shape of Llama, its output layer tied to its embedding."""
    settings = settings or {"rank": 6, "order": 2}
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=_WORDS, hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return comera.tensorize_(model, comera.TTConfig(tied=tied, **settings))  # type: ignore[arg-type]


def data(model: Any) -> list[dict[str, Any]]:
    """Rows for either: a class that one word gives away, or words that follow each other."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(_ROWS):
        words = torch.randint(_WORDS, (_LENGTH,), generator=generator)
        if model.can_generate():
            words = (words[0] + torch.arange(_LENGTH)) % _WORDS
            rows.append({"input_ids": words, "labels": words})
        else:
            rows.append({"input_ids": words, "labels": int(words[0] < _WORDS // 2)})
    return rows


MODELS = {"bert": bert, "llama": llama}


def trainer(model: Any, folder: Any, **settings: Any) -> Any:
    """The trainer of an ordinary script, without a model card, bars or reports."""
    defaults: dict[str, Any] = {
        "max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 1e-3,
        "weight_decay": 0.1, "warmup_steps": 0, "lr_scheduler_type": "constant",
        "save_strategy": "steps", "save_steps": 4, "logging_steps": 1, "seed": 5,
        "report_to": [], "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    rows = data(model)
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **{**defaults, **settings}),
        train_dataset=rows,
        eval_dataset=rows[:16],
    )
