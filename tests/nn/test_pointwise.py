"""1 x 1 convolutions: a linear layer at every position, converted, run, saved and back."""

import pytest
import torch
from torch import nn

import comera
from comera.nn import forms
from comera.nn.linear import TTPointwise
from comera.serving.layers import ThinLinear

CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
each = pytest.mark.parametrize("conv", CONVS)
SVD = comera.TTConfig(rank=8, order=1, init="svd", target_modules="all-linear")
DRAWN = comera.TTConfig(rank=8, init="orthogonal", target_modules="all-linear")


def model(conv=nn.Conv2d):
    torch.manual_seed(0)
    return nn.Sequential(conv(48, 64, 1), nn.GELU(), conv(64, 32, 1, bias=False)).double()


def pictures(conv=nn.Conv2d, batch=(3,)):
    spatial = range(4, 4 + CONVS.index(conv) + 1)
    return torch.randn(*batch, 48, *spatial, dtype=torch.float64)


def dense_twin(layer):
    """The convolution of the dense weight, which is what the layer is to compute."""
    conv = CONVS[-2 - layer.feature_dim](layer.in_features, layer.out_features, 1).double()
    conv.weight = nn.Parameter(layer.dense_weight().detach().reshape_as(conv.weight))
    conv.bias = layer.bias
    return conv


@each
@pytest.mark.parametrize("batch", [(3,), ()])
def test_it_computes_what_the_convolution_of_its_weight_does(conv, batch):
    net, x = comera.tensorize_(model(conv), DRAWN), pictures(conv, batch).requires_grad_()
    assert [type(net[k]) for k in (0, 2)] == [TTPointwise, TTPointwise]
    y = net[0](x)
    wanted = dense_twin(net[0])(x)
    assert y.shape == wanted.shape
    assert y.is_contiguous()
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), x)[0],
        torch.autograd.grad(wanted.square().sum(), x)[0],
    )


def test_gradients_are_those_of_finite_differences():
    layer = TTPointwise(6, 4, rank=2, dtype=torch.float64, feature_dim=-3)
    x = torch.randn(2, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    params = dict(layer.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(params, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *params.values()), check_batched_grad=False)


def test_channels_last_stays_channels_last():
    net, x = comera.tensorize_(model(), DRAWN), pictures()
    y = net[0](x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, net[0](x))


def test_a_weight_of_low_rank_is_kept_and_comes_back():
    net, x = model(), pictures()
    for k in (0, 2):
        out, wide = net[k].weight.shape[:2]
        low = torch.randn(out, 8, dtype=torch.float64) @ torch.randn(8, wide, dtype=torch.float64)
        net[k].weight = nn.Parameter(low.reshape_as(net[k].weight))
    before, bias, names = net(x), net[0].bias, set(net.state_dict())
    comera.tensorize_(net, SVD)
    assert net[0].bias is bias
    torch.testing.assert_close(net(x), before)
    comera.densify_(net)
    assert [type(layer) for layer in net] == [nn.Conv2d, nn.GELU, nn.Conv2d]
    assert set(net.state_dict()) == names
    torch.testing.assert_close(net(x), before)


def test_it_is_trained_through_a_cut_of_its_ranks():
    net, x = comera.tensorize_(model(), DRAWN), pictures()
    wanted = torch.randn_like(net(x))
    optimizer = torch.optim.AdamW(comera.param_groups(net, 1e-2, gate_lr=0.3))
    ranks = comera.TwoStage(net, 0.5, early_steps=3, late_steps=6)
    first = None
    while not ranks.due:
        loss = (net(x) - wanted).square().mean()
        first = loss.item() if first is None else first
        ranks.objective(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        ranks.step(loss.detach(), optimizer)
    ranks.finish_(optimizer)
    assert (net(x) - wanted).square().mean() < first
    assert sum(core.numel() for core in net[0].cores) < sum(
        core.numel() for core in comera.tensorize_(model(), DRAWN)[0].cores
    )


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d])
def test_it_is_saved_frozen_and_made_plain(conv, tmp_path):
    net, x = comera.tensorize_(model(conv), DRAWN).eval(), pictures(conv)
    wanted = net(x)
    comera.save_model(net, tmp_path / "trained")
    again = comera.load_model(tmp_path / "trained", lambda: model(conv))
    assert torch.equal(again(x), wanted)

    comera.freeze_(net, batch=1)
    torch.testing.assert_close(net(x), wanted)
    comera.save_model(net, tmp_path / "frozen")
    frozen = comera.load_model(tmp_path / "frozen", lambda: model(conv)).eval()
    assert torch.equal(frozen(x), net(x))

    for compressed in (again, frozen):
        comera.to_plain_(compressed)
        kinds = {type(layer) for layer in compressed.modules()}
        assert kinds | {ThinLinear} == {nn.Sequential, ThinLinear, conv, nn.GELU}
        torch.testing.assert_close(compressed(x), wanted)
        program = torch.export.export(compressed, (x,))
        torch.testing.assert_close(program.module()(x), wanted)


