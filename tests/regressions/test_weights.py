"""Weights that a user writes, freezes or ties: what is done with them is what was asked."""

import copy

import pytest
import torch
from torch import nn

import comera


def test_an_edit_of_the_weight_is_refused():
    layer = comera.TTLinear(16, 16, rank=4)
    with pytest.raises(RuntimeError, match="set_weight_"):
        layer.weight.data.add_(1.0)


def test_initialisers_of_a_weight_are_refused():
    model = nn.Sequential(comera.TTLinear(16, 16, rank=4))
    with pytest.raises(RuntimeError, match="set_weight_"):
        model.apply(lambda m: nn.init.zeros_(m.weight) if hasattr(m, "weight") else None)


def test_an_assigned_weight_is_the_layers():
    layer, weight = comera.TTLinear(16, 16, rank=16), torch.randn(16, 16)
    layer.weight = nn.Parameter(weight)
    torch.testing.assert_close(layer(torch.eye(16)), weight.T + layer.bias)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # said by peft
@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_not_merged_into_cores_that_do_not_change(safe):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    config._register_custom_module({comera.TTLinear: peft.tuners.lora.Linear})
    model = peft.get_peft_model(nn.Sequential(comera.TTLinear(32, 32, rank=4)), config)
    before = copy.deepcopy(model)(x := torch.randn(3, 32))
    with pytest.raises(RuntimeError, match="densify_"):
        model.merge_and_unload(safe_merge=safe)
    comera.densify_(model)
    torch.testing.assert_close(model.merge_and_unload(safe_merge=safe)(x), before)


def test_frozen_positions_keep_their_numbers():
    model = nn.ModuleList([nn.Embedding(64, 32), nn.Linear(32, 32)])
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    comera.tensorize_(model, comera.TTConfig(rank=4))
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


def test_a_whisper_model_keeps_its_sinusoids():
    transformers = pytest.importorskip("transformers")
    sizes = {
        f"{part}_{n}": 2 for part in ("encoder", "decoder") for n in ("layers", "attention_heads")
    }
    config = transformers.WhisperConfig(vocab_size=200, d_model=32, **sizes, pad_token_id=0)
    model = transformers.WhisperForConditionalGeneration(config)
    before = model.model.encoder.embed_positions.weight.clone()
    comera.tensorize_(model, comera.TTConfig(rank=4))
    torch.testing.assert_close(model.model.encoder.embed_positions.weight, before, rtol=0, atol=0)


def test_that_weights_are_lost_is_said(caplog):
    comera.tensorize_(nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(rank=4))
    assert "the weights that were there are gone" in caplog.text


def test_tied_weights_over_shared_cores_are_saved_once(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(_small_llama(transformers))
    comera.tensorize_(model, comera.TTConfig(rank=4, tied="share"))
    model.save_pretrained(tmp_path)
    model.tie_weights()
    assert model.lm_head.embedding.cores is model.model.embed_tokens.cores
    comera.densify_(model)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def _small_llama(transformers):
    return transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
