"""Dense tables whose rows are shared out, beside tensor trains: as one process trains."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import comera
from comera.models.dlrm import DLRM
from comera.params import is_sharded
from comera.train.sharded import RowShardedBag, shard_dense_, whole_state
from tests.processes import in_worlds

pytestmark = pytest.mark.slow  # interpreters have to start

STEPS, BATCH = 20, 16
SIZES = {"user": 150, "item": 61, "city": 3}
"""The first becomes a tensor train; of the last four processes do not all get a row."""


def make_model():
    torch.manual_seed(0)
    model = DLRM(SIZES, 2, embedding_dim=8, bottom=[12], top=[12])
    return comera.tensorize_(model, comera.TTConfig(rank=4, target_modules=["tables.user"]))


def batch(number, rank=0, count=1):
    """With one item a row, and bags of users and cities of many sizes, some of them empty."""
    generator = torch.Generator().manual_seed(number)
    continuous = torch.randn(BATCH, 2, generator=generator)
    bags = {
        name: [
            torch.randint(0, SIZES[name], (int(size),), generator=generator)
            for size in torch.randint(0, 4, (BATCH,), generator=generator)
        ]
        for name in ("user", "city")
    }
    items = torch.randint(0, SIZES["item"], (BATCH, 1), generator=generator)
    labels = (items[:, 0] % 2).float()
    mine = slice(rank, None, count)
    fields = {"item": items[mine]}
    for name, each in bags.items():
        sizes = [len(bag) for bag in each[mine]]
        offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        fields[name] = torch.cat(each[mine]), offsets
    return continuous[mine], fields, labels[mine]


def loss_fn(model, given):
    continuous, fields, labels = given
    return F.binary_cross_entropy_with_logits(model(continuous, fields), labels)


def train(model, rank=0, count=1):
    """Through the cut of ranks."""
    optimizer = comera.MuonAdamW(comera.param_groups(model, 2e-2, gate_lr=0.2))
    ranks = comera.TwoStage(model, 0.6, 5, 6)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks, clip_norm=0.3)
    losses = []
    for number in range(STEPS):
        losses.append(float(step(batch(number, rank, count))))
        if ranks.due:
            ranks.finish_(optimizer)
    return losses, {name: w.detach().clone() for name, w in whole_state(model.state_dict()).items()}


def said(call):
    try:
        call()
    except (ValueError, IndexError) as error:
        return str(error)
    return "nothing was raised"


def _found(rank):
    count = dist.get_world_size()
    model = shard_dense_(make_model())
    tables = {name: type(table) for name, table in model.tables.items()}
    rows = [model.tables[name].weight.to_local().shape[0] for name in ("item", "city")]
    shared = [name for name, param in model.named_parameters() if is_sharded(param)]
    found = {"tables": tables, "rows": rows, "shared": shared, "trained": train(model, rank, count)}
    if count > 2:
        return found
    bags = model.tables["item"]
    mean = shard_dense_(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 4)))[0]
    whole = mean.weight.full_tensor().detach()
    twos = torch.tensor([[1, 8], [3, 3]]) - rank
    found["mean"] = float((mean(twos) - whole[twos].mean(1)).abs().max())
    found["said"] = {
        "uneven": said(lambda: bags(torch.zeros(2 + rank, 1, dtype=torch.long))),
        "no row": said(lambda: bags(torch.full((2, 1), 61))),
        "weights": said(lambda: bags(twos, None, torch.ones(2, 2))),
        "max": said(lambda: shard_dense_(nn.Sequential(nn.EmbeddingBag(9, 4, mode="max")))),
    }
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of so many processes found."""
    counts = (2, 4)
    stages = [(count, _found) for count in counts]
    return dict(zip(counts, in_worlds(stages, tmp_path_factory.mktemp("worlds")), strict=True))


@pytest.mark.parametrize("count", [2, 4])
def test_a_recommender_trains_as_in_one_process(results, count):
    losses, weights = train(make_model())
    assert losses[-1] < 0.95 * losses[0]
    assert sum(map(torch.Tensor.numel, weights.values())) < sum(  # ranks were cut
        param.numel() for param in make_model().state_dict().values()
    )
    held = {2: [[31, 2], [30, 1]], 4: [[16, 1], [16, 1], [16, 1], [13, 0]]}
    assert [found["rows"] for found in results[count]] == held[count]
    for found in results[count]:
        assert found["tables"]["item"] is found["tables"]["city"] is RowShardedBag
        assert found["tables"]["user"] is comera.TTEmbeddingBag
        dense = {name for name, p in make_model().named_parameters() if p.dim() == 2}
        assert set(found["shared"]) == {name for name in dense if "cores" not in name}
        there, learned = found["trained"]
        assert there == pytest.approx(losses, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(learned[name], weight, rtol=1e-3, atol=1e-3)


def test_what_a_shared_table_takes_and_what_it_refuses(results):
    for rank, found in enumerate(results[2]):
        assert found["mean"] < 1e-6
        texts = found["said"]
        assert "the processes ask for [2, 3] bags" in texts["uneven"], rank
        assert texts["no row"] == "an index is no row of 61"
        assert "per_sample_weights are not for tables" in texts["weights"]
        assert texts["max"].startswith("0 takes the largest of a bag (mode='max')")
