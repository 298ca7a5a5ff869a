"""A training step whose model several processes train, each on batches of its own."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comera.surgery.truncate import renew_

WARM_UP_TOGETHER = 11
"""Steps alike before one is recorded: DistributedDataParallel measures its first ten, on the host
(PyTorch's notes on CUDA semantics, "Usage with DistributedDataParallel")."""

_NEVER = 2**31 - 1
_FIRST_CAPTURABLE_NCCL = (2, 9, 6)


class DataParallel:
    """The ``DistributedDataParallel`` of a training step, its buffers made anew where need be.

    It sorts its gradients into buffers once and for all, by the sizes its parameters have, and
    ties each to the stream it was made on. Ranks that are truncated change the sizes, and a CUDA
    graph is captured on a stream of its own, so the buffers are made anew for either.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.parallel.DistributedDataParallel) -> None:
        self._model = model
        self._made_for: object = self._present()
        self._renewed = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes that train the model."""
        return self._model.process_group

    def held_back(self) -> AbstractContextManager[None]:
        """Put a forward and a backward pass off averaging: their gradients wait for a later one."""
        return self._model.no_sync()

    def prepare_(self) -> None:
        """Make buffers anew if parameters have changed size, or the stream; before each step."""
        present = self._present()
        if self._made_for != present:
            self._renew_()
            self._made_for = present
            self._renewed += 1

    def forget(self) -> None:
        """Rebuild the buffers: a backward pass broke off, and they wait for its rest."""
        self._made_for = None

    @property
    def times_renewed(self) -> int:
        """Number of rebuilds of the buffers; a recording writes to those it was made with."""
        return self._renewed

    def why_not_capturable(self, device: torch.device) -> str | None:
        """Return why a graph cannot hold the averaging of gradients; None if it can."""
        model, name = self._model, "DistributedDataParallel"
        if model.find_unused_parameters:
            return (
                f"{name}(find_unused_parameters=True) reads back which parameters were used: leave "
                "it out, and freeze what is not used"
            )
        if model._comm_hooks:
            return f"{name} has a communication hook, whose part on the host a graph would not run"
        if model.mixed_precision is not None:
            return (
                f"{name}(mixed_precision=...) casts in hooks on the host: give TrainStep "
                'precision="bf16" instead'
            )
        if model._delay_all_reduce_params:
            return f"{name}(delay_all_reduce_named_params=...) reduces in hooks on the host"
        return _why_not_nccl(self.group) if device.type == "cuda" else None

    def _present(self) -> object:
        sizes = [param.numel() for param in self._model.module.parameters()]
        device = next(self._model.module.parameters()).device
        if device.type != "cuda":
            return sizes, None
        return sizes, torch.cuda.current_stream(device).cuda_stream

    def _renew_(self) -> None:
        """Make the buffers anew; all processes do so at the same step."""
        renew_(self._model)
        # Past the first ten steps it measures every hundredth, which must not be a captured one.
        self._model._set_ddp_runtime_logging_sample_rate(_NEVER)


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the model inside ``DistributedDataParallel``, or the model as it is."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def mean_over(group: dist.ProcessGroup | None, value: Tensor) -> Tensor:
    """Average a tensor over the processes of a group; without a group return it as it is."""
    if group is None:
        return value
    mean = value / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    return mean


def _why_not_nccl(group: dist.ProcessGroup) -> str | None:
    """Return why a graph cannot hold the reductions of a group; None if it can.

    PyTorch's notes also ask for TORCH_NCCL_ASYNC_ERROR_HANDLING=0, for the thread that watches
    over operations; since torch 2.1 it leaves captured ones alone (pytorch #102542).
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if backends.get("cuda") != "nccl":
        return (
            f"the processes talk over {backends.get('cuda')}, and only operations of nccl can be "
            'captured: init_process_group("nccl")'
        )
    version = torch.cuda.nccl.version()
    if version < _FIRST_CAPTURABLE_NCCL:
        return f"NCCL {version} cannot be captured, {_FIRST_CAPTURABLE_NCCL} and later can"
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
        return "TORCH_NCCL_BLOCKING_WAIT makes the host wait for each reduction: unset it"
    if not dist.is_gloo_available():
        return "torch was built without gloo, over which processes agree on what to capture"
    return None


class Alone:
    """Decisions of a process that has no others to ask.

    Attributes:
        speaks: Whether what all have decided is to be said here.
    """

    speaks = True

    def least(self, number: int) -> int:
        """Return the smallest number that any process gives."""
        return number

    def gathered(self, text: str | None) -> str:
        """Gather what each process has to say into one text."""
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
    """Return how the processes of a group decide; all of them must call it."""
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    return Together(group)


def _by_process(ranks: Sequence[int], texts: Sequence[str | None]) -> list[str]:
    """List each text once, with the processes it comes from."""
    sources: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text is not None:
            sources.setdefault(text, []).append(rank)
    return [f"in process {', '.join(map(str, of))}: {text}" for text, of in sources.items()]
