"""Train a run: build the model, its training step and, if requested, its dense twin."""

import contextlib
import dataclasses
import datetime
import logging
import math
import subprocess
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from comera import __version__
from comera.checkpoint.archive import Archive
from comera.extras import error_prefix, without_remarks
from comera.files import local_folder, write_text
from comera.nn.convert import tensorize_
from comera.nn.init import init_keys_as_queries_
from comera.nn.module import tensor_trains
from comera.optim.in_backward import OptimizerInBackward
from comera.planning.machine import processor_name
from comera.rank.learning import target_entries
from comera.recipes import run_folder
from comera.recipes.optimizers import OptimizerConfig
from comera.recipes.run_config import RunConfig, check_processes
from comera.recipes.tasks.task import Task, prepare_task, task_of
from comera.report import model_plan
from comera.report.compression import CompressionReport, compression_report
from comera.report.memory_use import MemoryReport, memory_report
from comera.saved.model_folder import read_folder, save_state
from comera.train.log import MemoryWatch, print_text, to_json
from comera.train.loop import evaluated, forward_seconds, train
from comera.train.processes import Processes
from comera.train.sharded import shard_dense_, whole_state
from comera.train.step import TrainStep

_log = logging.getLogger("comera")


def run(
    config: RunConfig,
    console: Console | None = None,
    quiet: bool = False,
    processes: Processes | None = None,
) -> list[run_folder.Outcome]:
    """Train the models of a run, resuming models that are unfinished in its folder.

    Figures of a finished run are read from its folder, without its data. Returns the outcome of the
    compressed model (of the dense one, without a section ``tensorize``), then that of the twin. The
    list is empty if the run was interrupted; the same call resumes it. All ``processes`` that train
    the models together call this, and only the first one writes; None is a single process.

    Raises ``ValueError`` if the folder holds a run with other settings or data or settings
    contradict, ``FolderInUseError`` if another process trains into the folder, and
    ``OtherProcessError`` if one of the processes has failed.
    """
    processes = processes or Processes()
    config = dataclasses.replace(config, out=str(local_folder(config.out)))
    config.check()
    config = run_folder.with_whole_paths(config)
    check_processes(config, processes.count)
    console = console or Console()
    folder = Path(config.out)
    found = processes.from_first(lambda: run_folder.begun_run(config))
    outcomes = processes.from_first(lambda: _finished(config, found, console))
    if outcomes is not None:
        return outcomes
    device = find_device(config.device, processes)
    processes.from_first(lambda: _check_settings(config, found))
    together = f", {processes.count} processes" if processes.count > 1 else ""
    print_text(console, f"run folder {folder}, device {device}{together}: preparing data")
    digests = processes.in_turn(config.data.digests)
    # Before anything is made of the data, and before anything is written.
    processes.from_first(lambda: _check_content(config, run_folder.DataRecord(digests)))
    with contextlib.ExitStack() as held:
        processes.from_first(lambda: held.enter_context(run_folder.lock(folder)))
        task = processes.in_turn(lambda: prepare_task(config, device, digests, processes))
        if config.ranks is not None:
            config.ranks.check_shares(task.steps)
        _check_same_data(task.record, processes)
        processes.from_first(lambda: _begin(config, task.record, console))
        trained: list[run_folder.Outcome] = []
        for place, (name, settings) in _jobs(config).items():
            outcome = _train_one(
                name, folder / place, settings, task, console, quiet, trained, processes
            )
            if outcome is None:
                print_text(console, f"interrupted; the same command resumes the run in {folder}")
                return []
            trained.append(outcome)
        processes.from_first(lambda: run_folder.write_settings(config))
        print_text(console, run_folder.outcome_text(trained))
        return trained


def _finished(
    config: RunConfig, found: run_folder.Begun | None, console: Console
) -> list[run_folder.Outcome] | None:
    folder = Path(config.out)
    if config.overwrite or found is None or not found.is_finished(folder):
        return None
    names = [each.name for each in dataclasses.fields(run_folder.Outcome)]
    places = [folder / place for place in _jobs(config)]
    try:
        results = map(run_folder.read_result, places)
        kept = ({k: facts[k] for k in names if k in facts} for facts in results)
        outcomes = [run_folder.Outcome(**facts) for facts in kept]
        for place in places:
            task_of(config).load_vocabulary(place)
            read_folder(place)
    except (OSError, ValueError, TypeError) as problem:
        print_text(console, f"{problem}\nthe last step writes it again")
        return None
    with run_folder.lock(folder):  # no other process replaces it meanwhile
        print_text(console, f"the run in {folder} is finished")
        print_text(console, run_folder.outcome_text(outcomes))
        return outcomes


