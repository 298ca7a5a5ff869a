"""``import comera`` registers the operators and costs little more than torch; the rest waits."""

import ast
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

import comera

ROOT = Path(comera.__file__).parent
OPERATORS = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in (ROOT / "ops").rglob("*.py")
    if path.name != "__init__.py"
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_package_named_kernels_is_found_from_the_root_of_a_checkout(tmp_path):
    """The folder of that name holds no Python file, so Python prefers the package to it."""
    assert not [*(ROOT.parent / "kernels").rglob("*.py")]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("def get_kernel(): return 'the package'")
    found = f"sys.path.append({str(tmp_path)!r})\nfrom kernels import get_kernel\n"
    assert run(f"{found}import comera\nprint(get_kernel())") == "the package\n"


def test_public_names_have_one_home_each_and_checkers_see_the_same():
    block = next(
        node
        for node in ast.parse((ROOT / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = [
        (node.module, alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    homes = [(home, name, name) for home, names in comera._HOMES.items() for name in names]
    assert sorted(seen) == sorted(homes)
    assert len({name for _, name, _ in homes}) == len(homes) == len(comera.__all__)


@pytest.mark.parametrize("name", comera.__all__)
def test_a_public_name_is_that_of_its_module(name):
    found = getattr(comera, name)
    assert found is getattr(sys.modules[comera._MODULES[name]], name)
    assert vars(comera)[name] is found  # the second time, nothing is looked for
    assert name in dir(comera)


def test_a_name_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match=r"module 'comera' has no attribute 'TTLiner'"):
        comera.TTLiner  # noqa: B018


@pytest.mark.slow
def test_all_operators_are_registered_by_the_import():
    operators = "print(*sorted(torch._C._dispatch_get_all_op_names()))"
    each = f"{operators}; import {', '.join(OPERATORS)}; {operators}"
    plain, every = run(f"import comera, torch; {each}").splitlines()
    assert plain == every
    assert "comera::" in plain


def test_only_operators_and_what_they_need_are_loaded():
    torch_, comera_ = run(
        "import torch; print(*sys.modules)\n"  # torch itself imports opt_einsum, where it is
        "import comera; print(*sys.modules)"
    ).splitlines()
    added = sorted(set(comera_.split()) - set(torch_.split()))
    rooms = {name.split(".")[1] for name in added if name.startswith("comera.")}
    assert rooms <= {
        "_command",
        "extras",
        "files",
        "modes",
        "names",
        "ops",
        "params",
        "planning",
        "shapes",
    }
    others = {name.split(".")[0] for name in added} - {"comera", *sys.stdlib_module_names}
    assert not others
    # Nor has torch loaded what only printing, planning and checkpoints need.
    unwanted = {"docstring_parser", "filelock", "matplotlib", "pandas", "rich", "zstandard"}
    assert not unwanted & set(comera_.split())


@pytest.mark.slow
def test_where_opt_einsum_is_missing_the_import_works():
    without = run("sys.modules['opt_einsum'] = None; import comera; print('comera' in sys.modules)")
    assert without.strip() == "True"


def seconds() -> tuple[float, float]:
    """Processor time of importing torch in a new process, and of importing comera after it."""
    code = "from time import process_time as now; a = now(); import torch; b = now(); import comera"
    alone, more = map(float, run(f"{code}; print(b - a, now() - b)").split())
    return alone, more


@pytest.mark.slow
def test_the_import_costs_at_most_a_seventh_more_than_that_of_torch():
    seconds()  # compiled files, if any are written, are there from now on
    ratios = []
    for _ in range(3):  # what disturbs one measurement does not disturb three
        alone, more = zip(*(seconds() for _ in range(3)), strict=True)
        ratios.append(1 + median(more) / median(alone))
        if ratios[-1] <= 1.15:
            return
    pytest.fail(f"import comera costs {min(ratios):.3f} times the import of torch")
