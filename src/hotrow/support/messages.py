"""Warnings that point at the line of the user's which led to them; lists and numbers for people."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_ALL_DIGITS = 17  # that a float can have

# Frames in between: ours, and torch's where it calls us.
_INSIDE = tuple(
    str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
)


def warn(message: str) -> None:
    """A UserWarning at the innermost line that is neither hotrow's nor torch's."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)


def _as_argument(name: str, value: str) -> str:
    return f"{name}={value!r}"


_written: Callable[[str, str], str] = _as_argument


def setting(name: str, value: str) -> str:
    """Return a collection's argument as the user writes it: in Python, unless set otherwise."""
    return _written(name, value)


@contextmanager
def settings_written(form: Callable[[str, str], str]) -> Iterator[None]:
    """Inside, `setting` writes so."""
    global _written
    before, _written = _written, form
    try:
        yield
    finally:
        _written = before


def few(names: Iterable[str], *, most: int = 8, between: str = ", ") -> str:
    """The first of them, and how many more there are: a model may have a thousand tables."""
    every = list(names)
    shown = between.join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most:,} more"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like another one; None: none is."""
    return next(iter(difflib.get_close_matches(name.lower(), list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Behind a name that is not known: the nearest one that is, if any is near."""
    near = nearest(name, known)
    return "" if near is None else f" (did you mean {near!r}?)"


def many(count: int, one: str, more: str | None = None) -> str:
    """So many of them: `many(1, "row")` is "1 row", `many(2000, "batch", "batches")` has 2,000."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def apart(*numbers: float, digits: int = 3, kind: str = "g") -> list[str]:
    """Numbers as texts, with so many digits, or as many more as different numbers need to look
    different. `kind` is a format's: "g", "f" or "%"."""
    while True:
        texts = [f"{number:.{digits}{kind}}" for number in numbers]
        if digits >= _ALL_DIGITS or len(set(texts)) == len(set(numbers)):
            return texts
        digits += 1