def _check_settings(config: RunConfig, found: run_folder.Begun | None) -> None:
    if not config.is_told_by_data:
        _planned(config)
    try:
        config.data.find()
    except FileNotFoundError as problem:
        if found is None:
            raise
        raise run_folder.place_of_moved(problem, config, "--{}=...") from None
    run_folder.check_folder(config, found)


def _check_content(config: RunConfig, record: run_folder.DataRecord) -> None:
    run_folder.check_data(config, record)
    if config.is_told_by_data:
        _planned(config)


def _check_same_data(record: run_folder.DataRecord, processes: Processes) -> None:
    first = processes.from_first(lambda: record)

    def check() -> None:
        difference = run_folder.changed_data(first, record)
        if difference is not None:
            raise ValueError(
                f"it has read other data than process 0 ({difference}): give every machine the same"
            )

    processes.together(check)


def _begin(config: RunConfig, record: run_folder.DataRecord, console: Console) -> None:
    """Check the folder again now that it is locked, and write this run's settings into it."""
    found = run_folder.begun_run(config)
    run_folder.check_folder(config, found)
    run_folder.check_data(config, record)
    if found is not None and not config.overwrite:
        if found.longer:
            print_text(
                console,
                f"the run in {config.out} is trained for longer than it was to be: its learning "
                "rate goes on where the schedule of a run of that length is by then, not where "
                "its own was",
            )
        if found.rhythm:
            print_text(console, f"the run in {config.out} goes on with {', '.join(found.rhythm)}")
    run_folder.claim(config, record, found)


def _jobs(config: RunConfig) -> dict[str, tuple[str, RunConfig]]:
    """Return the models of a run by folder inside its own: its own, then the twin if requested."""
    jobs = {"": ("compressed" if config.tensorize else "dense", config)}
    if config.twin and config.tensorize:
        optimizer = config.optimizer and config.optimizer.of_twin()
        twin = dataclasses.replace(
            config, tensorize=None, two_stage=None, importance_pruning=None, optimizer=optimizer
        )
        jobs["dense"] = "dense", twin
    return jobs


def plan(config: RunConfig) -> tuple[CompressionReport, model_plan.ModelPlan | None, int | None]:
    """Return a run's report, plan and target size of the cores; allocate and read nothing."""
    config.check()
    model = planned_model(config)
    report = compression_report(model, config.tokens)
    if config.tensorize is None:
        return report, None, None
    layers = model_plan.plan(model, tokens=config.tokens)
    assert isinstance(layers, model_plan.ModelPlan), "the model is not one layer"
    if config.ranks is None:
        return report, layers, None
    return report, layers, math.floor(config.ranks.target * report.live_params)


def print_plan(config: RunConfig, console: Console) -> None:
    report, layers, target = plan(config)
    for table in (report, layers, *planned_memory(config)):
        if table is not None:
            print_text(console, str(table))
    if target is not None:
        cores = report.live_params
        rest = report.params - cores
        console.print(
            f"rank learning from {cores:,} to at most {target:,} entries in the cores: "
            f"the whole model then has at most {rest + target:,} parameters, "
            f"{report.dense_params / (rest + target):.1f}x fewer than dense"
        )


def planned_memory(config: RunConfig) -> list[MemoryReport]:
    """Count the memory of a run's model and then of its twin; nothing is allocated.

    Raises ``ValueError`` if settings contradict each other, or the optimizer or the target of rank
    learning does not suit the models.
    """
    config.check()
    return [
        memory_report(model, optimizer, f"memory of the {name} model at the start")
        for name, model, optimizer in _planned(config)
    ]


