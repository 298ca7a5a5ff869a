"""Show how far the runs of a sweep are: bars while they run, a line for each that ends."""

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from comera.recipes.jobs import Job, Watcher
from comera.recipes.report.comparison import read_trained
from comera.recipes.report.words import show_metric
from comera.train.log import last_logged, progress_bar


@contextlib.contextmanager
def show_progress(
    jobs: Sequence[Job], metric: str, console: Console, expected: int
) -> Iterator[Watcher]:
    """Show one bar for all jobs, which finished or failed, and one for each that runs.

    Args:
        jobs: All jobs that are known, finished or not.
        metric: Key of the metric that is shown for each that finishes.
        console: The console to print on; bars are shown only if it is a terminal.
        expected: How many jobs there are to be in the end.
    """
    width = max(len(job.name) for job in jobs)
    bars: dict[Job, TaskID] = {}
    with progress_bar(console=console) as progress:
        finished = sum(job.state == "finished" for job in jobs)
        overall = progress.add_task("all runs", total=expected, completed=finished, figures="")

        def began(job: Job) -> None:
            bars[job] = progress.add_task(job.name.ljust(width), total=None, figures="starting")

        def ended(job: Job) -> None:
            if job in bars:
                progress.remove_task(bars.pop(job))
            if job.state != "stopped":
                progress.advance(overall)
            failed = sum(job.state == "failed" for job in jobs)
            progress.update(overall, figures=f"{failed} failed" if failed else "")
            line = f"{escape(job.name.ljust(width))}  {escape(_ending(job, metric))}"
            progress.console.print(line, highlight=False, soft_wrap=True)

        def looked(running: Sequence[Job]) -> None:
            for job in running:
                if job.steps is None:  # it is still reading its data
                    continue
                logged = last_logged(job.folder, "loss")
                step, figures = (0, "") if logged is None else (logged[0], f"loss {logged[1]:.4f}")
                progress.update(bars[job], total=job.steps, completed=step, figures=figures)

        yield Watcher(began, ended, looked)


def _ending(job: Job, metric: str) -> str:
    if job.state == "failed":
        return f"failed: {job.reason}"
    if job.state != "finished":
        return "stopped; it can be resumed"
    run = read_trained(job.variant, job.seed, job.folder)
    return (
        f"{metric} {show_metric(metric, run.metrics[metric])}, {run.params:,} parameters, "
        f"{run.steps:,} steps in {run.seconds:,.1f} s"
    )
