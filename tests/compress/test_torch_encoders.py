"""Layers inside of torch's own encoder, which calls none of them on its fast path."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.compress import correct as correct_module
from comera.compress.layer_moments import gather_moments


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 48, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens, mask=True):
        padding = tokens == 0 if mask else None
        return self.head(self.encoder(self.words(tokens), src_key_padding_mask=padding))


def loss_fn(model, tokens):
    return F.cross_entropy(model(tokens)[:, 0], tokens[:, 0] % 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Encoder()


@pytest.fixture
def batches():
    tokens = torch.randint(1, 20, (3, 8, 6), generator=torch.Generator().manual_seed(0))
    tokens[:, :4, 4:] = 0
    return list(tokens)


def test_moments_are_those_of_the_layers_that_are_called(model, batches):
    layers = {
        "linear1": model.encoder.layers[0].linear1,
        "linear2": model.encoder.layers[1].linear2,
    }
    found = gather_moments(model, layers, batches, loss_fn)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        wanted = gather_moments(model, layers, batches, loss_fn)
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    for name, moments in wanted.items():
        assert torch.equal(found[name].inputs_II, moments.inputs_II)
        assert torch.equal(found[name].grads_OO, moments.grads_OO)


def test_they_are_corrected(model, batches, monkeypatch):
    monkeypatch.setattr(correct_module, "_PRIOR_ROWS", 16)

    def unmasked(model, tokens):
        return F.cross_entropy(model(tokens, mask=False)[:, 0], tokens[:, 0] % 4)

    small = [copy.deepcopy(model) for _ in range(2)]
    for one, correct in zip(small, (False, True), strict=True):
        comera.compress_(one, batches, budget=0.6, loss_fn=unmasked, correct=correct)
    first, second = (one.encoder.layers[1].linear2.weight for one in small)
    assert not torch.allclose(first, second, atol=1e-3)


def test_padding_is_answered_alike_by_teacher_and_model(model, batches):
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.linear1.weight[:, 8:] = 0
    small = copy.deepcopy(model)
    comera.tensorize_(
        small,
        comera.TTConfig(rank=8, order=1, init="svd", target_modules=r".*linear1"),
        calibration=batches,
    )
    done = comera.heal_(small, model, batches, lr=1e-9, outputs=lambda m, batch: m(batch))
    assert done.first < 1e-5  # it is the same function
