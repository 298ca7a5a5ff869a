import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import comera
from comera.compress import heal
from comera.nn.linear import TTLinear


def make_pair():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8))
    batches = [torch.randn(32, 16) for _ in range(40)]
    small = copy.deepcopy(dense)
    teach = [(x, torch.randint(0, 8, (32,))) for x in batches[:8]]
    comera.compress_(small, teach, budget=0.5, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    return small, dense, batches


def answers(model, batch):
    return model(batch)


def distance(small, dense, x):
    with torch.no_grad():
        small, dense = (F.log_softmax(m.eval()(x), -1) for m in (small, dense))
    return float(F.kl_div(small, dense, reduction="batchmean", log_target=True))


def test_the_answers_come_closer_to_those_of_the_dense_model():
    small, dense, batches = make_pair()
    test = torch.randn(512, 16)
    with torch.no_grad():
        for core in small[0].cores:
            core.add_(0.2 * torch.randn_like(core))
    before = distance(small, dense, test)
    done = comera.heal_(small, dense, batches * 5, lr=3e-3, outputs=answers)
    assert distance(small, dense, test) < 0.5 * before
    assert done.steps == 200
    assert done.last < done.first
    assert "200 steps in" in str(done)


def test_numbers_that_tell_few_steps_apart_are_named(caplog):
    small, dense, batches = make_pair()
    comera.heal_(small, dense, batches[:2], outputs=answers)
    assert "heal_ trains" not in caplog.text
    narrow = [x.bfloat16() for x in batches[:2]]
    comera.heal_(small.bfloat16(), dense.bfloat16(), narrow, outputs=answers)
    assert caplog.text.count("heal_ trains parameters of bfloat16") == 1


def test_only_layers_in_compressed_form_change_and_modes_stay():
    small, dense, batches = make_pair()
    assert isinstance(small[0], TTLinear)
    small.insert(4, nn.LayerNorm(8))
    small.train()
    before = copy.deepcopy(small.state_dict())
    theirs = copy.deepcopy(dense.state_dict())
    comera.heal_(small, dense, batches[:3], outputs=answers)
    changed = {key for key, value in small.state_dict().items() if not value.equal(before[key])}
    assert changed
    assert all(".cores." in key or key.endswith("bias") for key in changed)
    assert not any(key.startswith("4.") for key in changed)
    assert all(value.equal(theirs[key]) for key, value in dense.state_dict().items())
    assert all(module.training for module in (*small.modules(), *dense.modules()))
    assert all(param.requires_grad and param.grad is None for param in small.parameters())


def test_the_rate_rises_at_first_and_falls_to_zero():
    small, dense, batches = make_pair()
    rates = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    try:
        comera.heal_(small, dense, batches, lr=1e-3, outputs=answers)
    finally:
        hook.remove()
    assert len(rates) == 40
    highest = rates.index(max(rates))
    assert highest < 5
    assert rates[: highest + 1] == sorted(rates[: highest + 1])
    assert rates[20] == pytest.approx(0.5e-3)
    assert rates[39] == pytest.approx(1e-3 / 40)


def test_it_stops_when_the_time_is_over():
    small, dense, batches = make_pair()
    done = comera.heal_(small, dense, batches[:2], seconds=0.3, outputs=answers)
    assert done.steps > 2  # more than one pass
    assert 0.3 <= done.seconds < 10


def test_models_of_hugging_face_need_no_outputs():
    class Named(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return type("Output", (), {"logits": self.net(x)})

    small, dense, batches = make_pair()
    data = [{"x": x, "labels": None} for x in batches[:4]]
    assert comera.heal_(Named(small), Named(dense), data).steps == 4


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lr": 0}, "lr=0 must be above 0"),
        ({"seconds": -1}, "seconds=-1 must be above 0"),
        ({"batches": []}, "batches is empty"),
        ({"batches": iter([])}, "have no length: say how long with seconds="),
        ({"outputs": None}, r"a batch of type Tensor needs outputs\(model, batch\)"),
        ({"outputs": lambda m, x: m(x)[:, : len(m)]}, "answers with shape .* the dense one with"),
        ({"distance": lambda a, b: (a - b).sum() * torch.inf}, "lower lr=0.0002"),
    ],
)
def test_what_is_wrong_is_named(settings, problem):
    small, dense, batches = make_pair()
    small.append(nn.Identity())
    batches = settings.pop("batches", batches[:2])
    with pytest.raises(ValueError, match=problem):
        comera.heal_(small, dense, batches, **{"outputs": answers, **settings})


def test_a_model_without_compressed_layers_is_refused():
    _, dense, batches = make_pair()
    with pytest.raises(ValueError, match="has no tensor-train layer that may be trained"):
        comera.heal_(copy.deepcopy(dense), dense, batches, outputs=answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_divergence_and_its_gradient_are_those_of_torch(dtype, monkeypatch):
    monkeypatch.setattr(heal, "_AT_ONCE", 40)  # three rows, and two at last
    mine, theirs = (torch.randn(1, 8, 13, dtype=dtype, requires_grad=True) for _ in range(2))
    ours, wanted = (F.log_softmax(x.float(), -1).flatten(0, 1) for x in (mine, theirs.detach()))
    expected = F.kl_div(ours, wanted, reduction="batchmean", log_target=True)
    found = heal._Divergence.apply(mine, theirs.detach())
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(3 * found, mine)
    torch.testing.assert_close(grad, torch.autograd.grad(3 * expected, mine)[0])


def test_the_divergence_is_never_below_zero():
    logits = torch.randn(99, 3, 7)
    assert all(heal._Divergence.apply(row * (1 + 1e-7), row) >= 0 for row in logits)


def test_a_model_is_not_its_own_teacher():
    model = nn.Sequential(TTLinear(8, 8, rank=2))
    with pytest.raises(ValueError, match="dense is the model itself"):
        comera.heal_(model, model, [torch.randn(2, 8)], outputs=lambda m, x: m(x))
