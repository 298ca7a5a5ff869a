"""The ways to compute a compressed linear layer, and the dense layer, as lists of steps.

Factorized, the cores of each side are contracted to a factor, ``A (in, r)`` and ``B (r, out)``, and
the batch is multiplied by one after the other. Reconstructed, it is multiplied by ``W = A B``.
A block tensor train is two batched products and a shuffle.

Letters of the equations of blocks: t = tokens, a and b = blocks of the input and the numbers in
each, c and d = those of the output, r = rank of the blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from comera.planning.candidate import (
    Candidate,
    Step,
    candidate,
    factor_chains,
    gate_gradients,
    gates,
    product,
)
from comera.planning.contraction import Search, linear_network, search
from comera.planning.machine import Machine
from comera.planning.products import Layer, factorized_products, reconstructed_products
from comera.shapes import BTTShape, TTShape


def candidates(layer: Layer, machine: Machine, dtype: str) -> tuple[list[Candidate], set[str]]:
    """Return the candidates of a layer, all of which it has code for, and their names."""
    if 0 in layer.shape.ranks:
        ways = [only_bias]
    elif isinstance(layer.shape, BTTShape):
        ways = [blocks]
    else:
        assert isinstance(layer.shape, TTShape), "there are two formats"
        ways = [factorized, reconstructed]
    made = [way(layer, machine, dtype) for way in ways]
    return made, {one.name for one in made}


def best_tree(layer: Layer) -> Search | None:
    """Return the best tree of a tensor train; None for blocks or a weight that has vanished."""
    if not isinstance(layer.shape, TTShape) or 0 in layer.shape.ranks:
        return None
    network = linear_network(layer.shape, layer.tokens)
    wanted = set(network.tensors) - (set() if layer.input_grad else {"x"})
    return search(network, wanted if layer.train else ())


def factorized(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``y = (x A) B``; the bias is one more row of B, against a column of ones."""
    left, right = factor_chains(layer.shape)
    t, y, gt, gx, ga, gb = factorized_products(layer)
    ones = Step("t", ("t",), "ones for the bias", layer.tokens * layer.bond, moved=layer.tokens)
    forward = [
        *_factors(layer),
        product("t", ("x", "A"), "bi,ir->br", (1, *t)),
        *([ones] if layer.bias else []),
        product("y", ("t", "B"), "br,ro->bo", (1, *y)),
    ]
    backward = [
        product("grad(t)", ("gy", "B"), "bo,ro->br", (1, *gt)),
        product("grad(x)", ("grad(t)", "A"), "br,ir->bi", (1, *gx)),
        product(f"grad({left.name})", ("x", "grad(t)"), "bi,br->ir", (1, *ga)),
        product(f"grad({right.name})", ("t", "gy"), "br,bo->ro", (1, *gb)),
        *_core_gradients(layer),
    ]
    return linear_candidate("factorized", layer, machine, dtype, forward, backward, _cores(layer))


