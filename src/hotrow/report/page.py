"""A comparison as one HTML page that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hotrow.records import ComparisonRecord, Figures
from hotrow.report.cells import (
    NONE,
    RESULT,
    SPEED,
    conditions,
    remarks,
    result_cells,
    speed_cells,
    speed_title,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #6a737d;
  --line: #d8dee4; --bar: #2f6f9f; --spread: #1b1f24; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #15181c; --faint: #9aa4ae;
  --line: #353b42; --bar: #5aa0d0; --spread: #e6e8ea; --bad: #ff8a80; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 78rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.advice { border-left: 4px solid var(--bar); padding: .5rem 1rem }
.faint { color: var(--faint); font-size: .9rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; font-variant-numeric: tabular-nums }
th:first-child, td:first-child, td.words, th.words { text-align: left }
td:first-child { font-weight: 600 }
td.bad, li.bad { color: var(--bad) }
svg { width: 100%; height: auto; max-width: 60rem } svg text { fill: var(--ink); font-size: 13px }
svg .bar { fill: var(--bar) } svg .spread { stroke: var(--spread); stroke-width: 2 }
pre { overflow-x: auto; font-size: .8rem }
@media (max-width: 50rem) {
  body { padding: 1rem }
  table, tbody, tr, td { display: block } thead { display: none }
  tr { border: 1px solid var(--line); border-radius: 6px; margin: 0 0 1rem; padding: .3rem }
  td { display: flex; justify-content: space-between; gap: 1rem; text-align: right; border: 0 }
  td.words { text-align: right }
  td::before { content: attr(data-label); color: var(--faint); font-weight: 400 }
}
"""
_WORDS = ("contract", "equal to all-fast")


def page_of(record: ComparisonRecord) -> str:
    """The whole page. Everything that comes from outside is escaped."""
    title = f"hotrow compare: {record.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="advice">{escape(record.advice)}</p>' if record.advice else "",
        f'<p class="faint">{escape(record.started)}, {escape(record.outcome)}. '
        f"{escape(conditions(record))}</p>",
        "<h2>Speed</h2>",
        _bars(record.strategies),
        "<h2>Figures</h2>",
        _table(record),
        _remarks(remarks(record)),
        _details(record),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _bars(strategies: Sequence[Figures]) -> str:
    """A bar for each p50, with a line from p20 to p80 upon it."""
    timed = [each for each in strategies if each.samples_per_second > 0]
    if not timed:
        return "<p>No strategy was timed.</p>"
    scale = 480 / max(each.fast_samples_per_second for each in timed)
    height = 30 * len(timed) + 8
    rows = []
    for place, each in enumerate(timed):
        top = 30 * place + 6
        low, middle, high = (
            130 + scale * rate
            for rate in (
                each.slow_samples_per_second,
                each.samples_per_second,
                each.fast_samples_per_second,
            )
        )
        rows.append(
            f'<text x="0" y="{top + 15}">{escape(each.strategy)}</text>'
            f'<rect class="bar" x="130" y="{top}" width="{middle - 130:.1f}" height="20" />'
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{top + 10}" '
            f'y2="{top + 10}" />'
            f'<text x="{max(middle, high) + 8:.1f}" y="{top + 15}">'
            f"{each.samples_per_second:,.0f}</text>"
        )
    return (
        f'<svg viewBox="0 0 720 {height}" role="img" aria-label="Samples per second: median, and '
        f'from the 20th to the 80th percentile">{"".join(rows)}</svg>'
        '<p class="faint">Samples per second: the median step, and from the 20th to the 80th '
        "percentile of all timed steps.</p>"
    )


def _table(record: ComparisonRecord) -> str:
    names = ["strategy", *(name or speed_title(record) for name in SPEED), *RESULT]
    heads = "".join(f"<th{_words(name)}>{escape(name)}</th>" for name in names)
    rows = "".join(f"<tr>{_cells(each, names)}</tr>" for each in record.strategies)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(figures: Figures, names: Sequence[str]) -> str:
    texts = [figures.strategy, *speed_cells(figures), *result_cells(figures)]
    if figures.outcome == "failed" and figures.samples == 0:
        texts[-1] = "failed"
    cells = zip(names, texts, strict=True)
    return "".join(
        f'<td{_words(name, text)} data-label="{escape(name)}">{escape(text)}</td>'
        for name, text in cells
    )


def _words(name: str, text: str = "") -> str:
    kinds = ["words"] if name in _WORDS else []
    if name == "equal to all-fast" and text in ("no", "failed"):
        kinds.append("bad")
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _remarks(found: Sequence[str]) -> str:
    if not found:
        return ""
    return f"<h2>Remarks</h2><ul>{''.join(f'<li>{escape(each)}</li>' for each in found)}</ul>"


def _details(record: ComparisonRecord) -> str:
    """Settings and machine, for whoever wants to repeat it."""
    lines = [
        f"{section}.{key} = {value}"
        for section, values in record.settings.items()
        for key, value in values.items()
    ]
    lines += [f"{key}: {value}" for key, value in record.environment.items()]
    what = "".join(
        f"<li>{escape(each.strategy)}: {escape(each.summary or NONE)}</li>"
        for each in record.strategies
    )
    return (
        f"<h2>What they are</h2><ul>{what}</ul><details><summary>Settings and machine</summary>"
        f"<pre>{escape(chr(10).join(lines))}</pre></details>"
    )
