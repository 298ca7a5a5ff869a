"""Whether indices are rows of a table."""

import torch
from torch import Tensor

from comera.ops.fixed_sizes import is_free_on_cpu
from comera.ops.operator import is_plain


def check_integers(indices: Tensor) -> None:
    """Raise ``TypeError`` where indices are no whole numbers; booleans, which mask, are none."""
    if indices.dtype == torch.bool:
        raise TypeError(
            "indices are torch.bool, and no mask selects rows of a table: give the rows' numbers, "
            "such as mask.nonzero() has them"
        )
    if indices.is_floating_point() or indices.is_complex():
        raise TypeError(f"indices are {indices.dtype}; they must be whole numbers, such as int64")


def check_range(indices: Tensor, num_embeddings: int) -> None:
    """Raise ``IndexError`` that names the first index that is no row; on a CPU only.

    And ``TypeError`` where indices are no whole numbers, everywhere.
    """
    check_integers(indices)
    if not is_free_on_cpu(indices) or not is_plain(indices) or not indices.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low >= 0 and high < num_embeddings:
        return
    place = ((indices < 0) | (indices >= num_embeddings)).nonzero()[0].tolist()
    where = f" at {place[0] if len(place) == 1 else tuple(place)}" if place else ""
    raise IndexError(
        f"index {int(indices[tuple(place)])}{where} is out of range for an embedding of "
        f"{num_embeddings} rows (0 to {num_embeddings - 1})"
    )
