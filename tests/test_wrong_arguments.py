"""Arguments of the wrong kind: the error repeats them and says what is wanted."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import comera
from comera import TrainStep, TTConfig, TTEmbedding, TTLinear, TwoStage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


BATCHES = [(torch.zeros(4, 32), torch.zeros(4, dtype=torch.long))]
AdamW = torch.optim.AdamW


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def without_gradient(model, batch):
    return loss_fn(model, batch)


def compressed():
    return comera.tensorize_(Net(), TTConfig(rank=2, init="orthogonal"))


@pytest.mark.parametrize(
    "call",
    [
        comera.tensorize_,
        comera.densify_,
        comera.truncate_,
        comera.canonicalize_,
        comera.freeze_,
        comera.to_plain_,
        comera.compression_report,
        comera.plan,
        comera.BatchedContraction,
        lambda model: comera.plan(model, TTConfig(rank=2)),
        lambda model: comera.param_groups(model, 1e-3),
        lambda model: comera.galore_param_groups(model, 1e-3, 4),
        lambda model: comera.memory_report(model, AdamW(Net().parameters())),
        lambda model: comera.save_model(model, "nowhere"),
        lambda model: comera.compress_(model, BATCHES, budget=0.5, loss_fn=loss_fn),
        lambda model: comera.explore(model, loss_fn),
        lambda model: comera.heal_(model, Net(), BATCHES),
        lambda model: comera.heal_(compressed(), model, BATCHES),
        lambda model: TrainStep(model, loss_fn, AdamW(Net().parameters())),
        lambda model: TwoStage(model, 0.5, 1, 1),
    ],
)
def test_no_model(call):
    with pytest.raises(TypeError, match=r"^Net is a class; a model is wanted: Net\(\.\.\.\)$"):
        call(Net)
    with pytest.raises(TypeError, match=r"^'my model' is no model, but of type str$"):
        call("my model")


@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer: comera.memory_report(Net(), optimizer),
        lambda optimizer: comera.truncate_(compressed(), optimizer),
        lambda optimizer: TrainStep(Net(), loss_fn, optimizer),
    ],
)
@pytest.mark.parametrize(("wrong", "shown"), [(AdamW, "<class .*AdamW'>"), (1e-3, "0.001")])
def test_no_optimizer(call, wrong, shown):
    with pytest.raises(TypeError, match=f"^{shown} is given where an optimizer is wanted"):
        call(wrong)


def step(model=None, loss=loss_fn, optimizer=None, ranks=None, **settings):
    model = compressed() if model is None else model
    return TrainStep(model, loss, optimizer or AdamW(model.parameters()), ranks, **settings)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: step(loss=AdamW(Net().parameters()), optimizer=loss_fn),
            TypeError, r"of type AdamW: TrainStep\(model, loss_fn, optimizer\)",
        ),
        (
            lambda: step(loss=nn.MSELoss()),
            TypeError, r"loss_fn=MSELoss\(\) would be called with the model and a batch",
        ),
        (lambda: step(ranks=0.5), TypeError, "ranks=0.5 must be a comera.TwoStage or"),
        (lambda: step(accumulate="2"), ValueError, "accumulate='2' must be a whole number"),
        (lambda: step(clip_norm="1"), ValueError, "clip_norm='1' must be above 0"),
        (lambda: step(scheduler=0.9), TypeError, "scheduler=0.9 must be a scheduler of torch"),
        (
            lambda: step(scheduler=StepLR(AdamW(Net().parameters()), 1)),
            ValueError, "the StepLR sets the rates of another AdamW, not of the optimizer given",
        ),
        (
            lambda: comera.param_groups(Net(), 1e-3, gate_lr=None),
            ValueError, "gate_lr=None must be a number from 0",
        ),
        (
            lambda: comera.galore_param_groups(Net(), 1e-3, 2.5),
            ValueError, r"rank=2\.5 must be a whole number",
        ),
        (
            lambda: TTEmbedding(100, 8, hot_rows=20, hot_rank="2"),
            ValueError, "hot_rank='2' must be a whole number",
        ),
        (lambda: TTConfig(hot_rank=[2]), ValueError, r"hot_rank=\[2\] must be a whole number"),
        (
            lambda: TTConfig(hot_pattern={"a": 3}),
            ValueError, r"hot_pattern\['a'\]=3 must be two numbers, hot_rows and hot_rank",
        ),
        (
            lambda: TTConfig(target_modules=nn.Linear),
            ValueError, "target_modules=<class .*Linear'> must be a string or a list of names",
        ),
        (
            lambda: TTConfig(exclude_modules=[nn.Linear]),
            ValueError, r"exclude_modules=\[<class .*Linear'>\] must be a string or a list",
        ),
        (
            lambda: TTConfig(rank=8, compression=10),
            ValueError, "rank=8 and compression=10 say the same thing twice",
        ),
        (
            lambda: TTLinear(8, 8, rank=2)(np.zeros((2, 8), np.float32)),
            TypeError, r"TTLinear takes a tensor, not array\(",
        ),
        (
            lambda: TTEmbedding(100, 8, rank=2)([1, 2]),
            TypeError, r"TTEmbedding takes a tensor, not \[1, 2\]",
        ),
        (
            lambda: comera.TTEmbeddingBagCollection([100, 200]),
            TypeError, r"tables=\[100, 200\] must be bags by name",
        ),
        (
            lambda: comera.update_hot_rows_(nn.Sequential(TTEmbedding(100, 8)), torch.ones(100)),
            TypeError, "takes a table, not a Sequential; its tables are model.0$",
        ),
        (
            lambda: comera.load_model(Net(), "folder"),
            TypeError, r"a model is given where the folder is wanted: load_model\(folder, model\)",
        ),
        (
            lambda: comera.explore(Net(), 1.0),
            TypeError, "evaluate=1.0 must be a function of the model",
        ),
        (
            lambda: comera.explore(Net(), loss_fn, BATCHES, budgets=0.5, loss_fn=loss_fn),
            TypeError, r"budgets=0.5 must be a list of such, as \[0.5\]",
        ),
        (
            lambda: comera.compress_(Net(), BATCHES, budget=0.5, loss_fn=without_gradient),
            ValueError, r"loss_fn gave tensor\(.* for batch 0, which has no gradient",
        ),
        (
            lambda: comera.compress_(
                Net(), BATCHES, budget=0.5, loss_fn=lambda *given: loss_fn(*given).item()
            ),
            ValueError, r"loss_fn gave \d\.\d* for batch 0, which has no gradient",
        ),
    ],
)  # fmt: skip
def test_what_is_given_is_repeated(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_model_that_is_compressed_already_says_so():
    model = Net()
    comera.compress_(model, BATCHES, budget=0.6, loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"no target \(compressed ones, others, tables"):
        comera.compress_(model, BATCHES, budget=0.3, loss_fn=loss_fn)
