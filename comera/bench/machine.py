"""On what a benchmark ran, in one line."""

import datetime
from typing import Any

import torch

from comera.planning.machine import processor_name, usable_threads


def machine_facts(device: torch.device, kept: bool) -> dict[str, Any]:
    """What to know about the machine and this process; ``kept`` is whether freed memory is."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": usable_threads(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "freed_memory": "kept" if kept else "returned",
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def machine_line(facts: dict[str, Any], dtype: str) -> str:
    """The facts for people."""
    gpu = [facts["gpu"]] if "gpu" in facts else []
    return ", ".join(
        [
            *gpu,
            facts["processor"],
            f"cores {facts['cores']}",
            f"threads {facts['threads']}",
            f"torch {facts['torch']}",
            dtype,
            f"freed memory {facts['freed_memory']}",
            facts["date"],
        ]
    )
