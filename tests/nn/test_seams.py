"""Optimizers, checkpoints, copies and folders around a converted layer."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import comera
from tests.peers import peer
from tests.states import assert_equal


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


CONFIG = comera.TTConfig(rank=4, init="orthogonal", tokens=65536)


class Agent(nn.Module):
    """A model that has its optimizer as an attribute, as the policies of stable-baselines3."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.other = nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2)
        self.optimizers = [torch.optim.SGD(self.other.parameters(), 1e-2)]

    def forward(self, x):
        return self.net(x)


GONE = "optimizer holds parameters that are gone, and none of those in their place: build it anew"


def to_plain(agent):
    comera.tensorize_(agent, CONFIG)
    agent.optimizer = torch.optim.Adam(agent.net.parameters(), 1e-2)
    return comera.to_plain_


def densify(agent):
    to_plain(agent)
    return comera.densify_


def tensorize(agent):
    return lambda agent: comera.tensorize_(agent, CONFIG)


def compress(agent):
    batches = [torch.randn(32, 64) for _ in range(3)]
    settings = {"budget": 0.5, "loss_fn": lambda m, b: m(b).square().mean()}
    return lambda agent: comera.compress_(agent, batches, exclude_modules=["other"], **settings)


@pytest.mark.parametrize("prepare", [tensorize, densify, to_plain, compress])
@pytest.mark.parametrize("inside", [False, True], ids=["the agent", "a parent"])
def test_an_optimizer_that_holds_what_is_gone_is_named(prepare, inside, caplog):
    agent = Agent()
    change = prepare(agent)
    caplog.clear()
    if inside and prepare is not compress:
        change(nn.ModuleDict({"policy": agent}))
        assert caplog.text.count(f"policy.{GONE}") == 1
    else:
        change(agent)
        assert caplog.text.count(f" {GONE}") == 1
    assert "optimizers" not in caplog.text
    agent.optimizer = torch.optim.Adam(agent.net.parameters(), 1e-2)
    caplog.clear()
    if prepare is densify:
        comera.tensorize_(agent.other, comera.TTConfig(rank=1, init="orthogonal", tokens=65536))
        assert GONE not in caplog.text


def loss_fn(model, batch):
    return model(batch).square().mean()


def test_an_optimizer_made_before_densify(caplog):
    model = comera.tensorize_(net(), CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    comera.densify_(model)
    comera.TrainStep(model, loss_fn, optimizer)
    assert "2 of 4 trainable parameters never move" in caplog.text
    assert "0.weight, 2.weight" in caplog.text


def test_an_optimizer_made_between_two_conversions(caplog):
    model = net()
    comera.tensorize_(model[0], comera.TTConfig(rank=4, init="orthogonal", tokens=65536))
    parts = nn.Sequential(nn.Sequential(model[0]), nn.Sequential(model[2]))
    comera.tensorize_(parts[0], CONFIG)
    optimizer = torch.optim.AdamW(parts.parameters(), 1e-2)
    comera.tensorize_(parts[1], CONFIG)
    comera.TrainStep(parts, loss_fn, optimizer)
    assert "never move, as the optimizer does not hold them: 1.0." in caplog.text


def test_an_optimizer_of_all_that_trains_is_fine(caplog):
    model = comera.tensorize_(net(), CONFIG)
    model[0].bias.requires_grad_(False)
    kept = [p for p in model.parameters() if p.requires_grad]
    comera.TrainStep(model, loss_fn, torch.optim.AdamW(kept, 1e-2))
    ranks = comera.TwoStage(model, target=0.5, early_steps=3, late_steps=3)
    comera.TrainStep(model, loss_fn, torch.optim.AdamW(comera.param_groups(model, 1e-2)), ranks)
    assert "never move" not in caplog.text


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_dense_checkpoint_says_how_it_is_loaded(linear_format, strict, caplog):
    dense, table = net(), nn.Embedding(100, 64)
    whole = nn.Sequential(table, *dense)
    config = comera.TTConfig(
        rank=2, init="orthogonal", target_modules="all", linear_format=linear_format,
        embedding_rank=4, tokens=65536,
    )  # fmt: skip
    saved = {key: value.clone() for key, value in whole.state_dict().items()}
    model = comera.tensorize_(whole, config)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if strict:
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(saved)
    else:
        model.load_state_dict(saved, strict=False)
    assert caplog.text.count('Load it before tensorize_(init="svd")') == 1
    biases = {key for key in saved if key in before}
    for key, value in model.state_dict().items():
        assert_equal(value, saved[key] if key in biases else before[key])


@pytest.mark.parametrize("init", ["orthogonal", "normal"])
def test_a_copy_stays_a_copy(init):
    model = nn.ModuleDict({"online": net(), "other": net()})
    model["target"] = copy.deepcopy(model["online"])
    nn.init.normal_(model["other"][0].weight)
    nn.init.zeros_(model["online"][2].weight)
    nn.init.zeros_(model["other"][2].weight)
    nn.init.zeros_(model["target"][2].weight)
    config = comera.TTConfig(rank=4, init=init, tokens=65536)
    comera.tensorize_(model, config)
    x = torch.randn(5, 64)
    first = {key: model[key][0](x) for key in model}
    assert torch.equal(first["online"], first["target"])
    assert not torch.equal(first["online"], first["other"])
    last = [model[key][2].cores[0] for key in model]
    assert not torch.equal(last[0], last[1])  # constants tell nothing


def test_layers_of_an_encoder_are_drawn_one_by_one():
    part = nn.TransformerEncoderLayer(64, 4, 128)
    model = nn.TransformerEncoder(part, 2, enable_nested_tensor=False)
    comera.tensorize_(model, CONFIG)
    first, second = (layer.linear1.cores[0] for layer in model.layers)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("change", [comera.to_plain_, comera.densify_, comera.freeze_])
def test_under_a_default_device_of_accelerate(change):
    accelerate = peer("accelerate")
    model = nn.Sequential(nn.Embedding(100, 64), *net(), nn.Linear(64, 8, bias=False))
    config = comera.TTConfig(rank=2, init="orthogonal", target_modules="all", embedding_rank=4)
    comera.tensorize_(model, config)
    x = torch.randint(100, (5,))
    want = model(x)
    with accelerate.init_on_device(torch.device("cpu")):
        model = change(model)
    torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-4)


