"""How tensors are kept, by name and by kind."""

import pytest
import torch

from comera.checkpoint.chain import CheckpointChain

from ..states import assert_equal
from .test_chain import adamw, make_model, train


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


def test_weights_beyond_the_range_of_float32_are_kept_exactly(tmp_path):
    large = torch.randn(30, 30, dtype=torch.float64) * 1e200
    with CheckpointChain(tmp_path) as chain:
        chain.save(1, {"large": large})
    assert torch.equal(CheckpointChain(tmp_path).load().model["large"], large)
