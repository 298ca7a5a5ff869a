"""Train the variants of a front, each in a process and a folder of its own."""

import dataclasses
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from comera.compress.compress import compress_
from comera.compress.layer_moments import LossFn
from comera.extras import listed
from comera.files import write_text
from comera.nn.swap import evaluation_mode
from comera.nn.targets import TTConfig
from comera.params import model_size
from comera.report.frontier import Front, Training, chosen_rates, points_of
from comera.train.log import PlainLines, from_json, print_text, progress_bar, to_json
from comera.train.processes import PARENT, stop_with_parent

FAMILIES = {
    "given": "the model as given",
    "narrower": "dense models of smaller widths",
    "shallower": "dense models of fewer layers",
    "low-rank": "linear layers of low rank",
    "blocks": "linear layers as block tensor trains",
    "trains": "linear layers as tensor trains, whose ranks are learned and cut",
    "table": "the tables alone as tensor trains, frequent rows in a basis of their own",
    "fewer-words": "tables of fewer rows",
    "compressed-after": "the model as given, trained, by compress_",
    "8-bits": "the model as given, trained, its weights rounded to eight bits",
    "configured": "the model as its configuration compresses it",
}
"""What is done to a model, by name."""

_COMPRESSED = ("low-rank", "blocks", "trains", "table", "compressed-after", "configured")
_AFTER = ("compressed-after", "8-bits")  # made of the trained model as given
_RESULT = "trained.json"


@dataclass(frozen=True)
class Variant:
    """One way to make a model smaller, and what it is called."""

    name: str
    family: str
    width: Any = None  # what makes its model
    settings: TTConfig | None = None
    target: float | None = None  # of rank learning
    budget: float | None = None  # share of the parameters left after training
    scale: float = 1.0  # rate in units of that of the model as given

    @property
    def is_of_given(self) -> bool:
        """Return whether it is made of the trained model as given."""
        return self.family in _AFTER


Measured = tuple[float, float | None, dict[str, Any], str, str]
"""Quality on development and on test data, costs, layers, and how to train on: see `Training`."""


@dataclass
class Work(ABC):
    """How variants are trained; all trainings and their results are in ``folder``."""

    folder: Path

    @abstractmethod
    def train(self, variant: Variant, rate: float, seed: int, place: Path) -> Measured:
        """Train a variant in a folder; raise ``KeyboardInterrupt`` if stopped."""

    @abstractmethod
    def make_smaller(self, variant: Variant, given: Path, place: Path) -> Measured:
        """Compress the trained model of a folder, save it in another one, return its figures."""

    def place(self, name: str, rate: float, seed: int) -> Path:
        """Return the folder of a training."""
        return self.folder / name / f"rate-{rate:g}" / f"seed-{seed}"

    def read(self) -> list[Training]:
        """Return the trainings that have ended."""
        files = sorted(self.folder.glob(f"*/*/*/{_RESULT}"))
        return [Training(**from_json(file.read_text(encoding="utf-8"))) for file in files]


