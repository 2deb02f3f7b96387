"""Which samples are for training, which for validation and which for the test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrow.support.hashing import mixed

_PARTS = 10  # at random: one of ten for validation, one for the test
_MOST_TIMES = 1 << 22
_LAST = 7  # of one file the last seventh is held back, as of a week the last day


@dataclass(frozen=True)
class ByTime:
    """Lines (or times) before `validation` are for training, those from `test` on for the test."""

    validation: int
    test: int

    def __call__(self, lines: NDArray[np.int64]) -> NDArray[np.uint8]:
        """For each line, counted over all files, the number of its split."""
        later = (lines >= self.validation).astype(np.uint8)
        return later + (lines >= self.test)


@dataclass(frozen=True)
class AtRandom:
    """Each line by itself: where it goes depends on the seed and its number alone."""

    seed: int

    def __call__(self, lines: NDArray[np.int64]) -> NDArray[np.uint8]:
        start = mixed(np.array([self.seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        part = mixed(start ^ lines.astype(np.uint64)) % np.uint64(_PARTS)
        return np.where(part < 2, part + 1, 0).astype(np.uint8)


@dataclass(frozen=True)
class LastDay:
    """Lines from `held` on are held back: before `middle` for the test, the others for validation.

    In that order, because published figures are of the first half.
    """

    held: int
    middle: int

    def __call__(self, lines: NDArray[np.int64]) -> NDArray[np.uint8]:
        is_test = (lines >= self.held) & (lines < self.middle)
        return np.where(lines >= self.middle, 1, np.where(is_test, 2, 0)).astype(np.uint8)


Split = ByTime | AtRandom | LastDay


def last_day_halved(lines_of_files: Sequence[int], *, first_line: int = 0) -> LastDay:
    """The last of several files, or the last seventh of one, rounded down: its first half for the
    test and its second for validation, all as in the DLRM reference."""
    total = sum(lines_of_files)
    held = lines_of_files[-1] if len(lines_of_files) > 1 else total // _LAST
    end = first_line + total
    return LastDay(end - held, end - held // 2)


def out_of_order(names: Sequence[str]) -> str | None:
    """What to say where the last file may not be the last day: a shell puts day_10 before day_2."""
    numbers = [[int(each) for each in re.findall(r"[0-9]+", name)] for name in names]
    if len({re.sub(r"[0-9]+", "", name) for name in names}) > 1 or numbers == sorted(numbers):
        return None
    expected = names[numbers.index(max(numbers))]
    return (
        f"files are taken as they are given, in the order of time: {names[-1]} is the last one, "
        f"and by its number that would be {expected}. In a shell, day_{{0..23}} keeps the order"
    )


def by_quantiles(times: Sequence[NDArray[np.int64]]) -> ByTime:
    """The first 70 % of the time line for training, the rest halved, as TBSM splits Taobao.

    Of very many samples a regular part decides.
    """
    step = 1 + sum(map(len, times)) // _MOST_TIMES
    every = np.sort(np.concatenate([each[::step] for each in times]))
    return ByTime(int(every[len(every) * 7 // 10]), int(every[len(every) * 17 // 20]))
