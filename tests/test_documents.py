"""What the documents show runs, and what they name exists."""

import functools
import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

import comera
from benchmarks.__main__ import make_parser as make_benchmarks
from comera.extras import MissingPackageError
from comera.recipes.cli import make_parser
from comera.recipes.parse import nested, parse_settings
from comera.recipes.run_config import RunConfig
from comera.recipes.search import extremes, read_search
from comera.recipes.sweep import _KEYS
from tests.test_floors import FLOORS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "kernels/README.md"]

PREAMBLE = """
import comera, torch
from torch import nn

class MyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(200, 64)
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.tokens(tokens)).mean(1))

def loss_fn(model, batch):
    tokens, labels = batch
    return nn.functional.cross_entropy(model(tokens), labels)

model = MyTransformer()
loader = [(torch.randint(200, (4, 8)), torch.randint(3, (4,))) for _ in range(4)]
optimizer = torch.optim.AdamW(model.parameters())
"""
"""What every block may use: a page says of it "your model", "your loader"."""

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[re.Match[str]]:
    found = _BLOCK.finditer(path.read_text(encoding="utf-8"))
    return [block for block in found if block["language"] == language]


def line_of(path: Path, position: int) -> int:
    return path.read_text(encoding="utf-8").count("\n", 0, position) + 1


EXAMPLES = [
    pytest.param(path, block, id=f"{name_of(path)}:{line_of(path, block.start('code'))}")
    for path in PAGES
    for block in blocks(path, "python")
    if block["reason"] is None
]


def test_examples_are_found():
    assert len(EXAMPLES) >= 15


