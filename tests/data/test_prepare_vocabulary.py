"""Counting values and giving them rows: as a plain counter does, within the memory that is said."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from hotrow.data.prepared.vocabulary import (
    LEAST_PENDING,
    Counted,
    Tally,
    Vocabulary,
    bytes_per_value,
    spread,
)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
@pytest.mark.parametrize(("min_frequency", "max_rows"), [(1, None), (3, None), (1, 40), (2, 100)])
def test_rows_are_those_of_a_plain_counter(
    dtype: str, min_frequency: int, max_rows: int | None
) -> None:
    draw = np.random.default_rng(0)
    tally, uses = Tally(dtype, pending=50, together=16), Counter[int]()
    for _ in range(12):
        keys = (draw.zipf(1.3, 200) % 2**31).astype(dtype)
        tally.add(Counted.of(keys))
        uses.update(keys.tolist())
    kept, different = tally.vocabulary(min_frequency=min_frequency, max_rows=max_rows)
    assert different == len(uses)
    # The most frequent first, then by the order of the spread keys.
    order = {key: int(spread(np.array([key], dtype))[0]) for key in uses}
    frequent = sorted(uses, key=lambda key: (-uses[key], order[key]))
    frequent = [key for key in frequent if uses[key] >= min_frequency]
    frequent = frequent[: None if max_rows is None else max_rows - 1]
    assert kept.tolist() == sorted(order[key] for key in frequent)
    every = np.array(list(uses), dtype)
    rows = Vocabulary(kept).rows_of(every)
    assert {key for key, row in zip(uses, rows, strict=True) if row} == set(frequent)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_a_table_takes_no_more_memory_than_is_reckoned_with(dtype: str) -> None:
    """One table alone is the worst case: of several only one is worked on at a time."""
    draw, part = np.random.default_rng(0), LEAST_PENDING // 8
    apart = 10 * LEAST_PENDING  # pending values and those that come in
    tracemalloc.start()
    tally = Tally(dtype, pending=part, together=part)
    for _ in range(16):
        tracemalloc.reset_peak()
        tally.add(Counted.of(draw.integers(0, 2**32, part, dtype=dtype)))
        _, peak = tracemalloc.get_traced_memory()
        assert peak <= bytes_per_value(dtype) * len(tally) + apart
    tally.settle()
    tracemalloc.reset_peak()
    tally.vocabulary(min_frequency=1, max_rows=len(tally) // 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= bytes_per_value(dtype) * len(tally)
