"""Parts of a plain HTML page that needs nothing but itself. All text passed in is escaped here."""

import html
from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 62rem; background: #fff;
  color: #23282c; font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0 0 .3rem; font-size: 1.75rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid #d5dbe0;
  font-size: 1.2rem; }
p { margin: .5rem 0; max-width: 46rem; }
.note { padding: .5rem .8rem; border-left: 3px solid #c4651a; background: #fcf5ef; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .26rem .8rem .26rem 0; text-align: left; vertical-align: baseline; }
th { color: #5d666d; font-weight: 600; }
thead th { border-bottom: 1px solid #aeb7be; vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid #edf0f2; }
tfoot > tr > * { border-top: 1px solid #aeb7be; font-weight: 600; }
tbody th { color: inherit; font-weight: 400; }
.number { padding-left: .8rem; padding-right: .2rem; text-align: right; white-space: nowrap; }
.wide { font-size: .8rem; line-height: 1.4; width: 100%; }
figure { margin: .8rem 0 1.4rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text {
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
figcaption { margin-top: .4rem; max-width: 46rem; color: #5d666d; font-size: .875rem; }
pre { margin: .6rem 0; padding: .9rem 1.1rem; background: #f5f7f8; columns: 22rem 2;
  font: .8rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
@media print {
  html { font-size: 11px; }
  body { max-width: none; padding: 0; }
  /* the totals stand once at the end, not below the rows of every sheet */
  tfoot { display: table-row-group; }
  h2 { break-after: avoid; }
  tr, .note { break-inside: avoid; }
  .scroll { overflow: visible; }
}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Return the whole document: ``title`` as its heading, then parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str, note: bool = False) -> str:
    """Return one paragraph; as a note it is set apart."""
    mark = ' class="note"' if note else ""
    return f"<p{mark}>{html.escape(text)}</p>"


def preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def figure(svg: str, alt: str, caption: str) -> str:
    """Return a plot with a name for those who cannot see it and a caption for all."""
    named = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)
    return f"<figure>\n{named}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int = 1,
    total: Sequence[str] | None = None,
    wide: bool = False,
) -> str:
    """Return a table; cells after the first ``text_columns`` are numbers and stand on the right."""

    def line(cells: Sequence[str], scope: str = "") -> str:
        out = []
        for k, cell in enumerate(cells):
            kind = "th" if scope == "col" or k == 0 else "td"
            mark = f' scope="{scope or "row"}"' if kind == "th" else ""
            mark += ' class="number"' if k >= text_columns else ""
            out.append(f"<{kind}{mark}>{html.escape(cell)}</{kind}>")
        return f"<tr>{''.join(out)}</tr>"

    body = "\n".join(line(row) for row in rows)
    foot = f"\n<tfoot>{line(total)}</tfoot>" if total else ""
    return (
        f'<div class="scroll"><table{" class=wide" if wide else ""}>\n'
        f"<thead>{line(header, 'col')}</thead>\n<tbody>\n{body}\n</tbody>{foot}\n</table></div>"
    )
