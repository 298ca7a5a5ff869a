"""That a whole training step can be captured, shown without a GPU.

The step runs on tensors without values: whatever would look at one, or needs one for a shape,
raises. The operators of this package are entered.
"""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn import functional as F

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.dlrm import DLRM
from comera.models.transformer import Encoder, MaskedLanguageModel
from comera.nn.module import tensor_trains
from comera.ops.context import static_shapes
from comera.train.host_state import make_capturable_

from . import conftest
from .conftest import get_batch
from .tape import Capturable
from .test_launches import batch, loss_fn, make_model, step_of


def run_without_values(step, batch, loss_fn=None):
    """Once, from where the step has come to; ``loss_fn`` in the place of its own."""
    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        step = copy.deepcopy(step)
    step._loss_fn = loss_fn or step._loss_fn
    with mode, static_shapes(), Capturable():
        step(batch())


def started(step, batch):
    """After two steps, so that the optimizer has its state."""
    make_capturable_(step.optimizer, torch.device("cpu"))
    with static_shapes():
        for _ in range(2):
            step(batch())
    return step


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_the_step_of_six_encoders(late):
    run_without_values(started(step_of(make_model(), late), batch), batch)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_settings_of_the_step(settings):
    run_without_values(started(step_of(make_model(1), late=True, **settings), batch), batch)


PLANTED = {
    "item": (lambda model, loss: loss * float(loss), "_local_scalar_dense"),
    "if": (lambda model, loss: loss if loss > 0 else -loss, "_local_scalar_dense"),
    "boolean index": (lambda model, loss: loss + bias(model)[bias(model) > 0].sum(), "boolean"),
    "unique": (lambda model, loss: loss + torch.unique(bias(model)).sum(), "_unique2"),
    "nonzero": (lambda model, loss: loss + bias(model).nonzero().sum(), "nonzero"),
    "bincount": (lambda model, loss: loss + torch.bincount(torch.arange(3)).sum(), "bincount"),
    "python value": (lambda model, loss: loss * torch.tensor(2.0), "lift_fresh"),
}


def bias(model):
    return model.output.bias


@pytest.fixture(scope="module")
def one_encoder():
    return started(step_of(make_model(1)), batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_what_a_graph_cannot_hold_is_found(one_encoder, name):
    plant, message = PLANTED[name]
    with pytest.raises(RuntimeError, match=message):
        run_without_values(
            one_encoder, batch, lambda model, batch: plant(model, loss_fn(model, batch))
        )


@pytest.mark.parametrize("name", ["came", "came in eight bits", "muon", "sgd"])
def test_optimizers(name):
    make = {
        "came": lambda g: comera.CAME(g, bias_correction=True, weight_decay=0.1),
        "came in eight bits": lambda g: comera.CAME(g, state_dtype="8bit"),
        "muon": lambda g: comera.MuonAdamW(g, fused=True, weight_decay=0.1),
        "sgd": lambda g: torch.optim.SGD(g, fused=True, momentum=0.9),
    }[name]
    step = conftest.make_step(make_optimizer=make)
    run_without_values(started(step, lambda: get_batch(0)), lambda: get_batch(0))


def causal_model():
    return CausalLanguageModel(Decoder(60, 32, 2, 2, 48), 60)


def masked_model():
    return MaskedLanguageModel(Encoder(60, 32, 2, 2, 48, 12), 60)


def click_model():
    return DLRM({"a": 300, "b": 200, "c": 5}, 4, 8, [16], [16])


MODELS = {
    "causal": (
        causal_model,
        lambda: {"tokens": torch.randint(0, 60, (3, 12)), "targets": torch.randint(0, 60, (3, 12))},
        lambda m, b: F.cross_entropy(m(b["tokens"]).flatten(0, 1), b["targets"].flatten()),
    ),
    "masked": (
        masked_model,
        lambda: {"tokens": torch.randint(0, 60, (3, 12)), "at": torch.randint(0, 12, (3, 2))},
        lambda m, b: m(b["tokens"], b["at"]).logsumexp(-1).mean(),
    ),
    "clicks": (
        click_model,
        lambda: {"x": torch.randn(6, 4), "fields": torch.randint(0, 5, (6, 3))},
        lambda m, b: F.softplus(m(b["x"], b["fields"])).mean(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_recipes(name):
    make_model, batch, loss_fn = MODELS[name]
    model = comera.tensorize_(make_model(), comera.TTConfig(rank=4, target_modules="all"))
    assert tensor_trains(model)
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-3), fused=True)
    ranks = comera.TwoStage(model, 0.5, 0, 10)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks, clip_norm=1.0)
    run_without_values(started(step, batch), batch)
