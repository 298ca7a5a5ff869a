"""Load a saved model and generate, as a process: ``python -m benchmarks.serve_job JOB OUT``.

The base of the peak is what :mod:`benchmarks.peak` has: all imports and one step of a tiny layer.
"""

import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peak import peak_reader
from comera.allocator import reuse_freed_memory
from comera.extras import needed_by
from comera.saved.model_folder import load_model
from comera.serving.freeze import freeze_

_SEED = 0


@dataclass(frozen=True)
class ServedLlama:
    """A language model of transformers in the shape of Llama, with random weights.

    Args:
        layers: Number of blocks.
        width: Width of the model.
        ffn: Hidden width of the feed-forward parts.
        heads: Attention heads of a block.
        vocab: Tokens.
        prompt: Tokens that are there before the first is generated.
        tokens: Tokens that are generated.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    vocab: int
    prompt: int
    tokens: int

    def model(self) -> Any:
        """Make the dense model with numbers.

        Raises:
            MissingPackageError: If transformers is not installed.
        """
        torch.manual_seed(_SEED)
        return _llama(self).eval()

    def empty(self) -> Any:
        """Make the dense model on the ``meta`` device, to be filled from a folder."""
        with torch.device("meta"):
            model = _llama(self)
        # Angles of positions are in no file: no state dict has them.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        return model.eval()

    def words(self) -> Tensor:
        """Return the prompt, ``(1, prompt)`` integers, the same in every process."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(self.vocab, (1, self.prompt), generator=generator)


@dataclass(frozen=True)
class ServeJob:
    """What to load and measure.

    Args:
        folder: Of :func:`comera.save_model`.
        llama: What it holds.
        int8: Whether torchao holds the weights of linear layers in eight bits once it is loaded.
        device: ``"cpu"`` or ``"cuda"``.
        threads: Threads that torch uses.
        keep: Whether freed memory is kept in the process.
    """

    folder: str
    llama: ServedLlama
    int8: bool
    device: str
    threads: int
    keep: bool

    def to_json(self) -> str:
        """Return the job as one word for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ServeJob":
        """Make the job of which ``text`` speaks."""
        content = json.loads(text)
        return cls(**{**content, "llama": ServedLlama(**content["llama"])})


def serve(job: ServeJob) -> dict[str, Any]:
    """Return seconds to load, to the first token and for each other, the peak in bytes, logits.

    The tokens are those of a second pass; in the first one memory is allocated.
    """
    torch.set_num_threads(job.threads)
    if job.keep:
        reuse_freed_memory()
    device = torch.device(job.device)
    _llama_class()  # an import is no part of loading
    if job.int8:
        freeze_(nn.Sequential(nn.Linear(32, 32)), quantize="int8")  # nor is that of torchao
    peak = peak_reader(device)
    began = time.perf_counter()
    model = load_model(job.folder, job.llama.empty, device=device)
    if job.int8:
        model = freeze_(model, quantize="int8")
    loaded = time.perf_counter() - began
    words = job.llama.words().to(device)
    _generate(model, words, job.llama.tokens)
    first, each = _generate(model, words, job.llama.tokens)
    found = {"load": loaded, "first": first, "each": each, "peak": max(0, peak())}
    with torch.inference_mode():
        logits = model(words).logits[0, -1]
    return {**found, "logits": logits.float().tolist()}


class _Clock:
    """What ``generate`` calls a streamer: is given the prompt, then each token as it comes."""

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
    """Return seconds to the first token, and those of every other one."""
    clock = _Clock(words.device)
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            words,
            attention_mask=torch.ones_like(words),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
        )
    _, first, *others = clock.times
    pairs = zip([first, *others], others, strict=False)
    return first - began, [after - before for before, after in pairs]


def _llama_class() -> Any:
    with needed_by("python -m benchmarks serve"):
        from transformers import LlamaForCausalLM
    return LlamaForCausalLM


def _llama(shape: ServedLlama) -> Any:
    made = _llama_class()
    config = made.config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.prompt + shape.tokens,
        tie_word_embeddings=False,
    )
    return made(config)


def main(job: str, out: str) -> None:
    """Do a job and write what was found; libraries print what they like meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = serve(ServeJob.from_json(job))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
