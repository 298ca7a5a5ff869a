"""At which row a table keeps each index."""

import torch
from torch import Tensor

from comera.nn.table import TTTable


@torch.no_grad()
def order_rows_(table: TTTable, places: Tensor) -> None:
    """Keep index ``i`` of a table at row ``places[i]``, in place; before training.

    The first ``hot_rows`` places are the hot rows, the others rows of the tensor train, those
    next to each other with most of their parameters in common. What an index reads changes with
    its place: a table that has been trained loses what it learned.

    Args:
        table: Its ``row_order``, four bytes for each row, is set and saved with it.
        places: Integers ``(num_embeddings,)``, a permutation.

    Raises:
        ValueError: If ``places`` is no permutation of the table's rows.

    Example::

        by_topic = topics.argsort().argsort()  # words of one topic side by side
        comera.order_rows_(table, by_topic)
    """
    rows = table.num_embeddings
    if places.shape != (rows,) or places.is_floating_point() or places.is_complex():
        raise ValueError(
            f"places are {places.dtype} of shape {tuple(places.shape)}; a table of {rows} rows "
            f"needs whole numbers of shape ({rows},)"
        )
    if not torch.equal(places.long().sort().values, torch.arange(rows, device=places.device)):
        raise ValueError(f"places must hold every number from 0 to {rows - 1} once")
    table.keep_rows_at_(places.to(table.cores[0].device, torch.int32, copy=True))
