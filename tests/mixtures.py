"""Models of every layer and tie there is, small and with ranks of all kinds."""

import torch
from hypothesis import strategies as st
from torch import nn

import comera
from comera.nn.table import TTTable
from comera.surgery.truncate import truncate_

ROWS, WIDTH = 40, 12


class Mixture(nn.Module):
    """Lookups, bags and products, with the ties of its layers."""

    def __init__(self, tie: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS)
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.again = nn.Embedding(ROWS, WIDTH)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=k > 0) for k in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.other_name = self.layers[2]
        if tie in ("head", "all"):
            self.head.weight = self.embed.weight
        if tie in ("tables", "all"):
            self.again.weight = self.bag.weight = self.embed.weight
        if tie == "linears":
            self.layers[1].weight = self.layers[0].weight
        self.to(dtype)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embed(indices) + self.again(indices) + self.bag(indices)[:, None]
        for layer in self.layers:
            x = layer(x) + self.other_name(x)
        return self.head(self.norm(x.flatten(0, 1)))


def draw_numbers_(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)


def close_ranks_(model: nn.Module, draw) -> None:
    """Prune some ranks and cut some of those out, down to layers that vanish."""
    for name, param in model.named_parameters():
        if "gates" in name:
            keep = draw(st.integers(0, param.numel()), label=f"kept of {name}")
            param.data[keep:] = 0
    if draw(st.booleans(), label="cut"):
        truncate_(model, min_rank=draw(st.integers(0, 1), label="min_rank"))


CONFIGS = st.builds(
    comera.TTConfig,
    rank=st.integers(1, 6),
    order=st.integers(1, 4),
    embedding_order=st.integers(2, 4),
    hot_rows=st.sampled_from([0, 7]),
    scatter_rows=st.sampled_from([None, False]),
    target_modules=st.sampled_from(["all", "all-linear", "all-embedding", ["embed", "layers.1"]]),
    tied=st.sampled_from(["skip", "share", "untie"]),
    prune_below=st.sampled_from([0.01, 0.3]),
    init=st.sampled_from(["orthogonal", "svd"]),
)


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
TIES = st.sampled_from(["none", "head", "tables", "linears", "all"])


def draw_mixture(data, config: comera.TTConfig, tie: str, dtype: torch.dtype) -> Mixture:
    """Make a model, pruned, cut and with rows moved as the data say; its numbers are near one."""
    if config.hot_rows:
        config.hot_rank = data.draw(st.sampled_from([None, 1, 3]), label="hot_rank")
    model = comera.tensorize_(Mixture(tie, dtype), config)
    draw_numbers_(model)
    close_ranks_(model, data.draw)
    tables = [each for each in model.modules() if isinstance(each, TTTable) and each.hot_rows]
    if tables and data.draw(st.booleans(), label="moved rows"):
        comera.update_hot_rows_(tables[0], torch.randperm(ROWS))
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 5 != 2)
    return model.eval()
