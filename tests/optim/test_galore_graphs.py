"""GaLore's step compiled, and captured in CUDA graphs."""

import pytest
import torch
from torch import nn

import comera
from comera.optim.galore import GaLore

GAP = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))


def make_optimizer(model: nn.Module, **settings) -> GaLore:
    groups = comera.galore_param_groups(model, 1e-2, 6, update_proj_gap=GAP)
    return GaLore(groups, torch.optim.AdamW, **settings)


def backward(model, k):
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(k))
    device = next(model.parameters()).device
    (model(x.to(device)) - x.to(device)).square().mean().backward()


def subspaces(optimizer) -> list[torch.Tensor]:
    return [
        v for s in optimizer.state.values() for k, v in s.items() if k.endswith(("left", "right"))
    ]


def capturing(monkeypatch, yes: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: yes)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: yes)
    # Asks the driver for its stream, from torch 2.14 on, where torch was built for CUDA.
    check = "_accelerator_graph_capture_health_check"
    monkeypatch.setattr(torch.optim.Optimizer, check, lambda self: None, raising=False)


@pytest.mark.slow
def test_compiled_steps_are_the_same_and_compiled_once():
    torch.compiler.reset()
    models = [make_model(), make_model()]
    optimizers = [make_optimizer(model, lr=torch.tensor(1e-2)) for model in models]
    compiled = torch.compile(optimizers[1].step)
    torch._dynamo.utils.counters.clear()
    for k in range(2 * GAP + 1):
        for model, step in zip(models, (optimizers[0].step, compiled), strict=True):
            model.zero_grad()
            backward(model, k)
            step()
        for ours, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_new_subspaces_take_the_memory_of_the_old():
    model = make_model()
    optimizer = make_optimizer(model)
    backward(model, 0)
    optimizer.step()
    before = [(basis.data_ptr(), basis.clone()) for basis in subspaces(optimizer)]
    for k in range(1, GAP + 1):
        model.zero_grad()
        backward(model, k)
        optimizer.step()
    for (pointer, old), new in zip(before, subspaces(optimizer), strict=True):
        assert new.data_ptr() == pointer
        assert not torch.allclose(old, new)


def test_a_captured_step_leaves_the_subspaces_to_refresh(monkeypatch):
    """Steps as a graph would take them, with refresh_ after each: subspaces one step late."""
    model = make_model()
    optimizer = make_optimizer(model)
    backward(model, 0)
    optimizer.step()
    changed = []
    for k in range(1, 2 * GAP + 1):
        before = [basis.clone() for basis in subspaces(optimizer)]
        model.zero_grad()
        backward(model, k)
        with monkeypatch.context() as patch:
            capturing(patch, True)
            optimizer.step()
        for old, now in zip(before, subspaces(optimizer), strict=True):
            assert torch.equal(old, now)
        optimizer.refresh_()
        now = subspaces(optimizer)
        changed.append([not torch.equal(a, b) for a, b in zip(before, now, strict=True)])
    assert [sum(each) for each in zip(*changed, strict=True)] == [2, 2]  # each twice in two gaps


def test_a_first_step_cannot_be_captured(monkeypatch):
    model = make_model()
    optimizer = make_optimizer(model)
    backward(model, 0)
    capturing(monkeypatch, True)
    with pytest.raises(
        RuntimeError, match=r"shape \(40, 24\), and none can be found in a CUDA graph"
    ):
        optimizer.step()


@pytest.mark.gpu
def test_replayed_steps_equal_eager_ones():
    models = [make_model().cuda(), make_model().cuda()]
    optimizers = [
        make_optimizer(model, lr=torch.tensor(1e-2, device="cuda"), capturable=True)
        for model in models
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model, 0)
        optimizer.step()
    x = torch.randn(16, 24, device="cuda")
    graph = torch.cuda.CUDAGraph()
    grads = [torch.zeros_like(p) for p in models[1].parameters()]
    for param, grad in zip(models[1].parameters(), grads, strict=True):
        param.grad = grad
    with torch.cuda.graph(graph):
        optimizers[1].step()
    for k in range(1, GAP):  # before the first refresh: both use the same subspaces
        x = torch.randn(16, 24, device="cuda")
        models[0].zero_grad()
        (models[0](x) - x).square().mean().backward()
        for grad, param in zip(grads, models[0].parameters(), strict=True):
            grad.copy_(param.grad)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizers[0], "_refresh", lambda *_: None)
            optimizers[0].step()
        graph.replay()
        for ours, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6, msg=f"step {k}")
