"""Generated ids: skewed, seeded, and no row of a table left out."""

from __future__ import annotations

import numpy as np

ROWS = 20_000


def skewed(rows: int, count: int, seed: int, first: int = 0) -> np.ndarray:
    """Return ids from `first` to `rows - 1`; few are frequent, all occur if `count` allows."""
    random = np.random.default_rng(seed)
    names = random.permutation(np.arange(first, rows))
    ids = names[(random.random(count) ** 6 * len(names)).astype(np.int64)]
    # Every row once, in random places, so that tables are as large as they say.
    places = random.permutation(count)[: len(names)]
    ids[places] = names[: len(places)]
    return ids


def labels(*columns: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return 0 or 1 for each sample, more often 1 where ids say so."""
    scores = sum(np.sin(column * (place + 1.0)) for place, column in enumerate(columns))
    noise = np.random.default_rng(seed).normal(size=len(columns[0]))
    return (scores + noise > 0).astype(np.float32)
