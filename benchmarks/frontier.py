"""Measure which causal language model learns most for what it costs: dense or compressed.

First the step of each model is timed: processor time of one thread, on a machine that should have
nothing else to do. A point then trains one model for the steps that fit a budget of such seconds,
on any device, and is a file that is written when it ends: the same command resumes, and several may
share the work. For each model a rate is chosen by validation loss; other seeds are tested at it.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.memory import peak_reader
from benchmarks.session import Session, add_several, add_sizes, count, in_new_process, machine_facts
from benchmarks.timing import watch_neighbours
from comera.data.text import CausalText, TextData, TextStreams
from comera.files import write_text
from comera.models.decoder import CausalLanguageModel, Decoder
from comera.nn.convert import plans_of, tensorize_
from comera.nn.module import tensor_trains
from comera.nn.targets import TTConfig
from comera.optim.groups import param_groups
from comera.optim.muon import MuonAdamW
from comera.planning.printing import empty_figure, show_bytes, show_count
from comera.train.step import NonFiniteLossError, TrainStep

# By family the learning rate at width 128, which falls with the width.
RATES = {"dense": 2.2e-3, "muon": 2e-3, "lowrank": 3e-3, "trains": 3e-3, "blocks": 3e-3}
RATES |= {"ffnblocks": 2.4e-3}  # in the feed-forward parts alone; attention as `muon` has it
POINTS = """dense:64,96,128,192,256x2,4,6 muon:96,128,192x2,4 lowrank24:128,192x2,4
trains32:192,256x2,4 blocks1:96,128,192,256x2,4 blocks2:96,128,192,256x2,4 blocks4:128,192x2,4"""
AXES = {
    "seconds": ("seconds", "{:g}".format), "operations": ("operations", show_count),
    "parameters": ("parameters", show_count), "body": ("without table", show_count),
    "memory": ("memory", show_bytes), "tokens": ("tokens", show_count),
}  # fmt: skip
BATCH, LENGTH = 16, 64  # sequences, and their tokens
_WARM_UP, _CLIP, _EVALUATED = 0.05, 1.0, 64  # share of the steps; norm of gradients; batches
_TIMED, _LEAST = 6, 12  # seconds of a step's timing, and steps
_BODY, _TABLE = r"model\.layers\..*", r"model\.embed_tokens|lm_head"
_SIDES = {False: "dense", True: "compressed"}
_NAME = "{family} {width}x{depth}, {budget}s"
_FILE = "{text}-v{vocab}/{part}-{budget}s-{family}-{width}x{depth}-{rate:g}-{seed}.json"
_STEP = "{text}-v{vocab}/step-{family}-{width}x{depth}.json"
Point = dict[str, Any]  # family, kind, compressed, width, depth; costs of a step; budget, rate, ...


def make_model(setting: Point, vocab: int) -> nn.Module:
    """Return a model, table and head tied; raise ``ValueError`` if a layer would be no smaller."""
    kind, width = setting["kind"], setting["width"]
    ranks = [int(word) for word in re.findall(r"\d+", setting["family"])]
    heads = next((n for n in range(width // 32, 0, -1) if width % (2 * n) == 0), 1)
    decoder = Decoder(vocab, width, setting["depth"], heads, 2 * width)
    model = CausalLanguageModel(decoder, vocab)
    model.lm_head.weight = decoder.embed_tokens.weight
    if ranks:
        how: Any = {"rank": ranks[0], "init": "orthogonal", "tokens": BATCH * LENGTH}
        how |= {"lowrank": {"order": 1}, "trains": {}}.get(kind, {"linear_format": "btt"})
        targets = r"model\.layers\..*\.mlp\..*" if kind == "ffnblocks" else _BODY
        tensorize_(model, TTConfig(target_modules=targets, **how))
        left = (m for name, m in model.named_modules() if re.fullmatch(targets, name))
        if any(type(layer) is nn.Linear for layer in left):
            raise ValueError(f"{setting['family']} of width {width} would be no smaller than dense")
    if ranks[1:]:
        how = {"embedding_rank": ranks[1], "init": "orthogonal", "tied": "share"}
        tensorize_(model, TTConfig(target_modules=_TABLE, **how))
    return model


def operations(setting: Point, model: nn.Module, vocab: int) -> int:
    """Count the operations of a step: two for each multiply-add, and twice as many backward."""
    body = model.get_submodule("model.layers").modules()
    numbers = (vocab + 2 * LENGTH * setting["depth"]) * setting["width"]  # head; attention
    numbers += sum(layer.weight.numel() for layer in body if type(layer) is nn.Linear)
    plans = plans_of(tensor_trains(model), {}, BATCH * LENGTH)
    return 6 * numbers * BATCH * LENGTH + sum(2 * len(n) * p.chosen.operations for n, p in plans)


def settings_of(text: str) -> list[Point]:
    """Read ``FAMILY:WIDTHSxDEPTHS``, such as ``blocks2:96,128x2,4``, or raise ``ValueError``."""
    ranked = r"(?:lowrank|trains|(?:ffn)?blocks)\d+(?:\+\d+)?"
    form = rf"((dense|muon)|{ranked}):(\d+(?:,\d+)*)x(\d+(?:,\d+)*)"
    if (found := re.fullmatch(form, text)) is None:
        raise ValueError(
            f"points={text!r} must be as dense:64,96x2,4 or muon:96x2 or blocks2:128x4; families "
            "with a rank are lowrank, trains, blocks and ffnblocks; +RANK compresses the table too"
        )
    widths, depths = ([int(word) for word in found[k].split(",")] for k in (3, 4))
    own = {"family": found[1], "kind": re.split(r"\d", found[1])[0], "compressed": not found[2]}
    return [own | {"width": width, "depth": depth} for depth in depths for width in widths]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--text", type=Path, help="Folder of Python files, or a file of text.")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="Of the points.")
    add_several(parser, "--vocab", [512, 8192], "Tokens of the byte-pair vocabularies.")
    add_several(parser, "--budgets", [60, 240, 960], "Seconds of steps on a CPU.")
    parser.add_argument("--points", nargs="+", default=POINTS.split(), help="FAMILY:WIDTHSxDEPTHS.")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.7, 1.4], help="Times its own.")
    add_sizes(parser, {"seeds": (3, "Seeds at the best rate."), "megabytes": (12, "Of text.")})
    help = "Run nothing; print and draw the fronts by losses of the test, or of trials."
    parser.add_argument("--show", nargs="?", const="test", choices=["test", "valid"], help=help)


def run(session: Session, options: argparse.Namespace) -> None:
    """Measure the points that are missing, or show those that are there."""
    if options.show:
        return show(session, options.out, options.show)
    if options.text is None or not options.text.exists():
        raise ValueError(f"text={options.text} must be a folder or a file; --show needs none")
    settings = [setting for each in options.points for setting in settings_of(each)]
    with torch.device("meta"):  # refused now instead of after hours
        for setting in settings:
            make_model(setting, min(options.vocab))
    text = options.text.resolve()
    files = {"folder": str(text.parent), "pattern": text.name} if text.is_file() else {}
    files = {"folder": str(text), "max_megabytes": options.megabytes} | files
    steps: list[tuple[Any, list[Point]]] = []
    for vocab in options.vocab:
        data = {**files, "vocab_size": vocab, "length": LENGTH, "heldout": 0.05, "test": 0.05}
        name = f"{text.name}-{TextStreams.prepare(TextData(**data)).prepared[:8]}"
        models = [setting | {"text": name, "vocab": vocab} for setting in settings]
        timed = [_measured(session, options.out, _STEP, data, model, "cpu") for model in models]
        steps.append((data, [step for step in timed if step is not None]))
    parts = ("valid", "test")
    for budget, (data, models), part in product(sorted(options.budgets), steps, parts):
        for model in models:
            for point in _planned(session, options, model, budget, part):
                _measured(session, options.out, _FILE, data, point, str(session.device))


def _planned(session: Session, options: Any, step: Point, budget: int, part: str) -> list[Point]:
    """Return the trials of a model, or its tests at the best rate once all trials have ended."""
    steps = max(1, round(budget / step["seconds"]))
    totals = {"seconds": steps * step["seconds"], "operations": steps * step["operations"]}
    totals |= {"steps": steps, "tokens": steps * BATCH * LENGTH}
    about = {**step, **totals, "budget": budget, "part": "valid", "seed": 0}
    rate = RATES[step["kind"]] * 128 / step["width"]
    trials = [about | {"rate": float(f"{rate * times:.3g}")} for times in options.rates]
    if part == "valid":
        return trials
    files = [options.out / _FILE.format(**point) for point in trials]
    tried = [json.loads(file.read_text()) for file in files if file.exists()]
    known = [(point["loss"], point["rate"]) for point in tried if point["loss"] is not None]
    if not known or len(tried) < len(trials):
        session.note(f"{_NAME.format(**about)}: its trials have not all ended, or all diverged")
        return []
    best = {"rate": min(known)[1], "part": "test"}
    return [about | best | {"seed": seed} for seed in range(1, options.seeds + 1)]


def _measured(
    session: Session, out: Path, name: str, data: Mapping[str, Any], point: Point, device: str
) -> Point | None:
    """Return a point, measured in a new process if it is neither there nor another's work."""
    file, job = out / name.format(**point), {"data": data, "point": point, "device": device}
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file.with_suffix(".lock"), timeout=0):
            if file.exists():
                return json.loads(file.read_text())
            found = point | in_new_process("benchmarks.frontier", job)
            write_text(file, json.dumps(found, indent=1) + "\n")
            session.print(f"{file.stem}: {found.get('loss', found['seconds'])}")
            if "loss" not in found and found["busy"]:
                session.note(f"{file.stem}: {found['busy']}")
            return found
    except Timeout:
        session.print(f"{file.stem} is being measured by another process")
    except RuntimeError as problem:
        session.note(f"{file.stem}: {problem}")
        session.failed = True
    return None


