"""The way from an operator to ``cuLaunchKernel``, against a stand-in that records its calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.ops.kernels import emulate, nvrtc
from tests.kernels.test_build import needs_nvrtc

HERE = Path(__file__).parent

PRETEND = """
import contextlib, threading
import torch
from comera.ops.kernels import driver, launch
from comera.ops.kernels import contract_kernel
from tests.kernels.test_contract import chains, make

torch.cuda.init = lambda: None
torch.cuda.device = lambda number: contextlib.nullcontext()
torch.cuda.get_device_capability = lambda number: (9, 0)
class Stream: cuda_stream = 0xABC0
torch.cuda.current_stream = lambda number: Stream
card = torch.device("cuda", 0)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Runs Python code where the driver is a stand-in, and gives what that wrote down."""
    gxx = emulate.compiler()
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
    nvrtc.cubin("contract", "sm_90")  # NVRTC itself looks for a driver, so not beside the stand-in
    lines = stand_in(
        """
group, launch_it = chains(make("3+3", 2)), contract_kernel.launch
contract_kernel.launch = lambda file, name, device, *rest: launch_it(file, name, card, *rest)
left, right = contract_kernel.contract([group])
grads = contract_kernel.contract_backward([group], [left, right])
""",
        "sp",
    )
    assert lines[:2] == ["CALL cuCtxSetCurrent", "CALL cuLibraryLoadData cubin"]
    shared = 4 * (16 * 33 + 32 * 65)
    forward, halves, cores = [line.split() for line in lines[2:]]
    # Two layers; heads of 2 and 2; cores with bonds 2 5 6 | 6 5 2 inwards are six tiles of eight.
    assert forward[:6] == ["LAUNCH", "contract_f32", "8,1,1", "128,1,1", str(shared), "0xabc0"]
    assert halves[1:6] == ["contract_back_factors_f32", "8,1,1", "128,1,1", str(shared), "0xabc0"]
    assert cores[1:6] == ["contract_back_cores_f32", "12,1,1", "128,1,1", str(shared), "0xabc0"]
    assert [line[6] for line in (forward, halves, cores)] == ["1", "1", "1"]  # groups
    assert halves[7] == cores[7]  # scratch memory


@needs_nvrtc
def test_arguments_keep_their_kinds_and_a_new_thread_enters_the_context_once(stand_in):
    nvrtc.cubin("contract", "sm_90")
    lines = stand_in(
        """
def go():
    for number in (7, 8):
        launch.launch(
            "contract", "contract_bf16", card, (3, 2), 128, 50000, torch.zeros(3), None, number, 0.5
        )
go()
other = threading.Thread(target=go)
other.start(), other.join()
launch.launch("contract", "contract_bf16", card, 0, 128, 0)  # no blocks: nothing to launch
for shared in (49999, 60000, 50000):
    launch.launch("contract", "contract_f32", card, 1, 128, shared, torch.zeros(3), None, 9, 0.5)
""",
        "ppif",
    )
    end = next(number for number, line in enumerate(lines) if "49999" in line)
    lines, more = lines[:end], lines[end:]
    launches = [line.split() for line in lines if line.startswith("LAUNCH")]
    for launched, number in zip(launches, [7, 8, 7, 8], strict=True):
        *start, pointer, nothing, whole, other = launched
        assert start == ["LAUNCH", "contract_bf16", "3,2,1", "128,1,1", "50000", "0xabc0"]
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
