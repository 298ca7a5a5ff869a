"""Examples are short, run as they stand, and come out as they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def printed_by(name: str, folder: Path, *launcher: str) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def figure(text: str, name: str) -> float:
    return float(re.findall(rf"{name}\D*?([\d.]+)", text)[-1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_sixty_lines_and_named_in_the_index(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    assert f"{path.name})" in (ROOT / "examples/README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_own_loop(tmp_path):
    text = printed_by("own_loop.py", tmp_path)
    assert "'forced': 0" in text
    assert figure(text, "accuracy") > 0.9
    assert (tmp_path / "small-model/model.safetensors").is_file()


@pytest.mark.slow
def test_compress_trained(tmp_path):
    text = printed_by("compress_trained.py", tmp_path)
    dense, cut, healed, served = (
        figure(text, f"{name}: loss") for name in ("dense", "compressed", "healed", "frozen")
    )
    assert cut < 1.0
    assert healed < min(cut, dense + 0.1)
    assert served == pytest.approx(healed, abs=2e-3)


@pytest.mark.slow
def test_recommender(tmp_path):
    text = printed_by("recommender.py", tmp_path)
    assert figure(text, "accuracy") > 0.8


@pytest.mark.slow
def test_huggingface_trainer(tmp_path):
    pytest.importorskip("transformers")
    text = printed_by("huggingface_trainer.py", tmp_path)
    assert figure(text, "'eval_accuracy'") > 0.6
    assert (tmp_path / "small-bert/config.json").is_file()


def test_without_transformers_their_example_says_what_to_install(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('transformers')")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/huggingface_trainer.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "this example needs transformers: pip install 'comera[hf]'\n"


@pytest.mark.slow
def test_several_processes(tmp_path):
    text = printed_by("several_processes.py", tmp_path, *TORCHRUN)
    assert "in 2 processes" in text
    assert figure(text, "loss") < 0.45
    sent, cut, dense = map(int, re.findall(r"[\d]+(?=\D*)", text.replace(",", ""))[-3:])
    assert cut < sent < dense / 10
