import re
import shutil

import pytest
import yaml

from benchmarks import reproduce as module
from benchmarks.__main__ import main
from benchmarks.reproduce import (
    Claim,
    experiments,
    file_of,
    read_experiment,
    try_out,
    with_changes,
    write_reproduction,
)
from comera.recipes import jobs
from comera.recipes.report.sweep_report import Failed, Trained, compare, write_comparison
from comera.recipes.sweep import Sweep, read_sweep
from tests.recipes.conftest import run_here

TINY = {
    "masked_text.vocab_size": 300,
    "masked_text.length": 16,
    "masked_text.max_megabytes": 0.2,
    "model.d_model": 16,
    "model.ffn_dim": 32,
    "train.steps": 6,
    "train.eval_every": 3,
    "train.eval_batches": 1,
    "train.batch_size": 2,
}


def test_every_paper_has_an_experiment_in_both_scales():
    scales = {name: set(found) for name, found in experiments().items()}
    for name in (
        "comera-nli",
        "comera-dlrm",
        "comera-code",
        "came-shapes",
        "came-gpt2",
        "excp-pythia",
    ):
        assert scales[name] == {"small", "paper"}
    assert scales["galore-llama"] == scales["comera-batch1"] == {"small"}
    for size in ("60m", "130m", "350m", "1b"):
        assert scales[f"galore-llama-{size}"] == {"paper"}
    assert scales["together"] == scales["came-gpt2"] == {"small", "paper"}


def test_an_unknown_name_or_scale_is_refused():
    with pytest.raises(ValueError, match=r"lists: did you mean comera-nli\?$"):
        file_of("comera-nly", "small")
    with pytest.raises(ValueError, match="galore-llama-1b has no --scale small, only paper"):
        file_of("galore-llama-1b", "small")


def test_data_that_are_missing_are_said_once_before_the_first_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "comera-nli", "--out=runs"]) == 1
    said = capsys.readouterr()
    assert "runs in" not in said.out
    (line,) = said.err.splitlines()
    data = tmp_path / "data"
    for place in (
        f"{data}/snli_1.0/snli_1.0_train.jsonl (nli.train)",
        f"{data}/snli_1.0/snli_1.0_dev.jsonl (nli.dev)",
        f"{data}/bert-base-uncased/vocab.txt (nli.vocab)",
    ):
        assert place in line
    assert "`comera init snli-small` says where they come from" in line
    assert "--set KEY=PLACE" in line


def test_the_folder_of_all_may_be_in_ones_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(module, "run_sweep", lambda *_, **__: 0)
    assert main(["reproduce", "came-shapes", "--out=~/all"]) == 0
    assert (tmp_path / "all" / "REPRODUCTION.md").is_file()


def sweep_of(variants: dict, tmp_path) -> Sweep:
    base = {
        "masked_text": {"folder": str(tmp_path)},
        "tensorize": {"rank": 4},
        "train": {"steps": 6},
    }
    path = tmp_path / "sweep.yaml"
    content = {"out": "out", "seeds": [0], "base": base, "reference": "dense", "variants": variants}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_sweep(path)


def test_changes_for_every_run_go_over_those_of_a_variant(tmp_path):
    variants = {"dense": {"optimizer": {"lr": 1e-3}, "tensorize.rank": 2}, "like": None}
    changes = {"optimizer.lr": 0.5, "tensorize": {"rank": 3}}
    found = with_changes(sweep_of(variants, tmp_path), changes).variants.values()
    assert [(each.optimizer.lr, each.tensorize.rank) for each in found] == [(0.5, 3)] * 2
    sweep = sweep_of({"dense": {"extends": "base"}, "base": {"tensorize": None}}, tmp_path)
    with pytest.raises(ValueError, match="variant dense: tensorize is null there, and would"):
        with_changes(sweep, {"tensorize.rank": 3})


