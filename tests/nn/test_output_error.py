import copy
import re

import pytest
import torch
from torch import nn

import comera


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(24, 32), nn.Dropout(0.5), nn.Linear(32, 16)

    def forward(self, x, scale=1.0):
        return self.second(self.drop(torch.tanh(self.first(x * scale))))


def batches():
    """Inputs of which a few directions are a hundred times larger than others."""
    torch.manual_seed(1)
    return [torch.randn(3, 20, 24) * torch.logspace(0, -2, 24) for _ in range(3)]


CONFIG = comera.TTConfig(rank=4, order=1, init="svd")


@pytest.mark.parametrize("rank", [4, 10])
def test_the_error_of_outputs_is_that_of_outputs(rank, caplog):
    net, data = Net(), batches()
    old, x = net.first, torch.cat([batch.flatten(0, 1) for batch in data])
    config = comera.TTConfig(rank=rank, order=1, init="svd", target_modules=["first"])
    comera.tensorize_(net, config, calibration=data)
    said = next(record.message for record in caplog.records if "will be off" in record.message)
    with torch.no_grad():
        off = (net.first(x) - old(x)).norm() / (x @ old.weight.T).norm()
    assert float(re.search(r"by (\S+) %", said).group(1)) == pytest.approx(
        100 * float(off), abs=0.06
    )
    assert net.training
    assert net.drop.training
    assert not old._forward_pre_hooks


def test_the_error_of_a_compiled_model_is_that_of_the_model(caplog):
    torch.manual_seed(0)
    net = Net()
    for model in (copy.deepcopy(net), torch.compile(net, backend="eager")):
        with torch.no_grad():
            model.eval()(batches()[0])
        comera.tensorize_(model, CONFIG, calibration=batches())
    plain, compiled = (r.message for r in caplog.records if "will be off" in r.message)
    assert compiled.replace("_orig_mod.", "") == plain


def test_the_error_of_a_convolution_called_by_keyword(caplog):
    class Picture(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Conv2d(24, 32, 1, bias=False)

        def forward(self, x):
            return self.mix(input=x)

    net, x = Picture(), torch.randn(2, 24, 3, 5)
    with torch.no_grad():
        want = net(x)
        comera.tensorize_(net, CONFIG, calibration=[x])
        off = 100 * float((net(x) - want).norm() / want.norm())
    error = re.search(r"off by (\S+) %", caplog.text).group(1)
    assert float(error) == pytest.approx(off, abs=0.06)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 1.0), lambda x: {"x": x}])
def test_with_calibration_it_says_how_far_off_outputs_will_be(caplog, wrap):
    net, data = Net(), batches()
    old, x = net.first, torch.cat([batch.flatten(0, 1) for batch in data])
    comera.tensorize_(net, CONFIG, calibration=[wrap(batch) for batch in data])
    said = next(record.message for record in caplog.records if "will be off" in record.message)
    with torch.no_grad():
        off = (net.first(x) - old(x)).norm() / (x @ old.weight.T).norm()
    median, worst, name = re.search(r"by (\S+) % \(median; (\S+) % of (\w+)\)", said).groups()
    assert float(median) <= float(worst)
    if name == "first":
        assert float(worst) == pytest.approx(100 * float(off), abs=0.06)


def test_without_it_says_that_it_cannot_know(caplog):
    comera.tensorize_(Net(), CONFIG)
    assert "approximates the weights of first, second; how far off" in caplog.text
    assert "it cannot know without data (calibration=batches)" in caplog.text
    caplog.clear()
    with torch.device("meta"):
        comera.tensorize_(Net(), CONFIG)
    assert "cannot know" not in caplog.text


@pytest.mark.parametrize(
    ("config", "data", "problem"),
    [
        (CONFIG, [], "calibration has no batch"),
        (comera.TTConfig(rank=4), [torch.randn(2, 24)], "init=None draws new cores"),
    ],
)
def test_calibration_that_says_nothing_is_refused_and_changes_nothing(config, data, problem):
    net = Net()
    with pytest.raises(ValueError, match=problem):
        comera.tensorize_(net, config, calibration=data)
    assert type(net.first) is nn.Linear


def test_a_layer_that_is_never_called_is_named():
    net = Net()
    net.spare = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="calibration reaches no spare"):
        comera.tensorize_(net, CONFIG, calibration=batches())
