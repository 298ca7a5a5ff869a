import dataclasses
import importlib
import inspect
import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import comera
from comera.data.clicks import ClickData
from comera.data.nli import LABELS, NliData
from comera.data.text import TextData
from comera.nn.convert import tensorize_
from comera.nn.module import tensor_trains
from comera.nn.targets import TTConfig
from comera.ops.linear.fp8 import why_not_fp8
from comera.recipes import chains
from comera.recipes.cli import main
from comera.recipes.optimizers import OPTIMIZERS, MuonConfig
from comera.recipes.parse import hints_of, read_yaml, section_of, wanted
from comera.recipes.report.run_report import gather
from comera.recipes.run import _rate, build_step, make_model, plan, planned_memory, run
from comera.recipes.run_config import (
    DlrmConfig,
    ImportancePruningConfig,
    ModelConfig,
    RunConfig,
    SmallTablesConfig,
    TrainConfig,
    TwoStageConfig,
)
from comera.recipes.tasks.task import prepare_task, task_of
from comera.recipes.trained import predictions
from comera.train.log import read_metrics
from comera.train.loop import SILENT
from tests.data.test_nli import pairs, write_snli
from tests.texts import write_functions

_ONE_SECTION = "exactly one of the sections masked_text, causal_text, nli and clicks"
CONFIGS = [
    path
    for path in sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
    # Those are many runs: see test_sweep.py and test_reproduce.py.
    if not path.stem.endswith("-sweep") and path.parent.name != "reproduce"
]


@pytest.fixture
def config(tmp_path, monkeypatch) -> RunConfig:
    """A run of a few seconds on a little text."""
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    write_functions(text, 10, 60)
    return RunConfig(
        out=str(tmp_path / "run"),
        masked_text=TextData(str(text), vocab_size=320, length=24, heldout=0.2),
        model=ModelConfig(d_model=32, num_layers=1, num_heads=2, ffn_dim=64),
        tensorize=TTConfig(rank=8, embedding_rank=8, order=2),
        two_stage=TwoStageConfig(target=0.6),
        optimizer=MuonConfig(lr=3e-3, gate_lr=0.05),
        train=TrainConfig(steps=50, batch_size=8, eval_batches=4, save_every=20),
        twin=True,
    )


def quiet_run(config):
    return run(config, Console(quiet=True), quiet=True)


def test_a_run_ends_small_and_beside_its_twin(config):
    compressed, dense = quiet_run(config)
    assert compressed.ranks["size"] <= compressed.ranks["target_size"]
    assert compressed.params < dense.params
    assert compressed.bytes < dense.bytes
    assert compressed.layer_params < compressed.layer_dense_params == dense.layer_params
    assert 0 < compressed.metrics["loss"] < 6
    folder = Path(config.out)
    saved = load_file(folder / "model.safetensors")
    fresh = tensorize_(task_of(config).dense_model({"vocab_size": 320}), config.tensorize)
    fresh.load_state_dict(saved)
    assert sum(p.numel() for p in fresh.parameters()) == compressed.params
    facts = json.loads((folder / "result.json").read_text())
    assert {layer["name"] for layer in facts["layers"]} == set(tensor_trains(fresh))
    assert read_metrics(folder / "dense")[-1]["step"] == 50


@pytest.mark.slow
@pytest.mark.parametrize(("gamma", "answers"), [(0.01, True), (10.0, False)])
def test_a_short_run_that_learns_ranks_answers_or_says_that_it_does_not(
    config, caplog, gamma, answers
):
    optimizer = MuonConfig(name=None, gate_lr=None if answers else 0.125)
    config = dataclasses.replace(
        config, causal_text=config.masked_text, masked_text=None,
        two_stage=TwoStageConfig(gamma=gamma), optimizer=optimizer, twin=False,
        tensorize=TTConfig(rank=8), train=TrainConfig(steps=25, batch_size=8),
    )  # fmt: skip
    quiet_run(config)
    said = [text for text in caplog.messages if "the model answers the same to every" in text]
    assert [text.split(",")[0] for text in said] == (
        [] if answers else ["before its ranks are cut", "after training"]
    )
    gaps = gather(Path(config.out))["gaps"]
    assert any("answers the same to every input: at step 25" in text for text in gaps) != answers


