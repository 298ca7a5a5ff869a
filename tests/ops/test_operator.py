import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from comera.ops.operator import operator


@operator("comera_test::scale_all")
def scale_all(x: Tensor, others: list[Tensor], unused: list[Tensor], factor: float) -> list[Tensor]:
    """Every tensor times the factor and x."""
    return [x * other * factor for other in others]


@scale_all.register_fake
def _(x, others, unused, factor):
    return [torch.empty_like(other) for other in others]


def _setup_context(ctx, inputs, output):
    x, others, _, ctx.factor = inputs
    ctx.count = len(others)
    ctx.save_for_backward(x, *others)


def _backward(ctx, grads):
    x, *others = ctx.saved_tensors
    need_x, need_others, _, _ = ctx.needs_input_grad
    assert len(need_others) == ctx.count
    grad_x = sum(g * o for g, o in zip(grads, others, strict=True)) * ctx.factor if need_x else None
    return grad_x, [g * x * ctx.factor for g in grads], [None], None


scale_all.register_autograd(_backward, setup_context=_setup_context)


def inputs(count=3):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    others = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    return x, others, [torch.ones(2, requires_grad=True)], 1.5


def test_it_keeps_what_the_function_says_about_itself():
    assert scale_all.__doc__ == "Every tensor times the factor and x."


@pytest.mark.parametrize("needs_x", [True, False])
def test_eager_mode_equals_the_custom_op(needs_x):
    x, others, unused, factor = inputs()
    x.requires_grad_(needs_x)
    leaves = [*([x] if needs_x else []), *others]
    sums = [
        sum((k + 1) * out.sum() for k, out in enumerate(run(x, others, unused, factor)))
        for run in (scale_all, scale_all.custom_op)
    ]
    torch.testing.assert_close(sums[0], sums[1])
    got, want = (torch.autograd.grad(total, leaves) for total in sums)
    torch.testing.assert_close(got, want)


def test_an_argument_without_gradient_gets_none():
    x, others, unused, factor = inputs()
    sum(out.sum() for out in scale_all(x, others, unused, factor)).backward()
    assert unused[0].grad is None


def test_gradients():
    x, others, unused, factor = inputs()

    def run(x, *others):
        return tuple(scale_all(x, list(others), unused, factor))

    assert torch.autograd.gradcheck(run, (x, *others))
    assert torch.autograd.gradgradcheck(run, (x, *others))


def test_tensors_without_numbers_go_the_compilers_way(monkeypatch):
    monkeypatch.setattr(scale_all, "run", None)  # would be called with numbers
    x = torch.empty(4, device="meta")
    assert scale_all(x, [x], [], 1.5)[0].is_meta
    with FakeTensorMode():
        x = torch.empty(4)
        assert scale_all(x, [x], [], 1.5)[0].shape == (4,)


def test_function_transforms_are_refused():
    x, others, unused, factor = inputs(1)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda o: scale_all(x, [o], unused, factor)[0].sum())(others[0])


def test_forward_mode_says_that_it_is_not_there():
    x, others, unused, factor = inputs(1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(others[0].detach(), torch.ones(4).double())
        with pytest.raises(NotImplementedError, match="forward mode"):
            scale_all(x, [dual], unused, factor)
