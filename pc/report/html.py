"""One file of HTML without scripts, in light and dark, for any width: what the pages of this project share."""

from collections.abc import Iterable, Sequence
from html import escape

CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #666d76; --line: #d5d9de; --soft: #f4f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15171a; --faint: #9aa2ac; --line: #383d44; --soft: #1f2227 } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem;
  padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; border-top: 1px solid var(--line); padding-top: 1rem; margin-top: 2rem }
h1, h2, h3, p { overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; vertical-align: bottom; white-space: normal } th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper) }
.head { font-size: 1.1rem } .advice { background: var(--soft); padding: .8rem 1rem; border-left: 4px solid #8a6d1b }
small, .faint, figcaption { color: var(--faint); font-size: .85rem } .panels { display: flex; flex-wrap: wrap }
figure { flex: 1 1 18rem; max-width: 30rem; margin: 0 } figcaption { overflow-wrap: anywhere }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .8rem }
"""


def document(title: str, parts: Sequence[str]) -> str:
    """The whole file. title: as plain text; parts: HTML."""
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    head += f"<title>{escape(title)}</title><style>{CSS}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"
