"""Time the ways (implementations) of each operator on this GPU, for ``comera.ops.dispatch``.

Each trial times the ways of an operator, forward and backward, on several inputs in turn, so that
caches stay cold. Times are saved after each trial.
"""

import contextlib
import datetime
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comera.nn.batched_contraction import BatchedContraction
from comera.nn.embedding import TTEmbedding, TTEmbeddingBag
from comera.nn.linear import TTLinear
from comera.ops import dispatch
from comera.ops.context import static_shapes
from comera.ops.kernels import choose
from comera.ops.linear.feed_forward import factorized_feed_forward, gated_feed_forward
from comera.ops.linear.tt_linear import Factors
from comera.planning.printing import show_seconds
from comera.planning.way_times import Timing, save_way_times
from comera.train.capture import WARM_UP
from comera.train.graphs import CudaGraphs

Say = Callable[[str], None]
Run = Callable[[], object]

_ROUNDS, _LEAST_ROUNDS = 7, 3
_ENOUGH = 0.2  # seconds after which a way has been measured, however few rounds there were
_SECONDS = 0.01  # a sample takes at least this long, so that the clock does not show
_ALL_SECONDS = 75.0  # for all trials together; one that is late leaves less to those behind it

_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16, torch.float16)}

_IN_TF32 = {"feed_forward", "gated_feed_forward"}
"""Groups with a way that runs only where products of float32 may be of tf32."""

_ROTATED, _MOST_COPIES = 128 << 20, 16
"""Bytes of all inputs of an operator on a GPU together: twice the cache of an H200."""


class Trial(NamedTuple):
    """A measurement of the operator group ``group`` at one size.

    ``make`` returns functions that run it on a device and in a dtype, each on its own inputs.
    """

    group: str
    make: Callable[[torch.device, torch.dtype], Sequence[Run]]


def measure_ways(device: torch.device, say: Say) -> None:
    """Time all ways of all operators on a GPU, and save the times after each trial.

    ``say`` is called with a line after each trial. On a CPU nothing is timed: operators try
    their ways as listed. Raises ``ValueError`` if ``COMERA_KERNELS`` forces kernels or torch.
    """
    check_choice()
    if device.type not in dispatch.ORDERED:
        return
    setting, today = dispatch.way_setting(device), datetime.date.today().isoformat()
    path: Path | None = None
    jobs, left_out = _jobs(device), Counter[str]()
    deadline = time.monotonic() + _ALL_SECONDS
    try:
        for number, (trial, dtype, tf32) in enumerate(jobs):
            now = time.monotonic()
            if now > deadline:
                left_out[f"{trial.group}, {str(dtype).removeprefix('torch.')}"] += 1
                continue
            until = now + (deadline - now) / (len(jobs) - number)
            with tf32_products(tf32):
                timings = _measure(trial, device, dtype, say, until)
            if timings:
                path = save_way_times(setting, timings, today)
                for timing in timings:
                    say(describe(timing))
    finally:
        dispatch.forget_times()
    for name, count in left_out.items():
        say(f"{name}: sizes not measured: {count}, {_ALL_SECONDS:.0f} s are over")
    say("no operator has two ways here" if path is None else f"saved as {path}")


def _jobs(device: torch.device) -> list[tuple[Trial, torch.dtype, bool]]:
    """Return trials, in turn from each operator: where time ends early, none goes without."""
    jobs = [
        (dtype == torch.float16, number, trial, dtype, tf32)
        for _, trials in groupby(TRIALS, lambda trial: trial.group)
        for number, trial in enumerate(trials)
        for dtype, tf32 in _roundings(trial, device)
    ]
    return [job[2:] for job in sorted(jobs, key=lambda job: job[:2])]


def _roundings(trial: Trial, device: torch.device) -> Iterator[tuple[torch.dtype, bool]]:
    """Yield the dtypes to measure, each with a bool: may float32 products use tf32?"""
    for dtype in _DTYPES[device.type]:
        yield dtype, False
        if device.type == "cuda" and dtype == torch.float32 and trial.group in _IN_TF32:
            yield dtype, True


def check_choice() -> None:
    if choose.mode() != "auto":
        raise ValueError(
            f"COMERA_KERNELS={choose.mode()} leaves no choice between kernels and torch: unset it "
            "to measure which is faster"
        )


def describe(timing: Timing) -> str:
    """Return a line with the times of all ways in one case, the fastest first."""
    fastest = sorted(timing.seconds, key=lambda way: timing.seconds[way])
    ways = ", ".join(f"{way} {show_seconds(timing.seconds[way])}" for way in fastest)
    where = ", captured" if timing.captured else ""
    sizes = " x ".join(map(str, timing.sizes))
    return f"{timing.group} {sizes}, {timing.dtype}{where}: {ways}"


