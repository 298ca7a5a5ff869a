import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comera
from comera.report.front import Width, heads_of, plan_variants, rows_for, table_settings
from comera.report.front_work import round_to_8_bits_, side_by_side
from comera.shapes import TTMShape

ROWS, WORDS = 400, 6


class Bag(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(ROWS, width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU())
        self.out = nn.Linear(4 * width, 5)

    def forward(self, words):
        return self.out(self.body(self.table(words).mean(1)))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def data():
    draw = torch.Generator().manual_seed(0)
    classes = torch.randn(ROWS, 5, generator=draw)
    words = torch.randint(ROWS, (30, 64, WORDS), generator=draw)
    return [(each, classes[each].mean(1).argmax(1)) for each in words]


def evaluate_on(batches):
    return lambda model: sum(float(loss_fn(model, batch)) for batch in batches) / len(batches)


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    found = comera.front(
        Bag, loss_fn, data[:20], evaluate_on(data[20:25]), test=evaluate_on(data[25:]),
        widths=[64, 16], seconds=0.2, sizes=1, rates=(1.0,), seeds=(0, 1), folder=folder,
        progress=False,
    )  # fmt: skip
    return found, folder


@pytest.mark.slow
def test_each_family_is_trained_and_the_answer_comes_first(made):
    found, folder = made
    names = [point.name for point in found.points]
    assert names == [
        "given", "narrower-16", "low-rank-4x", "blocks-rank-2", "trains-8x", "table-16",
        "fewer-words-16", "given-to-50%", "given-8-bits",
    ]  # fmt: skip
    assert not found.left_out
    assert str(found).startswith("Best: ")
    by_name = {point.name: point for point in found.points}
    for point in found.points:
        assert point.seeds == 2
        assert point.error > 0
        files = sorted(folder.glob(f"{point.name}/rate-{point.rate:g}/*/trained.json"))
        tests = [json.loads(file.read_text())["test"] for file in files]
        assert point.quality == pytest.approx(sum(tests) / 2)
    given, narrow = by_name["given"], by_name["narrower-16"]
    assert given.params == sum(p.numel() for p in Bag(64).parameters())
    assert (given.rate, narrow.rate) == (0.032 / 8, 0.032 / 4)  # it falls with the width
    assert narrow.steps > given.steps
    assert by_name["given-to-50%"].params <= given.params / 2
    assert given.bytes / 4 < by_name["given-8-bits"].bytes < given.bytes / 3.5
    assert by_name["given-8-bits"].memory is None
    assert abs(by_name["fewer-words-16"].params - by_name["table-16"].params) < 16
    assert all(p.memory > 0 and p.forward_seconds > 0 for p in found.points if p.steps and p.memory)


@pytest.mark.slow
def test_the_same_call_trains_nothing_again_and_more_of_it_is_added(made, data):
    found, folder = made
    files = {file: file.stat().st_mtime_ns for file in folder.rglob("trained.json")}
    again = comera.front(
        Bag, loss_fn, data[:20], evaluate_on(data[20:25]), test=evaluate_on(data[25:]),
        widths=[64, 32, 16], seconds=0.2, sizes=1, rates=(1.0,), seeds=(0, 1), folder=folder,
        variants=["narrower"], progress=False,
    )  # fmt: skip
    assert [point.name for point in again.points] == ["given", "narrower-32", "narrower-16"]
    assert all(file.stat().st_mtime_ns == at for file, at in files.items())
    assert again.points[-1].quality == pytest.approx(found.points[1].quality)
    with pytest.raises(ValueError, match=r"holds a front of seconds=0\.2: name another folder"):
        comera.front(Bag, loss_fn, data, evaluate_on(data), widths=[64], seconds=1, folder=folder)
    with pytest.raises(ValueError, match="holds a front of lr="):
        comera.front(
            Bag, loss_fn, data, evaluate_on(data), widths=[64], seconds=0.2, lr=1.0, folder=folder
        )


@pytest.mark.slow
def test_a_trained_model_can_be_loaded(made, data):
    found, folder = made
    point = next(point for point in found.points if point.name == "trains-8x")
    place = folder / "trains-8x" / f"rate-{point.rate:g}" / "seed-1"
    assert str(place.parent.parent) in point.trains_on
    model = comera.load_model(place, lambda: Bag(64)).eval()
    with torch.no_grad():
        loss = evaluate_on(data[25:])(model)
    assert loss == pytest.approx(json.loads((place / "trained.json").read_text())["test"], rel=1e-5)
    assert "cut" not in point.note
    shapes = [core.shape for core in model.body[0].cores]
    dense = 64 * 256
    assert sum(shape.numel() for shape in shapes) <= dense / 8 + 1  # a quarter, half of it cut


@pytest.mark.slow
@pytest.mark.parametrize("name", ["given", "trains-8x", "fewer-words-16", "given-to-50%"])
def test_a_model_is_loaded_by_its_name(name, made, data):
    found, folder = made
    point = next(point for point in found.points if point.name == name)
    model = found.load(name).eval()
    place = folder / name / f"rate-{point.rate:g}" / "seed-0"
    with torch.no_grad():
        loss = evaluate_on(data[25:])(model)
    assert loss == pytest.approx(json.loads((place / "trained.json").read_text())["test"], rel=1e-5)


@pytest.mark.slow
def test_another_task_is_not_taken_for_the_one_in_the_folder(made, data):
    _, folder = made

    def call(**changes):
        given = {"loss_fn": loss_fn, "batches": data[:20], "evaluate": evaluate_on(data[20:25])}
        comera.front(Bag, **given | changes, widths=[64], seconds=0.2, folder=folder)

    other = [(words.flip(0), classes) for words, classes in data]
    for changes, said in [
        ({"loss_fn": lambda m, b: 2 * loss_fn(m, b)}, "had loss 1.* and this one has 3"),
        ({"batches": other}, "had loss"),
        ({"evaluate": lambda model: 123.0}, "had quality .* and this one has 123"),
    ]:
        with pytest.raises(ValueError, match=f"holds a front of another task: .*{said}"):
            call(**changes)


@pytest.mark.slow
def test_what_fails_is_named_and_the_others_go_on(data, tmp_path):
    def bad(model, batch):
        loss = loss_fn(model, batch)
        return loss * float("nan") if len(model.table.weight) < ROWS else loss

    def evaluate(model):
        if isinstance(model.body[0], comera.BTTLinear):
            raise RuntimeError("no blocks here")
        return evaluate_on(data[20:22])(model)

    found = comera.front(
        Bag, bad, data[:20], evaluate, widths=[64, 16], seconds=0.1, sizes=1, rates=(1.0,),
        folder=tmp_path, progress=False,
        variants=["narrower", "blocks", "fewer-words", "compressed-after"],
    )  # fmt: skip
    assert [point.name for point in found.points] == ["given", "narrower-16", "given-to-50%"]
    assert "the loss is nan" in found.left_out["fewer-words-16"].lower()
    assert found.left_out["blocks-rank-2"] == "blocks-rank-2: RuntimeError: no blocks here"
    assert "left out: blocks-rank-2: RuntimeError" in str(found)
    assert "no blocks here" in next(tmp_path.glob("blocks-rank-2/*/*/log.txt")).read_text()


@pytest.mark.slow
def test_it_runs_in_this_process_where_none_can_be_forked(data, tmp_path, monkeypatch):
    monkeypatch.setattr("comera.report.front_work.can_fork", lambda device: False)
    monkeypatch.setattr(os, "fork", None)
    found = comera.front(
        lambda: Bag(32), loss_fn, data[:20], evaluate_on(data[20:]), seconds=0.1, rates=(1.0,),
        variants=["low-rank", "narrower"], sizes=1, folder=tmp_path, progress=False,
    )  # fmt: skip
    assert [point.name for point in found.points] == ["given", "low-rank-4x"]
    assert "widths=[...] names none" in found.left_out["narrower"]


def test_layers_that_no_variant_changes_are_named():
    model = nn.Sequential(nn.Embedding(100, 32), nn.LSTM(32, 64), nn.Linear(64, 100))
    width = Width("32", 32)
    _, left_out = plan_variants(["low-rank"], 1, [width], lambda key: model, lambda *_: "")
    assert left_out == {
        "layers": "25,088 of 34,788 parameters, of LSTM: variants change linear layers and tables"
    }


def test_wrong_arguments_are_refused_before_anything_is_trained(data, tmp_path):
    def call(**changes):
        given = {"make_model": Bag, "loss_fn": loss_fn, "batches": data, "widths": [16]}
        given |= {"evaluate": evaluate_on(data), "folder": tmp_path / "front"} | changes
        return comera.front(**given)

    for changes, kind, said in [
        ({"evaluate": None}, TypeError, "evaluate=None must be a function"),
        ({"variants": ["bloks"]}, ValueError, "'bloks', which is no family: did you mean blocks"),
        ({"variants": "table,bloks"}, ValueError, "'bloks', which is no family: did you mean"),
        ({"make_model": Bag(16)}, TypeError, r"is a model: .* makes one, such as lambda: Bag\("),
        ({"widths": [16, 32]}, ValueError, r"the largest: make_model\(32\) has [\d,]+ parameters"),
        ({"loss_fn": lambda model, batch, more: 0}, TypeError, "argument: 'more'"),
        ({"variants": ["shallower"]}, ValueError, "widths may hold what makes"),
        ({"seconds": 0}, ValueError, "seconds=0 must be above 0"),
        ({"rates": []}, ValueError, r"rates=\[\] must hold one at least"),
        ({"seeds": [-1]}, ValueError, r"seeds\[0\]=-1"),
        ({"sizes": 0}, ValueError, "sizes=0"),
        ({"batches": []}, ValueError, "batches is empty"),
        ({"batches": iter(data)}, TypeError, "can be read once"),
        ({"make_model": lambda width: 3}, TypeError, "returned 3, which is no module"),
    ]:
        with pytest.raises(kind, match=said):
            call(**changes)
    assert not list(tmp_path.rglob("trained.json"))


def test_tables_of_fewer_rows_have_as_many_numbers_as_their_conversion():
    model = Bag(16)
    settings = table_settings(model)
    rows = rows_for(settings, model)
    small = comera.tensorize_(Bag(16), settings)
    numbers = sum(p.numel() for p in small.table.parameters())
    assert 0 <= numbers - 16 * rows < 16
    assert isinstance(small.table.shape, TTMShape)
    assert small.table.hot_rows == ROWS // 20
    assert table_settings(nn.Sequential(nn.Embedding(10, 4), nn.Linear(400, 400))) is None


def test_output_layers_over_the_rows_of_a_table_stay_dense():
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 64), nn.Linear(64, 300))
    assert heads_of(model) == ["2"]


