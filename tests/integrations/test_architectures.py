"""Fourteen architectures from conversion to deployment: the same numbers all along."""

import copy

import pytest
import torch
from torch import nn

import comera
from comera.nn.module import tensor_trains
from tests.integrations.tiny import transformers

_WORDS = 96
_TEXT = {"input_ids": torch.arange(16).view(2, 8) * 5 % _WORDS}
_SIZES = {
    "vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
_HEADS = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": True}


class _Recurrent(nn.Module):
    """A language model whose output layer is tied."""

    def __init__(self):
        super().__init__()
        self.table, self.lstm = nn.Embedding(_WORDS, 32), nn.LSTM(32, 32, batch_first=True)
        self.up, self.head = nn.Linear(32, 32), nn.Linear(32, _WORDS)
        self.head.weight = self.table.weight

    def forward(self, input_ids):
        return self.head(self.up(self.lstm(self.table(input_ids))[0]))


class _Clicks(nn.Module):
    """A recommender: bags, a table and a tower."""

    def __init__(self):
        super().__init__()
        self.bag, self.item = nn.EmbeddingBag(500, 32, mode="sum"), nn.Embedding(500, 32)
        self.tower = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, input_ids):
        return self.tower(torch.cat([self.bag(input_ids), self.item(input_ids[:, 0])], -1))


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Transformer(32, 2, 1, 1, 64, dropout=0, batch_first=True)
        self.table = nn.Embedding(_WORDS, 32)

    def forward(self, input_ids):
        x = self.table(input_ids)
        return self.net(x, x)


def _of(kind, head, settings, given=_TEXT):
    """A function that makes a model of transformers, and its input."""

    def make():
        config = getattr(transformers, f"{kind}Config")(**settings, use_cache=False)
        return getattr(transformers, f"{kind.removesuffix('Text')}{head}")(config)

    return make, given


_CLIP = {key: value for key, value in _SIZES.items() if "vocab" not in key}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODELS = {
    "qwen3": _of("Qwen3", "ForCausalLM", _HEADS),
    "llama": _of("Llama", "ForCausalLM", _HEADS),
    "gemma3": _of("Gemma3Text", "ForCausalLM", _HEADS),
    "modernbert": _of(
        "ModernBert", "ForMaskedLM", {**_SIZES, **_TOKENS, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "deberta": _of(
        "DebertaV2", "ForMaskedLM",
        {**_SIZES, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c"]},
    ),
    "mamba": _of(
        "Mamba", "ForCausalLM",
        {"vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4,
         "tie_word_embeddings": True},
    ),
    "t5": _of(
        "T5", "ForConditionalGeneration",
        {"vocab_size": _WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1,
         "num_heads": 2},
        {**_TEXT, "decoder_input_ids": _TEXT["input_ids"]},
    ),
    "whisper": _of(
        "Whisper", "ForConditionalGeneration",
        {**_TOKENS, "vocab_size": _WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 8,
         "max_target_positions": 16, "decoder_start_token_id": 1},
        {"input_features": torch.linspace(0, 1, 256).view(2, 8, 16),
         "decoder_input_ids": _TEXT["input_ids"]},
    ),
    "clip": _of(
        "CLIP", "Model",
        {"text_config": _SIZES, "projection_dim": 32,
         "vision_config": {**_CLIP, "image_size": 16, "patch_size": 8}},
        {**_TEXT, "pixel_values": torch.linspace(0, 1, 1536).view(2, 3, 16, 16)},
    ),
    "mixtral": _of("Mixtral", "ForCausalLM", {**_HEADS, **_EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": _of(
        "Qwen3Moe", "ForCausalLM",
        {**_HEADS, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64},
    ),
    "nn.Transformer": (_Encoder, _TEXT),
    "lstm": (_Recurrent, _TEXT),
    "recommender": (_Clicks, _TEXT),
}  # fmt: skip


def _run(model, given):
    out = model(**given)
    return out if isinstance(out, torch.Tensor) else out[0]


def _check_same(model, given, wanted):
    with torch.no_grad():
        torch.testing.assert_close(_run(model.eval(), given), wanted, rtol=1e-4, atol=1e-5)


def test_layers_that_the_model_divides_in_evaluation_stay_dense(caplog):
    settings = {"hidden_size": 32, "num_hidden_layers": 3, "rescale_every": 2}
    config = transformers.RwkvConfig(vocab_size=_WORDS, **settings)
    model = transformers.RwkvForCausalLM(config)
    batch = {**_TEXT, "labels": _TEXT["input_ids"]}
    comera.compress_(copy.deepcopy(model).train(), [batch], budget=0.8)  # a cache has no gradient
    comera.tensorize_(model, comera.TTConfig(rank=2, init="orthogonal"))
    assert caplog.text.count("rwkv.blocks.0.attention.output, rwkv.blocks.0.feed_forward.v") == 2
    assert isinstance(model.rwkv.blocks[0].attention.key, comera.TTLinear)
    twin = comera.densify_(copy.deepcopy(model))
    for mode in (False, True, False):
        torch.testing.assert_close(_run(model.train(mode), _TEXT), _run(twin.train(mode), _TEXT))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("linear_format", ["tt", "btt"])
@pytest.mark.parametrize("name", _MODELS)
def test_from_conversion_to_deployment(name, linear_format, tmp_path):
    torch.manual_seed(0)
    make, given = _MODELS[name]
    model = make()
    rank = {"rank": 2} if linear_format == "tt" else {"rank": 1, "embedding_rank": 2}
    config = comera.TTConfig(init="orthogonal", tied="share", linear_format=linear_format, **rank)
    comera.tensorize_(model, config)
    assert tensor_trains(model)
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3, gate_lr=1e-2))
    for _ in range(2):
        _run(model.train(), given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        wanted = _run(model.eval(), given)
    assert wanted.isfinite().all()

    if isinstance(model, transformers.PreTrainedModel):
        model.save_pretrained(tmp_path / "hub")
        again, said = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
        assert not any(said.values()), said
        _check_same(again, given, wanted)
    comera.save_model(model, tmp_path / "own")
    _check_same(comera.load_model(tmp_path / "own", make), given, wanted)

    with comera.frozen(model) as served:
        _check_same(served, given, wanted)
    for convert in (comera.densify_, comera.freeze_, comera.to_plain_):
        served = convert(copy.deepcopy(model))
        _check_same(served, given, wanted)
    program = torch.export.export(served, (), given, strict=False).module()
    found = _run(program, given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
