"""Two processes that talk over gloo."""

import gc

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_two_processes(find, path):
    """What ``find(rank)``, a function of a module, returns in each; ``path`` is a folder."""
    mp.start_processes(_process, (find, str(path)), nprocs=2, start_method="spawn")
    return [torch.load(path / f"{rank}.pt") for rank in range(2)]


def _process(rank, find, path):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(find(rank), f"{path}/{rank}.pt")
    gc.collect()  # a DistributedDataParallel that outlives its group can wait for it forever
    dist.destroy_process_group()
