"""Mixtures of experts of transformers, whose matrices are parts of one parameter."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import comera
from comera.nn import forms
from comera.nn.forms import SplitExperts, is_fused
from tests.integrations.tiny import hf, transformers

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
WORDS = torch.arange(24).reshape(2, 12)
ONLY = comera.TTConfig(rank=4, order=2, init="orthogonal", target_modules=r".*\.experts\..*")


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def qwen():
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        **COMMON, intermediate_size=48, moe_intermediate_size=24, num_experts=4,
        shared_expert_intermediate_size=24, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config)


def gpt_oss():
    """Turned matrices, biases, and a gate that reads every other column."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **COMMON, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, head_dim=16
    )
    model = transformers.GptOssForCausalLM(config)
    for name, param in model.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(param, std=0.1)
    return model


MODELS = {"mixtral": mixtral, "qwen": qwen, "gpt_oss": gpt_oss}
each = pytest.mark.parametrize("name", MODELS)


def experts_of(model):
    """The module of experts by its name; there is one."""
    return next(
        (name, module)
        for name, module in model.named_modules()
        if is_fused(module) or isinstance(module, SplitExperts)
    )


def routed(dtype=torch.float64, width=32):
    """States, and which experts see them with what weight; no state goes to the first expert."""
    torch.manual_seed(1)
    states = torch.randn(9, width, dtype=dtype, requires_grad=True)
    index = torch.stack([1 + torch.randperm(3)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, dtype=dtype, requires_grad=True)
    return states, index, weights


def test_experts_may_be_blocks():
    config = comera.TTConfig(
        linear_format="btt", rank=1, init="orthogonal", target_modules=ONLY.target_modules
    )
    model = comera.tensorize_(mixtral(), config).eval()
    assert sum(isinstance(layer, comera.BTTLinear) for layer in model.modules()) == 8
    want = model(WORDS).logits
    torch.testing.assert_close(comera.densify_(model)(WORDS).logits, want, rtol=1e-4, atol=1e-5)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_the_dense_experts(name, dtype):
    """The dense experts are given the weights that the cores stand for, as functions of them.

    Products are grouped in float32 only.
    """
    model = comera.tensorize_(MODELS[name]().to(dtype), ONLY)
    _, split = experts_of(model)
    assert all(type(k) is comera.TTLinear for k in (*split.up, *split.down))
    states, index, weights = routed(dtype)
    found = split(states, index, weights)
    asked = [states, weights, *split.parameters()]
    wanted_of = torch.randn_like(found)
    gradients = torch.autograd.grad((found * wanted_of).sum(), asked)

    twin = copy.deepcopy(split).eval()
    dense = comera.densify_(nn.Sequential(twin))[0]
    assert type(dense).__name__.endswith("Experts")
    assert not isinstance(dense, SplitExperts)
    held = {}
    for key, layers in ((next(iter(dense._parameters)), split.up), ("down_proj", split.down)):
        stacked = torch.stack([layer.dense_weight() for layer in layers])
        held[key] = stacked.transpose(1, 2) if dense.is_transposed else stacked
        if dense.has_bias:
            held[f"{key}_bias"] = torch.stack([layer.bias for layer in layers])
    assert held.keys() == dict(dense.named_parameters()).keys()
    dense.config._experts_implementation = "eager"
    wanted = torch.func.functional_call(dense, held, (states, index, weights))
    torch.testing.assert_close(found, wanted)
    expected = torch.autograd.grad((wanted * wanted_of).sum(), asked)
    for mine, theirs in zip(gradients, expected, strict=True):
        rounding = {torch.float32: 2e-5, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=rounding)
    with torch.no_grad():  # experts that nobody asks are passed over
        torch.testing.assert_close(split(states, index, weights), wanted)
        index[:, 1], none = -1, torch.full_like(index, split.num_experts)  # these are no expert's
        one = split(states, index[:, :1], weights[:, :1])
        assert torch.equal(split(states, index, weights), one)
        assert not split(states, none, weights).any()


@each
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_do_what_the_loop_does(name, dtype, shared, monkeypatch):
    model = comera.tensorize_(MODELS[name]().to(dtype), ONLY)
    _, split = experts_of(model)
    inputs, calls = routed(dtype), []
    grouped = forms.grouped_linear
    monkeypatch.setattr(forms, "grouped_linear", lambda *a: calls.append(a) or grouped(*a))

    def run(most):
        monkeypatch.setattr(forms, "_GROUPED_TO", most)
        split.zero_grad()
        with comera.BatchedContraction(model) if shared else contextlib.nullcontext():
            found = split(*inputs)
            found.square().sum().backward()
        return found, [param.grad for param in split.parameters()]

    (found, grads), (wanted, expected) = run(1 << 15), run(0)
    assert len(calls) == 2  # up and down, of one run
    near = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(found, wanted, **near)
    torch.testing.assert_close(grads, expected, **near)
    assert not any(grad.any() for grad in (p.grad for p in split.up[0].parameters()))


@pytest.mark.parametrize(("tokens", "grouped"), [(512, True), (1 << 16, False)])
def test_grouped_experts_are_planned_as_such(tokens, grouped):
    """Each operator takes 60 us by the default profile, as long as 64 rows of these layers."""
    _, split = experts_of(comera.tensorize_(mixtral(), ONLY))
    planned = comera.plan(mixtral(), ONLY, tokens=tokens).layers
    assert {each.plan.layer.operators for each in planned} == {0.5 if grouped else 1.25}
    alone = comera.plan(nn.ModuleDict({"experts": split.up}), tokens=tokens).layers
    assert {each.plan.layer.operators for each in alone} == {1.25}


def test_what_grouped_products_would_pass_over_is_seen():
    """Hooks are called; experts of other ranks and widths of no multiple of eight run as well."""
    _, split = experts_of(comera.tensorize_(mixtral(), ONLY))
    inputs, rows = routed(torch.float32), []
    wanted = split(*inputs)
    hook = split.up[1].register_forward_hook(lambda *call: rows.append(len(call[2])))
    torch.testing.assert_close(split(*inputs), wanted)
    assert rows == [int((inputs[1] == 1).sum())]
    hook.remove()
    split.down[1].resize_ranks_([0] * len(split.down[1].ranks))
    assert not torch.equal(split(*inputs), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert split(*inputs).dtype == torch.float32
    padded = comera.TTLinear(40, 40, shape=((7, 6), (7, 6)), rank=3)
    alike, x, ends = nn.ModuleList([padded]), torch.randn(5, 40), torch.tensor([5]).int()
    found = forms.grouped_linear(x, ends, *forms.factors_together(x, alike))
    torch.testing.assert_close(found, padded(x))
    for layer in (*split.up, *split.down):
        layer.resize_ranks_([0] * len(layer.ranks))
    assert not split(*inputs).any()


@each
def test_a_whole_model_comes_back_dense(name, caplog):
    model = MODELS[name]().eval()
    names, dense = set(model.state_dict()), model(WORDS).logits
    svd = comera.TTConfig(rank=32, order=1, init="svd", target_modules=ONLY.target_modules)
    comera.tensorize_(model, svd)
    assert "Experts" not in caplog.text  # of what stays dense
    comera.densify_(model)
    assert set(model.state_dict()) == names
    assert is_fused(experts_of(model)[1])
    assert model(WORDS).logits.shape == dense.shape


def test_ranks_wide_enough_change_nothing():
    model = mixtral().eval()
    _, fused = experts_of(model)
    with torch.no_grad():
        for param in fused.parameters():
            left, _, right = torch.linalg.svd(param, full_matrices=False)
            param.copy_(left[..., :3] @ right[..., :3, :] / 4)
    before = model(WORDS).logits
    svd = comera.TTConfig(rank=3, order=1, init="svd", target_modules=ONLY.target_modules)
    comera.tensorize_(model, svd)
    torch.testing.assert_close(model(WORDS).logits, before, rtol=1e-4, atol=1e-5)


@each
def test_it_is_saved_and_loaded(name, tmp_path):
    model = comera.tensorize_(MODELS[name](), ONLY).eval()
    comera.save_model(model, tmp_path)
    again = comera.load_model(tmp_path, MODELS[name]).eval()
    assert torch.equal(again(WORDS).logits, model(WORDS).logits)
    with torch.device("meta"):
        bare = MODELS[name]()
    bare.model.rotary_emb = model.model.rotary_emb
    again = comera.load_model(tmp_path, bare).eval()
    assert torch.equal(again(WORDS).logits, model(WORDS).logits)


@pytest.mark.parametrize("name", ["mixtral", "qwen"])
def test_transformers_saves_and_loads_it(name, tmp_path):
    model = hf.attach_(comera.tensorize_(MODELS[name](), ONLY)).eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(WORDS).logits, model(WORDS).logits)
    headless = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(experts_of(headless)[1], SplitExperts)
    found, wanted = headless.state_dict(), model.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    dense = transformers.AutoModelForCausalLM.from_config(headless.config)
    dense.save_pretrained(tmp_path)  # under a description of experts alone
    again = type(dense).from_pretrained(tmp_path)
    assert torch.equal(again.eval()(WORDS).logits, dense.eval()(WORDS).logits)


def test_a_frozen_model_computes_the_same_and_is_saved_too(tmp_path):
    model = comera.tensorize_(mixtral(), ONLY).eval()
    wanted = model(WORDS).logits
    with comera.frozen(model), torch.inference_mode():
        torch.testing.assert_close(model(WORDS).logits, wanted)
    comera.freeze_(model)
    comera.save_model(model, tmp_path)
    again = comera.load_model(tmp_path, mixtral).eval()
    model.save_pretrained(tmp_path / "pretrained")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained").eval()
    with torch.inference_mode():
        assert torch.equal(again(WORDS).logits, model(WORDS).logits)
        assert torch.equal(loaded(WORDS).logits, model(WORDS).logits)


def test_experts_that_are_no_target_stay_one_parameter():
    model = mixtral()
    name, fused = experts_of(model)
    params = dict(fused.named_parameters())
    comera.tensorize_(
        model, comera.TTConfig(rank=4, order=2, init="orthogonal", exclude_modules=r".*experts.*")
    )
    assert model.get_submodule(name) is fused
    assert all(fused.get_parameter(key) is param for key, param in params.items())


def test_an_error_leaves_them_as_they_were(tmp_path):
    model = mixtral()
    name, fused = experts_of(model)
    params = dict(fused.named_parameters())
    with pytest.raises(ValueError, match="matches no layer"):
        comera.tensorize_(model, comera.TTConfig(target_modules=["no_such"]))
    comera.save_model(comera.tensorize_(mixtral(), ONLY), tmp_path)
    model.lm_head = nn.Linear(32, 65, bias=False)
    with pytest.raises(ValueError, match="not made as the saved one"):
        comera.load_model(tmp_path, model)
    assert model.get_submodule(name) is fused
    assert all(fused.get_parameter(key) is param for key, param in params.items())


def test_a_model_without_experts_is_refused(tmp_path):
    comera.save_model(comera.tensorize_(mixtral(), ONLY), tmp_path)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, intermediate_size=48))
    with pytest.raises(ValueError, match=r"experts at 'model\.layers\.0\.mlp\.experts'"):
        comera.load_model(tmp_path, plain)


