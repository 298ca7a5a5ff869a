import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comera.nn.embedding import TTEmbeddingBag
from comera.ops.context import static_shapes

ROWS, WIDTH = 11, 6


def make(mode="sum", **kwargs):
    torch.manual_seed(0)
    kwargs = {"rank": 3, "dtype": torch.float64, "shape": ((3, 4), (2, 3)), **kwargs}
    return TTEmbeddingBag(ROWS, WIDTH, mode=mode, **kwargs)


@st.composite
def problems(draw):
    """Settings of a bag, and arguments to call it with."""
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    bag = {"mode": mode, "padding_idx": draw(st.sampled_from([None, 0, 5, -1]))}
    whole = draw(st.sampled_from([torch.int32, torch.int64]))
    rows = st.integers(0, ROWS - 1)
    call = {}
    if draw(st.booleans()):
        bags, length = draw(st.integers(0, 4)), draw(st.integers(1, 5))
        entries = draw(st.lists(rows, min_size=bags * length, max_size=bags * length))
        call["input"] = torch.tensor(entries, dtype=whole).reshape(bags, length)
    else:
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        bag["include_last_offset"] = draw(st.booleans())
        ends = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        offsets = ends if bag["include_last_offset"] else ends[:-1]
        entries = draw(st.lists(rows, min_size=ends[-1], max_size=ends[-1]))
        call["input"] = torch.tensor(entries, dtype=whole)
        call["offsets"] = torch.tensor(offsets, dtype=whole)
    if mode == "sum" and draw(st.booleans()):
        weights = torch.linspace(-1, 2, call["input"].numel(), dtype=torch.float64)
        call["per_sample_weights"] = weights.reshape(call["input"].shape)
    return bag, call


def run(bag, call, parameters):
    """The output, and the gradients of the parameters and of the weights of the samples."""
    weights = call.get("per_sample_weights")
    if weights is not None:
        weights = weights.clone().requires_grad_()
        call = {**call, "per_sample_weights": weights}
        parameters = [*parameters, weights]
    y = bag(**call)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return y, torch.autograd.grad((y * upstream).sum(), parameters)


@pytest.mark.slow
@given(problems())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_equals_torchs_bag_of_its_weight(problem):
    bag_settings, call = problem
    bag = make(**bag_settings)
    whole = {key: getattr(bag, key) for key in ("mode", "include_last_offset", "padding_idx")}

    def torchs(input, offsets=None, per_sample_weights=None):
        return nn.functional.embedding_bag(
            input, bag.weight, offsets, per_sample_weights=per_sample_weights, **whole
        )

    parameters = list(bag.parameters())
    got, got_grads = run(bag, call, parameters)
    want, want_grads = run(torchs, call, parameters)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_grads, want_grads)
    torch.testing.assert_close(bag.to_dense()(**call), want)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_empty_bags_are_zero_and_train(mode, padding_idx):
    bag = make(mode, padding_idx=padding_idx)
    y = bag(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert torch.equal(y, torch.zeros(2, WIDTH, dtype=torch.float64))
    y.sum().backward()
    assert all(param.grad.eq(0).all() for param in bag.parameters())


@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_mean_is_over_what_is_counted(length):
    """Bags of nothing, of padding alone, of one entry among padding, and of several."""
    bag, call = make("mean", padding_idx=2), {"input": torch.tensor([[2] * 4, [2] * 4])}
    call["input"][1, :length] = torch.tensor([5, 5, 7])[:length]
    y, grads = run(bag, call, list(bag.parameters()))
    rows = bag.weight[call["input"][1, :length]]
    want = torch.stack([torch.zeros(WIDTH).double(), rows.sum(0) / max(1, length)])
    torch.testing.assert_close(y, want)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    want_grads = torch.autograd.grad((want * upstream).sum(), list(bag.parameters()))
    torch.testing.assert_close(grads, want_grads)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_hot_rows(mode):
    bag = make(mode, hot_rows=4, shape=None)
    x = torch.tensor([[0, 3, 4], [10, 10, 1]])
    want = nn.functional.embedding_bag(x, bag.weight, mode=mode)
    torch.testing.assert_close(bag(x), want)


def test_the_default_mode_is_torchs():
    x = torch.tensor([[0, 3, 4], [10, 10, 1]])
    bag = TTEmbeddingBag(ROWS, WIDTH, rank=3)
    torch.testing.assert_close(bag(x), bag.to_dense()(x))
    assert bag.mode == nn.EmbeddingBag(ROWS, WIDTH).mode == "mean"


def test_conversion_keeps_settings_and_the_random_state():
    dense = nn.EmbeddingBag(
        ROWS, WIDTH, mode="max", sparse=False, include_last_offset=True, padding_idx=3
    ).eval()
    before = torch.get_rng_state()
    bag = TTEmbeddingBag.from_embedding(dense, tolerance=1e-6)
    assert torch.equal(torch.get_rng_state(), before)
    for twin in (bag, bag.to_dense()):
        assert (twin.mode, twin.include_last_offset, twin.padding_idx) == ("max", True, 3)
        assert not twin.training
    others = [row for row in range(ROWS) if row != 3]
    torch.testing.assert_close(bag.weight[others], dense.weight[others])
    assert type(bag.to_dense()) is nn.EmbeddingBag


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"),
    [
        ({"max_norm": 2.0}, NotImplementedError, r"TTEmbeddingBag does not support max_norm=2\.0"),
        ({"scale_grad_by_freq": True}, NotImplementedError, "scale_grad_by_freq=True"),
        ({"mode": "median"}, ValueError, "mode='median' must be 'sum', 'mean' or 'max'"),
    ],
)
def test_wrong_settings_are_repeated(kwargs, kind, message):
    with pytest.raises(kind, match=message):
        make(**kwargs)


