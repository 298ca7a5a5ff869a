"""Run the experiments of the papers and collect the results.

An experiment is trained small or at the paper's scale; the same command resumes it.
OUT/REPRODUCTION.md collects the finished results beside the claims of the papers.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from benchmarks.session import positive
from comera.extras import check_known, error_prefix, without_remarks
from comera.files import write_text
from comera.params import model_size
from comera.planning.printing import show_bytes
from comera.recipes import parse
from comera.recipes.cli import changes_of
from comera.recipes.report import page, sweep_report
from comera.recipes.report.sweep_report import Comparison, Trained, deviation
from comera.recipes.run import build_step, make_model, planned_memory, planned_model
from comera.recipes.run_config import HIGHER_IS_BETTER, TASKS, RunConfig
from comera.recipes.sweep import (
    Sweep,
    make_jobs,
    overrides,
    read_sweep,
    run_sweep,
    unskipped,
    variant_of,
)
from comera.recipes.tasks.task import Batch, task_of
from comera.train.log import print_text

Scale = Literal["small", "paper"]

_CLAIM = "published.claims[{}]."
_COMMAND = "command.txt"
_ROWS, _STEPS = 2, 2
_STEPPED_UP_TO = 1 << 29
"""Bytes of weights, gradients and optimizer state up to which a dry run does steps."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and the rule by which figures of two variants decide about it.

    Args:
        says: The claim, in words.
        paper: The paper's own figures, and where they are.
        variant: The variant that it is about; without one no run here decides about it.
        figure: The figure that decides: a metric, or one of ``MEASURED``, where ``layer_params``
            is compared with the dense layers in their place.
        beside: The variant beside it, by default the reference.
        loses: Largest amount by which the metric may be worse than the other's.
        gains: Least amount by which the metric has to be better than the other's.
        fewer: Least ratio of the other's figure to this one's.
    """

    says: str = ""
    paper: str = ""
    variant: str | None = None
    figure: str = ""
    beside: str | None = None
    loses: float | None = None
    gains: float | None = None
    fewer: float | None = None

    def __post_init__(self) -> None:
        rules = [key for key in ("loses", "gains", "fewer") if getattr(self, key) is not None]
        for key in ("says", "paper"):
            if not getattr(self, key):
                raise ValueError(f"{key}={getattr(self, key)!r} must be a text")
        if len(rules) != (self.variant is not None) or bool(self.figure) != bool(rules):
            raise ValueError(
                f"variant={self.variant}: a claim has a variant, a figure and one of loses, gains "
                f"and fewer, or none of these where no run decides; here are {rules or 'none'}"
            )
        parse.check_least(self, "", loses=0, gains=0, fewer=1)

    def check(self, within: str, variants: Mapping[str, RunConfig]) -> None:
        """Raise ``ValueError`` for a name that is no variant, or a figure that is not measured."""
        for key in ("variant", "beside"):
            if (name := getattr(self, key)) is not None:
                check_known(name, variants, f"{within}{key}={name} is no variant")
                better = TASKS[variants[name].task].better
                known = [*better] if self.fewer is None else [*sweep_report.MEASURED]
                check_known(self.figure, known, f"{within}figure={self.figure} is not measured")


def read_claims(published: Mapping[str, Any]) -> list[Claim]:
    """Parse the claims in the section ``published`` of a sweep file; ``ValueError`` if wrong."""
    for key in published:
        check_known(key, ("source", "claims"), f"published.{key} is no part of what was published")
    given = published.get("claims") or []
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ValueError(f"published.claims={given!r} must be a list of mappings")
    return [parse.parse_settings(Claim, each, _CLAIM.format(k)) for k, each in enumerate(given)]


def read_experiment(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """Read the sweep file of an experiment, and check its claims too; see :func:`read_sweep`.

    ``changes`` are settings by dotted names that every variant gets, whatever the file says.
    """
    sweep = with_changes(read_sweep(path), changes or {})
    for number, claim in enumerate(read_claims(parse.read_yaml(path).get("published") or {})):
        claim.check(_CLAIM.format(number), sweep.variants)
    return sweep


def with_changes(sweep: Sweep, changes: Mapping[str, Any]) -> Sweep:
    """Return a sweep with settings by dotted names for every variant."""
    over, own, given = parse.nested(changes), {}, sweep.given
    for name in given if over else ():
        with error_prefix(f"variant {name}: "):
            before = parse.merged(sweep.base, overrides(name, given))
            if before.get("tensorize", "") is None and over.get("tensorize") is not None:
                raise ValueError("tensorize is null there, and would no longer be by --set")
            own[name] = parse.merged(parse.nested(given[name] or {}), over)
    if not own:
        return sweep
    variants = {name: variant_of(name, sweep.base, own) for name in own}
    return dataclasses.replace(sweep, variants=variants, given=own)


def experiments() -> dict[str, dict[str, Path]]:
    """Return the files of the experiments by name and scale, in the order of their names."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((parse.folder() / "reproduce").glob("*.yaml")):
        name, _, scale = path.stem.rpartition("-")
        found.setdefault(name, {})[scale] = path
    return found