def test_some_of_them_may_be_converted():
    model = mixtral()
    _, fused = experts_of(model)
    dense = fused.gate_up_proj.detach().clone()
    only = comera.TTConfig(rank=4, order=2, init="orthogonal", target_modules=["experts.up.1"])
    comera.tensorize_(model, only)
    _, split = experts_of(model)
    assert [type(k) for k in split.up] == [nn.Linear, comera.TTLinear, nn.Linear, nn.Linear]
    weight = split.up[2].weight
    assert torch.equal(weight, dense[2])
    assert weight.untyped_storage().nbytes() == weight.nbytes  # not that of all experts
    comera.densify_(model)
    assert torch.equal(experts_of(model)[1].gate_up_proj[[0, 2, 3]], dense[[0, 2, 3]])


def test_plain_experts_are_exported(caplog):
    model = comera.tensorize_(mixtral().double(), ONLY).eval()
    name, split = experts_of(model)
    states, index, weights = (tensor.detach() for tensor in routed())
    comera.to_plain_(model)
    assert f"the layers of {name} are torch's now" in caplog.text
    assert not any(isinstance(layer, comera.TTLinear) for layer in model.modules())
    with torch.no_grad():
        wanted = split(states, index, weights)
        program = torch.export.export(split, (states, index, weights))
    other = 1 + (index % 3)  # other experts of other numbers of states
    torch.testing.assert_close(program.module()(states, index, weights), wanted)
    torch.testing.assert_close(
        program.module()(states, other, weights), split(states, other, weights)
    )
