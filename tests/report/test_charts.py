"""Charts carry their data; pages carry all they need, and nothing that was not escaped."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from hotrow.report import page as pages
from hotrow.report.charts import Bars, Chart, Line, Spans


def show_chart(chart: Chart) -> str:
    return pages.page("t", [pages.charts([chart])])


def data_of(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', html)
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_its_points_gaps_and_a_band_behind_it() -> None:
    line = Line("a", [1, 2, 3], [0.123456789, math.nan, math.inf], low=[1, 1, 1], high=[3, 3, 3])
    low, high, middle = data_of(show_chart(Chart("t", "x", "y", (line,))))["data"]
    assert (middle["x"], middle["y"]) == ([1, 2, 3], [0.123457, None, None])
    assert (low["y"], high["y"], high["fill"]) == ([1, 1, 1], [3, 3, 3], "tonexty")


def test_bars_and_spans_lie_flat_in_the_order_given() -> None:
    bars = Bars("b", ["p", "q"], [1, 2], low=[0.5, 1], high=[2, 4])
    found = data_of(show_chart(Chart("t", "x", "", (bars,), order=("p", "q"))))
    assert found["data"][0]["error_x"]["array"] == [1, 2]
    assert found["data"][0]["error_x"]["arrayminus"] == [0.5, 1]
    assert found["layout"]["yaxis"]["categoryarray"] == ["p", "q"]
    spans = Spans("s", ["plan", "plan"], [0, 5], [1, 2])
    found = data_of(show_chart(Chart("t", "x", "", (spans,))))
    assert (found["data"][0]["base"], found["data"][0]["x"]) == ([0, 5], [1, 2])
    assert found["layout"]["barmode"] == "overlay"


def test_names_cannot_leave_their_place() -> None:
    evil = "</script><b>&\"'"
    html = pages.page(evil, [pages.charts([Chart(evil, evil, evil, (Line(evil, [1], [2]),) * 2)])])
    body = html[: html.rindex('type="application/json"')]
    assert "<b>" not in body
    assert data_of(html)["data"][0]["name"] == evil


def test_a_page_without_charts_has_no_script() -> None:
    empty = Chart("t", "x", "y", ())
    html = pages.page("t", [pages.paragraph("p"), pages.charts([empty])])
    assert "<script" not in html
    assert "default-src 'none'" in html


def test_a_page_with_charts_has_the_library_once() -> None:
    chart = Chart("t", "x", "y", (Line("a", [1], [2]),))
    html = pages.page("t", [pages.charts([chart, chart])])
    assert html.count("plotly.js v") == 1
    assert len(html) < 6_000_000
