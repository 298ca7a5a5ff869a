"""Dense layers that torch splits between two processes, beside tensor trains."""

import pytest
import torch
from torch import nn

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.params import is_sharded
from comera.train.sharded import whole_state
from tests.processes import in_two_processes

pytestmark = pytest.mark.slow  # two interpreters have to start

EARLY, LATE, STEPS, VOCAB = 4, 6, 18, 30
TRAINS = [r"model\.layers\.0\.mlp\..*", r"model\.layers\.1\.self_attn\.(q|o)_proj"]


def make_model(heads=2, trains=TRAINS):
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


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def train(model, make):
    optimizer = make(comera.param_groups(model, 2e-3, gate_lr=0.12))
    ranks = comera.TwoStage(model, 0.6, EARLY, LATE)
    step = comera.TrainStep(model, loss_fn, optimizer, ranks, accumulate=2, clip_norm=0.5)
    losses = []
    for number in range(STEPS):
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


def _found(rank):
    found = {}
    for name, make in MAKES.items():
        model = split_(make_model())
        shared = [key for key, param in model.named_parameters() if is_sharded(param)]
        held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
        found[name] = *train(model, make), shared, held
    with pytest.raises(ValueError, match="CAME stacks whole matrices"):
        comera.TrainStep(model, loss_fn, comera.CAME(comera.param_groups(model, 1e-2)))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return in_two_processes(_found, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", MAKES)
def test_losses_cut_and_weights_are_those_of_one_process(results, name):
    model = make_model()
    whole = sum(param.numel() for param in model.parameters())
    losses, weights = train(model, MAKES[name])
    assert losses[-1] < 0.9 * losses[0]
    assert sum(w.numel() for w in weights.values()) < whole  # ranks were cut
    for found in results:
        there, learned, shared, held = found[name]
        assert there == pytest.approx(losses, rel=1e-6)
        assert learned.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(learned[key], weight, rtol=1e-5, atol=1e-5)
        dense = {k for k, p in make_model().named_parameters() if p.dim() == 2 and "core" not in k}
        assert set(shared) == dense
        assert held < 0.7 * whole
