import copy
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import comera
from comera.nn.convert import densify_, tensorize_
from comera.nn.embedding import TiedTTLinear, TTEmbedding, TTEmbeddingBag
from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule, tensor_trains
from comera.nn.targets import TTConfig

ROWS, WIDTH = 60, 24


class Block(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH, device=device)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False, device=device)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Model(nn.Module):
    """An embedding, blocks and an output layer, which may share the table of the embedding."""

    def __init__(self, tied=False, device=None):
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, device=device)
        self.layers = nn.ModuleList(Block(device) for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS, device=device)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LINEAR = [f"layers.{k}.fc{n}" for k in (0, 1) for n in (1, 2)] + ["head"]
TOKENS = torch.arange(12).reshape(3, 4)


def convert(model, filter_fn=None, **settings):
    return tensorize_(model, TTConfig(**{"rank": 3, **settings}), filter_fn=filter_fn)


def low_rank(tied=False, **settings):
    """A dense model whose weights are tensor trains of rank 3, ties included."""
    return densify_(convert(Model(tied), tied="share", scatter_rows=False, **settings))


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, ["embedding", *LINEAR]),
        ({"target_modules": "all-linear"}, LINEAR),
        ({"target_modules": "all-embedding"}, ["embedding"]),
        ({"target_modules": r"layers\.\d+\.fc1"}, ["layers.0.fc1", "layers.1.fc1"]),
        ({"target_modules": r"layers\.1\..*"}, ["layers.1.fc1", "layers.1.fc2"]),
        ({"target_modules": ["fc1"]}, ["layers.0.fc1", "layers.1.fc1"]),
        ({"target_modules": ["0.fc2", "head"]}, ["layers.0.fc2", "head"]),
        ({"target_modules": ["layers.0.fc1"]}, ["layers.0.fc1"]),
        ({"exclude_modules": r"layers\..*"}, ["embedding", "head"]),
        ({"exclude_modules": ["head", "fc2"]}, ["embedding", "layers.0.fc1", "layers.1.fc1"]),
        ({"filter_fn": lambda m, n: "1" in n}, ["layers.0.fc1", "layers.1.fc1", "layers.1.fc2"]),
        ({"filter_fn": lambda m, n: isinstance(m, nn.Embedding)}, ["embedding"]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_targets(settings, want):
    model = convert(Model(), **settings)
    assert list(tensor_trains(model)) == want
    assert model(TOKENS).shape == (3, 4, ROWS)


def test_the_default_config_serves():
    model = tensorize_(nn.Sequential(nn.Linear(512, 512)))
    assert max(model[0].ranks) == 32


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": "nothing"}, {"target_modules": ["c1"]}, {"exclude_modules": ".*"}],
)
def test_nothing_matched_lists_the_layers(settings):
    with pytest.raises(ValueError, match=r"matches no layer.*embedding, layers\.0\.fc1.*head") as e:
        convert(Model(), **settings)
    assert str(*settings.values()) in str(e.value)
    with pytest.raises(ValueError, match="filter_fn matches no layer"):
        convert(Model(), filter_fn=lambda module, name: False)
    with pytest.raises(ValueError, match="layers are none at all"):
        convert(nn.Sequential(nn.ReLU()))


def test_a_regular_expression_that_is_none_is_repeated():
    with pytest.raises(ValueError, match=r"'layers\.\(' is not a regular expression"):
        convert(Model(), target_modules="layers.(")


def test_patterns_take_the_first_match():
    model = convert(
        Model(),
        rank_pattern={r"layers\.0\..*": 2, r".*fc1": 5},
        shape_pattern={r".*fc2": [[8, 6], [24]]},
        embedding_rank=4,
        embedding_order=2,
    )
    ranks = {name: max(layer.ranks) for name, layer in tensor_trains(model).items()}
    assert ranks == {
        "embedding": 4, "layers.0.fc1": 2, "layers.0.fc2": 2,
        "layers.1.fc1": 5, "layers.1.fc2": 3, "head": 3,
    }  # fmt: skip
    assert model.layers[1].fc2.shape.in_modes == (8, 6)
    assert len(model.embedding.cores) == 2


