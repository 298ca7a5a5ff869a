"""What can be done with a finished run: loaded, evaluated, asked, exported, trained on."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import comera
from comera.data.clicks import Clicks
from comera.data.text import TextStreams
from comera.planning import machine
from comera.recipes.cli import main
from comera.recipes.tasks.task import task_of
from comera.recipes.trained import predictions
from comera.train.log import read_metrics
from tests.data.test_clicks import table
from tests.data.test_nli import pairs, write_snli
from tests.peers import peer
from tests.texts import write_functions

pytestmark = pytest.mark.slow  # runs are trained first

SETTINGS = """
model: {d_model: 16, num_layers: 1, num_heads: 2, ffn_dim: 32}
dlrm: {embedding_dim: 4, bottom: [8], top: [8]}
tensorize: {rank: 4, embedding_rank: 4, order: 2}
optimizer: {gate_lr: 0.05}
train: {steps: 30, batch_size: 8, eval_batches: 3, save_every: 10, log_every: 5}
"""
TASKS = {
    "masked": "masked_text: {folder: text, vocab_size: 300, length: 16, heldout: 0.3, test: 0.2}\n"
    "two_stage: {target: 0.7}\ntwin: true\n",
    "causal": "causal_text: {folder: text, vocab_size: 300, length: 16, heldout: 0.2}\n",
    "pairs": "nli: {train: train.jsonl, dev: dev.jsonl, test: dev.jsonl, vocab_size: 120}\n",
    "clicks": "clicks: {file: clicks.csv, label: rating, continuous: [age], test: 0.2}\n",
}
INPUTS = {
    "masked": (torch.full((3, 9), 7), torch.ones(3, 2, dtype=torch.int64)),
    "causal": (torch.full((3, 9), 7),),
    "pairs": (torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.int64)),
    "clicks": (torch.zeros(3, 1), torch.zeros(3, 2, dtype=torch.int64)),
}
"""Of other sizes than those that a program was exported with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One finished run of each task, and what it was trained on."""
    folder = tmp_path_factory.mktemp("runs")
    write_functions(folder / "text", 8, 40)
    write_snli(folder / "train.jsonl", pairs(60))
    write_snli(folder / "dev.jsonl", pairs(30, seed=1))
    table(200)[["rating", "user", "city", "age"]].to_csv(folder / "clicks.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMERA_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        for name, task in TASKS.items():
            Path(f"{name}.yaml").write_text(f"out: runs/{name}\n{task}{SETTINGS}")
            assert main(["train", f"{name}.yaml"]) == 0
        yield folder


def logits_of(run, name):
    model, inputs = run.model, INPUTS[name]
    with torch.no_grad():
        return model(*inputs)


@pytest.mark.parametrize("name", TASKS)
def test_a_run_is_loaded_without_its_data(folder, name, tmp_path, monkeypatch):
    shutil.copytree(folder / "runs" / name, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    run = comera.load_run("moved")
    assert not run.model.training
    assert run.result["steps"] == run.config.train.steps == 30
    state = load_file(tmp_path / "moved/model.safetensors")
    assert all(torch.equal(value, state[key]) for key, value in run.model.state_dict().items())
    assert sum(param.numel() for param in run.model.parameters()) == run.result["params"]
    logged = run.metrics["loss"].dropna()
    assert logged.index[-1] == 30
    assert float(logged.iloc[-1]) == read_metrics(tmp_path / "moved")[-2]["loss"]
    assert (run.tokenizer is None) == (name == "clicks")
    first, model, trained, evaluation, *test = str(run).splitlines()
    assert first == "run in moved"
    assert model == f"model: {type(run.model).__name__}, {run.result['params']:,} parameters"
    assert trained.startswith("trained: 30 steps in ")
    assert f"loss {run.result['metrics']['loss']:.4f}" in evaluation
    assert len(test) == bool(run.result["test"])


def test_the_vocabulary_is_the_one_of_the_tokens(folder):
    run = comera.load_run(folder / "runs/causal")
    text = "def f(x):\n    return x + 1\n"
    ids = run.tokenizer.encode(text).ids
    assert run.tokenizer.decode(ids) == text
    streams = TextStreams.prepare(run.config.causal_text)
    first = streams.train[:200].tolist()
    assert run.tokenizer.encode(run.tokenizer.decode(first)).ids == first


def test_a_causal_run_ends_a_line_that_was_held_out(folder):
    run = comera.load_run(folder / "runs/causal")
    streams, task = TextStreams.prepare(run.config.causal_text), task_of(run.config)
    task.vocabulary, given = run.tokenizer, run.tokenizer.decode(streams.valid[:16].tolist())
    line, end = run.result["completion"]
    assert given.rpartition("\n")[2] == line
    whole = task.predict(run.model, given, 32)["text"] + "\n"
    assert whole.startswith(f"{given}{end}\n")
    assert comera.load_run(folder / "runs/pairs").result["completion"] is None


def test_a_twin_is_loaded_if_there_is_one(folder):
    run = comera.load_run(folder / "runs/masked", twin=True)
    assert not any(isinstance(m, comera.TTLinear) for m in run.model.modules())
    with pytest.raises(FileNotFoundError, match=r"holds no dense twin: .* without twin: true"):
        comera.load_run(folder / "runs/causal", twin=True)


def test_what_is_no_finished_run_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run of comera train"):
        comera.load_run(tmp_path)
    shutil.copytree(folder / "runs/causal", tmp_path / "run")
    (tmp_path / "run/result.json").write_text('{"metrics": {')
    with pytest.raises(ValueError, match=r"result\.json is damaged"):
        comera.load_run(tmp_path / "run")
    (tmp_path / "run/result.json").write_text('{"metrics": {}}')
    with pytest.raises(ValueError, match="does not say how large the model is"):
        comera.load_run(tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    with pytest.raises(ValueError, match="is not finished"):
        comera.load_run(tmp_path / "run")


@pytest.mark.parametrize("name", TASKS)
def test_an_evaluation_finds_what_was_noted(folder, name, capsys, caplog):
    machine.load_machine.cache_clear()
    caplog.set_level(logging.INFO, logger="comera")
    assert main(["evaluate", f"runs/{name}"]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    found = {cells[0].strip(): [float(cell) for cell in cells[1:]] for cells in rows}
    assert "no profile of this machine" not in caplog.text
    tested = name != "causal"
    assert any(key.startswith("test ") for key in found) == tested
    for values in found.values():
        assert len(values) == (4 if name == "masked" else 2)
        assert values[0] == pytest.approx(values[1], abs=2e-4)


def test_other_data_are_not_evaluated(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "text", tmp_path / "text")
    shutil.copytree(folder / "runs/causal", tmp_path / "run")
    changed = next((tmp_path / "text").iterdir())
    changed.write_text(changed.read_text() + "# more\n")
    settings = tmp_path / "run/config.yaml"
    settings.write_text(settings.read_text().replace(str(folder / "text"), str(tmp_path / "text")))
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "run"]) == 1
    assert "/text are not those that run was trained on (" in capsys.readouterr().err


def test_data_that_have_moved_are_evaluated_where_they_are_now(folder, tmp_path, capsys):
    settings = tmp_path / "run/config.yaml"
    shutil.copytree(folder / "runs/pairs", settings.parent)
    here = tmp_path / "elsewhere"
    here.mkdir()
    for name in ("train", "dev"):
        shutil.copy(folder / f"{name}.jsonl", here)
    settings.write_text(settings.read_text().replace(str(folder), str(tmp_path / "gone")))
    command = ["evaluate", str(tmp_path / "run")]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "if it is elsewhere now, give its new place, --set='[nli.train=...]'" in said
    moved = f"nli.train={here}/train.jsonl,nli.dev={here}/dev.jsonl,nli.test={here}/dev.jsonl"
    assert main([*command, f"--set=[{moved}]"]) == 0
    assert f"data: {moved.replace(',', ', ')}\n" in capsys.readouterr().out
    swapped = moved.replace("/train.jsonl", "/train2.jsonl")
    (here / "train2.jsonl").write_text((here / "dev.jsonl").read_text())
    assert main([*command, f"--set=[{swapped}]"]) == 1
    assert "are not those that" in capsys.readouterr().err
    assert main([*command, "--set=[nli.length=9]"]) == 1
    assert "nli.length does not say where data of this run are" in capsys.readouterr().err


LINES = {
    "masked": "def [MASK](x): return [MASK]",
    "causal": "def f(",
    "pairs": "a man sleeps\tnobody is awake",
}


@pytest.mark.parametrize("name", LINES)
def test_predictions_are_a_line_of_json_each(folder, name, capsys):
    Path("lines.txt").write_text(f"{LINES[name]}\n" * 2)
    assert main(["predict", f"runs/{name}", "lines.txt", "--tokens=5"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == second
    if name == "pairs":
        assert first["probabilities"][first["label"]] == max(first["probabilities"].values())
        assert sum(first["probabilities"].values()) == pytest.approx(1, abs=1e-3)
    elif name == "masked":
        assert [len(mask) for mask in first["masks"]] == [5, 5]
        likely = [word["probability"] for word in first["masks"][0]]
        assert likely == sorted(likely, reverse=True)
    else:
        assert first["text"].startswith("def f(")
        assert len(first["text"]) > len("def f(")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("masked", "no mask", "line 1: 'no mask' has no [MASK]"),
        ("pairs", "one sentence", "line 1: 'one sentence' must be a premise, a tab and a"),
        ("causal", "", "line 1: there is no text to go on from"),
        ("clicks", "x", "line 1: 'x' must be a JSON object"),
        ("clicks", "{}", "line 1: 'user' is missing: a row has user, city, and may have age"),
    ],
)
def test_a_line_that_is_something_else_is_named(folder, name, line, message, capsys):
    Path("lines.txt").write_text(f"{line}\n")
    assert main(["predict", f"runs/{name}", "lines.txt"]) == 1
    assert message in capsys.readouterr().out.replace("\n", " ")


def test_a_line_of_other_bytes_is_named_and_the_others_are_answered(folder, capsys):
    line = LINES["pairs"].encode()
    Path("lines.txt").write_bytes(line + b"\n\xff" + line + b"\n" + line + b"\n")
    assert main(["predict", "runs/pairs", "lines.txt"]) == 1
    one, two, three = map(json.loads, capsys.readouterr().out.splitlines())
    assert one == three
    assert two["error"].startswith("line 2: b'\\xffa man sleeps")
    assert main(["predict", "runs/pairs", "/dev/null"]) == 0
    assert main(["predict", "runs/pairs", "runs"]) == 1
    assert "runs: Is a directory" in capsys.readouterr().err


def test_a_mark_before_the_first_line_is_none_of_its_text(folder, monkeypatch, capsys):
    lines = "".join(f"{LINES['pairs']}\n" * 2).encode("utf-8-sig")
    Path("lines.txt").write_bytes(lines)
    assert main(["predict", "runs/pairs", "lines.txt"]) == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert main(["predict", "runs/pairs"]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == 1
    row = json.dumps({"user": "nobody", "city": "Ulm"})
    Path("rows.jsonl").write_text(row, encoding="utf-8-sig")
    assert main(["predict", "runs/clicks", "rows.jsonl"]) == 0


def test_a_click_is_predicted_from_the_values_of_its_row(folder, capsys):
    frame = pd.read_csv("clicks.csv", dtype={"user": str})
    rows = frame[["user", "city", "age"]].to_dict("records")
    rows[1]["age"] = None
    rows.append({"user": "nobody", "city": "Ulm"})
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["predict", "runs/clicks", "rows.jsonl"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    run = comera.load_run("runs/clicks")
    data = Clicks.prepare(run.config.clicks)
    every = data._rows(np.arange(200))
    with torch.no_grad():
        wanted = run.model(every["continuous"], every["fields"]).sigmoid()
        run.model.top[-1].bias.sub_(9)
        rare = run.model(every["continuous"], every["fields"])[0].sigmoid()
    assert found[0]["probability"] == pytest.approx(float(wanted[0]), abs=6e-5)
    for k in range(2, 200):
        assert found[k]["probability"] == pytest.approx(float(wanted[k]), abs=6e-5)
    assert "user" in found[200]["unknown"]
    (again,) = predictions(run, [json.dumps(rows[0])], 0)
    assert again["probability"] == pytest.approx(float(rare), rel=1e-3)


def test_a_run_of_clicks_that_kept_no_categories_is_named(folder, tmp_path, capsys):
    shutil.copytree("runs/clicks", tmp_path / "run")
    (tmp_path / "run/categories.safetensors").unlink()
    Path("lines.txt").write_text("{}\n")
    assert main(["predict", str(tmp_path / "run"), "lines.txt"]) == 1
    assert "comera train writes it again" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run")]) == 0
    Path("lines.txt").write_text('{"user": "nobody", "city": "Ulm"}\n')
    assert main(["predict", str(tmp_path / "run"), "lines.txt"]) == 0


RUN = """
import sys, torch
for name in sys.argv[1:]:
    program = torch.export.load(f"{name}.pt2").module()
    torch.save(program(*torch.load(f"{name} inputs.pt")), f"{name} outputs.pt")
