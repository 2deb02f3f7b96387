"""A DLRM with the tables of MLPerf's Criteo Terabyte, one axis varied at a time.

    python benchmarks/terabyte.py --list
    python benchmarks/terabyte.py --only target
    python benchmarks/terabyte.py --only 'target/hotrow-*' dim-128/fbgemm-cached --minutes 8

26 features with one id each; the target is dimension 64, batch 8192, SGD, power law 1.05, and 5 %
of the bytes in HBM. Every other setting differs from it in the one thing its name says.
"""

from __future__ import annotations

from suite import Setting, Suite, main

from hotrow.data import TERABYTE_ROWS


def capped(most: int) -> tuple[int, ...]:
    return tuple(min(num_rows, most) for num_rows in TERABYTE_ROWS)


MLPERF = capped(40_000_000)  # 204 M rows

# The most valuable first: minutes may be over before the last.
SETTINGS = (
    Setting("target", MLPERF),
    Setting("adam", capped(10_000_000), optimizer="adam"),  # 54 M rows, three times as wide
    Setting("rowwise-adagrad", MLPERF, optimizer="rowwise-adagrad"),
    Setting("dim-128", MLPERF, dim=128),
    Setting("zipf-0.9", MLPERF, skew=0.9),
    Setting("budget-2", MLPERF, budget=0.02),
    Setting("budget-10", MLPERF, budget=0.10),
    Setting("batch-2048", MLPERF, batch=2048),
    Setting("batch-32768", MLPERF, batch=32768),
)

SYSTEMS = (
    "hotrow-lookahead",
    "hotrow-all-fast",
    "hotrow-lookahead-written",
    "fbgemm-cached",
    "fbgemm-hbm",
    "fbgemm-prefetch",
    "hotrow-lru",
    "hotrow-scratchpipe",
    "hotrow-uncached",
    "hotrow-hybrid",
    "fbgemm-uvm",
    "torch-hybrid",
    "fbgemm-cached-rows",
    # For an eager loop, with --no-compile --no-graphs.
    "hotrow-loop-written",
    "dense-alone",
)

AXES = ("hotrow-lookahead", "hotrow-all-fast", "fbgemm-cached")
SUITE = Suite(
    "terabyte",
    __doc__.split("\n")[0],
    SETTINGS,
    default={
        "target": SYSTEMS[: SYSTEMS.index("fbgemm-cached-rows")],
        # More or fewer slots change nothing where every row is in HBM: the target's figures hold.
        "budget-2": tuple(name for name in AXES if name != "hotrow-all-fast"),
        "budget-10": tuple(name for name in AXES if name != "hotrow-all-fast"),
        "*": AXES,
    },
    systems=SYSTEMS,
)

if __name__ == "__main__":
    main(SUITE)
