"""Sharded models: those of ``fully_shard``, of torch's tensor parallelism, and tables by rows."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F

import comera
from comera.checkpoint.chain import Checkpoint
from comera.checkpoint.distributed import scatter_
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.dlrm import DLRM
from comera.params import is_sharded
from comera.train.sharded import RowShardedBag, Sharded, shard_dense_, whole_state
from tests.processes import in_worlds, said

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
    flat = [flat_shards(make_model(), kept) for kept in (True, False)]
    dense = shard_dense_(nn.Sequential(nn.Linear(40, 40)))
    layer, tiny = nn.Sequential(fully_shard(nn.Linear(40, 40))), comera.TTConfig(rank=2)
    saved = Checkpoint(1, cut_state(), None, {}, {})
    beside = nn.Sequential(comera.TTEmbedding(60, 16, rank=4), nn.Linear(16, 5))
    beside = flat_shards(beside, True, ignored_modules=[beside[0]])
    return {
        "TrainStep": said(lambda: comera.TrainStep(sharded, loss_fn, adamw(sharded))),
        "TwoStage": said(lambda: comera.TwoStage(sharded, 0.5, 2, 2)),
        "ImportancePruning": said(lambda: comera.ImportancePruning(sharded, 0.5, 2)),
        "BatchedContraction": said(lambda: comera.BatchedContraction(sharded)),
        "truncate_": said(lambda: comera.truncate_(sharded)),
        "canonicalize_": said(lambda: comera.canonicalize_(sharded)),
        "MuonAdamW": said(lambda: comera.MuonAdamW(groups)),
        "save_model": said(lambda: comera.save_model(sharded, os.environ["FOLDER"])),
        "densify_": said(lambda: comera.densify_(sharded)),
        "layer.weight": said(lambda: sharded[1].weight),
        "set_weight_": said(lambda: sharded[1].set_weight_(torch.ones(24, 16))),
        "tensorize_": [said(partial(comera.tensorize_, each, tiny)) for each in (dense, layer)],
        "cut state": said(lambda: set_model_state_dict(sharded, cut_state(), options=WHOLE)),
        "scatter_": said(lambda: scatter_(sharded, None, saved)),
        "CAME of flat shards": [said(partial(comera.CAME, each.parameters())) for each in flat],
        "truncate_ of flat shards": [said(partial(comera.truncate_, each)) for each in flat],
        "TrainStep of flat shards": said(lambda: comera.TrainStep(beside, loss_fn, adamw(beside))),
        "whole": all(map(is_sharded, sharded.parameters())),
        "later TrainStep": said(lambda: step(x)),
        "later TwoStage": said(lambda: ranks.objective(loss_fn(later, x))),
        "later BatchedContraction": said(contracted.__enter__),
        "at the end": said(ranks.finish_),
        "Muon of none": said(
            lambda: comera.MuonAdamW([group for group in groups if group["name"] != "cores"])
        ),
    }


def flat_shards(model, kept, **settings):
    """The older way, in which the model keeps its parameters, or has but one."""
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=device, use_orig_params=kept, **settings)


WHOLE = StateDictOptions(full_state_dict=True)


def cut_state():
    model = make_model()
    with torch.no_grad():
        model[1].gates[0][1:] = 0
    comera.truncate_(model)
    return model.state_dict()


def begun_on_meta(rank):
    """Each process draws other numbers, and has a part of those of the first."""
    found = {}
    for name, make in START.items():
        with torch.device("meta"):
            model = make()
        model = shard(nn.Sequential(model)).to_empty(device="cpu")
        torch.manual_seed(rank)
        model[0].reset_parameters()
        found[name] = whole(model)
    return found


START = {
    "linear": lambda: comera.TTLinear(12, 20, rank=4),
    "blocks": lambda: comera.BTTLinear(12, 20, rank=2),
    "hot rank": lambda: comera.TTEmbedding(90, 24, rank=4, hot_rows=30, hot_rank=2),
}


def state_without_extras(rank):
    """As of a table of torch."""
    model, alone = make_model(seed=1), make_model()
    state = alone.state_dict()
    del state["0.rows_scattered"]
    set_model_state_dict(shard(model), state, options=WHOLE)
    return all(map(torch.equal, whole(model).values(), alone.parameters()))


def norm_in_float64(rank):
    model = shard_dense_(nn.Sequential(nn.Linear(4, 4)).double())
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()])
    for param in model.parameters():
        param.grad = param.detach() * 0 + 1e30  # its square is above what float32 holds
    return float(Sharded(model, optimizer).clip_(1.0))


def norm_with_a_replicated_bias(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": RowwiseParallel()})
    for param in model.parameters():
        param.grad = param.detach() * 0 + 1
    return float(Sharded(model, torch.optim.SGD(model.parameters())).clip_(1.0))


def _two(rank):
    loop = own_loop(rank, os.environ["FOLDER"])
    found = {"loop": loop, "refusals": refusals(rank), "tensor parallel": _tensor_parallel(rank)}
    found |= {"start": begun_on_meta(rank), "extras": state_without_extras(rank)}
    found["replicated"] = norm_with_a_replicated_bias(rank)
    return found | {"tables": _tables(rank), "norm": norm_in_float64(rank)}


def _four(rank):
    return {"tables": _tables(rank)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two and of four processes found; starting them takes longer than all they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(tmp_path_factory.mktemp("checkpoint")))
        worlds = in_worlds([(2, _two), (4, _four)], tmp_path_factory.mktemp("processes"))
    return dict(zip((2, 4), worlds, strict=True))


def test_a_loop_of_ones_own_and_its_checkpoints_go_on(results):
    for sharded, replicated, again in (result["loop"] for result in results[2]):
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
        "save_model",
        "densify_",
    ],
)
def test_what_needs_whole_tensor_trains_says_so_when_it_is_made(results, what):
    for found in (result["refusals"] for result in results[2]):
        assert found[what].startswith(
            f"{what} needs whole tensor trains, and 0.cores.0 of shape (1, 20, 2, 4) is sharded"
        )
        assert "DistributedDataParallel" in found[what]
        assert "a loop of your own with torch.optim.AdamW" in found[what]


def test_what_cannot_be_done_to_shards_is_refused_and_changes_nothing(results):
    for found in (result["refusals"] for result in results[2]):
        for what in ("layer.weight", "set_weight_"):
            assert found[what].startswith(f"{what} needs whole tensor trains, and cores.0 of")
        for text in found["tensorize_"]:
            assert text.startswith("tensorize_ needs whole matrices, and 0 of shape")
        assert found["cut state"].startswith("load_state_dict of other ranks (1) needs whole")
        assert found["scatter_"].startswith("scatter_ of other ranks needs whole tensor trains")
        assert found["whole"]
        for text in found["CAME of flat shards"]:
            assert text.startswith("CAME does not take the flat parts")
        assert "TrainStep does not take the flat parts" in found["TrainStep of flat shards"]
        for text in found["truncate_ of flat shards"]:
            assert text.startswith("truncate_ needs whole tensor trains, and ")


def test_what_begins_on_meta_is_drawn_whole_and_shared_out(results):
    first, second = (result["start"] for result in results[2])
    for name, make in START.items():
        torch.manual_seed(0)
        alone = make()
        torch.manual_seed(0)
        alone.reset_parameters()
        for key, value in alone.named_parameters():
            assert torch.equal(first[name][f"0.{key}"], second[name][f"0.{key}"]), key
            if key != "bias":  # that DTensor draws
                assert torch.equal(first[name][f"0.{key}"], value), key


def test_a_state_need_not_have_what_only_tables_save(results):
    assert [result["extras"] for result in results[2]] == [True, True]


def test_norms_are_as_exact_as_gradients(results):
    assert [result["norm"] for result in results[2]] == pytest.approx([20**0.5 * 1e30] * 2)
    assert [result["replicated"] for result in results[2]] == pytest.approx([20**0.5] * 2)


def test_where_the_model_was_sharded_afterwards_it_is_said_at_first_use(results):
    for found in (result["refusals"] for result in results[2]):
        assert found["later TrainStep"].startswith("BatchedContraction needs whole tensor trains")
        assert found["later BatchedContraction"].startswith(
            "BatchedContraction needs whole tensor trains"
        )
        assert found["later TwoStage"].startswith("TwoStage needs whole tensor trains")
        assert found["at the end"].startswith("TwoStage needs whole tensor trains")


def test_muon_says_which_optimizer_takes_shards(results):
    for found in (result["refusals"] for result in results[2]):
        assert "MuonAdamW steps whole matrices" in found["MuonAdamW"]
        assert "use torch.optim.AdamW" in found["MuonAdamW"]
        assert found["Muon of none"] == "nothing was raised"


EARLY, LATE, DECODER_STEPS, VOCAB = 4, 6, 18, 30
TRAINS = [r"model\.layers\.0\.mlp\..*", r"model\.layers\.1\.self_attn\.(q|o)_proj"]


def make_decoder(heads=2, trains=TRAINS):
    """Of three blocks one has tensor trains for a whole part, one for two layers of a part."""
    torch.manual_seed(0)
    model = CausalLanguageModel(Decoder(VOCAB, 16, 3, heads, 24), VOCAB)
    for param in model.parameters():
        with torch.no_grad():
            param.mul_(4)  # at 0.02 the model would hardly do anything
    if trains:
        config = comera.TTConfig(rank=4, order=2, target_modules="|".join(trains), init="svd")
        comera.tensorize_(model, config)
    return model.double()  # so that rounding does not grow to anything in these steps


def predict(model, tokens):
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def train_decoder(model, make):
    optimizer = make(comera.param_groups(model, 2e-3, gate_lr=0.12))
    ranks = comera.TwoStage(model, 0.6, EARLY, LATE)
    step = comera.TrainStep(model, predict, optimizer, ranks, accumulate=2, clip_norm=0.5)
    losses = []
    for number in range(DECODER_STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCAB, (4, 1), generator=generator)
        losses.append(float(step((tokens + 3 * torch.arange(9)) % VOCAB)))
        if ranks.due:
            ranks.finish_(optimizer)
    weights = whole_state(model.state_dict())
    return losses, {name: weight.detach().clone() for name, weight in weights.items()}


MAKES = {"muon": comera.MuonAdamW, "adamw": torch.optim.AdamW}


def split_(model):
    """Torch's tensor parallelism: a part with a tensor train in it is split by columns alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def dense(name):
        return type(model.get_submodule(name)) is nn.Linear

    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for k in range(3):
        for part in (
            [f"model.layers.{k}.self_attn.{each}_proj" for each in "qkvo"],
            [f"model.layers.{k}.mlp.{each}_proj" for each in ("gate", "up", "down")],
        ):
            if all(map(dense, part)):
                plan |= {name: ColwiseParallel() for name in part[:-1]}
                plan[part[-1]] = RowwiseParallel()
            else:
                gathered = ColwiseParallel(output_layouts=Replicate())
                plan |= {name: gathered for name in part if dense(name)}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def _tensor_parallel(rank):
    found = {}
    for name, make in MAKES.items():
        model = split_(make_decoder())
        shared = [key for key, param in model.named_parameters() if is_sharded(param)]
        held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
        found[name] = *train_decoder(model, make), shared, held
    with pytest.raises(ValueError, match="CAME takes means of shards by rows"):
        comera.TrainStep(model, predict, comera.CAME(comera.param_groups(model, 1e-2)))
    return found


