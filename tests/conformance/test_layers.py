"""One table: layers under the requirements of torch's tests of modules, graphs and torch.func."""

import copy
import functools
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.autograd.functional import jacobian
from torch.func import functional_call, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, prune, skip_init, vector_to_parameters
from torch.testing import assert_close as same
from torch.testing import make_tensor
from torch.utils.checkpoint import checkpoint

import comera
from comera.nn.embedding import TiedTTLinear

from . import conforms, harness, table


class Tied(TiedTTLinear):
    def __init__(self, width, rows, device=None, dtype=None):
        bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))
        table = comera.TTEmbedding(rows, width, rank=4, device=device, dtype=dtype)
        super().__init__(table, bias)


LINEARS = {
    "nn.Linear": (nn.Linear, {}),
    "TTLinear": (comera.TTLinear, {"rank": 4}),
    "TTLinear of full rank": (comera.TTLinear, {"rank": 18, "order": 1}),
    "BTTLinear": (comera.BTTLinear, {"rank": 2, "bias": False}),
    "tied": (Tied, {}),
}
TABLES = {
    "nn.Embedding": (nn.Embedding, {"padding_idx": 3}),
    "TTEmbedding": (comera.TTEmbedding, {"padding_idx": 3, "rank": 4}),
    "TTEmbedding, hot rows": (comera.TTEmbedding, {"rank": 4, "hot_rows": 7}),
    "TTEmbedding, hot rank": (comera.TTEmbedding, {"rank": 4, "hot_rows": 12, "hot_rank": 2}),
}
BAGS = {
    f"{kind.__name__}, {mode}": (kind, {"mode": mode, "padding_idx": 3, **more})
    for mode in ("sum", "mean", "max")
    for kind, more in ((nn.EmbeddingBag, {}), (comera.TTEmbeddingBag, {"rank": 4}))
}
LAYERS = LINEARS | TABLES | BAGS


@functools.cache
def info(name):
    """Return torch's kind of entry: how the layer is made, its inputs, what it must compute."""
    torchs, (kind, settings) = harness(), LAYERS[name]

    def inputs(module_info, device, dtype, requires_grad, training):
        rows = make_tensor(4, 6, dtype=torch.long, device=device, low=4, high=50)
        calls = [(rows,), (rows[:1].expand(3, 6),), (rows[:0],), (rows[0],), (rows[0, 0],)]
        reference = lambda m, _, x: F.embedding(x, m.weight)  # noqa: E731
        if name in LINEARS:
            make = functools.partial(make_tensor, dtype=dtype, device=device)
            calls = [(make(*lead, 24),) for lead in ((5,), (0,), (), (2, 3))]
            calls.append((make(24, 5).T,))
            reference = lambda m, _, x: F.linear(x, m.weight, m.bias)  # noqa: E731
        elif name in BAGS:
            flat = torch.cat([rows.flatten(), torch.tensor([3, 3, 9])])  # 3 is the padding
            calls = [(rows,), (flat, torch.tensor([0, 3, 3, 9, 24])), (rows.T,)]

            def reference(m, _, *x):
                mode = settings["mode"]
                return F.embedding_bag(x[0], m.weight, *x[1:], mode=mode, padding_idx=3)

        made = torchs.FunctionInput(*((24, 18) if name in LINEARS else (50, 16)), **settings)
        called = [torchs.FunctionInput(*call) for call in calls]
        return [torchs.ModuleInput(made, call, reference_fn=reference) for call in called]

    return torchs.ModuleInfo(kind, module_inputs_func=inputs)


def cases(name, dtype=torch.float64):
    """Yield layers whose gates differ from one, with an input and a function of the two."""
    torch.manual_seed(0)
    entry = info(name)
    for one in entry.module_inputs_func(entry, "cpu", dtype, False, True):
        made = one.constructor_input
        layer = entry.module_cls(*made.args, **made.kwargs, dtype=dtype)
        with torch.no_grad():
            for key, param in layer.named_parameters():
                if "gates" in key:
                    param.uniform_(0.3, 1.5)
        yield layer, one.forward_input.args, one.reference_fn


def first(name, dtype=torch.float64):
    """Return a layer, an input, its parameters, and a function of these and of one sample."""
    layer, (x, *_), _ = next(cases(name, dtype))
    params = {key: param.detach().clone() for key, param in layer.named_parameters()}
    run = lambda p, x: functional_call(layer, p, (x[None] if name in BAGS else x,))  # noqa: E731
    return layer, x, params, run