def file_of(name: str, scale: Scale) -> Path:
    """Return the sweep file of an experiment; raise ``ValueError`` if it is unknown."""
    known = experiments()
    listed = "among those that `python -m benchmarks reproduce` lists"
    check_known(name, known, f"there is no experiment {name!r} {listed}")
    if scale not in known[name]:
        raise ValueError(f"{name} has no --scale {scale}, only {', '.join(known[name])}")
    return known[name][scale]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("name", nargs="?", help="Name of the experiment; without it all are listed.")
    help = "small takes minutes a run on a CPU, paper has the paper's shapes."
    add("--scale", choices=get_args(Scale), default="small", help=help)
    add("--out", type=Path, default=Path("runs/reproduce"), help="Folder of all experiments.")
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    help = "Settings that every run gets, such as nli.train=pairs.jsonl, the place of its data."
    add("--set", **many, metavar="KEY=VALUE", help=help)
    help = "Variants, or runs as VARIANT/seed-K, to leave out this time."
    add("--skip", **many, metavar="VARIANT", help=help)
    add("--jobs", type=positive, default=1, help="Number of runs at a time.")
    help = "Restart runs whose folders hold other settings or data; the others stay."
    add("--overwrite", action="store_true", help=help)
    add(
        "--dry-run", action="store_true",
        help="Only train two steps of each variant on random data, or compute only the shapes of "
        "variants that take more than 512 MiB.",
    )  # fmt: skip


def run(console: Console, options: argparse.Namespace) -> int:
    """Train an experiment, list all or try one out; return the exit status."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    name, scale, skip = options.name, options.scale, options.skip
    if name is None:
        for each, scales in experiments().items():
            title = parse.first_sentence(next(iter(reversed(scales.values()))))
            print_text(console, f"{each} ({', '.join(sorted(scales, reverse=True))}): {title}")
        return 0
    changes, path = changes_of(options.set), file_of(name, scale)
    if options.dry_run:
        for line in try_out(name, scale, changes, skip=skip):
            print_text(console, line)
        return 0
    root = options.out.expanduser()
    folder = root / path.stem
    sweep = dataclasses.replace(read_experiment(path, changes), out=folder)
    try:
        status = run_sweep(sweep, console, options.jobs, options.overwrite, skip=skip)
    except FileNotFoundError as problem:
        base = parse.read_yaml(path)["base"]
        source = f"`comera init {base}` says where they come from, and " * isinstance(base, str)
        raise FileNotFoundError(
            f"{problem}: {source}--set KEY=PLACE sets one for all runs"
        ) from None
    if (folder / "results.json").is_file():
        changed = f" --set {shlex.join(options.set)}" * bool(options.set)
        write_text(folder / _COMMAND, f"{_command(name, scale)}{changed}")
    write_reproduction(root)
    return status


def _command(name: str, scale: str) -> str:
    return f"python -m benchmarks reproduce {name} --scale {scale}"


def write_reproduction(out: Path) -> Path:
    """Write ``REPRODUCTION.md`` with the results below ``out`` beside the claims of the papers.

    An experiment without a folder there keeps the section that the page has, of another machine.
    """
    path, found = out / "REPRODUCTION.md", experiments()
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    claims: list[list[str]] = []
    sections = [
        _section(name, scale, found[name][scale], out, before, claims)
        for scale in get_args(Scale) for name in found if scale in found[name]
    ]  # fmt: skip
    header = ["paper", "claim", "the paper", "here", "verdict", "section"]
    table = page.markdown(header, claims, len(header))
    lines = []
    for scale in get_args(Scale):
        ours = [row[-2].partition(" (")[0] for row in claims if f", {scale}]" in row[-1]]
        counts = ", ".join(f"{verdict}: {ours.count(verdict)}" for verdict in _VERDICTS)
        lines.append(f"* {len(ours)} claims at the {scale} scale; {counts}")
    text = "\n\n".join([_HEAD, "\n".join(lines), table, *sections])
    write_text(path, text + "\n")
    return path


def _section(
    name: str, scale: str, path: Path, out: Path, before: str, claims: list[list[str]]
) -> str:
    """Return the section of an experiment, and add its claims to those of the page."""
    content, folder = parse.read_yaml(path), out / path.stem  # checked where it is run
    title, link = f"## {name}, {scale}", f"[{name}, {scale}](#{name}-{scale})"
    kept = before.partition(f"{title}\n")[2].partition("\n## ")[0].rstrip()
    if "\nMade by `" in kept and not (folder / "results.json").is_file():
        for line in before.splitlines():
            if line.endswith(f"| {link} |"):
                claims.append([c.replace(r"\|", "|") for c in line[2:-2].split(" | ")])
        return f"{title}\n{kept}"
    published = content.get("published") or {}
    source = published.get("source", "all together")
    reference = content.get("reference") or next(iter(content["variants"]))
    comparison = None
    command = _command(name, scale)
    parts = [title, f"{parse.first_sentence(path)}. Published: {source}."]
    if (folder / "results.json").is_file():
        comparison = sweep_report.read_comparison(folder)
        with contextlib.suppress(FileNotFoundError):
            command = (folder / _COMMAND).read_text(encoding="utf-8")
    rows = []
    for claim in read_claims(published):
        rule, ours, verdict = _judged(claim, reference, comparison)
        rows.append([claim.says, claim.paper, rule, ours, verdict])
        claims.append([source, claim.says, claim.paper, ours, verdict, link])
    header = ["claim", "the paper", "holds if here", "here", "verdict"]
    if rows:
        parts.append(page.markdown(header, rows, len(header)))
    if comparison is not None:
        columns, cells = sweep_report.comparison_cells(comparison)
        blank = [""] * (len(columns) - 2)
        lines = {each: [each, "not run", *blank] for each in content["variants"]}
        lines |= {each.variant: [each.variant, "failed", *blank] for each in comparison.failed}
        lines |= {row[0]: row for row in cells}
        parts.append(page.markdown(columns, list(lines.values())))
        parts += [f"Figures are of {comparison.title}. {comparison.note}", _places(comparison.runs)]
        parts += [f"Failed: {each}." for each in comparison.failed]
    parts.append(f"{'To be made' if comparison is None else 'Made'} by `{command}`.")
    return "\n\n".join(parts)


_VERDICTS = "holds", "in part", "does not hold", "not run"
_HEAD = """# Reproduction

