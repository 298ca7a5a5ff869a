"""Training in eight bits beside bfloat16."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.ops.context import static_shapes
from comera.ops.linear.fp8 import why_not_fp8
from comera.recipes.run_config import TrainConfig
from comera.train import step as step_module
from comera.train.host_state import make_capturable_

from .tape import Tapes

pytestmark = pytest.mark.skipif(
    why_not_fp8(torch.device("cpu")) is not None, reason="torch multiplies no eight bits here"
)

WIDTH, CLASSES = 32, 6


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = x + self.second(F.gelu(self.first(self.norm(x))))
        return self.out(x)


def make_step(seed=0, tapes=None, **settings):
    torch.manual_seed(seed)
    model = comera.tensorize_(Residual(), comera.TTConfig(rank=8, exclude_modules=["out"]))
    optimizer = torch.optim.AdamW(comera.param_groups(model, 3e-3), fused=True)
    return comera.TrainStep(
        model, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), optimizer, **settings
    )


def get_batch(number, seed=0):
    """Classes by a teacher that the model does not fit at once."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    x = torch.randn(48, WIDTH, generator=generator)
    teacher = torch.randn(2, WIDTH, 24, generator=torch.Generator().manual_seed(99))
    scores = (x @ teacher[0]).relu() @ teacher[1][:CLASSES].T[:24]
    return {"x": x, "y": scores.argmax(1)}


def final_loss(precision, seed, steps=160):
    step = make_step(seed, precision=precision)
    losses = [float(step(get_batch(k, seed))) for k in range(steps)]
    return sum(losses[:10]) / 10, sum(losses[-50:]) / 50


@pytest.mark.slow
def test_training_in_eight_bits_reaches_the_loss_of_bfloat16():
    """Within what another seed changes."""
    found = {
        precision: [final_loss(precision, seed) for seed in range(3)]
        for precision in ("fp32", "bf16", "fp8")
    }
    ends = {precision: torch.tensor(losses)[:, 1] for precision, losses in found.items()}
    start = torch.tensor(found["bf16"])[:, 0].mean()
    assert ends["bf16"].mean() < 0.5 * start  # it has learned something
    noise = torch.stack([ends["fp32"], ends["bf16"]]).std()
    assert (ends["fp8"].mean() - ends["bf16"].mean()).abs() < noise
    assert not torch.equal(ends["fp8"], ends["bf16"])


def test_precision_by_name_is_autocast(caplog):
    caplog.set_level("INFO", "comera")
    for precision, dtype in (("fp32", None), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)):
        step = make_step(precision=precision)
        assert step.autocast == dtype
        assert step.scaled == (precision == "fp8")
    assert caplog.text.count("precision='fp8' on a CPU shows the losses of eight bits") == 1
    assert make_step().autocast is None
    step, batch = make_step(precision="bf16"), get_batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(copy.deepcopy(step.model)(batch["x"]), batch["y"])
    assert torch.equal(step(batch), loss.detach())


def test_bad_precision():
    with pytest.raises(ValueError, match="precision='fp4' must be 'fp32', 'bf16' or 'fp8'"):
        make_step(precision="fp4")
    with pytest.raises(ValueError, match="precision=None must be 'fp32', 'bf16' or 'fp8'"):
        make_step(precision=None)


def test_where_it_cannot_run_it_is_bfloat16_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(step_module, "why_not_fp8", lambda device: "this card is too old")
    narrow, half = make_step(precision="fp8"), make_step(precision="bf16")
    for k in range(3):
        assert torch.equal(narrow(get_batch(k)), half(get_batch(k)))
    assert caplog.text.count("precision='fp8' trains in 'bf16' here: this card is too old") == 1


def test_a_captured_step_in_eight_bits_is_the_eager_one(monkeypatch):
    tapes = Tapes()
    eager = make_step(precision="fp8", clip_norm=1.0)
    make_capturable_(eager.optimizer, torch.device("cpu"))
    monkeypatch.setattr(step_module, "graphs_on", lambda device: tapes)
    captured = make_step(precision="fp8", clip_norm=1.0)
    for k in range(9):
        got = captured(get_batch(k))
        with static_shapes():
            assert torch.equal(got, eager(get_batch(k)))
    assert captured.describe().captured
    assert any("_scaled_mm" in name for name in captured.describe().contents.kernels)


def test_runs_name_it():
    assert TrainConfig(precision="fp8").precision == "fp8"
