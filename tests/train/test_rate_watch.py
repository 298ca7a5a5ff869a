"""A learning rate that is too high is named before the loss is not finite, and no other is."""

import logging
import math

import pytest
import torch
from torch import nn

import comera
import comera.nn.module
from comera.models.transformer import Encoder, SequenceClassifier
from comera.train.rate_watch import RateWatch
from comera.train.step import NonFiniteLossError


def classifier(**settings):
    torch.manual_seed(0)
    return SequenceClassifier(Encoder(50, 32, 2, 2, 64, 16, 0.0, **settings), 3, 0.0)


def tensorized(**settings):
    config = comera.TTConfig(rank=6, target_modules=r"encoder\.blocks\..*", init="orthogonal")
    return comera.tensorize_(classifier(**settings), config)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def batches(count):
    for k in range(count):
        tokens = torch.randint(1, 50, (8, 16), generator=torch.Generator().manual_seed(k))
        yield tokens, tokens.sum(1) % 3


def train(step, count):
    for batch in batches(count):
        step(batch)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "too high" in record.getMessage()]


def step_of(model, lr, optimizer=comera.MuonAdamW, **settings):
    return comera.TrainStep(model, loss_fn, optimizer(comera.param_groups(model, lr)), **settings)


@pytest.mark.parametrize("optimizer", [comera.MuonAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_absurd_rate_is_named_before_the_loss_is_nan(optimizer, precision, caplog):
    step = step_of(tensorized(), 7.0, optimizer, precision=precision)
    with pytest.raises(NonFiniteLossError, match=r"at a learning rate of 7; atten.*halve"):
        train(step, 50)
    said = warnings_of(caplog)
    assert any("has changed" in text and "set it to" in text for text in said)
    assert len(said) == len(set(said)) <= 2  # each sign once


def test_growing_scores_are_named_with_what_bounds_them(caplog):
    model = tensorized()
    step = step_of(model, 1e-3)
    with torch.no_grad():
        for core in model.encoder.blocks[1].attention.query.cores:
            core.mul_(4)
    step(next(batches(1)))
    (text,) = warnings_of(caplog)
    assert "attention scores of encoder.blocks.1.attention have" in text
    assert "qk_norm=True" in text


def test_a_usual_rate_is_not_named(caplog):
    step = step_of(tensorized(), 7e-4, watch=10)
    train(step, 25)
    assert not warnings_of(caplog)
    assert 0 < step.watch.last.change < 0.1
    assert 0.2 < step.watch.last.score < 0.6  # 1/3 at the start


def test_the_change_is_that_of_the_weight_that_changes_most():
    model = tensorized()
    step = step_of(model, 1e-3)
    layers = comera.nn.module.tensor_trains(model)
    before = {n: [core.detach().clone() for core in m.cores] for n, m in layers.items()}
    dense = {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() == 2}
    step(next(batches(1)))
    found = {
        name: sum(
            float((core.detach() - old).norm() / old.norm())
            for core, old in zip(layers[name].cores, cores, strict=True)
        )
        for name, cores in before.items()
    }
    params = dict(model.named_parameters())
    found |= {
        name: float((params[name].detach() - old).norm() / old.norm())
        for name, old in dense.items()
    }
    seen = step.watch.last
    assert seen.change == pytest.approx(max(found.values()), rel=1e-4)
    assert found[seen.weight] == max(found.values())


@pytest.mark.parametrize("make", [classifier, tensorized])
def test_the_score_is_that_of_normal_activations(make):
    model = make()
    watch = RateWatch(model, torch.optim.SGD(model.parameters(), 1e-3), every=1)
    with torch.no_grad():  # the second attention has the larger scores
        weight = model.encoder.blocks[1].attention.key
        (weight.cores[0] if hasattr(weight, "cores") else weight.weight).mul_(3)
    with watch.checked(1):
        pass
    attention = model.encoder.blocks[1].attention
    x, y = torch.randn(2, 40_000, 32)
    zero = torch.zeros(1, 32)  # takes off the biases
    q = (attention.query(x) - attention.query(zero)).unflatten(1, (2, 16))
    k = (attention.key(y) - attention.key(zero)).unflatten(1, (2, 16))
    found = ((q * k).sum(2) / 4).detach().std(0).max()
    assert watch.last.score == pytest.approx(float(found), rel=0.05)
    assert watch.last.attention == "encoder.blocks.1.attention"


def test_heads_may_share_their_keys():
    class Grouped(nn.Module):
        head_dim = 8

        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(16, 32), nn.Linear(16, 16)

    model = Grouped()
    watch = RateWatch(model, torch.optim.SGD(model.parameters(), 1e-3), every=1)
    with watch.checked(1):
        pass
    q, k = model.q_proj.weight.unflatten(0, (4, 8)), model.k_proj.weight.unflatten(0, (2, 8))
    norms = [(q[head].T @ k[head // 2]).norm() / math.sqrt(8) for head in range(4)]
    assert watch.last.score == pytest.approx(float(max(norms).detach()), rel=1e-5)
    assert watch.last.attention == ""


@pytest.mark.parametrize("width", [0, 6, 16])
def test_keys_that_do_not_fit_the_queries_are_left_out(width):
    model = nn.Module()
    model.num_heads, model.query, model.key = 2, nn.Linear(8, 8), nn.Linear(8, 8)
    model.key.weight = nn.Parameter(torch.ones(width, 8))
    watch = RateWatch(model, torch.optim.SGD(model.parameters(), 1e-3), every=1)
    with watch.checked(1):
        pass
    assert watch.last.score == 0


def test_bounded_attention_has_no_score():
    step = step_of(classifier(qk_norm=True), 1e-3)
    step(next(batches(1)))
    assert step.watch.last.score == 0


def test_weights_that_start_at_zero_are_no_alarm(caplog):
    model = classifier()
    nn.init.zeros_(model.output.weight)
    step = step_of(model, 1e-3, torch.optim.AdamW, watch=1)
    train(step, 1)
    assert math.isfinite(step.watch.last.change)
    assert not warnings_of(caplog)


@pytest.mark.parametrize(("rate", "named"), [(3e-3, False), (0.3, True)])
def test_rows_that_start_near_zero_are_judged_by_what_rows_usually_are(rate, named, caplog):
    model = classifier()
    nn.init.uniform_(model.encoder.tokens.weight, -1e-4, 1e-4)
    train(step_of(model, rate, torch.optim.AdamW), 1)
    assert any("encoder.tokens.weight" in text for text in warnings_of(caplog)) == named


def test_looks_are_few_and_can_be_left_out(monkeypatch):
    seen = []
    looked = RateWatch._look

    def look(watch, before):
        seen.append(step.steps_done + 1)
        return looked(watch, before)

    monkeypatch.setattr(RateWatch, "_look", look)
    step = step_of(classifier(), 1e-4, watch=12)
    train(step, 26)
    assert seen == [1, 5, 10, 12, 20, 24]
    step = step_of(classifier(), 1e-4, watch=0)
    step(next(batches(1)))
    assert seen[-1] == 24
    with pytest.raises(ValueError, match="watch=-1 must be at least 0"):
        step_of(classifier(), 1e-4, watch=-1)


def test_one_process_of_several_speaks(caplog):
    model = classifier()
    watch = RateWatch(model, torch.optim.SGD(model.parameters(), 1.0), every=1, warns=False)
    with torch.no_grad(), caplog.at_level(logging.WARNING), watch.checked(1):
        model.encoder.positions.add_(1)
    assert watch.last.change > 1
    assert not warnings_of(caplog)


def test_the_rate_that_is_named_is_one_of_weights():
    """Gates have a higher one of their own, which nobody is to halve."""
    for scaled in ({}, {"scale_rates": "contracted"}):
        groups = comera.param_groups(tensorized(), 1e-3, core_lr=2e-3, gate_lr=0.1, **scaled)
        watch = RateWatch(tensorized(), comera.MuonAdamW(groups))
        assert "at a learning rate of 0.002" in watch.advice()


def test_a_gradient_that_is_not_finite_is_no_matter_of_the_rate(caplog):
    model = classifier()
    model.output.weight.register_hook(lambda grad: grad * math.inf)
    train(step_of(model, 1e-3, torch.optim.AdamW), 1)
    assert not warnings_of(caplog)
