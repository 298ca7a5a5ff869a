import pytest
import torch
from torch import nn

import comera
from comera.train import step as step_module

from .tape import Tapes


def adamw(groups):
    return torch.optim.AdamW(groups, fused=True)


def make_step(
    early=6, late=10, gate_lr=0.2, dropout=0.1, make_optimizer=adamw,
    device="cpu", config=None, **settings,
) -> comera.TrainStep:  # fmt: skip
    """A small model with dropout, its optimizer, rank learning and learning-rate schedule.

    Without a late stage ranks are pruned by importance after ``early`` steps.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(100, 24), nn.Linear(24, 36), nn.GELU(), nn.Dropout(dropout), nn.Linear(36, 5)
    )
    config = config or comera.TTConfig(rank=5, order=2, exclude_modules=["4"])
    comera.tensorize_(model, config)
    model.to(device)
    optimizer = make_optimizer(comera.param_groups(model, 1e-2, gate_lr=gate_lr))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.1 * k))
    if late:
        ranks = comera.TwoStage(model, 0.5, early, late, rho_loss=0.5)
    else:
        ranks = comera.ImportancePruning(model, 0.5, early)
    settings = {"scheduler": scheduler, "clip_norm": 1.0, **settings}
    return comera.TrainStep(model, loss_fn, optimizer, ranks, **settings)


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).mean(1), batch["y"])


def get_batch(number: int, rows=16, device="cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 100, (rows, 3), generator=generator).to(device)
    return {"x": x, "y": x.sum(1) % 5}


def evaluate(model: nn.Module) -> dict[str, float]:
    assert not model.training
    device = next(model.parameters()).device
    return {"loss": float(loss_fn(model, get_batch(10**6, device=device)))}


@pytest.fixture
def step() -> comera.TrainStep:
    return make_step()


@pytest.fixture
def tapes(monkeypatch):
    """Steps made after this record and replay."""
    tapes = Tapes()
    monkeypatch.setattr(step_module, "graphs_on", lambda device: tapes)
    return tapes
