"""The way from an operator to ``cuLaunchKernel``, against a stand-in that records its calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.ops.kernels import contract_kernel, launch
from tests.kernels import emulation
from tests.kernels.test_build import needs_nvrtc

HERE = Path(__file__).parent

PRETEND = """
import contextlib, threading
import torch
from comera.ops.kernels import launch
from comera.ops.kernels import contract_kernel
from tests.kernels.test_contract import chains, make

torch.cuda.init = lambda: None
torch.cuda.device = lambda number: contextlib.nullcontext()
torch.cuda.get_device_capability = lambda number: (9, 0)
torch._C._cuda_getCurrentRawStream = lambda number: 0xABC0
card = torch.device("cuda", 0)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Runs Python code where the driver is a stand-in, and gives what that wrote down."""
    gxx = emulation.find_gxx()
    if gxx is None:
        pytest.skip("no g++, which the stand-in for the driver needs")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(
        [gxx, "-shared", "-fPIC", str(HERE / "stand_in_driver.cpp"), "-o",
         str(folder / "libcuda.so.1"), "-ldl"],
        check=True,
    )  # fmt: skip

    def run(code: str, arguments: str) -> list[str]:
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "STAND_IN_ARGUMENTS": arguments,
            "PYTHONPATH": str(HERE.parents[1]),
        }
        command = [sys.executable, "-c", PRETEND + code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert not done.returncode, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith(("CALL", "LAUNCH"))]

    return run


@needs_nvrtc
def test_launches_reach_the_driver_as_they_were_meant(stand_in):
    launch.cubin("contract_f32", "sm_90")  # NVRTC looks for a driver, so not beside the stand-in
    lines = stand_in(
        """
group, launch_it = chains(make("3+3", 2)), contract_kernel.launch
contract_kernel.launch = lambda file, name, device, *rest: launch_it(file, name, card, *rest)
for _ in range(2):
    left, right = contract_kernel.contract([group])
    grads = contract_kernel.contract_backward([group], [left, right])
""",
        "pp",
    )
    assert lines[:2] == ["CALL cuCtxSetCurrent", "CALL cuLibraryLoadData cubin"]
    walks = [contract_kernel.Walk((2, 3, 4), (2, 5, 6), right) for right in (False, True)]
    shared = [max(sizes) for sizes in zip(*(walk.shared for walk in walks), strict=True)]
    launches = [line.split() for line in lines if line.startswith("LAUNCH")]
    describe, last, first = "contract_describe", "contract_back_last_f32", "contract_back_first_f32"
    # Two layers of two factors: a block for 64 columns of each, which have 24.
    assert [line[1:6] for line in launches] == [
        [describe, "1,1,1", "256,1,1", "0", "0xabc0"],
        ["contract_f32", "4,1,1", "256,1,1", str(shared[0]), "0xabc0"],
        [describe, "1,1,1", "256,1,1", "0", "0xabc0"],
        [last, "4,1,1", "256,1,1", str(shared[1]), "0xabc0"],
        [first, "4,1,1", "256,1,1", str(shared[2]), "0xabc0"],
        ["contract_f32", "4,1,1", "256,1,1", str(shared[0]), "0xabc0"],
        [last, "4,1,1", "256,1,1", str(shared[1]), "0xabc0"],
        [first, "4,1,1", "256,1,1", str(shared[2]), "0xabc0"],
    ]
    assert launches[1][6:] == launches[5][6:]  # the same descriptors


@needs_nvrtc
def test_arguments_keep_their_kinds_and_a_new_thread_enters_the_context_once(stand_in):
    launch.cubin("contract_f32", "sm_90")
    lines = stand_in(
        """
def go():
    for number in (7, 8):
        launch.launch(
            "contract_f32", "contract_f32", card, (3, 2), 128, 50000, torch.zeros(3), None,
            number, 0.5,
        )
go()
other = threading.Thread(target=go)
other.start(), other.join()
launch.launch("contract_f32", "contract_f32", card, 0, 128, 0)  # no blocks: nothing to launch
for shared in (49999, 60000, 50000):
    launch.launch(
        "contract_f32", "contract_back_last_f32", card, 1, 128, shared, torch.zeros(3), None, 9, 0.5
    )
""",
        "ppif",
    )
    end = next(number for number, line in enumerate(lines) if "49999" in line)
    lines, more = lines[:end], lines[end:]
    launches = [line.split() for line in lines if line.startswith("LAUNCH")]
    for launched, number in zip(launches, [7, 8, 7, 8], strict=True):
        *start, pointer, nothing, whole, other = launched
        assert start == ["LAUNCH", "contract_f32", "3,2,1", "128,1,1", "50000", "0xabc0"]
        assert int(pointer, 16)
        assert (nothing, whole, other) == ("(nil)", str(number), "0.5")
    assert [line.split()[1] for line in lines if line not in map(" ".join, launches)] == [
        "cuCtxSetCurrent",
        "cuLibraryLoadData",
        "cuFuncSetAttribute",  # more shared memory than a block has without asking, once
        "cuCtxSetCurrent",
    ]
    assert "CALL cuFuncSetAttribute 8=50000" in lines
    # What has been allowed once stays so.
    assert [line for line in more if line.startswith("CALL")] == [
        "CALL cuFuncSetAttribute 8=49999", "CALL cuFuncSetAttribute 8=60000",
    ]  # fmt: skip
