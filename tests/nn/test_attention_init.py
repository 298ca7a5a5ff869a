"""Keys that begin as copies of queries."""

import pytest
import torch
from torch import nn

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.transformer import Encoder


def encoder():
    return Encoder(50, 32, 2, 2, 64, 16, dropout=0.0)


def looks_at_itself(attention):
    x = torch.randn(64, 32)
    q, k = (layer(x).unflatten(-1, (2, 16)) for layer in (attention.query, attention.key))
    scores = torch.einsum("the,she->hts", q, k)
    return bool(scores.diagonal(dim1=1, dim2=2).mean() > 2 * scores.abs().mean())


@pytest.mark.parametrize("rank", [None, 8])
def test_an_encoder_looks_first_at_what_is_like_it(rank):
    model = encoder()
    if rank is not None:
        comera.tensorize_(
            model, comera.TTConfig(rank=rank, init="orthogonal", target_modules=r"blocks\..*")
        )
    assert not any(looks_at_itself(block.attention) for block in model.blocks)
    assert comera.init_keys_as_queries_(model) is model
    assert all(looks_at_itself(block.attention) for block in model.blocks)


def test_queries_and_keys_learn_apart():
    model = comera.init_keys_as_queries_(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randint(1, 50, (4, 16)))[..., 0].sum().backward()
    optimizer.step()
    attention = model.blocks[0].attention
    assert attention.query.weight.data_ptr() != attention.key.weight.data_ptr()
    assert not torch.equal(attention.query.weight, attention.key.weight)


def test_layers_named_as_llamas_are_found():
    model = CausalLanguageModel(Decoder(50, 32, 1, 2, 48), 50)
    comera.init_keys_as_queries_(model)
    attention = model.model.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight, attention.k_proj.weight)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="Sequential has no layer with children query and key"):
        comera.init_keys_as_queries_(nn.Sequential(nn.Linear(4, 4)))


def test_grouped_queries_are_refused_and_nothing_is_changed():
    class Attention(nn.Module):
        def __init__(self, keys):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, keys)

    model = nn.Sequential(Attention(8), Attention(4))
    before = model[0].k_proj.weight.clone()
    with pytest.raises(ValueError, match=r"1\.k_proj is Linear\(in_features=8, out_features=4"):
        comera.init_keys_as_queries_(model)
    assert torch.equal(model[0].k_proj.weight, before)
