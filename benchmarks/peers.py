"""Other packages beside comera, imported here alone."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.nn.linear import TTLinear
from comera.nn.module import TensorTrainModule
from comera.nn.table import TTTable

GALORE_RANK, GALORE_GAP, GALORE_SCALE = 128, 200, 0.25
"""Settings of GaLore's own experiments, arXiv 2403.03507."""


class MissingPeerError(Exception):
    """A package that is not installed; the message names its extra."""


@contextmanager
def tensorly_on_torch() -> Iterator[None]:
    """Switch tensorly, if it is installed, to torch, and restore its backend afterwards."""
    try:
        tensorly = _load("tensorly", "tensorly-torch")
    except MissingPeerError:
        yield
        return
    before = tensorly.get_backend()
    tensorly.set_backend("pytorch")
    try:
        yield
    finally:
        tensorly.set_backend(before)


def tensorly_linear(layer: TTLinear, implementation: str) -> nn.Module:
    """Make tensorly-torch's layer over the same modes, each bond as wide as ``layer``'s widest.

    Its block tensor train pairs input and output modes, so it has other parameters at equal rank.
    ``implementation`` is ``"factorized"`` or ``"reconstructed"``; ``layer`` must not be padded.
    """
    tltorch = _load("tltorch", "tensorly-torch")
    shape, core = layer.shape, layer.cores[0]
    if (shape.in_width, shape.out_width) != (layer.in_features, layer.out_features):
        raise ValueError(
            f"it cannot pad {layer.in_features} -> {layer.out_features} to the modes "
            f"{shape.describe_modes()}"
        )
    return tltorch.FactorizedLinear(
        shape.in_modes, shape.out_modes, bias=layer.bias is not None, factorization="blocktt",
        rank=_block_ranks(shape.in_modes, layer), implementation=implementation,
        device=core.device, dtype=core.dtype,
    )  # fmt: skip


def tensorly_embedding(layer: TTTable) -> nn.Module:
    """Make tensorly-torch's table over the same modes, padding rows included."""
    tltorch = _load("tltorch", "tensorly-torch")
    shape, core = layer.shape, layer.cores[0]
    return tltorch.FactorizedEmbedding(
        shape.num_rows, shape.num_cols, auto_tensorize=False,
        tensorized_num_embeddings=shape.row_modes, tensorized_embedding_dim=shape.col_modes,
        factorization="blocktt", rank=_block_ranks(shape.row_modes, layer),
        device=core.device, dtype=core.dtype,
    )  # fmt: skip


def galore_adamw(
    model: nn.Module, lr: float, rank: int = GALORE_RANK, gap: int = GALORE_GAP
) -> Optimizer:
    """Make GaLore's AdamW, with gradients of all linear weights in a subspace."""
    galore = _load("galore_torch", "galore-torch")
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    chosen = {id(weight) for weight in linear}
    groups: list[dict[str, Any]] = [
        {"params": [param for param in model.parameters() if id(param) not in chosen]},
        {
            "params": linear, "rank": rank, "update_proj_gap": gap, "scale": GALORE_SCALE,
            "proj_type": "std",
        },
    ]  # fmt: skip
    return galore.GaLoreAdamW(groups, lr=lr, no_deprecation_warning=True)


def came(model: nn.Module, lr: float) -> Optimizer:
    """Make the authors' CAME."""
    return _load("came_pytorch", "came-pytorch").CAME(model.parameters(), lr=lr)


def refresh_galore(optimizer: Optimizer) -> None:
    """Make the next step refresh all subspaces, as every 200th does."""
    for state in optimizer.state.values():
        if "projector" in state:
            state["step"] = GALORE_GAP


def faiss_codes(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Find values and codes by faiss, called as by the authors of ExCP."""
    faiss = _load("faiss", "faiss-cpu")
    points = values.cpu().reshape(-1, 1).numpy()
    clusters = faiss.Kmeans(1, size, gpu=False)
    clusters.train(points)
    codes = clusters.index.search(points, 1)[1]
    return torch.from_numpy(clusters.centroids[:, 0]), torch.from_numpy(codes[:, 0])


def _load(module: str, package: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except Exception as problem:  # whatever the import raises
        reason = (str(problem).splitlines() or [""])[0]
        raise MissingPeerError(
            f"without {package} ({reason}): pip install 'comera[bench]' brings it"
        ) from None


def _block_ranks(modes: tuple[int, ...], layer: TensorTrainModule) -> tuple[int, ...]:
    return (1, *[max(layer.ranks)] * (len(modes) - 1), 1)
