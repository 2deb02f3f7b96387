"""MLPerf's DLRM-DCNv2: 214 lookups per sample, rows of 1 KiB with Adagrad's state.

    python benchmarks/dcnv2.py --timed 300

The tables of Criteo Terabyte with as many ids per feature as MLPerf's multi-hot data has, dimension
128, batch 6912. Tables have 9.5 M rows at the most (52 M in all, 49 GiB with state), so that they
fit the machine; ids by a power law of 1.05. `-written` counts every row as written before.
"""

from __future__ import annotations

from suite import Setting, Suite, main
from terabyte import capped

# Of mlcommons/training, recommendation_v2/torchrec_dlrm: `multi_hot_sizes`.
HOTNESS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
ROWS = 9_500_000


def setting(name: str, budget: float, rows: int = ROWS, optimizer: str = "adagrad") -> Setting:
    return Setting(
        name, capped(rows), dim=128, batch=6912, hotness=HOTNESS, budget=budget,
        optimizer=optimizer, model="dcnv2", least_warmup=100, tail=60,
    )  # fmt: skip


SETTINGS = (
    setting("budget-5", 0.05),
    setting("budget-20", 0.20),
    setting("budget-50", 0.50),
    # FBGEMM does not cache the state of Adagrad's columns; this one's is a number per row.
    setting("rowwise", 0.05, optimizer="rowwise-adagrad"),
)

SYSTEMS = (
    "hotrow-lookahead-written",
    "hotrow-all-fast",
    "hotrow-lookahead",
    "fbgemm-cached",
    "fbgemm-hbm",
)

SUITE = Suite(
    "dcnv2",
    __doc__.split("\n")[0],
    SETTINGS,
    default={"*": SYSTEMS},
    systems=SYSTEMS,
)

if __name__ == "__main__":
    main(SUITE)
