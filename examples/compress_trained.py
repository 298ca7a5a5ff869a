"""A trained model made smaller by what its data say, and healed in a few steps.

    python examples/compress_trained.py

A small network is trained here in the place of the one you have.
"""

import copy

import torch
from torch import nn

import comera

torch.manual_seed(0)
teacher = torch.randn(64, 8) / 8


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs that use few directions much, as activations of real models do, and classes."""
    inputs = torch.randn(rows, 64) * torch.logspace(0, -1.5, 64)
    return inputs, (inputs @ teacher).argmax(1)


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, classes = batch
    return nn.functional.cross_entropy(model(inputs), classes)


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_fn(model, held_out))


def train(model: nn.Module, steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=lr))
    step = comera.TrainStep(model, loss_fn, optimizer)
    for _ in range(steps):
        step(batch(256))


held_out = batch(4096)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
model.append(nn.Linear(256, 8))
train(model, 600, lr=2e-3)
print(f"dense: loss {loss_of(model):.3f}")

small = copy.deepcopy(model)
done = comera.compress_(small, [batch(512) for _ in range(8)], budget=0.1, loss_fn=loss_fn)
print(done.summary())
print(f"compressed: loss {loss_of(small):.3f}")
train(small, 150, lr=1e-3)
print(f"healed: loss {loss_of(small):.3f}")

# Serving: each pair of thin layers is multiplied in the way that is faster.
comera.save_model(small, "small-trained")
comera.freeze_(small)
print(f"frozen: loss {loss_of(small):.3f}")
