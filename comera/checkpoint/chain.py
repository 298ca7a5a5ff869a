"""Save chains of compressed checkpoints, each the change of the weights since the last."""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from torch import Tensor, nn

from comera.checkpoint.archive import Archive, Manifest, packed
from comera.checkpoint.contents import Quality, Snapshot, decode, encode, take_snapshot
from comera.checkpoint.streams import DamagedError
from comera.extras import error_prefix, listed
from comera.files import local_folder
from comera.shapes import check_whole_numbers

log = logging.getLogger("comera")

Treatment = Literal["exact", "lossy", "skip"]

KEY_EVERY = 20
"""Default number of checkpoints from one key frame to the next."""

_SMALLEST_LOSSY = 256
"""Smaller tensors are kept exactly, as are vectors: a loss is sensitive to them."""


class Policy:
    """How to treat a tensor: by the first pattern that matches its whole name, else by its kind.

    Weights and moments of floats are lossy if they are matrices or larger; all else is exact:
    vectors, counters, projections, quantised states, buffers, and everything in ``extra``.
    """

    def __init__(self, patterns: Mapping[str, str] | None = None, lossless: bool = False) -> None:
        """Compile the patterns; raise ``ValueError`` if a pattern or a treatment is invalid."""
        self._patterns, self._lossless = [], lossless
        self.unused = set(patterns or ())
        for pattern, treatment in (patterns or {}).items():
            if treatment not in get_args(Treatment):
                raise ValueError(
                    f"policy {pattern!r}: {treatment!r} is not one of {get_args(Treatment)}"
                )
            with error_prefix(f"policy {pattern!r} is no regular expression: ", re.error):
                self._patterns.append((re.compile(pattern), treatment))

    def treatment(self, name: str, tensor: Tensor, lossy: bool) -> str:
        """Return the treatment of a tensor; ``lossy`` is whether it is a weight or a moment."""
        wide = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0
        for pattern, treatment in self._patterns:
            if pattern.fullmatch(name) and (treatment != "lossy" or wide):
                self.unused.discard(pattern.pattern)
                return treatment
        matrix = tensor.ndim > 1 and tensor.numel() >= _SMALLEST_LOSSY
        return "lossy" if lossy and not self._lossless and wide and matrix else "exact"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read, on the CPU.

    Attributes:
        step: Optimizer steps done.
        model: The state dict of the model.
        optimizer: The state dict of the optimizer; None if none was saved.
        extra: The ``extra`` that was given to :meth:`CheckpointChain.save`.
        parameters: Names of weights by the keys of ``optimizer["state"]``, as far as known.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: dict[str, Any]
    parameters: dict[Any, str]


