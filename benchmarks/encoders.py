"""Transformer whose training step is measured, by default that of CoMERA's section 5.1."""

import argparse
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.checks import check_model
from benchmarks.session import PAPER_RANKS, Session, add_rank, add_sizes, rank_of
from comera.models.transformer import Encoder, SequenceClassifier
from comera.nn.convert import tensorize_
from comera.nn.linear import TTLinear
from comera.nn.table import TTTable
from comera.nn.targets import TTConfig
from comera.optim.groups import param_groups
from comera.rank.two_stage import TwoStage
from comera.train.step import TrainStep

LEARNING_RATE = 1e-4
TARGET = 0.2  # target of rank learning, as a share of the cores; all take the same time
_FIRST_WORD = 5  # smaller tokens are padding and other marks
_CLASSES, _DROPOUT, _SEGMENTS, _STD = 3, 0.1, 2, 0.02
PAPER_TABLE = {(30522, 768): [[16, 20, 10, 10], [4, 4, 8, 6]]}

Kind = Literal["dense", "comera"]
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Encoders:
    """A classifier of sequences: embeddings, encoder blocks with post-norm, three classes.

    ``embedding_rank`` bounds the bonds of the token table, ``rank`` those of the linear layers.
    """

    layers: int = 6
    width: int = 768
    ffn: int = 3072
    heads: int = 12
    vocab: int = 30522
    length: int = 128
    embedding_rank: int = 30
    rank: int | list[int] = field(default_factory=lambda: list(PAPER_RANKS))

    def __str__(self) -> str:
        return f"{self.layers} encoders of width {self.width}"

    def model(self, kind: Kind, device: torch.device) -> nn.Module:
        """Make the model with new weights; a compressed one is never dense while it is built."""
        torch.manual_seed(0)
        with torch.device("meta"):
            encoder = Encoder(
                self.vocab, self.width, self.layers, self.heads, self.ffn, self.length, _DROPOUT,
                _SEGMENTS, "post",
            )  # fmt: skip
            model: nn.Module = SequenceClassifier(encoder, _CLASSES)
        if kind == "comera":
            table = PAPER_TABLE.get((self.vocab, self.width))
            config = TTConfig(
                rank=self.rank, embedding_rank=self.embedding_rank, exclude_modules=["output"],
                shape_pattern={r"encoder\.tokens": table} if table else {},
            )  # fmt: skip
            tensorize_(model, config)
        model.to_empty(device=device)
        for module in model.modules():
            if isinstance(module, (TTLinear, nn.Linear, nn.LayerNorm)):
                module.reset_parameters()
            elif isinstance(module, TTTable):
                module.reset_parameters(std=_STD)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)
        for table_TD in (encoder.positions, encoder.segments):
            nn.init.normal_(table_TD, std=_STD)  # type: ignore[arg-type]
        return model

    def batch(self, size: int, device: torch.device) -> Batch:
        """Draw random tokens, segments and labels."""
        tokens = torch.randint(_FIRST_WORD, self.vocab, (size, self.length))
        labels = torch.randint(0, _CLASSES, (size,))
        return tokens.to(device), torch.zeros_like(tokens).to(device), labels.to(device)

    def check(self, session: Session, model: nn.Module, batch: Batch) -> None:
        """Compare a compressed model with its dense one, on two sequences, or raise the error."""
        what = f"{self}, batch {len(batch[0])}"
        session.print(check_model(what, model, batch[:2], most=2, padded=False))


def add_encoders(parser: argparse.ArgumentParser) -> None:
    blank = Encoders()
    add_sizes(
        parser,
        {
            "layers": (blank.layers, "Number of encoder blocks."),
            "width": (blank.width, "Width of the model."),
            "ffn": (blank.ffn, "Hidden width of the feed-forward parts."),
            "heads": (blank.heads, "Number of attention heads of a block."),
            "vocab": (blank.vocab, "Number of rows of the token table."),
            "length": (blank.length, "Number of tokens of a sequence."),
            "embedding_rank": (blank.embedding_rank, "Rank of the token table."),
        },
    )
    add_rank(parser)


def encoders_of(options: argparse.Namespace) -> Encoders:
    """Return the model of the options; raises ``ValueError`` for too small a vocabulary."""
    if options.vocab <= _FIRST_WORD:
        raise ValueError(
            f"vocab={options.vocab} must be above {_FIRST_WORD}, the first word's number"
        )
    sizes = ("layers", "width", "ffn", "heads", "vocab", "length", "embedding_rank")
    return Encoders(**{name: getattr(options, name) for name in sizes}, rank=rank_of(options.rank))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross entropy of a batch."""
    tokens, segments, labels = batch
    return F.cross_entropy(model(tokens, segments, padded=False), labels)


def train_step(
    model: nn.Module,
    ranks: TwoStage | None = None,
    compile: bool = False,
    graph: bool | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> TrainStep:
    optimizer = torch.optim.AdamW(param_groups(model, LEARNING_RATE), fused=True)
    return TrainStep(
        model, loss_fn, optimizer, ranks, compile=compile, graph=graph, precision=precision
    )


def learned_ranks(model: nn.Module, early: bool = True) -> TwoStage:
    """Return the rank objective in one of its stages, which never ends."""
    return TwoStage(model, TARGET, 10**6 if early else 0, 10**6)
