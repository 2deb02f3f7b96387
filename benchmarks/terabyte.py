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

SETTINGS = (
    Setting("target", MLPERF),
    Setting("batch-2048", MLPERF, batch=2048),
    Setting("batch-32768", MLPERF, batch=32768),
    Setting("zipf-0.9", MLPERF, skew=0.9),
    Setting("budget-2", MLPERF, budget=0.02),
    Setting("budget-10", MLPERF, budget=0.10),
    Setting("dim-128", MLPERF, dim=128),
    Setting("rowwise-adagrad", MLPERF, optimizer="rowwise-adagrad"),
    Setting("adam", capped(10_000_000), optimizer="adam"),  # 54 M rows, three times as wide
)

SUITE = Suite(
    "terabyte",
    __doc__.split("\n")[0],
    SETTINGS,
    default={
        "target": (
            "hotrow-all-fast",
            "hotrow-lookahead",
            "hotrow-lru",
            "hotrow-scratchpipe",
            "hotrow-uncached",
            "hotrow-hybrid",
            "fbgemm-hbm",
            "fbgemm-cached",
            "fbgemm-prefetch",
            "fbgemm-uvm",
            "torch-hybrid",
        ),
        "*": ("hotrow-all-fast", "hotrow-lookahead", "fbgemm-cached"),
    },
    systems=(
        "hotrow-all-fast",
        "hotrow-lookahead",
        "hotrow-lru",
        "hotrow-scratchpipe",
        "hotrow-uncached",
        "hotrow-hybrid",
        "fbgemm-hbm",
        "fbgemm-cached",
        "fbgemm-prefetch",
        "fbgemm-cached-rows",
        "fbgemm-uvm",
        "torch-hybrid",
    ),
)

if __name__ == "__main__":
    main(SUITE)
