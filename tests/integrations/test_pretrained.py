"""Compressed models in folders of transformers: what is loaded is what was saved, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import comera
from comera.nn.module import tensor_trains
from tests.integrations.tiny import bert, hf, llama, trainer, transformers

WORDS = torch.arange(8)[None]


@pytest.fixture(autouse=True)
def quiet():
    """Reports of keys that a head has more are its own affair."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity_warning()


def truncated(model, rank=1):
    """Cut one rank of every bond."""
    for layer in tensor_trains(model).values():
        for gate in layer.gates:
            with torch.no_grad():
                gate[rank:] = 0
    comera.truncate_(model)
    return model


def with_hot_rows(hot_rank=None):
    model = transformers.BertModel(bert().config)
    settings = {"target_modules": r".*word_embeddings", "embedding_order": 3}
    return comera.tensorize_(
        model, comera.TTConfig(rank=4, hot_rows=20, hot_rank=hot_rank, **settings)
    )


def with_rows_moved():
    model = with_hot_rows()
    comera.update_hot_rows_(model.embeddings.word_embeddings, torch.rand(128))
    return model


def same(first, second):
    mine, other = first.state_dict(), second.state_dict()
    assert mine.keys() == other.keys()
    for key, tensor in mine.items():
        assert torch.equal(tensor, other[key]), key
        assert tensor.dtype == other[key].dtype, key
    return True


def in_other_pieces_than_its_files():
    """A model whose q, k and v are one matrix in files, here of other ranks, one dense."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.NomicBertConfig(**sizes, intermediate_size=64, vocab_size=96)
    settings = {"rank_pattern": {r".*q_proj": 3}, "exclude_modules": ["v_proj"]}
    model = transformers.NomicBertModel(config)
    return comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal", **settings))


MADE = {
    "q, k and v in one": in_other_pieces_than_its_files,
    "bert, truncated": lambda: truncated(bert()),
    "bert, a layer vanished": lambda: vanished(bert()),
    "llama, tied and truncated": lambda: truncated(llama()),
    "llama, untied": lambda: llama(tied="untie"),
    "hot rows": with_hot_rows,
    "hot rows in a basis": lambda: truncated(with_hot_rows(hot_rank=6)),
    "rows moved": with_rows_moved,
}


def vanished(model):
    layer = next(iter(tensor_trains(model).values()))
    with torch.no_grad():
        layer.gates[0].zero_()
    comera.truncate_(model, min_rank=0)
    return model


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_loaded_is_what_was_saved(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    again, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values())
    assert same(model, again)
    assert [type(m) for m in model.modules()] == [type(m) for m in again.modules()]
    params = {id(param) for param in model.parameters()}
    assert len({id(param) for param in again.parameters()}) == len(params)  # as many are tied


_WIDTHS = {"vocab_size": 96, "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
_T5 = _WIDTHS | {"d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
_BART = _WIDTHS | {
    f"{part}_{key}": size
    for part in ("encoder", "decoder")
    for key, size in {"layers": 1, "ffn_dim": 64, "attention_heads": 2}.items()
}
TWO_TABLES = {
    "MT5ForConditionalGeneration": _T5 | {"tie_word_embeddings": False},
    "BartForConditionalGeneration": _BART | {"scale_embedding": False},
    "MarianMTModel": _BART | {"scale_embedding": True},
}


@pytest.mark.parametrize(
    ("convert", "options"),
    [(comera.to_plain_, {"tied": "share", "hot_rows": 4}), (comera.freeze_, {"tied": "untie"})],
    ids=["to_plain_", "freeze_"],
)
@pytest.mark.parametrize("name", TWO_TABLES)
def test_tables_of_an_encoder_and_a_decoder_stay_tied(name, convert, options, tmp_path):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**TWO_TABLES[name])).eval()
    convert(comera.tensorize_(model, comera.TTConfig(rank=2, init="svd", **options)))
    model.save_pretrained(tmp_path)
    again, said = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values()), said
    assert same(model, again)
    assert len([*again.parameters()]) == len([*model.parameters()])
    given = {"input_ids": WORDS, "decoder_input_ids": WORDS}
    torch.testing.assert_close(again(**given).logits, model(**given).logits)


def test_a_plain_output_layer_whose_bias_was_tied(tmp_path):
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    model = transformers.BertForMaskedLM(config)
    comera.to_plain_(comera.tensorize_(model, comera.TTConfig(rank=2, tied="untie"))).eval()
    model.save_pretrained(tmp_path)
    again, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values()), said
    assert torch.equal(again(WORDS).logits, model(WORDS).logits)


def test_auto_classes_load_it_with_and_without_its_head(tmp_path):
    model = hf.attach_(truncated(bert()))
    model.save_pretrained(tmp_path / "head")
    assert same(
        model, transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")
    )
    beneath = transformers.AutoModel.from_pretrained(tmp_path / "head")
    assert same(model.bert, beneath)
    beneath.save_pretrained(tmp_path / "beneath")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "beneath")
    assert same(model.bert, again.bert)


def test_a_language_model_beneath_its_tied_head(tmp_path):
    model = hf.attach_(llama())
    model.save_pretrained(tmp_path)
    beneath, said = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert same(model.model, beneath)
    assert not any(said.values()), said


def test_a_loaded_model_is_cast_trained_and_made_dense_as_any_other(tmp_path):
    hf.attach_(bert()).save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    trainer(model.double(), tmp_path / "run", max_steps=1).train()
    before = model.eval()(WORDS).logits
    model.dequantize().save_pretrained(tmp_path / "dense")
    assert not tensor_trains(model)
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    dense = type(model).from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(dense.eval()(WORDS).logits, before)


def test_a_model_is_compressed_as_it_is_loaded(tmp_path):
    dense = transformers.BertModel(bert().config)
    dense.save_pretrained(tmp_path / "dense")
    config = comera.TTConfig(order=1, tolerance=1e-6, init="svd", target_modules=r".*output\.dense")
    small = transformers.AutoModel.from_pretrained(
        tmp_path / "dense", quantization_config=hf.TensorTrainConfig(config)
    )
    assert not tensor_trains(small)  # at full rank none would be smaller
    config = comera.TTConfig(rank=8, init="svd", target_modules=r".*output\.dense")
    small = transformers.AutoModel.from_pretrained(
        tmp_path / "dense", quantization_config=hf.TensorTrainConfig(config)
    )
    assert len(tensor_trains(small)) == 4
    by_hand = comera.tensorize_(transformers.AutoModel.from_pretrained(tmp_path / "dense"), config)
    assert same(small, by_hand)
    small.save_pretrained(tmp_path / "small")
    assert same(small, transformers.AutoModel.from_pretrained(tmp_path / "small"))
    held = json.loads((tmp_path / "small/config.json").read_text())["quantization_config"]
    assert comera.TTConfig.from_dict(held["config"]) == config


_EVALUATE = """
import sys, torch, transformers
import comera.integrations.transformers
from tests.integrations.tiny import trainer
for folder, auto in zip(sys.argv[1::2], sys.argv[2::2]):
    model = getattr(transformers, auto).from_pretrained(folder)
    print("loss:", trainer(model, folder + "/evaluated").evaluate()["eval_loss"])
