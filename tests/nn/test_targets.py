"""What is said of layers that are not converted."""

import copy
import logging
import re

import pytest
import torch
from torch import nn

import comera


def test_other_kinds_of_layers_are_named_where_they_are_much_of_the_model(caplog):
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.GRU(8, 8), nn.Linear(64, 64)
    )
    with caplog.at_level(logging.WARNING, "comera"):
        comera.tensorize_(model, comera.TTConfig(rank=4))
    assert "leaves 2 Conv2d, 1 GRU dense, with 90 % of all parameters" in caplog.text
    caplog.clear()
    comera.tensorize_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(64, 64)), comera.TTConfig(rank=4))
    assert "Conv2d" not in caplog.text


class Composite(nn.Module):
    """Layers, a table of its own, and one row that is no matrix."""

    def __init__(self):
        super().__init__()
        self.fc, self.conv = nn.Linear(64, 64), nn.Conv2d(64, 64, 1)
        self.bias_table = nn.Parameter(torch.zeros(90, 64))
        self.first = nn.Parameter(torch.zeros(1, 1, 64))


def test_of_modules_with_layers_inside_only_their_own_matrices_are_named(caplog):
    model = nn.Sequential(Composite(), Composite(), nn.GRU(64, 64))
    comera.tensorize_(model, comera.TTConfig(rank=4, exclude_modules=["conv"], init="normal"))
    assert re.search(
        r"tensorize_ leaves 2 tests\.\S*Composite.bias_table, 1 GRU dense", caplog.text
    )


def test_what_a_conversion_says_is_said_once(caplog):
    model = nn.Sequential(
        nn.GRU(64, 64), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    )
    config, caught = comera.TTConfig(rank=2, init="normal"), []
    with caplog.at_level(logging.INFO, "comera"):
        comera.plan(model, config, tokens=4096)
        said = len(caplog.records)
        comera.tensorize_(copy.deepcopy(model), config)
        assert [said, len(caplog.records)] == [3, 3]
        assert "hidden width" in caplog.text
        logging.getLogger("comera").addFilter(caught.append)  # whoever gathers it misses nothing
        try:
            comera.tensorize_(model, config)
        finally:
            logging.getLogger("comera").removeFilter(caught.append)
    assert len(caught) == 3


class Scaled(nn.Embedding):
    """A subclass, of which nothing is known."""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(Scaled(4000, 64), nn.Linear(64, 64)), "leaves 0 dense: a subclass .* 98 %"),
        (nn.Sequential(Scaled(5, 64), nn.Linear(64, 64)), r"call comera.register_layer for it\)$"),
        (nn.TransformerDecoderLayer(64, 2, 128), "self_attn.out_proj, .*which is no layer.* 66 %"),
    ],
)
def test_the_share_of_what_stays_dense_is_said_where_it_is_large(model, said, caplog):
    comera.tensorize_(model, comera.TTConfig(rank=2, init="orthogonal", tokens=1 << 16))
    assert re.search(said, caplog.records[0].message)


def test_one_line_says_that_nothing_is_converted(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Embedding(40, 64))
    comera.tensorize_(model, comera.TTConfig(rank=4000))
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("tensorize_ converts nothing: it leaves 0, 1, 2 dense: as a ")


def test_layers_that_are_tensor_trains_already_are_named():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    comera.tensorize_(model, comera.TTConfig(rank=4))
    with pytest.raises(ValueError, match="none at all, and 0, 1 are tensor trains already"):
        comera.tensorize_(model, comera.TTConfig(rank=4))


@pytest.mark.parametrize(
    "call",
    [
        lambda: comera.tensorize_(nn.Linear(64, 64), {"rank": 4}),
        lambda: comera.TTLinear.from_linear(nn.Conv2d(3, 4, 2), rank=3),
        lambda: comera.TTLinear.from_linear(nn.Embedding(30, 4), rank=3),
        lambda: comera.TTEmbedding.from_embedding(nn.Linear(30, 4), rank=3),
    ],
)
def test_things_of_another_type_are_shown(call):
    with pytest.raises(TypeError, match=r"rank.*: 4|Conv2d\(3, 4|Embedding\(30, 4|Linear\(in_feat"):
        call()


def test_layers_of_fewer_entries_than_min_size_stay_dense():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63))
    comera.tensorize_(model, comera.TTConfig(rank=2, min_size=64 * 64))
    assert [type(layer) for layer in model] == [comera.TTLinear, nn.Linear]
