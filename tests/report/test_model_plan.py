import copy

import pytest
import torch
from torch import nn

import comera
from comera.planning.planner import Plan
from comera.report.model_plan import ModelPlan


def model():
    made = nn.Sequential(
        nn.Embedding(5000, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1000)
    )
    return comera.tensorize_(made, comera.TTConfig(rank=8))


def test_a_layer_gets_a_table_of_its_contractions():
    plan = comera.plan(model()[1], tokens=4096)
    assert isinstance(plan, Plan)
    assert plan.chosen.name == "factorized"
    text = str(plan)
    assert "linear 256 -> 256" in text
    assert "against nn.Linear" in text
    assert "<table>" in plan._repr_html_()


def test_a_model_gets_one_line_for_layers_that_are_alike():
    plan = comera.plan(model(), tokens=512)
    assert isinstance(plan, ModelPlan)
    assert [layer.names for layer in plan.layers] == [("0",), ("1", "2"), ("3",)]
    assert plan.seconds == pytest.approx(
        sum(len(one.names) * one.plan.chosen.seconds for one in plan.layers)
    )
    text = str(plan)
    assert "1 and 1 more" in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert "<td>1 and 1 more</td>" in plan._repr_html_()


def test_kinds_that_read_alike_share_a_row():
    layers = [nn.Linear(256, 256, bias=k > 0) for k in range(3)]
    plan = comera.plan(comera.tensorize_(nn.Sequential(*layers), comera.TTConfig(rank=8)))
    assert [layer.names for layer in plan.layers] == [("0",), ("1", "2")]
    times, kept = plan.tables()
    (name, shape, *_), (_, _, _, total, dense) = *times.rows, kept.rows[0]
    assert (name, shape.split(",")[0]) == ("0 and 2 more", "linear 256 -> 256")
    assert (total, dense) == kept.rows[1][3:]


def test_a_plan_of_an_embedding_alone_names_its_size():
    assert "embedding 5000 x 256" in str(comera.plan(model()[0], tokens=64))


def test_a_layer_that_loses_is_told_what_would_win():
    layer = comera.TTLinear(512, 512, rank=480)
    plan = comera.plan(nn.Sequential(layer), tokens=512)
    assert plan.layers[0].plan.time_ratio > 1
    assert plan.layers[0].suggestion.startswith("rank=")
    assert "instead" in str(plan)


def test_live_precision_and_padding_reach_the_planner():
    layer = comera.TTLinear(250, 99, rank=4, dtype=torch.bfloat16)
    plan = comera.plan(layer, tokens=10)
    assert plan.dtype == "bfloat16"
    assert "250 -> 99" in str(plan.layer)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="Linear has no tensor-train layer: call comera"):
        comera.plan(nn.Linear(3, 3))
    for tokens in (True, 1.5, "12"):
        with pytest.raises(ValueError, match=f"tokens={tokens!r} must be a whole number"):
            comera.plan(model()[1], tokens=tokens)
    with pytest.raises(ValueError, match="tokens=0 must be at least 1"):
        comera.plan(model(), tokens=0)


def test_the_table_is_shown_whole():
    times, kept = str(comera.plan(model(), tokens=512)).split("kept for the backward pass")
    assert "peak" in times.splitlines()[2]
    for table in (times.splitlines()[1:-1], kept.splitlines()[1:-1]):
        assert len({len(line) for line in table}) == 1


def test_a_dense_model_is_planned_before_it_is_converted():
    dense = nn.Sequential(
        nn.Embedding(5000, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1000)
    )
    dense.register_buffer("counts", torch.zeros(3))
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    config = comera.TTConfig(rank=8)
    plan = comera.plan(dense, config, tokens=512)
    made = comera.plan(comera.tensorize_(copy.deepcopy(dense), config), tokens=512)
    assert plan.tables() == made.tables()
    assert plan.seconds == made.seconds
    want = comera.compression_report(comera.tensorize_(copy.deepcopy(dense), config), tokens=512)
    assert plan.report.layers == want.layers
    assert want.summary() in str(plan)
    assert [type(layer) for layer in dense] == [nn.Embedding, *[nn.Linear] * 3]
    assert all(torch.equal(value, before[key]) for key, value in dense.state_dict().items())


def test_a_plan_of_what_would_be_keeps_ties_and_takes_a_single_layer():
    dense = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 500, bias=False))
    dense[2].weight = dense[0].weight
    names = {one.names for one in comera.plan(dense, comera.TTConfig(rank=4)).layers}
    assert names == {("1",)}
    assert isinstance(comera.plan(nn.Linear(64, 64), comera.TTConfig(rank=4)), Plan)


def test_a_configuration_that_is_none_or_converts_nothing_is_named():
    with pytest.raises(TypeError, match=r"config=64 must be a comera.TTConfig; rows are said as"):
        comera.plan(model(), 64)
    with pytest.raises(ValueError, match="would leave every layer dense"):
        comera.plan(nn.Sequential(nn.Linear(4, 4)), comera.TTConfig(rank=4))
