"""Dense layers split between two processes, beside tensor trains: as one process trains."""

import pytest
import torch
from torch import nn

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.params import is_sharded
from comera.train.sharded import whole_state
from comera.train.tensor_parallel import split_dense_
from tests.processes import in_two_processes, said

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


def _found(rank):
    found = {}
    for name, make in MAKES.items():
        model = split_dense_(make_model())
        shared = [key for key, param in model.named_parameters() if is_sharded(param)]
        held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
        found[name] = *train(model, make), shared, held
    tied = make_model()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    split_dense_(tied)
    found["tied"] = tied.lm_head.weight is tied.model.embed_tokens.weight
    found["refusals"] = {
        "heads": said(lambda: split_dense_(make_model(heads=1))),
        "shape": said(lambda: split_dense_(nn.Sequential(nn.Linear(4, 4)))),
        "none": said(lambda: split_dense_(make_model(trains=[".*_proj", "lm_head", ".*tokens"]))),
        "galore": said(
            lambda: comera.TrainStep(
                model, loss_fn, comera.CAME(comera.param_groups(model, 1e-2))
            )
        ),
    }  # fmt: skip
    transformers = _split_llama()
    return found | {"llama": transformers}


def _split_llama():
    """Logits of Hugging Face's Llama, whole and split, if it is installed; grouped queries too."""
    try:
        import transformers
    except ModuleNotFoundError:
        return None
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(12).view(2, 6)
    whole = model(tokens).logits.detach()
    return whole, split_dense_(model)(tokens).logits.detach()


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


def test_what_cannot_be_split_says_so(results):
    for found in (result["refusals"] for result in results):
        assert "self_attn.q_proj has 1 columns" in found["heads"] or "1 heads" in found["heads"]
        assert "which 2 processes cannot have equal parts of" in found["heads"]
        assert found["shape"].startswith("the model is not in the shape of LLaMA: no module has")
        assert found["none"].startswith("the model has no dense layers without bias to split")
        assert found["galore"].startswith("CAME stacks whole matrices")
    assert all(result["tied"] for result in results)


def test_llama_of_hugging_face_gives_the_same_logits(results):
    if results[0]["llama"] is None:
        pytest.skip("transformers is not installed")
    for found in results:
        whole, split = found["llama"]
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)
