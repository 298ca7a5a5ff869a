import pytest
import torch
from torch import nn

import comera
from comera.nn.module import tensor_trains


def make_model(dtype=torch.float64) -> nn.Module:
    """Two linear layers and an embedding in tensor-train form, one dense layer at the end.

    Some rows of the embedding are hot ones of low rank: a tensor train of their own.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(120, 24, dtype=dtype),
        nn.Linear(24, 36, dtype=dtype),
        nn.Tanh(),
        nn.Linear(36, 24, dtype=dtype),
        nn.Linear(24, 5, dtype=dtype),
    )
    config = comera.TTConfig(rank=6, order=2, hot_rows=40, hot_rank=6, exclude_modules=["4"])
    return comera.tensorize_(model, config)


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randint(0, 120, (16, 3), generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).mean(1), batch.sum(1) % 5)


@torch.no_grad()
def prune_some(model):
    for layer in tensor_trains(model).values():
        for gate in layer.gates:
            gate.uniform_(0.3, 1.0)
            gate[1] = 0.01  # exactly at the threshold


def train(model, optimizer, batch, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
