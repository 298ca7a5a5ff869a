"""Pages of the repository's root in the site, and links between them and those of ``docs``."""

import re
from pathlib import Path

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_NAMES = ("BENCHMARKS.md", "REPRODUCTION.md", "CHANGELOG.md", "CONTRIBUTING.md")
_PAGES = [name for name in _NAMES if (_ROOT / name).is_file()]  # the second one is made by runs
_TO_DOCS = re.compile(r"\]\(docs/")
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
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links that are right in the sources into those that are right in the site."""
    up = "../" * page.file.src_uri.count("/")
    return _TO_ROOT.sub(rf"]({up}\1", _TO_DOCS.sub("](", markdown))


def on_post_page(output, page, config):
    """Take the script that lets pages search without a server from the site, not from a network."""
    return _SHIM.sub("../" * page.url.count("/") + "iframe-worker/shim.js", output)


def on_post_template(output, template_name, config):
    """Do so on the page of what is not found."""
    return _SHIM.sub("/iframe-worker/shim.js", output)
