"""The numbers that planning keeps on the device: one name for the host and for kernels."""

from __future__ import annotations

import triton.language as tl


class Word(int, tl.constexpr):  # type: ignore[misc]
    """An int for the host. Kernels use it as a constant, which Triton wants of global names."""

    def __init__(self, value: int) -> None:
        tl.constexpr.__init__(self, value)


NEVER = Word(2**31 - 1)  # no known batch uses a row; or: its slot may not be taken
PINNED = NEVER
DOUBLED = Word(512)  # twice the uses are worth as many batches of recency

# Words of `state`, one set per scratchpad: what planning remembers from batch to batch.
CLOCK, HALT, HEAD, END, FLOOR, KNOWN, TOMBSTONES, EXPECTED, ROW_IN, ROW_OUT, COME = map(
    Word, range(11)
)
STATE_WORDS = Word(16)
# Words of `counts`, one set per plan.
UNIQUE, MISSING, AGAIN, MOVES, FIRST_BAD, OUTCOME, EVICTED, SOONEST = map(Word, range(8))
COUNT_WORDS = Word(8)
NO_BAD_ID = NEVER  # in FIRST_BAD
# What became of a plan.
PLANNED, NO_ROOM, BAD_ID, NOT_PLANNED = map(Word, range(4))
# Words of `per_block`, one set per block of a launch: rows that begin here, by what they are.
BLOCK_FIRSTS, BLOCK_MISSING, BLOCK_AGAIN = map(Word, range(3))
BLOCK_WORDS = Word(4)
# Words of `features`, one set per feature: where its ids begin, how many there are, which index
# is padding (-1: none), and which column of a dense batch it is.
FEATURE_BASE, FEATURE_LIMIT, FEATURE_PADDING, FEATURE_COLUMN = map(Word, range(4))
FEATURE_WORDS = Word(4)
# Words of `traffic`, one set per table.
TABLE_LOOKUPS, TABLE_ROWS, TABLE_FETCHED, TABLE_EVICTED = map(Word, range(4))
TABLE_WORDS = Word(4)
# What `next_use` tells of the batches to come, as far as they are known: nothing; for each slot the
# first that uses its row; or, where a row's id is hashed to, the last that may use it. That stays
# true as batches and rows come and go, and takes no search in the map.
NOTHING, FIRST_USE, LAST_USE = map(Word, range(3))
