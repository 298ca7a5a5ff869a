"""The profile of this machine, from which the planner predicts times."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn

from comera.calibrate.in_turn import in_turn
from comera.calibrate.ways import check_choice, measure_ways
from comera.nn.linear import TTLinear
from comera.ops.product import by_onednn, has_onednn
from comera.planning.machine import Machine, default_machine, processor_name, save_machine
from comera.planning.planner import plan_layer

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_LARGE = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Numbers in a tensor beyond any cache."""

_IN_CACHE = {"cpu": 1 << 19, "cuda": 1 << 22}
_ROUNDS = 7

Say = Callable[[str], None]


def calibrate(device: str = "cpu", say: Say = print) -> Machine:
    """Measure this machine: a profile for ``comera.plan``, and the fastest way of each operator.

    Takes about half a minute on a CPU and a minute on a card; other work on the machine counts as
    slowness. The profile is saved before the ways are timed, and these are saved one by one: an
    interrupt loses only the measurement it meets.

    Args:
        device: ``"cpu"``, at the present number of threads, or ``"cuda"``.
        say: Called with a line after each measurement.

    Raises:
        ValueError: If the device is neither, there is no such GPU, or ``COMERA_KERNELS`` leaves
            no choice.
    """
    rough = default_machine(device)  # raises for other devices
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no CUDA device")
    check_choice()
    rates = {dtype: _product_rate(device, dtype, say) for dtype in _DTYPES}
    profile = dataclasses.replace(
        rough,
        name=processor_name() if device == "cpu" else torch.cuda.get_device_name(),
        flops=tuple(rates.items()),
        bandwidth=_copy_rate(device, _LARGE[device], say, "copy of a large tensor"),
        strided_bandwidth=_transpose_rate(device, say),
        cache_bandwidth=_copy_rate(device, _IN_CACHE[device], say, "copy within the cache"),
        call_overhead=_call_overhead(device, say),
        eager_call=_eager_call(device, say),
        onednn=_onednn_gain(say) if device == "cpu" else 1.0,
        threads=torch.get_num_threads() if device == "cpu" else None,
        measured=True,
    )
    profile = dataclasses.replace(
        profile,
        half_width=_half_size(profile, say, "width", (4096, 768, 2 * rough.tile)),
        half_depth=_half_size(profile, say, "depth", (1024, 2 * rough.tile, 768)),
    )
    profile = _with_layers(profile, say)
    say(f"saved as {save_machine(profile)}")
    try:
        measure_ways(torch.device(device), say)
    except KeyboardInterrupt:
        say("the profile is saved, and so are the ways that were timed so far")
        raise
    return profile


def _seconds(run: Callable[[], object], device: str) -> float:
    """Measure the median seconds of several runs after a warm-up."""
    times = []
    for _ in range(_ROUNDS + 2):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _product_rate(device: str, dtype: str, say: Say) -> float:
    kind = getattr(torch, dtype)
    on_cpu = 1024 if kind.itemsize > 2 else 256  # of narrow numbers a CPU may take seconds for more
    size = on_cpu if device == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(kind)
    rate = 2 * size**3 / _seconds(lambda: a @ a, device)
    say(f"{dtype} product: {rate / 1e9:.4g} GFLOP/s")
    return rate


def _copy_rate(device: str, numbers: int, say: Say, what: str) -> float:
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    rate = 8 * numbers / _seconds(lambda: target.copy_(source), device)
    say(f"{what}: {rate / 1e9:.4g} GB/s")
    return rate


def _transpose_rate(device: str, say: Say) -> float:
    source = torch.ones(4096, 4096, device=device)
    target = torch.empty_like(source)
    rate = 8 * source.numel() / _seconds(lambda: target.copy_(source.T), device)
    say(f"transposed copy: {rate / 1e9:.4g} GB/s")
    return rate


_CALLS = 1000


