"""Measure the perplexity of a language model made smaller: ``python -m benchmarks.language_model``.

Beside :func:`comera.compress_`, with and without :func:`comera.heal_`, stand truncations of every
weight to one share: by SVD and TT-SVD of the weight, and by SVD weighed by the layer's inputs, as
in SVD-LLM (arXiv 2403.07378). Each point is written as it is measured; the same command resumes.
"""

import argparse
import copy
import functools
import json
import lzma
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comera.compress.compress import compress_
from comera.compress.heal import heal_
from comera.compress.layer_moments import LayerMoments, gather_moments, linear_targets, own_loss
from comera.compress.sensitivity import LayerSensitivity, Sensitivity
from comera.compress.whitened import whitened_svd
from comera.extras import needed_by
from comera.files import replacing
from comera.nn.linear import TTLinear
from comera.params import checksum, model_size
from comera.planning.printing import Table

METHODS = {
    "svd": "SVD of the weight, one share",
    "tt": "TT-SVD of the weight, order 3, one share",
    "whitened": "weighed by inputs, one share",
    "comera": "compress_",
    "healed": "compress_, then heal_",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all missing points, and print all."""
    parser = argparse.ArgumentParser(description="Perplexity of a language model made smaller.")
    parser.add_argument("--model", required=True, help="Folder of a causal model (transformers).")
    parser.add_argument("--gguf", help="File in that folder to take the weights from.")
    parser.add_argument("--calibrate", required=True, help="Text that is no test text (.txt, .xz).")
    parser.add_argument("--test", required=True, help="Text to measure on.")
    parser.add_argument("--shares", type=_share, nargs="+", default=[0.1, 0.2, 0.4, 0.6])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--length", type=int, default=512, help="Tokens of a sequence.")
    parser.add_argument("--sequences", type=int, default=16, help="For calibration.")
    parser.add_argument("--heal_sequences", type=int, default=64, help="Those after them.")
    parser.add_argument("--bfloat16", action="store_true", help="Heal under autocast to it.")
    parser.add_argument("--test_sequences", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("runs/language-model"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    model, encode = _load(options.model, options.gguf)
    told, tested = (
        _batches(encode(_text(path)), count, options.length, path)
        for path, count in (
            (options.calibrate, options.sequences + options.heal_sequences),
            (options.test, options.test_sequences),
        )
    )
    calibration, healing = told[: options.sequences], told[options.sequences :]
    bench = Bench(model, calibration, healing, tested, options.out, options.bfloat16)
    bench.measure("dense", 0.0, lambda: ({}, model))
    for method in options.methods:
        for share in options.shares:
            bench.measure(method, share, functools.partial(getattr(bench, method), share))
    print(bench)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(
            f"{share} must be between 0 and 1: the part of the linears that goes"
        )
    return share


class Bench:
    """A dense model, its data, and the points measured so far, in ``points.json`` of the folder.

    Each batch for healing is used once; ``bfloat16`` heals under autocast to it.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Sequence[Any],
        healing: Sequence[Any],
        tested: Sequence[Any],
        folder: Path,
        bfloat16: bool = False,
    ) -> None:
        self.model, self.tested, self.healing = model, tested, healing
        self.calibration, self.folder, self.bfloat16 = calibration, folder, bfloat16
        self.layers = {
            name: layer
            for name, layer in linear_targets(model, "all-linear", None, None).items()
            if isinstance(layer, nn.Linear)
        }
        self.file = folder / "points.json"
        self.points: list[dict[str, Any]] = (
            json.loads(self.file.read_text()) if self.file.exists() else []
        )

    @functools.cached_property
    def moments(self) -> dict[str, LayerMoments]:
        """Moments of all layers, cached in a file."""
        keep, data = self.folder / "moments.safetensors", self.calibration
        return gather_moments(self.model, self.layers, data, own_loss, keep, progress=True)

    @functools.cached_property
    def found(self) -> Sensitivity:
        """Sensitivity of all layers by these moments."""
        layers = tuple(
            LayerSensitivity(name, whitened_svd(w := each.weight, self.moments[name]), checksum(w))
            for name, each in self.layers.items()
        )
        return Sensitivity(layers, *model_size(self.model))

    def measure(
        self, method: str, share: float, make: Callable[[], tuple[dict[str, Any], nn.Module]]
    ) -> None:
        """Measure a point and write it, unless it is there."""
        if any((point["method"], point["share"]) == (method, share) for point in self.points):
            return
        wall, processor = time.monotonic(), time.process_time()
        about, small = make()
        seconds = {"seconds": time.monotonic() - wall}
        seconds["processor_seconds"] = time.process_time() - processor
        point = {"method": method, "share": share, **seconds, "params": model_size(small).params}
        point |= {"perplexity": perplexity(small, self.tested), **about}
        self.points.append(point)
        with replacing(self.file) as temporary:
            temporary.write_text(json.dumps(self.points, indent=1))
        print(f"{method} {share:.0%}: {point['perplexity']:.4g}", flush=True)

    def svd(self, share: float) -> tuple[dict[str, Any], nn.Module]:
        """Truncate each weight by its own singular values."""
        return {}, self._each(share, lambda _, layer: whitened_svd(layer.weight, None).factors)

    def whitened(self, share: float) -> tuple[dict[str, Any], nn.Module]:
        """Truncate each weight by the singular values of its outputs."""

        def factors(name: str, layer: nn.Linear) -> Callable[[int], tuple[Tensor, Tensor]]:
            inputs = self.moments[name].inputs_II
            same = torch.eye(layer.out_features, dtype=inputs.dtype)
            return whitened_svd(layer.weight, LayerMoments(inputs, same), grad_damping=0).factors

        return {}, self._each(share, factors)

    def tt(self, share: float) -> tuple[dict[str, Any], nn.Module]:
        """Approximate each weight by a tensor train, by TT-SVD."""
        small = copy.deepcopy(self.model)
        with torch.no_grad():
            for name in self.layers:
                layer = small.get_submodule(name)
                train = TTLinear.from_linear(layer, compression=1 / (1 - share))  # type: ignore[arg-type]
                layer.weight.copy_(train.weight)  # type: ignore[operator,union-attr]
        return {}, small

    def comera(self, share: float) -> tuple[dict[str, Any], nn.Module]:
        """Compress all layers to one budget."""
        small = copy.deepcopy(self.model)
        linears = sum(layer.weight.numel() for layer in self.layers.values())
        whole = model_size(self.model).params
        done = compress_(small, self.found, budget=1 - share * linears / whole)
        return {"kept_dense": sum(layer.rank is None for layer in done.layers)}, small

    def healed(self, share: float) -> tuple[dict[str, Any], nn.Module]:
        """Compress all layers to one budget, and train the result to answer as the dense model."""
        about, small = self.comera(share)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            done = heal_(small, self.model, self.healing, progress=True)
        return {**about, "steps": done.steps, "first": done.first, "last": done.last}, small

    def _each(
        self, share: float, factors: Callable[[str, nn.Linear], Callable[[int], Any]]
    ) -> nn.Module:
        """Truncate every weight to the rank at which its factors are smaller by a share."""
        small = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, layer in self.layers.items():
                weight = layer.weight
                rank = int((1 - share) * weight.numel() / sum(weight.shape))
                left, right = factors(name, layer)(rank)
                small.get_submodule(name).weight.copy_(left @ right)  # type: ignore[operator,union-attr]
        return small

    def __str__(self) -> str:
        shares = sorted({point["share"] for point in self.points} - {0.0})
        value = {(p["method"], p["share"]): f"{p['perplexity']:.4g}" for p in self.points}
        header = ("", "dense", *(f"{share:.0%} fewer" for share in shares))
        rows = [
            (text, value[("dense", 0.0)], *(value.get((name, share), "") for share in shares))
            for name, text in METHODS.items()
            if any(point["method"] == name for point in self.points)
        ]
        return Table("perplexity", header, rows).text()


@torch.no_grad()
def perplexity(model: nn.Module, batches: Sequence[Any]) -> float:
    """Return the exponential of the mean loss over batches of one length."""
    losses = [float(own_loss(model.eval(), batch)) for batch in batches]
    return float(torch.tensor(losses).double().mean().exp())


def _load(folder: str, gguf: str | None) -> tuple[nn.Module, Callable[[str], list[int]]]:
    with needed_by("a language model"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

    made = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    return made, AutoTokenizer.from_pretrained(folder, gguf_file=gguf).encode


def _text(path: str) -> str:
    data = Path(path).read_bytes()
    return (lzma.decompress(data) if path.endswith(".xz") else data).decode()


def _batches(tokens: list[int], count: int, length: int, path: str) -> list[dict[str, Tensor]]:
    if len(tokens) < count * length:
        raise ValueError(f"{path} has {len(tokens):,} tokens, and {count} x {length} are asked for")
    rows = torch.tensor(tokens[: count * length]).view(count, length)
    return [{"input_ids": row[None], "labels": row[None]} for row in rows]


if __name__ == "__main__":
    main()
