"""A small transformer, batches for it and ways to train it or a single parameter."""

import pytest
import torch
from torch.nn import functional as F

from comera.models.transformer import Encoder, MaskedLanguageModel

VOCAB, LENGTH = 200, 24
STATES = pytest.mark.parametrize("state_dtype", [None, "8bit"])


def transformer(width=64, layers=1):
    encoder = Encoder(VOCAB, width, layers, 4, 4 * width, LENGTH, dropout=0.0)
    return MaskedLanguageModel(encoder, VOCAB)


def batches(count, seed=0):
    """Tokens that count upwards, some of them hidden."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        start = torch.randint(2, VOCAB, (8, 1), generator=generator)
        tokens = 2 + (start + 3 * torch.arange(LENGTH)) % (VOCAB - 2)
        positions = torch.randint(0, LENGTH, (8, 4), generator=generator)
        yield tokens.scatter(1, positions, 1), positions, tokens.gather(1, positions).flatten()


def loss_of(model, batch):
    tokens, positions, targets = batch
    return F.cross_entropy(model(tokens, positions).flatten(0, 1).float(), targets)


def train(model, optimizer, data):
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(param, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(param.shape, generator=generator).to(param.dtype)


def run(param, optimizer, steps=3, seed=1):
    for gradient in gradients(param, steps, seed):
        param.grad = gradient
        optimizer.step()


def state_bytes(optimizer):
    tensors = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors)


def same_state(one, other):
    for a, b in zip(one.state.values(), other.state.values(), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype, key
            assert torch.equal(a[key], b[key]), key
