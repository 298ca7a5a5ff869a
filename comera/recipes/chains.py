"""Define ``comera checkpoint ACTION``: inspect, verify, export, evaluate and make chains."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from comera.checkpoint.archive import Archive, Manifest
from comera.checkpoint.chain import KEY_EVERY, CheckpointChain
from comera.checkpoint.contents import Quality
from comera.checkpoint.streams import DamagedError
from comera.extras import without_remarks
from comera.files import replacing
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run import build_step, find_device, make_model
from comera.recipes.run_config import RunConfig
from comera.recipes.run_folder import other_data
from comera.recipes.tasks.task import prepare_task
from comera.train.log import progress_bar, read_metrics
from comera.train.loop import evaluated
from comera.train.run_state import load_checkpoint

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.pt")
"""Files of weights in the folder of a checkpoint, as transformers and others write them."""


def find_series(path: Path) -> dict[int, Path]:
    """Return files or folders of one checkpoint each, by the last number in their names.

    Raises ``FileNotFoundError`` if there are none, ``ValueError`` for a missing or repeated number.
    """
    found: dict[int, Path] = {}
    for entry in sorted(path.iterdir()) if path.is_dir() else []:
        if not (entry.suffix in _SUFFIXES or any((entry / name).is_file() for name in _WEIGHTS)):
            continue
        numbers = re.findall(r"\d+", entry.stem if entry.suffix in _SUFFIXES else entry.name)
        if not numbers:
            raise ValueError(f"{entry} has no number in its name, which would be its step")
        step = int(numbers[-1])
        if step in found:
            raise ValueError(f"{found[step].name} and {entry.name} are both of step {step}")
        found[step] = entry
    if not found:
        raise FileNotFoundError(
            f"there are no checkpoints in {path}: files that end in {', '.join(_SUFFIXES)}, or "
            f"folders with {' or '.join(_WEIGHTS)}"
        )
    return dict(sorted(found.items()))


def read_foreign(path: Path) -> dict[str, Any]:
    """Read the arguments of :meth:`CheckpointChain.save` from another program's file; runs no code.

    Raises ``ValueError`` if the file is not readable, or holds no model.
    """
    if path.is_dir():
        weights = next(path / name for name in _WEIGHTS if (path / name).is_file())
        model, optimizer = _read(weights), path / "optimizer.pt"
        states = _read(optimizer) if optimizer.is_file() else None
        return {"model": model, "optimizer": states}
    state = _read(path)
    if all(isinstance(value, Tensor) for value in state.values()):
        return {"model": state}
    model_key = next((k for k in _MODEL_KEYS if isinstance(state.get(k), Mapping)), None)
    if model_key is None:
        raise ValueError(
            f"{path} has the keys {', '.join(map(str, state))}; the model is expected in one of "
            f"{', '.join(_MODEL_KEYS)}"
        )
    optimizer_key = next((k for k in _OPTIMIZER_KEYS if isinstance(state.get(k), Mapping)), None)
    extra = {k: v for k, v in state.items() if k not in (model_key, optimizer_key)}
    states = state[optimizer_key] if optimizer_key else None
    return {"model": state[model_key], "optimizer": states, "extra": extra}


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:
        raise ValueError(f"{path} is not readable: {str(problem)[:300]}") from problem
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a dict")
    return dict(state)


_KINDS = {
    "changes of weights": ("model/gaps", "model/codes", "model/books"),
    "moments": ("rest/gaps", "rest/places", "rest/codes", "rest/books", "rest/means"),
    "exact tensors of the model": ("model/byte",),
    "exact tensors of the rest": ("rest/byte",),
    "names, shapes and plain values": ("index",),
}
"""Streams of a checkpoint, by the beginnings of their names."""


def inspect(folder: str, console: Console) -> int:
    """Show the checkpoints of a chain, and what takes its bytes.

    Args:
        folder: Folder of the checkpoints, or of the run that wrote them.
    """
    archive = _archive(folder)
    table = _table(
        f"checkpoints in {archive.folder}",
        *("step", "builds on", "bytes", "raw bytes", "ratio"),
        *("kept changes", "error", "copying s", "encoding s"),
    )
    sound: list[Manifest] = []
    for step in archive.steps():
        try:
            manifest = archive.manifest(step)
        except DamagedError as problem:
            console.print(f"[red]{escape(str(problem))}[/]", soft_wrap=True, highlight=False)
            continue
        sound.append(manifest)
        figures, previous = manifest.figures, manifest.previous
        entries, seconds = figures.get("entries", {}), figures.get("seconds", {})
        lossy = entries.get("lossy", 0)
        table.add_row(
            f"{step:,}",
            "key frame" if previous is None else f"{previous[0]:,}",
            *_sizes(manifest.size, manifest.raw_bytes),
            f"{entries.get('changed', 0) / lossy:.1%}" if lossy else "all",
            f"{figures.get('error', 0):.3f}" if lossy else "none",
            f"{seconds.get('copying', 0):.2f}",
            f"{seconds.get('encoding', 0):.2f}",
        )
    if not sound:
        console.print(table)
        return 1
    table.add_section()
    table.add_row("all", "", *_sizes(sum(m.size for m in sound), sum(m.raw_bytes for m in sound)))
    table.caption = (
        "error: of the change of the weights since the last checkpoint (of the weights in a key "
        "frame), relative to its norm; the next checkpoint makes up for it"
    )
    console.print(table)
    title = "what the bytes are, all checkpoints together"
    table = _table(title, "", "quantised and packed", "entropy coded", "ratio", "share")
    streams = [(name, *sizes) for m in sound for name, sizes in m.streams.items()]
    total = sum(after for _, _, after in streams)
    for kind, prefixes in _KINDS.items():
        packed = sum(size for name, size, _ in streams if name.startswith(prefixes))
        if coded := sum(size for name, _, size in streams if name.startswith(prefixes)):
            ratio = f"{packed / coded:.2f}x"
            table.add_row(kind, f"{packed:,}", f"{coded:,}", ratio, f"{coded / total:.1%}")
    console.print(table)
    return int(len(sound) < len(archive.steps()))


def verify(folder: str, console: Console) -> int:
    """Read all checkpoints of a chain, and report which are damaged.

    Args:
        folder: Folder of the checkpoints, or of the run that wrote them.
    """
    archive = _archive(folder)
    with progress_bar(console=console) as bar:
        task = bar.add_task("verify", total=len(archive.steps()), figures="")
        problems = CheckpointChain(archive.folder).verify(
            lambda step: bar.update(task, advance=1, figures=f"step {step:,}")
        )
    for step, problem in problems.items():
        verdict = "[green]sound[/]" if problem is None else f"[red]{escape(problem)}[/]"
        console.print(f"step {step:,}: {verdict}", soft_wrap=True, highlight=False)
    return int(any(problems.values()))


def export(folder: str, out: str, console: Console, step: str = "latest") -> int:
    """Write a checkpoint's weights as safetensors.

    Args:
        folder: Folder of the checkpoints, or of the run that wrote them.
        out: File to write, ending in .safetensors, or a folder that gets a model.safetensors.
        step: Step of the checkpoint to write, or "latest".
    """
    chain = CheckpointChain(_archive(folder).folder)
    saved = chain.load("latest" if step == "latest" else _number("step", step, ", or 'latest'"))
    path = Path(out).expanduser()
    path = path if path.suffix == ".safetensors" else path / _WEIGHTS[0]
    with replacing(path) as temporary:  # tied tensors are written under each of their names
        tensors = {
            k: v.clone().contiguous() for k, v in saved.model.items() if isinstance(v, Tensor)
        }
        save_file(tensors, temporary, metadata={"format": "pt"})
    console.print(f"wrote {path}: {len(saved.model)} tensors of step {saved.step:,}", markup=False)
    return 0


def evaluate(
    run: str, console: Console, chain: str | None = None, at: str | None = None, train_on: int = 0
) -> int:
    """Show the loss of checkpoints beside the loss of the run.

    Args:
        run: Folder of a run of `comera train`.
        chain: Folder of the checkpoints (default: the run's own).
        at: Steps of the checkpoints to evaluate, with commas (default: all).
        train_on: Number of steps to train on from each checkpoint before it is evaluated.
    """
    folder, archive = Path(run).expanduser(), _archive(chain or run)
    checkpoints = CheckpointChain(archive.folder)
    known = checkpoints.steps()
    steps = [_number("at", part) for part in at.split(",")] if at else known
    for number in set(steps) - set(known):
        raise FileNotFoundError(f"at={at}: there is no checkpoint of step {number}")
    if train_on < 0:
        raise ValueError(f"train_on={train_on} must be 0 or more")
    metrics = read_metrics(folder)
    logged = {line["step"]: line["eval/loss"] for line in metrics if "eval/loss" in line}
    config = parse_settings(RunConfig, read_yaml(folder / "config.yaml"))
    device = find_device(config.device)
    task = prepare_task(config, device)
    if train_on and config.train.seconds is not None:
        raise ValueError(
            f"train_on={train_on} needs a run of so many steps, and {folder} has train.seconds"
        )
    difference = other_data(folder, task.record)
    if difference is not None:
        raise ValueError(f"{folder} was trained on other data ({difference}): restore them")
    names = ["step", "ratio", "the run's loss", "as read", "difference"]
    if train_on:
        names += ["trained on to", "the run's loss", "from what is read", "difference"]
    table = _table(f"loss with checkpoints in {checkpoints.folder}", *names)

    def beside_logged(number: int) -> list[str]:
        read, noted = evaluated(step, task.evaluate)["loss"], logged.get(number)
        if noted is None:
            return ["not evaluated", f"{read:.4f}", ""]
        return [f"{noted:.4f}", f"{read:.4f}", f"{read / noted - 1:+.2%}"]

    with progress_bar(console=console) as bar:
        total = sum(min(task.steps - number, train_on) + 1 for number in steps)
        progress = bar.add_task("evaluate", total=total, figures="")
        for number in steps:
            with without_remarks():  # the run made them
                step = build_step(make_model(config, task, device), config, task)
            load_checkpoint(checkpoints, step, number)
            manifest = archive.manifest(number)
            cells = [f"{number:,}", f"{manifest.raw_bytes / manifest.size:.1f}x"]
            cells += beside_logged(number)
            end = min(task.steps, number + train_on)
            while step.steps_done < end:
                step(task.get_batch(step.steps_done))
                if step.ranks is not None and step.ranks.due:
                    step.ranks.finish_(step.optimizer)
                bar.advance(progress, 1)
            if train_on:
                cells += [f"{end:,}", *beside_logged(end)]
            table.add_row(*cells)
            bar.update(progress, advance=1, figures=f"step {number:,}")
    console.print(table)
    return 0


def compress(
    source: str,
    out: str,
    console: Console,
    mode: Literal["lossy", "lossless"] = "lossy",
    bits: int = Quality.bits,
    rate: float = Quality.rate,
    alpha: float = Quality.alpha,
    beta: float = Quality.beta,
    key_every: int = KEY_EVERY,
    key_bits: int = Quality.key_bits,
) -> int:
    """Make a chain from checkpoints of other programs.

    Args:
        source: Folder of a series: files of torch or safetensors, or folders as transformers writes
            them, with the step as the last number in their names; or another chain.
        out: Folder of the chain to make.
        mode: Whether small errors are accepted (lossy) or every bit is kept (lossless).
        bits: Bits of the code of a changed entry, 2 to 8.
        rate: Error that is accepted to save one bit, as a share of the values' variance.
        alpha: Alpha of ExCP's rule for leaving out small changes, see ``comera.CheckpointChain``;
            at 0 the rate alone decides.
        beta: Leave out first moments smaller than this many times their mean.
        key_every: Number of checkpoints from one complete checkpoint to the next.
        key_bits: Bits of the code of a weight in a complete checkpoint.
    """
    folder, place = Path(out).expanduser(), Path(source).expanduser()
    if folder.resolve() == place.resolve():
        raise ValueError(f"out={out} is where the series is: choose another folder")
    found = _find_archive(place)
    link = None if found is None else CheckpointChain(found.folder)
    series = find_series(place) if link is None else dict.fromkeys(link.steps(), place)
    with (
        CheckpointChain(
            folder, background=False, mode=mode, bits=bits, rate=rate, alpha=alpha, beta=beta,
            key_every=key_every, key_bits=key_bits,
        ) as chain,
        progress_bar(console=console) as bar,
    ):  # fmt: skip
        done = set(chain.steps())
        task = bar.add_task("compress", total=len(series), figures="")
        for step, path in series.items():
            if step not in done:  # the same command resumes
                parts = read_foreign(path) if link is None else vars(link.load(step))
                chain.save(**{**parts, "step": step})
            bar.update(task, advance=1, figures=f"step {step:,}")
    return inspect(str(folder), console)


def _archive(folder: str) -> Archive:
    found = _find_archive(Path(folder).expanduser())
    if found is None:
        raise FileNotFoundError(f"there are no checkpoints in {folder}")
    return found


def _find_archive(folder: Path) -> Archive | None:
    archives = [Archive(path) for path in (folder, folder / "checkpoints")]
    return next((archive for archive in archives if archive.steps()), None)


def _number(name: str, text: str, other: str = "") -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number{other}") from None


def _table(title: str, *names: str) -> Table:
    columns = [Column(name, justify="right" if name else "left") for name in names]
    return Table(*columns, title=escape(title), title_style="")


def _sizes(size: int, raw: int) -> tuple[str, str, str]:
    return f"{size:,}", f"{raw:,}", f"{raw / size:.1f}x"
