"""A training step that runs as one CUDA graph as soon as it repeats itself.

The first steps run eagerly, for real, on the stream that is captured later: they load every kernel,
make the optimizer's state, and raise what is wrong with the model where it can be read. Once
nothing has changed for a few of them the step is recorded, and from then on replayed. When
something does change, such as the stage of rank learning or the address of a parameter, the
recording is dropped and the same begins again. So no state is ever set back: every step trains.
Batches that differ in a plain value alone, such as whether anything in them is padding, have a
recording for each of the last few values.
Eager steps stay on that stream to the end, a failed recording or not: autograd's accumulators
remember where they first ran.
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
from comera.train.data_parallel import Alone
from comera.train.graphs import (
    Contents,
    Graphs,
    Recording,
    Signature,
    StaticBatch,
    difference,
    is_shorter,
    is_variant,
    signature,
    why_not_static,
)
from comera.train.host_state import HostState, host_random_state, set_host_random_state

log = logging.getLogger("comera")

WARM_UP = 3
"""Steps alike before one is recorded, what torch asks for."""

_PATIENCE = 100
"""Steps without a recording after which it is said what keeps changing."""


_VARIANTS = 2
"""Recordings that are kept of batches which differ in plain values alone."""


class _Course(enum.IntEnum):
    """Ways to run a batch; of several processes all take the least that one of them can."""

    FALL_BACK = 0
    EAGER = 1
    RECORD = 2
    REPLAY = 3


class _Kept(NamedTuple):
    """A recording and the batch that it reads."""

    recording: Recording
    static: StaticBatch


@dataclass(frozen=True)
class StepDescription:
    """Report on a training step: eager, or recorded.

    Attributes:
        captured: Whether it runs as one CUDA graph.
        why: The reason in words.
        captures: How many graphs were captured so far.
        replays: Steps of all of them.
        contents: Nodes, kernels by name and bytes of the present one.
    """

    captured: bool
    why: str
    captures: int = 0
    replays: int = 0
    contents: Contents | None = None

    def __str__(self) -> str:
        lines = [f"the step runs {'as one CUDA graph' if self.captured else 'eagerly'}: {self.why}"]
        if self.captures:
            lines.append(f"graphs captured: {self.captures}; steps replayed: {self.replays}")
        if self.contents is not None:
            lines.append(f"memory of the graph: {self.contents.pool_bytes:,} bytes")
            if self.contents.peak_bytes is not None:
                lines.append(
                    f"peak with all tensors outside it: {self.contents.peak_bytes:,} bytes"
                )
            if self.contents.nodes is None or self.contents.kernels is None:
                lines.append("its nodes can be counted with the package cuda-bindings")
            else:
                kinds = ", ".join(f"{count} {kind}" for kind, count in self.contents.nodes.items())
                lines.append(f"nodes: {sum(self.contents.nodes.values())} ({kinds})")
                often = sorted(self.contents.kernels.items(), key=lambda pair: -pair[1])
                lines += [f"{count:6}  {name}" for name, count in often]
        return "\n".join(lines)


class Capture:
    """Runs an update, as a recording where it can be one.

    Args:
        update: The whole update for a batch; returns its loss. Nothing of it may depend on values.
        host: What else a recording depends on.
        graphs: Records it.
        device: The device of the model.
        warm_up: Steps alike before one is recorded.
        together: How the processes that train the model decide. All make the same calls.
    """

    def __init__(
        self,
        update: Callable[[Any], Tensor],
        host: HostState,
        graphs: Graphs,
        device: torch.device,
        warm_up: int = WARM_UP,
        together: Alone | None = None,
    ) -> None:
        self._update, self._host = update, host
        self._graphs, self._device = graphs, device
        self._warm_up, self._together = warm_up, together or Alone()
        self.why_not: str | None = None
        self._kept: list[_Kept] = []  # the latest last
        self._state: dict[str, Any] = {}  # that of the recordings, or of the last step without one
        self._last: Signature | None = None
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
        """Run one update; returns its loss, a tensor of the caller's own."""
        try:
            return self._run(batch)
        except BaseException:  # the step is not one of those that were alike
            self._alike, self._last = 0, None
            raise

    def _run(self, batch: Any) -> Tensor:
        """Update in the way that all processes can: as a recording, or eagerly."""
        if self.why_not is not None:
            return self._eagerly(batch)
        with static_shapes():  # in all steps, so that recorded ones do not differ from the others
            state = self._host.identity()
            # What this process could do, then the least that any can: a reduction must be in the
            # graph of every process or of none.
            course, problem = self._possible(state, batch)
            course = _Course(self._together.least(course))
            if course is _Course.EAGER:
                self._aside = True
                return self._eagerly(batch)
            if course is _Course.RECORD:
                problem = self._record(state, batch)
                course = _Course.REPLAY if self._find(signature(batch)) else _Course.FALL_BACK
            if course is _Course.REPLAY:
                return self._replay(batch)
        self._fall_back(problem)
        return self._eagerly(batch)

    def _eagerly(self, batch: Any) -> Tensor:
        """Update without a recording, on the stream on which earlier steps ran."""
        with self._graphs.stream() if self._aside else contextlib.nullcontext():
            return self._update(batch)

    def _possible(self, state: dict[str, Any], batch: Any) -> tuple[_Course, str | None]:
        """Decide what this process can do with a batch, and say why not more."""
        like = signature(batch)
        if self._fits(state) and self._find(like) is not None:
            return _Course.REPLAY, None
        problem = why_not_static(batch, self._device)
        problem = problem or self._host.why_not_capturable(self._device)
        if problem is not None:
            return _Course.FALL_BACK, problem
        self._compare(state, like, batch)
        return (_Course.EAGER if self._alike < self._warm_up else _Course.RECORD), None

    def _fall_back(self, why: str | None) -> None:
        """Run eagerly from now on, and say why; None where that is another process' reason."""
        self.free()
        self.why_not = self._together.gathered(why)
        if self._together.speaks:
            log.warning("the training step is not captured as a CUDA graph: %s", self.why_not)

    def free(self) -> None:
        """Drop all recordings and their memory."""
        self._free_but([])

    def _free_but(self, wanted: list[_Kept]) -> None:
        for kept in self._kept:
            if kept not in wanted:
                kept.recording.free()
        self._kept = wanted

    def _find(self, like: Signature) -> _Kept | None:
        """Return the recording for batches of this signature, if there is one."""
        return next((kept for kept in self._kept if kept.static.signature == like), None)

    def describe(self) -> StepDescription:
        """Return a text on how the update runs now, and what has been recorded so far."""
        counts = self._captures, self._replays
        if self.why_not is not None:
            return StepDescription(False, self.why_not, *counts)
        if not self._kept:
            why = (
                f"it is captured once {self._warm_up} steps in a row were alike; {self._alike} were"
            )
            return StepDescription(False, why, *counts)
        contents = self._kept[-1].recording.contents()
        return StepDescription(True, "nothing has changed since it was captured", *counts, contents)

    def _fits(self, state: dict[str, Any]) -> bool:
        """Check that there are recordings of this state; those of another are dropped."""
        if not self._kept:
            return False
        if state == self._state:
            return True
        self.free()
        return False

    def _replay(self, batch: Any) -> Tensor:
        like = signature(batch)
        kept = self._find(like)
        assert kept is not None
        kept.static.fill_(batch)
        kept.recording.replay()
        self._replays += 1
        self._waiting = 0
        if self._last is None or not is_variant(self._last, like):
            self._alike, self._last = 0, None  # batches of another shape have to come in a row
        return kept.recording.output.clone()

    def _compare(self, state: dict[str, Any], like: Signature, batch: Any) -> None:
        """Count how long steps have been alike, and warn where they never are."""
        changed = {name for name in state if state[name] != self._state.get(name)}
        if self._last is not None and like != self._last:
            changed.add("the batch")
        self._alike = 0 if changed or self._last is None else self._alike + 1
        self._state, self._last = state, like
        self._waiting += 1
        self._changes |= changed if self._waiting > self._warm_up else set()
        if self._kept:
            known = self._kept[-1].static.signature
            if not is_shorter(like, known) and not is_variant(like, known):
                self._say_batch(difference(known, like, batch))
        if self._waiting == _PATIENCE and not self._said_changes:
            self._said_changes = True
            log.warning(
                "the training step still runs eagerly after %d steps, since no %d in a row are "
                "alike: %s",
                _PATIENCE, self._warm_up, ", ".join(sorted(self._changes)),
            )  # fmt: skip

    def _say_batch(self, what: str) -> None:
        if not self._said_batch:
            self._said_batch = True
            log.warning(
                "a batch does not fit the captured training step, which therefore runs eagerly; it "
                "is captured anew after %d such batches in a row: %s. Pad batches to one shape to "
                "keep the graph",
                self._warm_up, what,
            )  # fmt: skip

    def _record(self, state: dict[str, Any], batch: Any) -> str | None:
        """Record the update, if all processes can; returns why this one could not."""
        static = StaticBatch(batch)
        variants = [
            kept
            for kept in self._kept
            if kept.static.signature != static.signature
            and is_variant(kept.static.signature, static.signature)
        ]
        # First, or the memory of two graphs would be taken.
        self._free_but(variants[1 - _VARIANTS :])
        beside = self._kept[0].recording if self._kept else None
        random, put_back = host_random_state(), self._host.hold()
        recording, problem = None, None
        try:
            recording = self._graphs.record(lambda: self._update(static.value), beside)
        except Exception as error:  # whatever it is: eager steps go on, or raise it themselves
            problem = f"{type(error).__name__}: {error}"
        except BaseException:  # Ctrl-C
            put_back()
            raise
        finally:
            set_host_random_state(random)  # recording is no step
        if recording is not None:
            # A replay repeats what was recorded: were the step to leave other addresses or
            # settings than it began with, the second replay would begin with the wrong ones.
            after = self._host.identity()
            names = ", ".join(name for name in state if state[name] != after[name])
            if names:
                problem = f"a step changes what the next one would have to start from: {names}"
        if self._together.least(problem is None):
            assert recording is not None
            self._kept.append(_Kept(recording, static))
            self._captures += 1
            return None
        if recording is not None:
            recording.free()
        put_back()
        return problem
