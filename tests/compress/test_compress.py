import copy
import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.compress.allocate import parse_budget
from comera.nn.linear import TTLinear


def make_model():
    first, second, third = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 5)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


def data(count, seed):
    """Inputs whose directions differ in size a hundred times, labels of a random network."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 24, generator=generator) * torch.logspace(0, -2, 24)
    teach = torch.Generator().manual_seed(7)
    hidden = torch.tanh(x @ torch.randn(24, 32, generator=teach))
    return x, (hidden @ torch.randn(32, 5, generator=teach)).argmax(1)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = make_model()
    x, y = data(4096, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for k in range(400):
        rows = slice(256 * (k % 16), 256 * (k % 16) + 256)
        optimizer.zero_grad()
        loss_fn(model, (x[rows], y[rows])).backward()
        optimizer.step()
    return model


def calibration():
    x, y = data(1024, 2)
    return list(zip(x.split(128), y.split(128), strict=True))


def test_the_loss_rises_by_less_than_half_of_what_a_plain_svd_makes(trained):
    test = data(4096, 3)
    model, plain = copy.deepcopy(trained), copy.deepcopy(trained)
    done = comera.compress_(model, calibration(), budget=0.6, loss_fn=loss_fn)
    assert done.share <= 0.6
    assert done.params == sum(p.numel() for p in model.parameters())
    comera.tensorize_(plain, comera.TTConfig(compression=1.6, order=1, init="svd"))
    assert sum(p.numel() for p in plain.parameters()) >= 0.97 * done.params
    with torch.no_grad():
        dense, ours, theirs = (float(loss_fn(m, test)) for m in (trained, model, plain))
    assert ours - dense < 0.5 * (theirs - dense)


def test_what_it_says_is_what_is_there(trained):
    model = copy.deepcopy(trained)
    done = comera.compress_(model, calibration(), budget=0.5, loss_fn=loss_fn)
    for layer in done.layers:
        module = model.get_submodule(layer.name)
        if layer.rank is None:
            assert type(module) is nn.Linear
            continue
        assert isinstance(module, TTLinear)
        assert module.ranks == (layer.rank,)
        assert layer.params == sum(p.numel() for p in (*module.cores, *module.gates))
    assert "parameters of" in str(done)


def test_layers_keep_bias_mode_dtype_and_what_is_frozen(trained):
    model = copy.deepcopy(trained).double().eval()
    model[2].weight.requires_grad_(False)
    batches = [(x.double(), y) for x, y in calibration()]
    before = model[2].bias.clone()
    comera.compress_(model, batches, budget=0.5, loss_fn=loss_fn, target_modules=["2"])
    layer = model[2]
    assert isinstance(layer, TTLinear)
    assert layer.cores[0].dtype == torch.float64
    assert not layer.training
    assert not any(core.requires_grad for core in layer.cores)
    assert layer.bias.requires_grad
    assert torch.equal(layer.bias, before)


def test_batches_of_hugging_face_need_no_loss_fn(trained):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = copy.deepcopy(trained)

        def forward(self, x, labels=None):
            logits = self.net(x)
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return type("Output", (), {"loss": loss})

    model = Named()
    batches = [{"x": x, "labels": y} for x, y in calibration()]
    assert comera.compress_(model, batches, budget=0.7).share <= 0.7
    with pytest.raises(ValueError, match="gives no loss for a batch with x: add labels"):
        comera.compress_(Named(), [{"x": batches[0]["x"]}], budget=0.7)
    with pytest.raises(ValueError, match="a batch of type tuple needs a loss_fn"):
        comera.compress_(Named(), calibration(), budget=0.7)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False),
        )  # fmt: skip
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embed(x))))


def loss_of_tokens(model, tokens):
    return F.cross_entropy(model(tokens), tokens.roll(1))


def test_tied_weights_are_left_alone():
    model = Tied()
    comera.compress_(model, [torch.randint(0, 50, (40,))], budget=0.95, loss_fn=loss_of_tokens)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.body, TTLinear)


def test_quantized_weights_are_left_alone(trained, caplog):
    with warnings.catch_warnings(action="ignore"):  # said while torchao is imported
        torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = copy.deepcopy(trained)
    torchao.quantize_(model[2], torchao.Int8WeightOnlyConfig())
    comera.compress_(model, calibration(), budget=0.9, loss_fn=loss_fn)
    comera.tensorize_(model, comera.TTConfig(rank=2, init="svd"))
    assert list(map(type, model[::2])) == [TTLinear, nn.Linear, TTLinear]
    for caller in ("compress_", "tensorize_"):
        assert f"{caller} leaves 2 dense: its weight is quantized" in caplog.text


def test_what_stays_dense_is_said_once_by_what_was_called(caplog):
    model, batches = Tied(), [torch.randint(0, 50, (40,))]
    model.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    why = (
        "dense: another module holds the weight; that is 59 % of all parameters",
        "dense: the weight or the bias is made from others, such as by weight_norm, spectral_norm "
        "or prune; that is 21 % of all parameters",
    )

    def said():
        lines = sorted(record.getMessage() for record in caplog.records)
        caplog.clear()
        return lines

    found = comera.sensitivity(model, batches, loss_fn=loss_of_tokens)
    assert said() == [f"sensitivity leaves head {why[0]}", f"sensitivity leaves normed {why[1]}"]
    comera.compress_(copy.deepcopy(model), found, budget=0.95)
    assert not said()
    comera.explore(model, lambda m: 1.0, found, budgets=(0.95,), each_layer=True)
    assert not said()
    comera.compress_(model, batches, budget=0.95, loss_fn=loss_of_tokens)
    assert said() == [f"compress_ leaves head {why[0]}", f"compress_ leaves normed {why[1]}"]


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (1.2, "budget=1.2 must be between 0 and 1"),
        (True, "budget=True must be between 0 and 1"),
        (20_000, "budget=20000 must be .* or the bytes of all parameters with a unit"),
        ("20 mb", "budget='20 mb' must be"),
        ("1GB", "is no less than the .* of all parameters"),
        (70, r"as \"60MB\" or \"60MiB\"; 70 % is budget=0\.7$"),
        ("62.5 %", r"62\.5 % is budget=0\.625$"),
        (100, 'as "60MB" or "60MiB"$'),
    ],
)
def test_a_budget_out_of_reach_changes_nothing(trained, budget, problem):
    model = copy.deepcopy(trained)
    with pytest.raises(ValueError, match=problem):
        comera.compress_(model, calibration(), budget=budget, loss_fn=loss_fn)
    assert all(type(m) is not TTLinear for m in model.modules())


@pytest.mark.parametrize("budget", [0.01, "1kB"])
def test_a_budget_that_is_too_small_is_told_the_smallest(trained, budget):
    found = comera.sensitivity(trained, calibration(), loss_fn=loss_fn)
    with pytest.raises(ValueError, match=f"budget={budget!r}: .* is the smallest") as problem:
        found.choose(budget)
    named = re.search(r'budget="?([\d.]+(kB)?)"? is the smallest', str(problem.value))[1]
    smallest = named if named.endswith("kB") else float(named)
    assert all(layer.rank == 1 for layer in found.choose(smallest))
    with pytest.raises(ValueError, match="is the smallest"):
        found.choose(smallest - 1e-4 if budget == 0.01 else f"{float(named[:-2]) - 0.1:.1f}kB")


def test_a_compiled_model_is_compressed_as_it_would_be_otherwise(trained):
    models = copy.deepcopy(trained), torch.compile(copy.deepcopy(trained), backend="eager")
    models[1](calibration()[0][0])
    done = [comera.compress_(m, calibration(), budget=0.6, loss_fn=loss_fn) for m in models]
    assert [layer.rank for layer in done[0].layers] == [layer.rank for layer in done[1].layers]
    x, _ = data(64, 3)
    torch.testing.assert_close(*(model(x) for model in models))


def test_a_model_that_is_itself_a_layer_is_refused():
    with pytest.raises(ValueError, match="itself a linear layer"):
        comera.compress_(nn.Linear(4, 4), [], budget=0.5, loss_fn=loss_fn)


def test_a_name_that_no_layer_has_is_refused(trained):
    names = [next(name for name, m in trained.named_modules() if type(m) is nn.Linear), "nothing"]
    with pytest.raises(ValueError, match="target_modules entry 'nothing' matches no layer"):
        comera.sensitivity(trained, calibration(), loss_fn=loss_fn, target_modules=names)


def test_a_budget_of_bytes_is_what_the_parameters_take(trained):
    model, half = copy.deepcopy(trained), copy.deepcopy(trained).half()
    whole = sum(p.nbytes for p in trained.parameters())
    done = comera.compress_(model, calibration(), budget="10kB", loss_fn=loss_fn)
    assert done.bytes == sum(p.nbytes for p in model.parameters()) <= 10_000 < whole
    assert done.bytes > 9_600  # a rank takes 388
    assert done.dense_bytes == whole
    batches = [(x.half(), y) for x, y in calibration()]
    done = comera.compress_(half, batches, budget="6KiB", loss_fn=loss_fn)
    assert done.bytes == sum(p.nbytes for p in half.parameters()) <= 6 * 1024


def test_what_sensitivity_found_is_of_the_weights_it_looked_at(trained):
    """In the model itself, too, whose weight it refers to."""
    model = copy.deepcopy(trained)
    found = comera.sensitivity(model, calibration(), loss_fn=loss_fn)
    model[2].weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="weight of 2 has changed since"):
        comera.compress_(model, found, budget=0.5)


class Alone(nn.Module):
    """A layer that is called by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        return self.linear(input=x)


