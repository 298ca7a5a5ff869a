import copy
import math
import shutil

import pytest
import torch
from torch import nn

import comera
from comera.nn.embedding import TTEmbedding
from comera.nn.linear import TTLinear
from comera.ops.context import static_shapes

TABLES = {
    "plain": {},
    "in order": {"scatter_rows": False},
    "padding": {"padding_idx": 3},
    "last row pads": {"padding_idx": -1},
    "hot rows": {"hot_rows": 7},
    "hot rank": {"hot_rows": 7, "hot_rank": 3, "padding_idx": 3},
    "hot padding": {"hot_rows": 7, "padding_idx": 3},
    "two cores": {"shape": ((7, 8), (4, 3))},
}


@pytest.fixture(params=TABLES)
def layer(request, device):
    settings = {"rank": 4, "order": 3, **TABLES[request.param]}
    layer = TTEmbedding(50, 12, device=device, dtype=torch.float64, **settings)
    with torch.no_grad():
        for gate in layer.gates:
            gate.uniform_(0.5, 1.5)[1] = 0.001  # pruned
    return layer


def error(got, want):
    return float((got.detach() - want.detach()).double().norm() / want.detach().double().norm())


def low_rank(rows, width, rank=4, dtype=torch.float32, **settings):
    """A table that decays: a sum of few outer products and a little noise."""
    table = nn.Embedding(rows, width, dtype=dtype, **settings)
    with torch.no_grad():
        signal = torch.randn(rows, rank) @ torch.randn(rank, width)
        table.weight.copy_(signal + 0.1 * torch.randn(rows, width))
    return table


def test_equals_torchs_embedding_of_its_weight(layer, device):
    params = list(layer.parameters())
    for x in (torch.arange(50).reshape(2, 25), torch.tensor([[0, 3, 3], [49, 8, 0]])):
        ys = [layer(x.to(device)), nn.functional.embedding(x.to(device), layer.weight)]
        torch.testing.assert_close(*ys)
        torch.testing.assert_close(layer.to_dense()(x.to(device)), ys[1])
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), params) for y in ys))


@pytest.mark.parametrize("padding_idx", [0, 49, -1, -50])
@pytest.mark.parametrize("hot_rows", [0, 5])
def test_the_padding_row_is_zero_and_gets_no_gradient(padding_idx, hot_rows):
    layer = TTEmbedding(50, 12, padding_idx, rank=4, hot_rows=hot_rows)
    row = padding_idx % 50
    assert layer.padding_idx == nn.Embedding(50, 12, padding_idx).padding_idx == row
    y = layer(torch.tensor([row, row]))
    assert torch.equal(y, torch.zeros(2, 12))
    assert torch.equal(layer.weight[row], torch.zeros(12))
    y.sum().backward()
    assert all(param.grad.eq(0).all() for param in layer.parameters())


@pytest.mark.parametrize("size", [(1000, 64), (30522, 768)], ids=str)
def test_rows_start_with_the_spread_of_torchs(size):
    x = torch.randint(size[0], (64,))
    squares = []
    for _ in range(60):
        squares.append(float(TTEmbedding(*size, rank=16)(x).detach().square().mean()))
    # A product of small random cores varies from draw to draw; 60 of them agree to some percent.
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("tolerance", [0.5, 0.2, 0.01])
@pytest.mark.parametrize("hot_rows", [0, 9])
def test_tolerance_is_met(tolerance, hot_rows):
    table = low_rank(101, 30)
    layer = TTEmbedding.from_embedding(table, tolerance=tolerance, hot_rows=hot_rows)
    assert error(layer.weight, table.weight) <= tolerance
    assert torch.equal(layer(torch.arange(hot_rows)), table.weight[:hot_rows])