@pytest.mark.parametrize("name", MAKES)
def test_losses_cut_and_weights_are_those_of_one_process(results, name):
    model = make_decoder()
    whole = sum(param.numel() for param in model.parameters())
    losses, weights = train_decoder(model, MAKES[name])
    assert losses[-1] < 0.9 * losses[0]
    assert sum(w.numel() for w in weights.values()) < whole  # ranks were cut
    for found in (result["tensor parallel"] for result in results[2]):
        there, learned, shared, held = found[name]
        assert there == pytest.approx(losses, rel=1e-6)
        assert learned.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(learned[key], weight, rtol=1e-5, atol=1e-5)
        dense = {
            k for k, p in make_decoder().named_parameters() if p.dim() == 2 and "core" not in k
        }
        assert set(shared) == dense
        assert held < 0.7 * whole


TABLE_STEPS, BATCH = 20, 16
SIZES = {"user": 150, "item": 61, "city": 3}
"""The first becomes a tensor train; of the last four processes do not all get a row."""


def make_recommender():
    torch.manual_seed(0)
    model = DLRM(SIZES, 2, embedding_dim=8, bottom=[12], top=[12])
    return comera.tensorize_(model, comera.TTConfig(rank=4, target_modules=["tables.user"]))


def click_batch(number, rank=0, count=1):
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


