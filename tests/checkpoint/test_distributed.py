"""Two processes on this machine, sharded and replicated, against one."""

import faulthandler
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import comera
from comera.checkpoint.chain import Checkpoint, CheckpointChain
from comera.checkpoint.distributed import gathered, scatter_
from tests.processes import in_two_processes

WORLD = 2
SECONDS = 300


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24))


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        model(torch.randn(8, 24, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))


def replicated(model):
    return nn.parallel.DistributedDataParallel(model)


def whole(model):
    model = getattr(model, "module", model)
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def save_and_resume(rank, path, wrap):
    chain = CheckpointChain(path / wrap.__name__, mode="lossless", background=False)
    model = wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (2, 4):
        train(model, optimizer, 2)
        parts = gathered(model, optimizer)
        assert (parts is None) == (rank != 0)
        if parts is not None:
            chain.save(step, **parts)
    again = wrap(make_model(seed=1))
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-2)
    scatter_(again, resumed, chain.load() if rank == 0 else None)
    train(again, resumed, 2)
    train(model, optimizer, 2)
    weights = whole(again)
    assert all(torch.equal(a, b) for a, b in zip(whole(model), weights, strict=True))
    if rank == 0:
        names = getattr(model, "module", model).state_dict()
        torch.save(dict(zip(names, weights, strict=True)), path / f"{wrap.__name__}.pt")
    chain.close()


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [sharded, replicated])
def test_processes_go_on_from_what_they_gathered(results, wrap):
    folder, _ = results
    weights = torch.load(folder / f"{wrap.__name__}.pt")
    alone = make_model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    saved = CheckpointChain(folder / wrap.__name__).load()  # in one process
    alone.load_state_dict(saved.model)
    names = {name: k for k, name in enumerate(alone.state_dict())}
    state = {names[name]: entries for name, entries in saved.optimizer["state"].items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    train(alone, optimizer, 2)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


class Tables(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scattered = comera.TTEmbedding(60, 8, rank=2)
        self.moved = comera.TTEmbedding(60, 8, rank=2, hot_rows=10)

    def forward(self, indices):
        return torch.cat([self.scattered(indices), self.moved(indices)])


def move_rows_and_resume(rank, path, wrap):
    indices = torch.arange(60)
    model = Tables()
    comera.update_hot_rows_(model.moved, (indices > 40).float())
    rows = model(indices)
    parts = gathered(wrap(model))
    with CheckpointChain(
        path / f"rows {wrap.__name__}", mode="lossless", background=False
    ) as chain:
        if parts is not None:
            chain.save(1, **parts)
        again = wrap(Tables(seed=1))
        scatter_(again, saved=chain.load() if rank == 0 else None)
    return again(indices).detach(), rows.detach()


def _found(rank):
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # says where, if they wait for each other
    folder, found = Path(os.environ["FOLDER"]), {}
    for wrap in (sharded, replicated):
        save_and_resume(rank, folder, wrap)
        found[wrap.__name__] = move_rows_and_resume(rank, folder, wrap)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(folder))
        return folder, in_two_processes(_found, tmp_path_factory.mktemp("processes"))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [sharded, replicated])
def test_tables_keep_their_rows_where_they_were_moved_to(results, wrap):
    for found in results[1]:
        assert torch.equal(*found[wrap.__name__])


def test_a_lossy_chain_knows_the_weights_of_gathered_moments(tmp_path):
    alone = make_model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    with CheckpointChain(tmp_path) as chain:
        for step in (1, 2):
            train(alone, optimizer, 1)
            named = {name: dict(optimizer.state[p]) for name, p in alone.named_parameters()}
            groups = [{"params": list(named), "lr": 1e-2}]
            chain.save(step, alone.state_dict(), {"state": named, "param_groups": groups})
        saved = chain.load()
    assert saved.parameters == {name: name for name in named}
    kept = saved.optimizer["state"]["0.weight"]["exp_avg"] != 0
    assert 0 < kept.sum() < kept.numel() / 2


def test_rank_0_without_a_checkpoint_says_so(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="rank 0 needs the checkpoint"):
            scatter_(make_model())
        bare = Checkpoint(1, {}, None, {}, {})
        with pytest.raises(ValueError, match="holds no state of an optimizer"):
            scatter_(make_model(), torch.optim.SGD(make_model().parameters()), bare)
    finally:
        dist.destroy_process_group()