@pytest.mark.parametrize("kind", ["masked_text", "causal_text", "nli", "clicks"])
def test_dead_gates_silence_a_model_and_nothing_else_does(kind):
    """Not of a fresh model; that of clicks, whose logits differ by thousandths, learns first."""
    data = {"masked_text": TextData(), "causal_text": TextData(), "nli": NliData()}
    data["clicks"] = ClickData("absent.csv")
    small = ModelConfig(d_model=32, num_layers=1, num_heads=2, ffn_dim=64)
    task = task_of(
        RunConfig(**{kind: data[kind]}, **({} if kind == "clicks" else {"model": small}))
    )
    sizes = {"vocab_size": 300, "table_sizes": {"user": 900, "item": 900}, "num_continuous": 2}
    torch.manual_seed(0)
    model = tensorize_(task.dense_model(sizes), TTConfig(rank=8)).eval()
    batch = task.drawn_batch(64, sizes)
    task._first_batch = lambda: batch
    if kind == "clicks":
        adam = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(20):
            task.loss(model, batch).backward()
            adam.step()
            adam.zero_grad()
    model.requires_grad_(False)
    assert task.spread(model)["spread"] > 2 * SILENT
    for train in tensor_trains(model).values():
        for gate in train.gates:
            gate.fill_(0.05)
    assert task.spread(model)["spread"] < SILENT


@pytest.mark.parametrize(
    ("steps", "given", "rates"),
    [
        (60, {}, (0.02, 2e-3)),
        (2000, {}, (1.5 / 400, 7e-4)),
        (60, {"lr": 1e-3}, (0.02, None)),
        (60, {"name": "adamw"}, (0.02, 2e-3)),
        (60, {"name": "sgd"}, (0.02, None)),
        (60, {"core_lr": 1e-3}, (0.02, 1e-3)),
        (60, {"gate_lr": 0.1}, (0.1, None)),
    ],
)
def test_cores_keep_up_with_the_gates_of_short_runs(config, steps, given, rates):
    kind = OPTIMIZERS[given.get("name", "muon")]
    short = dataclasses.replace(config, optimizer=kind(**{"name": None} | given))
    found = dataclasses.replace(short, two_stage=TwoStageConfig()).optimizer_for(steps)
    assert (found.gate_lr, found.core_lr) == rates


def test_the_same_command_resumes_or_refuses(config):
    config.twin, config.train.steps = False, 10
    first = quiet_run(config)
    (again,) = quiet_run(dataclasses.replace(config))
    assert again.metrics == first[0].metrics
    other = dataclasses.replace(config, seed=3, optimizer=MuonConfig(lr=1e-3))
    with pytest.raises(ValueError, match=r"other settings \(seed: 0 -> 3, optimizer.lr: 0.003 -> "):
        quiet_run(other)
    (fresh,) = quiet_run(dataclasses.replace(other, overwrite=True))
    assert fresh.metrics != first[0].metrics


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_step_does_not_hold_its_folder(config):
    config.twin, config.train.steps = False, 10
    with pytest.raises(ValueError, match="target"):
        quiet_run(dataclasses.replace(config, two_stage=TwoStageConfig(target=1e-6)))
    (outcome,) = quiet_run(config)
    moved = Path(config.out).rename(Path(config.out).with_name("elsewhere"))
    (again,) = quiet_run(dataclasses.replace(config, out=str(moved)))
    assert again.metrics == outcome.metrics


