"""Pages in the site that lie outside ``docs``: those of the root, and the notebooks."""

import base64
import html
import json
import re
from pathlib import Path

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_NAMES = ("BENCHMARKS.md", "REPRODUCTION.md", "CHANGELOG.md", "CONTRIBUTING.md")
_PAGES = [name for name in _NAMES if (_ROOT / name).is_file()]  # the second one is made by runs
_TO_DOCS = re.compile(r"\]\(docs/")
_TO_NOTEBOOKS = re.compile(r"\]\((?:\.\./)+(notebooks/[\w-]+)\.ipynb\)")
_TO_ROOT = re.compile(r"\]\((?:\.\./)+(BENCHMARKS|REPRODUCTION|CONTRIBUTING)")
_SHIM = re.compile(r"https://[\w.]+/iframe-worker/shim")


def on_config(config):
    """List the page of reproductions after the benchmarks, if there is one."""
    if "REPRODUCTION.md" in _PAGES:
        figures = next(part["Figures"] for part in config.nav if "Figures" in part)
        figures.insert(1, "REPRODUCTION.md")
    return config


def on_files(files, config):
    """Add the pages that lie in the root, where people look for them in the sources."""
    for name in _PAGES:
        text = (_ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    for path in sorted((_ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = _page_of(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def _page_of(path):
    """Return a notebook's prose, code and stored outputs as Markdown, and its pictures by name."""
    parts, pictures, heading = [], {}, path.stem
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../"))
            heading = (re.findall(r"^#+ (.+)$", source, re.MULTILINE) or [heading])[-1]
            continue
        parts.append(f"```python\n{source}\n```")
        for number, output in enumerate(cell["outputs"]):
            data = {kind: "".join(text) for kind, text in output.get("data", {}).items()
                    if kind in ("image/png", "text/html", "text/plain")}  # fmt: skip
            if "image/png" in data:
                name = f"{path.stem}-{cell['id']}-{number}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![{heading}]({name})")
            elif "text/html" in data:
                lines = filter(str.strip, data["text/html"].splitlines())
                parts.append("<div>\n" + "\n".join(lines) + "\n</div>")
            else:
                text = html.escape("".join(output.get("text", data.get("text/plain", ""))).rstrip())
                parts.append(f"<pre><code>{text}</code></pre>")
    parts.insert(1, f"*This page is `notebooks/{path.name}` of the sources, as it ran.*")
    return "\n\n".join(parts), pictures


def on_page_markdown(markdown, page, config, files):
    """Turn links that are right in the sources into those that are right in the site."""
    up = "../" * page.file.src_uri.count("/")
    markdown = _TO_NOTEBOOKS.sub(rf"]({up}\1.md)", markdown)
    return _TO_ROOT.sub(rf"]({up}\1", _TO_DOCS.sub("](", markdown))


def on_post_page(output, page, config):
    """Take the script that lets pages search without a server from the site, not from a network."""
    return _SHIM.sub("../" * page.url.count("/") + "iframe-worker/shim.js", output)


def on_post_template(output, template_name, config):
    """Do so on the page of what is not found."""
    return _SHIM.sub("/iframe-worker/shim.js", output)
