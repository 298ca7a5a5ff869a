"""Bytes of optimizers' state at a size that no machine of ours could hold."""

import pytest
import torch

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.report.memory_use import state_bytes
from tests.peers import peer


@pytest.fixture(scope="module")
def llama_7b():
    with torch.device("meta"):
        model = CausalLanguageModel(Decoder(32_000, 4096, 32, 32, 11_008), 32_000)
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
    return model


def share(model, optimizer):
    """State over that of AdamW, which keeps two float32 moments and a step."""
    count = sum(p.numel() for p in model.parameters())
    return sum(state_bytes(optimizer).values()) / (8 * count)


@pytest.mark.slow
def test_galore_keeps_a_third_of_adam_of_llama_7b(llama_7b):
    groups = comera.galore_param_groups(llama_7b, 1e-2, 1024)
    assert share(llama_7b, comera.GaLoreAdamW(groups)) < 0.35


@pytest.mark.slow
def test_galore_in_eight_bits_keeps_a_sixth(llama_7b):
    peer("torchao.optim")
    groups = comera.galore_param_groups(llama_7b, 1e-2, 1024)
    assert share(llama_7b, comera.GaLoreAdamW8bit(groups)) < 0.18


@pytest.mark.slow
def test_came_keeps_half_and_an_eighth(llama_7b):
    assert share(llama_7b, comera.CAME(llama_7b.parameters())) < 0.51
    assert share(llama_7b, comera.CAME(llama_7b.parameters(), state_dtype="8bit")) < 0.13
