"""Measure a language model as it is served: file, loading, tokens and memory.

A Llama of random weights, dense and in three compressed forms, each measured in new processes,
``python -m benchmarks.serve JOB``, in turn. The base of the peak is that of ``benchmarks.memory``.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.checks import DisagreementError
from benchmarks.memory import peak_reader
from benchmarks.optimizers import add_decoder
from benchmarks.session import Session, add_repeats, add_sizes, count, in_new_process
from benchmarks.timing import watch_neighbours
from comera.allocator import reuse_freed_memory
from comera.extras import needed_by
from comera.nn.convert import tensorize_
from comera.nn.targets import TTConfig
from comera.saved.model_folder import WEIGHTS, load_model, save_model
from comera.serving.freeze import freeze_

_ROWS = ("dense", "compressed", "frozen", "frozen, int8")
_AGREE = 1e-4  # largest difference of frozen from compressed logits, over the largest logit
_SEED = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; the model has 134 million parameters."""
    add_decoder(parser, layers=12, width=768, ffn=2048, heads=12)
    add_sizes(
        parser,
        {
            "rank": (64, "Bound on the ranks."),
            "prompt": (64, "Number of tokens that the model is given."),
            "tokens": (32, "Number of tokens it generates."),
        },
    )
    add_repeats(parser)


def run(session: Session, options: argparse.Namespace) -> None:
    """Load and run one model in all its forms, in turn; ``repeats`` rounds of four processes.

    Raises:
        DisagreementError: If the frozen model's logits are not the compressed one's.
        MissingPackageError: If transformers or torchao is not installed.
        ValueError: If the sizes do not fit, or the peak of memory cannot be read on this system.
    """
    if options.width % (2 * options.heads):
        raise ValueError(
            f"width={options.width} must be a multiple of 2 * heads={2 * options.heads}"
        )
    if options.tokens < 2:
        raise ValueError(f"tokens={options.tokens} must be at least 2: a first one and others")
    peak_reader(session.device)  # raises before anything starts
    sizes = ("layers", "width", "ffn", "heads", "vocab", "prompt", "tokens")
    llama = {name: getattr(options, name) for name in sizes}
    with tempfile.TemporaryDirectory() as folder:
        numbers = _save_all(Path(folder), llama, options.rank)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in _ROWS}
        neighbours = watch_neighbours()
        for _ in range(session.repeats):
            for name in _ROWS:
                found[name].append(_measure(session, Path(folder), name, llama))
        busy = neighbours(torch.get_num_threads())
        files = {name: _file(Path(folder), name).stat().st_size for name in _ROWS}
    _check(session, found)
    title = (
        f"Llama of {options.layers} layers of width {options.width}, {numbers['dense']:,} "
        f"parameters, rank {options.rank}: {options.prompt} tokens given, {options.tokens} "
        f"generated, median of {session.repeats} processes"
    )
    columns = {
        "": "", "parameters": ",", "file MB": ",.1f", "load ms": "ms", "first token ms": "ms",
        "token ms": "ms", "peak MiB": ",.0f",
    }  # fmt: skip
    session.table(
        title,
        columns,
        (
            (
                name, numbers[name], files[name] / 1e6,
                1e3 * median(each["load"] for each in rounds),
                1e3 * median(each["first"] for each in rounds),
                1e3 * median(second for each in rounds for second in each["each"]),
                median(each["peak"] for each in rounds) / 2**20,
            )
            for name, rounds in found.items()
        ),
    )  # fmt: skip
    if busy is not None:
        session.note(busy)


def _file(folder: Path, name: str) -> Path:
    """Return the file of the weights; eight bits are made of the frozen ones once loaded."""
    return folder / name.split(",")[0] / WEIGHTS


def _save_all(folder: Path, llama: dict[str, int], rank: int) -> dict[str, int]:
    """Save the model in each of its forms; return its parameters in each."""
    torch.manual_seed(_SEED)
    model, numbers = _llama(llama).eval(), {}
    for name, change in (
        ("dense", lambda model: model),
        ("compressed", lambda m: tensorize_(m, TTConfig(rank=rank, init="orthogonal"))),
        ("frozen", functools.partial(freeze_, batch=1)),
    ):
        model = change(model)
        numbers[name] = count(model)
        save_model(model, folder / name)
    return {**numbers, "frozen, int8": numbers["frozen"]}