def measure(job: Mapping[str, Any]) -> Point:
    """Time the step of a model, or train it for a point's steps; in one thread on a CPU."""
    torch.set_num_threads(1)
    point, device = job["point"], torch.device(job["device"])
    data = CausalText(TextStreams.prepare(TextData(**job["data"])))
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    facts = machine_facts(device, True)
    facts["commit"] = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    if "steps" in point:
        return {"loss": train(point, data, device), "trained": facts}
    return {**time_step(point, data), "timed": facts}


def time_step(point: Point, data: CausalText) -> Point:
    """Return what a step of a model costs, in seconds of the processor and otherwise."""
    peak_memory, neighbours = peak_reader(torch.device("cpu")), watch_neighbours()
    model = make_model(point, point["vocab"])
    step, times = _stepper(point, model, 1 << 30), list[float]()
    while len(times) < _LEAST or sum(times) < _TIMED:
        batch, start = data.batch(len(times), BATCH, 0), time.process_time()
        step(batch)
        times.append(time.process_time() - start)
    size, table = count(model), count(model.get_submodule("model.embed_tokens"))
    return {
        "seconds": median(times[2:]), "operations": operations(point, model, point["vocab"]),
        "parameters": size, "body": size - table, "memory": peak_memory(), "busy": neighbours(1),
    }  # fmt: skip


