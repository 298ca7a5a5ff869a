"""Runs that ``torchrun`` starts, and what happens to their processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Torchrun:
    """``torchrun -m comera train`` in a folder, watched while it runs.

    Args:
        folder: Where ``run.yaml`` is.
        out: The folder of the run; what is printed goes beside it.
        count: Number of processes.
        restarts: How often they are started again.
        words: What else follows on the command line.
    """

    def __init__(self, folder: Path, out: str, count: int, *words: str, restarts: int = 0) -> None:
        self.out = folder / out
        self.said = folder / f"{out}.txt"
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={count}", f"--max-restarts={restarts}", "--monitor-interval=0.1",
        ]  # fmt: skip
        with self.said.open("w") as file:
            self.process = subprocess.Popen(
                [*launcher, "-m", "comera", "train", "run.yaml", f"--out={out}", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, step: int) -> None:
        """Wait until a step has been logged, or the run has ended."""
        while self._logged() < step and self.process.poll() is None:
            time.sleep(0.02)

    def children(self) -> list[int]:
        """List the processes that train, as the system numbers them."""
        pid = self.process.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return sorted(int(number) for number in found)

    def kill(self, number: int) -> None:
        """End one of the processes that train, without a chance to save."""
        os.kill(self.children()[number], signal.SIGKILL)

    def end(self) -> int:
        """Wait for the end; returns the exit status."""
        try:
            return self.process.wait(timeout=500)
        finally:
            self.process.kill()

    def _logged(self) -> int:
        try:
            lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):  # not there yet, or being written
            return -1
