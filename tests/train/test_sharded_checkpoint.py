"""Dense matrices sharded, tensor trains whole: steps as of one process, and checkpoints in parts
or gathered in a lossy chain, from 1, 2, 4 processes to 1, 2, 4."""

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import comera
from comera.checkpoint.distributed import gathered, scatter_
from comera.params import is_sharded
from comera.train.run_state import load_parts, save_parts
from comera.train.sharded import shard_dense_, whole_state
from tests.processes import in_worlds, said

pytestmark = pytest.mark.slow  # interpreters have to start

EARLY, LATE, STEPS = 3, 4, 12
SAVED = {"before the cut": 5, "after it": 9}
COUNTS = (1, 2, 4)
OPTIMIZERS = {
    "muon": comera.MuonAdamW,
    "adamw": torch.optim.AdamW,
}
"""All that step parts of matrices."""


def make_step(name="muon"):
    """The same at the start, in any number of processes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        comera.TTEmbedding(60, 16, rank=4), comera.TTLinear(16, 24, rank=4), nn.GELU(),
        nn.Linear(24, 18), nn.LayerNorm(18), nn.Linear(18, 5),
    )  # fmt: skip
    if dist.is_initialized():
        shard_dense_(model)
    optimizer = OPTIMIZERS[name](comera.param_groups(model, 1e-2, gate_lr=0.3))
    ranks = comera.TwoStage(model, 0.6, EARLY, LATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    return comera.TrainStep(
        model, loss_fn, optimizer, ranks, accumulate=2, clip_norm=0.1, scheduler=scheduler
    )


def loss_fn(model, x):
    return nn.functional.cross_entropy(model(x), x % 5)


def train(step, until, losses=None):
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    while step.steps_done < until:
        rows = torch.randint(0, 60, (16,), generator=torch.Generator().manual_seed(step.steps_done))
        loss = float(step(rows[rank::count]))
        if losses is not None:
            losses.append(loss)
        if step.ranks is not None and step.ranks.due:
            step.ranks.finish_(step.optimizer)
    return step


def state_of(step):
    """Weights and moments."""
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
    """Parts, and gathered ones in a lossy chain whose second checkpoint builds on its first."""
    found = {}
    for name in OPTIMIZERS:
        step, losses = make_step(name), []
        with comera.CheckpointChain(folder / f"{count} {name}") as chain:
            for when, number in SAVED.items():
                train(step, number, losses)
                extra = {"count": count, "row": torch.arange(3)}
                save_parts(folder / f"{count} {name} {when}", step, extra)
                parts = gathered(step.model, step.optimizer)
                if parts is not None:
                    chain.save(number, **parts)
        found[name] = state_of(train(step, STEPS, losses))
        found[name, "losses"] = losses
        if count == 2:
            states = get_state_dict(step.model, step.optimizer)
            parts = dict(zip(("model", "optimizer"), states, strict=True))
            dcp.save(parts, checkpoint_id=folder / f"torch {name}")
            found[name, "gathered"] = gathered(step.model, step.optimizer)
    return found


def resume_all(folder):
    """Of what each number of processes has saved."""
    found = {}
    for count, name in itertools.product(COUNTS, OPTIMIZERS):
        for when, number in SAVED.items():
            step = make_step(name)
            extra = load_parts(folder / f"{count} {name} {when}", step)
            assert (extra["count"], extra["row"].tolist()) == (count, [0, 1, 2])
            assert step.steps_done == number
            found[count, name, when] = state_of(train(step, STEPS))
        found[count, name, "chain"] = resume_chain(folder / f"{count} {name}", name)
    return found


def resume_chain(folder, name):
    """What is there at once, and after some more steps."""
    step, saved = make_step(name), None
    if not dist.is_initialized() or dist.get_rank() == 0:
        with comera.CheckpointChain(folder) as chain:
            saved = chain.load()
    scatter_(step.model, step.optimizer, saved)
    loaded = state_of(step)
    if saved is not None:
        for key, value in saved.model.items():
            assert torch.equal(loaded[key], value), key
    on = comera.TrainStep(step.model, loss_fn, step.optimizer, clip_norm=1.0)
    return loaded, state_of(train(on, 3))


def refusals():
    model = make_step().model
    shared = [name for name, param in model.named_parameters() if is_sharded(param)]
    assert shared == ["3.weight", "5.weight"]
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


def _save(rank):
    return save_all(Path(os.environ["FOLDER"]), dist.get_world_size())


def _save_and_resume(rank):
    folder = Path(os.environ["FOLDER"])
    saved = _save(rank)
    files = {path.name for path in (folder / "4 muon after it").glob("*.distcp")}
    assert {name.split("_")[2] for name in files} == {"0", "1", "2", "3"}  # each has written
    return saved, resume_all(folder)


def _resume(rank):
    folder = Path(os.environ["FOLDER"])
    step = make_step()
    with pytest.raises(ValueError, match="holds a checkpoint: give each a folder of its own"):
        save_parts(folder / "2 muon after it", step)
    load_parts(folder / "2 muon after it", step)
    assert is_sharded(step.optimizer.state[step.model[3].weight]["exp_avg"])
    return resume_all(folder), refusals()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Ends of steps that never stopped, by number of processes, those of resumed ones, refusals."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(folder))
        whole = {1: save_all(folder, 1)}
        stages = [(2, _save), (4, _save_and_resume), (2, _resume)]
        two, four, resumed_by_two = in_worlds(stages, tmp_path_factory.mktemp("processes"))
        whole |= {2: two[0], 4: four[0][0]}
        resumed = [found for found, _ in resumed_by_two]
        by = {1: [resume_all(folder)], 2: resumed, 4: [found for _, found in four]}
    return whole, by, [refused for _, refused in resumed_by_two], folder


def assert_close(found, wanted, what):
    assert found.keys() == wanted.keys(), what
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-3, msg=f"{what}: {key}")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_processes_goes_on_from_parts_of_any_other(results, name, count):
    whole, by, *_ = results
    alone = whole[1][name]
    entries = sum(map(torch.Tensor.numel, alone.values()))
    assert entries < sum(map(torch.Tensor.numel, state_of(train(make_step(name), 1)).values()))
    assert_close(whole[count][name], alone, f"{name} of {count}")
    assert whole[count][name, "losses"] == pytest.approx(whole[1][name, "losses"], rel=1e-4)
    for found, of, when in itertools.product(by[count], COUNTS, SAVED):
        assert_close(found[of, name, when], alone, f"{name} from {of} {when} to {count}")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("of", COUNTS)
def test_any_number_of_processes_goes_on_from_a_lossy_chain_of_any_other(results, name, of):
    """As one process does from the same files, which hold less than was trained."""
    _, by, *_ = results
    ((loaded, trained),) = (found[of, name, "chain"] for found in by[1])
    for count in COUNTS:
        for mine, later in (found[of, name, "chain"] for found in by[count]):
            assert mine.keys() == loaded.keys()
            assert all(torch.equal(mine[key], value) for key, value in loaded.items())
            assert_close(later, trained, f"{name} from {of} to {count}")
    assert any(not torch.equal(loaded[key], value) for key, value in trained.items())


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_torch_are_read_by_one_process(results):
    whole, _, _, folder = results
    step = train(make_step("adamw"), STEPS)  # ranks are as they were saved
    parts = dict(
        zip(("model", "optimizer"), get_state_dict(step.model, step.optimizer), strict=True)
    )
    dcp.load(parts, checkpoint_id=folder / "torch adamw", no_dist=True)
    there = whole[2]["adamw", "gathered"]["model"]
    assert there.keys() == parts["model"].keys()
    for name, weight in there.items():
        assert torch.equal(parts["model"][name], weight)
        assert torch.equal(whole[2]["adamw"][name], weight)


def test_what_cannot_step_parts_says_so_when_the_step_is_made(results):
    for found in results[2]:
        assert found["CAME"].startswith("CAME takes means of whole matrices, and fully_shard")
        assert found["mixed"].startswith(
            "the optimizer's group '' holds parameters that are shared"
        )
        assert found["in backward"].startswith("OptimizerInBackward steps before the gradients of")
        assert found["no dense"].startswith("the model has no dense matrices to share out")
