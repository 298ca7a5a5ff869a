"""Define a causal language model with LLaMA's architecture and parameter names.

Touvron et al. 2023, arXiv 2302.13971. Shape suffixes: B = batch, T = time, D = width, H = heads,
E = head width, V = vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.fused import gated_feed_forward, linears

_EPS = 1e-6  # epsilon of RMS norms
_BASE = 10_000.0
"""Longest wavelength of the rotary positions, divided by 2 pi tokens (arXiv 2104.09864)."""


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions; ``qk_norm`` as in Qwen3."""

    def __init__(self, d_model: int, num_heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        if d_model % (2 * num_heads):
            raise ValueError(
                f"d_model={d_model} is not a multiple of 2 * num_heads={2 * num_heads}: rotary "
                "positions need heads of even width"
            )
        self.head_width = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        self.q_norm = nn.RMSNorm(self.head_width, eps=_EPS) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_width, eps=_EPS) if qk_norm else None

    def forward(self, x_BTD: Tensor, turns_2TE: Tensor) -> Tensor:
        q, k, v = (
            y_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # of some heads, where split
            for y_BTD in linears(x_BTD, [self.q_proj, self.k_proj, self.v_proj])
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        mixed_BHTE = F.scaled_dot_product_attention(
            _turned(q, turns_2TE), _turned(k, turns_2TE), v, is_causal=True
        )
        return self.o_proj(mixed_BHTE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, d_model: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, ffn_dim, bias=False)
        self.up_proj = nn.Linear(d_model, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return gated_feed_forward(x_BTD, self.gate_proj, self.up_proj, self.down_proj)


class Layer(nn.Module):
    """Attention and feed-forward, each after an RMS norm and added to a residual."""

    def __init__(
        self, d_model: int, num_heads: int, ffn_dim: int, dropout: float, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(d_model, eps=_EPS)
        self.self_attn = Attention(d_model, num_heads, qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(d_model, eps=_EPS)
        self.mlp = FeedForward(d_model, ffn_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, turns_2TE: Tensor) -> Tensor:
        mixed_BTD = self.self_attn(self.input_layernorm(x_BTD), turns_2TE)
        x_BTD = x_BTD + self.dropout(mixed_BTD)
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))


class Decoder(nn.Module):
    """Token embedding, a stack of layers and a norm: tokens ``(B, T)`` to ``(B, T, D)``.

    ``d_model`` is a multiple of ``2 * num_heads``; LLaMA's ``ffn_dim`` is 8/3 of it. ``dropout`` is
    on both residual branches; LLaMA has none. ``qk_norm`` normalises queries and keys, as Qwen3.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        ffn_dim: int = 688,
        dropout: float = 0.0,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.head_width = d_model // num_heads
        self.embed_tokens = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(
            Layer(d_model, num_heads, ffn_dim, dropout, qk_norm) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(d_model, eps=_EPS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        # Cosines and sines of the angle of each position and entry.
        device, width = x_BTD.device, self.head_width
        steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
        positions = torch.arange(tokens_BT.shape[1], device=device)
        angles = positions[:, None] * _BASE ** (-steps / width)
        angles_TE = torch.cat([angles, angles], 1)
        turns_2TE = torch.stack([angles_TE.cos(), angles_TE.sin()]).to(x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, turns_2TE)
        return self.norm(x_BTD)


class CausalLanguageModel(nn.Module):
    """Language model that predicts each token from the tokens before it.

    A state dict of ``transformers.LlamaForCausalLM`` loads and gives the same logits, if it has as
    many key as query heads and an untied output layer. Tokens ``(B, T)`` become logits
    ``(B, T, V)``, at each position those of the next.
    """

    def __init__(self, decoder: Decoder, vocab_size: int) -> None:
        super().__init__()
        self.model = decoder
        self.lm_head = nn.Linear(decoder.norm.normalized_shape[0], vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal entries of standard deviation 0.02, as LLaMA does."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens_BT))


def _turned(x_BHTE: Tensor, turns_2TE: Tensor) -> Tensor:
    """Rotate pairs of entries, one from each half of a head, by the angles of their position."""
    first, second = x_BHTE.chunk(2, -1)
    cos_TE, sin_TE = turns_2TE
    return x_BHTE * cos_TE + torch.cat([-second, first], -1) * sin_TE
