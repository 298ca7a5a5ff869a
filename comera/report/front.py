"""Train variants of one model for the same seconds: how small can it be, and by what?"""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from comera.extras import check_known, listed, without_remarks
from comera.files import write_text
from comera.nn.convert import tensorize_
from comera.nn.forms import form_of
from comera.nn.module import tensor_trains
from comera.nn.targets import TTConfig
from comera.optim.groups import param_groups
from comera.optim.muon import MuonAdamW
from comera.params import model_size
from comera.rank.two_stage import TwoStage, advised_gate_lr
from comera.report.front_work import (
    FAMILIES,
    Measured,
    Variant,
    Work,
    as_smaller,
    check_given,
    look_at_given,
    train_front,
)
from comera.report.frontier import Front, is_higher_better
from comera.saved.model_folder import load_model, save_model
from comera.shapes import check_whole_numbers, is_number
from comera.train.log import MemoryWatch, from_json
from comera.train.loop import forward_seconds, train
from comera.train.step import TrainStep

# What of each family is tried, the most telling first.
_RATIOS = {"low-rank": (4, 16, 8), "blocks": (2, 1, 4), "trains": (4, 12, 2)}
_BUDGETS = (0.5, 0.25, 0.1)

_CUT = 0.5  # share of the cores that is left once ranks are cut
_LARGE_TABLE = 0.1  # share of all parameters from which a table is worth a variant
_OTHER_LAYERS = 0.2  # share of all parameters in other layers from which it is said
_SMALL_LAYER = 1 << 12  # entries of a weight up to which a layer stays dense
BASE_RATE = 0.032
"""Rate of a dense model under Muon, over the root of its width: of the rates 1, 2 and 4 times
0.256 over the width, 4e-3 was best at widths 64, 128 and 256 (text, 30 seconds, one seed)."""

_FASTER = 1.5  # times the dense rate that cores learn best at, there
CALIBRATED = 16
"""Batches that a trained model is compressed by."""

_STEPS = 1000  # what a run by the clock counts as to its schedule
_EARLY = _LATE = 0.4  # shares of the run, of learning ranks
_WARM_UP = 0.05  # share of the run


