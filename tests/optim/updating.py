"""A small model, optimizers for it, and a training loop, to compare ways of updating."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import comera


class Tied(nn.Module):
    """Embedding and head share a weight; biases, a norm, a matrix, and a layer used at times."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.tokens = nn.Embedding(40, 24)
        self.hidden = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.wide = nn.Linear(24, 96)
        self.seldom = nn.Linear(96, 96)
        self.norm = nn.LayerNorm(96)
        self.narrow = nn.Linear(96, 24)
        self.checkpointed = checkpointed

    def body(self, x):
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return x

    def forward(self, tokens, seldom=False):
        x = self.tokens(tokens)
        if self.checkpointed is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpointed)
        x = torch.tanh(self.wide(x))
        if seldom:
            x = x + self.seldom(x)
        return self.narrow(self.norm(x)) @ self.tokens.weight.T


def make_model(kind=Tied, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return kind(**settings).to(dtype)


def loss_of(model, k):
    tokens = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(k))
    logits = model(tokens[:, :-1], seldom=k % 3 == 0)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model, optimizer, first, last, scheduler=None):
    for k in range(first, last):
        loss_of(model, k).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def state_of(optimizer):
    return optimizer.state_dict()["state"]


def assert_same(a, first, b, second):
    """Bit-equal parameters and optimizer state, groups included."""
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
    torch.testing.assert_close(state_of(first), state_of(second), rtol=0, atol=0)
    assert [group["lr"] for group in first.param_groups] == [
        group["lr"] for group in second.param_groups
    ]


def galore_groups(model, **settings):
    settings = {"rank": 4, "update_proj_gap": 5, "weight_decay": 0.1, **settings}
    return comera.galore_param_groups(model, 1e-2, settings.pop("rank"), **settings)


def decayed(model):
    return comera.param_groups(model, 1e-2, weight_decay=0.1)


OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(decayed(m)),
    "fused AdamW": lambda m: torch.optim.AdamW(decayed(m), fused=True, amsgrad=True),
    "foreach AdamW": lambda m: torch.optim.AdamW(decayed(m), foreach=True),
    "AdamW, named": lambda m: torch.optim.AdamW(m.named_parameters(), 1e-2, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(decayed(m), momentum=0.9, nesterov=True),
    "RMSprop": lambda m: torch.optim.RMSprop(decayed(m), momentum=0.9),
    "NAdam": lambda m: torch.optim.NAdam(decayed(m)),
    "Adafactor": lambda m: torch.optim.Adafactor(decayed(m)),
    "CAME": lambda m: comera.CAME(decayed(m)),
    "CAME, 8 bits": lambda m: comera.CAME(decayed(m), state_dtype="8bit"),
    "GaLoreAdamW": lambda m: comera.GaLoreAdamW(galore_groups(m)),
    "GaLoreAdamW, full": lambda m: comera.GaLoreAdamW(galore_groups(m, proj_type="full")),
    "GaLoreAdafactor": lambda m: comera.GaLoreAdafactor(galore_groups(m)),
    "GaLore around SGD": lambda m: comera.GaLore(galore_groups(m), torch.optim.SGD, momentum=0.9),
    "GaLore around CAME": lambda m: comera.GaLore(galore_groups(m), comera.CAME),
}


class Counting(torch.optim.SGD):
    """SGD that counts steps in its groups, as schedule-free optimizers and D-Adaptation do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)
