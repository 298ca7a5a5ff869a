"""The file of a sweep: variants of one run, over seeds, checked down to the settings of each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comera.extras import did_you_mean
from comera.recipes.parse import file_of, merged, nested, parse_settings, read_yaml
from comera.recipes.run_config import RunConfig
from comera.recipes.search import SearchConfig, read_search

_KEYS = (
    "out", "base", "seeds", "reference", "metric", "variants", "published", "search", "submitit",
    "ray",
)  # fmt: skip
_NEEDED = ("out", "base", "seeds", "reference", "variants")
_NEEDED_TO_SEARCH = ("out", "base", "seeds")
_ALONE: dict[str, Any] = {"base": {}}
"""The variants of a search that names none: the base as it is, for trials to be compared with."""
_OF_THE_SWEEP = ("out", "seed", "twin", "overwrite")
"""Settings of a run that a sweep makes itself: those of the base are not used."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Attributes:
        out: Folder of everything.
        seeds: Each variant is trained with each of them.
        reference: Name of the variant that the others are compared with.
        metric: Key of the last evaluation to compare.
        variants: Settings of the variants by name, in the order of the file, for any seed.
        launchers: Settings of launchers by their names.
        search: Variants that are to be proposed, if any.
        given: Settings of the base, and what every variant changes of them.
    """

    out: Path
    seeds: tuple[int, ...]
    reference: str
    metric: str
    variants: dict[str, RunConfig]
    launchers: dict[str, dict[str, Any]] = field(default_factory=dict)
    search: SearchConfig | None = None
    given: tuple[dict[str, Any], Mapping[str, Any]] = field(default_factory=lambda: ({}, {}))


def read_sweep(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file and check all of it, down to the settings of each variant.

    Args:
        path: The file.
        changes: Settings by dotted names that every variant gets, whatever the file says.

    Raises:
        ValueError: If something is wrong; names the variant and the first such thing.
        FileNotFoundError: If the file or its base is not there.
    """
    content = read_yaml(path)
    if not {"base", "variants", "search"} & content.keys() and "train" in content:
        raise ValueError(f"{path} is no sweep but a run: comera train trains it")
    for key in content:
        if key not in _KEYS:
            raise ValueError(f"{path}: {key} is no key of a sweep{did_you_mean(key, _KEYS)}")
    searched = content.get("search") is not None
    for key in _NEEDED_TO_SEARCH if searched else _NEEDED:
        if content.get(key) is None:
            raise ValueError(f"{path} lacks the key {key}")
    base = _base(content["base"], path.parent)
    given = content.get("variants") or (_ALONE if searched else content["variants"])
    if changes and isinstance(given, Mapping):
        given = {name: {**(own or {}), **changes} for name, own in given.items()}
    variants = _variants(base, given)
    _check_published(content.get("published"), variants)
    reference = content.get("reference") or next(iter(variants))
    if not isinstance(reference, str) or reference not in variants:
        raise ValueError(f"reference={reference} is no variant{did_you_mean(reference, variants)}")
    return Sweep(
        out=Path(str(content["out"])).expanduser(),
        seeds=_seeds(content["seeds"]),
        reference=reference,
        metric=_metric(content.get("metric"), variants),
        variants=variants,
        launchers={name: _mapping(name, content.get(name)) for name in ("submitit", "ray")},
        search=_search(content["search"], base, given) if searched else None,
        given=(base, given),
    )


def _check_published(given: Any, variants: Mapping[str, Any]) -> None:
    """Check what a file says of figures that others have published of such variants."""
    if given is None:
        return
    figures = given.get("figures") if isinstance(given, Mapping) else None
    if not isinstance(figures, Mapping) or not isinstance(given.get("source"), str):
        raise ValueError(f"published={given!r} must have a source, and figures by variant")
    for name in figures:
        if name not in variants:
            near = did_you_mean(name, variants)
            raise ValueError(f"published.figures.{name} is no variant{near}")