def test_eight_bits_round_each_row_by_its_own_scale():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 6), nn.LayerNorm(6))
    with torch.no_grad():
        model[0].weight[3] *= 1e4
        model[0].weight[4] = 0
    before = model[0].weight.clone()
    size = round_to_8_bits_(model)
    assert size == 20 * 6 + 2 * 6 + 4 * 6 + 2 * 4 * 6
    scale = before.abs().amax(1, keepdim=True) / 127
    assert ((model[0].weight - before).abs() <= scale / 2 * 1.0001).all()
    assert len(model[0].weight[0].unique()) > 10


def test_a_process_that_dies_is_named(tmp_path):
    def dies():
        os._exit(7)

    def ends():
        (tmp_path / "b" / "trained.json").write_text("{}")

    ended = []
    work = {tmp_path / "a": dies, tmp_path / "b": ends}
    problems = side_by_side(work, 2, ended.append)
    assert problems == {tmp_path / "a": "its process ended with exit code 7"}
    assert sorted(ended) == [tmp_path / "a", tmp_path / "b"]
    assert side_by_side({tmp_path / "b": dies}, 2, ended.append) == {}


@pytest.mark.slow
def test_an_interrupted_front_goes_on_from_its_steps(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, comera, torch
            from torch import nn
            torch.manual_seed(0)
            data = [(torch.randn(32, 64), torch.randn(32, 8)) for _ in range(8)]
            def make(width):
                return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))
            def loss_fn(model, batch):
                return nn.functional.mse_loss(model(batch[0]), batch[1])
            found = comera.front(
                make, loss_fn, data, lambda model: float(loss_fn(model, data[0])), widths=[128, 64],
                seconds=float(sys.argv[1]), rates=[1.0], variants=["narrower"], folder=sys.argv[2],
            )
            print(len(found.points), found.interrupted)
            """
        )
    )
    words = [sys.executable, str(script), "3", str(tmp_path / "front")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    logs = tmp_path / "front"
    while len(list(logs.rglob("metrics.jsonl"))) < 1 and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "0 True"
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2 False"
    assert any("going on after step" in log.read_text() for log in logs.rglob("log.txt"))
