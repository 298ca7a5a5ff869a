"""Reading the weight of a tensor train as ever, and refusing to write it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import comera
from comera.nn.dense_weight import read_only
from comera.nn.embedding import TiedTTLinear


@pytest.fixture(
    params=[
        lambda: comera.TTLinear(20, 30, rank=4),
        lambda: comera.TTEmbedding(60, 8, rank=4),
        lambda: comera.TTEmbedding(60, 8, rank=4, padding_idx=3, hot_rows=12, hot_rank=4),
        lambda: comera.TTEmbeddingBag(60, 8, rank=4, hot_rows=12),
        lambda: TiedTTLinear(comera.TTEmbedding(60, 8, rank=4)),
    ],
    ids=["linear", "embedding", "hot rank", "bag", "tied"],
)
def layer(request):
    return request.param()


def _assign_data(weight):
    weight.data = torch.zeros_like(weight)


def _add_to_data(weight):
    weight.data += 1


WRITES = {
    "method": lambda w: w.zero_(),
    "data": lambda w: w.data.add_(1.0),
    "data +=": _add_to_data,
    "data =": _assign_data,
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
    "item": lambda w: w.__setitem__(0, 1.0),
    "a row": lambda w: w[0].zero_(),
    "a view of a view": lambda w: w.detach().T[0].mul_(2),
    "unbind": lambda w: w.unbind(0)[1].mul_(2),
    "out=": lambda w: torch.zeros(w.shape, out=w),
    "zeros_": nn.init.zeros_,
    "xavier_normal_": nn.init.xavier_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "set_": lambda w: w.set_(torch.zeros_like(w)),
    "inplace=True": lambda w: nn.functional.relu(w, inplace=True),
    "foreach": lambda w: torch._foreach_add_([w, torch.zeros(3)], 1.0),
    "optimizer": lambda w: _step(w.detach().requires_grad_()),
}


def _step(param):
    param.square().sum().backward()
    torch.optim.SGD([param], lr=0.1).step()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
def test_writing_in_place_is_refused(layer, write, mode):
    before = copy.deepcopy(layer.state_dict())
    enabled = torch.enable_grad() if write is WRITES["optimizer"] else mode()
    with enabled, pytest.raises(RuntimeError, match=r"set_weight_\(W, tolerance=0.01\)"):
        write(layer.weight)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_what_is_computed_from_it_is_an_ordinary_tensor(layer):
    weight = layer.weight
    for made in (
        weight + 1,
        weight.clone(),
        weight.sum(),
        weight.float().double(),
        weight @ weight.T,
    ):
        assert type(made) is torch.Tensor
        with torch.no_grad():
            made.zero_()
    target = torch.zeros_like(weight)
    assert type(target) is torch.Tensor
    with torch.no_grad():
        target.copy_(weight)
    torch.testing.assert_close(target, layer.weight)


def test_it_lies_in_memory_as_that_of_torch(layer):
    weight = layer.weight
    assert weight.is_contiguous()
    assert torch.equal(nn.utils.parameters_to_vector([weight]), weight.flatten())


@pytest.mark.parametrize(
    "cut",
    [
        lambda it: prune.l1_unstructured(it, "weight", 0.5),
        lambda layer: prune.global_unstructured(
            [(layer, "weight")], prune.L1Unstructured, amount=2
        ),
    ],
)
def test_pruning_it_names_the_way_out(layer, cut):
    with pytest.raises(RuntimeError, match=r"computed from the layer's cores.*comera\.densify_"):
        cut(layer)
    assert "weight_orig" not in layer._parameters


def test_it_can_be_copied_saved_and_made_a_parameter(layer):
    weight = layer.weight.detach()
    torch.save(weight, file := io.BytesIO())
    file.seek(0)
    for made in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), torch.load(file)):
        assert type(made) is torch.Tensor
        torch.testing.assert_close(made, weight)
    own = nn.Parameter(layer.weight)
    assert type(own) is nn.Parameter
    own.square().sum().backward()
    torch.optim.SGD([own], lr=0.1).step()


def test_gradients_of_the_weight_itself_can_be_kept(layer):
    weight = layer.weight
    weight.retain_grad()
    weight.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.weight.requires_grad_(False),
        lambda layer: setattr(layer.weight, "requires_grad", False),
        lambda layer: layer.requires_grad_(False).weight.requires_grad_(),
        lambda layer: layer.weight.register_hook(print),
        lambda layer: setattr(layer.weight, "grad", torch.zeros(layer.weight.shape)),
    ],
)
def test_what_only_a_parameter_can_do_names_the_way_out(layer, use):
    layer.weight.requires_grad_()  # as it does already
    layer.weight.detach().requires_grad_().register_hook(print)
    with pytest.raises(RuntimeError, match=r"layer.requires_grad_\(False\) freezes the layer"):
        use(layer)


def test_it_can_be_read_in_transforms_and_in_compiled_code(layer):
    params = dict(layer.named_parameters())

    def size(params):
        with torch.nn.utils.stateless._reparametrize_module(layer, params):
            return layer.weight.square().sum()

    grads = torch.func.grad(size)(params)
    layer.weight.square().sum().backward()
    for name, param in params.items():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(grads[name], expected)


def test_a_weight_on_meta_can_be_read():
    layer = comera.TTLinear(20, 30, rank=4, device="meta")
    assert layer.weight.clone().zero_().shape == (30, 20)
    with pytest.raises(RuntimeError, match="set_weight_"), torch.no_grad():
        layer.weight.zero_()


def test_tensors_of_other_types_are_left_alone():
    param = nn.Parameter(torch.zeros(2))
    assert read_only(lambda: param, "") is param


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_weight_that_fits_is_set_exactly(layer, tolerance):
    weight = layer.weight.detach().clone() * 2
    assert layer.set_weight_(weight, tolerance=tolerance) < 1e-5
    torch.testing.assert_close(layer.weight, weight, rtol=1e-4, atol=1e-5)


def test_a_tolerance_is_kept_and_decides_the_ranks():
    layer = comera.TTLinear(48, 64, rank=2)
    params, weight = list(layer.parameters()), torch.randn(64, 48)
    for tolerance in (0.5, 0.1):
        assert layer.set_weight_(weight, tolerance=tolerance) <= tolerance
        assert layer.start_ranks == layer.ranks
    assert [id(p) for p in layer.parameters()] == [id(p) for p in params]
    dense = nn.functional.linear(torch.eye(48), weight, layer.bias)
    assert (layer(torch.eye(48)) - dense).norm() <= 0.1 * weight.norm()


def test_rows_that_were_moved_keep_their_numbers():
    table = comera.TTEmbedding(60, 8, rank=8, hot_rows=6)
    comera.update_hot_rows_(table, torch.arange(60))
    weight = torch.randn(60, 8)
    error = table.set_weight_(weight, tolerance=0.3)
    assert error <= 0.3
    torch.testing.assert_close(table.weight[54:], weight[54:])  # the hot ones are exact


@pytest.mark.parametrize("make", [lambda w: w, nn.Parameter], ids=["tensor", "parameter"])
def test_assignment_approximates_and_says_so(layer, make, caplog):
    weight = torch.randn_like(layer.weight)
    layer.weight = make(weight)
    assert "weight" not in dict(layer.named_parameters())
    assert "relative error of" in caplog.text
    twin = copy.deepcopy(layer)
    twin.set_weight_(weight)
    torch.testing.assert_close(twin.weight, layer.weight)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.zeros(20, 30), ValueError, r"shape \(20, 30\), that of this layer is \(30, 20\)"),
        ([1.0], TypeError, r"weight=\[1.0\] must be a tensor"),
        (torch.full((30, 20), torch.nan), ValueError, "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_are_named(weight, error, message):
    layer = comera.TTLinear(20, 30, rank=4)
    before = layer.weight.clone()
    with pytest.raises(error, match=message):
        layer.set_weight_(weight)
    torch.testing.assert_close(layer.weight, before)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: comera.TTLinear(64, 64, rank=8),
        lambda: comera.TTEmbedding(68, 16, rank=16, shape=((4, 4, 4), (2, 2, 4)), hot_rows=4),
    ],
    ids=["linear", "table"],
)
def test_ranks_stay_even_where_fewer_are_exact(layer):
    """After a cut, a bond may be wider than its neighbours can ever use."""
    layer = layer()
    ranks = (1, *layer.ranks[1:])
    layer.resize_ranks_(ranks)
    layer.reset_parameters()
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    for _ in range(2):
        weight = layer.weight.detach() / 2
        assert layer.set_weight_(weight) < 1e-5
        assert layer.ranks == ranks
        torch.testing.assert_close(layer.weight, weight, rtol=1e-4, atol=1e-6)
        layer.weight.sum().backward()
        optimizer.step()


@pytest.mark.parametrize("make", [lambda w: w, nn.Parameter], ids=["tensor", "parameter"])
def test_functional_call_replaces_cores_and_no_weight(make):
    layer, x = comera.TTLinear(20, 30, rank=4), torch.randn(3, 20)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match="functional_call could take"):
        torch.func.functional_call(layer, {"weight": make(torch.randn(30, 20))}, (x,))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_vanished_weight_asks_for_a_tolerance():
    layer = comera.TTLinear(20, 30, rank=4)
    with torch.no_grad():
        layer.gates[0].zero_()
    comera.truncate_(layer, min_rank=0)
    with pytest.raises(ValueError, match="give a tolerance"):
        layer.weight = torch.randn(30, 20)
    layer.set_weight_(weight := torch.randn(30, 20), tolerance=0.01)
    assert (layer.weight - weight).norm() <= 0.01 * weight.norm()


def test_a_compiled_model_reads_it_in_one_graph():
    """T5 of transformers asks for the dtype of a weight in each feed-forward part."""
    layer, x = comera.TTLinear(8, 8, rank=2), torch.randn(3, 8)

    def read(x):
        return x.to(layer.weight.dtype) @ layer.weight.T

    torch.testing.assert_close(torch.compile(read, backend="eager", fullgraph=True)(x), read(x))
