"""Adapters of peft on tensor-train layers: they train alone, are saved, and merge."""

import copy

import pytest
import torch

import comera
from comera.serving import freeze
from tests.integrations.tiny import bert, hf, llama, trainer, transformers

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks
]
WORDS = torch.arange(8)[None]


def settings(targets, **more):
    made = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, **more)
    return told(made)


def told(made):
    layers = comera.TTLinear, comera.BTTLinear
    made._register_custom_module(dict.fromkeys(layers, peft.tuners.lora.Linear))
    return made


def test_an_adapter_trains_alone_under_trainer_and_merges(tmp_path):
    model = hf.attach_(bert())
    adapted = peft.get_peft_model(model, settings(["query", "value"], task_type="SEQ_CLS"))
    cores = {name: value.clone() for name, value in model.state_dict().items() if "cores" in name}
    made = trainer(adapted, tmp_path, max_steps=3, learning_rate=1e-2, save_strategy="no")
    made.train()
    adapted.eval()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in cores.items())
    after = adapted(WORDS).logits
    with adapted.disable_adapter():
        assert not torch.allclose(adapted(WORDS).logits, after)

    comera.densify_(adapted)
    merged = adapted.merge_and_unload()
    assert not comera.nn.module.tensor_trains(merged)
    torch.testing.assert_close(merged(WORDS).logits, after)


def test_an_adapter_on_a_frozen_model_is_not_merged_into_nothing(monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: 0.1)
    model = torch.nn.Sequential(comera.TTLinear(64, 64, rank=2))
    adapted = comera.freeze_(peft.get_peft_model(model, settings(["0"])))
    assert adapted.base_model.model[0].base_layer.rank == 2
    with pytest.raises(RuntimeError, match=r"comera\.densify_"):
        adapted.merge_and_unload()


def test_an_adapter_is_saved_alone_and_fits_a_base_that_is_loaded(tmp_path):
    base = llama()
    hf.attach_(base).save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, settings(["q_proj"], task_type="CAUSAL_LM")).eval()
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param)
    adapted.save_pretrained(tmp_path / "adapter")
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.get_peft_model(small, settings(["q_proj"], task_type="CAUSAL_LM"))
    peft.set_peft_model_state_dict(again, peft.utils.load_peft_weights(str(tmp_path / "adapter")))
    assert torch.equal(again.eval()(WORDS).logits, adapted(WORDS).logits)


@pytest.mark.parametrize("layer", [comera.TTLinear, comera.BTTLinear])
def test_an_adapter_is_loaded_by_settings_that_are_told_of_the_layers(layer, tmp_path):
    base = torch.nn.Sequential(layer(32, 32, rank=2))
    adapted = peft.get_peft_model(copy.deepcopy(base), settings(["0"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(
        base, tmp_path, config=told(peft.LoraConfig.from_pretrained(tmp_path))
    )
    x = torch.randn(3, 32)
    assert torch.equal(again.eval()(x), adapted.eval()(x))
    comera.densify_(again)
    torch.testing.assert_close(again.merge_and_unload()(x), adapted(x))


@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_not_merged_into_cores_that_do_not_change(safe):
    dense = torch.nn.Sequential(comera.TTLinear(32, 32, rank=4))
    model = peft.get_peft_model(dense, settings(["0"], init_lora_weights=False))
    before = copy.deepcopy(model)(x := torch.randn(3, 32))
    with pytest.raises(RuntimeError, match="densify_"):
        model.merge_and_unload(safe_merge=safe)
    comera.densify_(model)
    torch.testing.assert_close(model.merge_and_unload(safe_merge=safe)(x), before)


def gpt2():
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("dense", [comera.densify_, comera.freeze_])
@pytest.mark.parametrize("target", ["attn.c_proj", "c_attn"])
def test_adapters_on_transposed_weights_merge(target, dense, monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: 9.0)
    model = comera.tensorize_(gpt2(), comera.TTConfig(rank=4, init="orthogonal"))
    adapted = peft.get_peft_model(model, settings([target], init_lora_weights=False)).eval()
    before = adapted(WORDS).logits
    merged = dense(adapted).merge_and_unload()
    torch.testing.assert_close(merged(WORDS).logits, before, rtol=1e-4, atol=1e-5)
    assert type(merged.get_submodule(f"transformer.h.0.attn.{target[-6:]}")).__name__ == "Conv1D"


def test_adapters_are_converted_only_if_named(caplog):
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    adapted = peft.get_peft_model(model, settings(["0"]))
    comera.tensorize_(adapted, comera.TTConfig(rank=1, init="svd"))
    layer = adapted.base_model.model[0]
    assert type(layer.base_layer) is comera.TTLinear
    assert type(layer.lora_A.default) is type(layer.lora_B.default) is torch.nn.Linear
    assert "lora_A.default, base_model.model.0.lora_B.default dense: adapters" in caplog.text
    named = comera.TTConfig(rank=1, order=1, init="svd", target_modules=r".*\.lora_A\..*")
    comera.tensorize_(adapted, named)
    assert type(layer.lora_A.default) is comera.TTLinear


def test_a_regular_expression_over_whole_layers_passes_cores_by():
    made = settings(r".*\.layers\..*_proj.*", exclude_modules=r".*\.(cores|gates)")
    adapted = peft.get_peft_model(llama(), made)
    tuned = [m for m in adapted.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert len(tuned) == 14
