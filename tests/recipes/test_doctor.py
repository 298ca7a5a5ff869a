import io
import sys
import warnings

import pytest
import torch
from rich.console import Console

from comera.ops.kernels import choose, launch
from comera.ops.kernels.launch import KernelError
from comera.recipes.cli import main
from comera.recipes.doctor import examine
from tests.kernels.test_build import needs_nvrtc


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path))


def printed():
    out = io.StringIO()
    examine(all=True, console=Console(file=out, width=240))
    return out.getvalue()


def row(text, *starts):
    """The cells of the line that begins with these."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")]
        if cells[: len(starts)] == list(starts):
            return cells[len(starts) :]
    raise AssertionError(f"no line begins with {starts} in\n{text}")


def ways(text, operator, dtype, device="cpu"):
    """The way taken, those refused before it and those after it; the first line of each."""
    found, start = "", []
    for line in text.partition(f"which way tensors on {device} go")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if line.startswith("│"):
            found, start = cells[0] or found, cells[2:] if cells[2] else start
            if found == operator and cells[1].rstrip(",") == dtype:
                return start
    raise AssertionError(f"no row of {operator} and {dtype} in\n{text}")


@pytest.mark.parametrize("mode", ["auto", "emulate", "ref"])
def test_without_a_card_it_says_which_way_operators_go(mode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choose, "mode", lambda: mode)
    text = printed()
    assert row(text, "CUDA devices") == ["none"]
    assert row(text, "COMERA_KERNELS") == [mode]
    assert (
        ways(text, "contract_cores", "float32")
        == {
            "auto": ["torch", "kernel: the tensors are on a CPU", "-"],
            "emulate": ["kernel", "-", "torch"],
            "ref": ["torch", "kernel: COMERA_KERNELS=ref", "-"],
        }[mode]
    )
    assert ways(text, "ttm_lookup", "float64")[0] == "distinct rows"
    assert ways(text, "rows_of_a_table", "float64") == ["lookup", "-", "every row for itself"]
    assert ways(text, "rows_of_a_table", "float64 in a captured step") == [
        "every row for itself",
        {
            "auto": "lookup: the tensors are on a CPU",
            "emulate": "lookup: kernels take float32, bfloat16 and float16, not float64",
            "ref": "lookup: COMERA_KERNELS=ref",
        }[mode],
        "-",
    ]


def test_with_a_card_it_says_why_a_kernel_does_not_run(monkeypatch):
    def fails(file, name, device):
        raise KernelError(f"{file}.cu does not compile")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    monkeypatch.setattr(launch, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(launch, "function", lambda file, name, device: None)
    monkeypatch.setattr(choose, "mode", lambda: "auto")
    choose._why_not_loaded.cache_clear()
    assert ways(printed(), "contract_cores", "bfloat16", "cuda") == ["kernel", "-", "torch"]
    monkeypatch.setattr(launch, "function", fails)
    choose._why_not_loaded.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is asked, and nothing falls back
        shown = ways(printed(), "contract_cores", "float32", "cuda")
    assert shown == ["torch", "kernel: contract_f32.cu does not compile", "-"]
    choose._why_not_loaded.cache_clear()


def test_without_cuda_python_it_says_what_to_install(monkeypatch):
    for name in ("cuda.bindings", "cuda.bindings.nvrtc", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    launch.nvrtc_version.cache_clear()
    text = printed()
    launch.nvrtc_version.cache_clear()
    told = ["cuda-bindings is not installed (pip install 'comera[cuda]')"]
    assert row(text, "NVRTC") == row(text, "CUDA driver") == told


@pytest.mark.slow
@needs_nvrtc
def test_it_lists_what_has_been_compiled():
    assert row(printed(), "ttm_lookup.cu")[1] == "-"
    launch.cubin("ttm_lookup", "sm_90")
    path = launch.cubin_path("ttm_lookup", "sm_80")
    path.with_name("ttm_lookup-sm_80-ofanothersource.cubin").write_bytes(b"")
    text = printed()
    assert row(text, "ttm_lookup.cu")[1] == "sm_90"
    assert row(text, "contract_f32.cu")[1] == "-"
    assert "2 files" in row(text, "compiled kernels")[0]


def test_the_command_answers_in_ten_lines_and_shows_the_rest_if_asked(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 0
    answer = capsys.readouterr().out
    assert len(answer.splitlines()) <= 10
    for part in ("device: cpu (no GPU", " do not run, the tensors are on a CPU", "measured"):
        assert part in answer
    assert main(["doctor", "--all"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(answer)
    assert "which way tensors" in said
