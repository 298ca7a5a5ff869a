"""The gates of many modules as one vector, of which each module and a rank objective read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from comera.nn.module import TensorTrainModule
from comera.nn.shared import SharedGates, may_share


def share_gates(trains: Sequence[TensorTrainModule]) -> None:
    """Put the gates of all modules into one vector, and let each module read its part of it."""
    gates = [list(train.gates) for train in trains]
    flat = [gate for of_one in gates for gate in of_one]
    alike = {(gate.dtype, gate.device, gate.requires_grad) for gate in flat}
    if len(alike) != 1:  # such as a frozen gate, which is to get no gradient
        return
    together = torch.cat(flat)
    parts = iter(together.split([gate.shape[0] for gate in flat]))
    start = 0
    for train, of_one in zip(trains, gates, strict=True):
        vars(train)["shared_gates"] = SharedGates(
            together, start, tuple(next(parts) for _ in of_one)
        )
        start += sum(gate.shape[0] for gate in of_one)


def unshare_gates(trains: Sequence[TensorTrainModule]) -> None:
    """Let every module read its own gates again."""
    for train in trains:
        vars(train)["shared_gates"] = None


def gates_together(trains: Sequence[TensorTrainModule]) -> Tensor:
    """Return all gates in one vector, the shared one if it holds just these."""
    gates = [gate for train in trains for gate in train.gates]
    for train in trains:
        train.renew_shared()
    first, start = trains[0].shared_gates, 0
    if first is None or not may_share(first.flat, gates[0]):
        return torch.cat(gates)
    for train in trains:
        shared = train.shared_gates
        if shared is None or shared.flat is not first.flat or shared.start != start:
            return torch.cat(gates)
        start += sum(part.shape[0] for part in shared.parts)
    return first.flat if len(first.flat) == start else torch.cat(gates)
