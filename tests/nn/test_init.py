import math

import pytest
import torch
from torch import nn

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.models.transformer import Encoder
from comera.nn.init import orthogonal_


def singular_values(layer):
    return torch.linalg.svdvals(layer.weight.detach().double())


@pytest.mark.parametrize("rank", [16, [8, 16, 40, 16, 8], [4, 8, 3, 8, 4]], ids=str)
def test_all_singular_values_are_equal(rank):
    layer = comera.TTLinear(256, 384, rank=rank)
    middle = layer.ranks[layer.shape.split - 1]
    values = singular_values(layer)
    torch.testing.assert_close(values[:middle], values[:1].expand(middle), rtol=1e-5, atol=0)
    assert values[middle:].max() < 1e-5 * values[0]


def test_gradients_of_all_cores_are_of_one_size():
    """Normal cores of one spread differ more than tenfold here."""
    torch.manual_seed(0)
    layer = comera.TTLinear(256, 256, rank=[8, 32, 96, 32, 8])
    y = layer(torch.randn(512, 256))
    y.backward(torch.randn_like(y))
    sizes = [float(core.grad.norm() / core.detach().norm()) for core in layer.cores]
    assert max(sizes) < 3 * min(sizes)


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ([(1, 4, 4), (4, 5, 7), (7, 6, 6), (6, 6, 1)], 2),
        ([(1, 3, 2, 6), (6, 4, 2, 5), (5, 4, 3, 1)], 1),  # a table
        ([(1, 2, 9), (9, 3, 4), (4, 2, 1)], 2),  # a bond wider than its modes allow
        ([(1, 5, 1), (1, 4, 1)], 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_root_mean_square_is_met(sizes, split, dtype):
    cores = [torch.empty(size, dtype=dtype) for size in sizes]
    orthogonal_(cores, split, 0.3)
    product = cores[0].double()
    for core in cores[1:]:
        product = torch.tensordot(product, core.double(), 1)
    exact = dtype == torch.float64
    assert float(product.square().mean()) == pytest.approx(0.09, rel=1e-9 if exact else 0.05)


def test_normal_cores_give_the_spread_on_average():
    layer = comera.TTLinear(256, 256, rank=[8, 8, 16, 8, 8], bias=False)
    squares = []
    for _ in range(30):
        layer.reset_parameters(0.5, "normal")
        squares.append(float(layer.weight.detach().square().mean()))
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(0.5, rel=0.06)


def test_an_unknown_start_is_named():
    with pytest.raises(ValueError, match="init='zeros' must be 'orthogonal' or 'normal'"):
        comera.TTLinear(8, 8, rank=2).reset_parameters(init="zeros")


def test_a_table_starts_with_the_spread_asked_for():
    table = comera.TTEmbedding(1000, 64, rank=8)
    table.reset_parameters(std=0.02)
    rows = table(torch.arange(1000)).detach()
    assert float(rows.square().mean().sqrt()) == pytest.approx(0.02, rel=0.05)
    assert math.isclose(float(rows.mean()), 0, abs_tol=2e-3)


@pytest.mark.parametrize("init", ["orthogonal", "normal", "svd"])
def test_layers_that_start_at_zero_do_so_and_train(init):
    """As the last layers of residual branches do; cores that are all zero have no gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(60, 32), torch.nn.Linear(32, 64))
    for layer in model:
        torch.nn.init.zeros_(layer.weight)
    settings = {"hot_rows": 20, "hot_rank": 4, "init": init}
    comera.tensorize_(model, comera.TTConfig(rank=8, order=2, embedding_order=2, **settings))
    assert not model[0].weight.any()
    assert not model[1].weight.any()
    model[1].bias.data.normal_()
    for layer, given in zip(model, (torch.arange(60), torch.randn(8, 32)), strict=True):
        optimizer = torch.optim.AdamW(comera.param_groups(layer, 1e-2))
        for _ in range(3):
            (layer(given) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (layer.weight != 0).all()


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