def front(
    make_model: Callable[..., nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any] | Callable[[int], Any],
    evaluate: Callable[[nn.Module], float],
    *,
    widths: Sequence[Any] = (),
    seconds: float = 20.0,
    test: Callable[[nn.Module], float] | None = None,
    variants: Sequence[str] | None = None,
    sizes: int = 2,
    lr: float | None = None,
    rates: Sequence[float] = (0.7, 1.4),
    seeds: Sequence[int] = (0,),
    metric: str = "loss",
    higher: bool | None = None,
    folder: str | Path = "runs/front",
    jobs: int | None = None,
    progress: bool = True,
) -> Front:
    """Train variants of a model for the same seconds, and return how small the model can be.

    Beside compressed variants stand the simple rivals: narrower dense models, tables of fewer rows
    and, after training, eight bits. All are trained by :class:`~comera.MuonAdamW` at the same
    number of rates, of which ``evaluate`` chooses. Each training has a folder: the same call goes
    on where the last one was broken off, and trains what was added. A variant that cannot be
    trained is left out with its reason, and the others go on.

    Args:
        make_model: Function that returns a fresh model; called with one of ``widths``, if given.
        loss_fn: Function ``loss_fn(model, batch)`` that returns the mean loss of a batch.
        batches: Batches to train on, read again and again, or a function that returns the batch of
            a step, counted from 0. Models and batches are on one device.
        evaluate: Function that returns the quality of a model in evaluation mode, on data that it
            is not trained on. The best rate is chosen by it.
        widths: Arguments of ``make_model``, of any kind (a tuple is one argument): first that of
            the model as given, then those of narrower or shallower dense models.
        seconds: Length of each training, in processor seconds of its steps on one thread; on a GPU
            in seconds. The learning rate rises for a twentieth of them, then falls to zero.
        test: Like ``evaluate``, on data that nothing is chosen by; it is what the front reports.
        variants: Families to train beside the model as given, by default all: ``narrower``,
            ``low-rank``, ``blocks``, ``trains``, ``table``, ``fewer-words`` (the first rows of a
            table, where the most frequent ones have to be), ``compressed-after``, ``8-bits``.
        sizes: Number of variants of each family, up to three.
        lr: Rate of the model as given, by default ``0.032 / sqrt(width)`` if the widths are
            numbers, else 2e-3. Narrower models then have a rate by their own width, models with
            compressed layers 1.5 times the rate.
        rates: Multiples of these rates to train each variant at.
        seeds: Seeds; the first is trained at each rate, others at the best.
        metric: Name of what ``evaluate`` returns.
        higher: True if more of it is better. By default the name decides: accuracy, AUC, F1, R2,
            precision, recall and BLEU are better if higher.
        folder: Folder of all trainings, models included.
        jobs: Trainings at a time, each in a process of its own; by default one a processor. On a
            GPU, and on systems other than Linux, all are trained in this process.
        progress: Whether to show a progress bar.

    Returns:
        The points, which print as an answer and a table; ``plot("plotly")`` draws them, and
        ``load(name)`` returns a trained model. After Ctrl-C those that have ended.

    Raises:
        ValueError: If an argument is out of range, ``variants`` names no family, there is no batch,
            the first width is not that of the largest model, or the folder holds a front of another
            model, with other settings, or by another loss or quality of the model as given.
        TypeError: If an argument is of the wrong kind, or ``make_model`` does not return a module.
        Exception: Any error of the functions on the model as given, before anything is trained.

    Example::

        found = comera.front(make_model, loss_fn, loader, evaluate, widths=[512, 256, 128])
        print(found)
        found.plot("plotly")
    """
    if isinstance(make_model, nn.Module):
        kind = type(make_model).__name__
        raise TypeError(
            f"make_model is a model: give a function that makes one, such as lambda: {kind}(...)"
        )
    for name, value in {"make_model": make_model, "loss_fn": loss_fn, "evaluate": evaluate}.items():
        if not callable(value):
            raise TypeError(f"{name}={value!r} must be a function")
    check_front(seconds, rates, seeds, sizes, jobs)
    families = chosen_families(variants)
    for family in {"shallower", "configured"} & {*families} if variants else ():
        raise ValueError(
            f"variants holds {family!r}, which is for comera front: widths may hold what makes "
            "make_model return a shallower model"
        )
    choices = [*widths] or [None]
    numeric = all(map(is_number, choices))
    dense = lr or (BASE_RATE / math.sqrt(choices[0]) if numeric else 2e-3)
    about = {"seconds": seconds, "lr": dense, "metric": metric, "width": choices[0]}
    work = _Own(Path(folder), make_model, loss_fn, _by_step(batches), evaluate, test, about)
    work.get_batch(0)
    torch.manual_seed(seeds[0])
    plain = {each: work.made(Variant("", "given", each)) for each in dict.fromkeys(choices)}
    numbers = {each: model_size(model).params for each, model in plain.items()}
    if larger := [each for each, number in numbers.items() if number > numbers[choices[0]]]:
        raise ValueError(
            f"widths={list(widths)!r} must begin with that of the model as given, the largest: "
            f"make_model({larger[0]!r}) has {numbers[larger[0]]:,} parameters, "
            f"make_model({choices[0]!r}) {numbers[choices[0]]:,}"
        )
    work.claim(plain[choices[0]])
    planned, left_out = plan_variants(
        families,
        sizes,
        [
            Width(
                "" if each is None else re.sub(r"[^A-Za-z0-9.]+", "-", str(each)).strip("-"),
                each,
                math.sqrt(choices[0] / each) if numeric else 1.0,
            )
            for each in choices
        ],
        plain.__getitem__,
        lambda width, rows: FewerRows(width, rows),
    )
    if "narrower" in families and not choices[1:]:
        left_out["narrower"] = "narrower: widths=[...] names none for make_model"
    device = next(plain[choices[0]].parameters()).device
    del plain
    higher = is_higher_better(metric) if higher is None else higher
    found = train_front(
        work, planned, left_out, dense, rates, seeds, metric, higher, jobs, device,
        described(seconds, rates, seeds, metric, test is not None), progress,
    )  # fmt: skip
    by_name, best = {each.name: each for each in planned}, {p.name: p.rate for p in found.points}

    def loaded(name: str) -> nn.Module:
        return work.load(by_name[name], work.place(name, best[name] or 0.0, seeds[0]))

    return dataclasses.replace(found, loader=loaded)