def test_hot_rows_of_a_rank_are_the_nearest_ones():
    table = nn.Embedding(101, 30)
    layer = TTEmbedding.from_embedding(table, rank=4, hot_rows=40, hot_rank=5)
    hot = table.weight[:40].detach()
    u, s, v = torch.linalg.svd(hot)
    nearest = u[:, :5] * s[:5] @ v[:5]
    torch.testing.assert_close(layer.weight[:40].detach(), nearest, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compression", [3, 20])
def test_compression_is_met(compression):
    layer = TTEmbedding.from_embedding(low_rank(1000, 64), compression=compression)
    assert sum(core.numel() for core in layer.cores) * compression <= layer.shape.num_dense


def test_decomposing_a_tensor_train_gives_it_back(layer):
    twin = TTEmbedding.from_embedding(
        layer.to_dense(), tolerance=1e-9, shape=layer.shape,
        hot_rows=layer.hot_rows, hot_rank=layer.hot_rank,
    )  # fmt: skip
    torch.testing.assert_close(twin.weight, layer.weight)
    assert twin.padding_idx == layer.padding_idx
    padded = layer.padding_idx is not None or layer.shape.num_dense != layer.num_dense
    if not padded and not layer.scatter_rows:  # zeros and moved rows cost rank
        assert all(a <= b for a, b in zip(twin.ranks, layer.live_ranks, strict=True))


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize(
    ("kind", "torchs", "own"),
    [
        (TTEmbedding, nn.Embedding, {"padding_idx": 3}),
        (comera.TTEmbeddingBag, nn.EmbeddingBag, {"mode": "max", "include_last_offset": True}),
    ],
)
def test_tables_are_made_of_pretrained_rows(kind, torchs, own, freeze):
    rows = low_rank(101, 30).weight.detach()
    rows[3] = 0
    layer = kind.from_pretrained(rows, freeze, tolerance=1e-5, hot_rows=5, **own)
    dense = torchs.from_pretrained(rows, freeze, **own)
    assert {param.requires_grad for param in layer.parameters()} == {not freeze}
    assert all(getattr(layer, key) == getattr(dense, key) for key in own)
    assert error(layer.weight, rows) < 1e-4


def test_conversion_keeps_settings_and_the_random_state():
    table = low_rank(300, 32, padding_idx=2, sparse=True, dtype=torch.bfloat16).eval()
    table.weight.data[2] = 0  # as torch begins
    before = torch.get_rng_state()
    layer = TTEmbedding.from_embedding(table, rank=4, hot_rows=3)
    assert torch.equal(torch.get_rng_state(), before)
    for twin in (layer, layer.to_dense()):
        assert (twin.padding_idx, twin.training) == (2, False)
        assert (twin.num_embeddings, twin.embedding_dim) == (300, 32)
        assert twin.weight.dtype == torch.bfloat16
    assert torch.equal(layer.hot, table.weight[:3])
    assert type(layer.to_dense()) is nn.Embedding
    assert (layer.sparse, layer.to_dense().sparse) == (False, True)
    assert TTEmbedding.from_config(layer.config()).to_dense().sparse


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"max_norm": 1.0}, NotImplementedError, r"TTEmbedding does not support max_norm=1\.0"),
        ({"scale_grad_by_freq": True}, NotImplementedError, "scale_grad_by_freq=True"),
        ({"sparse": True}, NotImplementedError, "sparse=True: .* gradients are dense"),
        ({"padding_idx": 50}, ValueError, "padding_idx=50 is outside a table of 50 rows"),
        ({"hot_rows": 50}, ValueError, "hot_rows=50 must leave rows.* 0 to 49"),
        ({"hot_rows": -1}, ValueError, "hot_rows=-1"),
        ({"hot_rows": 2.5}, ValueError, r"^hot_rows=2\.5 must be a whole number"),
        ({"padding_idx": 2.5}, ValueError, r"^padding_idx=2\.5 must be a whole number"),
        ({"hot_rank": 3}, ValueError, "hot_rank=3 is of hot rows: give hot_rows too"),
        ({"hot_rows": 20, "hot_rank": 8}, ValueError, "hot_rank=8 must be 1 to 7: .* 20 rows"),
        ({"hot_rows": 20, "hot_rank": 0}, ValueError, "hot_rank=0 must be 1 to 7"),
        ({"rank": 4, "compression": 2}, ValueError, "rank=4 and compression=2"),
        ({"rank": [3, 3], "order": 2}, ValueError, r"rank=\[3, 3\] names 2 bonds"),
        ({"shape": ((5, 5), (3, 4))}, ValueError, "5 x 5 multiply to 25, less than num_embeddings"),
        ({"shape": ((50,), (12,))}, ValueError, r"at least two of each; got \(50,\) and \(12,\)"),
        ({"dtype": torch.int64}, ValueError, r"dtype=torch\.int64"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_settings_are_repeated(settings, kind, message):
    with pytest.raises(kind, match=message):
        TTEmbedding(50, 12, **settings)


def test_wrong_indices_are_refused(layer):
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match=f"index {wrong} at 1 is out of range.* 50 rows"):
            layer.cpu()(torch.tensor([0, wrong]))


