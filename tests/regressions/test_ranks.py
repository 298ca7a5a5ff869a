"""Defects of rank learning that were mended, each in a few lines."""

import math

import pytest
import torch
from torch import nn

import comera
from comera.nn.module import tensor_trains
from tests.processes import in_two_processes
from tests.states import assert_equal


def test_the_target_is_met_where_someone_else_has_closed_a_whole_bond():
    """At ``min_rank=1`` the layer keeps a rank of that bond, and all of its others."""
    torch.manual_seed(0)
    model = nn.Sequential(comera.TTLinear(64, 64, rank=8), comera.TTLinear(64, 64, rank=8))
    ranks = comera.TwoStage(model, 0.3, 1, 1)
    with torch.no_grad():
        model[0].gates[1].zero_()
    outcome = ranks.finish_()
    cores = sum(core.numel() for m in tensor_trains(model).values() for core in m.cores)
    assert cores == outcome["size"] <= outcome["target_size"]


def test_a_part_of_a_batch_that_fails_leaves_no_gradients_to_the_next_step():
    """Such as one that runs out of memory, and a caller who goes on without it."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss_fn(model, batch):
        if batch.isnan().any():
            raise MemoryError
        return model(batch).mean()

    step = comera.TrainStep(model, loss_fn, optimizer, accumulate=2)
    with pytest.raises(MemoryError):
        step(torch.tensor([[1.0, 2.0], [3.0, math.nan]]))
    before = model.weight.detach().clone()
    step(torch.zeros(2, 2))
    assert torch.equal(model.weight, before)


def _own_loop(rank):
    torch.manual_seed(0)
    model = comera.TTLinear(16, 16, rank=8)
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    ranks = comera.ImportancePruning(model, 0.5, 3)
    for number in range(6):
        optimizer.zero_grad()
        loss = parallel(torch.randn(9, 16).roll(rank, 1) * (1 + rank + number)).square().mean()
        ranks.objective(loss).backward()
        optimizer.step()
        ranks.step(loss.detach(), optimizer)
        if ranks.due:
            ranks.finish_(optimizer)
    return [param.detach() for param in model.parameters()]


@pytest.mark.slow
def test_processes_that_average_gradients_keep_one_model_when_ranks_are_cut(tmp_path):
    mine, theirs = in_two_processes(_own_loop, tmp_path)
    assert_equal(mine, theirs)


def _sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(comera.TTLinear(16, 16, rank=4)))
    optimizer = torch.optim.AdamW(model.parameters())
    said = []
    for make in (
        lambda: comera.TrainStep(model, lambda m, x: m(x).mean(), optimizer)(torch.ones(2, 16)),
        lambda: comera.TwoStage(model, 0.5, 2, 2),
        lambda: comera.MuonAdamW(comera.param_groups(model, 1e-3)),
    ):
        with pytest.raises(ValueError, match="fully_shard") as error:
            make()
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_what_does_not_go_with_sharded_models_says_so(tmp_path):
    mine, theirs = in_two_processes(_sharded, tmp_path)
    assert mine == theirs
    assert all("DistributedDataParallel" in text for text in mine)