def check_front(
    seconds: float, rates: Sequence[float], seeds: Sequence[int], sizes: int, jobs: int | None
) -> None:
    """Raise ``ValueError`` for settings of a front that are out of range."""
    check_whole_numbers(1, sizes=sizes, **({} if jobs is None else {"jobs": jobs}))
    check_whole_numbers(0, **{f"seeds[{k}]": seed for k, seed in enumerate(seeds)})
    for name, numbers in {"rates": rates, "seeds": seeds}.items():
        if not numbers:
            raise ValueError(f"{name}={numbers!r} must hold one at least")
    for name, number in [("seconds", seconds), *(("rates", rate) for rate in rates)]:
        if not (is_number(number) and 0 < number < float("inf")):
            raise ValueError(f"{name}={number!r} must be above 0, and finite")


def chosen_families(variants: Sequence[str] | None) -> list[str]:
    """Return the chosen families, the model as given among them; ``ValueError`` for another."""
    if isinstance(variants, str):
        variants = variants.split(",")
    for family in variants or ():
        check_known(family, FAMILIES, f"variants holds {family!r}, which is no family")
    return list(FAMILIES) if variants is None else list(dict.fromkeys(["given", *variants]))


def described(
    seconds: float, rates: Sequence[float], seeds: Sequence[int], metric: str, tested: bool
) -> str:
    """Return how the variants of a front were trained, in words."""
    times = ", ".join(f"{each:g}" for each in rates)
    which = f"; the best of {times} times its rate" if len(rates) > 1 else ""
    where = "test data, rates chosen by others" if tested else "the data that rates are chosen by"
    return (
        f"{seconds:g} processor seconds of training each{which}; {metric} on {where}; "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    )


class Width(NamedTuple):
    """A width to plan variants of: its label in names, and what makes its model."""

    label: str
    key: Any
    scale: float = 1.0  # of the rate, in units of the given model's


