"""Checkpoints: copied, compressed and read, and the k-means of their codes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import faiss_codes
from benchmarks.session import Session
from comera.checkpoint.archive import packed
from comera.checkpoint.codebook import learn
from comera.checkpoint.contents import Quality, decode, encode
from comera.checkpoint.snapshot import Policy, take_snapshot

_CODES = 15
_LARGEST = 50304 * 1024
"""Entries of the largest tensor of Pythia-410M, the model of ExCP's release."""


def checkpoints(session: Session, entries: int, width: int, quality: Quality) -> None:
    """Measure checkpoints of a model of square random weights under AdamW, and of its change.

    Args:
        session: Where to run and print.
        entries: Parameters.
        width: Rows and columns of each weight.
        quality: Quality of the lossy checkpoint.
    """
    _whole(session, entries, width, quality)
    for count in (width**2, _LARGEST):
        _clusters(session, torch.randn(count))


def _whole(session: Session, entries: int, width: int, quality: Quality) -> None:
    """Measure all the tensors of a model, there and back."""
    model, states = _state(session, entries, width)
    raw = 3 * sum(weight.nbytes for weight in model.values())
    policy = Policy()
    base = {f"model.{name}": weight - torch.randn_like(weight) for name, weight in model.items()}

    def snapshot() -> Any:
        return take_snapshot(model, states, None, policy)

    taken = snapshot()
    lossless = take_snapshot(model, states, None, Policy(lossless=True))
    link, key = encode(taken, base, quality)[0], encode(taken, None, quality)[0]
    whole = encode(lossless, None, quality)[0]
    runs: dict[str, Callable[[], object]] = {
        "copied": snapshot,
        "compressed, change": lambda: packed(encode(taken, base, quality)[0].done),
        "compressed, key frame": lambda: packed(encode(taken, None, quality)[0].done),
        "compressed, lossless": lambda: packed(encode(lossless, None, quality)[0].done),
        "read, change": lambda: decode(link.done, base, 1 << 62),
        "read, key frame": lambda: decode(key.done, None, 1 << 62),
        "read, lossless": lambda: decode(whole.done, None, 1 << 62),
    }
    title = f"{sum(w.numel() for w in model.values()):,} parameters and their moments"
    timings = session.measure(title, runs, "copied")
    for name in runs:
        session.note(f"{name}: {raw / timings.median(name) / 1e6:,.0f} MB/s")
    for name, streams in (("change", link), ("key frame", key), ("lossless", whole)):
        session.note(f"{name}: {raw / sum(map(len, streams.done.values())):.1f}x smaller")


def _clusters(session: Session, values: Tensor) -> None:
    """Measure finding a codebook of a tensor and the codes of all its entries."""

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

    count = max(1, round(entries / width**2))
    model = {f"{k}.weight": draw(1.0) for k in range(count)}
    moments = {
        k: {"step": torch.tensor(100.0), "exp_avg": draw(1e-4), "exp_avg_sq": draw(1e-3).square()}
        for k in range(count)
    }
    groups = [{"params": list(range(count)), "param_names": list(model), "lr": 1e-3}]
    return model, {"state": moments, "param_groups": groups}
