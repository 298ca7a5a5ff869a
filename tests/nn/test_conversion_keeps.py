"""What a layer has beside its numbers: hooks, whether it trains, weights that are made anew."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import comera

CONVERSIONS = (comera.freeze_, comera.to_plain_, comera.densify_)


def test_frozen_layers_stay_frozen_there_and_back():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    before = {name: param.requires_grad for name, param in model.named_parameters()}
    comera.tensorize_(model, comera.TTConfig(rank=4, init="svd"))
    assert not any(p.requires_grad for p in [*model[0].cores, *model[0].gates])
    assert model[0].bias.requires_grad
    assert all(p.requires_grad for p in model[1].parameters())
    comera.densify_(model)
    assert {name: param.requires_grad for name, param in model.named_parameters()} == before


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_frozen_layers_are_not_drawn_anew(tied, caplog):
    table, head, other = nn.Embedding(300, 32), nn.Linear(32, 300, bias=False), nn.Linear(32, 32)
    head.weight = table.weight.requires_grad_(False)
    model = nn.ModuleList([table, head, other])
    kept = table.weight.clone()
    comera.tensorize_(model, comera.TTConfig(rank=4, tied=tied))
    assert model[0] is table
    assert model[1] is head
    torch.testing.assert_close(table.weight, kept, rtol=0, atol=0)
    assert isinstance(model[2], comera.TTLinear)
    assert "leaves 0, 1 dense: it is frozen" in caplog.text


def test_new_cores_are_announced_where_weights_are_lost(caplog):
    comera.tensorize_(nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(rank=4))
    assert "draws new cores for 0; the weights that were there are gone" in caplog.text
    caplog.clear()
    comera.tensorize_(nn.Sequential(nn.Linear(64, 64)), comera.TTConfig(rank=4, init="svd"))
    comera.tensorize_(nn.Sequential(nn.Linear(64, 64, device="meta")), comera.TTConfig(rank=4))
    assert "draws new cores" not in caplog.text


def test_biases_stay_the_same_parameters():
    """As those of a masked language model's head, of which one is the other."""
    head, table = nn.Linear(32, 300), nn.Embedding(300, 32)
    head.weight = table.weight
    model = nn.ModuleDict({"table": table, "head": head, "other": nn.Linear(32, 300)})
    model["other"].bias = bias = head.bias
    bias.requires_grad_(False)
    for change in (
        lambda m: comera.tensorize_(m, comera.TTConfig(rank=4, tied="share")),
        comera.densify_,
    ):
        change(model)
        assert model["head"].bias is bias
        assert model["other"].bias is bias
    assert not bias.requires_grad


@pytest.mark.parametrize("hot", [{}, {"hot_rows": 10}, {"hot_rows": 10, "hot_rank": 4}], ids=str)
def test_layers_made_from_frozen_ones_are_frozen(hot):
    weight = torch.randn(200, 32)
    table = comera.TTEmbedding.from_embedding(nn.Embedding.from_pretrained(weight), rank=4, **hot)
    bag = comera.TTEmbeddingBag.from_embedding(
        nn.EmbeddingBag.from_pretrained(weight), rank=4, **hot
    )
    linear = comera.TTLinear.from_linear(nn.Linear(64, 64).requires_grad_(False), rank=4)
    for layer in (table, bag, linear):
        assert not any(param.requires_grad for param in layer.parameters())
        assert not any(param.requires_grad for param in layer.to_dense().parameters())


@pytest.mark.parametrize("init", ["orthogonal", "svd"])
def test_hooks_are_called_as_before(init):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    called = []
    handle = model[0].register_forward_hook(lambda *_: called.append("after"))
    model[0].register_forward_pre_hook(lambda *_, **__: called.append("before"), with_kwargs=True)
    model[0].register_full_backward_hook(lambda *_: called.append("backward"))
    for change in (
        lambda m: comera.tensorize_(m, comera.TTConfig(rank=4, init=init)),
        comera.densify_,
    ):
        change(model)
        called.clear()
        model(torch.randn(2, 64, requires_grad=True)).sum().backward()
        assert called == ["before", "after", "backward"]
    handle.remove()
    called.clear()
    model(torch.randn(2, 64))
    assert called == ["before"]


