"""``comera checkpoint`` and the section ``checkpoints`` of a run."""

import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import comera
from comera.checkpoint.chain import CheckpointChain
from comera.recipes.cli import main
from tests.processes import forking

from ..checkpoint.test_chain import adamw, chain_of, make_model, train

pytestmark = pytest.mark.slow  # Runs and fresh processes.

RUN = """
out: {out}
masked_text: {{folder: {folder}, vocab_size: 300, length: 32}}
model: {{d_model: 32, num_layers: 1, num_heads: 2, ffn_dim: 64}}
tensorize: {{rank: 8, embedding_rank: 8}}
checkpoints: {{mode: {mode}}}
train: {{steps: 12, batch_size: 4, save_every: 4}}
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    text = Path(comera.__file__).parent.joinpath("shapes.py").read_text()
    for k in range(4):
        (folder / f"{k}.py").write_text(text)
    return folder


@pytest.mark.parametrize(("mode", "steps"), [("lossless", [8, 12]), ("lossy", [4, 8, 12])])
def test_a_run_keeps_checkpoints_as_its_settings_say(
    source, tmp_path, capsys, mode, steps, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(RUN.format(out=out, folder=source, mode=mode))
    assert main(["train", str(path)]) == 0
    assert CheckpointChain(out / "checkpoints").steps() == steps
    assert main(["checkpoint", "verify", "~/out"]) == 0
    assert capsys.readouterr().out.count("sound") == len(steps)


def test_a_run_goes_on_with_other_settings_of_checkpoints(source, tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(RUN.format(out=out, folder=source, mode="lossless"))
    assert main(["train", str(path)]) == 0
    with CheckpointChain(out / "checkpoints") as chain:  # as if it had been cut short
        chain.rewind(8)
    (out / "result.json").unlink()
    path.write_text(RUN.format(out=out, folder=source, mode="lossy"))
    assert main(["train", str(path), "--train.batch_size=5"]) == 1
    assert "other settings (train.batch_size: 4 -> 5)" in capsys.readouterr().err
    assert main(["train", str(path), "--checkpoints.keep_last=3"]) == 0
    assert "mode: lossy" in (out / "config.yaml").read_text()
    assert CheckpointChain(out / "checkpoints").steps() == [8, 12]
    assert main(["checkpoint", "verify", str(out)]) == 0
    # What is read back then makes another model.
    assert main(["train", str(path), "--checkpoints.restart=true"]) == 1
    said = "other settings (checkpoints.keep_last: 3 -> 2, checkpoints.restart: False -> True)"
    assert said in capsys.readouterr().err


def test_settings_of_checkpoints_that_make_no_sense_are_named(source, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(out=tmp_path / "out", folder=source, mode="lossy"))
    assert main(["train", str(path), "--checkpoints.keep_last=0"]) == 1
    assert "checkpoints.keep_last=0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_killed_goes_on_by_the_same_command(source, tmp_path):
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(RUN.format(out=out, folder=source, mode="lossless"))
    words = ["train", str(path), "--train.steps=5000", "--train.save_every=3"]
    reached = 0
    for _ in range(2):
        process = forking().Process(target=main, args=([*words, "--train.log_every=1"],))
        process.start()
        chain = CheckpointChain(out / "checkpoints")
        until = time.monotonic() + 300
        while max(chain.steps(), default=0) < reached + 6:
            assert process.is_alive()
            assert time.monotonic() < until
            time.sleep(0.01)
        process.kill()
        process.join()
        reached = chain.load().step
        assert set(chain.verify().values()) == {None}
    assert reached >= 12


def test_inspect_says_what_the_bytes_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    chain_of(tmp_path, 3)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "key frame" in printed
    for kind in ("changes of weights", "moments", "names, shapes and plain values"):
        assert kind in printed
    shares = [float(share) for share in re.findall(r"([\d.]+)% +│\n", printed)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_verify_names_what_is_damaged(tmp_path, capsys):
    chain_of(tmp_path, 3)
    path = tmp_path / "step-000000010" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "step 5: sound" in printed
    assert "step 10: " in printed
    assert "1 bytes long" not in printed
    assert printed.count(path.name) == 2  # and 15, which builds on it
    (tmp_path / "step-000000010" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert "lacks what a manifest has" in capsys.readouterr().out


def test_export_writes_weights_for_others(tmp_path, capsys):
    model, _, _ = chain_of(tmp_path / "chain", 3, mode="lossless")
    folder = str(tmp_path / "chain")
    assert main(["checkpoint", "export", folder, str(tmp_path / "hub")]) == 0
    weights = load_file(tmp_path / "hub" / "model.safetensors")
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    file = tmp_path / "w.safetensors"
    assert main(["checkpoint", "export", folder, str(file), "--step=5"]) == 0
    make_model().load_state_dict(load_file(file))
    assert main(["checkpoint", "export", folder, str(file), "--step=6"]) == 1
    assert "there are 5, 10, 15" in capsys.readouterr().err
    assert main(["checkpoint", "export", folder, str(file), "--step=last"]) == 1
    assert "step='last' must be a number" in capsys.readouterr().err


def test_compress_takes_the_series_of_other_programs(tmp_path, capsys):
    model = make_model()
    optimizer = adamw(model)
    states = {}
    for step in (100, 200, 1000):
        train(model, optimizer, 3, seed=step)
        states[step] = {k: v.clone() for k, v in model.state_dict().items()}
        torch.save(
            {"model_state_dict": states[step], "optimizer": optimizer.state_dict(), "epoch": 1.5},
            tmp_path / f"ck-{step}.pt",
        )
        folder = tmp_path / "trainer" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(states[step], folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    for source, extra in ((tmp_path, {"epoch": 1.5}), (tmp_path / "trainer", {})):
        words = ["checkpoint", "compress", str(source), str(source / "chain"), "--mode=lossless"]
        assert main(words) == 0
        assert main(words) == 0  # again: nothing is left to do
        chain = CheckpointChain(source / "chain")
        assert chain.steps() == [100, 200, 1000]
        saved = chain.load(200)
        assert all(torch.equal(saved.model[k], v) for k, v in states[200].items())
        assert saved.extra == extra
        again = adamw(make_model())
        again.load_state_dict(saved.optimizer)
    assert "key frame" in capsys.readouterr().out


def test_what_cannot_be_compressed_is_named(tmp_path, capsys):
    def said(*words):
        assert main(["checkpoint", *map(str, words)]) == 1
        return re.sub(r"\s+", " ", capsys.readouterr().err)

    out = tmp_path / "out"
    assert "no checkpoints in" in said("compress", tmp_path / "none", out)
    assert "no checkpoints in" in said("inspect", tmp_path)
    (tmp_path / "model.pt").write_bytes(b"x")
    assert "has no number in its name" in said("compress", tmp_path, out)
    (tmp_path / "model.pt").rename(tmp_path / "model-1.pt")
    assert "model-1.pt is not readable" in said("compress", tmp_path, out)
    torch.save({"weights": {}}, tmp_path / "model-1.pt")
    assert "has the keys weights; the model is expected in" in said("compress", tmp_path, out)
    torch.save(nn.Linear(2, 2), tmp_path / "model-1.pt")  # a pickled module: code
    assert "model-1.pt is not readable" in said("compress", tmp_path, out)
    torch.save({}, tmp_path / "other-1.pt")
    assert "are both of step 1" in said("compress", tmp_path, out)


def test_training_on_cuts_ranks_where_the_run_did(source, tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(RUN.format(out=out, folder=source, mode="lossless"))
    words = ["--train.eval_every=4", "--checkpoints.keep_last=null", "--two_stage=null"]
    words += ["--importance_pruning.share=0.5", "--importance_pruning.target=0.1"]
    words += ["--optimizer.lr=2e-2"]
    assert main(["train", str(path), *words]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "evaluate", str(out), "--at=4", "--train_on=8"]) == 0
    assert capsys.readouterr().out.count("+0.00%") == 2


def test_evaluate_sets_what_is_read_beside_the_run(source, tmp_path, capsys):
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    path.write_text(RUN.format(out=out, folder=source, mode="lossless"))
    words = ["--train.eval_every=4", "--checkpoints.keep_last=null"]
    assert main(["train", str(path), *words]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "evaluate", str(out), "--train_on=4"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("+0.00%") == 6  # lossless: nothing differs, nor after four steps more
    assert "/?" not in printed  # progress, of as many steps as there are
    chain = str(tmp_path / "lossy")
    assert main(["checkpoint", "compress", str(out), chain, "--key_every=3"]) == 0
    source_names = CheckpointChain(out / "checkpoints").load(8).parameters
    assert CheckpointChain(chain).load(8).parameters == source_names
    words = ["--chain", chain, "--train_on=4", "--at=4,8"]
    assert main(["checkpoint", "evaluate", str(out), *words]) == 0
    printed = capsys.readouterr().out
    differences = [float(d) for d in re.findall(r"([+-]\d+\.\d+)%", printed)]
    assert len(differences) == 4
    assert any(differences)
    assert max(map(abs, differences)) < 3
    assert main(["checkpoint", "evaluate", str(out), "--at=5"]) == 1
    assert "there is no checkpoint of step 5" in capsys.readouterr().err
    assert main(["checkpoint", "evaluate", chain]) == 1
    assert "is not a run" in capsys.readouterr().err
