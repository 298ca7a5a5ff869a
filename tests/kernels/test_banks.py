"""How the banks of shared memory serve kernels that multiply tiles there."""

import ctypes
import re
from collections import Counter

import pytest
import torch

from comera.ops.kernels import feed_forward_kernel, launch
from comera.ops.kernels.launch import KernelError
from tests.kernels import emulation
from tests.kernels.test_feed_forward import make
from tests.kernels.test_lookup import Table
from tests.kernels.thorough import some

KINDS = "loads", "stores", "copies", "matrices"
pytestmark = pytest.mark.usefixtures("tf32")


class Banks:
    """By kernel and kind of access: instructions of a warp, and steps beyond what they must."""

    def __init__(self):
        self.instructions, self.conflicts = Counter(), Counter()

    def add(self, name, counts):
        assert not counts[8], f"lanes of a warp do not do the same in {name}"
        for i, kind in enumerate(KINDS):
            self.instructions[name, kind] += counts[2 * i]
            self.conflicts[name, kind] += counts[2 * i + 1]

    def check(self):
        assert self.instructions.total()
        assert not +self.conflicts


@pytest.fixture
def banks(emulated, monkeypatch):
    found, emulate = Banks(), emulation.emulate

    def counted(file, name, *given):
        library = emulation.emulated(launch.text(file), tuple(launch.entries(file)))
        switch = ctypes.c_int.in_dll(library, "emulation_counts_banks")
        counts = (ctypes.c_int64 * 9).in_dll(library, "emulation_banks")
        counts[:], switch.value = [0] * 9, 1
        emulate(file, name, *given)
        switch.value = 0
        found.add(name, counts)

    monkeypatch.setattr(emulation, "emulate", counted)
    return found


@pytest.mark.parametrize(
    ("dtype", "name", "high"),
    [
        *((torch.bfloat16, "several blocks", high) for high in (16, 32, 64)),
        *((torch.bfloat16, "wide bonds", high) for high in (16, 32)),
        *((torch.float32, "several blocks", high) for high in (32, 64)),
        (torch.float32, "wide bonds", 32),
        *((torch.bfloat16, "gated, several blocks", high) for high in (16, 32, 64)),
        (torch.float32, "gated, several blocks", 32),
    ],
)
def test_no_lanes_of_a_feed_forward_wait_for_each_other(dtype, name, high, banks, monkeypatch):
    monkeypatch.setattr(feed_forward_kernel, "block_rows", lambda x: high)
    make(name, dtype).run()
    banks.check()


def test_no_lanes_of_a_lookup_wait_for_each_other(banks):
    Table("the paper's, by warps", dtype=torch.bfloat16, entries=200).run()
    banks.check()


BUGS = {
    "nothing left out": (r"(int left_out\(int ends\) {\n)", r"\1  return 0;\n"),
    "half as much left out of float": (r"2 \* \(ends - ends / 4\)", "(ends - ends / 4)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", some(BUGS))
def test_planted_bugs_are_caught(bug, plant, banks):
    mutant, count = re.subn(*BUGS[bug], launch.text("feed_forward_gated_tf32"))
    assert count == 1
    plant(mutant, "")
    make("gated, several blocks", torch.float32).run()
    with pytest.raises(AssertionError):
        banks.check()


@pytest.mark.slow
def test_what_goes_beyond_the_memory_is_caught(plant):
    mutant, count = re.subn("STAGES = 3;", "STAGES = 4;", launch.text("feed_forward_gated"))
    assert count == 1
    plant(mutant, "")
    with pytest.raises(KernelError, match="out of range"):
        make("gated, the first stage last").run()
