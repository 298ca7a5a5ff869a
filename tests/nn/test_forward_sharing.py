"""Models contract the cores of their layers together in each forward pass, whoever calls them."""

import contextlib
import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import comera
from comera.nn import batched_contraction, forward_sharing
from comera.nn.forward_sharing import share_in_forward_, unshare_in_forward_
from comera.nn.module import tensor_trains

pytestmark = pytest.mark.usefixtures("two_are_enough")

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
WIDTH = 64


class Model(nn.Module):
    """Layers of two shapes; some of them are left out of a pass, or checkpointed, as asked."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.skip = False
        self.reentrant = None

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.reentrant is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.wide(self.last(x))

    def middle(self, x):
        x = self.second(x)
        return x if self.skip else self.third(torch.tanh(x))


@pytest.fixture
def calls(monkeypatch):
    """How many layers each contraction of several was of."""
    counts, original = [], batched_contraction.contract_groups

    def counted(*args):
        counts.append(sum(args[3][3::7]))
        return original(*args)

    monkeypatch.setattr(batched_contraction, "contract_groups", counted)
    return counts


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = comera.tensorize_(Model().to(dtype), comera.TTConfig(rank=3, init="orthogonal"))
    for layer in tensor_trains(model).values():
        with torch.no_grad():
            layer.gates[-1][-1] = 0.001  # pruned
    return model


def apart(model):
    """A copy whose layers contract their cores by themselves."""
    twin = copy.deepcopy(model)
    assert twin._forward_pre_hooks
    for part in twin.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
            getattr(part, name).clear()
    return twin


def batch(dtype=torch.float64):
    return torch.randn(5, WIDTH, dtype=dtype)


def grads(model, x, **context):
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.double().square().sum().backward()
    return [y.detach(), *(param.grad for param in model.parameters())]


def assert_alike(model, x, close=CLOSE, passes=3):
    twin = apart(model)
    want = grads(twin, x)
    for _ in range(passes):
        torch.testing.assert_close(grads(model, x), want, **close)
    assert all(layer.shared is None for layer in tensor_trains(model).values())
    assert all(layer.shared_factors is None for layer in tensor_trains(model).values())


def test_outputs_and_gradients_are_those_of_each_layer_by_itself(calls):
    model = make()
    assert_alike(model, batch())
    assert calls == [5] * 3


def test_a_few_layers_on_a_cpu_are_faster_one_by_one(calls, monkeypatch):
    monkeypatch.setattr(forward_sharing, "_FEWEST_ON_CPU", 6)
    model = make()
    assert_alike(model, batch())
    assert calls == []
    model.sixth = comera.TTLinear(WIDTH, WIDTH, rank=3, dtype=torch.float64)
    share_in_forward_(model)
    model(batch())  # the first pass is of all layers, and finds five that are used
    model(batch())
    assert calls == [6]


def test_without_gradients_too(calls):
    model, x = make().eval(), batch()
    want = apart(model)(x)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), want, **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), want, **CLOSE)
    assert calls == [5] * 4
    assert_alike(model, x)


def test_weights_are_those_of_the_pass_whoever_changes_them_and_how():
    model, x = make(), batch()
    twin = apart(model)
    for number in range(4):
        torch.testing.assert_close(model(x), twin(x), **CLOSE)
        for each in (model, twin):
            with torch.no_grad():
                each.second.cores[0].mul_(1.1)
                each.third.cores[1].data = each.third.cores[1] * 0.9
                each.last.gates[0].data.mul_(1.2)
                if number == 2:
                    each.first.cores[2] = nn.Parameter(each.first.cores[2] * 2)


def test_a_weight_that_is_written_to_during_the_pass_is_noticed():
    model, x = make(), batch()
    grads(model, x)
    twin = apart(model)

    def halve(layer, *_):
        with torch.no_grad():
            layer.next.cores[0].mul_(0.5)
            layer.next.gates[0].detach().add_(1)

    for each in (model, twin):
        vars(each.second)["next"] = each.third
        each.second.register_forward_hook(halve)
    for _ in range(2):
        torch.testing.assert_close(model(x), twin(x), **CLOSE)


def test_an_optimizer_in_a_plain_loop():
    model, x = make(), batch()
    twin = apart(model)
    finals = []
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            for part in x.split(2):  # gradients add up
                each(part).square().sum().backward()
            optimizer.step()
        finals.append([param.detach() for param in each.parameters()])
    torch.testing.assert_close(*finals, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("context", [False, True])
def test_a_bias_that_is_computed_in_the_pass_of_its_layer(context, calls):
    """By pruning, from parameters that an optimizer has changed since the pass before."""
    model, x = make(), batch()
    grads(model, x)  # once with a bias like the others
    twin = copy.deepcopy(model)
    unshare_in_forward_(twin)
    for each in (model, twin):
        prune.l1_unstructured(each.first, "bias", 0.3)
    calls.clear()
    together = comera.BatchedContraction(model) if context else contextlib.nullcontext()
    for _ in range(3):
        with together:
            torch.testing.assert_close(grads(model, x), grads(twin, x), **CLOSE)
        with torch.no_grad():
            for each in (model, twin):
                each.first.bias_orig += 1
    assert set(calls) == {4}  # of five


def test_two_passes_before_one_backward():
    model = make()
    grads(model, batch())
    twin, x, y = apart(model), batch(), batch()
    for each in (model, twin):
        each.zero_grad()
        (each(x).square().sum() + each(y).sum()).backward()
    got, want = ([param.grad for param in each.parameters()] for each in (model, twin))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model, x = make(), batch()
    model.reentrant = reentrant
    assert_alike(model, x)
    model.reentrant = None
    assert_alike(model, x)
    model.reentrant = reentrant
    assert_alike(model, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_the_whole_model(reentrant):
    model, x = make(), batch().requires_grad_()
    outer = nn.Module()
    outer.model = model
    grads(model, x)
    twin = apart(model)
    for each in (model, twin):
        each.zero_grad()
        checkpoint(each, x, use_reentrant=reentrant).square().sum().backward()
    got, want = ([param.grad for param in each.parameters()] for each in (model, twin))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("outside", [False, True], ids=["in the model", "around it"])
def test_autocast(outside):
    model, x = make(torch.float32), batch(torch.float32)
    if not outside:
        forward = Model.forward
        model.forward = torch.autocast("cpu", torch.bfloat16)(lambda x: forward(model, x))
    twin = apart(model)
    if not outside:
        twin.forward = torch.autocast("cpu", torch.bfloat16)(lambda x: forward(twin, x))
    close = {"rtol": 5e-2, "atol": 5e-2}
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        want = grads(twin, x)
        for _ in range(3):
            got = grads(model, x)
            assert [t.dtype for t in got] == [t.dtype for t in want]
            torch.testing.assert_close(got, want, **close)
    exact = apart(model)
    exact.__dict__.pop("forward", None)
    model.__dict__.pop("forward", None)
    torch.testing.assert_close(grads(model, x), grads(exact, x))  # without autocast again


def test_a_layer_that_is_left_out_has_no_gradient(calls):
    model, x = make(), batch()
    for each in (True, True, False, False, True):
        model.skip = each
        assert_alike(model, x, passes=1)
        assert (model.third.cores[0].grad is None) == each
    assert calls == [5, 4, 4, 5, 5]


def test_a_layer_that_is_left_out_keeps_the_gradient_it_has():
    model, x = make(), batch()
    twin = apart(model)
    for each in (model, twin):
        each(x).sum().backward()
        each.skip = True
        (each(x).sum() + each.third.weight.sum()).backward()
    got, want = ([param.grad for param in each.parameters()] for each in (model, twin))
    torch.testing.assert_close(got, want, **CLOSE)


def test_parts_of_a_model_called_by_themselves(calls):
    model, x = make(), batch()
    grads(model, x)
    twin = apart(model)
    calls.clear()
    torch.testing.assert_close(model.middle(x), twin.middle(x), **CLOSE)
    torch.testing.assert_close(model.first(x), twin.first(x), **CLOSE)
    torch.testing.assert_close(Model.forward(model, x), twin(x), **CLOSE)
    assert not calls


def test_layers_that_are_replaced_inside_are_let_go(calls):
    model, x = nn.Sequential(make(), make()), batch()
    model[1].first = nn.Linear(2 * WIDTH, WIDTH, dtype=x.dtype)
    share_in_forward_(model)
    grads(model, x)
    old = weakref.ref(tensor_trains(model[0])["second"])
    comera.densify_(model[0])
    for _ in range(2):
        grads(model, x)
    gc.collect()
    assert old() is None
    assert_alike(model, x)


def test_parts_without_layers_keep_no_hooks():
    model = nn.ModuleDict({"one": make()})
    assert model["one"]._forward_pre_hooks
    comera.densify_(model)
    assert not model["one"]._forward_pre_hooks
    assert not model["one"]._forward_hooks


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_contracts_its_own_cores(how, calls):
    model, x = make(), batch()
    grads(model, x)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        twin.first.cores[0].mul_(2)
    assert_alike(twin, x)
    assert_alike(model, x)
    assert calls == [5] * 7


def test_frozen_layers_and_frozen_parameters():
    model, x = make(), batch()
    model.second.requires_grad_(False)
    model.third.cores[0].requires_grad_(False)
    model.last.bias.requires_grad_(False)
    assert_alike(model, x)
    model.second.requires_grad_(True)
    assert_alike(model, x)


def test_ranks_are_cut_and_dtypes_change_between_passes():
    model, x = make(), batch()
    grads(model, x)
    comera.truncate_(model)
    assert_alike(model, x)
    model.float()
    assert_alike(model, x.float(), {"rtol": 1e-4, "atol": 1e-4})


def test_a_threshold_that_is_set_between_passes_counts():
    model, x = make(), batch()
    before = model(x)
    for layer in tensor_trains(model).values():
        with torch.no_grad():
            layer.gates[0][0] = 0.5
    assert_alike(model, x)
    for layer in tensor_trains(model).values():
        layer.prune_below = 0.6
    assert_alike(model, x)
    assert not torch.allclose(model(x), before)


def test_a_pass_that_breaks_off_leaves_nothing_behind():
    model, x = make(), batch()
    grads(model, x)
    for problem in (RuntimeError, KeyboardInterrupt):

        def stop(*_, problem=problem):
            raise problem("stop")

        handle = model.last.register_forward_hook(stop)
        with pytest.raises(problem):
            model(x)
        handle.remove()
        assert_alike(model, x)


def test_a_model_in_a_model_and_a_context_around_it(calls):
    model, x = make(), batch()
    outer = comera.tensorize_(
        nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), model),
        comera.TTConfig(rank=3, init="orthogonal"),
    )
    assert_alike(outer, x)
    assert calls == [6] * 3
    with comera.BatchedContraction(outer):
        outer(x).sum().backward()
    assert calls == [6] * 4
    calls.clear()
    assert_alike(model, x)
    assert set(calls) == {5}


def test_several_threads_run_one_model():
    model, results = make(), []
    x = batch()
    grads(model, x)
    want = apart(model)(x)
    start = threading.Barrier(4)

    def run():
        start.wait()
        for _ in range(20):
            results.append(model(x))
            results[-1].sum().backward()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for got in results:
        torch.testing.assert_close(got, want, **CLOSE)


def test_functions_of_parameters():
    model, x = make(), batch()
    grads(model, x)
    params = {name: param.detach() * 1.1 for name, param in model.named_parameters()}
    twin = apart(model)
    twin.load_state_dict(params)

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    want = grads(twin, x)[1:]
    torch.testing.assert_close(list(torch.func.grad(loss)(params, x).values()), want, **CLOSE)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x[:, None])
    torch.testing.assert_close([grad.sum(0) for grad in each.values()], want, **CLOSE)
    wanted = {name: value.requires_grad_() for name, value in params.items()}
    got = torch.autograd.grad(loss(wanted, x), list(wanted.values()))
    torch.testing.assert_close(list(got), want, **CLOSE)


def test_second_derivatives():
    model, x = make(), batch()
    grads(model, x)
    twin, found = apart(model), []
    for each in (model, twin):
        params = list(each.parameters())
        first = torch.autograd.grad(each(x).pow(3).sum(), params, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), params))
    torch.testing.assert_close(*found, **CLOSE)


def test_large_models_are_contracted_layer_by_layer_where_no_gradients_keep_factors(
    calls, monkeypatch
):
    monkeypatch.setattr("comera.nn.forward_sharing._MOST", 100)
    model, x = make(), batch()
    with torch.no_grad():
        model(x)
        model(x)
    assert not calls
    assert_alike(model, x)
    assert calls


def test_dense_models_keep_no_hook():
    model = make()
    assert model._forward_hooks
    comera.densify_(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks_always_called


def test_to_share_twice_is_to_share_once(calls):
    model, x = make(), batch()
    share_in_forward_(model)
    share_in_forward_(model)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert_alike(model, x)
    assert calls == [5] * 3
