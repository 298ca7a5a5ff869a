"""Layers of other classes that are torch layers in another form: converted, saved, and back."""

import copy

import pytest
import torch
from torch import nn

import comera
from comera.nn import forms
from tests.peers import peer


class Turned(nn.Module):
    """``y = x W + b`` with a factor that a constructor sets."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        return x @ self.weight + self.bias


def to_torch(turned):
    linear = nn.Linear(*turned.weight.shape, device="meta")
    linear.weight = nn.Parameter(turned.weight.detach().T, turned.weight.requires_grad)
    linear.bias = turned.bias
    return linear


def from_torch(linear):
    turned = Turned(linear.in_features, linear.out_features)
    turned.weight = nn.Parameter(linear.weight.detach().T.contiguous())
    turned.bias = linear.bias
    return turned


class Known(Turned):
    """The same, registered."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(forms, "_FORMS", dict(forms._FORMS))
    comera.register_layer(Turned, to_torch, from_torch)


def model():
    torch.manual_seed(0)
    return nn.Sequential(Turned(32, 64), nn.Tanh(), Turned(64, 32))


def test_it_is_converted_to_what_it_computes_and_back():
    net, x = model(), torch.randn(5, 32)
    before = net(x)
    comera.tensorize_(net, comera.TTConfig(rank=16, order=1, init="svd", target_modules=["0"]))
    assert type(net[0]) is comera.TTLinear
    assert (net[0].in_features, net[0].out_features) == (32, 64)
    assert type(net[2]) is Turned
    net[0].weight = to_torch(model()[0]).weight @ torch.eye(32)  # as near as rank 16 comes
    small = net(x)
    comera.densify_(net)
    assert type(net[0]) is Turned
    torch.testing.assert_close(net(x), small)
    assert not torch.equal(small, before)


def test_at_full_rank_nothing_changes():
    net, x = nn.Sequential(Turned(32, 64)), torch.randn(5, 32)
    low = torch.randn(32, 4) @ torch.randn(4, 64)
    net[0].weight = nn.Parameter(low)
    before, bias = net(x), net[0].bias
    comera.tensorize_(
        net, comera.TTConfig(rank=4, order=1, init="svd", target_modules="all-linear")
    )
    torch.testing.assert_close(net(x), before, atol=1e-4, rtol=1e-4)
    assert net[0].bias is bias


def test_what_is_frozen_stays_and_meta_stays_meta(caplog):
    net = model()
    net[0].weight.requires_grad_(False)
    comera.tensorize_(net, comera.TTConfig(rank=4))
    assert type(net[0]) is Turned
    assert "frozen" in caplog.text
    with torch.device("meta"):
        net = model()
    comera.tensorize_(net, comera.TTConfig(rank=4))
    assert all(param.is_meta for param in net.parameters())


def test_it_is_saved_with_what_it_stands_for(tmp_path):
    net, x = model(), torch.randn(5, 32)
    comera.tensorize_(net, comera.TTConfig(rank=4))
    comera.save_model(net, tmp_path)
    again = comera.load_model(tmp_path, model)
    assert torch.equal(again(x), net(x))
    assert type(comera.densify_(again)[2]) is Turned


def test_a_form_that_is_not_known_here_is_named(monkeypatch):
    net = model()
    comera.tensorize_(net, comera.TTConfig(rank=4))
    monkeypatch.setattr(forms, "_FORMS", {})
    with pytest.raises(ValueError, match=r"stands for a tests\.nn\.test_forms\.Turned"):
        comera.densify_(net)


def test_a_class_derived_from_it_is_another_one():
    net = nn.Sequential(Known(32, 64), nn.Linear(64, 64))
    comera.tensorize_(net, comera.TTConfig(rank=4))
    assert type(net[0]) is Known


@pytest.mark.parametrize("given", [(Turned(2, 2), to_torch, from_torch), (Turned, 1, from_torch)])
def test_what_is_no_class_or_function_is_refused(given):
    with pytest.raises(TypeError, match="must be"):
        comera.register_layer(*given)