def test_wrong_calls_are_refused_as_by_torch():
    bag = make("mean")
    dense, x = bag.to_dense(), torch.tensor([1, 2, 3])
    offsets = torch.tensor([0])
    weights = torch.ones(3, dtype=torch.float64)
    for call in ({}, {"offsets": offsets, "per_sample_weights": weights}):
        with pytest.raises((ValueError, NotImplementedError)) as theirs:
            dense(x, **call)
        with pytest.raises(theirs.type):
            bag(x, **call)
    with pytest.raises(IndexError, match=r"index 11 at \(0, 0\) is out of range"):
        bag(torch.tensor([[ROWS]]))


@pytest.mark.parametrize(
    ("input", "offsets", "message"),
    [
        ([1, 2, 3], None, "a 1-d input needs offsets"),
        ([1, 2, 3], [1, 2], r"offsets\[0\]=1 must be 0"),
        ([1, 2, 3], [0, 2, 1], r"offsets\[2\]=1 comes after offsets\[1\]=2"),
        ([1, 2, 3], [0, 2, 7, 9], r"offsets\[2\]=7 is past the end of an input of 3 entries"),
        ([1, 2, 3], [[0, 1]], r"offsets have shape \(1, 2\); they must be 1-d"),
        ([[1, 2], [3, 4]], [0, 2], "offsets are for a 1-d input"),
        ([[[1]]], None, r"input has shape \(1, 1, 1\); it must be 1-d or 2-d"),
    ],
)
def test_bags_that_do_not_fit_the_input_are_named(input, offsets, message):
    offsets = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(ValueError, match=message):
        make()(torch.tensor(input), offsets)


@pytest.mark.parametrize("offsets", [[0.0, 1.5], [False, True]])
def test_offsets_that_are_no_whole_numbers_are_refused(offsets):
    offsets = torch.tensor(offsets)
    with pytest.raises(TypeError, match=rf"offsets are {offsets.dtype}; they must be whole"):
        make()(torch.tensor([1, 2, 3]), offsets)


def test_weights_that_do_not_fit_are_named():
    bag, x = make(), torch.tensor([[1, 2]])
    with pytest.raises(
        ValueError, match=r"per_sample_weights have shape \(2,\), the input \(1, 2\)"
    ):
        bag(x, per_sample_weights=torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"per_sample_weights are torch\.float32, the table"):
        bag(x, per_sample_weights=torch.ones(1, 2))


def test_many_rows_of_few_slices():
    """Groups of several rows that share a slice, some of their places empty."""
    torch.manual_seed(0)
    table = TTEmbeddingBag(
        6000, 6, mode="sum", shape=((1000, 6), (2, 3)), rank=3, dtype=torch.float64
    )
    offsets = torch.arange(0, 500, 5)
    problem = {"input": torch.randint(6000, (500,)), "offsets": offsets}
    problem["per_sample_weights"] = torch.rand(500, dtype=torch.float64)
    got, want = (run(bag, problem, []) for bag in (table, table.to_dense()))
    torch.testing.assert_close(got, want)
    grads = [run(table, problem, list(table.parameters()))[1]]

    def dense(input, offsets, per_sample_weights):
        return nn.functional.embedding_bag(
            input, table.weight, offsets, mode="sum", per_sample_weights=per_sample_weights
        )

    grads.append(run(dense, problem, list(table.parameters()))[1])
    torch.testing.assert_close(*grads)