def test_compression_and_a_rank_pattern_live_together():
    model = convert(Model(), rank=None, compression=3, rank_pattern={"head": 2})
    assert max(model.head.ranks) == 2
    for layer in model.layers:
        assert layer.fc1.shape.num_params * 3 <= layer.fc1.num_dense


@pytest.mark.parametrize("size", [{"compression": 3}, {"tolerance": 0.5, "init": "svd"}], ids=str)
def test_embeddings_may_have_a_rank_and_linear_layers_a_size(size):
    model = convert(Model(), rank=None, embedding_rank=2, **size)
    assert max(model.embedding.ranks) == 2


def test_a_conversion_keeps_the_spread_of_hot_rows():
    table = convert(nn.Embedding(600, 256), rank=16, hot_rows=400, hot_rank=32)
    for rows in (table.weight[:400], table.weight[400:]):
        assert float(rows.detach().std()) == pytest.approx(1.0, rel=0.1)


def test_hot_rows_reach_the_embedding():
    assert convert(Model(), hot_rows=7).embedding.hot.shape == (7, WIDTH)
    table = convert(Model(), hot_rows=17, hot_rank=4).embedding
    assert (table.hot.weight.shape, table.hot.ranks) == ((17, WIDTH), (4,))


@pytest.mark.parametrize(
    ("dense", "kind"),
    [
        (nn.Linear(48, 48), TTLinear),
        (nn.Embedding(60, 24, 2), TTEmbedding),
        (nn.EmbeddingBag(60, 24, mode="sum", padding_idx=2), TTEmbeddingBag),
    ],
)
@pytest.mark.parametrize("init", ["orthogonal", "normal", "svd"])
def test_a_root_layer_is_replaced_by_what_is_returned(dense, kind, init):
    thin = convert(dense.eval(), init=init)
    assert type(thin) is kind
    assert not thin.training
    assert getattr(thin, "padding_idx", None) == getattr(dense, "padding_idx", None)
    assert getattr(thin, "mode", None) == getattr(dense, "mode", None)
    assert type(densify_(thin)) is type(dense)


def test_a_module_used_twice_stays_one():
    shared = nn.Linear(48, 48)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    convert(model)
    assert isinstance(model["a"], TTLinear)
    assert model["a"] is model["b"][0]
    densify_(model)
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["b"][0]


@pytest.mark.parametrize(("exclude", "said"), [(["head", "haed"], "haed"), (r"typo\..*", "typo")])
def test_an_exclusion_that_excludes_nothing_is_named(caplog, exclude, said):
    with caplog.at_level(logging.WARNING, "comera"):
        convert(Model(), exclude_modules=exclude)
    (line,) = [r.getMessage() for r in caplog.records if "matches no" in r.getMessage()]
    assert said in line
    assert "embedding, layers.0.fc1" in line


def test_attention_keeps_its_projection(caplog):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    with caplog.at_level(logging.WARNING, "comera"):
        convert(layer)
    assert list(tensor_trains(layer)) == ["linear1", "linear2"]
    assert "self_attn.out_proj dense: nn.MultiheadAttention" in caplog.text
    layer(torch.randn(2, 5, 32)).sum().backward()


