"""Support data-parallel training steps, in which every process trains on its own batches."""

import os

import torch
import torch.distributed as dist
from torch import nn

from comera.params import renew_
from comera.rank.agreement import from_all

WARM_UP_TOGETHER = 11
"""Steps alike before one is recorded: DistributedDataParallel times its first ten on the host
(PyTorch's notes on CUDA semantics, "Usage with DistributedDataParallel")."""

_NEVER = 2**31 - 1
_FIRST_CAPTURABLE_NCCL = (2, 9, 6)


class DataParallel:
    """A step's ``DistributedDataParallel``; its buffers are rebuilt if sizes or stream change."""

    def __init__(self, model: nn.parallel.DistributedDataParallel) -> None:
        self._model, self.group = model, model.process_group
        self._made_for: object = self._present()
        self.times_renewed = 0  # a recording writes to the buffers it was made with

    def prepare_(self) -> None:
        """Rebuild DDP's buffers if sizes or the stream have changed; all processes call this."""
        present = self._present()
        if self._made_for != present:
            renew_(self._model)
            # Past the first ten steps it times every hundredth, which must not be a captured one.
            self._model._set_ddp_runtime_logging_sample_rate(_NEVER)
            self._made_for = present
            self.times_renewed += 1

    def forget(self) -> None:
        """Have the next step rebuild DDP's buffers, as after an interrupted backward pass."""
        self._made_for = None

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
        if device.type != "cuda":
            return None
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        if backends.get("cuda") != "nccl":
            return (
                f"the processes talk over {backends.get('cuda')}, and only operations of nccl can "
                'be captured: init_process_group("nccl")'
            )
        version = torch.cuda.nccl.version()
        if version < _FIRST_CAPTURABLE_NCCL:
            return f"NCCL {version} cannot be captured, {_FIRST_CAPTURABLE_NCCL} and later can"
        # TORCH_NCCL_ASYNC_ERROR_HANDLING=0, as PyTorch's notes ask, is not needed: since torch 2.1
        # the thread that watches over operations leaves captured ones alone (pytorch #102542).
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0":
            return "TORCH_NCCL_BLOCKING_WAIT makes the host wait for each reduction: unset it"
        if not dist.is_gloo_available():
            return "torch was built without gloo, over which processes agree on what to capture"
        return None

    def _present(self) -> object:
        sizes = [param.numel() for param in self._model.module.parameters()]
        device = next(self._model.module.parameters()).device
        if device.type != "cuda":
            return sizes, None
        return sizes, torch.cuda.current_stream(device).cuda_stream


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the model inside ``DistributedDataParallel``, or the model as it is."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


class Together:
    """Decisions that the processes of a group take together; each call waits for all of them.

    NCCL needs a collective to be in a graph in every process or in none (NCCL user guide, "Using
    NCCL with CUDA Graphs"). A process without a group decides alone.
    """

    speaks = True
    """True in the process that logs the decisions of all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None
        if group is not None and dist.get_world_size(group) > 1:
            ranks = dist.get_process_group_ranks(group)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self.speaks = dist.get_rank() == ranks[0]

    def least(self, number: int) -> int:
        """Return the smallest number that any process gives."""
        if self._group is None:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return int(value)

    def gathered(self, text: str | None) -> str:
        """Return the texts of all processes as one."""
        texts = from_all(self._group, text)
        if all(each == text for each in texts.values()):
            return text or ""
        sources: dict[str, list[int]] = {}
        for rank, each in texts.items():
            if each is not None:
                sources.setdefault(each, []).append(rank)
        return "; ".join(
            f"in process {', '.join(map(str, ranks))}: {each}" for each, ranks in sources.items()
        )