What the papers claim, and what came out here. `python -m benchmarks reproduce` writes this page
from the claims in `configs/reproduce` and the folders of finished runs; nothing in it is typed.

A claim *holds* if every seed reaches the bound in its section, *in part* if their mean does, and
*does not hold* otherwise; a run that failed reaches none. *Not run*: a run that it needs is
missing, or the package has none. Few seeds tell apart what differs by several standard errors, and
size and quality are claims of their own: read them together. Figures are of test data where a run
has any. Differences are paired by seed, ± their standard error, and ratios are geometric means with
their range; other figures are ± their standard deviation over seeds. The papers' figures are those
of abstracts and of the authors' repositories; those marked * are of tables, from memory."""


def _judged(claim: Claim, reference: str, comparison: Comparison | None) -> tuple[str, str, str]:
    """Return the rule of a claim in words, our figures, and the verdict."""
    if claim.variant is None:
        return "no run here decides", "–", "not run"
    figure, other = claim.figure, claim.beside or reference
    pair = (claim.variant, figure), (other, figure)
    if figure == "layer_params":
        pair, other = (pair[0], (claim.variant, "layer_dense_params")), "the dense ones"
    label, show = sweep_report.MEASURED.get(figure, (figure, partial(page.show_metric, figure)))
    rule = _rule(claim, label, other)
    runs, failed = (comparison.runs, comparison.failed) if comparison else ((), ())
    tested = all(figure in run.test for run in runs if run.variant in (claim.variant, other))
    facts = [(run, vars(run) | run.more | (run.test if tested else run.metrics)) for run in runs]
    mine, theirs = (
        {run.seed: f[key] for run, f in facts if run.variant == of and f.get(key) is not None}
        for of, key in pair
    )
    seeds = [seed for seed in mine if seed in theirs]
    lost = any(each.variant == claim.variant for each in failed)
    if comparison is None or not seeds:
        return (rule, "failed", "does not hold") if lost and not mine else (rule, "–", "not run")
    own, its = (show(statistics.fmean(each[seed] for seed in seeds)) for each in (mine, theirs))
    if claim.fewer is not None:
        gains = [math.log(theirs[seed] / mine[seed]) for seed in seeds]
        bound, mean = math.log(claim.fewer), statistics.fmean(gains)
        least, most = (f"{math.exp(end):.3g}" for end in (min(gains), max(gains)))
        span = f" ({least} to {most})" * (least != most)
        ours = f"{math.exp(mean):.3g}x less{span}: {own} against {its}"
    else:
        sign = 1 if figure in HIGHER_IS_BETTER else -1
        gains = [sign * (mine[seed] - theirs[seed]) for seed in seeds]
        between = deviation([theirs[seed] for seed in seeds]) or 0.0
        bound = -max(claim.loses or 0.0, between) if claim.gains is None else claim.gains
        mean, spread, error = statistics.fmean(gains), deviation(gains), None
        if spread is not None:
            error = spread / math.sqrt(len(seeds))
            own += f" ± {show(deviation([mine[seed] for seed in seeds]) or 0)}"
        change = page.show_change(figure, sign * mean, error)
        data = "test" if tested else "development"
        ours = f"{data} {label} {own} against {its}: {change}"
    reached = [gain >= bound - 1e-9 for gain in (*gains, mean)]
    verdict = _VERDICTS[0 if all(reached) and not lost else 1 if reached[-1] else 2]
    wanted = len(comparison.seeds)
    return rule, ours, verdict + f" ({len(seeds)} of {wanted} seeds)" * (len(seeds) < wanted)