assert not any(name.startswith("comera") for name in sys.modules)
"""


def test_exported_programs_run_without_this_package(folder, tmp_path):
    for name in TASKS:
        if name == "clicks":  # whose column is alone
            said = exported("clicks", tmp_path / "clicks.pt2")
            assert said.startswith("wrote a program of torch.export")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert main(["export", f"runs/{name}", str(tmp_path / f"{name}.pt2")]) == 0
        torch.save(INPUTS[name], tmp_path / f"{name} inputs.pt")
    subprocess.run([sys.executable, "-c", RUN, *TASKS], check=True, cwd=tmp_path)
    for name in TASKS:
        found = torch.load(tmp_path / f"{name} outputs.pt")
        wanted = logits_of(comera.load_run(folder / "runs" / name), name)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def exported(name: str, path: Path) -> str:
    """Export a run as from a shell, with no more said on the way than what became of the layers."""
    words = [sys.executable, "-m", "comera", "export", f"runs/{name}", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(comera.__file__).parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    (line,) = done.stderr.splitlines()
    assert line.startswith("contracted ")
    return done.stdout


def test_a_graph_of_onnx_computes_the_same(folder, tmp_path):
    peer("onnxscript")
    onnxruntime = peer("onnxruntime")
    run = comera.load_run(folder / "runs/pairs")
    assert exported("pairs", tmp_path / "model.onnx").startswith("wrote a graph of ONNX")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    names = [given.name for given in session.get_inputs()]
    inputs = {n: x.numpy() for n, x in zip(names, INPUTS["pairs"], strict=True)}
    (found,) = session.run(None, inputs)
    expected = logits_of(run, "pairs")
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_dense_weights_are_those_of_the_dense_model(folder, tmp_path, capsys):
    assert main(["export", "runs/causal", str(tmp_path / "dense.safetensors")]) == 0
    run = comera.load_run(folder / "runs/causal")
    expected = logits_of(run, "causal")
    dense = comera.densify_(run.model)
    dense.load_state_dict(load_file(tmp_path / "dense.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(dense(*INPUTS["causal"]), expected, rtol=1e-4, atol=1e-5)
    assert main(["export", "runs/causal", str(tmp_path / "model.bin")]) == 1
    assert "must end in one of .pt2" in capsys.readouterr().err


def test_names_in_brackets_are_shown(tmp_path, monkeypatch, capsys):
    run = tmp_path / "[old] runs/[a] b"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("train: {steps: 5}\n")
    (run / "[my] notes").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["list", "[old] runs"]) == 0
    said = capsys.readouterr().out
    assert "runs in [old] runs" in said
    assert "│ [a] b │" in said
    assert main(["list", "[old] runs/[a] b"]) == 0
    said = capsys.readouterr().out
    assert "the run in [old] runs/[a] b" in said
    assert "│ [my] notes" in said


def test_runs_and_their_files_are_listed(folder, capsys):
    assert main(["list"]) == 0
    rows = capsys.readouterr().out
    for name in TASKS:
        assert name in rows
    assert rows.count("30 of 30") == rows.count("finished") == len(TASKS)
    assert main(["list", "runs/masked"]) == 0
    files = capsys.readouterr().out
    for path in (folder / "runs/masked").iterdir():
        assert path.name in files or path.name == ".lock"
    assert "not written by comera train" not in files
    assert main(["list", "cache"]) == 1
    assert "cache holds no run of comera train" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["masked", "causal"])
def test_a_finished_run_is_trained_on(folder, name, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    shutil.copytree(f"runs/{name}", f"runs/{name} on")
    words = ["train", f"{name}.yaml", f"--out=runs/{name} on"]
    first = read_metrics(Path(f"runs/{name} on"))
    assert main([*words, "--train.steps=45"]) == 0
    said = capsys.readouterr().out
    assert "is trained for longer than it was to be" in " ".join(said.split())
    run = comera.load_run(f"runs/{name} on")
    assert run.result["steps"] == run.config.train.steps == 45
    lines = read_metrics(Path(f"runs/{name} on"))
    assert lines[: len(first)] == first
    assert [line["step"] for line in lines if "loss" in line][-3:] == [35, 40, 45]
    rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert rates[35] > rates[30]  # where the schedule of 45 steps is
    if name == "masked":
        assert comera.load_run(f"runs/{name} on", twin=True).result["steps"] == 45
        before = comera.load_run("runs/masked").result["params"]
        assert run.result["params"] == before  # ranks were learned and stay
    assert main([*words, "--train.steps=45"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert main([*words, "--train.steps=40"]) == 1
    assert "other settings (train.steps: 45 -> 40" in capsys.readouterr().err.replace("\n", " ")
