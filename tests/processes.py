"""Processes that talk over gloo."""

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
    store = dist.FileStore(f"{path}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    torch.save(find(rank), f"{path}/{rank}.pt")
    gc.collect()  # a DistributedDataParallel that outlives its group can wait for it forever
    dist.destroy_process_group()
