"""Change the hot rows of a table, which are kept beside its tensor train."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.extras import listed
from comera.nn.module import check_model
from comera.nn.table import HotRows, TTTable
from comera.optim.state_layout import AnyOptimizer, pack_state_, unpack_state_, unwrap_separable
from comera.params import renew_wrappers_, set_data_, wrappers_of
from comera.surgery.truncate import AVERAGES, FIRST_MOMENTS, follows


@torch.no_grad()
def update_hot_rows_(table: TTTable, counts: Tensor, optimizer: AnyOptimizer | None = None) -> int:
    """Make the most frequent indices the hot rows of a table, in place and at any time of training.

    An index that becomes hot keeps its row exactly or, with a ``hot_rank``, projected on the basis.
    It swaps places with an index that becomes cold, which then reads the tensor train's row at that
    place. All other rows and the optimizer state of rows that stay hot do not change. In the state
    of new hot rows, first moments are zero, ASGD's average is the row, and all else, such as second
    moments, is the mean over all rows.

    Averages of weights, as of ``torch.optim.swa_utils.AveragedModel``, must be made again. Every
    process passes the same counts, summed over all.

    Args:
        table: A table with hot rows. A ``row_order`` is stored with it: four bytes for each row.
        counts: ``(num_embeddings,)``, how often each index was read. Among equal counts hot rows
            stay hot.
        optimizer: The optimizer of the table, if it has taken a step.

    Returns:
        How many indices became hot.

    Raises:
        ValueError: If the table has no hot rows, there is not one count for each index, the
            optimizer is an LBFGS that has stepped, or processes of a ``DistributedDataParallel``
            around the table would choose different rows. Nothing is changed.
        TypeError: If ``table`` is no table.

    Example::

        counts = torch.bincount(all_indices, minlength=table.num_embeddings)
        comera.update_hot_rows_(table, counts, optimizer)
    """
    check_model(table)
    if not isinstance(table, TTTable):
        inside = [f"model.{name}" for name, m in table.named_modules() if isinstance(m, TTTable)]
        raise TypeError(
            f"update_hot_rows_ takes a table, not a {type(table).__name__}; "
            f"its tables are {listed(inside) or 'none'}"
        )
    if table.hot is None:
        raise ValueError("the table has no hot rows: make it with hot_rows=")
    if counts.shape != (table.num_embeddings,):
        raise ValueError(
            f"counts have shape {tuple(counts.shape)}; a table of {table.num_embeddings} rows "
            f"needs ({table.num_embeddings},)"
        )
    unwrapped = unwrap_separable(optimizer)
    device = table.cores[0].device
    order = table.row_order
    if order is None:
        order = torch.arange(table.num_embeddings, dtype=torch.int32, device=device)
    is_hot = order < table.hot_rows
    # Stable and by falling count, the hot ones before the others: they win among equal ones.
    first = torch.argsort(~is_hot, stable=True)
    ranked = first[torch.argsort(counts.to(device)[first], descending=True, stable=True)]
    wanted = torch.zeros_like(is_hot)
    wanted[ranked[: table.hot_rows]] = True
    for wrapper in wrappers_of([table]):
        votes, group = wanted.int(), wrapper.process_group
        dist.all_reduce(votes, group=group)
        if disputed := int(((votes > 0) & (votes < dist.get_world_size(group))).sum()):
            raise ValueError(
                f"processes that train together would keep different rows hot, {disputed} in all: "
                "give each of them the counts of all, added up by "
                "torch.distributed.all_reduce(counts)"
            )
    entering = (wanted & ~is_hot).nonzero().flatten()
    leaving = (is_hot & ~wanted).nonzero().flatten()
    if not len(entering):
        return 0
    rows = table._rows(entering)
    places = order[leaving].long()
    order = order.clone()
    order[entering], order[leaving] = order[leaving], order[entering]
    table.keep_rows_at_(order)
    if isinstance(table.hot, HotRows):
        _set_rows_(table.hot.cores[0], 1, places, _coordinates(table.hot, rows), unwrapped)
    else:
        _set_rows_(table.hot, 0, places, rows, unwrapped)
    return len(entering)


def _coordinates(hot: HotRows, rows: Tensor) -> Tensor:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return wide @ torch.linalg.pinv(hot.basis.to(wide.dtype))


def _set_rows_(
    param: nn.Parameter, dim: int, places: Tensor, rows: Tensor, optimizer: Optimizer | None
) -> None:
    """Set rows of a parameter; reset their optimizer state so that no step of them is too long."""
    moved = param.data.movedim(dim, 0)
    moved[places] = rows.to(param.dtype).view(len(places), *moved.shape[1:])
    if param.grad is not None:
        param.grad.index_fill_(dim, places, 0)
    unpack_state_(optimizer, param)
    state = {} if optimizer is None else optimizer.state.get(param, {})
    for key, value in state.items():
        if not isinstance(value, Tensor) or not follows(value, param.shape):
            continue
        if value.shape[dim] != param.shape[dim]:  # nothing for each row
            continue
        if key in AVERAGES:
            value.index_copy_(dim, places, param.data.index_select(dim, places).to(value.dtype))
        elif key in FIRST_MOMENTS:
            value.index_fill_(dim, places, 0)
        else:  # steps are divided by it: from zero the first ones would be far too long
            mean = value.mean(dim, keepdim=True).expand_as(value)
            value.index_copy_(dim, places, mean.index_select(dim, places))
    pack_state_(optimizer, param)


@torch.no_grad()
def append_rows_(table: TTTable, rows: Tensor) -> None:
    """Append rows to a table and the tables tied to it, in place; call it before making optimizers.

    The new rows ``(more, embedding_dim)`` are hot rows, which a ``hot_rank`` projects on the basis;
    earlier rows are read as before, bit for bit. A ``row_order``, four bytes for each row, is
    stored with the table. Raises ``ValueError`` if the rows have another width, or all ranks of the
    table's basis were cut.
    """
    if rows.dim() != 2 or rows.shape[1] != table.embedding_dim:
        raise ValueError(
            f"rows have shape {tuple(rows.shape)}; a table of width {table.embedding_dim} takes "
            f"(more, {table.embedding_dim})"
        )
    if isinstance(table.hot, HotRows) and 0 in table.hot.ranks:
        raise ValueError("all ranks of the hot rows' basis were cut, no row can be told in it")
    more, old, hot = len(rows), table.num_embeddings, table.hot_rows
    places = table._every_row_kept_at()
    if places is None:
        places = torch.arange(old, device=table.cores[0].device)
    places = torch.where(places < hot, places, places + more)  # rows of the train come after
    new = torch.arange(hot, hot + more, device=places.device)
    rows = rows.to(table.cores[0])
    if isinstance(table.hot, HotRows):
        coordinates = table.hot.cores[0]
        found = _coordinates(table.hot, rows).to(rows.dtype)
        set_data_(coordinates, torch.cat([coordinates, found[None]], 1))
        table.hot._modes = replace(table.hot._modes, in_modes=(hot + more,))
    elif table.hot is None:
        table.hot = nn.Parameter(rows.clone(), requires_grad=table.cores[0].requires_grad)
    else:
        set_data_(table.hot, torch.cat([table.hot, rows]))
    for each in (table, *table.twins):
        each.hot = table.hot
        each.num_embeddings, each.hot_rows = old + more, hot + more
        each._scatter_(False, places.device)  # row_order says where all of them are
    table.keep_rows_at_(torch.cat([places, new]).to(torch.int32))
    renew_wrappers_([table, *table.twins])
