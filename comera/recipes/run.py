"""Train a run: build the model, its training step and, if requested, its dense twin."""

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from comera.checkpoint.archive import Archive
from comera.data.click_files import CATEGORIES
from comera.files import replacing
from comera.nn.convert import tensorize_
from comera.nn.init import init_keys_as_queries_
from comera.nn.module import tensor_trains
from comera.optim.in_backward import OptimizerInBackward
from comera.rank.learning import target_entries
from comera.recipes.folder import (
    Begun,
    DataRecord,
    Outcome,
    begun_run,
    changed_data,
    check_data,
    check_folder,
    claim,
    is_finished,
    lock,
    missing_data,
    outcome_table,
    read_outcome,
    with_whole_paths,
    write_result,
)
from comera.recipes.optimizers import OptimizerConfig
from comera.recipes.run_config import RankConfig, RunConfig, check_processes
from comera.recipes.tasks.task import Task
from comera.recipes.tasks.task_kinds import kind_of, planned_dense_model, prepare_task
from comera.report.compression import CompressionReport, compression_report
from comera.report.memory_use import MemoryReport, memory_report
from comera.report.model_plan import ModelPlan
from comera.report.model_plan import plan as plan_model
from comera.saved.model_folder import save_state
from comera.train.loop import LoopResult, evaluated, train
from comera.train.processes import Processes
from comera.train.sharded import shard_dense_, whole_state
from comera.train.step import TrainStep

_log = logging.getLogger("comera")


