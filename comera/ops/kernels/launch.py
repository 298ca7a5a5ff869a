"""Compile kernels, and launch them on the GPU of their tensors.

NVRTC compiles each kernel once for a card's architecture, to machine code (a cubin) that is cached
on disk, as an older driver refuses the PTX of a newer NVRTC; it needs neither a driver nor a card.
A launch goes to torch's stream.
"""

import ctypes
import functools
import hashlib
import importlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comera.files import cache_folder, replacing, write_text

OPTIONS = ("--std=c++17",)


class KernelError(RuntimeError):
    """Raised if a kernel cannot be compiled, loaded or launched; it says which and why."""


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of the compiler; raise ``KernelError`` without it or cuda-bindings."""
    return checked(bindings("nvrtc").nvrtcVersion(), "NVRTC's version")


def cubin(file: str, arch: str) -> bytes:
    """Return the machine code of ``kernels/<file>.cu`` for an architecture such as ``"sm_90"``.

    Raises ``KernelError`` with the path of the compiler's log.
    """
    path = cubin_path(file, arch)
    if path.is_file():
        return path.read_bytes()
    code, problem = compile_source(text(file), f"{file}.cu", arch)
    if code is None:
        log = path.with_suffix(".log")
        write_text(log, problem)
        raise KernelError(f"{file}.cu does not compile for {arch}: the compiler's log is in {log}")
    with replacing(path) as temporary:  # several processes may come at once
        temporary.write_bytes(code)
    return code


def cubin_path(file: str, arch: str) -> Path:
    """Return the cache file of machine code: one for each source, options and compiler."""
    key = repr((text(file), arch, OPTIONS, nvrtc_version()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    return cubin_folder() / f"{file}-{arch}-{digest}.cubin"


def cubin_folder() -> Path:
    return cache_folder() / "kernels"


def compile_source(source: str, name: str, arch: str, *options: str) -> tuple[bytes | None, str]:
    """Compile a source; return the machine code, None on failure, and the compiler's log."""
    nvrtc = bindings("nvrtc")
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []), name)
    try:
        given = [f"--gpu-architecture={arch}", *OPTIONS, *options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(given), [o.encode() for o in given])
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program), name))
        checked(nvrtc.nvrtcGetProgramLog(program, log), name)
        said = log.rstrip(b"\0\n").decode(errors="replace")
        if int(result):
            return None, said or f"NVRTC gives no log, only {result.name}"
        code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program), name))
        checked(nvrtc.nvrtcGetCUBIN(program, code), name)
        return bytes(code), said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def bindings(name: str) -> Any:
    """Import ``nvrtc`` or ``driver`` of cuda-bindings; raise ``KernelError`` if not installed."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as problem:
        raise KernelError(
            "cuda-bindings is not installed (pip install 'comera[cuda]')"
        ) from problem


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """Return the result of a call of cuda-bindings; raise ``KernelError`` if it failed."""
    status, *values = answer
    if int(status):
        raise KernelError(f"{what}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


COMMON = "common.cuh"

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"\n')
_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')


def folder() -> Path:
    """Find the folder of the sources: beside the package if installed, above it in a checkout."""
    package = Path(__file__).parents[2]
    places = [package / "_kernels", package.parent / "kernels"]
    for place in places:
        if (place / COMMON).is_file():
            return place
    shown = " nor in ".join(map(str, places))
    raise FileNotFoundError(f"the sources of comera's kernels are neither in {shown}: reinstall it")


def files() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.cu"))


@functools.cache
def text(file: str) -> str:
    """Return a source with its includes pasted in, so that no compiler needs an include path."""
    source, pasted = (folder() / f"{file}.cu").read_text(), set[str]()
    while found := _INCLUDE.search(source):
        name = found[1]
        header = "" if name in pasted else (folder() / name).read_text()
        source = source.replace(found[0], header.replace("#pragma once\n", ""), 1)
        pasted.add(name)
    return source


def entries(file: str) -> list[str]:
    return _ENTRY.findall(text(file))


Argument = Tensor | ctypes.Structure | int | float | None


def launch(
    file: str,
    name: str,
    device: torch.device,
    grid: int | Sequence[int],
    threads: int,
    shared: int,
    *arguments: Argument,
) -> None:
    """Launch the function ``name`` of ``kernels/<file>.cu`` on the device of its tensors.

    ``grid`` are blocks, in up to three dimensions, and zero blocks launch nothing; ``shared`` are
    bytes of dynamic shared memory. Tensors and None are passed as pointers, structures by value.
    """
    sizes = [grid] if isinstance(grid, int) else list(grid)
    sizes += [1] * (3 - len(sizes))
    if not all(sizes):
        return
    values = [_value(argument) for argument in arguments]
    places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    start(file, name, device, sizes, threads, shared, places)


def dense(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor aligned to 16 bytes, as kernels read it."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _value(argument: Argument) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return argument
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)


MOST_SHARED = 96 * 1024  # bytes a block may have on every card that kernels run on
PLENTY_OF_SHARED = 48 * 1024  # bytes of shared memory a block gets without asking

_thread = threading.local()


@functools.cache
def function(file: str, name: str, device: int) -> Any:
    """Return a loaded kernel, compiled at the first call; raise ``KernelError`` on failure."""
    driver, what = bindings("driver"), f"{name} of {file}.cu"
    with torch.cuda.device(device):
        _enter_context(device)
        kernel = checked(driver.cuLibraryGetKernel(_library(file, device), name.encode()), what)
        return checked(driver.cuKernelGetFunction(kernel), what)  # loads it now, not when launched


@functools.cache
def _library(file: str, device: int) -> Any:
    driver = bindings("driver")
    major, minor = torch.cuda.get_device_capability(device)
    code = cubin(file, f"sm_{major}{minor}")
    answer = driver.cuLibraryLoadData(code, None, None, 0, None, None, 0)
    return checked(answer, f"{file}.cu, compiled for sm_{major}{minor}, does not load")


_allowing = threading.Lock()
_allowed: dict[tuple[str, str, int], int] = {}
"""Bytes of shared memory that a kernel on a card has been allowed, beyond what it has anyway."""


def _allow_shared(file: str, name: str, device: int, shared: int) -> None:
    if shared <= _allowed.get((file, name, device), PLENTY_OF_SHARED):
        return
    driver, kernel = bindings("driver"), function(file, name, device)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with _allowing:  # or another thread might lower it meanwhile
        if shared > _allowed.get((file, name, device), PLENTY_OF_SHARED):
            answer = driver.cuFuncSetAttribute(kernel, attribute, shared)
            checked((*answer, None), f"{shared} bytes of shared memory for {name}")
            _allowed[file, name, device] = shared


def start(
    file: str,
    name: str,
    on: torch.device,
    grid: Sequence[int],
    threads: int,
    shared: int,
    arguments: ctypes.Array[ctypes.c_void_p],
) -> None:
    """Start a kernel on torch's current stream of the card."""
    driver = bindings("driver")
    device = torch.cuda.current_device() if on.index is None else on.index
    kernel = function(file, name, device)
    with torch.cuda.device(device):
        _enter_context(device)
        _allow_shared(file, name, device, shared)
        stream = torch._C._cuda_getCurrentRawStream(device)
        answer = driver.cuLaunchKernel(
            kernel, *grid, threads, 1, 1, shared, stream, ctypes.addressof(arguments), 0
        )
    checked((*answer, None), name)


def driver_version() -> int:
    """Return the CUDA version of the driver, 13000 for 13.0; raise ``RuntimeError`` without one."""
    return checked(bindings("driver").cuDriverGetVersion(), "the driver's version")


def _enter_context(device: int) -> None:
    """Make a device's CUDA context current: threads of backward passes may have none."""
    if getattr(_thread, "entered", None) == device:
        return
    torch.cuda.init()
    driver = bindings("driver")
    if not int(checked(driver.cuCtxGetCurrent(), "the current context")):
        card = checked(driver.cuDeviceGet(device), f"device {device}")
        context = checked(driver.cuDevicePrimaryCtxRetain(card), f"the context of {device}")
        checked((*driver.cuCtxSetCurrent(context), None), f"the context of {device}")
    _thread.entered = device