def test_it_compiles_to_the_same():
    net, x = comera.tensorize_(model(), DRAWN), pictures()
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))


@pytest.mark.parametrize(
    "setting",
    [{"kernel_size": 3}, {"kernel_size": 1, "stride": 2}, {"kernel_size": 1, "groups": 2},
     {"kernel_size": 1, "padding": 1}],
    ids=str,
)  # fmt: skip
def test_other_convolutions_stay_and_are_named(setting, caplog):
    net = nn.Sequential(nn.Conv2d(48, 64, **setting), nn.Conv2d(64, 48, 1, padding="same"))
    comera.tensorize_(net, comera.TTConfig(rank=4, init="orthogonal"))
    assert type(net[0]) is nn.Conv2d
    assert type(net[1]) is TTPointwise
    assert "leaves 1 Conv2d dense" in caplog.text


def test_another_kind_of_convolution_is_no_place_for_it(tmp_path):
    net = comera.tensorize_(model(), DRAWN)
    comera.save_model(net, tmp_path)
    other = model()
    other[0] = nn.Conv2d(48, 64, 1, stride=2).double()
    with pytest.raises(ValueError, match="0 is a TTPointwise of size"):
        comera.load_model(tmp_path, other)


def test_a_layer_of_ones_own_may_have_its_features_anywhere(monkeypatch):
    class Mixer(nn.Module):
        """Mixes the tokens of ``(N, T, C)``, if it is told to."""

        def __init__(self, tokens, on=True):
            super().__init__()
            self.weight, self.on = nn.Parameter(torch.randn(tokens, tokens)), on

        def forward(self, x):
            return self.weight @ x if self.on else x

    def to_torch(mixer):
        linear = nn.Linear(*mixer.weight.shape, bias=False, device="meta")
        linear.weight = mixer.weight
        return linear

    def from_torch(linear):
        mixer = Mixer(linear.in_features)
        mixer.weight = linear.weight
        return mixer

    monkeypatch.setattr(forms, "_FORMS", dict(forms._FORMS))
    comera.register_layer(Mixer, to_torch, from_torch, feature_dim=-2, fits=lambda m: m.on)
    net, x = nn.Sequential(Mixer(32), Mixer(32, on=False)), torch.randn(2, 32, 5)
    comera.tensorize_(net, DRAWN)
    assert [type(layer) for layer in net] == [TTPointwise, Mixer]
    small = net(x)
    comera.densify_(net)
    torch.testing.assert_close(net(x), small, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"feature_dim": 1}, ValueError, "feature_dim=1 must be"),
        ({"feature_dim": -1.5}, ValueError, "feature_dim=-1.5 must be"),
        ({"fits": True}, TypeError, "fits=True must be a function"),
    ],
)
def test_settings_that_are_none_are_refused(given, kind, message):
    with pytest.raises(kind, match=message):
        comera.register_layer(nn.Identity, lambda x: x, lambda x: x, **given)