def test_inputs_of_one_row_and_by_name_are_counted():
    row = torch.randn(8)
    found = [
        comera.sensitivity(Alone(), [x], loss_fn=lambda m, x: m(x).square().mean())
        for x in (row, row[None])
    ]
    got = [each.layers[0].whitened_K for each in found]
    torch.testing.assert_close(got[0], got[1])


def test_what_sensitivity_found_serves_copies_of_the_model_at_any_budget(trained):
    found = comera.sensitivity(trained, calibration(), loss_fn=loss_fn)
    for budget in (0.8, 0.5):
        model, direct = copy.deepcopy(trained), copy.deepcopy(trained)
        done = comera.compress_(model, found, budget=budget)
        assert done.layers == found.choose(budget)
        comera.compress_(direct, calibration(), budget=budget, loss_fn=loss_fn)
        for ours, theirs in zip(model.parameters(), direct.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert type(trained[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"0 is no linear layer .* when sensitivity looked"):
        comera.compress_(model, found, budget=0.5)
    other = copy.deepcopy(trained)
    other[2].weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="weight of 2 has changed since"):
        comera.compress_(other, found, budget=0.5)
    with pytest.raises(ValueError, match=r"target_modules='0': .* say it to sensitivity"):
        comera.compress_(other, found, budget=0.5, target_modules="0")


def test_the_report_is_a_data_frame_and_a_table(trained):
    done = comera.compress_(copy.deepcopy(trained), calibration(), budget=0.5, loss_fn=loss_fn)
    frame = done.to_pandas()
    assert frame["name"].tolist() == ["0", "2", "4"]
    assert frame["params"].tolist() == [layer.params for layer in done.layers]
    assert done._repr_html_().count("<tr>") == 1 + len(done.layers)


def test_a_bound_on_the_loss_gives_the_smallest_model_that_keeps_to_it(trained):
    test = data(2048, 5)

    def evaluate(model):
        return float(loss_fn(model, test))

    with torch.no_grad():
        dense = evaluate(trained)
    found = comera.sensitivity(trained, calibration(), loss_fn=loss_fn)
    before = copy.deepcopy(trained.state_dict())
    sizes = []
    for more in (0.01, 0.2):
        model = copy.deepcopy(trained)
        done = comera.compress_(model, found, max_loss=dense + more, evaluate=evaluate)
        with torch.no_grad():
            assert evaluate(model) == pytest.approx(done.measured, rel=1e-4)
        assert done.measured <= dense + more
        assert f"measured loss {done.measured:.4g}" in str(done)
        smaller = copy.deepcopy(trained)
        comera.compress_(smaller, found, budget=done.share - 0.02)
        with torch.no_grad():
            assert evaluate(smaller) > dense + more
        sizes.append(done.params)
    assert sizes[1] < sizes[0] < sum(p.numel() for p in trained.parameters())
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())


