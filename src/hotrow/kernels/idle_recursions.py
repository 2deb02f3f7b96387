"""What steps without a gradient do to a row, as coefficients that grow step by step.

An entry belongs to one beginning: the step after which rows are idle. `start` is the
identity, `advance` adds one step to any number of entries. Everything is float64 and elementwise,
so an entry has the same bits alone, among others, and in arrays of another shape. The first `rows`
numbers of an entry are what rows use, as float32; the others belong to the recursion.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotrow.kernels.dense_rules import LinearStep, SeriesStep

Entries = NDArray[np.float64]  # [size, ...]: the coefficients of any number of entries
# Numbers of terms of the series. With the other coefficients a row has 64, 96 or 128 bytes.
TERMS = (11, 19, 27)
# The series is centred on the steps up to where this share of an idle row's movement is left.
_SHARE_LEFT = 5e-4
# Of the interval: powers of the inverse stay far from overflow, and no divisor is zero.
_LEAST_WIDTH, _MOST_WIDTH = 0.02, 0.95
_LEAST_CENTRE = 1e-30
# Bound of the series' error, relative to a row's movement; beyond it terms are added.
MOST_ERROR = 1e-4


class Recursion(Protocol):
    """One kind of coefficients."""

    size: int  # numbers of an entry
    rows: int  # of them, those that rows use

    def start(self, step: int, term: Any) -> tuple[float, ...]:
        """Return the numbers of the identity after a step, from the terms of that step."""

    def advance(self, entries: Entries, term: Any) -> None:
        """Add a step to entries, in place. `term` has numbers, or arrays that broadcast.

        Without the numbers that rows do not use, no error is known later.
        """

    def error(self, entries: Entries) -> float:
        """Return a bound of the error of each entry's movement, the largest of all entries.

        It is relative to the movement with the largest lr since the entry began.
        """


class Linear:
    """(w, b) becomes a matrix times (w, b); other state is multiplied by a factor."""

    size = rows = 5  # ww, wb, bw, bb, factor

    def start(self, step: int, term: LinearStep) -> tuple[float, ...]:
        return (1.0, 0.0, 0.0, 1.0, 1.0)

    def advance(self, entries: Entries, term: LinearStep) -> None:
        w, b = entries[0:2], entries[2:4]
        new_w = term.ww * w + term.wb * b
        b *= term.bb
        b += term.bw * w
        w[:] = new_w
        entries[4] *= term.factor
        _flush(entries)

    def error(self, entries: Entries) -> float:
        return 0.0


class Series:
    """Adam's movement of an idle row as a Chebyshev series in z = (e - e0) / (e + e0).

    e(s) is what the root of the second moment is multiplied by at step s, e0 the middle of an
    interval of them, and z runs from -width to width in it. docs/numerics.md has the formulas.
    """

    SHRINK, KEPT1, KEPT2, CENTRE, WIDTH = range(5)
    FIRST_TERM = 5
    _MISSED, _MOVED, _PEAK = -3, -2, -1  # for the error: two sums, and the largest lr

    def __init__(self, terms: int) -> None:
        self._terms = terms
        self.rows = self.FIRST_TERM + terms
        self.size = self.rows + 3

    def start(self, step: int, term: SeriesStep) -> tuple[float, ...]:
        centre, width = interval(step, term.beta1, term.beta2)
        return (1.0, 1.0, 1.0, centre, width, *[0.0] * (self._terms + 3))

    def advance(self, entries: Entries, term: SeriesStep) -> None:
        entries[self.KEPT1] *= term.beta1
        entries[self.KEPT2] *= term.beta2
        entries[self.SHRINK] *= term.shrink
        _flush(entries[: self.CENTRE])
        centre, width = entries[self.CENTRE], entries[self.WIDTH]
        e = np.sqrt(entries[self.KEPT2] / term.correction2)
        z = (e - centre) / (e + centre)
        unit = 2 * centre / (e + centre) * entries[self.KEPT1] / term.correction1  # 2 ... is 1 - z
        x = z / width
        polynomials = _chebyshev(x, self._terms)
        moments = entries[self.FIRST_TERM : self.rows]
        moments *= term.shrink
        moments += unit * term.lr * polynomials[:-1]
        if len(entries) == self.size:
            self._bound(entries, term, unit, z, np.abs(x), polynomials[-1])

    def _bound(self, entries: Entries, term: SeriesStep, unit: Any, z: Any, x: Any, t: Any) -> None:
        """Add a step to the sum of the terms that the series leaves out, and to the movement."""
        width, shrink = entries[self.WIDTH], np.abs(term.shrink)
        p = width / (1 + np.sqrt((1 - width) * (1 + width)))
        # |T_j(x)| is at most 1 within the interval, and at most growth ** j beyond it.
        growth = np.maximum(x + np.sqrt(np.maximum(x * x - 1, 0)), 1)
        ratio = 1 - np.minimum(p * growth, 1 - 1e-6)
        power = _to_the(p, self._terms)
        missed = unit * term.lr * (2 * power * np.maximum(2 * np.abs(t), 1) / ratio)
        entries[self._MISSED] = entries[self._MISSED] * shrink + missed
        entries[self._MOVED] = entries[self._MOVED] * shrink + unit / (1 + np.abs(z))
        entries[self._PEAK] = np.maximum(entries[self._PEAK], term.lr)

    def error(self, entries: Entries) -> float:
        width, moved = entries[self.WIDTH], entries[self._MOVED] * entries[self._PEAK]
        outer = np.sqrt((1 - width) * (1 + width))
        return float((entries[self._MISSED] / (outer * np.maximum(moved, 1e-300))).max(initial=0))


def interval(step: int, beta1: float, beta2: float) -> tuple[float, float]:
    """Return centre and width of the series for rows that are idle after a step.

    With constant betas the movement falls by beta1 / sqrt(beta2) in each step, so a number of
    steps has nearly all of it. The centre is the geometric mean of the first and last e of these.
    """
    fall = beta1 / math.sqrt(beta2) if beta2 else 0.0
    steps = 1.0
    if fall:
        steps = max(math.ceil(math.log(_SHARE_LEFT) / math.log(min(fall, 1 - 1e-6))), 1)
    first = math.sqrt(beta2 / (1 - beta2 ** (step + 1)))
    last = math.sqrt(beta2**steps / (1 - beta2 ** (step + steps)))
    centre = max(math.sqrt(first * last), _LEAST_CENTRE)
    width = (first - centre) / (first + centre)
    return centre, min(max(width, _LEAST_WIDTH), _MOST_WIDTH)


def _flush(values: Any) -> None:
    """Make numbers zero that no float32 can hold: as denormal ones they would stay, and be slow."""
    values *= np.abs(values) >= 1e-200


def _chebyshev(x: Any, degree: int) -> Entries:
    """Return the polynomials 0 to `degree` at x."""
    out = np.empty((degree + 1, *x.shape))
    out[0], out[1] = 1, x
    twice = x + x
    for j in range(2, degree + 1):
        np.multiply(twice, out[j - 1], out=out[j])
        out[j] -= out[j - 2]
    return out


def _to_the(base: Any, power: int) -> Any:
    """Return a power by multiplications alone: `**` need not round alike in all shapes."""
    result = base
    for _ in range(power - 1):
        result = result * base
    return result
