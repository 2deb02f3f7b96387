"""Drawings for pages with a light or a dark ground. Knows shapes and colours, no results."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

# Each with its form on a dark ground; they differ in lightness, too, for eyes that see few hues.
COLOURS = {
    "blue": ("#2f6db5", "#6aa7ec"),
    "orange": ("#d9730d", "#f5a04c"),
    "yellow": ("#c9a800", "#e8d36a"),
    "green": ("#3b8a3e", "#7cc47f"),
    "purple": ("#7d4fa8", "#b892dd"),
    "red": ("#bb3b3b", "#ee8080"),
    "grey": ("#8a8f98", "#868c96"),
}
INK, FAINT, GROUND = ("#1f2328", "#e6e8eb"), ("#59636e", "#a3abb5"), ("#ffffff", "#14171c")


class Drawing:
    """Shapes in the order they were drawn."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._shapes.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
            f'class="{colour}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """`style`: a colour, or "rule" or "dash"."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" class="{style} line"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{colour}"/>')

    def text(
        self, x: float, y: float, text: str, *, style: str = "ink", anchor: str = "start"
    ) -> None:
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} '
                f'{self.height:g}" font-family="sans-serif" font-size="14" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_rules(0)} @media (prefers-color-scheme: dark) {{{_rules(1)}}} "
                ".line {fill: none; stroke-width: 2} .rule {stroke-width: 1} "
                ".dash {stroke-width: 1; stroke-dasharray: 4 4} .small {font-size: 12px}</style>",
                f'<rect width="{self.width:g}" height="{self.height:g}" rx="8" class="ground"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self), encoding="utf-8")


def _rules(dark: int) -> str:
    rules = [f".ground {{fill: {GROUND[dark]}}}", f".ink {{fill: {INK[dark]}}}"]
    rules.append(f".faint, .small {{fill: {FAINT[dark]}}}")
    rules.append(f".rule, .dash {{stroke: {FAINT[dark]}; stroke-opacity: 0.5}}")
    for name, both in COLOURS.items():
        rules.append(f".{name} {{fill: {both[dark]}}} .{name}.line {{stroke: {both[dark]}}}")
    return " ".join(rules)
