"""What processes that train one model together must decide alike."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Alone:
    """Decisions of a process that has no others to ask.

    Attributes:
        speaks: Whether what all have decided is to be said here.
    """

    speaks = True

    def least(self, number: int) -> int:
        """The smallest number that any process gives."""
        return number

    def gathered(self, text: str | None) -> str:
        """What each process has to say, as one text."""
        return text or ""


class Together(Alone):
    """Decisions that several processes take together; each call waits for all of them.

    NCCL wants that: a collective operation is part of a graph in every process or in none, and
    the graphs that hold it are those of one capture (NCCL user guide, "Using NCCL with CUDA
    Graphs").

    Args:
        group: Whose processes. They talk over a group of their own on the CPU, so that no one
            waits for a GPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.speaks = dist.get_rank() == ranks[0]

    def least(self, number: int) -> int:
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return int(value)

    def gathered(self, text: str | None) -> str:
        texts: list[str | None] = [None] * len(self._ranks)
        dist.all_gather_object(texts, text, group=self._group)
        if all(each == text for each in texts):
            return text or ""
        return "; ".join(_by_process(self._ranks, texts))


def decisions_of(group: dist.ProcessGroup | None) -> Alone:
    """How the processes of a group decide; all of them must call it."""
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    return Together(group)


def _by_process(ranks: Sequence[int], texts: Sequence[str | None]) -> list[str]:
    """Each text once, with the processes it comes from."""
    sources: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text is not None:
            sources.setdefault(text, []).append(rank)
    return [f"in process {', '.join(map(str, of))}: {text}" for text, of in sources.items()]
