"""In a process of its own: the setting stays for as long as the process lives."""

import subprocess
import sys

import pytest

CODE = """
import resource, torch, comera
assert comera.reuse_freed_memory() and comera.reuse_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(12, 1 << 20).fill_(1)  # 48 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
assert faults() < 12288, faults()  # less than one buffer's pages for twenty buffers
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