def test_without_evaluate_the_calibration_batches_are_measured(trained):
    model = copy.deepcopy(trained).train()
    with torch.no_grad():
        dense = sum(float(loss_fn(trained, batch)) for batch in calibration()) / 8
    done = comera.compress_(model, calibration(), max_loss=dense + 0.05, loss_fn=loss_fn)
    assert dense < done.measured <= dense + 0.05
    assert model.training


def rising():
    calls = itertools.count()
    return lambda model: next(calls)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "budget=None and max_loss=None: one of them must be given"),
        ({"budget": 0.5, "max_loss": 1.0}, "max_loss=1.0: give one of them, not both"),
        ({"budget": 0.5, "evaluate": len}, "evaluate measures what max_loss bounds"),
        ({"max_loss": 1e-9}, "max_loss=1e-09: the dense model itself has a loss of"),
        ({"max_loss": 1.0, "evaluate": lambda m: torch.nan}, "evaluate gave nan"),
        ({"max_loss": 0.5, "evaluate": rising()}, "of the parameters the loss is 7 already"),
    ],
)
def test_a_loss_out_of_reach_changes_nothing(trained, settings, problem):
    model = copy.deepcopy(trained)
    with pytest.raises(ValueError, match=problem):
        comera.compress_(model, calibration(), loss_fn=loss_fn, **settings)
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained.state_dict()[key])
    with pytest.raises(ValueError, match="a calibration of type list_iterator, which cannot be"):
        comera.compress_(model, iter(calibration()), loss_fn=loss_fn, max_loss=1.0)


def test_a_share_may_be_a_number_of_numpy():
    assert parse_budget(np.float32(0.25)) == 0.25


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3kB", 3000), ("3KB", 3000), ("3 KiB", 3072), ("60MB", 60_000_000), ("0.5MiB", 1 << 19),
        ("1.5 GB", 1_500_000_000), ("2GiB", 2 << 30),
    ],
)  # fmt: skip
def test_bytes_are_read_as_people_write_them(text, size):
    assert parse_budget(text) == size