def shown_below(path: Path, block: re.Match[str]) -> str | None:
    """What a page shows as printed by a block: a block of ``text`` that directly follows it."""
    following = re.compile(r"\n+```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = following.match(path.read_text(encoding="utf-8"), block.end())
    return found and found[1]


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def check_printed(shown: str, printed: str) -> None:
    """Compare words exactly, and numbers to a tenth: losses depend on a machine's rounding."""
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", shown)
    of_shown, of_printed = (
        [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
        for text in (shown, printed)
    )
    assert of_printed == pytest.approx(of_shown, rel=0.1)


def test_first_pages_show_what_a_block_prints():
    for path in (ROOT / "README.md", ROOT / "docs/index.md"):
        assert any(shown_below(path, block) for block in blocks(path, "python"))


def test_another_print_is_found():
    check_printed("a: 1,234 numbers, loss 0.160\n", "a: 1,200 numbers, loss 0.165\n")
    for other in ("a: 1,234 numbers, loss 0.190\n", "b: 1,234 numbers, loss 0.160\n", ""):
        with pytest.raises(AssertionError):
            check_printed("a: 1,234 numbers, loss 0.160\n", other)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # by transformers' defaults
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # said by peft
@pytest.mark.filterwarnings("ignore:.*num_workers.*")  # said by Lightning
@pytest.mark.filterwarnings("ignore:.*logging interval.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # raised by its use of torch
@pytest.mark.parametrize(("path", "block"), EXAMPLES)
def test_examples_run(path, block, tmp_path, monkeypatch, capsys):
    """Each by itself after the preamble, in an empty folder, with line numbers of the page.

    What a page shows as printed by a block is compared with what the block prints.
    """
    for package in re.findall(
        r"^import (transformers|peft|accelerate|pytorch_lightning)$", block["code"], re.M
    ):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    exec(PREAMBLE, names)
    lines = "\n" * (line_of(path, block.start("code")) - 1)
    exec(compile(lines + block["code"], str(path), "exec"), names)
    if (shown := shown_below(path, block)) is not None:
        check_printed(shown, capsys.readouterr().out)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_settings_of_runs_and_sweeps_exist(path):
    for block in blocks(path, "yaml"):
        settings = yaml.safe_load(block["code"])
        if "seeds" in settings or settings.keys() <= {"submitit"}:
            assert not settings.keys() - set(_KEYS)
            if "search" in settings:
                pytest.importorskip("optuna")
                for key, domain in read_search(settings["search"]).over.items():
                    for value in extremes(domain):
                        parse_settings(RunConfig, nested({key: value}))
            for variant in settings.get("variants", {}).values():
                own = {key: value for key, value in variant.items() if key != "extends"}
                parse_settings(RunConfig, nested(own))
        else:
            parse_settings(RunConfig, settings)


# ── links ────────────────────────────────────────────────────────────────────────────────────────


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(path: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(plain)) == len(plain), f"{path}: two headings of one name"
    return set(plain)


def text_of(path: Path) -> str:
    """A page, or the prose of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    prose = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n".join("".join(cell["source"]) for cell in prose)


each_text = pytest.mark.parametrize(
    "path", [*PAGES, *sorted(ROOT.glob("notebooks/*.ipynb"))], ids=name_of
)


@each_text
def test_links_lead_somewhere(path):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(path))):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    assert not wrong


def test_pages_that_code_names_are_there():
    files = [ROOT / "Makefile", *ROOT.glob("comera/**/*.py"), *ROOT.glob("configs/**/*.yaml")]
    wrong = [
        f"{name_of(file)}: {name}"
        for file in files
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not wrong


def test_the_front_page_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 900


# ── names and commands ───────────────────────────────────────────────────────────────────────────


def code_of(text: str) -> str:
    """Blocks and spans of code; what was printed a while ago is in files of its own."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return "\n".join([*blocks, *spans])


def exists(name: str) -> bool:
    """Whether ``comera.x.y`` is a module, or something in one.

    What a module holds is not looked at where a package that it needs is not installed.
    """
    found = comera
    for depth, part in enumerate(name.split(".")[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(name.split(".")[:depth]))
            except MissingPackageError:
                return True
            except ModuleNotFoundError as problem:
                return not str(problem.name).startswith("comera")
        found = getattr(found, part)
    return True


@each_text
def test_names_in_the_package_exist(path):
    names = re.findall(r"\bcomera(?!\.json\b)(?:\.[A-Za-z_]\w*)+(?!/)", code_of(text_of(path)))
    assert not [name for name in names if not exists(name)]


def commands_of(text: str) -> list[list[str]]:
    """Words after ``comera`` of every command line, of those that go on over several too."""
    joined = code_of(text).replace("\\\n", " ")
    lines = re.findall(r"^\s*(?:\$ )?(?:COMERA_\w+=\S+ )*comera +([a-z].*)$", joined, re.MULTILINE)
    return [re.split(r"\s#|\s+\.\.\.", line)[0].split() for line in lines]


parser_of_all = functools.cache(make_parser)
"""Half a second to make, and only looked at here."""


def wrong_in(words: list[str]) -> str | None:
    """What no parser knows of a command line; ``a|b`` stands for either."""
    parser, rest = parser_of_all(), list(words)
    while parser._subparsers is not None:
        if not rest or rest[0] in ("…", "WHAT"):
            return None
        known = parser._subparsers._group_actions[0].choices
        for name in rest[0].strip("`.,").split("|"):
            if name not in known:
                return name
        parser = known[rest.pop(0).strip("`.,").split("|")[0]]
    options = {option for action in parser._actions for option in action.option_strings}
    short = {"--optimizer"}  # for --optimizer.name
    for word in rest:
        option = word.split("=")[0]
        sections = [option.rpartition(".")[0], option]
        if option.startswith("--") and not {*sections, option} & {*options, *short}:
            return option
        if option.startswith("configs/") and not (ROOT / option).exists():
            return option
    return None


benchmarks_of_all = functools.cache(make_benchmarks)


def wrong_benchmark(words: str) -> str | None:
    """What no parser knows of the words after ``python -m benchmarks``."""
    name, *rest = words.split()
    script = name.removeprefix(".")
    if name.startswith("."):
        return None if (ROOT / "benchmarks" / f"{script}.py").exists() else script
    known = benchmarks_of_all()._subparsers._group_actions[0].choices
    if name not in known:
        return name
    options = {option for action in known[name]._actions for option in action.option_strings}
    return next((word for word in rest if word.startswith("--") and word not in options), None)


@each_text
def test_benchmarks_exist(path):
    joined = code_of(text_of(path)).replace("\\\n", " ")
    commands = re.findall(r"python -m benchmarks *(\.?[a-z].*)$", joined, re.MULTILINE)
    assert not [words for words in commands if wrong_benchmark(words) is not None]


def test_a_benchmark_that_does_not_exist_is_found():
    assert wrong_benchmark("linaer --rank 3") == "linaer"
    assert wrong_benchmark("linear --ranks 3") == "--ranks"
    assert wrong_benchmark(".crad --tiny") == "crad"
    assert wrong_benchmark(".card --tiny") is None
    assert wrong_benchmark("step --batch 8 32 --compile") is None


@each_text
def test_commands_exist(path):
    wrong = [(words, wrong_in(words)) for words in commands_of(text_of(path))]
    assert not [pair for pair in wrong if pair[1] is not None]


def test_a_command_that_does_not_exist_is_found():
    assert commands_of("`comera trian x.yaml`") == [["trian", "x.yaml"]]
    assert wrong_in(["trian", "x.yaml"]) == "trian"
    assert wrong_in(["checkpoint", "inspekt"]) == "inspekt"
    assert wrong_in(["calibrate", "--thread", "3"]) == "--thread"
    assert wrong_in(["train", "configs/none.yaml"]) == "configs/none.yaml"
    assert wrong_in(["checkpoint", "inspect|stepp"]) == "stepp"
    assert wrong_in(["train", "configs/quickstart.yaml", "--train.steps=3"]) is None


def test_the_floors_of_the_table_are_those_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(FLOORS)))
    assert [set(re.findall(r"`([^`]+)`", names)) for _, names in rows] == FLOORS
