"""Processes of their own, and such as talk over gloo."""

import contextlib
import functools
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from comera.train.processes import Processes


def in_two_processes(find, path):
    """What ``find(rank)``, a function of a module, returns in each; ``path`` is a folder."""
    return in_processes(2, find, path)


def in_processes(count, find, path):
    """What ``find(rank)`` returns in each of so many."""
    start(_process, (count, find, str(path)), count)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(count)]


def in_worlds(stages, path):
    """What each of ``(count, find)`` returns in so many processes, one stage after the other.

    Processes start once, as many as the largest stage has.
    """
    started = max(count for count, _ in stages)
    start(_stages, (stages, str(path)), started)
    return [
        [torch.load(path / f"{k}-{rank}.pt", weights_only=False) for rank in range(count)]
        for k, (count, _) in enumerate(stages)
    ]


def start(work, given, count):
    """Run ``work(rank, *given)`` in so many processes, until all have ended."""
    given = (dict(os.environ), work, *given)
    start_method = forking().get_start_method()
    mp.start_processes(_of_rank, given, nprocs=count, start_method=start_method)


def in_a_process(find, *given, **environment):
    """What ``find(*given)``, a function of a module, returns in one with these variables set."""
    receive, send = forking().Pipe(duplex=False)
    variables = {**os.environ, **environment}
    process = forking().Process(target=_answer, args=(variables, send, find, *given))
    process.start()
    send.close()
    try:
        return receive.recv()  # EOFError: it raised, and has printed what
    finally:
        process.join()


def killed(work, *given, after):
    """The exit code of ``work(*given, ready)``, killed so many seconds after it has sent a word.

    With None it ends by itself.
    """
    receive, ready = forking().Pipe(duplex=False)
    process = forking().Process(target=work, args=(*given, ready))
    process.start()
    ready.close()
    receive.recv()
    if after is not None:
        time.sleep(after)
        process.kill()
    process.join(60)
    return process.exitcode


@functools.cache
def forking():
    """The context of processes that are forked from one that has imported what takes seconds.

    Its environment is that of the first call; processes of :func:`start` and :func:`in_a_process`
    see the present one.
    """
    if sys.platform == "win32":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["comera", "comera.recipes.run", "torch._dynamo", "torch.distributed.fsdp", "pytest"]
    )
    return context


def _of_rank(rank, environment, work, *given):
    _see(environment)
    work(rank, *given)


def _answer(environment, send, find, *given):
    _see(environment)
    send.send(find(*given))


def _see(environment):
    gc.freeze()  # what was imported before the fork is not looked through again and again
    os.environ.clear()
    os.environ.update(environment)


def this_process():
    """What ``joined`` yields in one that torchrun has started."""
    return Processes(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def said(call):
    """The message of the error that a call raises: to be sent to the test."""
    try:
        call()
    except (ValueError, IndexError, RuntimeError) as error:
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
