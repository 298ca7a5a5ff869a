"""Train variants of a run for the same seconds: how small can its model be (``comera front``)?"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from comera._command import INTERRUPTED
from comera.extras import error_prefix, without_remarks
from comera.files import write_text
from comera.nn.module import tensor_trains
from comera.params import model_size
from comera.recipes.parse import file_of, merged, parse_settings, read_yaml
from comera.recipes.report import page
from comera.recipes.run import find_device, make_model, planned_memory, planned_model, run
from comera.recipes.run_config import HIGHER_IS_BETTER, TASKS, RunConfig
from comera.recipes.run_folder import differences, lock, read_result, settings_of, with_whole_paths
from comera.recipes.tasks.task import Task, prepare_task
from comera.recipes.trained import load_run
from comera.report.front import (
    BASE_RATE,
    CALIBRATED,
    Width,
    check_front,
    chosen_families,
    described,
    heads_of,
    plan_variants,
)
from comera.report.front_work import (
    Measured,
    Variant,
    Work,
    as_smaller,
    check_given,
    look_at_given,
    train_front,
)
from comera.report.frontier import Front
from comera.saved.model_folder import save_model
from comera.train.log import print_text, to_json

_SHARES = (2, 4, 8)  # times that widths are smaller, or layers fewer


def front(
    config: str,
    /,
    *,
    model: str | None = None,
    variants: list[str] | str | None = None,
    sizes: int = 2,
    seconds: float = 60.0,
    rates: list[float] | None = None,
    seeds: list[int] | None = None,
    out: str | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    console: Console,
) -> int:
    """Find how small a run's model can be: train variants of it, and simple rivals, equally long.

    Args:
        config: YAML file of a run, or a configuration's name; its model is the given one.
        model: Another model, of one's own, as the setting model.make of a run.
        variants: Families to train beside the model as given, by default all: narrower, shallower,
            low-rank, blocks, trains, table, fewer-words, compressed-after, 8-bits, configured.
        sizes: Number of variants of each family, up to three.
        seconds: Length of each training, in processor seconds of its steps.
        rates: Multiples of a family's own learning rate, each to be tried (default: 0.7 and 1.4).
        seeds: Seeds; the first is trained at each rate, others at the best (default: 0).
        out: Folder of the front, instead of the run's.
        jobs: Trainings at a time, by default one a processor; on a GPU one.
        overwrite: Begin again if the folder holds a front with other settings.
    """
    rates = [0.7, 1.4] if rates is None else rates
    seeds = [0] if seeds is None else seeds
    check_front(seconds, rates, seeds, sizes, jobs)
    path = file_of(config)
    settings = read_yaml(path)
    own = {} if model is None else {"model": {"make": model}}
    with error_prefix(f"{path}: "):
        base = parse_settings(RunConfig, merged(settings, own) if own else settings)
    families = chosen_families(variants)
    base = dataclasses.replace(
        with_whole_paths(base), out=out or base.out, twin=False, overwrite=False,
        train=dataclasses.replace(
            base.train, steps=None, epochs=None, seconds=seconds, clock="processor", eval_every=0,
            save_every=0,
        ),
        checkpoints=dataclasses.replace(base.checkpoints, keep_last=1),
    )  # fmt: skip
    dense = dataclasses.replace(base, tensorize=None, two_stage=None, importance_pruning=None)
    dense.check()
    dense.data.find()
    with without_remarks():
        planned_model(dense)  # before anything is written
    work = RunWork(Path(base.out).expanduser(), dense, base if base.tensorize else None)
    with lock(work.folder, "front"):
        work.claim(seconds, overwrite)
        planned, left_out = work.plan(families, sizes)
        for variant in planned:
            if not variant.is_of_given:
                with error_prefix(f"{variant.name}: "), without_remarks():
                    planned_memory(work.config_of(variant, BASE_RATE, seeds[0]))
        metric = next(iter(TASKS[base.task].better))
        metric = "perplexity" if base.task == "causal_text" else metric
        work.metric = metric
        # Here once, for all that begin at the same time.
        work.look_at(prepare_task(dense, torch.device("cpu")))
        found = train_front(
            work, planned, left_out, work.base_rate, rates, seeds, metric,
            metric in HIGHER_IS_BETTER, jobs, find_device(base.device),
            described(seconds, rates, seeds, metric, work.is_tested),
        )  # fmt: skip
        print_text(console, str(found))
        if found.points:
            write_front(found, work.folder)
            names = "front.html, front.json and front.png"
            print_text(console, f"wrote {names} to {work.folder}")
    if found.interrupted:
        return INTERRUPTED
    return 0 if found.points else 1


@dataclass
class RunWork(Work):
    """Trainings that are runs, of the dense form of one configuration."""

    config: RunConfig
    configured: RunConfig | None  # the configuration itself, if it makes layers tensor trains
    metric: str = "loss"

    @property
    def base_rate(self) -> float:
        """The rate of the model as given: the configuration's for dense models, if it has one."""
        given = self.config.optimizer
        own = None if given is None else given.dense_lr or given.lr
        return own or BASE_RATE / math.sqrt(self.config.width)

    @property
    def is_tested(self) -> bool:
        data = self.config.data
        return bool(getattr(data, "test", None))

    def claim(self, seconds: float, overwrite: bool) -> None:
        """Write what the folder is for; raise ``ValueError`` if it is for something else."""
        about = json.loads(json.dumps({"seconds": seconds, "run": settings_of(self.config)}))
        file = self.folder / "settings.json"
        there = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else about
        for key, (before, now) in () if overwrite else differences(there, about):
            raise ValueError(
                f"{self.folder} holds a front with other settings ({key}: {before} -> {now}): "
                "choose another --out, or begin it again with --overwrite=true"
            )
        if there != about or overwrite:
            for result in self.folder.glob("*/*/*/trained.json"):
                result.unlink()
            self.config.overwrite = True
        write_text(file, json.dumps(about, indent=1))

    def look_at(self, task: Task) -> None:
        """Run the model as given once; raise ``ValueError`` if that is another than before."""
        make, file = self.config.model.make, self.folder / "given.json"
        try:
            seen = look_at_given(
                lambda: make_model(self.config, task, torch.device("cpu")),
                task.loss, lambda: task.get_batch(0),
                lambda model: task.evaluate(model)[self.metric],
            )  # fmt: skip
        except Exception as problem:
            if make is None:
                raise
            raise ValueError(
                f"model.make={make} was called with tokens (B, T), int64, and must return logits "
                f"(B, T, V): {type(problem).__name__}: {problem}"
            ) from None
        if file.is_file() and not self.config.overwrite:
            check_given(json.loads(file.read_text(encoding="utf-8")), seen, f"{self.folder} holds")
        write_text(file, json.dumps(seen))

    def plan(self, families: list[str], sizes: int) -> tuple[list[Variant], dict[str, str]]:
        """Return the variants to train, and why families have none."""

        def made(own: dict[str, Any]) -> nn.Module:
            with without_remarks():
                return planned_model(self.config_of(Variant("", "given", own), 1.0, 0))

        widths = [Width(str(self.config.width), {}), *self._narrower(sizes)]
        planned, left_out = plan_variants(families, sizes, widths, made, self._fewer)
        layers = self.config.model.num_layers if self.config.clicks is None else 0
        if "shallower" in families:
            depths = {max(1, layers // share) for share in _SHARES[: max(1, sizes - 1)]}
            planned[1:1] = [
                Variant(f"shallower-{depth}", "shallower", {"model": {"num_layers": depth}})
                for depth in sorted(depths)
                if depth < layers
            ]
        if "configured" in families and self.configured is not None:
            planned.append(Variant("configured", "configured"))
        return planned, left_out

    def _narrower(self, sizes: int) -> Iterator[Width]:
        """Yield narrower widths, each with the settings that make it."""
        model, width = self.config.model, self.config.width
        for share in _SHARES[:sizes]:
            narrow = width // share
            if narrow < 8:
                break
            if self.config.clicks is not None:
                yield Width(str(narrow), {"dlrm": {"embedding_dim": narrow}})
                continue
            heads = max(1, model.num_heads // share)
            own = {"d_model": narrow // heads * heads, "num_heads": heads}
            own["ffn_dim"] = max(1, model.ffn_dim // share)
            yield Width(str(narrow), {"model": own}, math.sqrt(width / narrow))

    def _fewer(self, own: dict[str, Any], rows: int) -> dict[str, Any] | str:
        """Return the settings of a width with tables of fewer rows, or why there are none."""
        if self.config.nli is not None:
            return {**own, "nli": {"vocab": None, "vocab_size": rows}}
        if self.config.clicks is not None:
            width = own.get("dlrm", {}).get("embedding_dim", self.config.width)
            small = {"kind": "hashed", "params": rows * width, "own": 0.5}
            return {"dlrm": {"embedding_dim": width, "small_tables": small}}
        return "perplexity counts tokens, and other words are other tokens"

    def config_of(self, variant: Variant, rate: float, seed: int) -> RunConfig:
        """Return the run of a variant at a rate."""
        out = str(self.place(variant.name, rate, seed))
        if variant.family == "configured":
            assert self.configured is not None, "it is planned only where there is one"
            optimizer = {**dataclasses.asdict(self.configured.optimizer_for(None)), "lr": rate}
            changes: dict[str, Any] = {"optimizer": {"lr": rate, "name": optimizer["name"]}}
            base = self.configured
        else:
            base, changes = self.config, dict(variant.width)
        facts = merged(settings_of(base), changes)
        if variant.settings is not None:
            facts["tensorize"] = variant.settings.to_dict()
        if variant.target is not None:
            facts["two_stage"] = {"target": variant.target}
        given = self.config.optimizer
        if variant.family != "configured":
            name = "muon" if given is None or given.name is None else given.name
            kept = {} if given is None else {"warmup_share": given.warmup_share}
            if betas := getattr(given, "betas", None):
                kept["betas"] = betas
            facts["optimizer"] = {**kept, "name": name, "lr": rate}
            config = parse_settings(RunConfig, facts)
            if name == "muon" and (matrices := _matrices(config)):
                facts["optimizer"]["target_modules"] = matrices
        facts |= {"out": out, "seed": seed}
        config = parse_settings(RunConfig, facts)
        config.overwrite = self.config.overwrite
        return config

    def train(self, variant: Variant, rate: float, seed: int, place: Path) -> Measured:
        config = self.config_of(variant, rate, seed)
        if not run(config, Console(), quiet=True):
            raise KeyboardInterrupt
        found = read_result(place)
        costs = {
            "params": found["params"], "bytes": found["bytes"], "memory": found["peak_memory"],
            "step_seconds": found["seconds"] / found["steps"], "steps": found["steps"],
            "forward_seconds": found["forward_seconds"],
        }  # fmt: skip
        layers = f"{len(found['layers'])} compressed layers" if found["layers"] else "dense"
        command = f"comera train {place} --train.seconds={4 * (config.train.seconds or 0):g}"
        return (*self._qualities(found), costs, layers, command)

    def make_smaller(self, variant: Variant, given: Path, place: Path) -> Measured:
        trained = load_run(given)
        task = prepare_task(trained.config, torch.device("cpu"))
        batches = [task.get_batch(step) for step in range(CALIBRATED)]
        size, done = as_smaller(variant, trained.model, batches, task.loss)
        save_model(trained.model, place)
        model: nn.Module = trained.model.eval()
        with torch.no_grad():
            found = {"metrics": task.evaluate(model), "test": task.test(model) if task.test else {}}
        costs = {"params": model_size(model).params, "bytes": size}
        layers = f"{len(tensor_trains(model))} compressed layers; {done}"
        return (*self._qualities(found), costs, layers, f"made of {given}")

    def _qualities(self, found: dict[str, Any]) -> tuple[float, float | None]:
        return found["metrics"][self.metric], found["test"].get(self.metric)


def _matrices(config: RunConfig) -> str | list[str] | None:
    """Return the dense layers that Muon steps, all but output layers; None if there are none."""
    with without_remarks():
        model = planned_model(config)
    heads = heads_of(model)
    linear = [k for k, m in model.named_modules() if type(m) is nn.Linear and k not in heads]
    names = [k for k in linear if min(model.get_submodule(k).weight.shape) > 16]  # type: ignore[arg-type,operator,union-attr]
    parents = [name.rpartition(".")[0].replace(".", "/") for name in names]
    shared = os.path.commonpath(parents).replace("/", ".") if parents else ""
    if shared and not any(head.startswith(f"{shared}.") for head in heads):
        return rf"{re.escape(shared)}\..*"
    return names or None


def write_front(found: Front, folder: Path) -> None:
    """Write the points, the picture and the page of a front into its folder."""
    facts = {**vars(found), "points": [vars(point) for point in found.points]}
    del facts["loader"]
    write_text(folder / "front.json", to_json(facts, indent=1))
    found.plot().savefig(folder / "front.png", dpi=110)
    content = page.gather_front(f"How small can it be: {folder.resolve().name}", found) | {
        "table": found.tables()[0],
        "note": found.summary().splitlines(),
        "commands": [(point.name, point.trains_on) for point in found.points],
    }
    page.write_page(folder / "front.html", "front.html", content)
