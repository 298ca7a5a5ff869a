import math
import warnings

import pytest
import torch
from torch import nn

import comera
from comera.models.transformer import Encoder, SequenceClassifier
from comera.train.step import NonFiniteLossError

from .conftest import get_batch, loss_fn, make_step


def grads_after(step, batch):
    """The gradients one call would have applied."""
    seen = {}
    named = dict(step.model.named_parameters())
    step.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: param.grad.clone() for name, param in named.items()})
    )
    step(batch)
    return seen


def test_returns_the_loss_without_the_rank_objective():
    step = make_step(dropout=0.0)
    want = loss_fn(step.model, get_batch(0)).detach()
    got = step(get_batch(0))
    torch.testing.assert_close(got, want)
    assert not got.requires_grad
    assert step.steps_done == step.ranks.steps_done == 1


@pytest.mark.parametrize("parts", [1, 3])
def test_a_loss_in_float64_is_not_rounded(parts):
    x, model = torch.arange(9.0, dtype=torch.float64)[:, None], nn.Linear(1, 1).double()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = comera.TrainStep(model, lambda m, x: m(x).square().mean(), sgd, accumulate=parts)
    want = model(x).square().mean().detach()
    torch.testing.assert_close(step(x), want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("parts", [2, 3, 16])
def test_accumulated_gradients_equal_those_of_the_whole_batch(parts):
    whole = grads_after(make_step(dropout=0.0), get_batch(0))
    split = grads_after(make_step(dropout=0.0, accumulate=parts), get_batch(0))
    torch.testing.assert_close(split, whole)


@pytest.mark.parametrize("rows", [16, 9])
def test_rank_learning_follows_the_loss_of_all_parts(rows):
    """Each with its share of the rows."""
    whole = make_step(dropout=0.0)
    split = make_step(dropout=0.0, accumulate=2)
    for step in (whole, split):
        for number in range(2):
            step(get_batch(number, rows))
    torch.testing.assert_close(split.ranks._running_loss, whole.ranks._running_loss)


def test_gradients_from_before_the_step_are_dropped():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    model.bias.grad, model.weight.grad = torch.ones(4), torch.ones(4, 4)
    sgd = torch.optim.SGD([model.weight], 1.0)  # so the bias counts in the norm alone
    step = comera.TrainStep(model, lambda m, x: m(x).sum(), sgd, clip_norm=1.0)
    moved = []
    for _ in range(3):
        step(torch.ones(1, 4))
        moved.append(float((model.weight.detach() - weight).norm()))
        weight.copy_(model.weight.detach())
    assert moved == pytest.approx([moved[0]] * 3)
    assert moved[0] == pytest.approx(math.sqrt(16 / 20), rel=1e-5)


def test_gradients_are_clipped_together():
    step = make_step()
    step.clip_norm = 1e-3
    grads = grads_after(step, get_batch(0)).values()
    norm = torch.stack([g.norm() for g in grads]).norm()
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_learns_and_shrinks(step):
    # Two batches: one would be learned by heart, and its gradients drown that of the size.
    losses = [float(step(get_batch(k % 2))) for k in range(16)]
    assert sum(losses[-2:]) < sum(losses[:2])
    assert step.ranks.size.exact() < step.ranks.start_size


def test_bfloat16_autocast_trains_float32_parameters():
    step = make_step(precision="bf16")
    first = float(step(get_batch(0)))
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    assert abs(first - float(make_step()(get_batch(0)))) < 0.02
    assert float(step(get_batch(0))) != first


def test_warnings_of_the_compiler_alone_are_ignored(monkeypatch, recwarn):
    def compiled(model, batch):
        loss = loss_fn(model, batch)
        for text in ("\nOnline softmax is disabled on the fly", "another"):
            loss.register_hook(lambda grad, text=text: warnings.warn(text, stacklevel=1))
        return loss

    monkeypatch.setattr(torch, "compile", lambda function: compiled)
    make_step(compile=True)(get_batch(0))
    assert [str(each.message) for each in recwarn] == ["another"]


def test_a_loss_that_is_not_finite_changes_nothing(step):
    step(get_batch(0))
    before = {n: p.clone() for n, p in step.model.named_parameters()}
    step._loss_fn = lambda model, batch: loss_fn(model, batch) * math.nan
    with pytest.raises(NonFiniteLossError, match="nan at step 2"):
        step(get_batch(1))
    torch.testing.assert_close(dict(step.model.named_parameters()), before)


def test_parts_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="accumulate=0"):
        make_step(accumulate=0)
    with pytest.raises(ValueError, match=r"16 rows.*accumulate=17"):
        make_step(accumulate=17)(get_batch(0))
    with pytest.raises(ValueError, match=r"\[3, 16\] rows"):
        make_step(accumulate=2)({"x": get_batch(0)["x"], "y": torch.zeros(3)})


