import pytest
import torch
from torch import nn

import comera


def make_step(early=6, late=10, gate_lr=0.2, dropout=0.1, **settings) -> comera.TrainStep:
    """A small model with dropout, its optimizer, rank schedule and learning-rate schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(100, 24), nn.Linear(24, 36), nn.GELU(), nn.Dropout(dropout), nn.Linear(36, 5)
    )
    comera.tensorize_(model, comera.TTConfig(rank=5, order=2, exclude_modules=["4"]))
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-2, gate_lr=gate_lr), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.1 * k))
    ranks = comera.TwoStage(model, 0.5, early, late, rho_loss=0.5)
    return comera.TrainStep(
        model, loss_fn, optimizer, ranks, scheduler=scheduler, clip_norm=1.0, **settings
    )


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).mean(1), batch["y"])


def get_batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 100, (16, 3), generator=generator)
    return {"x": x, "y": x.sum(1) % 5}


def evaluate(model: nn.Module) -> dict[str, float]:
    assert not model.training
    return {"loss": float(loss_fn(model, get_batch(10**6)))}


@pytest.fixture
def step() -> comera.TrainStep:
    return make_step()