"""


@pytest.mark.slow
def test_trained_through_both_stages_it_is_evaluated_in_a_fresh_process(tmp_path):
    words, wanted = [], []
    for make, auto in (
        (bert, "AutoModelForSequenceClassification"), (llama, "AutoModelForCausalLM"),
    ):  # fmt: skip
        folder = tmp_path / auto
        model = make()
        made = trainer(model, folder / "run", max_steps=9, save_strategy="no")
        ranks = comera.TwoStage(model, 0.5, early_steps=3, late_steps=3)
        hf.learn_ranks_(made, ranks, gate_lr=0.3)
        made.train()
        made.save_model(str(folder / "small"))
        words += [str(folder / "small"), auto]
        wanted.append(made.evaluate()["eval_loss"])
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _EVALUATE, *words],
        capture_output=True, text=True, check=True, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("loss:")]
    assert list(map(float, found)) == wanted


def test_only_models_of_transformers_are_attached():
    with pytest.raises(TypeError, match="save_model saves any model"):
        hf.attach_(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda described: described.update(version=99), "newer comera"),
        (
            lambda described: next(iter(described["layers"].values())).update(ranks="many"),
            "described wrongly",
        ),
    ],
    ids=["version", "entry"],
)
def test_a_folder_that_cannot_be_read_is_refused(damage, message, tmp_path):
    model = hf.attach_(bert())
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    damage(config["quantization_config"]["described"])
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        type(model).from_pretrained(tmp_path)


def test_a_model_that_has_none_of_the_layers_is_warned_of(tmp_path, caplog):
    model = llama(tied="untie", rank=4, target_modules=["lm_head"])
    model.save_pretrained(tmp_path)
    beneath = transformers.AutoModel.from_pretrained(tmp_path)
    assert same(model.model, beneath)
    assert "speaks of lm_head, and a LlamaModel has none of them" in caplog.text
    with pytest.raises(
        ValueError, match="a BertModel has none of them, nor any other layer of the"
    ):
        transformers.BertModel.from_pretrained(tmp_path)


def test_a_model_quantized_by_another_method_is_told_that_it_cannot_be_saved(caplog):
    model = transformers.LlamaForCausalLM(llama().config)
    model.hf_quantizer = torch.nn.Identity()
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    assert "cannot describe the new layers: its weights are quantized by Identity" in caplog.text
    with pytest.raises(ValueError, match="its weights are quantized by Identity"):
        hf.attach_(model)


@pytest.mark.parametrize("model", [llama("untie"), with_rows_moved()], ids=["llama", "rows moved"])
def test_what_a_file_lacks_is_drawn_as_a_fresh_layer_is(model, tmp_path):
    from safetensors.torch import load_file, save_file

    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    name = list(tensor_trains(model))[-1]
    rest = {key: x for key, x in held.items() if not key.startswith(name)}
    save_file(rest, file, {"format": "pt"})
    again, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert all(key.startswith(name) for key in said["missing_keys"])
    new = again.get_submodule(name)
    assert all((gate == 1).all() for gate in new.gates)
    torch.testing.assert_close(new.weight.std(), torch.tensor(0.02), rtol=0.3, atol=0)
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in rest.items())


def test_a_description_without_its_layers_is_put_right(tmp_path, caplog):
    llama("untie").save_pretrained(tmp_path / "small")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "small")
    dense = transformers.AutoModelForCausalLM.from_config(config)
    dense.save_pretrained(tmp_path / "dense")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert same(dense, again)
    assert "speaks of layers that its weights do not have" in caplog.text


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_another_number_of_labels(linear_format, tmp_path):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, num_labels=32,
    )  # fmt: skip
    settings = comera.TTConfig(rank=2, target_modules=["classifier"], linear_format=linear_format)
    model = comera.tensorize_(transformers.BertForSequenceClassification(config), settings)
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    again = auto.from_pretrained(tmp_path, num_labels=11, ignore_mismatched_sizes=True)
    assert same(model.bert, again.bert)
    assert again.eval()(WORDS).logits.shape == (1, 11)
    assert all((gate == 1).all() for gate in again.classifier.gates)
    assert not again.classifier.bias.any()
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        auto.from_pretrained(tmp_path, num_labels=11)


def test_a_tensor_train_that_takes_the_place_of_a_tied_one():
    other = comera.TTEmbedding(128, 32, rank=4)
    model = llama()
    model.set_input_embeddings(other)
    model.tie_weights()
    assert model.lm_head.embedding is other


@pytest.mark.parametrize("memory", [200, 2000, 20000])
def test_layers_are_placed_whole(memory):
    from accelerate import infer_auto_device_map

    model = llama()
    whole = model._no_split_modules
    found = infer_auto_device_map(model, {0: memory, "cpu": 10**9}, whole, offload_buffers=True)
    assert not [name for name in found if "cores" in name]


def test_without_the_package_transformers_says_so(tmp_path, monkeypatch):
    hf.attach_(bert()).save_pretrained(tmp_path)
    auto, said = transformers.quantizers.auto, []
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "comera")
    monkeypatch.setattr(auto.logger, "warning", said.append)
    transformers.AutoModel.from_pretrained(tmp_path)
    assert "Unknown quantization type, got comera" in said[0]


def test_a_state_that_is_given_is_what_is_written(tmp_path):
    """Such as averaged weights, or those gathered from several devices."""
    model = hf.attach_(bert())
    given = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, _ in model.named_parameters():
        given[name].zero_()
    model.save_pretrained(tmp_path / "given", state_dict=given)
    model.save_pretrained(tmp_path / "own")
    zeros = type(model).from_pretrained(tmp_path / "given")
    assert not any(param.any() for param in zeros.parameters())
    assert same(model, type(model).from_pretrained(tmp_path / "own"))
    zeros.save_pretrained(tmp_path / "again", state_dict=model.state_dict())
    assert same(model, type(model).from_pretrained(tmp_path / "again"))
