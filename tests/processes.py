"""Processes that talk over gloo."""

import contextlib
import gc

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from comera.train.processes import Processes


def in_two_processes(find, path):
    """What ``find(rank)``, a function of a module, returns in each; ``path`` is a folder."""
    return in_processes(2, find, path)


def in_processes(count, find, path):
    """What ``find(rank)`` returns in each of so many."""
    mp.start_processes(_process, (count, find, str(path)), nprocs=count, start_method="spawn")
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(count)]


def in_worlds(stages, path):
    """What each of ``(count, find)`` returns in so many processes, one stage after the other.

    Interpreters start once, as many as the largest stage has: starting them takes longer than most
    of what they do.
    """
    started = max(count for count, _ in stages)
    mp.start_processes(_stages, (stages, str(path)), nprocs=started, start_method="spawn")
    return [
        [torch.load(path / f"{k}-{rank}.pt", weights_only=False) for rank in range(count)]
        for k, (count, _) in enumerate(stages)
    ]


def this_process():
    """What ``joined`` yields in one that torchrun has started."""
    return Processes(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def said(call):
    """The message of the ``ValueError`` that a call raises: to be sent to the test."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def _process(rank, count, find, path):
    torch.set_num_threads(1)
    with _world(rank, count, f"{path}/store"):
        torch.save(find(rank), f"{path}/{rank}.pt")


def _stages(rank, stages, path):
    torch.set_num_threads(1)
    for number, (count, find) in enumerate(stages):
        if rank < count:
            with _world(rank, count, f"{path}/store-{number}"):
                torch.save(find(rank), f"{path}/{number}-{rank}.pt")


@contextlib.contextmanager
def _world(rank, count, path):
    store = dist.FileStore(path, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    yield
    gc.collect()  # a DistributedDataParallel that outlives its group can wait for it forever
    dist.destroy_process_group()
