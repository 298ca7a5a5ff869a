"""In a process of its own: the setting stays for as long as the process lives."""

import os
import subprocess
import sys

import pytest

CODE = """
import resource, torch, comera
assert comera.reuse_freed_memory() and comera.reuse_freed_memory()
def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.empty(18, 1 << 20).fill_(1)  # 72 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(20)  # until small pieces lie between buffers that are large enough
reused = faults(5)
assert reused < 18432, reused  # less than one buffer's pages for five buffers
assert not comera.reuse_freed_memory(False)
returned = faults(5)
assert returned > reused + 18000, (reused, returned)  # the pages of one at least anew
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_large_buffers_are_reused():
    subprocess.run([sys.executable, "-c", CODE], check=True)


CODE_OF_RETURN = """
import torch, comera
from comera.allocator import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
comera.reuse_freed_memory()
before = resident()
parts = [torch.ones(1 << 18) for _ in range(200)]  # 1 MiB each
del parts
kept = resident() - before
return_freed_memory()
assert kept > 150 << 20, kept
assert resident() - before < 50 << 20, resident() - before
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a call of glibc")
def test_freed_memory_is_returned_on_request():
    subprocess.run([sys.executable, "-c", CODE_OF_RETURN], check=True)


CODE_OF_STEP = """
import logging, sys, torch, comera
from comera import allocator
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
if len(sys.argv) > 1:
    comera.reuse_freed_memory(sys.argv[1] == "yes")
for _ in range(2):
    model = torch.nn.Linear(2, 1)
    step = comera.TrainStep(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters()))
print("reused" if allocator._made else "left")
"""


def _after_a_step(*said: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE_OF_STEP, *said],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_a_step_on_a_cpu_reuses_memory_and_says_so_once():
    said, reused = _after_a_step()
    assert "reuse_freed_memory(False)" in said
    assert reused == "reused"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "environment", "result"),
    [
        (["yes"], {}, "reused"),
        (["no"], {}, "left"),
        ([], {"COMERA_REUSE_MEMORY": "0"}, "left"),
        ([], {"MALLOC_TRIM_THRESHOLD_": "100000"}, "left"),
        ([], {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000"}, "left"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_what_somebody_said_counts(said, environment, result):
    assert _after_a_step(*said, **environment) == [result]