class Special(nn.Linear):
    pass


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(64, 0), "its weight is empty"),  # as in MobileBERT, of equal widths
        (lambda: nn.Linear(4, 4), "as a tensor train it would hold no fewer numbers"),
        (lambda: Special(64, 64), "a subclass"),
        (lambda: nn.LazyLinear(64), "a subclass"),  # it has no shape yet
        (lambda: nn.Linear(64, 64, dtype=torch.complex64), "its weight is torch.complex64"),
        (lambda: nn.Linear(64, 64).to(torch.float8_e4m3fn), "its weight is torch.float8_e4m3fn"),
        (lambda: nn.Embedding(60, 24, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(60, 24, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: parametrizations.weight_norm(nn.Linear(64, 64)), "the weight or the bias is made"),
        (lambda: nn.utils.weight_norm(nn.Linear(64, 64)), "the weight or the bias is made from"),
        (lambda: nn.utils.spectral_norm(nn.Linear(64, 64)), "the weight or the bias is made from"),
        (lambda: prune.l1_unstructured(nn.Linear(64, 64), "weight", 0.5), "the weight or the bias"),
        (lambda: prune.l1_unstructured(nn.Linear(64, 64), "bias", 0.5), "the weight or the bias"),
    ],
)
def test_what_cannot_be_converted_is_left_and_named(make, reason, caplog):
    model = nn.ModuleDict({"left": make(), "fc": nn.Linear(64, 64)})
    kind = type(model["left"])
    with caplog.at_level(logging.WARNING, "comera"):
        convert(model, rank=4)
    assert list(tensor_trains(model)) == ["fc"]
    assert type(model["left"]) is kind
    assert re.search(f"tensorize_ leaves left dense: .*{reason}", caplog.text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": [3, 3]}, r"layers\.0\.fc1: rank=\[3, 3\]"),
        ({"shape_pattern": {"head": [[4, 5], [60]]}}, "head: the modes 4 x 5"),
        ({"rank_pattern": {"head": [3, 3]}}, r"head: rank=\[3, 3\]"),
    ],
)
def test_a_failure_leaves_the_model_unchanged(settings, message):
    model = Model()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        convert(model, **settings)
    assert dict(model.named_modules()) == before
    assert not tensor_trains(model)


