"""Define the commands for this machine: ``doctor`` and ``calibrate``."""

import collections
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from comera import __version__
from comera.allocator import reuse_by_default
from comera.ops.context import static_shapes
from comera.ops.dispatch import TABLE, Sample, way_times_of
from comera.ops.kernels import choose, launch
from comera.planning.printing import show_seconds
from comera.shapes import check_whole_numbers

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def examine(*, all: bool = False, console: Console) -> None:
    """Report what this machine computes with and why; works without a card, driver or cuda-python.

    Args:
        all: Show too what was found, and the way (implementation) that each operator runs.
    """
    for line in _answer():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not all:
        return
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    ways = [table(torch.device(kind)) for kind in kinds for table in (_ways, _times)]
    for table in (_found(), _kernels(), *ways):
        console.print(table, markup=False)


def calibrate(
    device: Literal["cpu", "cuda"] = "cpu", threads: int | None = None, *, console: Console
) -> None:
    """Measure this machine for the planner, and save the result.

    Args:
        device: Device to measure.
        threads: Number of CPU threads to measure with (default: what torch chooses).
    """
    from comera.calibrate.machine import calibrate as measure  # not needed for the help

    reuse_by_default(silent=True)
    if threads is not None:
        check_whole_numbers(1, threads=threads)
        torch.set_num_threads(threads)
    measure(device, console.print)


def _answer() -> Iterator[str]:
    """Yield what runs here in a few lines: the device, its kernels or why there are none."""
    built = f"torch {torch.__version__} built for CUDA {torch.version.cuda or '(none)'}"
    yield f"comera {__version__}, {built}, Python {platform.python_version()}"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name(0) if kind == "cuda" else "no GPU that torch can use"
    yield f"device: {kind} ({name}); a run takes it unless its setting device says otherwise"
    device, by_reason = torch.device(kind), collections.Counter[str]()
    for operator in sorted(TABLE):
        way, before, _ = _cells(operator, device, torch.float32)
        why = before.partition("\n")[0].partition(": ")[2] or "as torch is the first way"
        by_reason["run" if way == "kernel" else f"do not run, {why}"] += 1
    yield f"kernels (COMERA_KERNELS={choose.mode()}), of {len(TABLE)} operators in float32:"
    yield from (f"  {count} {what}" for what, count in by_reason.most_common(5))
    yield f"times by which ways are chosen: {way_times_of(device).origin}"
    yield "`comera doctor --all` shows every operator, and all that was found"


def _found() -> Table:
    cards = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    cached = list(launch.cubin_folder().glob("*.cubin"))
    size = sum(file.stat().st_size for file in cached) / 1e6
    try:
        bindings = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        bindings = "not installed (pip install 'comera[cuda]'): no kernels on a card"
    rows = {
        "CUDA devices": "\n".join(
            f"{card.name}, compute capability {card.major}.{card.minor}, "
            f"{card.total_memory / 2**30:.0f} GiB"
            for card in cards
            if torch.cuda.is_available()
        ),
        "CUDA driver": _or_problem(
            lambda: "for CUDA up to {}.{}".format(*divmod(launch.driver_version() // 10, 100))
        ),
        "cuda-bindings": bindings,
        "NVRTC": _or_problem(lambda: "{}.{}".format(*launch.nvrtc_version())),
        "kernels": str(launch.folder()),
        "compiled kernels": f"{launch.cubin_folder()}: {len(cached)} files, {size:.1f} MB",
        "COMERA_KERNELS": choose.mode(),
    }
    table = Table(title="found", title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value or "none")
    return table


def _or_problem(call: Callable[[], str]) -> str:
    try:
        return call()
    except RuntimeError as problem:
        return str(problem)


def _kernels() -> Table:
    table = Table("file", "functions", "compiled for", title="kernels", title_justify="left")
    for file in launch.files():
        cubins = launch.cubin_folder().glob(f"{file}-*.cubin")
        compiled = {path.stem.split("-")[1] for path in cubins}
        try:  # those of the source as it is now
            archs = sorted(arch for arch in compiled if launch.cubin_path(file, arch).is_file())
        except RuntimeError:
            archs = []
        table.add_row(f"{file}.cu", "\n".join(launch.entries(file)), ", ".join(archs) or "-")
    return table


def _ways(device: torch.device) -> Table:
    columns = ("operator", "dtype", "way", "ways before it", "ways after it")
    table = Table(*columns, title=f"which way tensors on {device} go", title_justify="left")
    for name in sorted(TABLE):
        rows: dict[tuple[str, str, str], list[str]] = {}
        for dtype in _DTYPES:
            cells = _cells(name, device, dtype)
            with static_shapes():  # as in a captured step
                static = _cells(name, device, dtype)
            short = str(dtype).removeprefix("torch.")
            rows.setdefault(cells, []).append(short)
            if static != cells:
                rows.setdefault(static, []).append(f"{short} in a captured step")
        for cells, names in rows.items():
            table.add_row(name, ",\n".join(names), *cells)
    return table


def _cells(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str, str]:
    """Return the way that runs, the ways refused before it, with reasons, and the ways after it."""

    def new(*shape: int) -> Sample:
        return Sample(shape, dtype, device)

    with torch.set_grad_enabled(not name.endswith("_backward")):
        reasons = TABLE[name].reasons(*TABLE[name].sample(new))
    ways = list(reasons)
    taken = next(way for way in ways if reasons[way] is None)
    before = [f"{way}: {reasons[way]}" for way in ways[: ways.index(taken)]]
    return taken, "\n".join(before) or "-", "\n".join(ways[ways.index(taken) + 1 :]) or "-"


def _times(device: torch.device) -> Table:
    """Return a table of the times by which operators choose ways, with the way tried first."""
    known = way_times_of(device)
    title = f"times of the ways on {device}, {known.origin}"
    columns = ("operators", "sizes", "dtype", "", "first", "times")
    table = Table(*columns, title=title, title_justify="left")
    for group in sorted({ways.group for ways in TABLE.values()}):
        timings = [timing for timing in known.timings if timing.group == group]
        for timing in timings:
            sizes = " x ".join(map(str, timing.sizes))
            where = "captured" if timing.captured else "eager"
            seconds = sorted(timing.seconds.items(), key=lambda item: item[1])
            times = ", ".join(f"{way} {show_seconds(value)}" for way, value in seconds)
            table.add_row(group, sizes, timing.dtype, where, timing.fastest, times)
        if not timings:
            order = "as listed" if device.type == "cpu" else "torch, no kernel"
            table.add_row(group, "all", "all", "", order, "never measured here")
    return table


if __name__ == "__main__":  # without the packages of the command line
    examine(all=True, console=Console())