def test_a_dry_run_leaves_out_what_is_skipped(capsys):
    changes = [f"{key}={value}" for key, value in TINY.items()]
    command = ["reproduce", "came-shapes", "--dry-run", "--set", *changes]
    assert main([*command, "--skip", "came", "adamw"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["adafactor"]
    assert main([*command, "--skip=zzzz"]) == 1
    said = capsys.readouterr().err.partition("; there are ")[2].strip().split(", ")
    runs = [name for name in said if "/" in name]
    assert said == [*dict.fromkeys(name.partition("/")[0] for name in runs), *runs]
    assert main([*command, "--skip=cam"]) == 1
    assert "did you mean came?" in capsys.readouterr().err


def test_a_dry_run_that_does_no_steps_names_the_limit_that_it_keeps():
    (line,) = try_out("came-shapes", "small", TINY, most=1 << 10, skip=["came", "adamw"])
    assert "no steps done, as a dry run does them up to 1 KiB; forward and backward fit" in line


def test_a_dry_run_names_variants_that_are_as_large_as_data_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = ["dense", "tensor-trains", "tensor-trains-cut", "hashed"]
    (line,) = try_out("comera-dlrm", "small", skip=others)
    assert line.startswith("narrow: not tried, as its sizes are those of its data: no data file at")


@pytest.mark.slow
def test_small_scale_can_be_read_whole():
    for scales in experiments().values():
        if "small" in scales:
            assert len(read_experiment(scales["small"]).variants) > 1


PAPER = [name for name, scales in experiments().items() if "paper" in scales]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_paper_scale_goes_together(name):
    """Forward and backward at the true shapes of every variant; steps where they take 64 MiB."""
    lines = try_out(name, "paper", most=1 << 26)
    assert lines
    for line in lines:
        assert "2 steps done" in line or "forward and backward fit" in line


RAN = {"date": "2026-01-02", "machine": "an abacus", "threads": 1, "comera": "1", "torch": "2"}


def test_what_is_finished_stands_beside_what_was_published(tmp_path):
    folder = tmp_path / "comera-nli-paper"
    folder.mkdir()
    metrics = {"accuracy": 0.62, "loss": 1.0}
    runs = [Trained("dense", seed, 1000, metrics, 10, 5.0, ran=RAN) for seed in (0, 1)]
    runs.append(Trained("target-0.2", 1, 25, metrics, 10, 2.0))
    names, seeds = ["dense", "target-0.2"], [0, 1, 2]
    failed = [Failed("target-0.5", 0, "the loss is nan")]
    write_comparison(compare(runs, names, seeds, "dense", "accuracy", failed), folder)
    command = "python -m benchmarks reproduce comera-nli --set train.steps=9"
    (folder / "command.txt").write_text(command)
    text = write_reproduction(tmp_path).read_text()
    assert "Published: CoMERA, arXiv 2405.14377." in text
    assert "| dense | 2/3 | 1,000 | 1.00x | 62.00 ± 0.00 |" in text
    assert "| target-0.8 | not run |" in text
    assert "| target-0.5 | failed |" in text
    assert "* 2 of the runs: 2026-01-02, an abacus, threads: 1, comera 1, torch 2\n" in text
    assert "* 1 of the runs: date, not recorded, threads: ?," in text
    assert f"Made by `{command}`." in text
    assert text.count("To be made by") == sum(map(len, experiments().values())) - 1
    assert "| 40x less: 25 against 1,000 | does not hold (1 of 3 seeds) | [comera-nli, p" in text
    assert "development accuracy 62.00 % against 62.00 %: +0.00 points | holds (1 of" in text
    assert "| failed | does not hold |" in text
    shutil.rmtree(folder)
    assert write_reproduction(tmp_path).read_text() == text


@pytest.mark.parametrize(
    ("rule", "of_came", "verdict"),
    [
        ({"figure": "loss", "loses": 0.1}, [(2.0, 1), (2.1, 1)], "holds"),
        ({"figure": "loss", "loses": 0.06}, [(2.0, 1), (2.1, 1)], "in part"),
        ({"figure": "loss", "loses": 0}, [(2.0, 1), (2.1, 1)], "does not hold"),
        ({"figure": "loss", "loses": 0}, [(2.1, 1), (2.1, 1)], "does not hold"),
        ({"figure": "loss", "loses": 0}, [(float("nan"), 1), (2.0, 1)], "does not hold"),
        ({"figure": "loss", "loses": 0, "beside": "spread"}, [(2.0, 1), (2.1, 1)], "holds"),
        ({"figure": "loss", "gains": 0.2}, [(1.7, 1), (1.9, 1)], "in part"),
        ({"figure": "loss", "gains": 0.2, "beside": "adafactor"}, [(1.9, 1)] * 2, "not run"),
        ({"figure": "params", "fewer": 4}, [(2.0, 250), (2.0, 250)], "holds"),
        ({"figure": "params", "fewer": 4}, [(2.0, 250)], "holds (1 of 2 seeds)"),
        ({"figure": "params", "fewer": 4}, [(2.0, 240), (2.0, 260)], "in part"),
        ({"figure": "params", "fewer": 4}, [(2.0, 250), (2.0, 251)], "does not hold"),
        ({"figure": "layer_params", "fewer": 4}, [(2.0, 250), (2.0, 250)], "holds"),
        ({"figure": "layer_params", "fewer": 4}, [(2.0, 250), (2.0, 251)], "does not hold"),
        ({"figure": "peak_memory", "fewer": 4}, [(2.0, 1)] * 2, "not run"),
    ],
)
def test_a_verdict_follows_from_the_figures(rule, of_came, verdict):
    dev = {"loss": 9.0}
    runs = []
    for seed in (0, 1):
        runs.append(Trained("adamw", seed, 1000, dev, 1, 1.0, {"loss": 2.0}))
        runs.append(Trained("spread", seed, 1000, dev, 1, 1.0, {"loss": 1.9 + seed / 5}))
    for seed, (loss, params) in enumerate(of_came):
        layers = {"layer_params": params, "layer_dense_params": 1000}
        runs.append(Trained("came", seed, params, dev, 1, 1.0, {"loss": loss}, more=layers))
    comparison = compare(runs, ["adamw", "spread", "came"], [0, 1], "adamw", "loss")
    claim = Claim("it", "figure 1", "came", **rule)
    *_, found = module._judged(claim, "adamw", comparison)
    assert found == verdict


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"says": "it"}, r"claims\[0\].paper='' must be a text"),
        ({"fewr": 3}, r"claims\[0\].fewr is not a setting: did you mean fewer\?"),
        ({"variant": "came", "figure": "loss"}, "a figure and one of loses, gains"),
        ({"variant": "came", "figure": "loss", "loses": 0, "fewer": 2}, "loses', 'fewer'"),
        ({"variant": "cme", "figure": "loss", "loses": 0}, "variant=cme is no variant: did you"),
        ({"variant": "came", "figure": "los", "loses": 0}, "figure=los is not measured: did you"),
        ({"variant": "came", "figure": "loss", "fewer": 2}, "figure=loss is not measured"),
        ({"variant": "came", "figure": "params", "fewer": 0.5}, "fewer=0.5 must be at least 1"),
    ],
)
def test_a_claim_that_nothing_decides_by_mistake_is_refused(tmp_path, claim, said):
    whole = claim if claim.keys() == {"says"} else {"says": "it", "paper": "figure 1", **claim}
    content = yaml.safe_load(file_of("came-shapes", "small").read_text())
    content["published"]["claims"] = [whole]
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    assert read_sweep(path).reference == "adamw"  # what is published is not the sweep's to judge
    with pytest.raises(ValueError, match=said):
        read_experiment(path)


