"""Charts as HTML, drawn by Plotly in the reader's browser. Knows no runs.

A chart is data: titles, and lines, bars or spans. `LIBRARY` comes once per page, inlined, so that a
page needs no network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# Told apart on white and on black.
COLOURS = (
    "#3182bd", "#e6762b", "#2f9e6b", "#c2528b", "#8a6fd1", "#b08d1e", "#2aa5a5", "#8c8c8c",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A curve; `low` and `high` are drawn as a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0
    has_dots: bool = False
    is_dashed: bool = False  # so that one below it is seen

    def traces(self) -> list[dict[str, Any]]:
        colour = _colour(self.colour)
        kind = "lines+markers" if self.has_dots or len(self.x) < 3 else "lines"
        line = {
            "type": "scatter", "mode": kind, "name": self.name, "legendgroup": self.name,
            "x": _short(self.x), "y": _short(self.y),
            "line": {"color": colour, "width": 2, "dash": "dash" if self.is_dashed else "solid"},
            "connectgaps": False,
        }  # fmt: skip
        if not self.low:
            return [line]
        # Seen from behind the curve, and not by whoever asks what is under the pointer.
        edge = {
            "type": "scatter", "mode": "lines", "x": line["x"], "line": {"width": 0},
            "hoverinfo": "skip", "legendgroup": self.name,
        }  # fmt: skip
        band = {"fill": "tonexty", "fillcolor": colour + "30"}
        return [edge | {"y": _short(self.low)}, edge | band | {"y": _short(self.high)}, line]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, a label for each; `low` and `high` are drawn upon them."""

    name: str
    labels: Sequence[str]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0

    def traces(self) -> list[dict[str, Any]]:
        bars = {
            "type": "bar", "orientation": "h", "name": self.name, "legendgroup": self.name,
            "y": list(self.labels),
            "x": _short(self.values), "marker": {"color": _colour(self.colour)},
        }  # fmt: skip
        if self.low:
            above = [high - value for high, value in zip(self.high, self.values, strict=True)]
            below = [value - low for low, value in zip(self.low, self.values, strict=True)]
            bars["error_x"] = {
                "type": "data", "symmetric": False, "array": _short(above),
                "arrayminus": _short(below), "thickness": 2, "width": 5,
            }  # fmt: skip
        return [bars]


