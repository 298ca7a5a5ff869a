"""Layers inside of torch's own encoder, which calls none of them on its fast path."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
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
