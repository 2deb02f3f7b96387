"""Which way rows move between the store and the slots, and how much of the device that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class FillChoice:
    """How rows move, and why."""

    form: str  # zero-copy, bulk, staged
    why: str

    def __str__(self) -> str:
        return f"{self.form} ({self.why})"


class Level(NamedTuple):
    """What a fill may take of the device."""

    fill_blocks: int  # where rows are read and written, each takes a multiprocessor away
    read_blocks: int  # where they are only read


# More blocks slow down matrix products, which want all multiprocessors; the last saturate the link.
LEVELS = (Level(2, 1), Level(2, 2), Level(4, 4), Level(8, 8), Level(16, 16))
FULL = len(LEVELS) - 1
_LOOKS = 4  # the mean of so many decides
_WAITS = 0.25  # of a step: rows come too late
_WAITS_NOT = 0.02
_PATIENCE = 16  # looks before another level is tried; twice as many after each that is no better
_MOST_PATIENCE = 512
_SHORTER = 0.99  # of a step's time, or a level is no better
_FEW_BYTES_PER_SECOND = 20e9  # by the first level, both ways together
_SECONDS = 2e-3  # a fill that may take longer begins with a higher level

_LEAST_CORES = 4  # one launches, others load data


class Effort:
    """How much of the device fills get.

    More while training waits for them. Otherwise the level beside the present one is tried now and
    then, and kept if steps are shorter with it: with fewer blocks fills take longer, with more they
    disturb training.
    """

    def __init__(self, number: int = 0, *, is_fixed: bool = False) -> None:
        self.number, self._is_fixed = number, is_fixed
        self._looks: list[tuple[float, float]] = []
        self._tried = 0  # 1: the level above is being tried, -1: the one below
        self._before = 0.0  # seconds of a step without it
        self._calm = 0  # looks since a level was tried
        self._patience = _PATIENCE
        self._has_begun = is_fixed

    @property
    def level(self) -> Level:
        return LEVELS[self.number]

    def begin(self, num_bytes: int) -> None:
        """Choose the level to begin with, by what the first fill moves."""
        if not self._has_begun:
            self._has_begun = True
            seconds = num_bytes / _FEW_BYTES_PER_SECOND
            if seconds > _SECONDS:
                self.number = FULL - 1 if seconds > 2 * _SECONDS else FULL - 2

    def note(self, waited: float, step: float) -> None:
        """Training has waited for rows, for a part of a step of so many seconds."""
        if self._is_fixed:
            return
        self._looks.append((waited, step))
        if len(self._looks) < _LOOKS + (self._tried != 0):
            return
        looks = self._looks[-_LOOKS:]  # without the first with another level
        self._looks = []
        waited, step = (sum(each) / _LOOKS for each in zip(*looks, strict=True))
        if self._tried:
            self._judge(step)
        elif waited > _WAITS and self.number < FULL:
            self.number += 1
            self._calm = 0
        else:
            self._calm += _LOOKS
            if self._calm >= self._patience:
                self._try(1 if waited > _WAITS_NOT else -1, step)

    def _try(self, direction: int, step: float) -> None:
        self._calm = 0
        if 0 <= self.number + direction <= FULL:
            self._tried, self._before = direction, step
            self.number += direction

    def _judge(self, step: float) -> None:
        if step < _SHORTER * self._before:
            self._patience = _PATIENCE
        else:
            self.number -= self._tried
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._tried = 0


def choose(*, bulk: bool, cores: int | None = None) -> FillChoice:
    """Choose a form; `bulk`: whether leaving rows may go back in bulk.

    They go as fast as the CPU has time for them, and the device writes the others, so nothing needs
    to be measured.
    """
    cores = torch.get_num_threads() if cores is None else cores
    if not bulk:
        return FillChoice("zero-copy", "leaving rows cannot wait")
    if cores < _LEAST_CORES:
        return FillChoice("zero-copy", f"{cores} cores have enough to do")
    return FillChoice("bulk", "the CPU writes rows back while it has time")
