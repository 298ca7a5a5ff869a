import copy
import gc
import importlib
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.nn.feed_forward_parts import (
    LAYOUTS,
    fuse_feed_forwards_,
    register_feed_forward,
    unfuse_feed_forwards_,
)

WIDTH, HIDDEN = 24, 40


class Mlp(nn.Module):
    """A feed-forward part as GPTs of one's own have it."""

    def __init__(self, activation=None, dropout=0.1):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU() if activation is None else activation
        self.c_proj = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.c_fc(x)
        x = self.act(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Gated(nn.Module):
    """As LLaMA's own code has it."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Residual(nn.Module):
    """With a norm before, and the input added."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.down(F.relu(self.up(self.norm(x))))
        return x + y


class Held(Mlp):
    """Its activation is a function, which it holds."""

    def __init__(self):
        super().__init__(dropout=0.0)
        del self.act
        self.act = F.silu


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(self.dense(x))


class Nested(nn.Module):
    """As BERT has it: half of it in a module of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.out(self.inner(x))


class Noisy(Mlp):
    def forward(self, x):
        return self.c_proj(2 * self.act(self.c_fc(x)))


class Unknown(Mlp):
    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Loud(Inner):
    def __call__(self, x):
        return 2 * super().__call__(x)


class ItsOwnCall(Nested):
    def __init__(self):
        super().__init__()
        self.inner = Loud()


class Decorated(Mlp):
    @torch.no_grad()
    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


register_feed_forward(Mlp, ["c_fc", "c_proj"], "act", after=["dropout"])
register_feed_forward(Gated, ["w1", "w3", "w2"], F.silu)
register_feed_forward(Residual, ["up", "down"], F.relu, before=["norm"], after=[None])
register_feed_forward(
    Nested, ["inner.dense", "out"], "inner.act", inside={"inner": f"{__name__}.Inner"}
)
register_feed_forward(ItsOwnCall, ["inner.dense", "out"], "inner.act", inside={"inner": Loud})
register_feed_forward(Decorated, ["c_fc", "c_proj"], "act")


def encoder_layer(dropout=0.0):
    return nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout, "gelu", batch_first=True)


def sequential():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Dropout(0.5), nn.Identity(),
        nn.Linear(HIDDEN, WIDTH),
    )  # fmt: skip


MAKERS = {
    "mlp": lambda: Mlp(dropout=0.0), "gated": Gated, "residual": Residual,
    "sequential": sequential, "encoder layer": encoder_layer, "held": Held, "nested": Nested,
}  # fmt: skip


def converted(make, **settings):
    torch.manual_seed(0)
    config = comera.TTConfig(**{"rank": 5, "init": "orthogonal"} | settings)
    return comera.tensorize_(make().double(), config)


FORMATS = pytest.mark.parametrize(
    "settings", [{}, {"linear_format": "btt", "rank": 1}], ids=["tt", "btt"]
)


def is_fused(model):
    return bool(fuse_feed_forwards_(model))


def batch():
    return torch.randn(2, 30, WIDTH, dtype=torch.float64, requires_grad=True)


def results(model, x):
    """The output, and the gradients of the input and of all parameters."""
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])]


def by_layers(model):
    other = copy.deepcopy(model)
    unfuse_feed_forwards_(other)
    return other


def kept_widths(model, x):
    kept, rows = [], x.shape[0] * x.shape[1]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    return {t.shape[-1] for t in kept if t.numel() == rows * t.shape[-1]}


def goes_by_layers(model):
    return HIDDEN in kept_widths(model, batch())


@FORMATS
@pytest.mark.parametrize("kind", MAKERS)
def test_output_and_gradients_are_those_of_the_layers(kind, settings):
    model, x = converted(MAKERS[kind], **settings).eval(), batch()
    want = results(by_layers(model), x)
    torch.testing.assert_close(results(model, x), want, rtol=1e-9, atol=1e-9)


@FORMATS
@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_of_the_hidden_width_is_kept(kind, settings):
    model = converted(MAKERS[kind], **settings).eval()
    assert not goes_by_layers(model)
    assert goes_by_layers(by_layers(model))


def test_layers_of_another_kind_are_left_alone():
    model = converted(Mlp, target_modules=["c_fc"])
    assert not is_fused(model)
    blocks = comera.TTConfig(linear_format="btt", rank=1, init="orthogonal")
    assert not is_fused(comera.tensorize_(model, blocks))  # one of each


ELSE = {
    "tanh gelu": lambda: Mlp(nn.GELU("tanh")), "tanh": lambda: Mlp(nn.Tanh()),
    "another forward": Noisy, "not registered": Unknown, "its own call": ItsOwnCall,
    "decorated": Decorated,
    "no activation": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)),
    "three layers": lambda: nn.Sequential(*sequential(), nn.Linear(WIDTH, WIDTH)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ELSE)
def test_what_computes_something_else_is_left_alone(kind):
    assert not is_fused(converted(ELSE[kind]))


def test_a_pass_put_on_the_module_stays():
    model = converted(MAKERS["mlp"])
    model.forward = forward = torch.tanh
    fuse_feed_forwards_(model)
    assert model.forward is forward


@pytest.mark.parametrize("given", [
    (3, ["up", "down"], "act"), (Mlp, ["up"], "act"), (Mlp, "up", "act"),
    (Mlp, ["up", "down"], torch.tanh),
])  # fmt: skip
def test_what_cannot_be_registered(given):
    with pytest.raises((TypeError, ValueError), match="must be"):
        register_feed_forward(*given)


@pytest.mark.parametrize("names", ["before", "between", "after"])
def test_names_are_no_string(names):
    with pytest.raises(ValueError, match="must be lists of names"):
        register_feed_forward(Mlp, ["up", "down"], "act", **{names: "norm"})


def new(path):
    """A module of a class without the children that its constructor makes."""
    holder, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(holder), name)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def put(module, name, child):
    holder, _, last = name.rpartition(".")
    setattr(module.get_submodule(holder), last, child)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in LAYOUTS if path.startswith(("torch", "trans"))])
def test_registered_classes_compute_what_is_registered(path):
    if path.startswith("trans"):
        pytest.importorskip("transformers")
    layout, module = LAYOUTS[path], new(path)
    for name, inner in layout.inside.items():
        put(module, name, new(inner))
    *inner, last = layout.layers
    for name in inner:
        put(module, name, comera.TTLinear(WIDTH, HIDDEN, rank=5))
    put(module, last, comera.TTLinear(HIDDEN, WIDTH, rank=5))
    put(module, layout.activation, F.silu if len(inner) == 2 else F.gelu)
    for name in (*layout.between, *filter(None, layout.after)):
        put(module, name, nn.LayerNorm(WIDTH) if "Norm" in name else nn.Dropout())
    module, x = module.double().eval(), batch()
    assert is_fused(module)
    run = getattr(module, layout.method)
    want = getattr(by_layers(module), layout.method)(x)
    torch.testing.assert_close(run(x), want, rtol=1e-9, atol=1e-9)
    assert HIDDEN not in kept_widths(run, x)


def set_dropout(model):
    model.train()[3].p = 0.5


def hook(model):
    model.get_submodule("act").register_forward_hook(lambda *_: None)


def replace_activation(model):
    model.act = nn.Tanh()


def approximate(model):
    model.act.approximate = "tanh"


def patch(model):
    model.act.forward = torch.tanh


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def replace_layer(model):
    model.c_proj = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)


def delete(model):
    del model[2]
    model.insert(2, nn.Tanh())


def hold_another(model):
    model.act = torch.tanh


def replace_a_container(model):
    model.inner = nn.Sequential(model.inner.dense, nn.Tanh())


def patch_a_container(model):
    model.inner.forward = types.MethodType(lambda self, x: self.dense(x).cos(), model.inner)


CHANGES = [
    ("mlp", hook), ("mlp", replace_activation), ("mlp", approximate), ("mlp", patch),
    ("mlp", replace_layer), ("held", hold_another),
    ("sequential", set_dropout), ("sequential", delete),
    ("nested", replace_a_container), ("nested", patch_a_container),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_what_has_changed_since_goes_by_layers(kind, change):
    model = converted(MAKERS[kind]).eval()
    assert not goes_by_layers(model)
    change(model)
    assert goes_by_layers(model)
    x = batch()
    torch.manual_seed(1)
    got = results(model, x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, results(by_layers(model), x), rtol=0, atol=0)


@FORMATS
def test_a_result_can_be_changed_in_place(settings):
    def make():
        layers = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        return nn.Sequential(*layers, nn.ReLU(inplace=True))

    model, x = converted(make, **settings), batch()
    assert HIDDEN not in kept_widths(model, x)
    torch.testing.assert_close(results(model, x), results(by_layers(model), x))


def test_a_module_that_is_appended_is_called():
    model, x = converted(sequential).eval(), batch()
    before = model(x)
    torch.testing.assert_close(model.append(nn.Tanh())(x), before.tanh())


def test_an_input_by_name():
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    torch.testing.assert_close(model(x=x), model(x))


def test_a_module_that_is_gone_is_missed():
    model = converted(MAKERS["mlp"]).eval()
    del model.dropout
    with pytest.raises(AttributeError, match="dropout"):
        model(batch())


def test_a_layer_whose_forward_was_wrapped():
    """As accelerate hooks modules."""
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    forward = model.c_fc.forward
    model.c_fc.forward = doubled(forward)
    torch.testing.assert_close(model(x), model.c_proj(model.act(2 * forward(x))))


def test_a_class_that_is_patched_computes_what_it_says_then(monkeypatch):
    model, x = converted(MAKERS["nested"]).eval(), batch()
    monkeypatch.setattr(Nested, "forward", lambda self, x: self.out(self.inner(x)).cos())
    torch.testing.assert_close(model(x), model.out(model.inner(x)).cos())
    monkeypatch.setattr(Inner, "forward", lambda self, x: self.act(self.dense(x)).sin())
    torch.testing.assert_close(model(x), model.out(model.inner(x)).cos())


PATCHES = [
    ("mlp", nn.GELU, "forward"), ("mlp", nn.GELU, "__call__"), ("mlp", nn.Module, "__call__"),
    ("mlp", comera.TTLinear, "forward"), ("gated", comera.TTLinear, "forward"), ("mlp", F, "gelu"),
    ("gated", F, "silu"), ("sequential", nn.Dropout, "forward"), ("nested", Inner, "__call__"),
    ("sequential", nn.Identity, "forward"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "holder", "name"), PATCHES)
def test_what_is_patched_for_all_is_called(kind, holder, name, monkeypatch):
    model, x = converted(MAKERS[kind]).eval(), batch()
    layers, before = by_layers(model), model(x)
    monkeypatch.setattr(holder, name, doubled(getattr(holder, name)))
    got = model(x)
    assert not torch.allclose(got, before)
    torch.testing.assert_close(got, layers(x), rtol=1e-9, atol=1e-9)


def test_slices_and_new_ones_of_the_class():
    model, x = converted(sequential).eval(), batch()
    torch.testing.assert_close(model[:2](x), model[1](model[0](x)))
    model = converted(MAKERS["mlp"])
    assert type(model)()(x.float()).shape == x.shape


def test_an_attribute_hides_a_module_of_its_name():
    """As in a copy of torch's decoder layer whose activation is a module."""
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    vars(model)["act"] = F.relu
    torch.testing.assert_close(model(x), by_layers(model)(x))


def test_few_rows_go_by_layers():
    assert HIDDEN in kept_widths(converted(MAKERS["mlp"]).eval(), batch()[:, :7])


def test_a_hook_of_all_modules_is_called():
    model, called = converted(MAKERS["mlp"]).eval(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(type(m)))
    try:
        model(batch())
    finally:
        handle.remove()
    assert nn.GELU in called


def test_forward_mode_and_transforms():
    model, x = converted(MAKERS["mlp"]).eval(), batch().detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        got, want = (
            torch.autograd.forward_ad.unpack_dual(m(dual)) for m in (model, by_layers(model))
        )
        torch.testing.assert_close(got.tangent, want.tangent)
    jacobian = torch.func.jacfwd(model)(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacfwd(by_layers(model))(x[0]))


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_gradients_of_gradients(kind):
    model, x = converted(MAKERS[kind]).eval(), batch()

    def penalty(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *model.parameters()])

    torch.testing.assert_close(penalty(model), penalty(by_layers(model)), rtol=1e-9, atol=1e-9)


