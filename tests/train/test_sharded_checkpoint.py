"""Checkpoints of which each process writes its part: from 1, 2 and 4 processes to 1, 2 and 4."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import comera
from comera.params import is_sharded
from comera.train.sharded import shard_dense_, whole_state
from comera.train.sharded_checkpoint import load_parts, save_parts
from tests.processes import in_processes

pytestmark = pytest.mark.slow  # interpreters have to start

EARLY, LATE, STEPS = 3, 4, 12
SAVED = {"before the cut": 5, "after it": 9}


def make_step():
    """The same at the start, in any number of processes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        comera.TTEmbedding(60, 16, rank=4), comera.TTLinear(16, 24, rank=4), nn.GELU(),
        nn.Linear(24, 18), nn.LayerNorm(18), nn.Linear(18, 5),
    )  # fmt: skip
    if dist.is_initialized():
        shard_dense_(model)
    optimizer = comera.MuonAdamW(comera.param_groups(model, 1e-2, gate_lr=0.3))
    ranks = comera.TwoStage(model, 0.6, EARLY, LATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    return comera.TrainStep(model, loss_fn, optimizer, ranks, clip_norm=1.0, scheduler=scheduler)


def loss_fn(model, x):
    return nn.functional.cross_entropy(model(x), x % 5)


def train(step, until):
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    while step.steps_done < until:
        rows = torch.randint(0, 60, (16,), generator=torch.Generator().manual_seed(step.steps_done))
        step(rows[rank::count])
        if step.ranks.due:
            step.ranks.finish_(step.optimizer)
    return step


def ending(step):
    """Weights and moments at the end."""
    moments = whole_state(step.optimizer.state_dict())["state"]
    weights = whole_state(step.model.state_dict())
    return {
        **{name: value.detach().clone() for name, value in weights.items()},
        **{
            f"{number} {key}": value.clone()
            for number, state in moments.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        },
    }


def save_all(folder, count):
    step = make_step()
    for name, number in SAVED.items():
        train(step, number)
        save_parts(folder / f"{count} {name}", step, {"count": count, "row": torch.arange(3)})
    train(step, STEPS)
    return ending(step)


def resume_all(folder, count):
    """Of what each number of processes has saved."""
    found = {}
    for name, number in SAVED.items():
        step = make_step()
        extra = load_parts(folder / f"{count} {name}", step)
        assert (extra["count"], extra["row"].tolist()) == (count, [0, 1, 2])
        assert step.steps_done == number
        train(step, STEPS)
        found[f"{count} {name}"] = ending(step)
    return found


def _in_four(rank):
    folder = Path(os.environ["FOLDER"])
    whole = save_all(folder, 4)
    files = {path.name for path in (folder / "4 after it").glob("*.distcp")}
    assert {name.split("_")[2] for name in files} == {"0", "1", "2", "3"}  # each has written
    return {"whole": whole, **resume_all(folder, 1), **resume_all(folder, 4)}


def _in_two(rank):
    folder = Path(os.environ["FOLDER"])
    whole = save_all(folder, 2)
    step = make_step()
    with pytest.raises(ValueError, match="holds a checkpoint: give each a folder of its own"):
        save_parts(folder / "2 after it", step)
    load_parts(folder / "2 after it", step)
    assert is_sharded(step.optimizer.state[step.model[3].weight]["exp_avg"])
    return {"whole": whole, **resume_all(folder, 1), **resume_all(folder, 4)}


def test_any_number_of_processes_goes_on_from_what_any_other_has_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    alone = save_all(tmp_path, 1)
    assert sum(map(torch.Tensor.numel, alone.values())) < sum(  # ranks were cut
        map(torch.Tensor.numel, ending(train(make_step(), 1)).values())
    )
    found = []
    for count, work in ((4, _in_four), (2, _in_two)):
        (tmp_path / f"processes {count}").mkdir()
        found += in_processes(count, work, tmp_path / f"processes {count}")
    found += [resume_all(tmp_path, 4), resume_all(tmp_path, 2)]
    for name, resumed in ((name, value) for each in found for name, value in each.items()):
        assert resumed.keys() == alone.keys(), name
        for key, value in alone.items():
            torch.testing.assert_close(resumed[key], value, rtol=1e-3, atol=1e-3, msg=name)


def test_what_is_no_such_checkpoint(tmp_path):
    step = make_step()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint that was written to its end"):
        load_parts(tmp_path, step)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match="does not hold a checkpoint of save_parts"):
        load_parts(tmp_path, step)
    save_parts(tmp_path / "own", step)
    other = comera.TrainStep(
        nn.Linear(3, 5), loss_fn, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    )
    with pytest.raises(ValueError, match="belongs to another model"):
        load_parts(tmp_path / "own", other)