@pytest.mark.parametrize("settings", [{}, {"hot_rows": 5}, {"hot_rows": 9, "hot_rank": 2}], ids=str)
@pytest.mark.parametrize("kind", [comera.TTEmbedding, comera.TTEmbeddingBag])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_masks_are_no_indices(settings, kind, compiled, request):
    """Torch refuses them too; taken for 0 and 1 they would read two rows."""
    request.addfinalizer(torch._dynamo.reset)  # it passes by what has raised
    layer = kind(50, 24, rank=4, **settings)
    run = torch.compile(layer, backend="eager") if compiled else layer
    with pytest.raises(TypeError, match=r"indices are torch\.bool.*give the rows' numbers"):
        run(torch.tensor([[True, False]]))
    with pytest.raises(TypeError, match=r"indices are torch\.float32; they must be whole numbers"):
        run(torch.tensor([[1.0, 0.5]]))


def assert_compiled(model, **settings):
    compiled = torch.compile(model, fullgraph=True, dynamic=True, **settings)
    for batch in (3, 5):
        x = torch.randint(50, (batch, 7))
        got, want = compiled(x), model(x)
        torch.testing.assert_close(got, want)
        got, want = (torch.autograd.grad(y.sum(), model.parameters()) for y in (got, want))
        for grad, reference in zip(got, want, strict=True):
            # Sums in another order: rounding is that of the largest entry, not of each.
            torch.testing.assert_close(
                grad, reference, rtol=1.3e-6, atol=1e-5 * float(reference.abs().max())
            )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("rows", "width", "rank"),
    [(50, 24, 4), pytest.param(30522, 768, 32, id="products large enough for oneDNN")],
)
def test_a_model_compiles_to_machine_code(rows, width, rank):
    """Graphs are made anew; what a C++ compiler made of the same text, and of headers, is kept."""
    from torch._functorch import config as graphs
    from torch._inductor import config as code

    table = TTEmbedding(rows, width, rank=rank)
    with code.patch(fx_graph_cache=False), graphs.patch(enable_autograd_cache=False):
        assert_compiled(nn.Sequential(table, nn.GELU(), TTLinear(width, 18, rank=4)))


def test_rows_are_scattered_where_none_are_hot():
    """Neighbours share no slice of the left half, and every row of the train is some index's."""
    table = TTEmbedding(1000, 16, rank=4)
    rows = table._kept_at(torch.arange(1000))
    assert torch.equal(rows.sort().values, torch.arange(1000))
    right = math.prod(table.shape.row_modes[table.shape.split :])
    assert (rows[1:] // right != rows[:-1] // right).all()
    assert not TTEmbedding(1000, 16, rank=4, hot_rows=10).scatter_rows
    with pytest.raises(IndexError, match="index 1000 at 1"):
        table(torch.tensor([3, 1000]))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [10**10, 10**12])
def test_tables_beyond_thirty_two_bits(rows):
    """Every index is kept at a place of its own, and the row there is that of its digits."""
    table = TTEmbedding(rows, 16, rank=4)
    indices = torch.randint(rows, (1000,), generator=torch.Generator().manual_seed(0))
    kept = table._kept_at(indices).tolist()
    assert kept == [i * table._step % rows for i in indices.tolist()]  # whole numbers of any length
    with torch.no_grad():
        got = table(indices[:5])
        for row, place in zip(got, kept, strict=False):
            digits = []
            for mode in reversed(table.shape.row_modes):
                place, digit = divmod(place, mode)
                digits.insert(0, digit)
            want = torch.ones(1, 1)
            for core, digit in zip(table.cores, digits, strict=True):
                want = torch.tensordot(want, core[:, digit], 1).flatten(0, 1)
            torch.testing.assert_close(row, want.flatten())


def test_scattered_rows_beside_hot_ones_are_refused():
    with pytest.raises(ValueError, match=r"scatter_rows=True.*hot_rows=5"):
        TTEmbedding(100, 16, rank=4, hot_rows=5, scatter_rows=True)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_file_says_whether_its_rows_are_scattered(scattered, assign):
    """As ``from_embedding`` and ``init="svd"`` leave them in order, and new tables do not."""
    kept = TTEmbedding(300, 16, rank=4, scatter_rows=scattered)
    state, indices = kept.state_dict(), torch.arange(300)
    for there in (True, False):
        other = TTEmbedding(300, 16, rank=4, scatter_rows=there)
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(indices), kept(indices))
        assert other.scatter_rows == scattered
        again = other.state_dict()
        assert again.keys() == state.keys()
        assert all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32], ids=str
)
@pytest.mark.parametrize("rows", [2, 3, 30522, 340553])
def test_a_state_dict_of_another_dtype_finds_the_rows(rows, dtype):
    kept = TTEmbedding(rows, 8, rank=2)
    cast = {key: value.to(dtype) for key, value in kept.state_dict().items()}
    other = TTEmbedding(rows, 8, rank=2, scatter_rows=False)
    other.load_state_dict(cast)
    assert torch.equal(other._kept_at(torch.arange(rows)), kept._kept_at(torch.arange(rows)))