def reconstructed(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``W = A B``, then the products of an ordinary linear layer."""
    left, right = factor_chains(layer.shape)
    w, y, gx, gw, ga, gb = reconstructed_products(layer)
    forward = [
        *_factors(layer),
        product("W", ("A", "B"), "ir,ro->io", (1, *w)),
        product("y", ("x", "W"), "bi,io->bo", (1, *y)),
    ]
    backward = [
        product("grad(x)", ("gy", "W"), "bo,io->bi", (1, *gx)),
        product("grad(W)", ("x", "gy"), "bi,bo->io", (1, *gw)),
        *bias_gradient(layer),
        product(f"grad({left.name})", ("grad(W)", "B"), "io,ro->ir", (1, *ga)),
        product(f"grad({right.name})", ("A", "grad(W)"), "ir,io->ro", (1, *gb)),
        *_core_gradients(layer),
    ]
    return linear_candidate(
        "reconstructed", layer, machine, dtype, forward, backward, _cores(layer)
    )


def torch_linear(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``torch.nn.Linear`` of the same widths, for comparison."""
    _, y, gx, gw, _, _ = reconstructed_products(layer)
    forward = [replace(product("y", ("x", "weight"), "bi,oi->bo", (1, *y)), modules=0.5)]
    backward = [
        product("grad(x)", ("gy", "weight"), "bo,oi->bi", (1, *gx)),
        replace(product("grad(weight)", ("gy", "x"), "bo,bi->oi", (1, *gw)), modules=0.5),
        *bias_gradient(layer),
    ]
    weight = {"weight": layer.in_features * layer.out_features}
    return linear_candidate(
        "nn.Linear", layer, machine.without_onednn, dtype, forward, backward, weight
    )


def only_bias(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan a layer whose weight has vanished: its output is the bias, its input's gradient zero."""
    wide, high = layer.tokens * layer.in_features, layer.tokens * layer.out_features
    what = "the bias in every row" if layer.bias else "zeros"
    forward = [Step("y", (), what, high, moved=high)]
    backward = [Step("grad(x)", (), "zeros", wide, moved=wide), *bias_gradient(layer)]
    return linear_candidate("only the bias", layer, machine, dtype, forward, backward, {})


def linear_candidate(
    name: str,
    layer: Layer,
    machine: Machine,
    dtype: str,
    forward: Sequence[Step],
    backward: Sequence[Step],
    parameters: Mapping[str, int],
) -> Candidate:
    """Add up time and memory of a linear layer; steps that it does not need are dropped."""
    needed = [step for step in backward if layer.input_grad or step.result != "grad(x)"]
    return candidate(
        name,
        machine,
        dtype,
        forward=forward,
        backward=needed if layer.train else [],
        inputs={"x": layer.tokens * layer.in_features},
        output_gradient=layer.tokens * layer.out_features,
        parameters={**parameters, **({"bias": layer.out_features} if layer.bias else {})},
    )


def _factors(layer: Layer) -> list[Step]:
    """List the steps that contract the cores to A and B, the bond between them padded."""
    left, right = factor_chains(layer.shape)
    rank, bond = layer.shape.ranks[layer.shape.split - 1], layer.bond
    wide, high = layer.in_features, layer.out_features
    bias = ("bias",) if layer.bias else ()
    what = f"bond {rank} padded to {bond}"
    steps = [
        *gates(layer.shape, layer.operators),
        *left.forward,
        *right.forward,
        Step("A", (left.name,), what, wide * bond, moved=wide * (rank + bond), calls=2),
        Step("B", (right.name, *bias), what, high * bond, moved=high * (rank + bond), calls=2),
    ]
    return _shared(layer, steps)


def _core_gradients(layer: Layer) -> list[Step]:
    """List the steps from the gradients of A and B to those of cores and gates."""
    left, right = factor_chains(layer.shape)
    steps = [*left.backward, *right.backward, *gate_gradients(layer.shape, layer.operators)]
    return _shared(layer, steps)


def _shared(layer: Layer, steps: list[Step]) -> list[Step]:
    """Share the calls of steps on the cores among the layers that they serve."""
    if layer.together == 1:
        return steps
    return [replace(step, calls=step.calls / layer.together) for step in steps]


def _cores(layer: Layer) -> dict[str, int]:
    return {f"core{k}": a * n * b for k, (a, n, b) in enumerate(layer.shape.core_shapes)}


def bias_gradient(layer: Layer) -> list[Step]:
    """List the sum over rows that is a bias's gradient, if there is one."""
    if not layer.bias:
        return []
    numbers = layer.tokens * layer.out_features
    return [Step("grad(bias)", ("gy",), "sum over rows", layer.out_features, moved=numbers)]


def blocks(layer: Layer, machine: Machine, dtype: str) -> Candidate:
    """Plan ``y = shuffled(x A) B``, A and B being matrices with blocks along their diagonals."""
    shape = layer.shape
    assert isinstance(shape, BTTShape)
    (a, b), (c, d), (rank,), tokens = shape.in_modes, shape.out_modes, shape.ranks, layer.tokens
    hidden, high, sizes = tokens * a * c * rank, tokens * c * d, shape.slice_sizes
    pads = tokens * a * b if a * b > layer.in_features else 0
    plain = machine.without_onednn
    forward = [
        *gates(shape, 0),
        Step("B", ("core1",), "cacr to c,ar,d", sizes[1] * rank, copied=sizes[1] * rank),
        product("h", ("core0", "x"), "abcr,abt->acrt", (a, c * rank, b, tokens), copied=pads),
        Step("hidden", ("h",), "acrt to c,ar,t", hidden, moved=2 * hidden),
        product("blocks", ("hidden", "B"), "cart,card->ctd", (c, tokens, a * rank, d)),
        Step("y", ("blocks",), "ctd to t,cd", high, copied=high),
    ]
    backward = [
        Step("grad(blocks)", ("gy",), "t,cd to ctd", high, copied=high),
        *bias_gradient(layer),
        product("grad(B)", ("hidden", "grad(blocks)"), "cart,ctd->card", (c, a * rank, tokens, d)),
        product("grad(hidden)", ("grad(blocks)", "B"), "ctd,card->cart", (c, tokens, d, a * rank)),
        Step("grad(h)", ("grad(hidden)",), "c,ar,t to acrt", hidden, moved=2 * hidden),
        product("grad(core0)", ("x", "grad(h)"), "abt,acrt->abcr", (a, b, tokens, c * rank)),
        product("grad(x)", ("grad(h)", "core0"), "acrt,abcr->abt", (a, tokens, c * rank, b)),
        *gate_gradients(shape, 0),
    ]
    cores = {f"core{k}": size * rank for k, size in enumerate(sizes)}
    return linear_candidate("blocks", layer, plain, dtype, forward, backward, cores)