def _planned(config: RunConfig) -> list[tuple[str, nn.Module, Optimizer]]:
    """Return names, models on ``meta`` and optimizers; raises errors of :func:`planned_memory`."""
    name, other = ("dlrm", config.dlrm) if config.clicks is None else ("model", config.model)
    default = type(other)()
    unused = [f"{name}.{key}={v}" for key, v in vars(other).items() if v != getattr(default, key)]
    if unused:
        _log.warning(
            "%s has no effect: the model of %s is described by the section %s",
            ", ".join(unused), config.task, "model" if config.clicks is None else "dlrm",
        )  # fmt: skip
    found = []
    for name, settings in _jobs(config).values():
        with without_remarks():
            model = planned_model(settings)
        if (ranks := settings.ranks) is not None:
            section, layers = settings.rank_section, tensor_trains(model).values()
            if not layers:
                raise ValueError(
                    f"the section {section} needs tensor trains, but tensorize made none"
                )
            size = sum(layer.shape.size_at(layer.ranks) for layer in layers)
            with error_prefix(f"{section}."):
                target_entries(layers, ranks.target, size, ranks.min_rank)
        found.append((name, model, settings.optimizer_for(settings.train.steps).build(model)))
    return found


def planned_model(config: RunConfig) -> nn.Module:
    """Return the model that a run starts with, on the ``meta`` device."""
    task = task_of(config)
    with torch.device("meta"):
        model = task.dense_model(task.planned_sizes())
    return model if config.tt_config is None else tensorize_(model, config.tt_config)


def _train_one(
    name: str,
    folder: Path,
    config: RunConfig,
    task: Task,
    console: Console,
    quiet: bool,
    before: list[run_folder.Outcome],
    processes: Processes,
) -> run_folder.Outcome | None:
    """Train one model of a run and save it with its figures; None if it was interrupted."""
    ran, watch = where_and_when(task.device), None
    with contextlib.suppress(OSError):  # this system does not tell
        watch = MemoryWatch(task.device)
    torch.manual_seed(config.seed)
    model = make_model(config, task, task.device)
    step = build_step(model, config, task, processes)
    memory = memory_report(model, step.optimizer, f"memory of the {name} model at the start")
    print_text(console, str(memory))
    if step.ranks is not None:
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
        by_processor=config.train.clock == "processor",
        folder=folder,
        evaluate=task.evaluate,
        spread=task.spread,
        eval_every=config.train.eval_every,
        save_every=config.train.save_every,
        log_every=config.train.log_every,
        resume=True,
        chain=config.checkpoints.chain(folder / "checkpoints"),
        restart=config.checkpoints.restart,
        title=name,
        per_step=task.per_step,
        quiet=quiet or not processes.is_first,
        processes=processes,
        watch=watch,
    )
    if result.interrupted:
        return None
    test = evaluated(step, task.test) if task.test else {}
    forward = forward_seconds(step, task.loss, task.get_batch(0))
    with torch.no_grad():
        completion = task.completion(model.eval())
    state = whole_state(model.state_dict())  # of all processes, which may hold parts of it

    def saved() -> run_folder.Outcome:
        save_state(model, state, folder, config.tt_config)
        report = compression_report(model)
        layer_dense = before[0].layer_dense_params if before else report.tt_dense_params
        checkpoints = Archive(folder / "checkpoints")
        sizes = [checkpoints.size(step) for step in checkpoints.steps()]
        outcome = run_folder.Outcome(
            name=name,
            params=report.params,
            layer_params=report.tt_params if report.layers else layer_dense,
            layer_dense_params=layer_dense,
            bytes=(folder / "model.safetensors").stat().st_size,
            test=test,
            checkpoint_bytes=sum(sizes) / len(sizes) if sizes else None,
            state_bytes=memory.total.state,
            forward_seconds=forward,
            ran=ran,
            **{key: value for key, value in vars(result).items() if key != "interrupted"},
        )
        task.save_vocabulary(folder)
        facts = {**dataclasses.asdict(outcome), "sizes": dict(task.sizes), "completion": completion}
        facts["layers"] = [vars(layer) for layer in report.layers]
        write_text(folder / "result.json", to_json(facts, indent=2))
        return outcome

    return processes.from_first(saved)


