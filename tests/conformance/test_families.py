"""One table: converted models of transformers under the requirements of its tests of models."""

import atexit
import copy
import functools
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import comera
from comera.nn.module import tensor_trains
from comera.nn.table import TTTable
from tests.integrations.tiny import transformers

from . import conforms, table

same = functools.partial(assert_close, rtol=1e-4, atol=1e-5)
exactly = functools.partial(assert_close, rtol=0, atol=0)
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "tie_word_embeddings": True,
    "vocab_size": 96, "max_position_embeddings": 24, "num_key_value_heads": 1, "num_labels": 32,
    "num_local_experts": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32,
    "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 24, "d_model": 32, "d_kv": 16,
    "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"), 0),
}  # fmt: skip
atexit.register(shutil.rmtree, ROOT := tempfile.mkdtemp())
WORDS = torch.arange(16).view(2, 8) * 5 % 93 + 3
TEXT = {"input_ids": WORDS, "labels": WORDS, "use_cache": False}
IMAGE = {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)}
MODELS = {
    "BERT": ("BertForMaskedLM", {"input_ids": WORDS, "labels": WORDS}),
    "Llama": ("LlamaForCausalLM", TEXT),
    "Mixtral": ("MixtralForCausalLM", TEXT),
    "GPT2": ("GPT2LMHeadModel", TEXT),
    "T5": ("T5ForConditionalGeneration", {**TEXT, "decoder_input_ids": WORDS}),
    "ViT": ("ViTForImageClassification", {**IMAGE, "labels": torch.tensor([3, 5])}),
    "CLIP": ("CLIPModel", {"input_ids": WORDS, **IMAGE, "return_loss": True}),
}
TT = {"rank": 2, "tied": "share", "init": "orthogonal"}
FORMATS = {
    "dense": None, "TT": TT, "BTT": {**TT, "linear_format": "btt", "rank": 1, "embedding_rank": 2}
}  # fmt: skip
ROWS = [f"{name}, {form}" for name in MODELS for form in FORMATS]


@functools.cache
def made(name):
    """Return a model of random weights and gates and what it is given; it stays as it is."""
    torch.manual_seed(0)
    kind, given = MODELS[name.split(",")[0]]
    kind, form = getattr(transformers, kind), FORMATS[name.split(", ")[1]]
    towers = {"text_config": SIZES, "vision_config": SIZES, "projection_dim": 32}
    settings = towers if "CLIP" in name else SIZES
    used = {*vars(kind.config_class()), "num_labels", "decoder_start_token_id"}
    config = kind.config_class(**{key: settings[key] for key in settings if key in used})
    model = kind(config)
    if form is not None:
        comera.tensorize_(model, comera.TTConfig(**form))
    for layer in tensor_trains(model).values():
        for gate in layer.gates:
            nn.init.uniform_(gate, 0.5, 1.5)
    return model.eval(), given


def fresh(name):
    return copy.deepcopy(made(name)[0]), made(name)[1]


def saved(model, **options):
    model.save_pretrained(path := tempfile.mkdtemp(dir=ROOT), **options)
    return path


@functools.cache
def folder(name):
    return saved(made(name)[0])


def loaded(name, path=None, **options):
    """Load a model as it was saved, with nothing missing, mismatched or left over."""
    load, path = type(made(name)[0]).from_pretrained, path or folder(name)
    model, said = load(path, output_loading_info=True, **options)
    assert not any(said.values()), said
    return model


def tensors(out):
    """Return all tensors of an answer, those of answers inside it too."""
    out = out.to_tuple() if isinstance(out, transformers.utils.ModelOutput) else out
    if isinstance(out, (tuple, list)):
        return [x for part in out for x in tensors(part)]
    return [out] if isinstance(out, torch.Tensor) else []


@torch.no_grad()
def run(model, given, **more):
    return tensors(model(**{**given, **more}))


def is_saved_copied_and_loaded(name):
    model, given = made(name)
    twins = fresh(name)[0], pickle.loads(pickle.dumps(model))
    others = [loaded(name, saved(each, max_shard_size="20KB")) for each in twins]
    others += [loaded(name, low_cpu_mem_usage=True), loaded(name, device_map="auto"), *twins]
    for other in others:
        exactly(other.state_dict(), model.state_dict())
        exactly(run(other, given), run(model, given))
        assert [*map(type, other.modules())] == [*map(type, model.modules())]
        assert len([*other.parameters()]) == len([*model.parameters()])  # as many are tied


def what_a_file_lacks_is_drawn(name):
    model, drawn = made(name)[0], []
    path = saved(model)
    kept = {key: x for key, x in model.state_dict().items() if key == "logit_scale"}  # CLIP's
    save_file(kept, f"{path}/model.safetensors", {"format": "pt"})
    for _ in range(2):
        torch.manual_seed(0)
        again, said = type(model).from_pretrained(path, output_loading_info=True)
        assert said["missing_keys"]
        drawn.append(again.state_dict())
    exactly(*drawn)
    for layer in tensor_trains(again).values():
        assert all((gate == 1).all() for gate in layer.gates)
        assert 0.01 < layer.weight.std() < 0.04


