import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from comera.ops.kernels import launch
from comera.ops.kernels.launch import KernelError
from tests.kernels import emulation
from tests.kernels.thorough import ALL

needs_nvrtc = pytest.mark.skipif(
    find_spec("cuda") is None or find_spec("nvidia") is None,
    reason="no cuda-bindings or no nvidia-cuda-nvrtc, which compile kernels",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))
    return tmp_path / "kernels"


TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = 1.f; }'


def put(monkeypatch, text):
    monkeypatch.setattr(launch, "text", lambda file: text)


def builds():
    """Almost each kernel for Hopper, one of each family for Ampere and Blackwell: all take minutes.

    Left out are such as consist of parts that others have too. ``make kernels`` builds all
    of them for all three.
    """
    seldom = re.compile(r"contract_f32_f16|.*_relu.*|.*_silu_.*")
    families = {file.partition("_")[0]: file for file in reversed(launch.files())}
    everywhere = launch.files() if ALL else families.values()
    for file in launch.files():
        if ALL or not seldom.fullmatch(file):
            yield file, "sm_90"
        if file in everywhere:
            yield from ((file, "sm_80"), (file, "sm_100"))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("file", "arch"), list(builds()))
def test_every_kernel_compiles_without_spills(file, arch):
    code, log = launch.compile_source(launch.text(file), file, arch, "--ptxas-options=-v")
    assert code is not None, log
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    assert sorted(names) == sorted(launch.entries(file))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) == len(names)
    assert set(spills) == {("0", "0")}, log
    registers = [int(used) for used in re.findall(r"Used (\d+) registers", log)]
    # As many as leave room for as many blocks as their launch bounds say: of 128 threads four, but
    # three of wide bonds and of the gated one that keeps factors there.
    three = file.endswith("_wide") or file == "feed_forward_gated_tf32"
    assert max(registers) <= (168 if three else 128)


@needs_nvrtc
def test_machine_code_is_made_once_and_kept_by_source_and_architecture(cache, monkeypatch):
    put(monkeypatch, TINY)
    code = launch.cubin("tiny", "sm_90")
    assert code[:4] == b"\x7fELF"
    compiled = launch.compile_source
    monkeypatch.setattr(launch, "compile_source", lambda *args: pytest.fail("compiled again"))
    assert launch.cubin("tiny", "sm_90") == code
    monkeypatch.setattr(launch, "compile_source", compiled)
    launch.cubin("tiny", "sm_80")
    put(monkeypatch, TINY.replace("1.f", "2.f"))
    launch.cubin("tiny", "sm_90")
    assert sorted(path.name[:10] for path in cache.iterdir()) == [
        "tiny-sm_80", "tiny-sm_90", "tiny-sm_90",
    ]  # fmt: skip


@needs_nvrtc
def test_another_compiler_makes_its_own(cache, monkeypatch):
    put(monkeypatch, TINY)
    before = launch.cubin_path("tiny", "sm_90")
    monkeypatch.setattr(launch, "nvrtc_version", lambda: (99, 0))
    assert launch.cubin_path("tiny", "sm_90") != before


@needs_nvrtc
def test_what_does_not_compile_leaves_its_log_in_a_file(cache, monkeypatch):
    put(monkeypatch, TINY.replace("1.f", "nonsense"))
    with pytest.raises(KernelError, match=r"tiny\.cu does not compile for sm_90.* log is in") as no:
        launch.cubin("tiny", "sm_90")
    log = str(no.value).rsplit(" ", 1)[1]
    assert 'identifier "nonsense" is undefined' in Path(log).read_text()
    assert not list(cache.glob("*.cubin"))


def test_what_gxx_does_not_compile_is_said(emulated, cache):
    with pytest.raises(KernelError, match=r"g\+\+ does not compile wrong[\s\S]*nonsense"):
        emulation.emulated(
            '#include "emulation.h"\n__global__ void wrong() { nonsense(); }', ("wrong",)
        )


HANGS = {
    "some threads wait": "if (threadIdx.x < 3) __syncthreads(); else __syncwarp();",
    "a thread returned": "if (threadIdx.x < 3) return; __syncthreads();",
    "index out of range": "if (threadIdx.x == 3) __trap();",
    "wrote behind": "DYNAMIC_SHARED(char, memory); memory[threadIdx.x] = 0;",
}


@pytest.mark.parametrize("problem", HANGS)
def test_the_emulation_says_what_would_go_wrong_on_a_card(problem, emulated, monkeypatch):
    text = (
        '#include "emulation.h"\n'
        f'extern "C" __global__ void wrong() {{ {HANGS[problem]} }}'
    )  # fmt: skip
    monkeypatch.setattr(launch, "text", lambda file: text)
    monkeypatch.setattr(launch, "entries", lambda file: ["wrong"])
    with pytest.raises(KernelError, match=problem):
        emulation.emulate("wrong", "wrong", (1, 1, 1), 64, 0, None)
    with pytest.raises(KernelError, match="too large"):
        emulation.emulate("wrong", "wrong", (1, 1, 1), 2048, 0, None)
