"""Logs of a run: seconds of its steps, its speed, its lines and its progress bar."""

import contextlib
import io
import json
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from comera.train import loop
from comera.train.log import (
    MemoryWatch,
    Pace,
    RunLog,
    StepClock,
    from_json,
    last_logged,
    peak_memory,
    progress_bar,
    read_metrics,
    to_json,
)

from .conftest import evaluate, get_batch, make_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LAUNCH, WORK = 0.25, 4.0


class Device:
    """A stand-in for a GPU and the host beside it, each with a time of its own.

    Attributes:
        host: Time by which the host has come so far.
        through: Time by which the device will be through with all it was given.
        waits: How often the host waited for an event that had not come.
    """

    def __init__(self):
        self.host = self.through = 0.0
        self.waits = 0

    def launch(self, work):
        self.host += LAUNCH
        self.through = max(self.host, self.through) + work

    def wait(self):
        self.host = max(self.host, self.through)

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device):
        self.device = device

    def record(self, stream):
        assert stream == "the present stream"
        self.at = max(self.device.host, self.device.through)

    def query(self):
        return self.at <= self.device.host

    def synchronize(self):
        self.device.waits += not self.query()
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, later):
        assert self.query()
        assert later.query()
        return 1e3 * (later.at - self.at)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: "the present stream")
    return device


def test_seconds_are_those_of_running_not_of_launching(device):
    clock = StepClock(CUDA)
    for _ in range(10):
        with clock.step():
            device.launch(WORK)
    assert device.host == 10 * LAUNCH
    assert device.waits == 0
    assert clock.seconds() == LAUNCH + 10 * WORK  # the first had to wait for its launch
    assert device.host == LAUNCH + 10 * WORK


def test_launches_slower_than_what_they_launch_are_counted(device):
    clock = StepClock(CUDA)
    for _ in range(10):
        with clock.step():
            device.launch(0.1)
    assert clock.seconds() == pytest.approx(10 * LAUNCH + 0.1)


def test_nothing_between_steps_is_counted(device):
    """Neither what the host does there nor the device, which still has steps to run by then."""
    clock = StepClock(CUDA)
    for _ in range(3):
        for _ in range(4):
            with clock.step():
                device.launch(WORK)
        device.launch(100.0)
        device.wait()
        device.host += 50.0
    assert clock.seconds() == 3 * (LAUNCH + 4 * WORK)


def test_marks_of_steps_that_are_through_are_let_go(device):
    clock = StepClock(CUDA)
    for _ in range(100):
        with clock.step():
            device.launch(WORK)
        device.host += WORK
    assert device.waits == 0
    assert len(clock._open) == 1


def test_a_step_that_raises_is_not_counted(device):
    clock = StepClock(CUDA)
    clock.add(1.5)
    with contextlib.suppress(KeyError), clock.step():
        device.launch(WORK)
        raise KeyError
    assert clock.seconds() == 1.5


@pytest.mark.parametrize(("by_processor", "seconds"), [(False, 6.0), (True, 12.0)])
def test_on_a_cpu_it_is_the_time_inside(by_processor, seconds, monkeypatch):
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.value)
    monkeypatch.setattr(time, "process_time", lambda: 2 * now.value)  # two threads
    clock = StepClock(torch.device("cpu"), by_processor)
    for _ in range(3):
        with clock.step():
            now.value += 2.0
        now.value += 10.0
    assert (clock.seconds(), clock.processor) == (seconds, 12.0)


@pytest.fixture
def slow(device, monkeypatch):
    """Settings of a run whose steps, evaluations and checkpoints take that device's time."""
    monkeypatch.setattr(loop, "StepClock", lambda on, *by: StepClock(CUDA, *by))
    save = loop.save_checkpoint

    def saves(*given, **options):
        assert device.through <= device.host  # the steps are not part of it
        device.host += 70.0
        save(*given, **options)

    def evaluates(model):
        device.launch(30.0)
        device.wait()
        device.host += 50.0
        return evaluate(model)

    def batches(number):
        device.host += 0.01
        return get_batch(number)

    monkeypatch.setattr(loop, "save_checkpoint", saves)
    return {"get_batch": batches, "evaluate": evaluates, "quiet": True, "tensorboard": False}


def slow_step(device):
    step = make_step(early=100)
    update = step._update
    step._update = lambda batch: device.launch(WORK) or update(batch)
    return step