def train(point: Point, data: CausalText, device: torch.device) -> float | None:
    """Return the held-out loss of a trained model, None if it diverged."""
    torch.manual_seed(point["seed"])
    model = make_model(point, point["vocab"]).to(device)
    step = _stepper(point, model, point["steps"])
    for number in range(point["steps"]):
        try:
            step(_on(device, data.batch(number, BATCH, point["seed"])))
        except NonFiniteLossError:
            return None
    batches = data.held_out(point["part"], BATCH)
    spread = batches[:: max(1, len(batches) // _EVALUATED)][:_EVALUATED]
    with torch.no_grad():
        losses = [_loss(model.eval(), _on(device, batch)) for batch in spread]
    loss = float(torch.stack(losses).mean())
    return loss if math.isfinite(loss) else None


def _stepper(point: Point, model: nn.Module, steps: int) -> TrainStep:
    groups = param_groups(
        model,
        point.get("rate", RATES[point["kind"]]),
        muon_modules=_BODY if point["kind"] in ("muon", "ffnblocks") else None,
    )
    optimizer = (torch.optim.AdamW if point["kind"] == "dense" else MuonAdamW)(groups, fused=True)
    warm = max(1, round(_WARM_UP * steps))
    schedule = LambdaLR(optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm or 1)))
    return TrainStep(model, _loss, optimizer, clip_norm=_CLIP, scheduler=schedule)


def _on(device: torch.device, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: each.to(device) for key, each in batch.items()}


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def rows_of(folder: Path, part: str) -> list[Point]:
    """Read best trials, or means of tests; errors are by the seeds of all models of a budget."""
    found, rows = defaultdict[Any, list[Point]](list), list[Point]()
    for point in (json.loads(file.read_text()) for file in folder.glob(f"{part}-*.json")):
        if point["loss"] is not None:
            found[_NAME.format(**point), part == "test" and point["rate"]].append(point)
    for (name, _), points in found.items():
        kept = sorted(points, key=lambda p: p["loss"])[: 1 if part == "valid" else None]
        means = {key: fmean(p[key] for p in kept) for key in ("loss", "rate", "steps", *AXES)}
        apart = variance(p["loss"] for p in kept) if len(kept) > 1 else None
        own = {"model": name, "seeds": len(kept), "apart": apart, "seconds": kept[0]["budget"]}
        rows.append(kept[0] | means | own)
    for row in rows:
        alike = [one["apart"] for one in rows if one["budget"] == row["budget"] and one["apart"]]
        row["error"] = math.sqrt(fmean(alike) / row["seeds"]) if alike else None
    return sorted(rows, key=lambda row: (row["budget"], row["loss"]))