def _search(given: Any, base: dict[str, Any], variants: Mapping[str, Any]) -> SearchConfig:
    """Read a search, and check each end of what it may propose alone."""
    search = read_search(given)
    other = search.extends
    if other is not None and (not isinstance(other, str) or other not in variants):
        raise ValueError(f"search.extends={other} is no variant{did_you_mean(other, variants)}")
    taken = next((name for name in variants if name.startswith("trial-")), None)
    if taken is not None:
        raise ValueError(f"variant {taken}: such names are those of the search's trials")
    shared = base if other is None else merged(base, _overrides(other, variants, ()))
    for key, domain in search.over.items():
        if key.split(".")[0] in _OF_THE_SWEEP:
            raise ValueError(f"search.over.{key}: {key} is not for a search to set: the sweep does")
        for value in domain.extremes:
            try:
                parse_settings(RunConfig, merged(shared, nested({key: value})))
            except ValueError as problem:
                raise ValueError(f"search.over.{key}: {problem}") from None
    return search


def _mapping(key: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        raise ValueError(f"{key}={given!r} must be a mapping of settings of {key}")
    return dict(given or {})


def _base(given: Any, folder: Path) -> dict[str, Any]:
    """Return the settings that all variants share."""
    if isinstance(given, str):
        given = read_yaml(file_of(given, beside=folder))
    if not isinstance(given, Mapping):
        raise ValueError(
            f"base={given!r} must be the path of a run's file, a configuration's name, or settings"
        )
    try:
        settings = nested(given)
    except ValueError as problem:
        raise ValueError(f"base: {problem}") from None
    return {key: value for key, value in settings.items() if key not in _OF_THE_SWEEP}


def _variants(base: dict[str, Any], given: Any) -> dict[str, RunConfig]:
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"variants={given!r} must be mappings of settings, by name")
    for name, settings in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"variant {name!r} must have a name that can be a folder's: letters, digits and "
                "any of . _ + = - (in quotes where it looks like a number)"
            )
        if not isinstance(settings, Mapping | None):
            raise ValueError(f"variant {name}: {settings!r} must be a mapping of settings")
        other = (settings or {}).get("extends")
        if other is not None and (not isinstance(other, str) or other not in given):
            raise ValueError(
                f"variant {name}: extends={other} is no variant{did_you_mean(other, given)}"
            )
    return {name: variant_of(name, base, given) for name in given}


def variant_of(name: str, base: dict[str, Any], given: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a variant, with what it extends.

    Raises:
        ValueError: If they do not go together; names the variant.
    """
    try:
        config = parse_settings(RunConfig, merged(base, _overrides(name, given, ())))
        config.check()
    except ValueError as problem:
        raise ValueError(f"variant {name}: {problem}") from None
    return config


def _overrides(name: str, given: Mapping[str, Any], inner: tuple[str, ...]) -> dict[str, Any]:
    """Return what a variant changes of the base, with what it extends."""
    if name in inner:
        raise ValueError(f"extends goes round in a circle: {' -> '.join((*inner, name))}")
    own = nested({key: value for key, value in (given[name] or {}).items() if key != "extends"})
    for key in _OF_THE_SWEEP:
        if key in own:
            raise ValueError(f"{key} is not for a variant to set: the sweep does")
    other = (given[name] or {}).get("extends")
    return own if other is None else merged(_overrides(other, given, (*inner, name)), own)


def _seeds(given: Any) -> tuple[int, ...]:
    fine = isinstance(given, list) and given
    if not fine or any(type(seed) is not int or seed < 0 for seed in given):
        raise ValueError(f"seeds={given!r} must be a list of whole numbers from 0 on")
    twice = next((seed for seed in given if given.count(seed) > 1), None)
    if twice is not None:
        raise ValueError(f"seeds={given} has {twice} more than once")
    return tuple(given)


def _metric(given: Any, variants: Mapping[str, RunConfig]) -> str:
    """Return the requested metric, if every variant's task has it; by default the first of them."""
    measured = [(name, config.metrics) for name, config in variants.items()]
    shared = [m for m in measured[0][1] if all(m in found for _, found in measured)]
    if given is None:
        return shared[0]
    if given not in shared:
        lacking = next(name for name, found in measured if given not in found)
        raise ValueError(
            f"metric={given} is not measured in variant {lacking}; all variants have "
            f"{', '.join(shared)}"
        )
    return given
