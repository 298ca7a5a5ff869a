"""In a process of its own: the setting stays for as long as the process lives."""

import io
import logging
import resource
import sys
from pathlib import Path

import pytest
import torch

import comera
from comera import allocator
from comera.recipes import cli, run
from tests.processes import in_a_process


def _faults(times: int) -> int:
    """Fill so many new buffers of 72 MiB; returns how many pages that brought in."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(18, 1 << 20).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _reuse() -> tuple[int, int]:
    """Count the pages of five buffers while memory is reused, and when it no longer is."""
    assert comera.reuse_freed_memory()
    assert comera.reuse_freed_memory()
    _faults(20)  # until small pieces lie between buffers that are large enough
    reused = _faults(5)
    assert not comera.reuse_freed_memory(False)
    return reused, _faults(5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_large_buffers_are_reused():
    reused, returned = in_a_process(_reuse)
    assert reused < 18432  # less than one buffer's pages for five buffers
    assert returned > reused + 18000  # the pages of one at least anew


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _return() -> tuple[int, int]:
    """Free 200 MiB in parts of 1 MiB; returns the bytes that stay, before and after the request."""
    comera.reuse_freed_memory()
    before = _resident()
    parts = [torch.ones(1 << 18) for _ in range(200)]
    del parts
    kept = _resident() - before
    allocator.return_freed_memory()
    return kept, _resident() - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a call of glibc")
def test_freed_memory_is_returned_on_request():
    kept, left = in_a_process(_return)
    assert kept > 150 << 20
    assert left < 50 << 20


def _step(*said: bool) -> tuple[str, bool]:
    """Make two steps, after somebody has said what is to happen; what was printed, and made."""
    printed = io.StringIO()
    logging.basicConfig(stream=printed, format="%(message)s", level=logging.INFO)
    for reuse in said:
        comera.reuse_freed_memory(reuse)
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters())
        comera.TrainStep(model, lambda model, x: model(x).mean(), optimizer)
    return printed.getvalue(), allocator._enabled


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_a_step_on_a_cpu_reuses_memory_and_says_so_once():
    said, reused = in_a_process(_step)
    assert said.count("reuse_freed_memory(False)") == 1
    assert reused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "environment", "reused"),
    [
        ([True], {}, True),
        ([False], {}, False),
        ([], {"COMERA_REUSE_MEMORY": "0"}, False),
        ([], {"MALLOC_TRIM_THRESHOLD_": "100000"}, False),
        ([], {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000"}, False),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_what_somebody_said_counts(said, environment, reused):
    assert in_a_process(_step, *said, **environment) == ("", reused)


def _train() -> tuple[int, bool]:
    """Return the exit status of a run that trains nothing, and whether memory is reused."""
    run.run = lambda settings, console: ["trained"]
    return cli.main(["train", "quickstart"]), allocator._enabled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "reused"),
    [({}, True), ({"COMERA_REUSE_MEMORY": "0"}, False), ({"MALLOC_MMAP_THRESHOLD_": "9"}, False)],
)
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_the_environment_counts_for_the_command_too(environment, reused):
    assert in_a_process(_train, **environment) == (0, reused)