def test_a_folder_that_loads_at_random_is_named(caplog, tmp_path):
    hub = pytest.importorskip("huggingface_hub")

    class Model(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, width=64):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

    model = comera.tensorize_(Model(), CONFIG)
    said = "Model.save_pretrained writes a folder that from_pretrained loads as a dense model"
    assert caplog.text.count(said) == 1
    x = torch.randn(3, 64)
    comera.densify_(model).save_pretrained(tmp_path)
    torch.testing.assert_close(Model.from_pretrained(tmp_path)(x), model(x))


def test_a_bag_leaves_its_padding_out_with_weights_too():
    torch.manual_seed(0)
    bag = comera.TTEmbeddingBag(60, 16, rank=4, padding_idx=3, mode="sum")
    dense = bag.to_dense()
    index = torch.tensor([[3, 5, 7], [3, 3, 9], [1, 2, 4]])
    weights = torch.rand(3, 3, requires_grad=True)
    got, want = (each(index, None, weights) for each in (bag, dense))
    torch.testing.assert_close(got, want)
    wide = torch.randn_like(got)
    of_ours, of_torch = (
        torch.autograd.grad(y, weights, wide, allow_unused=True)[0] for y in (got, want)
    )
    real = index != 3
    torch.testing.assert_close(of_ours[real], of_torch[real])


def test_a_layer_made_dense_has_a_bias_of_its_own():
    layer = comera.TTLinear(64, 64, rank=4)
    dense = layer.to_dense()
    with torch.no_grad():
        dense.bias.add_(1)
    assert not torch.equal(layer.bias, dense.bias)


def test_galore_adafactor_moves_a_parameter_of_zeros():
    weight = nn.Parameter(torch.zeros(16, 24))
    optimizer = comera.GaLore([{"params": [weight], "rank": 4}], torch.optim.Adafactor, lr=1e-2)
    weight.grad = torch.randn(16, 24)
    optimizer.step()
    assert weight.abs().max() > 0


@pytest.mark.parametrize("config", [comera.TTConfig(rank=8), comera.TTConfig(linear_format="btt")])
@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_teacher_written_into_the_parameters_is_another_model(config, teacher_first):
    """Packages of moving averages write it through ``.data``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    comera.tensorize_(model, dataclasses.replace(config, init="orthogonal"))
    x, params = torch.randn(64, 64), list(model.parameters())

    def teacher():
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.data.mul_(0.9)
            found, want = model(x), comera.densify_(copy.deepcopy(model))(x)
            for param, was in zip(params, kept, strict=True):
                param.data.copy_(was)
        torch.testing.assert_close(found, want)

    want = comera.densify_(copy.deepcopy(model))(x)
    with comera.BatchedContraction(model):
        if teacher_first:
            teacher()
        found = model(x)
        teacher()
        torch.testing.assert_close(found, want)
        found.sum().backward()
    assert all(param.grad is not None for param in params)


def test_parameters_that_are_replaced_through_data_are_seen_to():
    model = comera.tensorize_(nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(rank=8))
    x = torch.randn(3, 64)
    with comera.BatchedContraction(model):
        before = model(x)
        for param in model.parameters():
            param.data = 0.5 * param.data
        assert not torch.allclose(model(x), before)
        torch.testing.assert_close(model(x), comera.densify_(copy.deepcopy(model))(x))


def test_a_second_backward_in_a_step_says_what_to_do():
    model = comera.tensorize_(
        nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(rank=2, linear_format="btt")
    )

    def loss_fn(model, x):
        near = x.clone().requires_grad_()
        model(near).square().mean().backward()
        return model(x + 0.1 * near.grad.sign()).square().mean()

    step = comera.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="a second time") as raised:
        step(torch.randn(4, 64))
    assert "torch.autograd.grad(loss, inputs)" in raised.value.__notes__[0]


@pytest.mark.parametrize("serve", [None, comera.to_plain_, comera.freeze_])
def test_a_convolution_keeps_its_settings(serve):
    """Which others read, as the blocks of Fourier neural operators do."""
    model = nn.Sequential(nn.Conv2d(64, 128, 1))
    settings = {k: v for k, v in vars(model[0]).items() if k[0] != "_" and k != "training"}
    assert settings.keys() > {"in_channels", "out_channels", "kernel_size", "groups"}
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    if serve is not None:
        serve(model)
    assert {name: getattr(model[0], name) for name in settings} == settings
    if serve is None:
        assert {k: getattr(comera.densify_(model)[0], k) for k in settings} == settings


def test_served_tables_refuse_what_is_no_index():
    for serve in (comera.to_plain_, comera.freeze_):
        table = serve(comera.TTEmbedding(6000, 64, rank=4))
        assert (table.max_norm, table.sparse) == (None, False)
        for wrong in (torch.tensor([1.7]), torch.tensor([True])):
            with pytest.raises(TypeError, match="indices are"):
                table(wrong)
