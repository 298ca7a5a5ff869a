"""Pages of the repository's root in the site, and links between them and those of ``docs``."""

import re
from pathlib import Path

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_PAGES = ("BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md")
_TO_DOCS = re.compile(r"\]\(docs/")
_TO_ROOT = re.compile(r"\]\((?:\.\./)+(BENCHMARKS|CONTRIBUTING)")
_SHIM = re.compile(r"https://[\w.]+/iframe-worker/shim")


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