@pytest.mark.parametrize("alone", [True, False])
def test_hooks_on_states_are_called_as_before(alone):
    called, layer = [], nn.Linear(64, 64)
    layer.register_state_dict_pre_hook(lambda *_: called.append("before"))
    layer.register_state_dict_post_hook(lambda _, state, at, __: state.__delitem__(f"{at}bias"))
    layer.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
    model = layer if alone else nn.Sequential(layer)
    for change in (
        lambda m: comera.tensorize_(m, comera.TTConfig(rank=4, init="orthogonal")),
        comera.densify_,
    ):
        model = change(model)
        called.clear()
        state = model.state_dict()
        assert called == ["before"]
        assert state
        assert not any(name.endswith("bias") for name in state)
        model.load_state_dict(state)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("back", CONVERSIONS)
def test_what_others_put_on_layers_goes_along(alone, back, caplog):
    layer = nn.Linear(64, 64)
    layer.scale, layer.weight._no_weight_decay = 3.0, True
    layer.register_buffer("mask", torch.ones(64), persistent=False)
    layer.register_parameter("gain", gain := nn.Parameter(torch.ones(64)))
    layer.inner = inner = nn.ReLU()
    new = comera.tensorize_(
        layer if alone else nn.Sequential(layer), comera.TTConfig(rank=4, init="orthogonal")
    )
    found = new if alone else new[0]
    assert all(param._no_weight_decay for param in [*found.cores, *found.gates])
    for convert in (None, back):
        found = new if convert is None else convert(new)
        found = found if alone else found[0]
        assert (found.scale, found.gain, found.inner) == (3.0, gain, inner)
        assert torch.equal(found.mask, torch.ones(64))
        assert found._non_persistent_buffers_set == {"mask"}
        assert not hasattr(found, "prune_below") or isinstance(found, comera.TTLinear)
    assert "cannot go along" not in caplog.text


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_cannot_go_along_is_named(register, caplog):
    model = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 64))
    getattr(model[1].weight, register)(lambda g: None)
    getattr(model[1].bias, register)(lambda g: None)
    model[2].kind = "last"
    model[2].register_load_state_dict_pre_hook(lambda *_: None)
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    said = "1.weight's hooks, 2.load_state_dict's pre-hooks, 2.kind cannot go along: cores have"
    assert said in caplog.text
    caplog.clear()
    comera.densify_(model)
    assert "cannot go along" not in caplog.text