def outputs_and_gradients(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for layer, args, reference in cases(name, dtype):
            found = [layer(*args), reference(layer, *args)]
            up = torch.linspace(-1, 1, found[0].numel()).view_as(found[0]).to(dtype)
            grads = [grad(y, list(layer.parameters()), up) for y in found]
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                narrow = layer(*args)
            if dtype != torch.bfloat16:
                same((found[0], grads[0]), (found[1], grads[1]), rtol=1e-4, atol=1e-4)
            if dtype == torch.float32:
                assert narrow.dtype == (torch.bfloat16 if name in LINEARS else dtype)
            assert (narrow - found[1]).norm() <= 0.02 * found[1].norm()


def ways_to_make_it(name):
    (kind, settings), sizes = LAYERS[name], (24, 18) if name in LINEARS else (50, 16)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        layer, x = kind(*sizes, **settings, dtype=dtype, device="meta"), first(name)[1]
        y = layer(x.to("meta", dtype if name in LINEARS else None))
        y.sum().backward()
        assert (layer.weight.dtype, y.dtype, len(y)) == (dtype, dtype, len(x))
        for key, param in layer.named_parameters():
            wide = torch.promote_types(dtype, torch.float32) if "gates" in key else dtype
            assert (param.is_meta, param.dtype, param.grad.dtype) == (True, wide, wide)
        for each in (layer.to_empty(device="cpu"), twin := kind(*sizes, **settings, dtype=dtype)):
            torch.manual_seed(0)
            getattr(each, "embedding", each).reset_parameters()
        same([*layer.state_dict().values()][1:], [*twin.state_dict().values()][1:])
    fresh = skip_init(kind, *sizes, **settings)
    assert {param.is_meta for param in fresh.parameters()} == {False}
    with FakeTensorMode():
        layer, x, *_ = first(name)
        assert len(layer(x)) == len(x)


def copies_and_states(name):
    layer, x, *_ = first(name)
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    others = [copy.deepcopy(layer), torch.load(file, weights_only=False), *(first(name)[0],) * 2]
    state = layer.state_dict()
    for assign, other in zip((True, False), others[2:], strict=True):
        nn.init.ones_(next(other.parameters()))
        assert other.load_state_dict(copy.deepcopy(state), assign=assign) == ([], [])
    for other in others:
        same(other(x), layer(x))
        assert not {*map(id, other.parameters())} & {*map(id, layer.parameters())}
    assert layer.load_state_dict({}, strict=False).missing_keys == list(state)
    with pytest.raises(RuntimeError, match="other"):
        layer.load_state_dict(state | {"other": torch.ones(1)})


def moves_and_casts(name):
    for swap in (False, True):
        layer, x, *_ = first(name)
        held, want = list(layer.parameters()), layer(x).detach()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        layer.bfloat16().double().to(memory_format=torch.channels_last)
        layer.to("meta").to_empty(device="cpu")
        torch.__future__.set_swap_module_params_on_conversion(False)
        assert all(a is b for a, b in zip(held, layer.parameters(), strict=True)) or not swap
        vector = parameters_to_vector([param.double() for param in first(name)[0].parameters()])
        vector_to_parameters(vector, layer.parameters())
        same(layer.eval()(x), want)
        assert parameters_to_vector([layer.weight]).shape == (layer.weight.numel(),)


def passes(name):
    layer, x, *_ = first(name)
    called, params = [], list(layer.parameters())
    layer.register_forward_hook(lambda *_: called.append("forward"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    want = grad(layer(x).square().sum(), params)
    assert called == ["forward", "backward"]
    same(grad(checkpoint(layer, x, use_reentrant=False).square().sum(), params), want)
    with torch.inference_mode():
        same(layer(x), layer.eval()(x))


def gradients_are_checked(name, check=gradcheck):
    layer, x, params, _ = first(name)
    given = [p.requires_grad_() for p in params.values()]
    given += [x.requires_grad_()] if name in LINEARS else []

    def run(*values):
        own = dict(zip(params, values, strict=False))
        return functional_call(layer, own, values[len(params) :] or (x,))

    assert check(run, given, fast_mode=True)


def gradients_of_gradients(name):
    gradients_are_checked(name, gradgradcheck)


def batches_of_samples(name):
    _, x, params, run = first(name)
    same(vmap(run, (None, 0))(params, x), torch.stack([run(params, each) for each in x]))
    one = torch.func.grad(lambda params, x: run(params, x).square().sum())
    got, each = vmap(one, (None, 0))(params, x), [one(params, sample) for sample in x]
    same(got, {key: torch.stack([grads[key] for grads in each]) for key in got})
    models = {key: torch.stack([value, 2 * value]) for key, value in params.items()}  # an ensemble
    want = [run({key: value[k] for key, value in models.items()}, x[0]) for k in (0, 1)]
    same(vmap(run, (0, None))(models, x[0]), torch.stack(want))


def forward_mode(name):
    _, x, params, run = first(name)
    tangents = {key: torch.randn_like(value) for key, value in params.items()}
    value, got = jvp(lambda params: run(params, x[0]), (params,), (tangents,))
    rows = jacrev(lambda params: run(params, x[0]))(params)
    same(got, sum(j.flatten(value.dim()) @ tangents[key].flatten() for key, j in rows.items()))
    with forward_ad.dual_level():
        dual = {key: forward_ad.make_dual(value, tangents[key]) for key, value in params.items()}
        same(forward_ad.unpack_dual(run(dual, x[0])).tangent, got)


def batches_of_gradients(name):
    _, x, params, run = first(name)
    leaves = tuple(value.requires_grad_() for value in params.values())
    of_leaves = lambda *values: run(dict(zip(params, values, strict=True)), x[0])  # noqa: E731
    y = of_leaves(*leaves)
    many = torch.randn(3, *y.shape, dtype=y.dtype)
    got = grad(y, leaves, many, retain_graph=True, is_grads_batched=True)
    each = [grad(y, leaves, one, retain_graph=True) for one in many]
    same(got, tuple(map(torch.stack, zip(*each, strict=True))))
    same(jacobian(of_leaves, leaves, vectorize=True), jacobian(of_leaves, leaves))


def traced(name):
    layer, x, *_ = first(name)
    same(torch.jit.trace(layer, x, check_trace=False)(x.repeat(2, 1)), layer(x.repeat(2, 1)))


def graphs_of_any_size(name):
    torch._dynamo.reset()
    layer, x, params, _ = first(name)
    later, sizes = x.repeat(3, 1), ({0: torch.export.Dim("rows", min=2)},)
    graph = make_fx(functools.partial(functional_call, layer), tracing_mode="symbolic")(params, x)
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes).module()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    want, leaves = layer(later), list(layer.parameters())
    same((graph(params, later), program(later)), (want, want))
    with torch.no_grad():
        same(compiled(later), want)
    same(grad(compiled(later).sum(), leaves), grad(want.sum(), leaves))


def weight_is_a_parameter(name):
    assert isinstance(first(name)[0].weight, nn.Parameter), "no nn.Parameter"


def weight_is_pruned(name):
    prune.l1_unstructured(first(name)[0], "weight", amount=0.5)


def rows_have_sparse_gradients(name):
    kind, settings = LAYERS[name]
    layer = kind(50, 16, **settings, sparse=True)
    layer(torch.tensor([[5, 6]])).sum().backward()
    assert layer.weight.grad.is_sparse


COMPUTED = "the weight is computed from the cores, which are the parameters"
BAGS_OF_TORCH = "torch's own bags cannot either"
CANNOT = [
    ("TT|BTT|tied", weight_is_a_parameter, "no nn.Parameter", COMPUTED),
    ("TT|BTT|tied", weight_is_pruned, "computed from the layer's cores", COMPUTED),
    ("TTEmb", rows_have_sparse_gradients, "not support sparse=True", "rows share their cores"),
    (".*Linear|tied", rows_have_sparse_gradients, "keyword argument 'sparse'", "it has no rows"),
    ("EmbeddingBag, max", rows_have_sparse_gradients, "max mode does not", BAGS_OF_TORCH),
    ("EmbeddingBag", forward_mode, "forward AD with _embedding_bag", BAGS_OF_TORCH),
    (".*EmbeddingBag, max|EmbeddingBag", gradients_of_gradients, "derivative", BAGS_OF_TORCH),
]
REQUIREMENTS = (
    outputs_and_gradients, ways_to_make_it, copies_and_states, moves_and_casts, passes,
    gradients_are_checked, gradients_of_gradients, batches_of_samples, forward_mode,
    batches_of_gradients, traced, graphs_of_any_size, weight_is_a_parameter, weight_is_pruned,
    rows_have_sparse_gradients,
)  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning",
    "ignore:.*performance drop:UserWarning", "ignore:Full backward hook:UserWarning",
)  # fmt: skip
@table(LAYERS, REQUIREMENTS, slow={graphs_of_any_size, gradients_of_gradients})
def test_layers(name, requirement):
    conforms(name, requirement, CANNOT)
