"""Figures in words: how a metric differs from another model's, how long something took."""

HIGHER_IS_BETTER = ("accuracy", "auc")


def show_metric(metric: str, value: float) -> str:
    """Return a metric as it is shown: an accuracy in percent."""
    if metric == "accuracy":
        return f"{100 * value:.2f} %"
    return f"{value:,.2f}" if metric == "perplexity" else f"{value:.4f}"


def show_change(metric: str, value: float, error: float | None = None) -> str:
    """Return a difference of a metric with its sign and, if there is one, its standard error."""
    scale, unit = (100, " points") if metric == "accuracy" else (1, "")
    digits = 2 if metric in ("accuracy", "perplexity") else 4
    spread = "" if error is None else f" ± {scale * error:,.{digits}f}"
    return f"{scale * value:+,.{digits}f}{spread}{unit}"


def show_difference(metric: str, value: float, other: float) -> str:
    """Say how a metric differs from that of another model: ``11 % higher than``.

    A perplexity is compared by its ratio, an accuracy in points of a percent, others as they are.
    """
    if metric == "perplexity":
        percent = 100 * abs(value / other - 1)
        size = f"{percent:,.0f} %" if percent >= 10 else f"{percent:.1f} %"
    elif metric == "accuracy":
        size = f"{100 * abs(value - other):.2f} points"
    else:
        size = f"{abs(value - other):.4f}"
    if value == other:
        return "the same as"
    return f"{size} {'higher' if value > other else 'lower'} than"


def show_times(value: float, other: float, more: str, less: str) -> str:
    """Say how many times more or less, both given in words: ``2.10 times faster``."""
    ratio, word = (value / other, more) if value >= other else (other / value, less)
    return f"{ratio:,.2f} times {word}" if ratio < 10 else f"{ratio:,.1f} times {word}"


def show_duration(seconds: float) -> str:
    """Return seconds, minutes or hours, whichever can be read."""
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"