@pytest.mark.slow
def test_a_piece_is_trained_skipped_and_gone_on_with(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "start_run", run_here)
    changes = [f"{key}={value}" for key, value in TINY.items()]
    command = ["reproduce", "came-shapes", f"--out={tmp_path}", "--set", *changes]
    most = [f"{name}/seed-{seed}" for name in ("adamw", "adafactor") for seed in (1, 2)]
    assert main([*command, "--skip", "came", *most]) == 0
    page = tmp_path / "REPRODUCTION.md"
    text = page.read_text()
    assert "| adafactor | 1/3 |" in text
    assert "--scale small --set masked_text.vocab_size=300 " in text
    assert re.search(r"\* 2 of the runs: \d{4}-\d\d-\d\d, .+, comera .*, torch ", text)
    assert "| came | not run |" in text
    assert main([*command, "--skip", "came/seed-1", "came/seed-2", *most]) == 0
    assert "3 runs in" in capsys.readouterr().out
    assert "| came | 1/3 |" in page.read_text()


def test_a_wrong_word_is_named_before_anything_is_trained(tmp_path, capsys):
    command = ["reproduce", "came-shapes", f"--out={tmp_path}"]
    assert main([*command, "--skip=cam"]) == 1
    assert "skip=cam is neither a variant nor a run: did you mean came?" in capsys.readouterr().err
    assert main([*command, "--set=train"]) == 1
    assert "--set=train must be KEY=VALUE" in capsys.readouterr().err
    assert main([*command, "--set=train.stepps=3"]) == 1
    assert "stepps" in capsys.readouterr().err


def test_the_list_says_what_each_is(capsys):
    assert main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert "comera-nli (small, paper): CoMERA's method on SNLI" in out
