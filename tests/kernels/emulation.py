"""CUDA kernels on a CPU: the same sources, compiled by g++ with ``kernels/emulation.h``.

Threads of a block run one after the other, in ``thread_order``.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import threading
from collections.abc import Sequence

from comera.files import cache_folder, replacing
from comera.ops.kernels import choose, launch
from comera.ops.kernels.launch import KernelError

ASCENDING, DESCENDING = 0, 1
thread_order = ASCENDING
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


def emulate(
    file: str,
    name: str,
    grid: Sequence[int],
    threads: int,
    shared: int,
    arguments: ctypes.Array[ctypes.c_void_p],
) -> None:
    """Run a kernel on a CPU; raise ``KernelError`` where it would hang or fail on a card."""
    run = getattr(emulated(launch.text(file), tuple(launch.entries(file))), f"emulate_{name}")
    three = ctypes.c_uint * 3
    with _alone:
        problem = run(
            three(*grid), three(threads, 1, 1), ctypes.c_size_t(shared),
            ctypes.c_uint(thread_order), arguments,
        )  # fmt: skip
    if problem:
        raise KernelError(f"{name} of {file}.cu: {_PROBLEMS[problem]}")


@functools.cache
def emulated(source: str, names: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a source for the CPU and return it as a loaded library."""
    header = (launch.folder() / "emulation.h").read_text()
    exports = "\n".join(f"EXPORT({name})" for name in names)
    whole = f"#define COMERA_EMULATION\n{source}\n{exports}\n"
    digest = hashlib.sha256("\n".join([whole, header, *_FLAGS]).encode()).hexdigest()[:20]
    path = cache_folder() / "kernels" / f"emulated-{digest}.so"
    if not path.is_file():
        gxx = find_gxx()
        assert gxx is not None, "the emulation of CUDA needs g++"
        with replacing(path) as temporary:
            command = [gxx, *_FLAGS, f"-I{launch.folder()}", "-xc++", "-", "-o", str(temporary)]
            done = subprocess.run(command, input=whole, capture_output=True, text=True)
            if done.returncode:
                raise KernelError(f"g++ does not compile {names[0]} and others:\n{done.stderr}")
    return ctypes.CDLL(str(path))


def find_gxx() -> str | None:
    return shutil.which("g++")


def emulate_kernels(monkeypatch) -> None:
    """Let kernels take tensors on a CPU, and emulate those launched there, within a test."""
    start = launch.start

    def either(file, name, device, *rest):
        if device.type == "cpu":
            emulate(file, name, *rest)
        else:
            start(file, name, device, *rest)

    monkeypatch.setattr(launch, "start", either)
    monkeypatch.setattr(choose, "mode", lambda: "emulate")
