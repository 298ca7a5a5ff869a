"""Measure the profile of this machine, from which the planner predicts times."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
from torch import nn

from comera.calibrate.ways import Run, Say, check_choice, in_turn, measure_ways
from comera.nn.linear import TTLinear
from comera.ops.product import has_onednn, onednn
from comera.planning.machine import Machine, default_machine, processor_name, save_machine
from comera.planning.ways import factorized, torch_linear

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_LARGE = {"cpu": 1 << 26, "cuda": 1 << 29}  # numbers in a tensor beyond any cache

_IN_CACHE = {"cpu": 1 << 19, "cuda": 1 << 22}
_ROUNDS = 7
_CALLS = 1000
_DEEP = 8  # layers in a row: a pass through all of them begins and ends once


def calibrate(device: str = "cpu", say: Say = print) -> Machine:
    """Measure this machine: a profile for ``comera.plan``, and the fastest way of each operator.

    Takes about half a minute on a CPU, two minutes on a GPU; other work on the machine distorts the
    times. ``device`` is ``"cpu"``, at the present number of threads, or ``"cuda"``; ``say`` is
    called with a line after each measurement. Each result is saved at once, so an interrupt loses
    only the current measurement. Raises ``ValueError`` for another device, a missing GPU, or a
    ``COMERA_KERNELS`` that leaves no choice between kernels and torch.
    """
    rough = default_machine(device)  # raises for other devices
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch finds no CUDA device")
    check_choice()

    def rate(what: str, amount: float, unit: str, run: Run) -> float:
        found = amount / _seconds(run, device)
        say(f"{what}: {found / 1e9:.4g} {unit}/s")
        return found

    def seconds(what: str, run: Run, count: int) -> float:
        found = _seconds(run, device) / count
        say(f"{what}: {1e6 * found:.3g} us")
        return found

    flops = []
    for name in _DTYPES:
        dtype = getattr(torch, name)
        on_cpu = 1024 if dtype.itemsize > 2 else 256  # more narrow numbers may take a CPU seconds
        size = on_cpu if device == "cpu" else 8192
        a = torch.randn(size, size, device=device).to(dtype)
        run = partial(torch.matmul, a, a)
        flops.append((name, rate(f"{name} product", 2 * size**3, "GFLOP", run)))
    large, cached = (torch.ones(of[device], device=device) for of in (_LARGE, _IN_CACHE))
    square, one = torch.ones(4096, 4096, device=device), torch.ones(8, device=device)

    def calls() -> None:
        for _ in range(_CALLS):
            torch.add(one, one, out=one)

    def copy(source: torch.Tensor) -> Run:
        return partial(torch.empty(source.shape, device=device).copy_, source)

    node = "a node of a graph" if device == "cuda" else "a call"
    profile = dataclasses.replace(
        rough,
        name=processor_name() if device == "cpu" else torch.cuda.get_device_name(),
        flops=tuple(flops),
        bandwidth=rate("copy of a large tensor", 8 * large.numel(), "GB", copy(large)),
        strided_bandwidth=rate("transposed copy", 8 * square.numel(), "GB", copy(square.T)),
        cache_bandwidth=rate("copy within the cache", 8 * cached.numel(), "GB", copy(cached)),
        call_overhead=seconds(node, in_turn([calls], torch.device(device)), _CALLS),
        eager_call=0.0 if device == "cpu" else seconds("a call in eager mode", calls, _CALLS),
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


def _seconds(run: Run, device: str) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(_ROUNDS + 2):
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _onednn_gain(say: Say) -> float:
    """Return oneDNN's speed divided by that of torch's default library, the lower of two sizes."""
    if not has_onednn():
        return 1.0
    gains = []
    for width in (32, 768):
        multiply = partial(torch.mm, torch.randn(4096, 768), torch.randn(768, width))
        theirs = _seconds(multiply, "cpu")
        with onednn:
            gains.append(theirs / _seconds(multiply, "cpu"))
    say(f"oneDNN: {gains[0]:.2f} times as fast at products of 32 columns, {gains[1]:.2f} of 768")
    return min(gains)


def _half_size(machine: Machine, say: Say, what: str, sizes: tuple[int, int, int]) -> float:
    """Estimate the size at half the peak rate: ``half``, given ``n / (n + half)`` at one n."""
    rows, depth, width = sizes
    device = machine.kind
    a, b = torch.randn(rows, depth, device=device), torch.randn(depth, width, device=device)
    with onednn if machine.prefers_onednn else nullcontext():
        rate = 2 * rows * depth * width / _seconds(lambda: torch.mm(a, b), device)
    share = min(rate / machine.product_rate("float32", rows * depth * width), 1.0)
    narrow = min(depth, width)
    say(f"product of {what} {narrow}: {share:.0%} of the peak rate")
    return narrow / share - narrow


def _with_layers(profile: Machine, say: Say) -> Machine:
    """Return the profile with the overhead measured on tiny layers, on a GPU also on torch's."""
    device = profile.kind
    layers = [TTLinear(64, 64, rank=2, device=device) for _ in range(_DEEP)]

    def with_overhead(overhead: float) -> Machine:
        if profile.eager is None:
            return dataclasses.replace(profile, operator_overhead=overhead)
        return dataclasses.replace(profile, eager_operator=overhead)

    def predicted(overhead: float) -> float:
        machine = with_overhead(overhead)
        return factorized(layers[0].at(1), machine.eager or machine, "float32").seconds

    taken = _seconds_a_layer(layers, device)
    overhead = max(0.0, (taken - predicted(0.0)) / (predicted(1.0) - predicted(0.0)))
    say(f"an operator: {1e6 * overhead:.3g} us")
    profile = with_overhead(overhead)
    if profile.eager is None:
        return profile
    taken = _seconds_a_layer([nn.Linear(64, 64, device=device) for _ in range(_DEEP)], device)
    plain = dataclasses.replace(profile.eager, module_overhead=0.0)
    dense = torch_linear(layers[0].at(1), plain, "float32").seconds
    say(f"a dense layer in eager mode: {1e6 * taken:.3g} us")
    return dataclasses.replace(profile, eager_module=max(0.0, taken - dense))


def _seconds_a_layer(layers: Sequence[nn.Module], device: str) -> float:
    x, model = torch.ones(1, 64, device=device, requires_grad=True), nn.Sequential(*layers)
    return _seconds(lambda: model(x).sum().backward(), device) / len(layers)
