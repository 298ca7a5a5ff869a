"""Kill one of four processes at random moments: ``python -m tests.recipes.kill_at_random 20``.

Each time torchrun starts the processes again, and the run must end with the weights of one that
nothing happened to. Takes a minute or so a moment on two cores; a second number
is the moment to begin with, where it was broken off.
"""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.recipes.test_torchrun import CONFIG, STEPS
from tests.recipes.torchrun import Torchrun
from tests.texts import write_functions

COUNT = 4


def main(moments: int, begin: int = 1) -> None:
    """Kill at so many moments, and print what came of each from one on."""
    chosen = random.Random(0)
    folder = Path(tempfile.mkdtemp())
    os.environ["COMERA_CACHE"] = str(folder / "cache")
    write_functions(folder / "text", 8, 40)
    (folder / "run.yaml").write_text(CONFIG, encoding="utf-8")
    assert Torchrun(folder, "whole", COUNT).end() == 0
    whole = load_file(folder / "whole/model.safetensors")
    for number in range(1, moments + 1):
        step, rank = chosen.randrange(STEPS - 2), chosen.randrange(COUNT)
        if number < begin:
            continue
        run = Torchrun(folder, "killed", COUNT, restarts=1)
        run.wait_for(step)
        run.kill(rank)
        status = run.end()
        killed = load_file(folder / "killed/model.safetensors")
        alike = whole.keys() == killed.keys()
        furthest = max(float((whole[name] - killed[name]).abs().max()) for name in whole)
        print(
            f"{number:2}: process {rank} killed after step {step:2}: status {status}, "
            f"weights within {furthest:.1e}",
            flush=True,
        )
        assert alike, "other ranks"
        assert status == 0
        for name, weight in whole.items():
            torch.testing.assert_close(killed[name], weight, rtol=1e-3, atol=1e-3)
        shutil.rmtree(folder / "killed")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
