"""Run a training step as one CUDA graph as soon as it repeats itself.

The first steps run eagerly on the stream that is captured later. Once nothing has changed for a few
steps, the step is recorded and then replayed; a change drops the recording, and steps run eagerly
again. Batches that differ only in a plain value have a recording for each of the last few values.
"""

import contextlib
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.ops.context import static_shapes
from comera.train import graphs
from comera.train.data_parallel import Together
from comera.train.host_state import HostState, host_random_state, set_host_random_state

log = logging.getLogger("comera")

WARM_UP = 3
"""Steps alike before one is recorded, as torch recommends."""

_PATIENCE = 100
"""Steps without a recording after which a warning names the changes."""

_VARIANTS = 2
"""Recordings kept of batches that differ in plain values alone."""


class _Course(enum.IntEnum):
    """Ways to run a batch; all processes take the lowest that any of them can."""

    FALL_BACK = 0
    EAGER = 1
    RECORD = 2
    REPLAY = 3


class _Kept(NamedTuple):
    """A recording and the batch that it reads."""

    recording: graphs.CudaRecording
    static: graphs.StaticBatch


@dataclass(frozen=True)
class StepDescription:
    """Report on a training step: whether it is ``captured`` as one CUDA graph, and why.

    ``captures`` is the number of graphs captured so far, ``replays`` the steps that replayed one,
    ``contents`` the nodes, kernels by name and bytes of the present graph.
    """

    captured: bool
    why: str
    captures: int = 0
    replays: int = 0
    contents: graphs.Contents | None = None

    def __str__(self) -> str:
        lines = [f"the step runs {'as one CUDA graph' if self.captured else 'eagerly'}: {self.why}"]
        if self.captures:
            lines.append(f"graphs captured: {self.captures}; steps replayed: {self.replays}")
        if (found := self.contents) is not None:
            lines.append(f"memory of the graph: {found.pool_bytes:,} bytes")
            lines.append(f"peak with all tensors outside it: {found.peak_bytes:,} bytes")
            if found.nodes is None or found.kernels is None:
                lines.append("its nodes can be counted with the package cuda-bindings")
            else:
                kinds = ", ".join(f"{count} {kind}" for kind, count in found.nodes.items())
                lines.append(f"nodes: {sum(found.nodes.values())} ({kinds})")
                often = sorted(found.kernels.items(), key=lambda pair: -pair[1])
                lines += [f"{count:6}  {name}" for name, count in often]
        return "\n".join(lines)


