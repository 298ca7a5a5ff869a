"""An order of rows in which neighbours are alike, from what the rows occur together with.

A tensor-train table makes row ``i`` from the digits of ``i``, so rows that share leading digits
share parameters. Where those are alike the sharing costs less; where the most frequent rows stand
side by side, as in vocabularies sorted by frequency, it costs most (``docs/quality.md``).

Shape suffixes: N = rows, M = things they occur with, F = features, B = blocks.
"""

import math

import torch
from torch import Tensor

_LEAF = 8
"""Rows of a block that is only sorted, no longer split."""
_POWER_STEPS = 16
"""Towards the principal axis: any axis along which rows differ much will do."""


def similar_rows(features_NF: Tensor) -> Tensor:
    """Places for rows so that rows with like features get neighbouring places.

    All rows are sorted along the direction in which their features differ most and split in the
    middle, each half likewise, and so on: a balanced tree, as are the digits of a row's number.

    Args:
        features_NF: Floating point, one line for each row; its angle is what counts where the
            lines have length one. See :func:`occurrence_features`.

    Returns:
        int64 ``(N,)``, a permutation: the place of each row. Give it to
        :func:`~comera.order_rows_`, or number a vocabulary by it.

    Raises:
        ValueError: If the features are no matrix of finite floating-point numbers.
    """
    if features_NF.dim() != 2 or not features_NF.is_floating_point():
        raise ValueError(
            "features must be a floating-point matrix, one line for each row; got "
            f"{features_NF.dtype} of shape {tuple(features_NF.shape)}"
        )
    if not features_NF.isfinite().all():
        raise ValueError("features must be finite")
    count, device = len(features_NF), features_NF.device
    if not count or not features_NF.shape[1]:
        return torch.arange(count, device=device)
    levels = max(0, math.ceil(math.log2(count / _LEAF)))
    # Blocks of one size: some rows are taken twice, and their second places left out at the end.
    each = torch.arange(max(count, _LEAF << levels), device=device)
    rows = torch.where(each < count, each, (each - count) * count // max(1, len(each) - count))
    for level in range(levels + 1):
        order_BN = _along_widest(features_NF[rows].view(2**level, -1, features_NF.shape[1]))
        rows, each = (x.view_as(order_BN).gather(1, order_BN).flatten() for x in (rows, each))
    sorted_rows = rows[each < count]
    return torch.empty_like(sorted_rows).scatter_(0, sorted_rows, torch.arange(count).to(device))


def occurrence_features(
    rows: Tensor, beside: Tensor, num_rows: int, num_beside: int, width: int = 16
) -> Tensor:
    """Features of rows, from what they occur with: alike where that is alike.

    The leading left singular vectors, times their values, of the matrix that says which row occurs
    with what, each entry divided by the root of its row's and its column's count; lines scaled to
    length one. That is the spectral embedding of Dhillon (2001, "Co-clustering documents and
    words using bipartite spectral graph partitioning", equation 8).

    Args:
        rows: Integers, any number of them: a row of each event, such as the book of a rating.
        beside: As many integers: what it occurred with, such as the reader.
        num_rows: N.
        num_beside: M.
        width: F at most.

    Returns:
        float32 ``(N, F)``; rows that do not occur are zero.

    Raises:
        IndexError: If a number is out of range.
    """
    rows, beside = rows.flatten().long(), beside.flatten().long()
    for name, numbers, most in (("rows", rows, num_rows), ("beside", beside, num_beside)):
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < most:
            wrong = numbers[(numbers < 0) | (numbers >= most)][0]
            raise IndexError(f"{name} holds {int(wrong)}, but there are only {most}")
    pairs = (rows * num_beside + beside).unique()
    row, other = pairs // num_beside, pairs % num_beside
    per_row = torch.bincount(row, minlength=num_rows)
    per_other = torch.bincount(other, minlength=num_beside)
    weight = (per_row[row] * per_other[other]).float().rsqrt()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        matrix = torch.sparse_coo_tensor(
            torch.stack([row, other]), weight, (num_rows, num_beside), check_invariants=True
        )
        left, values, _ = torch.svd_lowrank(matrix, q=min(width, num_rows, num_beside), niter=4)
    features = torch.nn.functional.normalize(left * values, dim=1)
    return features.where(per_row[:, None] > 0, 0)


def _along_widest(features_BNF: Tensor) -> Tensor:
    """Order of the rows of each block along its first principal axis, ``(B, N)``."""
    centred = features_BNF - features_BNF.mean(1, keepdim=True)
    spread_BFF = centred.mT @ centred
    widest = spread_BFF.diagonal(dim1=1, dim2=2).argmax(1)
    axis_BF1 = spread_BFF[torch.arange(len(widest), device=widest.device), widest].unsqueeze(2)
    for _ in range(_POWER_STEPS):
        axis_BF1 = torch.nn.functional.normalize(spread_BFF @ axis_BF1, dim=1)
    return torch.argsort((centred @ axis_BF1).squeeze(2), stable=True)
