import copy

import pytest
import torch
from torch import nn

import comera
from comera import TTConfig, TTEmbedding, TTLinear, compression_report, tensorize_
from comera.planning.printing import show_bytes


def linear(**settings) -> TTLinear:
    """12 to 20 features over cores (1, 3, 2), (2, 4, 3), (3, 4, 2), (2, 5, 1)."""
    return TTLinear(12, 20, shape=((3, 4), (4, 5)), rank=[2, 3, 2], **settings)


LINEAR_CORES = 6 + 24 + 24 + 10
LINEAR_GATES = 2 + 3 + 2


def embedding(**settings) -> TTEmbedding:
    """28 rows of 6, 4 of them dense; cores (1, 4, 2, 2), (2, 6, 3, 1) for the other 24."""
    return TTEmbedding(28, 6, shape=((4, 6), (2, 3)), rank=2, hot_rows=4, **settings)


TABLE_STORED = 16 + 36 + 2 + 4 * 6


def test_totals_equal_counts_by_hand():
    model = nn.Sequential(embedding(), nn.Linear(6, 12), linear())
    report = compression_report(model, tokens=7)
    table, matrix = report.layers
    assert (table.name, table.kind) == ("0", "TTEmbedding")
    assert (table.params, table.dense_params, table.live_params) == (TABLE_STORED, 28 * 6, 52)
    assert (matrix.name, matrix.kind) == ("2", "TTLinear")
    assert matrix.params == LINEAR_CORES + LINEAR_GATES
    assert (matrix.dense_params, matrix.live_params) == (240, LINEAR_CORES)
    assert matrix.bytes == 4 * matrix.params
    assert report.tt_params == TABLE_STORED + LINEAR_CORES + LINEAR_GATES
    assert report.tt_dense_params == 28 * 6 + 240
    dense_linear, bias = 6 * 12 + 12, 20
    assert report.params == report.tt_params + dense_linear + bias
    assert report.dense_params == 28 * 6 + dense_linear + 240 + bias
    assert report.bytes == 4 * report.params
    assert report.compression == report.dense_params / report.params
    assert report.layer_compression == report.tt_dense_params / report.tt_params
    assert f"{report.params:,} parameters" in report.summary()


def test_dense_total_is_that_of_the_densified_model():
    model = nn.Sequential(embedding(), linear(bias=False))
    dense = compression_report(model).dense_params
    comera.densify_(model)
    assert sum(param.numel() for param in model.parameters()) == dense