@pytest.mark.parametrize("size", [{"rank": 3}, {"rank": None, "tolerance": 1e-4}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_svd_approximates_the_model(tied, size):
    model = low_rank(tied)
    want = model(TOKENS).detach()
    convert(model, init="svd", tied="share", **size)
    assert len(tensor_trains(model)) == (5 if tied else 6)
    assert all(max(layer.ranks) <= 3 for layer in tensor_trains(model).values())
    torch.testing.assert_close(model(TOKENS), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("factor", [0.02, 1.0, 5.0])
def test_fresh_cores_keep_the_scale_of_the_weight_and_the_bias(factor):
    model = nn.ModuleDict({"fc": nn.Linear(256, 256), "table": nn.Embedding(512, 64)})
    with torch.no_grad():
        for module in model.values():
            module.weight.normal_(std=factor)
    bias = model["fc"].bias.detach().clone()
    squares = {"fc": [], "table": []}
    for _ in range(20):
        thin = convert(copy.deepcopy(model), rank=16)
        assert torch.equal(thin["fc"].bias, bias)
        for name, values in squares.items():
            values.append(thin[name].weight.detach().square().mean())
    for values in squares.values():
        # The product of few random cores varies from draw to draw, here by up to 20 percent.
        assert float(torch.stack(values).mean().sqrt()) == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("settings", [{}, {"init": "svd"}, {"tied": "share"}], ids=str)
def test_meta_models_convert_without_allocating(settings):
    model = convert(Model(tied=True, device="meta"), **settings)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert isinstance(model.layers[0].fc1, TTLinear)
    assert model(TOKENS.to("meta")).shape == (3, 4, ROWS)
    assert {p.device.type for p in densify_(model).parameters()} == {"meta"}


def test_types_and_training_mode_are_kept():
    model = convert(Model().bfloat16().eval())
    for layer in tensor_trains(model).values():
        assert not layer.training
        assert {core.dtype for core in layer.cores} == {torch.bfloat16}
        assert {gate.dtype for gate in layer.gates} == {torch.float32}


def test_a_padding_row_that_is_not_zero_is_read_as_torch_reads_it(caplog):
    """The padding token may also end a text: torch's padding_idx only stops its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 12, padding_idx=2), nn.Linear(12, 12))
    bag = nn.EmbeddingBag(60, 12, padding_idx=2)  # which leaves out such entries
    with torch.no_grad():
        model[0].weight[2], bag.weight[2] = 5.0, 5.0
    tokens = torch.arange(60)
    wanted, of_bags = model(tokens), bag(tokens.view(6, 10))
    for hot in ({}, {"hot_rows": 4}):
        config = TTConfig(init="svd", tolerance=1e-5, target_modules="all-embedding", **hot)
        small = tensorize_(copy.deepcopy(model), config)
        torch.testing.assert_close(small(tokens), wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(densify_(small)(tokens), wanted, atol=1e-4, rtol=1e-4)
    assert "row 2 of a table of 60 is its padding_idx and not zero" in caplog.text
    small = comera.TTEmbeddingBag.from_embedding(bag, tolerance=1e-5)
    torch.testing.assert_close(small(tokens.view(6, 10)), of_bags, atol=1e-4, rtol=1e-4)
    assert small.padding_idx == 2


def test_densify_keeps_the_function():
    model = convert(Model())
    want = model(TOKENS)
    assert densify_(model) is model
    assert not tensor_trains(model)
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in Model().named_parameters()
    }
    torch.testing.assert_close(model(TOKENS), want)


def test_tied_weights_are_skipped_and_named(caplog):
    model = Model(tied=True)
    with caplog.at_level(logging.WARNING, "comera"):
        convert(model)
    assert list(tensor_trains(model)) == LINEAR[:-1]
    assert model.head.weight is model.embedding.weight
    assert "leaves embedding, head dense: they share a weight" in caplog.text


def test_tied_weights_are_untied():
    model = convert(Model(tied=True), tied="untie")
    assert list(tensor_trains(model)) == ["embedding", *LINEAR]
    assert not {*map(id, model.head.parameters())} & {*map(id, model.embedding.parameters())}


@pytest.mark.parametrize(
    "settings",
    [{}, {"hot_rows": 5}, {"hot_rows": 9, "hot_rank": 2}],
    ids=["cold", "hot", "hot rank"],
)
def test_tied_weights_share_one_set_of_cores(settings):
    model = Model(tied=True)
    bias = model.head.bias.detach().clone()
    convert(model, tied="share", **settings)
    assert isinstance(model.head, TiedTTLinear)
    trains = [name for name in tensor_trains(model) if name != "embedding.hot"]
    assert trains == ["embedding", *LINEAR[:-1]]
    x = torch.randn(2, 7, WIDTH)
    table = model.embedding.weight
    torch.testing.assert_close(model.head(x), x @ table.T + bias)
    torch.testing.assert_close(model.head.weight, table)
    assert (model.head.in_features, model.head.out_features) == (WIDTH, ROWS)
    model.head(x).square().sum().backward()  # no lookup: all of it comes from the logits
    assert all(p.grad.ne(0).any() for p in model.embedding.parameters())
    assert sum(p.numel() for p in model.parameters()) < sum(
        p.numel() for p in Model(tied=True).parameters()
    )


def test_ties_are_restored():
    model = convert(Model(tied=True), tied="share")
    want = model(TOKENS)
    densify_(model)
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model(TOKENS), want)


@pytest.mark.parametrize("padding", [(None, 3), (3, None), (3, 3)], ids=str)
def test_tied_tables_of_other_padding_rows_compute_the_same_when_dense(padding):
    tables = nn.ModuleList([nn.Embedding(60, 24, padding_idx=row) for row in padding])
    tables[1].weight = tables[0].weight
    convert(tables, tied="share")
    tokens = torch.arange(60)
    want = [table(tokens) for table in tables]
    densify_(tables)
    torch.testing.assert_close([table(tokens) for table in tables], want)
    assert (tables[0].weight is tables[1].weight) == (padding == (3, 3))


def test_a_tied_table_that_stays_dense_keeps_its_twin_dense(caplog):
    tables = nn.ModuleList([nn.Embedding(60, 24), nn.Embedding(60, 24, max_norm=1.0)])
    tables[1].weight = tables[0].weight
    assert not tensor_trains(convert(tables, tied="share"))
    assert "leaves 0, 1 dense: max_norm scales single rows" in caplog.text


@pytest.mark.parametrize("init", ["orthogonal", "normal", "svd"])
def test_layers_of_one_kind_may_be_tied_too(init):
    model = nn.ModuleDict({"a": nn.Linear(48, 48), "b": nn.Linear(48, 48)})
    model["b"].weight = model["a"].weight
    biases = [module.bias.detach().clone() for module in model.values()]
    convert(model, tied="share", init=init)
    assert model["a"].cores is model["b"].cores
    assert model["a"].gates is model["b"].gates
    x = torch.randn(3, 48)
    want = [module(x).detach() for module in model.values()]
    for module, bias in zip(model.values(), biases, strict=True):
        assert torch.equal(module.bias, bias)
    densify_(model)
    assert model["a"].weight is model["b"].weight
    torch.testing.assert_close([module(x) for module in model.values()], want)


def test_a_shared_model_saves_and_loads():
    model, twin = (convert(Model(tied=True), tied="share") for _ in range(2))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(TOKENS), model(TOKENS))
    copied = copy.deepcopy(model)
    assert copied.head.embedding is copied.embedding
    assert isinstance(copied.embedding, TensorTrainModule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": {"nothing": 3}}, "rank_pattern 'nothing' matches none"),
        ({"shape_pattern": {"no.*": [[4, 4], [4, 4]]}}, "shape_pattern 'no.\\*' matches none"),
        ({"target_modules": ["0", "typo"]}, "entry 'typo' matches no layer"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        tensorize_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), TTConfig(**settings))


def test_the_largest_rank_of_blocks_is_named(caplog):
    tensorize_(
        nn.ModuleList([nn.Linear(96, 64), nn.Linear(768, 768)]),
        TTConfig(rank=8, linear_format="btt"),
    )
    (rank,) = re.findall(
        r"leaves 0 dense: .*\(rank=(\d+), or more compression, would\)", caplog.text
    )
    for more, wanted in enumerate((1, 0)):
        caplog.clear()
        model = nn.ModuleList([nn.Linear(96, 64), nn.Linear(768, 768)])
        tensorize_(model, TTConfig(rank=int(rank) + more, linear_format="btt"))
        assert isinstance(model[0], comera.BTTLinear) == wanted


def test_layers_that_would_be_slower_than_dense_are_named_in_one_line(caplog):
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(2048, 2048), nn.Linear(2048, 2048)])
        model += [nn.Embedding(5000, 32), nn.EmbeddingBag(5000, 64), nn.Linear(2000, 2048)]
    tensorize_(model, TTConfig(rank=900, embedding_rank=8, tokens=512))
    (said,) = [r.message for r in caplog.records if "slower" in r.message]
    assert said.startswith("tensorize_: 5 of 5 layers are slower or larger than dense, 2 most: ")
    assert "x the time of nn.Embedding" in said
    assert "TTConfig(tokens=512)" in said
    assert said.endswith("see comera.plan(model)")
    caplog.clear()
    tensorize_(model[:0].append(nn.Linear(2048, 2048)), TTConfig(rank=900, tokens=512))
    assert "1 of 1 layers are slower or larger than dense, 0 most: 1." in caplog.text
    assert "(rank=" in caplog.text
    caplog.clear()
    tensorize_(nn.Sequential(nn.Linear(768, 768)), TTConfig(rank=16, tokens=4096))
    assert "slower" not in caplog.text


class Mixture(nn.Module):
    def __init__(self, **said):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(128, 128)) for _ in range(16))
        vars(self).update(said)


@pytest.mark.parametrize(
    ("said", "rows"),
    [({"top_k": 2}, 512), ({"config": SimpleNamespace(num_experts_per_tok=4)}, 1024), ({}, 4096)],
)
def test_experts_are_planned_with_the_rows_that_they_get(said, rows, caplog):
    model = nn.Sequential(nn.Linear(128, 128), Mixture(**said))
    config = TTConfig(rank=8, init="orthogonal")
    for planned in (comera.plan(model, config), comera.plan(tensorize_(model, config))):
        by_name = {name: kind.plan.layer for kind in planned.layers for name in kind.names}
        assert by_name["0"].tokens == 4096
        assert by_name["1.experts.3.0"].tokens == rows
        shown = [row[1] for row in planned.tables()[0].rows]
        assert shown[-1].endswith(f", {rows} rows" if said else "ranks 8 8 8 8 8")
    assert ("each expert of 1.experts with all 4096 rows" in caplog.text) == (not said)
    layers = {layer.name: layer for layer in comera.compression_report(model).layers}
    shares = layers["1.experts.3.0"].dense_operations / layers["0"].dense_operations
    assert shares == pytest.approx(rows / 4096)


@pytest.mark.gpu
def test_on_a_card_the_way_to_go_is_named_once(caplog):
    for _ in range(2):
        tensorize_(nn.Linear(64, 64, device="cuda"), TTConfig(rank=2, init="orthogonal"))
    assert caplog.text.count('torch.compile(mode="reduce-overhead")') == 1