@pytest.mark.gpu
def test_a_bag_is_captured_in_a_graph():
    bag = make("mean", hot_rows=3, shape=None).cuda()
    x = torch.randint(ROWS, (4, 5), device="cuda")
    bag(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bag(x)
    x.copy_(torch.randint(ROWS, (4, 5)))
    graph.replay()
    torch.testing.assert_close(y, bag.to_dense()(x))


@pytest.mark.parametrize("way", ["exported", "exported rows", "compiled", "traced"])
@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_graphs_take_any_number_of_bags(mode, padding_idx, way, request):
    request.addfinalizer(torch._dynamo.reset)
    bag = make(mode, padding_idx=padding_idx, include_last_offset=mode == "mean")
    first, later = (torch.randint(ROWS, (12,)), torch.arange(0, 13, 4)), (
        torch.tensor([5, 1, 10, 5, 5, 0, 5]), torch.tensor([0, 2, 3, 5, 7]),
    )  # fmt: skip
    if way == "exported rows":
        first, later = (first[0].view(6, 2),), (torch.randint(ROWS, (9, 2)),)
    if way == "compiled":
        run = torch.compile(bag, backend="eager")
        run(*first)
    elif way == "traced":
        run = torch.jit.trace(bag, first, check_trace=False)
    else:
        sizes = [{0: torch.export.Dim(name, min=3)} for name in ("entries", "bags")]
        exported = torch.export.export(bag, first, dynamic_shapes=tuple(sizes[: len(first)]))
        run = exported.module()
    torch.testing.assert_close(run(*later), bag(*later))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_entries_after_the_last_offset_are_in_no_bag(mode):
    bag = make(mode, include_last_offset=True)
    indices, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 4])
    torch.testing.assert_close(bag(indices, offsets), bag(indices[:4], offsets))
    if mode == "sum":  # torch itself is not of one mind about the others
        dense = bag.float().to_dense()
        torch.testing.assert_close(bag(indices, offsets), dense(indices, offsets))


def test_weights_after_the_last_offset_are_of_no_bag():
    bag = make(include_last_offset=True)
    indices, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 4])
    weights = torch.rand(5, dtype=torch.float64)
    want = bag(indices[:4], offsets, weights[:4])
    torch.testing.assert_close(bag(indices, offsets, weights), want)


def test_weights_may_be_made_of_the_rows_themselves():
    """As in attention over one table: each way to the rows counts once."""
    bag = make(hot_rows=3, shape=((2, 4), (2, 3)))
    indices, offsets = torch.tensor([1, 2, 0, 4, 1]), torch.tensor([0, 2])
    sums = bag(indices, offsets, bag(indices[:, None]).tanh().sum(1)).square().sum()
    params = [param for param in bag.parameters() if param.requires_grad]
    want = torch.autograd.grad(sums, params, retain_graph=True)
    got = torch.autograd.grad(sums, params, create_graph=True)
    torch.testing.assert_close(got, want)


def test_gradients_of_gradients_of_weighted_bags():
    bag = make()
    indices, offsets = torch.tensor([1, 2, 3, 4, 1]), torch.tensor([0, 2, 2])
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    params = [*bag.parameters(), weights]
    found = []
    for dense in (False, True):
        if dense:
            at = torch.tensor([0, 0, 2, 2, 2])
            rows = bag.weight[indices] * weights[:, None]
            sums = rows.new_zeros(3, WIDTH).index_add(0, at, rows)
        else:
            sums = bag(indices, offsets, weights)
        first = torch.autograd.grad(sums.pow(3).sum(), params, create_graph=True)
        found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), params))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_entries_and_no_bags_are_refused(mode, compiled, request):
    """Torch reads past the end of the offsets, and the process may end."""
    request.addfinalizer(torch._dynamo.reset)  # it passes by what has raised
    indices, none = torch.tensor([1, 2]), torch.tensor([], dtype=torch.long)
    bag = make(mode)
    assert bag(none, none).shape == (0, WIDTH)
    run = torch.compile(bag, backend="eager") if compiled else bag
    with pytest.raises(ValueError, match="offsets begin no bag, and the input has 2 entries"):
        run(indices, none)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_entries_after_the_only_offset_are_of_no_bag(mode):
    bag = make(mode, include_last_offset=True)
    assert bag(torch.tensor([1, 2]), torch.tensor([0])).shape == (0, WIDTH)
    with static_shapes(), pytest.raises(ValueError, match="begin no bag"):  # offsets are not read
        bag(torch.tensor([1, 2]), torch.tensor([0]))
