"""Charts as data: titles, and lines or bars, which Plotly draws in a reader's browser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Distinct on white and on black.
COLOURS = (
    "#3182bd", "#e6762b", "#2f9e6b", "#c2528b", "#8a6fd1", "#b08d1e", "#2aa5a5", "#8c8c8c",
)  # fmt: skip


class _Series:
    """What all kinds of series share."""

    name: str
    colour: int

    @property
    def hue(self) -> str:
        return COLOURS[self.colour % len(COLOURS)]

    def _trace(self, **values: Any) -> dict[str, Any]:
        return {"name": self.name, "legendgroup": self.name, **values}


@dataclass(frozen=True)
class Line(_Series):
    """A curve; `low` and `high` are drawn as a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0
    has_dots: bool = False
    is_dashed: bool = False  # shows a line below it

    def traces(self) -> list[dict[str, Any]]:
        kind = "lines+markers" if self.has_dots or len(self.x) < 3 else "lines"
        dash = "dash" if self.is_dashed else "solid"
        line = self._trace(
            type="scatter", mode=kind, x=_short(self.x), y=_short(self.y),
            line={"color": self.hue, "width": 2, "dash": dash}, connectgaps=False,
        )  # fmt: skip
        if not self.low:
            return [line]
        # The band is behind the curve, and does not answer the pointer.
        edge = {
            "type": "scatter", "mode": "lines", "x": line["x"], "line": {"width": 0},
            "hoverinfo": "skip", "legendgroup": self.name,
        }  # fmt: skip
        band = {"fill": "tonexty", "fillcolor": self.hue + "30"}
        return [edge | {"y": _short(self.low)}, edge | band | {"y": _short(self.high)}, line]

    def cells(self, form: str) -> Iterator[tuple[float, str]]:
        """Yield the points as texts, empty for a gap; half the band's width is the error."""
        for place, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            error = (self.high[place] - self.low[place]) / 2 if self.low else 0.0
            yield x, with_error(y, error, form) if math.isfinite(y) else ""


@dataclass(frozen=True)
class Bars(_Series):
    """Horizontal bars, a label for each; `low` and `high` are drawn upon them. With `starts` they
    are intervals of time, several on the row of a label."""

    name: str
    labels: Sequence[str]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int = 0
    starts: Sequence[float] = ()

    def traces(self) -> list[dict[str, Any]]:
        bars = self._trace(
            type="bar", orientation="h", y=list(self.labels), x=_short(self.values),
            marker={"color": self.hue},
        )  # fmt: skip
        if self.low:
            above = [high - value for high, value in zip(self.high, self.values, strict=True)]
            below = [value - low for low, value in zip(self.low, self.values, strict=True)]
            bars["error_x"] = {
                "type": "data", "symmetric": False, "array": _short(above),
                "arrayminus": _short(below), "thickness": 2, "width": 5,
            }  # fmt: skip
        if self.starts:
            hover = "%{y}: %{x:.3~f} from %{base:.3~f}<extra></extra>"
            bars |= {"base": _short(self.starts), "width": 0.7, "hovertemplate": hover}
        return [bars]


def Spans(
    name: str,
    labels: Sequence[str],
    starts: Sequence[float],
    lengths: Sequence[float],
    colour: int = 0,
) -> Bars:
    """Return intervals of time, a row for each label."""
    return Bars(name, labels, lengths, colour=colour, starts=starts)


@dataclass(frozen=True)
class Chart:
    """One chart; `note` is a sentence or two below its title."""

    title: str
    x: str  # titles of the axes
    y: str
    series: tuple[Line | Bars, ...]
    note: str = ""
    x_format: str = ""  # as in d3-format: ".0%" for shares
    y_format: str = ""
    x_log: bool = False  # a logarithmic axis
    from_zero: bool = False  # the axis of values begins at 0
    is_stacked: bool = False
    order: tuple[str, ...] = ()  # of the labels, from the top down
    cell: str = ""  # of lines: Python's format in a table instead of the chart; empty: no table
    gaps: Mapping[Any, str] = field(default_factory=dict)  # in that table: why a point is missing

    @property
    def bars(self) -> list[Bars]:
        """If there are any, labels are at the left, and values go to the right."""
        return [series for series in self.series if isinstance(series, Bars)]

    @property
    def height(self) -> int:
        if not self.bars:
            return 320
        labels = {label for series in self.bars for label in series.labels}
        beside = 1 if self.barmode != "group" else len(self.series)
        return 80 + len(labels) * max(26, 16 * beside)

    @property
    def barmode(self) -> str:
        if any(series.starts for series in self.bars):
            return "overlay"
        return "stack" if self.is_stacked else "group"

    def figure(self) -> dict[str, Any]:
        """Return what Plotly draws."""
        x: dict[str, Any] = {"title": {"text": self.x}, "tickformat": self.x_format}
        y: dict[str, Any] = {"title": {"text": self.y}, "tickformat": self.y_format}
        if self.from_zero:
            (x if self.bars else y)["rangemode"] = "tozero"
        if self.bars:
            y |= {"type": "category", "autorange": "reversed"}
            if self.order:
                y |= {"categoryorder": "array", "categoryarray": list(self.order)}
        elif self.x_log:
            x["type"] = "log"
        else:
            x["rangemode"] = "tozero"
        layout = {
            "xaxis": x, "yaxis": y, "height": self.height, "barmode": self.barmode,
            "showlegend": False,
        }  # fmt: skip
        data = [trace for series in self.series for trace in series.traces()]
        return {"data": data, "layout": layout}


def library() -> str | None:
    """Return Plotly's script, which a page contains once; None: it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    script: str = get_plotlyjs()
    return script


def with_error(value: float, error: float, form: str) -> str:
    """Return a value, with its error if that has a digit other than 0."""
    shown = format(error, form)
    has_error = error > 0 and any(digit in "123456789" for digit in shown)
    return format(value, form) + (f" ±{shown}" if has_error else "")


def _short(values: Sequence[float]) -> list[float | None]:
    """Round to six digits, more than a screen shows; NaN and infinity are gaps."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def lines_by_strategy(
    points: Iterable[tuple[str, int | None, float, float]],
) -> tuple[Line, ...]:
    """Return a line with dots for each strategy, and of lookahead for each depth, from points of
    (strategy, depth, x, y)."""
    points = list(points)
    depths = {depth for strategy, depth, *_ in points if strategy == "lookahead"}
    named: dict[str, list[tuple[float, float]]] = {}
    for strategy, depth, x, y in points:
        is_one_of_many = strategy == "lookahead" and len(depths) > 1
        name = f"{strategy}, {depth} ahead" if is_one_of_many else strategy
        named.setdefault(name, []).append((x, y))
    return tuple(
        Line(name, [x for x, _ in some], [y for _, y in some], colour=colour, has_dots=True)
        for colour, (name, some) in enumerate(named.items())
    )


def bars_by_name(labels: Sequence[str], values: Mapping[str, Sequence[float]]) -> tuple[Bars, ...]:
    """Return bars for each name, with a value for each label."""
    return tuple(
        Bars(name, labels, numbers, colour=colour)
        for colour, (name, numbers) in enumerate(values.items())
    )


def band(values: Sequence[float], errors: Sequence[float]) -> dict[str, Any]:
    """Return `low` and `high` of a line; nothing where all errors are 0."""
    if not any(errors):
        return {}
    pairs = list(zip(values, errors, strict=True))
    return {"low": [v - e for v, e in pairs], "high": [v + e for v, e in pairs]}
