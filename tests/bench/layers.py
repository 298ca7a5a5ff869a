"""Figures of single layers and of rank learning, dense and tensor train side by side.

    python -m tests.bench.layers linear      # forward + backward of a layer: time and peak memory
    python -m tests.bench.layers objective   # what the rank objective adds to a training step
    python -m tests.bench.layers truncation  # a training step before and after truncation

Times are medians of alternating runs in one process; compare their ratio, not the milliseconds.
Freed memory is kept in the process, for dense layers too (``comera.reuse_freed_memory``);
``--malloc=default`` leaves the C library as it is.
"""

import argparse
import copy
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comera
from comera.models.transformer import Encoder, SequenceClassifier


def alternate(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn; the first round warms up and is left out."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in times.items()}


def show(times: dict[str, list[float]], baseline: str) -> None:
    for name, values in times.items():
        pairs = [b / v for b, v in zip(times[baseline], values, strict=True)]
        print(
            f"{name:12} {1000 * median(values):8.1f} ms "
            f"({1000 * min(values):.1f} to {1000 * max(values):.1f}), "
            f"{baseline} / {name} {median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
        )


def make_layer(kind: str, width_in: int, width_out: int, rank: list[int]) -> nn.Module:
    torch.manual_seed(0)
    if kind == "dense":
        return nn.Linear(width_in, width_out)
    return comera.TTLinear(width_in, width_out, rank=rank)


def linear(width_in: int, width_out: int, rank: list[int], tokens: int, repeats: int) -> None:
    """One layer, input gradient included; peak memory from a fresh process for each kind."""
    x = torch.randn(tokens, width_in, requires_grad=True)
    grad = torch.randn(tokens, width_out)

    def step(layer: nn.Module) -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(grad)

    layers = {kind: make_layer(kind, width_in, width_out, rank) for kind in ("dense", "TTLinear")}
    print(f"{width_in} -> {width_out}, ranks {rank}, {tokens} tokens, forward and backward")
    show(alternate({k: lambda m=m: step(m) for k, m in layers.items()}, repeats), "dense")
    for kind in layers:
        words = [sys.executable, "-m", "tests.bench.layers", "memory", "--kind", kind]
        words += ["--shape", str(width_in), str(width_out), "--tokens", str(tokens)]
        words += ["--rank", *map(str, rank)]
        peak = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
        print(f"{kind:12} peak memory of the step, input and its gradient included: {peak}")


def memory(kind: str, width_in: int, width_out: int, rank: list[int], tokens: int) -> None:
    layer = make_layer(kind, width_in, width_out, rank)
    warm = torch.zeros(8, width_in, requires_grad=True)
    layer(warm).sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = _peak()
    x = torch.randn(tokens, width_in, requires_grad=True)
    layer(x).sum().backward()
    print(f"{(_peak() - before) / 1024:.1f} MiB")


def _peak() -> int:
    """Peak resident size of this process in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1])


def six_encoders(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of the paper's section 5.1 and a batch of random tokens, length 128."""
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(30522, 768, 6, 12, 3072, 128, 0.1, 2, "post"), 3)
    config = comera.TTConfig(
        rank=[12, 30, 30, 30, 16],
        embedding_rank=30,
        exclude_modules=["output"],
        shape_pattern={r"encoder\.tokens": [[16, 20, 10, 10], [4, 4, 8, 6]]},
    )
    comera.tensorize_(model, config)
    tokens = torch.randint(5, 30522, (batch, 128))
    return model, (tokens, torch.zeros_like(tokens), torch.randint(0, 3, (batch,)))


def loss_fn(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    tokens, segments, labels = batch
    return F.cross_entropy(model(tokens, segments), labels)


def make_step(model: nn.Module, ranks: comera.TwoStage | None = None) -> comera.TrainStep:
    optimizer = torch.optim.AdamW(comera.param_groups(model, 1e-4), fused=True)
    return comera.TrainStep(model, loss_fn, optimizer, ranks)


def objective(batch: int, repeats: int) -> None:
    """The objective alone, forward and backward, against the whole step without it."""
    model, data = six_encoders(batch)
    step = make_step(model)
    for stage, early in (("early", 10**6), ("late", 0)):
        ranks = comera.TwoStage(model, 0.2, early, 10**6)
        loss = torch.ones((), requires_grad=True)

        def alone(ranks=ranks, loss=loss) -> None:
            ranks.objective(loss * 1).backward()
            ranks.step(loss.detach())
            step.optimizer.zero_grad()

        times = alternate({"step": lambda: step(data), "objective": alone}, repeats)
        share = median(times["objective"]) / median(times["step"])
        print(f"six encoders, batch {batch}x128, {stage} stage: objective {100 * share:.2f} % of")
        show(times, "step")


def truncation(batch: int, repeats: int) -> None:
    """The same model with masked ranks and with the ranks cut out, at a fifth of the size."""
    masked, data = six_encoders(batch)
    comera.rank.truncate.prune_to_(masked, 0.2 * comera.compression_report(masked).live_params)
    cut = copy.deepcopy(masked)
    comera.truncate_(cut)
    with torch.no_grad():
        masked.eval(), cut.eval()
        print(f"loss masked {loss_fn(masked, data):.6f}, truncated {loss_fn(cut, data):.6f}")
        masked.train(), cut.train()
    steps = {"masked": make_step(masked), "truncated": make_step(cut)}
    show(alternate({k: lambda s=s: s(data) for k, s in steps.items()}, repeats), "masked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["linear", "memory", "objective", "truncation"])
    parser.add_argument("--shape", type=int, nargs=2, default=[768, 3072])
    parser.add_argument("--rank", type=int, nargs="+", default=[12, 30, 30, 30, 16])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kind", default="dense")
    parser.add_argument("--malloc", choices=["keep", "default"], default="keep")
    given = parser.parse_args()
    kept = given.malloc == "keep" and comera.reuse_freed_memory()
    if given.what == "memory":
        memory(given.kind, *given.shape, given.rank, given.tokens)
        return
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, float32, "
        f"freed memory {'kept' if kept else 'returned'}"
    )
    if given.what == "linear":
        linear(*given.shape, given.rank, given.tokens, given.repeats)
    elif given.what == "objective":
        objective(given.batch, given.repeats)
    else:
        truncation(given.batch, given.repeats)


if __name__ == "__main__":
    main()
