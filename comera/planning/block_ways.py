"""How a block tensor train is computed, as a list of steps: two batched products and a shuffle.

Letters of the equations: t = tokens, a and b = blocks of the input and the numbers in each, c and
d = those of the output, r = rank of the blocks.
"""

from comera.block_shape import BTTShape
from comera.planning.candidate import Candidate, gate_gradients, gates
from comera.planning.linear_ways import bias_gradient, linear_candidate
from comera.planning.machine import Machine
from comera.planning.operation import Step, product
from comera.planning.products import Layer


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
