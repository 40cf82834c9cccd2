"""Parts of pages: escaped text, and the style sheet."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from html import escape

from .width import printable

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --ink: #1c2430; --page: #fff; --good: #1a7f37; --bad: #c62828; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --page: #14181f; --good: #4ac26b; --bad: #ff7b72; --warn: #d29922; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); } h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
pre, code, .mono { font: 13px/1.4 ui-monospace, monospace; } pre { overflow-x: auto; padding: .6rem; background: var(--soft); border-radius: .4rem; overflow-wrap: normal; }
.scroll { overflow-x: auto; overflow-wrap: normal; } table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .dim { opacity: .7; }
details { margin-left: 1.1rem; } details > summary, .leaf { padding: .1rem 0; } summary { cursor: pointer; margin-left: -1.1rem; } .leaf { margin-left: 1.1rem; }
.leaf:focus::after, summary:focus::after { content: attr(title); display: block; white-space: pre-wrap; font: 12px/1.4 ui-monospace, monospace; padding: .3rem .5rem; margin: .2rem 0; background: var(--soft); border-radius: .3rem; }
.chip { display: inline-block; padding: 0 .45rem; border-radius: .7rem; font-size: 12px; color: #10151c; white-space: nowrap; } .axis { border: 1px solid var(--line); color: inherit; }
.bar { display: flex; height: 1.6rem; background: var(--soft); border-radius: .3rem; overflow: hidden; margin: .3rem 0; } .bar span { display: block; height: 100%; }
.legend span { margin-right: 1rem; white-space: nowrap; } .legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .3rem; vertical-align: -1px; }
svg text { fill: currentColor; font: 12px ui-monospace, monospace; } svg .on { fill: #10151c; }
"""


def text(value: object) -> str:
    """Text for a page, or for an attribute in double quotes, escaped so that names of models and plans are never markup."""
    return escape(printable(str(value)), quote=True)


def color(word: str) -> str:
    """The colour of a style: the same in every report."""
    return f"hsl({zlib.crc32(word.encode()) % 360} 62% 72%)"


# Hues far from each other on the colour wheel, as a bar shows them next to each other.
HUES = (210, 30, 120, 280, 60, 340, 0)


def hue(position: int) -> str:
    """One of a few distinguishable colours."""
    return f"hsl({HUES[position % len(HUES)]} 60% 62%)"


def chip(word: str) -> str:
    """A style as a coloured mark."""
    return f'<span class="chip" style="background:{color(word)}">{text(word)}</span>'


def axis_chip(word: str) -> str:
    return f'<span class="chip axis">{text(word)}</span>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """A table of cells that are already escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        made = (f"<{tag}{' class=n' if i in numbers else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table><thead>{row(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def page(title: str, body: str) -> str:
    """A complete document: it runs no script, and fetches nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
