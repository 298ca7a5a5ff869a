"""Frozen models compute what compressed ones do, go back, and do not pretend to train."""

import copy
import logging
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import comera
from comera.extras import MissingPackageError
from comera.serving import freeze
from comera.serving.layers import FactoredHead, ThinLinear, table_factors
from tests.mixtures import CONFIGS, ROWS, TIES, draw_mixture
from tests.serving.test_plain import check_same


@pytest.fixture(name="ways", params=["thin", "dense"])
def _ways(request, monkeypatch):
    """Have the measurement say which way is faster."""
    ratio = 0.1 if request.param == "thin" else 10.0
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: ratio)
    return request.param


def small(bias: bool = True) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 96, bias), nn.ReLU(), nn.Linear(96, 64, bias))
    return comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal")).eval()


@settings(max_examples=40, deadline=None)
@given(
    config=CONFIGS,
    tie=TIES,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    ratio=st.sampled_from([0.1, 10.0]),
    data=st.data(),
)
@pytest.mark.slow
def test_any_mixture_can_be_frozen_and_goes_back(config, tie, dtype, ratio, data):
    model = draw_mixture(data, config, tie, dtype)
    indices = torch.arange(ROWS).view(4, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freeze, "time_ratio", lambda *_: ratio)
        check_same(model, comera.freeze_(copy.deepcopy(model)), indices)
        before, made = copy.deepcopy(model), model(indices)
        parts = [id(part) for part in model.modules()]
        with comera.frozen(model) as served:
            check_same(before, served, indices)
    assert [id(part) for part in model.modules()] == parts
    assert repr(model) == repr(before)
    assert torch.equal(model(indices), made)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])


@pytest.mark.parametrize("bias", [False, True])
def test_what_a_layer_becomes(ways, bias):
    model = small(bias)
    dense = copy.deepcopy(model[0]).to_dense()
    served = comera.freeze_(model)
    assert served is model
    layer = served[0]
    if ways == "thin":
        assert [type(part) for part in layer] == [nn.Linear] * 2
        assert layer.rank == 4
    else:
        assert type(layer) is nn.Linear
    torch.testing.assert_close(layer.weight, dense.weight.detach())
    assert (layer.bias is None) == (not bias)
    assert not any(param.requires_grad for param in served.parameters())


def test_a_weight_of_two_layers_refuses_edits_and_one_of_its_own_takes_them(ways):
    layer, x = comera.freeze_(small())[0], torch.randn(2, 64)
    want = layer(x) + x.sum(-1, keepdim=True)
    if ways == "thin":
        with pytest.raises(RuntimeError, match=r"before comera\.freeze_: comera\.densify_"):
            layer.weight.data += 1
    else:
        layer.weight.data += 1
        torch.testing.assert_close(layer(x), want)


def test_pruned_ranks_are_gone(monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: 0.1)
    model = small()
    model[0].gates[model[0].shape.split - 1].data[1:] = 0
    before = copy.deepcopy(model)
    assert comera.freeze_(model)[0].rank == 1
    check_same(before, model, torch.randn(5, 64))


def test_a_smaller_dense_layer_is_taken_without_measuring(monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: pytest.fail("measured"))
    layer = comera.TTLinear(16, 16, rank=9)
    assert type(comera.freeze_(layer)) is nn.Linear


def test_of_equal_sizes_the_dense_layer_is_taken(monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: 0.1)
    layer = comera.TTLinear(16, 16, rank=8, order=1)
    assert sum(core.numel() for core in layer.cores) == 16 * 16
    assert type(comera.freeze_(layer)) is nn.Linear
    table = comera.TTEmbedding(16, 16, rank=8, shape=((4, 4), (4, 4)))
    assert sum(factor.numel() for factor in table_factors(table)) == 16 * 16
    assert type(comera.freeze_(table)) is nn.Embedding


def test_what_was_chosen_is_said(caplog, monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: 10.0)
    with caplog.at_level(logging.INFO, "comera"):
        comera.freeze_(small(), batch=32)
    assert "contracted 2 layers; dense at batch=32, as measured: 0, 2" in caplog.text


def test_layers_of_one_size_are_measured_once(monkeypatch):
    seen = []

    def ratio(one, other, x):
        seen.append(x.shape)
        return 0.1

    monkeypatch.setattr(freeze, "time_ratio", ratio)
    model = nn.Sequential(*(comera.TTLinear(64, 64, rank=4) for _ in range(5)))
    comera.freeze_(model, batch=7)
    assert seen == [(7, 64)]


def test_the_faster_of_two_modules_is_told():
    fast, slow = nn.Identity(), nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    assert freeze.time_ratio(slow, fast, torch.randn(8, 64)) > 2