def where_and_when(device: torch.device) -> dict[str, Any]:
    """Return date, machine, threads and versions of a session that begins to train."""
    gpu, root, at = device.type == "cuda", Path(__file__).parents[2], ""
    if (root / ".git").exists():  # a checkout
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
        with contextlib.suppress(OSError):
            at = " at " + subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(device) if gpu else processor_name(),
        "threads": torch.get_num_threads(),
        "comera": __version__ + at,
        "torch": torch.__version__,
    }


def find_device(name: str, processes: Processes | None = None) -> torch.device:
    """Return the device that a run's settings name; ``auto`` is a GPU if there is one.

    Each process takes its own GPU. Raises ``ValueError`` if the device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "meta":
        raise ValueError(f"device={name!r} holds no numbers: nothing can be trained there")
    if processes is not None and processes.count > 1 and device.type == "cuda":
        device = torch.device("cuda", processes.local_rank)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:  # the latter where torch has no CUDA at all
        why = str(problem).splitlines()[0].partition(". ")[0]  # of a list of all devices
        raise ValueError(f"device={name!r} cannot be used here: {why}") from None
    return device


def make_model(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    """Return the initial model of a run; it is drawn on the CPU, so all devices get the same."""
    settings = config.tt_config
    if settings is not None and settings.init is None:
        # Named, so that nothing warns of lost weights: those of a fresh model are none.
        settings = dataclasses.replace(settings, init="orthogonal")
    lean = settings is not None and task.lean and settings.init != "svd"
    with torch.device("meta" if lean else "cpu"):
        model = task.dense_model(task.sizes)
    if settings is not None:
        if settings.init == "svd":  # draws nothing, and is the device's work
            model = model.to(device)
        model = tensorize_(model, settings)
        if lean:
            model.to_empty(device="cpu")
            model.reset_parameters(settings.init)  # type: ignore[operator]
    model = model.to(device)
    # Here, since fresh cores are drawn one layer after the other.
    return init_keys_as_queries_(model) if config.model.qk_init == "same" else model


def build_step(
    model: nn.Module, config: RunConfig, task: Task, processes: Processes | None = None
) -> TrainStep:
    """Return the training step of a run; every process calls this, with equal weights."""
    group = None if processes is None else processes.group
    is_sharded = group is not None and config.parallel == "fsdp"
    if is_sharded:
        # Torch warns that what a model returns must not be written to, which no loss here does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        shard_dense_(model)  # makes other parameters, which the optimizer has to hold
    settings = config.optimizer_for(task.steps)
    optimizer = settings.build(model)
    ranks = None if config.ranks is None else config.ranks.build(model, task.steps)

    def rate(group: str, step: float) -> float:
        falling = 1.0 if group == "gates" else _rate(settings, task.steps, step)
        if ranks is None or ranks.pace == 1:
            return falling
        # By the clock it shows only now how many steps there are for gates to close in.
        now = config.optimizer_for(max(1, round(task.steps / ranks.pace)))
        key = {"gates": "gate_lr", "cores": "core_lr", "matrices": "core_lr"}.get(group, "lr")
        return falling * (getattr(now, key) or 1.0) / (getattr(settings, key) or 1.0)

    in_backward = settings.in_backward  # averages gradients itself, and frees each
    replicated = group is not None and not is_sharded and not in_backward
    if replicated:  # buffers are those of tables, equal in all processes: no message in each step
        buffers = [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return TrainStep(
        DistributedDataParallel(model) if replicated else model,
        task.loss,
        OptimizerInBackward(optimizer, process_group=group) if in_backward else optimizer,
        ranks,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        precision=config.train.precision,
        scheduler=LambdaLR(optimizer, [partial(rate, g["name"]) for g in optimizer.param_groups]),
        compile=config.train.compile,
        graph=config.train.graph,
    )


def _rate(settings: OptimizerConfig, steps: int, step: float) -> float:
    """Return the learning rate at a step as a share of the peak rate, by the schedule."""
    warmup = max(1, round(settings.warmup_share * steps))
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    left = max(0.0, (steps - step) / max(1, steps - warmup))
    if settings.schedule == "linear":
        return left
    return 0.5 - 0.5 * math.cos(math.pi * left) if settings.schedule == "cosine" else 1.0
