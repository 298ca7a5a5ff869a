"""Decide whether an operator's kernel runs, or torch operations in its place.

``COMERA_KERNELS=auto``, the default, runs kernels for tensors on a GPU if the kernels take their
dtype and the compiler is installed; ``ref`` runs none. Tests emulate them on a CPU.
"""

import functools
import os
import warnings

import torch
from torch import Tensor

MODES = ("auto", "ref")
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Dtypes that kernels take, and the suffixes of their functions' names."""

CONTRACT = {
    (torch.float32, torch.float32): "contract_f32",
    (torch.float32, torch.bfloat16): "contract_f32_bf16",
    (torch.float32, torch.float16): "contract_f32_f16",
    (torch.bfloat16, torch.bfloat16): "contract_bf16",
    (torch.float16, torch.float16): "contract_f16",
}
"""The sources that contract cores of one dtype to factors of another, without their suffix."""

OLDEST = (8, 0)  # compute capability from which kernels run

ON_CPU = "the tensors are on a CPU"
NO_CARD = "the tensors are not on a card"
DIFFERENTIATED = "this backward pass is itself differentiated"
REF = "COMERA_KERNELS=ref"
BAGS = "there are hot rows or bags"
WIDE = "the factors are not of 16 bits"
UNLIKE = "the batch and the factors are not all of bfloat16, or of float32"
EXACT = "products of float32 are exact here: tf32 is not allowed"
RECORDED = "torch.func, forward-mode differentiation or a tracer has to see all operations"
_EXPECTED = {ON_CPU, NO_CARD, DIFFERENTIATED, RECORDED, REF, BAGS, WIDE, UNLIKE, EXACT}
"""Refusals without a warning."""

SETTING = os.environ.get("COMERA_KERNELS", "auto")
"""``COMERA_KERNELS`` as it was when this module was imported; see :func:`mode`."""


class KernelWarning(UserWarning):
    """Warning that torch operations run in place of a kernel; given once for each reason."""


def mode() -> str:
    """Return ``COMERA_KERNELS`` as at import; raise ``ValueError`` if it is none of ``MODES``."""
    if SETTING not in MODES:
        raise ValueError(f"COMERA_KERNELS={SETTING!r} must be one of {', '.join(MODES)}")
    return SETTING


def kernel_refuses(file: str, like: Tensor) -> str | None:
    """Return why kernels of ``kernels/<file>.cu`` cannot run on tensors like this, or None."""
    if mode() == "ref" and (like.is_cuda or like.is_cpu):
        return REF
    if not like.is_cuda and not (like.is_cpu and mode() == "emulate"):
        return ON_CPU if like.is_cpu else NO_CARD
    if like.dtype not in DTYPES:
        *names, last = (str(known).removeprefix("torch.") for known in DTYPES)
        dtype = str(like.dtype).removeprefix("torch.")
        return f"kernels take {', '.join(names)} and {last}, not {dtype}"
    if like.is_cpu:
        return None
    number = like.device.index
    return _why_not_on(file, torch.cuda.current_device() if number is None else number)


def off_card(file: str, like: Tensor) -> str | None:
    """Return :func:`kernel_refuses` off a GPU; None on a GPU, where sizes are checked first."""
    return None if like.is_cuda else kernel_refuses(file, like)


def warn_of(what: str, reason: str) -> None:
    """Warn once that torch runs in place of the kernel ``what``, unless the reason is expected."""
    if reason in _EXPECTED or mode() != "auto" or (what, reason) in _said:
        return
    _said.add((what, reason))
    warnings.warn(
        f"comera runs {what} through torch operations, not its CUDA kernel: {reason}",
        KernelWarning,
        stacklevel=3,
    )


@functools.cache
def _why_not_loaded(file: str, device: int) -> str | None:
    """Compile and load the file at the first call; return why that fails, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return "compute capability {}.{} is below {}.{}".format(*capability, *OLDEST)
    from comera.ops.kernels import launch  # on a card alone

    try:
        launch.nvrtc_version()
        for name in launch.entries(file):
            launch.function(file, name, device)
    except (RuntimeError, OSError) as problem:  # cuda-bindings finds no library
        return str(problem)
    return None


def _why_not_on(file: str, device: int) -> str | None:
    return _why_not_loaded(file, device)


_said: set[tuple[str, str]] = set()

# As torch.compiler.assume_constant_result does, without importing dynamo, which warns of functions
# with a cache.
_why_not_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
warn_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
