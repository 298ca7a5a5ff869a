"""Time checkpoints that are copied, compressed and read, and the k-means of their codes."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import faiss_codes
from benchmarks.session import Session, add_repeats, add_sizes
from comera.checkpoint.archive import packed
from comera.checkpoint.chain import Policy
from comera.checkpoint.codebook import learn
from comera.checkpoint.contents import Quality, decode, encode, take_snapshot

_CODES = 15
_LARGEST = 50304 * 1024  # entries of the largest tensor of Pythia-410M, the model of ExCP's release


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_sizes(
        parser,
        {
            "parameters": (16_777_216, "Number of parameters of the model."),
            "width": (2048, "Width of the weight matrices."),
        },
    )
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Measure checkpoints of a model of square random weights under AdamW, and of its change."""
    _whole(session, options.parameters, options.width, Quality())
    for entries in (options.width**2, _LARGEST):
        _clusters(session, torch.randn(entries))


def _whole(session: Session, entries: int, width: int, quality: Quality) -> None:
    """Measure all the tensors of a model, there and back."""
    model, states = _state(session, entries, width)
    raw = 3 * sum(weight.nbytes for weight in model.values())
    base = {f"model.{name}": weight - torch.randn_like(weight) for name, weight in model.items()}

    def snapshot() -> Any:
        return take_snapshot(model, states, None, Policy().treatment)

    lossless = take_snapshot(model, states, None, Policy(lossless=True).treatment)
    taken = snapshot()
    cases = {"change": (taken, base), "key frame": (taken, None), "lossless": (lossless, None)}
    done = {name: encode(what, from_, quality)[0].done for name, (what, from_) in cases.items()}
    runs: dict[str, Callable[[], object]] = {"copied": snapshot}
    for name, (what, from_) in cases.items():
        runs[f"compressed, {name}"] = lambda what=what, from_=from_: packed(  # type: ignore[misc]
            encode(what, from_, quality)[0].done
        )
    for name, (_, from_) in cases.items():
        runs[f"read, {name}"] = lambda name=name, from_=from_: decode(done[name], from_)  # type: ignore[misc]
    title = f"{sum(w.numel() for w in model.values()):,} parameters and their moments"
    timings = session.measure(title, runs, "copied")
    for name in runs:
        session.note(f"{name}: {raw / timings.median(name) / 1e6:,.0f} MB/s")
    for name, streams in done.items():
        session.note(f"{name}: {raw / sum(map(len, streams.values())):.1f}x smaller")


def _clusters(session: Session, values: Tensor) -> None:
    """Time the codebook of a tensor and the codes of its entries."""

    def ours() -> tuple[Tensor, Tensor]:
        book = learn(values, _CODES)
        return book.values, book.codes(values)

    runs: dict[str, Callable[[], object]] = {"comera": ours}
    found: dict[str, tuple[Tensor, Tensor]] = {"comera": ours()}

    def make() -> Callable[[], object]:
        found["faiss"] = faiss_codes(values, _CODES)
        return lambda: faiss_codes(values, _CODES)

    session.add_peer(runs, "faiss", make)
    session.measure(f"k-means of {len(values):,} values, {_CODES} clusters", runs, "comera")
    for name, (book, codes) in found.items():
        error = (book[codes.long()] - values).square().mean() / values.var()
        session.note(f"{name}: mean square error {float(error):.5f} of the variance")


def _state(session: Session, entries: int, width: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    def draw(scale: float) -> Tensor:
        return scale * torch.randn(width, width, device=session.device)

    number = max(1, round(entries / width**2))
    model = {f"{k}.weight": draw(1.0) for k in range(number)}
    moments = {
        k: {"step": torch.tensor(100.0), "exp_avg": draw(1e-4), "exp_avg_sq": draw(1e-3).square()}
        for k in range(number)
    }
    groups = [{"params": list(range(number)), "param_names": list(model), "lr": 1e-3}]
    return model, {"state": moments, "param_groups": groups}
