"""Per-layer updates in two processes: averaged over a group, and on sharded parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import comera
from comera import OptimizerInBackward
from tests.processes import in_two_processes, said

pytestmark = pytest.mark.slow  # two interpreters have to start

STEPS = 6


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 48), nn.Linear(48, 32))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def came(model):
    return comera.CAME(model.parameters(), lr=1e-2, weight_decay=0.1)


def galore(model):
    return comera.GaLoreAdamW(comera.galore_param_groups(model, 1e-2, 4, update_proj_gap=3))


def batch(rank, k):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * k + rank))


def train(model, optimizer, rank, parts=1, hold_back=None):
    for k in range(STEPS):
        for part in range(parts - 1):
            with hold_back():
                model(batch(rank, 100 * part + k)).square().mean().backward()
        model(batch(rank, k)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged(rank):
    """Against DistributedDataParallel."""
    found = {}
    for make in (adamw, came, galore):
        for parts in (1, 2):
            a, b = make_model(), make_model()
            wrapped = nn.parallel.DistributedDataParallel(a)
            train(wrapped, make(a), rank, parts, wrapped.no_sync)
            updates = OptimizerInBackward(make(b), process_group=dist.group.WORLD)
            train(b, updates, rank, parts, updates.accumulate)
            same = [torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
            found[f"{make.__name__}, {parts} parts"] = all(same)
    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    found["wrapped"] = said(lambda: train(wrapped, OptimizerInBackward(adamw(model)), rank))
    model = make_model()
    updates = OptimizerInBackward(adamw(model), process_group=dist.group.WORLD)
    with updates.accumulate():
        model(batch(rank, 0)).mean().backward()
    updates.step()  # what only accumulate() saw is averaged, too
    all_of = [torch.empty_like(model[0].weight) for _ in range(2)]
    dist.all_gather(all_of, model[0].weight.detach())
    found["accumulated"] = torch.equal(*all_of)
    model = make_model()
    model[0].requires_grad_(False)
    late = OptimizerInBackward(sgd(model), process_group=dist.group.WORLD)
    model[0].requires_grad_(True)
    train(model, late, rank)
    dist.all_gather(all_of, model[0].weight.detach())
    found["unfrozen later"] = torch.equal(*all_of)
    found["closure"] = said(lambda: updates.step(lambda: None))
    return found


def sharded(rank):
    """Against the same optimizer after backward, and against whole parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def shard(model):
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    found = {}
    for make in (adamw, sgd):
        a, b, whole = shard(make_model()), shard(make_model()), make_model()
        train(a, make(a), rank)
        updates = OptimizerInBackward(make(b))
        after = []
        updates.optimizer.register_step_post_hook(
            lambda *_, b=b, after=after: after.extend(p.grad for p in b.parameters())
        )
        train(b, updates, rank)
        train(nn.parallel.DistributedDataParallel(whole), make(whole), rank)
        found[f"{make.__name__}, freed"] = all(grad is None for grad in after)
        found[make.__name__] = all(
            torch.equal(p.to_local(), q.to_local())
            for p, q in zip(a.parameters(), b.parameters(), strict=True)
        )
        found[f"{make.__name__}, whole"] = max(
            float((p.full_tensor() - q).abs().max().detach())
            for p, q in zip(b.parameters(), whole.parameters(), strict=True)
        )
    model = shard(make_model())
    params = [{"params": [p for p in model.parameters() if p.dim() == 2], "rank": 4}]
    for name, make, settings in (
        ("galore", lambda: comera.GaLoreAdamW(params), {}),
        ("adafactor", lambda: torch.optim.Adafactor(model.parameters()), {}),
        ("came", lambda: came(model), {}),
        ("group", lambda: adamw(model), {"process_group": dist.group.WORLD}),
    ):
        found[name] = said(lambda m=make, s=settings: OptimizerInBackward(m(), **s))
    return found


def _found(rank):
    return {"averaged": averaged(rank), "sharded": sharded(rank)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes found; starting them takes longer than all they do."""
    return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


def test_averaged_gradients_step_as_with_distributed_data_parallel(results):
    for found in (dict(result["averaged"]) for result in results):
        assert "updated in backward and has a gradient again" in found["wrapped"]
        assert "process_group=torch.distributed.group.WORLD" in found.pop("wrapped")
        assert "step(closure) does not go with process_group=" in found.pop("closure")
        assert all(found.values()), found
        assert len(found) == 8


def test_sharded_parameters_step_as_after_backward(results):
    for found in (result["sharded"] for result in results):
        for name in ("adamw", "sgd"):
            assert found[name]
            assert found[f"{name}, freed"]
            assert found[f"{name}, whole"] < 1e-5
        assert "GaLore projects whole matrices" in found["galore"]
        assert "Adafactor takes norms in place" in found["adafactor"]
        assert "CAME takes means of whole matrices" in found["came"]
        assert "process_group= is for whole parameters" in found["group"]
