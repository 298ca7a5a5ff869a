"""Feed-forward parts of transformers' models, which keep nothing of the hidden width."""

import copy
from typing import Any

import pytest
import torch

import comera
from comera.nn.feed_forward_parts import fuse_feed_forwards_, unfuse_feed_forwards_

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 64,
}  # fmt: skip
PARTS = {
    "Bert": "BertLayer", "Roberta": "RobertaLayer", "Electra": "ElectraLayer",
    "Llama": "LlamaMLP", "Mistral": "MistralMLP", "Qwen2": "Qwen2MLP",
}  # fmt: skip


def make(name):
    torch.manual_seed(0)
    more = {"num_key_value_heads": 2} if PARTS[name].endswith("MLP") else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    model = transformers.AutoModel.from_config(config).double().eval()
    return comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))


def results(model, tokens):
    y = model(input_ids=tokens).last_hidden_state
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    params = [p for p in model.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad((y * weights).sum(), params, allow_unused=True)]


def kept_widths(model, tokens):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(input_ids=tokens)
    return {t.shape[-1] for t in kept if t.numel() == tokens.numel() * t.shape[-1]}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_found_and_compute_the_same(name):
    model, tokens = make(name), torch.randint(2, 64, (2, 24))
    parts = [type(model.get_submodule(part)).__name__ for part in fuse_feed_forwards_(model)]
    assert parts == [PARTS[name]] * 2
    by_layers = copy.deepcopy(model)
    unfuse_feed_forwards_(by_layers)
    want = results(by_layers, tokens)
    torch.testing.assert_close(results(model, tokens), want, rtol=1e-8, atol=1e-8)
    assert 80 not in kept_widths(model, tokens)
    assert 80 in kept_widths(by_layers, tokens)


def test_gelu_by_its_approximation_is_left_alone():
    sizes = SIZES | {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "num_key_value_heads": 2,
    }
    model = transformers.AutoModel.from_config(transformers.GemmaConfig(**sizes))
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    assert not fuse_feed_forwards_(model)