def click_loss(model, given):
    continuous, fields, labels = given
    return F.binary_cross_entropy_with_logits(model(continuous, fields), labels)


def train_recommender(model, rank=0, count=1):
    """Through the cut of ranks."""
    optimizer = comera.MuonAdamW(comera.param_groups(model, 2e-2, gate_lr=0.2))
    ranks = comera.TwoStage(model, 0.6, 5, 6)
    step = comera.TrainStep(model, click_loss, optimizer, ranks, clip_norm=0.3)
    losses = []
    for number in range(TABLE_STEPS):
        losses.append(float(step(click_batch(number, rank, count))))
        if ranks.due:
            ranks.finish_(optimizer)
    return losses, {name: w.detach().clone() for name, w in whole_state(model.state_dict()).items()}


def _tables(rank):
    count = dist.get_world_size()
    model = shard_dense_(make_recommender())
    tables = {name: type(table) for name, table in model.tables.items()}
    rows = [model.tables[name].weight.to_local().shape[0] for name in ("item", "city")]
    shared = [name for name, param in model.named_parameters() if is_sharded(param)]
    found = {
        "tables": tables,
        "rows": rows,
        "shared": shared,
        "trained": train_recommender(model, rank, count),
    }
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


@pytest.mark.parametrize("count", [2, 4])
def test_a_recommender_trains_as_in_one_process(results, count):
    losses, weights = train_recommender(make_recommender())
    assert losses[-1] < 0.95 * losses[0]
    assert sum(map(torch.Tensor.numel, weights.values())) < sum(  # ranks were cut
        param.numel() for param in make_recommender().state_dict().values()
    )
    held = {2: [[31, 2], [30, 1]], 4: [[16, 1], [16, 1], [16, 1], [13, 0]]}
    assert [result["tables"]["rows"] for result in results[count]] == held[count]
    for found in (result["tables"] for result in results[count]):
        assert found["tables"]["item"] is found["tables"]["city"] is RowShardedBag
        assert found["tables"]["user"] is comera.TTEmbeddingBag
        dense = {name for name, p in make_recommender().named_parameters() if p.dim() == 2}
        assert set(found["shared"]) == {name for name in dense if "cores" not in name}
        there, learned = found["trained"]
        assert there == pytest.approx(losses, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(learned[name], weight, rtol=1e-3, atol=1e-3)


def test_what_a_shared_table_takes_and_what_it_refuses(results):
    for rank, found in enumerate(result["tables"] for result in results[2]):
        assert found["mean"] < 1e-6
        texts = found["said"]
        assert "the processes ask for [2, 3] bags" in texts["uneven"], rank
        assert texts["no row"] == "an index is no row of 61"
        assert "per_sample_weights are not for tables" in texts["weights"]
        assert texts["max"].startswith("0 takes the largest of a bag (mode='max')")
