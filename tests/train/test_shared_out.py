"""Dense matrices shared out among processes, tensor trains whole in each: as one process trains."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import comera
from comera.checkpoint.distributed import gathered
from comera.params import is_sharded
from comera.train.sharded import shard_dense_, whole_state
from tests.processes import in_two_processes, said

pytestmark = pytest.mark.slow  # two interpreters have to start

EARLY, LATE, STEPS = 6, 10, 24


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        comera.TTEmbedding(60, 16, rank=4), comera.TTLinear(16, 24, rank=4), nn.GELU(),
        nn.Linear(24, 16), nn.LayerNorm(16), nn.Linear(16, 5),
    )  # fmt: skip


def loss_fn(model, x):
    return nn.functional.cross_entropy(model(x), x % 5)


def rows(number):
    return torch.randint(0, 60, (16,), generator=torch.Generator().manual_seed(number))


def muon(model):
    return comera.MuonAdamW(comera.param_groups(model, 1e-2, gate_lr=0.1), fused=True)


def adamw(model):
    return torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=0.1))


def make_step(model, optimizer, two_stage):
    """With two parts a batch, and a norm that is always clipped."""
    if two_stage:
        ranks = comera.TwoStage(model, 0.6, EARLY, LATE)
    else:
        ranks = comera.ImportancePruning(model, 0.6, EARLY + LATE)
    return comera.TrainStep(model, loss_fn, optimizer, ranks, accumulate=2, clip_norm=0.1)


def train(step, get):
    losses = []
    for number in range(STEPS):
        losses.append(float(step(get(number))))
        if step.ranks.due:
            step.ranks.finish_(step.optimizer)
    return losses


def weights(model):
    return {name: value.detach().clone() for name, value in whole_state(model.state_dict()).items()}


def refusals():
    model = shard_dense_(make_model())
    groups = comera.param_groups(model, 1e-2)
    names = {group["name"]: group["params"] for group in groups}
    mixed = torch.optim.AdamW([*names["cores"], *names["dense"]])
    dense_alone = [{"params": names["dense"]}]

    def step(optimizer):
        return said(lambda: comera.TrainStep(model, loss_fn, optimizer))

    return {
        "CAME": step(comera.CAME(groups)),
        "mixed": step(mixed),
        "in backward": step(comera.OptimizerInBackward(torch.optim.AdamW(dense_alone))),
        "no dense": said(lambda: shard_dense_(nn.Sequential(comera.TTLinear(16, 24, rank=4)))),
    }


def _found(rank):
    folder = Path(os.environ["FOLDER"])
    found = {}
    for make, two_stage in ((muon, True), (adamw, False)):
        model = shard_dense_(make_model())
        kinds = {name: is_sharded(param) for name, param in model.named_parameters()}
        step = make_step(model, make(model), two_stage)
        losses = train(step, lambda number: rows(number)[rank::2])
        found[make.__name__] = losses, weights(model), kinds
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, step.optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder / "dcp")
    found["gathered"] = gathered(model, step.optimizer)
    return found | {"refusals": refusals()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("checkpoint")
        patch.setenv("FOLDER", str(folder))
        return in_two_processes(_found, tmp_path_factory.mktemp("processes")), folder


@pytest.mark.parametrize(("make", "two_stage"), [(muon, True), (adamw, False)])
def test_stages_cut_and_clipping_are_those_of_one_process(results, make, two_stage):
    model = make_model()
    step = make_step(model, make(model), two_stage)
    alone = train(step, rows)
    for found in results[0]:
        losses, learned, kinds = found[make.__name__]
        assert losses == pytest.approx(alone, rel=1e-4)
        assert [name for name, shared in kinds.items() if shared] == ["3.weight", "5.weight"]
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(learned[name], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_torch_are_read_by_one_process(results):
    (first, _), folder = results
    model = make_model()
    step = make_step(model, adamw(model), False)
    train(step, rows)  # ranks are as they were saved
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, step.optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder / "dcp", no_dist=True)
    assert first["gathered"]["model"].keys() == parts["model"].keys()
    for name, weight in first["adamw"][1].items():
        assert torch.equal(parts["model"][name], weight)
        assert torch.equal(first["gathered"]["model"][name], weight)


def test_what_cannot_step_parts_says_so_when_the_step_is_made(results):
    for found in (result["refusals"] for result in results[0]):
        assert found["CAME"].startswith(
            "CAME stacks whole matrices of equal shape, and fully_shard"
        )
        assert found["mixed"].startswith(
            "the optimizer's group '' holds parameters that are shared"
        )
        assert found["in backward"].startswith("OptimizerInBackward steps before the gradients of")
        assert found["no dense"].startswith("the model has no dense matrices to share out")