def test_any_structure_of_batch_and_no_ranks():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = comera.TrainStep(
        model, lambda m, b: (m(b[0]) - b[1][0]).square().mean(), optimizer, accumulate=2
    )
    assert step((torch.ones(4, 4), [torch.zeros(4, 2)])) > 0


def test_an_optimizer_of_the_model_before_conversion_is_refused():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comera.tensorize_(model, comera.TTConfig(rank=4, exclude_modules=["1"]))
    with pytest.raises(ValueError, match="build it after tensorize_"):
        comera.TrainStep(model, loss_fn, optimizer)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda loss: loss.detach(), r"got \(\) without a gradient"),
        (lambda loss: loss[None], r"got \(1,\)"),
        (float, "got float"),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
def test_a_loss_that_cannot_be_trained_on_is_refused(step, wrong, message):
    step._loss_fn = lambda model, batch: wrong(loss_fn(model, batch))
    with pytest.raises(ValueError, match=message):
        step(get_batch(0))


def test_a_gradient_that_is_not_finite_changes_nothing(step):
    before = {n: p.clone() for n, p in step.model.named_parameters()}
    root = next(iter(step.model.parameters()))
    step._loss_fn = lambda m, b: loss_fn(m, b) + (root.sum() * 0).sqrt()
    with pytest.raises(NonFiniteLossError, match="gradient norm is nan at step 1"):
        step(get_batch(0))
    torch.testing.assert_close(dict(step.model.named_parameters()), before)


def test_a_graph_that_is_neither_wanted_nor_not():
    with pytest.raises(TypeError, match="graph='auto' must be True, False, or None"):
        make_step(graph="auto")


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_cannot_be_clipped_to_is_refused(clip_norm):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=f"clip_norm={clip_norm} must be above 0"):
        comera.TrainStep(model, loss_fn, optimizer, clip_norm=clip_norm)


def losses(device, precision="fp32", steps=3):
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(300, 64, 2, 2, 128, 16, 0.0, 0, "post"), 3, dropout=0.0)
    comera.tensorize_(model, comera.TTConfig(rank=6, exclude_modules=["output"]))
    tokens, labels = torch.randint(0, 300, (4, 16)), torch.randint(0, 3, (4,))
    tokens[:, 0] = 1  # something to attend to
    model.to(device)
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-2), fused=True)
    ranks = comera.TwoStage(model, 0.5, 100, 100)

    def entropy(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    step = comera.TrainStep(model, entropy, optimizer, ranks, precision=precision)
    batch = tokens.to(device), labels.to(device)
    return [float(step(batch)) for _ in range(steps)]


def test_losses_are_those_of_the_cpu(device):
    torch.testing.assert_close(losses(device), losses("cpu"), rtol=1e-3, atol=1e-4)


def test_mixed_precision_follows_float32(device):
    torch.testing.assert_close(losses(device, "bf16"), losses("cpu"), rtol=0.05, atol=0.02)
