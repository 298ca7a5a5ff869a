"""Train small causal models at several learning rates of their blocks, to see where the best is.

Prints the loss on held-out text for each rate. The text is the standard library's source, the
table, the output layer and all vectors learn by AdamW at a rate that stays the same.

    python docs/benchmarks/rates.py --width 512 --order 1 --rank 32 --lr 1e-3 2e-3 4e-3
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comera
from comera.data.text import CausalText, TextData, TextStreams
from comera.models.decoder import CausalLanguageModel, Decoder

VOCABULARY, LENGTH, BATCH = 512, 64, 16


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def held_out(data: CausalText, lr: float, options: argparse.Namespace) -> float:
    """Train a model and return its loss on held-out text."""
    torch.manual_seed(options.seed)
    width = options.width
    decoder = Decoder(VOCABULARY, width, options.depth, max(1, width // 32), 2 * width)
    model = CausalLanguageModel(decoder, VOCABULARY)
    layers = r"model\.layers\..*"
    if options.format != "dense":
        order = {"order": options.order} if options.format == "tt" else {}
        config = comera.TTConfig(
            linear_format=options.format, rank=options.rank, target_modules=layers,
            init="orthogonal", **order,
        )  # fmt: skip
        comera.tensorize_(model, config)
    groups = comera.param_groups(
        model, options.rest, core_lr=lr, gate_lr=2e-3, scale_rates=options.scale_rates,
        muon_modules=layers if options.format == "dense" else None,
    )  # fmt: skip
    kind = {"muon": comera.MuonAdamW, "adamw": torch.optim.AdamW}[options.optimizer]
    optimizer = kind(groups, betas=(0.9, 0.98), fused=True)
    steps, warm_up = options.steps, max(1, options.steps // 20)

    def rate(step: int) -> float:
        rising = (step + 1) / warm_up
        return rising if step < warm_up else max(0.0, (steps - step) / (steps - warm_up))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    train = comera.TrainStep(
        model, loss_of, optimizer, scheduler=scheduler, clip_norm=1.0, precision=options.precision
    )
    for number in range(steps):
        train(data.batch(number, BATCH, options.seed))
    model.eval()
    with torch.no_grad(), train.contracted:
        losses = [float(loss_of(model, batch)) for batch in data.valid_batches(8, 32)]
    return sum(losses) / len(losses)


def main() -> None:
    """Read the options and print a line for each rate."""
    parser = argparse.ArgumentParser()
    for name, value in {"width": 128, "depth": 1, "order": 3, "rank": 16, "steps": 300}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--format", choices=["tt", "btt", "dense"], default="tt")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--rest", type=float, default=6e-3, help="rate of all but the cores")
    parser.add_argument("--scale_rates", choices=["contracted"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = TextData(vocab_size=VOCABULARY, length=LENGTH, max_megabytes=6)
    data = CausalText(TextStreams.prepare(text))
    for lr in options.lr:
        print(f"{lr:g}: {held_out(data, lr, options):.4f}", flush=True)


if __name__ == "__main__":
    main()