def _rule(claim: Claim, label: str, other: str) -> str:
    """Return the rule of a claim in words, given names of its figure and the variant beside it."""
    if claim.fewer is not None:
        how = f"at least {claim.fewer:g}x less" if claim.fewer > 1 else "no more"
        return f"{label} {how} than {other}"
    if claim.gains is not None:
        gains = page.show_change(claim.figure, claim.gains, sign="")
        return f"{label} better than {other} by {gains}"
    rule = f"{label} worse than {other} by no more than its deviation over seeds"
    if claim.loses:
        rule += f" or {page.show_change(claim.figure, claim.loses, sign='')}"
    return rule


def _places(runs: Sequence[Trained]) -> str:
    """Return a list of dates, machines and versions, with the number of runs."""
    dates: dict[str, list[str]] = {}
    for run in runs:
        ran = {"date": "date", **dict.fromkeys(("machine", "comera", "torch"), "not recorded")}
        ran |= {"threads": "?"} | run.ran
        place = "{machine}, threads: {threads}, comera {comera}, torch {torch}".format(**ran)
        dates.setdefault(place, []).append(ran["date"])
    return "\n".join(
        f"* {len(each)} of the runs: {' to '.join(dict.fromkeys((min(each), max(each))))}, {place}"
        for place, each in dates.items()
    )


def try_out(
    name: str,
    scale: Scale,
    changes: Mapping[str, Any] | None = None,
    most: int = _STEPPED_UP_TO,
    skip: Sequence[str] = (),
) -> list[str]:
    """Train every variant for two steps, see :func:`dry_run`; return a line for each."""
    lines = []
    sweep = read_experiment(file_of(name, scale), changes)
    for variant in dict.fromkeys(job.variant for job in unskipped(make_jobs(sweep), skip)):
        with error_prefix(f"{name}, {scale}, variant {variant}: "):
            try:
                found = dry_run(sweep.variants[variant], most)
            except FileNotFoundError as missing:
                found = f"not tried, as its sizes are those of its data: {missing}"
            lines.append(f"{variant}: {found}")
    return lines


def dry_run(config: RunConfig, most_bytes: int) -> str:
    """Train a run for two steps of two random rows, with its optimizer and rank learning.

    Nothing is read or written. Above ``most_bytes`` of weights, gradients and optimizer state only
    shapes are computed. Returns a sentence on parameters, memory and steps. Raises ``ValueError``
    if settings contradict each other.
    """
    needed = planned_memory(dataclasses.replace(config, twin=False))[0].total.total
    steps = config.train.steps or 1000  # for schedules and stages, where the data tell
    train = dataclasses.replace(config.train, steps=steps, epochs=None, seconds=None, compile=False)
    train.batch_size, train.accumulate = _ROWS, 1
    small = dataclasses.replace(config, train=train, device="cpu", twin=False)
    task = task_of(small)
    task.sizes, task.steps = task.planned_sizes(), steps

    def batch(step: int) -> Batch:
        torch.manual_seed(step)
        return task.drawn_batch(_ROWS, task.sizes)

    with without_remarks():
        if needed > most_bytes:
            model = planned_model(small)
            with torch.device("meta"):
                data = batch(0)
            task.loss(model, data).backward()
            missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
            if missing:
                raise ValueError(f"{missing[0]} gets no gradient")
            params = model_size(model).params
            done = (
                f": no steps done, as a dry run does them up to {show_bytes(most_bytes)}; "
                "forward and backward fit by their shapes"
            )
        else:
            torch.manual_seed(config.seed)
            model = make_model(small, task, torch.device("cpu"))
            params, step = model_size(model).params, build_step(model, small, task)
            for number in range(_STEPS):
                step(batch(number))
            done = f"; {_STEPS} steps done"
    return f"{params:,} parameters, {needed / (1 << 20):,.0f} MiB to train them{done}"
