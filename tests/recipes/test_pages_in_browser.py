"""Both pages in a real browser: nothing fails, everything is seen, on a phone and in the dark."""

import html
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from comera.recipes.report.run_report import write_report
from comera.recipes.report.sweep_report import compare, write_comparison, write_sweep_report
from tests.recipes.test_run_report import write_run, write_twin
from tests.recipes.test_sweep_report import NAMES, RUNS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"),
]

PHONE, DESK = 390, 1280
PROBE = """
function numbers(colour) { return colour.match(/[\\d.]+/g).map(Number); }
function luminance(colour) {
  const [r, g, b] = numbers(colour).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {  // the colour that an element's letters stand on
  for (let at = element; at; at = at.parentElement) {
    const colour = at.ownerDocument.defaultView.getComputedStyle(at).backgroundColor;
    if (numbers(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
}
function paleTexts(page) {  // WCAG 2.1, level AA
  const texts = [...page.body.querySelectorAll("*")].filter((element) =>
    !element.closest("svg, script") &&
    [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return texts.filter((element) => {
    const ink = page.defaultView.getComputedStyle(element).color;
    const [low, high] = [luminance(ink), luminance(behind(element))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < 4.5;
  }).map((element) => element.outerHTML);
}
function hintAt(page, picture) {
  const mark = picture.querySelector(".mark");
  mark.scrollIntoView();
  const at = mark.getBoundingClientRect();
  const where = { clientX: at.left + at.width / 2, clientY: at.top + at.height / 2 };
  picture.dispatchEvent(new page.defaultView.PointerEvent("pointermove", where));
  return page.getElementById("hint").textContent;
}
function facts(frame) {
  const page = frame.contentDocument;
  const pictures = [...page.querySelectorAll("svg")];
  return {
    wide: page.documentElement.scrollWidth,
    paper: luminance(page.defaultView.getComputedStyle(page.body).backgroundColor),
    pale: paleTexts(page),
    headings: [...page.querySelectorAll("h1, h2, h3")].map((each) => Number(each.tagName[1])),
    pictures: pictures.map((picture) => {
      const { width, height } = picture.getBoundingClientRect();
      const drawn = picture.querySelectorAll(".mark").length;
      return { width, height, drawn, name: picture.getAttribute("aria-label"),
               hint: hintAt(page, picture), expected: picture.querySelector("title").textContent };
    }),
  };
}
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(facts);
  document.body.textContent = JSON.stringify(found);
};
"""


def open_pages(folder: Path, *pages: tuple[str, int, str]) -> tuple[list[dict], list[str]]:
    """Open pages of a width under a system's colour scheme; return facts and console messages."""
    frames = [
        f'<iframe style="width: {width}px; height: 844px; border: 0; color-scheme: {scheme}" '
        f'srcdoc="{html.escape(text)}"></iframe>'
        for text, width, scheme in pages
    ]
    around = folder / "around.html"
    around.write_text(
        f'<meta charset="utf-8"><body>{"".join(frames)}<script>{PROBE}</script>', encoding="utf-8"
    )
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1400,900", "--dump-dom",
        around.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r"<body>(\[.*\])</body>", done.stdout, re.DOTALL)
    assert found, console
    return json.loads(html.unescape(found[1])), console


def run_page(folder: Path) -> str:
    write_run(folder)
    write_twin(folder)
    return write_report(folder).read_text(encoding="utf-8")


def sweep_page(folder: Path) -> str:
    comparison = compare(RUNS, NAMES, [0, 1, 2, 7], "dense", "accuracy")
    write_comparison(comparison, folder)
    return write_sweep_report(folder).read_text(encoding="utf-8")


@pytest.mark.parametrize(("make", "pictures"), [(run_page, 7), (sweep_page, 3)])
def test_a_page_in_a_browser(tmp_path, make, pictures):
    text = make(tmp_path)
    switched = text.replace('<option value="dark">', '<option value="dark" selected>')
    assert switched != text
    (light, dark, switch, desk), console = open_pages(
        tmp_path,
        (text, PHONE, "light"),
        (text, PHONE, "dark"),
        (switched, PHONE, "light"),
        (text, DESK, "light"),
    )
    assert not console
    for facts, width in ((light, PHONE), (dark, PHONE), (switch, PHONE), (desk, DESK)):
        assert facts["wide"] <= width
        assert not facts["pale"]
        assert facts["headings"][0] == 1
        assert all(below - above <= 1 for above, below in pairwise(facts["headings"]))
        assert len(facts["pictures"]) == pictures
        for picture in facts["pictures"]:
            assert picture["width"] > 150
            assert picture["height"] > 10
            assert picture["drawn"] > 0
            assert picture["name"]
            assert picture["hint"] == picture["expected"]
    assert light["paper"] == desk["paper"] == 1
    assert dark["paper"] == switch["paper"] < 0.02


def test_what_a_browser_finds_wrong_is_noticed(tmp_path):
    page = '<h1>x</h1><p style="width: 900px; color: #aaa">y</p><script>nothing.there</script>'
    (facts,), console = open_pages(tmp_path, (f"<!DOCTYPE html>{page}", PHONE, "light"))
    assert facts["wide"] > PHONE
    assert facts["pale"] == ['<p style="width: 900px; color: #aaa">y</p>']
    assert any("nothing is not defined" in line for line in console)
