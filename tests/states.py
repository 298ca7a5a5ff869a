"""Nested states compared."""

import torch


def assert_equal(got, want):
    """Bit for bit, through nested containers."""
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    else:
        assert got == want or callable(want)