def test_gradients_of_gradients_of_a_part_that_is_used_again_and_again():
    """Its factors are shared: a later pass depends on them by way of the earlier ones too."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp(dropout=0.0)

        def forward(self, x):
            return self.mlp(self.mlp(self.mlp(x)))

    model, x = converted(Tied), batch()
    params = list(model.parameters())
    with_graph = torch.autograd.grad(model(x).square().sum(), params, create_graph=True)
    plainly = torch.autograd.grad(model(x).square().sum(), params)
    torch.testing.assert_close(
        [g.detach() for g in with_graph], list(plainly), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_parts_with_weights_of_their_own(through):
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    want, other = model(x), through(model)
    assert type(other) is Mlp
    assert not goes_by_layers(other)
    torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    with torch.no_grad():
        other.c_proj.bias.add_(1)
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    torch.testing.assert_close(other(x), want + 1)


def test_dense_again():
    model = comera.densify_(converted(MAKERS["mlp"]))
    assert vars(model).keys() == vars(Mlp()).keys()


def test_a_class_that_another_library_has_derived_stays():
    model = converted(MAKERS["mlp"]).eval()
    derived = type("Wrapped", (type(model),), {})
    model.__class__ = derived
    assert not goes_by_layers(model)
    unfuse_feed_forwards_(model)
    assert type(model) is derived
    assert goes_by_layers(model)


def test_a_part_is_freed_with_its_last_reference():
    model = converted(MAKERS["mlp"])
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_replica_of_data_parallel_uses_its_own_modules():
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    replica = model._replicate_for_data_parallel()
    replica._modules = {**model._modules, "dropout": nn.Tanh()}
    torch.testing.assert_close(replica(x), model(x).tanh())
    assert not goes_by_layers(replica)


@pytest.mark.slow
def test_a_compiler_sees_the_layers():
    model, x = converted(MAKERS["gated"]).eval(), batch()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-9, atol=1e-9)
    assert "silu" in graphs[0]
    assert "gated_hidden" not in graphs[0]
