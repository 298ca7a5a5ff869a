"""Start a kernel where its tensors are: on their card, or in the emulation on a CPU."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.ops.kernels import driver

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
    """Launch a function of ``kernels/<file>.cu``.

    Args:
        file: Name of the source, without its suffix.
        name: Name of the function.
        device: The device of the tensors.
        grid: Blocks, in up to three dimensions; nothing is launched where there are none.
        threads: Threads of each block.
        shared: Bytes of dynamic shared memory.
        arguments: Tensors and None as pointers, whole numbers as ``int``, others as ``float``,
            structures by value.
    """
    sizes = [grid] if isinstance(grid, int) else list(grid)
    sizes += [1] * (3 - len(sizes))
    if not all(sizes):
        return
    values = [_value(argument) for argument in arguments]
    places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        driver.launch(file, name, number, sizes, threads, shared, places)
    else:
        from comera.ops.kernels import emulate  # for tests alone

        emulate.launch(file, name, sizes, threads, shared, places)


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor as kernels read it 16 bytes at a time: without gaps, from a multiple of 16.

    Few begin elsewhere, such as parts of one tensor; predicates do not ask, as they are also asked
    in graphs, where there are no addresses.
    """
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