def plan_variants(
    families: Sequence[str],
    sizes: int,
    widths: Sequence[Width],
    made: Callable[[Any], nn.Module],
    fewer: Callable[[Any, int], Any],
) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants to train, and why families have none.

    The first width is that of the model as given. ``made`` returns a model by its key, ``fewer``
    the key of that model with tables of so many rows, or a reason against it.
    """
    given, left_out = made(widths[0].key), dict[str, str]()
    kinds: dict[str, int] = {}
    for module in given.modules():
        known = isinstance(module, nn.Linear | nn.Embedding | nn.EmbeddingBag)
        if not known and form_of(module) is None:
            own = sum(param.numel() for param in module.parameters(recurse=False))
            kinds[type(module).__name__] = kinds.get(type(module).__name__, 0) + own
    if (other := sum(kinds.values())) > _OTHER_LAYERS * (whole := model_size(given).params):
        large = [kind for kind, own in kinds.items() if 10 * own > other]
        left_out["layers"] = (
            f"{other:,} of {whole:,} parameters, of {listed(large)}: variants change linear layers "
            "and tables"
        )
    planned = [Variant("given", "given", widths[0].key)]
    if "narrower" in families:
        planned += [
            Variant(f"narrower-{each.label}", "narrower", each.key, scale=each.scale)
            for each in widths[1:]
        ]
    targets: dict[str, Any] = {"target_modules": "all-linear", "init": "orthogonal"}
    targets |= {"exclude_modules": heads_of(given) or None, "min_size": _SMALL_LAYER}
    for family in [each for each in _RATIOS if each in families]:
        for ratio in _RATIOS[family][:sizes]:
            how: dict[str, Any] = {"compression": ratio}
            name, target = f"{family}-{ratio}x", None
            if family == "blocks":
                how, name = {"linear_format": "btt", "rank": ratio}, f"blocks-rank-{ratio}"
            elif family == "low-rank":
                how["order"] = 1
            else:
                name, target = f"trains-{round(ratio / _CUT)}x", _CUT
            settings = TTConfig(**how, **targets)
            planned.append(Variant(name, family, widths[0].key, settings, target, scale=_FASTER))
    for label, key, scale in widths[-sizes:] if {"table", "fewer-words"} & {*families} else ():
        model, end = made(key), f"-{label}" * bool(label)
        if (of_tables := table_settings(model)) is None:
            left_out["table"] = "table, fewer-words: no table has a tenth of the parameters"
            continue
        tables = targets_of(of_tables, model).values()
        heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
        if any(id(table.weight) in heads for table in tables):
            left_out["table"] = "table, fewer-words: a table is the weight of an output layer too"
            continue
        if "table" in families:
            planned.append(Variant(f"table{end}", "table", key, of_tables, scale=scale))
        if "fewer-words" in families:
            small = fewer(key, rows_for(of_tables, model))
            if isinstance(small, str):
                left_out["fewer-words"] = f"fewer-words: {small}"
            else:
                name = f"fewer-words{end}"
                planned.append(Variant(name, "fewer-words", small, scale=scale))
    budgets = _BUDGETS[:sizes] if "compressed-after" in families else ()
    planned += [Variant(f"given-to-{b:.0%}", "compressed-after", budget=b) for b in budgets]
    return planned + [Variant("given-8-bits", "8-bits")] * ("8-bits" in families), left_out


def table_settings(model: nn.Module) -> TTConfig | None:
    """Return the conversion of a model's large tables; None if it has none.

    A twentieth of the rows, the first ones, have coordinates of half the width in a basis of their
    own; the rest has rank 16, as the tables that did best on sentence pairs (docs/experiments.md).
    """
    whole = model_size(model).params
    hot: dict[str, list[int | None]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        rows, width = module.weight.shape
        if rows * width > _LARGE_TABLE * whole:
            frequent = rows // 20
            most = (frequent * width - 1) // (frequent + width)  # above it nothing is saved
            rank = min(width // 2, most)
            hot[re.escape(name)] = [frequent, rank] if rank > 0 else [0, None]
    if not hot:
        return None
    names = "|".join(hot)
    return TTConfig(embedding_rank=16, target_modules=names, hot_pattern=hot, init="orthogonal")


def rows_for(settings: TTConfig, model: nn.Module) -> int:
    """Return how many rows of the tables take as many numbers as their conversion has."""
    width = sum(table.weight.shape[1] for table in targets_of(settings, model).values())
    with without_remarks():
        small = tensorize_(copy.deepcopy(model), settings)
    cores = sum(p.numel() for m in targets_of(settings, small).values() for p in m.parameters())
    return max(2, cores // width)


def targets_of(settings: TTConfig, model: nn.Module) -> dict[str, Any]:
    """Return the modules that a conversion of tables is for, by name."""
    names = str(settings.target_modules)
    return {name: m for name, m in model.named_modules() if re.fullmatch(names, name)}


def heads_of(model: nn.Module) -> list[str]:
    """Return the linear layers with as many outputs as a table has rows."""
    modules = dict(model.named_modules())
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    rows = {len(table.weight) for table in tables}
    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    return [name for name, layer in linear.items() if layer.out_features in rows]


def _by_step(batches: Iterable[Any] | Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function that returns the batch of a step; ``ValueError`` if there is none."""
    if callable(batches):
        return batches
    if isinstance(batches, Sequence) and batches:
        return lambda step: batches[step % len(batches)]
    if iter(batches) is batches:
        raise TypeError(
            f"batches={batches!r} can be read once, and each variant reads them again: give a "
            "list, a DataLoader or a function of the step"
        )
    left = iter(())

    def batch(step: int) -> Any:
        nonlocal left
        if (found := next(left, left)) is not left:
            return found
        left = iter(batches)
        if (found := next(left, left)) is left:
            raise ValueError("batches is empty: there is nothing to train on")
        return found

    return batch


