"""Models of ``fully_shard``: what trains them, and what says that it cannot."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import comera
from tests.processes import in_two_processes, said

pytestmark = pytest.mark.slow  # two interpreters have to start

STEPS = 4


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        comera.TTEmbedding(60, 16, rank=4), comera.TTLinear(16, 24, rank=4), nn.GELU(),
        comera.TTLinear(24, 16, rank=4), nn.Linear(16, 5),
    )  # fmt: skip
    return model


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if not isinstance(layer, nn.GELU):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model):
    return torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=1e-2))


def loss_fn(model, x):
    return nn.functional.cross_entropy(model(x), x % 5)


def rows(rank, number):
    return torch.randint(0, 60, (8,), generator=torch.Generator().manual_seed(10 * number + rank))


def train(model, optimizer, rank, numbers):
    for number in numbers:
        optimizer.zero_grad()
        loss_fn(model, rows(rank, number)).backward()
        optimizer.step()


def whole(model):
    params = getattr(model, "module", model).named_parameters()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in params}


def own_loop(rank, folder):
    """Beside a replicated model, and again from a checkpoint in the middle."""
    sharded, replicated = shard(make_model()), nn.parallel.DistributedDataParallel(make_model())
    train(replicated, adamw(replicated), rank, range(2 * STEPS))
    optimizer = adamw(sharded)
    train(sharded, optimizer, rank, range(STEPS))
    parts = dict(zip(("model", "optimizer"), get_state_dict(sharded, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder)
    train(sharded, optimizer, rank, range(STEPS, 2 * STEPS))
    again = shard(make_model(seed=1))
    resumed = adamw(again)
    parts = dict(zip(("model", "optimizer"), get_state_dict(again, resumed), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        again, resumed, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    train(again, resumed, rank, range(STEPS, 2 * STEPS))
    return whole(sharded), whole(replicated), whole(again)


def refusals(rank):
    sharded, later = shard(make_model()), make_model()
    ranks, contracted = comera.TwoStage(later, 0.5, 2, 2), comera.BatchedContraction(later)
    step = comera.TrainStep(later, loss_fn, adamw(later))
    with contracted:
        pass
    shard(later)
    x = rows(rank, 0)
    groups = comera.param_groups(sharded, 1e-2)
    return {
        "TrainStep": said(lambda: comera.TrainStep(sharded, loss_fn, adamw(sharded))),
        "TwoStage": said(lambda: comera.TwoStage(sharded, 0.5, 2, 2)),
        "ImportancePruning": said(lambda: comera.ImportancePruning(sharded, 0.5, 2)),
        "BatchedContraction": said(lambda: comera.BatchedContraction(sharded)),
        "truncate_": said(lambda: comera.truncate_(sharded)),
        "canonicalize_": said(lambda: comera.canonicalize_(sharded)),
        "MuonAdamW": said(lambda: comera.MuonAdamW(groups)),
        "later TrainStep": said(lambda: step(x)),
        "later TwoStage": said(lambda: ranks.objective(loss_fn(later, x))),
        "later BatchedContraction": said(contracted.__enter__),
        "at the end": said(ranks.finish_),
        "Muon of none": said(
            lambda: comera.MuonAdamW([group for group in groups if group["name"] != "cores"])
        ),
    }


def _found(rank):
    return {"loop": own_loop(rank, os.environ["FOLDER"]), "refusals": refusals(rank)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes found; starting them takes longer than all they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(tmp_path_factory.mktemp("checkpoint")))
        return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


def test_a_loop_of_ones_own_and_its_checkpoints_go_on(results):
    for sharded, replicated, again in (result["loop"] for result in results):
        assert sharded.keys() == replicated.keys() == again.keys()
        for name, weight in sharded.items():
            torch.testing.assert_close(weight, replicated[name], rtol=1e-3, atol=1e-4)
            assert torch.equal(weight, again[name])


@pytest.mark.parametrize(
    "what",
    [
        "TrainStep",
        "TwoStage",
        "ImportancePruning",
        "BatchedContraction",
        "truncate_",
        "canonicalize_",
    ],
)
def test_what_needs_whole_tensor_trains_says_so_when_it_is_made(results, what):
    for found in (result["refusals"] for result in results):
        assert found[what].startswith(
            f"{what} needs whole tensor trains, and 0.cores.0 of shape (1, 20, 2, 4) is sharded"
        )
        assert "DistributedDataParallel" in found[what]
        assert "a loop of your own with torch.optim.AdamW" in found[what]


def test_where_the_model_was_sharded_afterwards_it_is_said_at_first_use(results):
    for found in (result["refusals"] for result in results):
        assert found["later TrainStep"].startswith("BatchedContraction needs whole tensor trains")
        assert found["later BatchedContraction"].startswith(
            "BatchedContraction needs whole tensor trains"
        )
        assert found["later TwoStage"].startswith("TwoStage needs whole tensor trains")
        assert found["at the end"].startswith("TwoStage needs whole tensor trains")


def test_muon_says_which_optimizer_takes_shards(results):
    for found in (result["refusals"] for result in results):
        assert "MuonAdamW steps whole matrices" in found["MuonAdamW"]
        assert "use torch.optim.AdamW" in found["MuonAdamW"]
        assert found["Muon of none"] == "nothing was raised"
