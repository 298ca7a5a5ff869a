"""Modules that compute something else than a feed-forward part, though it looks like one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .test_feed_forward_parts import HIDDEN, WIDTH, Gated, Inner, Mlp, Residual, converted, is_fused


class Noisy(Mlp):
    def forward(self, x):
        h = F.gelu(self.c_fc(x))
        if self.training:
            h = h * 2
        return self.c_proj(h)


class Quiet(Mlp):
    def forward(self, x):
        h = F.gelu(self.c_fc(x))
        return self.c_proj(h if self.training else h * 2)


class UsedTwice(Mlp):
    def forward(self, x):
        h = F.gelu(self.c_fc(x))
        return self.c_proj(h) + h.mean()


class Counting(Mlp):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.c_proj(F.gelu(self.c_fc(x)))


class Branching(Mlp):
    def forward(self, x):
        if isinstance(x, torch.Tensor) and torch.rand(()) < 2:
            return self.c_proj(F.gelu(self.c_fc(x)))
        return x


class Within(Mlp):
    def forward(self, x):
        with torch.no_grad():
            return self.c_proj(F.gelu(self.c_fc(x)))


class Decorated(Mlp):
    @torch.no_grad()
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class InPlace(Mlp):
    def forward(self, x):
        x += self.c_proj(F.gelu(self.c_fc(x)))
        return x


class Optional(Mlp):
    def forward(self, x, scale=1.0):
        return self.c_proj(F.gelu(self.c_fc(x))) * scale


class ItsOwnCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = Loud(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.out(self.inner(x))


class Loud(Inner):
    def __call__(self, x):
        return 2 * super().__call__(x)


class TwoMasks(Gated):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.w2(F.silu(self.w1(self.drop(x))) * self.w3(self.drop(x)))


class MaskedBeforeItsGate(Gated):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.drop(self.w3(x)))


class Watching(Residual):
    """Keeps running means of its input."""

    def __init__(self):
        super().__init__()
        self.seen = nn.BatchNorm1d(30, affine=False)

    def forward(self, x):
        _ = self.seen(x)
        return self.down(F.relu(self.up(x)))


ELSE = {
    "tanh gelu": lambda: Mlp(nn.GELU("tanh")), "tanh": lambda: Mlp(nn.Tanh()),
    "noisy": Noisy, "quiet": Quiet, "used twice": UsedTwice, "counting": Counting,
    "two masks": TwoMasks, "a mask": MaskedBeforeItsGate, "watching": Watching,
    "branching": Branching, "within": Within, "decorated": Decorated,
    "in place": InPlace, "optional": Optional, "its own call": ItsOwnCall,
    "no activation": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ELSE)
def test_what_computes_something_else_is_left_alone(kind):
    model = converted(ELSE[kind])
    assert not is_fused(model)
    assert getattr(model, "calls", 0) == 0
