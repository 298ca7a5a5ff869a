"""``comera doctor``: what there is for CUDA kernels here, and which way each operator goes."""

import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table

from comera import __version__
from comera.ops.kernels import (
    choose,
    contract_kernel,
    driver,
    emulate,
    lookup_kernel,
    low_rank_kernel,
    nvrtc,
)
from comera.ops.kernels.nvrtc import KernelError

_OPERATORS = {
    "merge_halves": contract_kernel.FILE,
    "ttm_look_up": lookup_kernel.FILE,
    "thin_linears": low_rank_kernel.FILE,
}
"""What has CUDA kernels, and in which file."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def examine(console: Console) -> None:
    """Print what was found; works without a card, a driver or cuda-python."""
    for table in (_found(), _kernels(), _ways()):
        console.print(table, markup=False)


def _found() -> Table:
    table = Table(title="found", title_justify="left", show_header=False)
    table.add_row("comera", __version__)
    table.add_row("Python", platform.python_version())
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    table.add_row("torch", f"{torch.__version__}, {cuda}")
    table.add_row("CUDA devices", _devices())
    table.add_row("CUDA driver", _driver())
    table.add_row("cuda-bindings", _version("cuda-bindings") or _not_installed())
    table.add_row("NVRTC", _nvrtc())
    table.add_row("g++", emulate.compiler() or "none: no emulation of kernels")
    table.add_row("kernels", str(nvrtc.folder()))
    table.add_row("compiled kernels", _cache())
    table.add_row("COMERA_KERNELS", choose.mode())
    return table


def _kernels() -> Table:
    table = Table(title="kernels", title_justify="left")
    for column in ("file", "functions", "compiled for"):
        table.add_column(column)
    for file in nvrtc.files():
        table.add_row(f"{file}.cu", "\n".join(nvrtc.entries(file)), ", ".join(_made(file)) or "-")
    return table


def _ways() -> Table:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table(title=f"which way tensors on {device} go", title_justify="left")
    for column in ("operator", "dtype", "way", "why"):
        table.add_column(column)
    for operator, file in _OPERATORS.items():
        for dtype in _DTYPES:
            why = choose.why_not(file, device, dtype)
            way = "torch operations" if why else "kernel" if device.type == "cuda" else "emulation"
            table.add_row(operator, str(dtype).removeprefix("torch."), way, why or "-")
    return table


def _devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    cards = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    return "\n".join(
        f"{card.name}, compute capability {card.major}.{card.minor}, "
        f"{card.total_memory / 2**30:.0f} GiB"
        for card in cards
    )


def _driver() -> str:
    try:
        number = driver.version()
    except (KernelError, RuntimeError) as problem:
        return str(problem)
    return f"for CUDA up to {number // 1000}.{number % 1000 // 10}"


def _nvrtc() -> str:
    try:
        return "{}.{}".format(*nvrtc.nvrtc_version())
    except (KernelError, RuntimeError) as problem:
        return str(problem)


def _not_installed() -> str:
    return "not installed (pip install 'comera[cuda]'): no kernels on a card"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cache() -> str:
    files = list(nvrtc.cubin_folder().glob("*.cubin"))
    size = sum(file.stat().st_size for file in files)
    return f"{nvrtc.cubin_folder()}: {len(files)} files, {size / 1e6:.1f} MB"


def _made(file: str) -> list[str]:
    """Return the architectures for which the source as it is now has been compiled."""
    archs = {path.stem.split("-")[1] for path in nvrtc.cubin_folder().glob(f"{file}-*.cubin")}
    try:
        return sorted(arch for arch in archs if nvrtc.cubin_path(file, arch).is_file())
    except (KernelError, RuntimeError):
        return []
