"""The numbers that planning keeps on the device, and what they mean."""

NEVER = 2**31 - 1
PINNED = 2**31 - 1
DOUBLED = 512  # twice the uses are worth as many batches of recency

# Words of `state`, one set per scratchpad: what planning remembers from batch to batch.
CLOCK, HALT, HEAD, END, FLOOR, KNOWN, TOMBSTONES, EXPECTED, ROW_IN, ROW_OUT, COME = range(11)
STATE_WORDS = 16
# Words of `counts`, one set per plan.
UNIQUE, MISSING, AGAIN, MOVES, FIRST_BAD, OUTCOME, EVICTED, SOONEST = range(8)
COUNT_WORDS = 8
# What became of a plan.
PLANNED, NO_ROOM, BAD_ID, NOT_PLANNED = range(4)
NO_BAD_ID = 2**31 - 1
# What `next_use` tells of the batches to come, as far as they are known: nothing; for each slot the
# first that uses its row; or, where a row's id is hashed to, the last that may use it. That stays
# true as batches and rows come and go, and takes no search in the map.
NOTHING, FIRST_USE, LAST_USE = range(3)
