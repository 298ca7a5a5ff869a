"""``resize_token_embeddings`` of transformers for models whose tables are tensor trains."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.linear_base import CompressedLinear
from comera.nn.table import TTTable
from comera.nn.tied import TiedTTLinear, rename_tied_weights_
from comera.surgery.rows import append_rows_


def let_tables_grow_(model: Any) -> None:
    """Let ``model.resize_token_embeddings(more)`` work on tables that are tensor trains."""
    model._get_resized_embeddings = partial(_resized_table, model)
    model._get_resized_lm_head = partial(_resized_head, model)


def _resized_table(
    model: Any,
    old: nn.Module,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Do what the method does, whose arguments these are, by appending rows to the table itself."""
    if not isinstance(old, TTTable):
        dense = type(model)._get_resized_embeddings
        return dense(model, old, new_num_tokens, pad_to_multiple_of, mean_resizing)
    wanted = old.num_embeddings if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    more = wanted - old.num_embeddings
    if more < 0:
        raise ValueError(
            f"resize_token_embeddings({wanted}) would take rows from a table of "
            f"{old.num_embeddings}, whose rows share their cores: leave them, or make the model "
            "dense first with comera.densify_(model)"
        )
    if more:
        append_rows_(old, _new_rows(model, old, more, mean_resizing))
        rename_tied_weights_(model)
    return old


@torch.no_grad()
def _new_rows(model: Any, table: TTTable, more: int, mean_resizing: bool) -> Tensor:
    if mean_resizing:
        return table.dense_weight().float().mean(0).expand(more, -1)
    std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    return std * torch.randn(more, table.embedding_dim, device=table.cores[0].device)


def _resized_head(
    model: Any,
    old: nn.Module,
    new_num_tokens: int | None = None,
    transposed: bool = False,
    mean_resizing: bool = True,
) -> nn.Module:
    """Do what the method does; a head on the cores of a table has grown with it but for its bias.

    The new entries of that are the mean of the others.
    """
    if isinstance(old, CompressedLinear) and new_num_tokens not in (None, old.out_features):
        raise ValueError(
            f"the output layer is a tensor train of {old.out_features} rows that share their "
            'cores: leave it dense, or tie it to the embedding with TTConfig(tied="share")'
        )
    if not isinstance(old, TiedTTLinear):
        dense = type(model)._get_resized_lm_head
        return dense(model, old, new_num_tokens, transposed, mean_resizing)
    more = old.embedding.num_embeddings - old.out_features
    old.out_features += more
    if old.bias is not None and more:
        mean = old.bias.detach().mean()
        bias = torch.cat([old.bias.detach(), mean.expand(more)])
        old.bias = nn.Parameter(bias, requires_grad=old.bias.requires_grad)
    return old
