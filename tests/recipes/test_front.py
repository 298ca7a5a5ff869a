import io
import json
import re
import sys
import textwrap

import pytest
import yaml
from rich.console import Console

import comera
from comera.recipes import front
from comera.recipes.cli import main
from comera.recipes.front import RunWork
from comera.recipes.parse import file_of, parse_settings, read_yaml
from comera.recipes.run import planned_model
from comera.recipes.run_config import RunConfig
from comera.report.front_work import FAMILIES
from comera.train.log import PlainLines
from tests.texts import write_functions


@pytest.fixture
def content(tmp_path, monkeypatch) -> dict:
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    write_functions(tmp_path / "text", 6, 40)
    return {
        "out": str(tmp_path / "out"),
        "causal_text": {
            "folder": str(tmp_path / "text"), "vocab_size": 300, "length": 16, "heldout": 0.2,
            "test": 0.1,
        },
        "model": {"d_model": 64, "num_layers": 2, "num_heads": 2, "ffn_dim": 128, "dropout": 0.0},
        "train": {"steps": 6, "batch_size": 4, "eval_batches": 2},
    }  # fmt: skip


def written(content, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


@pytest.mark.slow
def test_a_front_of_a_run_ends_in_a_page_and_commands_that_train_on(
    content, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(PlainLines, "EVERY", 0.0)
    words = [written(content, tmp_path), "--seconds=0.3", "--sizes=1", "--rates=[1]"]
    words += ["--variants=[narrower,shallower,blocks,table,fewer-words,compressed-after,8-bits]"]
    assert main(["front", *words]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^training 7/7: given-", printed, re.M)
    assert re.search(r"^Best: .*perplexity", printed, re.M)
    assert "fewer-words: perplexity counts tokens" in printed
    out = tmp_path / "out"
    points = json.loads((out / "front.json").read_text())["points"]
    names = [point["name"] for point in points]
    assert names == [
        "given", "shallower-1", "narrower-32", "blocks-rank-2", "table-32", "given-to-50%",
        "given-8-bits",
    ]  # fmt: skip
    page = (out / "front.html").read_text()
    assert all(name in page for name in names)
    assert (out / "front.png").stat().st_size > 10_000
    for point in points:
        place = out / point["name"] / f"rate-{point['rate']:g}" / "seed-0"
        test = json.loads((place / "trained.json").read_text())["test"]
        assert point["quality"] == test
    found = comera.load_run(next(out.glob("blocks-rank-2/*/seed-0")))
    assert found.config.train.clock == "processor"
    assert found.config.tensorize.linear_format == "btt"
    assert found.result["forward_seconds"] > 0
    narrow = next(point for point in points if point["name"] == "narrower-32")
    command = narrow["trains_on"].split()
    assert command[:2] == ["comera", "train"]
    assert main(command[1:]) == 0
    assert float(command[3].partition("=")[2]) == pytest.approx(1.2)
    assert main(["front", *words[:1], "--seconds=9"]) == 1
    assert "holds a front with other settings (seconds: 0.3 -> 9.0)" in capsys.readouterr().err


def work_of(name_or_path, **changes):
    settings = read_yaml(file_of(name_or_path)) | changes
    config = parse_settings(RunConfig, settings)
    return RunWork(None, config, None)


def planned(work, sizes=2):
    return work.plan(list(FAMILIES), sizes)


def test_the_demo_has_a_dozen_variants_and_their_muon_steps_the_layers():
    work = work_of("demo")
    work.folder = file_of("demo").parent
    variants, left_out = planned(work)
    assert [v.name for v in variants] == [
        "given", "shallower-1", "narrower-128", "narrower-64", "low-rank-4x", "low-rank-16x",
        "blocks-rank-2", "blocks-rank-1", "trains-8x", "trains-24x", "table-128", "table-64",
        "given-to-50%", "given-to-25%", "given-8-bits",
    ]  # fmt: skip
    assert list(left_out) == ["fewer-words"]
    by_name = {variant.name: variant for variant in variants}
    given = work.config_of(by_name["given"], 1e-3, 0)
    assert given.optimizer.target_modules == r"model\.layers\..*"
    narrow = work.config_of(by_name["narrower-64"], 1e-3, 3)
    sizes = narrow.model.d_model, narrow.model.num_heads, narrow.model.ffn_dim, narrow.seed
    assert sizes == (64, 2, 192, 3)
    assert by_name["narrower-64"].scale == 2
    trains = work.config_of(by_name["trains-8x"], 1e-3, 0)
    assert trains.two_stage.target == 0.5
    assert trains.optimizer.target_modules is None  # no dense layer is left
    table = work.config_of(by_name["table-64"], 1e-3, 0)
    names = [
        name for name, layer in planned_model(table).named_modules() if hasattr(layer, "cores")
    ]
    assert names == ["model.embed_tokens", "model.embed_tokens.hot"]
    assert by_name["table-64"].scale == 2


def test_sentence_pairs_have_fewer_words_of_a_vocabulary_of_their_own():
    work = work_of("nli/snli-small", tensorize=None, optimizer=None)
    work.folder = file_of("demo").parent
    variants, left_out = planned(work)
    assert not left_out
    by_name = {variant.name: variant for variant in variants}
    fewer = work.config_of(by_name["fewer-words-64"], 1e-3, 0)
    table = planned_model(work.config_of(by_name["table-64"], 1e-3, 0))
    numbers = sum(p.numel() for p in table.encoder.tokens.parameters())
    assert fewer.nli.vocab is None
    assert 0 <= numbers - 64 * fewer.nli.vocab_size < 64
    assert fewer.model.d_model == 64


def test_a_configuration_that_compresses_is_a_variant_of_its_own(content, tmp_path):
    config = parse_settings(
        RunConfig, content | {"tensorize": {"rank": 4, "target_modules": "all-linear"}}
    )
    work = RunWork(tmp_path, parse_settings(RunConfig, content), config)
    variants, _ = work.plan(["configured"], 1)
    assert [variant.name for variant in variants] == ["given", "configured"]
    run = work.config_of(variants[-1], 1e-3, 2)
    assert (run.tensorize.rank, run.optimizer.lr, run.seed) == (4, 1e-3, 2)


def test_rates_are_the_configurations_own_if_it_has_one(content, tmp_path):
    config = parse_settings(RunConfig, content)
    assert RunWork(tmp_path, config, None).base_rate == 0.032 / 8
    named = content | {"optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.8, 0.9]}}
    work = RunWork(tmp_path, parse_settings(RunConfig, named), None)
    assert work.base_rate == 3e-4
    run = work.config_of(work.plan([], 1)[0][0], 1e-2, 0)
    assert (run.optimizer.name, run.optimizer.lr, run.optimizer.betas) == (
        "adamw",
        1e-2,
        (0.8, 0.9),
    )


@pytest.mark.slow
def test_a_model_of_ones_own_is_the_given_one(content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from torch import nn
            def make(width, vocab_size, extra=1):
                table, inner = nn.Embedding(vocab_size, width), nn.Linear(width, 4 * width)
                return nn.Sequential(table, inner, nn.ReLU(), nn.Linear(4 * width, vocab_size))
            """
        )
    )
    path = written(content, tmp_path)
    words = ["front", path, "--model=mine:make", "--seconds=0.2", "--rates=[1]", "--sizes=1"]
    assert main([*words, "--variants=[narrower,8-bits]"]) == 0
    points = json.loads((tmp_path / "out/front.json").read_text())["points"]
    assert [point["name"] for point in points] == ["given", "narrower-32", "given-8-bits"]
    assert points[0]["params"] == 300 * 64 + (64 + 1) * 256 + (256 + 1) * 300


@pytest.mark.slow
def test_a_model_that_is_called_otherwise_or_is_another_one(content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            from torch import nn
            def pair(width, vocab_size):
                return nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, 7))
            def make(width, vocab_size):
                table = nn.Embedding(vocab_size, width)
                return nn.Sequential(table, nn.ReLU(), nn.Linear(width, vocab_size))
            """
        )
    )
    words = ["front", written(content, tmp_path), "--seconds=0.1", "--rates=[1]", "--sizes=1"]
    words += ["--variants=narrower"]
    assert main([*words, "--model=mine:pair"]) == 1
    assert "mine:pair was called with tokens (B, T), int64, and must return" in (
        capsys.readouterr().err
    )
    assert not [*(tmp_path / "out").rglob("trained.json")]
    assert main([*words, "--model=mine:make", "--overwrite=true"]) == 0
    source = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace("nn.ReLU()", "nn.Tanh()"))
    del sys.modules["mine"]
    capsys.readouterr()
    assert main([*words, "--model=mine:make"]) == 1
    assert "out holds a front of another task: before training its model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("nowhere", "model.make=nowhere is no folder, and no module:function"),
        (
            "mine.py:other",
            "no folder, and no module:function: write mine:other",
        ),
        ("mine:other", "model.make=mine:other cannot be imported"),
        ("mine:wants", "model.make=mine:wants needs color, and is given width, depth"),
        ("mine:three", "model.make=mine:three returned 3, which is no module"),
    ],
)
def test_what_makes_no_model_is_refused_before_anything_is_written(
    content, tmp_path, monkeypatch, capsys, make, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    lines = "def wants(width, color): ...\ndef three(**sizes): return 3\n"
    (tmp_path / "mine.py").write_text(lines.replace("**sizes", "width"))
    assert main(["front", written(content, tmp_path), f"--model={make}"]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_transformers_is_a_model_too(content, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path / "llama")
    content["model"]["make"] = str(tmp_path / "llama")
    model = planned_model(parse_settings(RunConfig, content))
    config = model.model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 300)
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)


def test_wrong_settings_are_named(content, tmp_path, capsys):
    path = written(content, tmp_path)
    for option, said in [
        ("--seconds=0", "seconds=0.0 must be above 0"),
        ("--variants=[bloks]", "did you mean blocks"),
        ("--variants=bloks", "did you mean blocks"),
        ("--sizes=0", "sizes=0"),
        ("--rates=[]", "rates=[] must hold one at least"),
    ]:
        assert main(["front", path, option]) == 1
        assert said in capsys.readouterr().err
    content["clicks"] = None
    content["causal_text"]["folder"] = str(tmp_path / "gone")
    assert main(["front", written(content, tmp_path)]) == 1
    assert "gone" in capsys.readouterr().err


def test_an_interrupted_front_says_how_it_goes_on(content, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("comera.report.front_work.side_by_side", interrupted)
    console = Console(file=io.StringIO(), width=200)
    status = front.front(written(content, tmp_path), console=console)
    assert status == 130
    assert f"interrupted: the same command or call goes on in {tmp_path / 'out'}" in (
        console.file.getvalue()
    )
