"""Coordinate processes that train one model together, and handle signals that stop them."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from comera.rank.agreement import from_all

_T = TypeVar("_T")
_CPU = torch.device("cpu")


class OtherProcessError(RuntimeError):
    """Raised if another process has failed; the message says which one, and why."""


@dataclass(frozen=True)
class Processes:
    """The processes that train one model; by default this one alone.

    They make the same calls in the same order, and communicate over the CPU, not waiting for a GPU.
    ``rank`` is the number of this process, counted from 0, ``local_rank`` that among those of its
    machine; ``group`` is None for a process that no launcher started.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share_of(self, batch: Any) -> Any:
        """Return this process' rows of a batch: every ``count``-th row from its number on."""
        if self.count == 1:
            return batch

        def own(leaf: Tensor) -> Tensor:
            return leaf[self.rank :: self.count].contiguous() if leaf.dim() else leaf

        return tree_map_only(Tensor, own, batch)

    def draw_(self, seed: int, step: int) -> None:
        """Seed torch's random state from seed, step and process, if there are several processes."""
        if self.count > 1:
            words = np.random.SeedSequence([seed % 2**64, step, self.rank]).generate_state(1, "u8")
            torch.manual_seed(int(words[0]) >> 1)

    def any(self, flag: bool) -> bool:
        return bool(self.sums(flag)[0])

    def sums(self, *numbers: float) -> list[float]:
        """Return the sums of numbers over all processes, in float64."""
        if self.count == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(values)
        return values.tolist()

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes on the CPU, in the order of processes."""
        if self.count == 1:
            return rows
        return torch.cat(list(from_all(self.group, rows.cpu()).values()))

    def from_first(self, call: Callable[[], _T]) -> _T:
        """Call a function in the first process; return its result, on the CPU, in every process.

        If the function fails, the first process raises its error, the others ``OtherProcessError``.
        """
        if self.count == 1:
            return call()
        found = [self.together(lambda: call() if self.is_first else None)]
        dist.broadcast_object_list(found, src=0, device=_CPU)
        return found[0]  # type: ignore[return-value]

    def together(self, call: Callable[[], _T]) -> _T:
        """Call a function in every process; if it fails in any, all of them raise an error.

        The first process that fails raises its own error, the others ``OtherProcessError``.
        """
        outcome, problem, text = None, None, None
        try:
            outcome = call()
        except Exception as error:  # the others raise too
            problem, text = error, str(error)
            if not isinstance(error, ValueError | OSError):
                text = f"{type(error).__name__}: {error}"
        texts = from_all(self.group, text)
        for rank, text in texts.items():  # the first that failed
            if problem is not None and rank == self.rank:
                raise problem
            if text is not None:
                raise OtherProcessError(f"process {rank}: {text}") from problem
        return outcome  # type: ignore[return-value]

    def in_turn(self, call: Callable[[], _T]) -> _T:
        """Call a function in the first process of each machine, then in the others.

        So the first process can fill a cache that the others read. Errors as in :meth:`together`.
        """
        leads = self.local_rank == 0
        outcome = self.together(lambda: call() if leads else None)
        others = self.together(lambda: None if leads else call())
        return outcome if leads else others  # type: ignore[return-value]


def count_started(environment: Mapping[str, str]) -> int:
    """Return the number of processes that a launcher such as torchrun has started."""
    started = any(environment.get(name) for name in ("RANK", "LOCAL_RANK"))
    try:
        return int(environment.get("WORLD_SIZE") or 1) if started else 1
    except ValueError:
        return 1


def rank_started(environment: Mapping[str, str]) -> int:
    """Return the number of this process among those that a launcher has started."""
    name = "RANK" if environment.get("RANK") else "LOCAL_RANK"
    try:
        return int(environment.get(name) or 0)
    except ValueError:
        raise ValueError(
            f"{name}={environment[name]}, in the environment, must be a whole number: a launcher "
            "such as torchrun sets it"
        ) from None


@contextlib.contextmanager
def joined(cuda: bool, minutes: float) -> Iterator[Processes]:
    """Join the processes that torchrun has started, over gloo, and over NCCL between GPUs.

    With ``cuda`` each process takes the GPU of its local number; ``minutes`` is how long a process
    waits for the others. Raises ``ConnectionError`` if the connection to another process is lost
    inside the context, and ``ValueError`` if this machine has fewer GPUs than processes, or
    processes of several machines were started again and could not find each other.
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
    # Without the processes that ran before a restart, whose addresses torchrun does not clear away.
    # On one machine it counts restarts; on several each counts its own.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if int(os.environ.get("GROUP_WORLD_SIZE") or 1) > 1:
        if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise ValueError(
                "torchrun keeps the addresses of processes of several machines through a restart, "
                "and those that it has started again would look for the ones that are gone "
                "(pytorch issue 135712): set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine "
                "before torchrun. The same command resumes the run"
            )
        restarts = 0
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"restart-{restarts}", store)
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


PARENT = "COMERA_PARENT"
"""Environment variable with the process id of the parent with which a run ends."""


def stop_with_parent() -> None:
    """Send this process SIGINT once its parent has ended, if ``PARENT`` is set."""
    parent = os.environ.pop(PARENT, None)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def on_stop_signals(heard: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call ``heard`` with the number of each SIGINT, SIGTERM and SIGHUP instead of ending.

    An ignored SIGHUP, as under nohup, stays ignored; a SIGHUP after another signal does not count.
    After a SIGHUP terminal output is dropped. Yields a function that restores the handlers of
    SIGINT and SIGTERM. Works in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    terminals = [number for number in (1, 2) if os.isatty(number)]
    numbers: list[int] = []

    def hear(number: int, frame: Any) -> None:
        again = bool(numbers)
        numbers.append(number)
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)
        if number != signal.SIGHUP or not again:
            heard(number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
    before = {number: signal.signal(number, hear) for number in caught}

    def give_back() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, before[number])

    try:
        yield give_back
    finally:
        give_back()
        if not ignored:  # a shell may send it only now, while the state is being saved
            hung_up = signal.SIGHUP in numbers
            signal.signal(signal.SIGHUP, signal.SIG_IGN if hung_up else before[signal.SIGHUP])