def run(
    config: RunConfig,
    console: Console | None = None,
    quiet: bool = False,
    processes: Processes | None = None,
) -> list[Outcome]:
    """Train what a configuration describes, resuming what is unfinished in its folder.

    Of a finished run the figures are read again; its data need not be there any more.

    Args:
        config: The whole run.
        console: The console that the tables go to.
        quiet: Whether to show no progress bars.
        processes: Those that train the models together, all of which call this; None for this one
            alone. Only the first one writes.

    Returns:
        The compressed model (or the dense one, without a ``tensorize`` section), then its twin.
        Empty if the run was interrupted; the same call goes on from there.

    Raises:
        ValueError: If the folder holds a run with other settings or of other data, or settings
            contradict.
        FolderInUseError: If another process trains into the folder; a RuntimeError.
        OtherProcessError: If one of the processes has failed; a RuntimeError.
    """
    processes = processes or Processes()
    config = dataclasses.replace(config, out=str(Path(config.out).expanduser()))
    config.check()
    config = with_whole_paths(config)
    check_processes(config, processes.count)
    console = console or Console()
    folder = Path(config.out)
    found = processes.from_first(lambda: begun_run(config))
    outcomes = processes.from_first(lambda: _shown_if_finished(config, found, console))
    if outcomes is not None:
        return outcomes
    device = find_device(config.device, processes)
    processes.from_first(lambda: _check_settings(config, found, processes.count))
    console.print(
        f"run folder {folder}, device {device}{_count(processes)}: preparing data",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    digests = processes.in_turn(lambda: config.data.digests())
    # Before anything is made of the data, and before anything is written.
    processes.from_first(lambda: _check_content(config, DataRecord(digests), processes.count))
    with contextlib.ExitStack() as held:
        processes.from_first(lambda: held.enter_context(lock(folder)))
        task = processes.in_turn(lambda: prepare_task(config, device, digests, processes))
        if config.ranks is not None:
            config.ranks.check(task.steps)
        _check_same_data(task.record, processes)
        processes.from_first(lambda: _begin(config, task.record, console))
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        return _train_all(config, task, device, console, quiet, processes)


def _count(processes: Processes) -> str:
    return f", {processes.count} processes" if processes.count > 1 else ""


def _shown_if_finished(
    config: RunConfig, found: Begun | None, console: Console
) -> list[Outcome] | None:
    """Print and return the outcomes of a run that is finished; None of one that is not."""
    if config.overwrite or not is_finished(config, found):
        return None
    folder = Path(config.out)
    try:
        outcomes = [read_outcome(folder / place) for place in _places(config)]
    except (OSError, ValueError, TypeError):  # the last step writes it again
        return None
    if not all((folder / place / "model.safetensors").is_file() for place in _places(config)):
        return None
    with lock(folder):  # nobody is beginning it anew
        console.print(f"the run in {folder} is finished", soft_wrap=True, markup=False)
        console.print(outcome_table(outcomes))
        return outcomes


def _check_settings(config: RunConfig, found: Begun | None, count: int) -> None:
    """Make the checks that need no data to be read."""
    if not kind_of(config).is_told_by_data:
        planned_memory(config, count)
    try:
        config.data.find()
    except FileNotFoundError as problem:
        key = next(iter(missing_data(config)), None)
        if key is None or found is None:
            raise
        raise FileNotFoundError(
            f"{problem}; the run in {config.out} was begun with that: if it is elsewhere now, give "
            f"its new place, --{key}=..."
        ) from None
    check_folder(config, found)


def _check_content(config: RunConfig, record: DataRecord, count: int) -> None:
    """Make the checks that need the data, before they are prepared and the folder is locked."""
    check_data(config, record)
    if kind_of(config).is_told_by_data:
        planned_memory(config, count)


def _check_same_data(record: DataRecord, processes: Processes) -> None:
    """Check that every process has read what the first one has."""
    first = processes.from_first(lambda: record)

    def check() -> None:
        difference = changed_data(first, record)
        if difference is not None:
            raise ValueError(
                f"it has read other data than process 0 ({difference}): give every machine the same"
            )

    processes.together(check)


def _begin(config: RunConfig, record: DataRecord, console: Console) -> None:
    """Make the locked folder that of this run, once it was looked at again."""
    found = begun_run(config)
    check_folder(config, found)
    check_data(config, record)
    if found is not None and not config.overwrite:
        if found.longer:
            console.print(
                f"the run in {config.out} is trained for longer than it was to be: its learning "
                "rate goes on where the schedule of a run of that length is by then, not where "
                "its own was",
                soft_wrap=True, markup=False,
            )  # fmt: skip
        if found.rhythm:
            console.print(
                f"the run in {config.out} goes on with {', '.join(found.rhythm)}",
                soft_wrap=True, markup=False,
            )  # fmt: skip
    claim(config, record, found)


def _places(config: RunConfig) -> list[str]:
    """Return the folders of a run's models in its own."""
    return [name if number else "" for number, (name, _) in enumerate(_jobs(config))]


def _train_all(
    config: RunConfig,
    task: Task,
    device: torch.device,
    console: Console,
    quiet: bool,
    processes: Processes,
) -> list[Outcome]:
    """Train the models of a run one after the other; none are returned if it was interrupted."""
    folder = Path(config.out)
    outcomes: list[Outcome] = []
    for place, (name, settings) in zip(_places(config), _jobs(config), strict=True):
        outcome = _train_one(
            name, folder / place, settings, task, device, console, quiet, outcomes, processes
        )
        if outcome is None:
            console.print(
                f"interrupted; the same command resumes the run in {folder}", markup=False
            )
            return []
        outcomes.append(outcome)
    console.print(outcome_table(outcomes))
    return outcomes


def plan(config: RunConfig) -> tuple[CompressionReport, ModelPlan | None, int | None]:
    """Return what a run will train: size and plan of its model, and the size to end at.

    Nothing is allocated and no data is read.
    """
    model = planned_model(config)
    report = compression_report(model, config.tokens)
    if config.tensorize is None:
        return report, None, None
    layers = plan_model(model, tokens=config.tokens)
    assert isinstance(layers, ModelPlan), "the model is not one layer"
    if config.ranks is None:
        return report, layers, None
    return report, layers, math.floor(config.ranks.target * report.live_params)


def planned_memory(config: RunConfig, count: int = 1) -> list[MemoryReport]:
    """Count what a run's model and then its twin will keep in memory; nothing is allocated.

    Raises:
        ValueError: If the optimizer or the target of rank learning does not suit them, or they
            cannot be split among ``count`` processes as the run asks for.
    """
    unused = config.without_effect
    if unused:
        _log.warning(
            "%s has no effect: the model of %s is described by the section %s",
            ", ".join(unused), config.task, "model" if config.text else "dlrm",
        )  # fmt: skip
    found = []
    for name, settings in _jobs(config):
        with without_remarks():  # tensorize_ has its say when the model is made
            model = planned_model(settings)
        if settings.ranks is not None:
            _check_target(model, settings.ranks, settings.rank_section)
        optimizer = settings.optimizer_for(settings.train.steps).build(model)
        found.append(memory_report(model, optimizer, f"memory of the {name} model at the start"))
    return found


def _check_target(model: nn.Module, ranks: RankConfig, section: str) -> None:
    layers = tensor_trains(model).values()
    if not layers:
        raise ValueError(f"the section {section} needs tensor trains, but tensorize made none")
    start_size = sum(layer.shape.size_at(layer.ranks) for layer in layers)
    try:
        target_entries(layers, ranks.target, start_size, ranks.min_rank)
    except ValueError as problem:
        raise ValueError(f"{section}.{problem}") from None


def planned_model(config: RunConfig) -> nn.Module:
    """Make the model that a run starts with, without memory for its parameters."""
    config.check()
    with torch.device("meta"):
        model = planned_dense_model(config)
    return model if config.tt_config is None else tensorize_(model, config.tt_config)


def _jobs(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Return the models of a run by name: its own, then the dense twin if there is to be one."""
    jobs = [("compressed" if config.tensorize else "dense", config)]
    if config.twin and config.tensorize:
        optimizer = config.optimizer and config.optimizer.of_twin()
        twin = dataclasses.replace(
            config, tensorize=None, two_stage=None, importance_pruning=None, optimizer=optimizer
        )
        jobs.append(("dense", twin))
    return jobs


def _train_one(
    name: str,
    folder: Path,
    config: RunConfig,
    task: Task,
    device: torch.device,
    console: Console,
    quiet: bool,
    before: list[Outcome],
    processes: Processes,
) -> Outcome | None:
    torch.manual_seed(config.seed)
    model = make_model(config, task, device)
    layer_dense = compression_report(model).tt_dense_params
    if before:
        layer_dense = before[0].layer_dense_params
    step = build_step(model, config, task, processes)
    console.print(
        str(memory_report(model, step.optimizer, f"memory of the {name} model at the start")),
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip
    if config.ranks is not None and step.ranks is not None:
        console.print(
            f"{name}: cores of {step.ranks.start_size:,} entries to end at "
            f"{step.ranks.target_size:,} or less"
        )
    # Parameters are drawn the same way whatever the model, so the twins see the same dropout too.
    torch.manual_seed(config.seed + 1)
    result = train(
        step,
        task.get_batch,
        steps=task.steps,
        seconds=config.train.seconds,
        folder=folder,
        evaluate=task.evaluate,
        eval_every=config.train.eval_every,
        save_every=config.train.save_every,
        log_every=config.train.log_every,
        resume=True,
        chain=config.checkpoints.chain(folder / "checkpoints"),
        title=name,
        per_step=task.per_step,
        quiet=quiet or not processes.is_first,
        processes=processes,
    )
    if result.interrupted:
        return None
    test = evaluated(step, task.test) if task.test else {}
    state = whole_state(model.state_dict())  # of all processes, which may hold parts of it
    return processes.from_first(
        lambda: _save(name, folder, config, task, model, state, result, layer_dense, test)
    )


def _save(
    name: str,
    folder: Path,
    config: RunConfig,
    task: Task,
    model: nn.Module,
    state: dict[str, Tensor],
    result: LoopResult,
    layer_dense: int,
    test: dict[str, float],
) -> Outcome:
    save_state(model, state, folder, config.tt_config)
    report = compression_report(model)
    checkpoints = Archive(folder / "checkpoints")
    sizes = [checkpoints.size(step) for step in checkpoints.steps()]
    outcome = Outcome(
        name=name,
        metrics=result.metrics,
        params=report.params,
        layer_params=report.tt_params if report.layers else layer_dense,
        layer_dense_params=layer_dense,
        bytes=(folder / "model.safetensors").stat().st_size,
        seconds=result.seconds,
        steps=result.steps,
        ranks=result.ranks,
        test=test,
        checkpoint_bytes=sum(sizes) / len(sizes) if sizes else None,
    )
    if task.tokenizer is not None:
        with replacing(folder / "tokenizer.json") as temporary:
            temporary.write_text(task.tokenizer.to_str(), encoding="utf-8")
    if task.categories is not None:
        task.categories().save(folder / CATEGORIES)
    layers = report.to_pandas().to_dict("records")
    facts = {**dataclasses.asdict(outcome), "sizes": dict(task.sizes), "layers": layers}
    write_result(folder, facts)
    return outcome


def find_device(name: str, processes: Processes | None = None) -> torch.device:
    """Return the device of a run's settings; ``auto`` is a GPU where there is one.

    Of several processes each takes a GPU of its own.

    Raises:
        ValueError: If it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if processes is not None and processes.count > 1 and device.type == "cuda":
        device = torch.device("cuda", processes.local_rank)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:  # the latter where torch has no CUDA at all
        raise ValueError(f"device={name!r} cannot be used here: {problem}") from None
    return device


def make_model(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    """Make the model at the start of a run, the same on every device for the same random state.

    Numbers are drawn on the CPU, since a GPU draws others.
    """
    model = _drawn(config, task, device)
    # Here, since fresh cores are drawn one layer after the other.
    return init_keys_as_queries_(model) if config.model.qk_init == "same" else model


def _drawn(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    settings = config.tt_config
    if settings is not None and settings.init is None:
        settings = replace(settings, init="orthogonal")  # nobody loses weights of a fresh model
    if settings is not None and task.lean and settings.init != "svd":
        with torch.device("meta"):
            model = task.make_model()
        tensorize_(model, settings).to_empty(device="cpu")
        model.reset_parameters(settings.init)  # type: ignore[operator]
        return model.to(device)
    with torch.device("cpu"):
        model = task.make_model()
    if settings is None:
        return model.to(device)
    if settings.init == "svd":  # draws nothing, and is the device's work
        return tensorize_(model.to(device), settings)
    return tensorize_(model, settings).to(device)


def build_step(
    model: nn.Module, config: RunConfig, task: Task, processes: Processes | None = None
) -> TrainStep:
    """Make the training step of a run, with its optimizer and schedules.

    Of several processes all call this, each with a model of the same weights.
    """
    group = None if processes is None else processes.group
    share_out = _shard if group is not None and config.parallel.kind == "fsdp" else None
    if share_out is not None:
        share_out(model)  # makes other parameters, which the optimizer has to hold
    settings = config.optimizer_for(task.steps)
    optimizer = settings.build(model)
    falling = _rate(settings, task.steps)
    scheduler = LambdaLR(
        optimizer,
        [_constant if g["name"] == "gates" else falling for g in optimizer.param_groups],
    )
    ranks = None if config.ranks is None else config.ranks.build(model, task.steps)
    in_backward = settings.in_backward  # averages gradients itself, and frees each
    return TrainStep(
        model
        if group is None or share_out is not None or in_backward
        else nn.parallel.DistributedDataParallel(model),
        task.loss_fn,
        OptimizerInBackward(optimizer, process_group=group) if in_backward else optimizer,
        ranks,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        precision=config.train.precision,
        scheduler=scheduler,
        compile=config.train.compile,
        graph=config.train.graph,
    )


def _shard(model: nn.Module) -> nn.Module:
    # Torch warns that what a model returns must not be written to, which no loss here does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    return shard_dense_(model)


def _constant(step: int) -> float:
    return 1.0


def _rate(settings: OptimizerConfig, steps: int):
    """Return the share of the peak rate at each step: rising, then falling to zero."""
    warmup = max(1, round(settings.warmup_share * steps))

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        left = max(0.0, (steps - step) / max(1, steps - warmup))
        if settings.schedule == "linear":
            return left
        return 0.5 - 0.5 * math.cos(math.pi * left) if settings.schedule == "cosine" else 1.0

    return rate


@contextlib.contextmanager
def without_remarks(about: str = "comera") -> Iterator[None]:
    """Run what is inside without remarks about the layers, or of another logger."""
    log = logging.getLogger(about)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
