"""Load machine code on a card and launch it on torch's stream, through CUDA's driver."""

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from comera.ops.kernels.nvrtc import KernelError, checked, cubin

PLENTY_OF_SHARED = 48 * 1024
"""Bytes of shared memory a block gets without asking."""

_thread = threading.local()


@functools.cache
def function(file: str, name: str, device: int) -> Any:
    """Return a kernel on a card, ready to launch; compiled and loaded at the first call.

    Raises:
        KernelError: If it cannot be compiled or loaded.
    """
    driver, what = _driver(), f"{name} of {file}.cu"
    with torch.cuda.device(device):
        _enter_context(device)
        kernel = checked(driver.cuLibraryGetKernel(_library(file, device), name.encode()), what)
        return checked(driver.cuKernelGetFunction(kernel), what)  # loads it now, not when launched


@functools.cache
def _library(file: str, device: int) -> Any:
    driver = _driver()
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
    driver, kernel = _driver(), function(file, name, device)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    with _allowing:  # or another thread might lower it meanwhile
        if shared > _allowed.get((file, name, device), PLENTY_OF_SHARED):
            answer = driver.cuFuncSetAttribute(kernel, attribute, shared)
            checked((*answer, None), f"{shared} bytes of shared memory for {name}")
            _allowed[file, name, device] = shared


def launch(
    file: str,
    name: str,
    device: int,
    grid: Sequence[int],
    threads: int,
    shared: int,
    arguments: ctypes.Array[ctypes.c_void_p],
) -> None:
    """Start a kernel on torch's current stream of the card."""
    driver = _driver()
    kernel = function(file, name, device)
    with torch.cuda.device(device):
        _enter_context(device)
        _allow_shared(file, name, device, shared)
        stream = torch.cuda.current_stream(device).cuda_stream
        answer = driver.cuLaunchKernel(
            kernel, *grid, threads, 1, 1, shared, stream, ctypes.addressof(arguments), 0
        )
    checked((*answer, None), name)


def version() -> int:
    """Return the newest CUDA version that the driver knows, 13000 for 13.0.

    Raises:
        RuntimeError: If there is no driver, or no cuda-bindings.
    """
    return checked(_driver().cuDriverGetVersion(), "the driver's version")


def _enter_context(device: int) -> None:
    """Enter a device's context: threads of autograd, which run backward passes, may have none."""
    if getattr(_thread, "entered", None) == device:
        return
    torch.cuda.init()
    driver = _driver()
    if not int(checked(driver.cuCtxGetCurrent(), "the current context")):
        card = checked(driver.cuDeviceGet(device), f"device {device}")
        context = checked(driver.cuDevicePrimaryCtxRetain(card), f"the context of {device}")
        checked((*driver.cuCtxSetCurrent(context), None), f"the context of {device}")
    _thread.entered = device


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as problem:
        raise KernelError(
            "cuda-bindings is not installed (pip install 'comera[cuda]')"
        ) from problem
    return driver
