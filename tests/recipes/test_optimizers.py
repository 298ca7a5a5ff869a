import dataclasses
import io
import logging
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

import comera
from comera.data.text import TextData
from comera.nn.targets import TTConfig
from comera.recipes.cli import main
from comera.recipes.optimizers import OPTIMIZERS, AdamWConfig, CAMEConfig, MuonConfig
from comera.recipes.parse import parse_settings
from comera.recipes.run import (
    build_step,
    make_model,
    planned_memory,
    planned_model,
    print_plan,
    run,
)
from comera.recipes.run_config import (
    ImportancePruningConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    TwoStageConfig,
)
from comera.recipes.run_folder import begun_run
from comera.recipes.sweep import read_sweep, run_sweep
from comera.recipes.tasks.task import prepare_task
from comera.train.step import TrainStep
from tests.peers import peer
from tests.texts import write_functions


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A little text, prepared once."""
    folder = tmp_path_factory.mktemp("data")
    write_functions(folder / "text", 6, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMERA_CACHE", str(folder / "cache"))
        yield TextData(str(folder / "text"), vocab_size=300, length=16, heldout=0.2)


@pytest.fixture
def config(data, tmp_path) -> RunConfig:
    """A run of a moment: attention dense, the rest in tensor-train form, ranks learned."""
    return RunConfig(
        out=str(tmp_path / "run"),
        masked_text=data,
        model=ModelConfig(d_model=32, num_layers=1, num_heads=2, ffn_dim=64),
        tensorize=TTConfig(rank=8, order=2, target_modules=["fc1", "fc2"]),
        two_stage=TwoStageConfig(target=0.6, early_share=0.3, late_share=0.4),
        train=TrainConfig(steps=10, batch_size=4, eval_batches=2, log_every=5, save_every=0),
    )


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    with warnings.catch_warnings():
        if "adamw8bit" in request.param:
            warnings.simplefilter("ignore")  # of torchao's own making
            peer("torchao.optim")
        with torch.compiler.set_stance("force_eager"):
            yield request.param


def quiet_run(config, **changes):
    changed = dataclasses.replace(config, **changes)
    return run(changed, Console(quiet=True), quiet=True)


def weights(config, part="."):
    return (Path(config.out) / part / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_every_choice_trains_truncates_and_resumes_exactly(name, config, tmp_path, monkeypatch):
    config.optimizer = OPTIMIZERS[name](gate_lr=0.05, core_lr=2e-3, dense_lr=1e-3)
    config.twin = name in ("adamw", "galore_adamw")
    outcomes = quiet_run(config)
    assert outcomes[0].ranks["size"] <= outcomes[0].ranks["target_size"]
    assert all(0 < outcome.metrics["loss"] < 8 for outcome in outcomes)
    again = dataclasses.replace(config, out=str(tmp_path / "again"))
    real, pressed = TrainStep.__call__, []

    def call(self, batch):
        if self.steps_done == 8 and len(pressed) < len(outcomes):  # the cores have been cut
            pressed.append(len(pressed))
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch)

    monkeypatch.setattr(TrainStep, "__call__", call)
    for _ in outcomes:  # in the model, and in its twin
        assert quiet_run(again) == []
    assert len(quiet_run(again)) == len(outcomes)
    assert weights(again) == weights(config)
    if config.twin:
        assert weights(again, "dense") == weights(config, "dense")


def test_steps_in_backward_end_at_the_same_model(config, tmp_path):
    config.train.clip_norm = None
    quiet_run(config)
    other = dataclasses.replace(
        config, out=str(tmp_path / "other"), optimizer=MuonConfig(in_backward=True)
    )
    quiet_run(other)
    assert weights(other) == weights(config)
    other.train = dataclasses.replace(config.train, clip_norm=1.0)
    with pytest.raises(
        ValueError, match=r"train\.clip_norm=1\.0 needs all .* train\.clip_norm=null"
    ):
        other.check()


@pytest.mark.slow
def test_what_is_planned_is_what_the_optimizer_allocates(name, config):
    config.optimizer = OPTIMIZERS[name]()
    config.two_stage = None
    console = Console(record=True, width=120, file=io.StringIO())
    print_plan(config, console)
    (planned,) = planned_memory(config)
    task = prepare_task(config, torch.device("cpu"))
    model = make_model(config, task, torch.device("cpu"))
    step = build_step(model, config, task)
    step(task.get_batch(0))
    assert comera.memory_report(model, step.optimizer, planned.title) == planned
    printed = console.export_text()
    assert all(line.rstrip() in printed for line in str(planned).splitlines())


def test_compressed_runs_have_muon_and_dense_ones_adamw(config):
    assert config.settings()["optimizer"]["name"] == "muon"
    assert config.settings()["optimizer"]["lr"] == 7e-4
    dense = dataclasses.replace(config, tensorize=None, two_stage=None)
    assert dense.settings()["optimizer"]["name"] == "adamw"
    config.optimizer = CAMEConfig()
    assert config.settings()["optimizer"]["name"] == "came"


@pytest.mark.parametrize(
    ("steps", "late", "rate"),
    [(10, 0.4, 0.02), (500, 0.4, 1.5 / 120), (5000, 0.4, 2e-3), (10, 0, 2e-3)],
)
def test_gates_can_fall_in_the_late_stage_there_is(config, steps, late, rate):
    if late:
        config.two_stage = TwoStageConfig(target=0.6, early_share=0.3, late_share=late)
    else:
        config.two_stage, config.importance_pruning = None, ImportancePruningConfig(target=0.6)
    task = prepare_task(config, torch.device("cpu"))
    task.steps = config.train.steps = steps
    model = make_model(config, task, torch.device("cpu"))

    def rates():
        groups = build_step(model, config, task).optimizer.param_groups
        return [group["lr"] for group in groups if group["name"] == "gates"]

    assert rates() == [rate]
    config.train.steps = None  # as in a run of epochs: the data tell
    assert rates() == [rate]
    config.optimizer = MuonConfig(gate_lr=0.0)
    assert rates() == [0.0]


def test_the_twin_has_the_optimizer_of_its_run_or_of_dense_ones(config):
    config.optimizer = MuonConfig(name=None, target_modules=None)  # not of adamw
    compressed, dense = quiet_run(config, twin=True)
    assert compressed.ranks["size"] <= compressed.ranks["target_size"]
    assert 0 < dense.metrics["loss"] < 8
    plain = yaml.safe_load((Path(config.out) / "config.yaml").read_text())
    assert plain["optimizer"]["name"] is None  # the twin has another default
    assert config.optimizer.of_twin() == AdamWConfig(name=None)
    for rate in (0.1, 0.0):
        assert MuonConfig(dense_lr=rate).of_twin() == MuonConfig(lr=rate, dense_lr=rate)


@pytest.mark.slow
def test_adamw_is_torchs(config):
    config.optimizer = AdamWConfig()
    model = planned_model(config)
    chosen = config.optimizer_for(10)
    rates = {"gate_lr": 0.02, "core_lr": 2e-3}
    groups = comera.param_groups(model, 5e-4, **rates, weight_decay=0.01)
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    made = chosen.build(model)
    assert type(made) is torch.optim.AdamW
    for mine, before in zip(made.param_groups, plain.param_groups, strict=True):
        assert {**mine, "fused": None} == {**before, "fused": None}
    with torch.device("cpu"):
        assert chosen.build(torch.nn.Linear(2, 3)).defaults["fused"]
    quiet_run(config)
    settings = yaml.safe_load((Path(config.out) / "config.yaml").read_text())
    assert settings["optimizer"] == {
        "name": "adamw", "lr": 5e-4, "dense_lr": None, "core_lr": None, "scale_rates": None,
        "gate_lr": None, "weight_decay": 0.01, "betas": [0.9, 0.999],
        "in_backward": False, "warmup_share": 0.05, "schedule": "linear",
    }  # fmt: skip
    assert begun_run(config).difference is None
    other = dataclasses.replace(config, optimizer=CAMEConfig(lr=5e-4))
    assert begun_run(other).difference.startswith(
        "optimizer.name: adamw -> came, optimizer.betas: "
    )


def optimizer_of(given, **sections):
    """The section as a file has it."""
    return parse_settings(RunConfig, {**sections, "optimizer": given}).optimizer


def test_defaults_are_those_of_the_optimizer():
    galore = optimizer_of({"name": "galore_adamw"}).filled_in(256)
    assert (galore.rank, galore.lr, galore.target_modules) == (64, 2e-3, "all-linear")
    came = optimizer_of({"name": "came", "betas": [0.8, 0.98]})
    assert came.betas == (0.8, 0.98, 0.9999)
    for given in (came, *(kind(betas=(0.8, 0.98)) for kind in (AdamWConfig, MuonConfig))):
        made = given.make([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1}])
        assert made.param_groups[0]["betas"] == given.betas
    assert optimizer_of({"lr": 0.1}) == AdamWConfig(name=None, lr=0.1)
    assert optimizer_of({"lr": 0.1}, tensorize={}) == MuonConfig(name=None, lr=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cane"}, "optimizer.name=cane is no optimizer: did you mean came"),
        ({"rank": 8}, "optimizer.rank=8 is not a setting of muon: it belongs to galore_adamw, "),
        ({"name": "sgd", "betas": (0.9, 0.99)}, "optimizer.betas=.* of sgd: it belongs to adamw, "),
        (
            {"name": "came", "target_modules": "x"},
            "optimizer.target_modules='x' .* belongs to muon, galore_adamw, .*; leave it",
        ),
        ({"betas": (0.9, 0.99, 0.999)}, "optimizer.betas=.* must be a list of 2 numbers for muon"),
        ({"lr": (0.1, 0.2)}, r"optimizer.lr=\(0.1, 0.2\) must be a number or null for muon"),
        ({"betas": (0.9, 1.5)}, r"optimizer.betas=\(0.9, 1.5\) must be decay rates in \[0, 1\)"),
        ({"core_lr": -1.0}, "optimizer.core_lr=-1.0 must be at least 0"),
        ({"name": "galore_adamw", "rank": 0}, "optimizer.rank=0 must be at least 1"),
        ({"name": "galore_adamw", "rank": 99}, "nothing to project: .* rank=99. GaLore is for"),
        ({"name": "galore_adamw", "target_modules": "x"}, "target_modules='x' names no dense"),
    ],
)
def test_what_does_not_belong_is_named_before_anything_is_done(config, settings, message):
    with pytest.raises(ValueError, match=message):
        quiet_run(config, optimizer=optimizer_of(settings, tensorize={}))
    assert not Path(config.out).exists()


def test_a_model_without_dense_layers_has_nothing_to_project(config):
    config.tensorize = TTConfig(rank=4, order=2)
    config.optimizer = OPTIMIZERS["galore_adamw"]()
    with pytest.raises(ValueError, match=r"keep layers dense with tensorize\.exclude"):
        quiet_run(config)
    config.tensorize = TTConfig(rank=4, order=2, exclude_modules=["query"])
    assert quiet_run(config)


def test_a_missing_package_is_named_with_its_command(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    for name in ("adamw8bit", "galore_adamw8bit"):
        config.optimizer = OPTIMIZERS[name]()
        with pytest.raises(ValueError, match=rf"name={name} needs torchao.*: pip install torchao"):
            quiet_run(config)


@pytest.fixture
def file(config, tmp_path):
    """The run as a YAML file, with another section ``optimizer``."""

    def write(optimizer):
        settings = {**config.settings(), "optimizer": optimizer}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(settings))
        return str(path)

    return write


@pytest.mark.slow
def test_the_name_alone_in_a_file_or_on_the_command_line(file, capsys):
    def planned(*words):
        status = main(["plan", *words])
        return status, "".join(capsys.readouterr())

    adamw, came = file({"lr": 1e-3}), "CAME keeps"
    assert "AdamW keeps" in planned(adamw)[1]
    for words in (["--optimizer=came"], ["--optimizer.name=came8bit", "--optimizer.lr=1e-4"]):
        assert came in planned(adamw, *words)[1]
    assert came in planned(file("came"))[1]
    assert "galore" in planned(file("galore_adamw"), "--optimizer.rank=4")[1]
    status, out = planned(file("galore_adafactor"), "--optimizer.betas=[0.9,0.98]")
    assert status == 1
    assert "optimizer.betas=[0.9, 0.98] is not a setting of galore_adafactor" in out
    status, out = planned(file({"betas": [0.9, 0.98]}), "--optimizer=sgd")
    assert (status, "--optimizer.betas=null" in out) == (1, True)
    assert (
        planned(file({"betas": [0.9, 0.98]}), "--optimizer=sgd", "--optimizer.betas=null")[0] == 0
    )


def test_training_from_the_command_line(file, caplog):
    caplog.set_level(logging.ERROR)
    path = file("galore_adafactor")
    assert main(["train", path, "--train.steps=3", "--two_stage=null"]) == 0
    folder = Path(yaml.safe_load(Path(path).read_text())["out"])
    settings = yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]
    assert (settings["name"], settings["rank"], settings["lr"]) == ("galore_adafactor", 8, 1e-2)


@pytest.mark.slow
def test_variants_of_a_sweep_choose(config, tmp_path):
    base = {**config.settings(), "optimizer": "came", "two_stage": None}
    base["train"] |= {"steps": 2}
    content = {
        "out": str(tmp_path / "sweep"),
        "base": base,
        "seeds": [0],
        "reference": "came",
        "variants": {
            "came": {},
            "came-fast": {"optimizer": {"lr": 1e-3}},
            "galore": {"optimizer": "galore_adamw"},
            "galore-4": {"extends": "galore", "optimizer.rank": 4},
        },
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    found = {k: v.optimizer for k, v in read_sweep(path).variants.items()}
    assert [(o.name, o.lr, getattr(o, "rank", None)) for o in found.values()] == [
        ("came", None, None),
        ("came", 1e-3, None),
        ("galore_adamw", None, None),
        ("galore_adamw", None, 4),
    ]
    content["variants"]["wrong"] = {"optimizer": {"name": "galore_adamw", "rank": 999}}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"variant wrong: optimizer.name=galore_adamw: there is"):
        run_sweep(read_sweep(path), console=Console(quiet=True))