def train_front(
    work: Work,
    planned: Sequence[Variant],
    left_out: Mapping[str, str],
    base_rate: float,
    rates: Sequence[float],
    seeds: Sequence[int],
    metric: str,
    higher: bool,
    jobs: int | None,
    device: torch.device,
    about: str,
    progress: bool = True,
) -> Front:
    """Train the planned variants, and return the front of all that have ended.

    The first seed is trained at each rate, a multiple of ``base_rate`` and of the variant's scale,
    the others at the best one. ``jobs`` are trainings at a time, None as many as processors; on a
    device whose trainings cannot be forked, each is in this process. After Ctrl-C the front says
    that it was interrupted.
    """
    at_once = (jobs or len(os.sched_getaffinity(0))) if can_fork(device) else 0
    trained = [variant for variant in planned if not variant.is_of_given]
    after = [variant for variant in planned if variant.is_of_given]
    problems: dict[Path, str] = {}

    def rate_of(variant: Variant, times: float) -> float:
        return float(f"{base_rate * variant.scale * times:.3g}")

    def piece(variant: Variant, rate: float, seed: int, given: Path | None = None) -> Piece:
        place = work.place(variant.name, rate, seed)

        def do() -> None:
            if given is None:
                found = work.train(variant, rate, seed, place)
            else:
                found = work.make_smaller(variant, given, place)
            compressed = variant.family in _COMPRESSED
            training = Training(variant.name, variant.family, compressed, rate, seed, *found)
            write_text(place / _RESULT, to_json(vars(training), indent=1))

        return place, do

    total = len(trained) * (len(rates) + len(seeds) - 1) + len(after) * len(seeds)
    console, there = Console(), len(work.read())
    if progress:
        side = f", {at_once} at a time" if at_once else ""
        had = f", where {there} are already" if there else ""
        print_text(console, f"{total} trainings{side}, in {work.folder}{had}: {about}")
    with progress_bar(not progress, console) as bar:
        task = bar.add_task("all trainings", total=total, figures="")
        lines = PlainLines(bar, "training", total)

        def run(pieces: Iterable[Piece]) -> None:
            def ended(place: Path) -> None:
                name = place.relative_to(work.folder).parts[0]
                bar.update(task, advance=1, figures=f"{name},")
                lines.show(round(bar.tasks[0].completed), name)

            problems.update(side_by_side(dict(pieces), at_once, ended))

        interrupted = False
        try:
            run(piece(v, rate_of(v, times), seeds[0]) for v in trained for times in rates)
            best = chosen_rates(work.read(), higher)
            known = [variant for variant in trained if variant.name in best]
            run(piece(v, best[v.name], seed) for v in known for seed in seeds[1:])
            ends = [(seed, work.place("given", best.get("given", 0.0), seed)) for seed in seeds]
            run(
                piece(variant, best["given"], seed, given)
                for variant in after
                for seed, given in ends
                if (given / _RESULT).is_file()
            )
        except KeyboardInterrupt:
            interrupted = True
            about = f"interrupted: the same command or call goes on in {work.folder}. {about}"
    names = [variant.name for variant in planned]
    points = points_of([run for run in work.read() if run.variant in names], higher)
    points.sort(key=lambda point: names.index(point.name))
    found = {point.name: list[str]() for point in points}
    lost = dict(left_out)
    for place, problem in problems.items():
        name, rate, seed = place.relative_to(work.folder).parts
        if name in found:
            found[name].append(f"{rate}, {seed}: {problem}")
        else:
            lost[name] = f"{name}: {problem}"
    if after and "given" not in found:
        lost["after"] = f"{listed([v.name for v in after])}: the model as given was not trained"
    points = [dataclasses.replace(p, note="; ".join(found[p.name])) for p in points]
    return Front(tuple(points), metric, higher, lost, about, interrupted)


def as_smaller(
    variant: Variant, model: nn.Module, batches: Iterable[Any], loss_fn: LossFn
) -> tuple[int, str]:
    """Make a trained model smaller in place; return its bytes and what was done, in words."""
    if variant.budget is not None:
        done = compress_(
            model, batches, budget=variant.budget, loss_fn=loss_fn, target_modules="all"
        )
        return model_size(model).bytes, done.summary()
    return round_to_8_bits_(model), "weights of eight bits, with a scale for each row"


@torch.no_grad()
def round_to_8_bits_(model: nn.Module) -> int:
    """Round the weights of linear layers and tables to eight bits, and return the model's bytes.

    Each row has a scale, of two bytes; other parameters keep their own size.
    """
    size, seen = model_size(model).bytes, set[int]()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.EmbeddingBag):
            weight = module.weight
            if id(weight) not in seen:
                seen.add(id(weight))
                scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
                weight.copy_((weight / scale).round() * scale)
                size -= weight.numel() * (weight.element_size() - 1) - 2 * len(weight)
    return size


