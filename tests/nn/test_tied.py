"""What happens to weights that several modules hold."""

import copy
import logging

import pytest
import torch
from torch import nn

import comera
from comera.nn.convert import densify_, tensorize_
from comera.nn.embedding import TTEmbedding
from comera.nn.targets import TTConfig


def tied_model() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(200, 32), "head": nn.Linear(32, 200, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("tied", ["skip", "share"])
def test_a_tie_to_a_layer_that_is_no_target_is_kept(tied, caplog):
    model = tied_model()
    with caplog.at_level(logging.WARNING, "comera"):
        tensorize_(model, TTConfig(rank=4, target_modules="all-embedding", tied=tied))
    assert type(model["embed"]) is nn.Embedding
    assert model["head"].weight is model["embed"].weight
    assert "head.weight holds the same weight and is no target" in caplog.text


def test_a_tie_to_a_layer_that_is_no_target_can_be_cut():
    model = tied_model()
    tensorize_(model, TTConfig(rank=4, target_modules="all-embedding", tied="untie"))
    assert type(model["embed"]) is TTEmbedding
    assert type(model["head"]) is nn.Linear


def test_going_back_leaves_the_random_state_alone():
    model = nn.Sequential(nn.Embedding(200, 32), nn.Linear(32, 64))
    tensorize_(model, TTConfig(rank=4))
    before = torch.get_rng_state()
    densify_(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("settings", [{"hot_rows": 10}, {"hot_rows": 10, "hot_rank": 4}, {}])
def test_tables_that_share_their_rows_find_them_at_the_same_places(settings):
    model = nn.ModuleList([nn.Embedding(200, 32), nn.Embedding(200, 32), nn.EmbeddingBag(200, 32)])
    model[1].weight = model[2].weight = model[0].weight
    tensorize_(model, TTConfig(rank=4, tied="share", **settings))
    for which, table in enumerate(copy.deepcopy(model)):
        tables = copy.deepcopy(model)
        before = table.weight
        if settings:
            counts = torch.zeros(200).index_fill_(0, torch.arange(100, 110), 1)
            comera.update_hot_rows_(tables[which], counts)
        else:
            tables[which].keep_rows_at_(torch.randperm(200).int())
        assert not torch.equal(tables[0].weight, before)
        assert torch.equal(tables[1].weight, tables[0].weight)
        assert torch.equal(tables[2].weight, tables[0].weight)
        assert torch.equal(model[0].weight, before)  # of which these are copies
