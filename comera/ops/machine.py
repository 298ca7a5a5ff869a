"""The planner's profile of the device a tensor is on."""

import torch

from comera.planning.machine import Machine, load_machine


def machine_of(device: torch.device) -> Machine:
    """The measured profile of the device, else rough defaults; a CPU's unless it is a GPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        return load_machine("cuda", torch.cuda.get_device_name(device))
    return load_machine("cpu", threads=torch.get_num_threads())