def test_a_run_counts_its_steps_and_neither_evaluations_nor_checkpoints(device, slow, tmp_path):
    step = slow_step(device)
    result = loop.train(step, steps=12, folder=tmp_path, eval_every=5, save_every=4, **slow)
    evaluations, checkpoints = 3, 3
    assert device.host >= 12 * WORK + 80 * evaluations + 70 * checkpoints
    stops = 4 + 1  # after which a step waits for its launch: evaluations and checkpoints, the log
    assert 12 * WORK <= result.seconds <= 12 * WORK + (stops + 1) * LAUNCH
    lines = [line for line in read_metrics(tmp_path) if "seconds" in line]
    assert lines[-1]["seconds"] == pytest.approx(result.seconds)


def test_a_run_that_goes_on_adds_to_its_seconds(device, slow, tmp_path):
    whole = loop.train(slow_step(device), steps=12, folder=tmp_path / "whole", save_every=4, **slow)
    loop.train(slow_step(device), steps=8, folder=tmp_path / "parts", save_every=4, **slow)
    rest = slow_step(device)
    parts = loop.train(rest, steps=12, folder=tmp_path / "parts", resume=True, **slow)
    assert parts.seconds == pytest.approx(whole.seconds, abs=2 * LAUNCH)


@pytest.fixture
def by_the_clock(monkeypatch, tmp_path):
    """Runs of 40 seconds on a CPU, made for 20 steps, whose steps take one second to four."""
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.value)
    monkeypatch.setattr(time, "process_time", lambda: 2 * now.value)  # two threads

    def run(name, late=10, **settings):
        step = make_step(late=late)
        update = step._update

        def slowly(batch):
            now.value += 1 + step.steps_done % 4
            return update(batch)

        step._update = slowly
        given = {"get_batch": get_batch, "evaluate": evaluate, "log_every": 1} | settings
        fixed = {"folder": tmp_path / name, "quiet": True, "tensorboard": False}
        return loop.train(step, steps=20, seconds=40, **fixed, **given)

    return run


@pytest.mark.parametrize("late", [10, 0])
def test_rates_and_stages_of_a_run_by_the_clock_follow_it(by_the_clock, tmp_path, late):
    result = by_the_clock("run", late)
    assert (result.steps, result.seconds, result.interrupted) == (16, 40, False)
    assert result.ranks["size"] <= result.ranks["target_size"]
    lines = [line for line in read_metrics(tmp_path / "run") if "lr" in line]
    assert [line["seconds"] for line in lines][:5] == [1, 3, 6, 10, 11]
    for line in lines:
        place = 20 * line["seconds"] / 40
        assert line["lr"] == pytest.approx(1e-2 / (1 + 0.1 * place))
        assert line["stage"] == ("early" if place < 6 else "late" if place < 6 + late else "done")
    (cut,) = (
        line for line in read_metrics(tmp_path / "run") if "size" in line and "lr" not in line
    )
    assert cut["step"] == (14 if late else 6)  # after 33 seconds or 13, and it goes on small
    again = by_the_clock("run", late, resume=True)
    assert (again.steps, again.metrics) == (16, result.metrics)


