"""``comera checkpoint WHAT``: look into chains of checkpoints, test, write and make them.

The quality of a run's checkpoints: evaluated as they are read, and trained on from.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from comera.checkpoint.archive import Archive, Manifest
from comera.checkpoint.chain import KEY_EVERY, CheckpointChain
from comera.checkpoint.contents import Quality
from comera.checkpoint.foreign import find_series, read_foreign, step_of, write_weights
from comera.checkpoint.streams import DamagedError
from comera.recipes.build import build_step, find_device, make_model, without_remarks
from comera.recipes.folder import other_data
from comera.recipes.parse import parse_settings, read_yaml
from comera.recipes.run_config import RunConfig
from comera.recipes.tasks.task_kinds import prepare_task
from comera.train.log import progress_bar, read_metrics
from comera.train.run_state import load_checkpoint
from comera.train.run_under_way import evaluated


@dataclass(frozen=True)
class Replayed:
    """A metric of one checkpoint beside that of the run itself.

    Attributes:
        step: Step of the checkpoint.
        logged: The run's figure there, if it was evaluated there.
        read: The figure of the model that is read.
        later: The step up to which training went on from what was read; ``step`` if it did not.
        logged_later: The run's figure there.
        read_later: The figure of the model trained on.
    """

    step: int
    logged: float | None
    read: float
    later: int
    logged_later: float | None
    read_later: float


def replay(
    run: Path,
    chain: CheckpointChain,
    steps: list[int],
    train_on: int,
    progress: Callable[[int], None],
) -> Iterator[Replayed]:
    """Evaluate checkpoints by the loss of a run.

    Args:
        run: Folder of the run, which holds the settings and what was logged.
        chain: Checkpoints of that run, kept in whatever way.
        steps: Steps whose checkpoints are evaluated.
        train_on: Optimizer steps to go on from each, but no further than the run's end.
        progress: Called after every step trained.

    Raises:
        FileNotFoundError: If the folder holds no run.
        ValueError: If its data have changed since.
    """
    logged = {line["step"]: line["eval/loss"] for line in read_metrics(run) if "eval/loss" in line}
    config = parse_settings(RunConfig, read_yaml(run / "config.yaml"))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    device = find_device(config.device)
    task = prepare_task(config, device)
    difference = other_data(run, task.record)
    if difference is not None:
        raise ValueError(f"{run} was trained on other data ({difference}): restore them")
    for number in steps:
        with without_remarks():  # the run made them
            step = build_step(make_model(config, task, device), config, task)
        load_checkpoint(chain, step, number)
        loss = later = evaluated(step, task.evaluate)["loss"]
        end = min(task.steps, number + train_on)
        while step.steps_done < end:
            step(task.get_batch(step.steps_done))
            if step.ranks is not None and step.ranks.due:
                step.ranks.finish_(step.optimizer)
            progress(1)
        if end > number:
            later = evaluated(step, task.evaluate)["loss"]
        yield Replayed(number, logged.get(number), loss, end, logged.get(end), later)


def add_checkpoint(commands: Any) -> None:
    """Add ``checkpoint`` and its subcommands to the commands of ``comera``."""
    parser = ArgumentParser(
        description="Look into chains of compressed checkpoints, and make them.", allow_abbrev=False
    )
    # The outer level first, then the inner one: jsonargparse insists.
    commands.add_subcommand(
        "checkpoint", parser, help="Look into chains of compressed checkpoints, and make them."
    )
    actions = parser.add_subcommands(dest="action")
    for name, (text, add, _) in _ACTIONS.items():
        command = ArgumentParser(description=text, allow_abbrev=False)
        add(command)
        actions.add_subcommand(name, command, help=text)


def run_checkpoint(chosen: Namespace, console: Console) -> int:
    """Run one subcommand of ``comera checkpoint``; returns the exit status.

    Raises:
        ValueError, FileNotFoundError: If it cannot be done; says why.
    """
    return _ACTIONS[chosen.action][2](chosen[chosen.action], console)


# ── inspect ──────────────────────────────────────────────────────────────────────────────────────

_KINDS = {
    "changes of weights": ("model/gaps", "model/codes", "model/books"),
    "moments": (
        "rest/gaps", "rest/places", "rest/codes", "rest/books", "rest/means",
    ),
    "exact tensors of the model": ("model/byte",),
    "exact tensors of the rest": ("rest/byte",),
    "names, shapes and plain values": ("index",),
}  # fmt: skip


def _inspect(options: Namespace, console: Console) -> int:
    archive = _archive(options.folder)
    table = Table(title=f"checkpoints in {escape(str(archive.folder))}", title_style="")
    for name in ("step", "builds on", "bytes", "raw bytes", "ratio"):
        table.add_column(name, justify="right")
    for name in ("kept changes", "error", "copying s", "encoding s"):
        table.add_column(name, justify="right")
    sound: list[Manifest] = []
    for step in archive.steps():
        try:
            manifest = archive.manifest(step)
        except DamagedError as problem:
            console.print(f"[red]{escape(str(problem))}[/]", soft_wrap=True, highlight=False)
            continue
        sound.append(manifest)
        table.add_row(*_row(manifest))
    if sound:
        raw, size = (sum(m.raw_bytes for m in sound), sum(m.size for m in sound))
        table.add_section()
        table.add_row("all", "", f"{size:,}", f"{raw:,}", f"{raw / size:.1f}x")
    console.print(table)
    if sound:
        console.print(_by_kind(sound))
    return 0 if len(sound) == len(archive.steps()) else 1


def _row(manifest: Manifest) -> list[str]:
    figures, previous = manifest.figures, manifest.previous
    entries, seconds = figures.get("entries", {}), figures.get("seconds", {})
    lossy = entries.get("lossy", 0)
    return [
        f"{manifest.step:,}",
        "key frame" if previous is None else f"{previous[0]:,}",
        f"{manifest.size:,}",
        f"{manifest.raw_bytes:,}",
        f"{manifest.raw_bytes / manifest.size:.1f}x",
        f"{entries.get('changed', 0) / lossy:.1%}" if lossy else "all",
        f"{figures.get('error', 0):.3f}" if lossy else "none",
        f"{seconds.get('copying', 0):.2f}",
        f"{seconds.get('encoding', 0):.2f}",
    ]


def _by_kind(manifests: list[Manifest]) -> Table:
    table = Table(title="what the bytes are, all checkpoints together", title_style="")
    table.add_column("")
    for name in ("quantised and packed", "entropy coded", "ratio", "share"):
        table.add_column(name, justify="right")
    total = sum(stored for m in manifests for _, stored in m.streams.values())
    for kind, prefixes in _KINDS.items():
        pairs = [
            sizes
            for m in manifests
            for name, sizes in m.streams.items()
            if name.startswith(prefixes)
        ]
        before, after = (sum(pair[k] for pair in pairs) for k in (0, 1))
        if after:
            table.add_row(
                kind, f"{before:,}", f"{after:,}", f"{before / after:.2f}x", f"{after / total:.1%}"
            )
    table.caption = (
        "error: of the change of the weights since the last checkpoint (of the weights in a key "
        "frame), relative to its norm; the next checkpoint makes up for it"
    )
    return table


# ── verify, export, compress ─────────────────────────────────────────────────────────────────────


def _verify(options: Namespace, console: Console) -> int:
    archive = _archive(options.folder)
    with progress_bar(console=console) as bar:
        task = bar.add_task("verify", total=len(archive.steps()), figures="")

        def checked(step: int) -> None:
            bar.update(task, advance=1, figures=f"step {step:,}")

        problems = CheckpointChain(archive.folder).verify(checked)
    for step, problem in problems.items():
        verdict = "[green]sound[/]" if problem is None else f"[red]{escape(problem)}[/]"
        console.print(f"step {step:,}: {verdict}", soft_wrap=True, highlight=False)
    return int(any(problems.values()))


def _export(options: Namespace, console: Console) -> int:
    chain = CheckpointChain(_archive(options.folder).folder)
    saved = chain.load(_step(options.step))
    path = write_weights(Path(options.out).expanduser(), saved.model)
    console.print(f"wrote {path}: {len(saved.model)} tensors of step {saved.step:,}", markup=False)
    return 0


def _compress(options: Namespace, console: Console) -> int:
    folder = Path(options.out).expanduser()
    if folder.resolve() == Path(options.source).expanduser().resolve():
        raise ValueError(f"out={options.out} is where the series is: choose another folder")
    series = _series(Path(options.source).expanduser())
    settings = {key: value for key, value in options.items() if key not in ("source", "out")}
    with (
        CheckpointChain(folder, background=False, **settings) as chain,
        progress_bar(console=console) as bar,
    ):
        done = set(chain.steps())
        task = bar.add_task("compress", total=len(series), figures="")
        for step, read in series.items():
            if step not in done:  # the same command goes on
                chain.save(step, **read())
            bar.update(task, advance=1, figures=f"step {step:,}")
    return _inspect(Namespace(folder=str(folder)), console)


def _series(source: Path) -> dict[int, Callable[[], dict[str, Any]]]:
    """Return steps in order, and what reads the checkpoint of each."""
    found = _find_archive(source)
    if found is None:
        return {step_of(path): partial(read_foreign, path) for path in find_series(source)}
    chain = CheckpointChain(found.folder)
    return {step: partial(_parts_of_link, chain, step) for step in chain.steps()}


def _parts_of_link(chain: CheckpointChain, step: int) -> dict[str, Any]:
    parts = vars(chain.load(step))
    return {name: part for name, part in parts.items() if name != "step"}


def _evaluate(options: Namespace, console: Console) -> int:
    run = Path(options.run).expanduser()
    archive = _archive(options.chain or options.run)
    chain = CheckpointChain(archive.folder)
    steps = [_number("at", part) for part in options.at.split(",")] if options.at else chain.steps()
    for step in set(steps) - set(chain.steps()):
        raise FileNotFoundError(f"at={options.at}: there is no checkpoint of step {step}")
    if options.train_on < 0:
        raise ValueError(f"train_on={options.train_on} must be 0 or more")
    table = Table(title=f"loss with checkpoints in {escape(str(chain.folder))}", title_style="")
    for name in ("step", "ratio", "the run's loss", "as read", "difference"):
        table.add_column(name, justify="right")
    if options.train_on:
        for name in ("trained on to", "the run's loss", "from what is read", "difference"):
            table.add_column(name, justify="right")
    with progress_bar(console=console) as bar:
        task = bar.add_task("evaluate", total=None, figures="")
        for found in replay(run, chain, steps, options.train_on, lambda n: bar.advance(task, n)):
            manifest = archive.manifest(found.step)
            cells = [f"{found.step:,}", f"{manifest.raw_bytes / manifest.size:.1f}x"]
            cells += _beside(found.logged, found.read)
            if options.train_on:
                cells += [f"{found.later:,}", *_beside(found.logged_later, found.read_later)]
            table.add_row(*cells)
            bar.update(task, advance=1, figures=f"step {found.step:,}")
    console.print(table)
    return 0


def _beside(logged: float | None, read: float) -> list[str]:
    if logged is None:
        return ["not evaluated", f"{read:.4f}", ""]
    return [f"{logged:.4f}", f"{read:.4f}", f"{read / logged - 1:+.2%}"]


def _archive(folder: str) -> Archive:
    """Return the checkpoints in a folder, or those of a run."""
    found = _find_archive(Path(folder))
    if found is None:
        raise FileNotFoundError(f"there are no checkpoints in {folder}")
    return found


def _find_archive(folder: Path) -> Archive | None:
    archives = [Archive(path) for path in (folder, folder / "checkpoints")]
    return next((archive for archive in archives if archive.steps()), None)


def _step(text: str) -> int | Literal["latest"]:
    return "latest" if text == "latest" else _number("step", text, ", or 'latest'")


def _number(name: str, text: str, other: str = "") -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number{other}") from None


def _add_folder(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=str, help="Folder of the checkpoints, or of the run that wrote them."
    )


def _add_export(parser: ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument(
        "out",
        type=str,
        help="File to write, ending in .safetensors, or a folder that gets a model.safetensors.",
    )
    parser.add_argument(
        "--step", type=str, default="latest", help='Step of the checkpoint to write, or "latest".'
    )


def _add_compress(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=str,
        help="Folder of a series: files of torch or safetensors, or folders as transformers "
        "writes them, with the step as the last number in their names; or another chain.",
    )
    parser.add_argument("out", type=str, help="Folder of the chain to make.")
    parser.add_argument(
        "--mode",
        type=Literal["lossy", "lossless"],
        default="lossy",
        help="Whether small errors are accepted (lossy) or every bit is kept (lossless).",
    )
    for name, default, text in (
        ("bits", Quality.bits, "Bits of the code of a changed entry, 2 to 8."),
        (
            "rate",
            Quality.rate,
            "Error that is accepted to save one bit, as a share of the variance.",
        ),
        (
            "alpha",
            Quality.alpha,
            "Factor alpha of the paper's rule for changes that are left out; 0 leaves it to the "
            "rate.",
        ),
        ("beta", Quality.beta, "Leave out first moments smaller than this many times their mean."),
        ("key_every", KEY_EVERY, "Number of checkpoints from one that stands alone to the next."),
        (
            "key_bits",
            Quality.key_bits,
            "Bits of the code of a weight in a checkpoint that stands alone.",
        ),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)


def _add_evaluate(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=str, help="Folder of a run of `comera train`.")
    parser.add_argument(
        "--chain", type=str, help="Folder of the checkpoints (default: the run's own)."
    )
    parser.add_argument(
        "--at", type=str, help="Steps of the checkpoints to evaluate, with commas (default: all)."
    )
    parser.add_argument(
        "--train_on",
        type=int,
        default=0,
        help="Number of steps to train on from each checkpoint before it is evaluated.",
    )


_Action = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace, Console], int]]
_ACTIONS: dict[str, _Action] = {
    "inspect": ("Show what is in a chain, and what its bytes are.", _add_folder, _inspect),
    "verify": ("Read everything, and say what is damaged.", _add_folder, _verify),
    "export": ("Write a checkpoint's weights as safetensors.", _add_export, _export),
    "evaluate": ("Show the loss of checkpoints beside the run's own.", _add_evaluate, _evaluate),
    "compress": ("Make a chain of other programs' checkpoints.", _add_compress, _compress),
}
