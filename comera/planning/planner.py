"""Plan a layer at a batch: which way of computing it is predicted to be fastest."""

import functools

from comera.block_shape import BTTShape
from comera.planning import block_ways, linear_ways, lookup_ways
from comera.planning.candidate import Candidate
from comera.planning.lookup_ways import Lookup
from comera.planning.machine import Machine, load_machine
from comera.planning.plan import Plan
from comera.planning.products import Layer, check_count, check_width
from comera.shapes import TTMShape

_KEPT_PLANS = 1024


def plan_linear(layer: Layer, *, dtype: str = "float32", machine: Machine | None = None) -> Plan:
    """Plan a linear layer; a second call with equal arguments returns the same plan.

    Args:
        layer: The layer and its batch.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        machine: The machine on which it will run; the profile of this computer's CPU if None.

    Returns:
        The plan; on a GPU that of a captured step, with the plan of eager mode in it.

    Raises:
        ValueError: If the machine has no rate for ``dtype``.
    """
    return _plan_linear(layer, machine or load_machine(), dtype)


def plan_embedding(
    shape: TTMShape,
    tokens: int,
    *,
    dtype: str = "float32",
    machine: Machine | None = None,
    distinct: int | None = None,
    num_embeddings: int | None = None,
    embedding_dim: int | None = None,
    train: bool = True,
) -> Plan:
    """Plan the lookups of a table; a second call with the same arguments returns the same plan.

    Args:
        shape: Modes and ranks.
        tokens: Indices in the batch.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        machine: The machine on which it will run; the profile of this computer's CPU if None.
        distinct: How many different indices to expect; as many as can be if None.
        num_embeddings: Rows of the table if the modes multiply to more.
        embedding_dim: Width if the modes multiply to more.
        train: Whether a backward pass follows.

    Raises:
        ValueError: If ``tokens`` is below one, ``distinct`` is not between one and ``tokens``, a
            size does not fit the modes, or the machine has no rate for ``dtype``.
    """
    check_count("tokens", tokens)
    if distinct is not None and not 1 <= distinct <= tokens:
        raise ValueError(f"distinct={distinct} must be between 1 and tokens={tokens}")
    rows = check_width("num_embeddings", num_embeddings, shape.num_rows)
    columns = check_width("embedding_dim", embedding_dim, shape.num_cols)
    different = min(tokens, rows) if distinct is None else distinct
    lookup = Lookup(shape, tokens, different, rows, columns, train)
    return _plan_embedding(lookup, machine or load_machine(), dtype)


@functools.lru_cache(maxsize=_KEPT_PLANS)
def _plan_linear(layer: Layer, machine: Machine, dtype: str) -> Plan:
    machine.rate(dtype)
    shape = layer.shape
    eager = None if machine.eager is None else _plan_linear(layer, machine.eager, dtype)
    title = (
        f"linear {layer.in_features} -> {layer.out_features}, modes {shape.describe_modes()}, "
        f"ranks {' '.join(map(str, shape.ranks))}"
    )
    dense = linear_ways.torch_linear(layer, machine, dtype)
    if 0 in shape.ranks:
        empty = linear_ways.only_bias(layer, machine, dtype)
        return Plan(
            title, layer.tokens, dtype, machine, (empty,), (empty.name,), dense, None, eager
        )
    if isinstance(shape, BTTShape):
        only = block_ways.blocks(layer, machine, dtype)
        return Plan(title, layer.tokens, dtype, machine, (only,), (only.name,), dense, None, eager)
    optimal, search = linear_ways.sequential(layer, machine, dtype)
    candidates = [
        linear_ways.factorized(layer, machine, dtype),
        optimal,
        linear_ways.reconstructed(layer, machine, dtype),
    ]
    ranked, runs = _ranked(candidates), ("factorized", "reconstructed")
    return Plan(title, layer.tokens, dtype, machine, ranked, runs, dense, search, eager)


@functools.lru_cache(maxsize=_KEPT_PLANS)
def _plan_embedding(lookup: Lookup, machine: Machine, dtype: str) -> Plan:
    machine.rate(dtype)
    shape = lookup.shape
    eager = None if machine.eager is None else _plan_embedding(lookup, machine.eager, dtype)
    title = (
        f"embedding {lookup.num_embeddings} x {lookup.embedding_dim}, modes "
        f"{shape.describe_modes()}, ranks {' '.join(map(str, shape.ranks))}, "
        f"{lookup.distinct} distinct rows"
    )
    dense = lookup_ways.torch_embedding(lookup, machine, dtype)
    if 0 in shape.ranks:
        empty = lookup_ways.only_zeros(lookup, machine, dtype)
        return Plan(
            title, lookup.tokens, dtype, machine, (empty,), (empty.name,), dense, None, eager
        )
    optimal, search = lookup_ways.sequential(lookup, machine, dtype)
    candidates = [
        lookup_ways.from_factors(lookup, machine, dtype, unique=True),
        lookup_ways.from_factors(lookup, machine, dtype, unique=False),
        optimal,
    ]
    ranked, runs = _ranked(candidates), (candidates[0].name,)
    return Plan(title, lookup.tokens, dtype, machine, ranked, runs, dense, search, eager)


def _ranked(candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """Sort candidates, fastest first; of equals the one listed first."""
    return tuple(sorted(candidates, key=lambda one: one.seconds))
