import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.nn.feed_forward_parts import unfuse_feed_forwards_

WIDTH, HIDDEN = 24, 40


class Mlp(nn.Module):
    """As GPTs of one's own have it."""

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
    """With a norm before, whose scale is read from a flag, and the input added."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.add = True

    def forward(self, x):
        y = self.down(F.relu(self.up(self.norm(x))))
        return x + y if self.add else y


class Noisy(Mlp):
    def forward(self, x):
        h = F.gelu(self.c_fc(x))
        if self.training:
            h = h * 2
        return self.c_proj(h)


class Quiet(Mlp):
    def forward(self, x):
        h = F.gelu(self.c_fc(x))
        return self.c_proj(h if self.training else h * 2)


class UsedTwice(Mlp):
    def forward(self, x):
        h = F.gelu(self.c_fc(x))
        return self.c_proj(h) + h.mean()


class Counting(Mlp):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class TwoMasks(Gated):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.w2(F.silu(self.w1(self.drop(x))) * self.w3(self.drop(x)))


def encoder_layer(dropout=0.0):
    return nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout, "gelu", batch_first=True)


def sequential():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Dropout(0.5),
        nn.Linear(HIDDEN, WIDTH),
    )  # fmt: skip


MAKERS = {
    "mlp": lambda: Mlp(dropout=0.0), "gated": Gated, "residual": Residual,
    "sequential": sequential, "encoder layer": encoder_layer,
}  # fmt: skip


def converted(make, **settings):
    torch.manual_seed(0)
    config = comera.TTConfig(rank=5, init="orthogonal", **settings)
    return comera.tensorize_(make().double(), config)


def is_fused(model):
    return any("_feed_forward_part" in vars(module) for module in model.modules())


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
    assert not is_fused(other)
    return other


def kept_widths(model, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    return {t.shape[-1] for t in kept if t.numel() == 60 * t.shape[-1]}


def goes_by_layers(model):
    return HIDDEN in kept_widths(model, batch())


@pytest.mark.parametrize("kind", MAKERS)
def test_output_and_gradients_are_those_of_the_layers(kind):
    model, x = converted(MAKERS[kind]).eval(), batch()
    assert is_fused(model)
    want = results(by_layers(model), x)
    torch.testing.assert_close(results(model, x), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_of_the_hidden_width_is_kept(kind):
    model = converted(MAKERS[kind]).eval()
    assert not goes_by_layers(model)
    assert goes_by_layers(by_layers(model))


ELSE = {
    "tanh gelu": lambda: Mlp(nn.GELU("tanh")), "tanh": lambda: Mlp(nn.Tanh()),
    "noisy": Noisy, "quiet": Quiet, "used twice": UsedTwice, "counting": Counting,
    "two masks": TwoMasks,
    "no activation": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ELSE)
def test_what_computes_something_else_is_left_alone(kind):
    model = converted(ELSE[kind])
    assert not is_fused(model)
    model(batch())
    assert getattr(model, "calls", 1) == 1


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["c_fc"]}, {"linear_format": "btt", "rank": 1}], ids=str
)
def test_layers_of_another_kind_are_left_alone(settings):
    torch.manual_seed(0)
    model = comera.tensorize_(Mlp(), comera.TTConfig(init="orthogonal", **({"rank": 5} | settings)))
    assert not is_fused(model)


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


def replace_layer(model):
    model.c_proj = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)


def drop_the_sum(model):
    model.add = False


def append(model):
    model.append(nn.Tanh())


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mlp", hook), ("mlp", replace_activation), ("mlp", approximate), ("mlp", patch),
        ("mlp", replace_layer), ("residual", drop_the_sum), ("sequential", set_dropout),
        ("sequential", append),
    ],
)  # fmt: skip
def test_what_has_changed_since_goes_by_layers(kind, change):
    model = converted(MAKERS[kind]).eval()
    change(model)
    assert is_fused(model)
    assert goes_by_layers(model)
    x = batch()
    torch.manual_seed(1)
    got = results(model, x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, results(by_layers(model), x), rtol=0, atol=0)


def test_an_input_by_name():
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    torch.testing.assert_close(model(x=x), model(x))


def test_a_module_that_is_gone_is_missed():
    model = converted(MAKERS["mlp"]).eval()
    del model.dropout
    with pytest.raises(AttributeError, match="dropout"):
        model(batch())


def test_a_hook_of_all_modules_is_called():
    model, called = converted(MAKERS["mlp"]).eval(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(type(m)))
    try:
        model(batch())
    finally:
        handle.remove()
    assert nn.GELU in called


def test_transforms():
    model, x = converted(MAKERS["mlp"]).eval(), batch().detach()[0]
    jacobian = torch.func.jacfwd(model)(x[:1])
    torch.testing.assert_close(jacobian, torch.func.jacfwd(by_layers(model))(x[:1]))


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_gradients_of_gradients(kind):
    model, x = converted(MAKERS[kind]).eval(), batch()

    def penalty(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *model.parameters()])

    torch.testing.assert_close(penalty(model), penalty(by_layers(model)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_are_parts_with_weights_of_their_own(through):
    model, x = converted(MAKERS["mlp"]).eval(), batch()
    want, other = model(x), through(model)
    assert type(other).__name__ == "Mlp"
    assert isinstance(other, Mlp)
    assert not goes_by_layers(other)
    torch.testing.assert_close(other(x), want, rtol=0, atol=0)
    with torch.no_grad():
        other.c_proj.bias.add_(1)
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    torch.testing.assert_close(other(x), want + 1)


def test_dense_again():
    model = comera.densify_(converted(MAKERS["mlp"]))
    assert type(model) is Mlp
    assert not is_fused(model)


def test_a_class_that_another_library_has_derived_stays():
    model = converted(MAKERS["mlp"]).eval()
    derived = type("Wrapped", (type(model),), {})
    model.__class__ = derived
    unfuse_feed_forwards_(model)
    assert type(model) is derived
    assert not goes_by_layers(model)


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