@pytest.mark.slow
def test_starting_again_leaves_foreign_files_alone(config):
    config.twin, config.train.steps = False, 10
    folder = Path(config.out)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    never_begun = "seed: 5\ndevice: auto\ntrain: {}\noptimizer: {}\ntwin: false\n"
    (folder / "config.yaml").write_text(never_begun)
    quiet_run(config)
    quiet_run(dataclasses.replace(config, seed=3, overwrite=True))
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_seed_is_that_of_parameters_and_of_dropout_which_the_twin_shares(config, monkeypatch):
    train = importlib.import_module("comera.recipes.run").train
    begun = []

    def begin(step, *args, **settings):
        begun.append((next(step.model.parameters()).detach().clone(), torch.get_rng_state()))
        return train(step, *args, **settings)

    monkeypatch.setattr("comera.recipes.run.train", begin)
    short = dataclasses.replace(config, two_stage=None, train=TrainConfig(steps=1, batch_size=2))
    for seed in (1, 2):
        quiet_run(dataclasses.replace(short, seed=seed, out=f"{config.out}-{seed}"))
    (drawn, state), (_, state_of_twin), (others, other), _ = begun
    assert not torch.equal(drawn, others)
    assert not torch.equal(state, other)
    assert torch.equal(state, state_of_twin)


def test_a_dense_run_needs_no_other_section(config):
    (outcome,) = quiet_run(dataclasses.replace(config, tensorize=None, two_stage=None))
    assert outcome.name == "dense"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"masked_text": None},
            _ONE_SECTION,
        ),
        ({"tensorize": None}, "section two_stage needs a section tensorize"),
        ({"train": TrainConfig()}, "exactly one of train.steps, .* as null: not none"),
        (
            {"train": TrainConfig(steps=9, seconds=60)},
            "train.seconds, a length with .* no limit, .*: not steps and seconds",
        ),
        ({"train": TrainConfig(epochs=1)}, "train.epochs needs data with an end"),
        (
            {"two_stage": TwoStageConfig(early_share=0.8, late_share=0.3)},
            "two_stage.late_share=0.3 must be",
        ),
        ({"two_stage": TwoStageConfig(late_share=0)}, "two_stage.late_share=0 must be"),
        (
            {"two_stage": TwoStageConfig(late_share=0.001)},
            "two_stage.late_share=0.001 of 50 steps is no step",
        ),
        ({"two_stage": TwoStageConfig(target=30)}, "two_stage.target=30 must be in"),
        ({"two_stage": TwoStageConfig(gamma=-1.0)}, "two_stage.gamma=-1.0 must be a number of at"),
        (
            {"two_stage": TwoStageConfig(target=0.001)},
            "two_stage.target=0.001 leaves .* the smallest target",
        ),
        (
            {"importance_pruning": ImportancePruningConfig()},
            "give one of the sections two_stage and importance_pruning",
        ),
        *(
            ({"two_stage": None, "importance_pruning": ImportancePruningConfig(**given)}, message)
            for given, message in (
                ({"target": 0}, "importance_pruning.target=0 must be in"),
                ({"target": 0.001}, "importance_pruning.target=0.001 leaves .* smallest target"),
                ({"min_keep": 2}, "importance_pruning.min_keep=2 must be in"),
                ({"share": 0}, "importance_pruning.share=0 must be a share"),
                ({"share": 0.001}, "importance_pruning.share=0.001 of 50 steps is no step"),
            )
        ),
        ({"optimizer": MuonConfig(lr=-1.0)}, "optimizer.lr=-1.0 must be at least 0"),
        ({"optimizer": MuonConfig(warmup_share=2.0)}, "optimizer.warmup_share=2.0 must be"),
        ({"optimizer": MuonConfig(target_modules="x")}, "target_modules='x' names no dense"),
        ({"train": TrainConfig(steps=-3)}, "train.steps=-3 must be at least 1"),
        ({"train": TrainConfig(steps=3, eval_batches=0)}, "train.eval_batches=0 must be at least"),
        ({"train": TrainConfig(steps=3, save_every=-1)}, "train.save_every=-1 must be at least 0"),
        (
            {"train": TrainConfig(epochs=0), "masked_text": None, "nli": NliData()},
            "train.epochs=0 must be above 0",
        ),
        ({"train": TrainConfig(seconds=math.inf)}, "train.seconds=inf has no end"),
        ({"train": TrainConfig(steps=3, clip_norm=0)}, "train.clip_norm=0 must be above 0"),
        (
            {"train": TrainConfig(steps=3, batch_size=4, accumulate=5)},
            "train.accumulate=5 splits a batch into more parts than the train.batch_size=4",
        ),
        ({"model": ModelConfig(dropout=2.0)}, r"model.dropout=2.0 must be in \[0, 1\)"),
        ({"model": ModelConfig(d_model=0)}, "model.d_model=0 must be at least 1"),
        ({"masked_text": TextData(vocab_size=0)}, "masked_text.vocab_size=0 must be at least 261"),
        ({"masked_text": TextData(length=1)}, "masked_text.length=1 must be at least 2"),
        (
            {"masked_text": TextData(max_megabytes=-1)},
            "max_megabytes=-1 must be above 0",
        ),
        ({"masked_text": None, "nli": NliData(length=3)}, "nli.length=3 must be at least 5"),
        ({"dlrm": DlrmConfig(embedding_dim=0)}, "dlrm.embedding_dim=0 must be at least 1"),
        ({"dlrm": DlrmConfig(bottom=[8, 0])}, r"dlrm.bottom=\[8, 0\]: each width must be"),
        (
            {"masked_text": None, "clicks": ClickData("absent.csv", hash_rows=0)},
            "clicks.hash_rows=0 must be at least 2, or null",
        ),
        (
            {"masked_text": None, "clicks": ClickData("absent.csv", min_count=-1)},
            "clicks.min_count=-1 must be at least 1",
        ),
        ({"dlrm": DlrmConfig(small_tables=SmallTablesConfig(params=9))}, "give tensorize=null"),
        ({"device": "gpuu"}, "device='gpuu'"),
        ({"device": "meta"}, "device='meta' holds no numbers"),
        ({"two_stage": TwoStageConfig(target=0)}, r"two_stage.target=0 must be in \(0, 1\]"),
        (
            {"masked_text": TextData(vocab_size=10**10)},
            "=10000000000 is above 16,777,216",
        ),
        (
            {"masked_text": None, "nli": NliData(vocab_size=10**10)},
            "nli.vocab_size=10000000000 must be from 1 to 16,777,216",
        ),
    ],
)
def test_contradicting_settings_are_named_and_nothing_is_lost(config, changes, message):
    there = Path(config.out) / "model.safetensors"
    there.parent.mkdir()
    there.touch()
    with pytest.raises(ValueError, match=message):
        quiet_run(dataclasses.replace(config, **changes, overwrite=True))
    assert there.exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_configuration_can_be_planned(path, capsys):
    assert main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "whole model" in out
    assert ("fewer than dense" in out) == ("two_stage" in read_yaml(path))


