"""Run kernels on a CPU: the same sources, compiled by g++ with ``kernels/emulation.h``.

For tests, not for speed: threads of a block are run one after the other.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import threading
from collections.abc import Sequence

from comera.files import cache_folder, replacing
from comera.ops.kernels.nvrtc import EMULATION, KernelError, entries, folder, text

ASCENDING, DESCENDING = 0, 1
order = ASCENDING
"""Order in which the threads of a block run between two barriers; above 1 a shuffle's seed."""

_PROBLEMS = {
    1: "the grid or block is empty or too large",
    2: "some threads wait at a barrier that others never reach",
    3: "a thread returned and left others waiting at a barrier",
    4: "a thread met an index out of range, copied beyond its shared memory, or read several "
    "numbers at once from no multiple of their size",
    5: "a thread wrote behind the shared memory of its block",
}
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas")
_alone = threading.Lock()


def compiler() -> str | None:
    """Return the path of g++, or None."""
    return shutil.which("g++")


def launch(
    file: str,
    name: str,
    grid: Sequence[int],
    threads: int,
    shared: int,
    arguments: ctypes.Array[ctypes.c_void_p],
) -> None:
    """Run a kernel to its end.

    Raises:
        KernelError: If it cannot be compiled, or if it would hang or fail on a card.
    """
    run = getattr(library(text(file), tuple(entries(file))), f"emulate_{name}")
    three = ctypes.c_uint * 3
    with _alone:
        problem = run(
            three(*grid), three(threads, 1, 1), ctypes.c_size_t(shared), ctypes.c_uint(order),
            arguments,
        )  # fmt: skip
    if problem:
        raise KernelError(f"{name} of {file}.cu: {_PROBLEMS[problem]}")


@functools.cache
def library(source: str, names: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a source for the CPU and return its functions, callable."""
    header = (folder() / EMULATION).read_text()
    exports = "\n".join(f"EXPORT({name})" for name in names)
    whole = f"#define COMERA_EMULATION\n{source}\n{exports}\n"
    digest = hashlib.sha256("\n".join([whole, header, *_FLAGS]).encode()).hexdigest()[:20]
    path = cache_folder() / "kernels" / f"emulated-{digest}.so"
    if not path.is_file():
        gxx = compiler()
        if gxx is None:
            raise KernelError("COMERA_KERNELS=emulate needs g++, which is not installed")
        with replacing(path) as temporary:
            command = [gxx, *_FLAGS, f"-I{folder()}", "-xc++", "-", "-o", str(temporary)]
            done = subprocess.run(command, input=whole, capture_output=True, text=True)
            if done.returncode:
                raise KernelError(f"g++ does not compile {names[0]} and others:\n{done.stderr}")
    return ctypes.CDLL(str(path))
