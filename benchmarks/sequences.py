"""Sequences: a million lookups per step without pooling, of wide rows.

    python benchmarks/sequences.py --timed 1000

One table of 6 M rows and dimension 512 with row-wise Adagrad, 1,048,576 ids per step of which 14 %
are different (power law 1.15), 10 % of the bytes in HBM. Forward, backward from a given gradient,
update. Each lookup gives a vector of its own. `-written` counts every row as written before.
"""

from __future__ import annotations

from suite import Setting, Suite, main

SETTINGS = (
    Setting(
        "sequences",
        (6_000_000,),
        dim=512,
        batch=1 << 20,
        skew=1.15,
        budget=0.10,
        optimizer="rowwise-adagrad",
        has_dense=False,
        is_pooled=False,
        least_warmup=60,
        tail=80,
    ),
)

SYSTEMS = ("hotrow-lookahead-written", "hotrow-all-fast", "fbgemm-cached", "hotrow-lookahead")

SUITE = Suite(
    "sequences",
    __doc__.split("\n")[0],
    SETTINGS,
    default={"*": SYSTEMS[:-1]},
    systems=SYSTEMS,
)

if __name__ == "__main__":
    main(SUITE)
