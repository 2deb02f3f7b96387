"""One HTML page that needs nothing else: no network, no font, and a script only for charts.

    page("hotrow report: first", [paragraph(...), Chart(...), table(heads, rows)])

Everything that comes from outside is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hotrow.report.charts import Chart, has_points, library, show_chart

NEEDS_PLOTLY = (
    "charts need plotly, which is not installed; pip install plotly, or ask for --text or --json"
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #6a737d;
  --line: #d8dee4; --bar: #2f6f9f; --spread: #1b1f24; --bad: #b3261e; --mark: #fff4d6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #15181c; --faint: #9aa4ae;
  --line: #353b42; --bar: #5aa0d0; --spread: #e6e8ea; --bad: #ff8a80; --mark: #3d3420 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
h3 { font-size: 1rem; margin: 0 }
p, li, details td, .differs td { overflow-wrap: anywhere }
.advice { border-left: 4px solid var(--bar); padding: .5rem 1rem }
.faint { color: var(--faint); font-size: .9rem; margin: .2rem 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr));
  gap: 1.5rem 2rem }
figure { margin: 0; min-width: 0 }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; font-variant-numeric: tabular-nums }
th:first-child, td:first-child, td.words, th.words { text-align: left }
td:first-child { font-weight: 600 }
td.bad, li.bad { color: var(--bad) }
tr.differs { background: var(--mark) }
figure ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0 0; padding: 0 }
figure li { list-style: none }
figure button { all: unset; cursor: pointer; font-size: .9rem }
figure button:focus-visible { outline: 2px solid var(--bar) }
figure button::before { content: ""; display: inline-block; width: .8em; height: .8em;
  margin-right: .4em; border-radius: 2px; background: var(--colour) }
figure button[aria-pressed=false] { opacity: .4 }
.plain svg { width: 100%; height: auto; max-width: 60rem }
.plain svg text { fill: var(--ink); font-size: 13px }
.plain svg .bar { fill: var(--bar) } .plain svg .spread { stroke: var(--spread); stroke-width: 2 }
pre { overflow-x: auto; font-size: .8rem }
summary { cursor: pointer; margin: .5rem 0 }
@media (max-width: 50rem) {
  body { padding: 1rem }
  table, tbody, tr, td { display: block } thead { display: none }
  tr { border: 1px solid var(--line); border-radius: 6px; margin: 0 0 1rem; padding: .3rem }
  td { display: flex; justify-content: space-between; gap: 1rem; text-align: right; border: 0 }
  td.words { text-align: right }
  td::before { content: attr(data-label); color: var(--faint); font-weight: 400 }
}
"""
# A browser that is told so fetches nothing, whatever stands in a page.
_RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page; `parts` are HTML, of the functions below or of one's own."""
    body = "\n".join(part for part in parts if part)
    script = ""
    if '<div class="chart"' in body:
        script = library() or ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_RULES}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n{script}</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """`kind`: "advice" stands out, "faint" does not."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in lines)}</ul>" if lines else ""


def charts(found: Sequence[Chart]) -> str:
    """Side by side where there is room; those without a point are left out."""
    shown = "".join(show_chart(each) for each in found if has_points(each))
    return f'<div class="charts">{shown}</div>' if shown else ""


def details(summary: str, inner: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Sequence[str] = (),
    bad: Iterable[tuple[int, str]] = (),
    marked: Iterable[int] = (),
) -> str:
    """Cards on a narrow screen. `words`: columns of text; `bad`: cells, by row and column, that
    stand out; `marked`: rows that do."""
    bad, marked = set(bad), set(marked)
    top = "".join(f"<th{_class(name in words)}>{escape(name)}</th>" for name in heads)
    body = []
    for number, row in enumerate(rows):
        cells = "".join(
            f"<td{_class(name in words, (number, name) in bad)} "
            f'data-label="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(heads, row, strict=True)
        )
        kind = ' class="differs"' if number in marked else ""
        body.append(f"<tr{kind}>{cells}</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _class(is_text: bool, is_bad: bool = False) -> str:
    kinds = [name for name, holds in (("words", is_text), ("bad", is_bad)) if holds]
    return f' class="{" ".join(kinds)}"' if kinds else ""
