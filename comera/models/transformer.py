"""Define a transformer encoder with separate ``nn.Linear`` projections, and two heads for it.

Shape suffixes: B = batch, T = time, D = width, H = heads, E = head width, V = vocabulary,
M = masked positions of a sequence, C = classes.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comera.nn.fused import feed_forward, linears, self_attention
from comera.ops.attention import attend, dropout_add, score_bias
from comera.ops.context import autocast_dtype
from comera.ops.dispatch import may_read_values

PAD = 0  # token of padding, which attention leaves out
_EPS = 1e-6  # epsilon of the norms of queries and keys
_STD = 0.02  # standard deviation of initial embeddings, as in BERT


class Attention(nn.Module):
    """Multi-head self-attention to the positions in ``keep_BT``; None means all.

    ``qk_norm`` adds RMS norms of queries and keys over the width of a head, which bound the scores
    (arXiv 2010.04245, 2302.05442).
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float, qk_norm: bool) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of num_heads={num_heads}")
        self.num_heads, self.dropout = num_heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        width = d_model // num_heads
        self.query_norm = nn.RMSNorm(width, eps=_EPS) if qk_norm else None
        self.key_norm = nn.RMSNorm(width, eps=_EPS) if qk_norm else None

    def forward(self, x_BTD: Tensor, keep_BT: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.query_norm is None or self.key_norm is None:
            return self_attention(
                x_BTD, self.query, self.key, self.value, self.out, self.num_heads, keep_BT, dropout
            )
        # A norm stands between the factors that rank space would join.
        q_BHTE, k_BHTE, v_BHTE = (
            y_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y_BTD in linears(x_BTD, [self.query, self.key, self.value])
        )
        q_BHTE = self.query_norm(q_BHTE).to(v_BHTE.dtype)
        k_BHTE = self.key_norm(k_BHTE).to(v_BHTE.dtype)
        scale = q_BHTE.shape[-1] ** -0.5
        mixed_BHTE = attend(q_BHTE, k_BHTE, v_BHTE, keep_BT, scale, dropout)
        return self.out(mixed_BHTE.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and a layer norm before or after."""

    def __init__(
        self, d_model: int, num_heads: int, ffn_dim: int, dropout: float, norm: str, qk_norm: bool
    ) -> None:
        super().__init__()
        self.pre_norm = norm == "pre"
        self.attention = Attention(d_model, num_heads, dropout, qk_norm)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, keep_BT: Tensor | None) -> Tensor:
        rate, training = self.dropout, self.training
        if self.pre_norm:
            mixed_BTD = self.attention(self.norm1(x_BTD), keep_BT)
            x_BTD = dropout_add(mixed_BTD, x_BTD, rate, training)
            fed_BTD = feed_forward(self.norm2(x_BTD), self.fc1, self.fc2, "gelu")
            return dropout_add(fed_BTD, x_BTD, rate, training)
        x_BTD = self.norm1(dropout_add(self.attention(x_BTD, keep_BT), x_BTD, rate, training))
        fed_BTD = feed_forward(x_BTD, self.fc1, self.fc2, "gelu")
        return self.norm2(dropout_add(fed_BTD, x_BTD, rate, training))


class Encoder(nn.Module):
    """Token, position and optional segment embeddings, then a stack of blocks.

    Token 0 is padding. ``dropout`` is in attention, on both residual branches and the embeddings.
    ``qk_norm`` normalises the queries and keys of every head, which bounds attention scores at high
    learning rates; tensor trains then attend by heads, not in the space of ranks. Embeddings of
    positions and segments begin with the standard deviation ``position_std``, those of tokens 0.02.

    Shapes:
        tokens ``(B, T)`` integers; segments ``(B, T)`` integers or None; output ``(B, T, D)``.
        ``padded=False`` promises that no token is padding; attention without a mask is faster.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        ffn_dim: int = 1024,
        max_length: int = 128,
        dropout: float = 0.1,
        num_segments: int = 0,
        norm: Literal["pre", "post"] = "pre",
        qk_norm: bool = False,
        position_std: float = _STD,
    ) -> None:
        super().__init__()
        self.d_model, self.max_length, self.position_std = d_model, max_length, position_std
        self.tokens = nn.Embedding(vocab_size, d_model, padding_idx=PAD)
        self.positions = nn.Parameter(torch.empty(max_length, d_model))
        self.segments = nn.Parameter(torch.empty(num_segments, d_model)) if num_segments else None
        self.norm = nn.LayerNorm(d_model)
        self.dropout = dropout
        self.blocks = nn.ModuleList(
            Block(d_model, num_heads, ffn_dim, dropout, norm, qk_norm) for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(d_model) if norm == "pre" else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw embeddings from normal distributions, as BERT does."""
        nn.init.normal_(self.tokens.weight, std=_STD)
        nn.init.normal_(self.positions, std=self.position_std)
        if self.segments is not None:
            nn.init.normal_(self.segments, std=self.position_std)

    def forward(
        self, tokens_BT: Tensor, segments_BT: Tensor | None = None, padded: bool = True
    ) -> Tensor:
        length = tokens_BT.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens exceeds max_length={self.max_length}")
        x_BTD = self.tokens(tokens_BT) + self.positions[:length]
        if self.segments is not None and segments_BT is not None:
            # Its gradient on a GPU is far faster than that of indexing.
            x_BTD = x_BTD + F.embedding(segments_BT, self.segments)
        x_BTD = dropout_add(self.norm(x_BTD), None, self.dropout, self.training)
        if not padded and may_read_values(tokens_BT) and bool((tokens_BT == PAD).any()):
            raise ValueError(f"padded=False, but there are tokens {PAD}, which stand for padding")
        keep_BT = score_bias(tokens_BT != PAD, autocast_dtype(x_BTD)) if padded else None
        for block in self.blocks:
            x_BTD = block(x_BTD, keep_BT)
        return self.final_norm(x_BTD)


class MaskedLanguageModel(nn.Module):
    """Model that predicts the tokens at given positions; ``padded`` as in :class:`Encoder`.

    Shapes:
        tokens ``(B, T)``, positions ``(B, M)``; output logits ``(B, M, V)``.
    """

    def __init__(self, encoder: Encoder, vocab_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.transform = nn.Linear(encoder.d_model, encoder.d_model)
        self.norm = nn.LayerNorm(encoder.d_model)
        self.output = nn.Linear(encoder.d_model, vocab_size)

    def forward(self, tokens_BT: Tensor, positions_BM: Tensor, padded: bool = True) -> Tensor:
        hidden_BTD = self.encoder(tokens_BT, padded=padded)
        index_BMD = positions_BM.unsqueeze(-1).expand(-1, -1, hidden_BTD.shape[-1])
        picked_BMD = hidden_BTD.gather(1, index_BMD)
        return self.output(self.norm(F.gelu(self.transform(picked_BMD))))


class SequenceClassifier(nn.Module):
    """Model that classifies a sequence by its first token; ``padded`` as in :class:`Encoder`.

    Shapes:
        tokens and segments ``(B, T)``; output logits ``(B, C)``.
    """

    def __init__(self, encoder: Encoder, num_classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooler = nn.Linear(encoder.d_model, encoder.d_model)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(encoder.d_model, num_classes)

    def forward(
        self, tokens_BT: Tensor, segments_BT: Tensor | None = None, padded: bool = True
    ) -> Tensor:
        first_BD = self.encoder(tokens_BT, segments_BT, padded)[:, 0]
        return self.output(self.dropout(torch.tanh(self.pooler(first_BD))))