@pytest.mark.parametrize("settings", [{}, {"scatter_rows": False}, {"hot_rows": 7}], ids=str)
@pytest.mark.parametrize("rows", [1001, 999])
def test_a_state_dict_of_another_number_of_rows_is_refused(rows, settings):
    """Cores of neighbouring tables may have equal shapes, and steps may be equal, too."""
    kept, other = (TTEmbedding(n, 16, rank=4, **settings) for n in (1000, rows))
    assert [core.shape for core in other.cores] == [core.shape for core in kept.cores]
    with pytest.raises(ValueError, match=f"this table has {rows} rows: .* another number of rows"):
        other.load_state_dict(kept.state_dict())


def old_state_dict(table):
    """With the extra state that names the places of rows in files of earlier versions."""
    state = table.state_dict()
    scattered = state.pop("rows_scattered", None) is not None
    state.pop("rows_in_order", None)
    rows = table.num_embeddings
    return state | {"_extra_state": torch.tensor(64 * rows + 619 if scattered else 1 - 64 * rows)}


def test_an_older_state_dict_still_loads():
    for scattered in (True, False):
        kept = TTEmbedding(1000, 16, rank=4, scatter_rows=scattered)
        other = TTEmbedding(1000, 16, rank=4, scatter_rows=not scattered)
        other.load_state_dict(old_state_dict(kept))
        assert torch.equal(other(torch.arange(1000)), kept(torch.arange(1000)))
        for rows in (999, 1001):
            with pytest.raises(ValueError, match=f"this table has {rows} rows"):
                TTEmbedding(rows, 16, rank=4).load_state_dict(old_state_dict(kept))


def test_an_average_of_state_dicts_has_the_same_rows():
    kept = TTEmbedding(1000, 16, rank=4)
    state = kept.state_dict()
    mean = {key: 0.997 * value + 0.003 * value for key, value in state.items()}
    assert mean["rows_scattered"].is_floating_point()
    other = TTEmbedding(1000, 16, rank=4, scatter_rows=False)
    other.load_state_dict(mean)
    torch.testing.assert_close(other(torch.arange(1000)), kept(torch.arange(1000)))


def test_memory_that_is_new_holds_no_other_number_of_rows():
    table = TTEmbedding(1000, 16, rank=4)
    again = copy.deepcopy(table).to_empty(device=table.cores[0].device)
    next(again.buffers()).fill_(7)
    again.load_state_dict({**again.state_dict(), **dict(table.named_parameters())})
    assert torch.equal(again(torch.arange(1000)), table(torch.arange(1000)))


def test_a_table_by_svd_loads_into_one_made_without_memory():
    config = comera.TTConfig(rank=8, init="svd")
    small = comera.tensorize_(nn.Embedding(300, 16), config)
    with torch.device("meta"):
        other = nn.Embedding(300, 16)
    other = comera.tensorize_(other, config)
    other.load_state_dict(small.state_dict(), assign=True)
    assert torch.equal(other(torch.arange(300)), small(torch.arange(300)))


@pytest.mark.parametrize("settings", [{}, {"scatter_rows": False}, {"hot_rows": 7}], ids=str)
def test_an_index_out_of_range_is_no_row_when_compiled_either(settings):
    layer = TTEmbedding(50, 12, rank=4, **settings)
    look_up = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(look_up(torch.tensor([0, 49])), layer(torch.tensor([0, 49])))
    for index in (50, -1):
        with pytest.raises(IndexError, match=f"index {index} at 1 is out of range"):
            look_up(torch.tensor([0, index]))


def test_gradients_of_gradients(layer):
    """The second derivative, against autograd's of the dense table."""
    params = [param for param in layer.parameters() if param.numel()]
    indices = torch.tensor([[3, 49, 3], [0, 6, 7]], device=params[0].device)
    found = []
    for rows in (layer(indices), layer.weight[indices]):
        first = torch.autograd.grad(rows.pow(3).sum(), params, create_graph=True)
        second = sum(grad.pow(2).sum() for grad in first)
        found.append(torch.autograd.grad(second, params))
    torch.testing.assert_close(*found)


def test_a_table_without_rows_is_refused():
    with pytest.raises(ValueError, match="num_embeddings=0 must be at least 1"):
        TTEmbedding(0, 8)


def test_compiling_a_look_up_of_a_captured_step_warns_of_nothing():
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    lookup = torch.compile(TTEmbedding(24, 36, rank=5), backend="eager")
    with static_shapes():
        assert lookup(torch.tensor([1, 2])).shape == (2, 36)
