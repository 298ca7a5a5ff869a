"""What ``pip install comera`` brings is enough to train; what more it takes is said in one line."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from comera.extras import _EXTRAS, MissingPackageError, needed_by

pytestmark = pytest.mark.slow  # Runs and fresh processes.

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.modules.update(dict.fromkeys({sorted(_EXTRAS)!r}))  # as if they were not installed
"""
FRONT_PAGE = """
import comera, torch

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
comera.tensorize_(model, comera.TTConfig(rank=4))
print(comera.compression_report(model))
print(comera.plan(model, tokens=64))
optimizer = comera.MuonAdamW(comera.param_groups(model, lr=1e-3))
ranks = comera.TwoStage(model, target=0.5, early_steps=1, late_steps=1)
step = comera.TrainStep(model, lambda model, x: model(x).square().mean(), optimizer, ranks)
with comera.CheckpointChain(sys.argv[1], mode="lossless") as chain:
    for k in range(4):
        step(torch.randn(8, 32))
        if ranks.due:
            ranks.finish_(optimizer)
        chain.save(k + 1, model, optimizer)
    loaded = chain.load()
optimizer.load_state_dict(loaded.optimizer)
for name, tensor in model.state_dict().items():
    assert torch.equal(loaded.model[name], tensor), name
comera.densify_(model)
try:
    comera.compression_report(model).to_pandas()
except ModuleNotFoundError as missing:
    print(missing)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


def names(requirements: list[str]) -> set[str]:
    return {requirement.split(">")[0].split("[")[0].strip() for requirement in requirements}


def test_seven_packages_are_required_and_the_rest_is_an_extra():
    required = {"torch", "numpy", "safetensors", "opt_einsum", "platformdirs", "rich", "zstandard"}
    assert names(PROJECT["dependencies"]) == required
    extra = names(PROJECT["optional-dependencies"]["cli"])
    asked = {name.replace("yaml", "pyyaml") for name, by in _EXTRAS.items() if by == "cli"}
    assert extra == asked | {"shtab"}  # which is imported to complete commands alone
    assert set(_EXTRAS.values()) <= set(PROJECT["optional-dependencies"])


def test_the_front_page_runs_with_what_is_required(tmp_path):
    done = run("-c", WITHOUT + FRONT_PAGE, str(tmp_path / "chain"))
    assert done.returncode == 0, done.stderr
    assert "tensor-train layers" in done.stdout
    assert "plan at 64 tokens" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == "to_pandas() needs pandas: pip install 'comera[cli]'"


def test_the_command_says_in_one_line_what_to_install():
    done = run("-c", WITHOUT + "from comera.__main__ import main; sys.exit(main())", "train")
    assert (done.returncode, done.stdout) == (1, "")
    needs = "docstring_parser"  # the first of them that is imported
    assert done.stderr == f"error: the command comera needs {needs}: pip install 'comera[cli]'\n"
    assert PROJECT["scripts"]["comera"] == "comera.__main__:main"


READ_CLICKS = """
from comera.data.clicks import ClickData, Clicks
Clicks.prepare(ClickData("clicks.csv", label="y"))
"""


@pytest.mark.parametrize("code", [READ_CLICKS, "import comera.data.vocabulary"])
def test_what_needs_more_says_what_to_install(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMERA_CACHE", str(tmp_path / "cache"))
    Path("clicks.csv").write_text("x,y\n" + "a,0\nb,1\n" * 10)
    done = run("-c", WITHOUT + code)
    assert done.stderr.splitlines()[-1].endswith(": pip install 'comera[cli]'")


def test_a_missing_part_of_an_optional_package_is_named():
    expected = pytest.raises(MissingPackageError, match=r"^a plot needs pandas: .*comera\[cli\]'$")
    with expected, needed_by("a plot"):
        raise ModuleNotFoundError("No module named 'pandas.core'", name="pandas.core")


def test_other_failures_of_an_import_pass_unchanged():
    for problem in (ModuleNotFoundError("no torch", name="torch"), ImportError("broken pandas")):
        with pytest.raises(ImportError) as found, needed_by("a plot"):
            raise problem
        assert found.value is problem
