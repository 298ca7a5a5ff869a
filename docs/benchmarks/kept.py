"""Count what tensorised models of transformers keep for the backward pass, and time their steps.

Each model runs as `comera.tensorize_` leaves it, its feed-forward parts as one operation, and layer
by layer; turns alternate. Sizes count every storage once, parameters left out.

    python docs/benchmarks/kept.py --tokens 2048
"""

import argparse
import statistics
import time

import torch
import transformers
from torch import Tensor, nn

import comera
from comera.nn.feed_forward_parts import fuse_feed_forwards_, unfuse_feed_forwards_

LENGTH, TURNS = 256, 9


def models(rank: int) -> dict[str, nn.Module]:
    """Make six blocks of SmolLM's and of BERT's shape, their linear layers compressed."""
    llama = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=2048,
    )  # fmt: skip
    bert = transformers.BertConfig(num_hidden_layers=6, vocab_size=2048)
    made = {}
    for config in (llama, bert):
        model = transformers.AutoModel.from_config(config)
        layers = comera.TTConfig(rank=rank, target_modules="all-linear", init="orthogonal")
        made[config.model_type] = comera.tensorize_(model, layers)
    return made


def kept(model: nn.Module, tokens: Tensor) -> int:
    """Return the bytes that a forward pass keeps."""
    of_parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens)
    del output
    return sum(sizes.values())


def seconds(model: nn.Module, tokens: Tensor) -> float:
    """Time a forward and a backward pass."""
    model.zero_grad()
    start = time.perf_counter()
    model(input_ids=tokens).last_hidden_state.square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    """Read the options and print a line for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokens = torch.randint(2048, (-(-options.tokens // LENGTH), LENGTH))
    for name, model in models(options.rank).items():
        ratios, sizes = [], []
        for turn in range(TURNS + 1):
            times = []
            for change in (unfuse_feed_forwards_, fuse_feed_forwards_):
                change(model)
                times.append(seconds(model, tokens))
                if turn == 0:  # also what warms up
                    sizes.append(kept(model, tokens) / 2**20)
            if turn:
                ratios.append(times[0] / times[1])
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(
            f"{name}: kept {sizes[0]:.0f} MiB layer by layer, {sizes[1]:.0f} MiB as one operation; "
            f"time layer by layer over the other {middle:.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