class CheckpointChain:
    """A series of compressed training checkpoints in a folder.

    After ExCP (arXiv 2406.11257): a checkpoint holds the change of the weights since the previous
    checkpoint, and the optimizer's moments. Small changes and their moments are pruned; the rest is
    quantized by a codebook for each tensor and entropy coded. Errors do not accumulate, since each
    change is relative to the decoded weights. Unlike in the paper, a value may get a cheaper code
    than that of the nearest value, and pruned second moments are read as means of rows and columns.
    Every ``key_every``-th checkpoint is complete.

    Writing is atomic and damage is detected. Reading runs no code from the files.

    Example::

        with CheckpointChain("run/checkpoints", keep_last=3) as chain:
            for step in ...:
                ...
                chain.save(step, model, optimizer, {"scheduler": scheduler.state_dict()})

        saved = CheckpointChain("run/checkpoints").load("latest")
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.optimizer)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        mode: Literal["lossy", "lossless"] = "lossy",
        bits: int = Quality.bits,
        rate: float = Quality.rate,
        alpha: float = Quality.alpha,
        beta: float = Quality.beta,
        key_every: int = KEY_EVERY,
        key_bits: int = Quality.key_bits,
        policy: Mapping[str, str] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = True,
    ) -> None:
        """
        Args:
            folder: Folder for the checkpoints and nothing else; made when the first one is saved.
            mode: ``lossless`` keeps every bit; files are about a sixth smaller than the tensors.
            bits: 2 to 8; a change or moment becomes one of ``2 ** bits - 1`` values or is left out.
            rate: Price of a bit, as a share of the variance of the values: a larger price makes
                smaller files and larger errors. The price is raised for changes that are small
                beside their weights, and 5.5 times less for cores of tensor trains. 0 is the
                paper's k-means.
            alpha: Changes smaller than ``alpha / sqrt(mean(v))`` medians, at most 2.5 medians, are
                left out whatever the rate, v being the second moments. The paper has 5e-5 (with a
                rate of 0).
            beta: First moments below ``beta`` times the mean are left out; the paper has 2.
            key_every: Number of checkpoints that build on each other; the first of them, the key
                frame, is complete. At 1 all are.
            key_bits: 2 to 8; weights in a key frame, and others written without a base, become one
                of ``2 ** key_bits - 1`` values; cores of tensor trains get two bits more.
            policy: ``exact``, ``lossy`` or ``skip`` by regular expressions over whole names, as in
                ``{r"model\\.head\\..*": "exact", r"optimizer\\..*": "skip"}``; the first match
                counts. Without a match weights and moments that are matrices are lossy, all else
                is exact; ``lossy`` for other than weights and moments is exact, too.
            keep_last: Number of checkpoints to keep. Older ones are deleted once no later one
                builds on them, so up to ``key_every`` more stay; None keeps all.
            keep_every: Checkpoints of steps divisible by this number are never deleted.
            background: Compress and write in another thread, after the state is copied. The next
                call of a method raises errors of that thread.

        Raises:
            ValueError: If an argument is out of range, or ``folder`` a URL.
        """
        if mode not in ("lossy", "lossless"):
            raise ValueError(f"mode is {mode!r}: choose 'lossy' or 'lossless'")
        check_whole_numbers(0, bits=bits, key_bits=key_bits)
        for name, count in (("bits", bits), ("key_bits", key_bits)):
            if not 2 <= count <= 8:
                raise ValueError(f"{name} is {count}; it can be 2 to 8")
        for name, size in (("rate", rate), ("alpha", alpha), ("beta", beta)):
            if not 0 <= size < float("inf"):
                raise ValueError(f"{name} is {size}; it must be 0 or more")
        kept = {"key_every": key_every, "keep_last": keep_last, "keep_every": keep_every}
        check_whole_numbers(1, **{name: n for name, n in kept.items() if n is not None})
        self._archive = Archive(local_folder(folder))
        self._policy = Policy(policy, lossless=mode == "lossless")
        self._quality = Quality(bits, rate, alpha, beta, key_bits)
        self._key_every, self._keep_last, self._keep_every = key_every, keep_last, keep_every
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[None] | None = None
        self._calls = threading.RLock()
        """Held in each call that writes, in whatever thread."""
        self._last: tuple[Manifest, int, dict[str, Tensor]] | None = None
        """The last checkpoint, its place in its chain, and its weights as they will be read."""

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self._archive.folder

    def steps(self) -> list[int]:
        """Return the steps of all written checkpoints, even of damaged ones, in ascending order."""
        return self._archive.steps()

    def save(
        self,
        step: int,
        model: nn.Module | Mapping[str, Any],
        optimizer: Any = None,
        extra: Mapping[str, Any] | None = None,
        parameters: Mapping[Any, str] | None = None,
    ) -> None:
        """Add a checkpoint. Returns once the state is copied, unless ``background`` is off.

        Args:
            step: Optimizer steps done; more than at the last checkpoint.
            model: A module or its state dict, in which matrices that the optimizer does not train
                are exact; without an optimizer all may be lossy, even buffers.
            optimizer: An optimizer, its state, or None.
            extra: Tensors, numbers, strings, None, and dicts, lists and tuples of them.
            parameters: Names of weights by the keys of the optimizer's state; needed only if states
                are given instead of objects, and parameters are not in the model's order.

        Raises:
            ValueError: If the folder has a checkpoint of this or a later step.
            TypeError: If something to save is of another type; nothing is written.
            FolderInUseError: If another process writes to the folder.
            OSError: If the disk is full or the folder not writable; earlier checkpoints stay.
        """
        check_whole_numbers(0, step=step)
        step = int(step)
        with self._calls:
            self.wait()
            self.lock()
            if self._last is None:
                self._last = self._find_last()
            if later := [s for s in self.steps() if s >= step]:
                raise ValueError(
                    f"{self.folder} has a checkpoint of step {later[-1]}, so that of step {step} "
                    f"cannot be added: rewind({step - 1}) deletes those after, or choose another "
                    "folder"
                )
            began = time.perf_counter()
            snapshot = take_snapshot(model, optimizer, extra, self._policy.treatment, parameters)
            copying = time.perf_counter() - began
            if unused := listed(sorted(self._policy.unused)):
                log.warning("policy %s treats no tensor of step %d", unused, step)
                self._policy.unused.clear()
            if self._thread is None:
                self._write(step, snapshot, copying)
            else:
                self._pending = self._thread.submit(self._write, step, snapshot, copying)

    def lock(self) -> None:
        """Lock the folder for this process, as the first :meth:`save` does; raises its errors."""
        with self._calls:
            self._archive.lock()

    def wait(self) -> None:
        """Wait until every checkpoint is on the disk; raises errors of the background thread."""
        with self._calls:
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.result()

    def close(self) -> None:
        """Wait for the background thread, and unlock the folder; the object can be used again."""
        with self._calls:
            try:
                self.wait()
            finally:
                self._last = None
                self._archive.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rewind(self, step: int) -> None:
        """Delete all checkpoints after a step, to resume there."""
        check_whole_numbers(-1, step=step)
        with self._calls:
            self.wait()
            self.lock()
            self._archive.remove([s for s in self.steps() if s > step])
            self._last = None

    def _write(self, step: int, snapshot: Snapshot, copying: float) -> None:
        began = time.perf_counter()
        before = self._last
        if before is not None and before[1] + 1 >= self._key_every:
            before = None
        if before is not None:
            try:
                self._archive.check_base(before[0])
            except DamagedError as problem:
                log.warning(
                    "the checkpoint of step %d is complete, as what it would build on was removed "
                    "or changed since: %s", step, problem,
                )  # fmt: skip
                before = None
        streams, figures, weights = encode(snapshot, before and before[2], self._quality)
        file = packed(streams.done)
        encoding = time.perf_counter() - began
        manifest = self._archive.write(
            step,
            previous=None if before is None else (before[0].step, before[0].checksum),
            file=file,
            raw_bytes=snapshot.raw_bytes,
            streams=streams.sizes,
            figures={
                **figures,
                "seconds": {"copying": round(copying, 4), "encoding": round(encoding, 4)},
            },
        )
        self._last = (manifest, 0 if before is None else before[1] + 1, weights)
        self._retain()

    def _retain(self) -> None:
        """Delete checkpoints that no setting keeps and no kept checkpoint builds on."""
        if self._keep_last is None:
            return
        links: dict[int, int | None] = {}
        for step in self.steps():
            with contextlib.suppress(DamagedError):  # left as it is
                previous = self._archive.manifest(step).previous
                links[step] = previous and previous[0]
        every = self._keep_every
        kept: set[int] = set()
        for step in (
            *list(links)[-self._keep_last :],
            *(s for s in links if every and not s % every),
        ):
            at: int | None = step
            while at is not None and at not in kept and at in links:  # what it builds on
                kept.add(at)
                at = links[at]
        self._archive.remove(sorted(links.keys() - kept))

    def _find_last(self) -> tuple[Manifest, int, dict[str, Tensor]] | None:
        """Return the last sound checkpoint, and rename damaged ones after it; None without one."""
        for step in reversed(self.steps()):
            try:
                links = self._archive.links(step)
                weights = self._weights(links) or {}
            except DamagedError as problem:
                log.warning(
                    "the checkpoint of step %d cannot be built on, and is now %s: %s",
                    step, self._archive.set_aside(step).name, problem,
                )  # fmt: skip
            else:
                return links[-1], len(links) - 1, weights
        return None

    def load(self, step: int | Literal["latest"] = "latest") -> Checkpoint:
        """Read a checkpoint.

        Args:
            step: One of :meth:`steps`; ``latest`` is the last undamaged one, with a warning for
                each damaged checkpoint after it.

        Raises:
            FileNotFoundError: If there is no checkpoint of that step, or none that is undamaged.
            ValueError: If this checkpoint or one it builds on is damaged; the message names the
                file.
        """
        self.wait()
        steps = self.steps()
        if step != "latest":
            check_whole_numbers(0, step=step)
            if step not in steps:
                raise FileNotFoundError(
                    f"there is no checkpoint of step {step} in {self.folder}; there are "
                    f"{', '.join(map(str, steps)) or 'none'}"
                )
        for number in reversed(steps) if step == "latest" else (int(step),):
            try:
                links = self._archive.links(number)
                parts, _ = decode(self._archive.streams(links[-1]), self._weights(links[:-1]))
                return Checkpoint(number, **parts)
            except DamagedError as problem:
                if step != "latest":
                    raise
                log.warning("the checkpoint of step %d cannot be used: %s", number, problem)
        if steps != self.steps():  # another process wrote a checkpoint and removed those before it
            return self.load()
        raise FileNotFoundError(f"no checkpoint in {self.folder}" + (" is sound" if steps else ""))

    def verify(self, checked: Callable[[int], None] | None = None) -> dict[int, str | None]:
        """Read all checkpoints; return for each step the damage, or None if it can be restored.

        ``checked`` is called with every step after its check.
        """
        self.wait()
        found: dict[int, str | None] = {}
        before: tuple[str, dict[str, Tensor]] | None = None
        for step in self.steps():
            try:
                links = self._archive.links(step)
                last = links[-2].checksum if len(links) > 1 else None
                known = before[1] if before and before[0] == last else self._weights(links[:-1])
                _, weights = decode(self._archive.streams(links[-1]), known)
                before = (links[-1].checksum, weights)
                found[step] = None
            except DamagedError as problem:
                found[step] = str(problem)
            if checked is not None:
                checked(step)
        return found

    def _weights(self, links: list[Manifest]) -> dict[str, Tensor] | None:
        weights: dict[str, Tensor] | None = None
        for manifest in links:
            _, weights = decode(self._archive.streams(manifest), weights, model_only=True)
        return weights