def test_training_a_frozen_layer_is_refused(ways):
    model = comera.freeze_(small()).train()
    x = torch.randn(2, 64)
    with pytest.raises(RuntimeError, match=r"no cores left to train.*with comera\.frozen\(model\)"):
        model(x)
    with torch.no_grad():
        model(x)
    x.requires_grad_()
    model.eval()(x).sum().backward()
    assert x.grad is not None


def test_a_frozen_model_that_is_loaded_is_not_trained_and_a_plain_one_is(ways, tmp_path):
    dense, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), torch.randn(2, 64)
    folder = comera.save_model(comera.freeze_(small()), tmp_path)
    loaded = comera.load_model(folder, dense).train()
    with pytest.raises(RuntimeError, match="no cores left to train"):
        loaded(x)
    assert not comera.to_plain_(loaded)(x).requires_grad
    assert loaded.training


def test_inside_the_context_a_model_evaluates_and_trains_on_afterwards(ways):
    model = small().train()
    model[1].eval()
    x = torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with comera.frozen(model), torch.no_grad():
            served = model(x)
            assert not model.training
        torch.testing.assert_close(served, model(x).detach())
        model(x).sum().backward()
        optimizer.step()
    assert model.training
    assert not model[1].training


def test_a_context_that_is_left_by_an_error_puts_the_layers_back(ways):
    model = small()
    with pytest.raises(ZeroDivisionError), comera.frozen(model):
        1 / 0  # noqa: B018
    assert type(model[0]) is comera.TTLinear


def test_one_layer_alone(ways):
    layer = comera.TTLinear(64, 96, rank=4)
    x = torch.randn(3, 64)
    with comera.frozen(layer) as served, torch.no_grad():
        assert type(served) is (ThinLinear if ways == "thin" else nn.Linear)
        torch.testing.assert_close(served(x), layer(x))


def test_hooks_stay_with_their_layer(ways):
    model, seen = small(), []
    handle = model[0].register_forward_hook(lambda *_: seen.append("ran"))
    with comera.frozen(model):
        model(torch.randn(2, 64))
    model(torch.randn(2, 64))
    assert seen == ["ran", "ran"]
    handle.remove()
    assert not model[0]._forward_hooks


def test_an_output_layer_reads_the_table_it_is_tied_to(monkeypatch):
    monkeypatch.setattr(freeze, "time_ratio", lambda *_: 0.1)
    model = nn.ModuleDict({"embed": nn.Embedding(300, 64), "head": nn.Linear(64, 300)})
    model["head"].weight = model["embed"].weight
    config = comera.TTConfig(rank=4, tied="share", init="orthogonal")
    dense = comera.tensorize_(model, config)["embed"].dense_weight()
    for ratio in (10.0, 0.1):
        monkeypatch.setattr(freeze, "time_ratio", lambda *_, ratio=ratio: ratio)
        with comera.frozen(model) as served:
            assert type(served["head"]) is (nn.Linear if ratio > 1 else FactoredHead)
            for layer in served.values():
                assert torch.allclose(layer.weight, dense, atol=1e-6)
        assert all(param.requires_grad for param in model.parameters())
    served = comera.freeze_(model)
    assert type(served["head"]) is FactoredHead
    assert served["head"].embedding is served["embed"]


@pytest.mark.parametrize("batch", [0, -3, 2.5, "many", True])
def test_batches_that_are_none(batch):
    with pytest.raises(ValueError, match=r"batch=.* must be (a whole number|at least 1)"):
        comera.freeze_(small(), batch=batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # said while torchao is imported
def test_eight_bits_are_close():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig

    model = small()
    x = torch.randn(4, 64)
    for quantize in ("int8", Int8WeightOnlyConfig()):
        served = comera.freeze_(copy.deepcopy(model), quantize=quantize)
        linears = [part for part in served.modules() if isinstance(part, nn.Linear)]
        assert all(type(part.weight).__module__.startswith("torchao") for part in linears)
        with torch.no_grad():
            off = (served(x) - model(x)).norm() / model(x).norm()
        assert 0 < off < 0.02
    with pytest.raises(ValueError, match=r'quantize=\'int3\' must be "int8" or a configuration'):
        comera.freeze_(small(), quantize="int3")
    with pytest.raises(ValueError, match="only plain tensors can be saved"):
        comera.save_model(served, "unused")


@pytest.mark.filterwarnings("ignore")  # said while torchao is imported
def test_blocks_that_keep_their_bits_are_named(caplog):
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = nn.Sequential(comera.BTTLinear(64, 64), nn.Linear(64, 64))
    served = comera.freeze_(model, quantize="int8")
    assert type(served[1].weight).__module__.startswith("torchao")
    assert "freeze_: quantize='int8' leaves 0 as they are: a BTTLinear" in caplog.text


def test_without_torchao_it_says_what_to_install(monkeypatch):
    for name in ("torchao", "torchao.core.config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"quantize='int8' needs torchao: pip install"):
        comera.freeze_(small(), quantize="int8")