@pytest.mark.parametrize("rank", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frozen_bytes_are_those_of_the_contracted_model(rank, dtype):
    """At rank 40 two factors of a linear layer, and of a table, would hold more than the weight."""
    model = nn.Sequential(
        TTEmbedding(60, 24, rank=rank, hot_rows=4), nn.Linear(24, 36),
        TTLinear(36, 48, rank=rank), TTLinear(48, 36, rank=rank, bias=False),
        comera.BTTLinear(36, 36, rank=2),
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        model[2].gates[2][0] = 0.0
    report = compression_report(model)
    dense = comera.densify_(copy.deepcopy(model))
    assert report.dense_bytes == sum(param.nbytes for param in dense.parameters())
    comera.to_plain_(model)
    assert report.frozen_bytes == sum(param.nbytes for param in model.parameters())
    frozen, dense = show_bytes(report.frozen_bytes), show_bytes(report.dense_bytes)
    assert f"{frozen} or more frozen, {dense} dense" in report.summary()


def test_a_layer_of_hot_rows_in_a_basis_is_frozen_as_counted():
    model = nn.Sequential(TTEmbedding(600, 32, rank=2, hot_rows=50, hot_rank=3))
    report = compression_report(model)
    comera.to_plain_(model)
    assert report.frozen_bytes == sum(param.nbytes for param in model.parameters())


def test_bytes_of_cores_in_half_and_gates_in_full_precision():
    report = compression_report(linear(dtype=torch.bfloat16))
    assert report.layers[0].bytes == 2 * LINEAR_CORES + 4 * LINEAR_GATES
    assert report.bytes == report.layers[0].bytes + 2 * 20


def test_costs_are_those_of_the_plan_at_the_live_ranks():
    table, matrix = embedding(), linear()
    with torch.no_grad():
        matrix.gates[1][0] = 0
    ours, theirs = compression_report(nn.ModuleList([table, matrix]), tokens=50).layers
    comera.truncate_(matrix)
    for found, layer in ((theirs, matrix), (ours, table)):
        plan = comera.plan(layer, tokens=50)
        assert (found.operations, found.saved_bytes) == (
            plan.chosen.operations,
            plan.chosen.saved_bytes,
        )
        assert (found.dense_operations, found.dense_saved_bytes) == (
            plan.dense.operations,
            plan.dense.saved_bytes,
        )


def test_live_ranks_after_pruning_gates():
    layer = linear()
    with torch.no_grad():
        layer.gates[0][1] = 0
        layer.gates[1][:2] = 0.005
    before = compression_report(layer).layers[0]
    assert (before.start_ranks, before.ranks) == ((2, 3, 2), (1, 1, 2))
    assert before.live_params == 3 + 4 + 8 + 10
    assert before.params == LINEAR_CORES + LINEAR_GATES
    comera.truncate_(layer)
    after = compression_report(layer).layers[0]
    assert (after.start_ranks, after.ranks) == ((2, 3, 2), (1, 1, 2))
    assert after.params == before.live_params + 4
    assert "2 3 2 -> 1 1 2" in str(compression_report(layer))


def test_a_layer_of_rank_zero_is_reported_as_empty():
    layer = linear(bias=False)
    with torch.no_grad():
        layer.gates[1].zero_()
    comera.truncate_(layer, min_rank=0)
    report = compression_report(layer)
    assert (report.layers[0].ranks, report.layers[0].params) == ((0, 0, 0), 0)
    assert (report.layers[0].live_params, report.dense_params) == (0, 240)
    assert report.layers[0].operations == 0
    assert str(report)


def test_head_tied_to_an_embedding_is_counted_once():
    table, head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    dense = sum(param.numel() for param in model.parameters())
    tensorize_(model, TTConfig(rank=4, tied="share"))
    report = compression_report(model)
    assert len(report.layers) == 1
    assert report.params == sum(param.numel() for param in model.parameters())
    assert report.tt_params == report.params - 1000
    assert (report.tt_dense_params, report.dense_params) == (64_000, dense)


@pytest.mark.parametrize("kind", ["tables", "matrices"])
def test_layers_of_one_kind_that_share_cores_are_counted_once(kind):
    make = {"tables": lambda: nn.Embedding(1000, 64), "matrices": lambda: nn.Linear(256, 256)}[kind]
    one, other = make(), make()
    other.weight = one.weight
    model = nn.Sequential(one, other)
    dense = sum(param.numel() for param in model.parameters())
    tensorize_(model, TTConfig(rank=4, tied="share"))
    report = compression_report(model)
    biases = 512 if kind == "matrices" else 0
    assert report.params == sum(param.numel() for param in model.parameters())
    assert report.dense_params == dense
    assert report.tt_params == report.params - biases


def test_a_module_used_twice_is_one_layer():
    layer = linear()
    report = compression_report(nn.Sequential(layer, nn.Linear(20, 12), layer))
    assert [found.name for found in report.layers] == ["0"]


def test_model_on_meta_gives_the_same_numbers():
    with torch.device("meta"):
        planned = compression_report(nn.Sequential(embedding(), linear()))
    made = compression_report(nn.Sequential(embedding(), linear()))
    assert planned.layers == made.layers
    assert str(planned) == str(made)


def test_a_model_without_tensor_trains_is_reported_as_dense():
    report = compression_report(nn.Linear(3, 5))
    assert (report.layers, report.params, report.dense_params) == ([], 20, 20)
    assert report.compression == report.layer_compression == 1
    assert len(report.to_pandas()) == 0
    assert "<table>" in report._repr_html_()
    assert compression_report(nn.Identity()).compression == 0


def test_to_pandas_has_one_row_a_layer():
    report = compression_report(nn.Sequential(embedding(), linear()))
    frame = report.to_pandas()
    assert frame["name"].tolist() == ["0", "1"]
    assert frame["params"].sum() == report.tt_params
    assert frame["dense_params"].sum() == report.tt_dense_params
    assert frame["ranks"].tolist() == [(2,), (2, 3, 2)]


def test_html_escapes_names():
    model = nn.Module()
    model.add_module("<script>alert(1)</script>", linear())
    text = compression_report(model)._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert text.count("<tr>") == 2


@pytest.mark.parametrize("columns", [80, 200])
def test_text_fits_the_terminal_and_names_every_layer(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    inner = nn.Module()
    inner.add_module("a_projection", linear())
    text = str(compression_report(nn.ModuleDict({"encoder": nn.ModuleList([inner, linear()])})))
    assert max(map(len, text.splitlines())) <= columns
    if columns == 80:
        assert "(… is encoder.)" in text
        assert "│ …0.a_projection │" in text
        assert "a wider terminal shows too: type, " in text
    else:
        assert "│ encoder.0.a_projection │ TTLinear │ 3x4 | 4x5 │ 2 3 2 " in text
        assert "wider" not in text
    assert "(model)" in str(compression_report(linear()))


@pytest.mark.parametrize("tokens", [0, -3])
def test_tokens_below_one_raise(tokens):
    with pytest.raises(ValueError, match=f"tokens={tokens} must be at least 1"):
        compression_report(linear(), tokens=tokens)
