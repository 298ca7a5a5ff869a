"""Packages that train models of their own: agents, private gradients, sentence embeddings."""

import copy

import pytest
import torch
from torch import nn

import comera
from tests.peers import peer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs are not ours to mend

SMALL = comera.TTConfig(rank=4, init="orthogonal")


@pytest.fixture
def agent():
    stable_baselines3 = peer("stable_baselines3")
    layers = {"net_arch": [64, 64]}
    return stable_baselines3.DQN(
        "MlpPolicy", "CartPole-v1", policy_kwargs=layers, seed=0, learning_starts=20,
        train_freq=1, target_update_interval=10_000, device="cpu",
    )  # fmt: skip


def test_an_agent_learns_with_an_optimizer_that_is_built_anew(agent, caplog, tmp_path):
    comera.tensorize_(agent.policy, SMALL)
    assert "policy.optimizer" in caplog.text or "optimizer holds parameters" in caplog.text
    online, target = agent.policy.q_net, agent.policy.q_net_target
    assert all(map(torch.equal, online.parameters(), target.parameters()))  # a copy stays one
    agent.policy.optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    before = copy.deepcopy(agent.policy.q_net.state_dict())
    agent.learn(60)
    after = agent.policy.q_net.state_dict()
    assert not [key for key in before if torch.equal(before[key], after[key])]
    agent.save(tmp_path / "agent.zip")
    seen = torch.randn(5, 4)
    want = online(seen)
    with torch.no_grad():
        for param in online.parameters():
            param.zero_()
    agent.set_parameters(str(tmp_path / "agent.zip"))
    assert torch.equal(online(seen), want)


@pytest.mark.parametrize("plain_form", [False, True])
def test_gradients_of_each_sample(plain_form):
    """The plain form has them for layers without a bias, too."""
    opacus = peer("opacus")
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8, bias=not plain_form))
    comera.tensorize_(model, SMALL)
    if plain_form:
        comera.to_plain_(model)
    plain, inside, x = copy.deepcopy(model), opacus.GradSampleModule(model), torch.randn(6, 32)
    inside(x).square().sum(-1).mean().backward()
    alone = [
        torch.autograd.grad(plain(row[None]).square().sum(), list(plain.parameters())) for row in x
    ]
    for param, *want in zip(model.parameters(), *alone, strict=True):
        torch.testing.assert_close(param.grad_sample, torch.stack(want), rtol=1e-4, atol=1e-5)


def test_sentence_embeddings_are_compressed_saved_and_loaded(tmp_path, caplog):
    sentences = peer("sentence_transformers")
    from sentence_transformers import models as parts
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *"a cat dog sat ran on the mat".split()]  # noqa: SIM905
    table = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, "[UNK]"))
    table.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=table, **special).save_pretrained(tmp_path / "bert")
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert")
    first = parts.Transformer(str(tmp_path / "bert"), max_seq_length=16)
    model = sentences.SentenceTransformer(modules=[first, parts.Pooling(32)], device="cpu")
    texts = ["a cat sat on the mat", "the dog ran", "a dog sat"]
    batch = model.tokenize(texts)

    def loss_fn(model, batch):
        return model(dict(batch))["sentence_embedding"].square().mean()

    size = sum(param.numel() for param in model.parameters())
    comera.compress_(model, [batch] * 2, budget=0.8, loss_fn=loss_fn)
    assert sum(param.numel() for param in model.parameters()) <= 0.8 * size
    assert "pooler.dense" in caplog.text  # which plays no part, and stays dense
    want = model.encode(texts)
    model.save(str(tmp_path / "small"))
    again = sentences.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert (again.encode(texts) == want).all()
