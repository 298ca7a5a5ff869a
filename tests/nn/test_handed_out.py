"""Layers contracted together leave what autograd and optimizers see as if each were alone."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import comera
from comera.nn.forward_sharing import share_in_forward_, unshare_in_forward_

pytestmark = pytest.mark.usefixtures("two_are_enough")


class TwoHeads(nn.Module):
    """Heads of one shape, one of another, on a body that may be cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.body = comera.TTLinear(24, 24, rank=3)
        self.actor = comera.TTLinear(24, 24, rank=3)
        self.critic = comera.TTLinear(24, 24, rank=3)
        self.value = comera.TTLinear(24, 12, rank=2, bias=False)
        self.cut = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        body = self.body(x)
        if self.cut:
            body = body.detach()
        return self.actor(body), self.critic(body), self.value(body)


@pytest.fixture
def pair() -> tuple[TwoHeads, TwoHeads]:
    """A model whose layers are contracted one by one, and the same with all of them together."""
    torch.manual_seed(0)
    alone = TwoHeads()
    together = copy.deepcopy(alone)
    share_in_forward_(together)
    return alone, together


def assert_same_grads(alone: nn.Module, together: nn.Module) -> None:
    for (name, a), b in zip(alone.named_parameters(), together.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(
                b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_layers_that_no_gradient_reaches_have_none(pair):
    x = torch.randn(5, 24)
    for model in pair:
        model.cut = True
        model(x)[0].sum().backward()
        assert model.body.bias.grad is None
        assert model.value.cores[0].grad is None
    assert_same_grads(*pair)


def test_an_optimizer_leaves_what_is_cut_off_where_it_is(pair):
    x, (alone, together) = torch.randn(5, 24), pair
    for model in pair:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(6):
            model.cut = step > 2
            sum(y.square().mean() for y in model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(b, a)


def test_zeros_that_were_there_stay(pair):
    x = torch.randn(5, 24)
    for model in pair:
        model.cut = True
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        model(x)[0].sum().backward()
    assert_same_grads(*pair)


def test_a_layer_under_no_grad_has_no_gradient(pair):
    _, together = pair

    def body_without(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return comera.TTLinear.forward(together.body, x)

    together.body.forward = body_without
    together(torch.randn(5, 24))[2].sum().backward()
    assert [p.grad for p in together.body.parameters()] == [None] * 8
    assert together.value.cores[0].grad is not None


def test_losses_of_different_heads_have_backward_passes_of_their_own(pair):
    x = torch.randn(5, 24)
    for model in pair:
        for y in model(x):
            y.square().sum().backward(retain_graph=True)
    assert_same_grads(*pair)


def test_second_derivatives(pair):
    x, found = torch.randn(5, 24), []
    for model in pair:
        for p in model.parameters():
            p.data = p.data.double()
        asked = x.double().requires_grad_()
        first = torch.autograd.grad(model(asked)[0].square().sum(), asked, create_graph=True)[0]
        first.square().sum().backward()
        found.append(asked.grad)
    torch.testing.assert_close(found[1], found[0])
    assert_same_grads(*pair)


def test_the_context_does_the_same():
    torch.manual_seed(0)
    alone = TwoHeads()
    together = copy.deepcopy(alone)
    x = torch.randn(5, 24)
    alone.cut = together.cut = True
    alone(x)[0].sum().backward()
    with comera.BatchedContraction(together):
        together(x)[0].sum().backward()
    for (name, a), b in zip(alone.named_parameters(), together.parameters(), strict=True):
        if "gates" not in name:
            assert (a.grad is None) == (b.grad is None), name


def test_forward_mode(pair):
    x, found = torch.randn(5, 24), []
    change = [torch.randn_like(param) for param in pair[0].parameters()]
    for model in pair:
        names = [name for name, _ in model.named_parameters()]
        with forward_ad.dual_level():
            params = {
                name: forward_ad.make_dual(param, tangent)
                for name, param, tangent in zip(names, model.parameters(), change, strict=True)
            }
            ys = torch.func.functional_call(model, params, (x,))
            found.append([forward_ad.unpack_dual(y).tangent for y in ys])
    torch.testing.assert_close(found[1], found[0])


def test_each_layer_may_be_by_itself_again(pair):
    _, together = pair
    unshare_in_forward_(together)
    actor, critic, _ = together(torch.randn(5, 24))
    assert together.actor.shared is None
    assert not together._forward_pre_hooks
    assert actor.shape == critic.shape