@pytest.mark.slow
def test_plan_says_what_a_run_will_end_at(config):
    config.train.steps = 10
    report, planned, target = plan(config)
    assert planned is not None
    assert planned.layers
    compressed, _ = quiet_run(config)
    assert target == compressed.ranks["target_size"]
    assert report.tt_dense_params == compressed.layer_dense_params


@pytest.mark.parametrize("tensorize", [None, TTConfig(rank=8, embedding_rank=8, order=2)])
def test_a_model_is_drawn_on_the_cpu_whatever_the_device(config, tensorize):
    """A device that draws for itself would leave the state of these numbers as it was."""
    config = dataclasses.replace(config, tensorize=tensorize, two_stage=None)
    task = prepare_task(config, torch.device("cpu"))
    states = []
    for device in ("cpu", "meta"):
        torch.manual_seed(config.seed)
        model = make_model(config, task, torch.device(device))
        assert {param.device.type for param in model.parameters()} == {device}
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("tensorize", [None, TTConfig(rank=8, order=2), TTConfig(8, init="svd")])
def test_keys_of_a_run_may_begin_as_its_queries(config, tensorize):
    model = ModelConfig(32, 1, 2, 64, qk_init="same", position_std=0.002)
    config = dataclasses.replace(config, tensorize=tensorize, two_stage=None, model=model)
    made = make_model(
        config, prepare_task(config, torch.device("cpu")), torch.device("cpu")
    ).encoder
    attention = made.blocks[0].attention
    keys = attention.key.state_dict()
    assert keys
    assert all(torch.equal(keys[name], q) for name, q in attention.query.state_dict().items())
    assert float(made.positions.detach().std()) == pytest.approx(0.002, rel=0.1)


