"""Blocks that are compressed already, in files, until all of them are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from comera.compress.compressed_layers import CompressedLayer
from comera.files import replacing
from comera.saved.description import describe_layers
from comera.saved.rebuild import rebuild_
from comera.saved.shards import read_tensor

_KEY = "comera_blocks"


class UnfinishedBlocks:
    """A folder with a file for each block, and what the next one is given.

    Args:
        folder: Is made if need be.
        about: What the work depends on, as JSON can hold it.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.about = folder, json.loads(json.dumps(about))
        self._states = folder / "states.safetensors"

    def go_on(self, states: list[Tensor]) -> int:
        """Return how many blocks are done, with what the next one is given in ``states``.

        Raises:
            ValueError: If the folder is of other work, or damaged.
        """
        if not self._states.exists():
            return 0
        try:
            with safe_open(self._states, "pt") as file:
                noted = json.loads((file.metadata() or {})[_KEY])
                read = [file.get_tensor(str(k)).clone() for k in range(len(states))]
        except (SafetensorError, KeyError, ValueError):
            read, noted = [], {"about": {}}
        wrong = [key for key, value in self.about.items() if noted["about"].get(key) != value]
        if wrong:
            raise ValueError(
                f"{self.folder} is of a call with another {wrong[0]}: repeat that call to go on "
                "with it, or remove the folder"
            )
        states[:] = read
        return noted["done"]

    def add(
        self, k: int, block: nn.Module, layers: Sequence[CompressedLayer], after: Sequence[Tensor]
    ) -> None:
        """Write a block, and then what it hands on."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in block.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor.detach().contiguous()
        noted = {"layers": [asdict(one) for one in layers], "described": describe_layers(block)}
        with replacing(self._file(k)) as temporary:
            save_file(tensors, temporary, {_KEY: json.dumps(noted)})
        states = {str(number): state.contiguous() for number, state in enumerate(after)}
        done = {"about": self.about, "done": k + 1}
        with replacing(self._states) as temporary:
            save_file(states, temporary, {_KEY: json.dumps(done)})

    def put_layers_(self, k: int, block: nn.Module) -> None:
        """Give a dense block the layers that it has been given before, without numbers."""
        rebuild_(block, self._noted(k)["described"])

    def layers(self, k: int) -> list[CompressedLayer]:
        """Return what became of a block's layers, under their names in the block."""
        return [CompressedLayer(**one) for one in self._noted(k)["layers"]]

    def tensor(self, k: int, name: str) -> Tensor:
        """Read one tensor of a block, by its name in the block."""
        return read_tensor(self._file(k), name)

    def _noted(self, k: int) -> dict[str, Any]:
        with safe_open(self._file(k), "pt") as file:
            return json.loads(file.metadata()[_KEY])

    def _file(self, k: int) -> Path:
        return self.folder / f"block-{k:04d}.safetensors"
