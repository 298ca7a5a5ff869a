"""Compile kernels with NVRTC, each once for a card's architecture, and cache them on disk.

The result is machine code (a cubin): an older driver refuses the PTX of a newer NVRTC. NVRTC needs
neither a driver nor a card.
"""

import functools
import hashlib
import importlib
import re
from pathlib import Path
from typing import Any

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