def look_at_given(
    made: Callable[[], nn.Module],
    loss_fn: LossFn,
    batch: Callable[[], Any],
    evaluate: Callable[[nn.Module], float],
) -> list[float | None]:
    """Return loss and quality of a fresh model, to know the task by; None where chance is in them.

    Errors of the functions are raised, before anything is trained.
    """
    looks = []
    for _ in range(2):
        torch.manual_seed(0)
        model = made()
        with evaluation_mode(model), torch.no_grad():
            looks.append((float(loss_fn(model, batch())), float(evaluate(model))))
    return [a if math.isclose(a, b, rel_tol=1e-6) else None for a, b in zip(*looks, strict=True)]


def check_given(before: Sequence[float | None], now: Sequence[float | None], what: str) -> None:
    """Raise ``ValueError`` if :func:`look_at_given` saw another task before."""
    for name, old, new in zip(("loss", "quality"), before, now, strict=True):
        if None not in (old, new) and not math.isclose(old or 0, new or 0, rel_tol=1e-4):
            raise ValueError(
                f"{what} a front of another task: before training its model as given had {name} "
                f"{old:.6g}, and this one has {new:.6g}"
            )


Piece = tuple[Path, Callable[[], None]]
"""A folder, and what is to be done in it."""


def can_fork(device: torch.device) -> bool:
    """Return whether trainings on a device can be in forked processes."""
    return device.type == "cpu" and sys.platform == "linux"


def side_by_side(
    work: Mapping[Path, Callable[[], None]], at_once: int, ended: Callable[[Path], object]
) -> dict[Path, str]:
    """Run the pieces of work that have no result yet, and return why some of them failed.

    Each runs in a forked process with one thread, so many at a time, and its output goes to
    ``log.txt`` in its folder; with ``at_once=0`` all run in this process. Ctrl-C stops them, which
    may save their state, and is raised.
    """
    todo, problems = list(work.items()), dict[Path, str]()
    running: dict[Path, tuple[Any, Any]] = {}
    try:
        while todo or running:
            while todo and len(running) < max(1, at_once):
                place, do = todo.pop(0)
                if (place / _RESULT).is_file():
                    ended(place)
                elif at_once:
                    running[place] = _forked(place, do)
                else:
                    if (problem := _done(do)) is not None:
                        problems[place] = problem
                    ended(place)
            if running:
                multiprocessing.connection.wait([p.sentinel for p, _ in running.values()])
            for place, (process, said) in list(running.items()):
                if process.exitcode is not None:
                    del running[place]
                    if process.exitcode:
                        problems[place] = f"its process ended with exit code {process.exitcode}"
                        with suppress(EOFError):  # it was killed, and said nothing
                            problems[place] = said.recv()
                    ended(place)
    except KeyboardInterrupt:
        for process, _ in running.values():
            os.kill(process.pid, signal.SIGINT)
        for process, _ in running.values():
            process.join()
        raise
    return problems


def _forked(place: Path, do: Callable[[], None]) -> tuple[Any, Any]:
    """Start a process, and return it with the connection by which it says why it failed."""
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(place, do, theirs), daemon=True)
    with warnings.catch_warnings():  # of threads, of which the child has none and needs none
        warnings.filterwarnings("ignore", ".* multi-threaded", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def _child(place: Path, do: Callable[[], None], said: Any) -> None:
    os.environ[PARENT] = str(os.getppid())
    os.setsid()  # Ctrl-C of a terminal goes to the parent alone, which hands it on
    stop_with_parent()
    place.mkdir(parents=True, exist_ok=True)
    with (place / "log.txt").open("a", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        logging.basicConfig(format="%(message)s", level=logging.INFO, stream=file, force=True)
        torch.set_num_threads(1)  # more would wait for threads that only the parent has
        try:
            problem = _done(do)
        except KeyboardInterrupt:
            problem = "interrupted"
        if problem is not None:
            said.send(problem)
            file.flush()
            os._exit(1)


def _done(do: Callable[[], None]) -> str | None:
    """Do a piece of work; return why it failed, of whatever kind: the others are worth it still."""
    try:
        do()
    except Exception as problem:
        traceback.print_exc()
        kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
        return f"{kind}{problem}"
    return None
