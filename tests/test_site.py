"""The site builds without a warning, and has every public name."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import comera

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings_handlers")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # each warning is an error
    return folder


def test_every_public_name_has_an_entry_and_an_example(site):
    pages = sorted((ROOT / "docs/api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    entries = dict(re.findall(r"^::: comera\.(\w+)\n\n(.*?)(?=\n::: |\n# |\Z)", text, re.M | re.S))
    assert sorted(entries) == sorted(comera.__all__)
    assert all("```python" in entry for entry in entries.values())
    built = "\n".join((site / f"api/{page.stem}.html").read_text() for page in pages)
    assert all(f'id="comera.{name}"' in built for name in comera.__all__)


def test_it_can_be_read_and_searched_from_the_disk(site):
    assert (site / "search/search_index.js").is_file()
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]+)"', page.read_text())
        assert not [each for each in map(html.unescape, loaded) if each.startswith("http")], page


def test_pages_of_the_root_are_in_it(site):
    assert "BENCHMARKS.html" in (site / "when-they-lose.html").read_text()
    assert (site / "BENCHMARKS.html").is_file()


def test_notebooks_are_in_it_with_their_pictures(site):
    index = (site / "notebooks.html").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f'href="notebooks/{path.stem}.html"' in index
        page = (site / f"notebooks/{path.stem}.html").read_text()
        assert page.count("<h1") == 1
        pictures = re.findall(rf'<img [^>]*src="({path.stem}-[^"]+\.png)"', page)
        stored = path.read_text(encoding="utf-8").count('"image/png"')
        assert len(pictures) == stored > 0
        assert all((site / "notebooks" / name).is_file() for name in pictures)
        assert ".ipynb)" not in page
