"""Measure which causal language model learns most for what it costs: dense or compressed.

Every point trains one model for a budget of processor time, in one thread of a process of its own,
and is a file that is written when it ends: the same command resumes, and several may share the
work. For each model a rate is chosen by validation loss; other seeds are tested once at it.
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
from statistics import fmean, variance
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.nn import functional as F

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
POINTS = """dense:64,96,128,192,256x2,4,6 muon:96,128,192x2,4 lowrank24:128,192x2,4
trains32:192,256x2,4 blocks1:96,128,192,256x2,4 blocks2:96,128,192,256x2,4 blocks4:128,192x2,4"""
AXES = {
    "seconds": ("seconds", "{:g}".format), "operations": ("operations", show_count),
    "parameters": ("parameters", show_count), "body": ("without table", show_count),
    "memory": ("memory", show_bytes), "tokens": ("tokens", show_count),
}  # fmt: skip
BATCH, LENGTH = 16, 64  # sequences, and their tokens
_WARM_UP, _CLIP, _EVALUATED = 0.05, 1.0, 64  # share of the budget; norm of gradients; batches
_BODY, _TABLE = r"model\.layers\..*", r"model\.embed_tokens|lm_head"
_SIDES = {False: "dense", True: "compressed"}
_NAME = "{family} {width}x{depth}, {budget}s"
_FILE = "{text}-v{vocab}/{part}-{budget}s-{family}-{width}x{depth}-{rate:g}-{seed}.json"
Point = dict[str, Any]  # family, kind, compressed, width, depth; budget, rate, ...; what was found


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
        how |= {"blocks": {"linear_format": "btt"}, "lowrank": {"order": 1}}.get(kind, {})
        tensorize_(model, TTConfig(target_modules=_BODY, **how))
        if any(type(layer) is nn.Linear for layer in decoder.layers.modules()):
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
    form = r"((dense|muon)|(?:lowrank|trains|blocks)\d+(?:\+\d+)?):(\d+(?:,\d+)*)x(\d+(?:,\d+)*)"
    if (found := re.fullmatch(form, text)) is None:
        raise ValueError(
            f"points={text!r} must be as dense:64,96x2,4 or muon:96x2 or blocks2:128x4; families "
            "with a rank are lowrank, trains and blocks, and +RANK compresses the table too"
        )
    widths, depths = ([int(word) for word in found[k].split(",")] for k in (3, 4))
    own = {"family": found[1], "kind": re.split(r"\d", found[1])[0], "compressed": not found[2]}
    return [own | {"width": width, "depth": depth} for depth in depths for width in widths]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--text", type=Path, help="Folder of Python files, or a file of text.")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="Of the points.")
    add_several(parser, "--vocab", [512, 8192], "Tokens of the byte-pair vocabularies.")
    add_several(parser, "--budgets", [60, 240, 960], "Seconds of processor time in steps.")
    parser.add_argument("--points", nargs="+", default=POINTS.split(), help="FAMILY:WIDTHSxDEPTHS.")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.7, 1.4], help="Times its own.")
    add_sizes(parser, {"seeds": (3, "Seeds at the best rate."), "megabytes": (12, "Of text.")})
    parser.add_argument("--pilot", action="store_true", help="Run the shortest budget only.")
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
    text, budgets = options.text.resolve(), sorted(options.budgets)
    files = {"folder": str(text.parent), "pattern": text.name} if text.is_file() else {}
    files = {"folder": str(text), "max_megabytes": options.megabytes} | files
    for budget in budgets[: 1 if options.pilot else None]:
        for vocab in options.vocab:
            data = {**files, "vocab_size": vocab, "length": LENGTH, "heldout": 0.05, "test": 0.05}
            name = f"{text.name}-{TextStreams.prepare(TextData(**data)).prepared[:8]}"
            about = {"text": name, "vocab": vocab, "budget": budget}
            for part in ("valid", "test"):
                for setting in settings:
                    for point in _planned(session, options, setting, about, part):
                        _run(session, options.out, data, point)


def _planned(session: Session, options: Any, setting: Point, about: Any, part: str) -> list[Point]:
    """Return the trials of a setting, or its tests at the best rate once all trials have ended."""
    rate = RATES[setting["kind"]] * 128 / setting["width"]
    about = {**about, **setting, "part": "valid", "seed": 0}
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


def _run(session: Session, out: Path, data: Mapping[str, Any], point: Point) -> None:
    """Measure a point in a new process, unless it is there or another process does."""
    file = out / _FILE.format(**point)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file.with_suffix(".lock"), timeout=0):
            if not file.exists():
                found = in_new_process("benchmarks.frontier", {"data": data, "point": point})
                write_text(file, json.dumps(point | found, indent=1) + "\n")
                session.print(f"{file.stem}: {found['loss']}")
    except Timeout:
        session.print(f"{file.stem} is being measured by another process")
    except RuntimeError as problem:
        session.note(f"{file.stem}: {problem}")
        session.failed = True


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train one model by the clock and score it; the loss is None if it diverged."""
    torch.set_num_threads(1)
    point, device = job["point"], torch.device("cpu")
    data = CausalText(TextStreams.prepare(TextData(**job["data"])))
    budget, peak_memory, neighbours = point["budget"], peak_reader(device), watch_neighbours()
    torch.manual_seed(point["seed"])
    model = make_model(point, point["vocab"])
    groups = param_groups(model, point["rate"], muon_modules={"muon": _BODY}.get(point["kind"]))
    optimizer = (torch.optim.AdamW if point["kind"] == "dense" else MuonAdamW)(groups, fused=True)
    step = TrainStep(model, _loss, optimizer, clip_norm=_CLIP)
    used, steps, diverged, began = 0.0, 0, False, time.monotonic()
    while used < budget and not diverged:
        batch, share = data.batch(steps, BATCH, point["seed"]), max(used / budget, 1e-3)
        start = time.process_time()
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])
            group["lr"] = peak * min(share / _WARM_UP, (1 - share) / (1 - _WARM_UP))
        try:
            step(batch)
        except NonFiniteLossError:
            diverged = True
        used, steps = used + time.process_time() - start, steps + 1
    memory, wall, busy = peak_memory(), time.monotonic() - began, neighbours(1)
    batches = data.held_out(point["part"], BATCH)
    with torch.no_grad():
        spread = batches[:: max(1, len(batches) // _EVALUATED)][:_EVALUATED]
        loss = fmean(float(_loss(model.eval(), each)) for each in spread)
    size, table = count(model), count(model.get_submodule("model.embed_tokens"))
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "loss": None if diverged or not math.isfinite(loss) else loss, "steps": steps,
        "seconds": used, "wall": wall, "tokens": steps * BATCH * LENGTH, "parameters": size,
        "body": size - table, "operations": steps * operations(point, model, point["vocab"]),
        "memory": memory, "busy": busy, **machine_facts(device, True),
        "commit": subprocess.run(words, capture_output=True, text=True).stdout.strip(),
    }  # fmt: skip


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