@dataclass(frozen=True)
class Spans:
    """What was at work from when to when, a row for each lane."""

    name: str
    lanes: Sequence[str]
    starts: Sequence[float]
    lengths: Sequence[float]
    colour: int = 0

    def traces(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "bar", "orientation": "h", "name": self.name, "legendgroup": self.name,
                "y": list(self.lanes),
                "base": _short(self.starts), "x": _short(self.lengths),
                "marker": {"color": _colour(self.colour)}, "width": 0.7,
                "hovertemplate": "%{y}: %{x:.3~f} from %{base:.3~f}<extra></extra>",
            }
        ]  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One chart; `note` is a sentence or two below its title."""

    title: str
    x: str  # titles of the axes
    y: str
    series: tuple[Line | Bars | Spans, ...]
    note: str = ""
    x_format: str = ""  # as in d3-format: ".0%" for shares
    y_format: str = ""
    x_log: bool = False  # a curve's numbers are spread by their logarithms
    from_zero: bool = False  # the axis of values begins with 0
    is_stacked: bool = False
    order: tuple[str, ...] = ()  # of the lanes or labels, from the top down

    @property
    def is_flat(self) -> bool:
        """Whether its labels stand at the left, and values go to the right."""
        return any(isinstance(each, Bars | Spans) for each in self.series)

    @property
    def height(self) -> int:
        if not self.is_flat:
            return 320
        labels = {label for each in self.series for label in _labels(each)}
        beside = 1 if self.barmode != "group" else len(self.series)
        return 80 + len(labels) * max(26, 16 * beside)

    @property
    def barmode(self) -> str:
        if any(isinstance(each, Spans) for each in self.series):
            return "overlay"
        return "stack" if self.is_stacked else "group"


def has_points(chart: Chart) -> bool:
    return any(trace.get("x") for each in chart.series for trace in each.traces())


def show_chart(chart: Chart) -> str:
    """A figure: the title and the note as text, a place for the picture, and its data."""
    data = [trace for each in chart.series for trace in each.traces()]
    x: dict[str, Any] = {"title": {"text": chart.x}, "tickformat": chart.x_format}
    y: dict[str, Any] = {"title": {"text": chart.y}, "tickformat": chart.y_format}
    values = x if chart.is_flat else y
    if chart.from_zero:
        values["rangemode"] = "tozero"
    if chart.is_flat:
        y |= {"type": "category", "autorange": "reversed"}
        if chart.order:
            y |= {"categoryorder": "array", "categoryarray": list(chart.order)}
    elif chart.x_log:
        x["type"] = "log"
    else:
        x["rangemode"] = "tozero"
    layout = {
        "xaxis": x, "yaxis": y, "height": chart.height,
        "barmode": chart.barmode, "showlegend": False,
    }  # fmt: skip
    # No text may end the script it stands in.
    text = json.dumps({"data": data, "layout": layout}, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c")
    note = f'<p class="faint">{escape(chart.note)}</p>' if chart.note else ""
    legend = "".join(
        f'<li><button aria-pressed="true" style="--colour:{_colour(each.colour)}">'
        f"{escape(each.name)}</button></li>"
        for each in chart.series
    )
    legend = f"<ul>{legend}</ul>" if len(chart.series) > 1 else ""
    label = escape(f"{chart.title}: {chart.y or chart.x}")
    return (
        f"<figure><h3>{escape(chart.title)}</h3>{note}{legend}"
        f'<div class="chart" role="img" aria-label="{label}" style="height:{chart.height}px"></div>'
        f'<script type="application/json">{text}</script></figure>'
    )


def library() -> str | None:
    """Plotly, and what draws a page's charts with it; None: it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return f"<script>{get_plotlyjs()}</script><script>{_DRAW}</script>"


# Colours are the page's own, also when a reader changes from light to dark.
_DRAW = """
(() => {
  const style = getComputedStyle(document.documentElement);
  const boxes = [...document.querySelectorAll(".chart")];
  const themed = (layout) => {
    const [ink, line, paper] = ["--ink", "--line", "--paper"].map((x) => style.getPropertyValue(x));
    const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true};
    return {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: "system-ui, sans-serif", size: 13, color: ink},
      hoverlabel: {bgcolor: paper, bordercolor: line, font: {color: ink}},
      hovermode: layout.yaxis.type === "category" ? "closest" : "x unified",
      margin: {l: 8, r: 16, t: 8, b: 8},
      xaxis: {...layout.xaxis, ...axis}, yaxis: {...layout.yaxis, ...axis}};
  };
  const draw = (how) => boxes.forEach((box) => {
    const {data, layout} = JSON.parse(box.nextElementSibling.textContent);
    const ink = style.getPropertyValue("--ink");
    data.filter((each) => each.error_x).forEach((each) => each.error_x.color = ink);
    Plotly[how](box, data, themed(layout), {responsive: true, displaylogo: false,
      displayModeBar: false});
  });
  draw("newPlot");
  document.querySelectorAll("figure button").forEach((button) => button.onclick = () => {
    const shown = button.ariaPressed === "false";
    button.ariaPressed = String(shown);
    const box = button.closest("figure").querySelector(".chart");
    const mine = box.data.flatMap((each, i) => each.legendgroup === button.textContent ? [i] : []);
    Plotly.restyle(box, {visible: shown}, mine);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw("react"));
})();
"""


def _labels(series: Line | Bars | Spans) -> Sequence[str]:
    if isinstance(series, Line):
        return ()
    return series.labels if isinstance(series, Bars) else series.lanes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _short(values: Sequence[float]) -> list[float | None]:
    """Six digits are more than a screen shows; what is no number is a gap."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