def test_positions_that_a_model_has_not_are_named(config):
    text = config.masked_text
    config = dataclasses.replace(
        config, masked_text=None, causal_text=text, model=ModelConfig(position_std=0.006)
    )
    with pytest.raises(ValueError, match=r"position_std=0\.006: the model of causal_text has no"):
        config.check()


def test_settings_of_a_model_that_is_not_trained_are_named(config, caplog):
    planned_memory(config)
    assert "no effect" not in caplog.text
    planned_memory(dataclasses.replace(config, dlrm=DlrmConfig(top=[8])))
    assert (
        "dlrm.top=[8] has no effect: the model of masked_text is described by the section model"
    ) in caplog.text
    dlrm = DlrmConfig(table_sizes={"user": 9, "item": 9})
    model, train = ModelConfig(64, dropout=0.3), TrainConfig(steps=1)
    planned_memory(RunConfig(clicks=ClickData(), dlrm=dlrm, model=model, train=train))
    assert "model.d_model=64, model.dropout=0.3 has no effect: the model of clicks" in caplog.text


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"user": 9, "items": 9}, "table_sizes has items, which is no field .*: did you mean item"),
        ({"user": 9}, "table_sizes has nothing for item: give the rows of every field"),
    ],
)
def test_tables_are_those_of_the_fields(tmp_path, monkeypatch, named, sizes, message):
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "log.csv"
    file.write_text("click,user,item,age\n" + "0,a,b,3\n1,c,d,4\n" * 20)
    fields = ["user", "item"] if named else []
    config = RunConfig(
        str(tmp_path / "run"),
        clicks=ClickData(str(file), label="click", fields=fields, continuous=["age"]),
        dlrm=DlrmConfig(4, [4], [4], table_sizes=sizes),
        train=TrainConfig(steps=1, batch_size=8),
    )
    with pytest.raises(ValueError, match=message):
        plan(config) if named else quiet_run(config)


@pytest.mark.parametrize(
    ("method", "section"),
    [(comera.TwoStage, TwoStageConfig), (comera.ImportancePruning, ImportancePruningConfig)],
)
def test_a_section_has_the_settings_and_defaults_of_its_method(method, section):
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "process_group"
    }
    settings = {name: value for name, value in vars(section()).items() if name in keywords}
    assert settings == keywords
    assert keywords
    others = vars(section()).keys() - keywords.keys()
    assert all(name == "target" or "share" in name for name in others)


def test_a_section_makes_its_method():
    layer = comera.TTLinear(16, 16, rank=4)
    ranks = TwoStageConfig(target=0.7, gamma=0.2, late_share=0.2).build(layer, 10)
    assert (ranks.early_steps, ranks.late_steps, ranks.settings.gamma) == (4, 2, 0.2)
    ranks = ImportancePruningConfig(target=0.7, min_keep=0.1, canonical=False).build(layer, 10)
    assert (ranks.target, ranks.settings.min_keep, ranks.settings.canonical) == (0.7, 0.1, False)
    for _ in range(3):
        assert not ranks.due
        ranks.step(torch.ones(()))
    assert ranks.due


def test_stages_end_with_the_run():
    """Both rounded up they would be longer, and ranks were never cut."""
    assert TwoStageConfig(early_share=0.5, late_share=0.5).stages(7) == (4, 3)


def clocked(config) -> RunConfig:
    """A run of as many seconds as its training steps look at a clock that goes on by one then."""
    return dataclasses.replace(config, train=TrainConfig(seconds=20, batch_size=8, eval_batches=4))