class Capture:
    """Runs the update of a training step, by replaying a CUDA graph of it if possible.

    ``update`` updates on a batch and returns its loss, without code on the host that depends on
    values of tensors; ``host`` is the state besides the batch that a recording depends on. A step
    is recorded after ``warm_up`` equal ones in a row. ``together`` makes decisions common to all
    processes, which make the same calls.
    """

    def __init__(
        self,
        update: Callable[[Any], Tensor],
        host: HostState,
        recorder: graphs.CudaGraphs,
        device: torch.device,
        warm_up: int,
        together: Together,
    ) -> None:
        self._update, self._host = update, host
        self._recorder, self._device = recorder, device
        self._warm_up, self._together = warm_up, together
        self.why_not: str | None = None
        self._kept: list[_Kept] = []  # the latest last
        self._state: dict[str, Any] = {}  # that of the recordings, or of the last step without one
        self._last: graphs.Signature | None = None
        self._alike = 0  # steps so far that were like the last one
        self._waiting = 0  # steps since there was a recording
        self._changes: set[str] = set()
        self._said_batch = self._said_changes = False
        self._aside = False  # whether a step ran on the stream of the recording
        self._captures = self._replays = 0
        why_not = host.why_not_capturable(device)
        if not self._together.least(why_not is None):
            self._fall_back(why_not)

    def __call__(self, batch: Any) -> Tensor:
        """Run one update; return its loss, a tensor that later updates do not change."""
        try:
            return self._run(batch)
        except BaseException:  # the step is not one of those that were alike
            self._alike, self._last = 0, None
            raise

    def _run(self, batch: Any) -> Tensor:
        if self.why_not is not None:
            return self._eagerly(batch)
        with static_shapes():  # in all steps, so that recorded ones do not differ from the others
            state, like = self._host.identity(), graphs.signature(batch)
            # A reduction must be in the graph of every process or of none.
            course, problem = self._possible(state, like, batch)
            course = _Course(self._together.least(course))
            if course is _Course.EAGER:
                self._aside = True
                return self._eagerly(batch)
            if course is _Course.RECORD:
                problem = self._record(state, batch)
            if course is not _Course.FALL_BACK and (kept := self._find(like)):
                return self._replay(kept, like, batch)
        self._fall_back(problem)
        return self._eagerly(batch)

    def _eagerly(self, batch: Any) -> Tensor:
        with self._recorder.stream() if self._aside else contextlib.nullcontext():
            return self._update(batch)

    def _possible(
        self, state: dict[str, Any], like: graphs.Signature, batch: Any
    ) -> tuple[_Course, str | None]:
        """Return how this process can best run the step, and the reason if it must fall back."""
        if state != self._state:
            self.free()
        if self._find(like) is not None:
            return _Course.REPLAY, None
        device = self._device
        problem = graphs.why_not_static(batch, device) or self._host.why_not_capturable(device)
        if problem is not None:
            return _Course.FALL_BACK, problem
        self._compare(state, like, batch)
        return (_Course.EAGER if self._alike < self._warm_up else _Course.RECORD), None

    def _fall_back(self, why: str | None) -> None:
        """Run eagerly from now on, and warn; ``why`` is None if another process decided."""
        self.free()
        self.why_not = self._together.gathered(why)
        if self._together.speaks:
            log.warning("the training step is not captured as a CUDA graph: %s", self.why_not)

    def free(self, number: int | None = None) -> None:
        for kept in self._kept[:number]:
            kept.recording.free()
        del self._kept[:number]

    def _find(self, like: graphs.Signature) -> _Kept | None:
        return next((kept for kept in self._kept if kept.static.signature == like), None)

    def describe(self) -> StepDescription:
        counts = self._captures, self._replays
        if self.why_not is not None:
            return StepDescription(False, self.why_not, *counts)
        if not self._kept:
            needed = f"it is captured once {self._warm_up} steps in a row were alike"
            return StepDescription(False, f"{needed}; {self._alike} were", *counts)
        contents = self._kept[-1].recording.contents()
        return StepDescription(True, "nothing has changed since it was captured", *counts, contents)

    def _replay(self, kept: _Kept, like: graphs.Signature, batch: Any) -> Tensor:
        kept.static.fill_(batch)
        kept.recording.replay()
        self._replays += 1
        self._waiting = 0
        if self._last is None or not graphs.is_variant(self._last, like):
            self._alike, self._last = 0, None  # batches of another shape have to come in a row
        return kept.recording.output.clone()

    def _compare(self, state: dict[str, Any], like: graphs.Signature, batch: Any) -> None:
        """Count equal steps in a row; warn if a batch differs, or if steps keep changing."""
        changed = {name for name in state if state[name] != self._state.get(name)}
        if self._last is not None and like != self._last:
            changed.add("the batch")
        self._alike = 0 if changed or self._last is None else self._alike + 1
        self._state, self._last = state, like
        self._waiting += 1
        self._changes |= changed if self._waiting > self._warm_up else set()
        if self._kept and not self._said_batch:
            known = self._kept[-1].static.signature
            if not graphs.is_shorter(like, known) and not graphs.is_variant(like, known):
                self._said_batch = True
                log.warning(
                    "a batch does not fit the captured training step, which therefore runs "
                    "eagerly; it is captured anew after %d such batches in a row: %s. Pad batches "
                    "to one shape to keep the graph",
                    self._warm_up, graphs.difference(known, like, batch),
                )  # fmt: skip
        if self._waiting == _PATIENCE and not self._said_changes:
            self._said_changes = True
            log.warning(
                "the training step still runs eagerly after %d steps, since no %d in a row are "
                "alike: %s",
                _PATIENCE, self._warm_up, ", ".join(sorted(self._changes)),
            )  # fmt: skip

    def _record(self, state: dict[str, Any], batch: Any) -> str | None:
        """Record the update if all processes can; return why this process could not, or None."""
        static = graphs.StaticBatch(batch)
        variants = [
            kept
            for kept in self._kept
            if kept.static.signature != static.signature
            and graphs.is_variant(kept.static.signature, static.signature)
        ]
        # Before the next recording, or the memory of two graphs would be taken.
        wanted = variants[1 - _VARIANTS :]
        self._kept = [kept for kept in self._kept if kept not in wanted] + wanted
        self.free(len(self._kept) - len(wanted))
        beside = self._kept[0].recording if self._kept else None
        random, put_back = host_random_state(), self._host.hold()
        recording, problem = None, None
        try:
            recording = self._recorder.record(lambda: self._update(static.value), beside)
            # If the step leaves other addresses or settings than it began with, the second replay
            # would begin with the wrong ones.
            after = self._host.identity()
            if names := ", ".join(name for name in state if state[name] != after[name]):
                problem = f"a step changes what the next one would have to start from: {names}"
        except Exception as error:  # eager steps go on, or raise it themselves
            problem = f"{type(error).__name__}: {error}"
        except BaseException:  # Ctrl-C
            put_back()
            raise
        finally:
            set_host_random_state(random)  # recording is no step
        if self._together.least(problem is None):
            assert recording is not None
            self._kept.append(_Kept(recording, static))
            self._captures += 1
            return None
        if recording is not None:
            recording.free()
        put_back()
        return problem