def _measure(session: Session, folder: Path, name: str, llama: dict[str, int]) -> dict[str, Any]:
    job = {
        "folder": str(_file(folder, name).parent), "llama": llama, "int8": name.endswith("int8"),
        "device": str(session.device), "threads": torch.get_num_threads(), "keep": session.kept,
    }  # fmt: skip
    try:
        return in_new_process("benchmarks.serve", job)
    except RuntimeError as problem:
        raise ValueError(f"{name}: {problem}") from None


def _check(session: Session, found: dict[str, list[dict[str, Any]]]) -> None:
    """Compare the logits of the forms, and print the differences."""
    logits = {name: torch.tensor(rounds[0]["logits"]) for name, rounds in found.items()}
    wanted = logits["compressed"]
    off = {
        name: float((logits[name] - wanted).abs().max() / wanted.abs().max()) for name in _ROWS[2:]
    }
    if not off["frozen"] <= _AGREE:
        raise DisagreementError(
            f"the frozen model's logits are {off['frozen']:.1e} of the largest from those of the "
            f"compressed one, which is more than {_AGREE:.0e}"
        )
    session.print(
        f"frozen agrees with compressed to {off['frozen']:.1e} of the largest logit, in eight "
        f"bits to {off['frozen, int8']:.1e}"
    )


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds to load, to the first token and for each other, the peak in bytes, logits.

    A job has ``folder`` of :func:`comera.save_model`, ``llama``, its sizes, ``int8``, whether it is
    quantised once loaded, ``device``, ``threads`` and ``keep`` of freed memory. Tokens are timed in
    a second pass, since the first one allocates memory.
    """
    torch.set_num_threads(job["threads"])
    if job["keep"]:
        reuse_freed_memory()
    device, llama = torch.device(job["device"]), job["llama"]
    _llama_class()  # an import is no part of loading
    if job["int8"]:
        freeze_(nn.Sequential(nn.Linear(32, 32)), quantize="int8")  # nor is that of torchao
    peak = peak_reader(device)
    began = time.perf_counter()
    model: Any = load_model(job["folder"], functools.partial(_empty, llama), device=device)
    if job["int8"]:
        model = freeze_(model, quantize="int8")
    loaded = time.perf_counter() - began
    generator = torch.Generator().manual_seed(_SEED)
    words = torch.randint(llama["vocab"], (1, llama["prompt"]), generator=generator).to(device)
    _generate(model, words, llama["tokens"])
    first, each = _generate(model, words, llama["tokens"])
    found = {"load": loaded, "first": first, "each": each, "peak": max(0, peak())}
    with torch.inference_mode():
        logits = model(words).logits[0, -1]
    return {**found, "logits": logits.float().tolist()}


class _Clock:
    """Streamer of ``generate``, which gets the prompt, then each token."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._device = device

    def put(self, tokens: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any, words: Tensor, tokens: int) -> tuple[float, list[float]]:
    """Return seconds to the first token, and of every other one."""
    clock = _Clock(words.device)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            words, attention_mask=torch.ones_like(words), min_new_tokens=tokens,
            max_new_tokens=tokens, do_sample=False, streamer=clock,
        )  # fmt: skip
    _, first, *others = clock.times
    pairs = zip([first, *others], others, strict=False)
    return first - began, [after - before for before, after in pairs]


def _llama_class() -> Any:
    with needed_by("the benchmark serve"):
        from transformers import LlamaForCausalLM
    return LlamaForCausalLM


def _llama(llama: dict[str, int]) -> Any:
    made = _llama_class()
    config = made.config_class(
        vocab_size=llama["vocab"], hidden_size=llama["width"], intermediate_size=llama["ffn"],
        num_hidden_layers=llama["layers"], num_attention_heads=llama["heads"],
        num_key_value_heads=llama["heads"], tie_word_embeddings=False,
        max_position_embeddings=llama["prompt"] + llama["tokens"],
    )  # fmt: skip
    return made(config)


def _empty(llama: dict[str, int]) -> Any:
    """Make the dense model on the ``meta`` device, to be filled from a folder."""
    with torch.device("meta"):
        model = _llama(llama)
    # The rotary angles are in no state dict.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        served = serve(json.loads(sys.argv[1]))
    print(json.dumps(served))  # the last line: libraries print what they like before