def test_rates_by_the_clock_rise_and_fall_without_a_jump(config):
    config = dataclasses.replace(clocked(config), optimizer=MuonConfig(name=None))
    task = prepare_task(config, torch.device("cpu"))
    step = build_step(make_model(config, task, task.device), config, task)
    step.optimizer.step()  # else torch warns of the order
    groups = {group["name"]: group for group in step.optimizer.param_groups}

    def rates(place):
        step.stand_at_(place)
        return {name: group["lr"] for name, group in groups.items()}

    peak = 7e-4
    shares = [rates(0.25 * k)["dense"] / peak for k in range(4 * 1000 + 1)]
    assert shares[0] == pytest.approx(1 / 50)
    assert max(shares) == pytest.approx(1)
    assert shares[2100] == pytest.approx(0.5, abs=1e-3)
    assert shares[-1] == 0
    assert max(abs(b - a) for a, b in itertools.pairwise(shares)) < 0.006
    # In a run of a hundred steps gates have forty to close in, and cores have to keep up.
    for pace, steps in ((1, 1000), (10, 100), (0.1, 10_000)):
        step.ranks.pace = pace
        want = config.optimizer_for(steps)
        found = rates(525)
        assert found["gates"] == pytest.approx(want.gate_lr)
        assert found["cores"] == pytest.approx(want.core_lr / 2)
        assert found["dense"] == pytest.approx(peak / 2)


def test_a_run_of_so_many_seconds_and_its_twin(config, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
    compressed, dense = quiet_run(clocked(config))
    for outcome in (compressed, dense):
        assert 20 <= outcome.seconds < 22
        assert 5 < outcome.steps <= 20
    assert compressed.ranks["size"] <= compressed.ranks["target_size"]
    with pytest.raises(ValueError, match="train_on=4 needs a run of so many steps"):
        chains.evaluate(config.out, Console(quiet=True), train_on=4)


def test_epochs_of_no_step_are_refused():
    def counted(epochs, rows=10 * 32 + 31):
        task = task_of(RunConfig(nli=NliData(), train=TrainConfig(epochs=epochs)))
        task._prepared(SimpleNamespace(digests={}, prepared=""), lambda step: {}, rows)
        return task.steps

    assert counted(0.15) == 2
    with pytest.raises(ValueError, match=r"train\.epochs=0\.04 is no step: an epoch has 10"):
        counted(0.04)
    with pytest.raises(ValueError, match=r"train\.batch_size=32 exceeds 31 training rows"):
        counted(1, rows=31)


@pytest.mark.slow
def test_loss_curves_are_those_of_the_cpu(config, tmp_path, device):
    """To float32 noise, by the same settings and seed. The late stage is the last step alone: it
    asks which of two numbers is larger, and noise may answer."""
    model = dataclasses.replace(config.model, dropout=0.0)  # each device draws its own
    ranks = TwoStageConfig(target=0.6, early_share=0.98, late_share=0.02)
    config = dataclasses.replace(config, model=model, two_stage=ranks, twin=False)
    config.train.log_every = 1
    curves = []
    for where, place in (("cpu", "reference"), (device, "own")):
        settings = dataclasses.replace(config, device=where, out=str(tmp_path / place))
        quiet_run(settings)
        records = read_metrics(tmp_path / place)
        curves.append(torch.tensor([record["loss"] for record in records if "loss" in record]))
    assert len(curves[0]) == config.train.steps
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)]
)
def test_a_run_chooses_its_precision(config, precision, dtype):
    config.train.precision = precision
    device = torch.device("cpu")
    task = prepare_task(config, device)
    step = build_step(make_model(config, task, device), config, task)
    assert step.autocast == dtype
    assert step.scaled == (precision == "fp8" and why_not_fp8(device) is None)
    assert bool(step(task.get_batch(0)).isfinite())


