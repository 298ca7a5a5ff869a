"""The loop of one's own in several processes, by ``DistributedDataParallel``.

    torchrun --standalone --nproc-per-node=2 examples/several_processes.py

Only cores, gates and what stayed dense are exchanged: that is counted and printed.
"""

import torch
from torch import distributed as dist
from torch import nn

import comera

BATCH = 64  # rows of all processes together


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process' rows of a batch: every N-th row of the one that all of them draw."""
    rows = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(number))
    targets = rows.roll(1, dims=1).relu()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return rows[mine], targets[mine]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    rows, targets = batch
    return nn.functional.mse_loss(model(rows), targets)


dist.init_process_group("gloo")  # "nccl" with one GPU a process
torch.manual_seed(0)  # the same weights in each process
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
dense = sum(param.numel() for param in model.parameters())
comera.tensorize_(model, comera.TTConfig(rank=24, init="orthogonal"))
small = sum(param.numel() for param in model.parameters())

ranks = comera.TwoStage(model, target=0.6, early_steps=60, late_steps=60)
optimizer = comera.MuonAdamW(comera.param_groups(model, lr=3e-3, gate_lr=ranks.gate_lr))
parallel = nn.parallel.DistributedDataParallel(model)
step = comera.TrainStep(parallel, loss_fn, optimizer, ranks)
for number in range(170):
    loss = step(batch(number))  # the mean over all processes
    if ranks.due:
        ranks.finish_(optimizer)  # in all of them, to the same ranks

if dist.get_rank() == 0:
    cut = sum(param.numel() for param in model.parameters())
    print(f"loss {loss:.4f} in {dist.get_world_size()} processes")
    print(f"gradients a step: {small:,} numbers, {cut:,} since the cut; dense {dense:,}")
    comera.save_model(model, "small-parallel")
dist.destroy_process_group()