def _measure(
    trial: Trial, device: torch.device, dtype: torch.dtype, say: Say, until: float = math.inf
) -> list[Timing]:
    """Time the ways of a trial, if several, in eager mode, and on a GPU also in a CUDA graph."""
    if device.type != "cuda":
        return _in_turns(trial.group, trial.make(device, dtype), device, None, say, until)
    with torch.cuda.device(device):
        graphs = CudaGraphs(device)
        with graphs.stream():  # all calls, or none could be captured later
            runs = trial.make(device, dtype)
            eager = _in_turns(trial.group, runs, device, None, say, until)
            with static_shapes():
                return eager + _in_turns(trial.group, runs, device, graphs, say, until)


def _in_turns(
    group: str, runs: Sequence[Run], device: torch.device, graphs: CudaGraphs | None, say: Say,
    until: float,
) -> list[Timing]:  # fmt: skip
    """Time the ways in turn, captured if ``graphs`` is given; report a way that cannot run."""
    samples: dict[str, Callable[[], float]] = {}
    cases: set[tuple[str, tuple[int | str, ...]]] = set()
    for way in ("kernel", "torch"):
        try:
            met = cases_of(group, way, runs[0])
            if way not in [ran for ran, _ in met]:
                continue
            sample: Callable[[], float] = partial(_host_seconds, group, way, runs, device)
            if graphs is not None:
                with dispatch.preferring(group, way):
                    sample = partial(_graph_seconds, in_turn(runs, device, graphs), len(runs))
        except (RuntimeError, OSError) as problem:  # too little memory, a kernel that fails
            say(f"{group}: {way} cannot be measured: {problem}")
            continue
        samples[way] = sample
        cases |= {(str(dtype).removeprefix("torch."), sizes) for _, (_, dtype, sizes) in met}
    if len(samples) < 2:
        return []
    taken = {way: [sample()] for way, sample in samples.items()}
    for number in range(_ROUNDS):
        if number and time.monotonic() > until:
            break
        for way, sample in samples.items():
            if sum(taken[way]) < _ENOUGH or len(taken[way]) < _LEAST_ROUNDS:
                taken[way].append(sample())
    seconds = {way: median(values[1:]) for way, values in taken.items()}
    return [
        Timing(group, dtype, graphs is not None, sizes, seconds) for dtype, sizes in sorted(cases)
    ]


def cases_of(group: str, way: str, run: Run) -> list[tuple[str, dispatch.Case]]:
    """Call ``run`` once, preferring one way; return the ways that ran, each with its case."""
    with dispatch.recorded() as seen, dispatch.preferring(group, way):
        run()
    return [(ran, case) for of, ran, case in seen if of == group and case is not None]