def test_a_run_by_the_clock_goes_on_from_the_seconds_it_used(by_the_clock, tmp_path):
    def broken_off(number):
        if number == 9:
            raise KeyError("no such batch")
        return get_batch(number)

    by_the_clock("whole")
    with pytest.raises(KeyError, match="no such batch"):
        by_the_clock("parts", get_batch=broken_off, save_every=8)
    by_the_clock("parts", resume=True)
    whole, parts = (
        [{k: v for k, v in line.items() if k != "time"} for line in read_metrics(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert parts == whole


def test_on_a_gpu_a_run_ends_within_a_step_of_its_seconds(device, slow, tmp_path):
    """The host waits for the last step but one, so that there always is work."""
    step = slow_step(device)
    result = loop.train(step, steps=100, seconds=80, folder=tmp_path, log_every=100, **slow)
    assert abs(result.seconds - 80) <= WORK + LAUNCH
    assert result.ranks is not None
    assert step.ranks.pace == 100 * WORK / 80


def test_speeds_are_those_since_the_last_time():
    pace = Pace(CPU, (4096, "tokens"), steps=100, seconds=50.0)
    assert pace.show(110, 52.0).startswith("5 steps/s, 20.5k tokens/s, peak ")
    assert pace.show(130, 53.0).startswith("20 steps/s, 81.9k tokens/s, peak ")
    assert pace.show(130, 53.0).startswith("peak ")  # nothing is new


def test_memory_is_that_of_the_process():
    before = peak_memory(CPU)
    assert before > 32 << 20  # torch alone
    assert peak_memory(CPU) >= before
    assert Pace(CPU).show(0, 0.0) == f"peak {peak_memory(CPU) / (1 << 20):,.0f} MiB"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is read from /proc")
def test_a_watch_measures_what_came_after_it_and_is_gone_again():
    watch = MemoryWatch(CPU)
    torch.ones(16 << 18)
    assert 15 << 20 < watch.peak() < 32 << 20
    watch.begin()
    assert watch.peak() < 8 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is read from /proc")
def test_a_watch_leaves_out_data_that_are_mapped_from_a_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(32 << 20))
    watch = MemoryWatch(CPU)
    mapped = torch.from_file(str(path), size=32 << 20, dtype=torch.uint8)
    assert mapped[::4096].sum() == 0  # reads every page
    assert watch.peak() < 8 << 20


def strict(text: str):
    """Read JSON as other programs do, to which NaN is none."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_numbers_that_are_not_finite_are_null_and_come_back():
    facts = {"a.b": [1.5, {"c": math.inf}], "d": -math.inf, "e": None, "f": {"g": "nan"}}
    text = to_json(facts)
    assert strict(text) == {
        "a.b": [1.5, {"c": None}], "d": None, "e": None, "f": {"g": "nan"},
        "not_finite": {"a.b.1.c": "inf", "d": "-inf"},
    }  # fmt: skip
    assert from_json(text) == facts
    assert math.isnan(from_json(to_json({"x": math.nan}))["x"])
    assert to_json({"x": 1}) == '{"x": 1}'


def test_the_log_is_json_whatever_an_evaluation_finds(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.write(1, **{"eval/loss": 2.0, "eval/auc": math.nan})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict(line)["eval/auc"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["eval/auc"])
    assert math.isnan(last_logged(tmp_path, "eval/auc")[1])


def test_a_line_cut_short_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
    with pytest.raises(FileNotFoundError, match="not a run"):
        read_metrics(tmp_path / "nowhere")


def test_a_damaged_line_is_dropped_alone_and_that_is_said(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in range(1, 5)]
    path.write_text("\n".join([lines[0], '{"st', *lines[1:], '{"step": 5, "lo']))
    RunLog(tmp_path, resume_step=3, tensorboard=False).close()
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert f"{path}: drops 1 of 6 lines, as damaged ones" in caplog.text
    caplog.clear()
    RunLog(tmp_path, resume_step=2, tensorboard=False).close()
    assert not caplog.text


def test_the_last_value_is_found_at_the_end_of_a_long_log(tmp_path):
    assert last_logged(tmp_path, "loss") is None
    lines = [json.dumps({"step": k, "loss": k / 2, "much": "x" * 100}) for k in range(2000)]
    lines += [json.dumps({"step": 1999, "eval/loss": 3.0}), '{"step": 20']  # cut short
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert last_logged(tmp_path, "loss") == (1999, 999.5)
    assert last_logged(tmp_path, "eval/loss") == (1999, 3.0)
    assert last_logged(tmp_path, "accuracy") is None


def test_a_log_that_is_removed_begins_anew_and_a_folder_that_is_gone_ends_the_run(tmp_path, caplog):
    log = RunLog(tmp_path / "run")
    log.write(1, loss=1.0)
    log.path.unlink()
    log.write(2, loss=2.0)
    assert f"{log.path} was removed while the run goes on" in caplog.text
    assert [line["step"] for line in read_metrics(log.path.parent)] == [2]
    log.path.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="run is gone: it was removed or renamed while the"):
        log.write(3, loss=3.0)
    log.close()
    assert not log.path.parent.exists()


@pytest.mark.parametrize(
    ("width", "shown"), [(79, "573 tokens/s, -"), (99, "457 MiB, -"), (130, "457 MiB, -")]
)
def test_figures_that_have_no_room_are_left_out_whole(width, shown):
    drawn = drawn_bar(width, "dense", total=60, completed=6)
    assert shown in drawn
    assert "…" not in drawn


def test_where_there_is_little_room_steps_and_time_stay():
    drawn = drawn_bar(60, "compressed", total=260, completed=140)
    assert "140/260" in drawn
    assert "left" in drawn


def drawn_bar(width, title, **steps):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with progress_bar(console=console) as bar:
        figures = "loss 8.3710, 8.96 steps/s, 573 tokens/s, peak 457 MiB,"
        bar.add_task(title, **steps, figures=figures)
    return out.getvalue()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "x"}', '{"step": null}', '{"not_finite": 5, "x": null}', "[" * 10**5,
        '{"step": ' + "9" * 5000 + "}", '{"loss": 1.0}', "\0\0",
    ],
)  # fmt: skip
def test_a_damaged_line_ends_a_log_and_is_dropped(line, tmp_path):
    whole = '{"step": 1, "loss": 2.0}'
    (tmp_path / "metrics.jsonl").write_text(f"{whole}\n{line}\n")
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    log = RunLog(tmp_path, resume_step=1, tensorboard=False)
    log.write(2, loss=1.0)
    log.close()
    assert [each["step"] for each in read_metrics(tmp_path)] == [1, 2]