@torch.no_grad()
@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_a_table_that_scales_its_output_scales_in_every_form(scale, tmp_path):
    kind = peer("transformers.models.gemma3.modeling_gemma3").Gemma3TextScaledWordEmbedding
    table, x = kind(60, 64, 0, embed_scale=scale), torch.randint(0, 60, (7,))
    config = comera.TTConfig(embedding_rank=4, embedding_order=2, init="svd")
    assert comera.plan(nn.Sequential(table), config).layers
    model = comera.tensorize_(nn.Sequential(copy.deepcopy(table)), config)
    table.weight.copy_(model[0].weight)
    for change in (comera.densify_, comera.to_plain_, comera.freeze_, lambda same: same):
        changed = change(copy.deepcopy(model)).eval()
        torch.testing.assert_close(changed(x), table(x))
        if change is not comera.to_plain_:
            folder = tmp_path / change.__name__
            comera.save_model(changed, folder)
            again = comera.load_model(folder, lambda: nn.Sequential(kind(60, 64, 0, scale)))
            torch.testing.assert_close(again.eval()(x), table(x))
    narrow = comera.tensorize_(kind(60, 64, 0, 33.94).bfloat16(), config)
    assert narrow.output_scale == 34  # as the weight's dtype holds it
    with pytest.raises(TypeError, match=r"nn\.Embedding is needed, not Gemma3"):
        comera.TTEmbedding.from_embedding(table, rank=4)
    with pytest.raises(ValueError, match="ScaledWordEmbedding is not among what it compresses"):
        comera.sensitivity(nn.Sequential(table, nn.Tanh()), [x], target_modules="all")


def test_a_table_that_does_more_than_scale_stays_dense(caplog):
    kind = peer("transformers.models.t5gemma2.modeling_t5gemma2").T5Gemma2TextScaledWordEmbedding
    model = nn.Sequential(kind(60, 64, 0, 8.0, eoi_token_index=5), nn.Linear(64, 64))
    comera.tensorize_(model, comera.TTConfig(rank=2, init="orthogonal"))
    assert type(model[0]) is kind
    assert "leaves 0 dense: a subclass may do more than its torch layer" in caplog.text


def falcon():
    modeling = peer("transformers.models.falcon.modeling_falcon")
    return modeling.FalconLinear(32, 64), modeling.FalconLinear(64, 32, bias=False)


def geometric():
    dense = pytest.importorskip("torch_geometric.nn.dense.linear")
    return dense.Linear(32, 64), dense.Linear(64, 32, bias=False)


@pytest.mark.parametrize("layers", [falcon, geometric])
def test_classes_of_their_own_that_compute_what_a_linear_layer_does(layers, caplog):
    torch.manual_seed(0)
    net, x = nn.Sequential(*layers()), torch.randn(5, 32)
    for name, param in net.named_parameters():
        nn.init.normal_(param, 0.1 * name.endswith("bias"), 0.2)
    kinds, want = [type(layer) for layer in net], net(x)
    comera.tensorize_(net, comera.TTConfig(rank=12, order=1, init="svd", tokens=1 << 16))
    assert [type(layer) for layer in net] == [comera.TTLinear] * 2
    got = net(x)
    comera.densify_(net)
    assert [type(layer) for layer in net] == kinds
    torch.testing.assert_close(net(x), got)
    whole = comera.tensorize_(net, comera.TTConfig(rank=32, order=1, init="svd", min_size=0))
    torch.testing.assert_close(whole(x), got, atol=1e-4, rtol=1e-4)
    assert want.shape == got.shape


def test_a_layer_that_does_not_know_its_width_stays():
    dense = pytest.importorskip("torch_geometric.nn.dense.linear")
    net = nn.Sequential(dense.Linear(-1, 64), nn.Linear(64, 64))
    comera.tensorize_(net, comera.TTConfig(rank=4, init="orthogonal", tokens=1 << 16))
    assert type(net[0]) is dense.Linear
    assert type(net[1]) is comera.TTLinear
