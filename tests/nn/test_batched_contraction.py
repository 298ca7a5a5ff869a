"""Layers contract their cores together in a context."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import comera
from comera.nn import linear
from comera.nn.batched_contraction import gates_together
from comera.nn.module import tensor_trains


def make(dtype=torch.float64, linear_format="tt"):
    """Two shapes, one of them three times, a padded width, a layer without bias, an embedding."""
    model = nn.Sequential(
        nn.Embedding(50, 24), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 24),
        nn.Linear(24, 22), nn.Linear(22, 10, bias=False),
    ).to(dtype)  # fmt: skip
    rank = {"tt": 4, "btt": 1}[linear_format]
    shapes = {"5": [[6, 4], [6, 4]]}
    config = comera.TTConfig(rank=rank, shape_pattern=shapes, linear_format=linear_format)
    return comera.tensorize_(model, config)


def train(model, tokens, contracted):
    with contracted:
        model(tokens).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_outputs_and_gradients_are_those_of_each_layer_by_itself(linear_format):
    model = make(linear_format=linear_format)
    twin, tokens = copy.deepcopy(model), torch.randint(0, 50, (3, 4))
    twin(tokens).square().mean().backward()
    got = train(model, tokens, comera.BatchedContraction(model))
    torch.testing.assert_close(got, [p.grad for p in twin.parameters()], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_frozen_layers_ask_for_no_gradient_beside_others(linear_format):
    model = make(linear_format=linear_format)
    contracted = comera.BatchedContraction(model)
    for layer in (model[5], model[6]):  # each the only one of its shape
        with contracted:
            assert layer.shared_factors[0].requires_grad
        layer.requires_grad_(False)
        with contracted:
            assert not layer.shared_factors[0].requires_grad
            assert model[1].shared_factors[0].requires_grad


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_under_autocast_factors_are_made_narrow(linear_format):
    model, tokens = make(torch.float32, linear_format), torch.randint(0, 50, (3, 4))
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = twin(tokens)
        want.float().square().mean().backward()
    with comera.BatchedContraction(model, torch.bfloat16):
        assert model[1].shared_factors[0].dtype == torch.bfloat16  # and no others
        with torch.autocast("cpu", torch.bfloat16):
            assert all(half.dtype == torch.bfloat16 for half in model[1].factors()[:2])
            got = model(tokens)
            with torch.autocast("cpu", enabled=False):
                assert all(half.dtype == torch.float32 for half in model[1].factors()[:2])
        assert model(tokens).dtype == torch.float32
        got.float().square().mean().backward()
    torch.testing.assert_close(got, want)
    grads = [[p.grad for p in each.parameters()] for each in (model, twin)]
    torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-4)


def test_nothing_is_left_behind():
    model = make()
    contracted = comera.BatchedContraction(model)
    with pytest.raises(RuntimeError, match="stop"), contracted:
        raise RuntimeError("stop")
    assert all(m.shared_factors is None for m in model.modules() if isinstance(m, comera.TTLinear))


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
def test_truncation_between_two_uses(linear_format):
    model = make(linear_format=linear_format)
    contracted, tokens = comera.BatchedContraction(model), torch.randint(0, 50, (3, 4))
    train(model, tokens, contracted)
    with torch.no_grad():
        model[1].gates[0][1:] = 0
    before = model(tokens)
    comera.truncate_(model)
    with contracted:
        torch.testing.assert_close(model(tokens), before)
    model.to(torch.float32)
    with contracted:
        assert model(tokens).dtype == torch.float32


def test_backward_inside_the_context_allows_activation_checkpointing():
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    twin = copy.deepcopy(model)
    want = train(twin, tokens, comera.BatchedContraction(twin))
    with comera.BatchedContraction(model):
        hidden = model[0](tokens)
        checkpoint(model[1:], hidden, use_reentrant=False).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want)


def test_a_bias_that_is_computed_in_the_pass_of_its_layer():
    """By pruning, from parameters that an optimizer has changed since the pass before."""
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    contracted = comera.BatchedContraction(model)
    train(model, tokens, contracted)  # once with a bias like the others
    twin = copy.deepcopy(model)
    for each in (model, twin):
        prune.l1_unstructured(each[3], "bias", 0.3)
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
        twin(tokens).square().mean().backward()
        got = train(model, tokens, contracted)
        torch.testing.assert_close(got, [p.grad for p in twin.parameters()], rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            for each in (model, twin):
                each[3].bias_orig += 1


def test_a_model_without_tensor_trains_is_left_alone():
    model = nn.Linear(3, 3)
    with comera.BatchedContraction(model):
        assert model(torch.zeros(1, 3)).shape == (1, 3)


def test_joined_without_gradients_they_are_not_used_where_gradients_are_wanted():
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    contracted = comera.BatchedContraction(model)
    with torch.no_grad():
        contracted.__enter__()
    model(tokens).sum().backward()
    contracted.__exit__(None, None, None)
    assert all(param.grad is not None for param in model.parameters())


def test_a_copy_made_inside_is_a_copy_of_the_parameters():
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    with comera.BatchedContraction(model):
        model(tokens).sum().backward()
        twin = copy.deepcopy(model)
        torch.testing.assert_close(twin(tokens), model(tokens))
    assert all(m.shared_factors is None for m in twin.modules() if isinstance(m, comera.TTLinear))


def changed_by_an_optimizer(model, fused=False):
    model.zero_grad()
    model(torch.arange(5)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5, fused=fused).step()


def changed_by_a_fused_optimizer(model):
    changed_by_an_optimizer(model, fused=True)


def changed_by_loading(model):
    state = model.state_dict()
    model.load_state_dict({k: 1.5 * v if v.is_floating_point() else v for k, v in state.items()})


def changed_gates(model):
    with torch.no_grad():
        model[1].gates[0].mul_(0.5)


def changed_table(model):
    with torch.no_grad():
        model[0].gates[0].mul_(0.5)


CHANGES = [
    changed_by_an_optimizer, changed_by_a_fused_optimizer, changed_by_loading, changed_gates,
    changed_table,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_parameters_changed_inside_are_joined_anew(change, grad):
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    model[0] = comera.TTEmbedding(50, 24, rank=4, dtype=torch.float64)
    with torch.set_grad_enabled(grad), comera.BatchedContraction(model):
        before = model(tokens)
        with torch.enable_grad():
            change(model)
        got = model(tokens)
    assert not torch.allclose(got, before)
    torch.testing.assert_close(got, model(tokens), rtol=1e-10, atol=1e-10)


def test_gradients_after_a_change_inside_are_those_of_the_new_parameters():
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    with comera.BatchedContraction(model):
        changed_by_an_optimizer(model)
        twin = copy.deepcopy(model)
        model.zero_grad()
        model(tokens).square().mean().backward()
    twin.zero_grad()
    twin(tokens).square().mean().backward()
    grads = [[p.grad for p in each.parameters()] for each in (model, twin)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("linear_format", ["tt", "btt"])
@pytest.mark.parametrize(
    "others", ["", "0.gates.0", "1.cores.1", "3.gates.0", "4.bias", "6.cores.0"], ids=str
)
def test_parameters_in_the_place_of_others_are_those_that_are_used(linear_format, others):
    """Parameters given to ``functional_call`` are used, as in a mean teacher or meta-learning."""
    model, tokens = make(linear_format=linear_format), torch.randint(0, 50, (3, 4))
    model[0] = comera.TTEmbedding(50, 24, rank=4, dtype=torch.float64)
    named = {name: p for name, p in model.named_parameters() if name.startswith(others)}
    values = [(p + 0.1).detach().requires_grad_() for p in named.values()]
    there, found = dict(zip(named, values, strict=True)), []
    for context in (contextlib.nullcontext(), comera.BatchedContraction(model)):
        with context:
            made = torch.func.functional_call(model, there, (tokens,))
            grads = torch.autograd.grad(made.square().mean(), values)
            found.append((made, *grads, model(tokens)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found[0][0], found[0][-1])


@torch.no_grad()  # else the compiler warns that it looks at gradients of shared factors
def test_a_compiled_step_reads_parameters_in_the_place_of_others():
    model, tokens = make(), torch.randint(0, 50, (3, 4))
    others = {name: p + 0.1 for name, p in model.named_parameters()}

    def both(tokens):
        return torch.func.functional_call(model, others, (tokens,)), model(tokens)

    want = both(tokens)
    with comera.BatchedContraction(model):
        got = torch.compile(both, backend="eager", fullgraph=True)(tokens)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_rank_objective_reads_gates_changed_inside():
    model = make()
    trains = list(tensor_trains(model).values())
    with comera.BatchedContraction(model):
        changed_gates(model)
        assert torch.equal(gates_together(trains), torch.cat([g for t in trains for g in t.gates]))


def test_what_has_not_changed_is_joined_once(monkeypatch):
    model, calls = make(), []
    original = linear.contract_groups
    monkeypatch.setattr(
        linear,
        "contract_groups",
        lambda groups: calls.append(groups) or original(groups),
    )
    with comera.BatchedContraction(model):
        for _ in range(3):
            model(torch.arange(5))
        (groups,) = calls
        assert sorted(group.num_layers for group in groups) == [
            1,
            1,
            3,
        ]  # all layers, grouped by shape
        changed_gates(model)
        for _ in range(3):
            model(torch.arange(5))
        assert len(calls) == 2  # for all layers at once


def test_parameters_made_in_inference_mode_are_lent_as_they_are():
    with torch.inference_mode():
        model, tokens = make(), torch.arange(5)
        want = model(tokens)
        with comera.BatchedContraction(model):
            torch.testing.assert_close(model(tokens), want)


class TwoHeads(nn.Module):
    """Heads of one shape, one of another, on a body that may be cut off."""

    def __init__(self):
        super().__init__()
        self.body = comera.TTLinear(24, 24, rank=3)
        self.actor = comera.TTLinear(24, 24, rank=3)
        self.critic = comera.TTLinear(24, 24, rank=3)
        self.value = comera.TTLinear(24, 12, rank=2, bias=False)
        self.cut = False

    def forward(self, x):
        body = self.body(x)
        if self.cut:
            body = body.detach()
        return self.actor(body), self.critic(body), self.value(body)


@pytest.fixture
def pair():
    """A model whose layers are contracted one by one, and the same in a context."""
    torch.manual_seed(0)
    alone = TwoHeads()
    for layer in tensor_trains(alone).values():
        layer.gates.requires_grad_(False)  # those of a context get zeros where others get none
    together = copy.deepcopy(alone)
    return alone, together, comera.BatchedContraction(together)


def assert_same_grads(alone, together, but_for=None):
    for (name, a), b in zip(alone.named_parameters(), together.parameters(), strict=True):
        if but_for and but_for in name:
            continue
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(
                b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("before", ["nothing", "zeros", "gates are trained"])
def test_layers_that_no_gradient_reaches_have_none(pair, before):
    (alone, together, context), x = pair, torch.randn(5, 24)
    for model in (alone, together):
        model.cut = True
        if before == "zeros":  # which stay
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
        elif before == "gates are trained":
            model.requires_grad_(True)
    alone(x)[0].sum().backward()
    with context:
        together(x)[0].sum().backward()
    if before != "zeros":
        assert together.body.bias.grad is None
        assert together.value.cores[0].grad is None
    assert_same_grads(alone, together, but_for="gates" if before == "gates are trained" else None)


def test_an_optimizer_leaves_what_is_cut_off_where_it_is(pair):
    (alone, together, context), x = pair, torch.randn(5, 24)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.1) for m in pair[:2]]
    for step in range(6):
        alone.cut = together.cut = step > 2
        sum(y.square().mean() for y in alone(x)).backward()
        with context:
            sum(y.square().mean() for y in together(x)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(b, a)


def test_a_layer_under_no_grad_has_no_gradient(pair):
    _, together, context = pair

    def body_without(x):
        with torch.no_grad():
            return comera.TTLinear.forward(together.body, x)

    together.body.forward = body_without
    with context:
        together(torch.randn(5, 24))[2].sum().backward()
    assert [p.grad for p in together.body.parameters()] == [None] * 8
    assert together.value.cores[0].grad is not None


def test_second_derivatives(pair):
    (alone, together, context), x, found = pair, torch.randn(5, 24), []

    def differentiate(model):
        asked = x.double().requires_grad_()
        first = torch.autograd.grad(model(asked)[0].square().sum(), asked, create_graph=True)[0]
        first.square().sum().backward()
        found.append(asked.grad)

    differentiate(alone.double())
    together.double()
    with context:
        differentiate(together)
    torch.testing.assert_close(found[1], found[0])
    assert_same_grads(alone, together)


def test_a_layer_that_the_loss_does_not_reach_keeps_the_gradients_of_rank_learning():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: comera.TTLinear(16, 16, rank=4) for name in ("used", "idle")})
    ranks, x = comera.TwoStage(model, 0.5, 5, 5, gamma=0.1, beta=0.1), torch.randn(8, 16)
    found = []
    for context in (comera.BatchedContraction(model), contextlib.nullcontext()):
        model.zero_grad()
        with context:
            model["idle"](x)
            ranks.objective(model["used"](x).square().mean()).backward()
        found.append([param.grad for param in model.parameters() if param.grad is not None])
    assert len(found[0]) == len(found[1]) == len([*model.parameters()]) - 1  # but the idle bias
    for together, alone in zip(*found, strict=True):
        torch.testing.assert_close(together, alone)
    assert all(bool(gate.grad.any()) for gate in model["idle"].gates)
