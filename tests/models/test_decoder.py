import pytest
import torch

import comera
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.nn.module import tensor_trains
from tests.peers import peer


def model() -> CausalLanguageModel:
    torch.manual_seed(0)
    return CausalLanguageModel(Decoder(60, 32, 2, 4, 48), 60)


def test_logits_and_gradients_equal_transformers():
    transformers = peer("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, rms_norm_eps=1e-6, max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    ours = model()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(60, (3, 17))
    logits, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(logits)
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad, wanted[name].grad, rtol=1e-3, atol=1e-4)


def test_normed_queries_and_keys_are_those_of_transformers():
    transformers = peer("transformers")
    config = transformers.Qwen3Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-6,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.Qwen3ForCausalLM(config)
    for name, param in theirs.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.uniform_(param, 0.5, 1.5)
    ours = CausalLanguageModel(Decoder(60, 32, 2, 4, 48, qk_norm=True), 60)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(60, (3, 17))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_no_token_sees_those_after_it():
    tokens = torch.randint(60, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 60
    decoder = model()
    one, two = decoder(tokens), decoder(changed)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert not torch.allclose(one[:, 5], two[:, 5])


def test_every_large_layer_can_be_tensorised():
    with torch.device("meta"):
        large = CausalLanguageModel(Decoder(32_000, 512, 8, 8, 1376), 32_000)
    assert sum(p.numel() for p in large.parameters()) == 58_073_600  # LLaMA-60M of GaLore's authors
    comera.tensorize_(large, comera.TTConfig(rank=32, exclude_modules=["lm_head"]))
    assert len(tensor_trains(large)) == 8 * 7 + 1


def test_a_tensorised_decoder_learns():
    decoder = comera.tensorize_(model(), comera.TTConfig(rank=8))
    optimizer = torch.optim.AdamW(comera.param_groups(decoder, 1e-2))
    tokens = torch.randint(60, (4, 9))

    def loss() -> torch.Tensor:
        logits = decoder(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    before = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < before / 2


def test_heads_of_odd_width_are_named():
    with pytest.raises(ValueError, match="d_model=12 is not a multiple of 2"):
        Decoder(60, 12, 1, 4)