def _call_overhead(device: str, say: Say) -> float:
    """Measure what starting a small kernel takes, on a GPU as a node of a graph."""
    where = "a node of a graph" if device == "cuda" else "a call"
    overhead = _seconds(in_turn([_calls(device)], torch.device(device)), device) / _CALLS
    say(f"{where}: {1e6 * overhead:.3g} us")
    return overhead


def _eager_call(device: str, say: Say) -> float:
    """Measure what the host takes to start a small kernel, where it runs ahead of the device."""
    if device == "cpu":
        return 0.0
    overhead = _seconds(_calls(device), device) / _CALLS
    say(f"a call in eager mode: {1e6 * overhead:.3g} us")
    return overhead


def _calls(device: str) -> Callable[[], None]:
    a = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(_CALLS):
            torch.add(a, a, out=a)

    return run


def _onednn_gain(say: Say) -> float:
    """Measure how many times as fast oneDNN is as torch's own, at few columns and at many."""
    if not has_onednn():
        return 1.0
    gains = []
    for width in (32, 768):
        pair = torch.randn(4096, 768), torch.randn(768, width)
        theirs, its = (_seconds(partial(run, *pair), "cpu") for run in (torch.mm, by_onednn))
        gains.append(theirs / its)
    say(f"oneDNN: {gains[0]:.2f} times as fast at products of 32 columns, {gains[1]:.2f} of 768")
    return min(gains)


def _half_size(machine: Machine, say: Say, what: str, sizes: tuple[int, int, int]) -> float:
    """Estimate where a product reaches half its peak rate: ``share = n / (n + half)`` at one n."""
    rows, depth, width = sizes
    device, multiply = machine.kind, by_onednn if machine.prefers_onednn else torch.mm
    a, b = torch.randn(rows, depth, device=device), torch.randn(depth, width, device=device)
    rate = 2 * rows * depth * width / _seconds(lambda: multiply(a, b), device)
    share = min(rate / machine.product_rate("float32", rows * depth * width), 1.0)
    narrow = min(depth, width)
    say(f"product of {what} {narrow}: {share:.0%} of the peak rate")
    return narrow / share - narrow


_DEEP = 8
"""Layers in a row: a pass through all of them begins and ends once."""


def _with_layers(profile: Machine, say: Say) -> Machine:
    """Add what layers with next to no arithmetic take beyond their predicted calls.

    On a CPU that of tensor trains alone; on a GPU, in eager mode, that of torch's layers as well.
    """
    device = profile.kind
    layers = [TTLinear(64, 64, rank=2, device=device) for _ in range(_DEEP)]

    def with_overhead(overhead: float) -> Machine:
        if profile.eager is None:
            return dataclasses.replace(profile, operator_overhead=overhead)
        return dataclasses.replace(profile, eager_operator=overhead)

    def predicted(overhead: float) -> float:
        machine = with_overhead(overhead)
        plan = plan_layer(layers[0].at(1), machine=machine.eager or machine)
        return plan.candidate("factorized").seconds

    taken = _seconds_a_layer(layers, device)
    overhead = max(0.0, (taken - predicted(0.0)) / (predicted(1.0) - predicted(0.0)))
    say(f"an operator: {1e6 * overhead:.3g} us")
    profile = with_overhead(overhead)
    if profile.eager is None:
        return profile
    taken = _seconds_a_layer([nn.Linear(64, 64, device=device) for _ in range(_DEEP)], device)
    plain = dataclasses.replace(profile.eager, module_overhead=0.0)
    dense = plan_layer(layers[0].at(1), machine=plain).dense.seconds
    say(f"a dense layer in eager mode: {1e6 * taken:.3g} us")
    return dataclasses.replace(profile, eager_module=max(0.0, taken - dense))


def _seconds_a_layer(layers: Sequence[nn.Module], device: str) -> float:
    """Measure both passes of one of several layers in a row."""
    x, model = torch.ones(1, 64, device=device, requires_grad=True), nn.Sequential(*layers)
    return _seconds(lambda: model(x).sum().backward(), device) / len(layers)
