"""Optimizers of sharded parameters, in two processes."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

import comera
from tests.processes import in_two_processes, said

pytestmark = pytest.mark.slow  # two interpreters have to start


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Linear(12, 20), comera.TTLinear(20, 12, rank=4), nn.Linear(12, 7), nn.Linear(7, 1)
    # Of the last the second process has nothing.
    return nn.Sequential(*layers).to(dtype)


def train(model, optimizer, first, last):
    for k in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        model(x).square().mean().backward()
        optimizer.step()


def came_off(folder, **settings):
    """Return the distance of sharded from whole weights, trained at once and from a checkpoint."""
    from torch.distributed.fsdp import fully_shard

    def optimizer_of(model):
        return comera.CAME(model.parameters(), lr=1e-3, weight_decay=0.1, **settings)

    whole, sharded = make_model(), fully_shard(make_model())
    other, optimizer = optimizer_of(whole), optimizer_of(sharded)
    train(whole, other, 0, 20)
    train(sharded, optimizer, 0, 10)
    optimizer.zero_grad()  # torch asks for no state where there are gradients
    state = get_optimizer_state_dict(sharded, optimizer)
    dcp.save(state, checkpoint_id=folder)
    resumed = optimizer_of(sharded)
    state = get_optimizer_state_dict(sharded, resumed)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(sharded, resumed, state)
    train(sharded, resumed, 10, 20)
    start = make_model().parameters()
    moved = zip(sharded.parameters(), whole.parameters(), start, strict=True)
    return max(float((p.full_tensor() - q).detach().norm() / (q - s).norm()) for p, q, s in moved)


def refusals():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard

    def kinds(params):
        return {
            "CAME": lambda: comera.CAME(params),
            "8bit": lambda: comera.CAME(params, state_dtype="8bit"),
            "MuonAdamW": lambda: comera.MuonAdamW([{"params": params, "muon": True}]),
            "GaLore": lambda: comera.GaLoreAdamW([{"params": params, "rank": 4}]),
        }

    def layer():
        return nn.Linear(90, 90, bias=False)

    found = {}
    columns = fully_shard(layer(), shard_placement_fn=lambda _: Shard(1))
    for name, model in (("fsdp2", fully_shard(layer())), ("columns", columns)):
        for kind, make in kinds(list(model.parameters())).items():
            found[name, kind] = said(make)
    for orig in (False, True):
        model = FullyShardedDataParallel(
            layer(), use_orig_params=orig, device_id=torch.device("cpu")
        )
        for kind, make in kinds(list(model.parameters())).items():
            found[f"fsdp1 {orig}", kind] = said(make)
    return found


def galore_by_zero(rank):
    """Steps of a run of GaLore within ZeroRedundancyOptimizer, and of one that is resumed."""
    ends = []
    model = make_model()
    saved = None
    for _ in range(2):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizer = ZeroRedundancyOptimizer(
            [{"params": matrices, "rank": 2, "update_proj_gap": 4}], comera.GaLoreAdamW, lr=1e-2
        )
        if saved is None:
            train(model, optimizer, 0, 6)
            for to in range(2):  # the other's is gone then
                optimizer.consolidate_state_dict(to)
                if to == rank:
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        else:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, 6, 9)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return ends


class Find:
    """A function of a rank that can be sent to other processes."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank):
        return {
            "off": [
                came_off(f"{self.folder}/{k}", bias_correction=bool(k), maximize=bool(k))
                for k in range(2)
            ],
            "refusals": refusals(),
            "zero": galore_by_zero(rank),
        }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return in_two_processes(Find(str(folder)), folder)


def test_came_of_shards_is_that_of_whole_matrices(results):
    assert all(off < 1e-12 for result in results for off in result["off"])


def test_what_cannot_be_stepped_is_refused_by_name(results):
    for result in results:
        found = result["refusals"]
        assert found.pop(("fsdp2", "CAME")) == "nothing was raised"
        assert len(found) == 15
        for (way, kind), text in found.items():
            assert text.startswith("CAME" if kind == "8bit" else kind)
            flat = way.startswith("fsdp1") and kind in ("CAME", "8bit")
            reason = "the flat parts" if flat else "whole matrices, and a parameter of shape"
            assert reason in text
            assert "or leave the model whole in DistributedDataParallel" in text
        assert "use it without state_dtype='8bit'" in found["fsdp2", "8bit"]


def test_galore_goes_on_within_zero_redundancy_optimizer(results):
    for result in results:
        assert torch.equal(*result["zero"])