def fronts(rows: Sequence[Point], axis: str) -> list[tuple[float, list[Point]]]:
    """Return the best row of each side, better first, among those up to each cost on an axis."""
    found = []
    for most in sorted({row[axis] for row in rows}):
        fits = [[r for r in rows if r["compressed"] == k and r[axis] <= most] for k in _SIDES]
        best = [min(side, key=lambda row: row["loss"]) for side in fits if side]
        found.append((most, sorted(best, key=lambda row: row["loss"])))
    return found


def _leads(rows: Sequence[Point]) -> Iterator[tuple[Any, ...]]:
    """Yield by budget and axis the stretches between points where the best of a side changes."""
    for budget, axis in product(sorted({row["budget"] for row in rows}), AXES):
        (title, form), least = AXES[axis], budget if axis == "seconds" else 0
        best = fronts([row for row in rows if least <= row["budget"] <= budget], axis)
        for _, [*levels] in groupby(best, lambda each: [row["model"] for row in each[1]]):
            (low, (first, *rest)), (high, _) = levels[0], levels[-1]
            rival = rest[0] if rest else {"model": "none as cheap", "loss": None, "error": None}
            errors = [first["error"], rival["error"]]
            off = (rival["loss"] - first["loss"]) / math.hypot(*errors) if all(errors) else None
            where = f"{budget}s, {title}", form(low), form(high), _SIDES[first["compressed"]]
            yield *where, first["model"], first["loss"], rival["model"], rival["loss"], off


def show(session: Session, out: Path, part: str) -> None:
    """Print tables of all models and of who leads for each text, and draw the fronts."""
    if not (folders := sorted({file.parent for file in out.glob("*/*.json")})):
        raise ValueError(f"out={out} has no points yet")
    for folder in folders:
        by = part if any(folder.glob(f"{part}-*.json")) else "valid"
        rows, name = rows_of(folder, by), f"{folder.name}, {by} loss"
        shown = {axis: form for axis, (_, form) in AXES.items() if axis != "seconds"}
        columns = {"model": "", "loss": ".4f", "error": ".4f", "seeds": ",", "rate": ".2g"}
        columns |= {"steps": ",.0f", **{AXES[axis][0]: "" for axis in shown}}
        cells = ([*map(r.get, [*columns][:6]), *(f(r[a]) for a, f in shown.items())] for r in rows)
        session.table(f"{name}: all models, best first", columns, cells)
        session.table(
            f"{name}: who leads, of models that cost no more, and where that changes",
            {"budget, axis": "", "from": "", "to": "", "leads": "", "best": "", "loss": ".4f",
             "best rival": "", "its loss": ".4f", "errors": ".1f"},
            _leads(rows), "errors: how many standard errors they are apart",
        )  # fmt: skip
        _draw(name, rows, file := out / f"{folder.name}.png")
        session.print(f"wrote {file}")


def _draw(title: str, rows: Sequence[Point], file: Path) -> None:
    (figure := empty_figure(2, 7.2, 3.0)[0]).clear()
    for axes, (axis, (name, form)) in zip(figure.subplots(2, 3).flat, AXES.items(), strict=True):
        ends = sorted({pick(row[axis] for row in rows) for pick in (min, max)})
        for side, color in zip(_SIDES, ("#2a6f97", "#d1495b"), strict=True):
            if own := [row for row in rows if row["compressed"] == side]:
                dots = zip(*((r[axis], r["loss"], r["error"] or 0) for r in own), strict=True)
                axes.errorbar(*dots, fmt="o", ms=3, c=color, alpha=0.6)
                front = [(most, best[0]["loss"]) for most, best in fronts(own, axis)]
                line = zip(*front, (ends[-1], front[-1][1]), strict=True)
                axes.step(*line, where="post", c=color, label=_SIDES[side])
        axes.set(xlabel=name, ylabel=title, xscale="log", xticks=ends)
        axes.set(xticklabels=map(form, ends))
        axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