@pytest.mark.parametrize("convert", [comera.densify_, comera.freeze_])
@pytest.mark.parametrize(
    "computed",
    [lambda m: prune.l1_unstructured(m, "bias", 0.5),
     lambda m: parametrize.register_parametrization(m, "bias", nn.Tanh())],
    ids=["pruned", "parametrized"],
)  # fmt: skip
def test_a_bias_that_is_computed(computed, convert):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    computed(model[0])
    x = torch.randn(3, 64)
    want = [model(x), model[0](x)]
    model = convert(model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close([model(x), model[0](x)], want)


def test_sparse_gradients_that_become_dense_are_named(caplog):
    model = nn.ModuleList([nn.Embedding(300, 32, sparse=True), nn.EmbeddingBag(300, 32)])
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    assert "0 had sparse gradients (sparse=True)" in caplog.text
    assert not model[0].sparse
    comera.densify_(model)
    assert (model[0].sparse, model[1].sparse) == (True, False)


class Doubled(comera.TTLinear):
    def forward(self, input):
        return 2 * super().forward(input)


def patched(layer):
    own = layer.forward
    layer.forward = lambda input: 2 * own(input)
    return layer


@pytest.mark.parametrize(
    ("convert", "layer"),
    [
        (comera.tensorize_, lambda: patched(nn.Linear(64, 64))),
        *((convert, lambda: patched(comera.TTLinear(24, 40, rank=2))) for convert in CONVERSIONS),
        *((convert, lambda: Doubled(24, 40, rank=2)) for convert in CONVERSIONS),
    ],
)
def test_forward_passes_that_are_lost_are_named(convert, layer, caplog):
    settings = [comera.TTConfig(rank=2)] if convert is comera.tensorize_ else []
    convert(nn.Sequential(nn.ReLU(), layer()), *settings)
    assert "1: the forward pass of its own" in caplog.text
    caplog.clear()
    plain = nn.Linear if convert is comera.tensorize_ else comera.TTLinear
    convert(nn.Sequential(plain(64, 64)), *settings)
    assert "of its own" not in caplog.text


class Named(NamedTuple):
    one: nn.Module
    more: list[nn.Module]


@dataclass(frozen=True, slots=True)
class Ends:
    """A dataclass that allows no assignment, one of its layers deeper."""

    first: nn.Module
    others: tuple[nn.Module, ...]


class Held(nn.Module):
    """Layers that its attributes hold in ways of which torch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(64, 64) for _ in range(3))
        self.order = [self.first, self.second]
        self.pair = (self.first, self.head)
        self.by_name = {"head": self.head, "width": 64}
        self.branches = [(self.first, self.second), {"last": deque([self.head])}]
        self.branches.append(self.branches)
        self.named = Named(self.first, [self.second])
        self.kinds = {self.first, self.head}
        self.ends = Ends(self.first, (self.head,))
        self.project = self.head.forward
        self.again = partial(self.second, input=partial(self.head))
        self.__dict__["unlisted"] = self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.order:
            x = layer(x)
        return self.project(self.by_name["head"](self.unlisted(self.ends.first(x))))


def test_lists_of_layers_hold_the_new_ones_there_and_back():
    model, x = Held().double(), torch.randn(3, 64, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.children():
            layer.weight[4:] = layer.weight[:4].repeat(15, 1)  # of rank 4
    order, want = model.order, model(x)
    comera.tensorize_(model, comera.TTConfig(rank=4, init="svd", order=1))
    for kind in (comera.TTLinear, nn.Linear):
        assert isinstance(model.first, kind)
        assert model.order is order
        assert order == [model.first, model.second]
        assert model.pair == (model.first, model.head)
        assert model.by_name == {"head": model.head, "width": 64}
        assert model.unlisted is model.second
        assert model.branches[0] == (model.first, model.second)
        assert model.branches[1] == {"last": deque([model.head])}
        assert model.branches[2] is model.branches
        assert model.named == Named(model.first, [model.second])
        assert model.kinds == {model.first, model.head}
        assert model.ends == Ends(model.first, (model.head,))
        assert model.project.__self__ is model.head
        assert model.again.func is model.second
        assert model.again.keywords["input"].func is model.head
        torch.testing.assert_close(model(x), want)
        comera.densify_(model)


def test_weights_that_a_list_of_the_model_holds_are_named(caplog):
    """Weights in a list, as a penalty sums them, stay the dense ones, which a warning names."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model.penalised = {"first": [model[0].weight, model[0].bias], "none": None}
    comera.tensorize_(model, comera.TTConfig(rank=4, init="orthogonal"))
    assert "the weight of 0 is also in a list or another object of the model" in caplog.text
    caplog.clear()
    comera.densify_(model)
    model[0].weight, model.penalised["first"] = model[1].weight, [model[1].weight]
    untied = comera.TTConfig(rank=4, init="orthogonal", tied="untie", target_modules=["0"])
    comera.tensorize_(model, untied)  # the other layer has that weight still
    assert "is also in" not in caplog.text


def test_frozen_embeddings_keep_their_numbers():
    model = nn.ModuleList([nn.Embedding(64, 32), nn.Linear(32, 32)])
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    comera.tensorize_(model, comera.TTConfig(rank=4))
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


def test_a_whisper_model_keeps_its_frozen_sinusoids():
    transformers = pytest.importorskip("transformers")
    sizes = {
        f"{part}_{n}": 2 for part in ("encoder", "decoder") for n in ("layers", "attention_heads")
    }
    config = transformers.WhisperConfig(vocab_size=200, d_model=32, **sizes, pad_token_id=0)
    model = transformers.WhisperForConditionalGeneration(config)
    before = model.model.encoder.embed_positions.weight.clone()
    comera.tensorize_(model, comera.TTConfig(rank=4))
    torch.testing.assert_close(model.model.encoder.embed_positions.weight, before, rtol=0, atol=0)
