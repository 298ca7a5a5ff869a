"""A click model whose tables are tensor trains, with rows of their own for what is asked most.

    python examples/recommender.py

Clicks are made up here: users and items have a hidden taste, and most clicks are on few items.
"""

import torch
from torch import nn

import comera

USERS, ITEMS, WIDTH = 20_000, 50_000, 16


class Clicks(nn.Module):
    """A table of users, one of items, and a small network on both."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        user, item = self.users(users), self.items(items)
        return self.top(torch.cat([user, item, user * item], 1)).squeeze(1)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    users = torch.randint(USERS, (rows,))
    items = (ITEMS * torch.rand(rows) ** 4).long()  # small numbers come often
    return users, items, ((users % 7 + items % 11) % 3 == 0).float()


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    users, items, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)


torch.manual_seed(0)
model = Clicks()
tables = comera.TTConfig(rank=16, target_modules="users|items", hot_rows=1000, init="orthogonal")
comera.tensorize_(model, tables)
print(comera.compression_report(model))

groups = comera.param_groups(model, lr=1e-2, gate_lr=1e-2)
step = comera.TrainStep(model, loss_fn, torch.optim.AdamW(groups))
for number in range(400):
    loss = step(batch(512))
    if number % 100 == 99:
        print(f"step {number + 1}: loss {loss:.3f}")

users, items, clicked = batch(10_000)
with torch.no_grad():
    right = (model(users, items) > 0) == clicked.bool()
print(f"accuracy {right.float().mean():.3f}, of saying no always {1 - clicked.mean():.3f}")
