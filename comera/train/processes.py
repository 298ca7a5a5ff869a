"""Processes that train one model together: which of them this is, and what they agree on."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

_T = TypeVar("_T")
_CPU = torch.device("cpu")


class OtherProcessError(RuntimeError):
    """Another process has failed; the message says which one, and why."""


@dataclass(frozen=True)
class Processes:
    """The processes that train one model; by default this one alone.

    What they agree on goes over the CPU, so that nothing waits for a GPU. Every process makes the
    same calls in the same order.

    Attributes:
        rank: The number of this process, counted from 0.
        count: Number of processes.
        local_rank: Its number among those of its machine.
        group: The process group; None for a process that no launcher started.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this is the one process that writes and logs."""
        return self.rank == 0

    def share_of(self, batch: Any) -> Any:
        """Return the rows of a batch that are this process': every ``count``-th, or all.

        So a batch that is split into equal parts along its rows has the same rows in part k,
        whatever the number of processes. A batch of ``count`` times as many rows is expected.
        """
        if self.count == 1:
            return batch

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            return leaf[self.rank :: self.count].contiguous()

        return tree_map(own, batch)

    def draw_(self, seed: int, step: int) -> None:
        """Set torch's random state for a step, another one in each of several processes.

        It depends on nothing from before, so that a resumed run draws the same numbers.
        """
        if self.count > 1:
            words = np.random.SeedSequence([seed % 2**64, step, self.rank]).generate_state(1, "u8")
            torch.manual_seed(int(words[0]) >> 1)

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process."""
        if self.count == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def sums(self, *numbers: float) -> list[float]:
        """Add up numbers over all processes, in float64."""
        if self.count == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values)
        return values.tolist()

    def gathered(self, rows: Tensor) -> Tensor:
        """Put together the rows that each process has, on the CPU, in the order of processes."""
        return torch.cat(self._all_gathered(rows.cpu())) if self.count > 1 else rows

    def from_first(self, call: Callable[[], _T]) -> _T:
        """Return in every process what a function returns in the first one, on its CPU.

        Raises:
            Exception: What the function raised, in the first process.
            OtherProcessError: The same in the others.
        """
        if self.count == 1:
            return call()
        outcome, problem = _attempt(call) if self.is_first else (None, None)
        found = [(outcome, _text_of(problem))]
        dist.broadcast_object_list(found, src=0, device=_CPU)
        self._raise_of(problem, {0: found[0][1]})
        assert found[0][1] is None, "raised above"
        return found[0][0]  # type: ignore[return-value]

    def together(self, call: Callable[[], _T]) -> _T:
        """Call a function in every process; if it raises in any, all of them raise.

        Raises:
            Exception: What the function raised, in the first process that failed.
            OtherProcessError: In the others.
        """
        if self.count == 1:
            return call()
        outcome, problem = _attempt(call)
        self._raise_of(problem, dict(enumerate(self._all_gathered(_text_of(problem)))))
        return outcome  # type: ignore[return-value]

    def in_turn(self, call: Callable[[], _T]) -> _T:
        """Call a function in the first process of each machine, and then in the others.

        So that one of them fills a cache that the others read. Raises as :meth:`together` does.
        """
        if self.count == 1:
            return call()
        leads = self.local_rank == 0
        outcome = self.together(lambda: call() if leads else None)
        others = self.together(lambda: None if leads else call())
        return outcome if leads else others  # type: ignore[return-value]

    def wait(self) -> None:
        """Wait until every process has come here."""
        self.any(False)

    def _all_gathered(self, mine: _T) -> list[_T]:
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine, group=None)
        return found

    def _raise_of(self, problem: Exception | None, texts: Mapping[int, str | None]) -> None:
        failed = [rank for rank, text in texts.items() if text is not None]
        if not failed:
            return
        if problem is not None and self.rank == failed[0]:
            raise problem
        raise OtherProcessError(f"process {failed[0]}: {texts[failed[0]]}") from problem


def _attempt(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return call(), None
    except Exception as problem:  # whatever it is: the others are told
        return None, problem


def _text_of(problem: Exception | None) -> str | None:
    if problem is None:
        return None
    plain = isinstance(problem, ValueError | OSError)
    return str(problem) if plain else f"{type(problem).__name__}: {problem}"


def count_started(environment: Mapping[str, str]) -> int:
    """Count the processes that a launcher such as torchrun has started, of which this is one."""
    started = any(environment.get(name) for name in ("RANK", "LOCAL_RANK"))
    try:
        return int(environment.get("WORLD_SIZE") or 1) if started else 1
    except ValueError:
        return 1


def rank_started(environment: Mapping[str, str]) -> int:
    """Return the number of this process among those that a launcher has started."""
    return int(environment.get("RANK") or environment.get("LOCAL_RANK") or 0)


@contextlib.contextmanager
def joined(cuda: bool, minutes: float) -> Iterator[Processes]:
    """Join the processes that torchrun has started, over gloo, and over NCCL between GPUs.

    Args:
        cuda: Whether they train on GPUs; each takes the one of its local number.
        minutes: How long a process waits for the others.

    Raises:
        ConnectionError: If inside the connection to another process is lost.
        ValueError: If there are fewer GPUs than processes on this machine, or processes of several
            machines have been started again and could not find each other.
    """
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"there are {torch.cuda.device_count()} GPUs for "
                f"{os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)} processes of this machine: "
                "start one process a GPU, --nproc-per-node=gpu"
            )
        torch.cuda.set_device(local_rank)
    timeout = timedelta(minutes=minutes)
    store, rank, count = _meeting_point(os.environ, timeout)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=count)
    try:
        yield Processes(rank, count, local_rank, dist.group.WORLD)
    except RuntimeError as problem:
        if "gloo" in str(problem) or isinstance(problem, dist.DistError):
            raise ConnectionError(f"another process is gone: {problem}") from problem
        raise
    # Not after an error: the others may be gone, or wait for what does not come.
    gc.collect()  # a DistributedDataParallel that outlives its group can wait for it forever
    dist.destroy_process_group()


_SHARED_STORE = (
    "torchrun keeps the addresses of processes of several machines through a restart, and those "
    "that it has started again would look for the ones that are gone (pytorch issue 135712): set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine before torchrun. The same command "
    "resumes the run"
)


def _meeting_point(
    environment: Mapping[str, str], timeout: timedelta
) -> tuple[dist.Store, int, int]:
    """Return where processes find each other, the rank of this one, and how many there are.

    Without those that ran before a restart, whose addresses torchrun does not clear away. On one
    machine it counts restarts; on several each counts its own.
    """
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if int(environment.get("GROUP_WORLD_SIZE") or 1) > 1:
        if restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ValueError(_SHARED_STORE)
        restarts = 0
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"restart-{restarts}", store), rank, count