def _graph_seconds(replay: Run, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / count


def _host_seconds(group: str, way: str, runs: Sequence[Run], device: torch.device) -> float:
    """Measure the mean seconds of a call; the GPU is synchronised only at the end."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with dispatch.preferring(group, way):
        for run in runs:  # so that the way is found, and nothing is made for the first time
            run()
        count, began = 0, now()
        while True:
            for run in runs:
                run()
            count += len(runs)
            if time.perf_counter() - began >= _SECONDS:
                return (now() - began) / count


def copies_of(device: torch.device, nbytes: float) -> int:
    """Return how many inputs of ``nbytes`` to use in turn so that none stays in a cache."""
    if device.type != "cuda":
        return 2
    return min(_MOST_COPIES, max(2, math.ceil(_ROTATED / nbytes)))


def in_turn(runs: Sequence[Run], device: torch.device, graphs: CudaGraphs | None = None) -> Run:
    """Return a function that calls all runs: on a GPU as one CUDA graph, without host time.

    ``graphs`` is the recorder on whose stream the runs have been called before. Raises the error of
    a run that cannot be captured.
    """

    def run_all() -> Tensor:
        for run in runs:
            run()
        return torch.empty(0, device=device)

    if device.type != "cuda":
        return run_all
    graphs = graphs or CudaGraphs(device)
    with graphs.stream():
        for _ in range(WARM_UP):
            run_all()
    recording = graphs.record(run_all)

    def replay(captured: Sequence[Run] = runs) -> None:  # they keep the tensors that it reads
        recording.replay()

    return replay


@contextlib.contextmanager
def tf32_products(on: bool) -> Iterator[None]:
    """Enable or disable tf32 for float32 products on a GPU, inside the context."""
    before = torch.backends.cuda.matmul.fp32_precision  # the older name raises after a newer one
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("high" if before == "tf32" else "highest")
        torch.backends.cuda.matmul.fp32_precision = before


def _contract(layers: int, rank: int, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Return a run that contracts the layers of a model: a third of them widen or narrow."""
    widths = [(768, 768)] * 4 + [(768, 3072), (3072, 768)]
    model = nn.ModuleList(
        TTLinear(*widths[k % len(widths)], rank=rank, device=device) for k in range(layers)
    )
    trains: list[TTLinear] = list(model)  # type: ignore[arg-type]
    narrow = None if dtype == torch.float32 else dtype
    together, params = BatchedContraction(model, narrow), list(model.parameters())

    def run() -> object:
        with torch.autocast(device.type, dtype, enabled=narrow is not None), together:
            factors = [factor for train in trains for factor in train.factors()[:2]]
        return torch.autograd.grad(factors, params, factors, allow_unused=True)

    return [run]


def _feed_forward(
    rows: int, width: int, hidden: int, rank: int, gated: bool, device: torch.device,
    dtype: torch.dtype,
) -> list[Any]:  # fmt: skip
    sizes = [(width, hidden), *([(width, hidden)] if gated else []), (hidden, width)]
    layers = []
    for size in sizes:
        with torch.no_grad():
            left, right, has_bias = TTLinear(*size, rank=rank, device=device).factors()
        left, right = (factor.to(dtype).requires_grad_() for factor in (left, right))
        layers.append(Factors(left, right, has_bias))
    weights = [factor for factors in layers for factor in factors[:2]]

    def run(x: Tensor) -> object:
        if gated:
            y = gated_feed_forward(x, *layers)  # type: ignore[misc]
        else:
            y = factorized_feed_forward(x, layers[0], layers[1], "gelu")
        return torch.autograd.grad(y, [x, *weights], x.detach())

    return [partial(run, x) for x in _batches(device, dtype, rows, width)]


def _batches(device: torch.device, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Return inputs that need a gradient, so many that none stays in the cache of a GPU."""
    one = torch.randn(shape).to(device, dtype)
    count = copies_of(device, 3 * one.numel() * one.element_size())
    return [(one + 1e-3 * k).requires_grad_() for k in range(count)]


_ROWS, _WIDTH, _ROW_RANK = 30522, 768, 30
_ROW_MODES = [[16, 20, 10, 10], [4, 4, 8, 6]]
_HOT_ROWS, _BAG = 2000, 8


def _look_up(
    entries: int, hot: bool, bags: bool, device: torch.device, dtype: torch.dtype
) -> list[Any]:
    modes, hot_rows = (None, _HOT_ROWS) if hot else (_ROW_MODES, 0)
    settings: dict[str, Any] = {"rank": _ROW_RANK, "device": device, "dtype": dtype}
    settings |= {"shape": modes, "hot_rows": hot_rows}
    table = (
        TTEmbeddingBag(_ROWS, _WIDTH, mode="sum", **settings)
        if bags
        else TTEmbedding(_ROWS, _WIDTH, **settings)
    )
    offsets = [torch.arange(0, entries, _BAG).to(device)] if bags else []
    grad = torch.randn(entries // _BAG if bags else entries, _WIDTH).to(device, dtype)
    params = [param for name, param in table.named_parameters() if "gates" not in name]

    def run(indices: Tensor) -> object:
        return torch.autograd.grad(table(indices, *offsets), params, grad)

    count = copies_of(device, 2 * grad.numel() * grad.element_size())
    return [
        partial(run, torch.randint(0, _ROWS, (entries,)).to(device)) for _ in range(min(4, count))
    ]


_SIZES: dict[tuple[str, Callable[..., list[Any]]], Sequence[tuple[Any, ...]]] = {
    ("contract_cores", _contract): [(1, 30), (12, 30), (36, 30), (36, 62)],
    ("feed_forward", _feed_forward): [
        *((rows, 768, 3072, rank, False) for rank in (30, 62) for rows in (256, 1024, 4096, 16384)),
        *((rows, 768, 3072, 32, False) for rows in (1024, 4096)),
        (4096, 4096, 11008, 30, False),
    ],
    ("gated_feed_forward", _feed_forward): [
        (1024, 768, 2048, 30, True),
        (4096, 768, 2048, 30, True),
        (4096, 4096, 11008, 30, True),
    ],
    ("lookup", _look_up): [
        *((entries, False, False) for entries in (256, 1024, 4096, 16384)),
        *((4096, *kind) for kind in ((True, False), (False, True), (True, True))),
    ],
}

TRIALS = tuple(
    Trial(group, partial(make, *sizes))
    for (group, make), of_group in _SIZES.items()
    for sizes in of_group
)
"""All trials, of the sizes of ordinary models. The nearest counts for all others."""
