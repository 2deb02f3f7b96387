"""The embedding part alone with a million lookups per step, in the shape of a public benchmark.

    python benchmarks/multihot.py --only sgd adam

10 tables of 1 M rows and dimension 128, about 104,857 ids each per step, power law 1.05: 330 k
different rows per step. Forward, backward from a given gradient, update; 20 % of the bytes in HBM.
`sgd` and `adam` pool bags of 10 ids; `-single` is one id per bag, as NVIDIA's benchmark of
dynamicemb measures FBGEMM.
"""

from __future__ import annotations

from suite import Setting, Suite, main

TABLES = (1_000_000,) * 10
IDS = 104_857
HOTNESS = 10


def alone(name: str, optimizer: str, *, hotness: int) -> Setting:
    return Setting(
        name,
        TABLES,
        dim=128,
        batch=IDS // hotness,
        hotness=hotness,
        budget=0.20,
        optimizer=optimizer,
        output="float32",
        has_dense=False,
        least_warmup=60,  # slots are full after a dozen steps
        tail=80,
    )


SETTINGS = (
    alone("sgd", "sgd", hotness=HOTNESS),
    alone("adam", "adam", hotness=HOTNESS),
    alone("sgd-single", "sgd", hotness=1),
    alone("adam-single", "adam", hotness=1),
)

SYSTEMS = (
    "hotrow-lookahead",
    "hotrow-lookahead-written",
    "hotrow-all-fast",
    "fbgemm-cached",
    "fbgemm-hbm",
    "fbgemm-prefetch",
    "fbgemm-uvm",
)

SUITE = Suite(
    "multihot",
    __doc__.split("\n")[0],
    SETTINGS,
    default={"*": SYSTEMS},
    systems=SYSTEMS,
)

if __name__ == "__main__":
    main(SUITE)