def base_and_head_share_folders(name):
    base = made(name)[0].base_model
    for each in (base, type(base).from_pretrained(folder(name))):
        path = saved(each)
        again = type(made(name)[0]).from_pretrained(path)
        exactly(again.base_model.state_dict(), base.state_dict())
    towers = {"text_model": "CLIPTextModel", "vision_model": "CLIPVisionModel"}
    for key, kind in towers.items() if "CLIP" in name else ():
        tower = getattr(transformers, kind).from_pretrained(folder(name))
        exactly(tower.state_dict(), getattr(base, key).state_dict())


def what_is_tied_stays_tied(name):
    for model in (loaded(name), fresh(name)[0], pickle.loads(pickle.dumps(made(name)[0]))):
        held, words = [*map(id, model.parameters())], model.get_input_embeddings()
        model.tie_weights()
        assert [*map(id, model.parameters())] == held
        nn.init.ones_(next(words.parameters()))
        exactly(model.get_output_embeddings().weight, words.weight)
    held = load_file(f"{folder(name)}/model.safetensors").values()
    assert sum(x.numel() for x in held if x.is_floating_point()) == model.num_parameters()
    dense = comera.densify_(fresh(name)[0])
    model.set_input_embeddings(nn.Embedding(96, 32))
    for each in (dense, model):
        each.tie_weights()
        assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
        exactly(loaded(name, saved(each)).state_dict(), each.state_dict())


def the_table_grows(name):
    model, given = fresh(name)
    rows, before = model.get_input_embeddings().weight.detach(), run(model, given, labels=None)
    exactly(model.resize_token_embeddings(96).weight, rows)
    words = model.resize_token_embeddings(106).weight
    assert model.config.get_text_config().vocab_size == len(words) == 106
    same(words[:96], rows)
    for x, y in zip(run(model, given, labels=None), before, strict=True):
        same(x[tuple(map(slice, y.shape))], y)
    exactly(run(loaded(name, saved(model)), given), run(model, given))
    assert len(made(name)[0].get_input_embeddings().weight) == 96  # it was a copy that grew


def the_table_shrinks(name):
    assert len(fresh(name)[0].resize_token_embeddings(90).weight) == 90


def the_table_is_an_embedding(name):
    assert isinstance(made(name)[0].get_input_embeddings(), nn.Embedding), "no nn.Embedding"


def every_parameter_is_trained(name):
    model, given = fresh(name)
    found = []
    for reentrant in (None, True, False):
        if reentrant is not None:
            model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        model.zero_grad()
        model(**given).loss.backward()
        found.append({key: param.grad for key, param in model.named_parameters()})
        same(found[-1], found[0])
    assert all(grad.isfinite().all() for grad in found[0].values())
    model.requires_grad_(False).enable_input_require_grads()
    assert model(**given).loss.requires_grad


def other_dtypes(name):
    model, given = made(name)
    want = run(model, given)[0]
    for dtype in (torch.bfloat16, torch.float64) + (torch.float16,) * ("T5" not in name):
        cast = fresh(name)[0].to(dtype)
        more = {key: x.to(dtype) for key, x in given.items() if key == "pixel_values"}
        for again in (loaded(name, dtype=dtype), loaded(name, saved(cast)), cast):
            exactly(again.state_dict(), cast.state_dict())
            found = run(again, given | more)[0]
            assert_close(found, want, rtol=0.05, atol=0.05, check_dtype=False)
            gates = {id(gate) for layer in tensor_trains(again).values() for gate in layer.gates}
            wide = torch.promote_types(dtype, torch.float32)
            for param in again.parameters():
                assert param.dtype == (wide if id(param) in gates else dtype)


def answers_do_not_depend_on_how_they_are_asked(name):
    model, given = loaded(name, attn_implementation="eager"), made(name)[1]
    want = run(*made(name))  # by fused attention
    asked = {"output_hidden_states": True, "output_attentions": True}
    shown = model(**given, **asked)
    same(run(model, given, return_dict=False, **asked), tensors(shown))
    for part in (shown, *(x for key, x in shown.items() if "model_output" in key)):
        states = [x for key, x in part.items() if key.endswith("hidden_states")]
        assert all(len(x) == 2 and x[0].shape[-1] == 32 for x in states)
        assert sum(key.endswith("attentions") for key in part) >= len(states)
    one = {key: x[:1] if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    for x, y in zip(want[1:], run(model, one)[1:], strict=True):
        same(x[tuple(map(slice, y.shape))], y)
    for module in model.modules():
        module.chunk_size_feed_forward = 1
    same(run(model, given), want)


def embedded_words_are_taken(name):
    model, given = made(name)
    words = model.get_input_embeddings()(WORDS)
    same(run(model, given, input_ids=None, inputs_embeds=words), run(model, given))


def words_are_generated(name):
    model, again = made(name)[0], loaded(name)

    def generate(model=model, words=WORDS, **options):
        torch.manual_seed(0)
        fixed = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 2, "do_sample": False}
        return model.generate(words, **{**fixed, **options})

    for options in ({}, {"num_beams": 2}, {"do_sample": True}):
        want = generate(**options)
        exactly(generate(use_cache=False, **options), want)
        exactly(generate(again, **options), want)
    exactly(generate(cache_implementation="static"), generate())
    exactly(generate(words=WORDS[:1], prompt_lookup_num_tokens=2), generate(words=WORDS[:1]))
    padded = nn.functional.pad(WORDS, (3, 0))
    left = generate(words=padded, attention_mask=(padded != 0).long())
    exactly(left[:, -4:], generate()[:, -4:])