@pytest.mark.slow
@pytest.mark.parametrize("section", ["masked_text", "causal_text"])
def test_a_trained_model_is_tested_once_on_data_of_its_own(config, section):
    text = dataclasses.replace(config.masked_text, heldout=0.3, test=0.2)
    loop = dataclasses.replace(config.train, steps=10, eval_every=5)
    config = dataclasses.replace(
        config, two_stage=None, twin=False, train=loop, **{"masked_text": None, section: text}
    )
    (outcome,) = quiet_run(config)
    task = prepare_task(config, torch.device("cpu"))
    model = make_model(config, task, torch.device("cpu"))
    model.load_state_dict(load_file(Path(config.out) / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        assert task.test(model) == pytest.approx(outcome.test, rel=1e-5)
        assert task.evaluate(model) == pytest.approx(outcome.metrics, rel=1e-5)
    assert outcome.test["loss"] != outcome.metrics["loss"]
    lines = read_metrics(Path(config.out))
    assert not any("test" in key for line in lines for key in line)
    (again,) = quiet_run(config)
    assert again == outcome


def test_figures_of_pairs_are_those_of_their_predictions(config, tmp_path):
    rows = pairs(50, seed=1)
    write_snli(tmp_path / "train.jsonl", pairs(60))
    write_snli(tmp_path / "dev.jsonl", rows)
    files = str(tmp_path / "train.jsonl"), str(tmp_path / "dev.jsonl")
    (outcome,) = quiet_run(dataclasses.replace(
        config, masked_text=None, nli=NliData(*files, vocab_size=120, length=16), twin=False,
        two_stage=None, tensorize=None, train=TrainConfig(steps=20, batch_size=4),
    ))  # fmt: skip
    lines = [f"{premise}\t{hypothesis}" for premise, hypothesis, _ in rows]
    found = list(predictions(comera.load_run(config.out), lines, 0))
    labels = [LABELS[label] for *_, label in rows]
    right = [each["label"] == label for each, label in zip(found, labels, strict=True)]
    assert outcome.metrics["accuracy"] == pytest.approx(sum(right) / 50)
    shares = [each["probabilities"][label] for each, label in zip(found, labels, strict=True)]
    assert outcome.metrics["loss"] == pytest.approx(-sum(map(math.log, shares)) / 50, abs=1e-4)


@pytest.mark.parametrize("section", ["masked_text", "causal_text"])
def test_settings_reach_the_model_and_its_step(config, section):
    model = ModelConfig(
        d_model=24, num_layers=2, num_heads=3, ffn_dim=40, dropout=0.3, qk_norm=True,
        norm="post" if section == "masked_text" else "pre",
    )  # fmt: skip
    loop = TrainConfig(steps=4, batch_size=4, accumulate=2, clip_norm=0.7)
    dense = {"tensorize": None, "two_stage": None, "twin": False}
    data = {"masked_text": None, section: config.masked_text}
    config = dataclasses.replace(config, model=model, train=loop, **dense, **data)
    task = prepare_task(config, torch.device("cpu"))
    made = make_model(config, task, torch.device("cpu"))
    step = build_step(made, config, task)
    assert (step.accumulate, step.clip_norm) == (2, 0.7)
    if section == "masked_text":
        found = [
            (each.fc1.weight.shape, each.dropout, each.pre_norm, each.attention.query_norm.weight)
            for each in made.encoder.blocks
        ]
        assert {each.attention.num_heads for each in made.encoder.blocks} == {3}
    else:
        found = [
            (each.mlp.up_proj.weight.shape, each.dropout.p, False, each.self_attn.q_norm.weight)
            for each in made.model.layers
        ]
    assert [(*each, len(norm)) for *each, norm in found] == 2 * [((40, 24), 0.3, False, 8)]


@pytest.mark.parametrize(
    ("schedule", "at_8"), [("linear", 0.25), ("cosine", 0.146447), ("constant", 1.0)]
)
def test_rates_rise_and_fall_by_the_schedule(schedule, at_8):
    settings = MuonConfig(schedule=schedule, warmup_share=0.2)
    rates = [_rate(settings, 10, step) for step in (0, 1, 2, 8, 10)]
    last = 1.0 if schedule == "constant" else 0.0
    assert rates == pytest.approx([0.5, 1, 1, at_8, last], abs=1e-6)


def test_words_for_every_type_of_a_setting():
    def check(kind: type) -> None:
        for each in vars(kind).get("choices", []):
            check(each)
        for hint in hints_of(kind).values():
            section, _ = section_of(hint)
            if section is not None:
                check(section)
            else:
                assert wanted(hint)

    check(RunConfig)
    expected = "a list of whole numbers, a mapping, each to a whole number or null"
    assert wanted(list[int] | dict[str, int] | None) == expected