class FewerRows(NamedTuple):
    """A width whose large tables have so many rows; the last one stands for all others."""

    width: Any
    rows: int


class _FewerRows(nn.Embedding):
    """A table whose last row stands for all indices from it on."""

    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index.clamp(max=self.num_embeddings - 1))


@dataclass
class _Own(Work):
    """Trainings of models that a function makes."""

    make_model: Callable[..., nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    get_batch: Callable[[int], Any]
    evaluate: Callable[[nn.Module], float]
    test: Callable[[nn.Module], float] | None
    about: dict[str, Any]  # settings that all trainings share

    def made(self, variant: Variant) -> nn.Module:
        """Return a fresh model of a variant."""
        width, rows = variant.width, None
        if isinstance(width, FewerRows):
            width, rows = width
        model = self.make_model() if width is None else self.make_model(width)
        if not isinstance(model, nn.Module):
            raise TypeError(f"make_model returned {model!r}, which is no module")
        if variant.settings is not None:
            model = tensorize_(model, variant.settings)
            if not tensor_trains(model):
                raise ValueError(f"nothing becomes smaller by {FAMILIES[variant.family]}")
        if rows is None or (settings := table_settings(model)) is None:
            return model
        for name, table in targets_of(settings, model).items():
            if type(table) is not nn.Embedding:
                raise ValueError(f"{name} is no nn.Embedding")
            padding = table.padding_idx
            padding = padding if padding is not None and padding < rows else None
            small = _FewerRows(rows, table.embedding_dim, padding).to(table.weight)
            with torch.no_grad():
                small.weight.copy_(table.weight[:rows])
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, small)
        return model

    def claim(self, given: nn.Module) -> None:
        """Write what the folder is for; raise ``ValueError`` if it is for something else."""
        shapes = {name: list(param.shape) for name, param in given.named_parameters()}
        about = json.loads(json.dumps({**self.about, "parameters": shapes}, default=repr))
        file = self.folder / "front.json"
        if file.is_file():
            there = from_json(file.read_text(encoding="utf-8"))
            if wrong := [key for key in about if there.get(key) != about[key]]:
                key = wrong[0]
                what = "another model" if key == "parameters" else f"{key}={there.get(key)!r}"
                raise ValueError(
                    f"folder={str(self.folder)!r} holds a front of {what}: name another folder, or "
                    "remove it"
                )
        plain = Variant("", "given", self.about["width"])
        seen = look_at_given(
            lambda: self.made(plain), self.loss_fn, lambda: self.get_batch(0), self.evaluate
        )
        if file.is_file():
            place = f"folder={str(self.folder)!r} holds"
            check_given(there.get("given", seen), seen, place)
        write_text(file, json.dumps({**about, "given": seen}, indent=1))

    def load(self, variant: Variant, place: Path) -> nn.Module:
        plain = dataclasses.replace(variant, settings=None)
        if variant.is_of_given:
            plain = Variant("", "given", self.about["width"])
        return load_model(place, partial(self.made, plain))

    def train(self, variant: Variant, rate: float, seed: int, place: Path) -> Measured:
        torch.manual_seed(seed)
        plain = self.made(dataclasses.replace(variant, settings=None))
        device, heads, watch = next(plain.parameters()).device, heads_of(plain), None
        del plain
        with suppress(OSError):  # this system does not tell
            watch = MemoryWatch(device)
        torch.manual_seed(seed)
        model = self.made(variant)
        matrices = [
            name
            for name, layer in model.named_modules()
            if type(layer) is nn.Linear and layer.weight.numel() > _SMALL_LAYER
            if name not in heads
        ]
        late, ranks = round(_LATE * _STEPS), None
        if variant.target is not None:
            ranks = TwoStage(model, variant.target, round(_EARLY * _STEPS), late)
        gate_lr = 1e-3 if ranks is None else ranks.gate_lr
        groups = param_groups(model, rate, gate_lr=gate_lr, muon_modules=matrices or None)
        optimizer = MuonAdamW(groups, fused=True)

        def of_gates(step: float) -> float:
            if ranks is None or ranks.pace == 1:
                return 1.0
            # By the clock it shows only now how many steps there are for gates to close in.
            return advised_gate_lr(ranks.target, max(1, round(late / ranks.pace))) / gate_lr

        def of_others(step: float) -> float:
            warm = _WARM_UP * _STEPS
            return min((step + 1) / warm, max(0.0, (_STEPS - step) / (_STEPS - warm)))

        scales = [of_gates if g["name"] == "gates" else of_others for g in optimizer.param_groups]
        step = TrainStep(
            model, self.loss_fn, optimizer, ranks, clip_norm=1.0, graph=False,
            scheduler=LambdaLR(optimizer, scales),  # type: ignore[arg-type]
        )  # fmt: skip
        torch.manual_seed(seed + 1)  # dropout is the same, whatever was drawn before
        result = train(
            step, self.get_batch, steps=_STEPS, seconds=self.about["seconds"], by_processor=True,
            folder=place, evaluate=lambda model: {"quality": self.evaluate(model)}, resume=True,
            quiet=True, tensorboard=False, watch=watch,
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        forward = forward_seconds(step, self.loss_fn, self.get_batch(0))
        save_model(model, place)
        width, rows = variant.width, None
        if isinstance(width, FewerRows):
            width, rows = width
        made = f"make_model({'' if width is None else repr(width)})"
        made += f" with {rows:,} rows a table" if rows else ""
        if variant.settings is not None:
            usual = TTConfig()
            given = {k: v for k, v in vars(variant.settings).items() if v != getattr(usual, k)}
            words = ", ".join(f"{key}={value!r}" for key, value in given.items())
            made = f"comera.tensorize_({made}, comera.TTConfig({words}))"
        costs = {"memory": result.peak_memory, "step_seconds": result.seconds / result.steps}
        costs |= {"forward_seconds": forward, "steps": result.steps, "bytes": None}
        return self._measured(model, costs, f"{made}; trained: {place}")

    def make_smaller(self, variant: Variant, given: Path, place: Path) -> Measured:
        of_given = Variant("given", "given", self.about["width"])
        model = load_model(given, partial(self.made, of_given))
        batches = [self.get_batch(step) for step in range(CALIBRATED)]
        size, done = as_smaller(variant, model, batches, self.loss_fn)
        save_model(model, place)
        return self._measured(model, {"bytes": size}, f"{done}; of {given}")

    def _measured(self, model: nn.Module, costs: dict[str, Any], trains_on: str) -> Measured:
        model.eval()
        with torch.no_grad():
            dev = float(self.evaluate(model))
            test = None if self.test is None else float(self.test(model))
        size, layers = model_size(model), [str(m) for m in tensor_trains(model).values()]
        costs |= {"params": size.params, "bytes": costs["bytes"] or size.bytes}
        return dev, test, costs, listed(list(dict.fromkeys(layers)), 4), trains_on