def is_read_from_disk_as_it_runs(name):
    with tempfile.TemporaryDirectory() as path:
        model = loaded(name, device_map={"": "disk"}, offload_folder=path)
        exactly(run(model, made(name)[1]), run(*made(name)))


def parameters_are_counted(name):
    model, _ = fresh(name)
    next(model.parameters()).requires_grad_(False)
    tables = nn.ModuleList(m for m in model.modules() if isinstance(m, (TTTable, nn.Embedding)))
    count = lambda params, only: sum(p.numel() for p in params if p.requires_grad or not only)  # noqa: E731
    for only in (False, True):
        whole, apart = count(model.parameters(), only), count(tables.parameters(), only)
        assert model.num_parameters(only) == whole
        assert model.num_parameters(only, exclude_embeddings=True) == whole - apart


def other_sizes_are_drawn(name):
    model, given = made(name)
    keys = "vocab_size", "projection_dim", "num_labels"
    size = {next(key for key in keys if hasattr(model.config, key)): 99}
    load = functools.partial(type(model).from_pretrained, folder(name), **size)
    run(load(ignore_mismatched_sizes=True), given)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load()


def answers_stay_when_it_is_served(name):
    model, given = made(name)
    dense = fresh(f"{name.split(',')[0]}, dense")[0]
    dense.load_state_dict(comera.densify_(fresh(name)[0]).state_dict())
    served = [comera.densify_(fresh(name)[0]), loaded(name).dequantize(), dense]
    served += [change(fresh(name)[0]) for change in (comera.to_plain_, comera.freeze_)]
    for each in served:
        same(run(each, given), run(model, given))
        exactly(run(loaded(name, path := saved(each)), given), run(each, given))
        if each not in served[3:]:
            assert "quantization_config" not in Path(path, "config.json").read_text()
        if model.can_generate():
            words = (m.generate(WORDS, max_new_tokens=3, do_sample=False) for m in (each, model))
            exactly(*words)


def is_exported_and_compiled(name):
    torch._dynamo.reset()
    model, given = fresh(name)
    program = torch.export.export(model, (), given, strict=False).module()
    same(tensors(program(**given)), run(model, given))
    ways = model, torch.compile(model, backend="eager")
    same(*(torch.autograd.grad(way(**given).loss, [*model.parameters()]) for way in ways))


OF_WORDS = (
    what_is_tied_stays_tied, the_table_grows, the_table_shrinks, the_table_is_an_embedding,
    embedded_words_are_taken,
)  # fmt: skip
NO_WORDS = "no attribute|not auto.handled|no nn.Embedding|Expected 3 but got 8"
SHARED = "rows share their cores"
CANNOT = [
    *(("ViT|CLIP", each, NO_WORDS, "transformers knows no table of words") for each in OF_WORDS),
    ("BERT|ViT|CLIP", words_are_generated, "no attribute 'generate'", "it generates nothing"),
    ("Mixtral, dense", other_dtypes, "matrix, got Double", "torch's grouped product is narrow"),
    (".*TT", the_table_shrinks, SHARED, SHARED),
    (".*dense", answers_stay_when_it_is_served, "need to first quantize", "nothing to undo"),
    (".*TT", the_table_is_an_embedding, "no nn.Embedding", "it holds cores, not a weight"),
    (".*TT", is_read_from_disk_as_it_runs, "preload_module", "accelerate is not told of the class"),
    ("[BLMGT].*TT", other_sizes_are_drawn, r"of size \(99, 32\)", SHARED),
]
SLOW = {is_exported_and_compiled}
REQUIREMENTS = (
    is_saved_copied_and_loaded, what_a_file_lacks_is_drawn, base_and_head_share_folders, *OF_WORDS,
    every_parameter_is_trained, other_dtypes, answers_do_not_depend_on_how_they_are_asked,
    words_are_generated, is_read_from_disk_as_it_runs, parameters_are_counted,
    other_sizes_are_drawn, answers_stay_when_it_is_served, is_exported_and_compiled,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@table(ROWS, REQUIREMENTS, SLOW, fast=("GPT2, TT",))
def test_families(name, requirement):
    conforms(name, requirement, CANNOT)
