"""Models of one's own as the model of a run: made by a function, or by a folder's configuration."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from comera.extras import needed_by


def own_model(make: str, **sizes: int) -> nn.Module:
    """Return a model for tokens ``(B, T)``, with logits ``(B, T, V)`` or those of ``make``'s task.

    Args:
        make: ``module:function``, called with those of ``sizes`` that it names; or a folder with
            the ``config.json`` of a causal model of transformers, whose sizes are changed to these.
        sizes: ``width``, ``depth``, ``heads``, ``ffn`` and ``vocab_size``.

    Raises:
        ValueError: If there is no such function or folder, the function needs something else, or it
            does not return a module.
    """
    if Path(make).expanduser().is_dir():
        return _of_transformers(Path(make).expanduser(), **sizes)
    place, colon, name = make.partition(":")
    if not colon or place.endswith(".py"):
        hint = f": write {place.removesuffix('.py')}:{name or 'function'}" if ".py" in place else ""
        raise ValueError(f"make={make} is no folder, and no module:function{hint}")
    sys.path.insert(0, str(Path.cwd()))  # as python -m has it
    try:
        function = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError) as problem:
        raise ValueError(f"make={make} cannot be imported from {Path.cwd()}: {problem}") from None
    finally:
        sys.path.pop(0)
    wanted = inspect.signature(function).parameters
    other = [k for k, p in wanted.items() if k not in sizes and p.default is p.empty]
    if other:
        raise ValueError(f"make={make} needs {', '.join(other)}, and is given {', '.join(sizes)}")
    model = function(**{key: value for key, value in sizes.items() if key in wanted})
    if not isinstance(model, nn.Module):
        raise ValueError(f"make={make} returned {model!r}, which is no module")
    return model


class _Logits(nn.Module):
    """A causal model of transformers, whose result are the logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BT, use_cache=False).logits


def _of_transformers(folder: Path, **sizes: int) -> nn.Module:
    with needed_by(f"model.make={folder}"):
        from transformers import AutoConfig, AutoModelForCausalLM
    config: Any = AutoConfig.from_pretrained(folder)
    heads, old = sizes["heads"], config.num_attention_heads
    config.hidden_size, config.num_hidden_layers = sizes["width"], sizes["depth"]
    config.num_attention_heads, config.vocab_size = heads, sizes["vocab_size"]
    if keys := getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = max(1, heads * keys // old)
    for name in ("intermediate_size", "n_inner"):
        if hasattr(config, name):
            setattr(config, name, sizes["ffn"])
    if hasattr(config, "head_dim"):
        config.head_dim = sizes["width"] // heads
    return _Logits(AutoModelForCausalLM.from_config(config))
