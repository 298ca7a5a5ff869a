"""State taken apart and put together, and how tensors are kept, by name and by kind."""

import math

import numpy as np
import pytest
import torch

from comera.checkpoint.chain import CheckpointChain
from comera.checkpoint.skeleton import DEEPEST_STATE, put_together, take_apart
from comera.checkpoint.streams import DamagedError
from tests.peers import peer

from ..states import assert_equal
from .test_chain import adamw, make_model, train


def round_trip(value, skip=()):
    tensors = {}

    def take(name, tensor):
        if name in skip:
            return None
        tensors[name] = tensor
        return name

    return put_together(take_apart(value, take), tensors), tensors


def test_plain_values_keep_their_types():
    value = {
        "numbers": [1, -2.5, True, None, 10**30, 1e-320],
        "text": "§",
        "pairs": (0.9, (1,)),
        "by number": {0: "a", 7: {"b": []}},
        "mixed": {0: 1, "x": 2},
        "empty": {},
        "tensor-like": {"tensor": "not one", "dict": {}},
        "dtype": torch.bfloat16,
    }
    again, tensors = round_trip(value)
    assert again == value
    *infinite, nan = round_trip([math.inf, -math.inf, math.nan])[0]  # JSON has none of them
    assert infinite == [math.inf, -math.inf]
    assert math.isnan(nan)
    assert list(map(type, again["numbers"])) == list(map(type, value["numbers"]))
    assert isinstance(again["pairs"], tuple)
    assert not tensors


def test_tensors_are_named_by_where_they_lie():
    value = {
        "model": {"a.weight": torch.ones(2)},
        "list": [torch.zeros(1)],
        "n": {3: torch.ones(1)},
    }
    again, tensors = round_trip(value)
    assert list(tensors) == ["model.a.weight", "list.0", "n.3"]
    assert again["model"]["a.weight"] is value["model"]["a.weight"]


def test_entries_can_be_left_out_of_dicts_only():
    again, _ = round_trip({"a": torch.ones(1), "b": torch.ones(1)}, skip=["a"])
    assert list(again) == ["b"]
    with pytest.raises(ValueError, match="x is a list, of which nothing can be skipped"):
        round_trip({"x": [torch.ones(1)]}, skip=["x.0"])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {"b": object()}}, r"a\.b is a object"),
        ({"a": [np.ones(2)]}, r"a\.0 is a ndarray"),
        ({"a": {1, 2}}, "a is a set"),
        ({"a": {(1, 2): 3}}, "a has keys that are neither"),
        ({"a": print}, "a is a builtin"),
    ],
)
def test_what_cannot_be_kept_is_named(value, told):
    with pytest.raises(TypeError, match=told):
        round_trip(value)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"tensor": "missing"},
        {"tensor": 3},
        {"float": "1e5; import os"},
        {"tuple": {"a": 1}},
        {"items": [[1, 2, 3]]},
        {"items": [[[], 1]]},
        {"dtype": "nn"},
        {"subclass": "os.system", "parts": {}, "context": {"tuple": ["true"]}},
        {"unknown": 1},
    ],
)
def test_a_skeleton_of_something_else_is_refused(skeleton):
    with pytest.raises(DamagedError, match="no "):
        put_together(skeleton, {})


def test_torchao_states_are_put_together_again():
    module = peer("torchao.optim.subclass_8bit")
    state = module.OptimState8bit.zeros((64, 64), signed=True, block_size=256, device="cpu")
    again, tensors = round_trip({"exp_avg": state})
    assert type(again["exp_avg"]) is type(state)
    assert torch.equal(again["exp_avg"].dequantize(), state.dequantize())
    assert all(name.startswith("exp_avg.") for name in tensors)


def test_a_torchao_state_without_its_parts_is_damaged():
    peer("torchao.optim.subclass_8bit")
    skeleton = {"subclass": "torchao.optim.subclass_8bit.OptimState8bit", "parts": {}}
    with pytest.raises(DamagedError, match="the parts make no torchao"):
        put_together({**skeleton, "context": {"tuple": [True, [64, 64]]}}, {})


def deep(levels, inside):
    for k in range(levels):
        inside = ({"a": inside}, [inside], (inside,), {1: inside})[k % 4]
    return inside


def test_what_is_nested_as_deep_as_can_be_comes_back_through_a_file(tmp_path):
    extra = deep(DEEPEST_STATE - 2, torch.ones(2))
    with CheckpointChain(tmp_path) as chain:
        chain.save(1, {}, extra={"x": extra})
        assert_equal(chain.load().extra["x"], extra)


def test_what_is_nested_deeper_is_refused_before_it_is_written(tmp_path):
    round_trip(deep(DEEPEST_STATE, 1))
    circle = {}
    circle["again"] = circle
    for extra in (deep(DEEPEST_STATE - 1, 1), deep(2000, 1), circle):
        with (
            CheckpointChain(tmp_path) as chain,
            pytest.raises(ValueError, match=r"^extra\.x\..*nested more than 64 deep"),
        ):
            chain.save(1, {}, extra={"x": extra})
    assert chain.steps() == []


def test_the_policy_decides_by_name(tmp_path):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    policy = {r"model\.1\..*": "exact", r"optimizer\.3\..*": "skip", r"optimizer\..*": "exact"}
    with CheckpointChain(tmp_path, policy=policy) as chain:
        chain.save(1, model, optimizer)
        train(model, optimizer, 2)
        chain.save(2, model, optimizer)
        saved = chain.load()
    assert torch.equal(saved.model["1.weight"], model[1].weight)
    assert not torch.equal(saved.model["0.weight"], model[0].weight)
    names = [name for name, _ in model.named_parameters()]
    for number, entries in saved.optimizer["state"].items():
        if names[number].startswith("3."):
            assert entries == {}
        else:
            assert_equal(entries, dict(optimizer.state_dict()["state"][number]))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(600).view(20, 30),
        torch.randn(20, 30, dtype=torch.complex64),
        torch.zeros(0, 3),
        torch.tensor(True),
    ],
    ids=["whole", "complex", "empty", "boolean"],
)
def test_what_cannot_be_approximated_is_kept_exactly_whatever_the_policy(tmp_path, value):
    with CheckpointChain(tmp_path, policy={r"model\..*": "lossy"}) as chain:
        for step in (1, 2):
            chain.save(step, {"weight": torch.randn(30, 30), "value": value})
    saved = CheckpointChain(tmp_path).load().model
    assert torch.equal(saved["value"], value)
    assert saved["weight"].shape == (30, 30)
