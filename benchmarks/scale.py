"""Does anything but memory grow with the number of rows? One trace over ever larger tables.

    python benchmarks/scale.py
    python benchmarks/scale.py --rows 1000000 500000000

The same lookups of 1 M different ids are spread over 1 M to 500 M rows of dimension 16 by a map
that is random but keeps the ids' order, so that hits and misses stay equal whatever ties are broken
by. Step time and HBM beside the slots should not grow; start-up should take as long as touching and
page-locking the rows' memory. The embedding part alone, SGD, the same bytes of budget throughout.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from harness import (
    LEAST_STEPS,
    Deadline,
    Session,
    device_for,
    hbm,
    parser,
    reset_hbm,
    say,
    time_steps,
)
from hostmem import HostMemory
from suite import COUNTED_STEPS, clean_up
from systems.ours import EmbeddingAlone, collection, facts_of, predictions_are_losses, trainer
from torch import Tensor
from traces import Trace, feature_names

from hotrow.data.popularity import Scatter
from hotrow.support.hashing import key_of

DISTINCT = 1_000_000
ROWS = (1_000_000, 10_000_000, 100_000_000, 500_000_000)
DIM, BATCH, FEATURES, SKEW = 16, 2048, 26, 1.05
BUDGET_BYTES = 32 * 2**20
WARMUP = 400
TAIL = 320  # batches after the timed ones, so that looking ahead never meets the end


def spread(num_rows: int) -> Tensor:
    """DISTINCT different rows among `num_rows`, at random places, ascending."""
    scatter = Scatter(num_rows, key=key_of(0, "spread", 0))
    return torch.from_numpy(np.sort(scatter(np.arange(min(DISTINCT, num_rows)))))


def memory_seconds(num_bytes: int, device: torch.device) -> dict[str, float]:
    """What the memory alone takes, before anything is written to it."""
    memory = HostMemory(num_bytes)
    seconds = {"touch_seconds": memory.touch()}
    if device.type == "cuda":
        seconds["lock_seconds"] = memory.lock()
    memory.close()
    return seconds


def measure(
    num_rows: int, trace: Trace, arguments: argparse.Namespace, deadline: Deadline
) -> dict[str, Any]:
    device = device_for(arguments)
    memory = memory_seconds(4 * DIM * num_rows, device)
    clean_up()
    reset_hbm(device)
    started = time.perf_counter()
    embedding = collection(
        [num_rows],
        DIM,
        strategy=arguments.strategy,
        optimizer="sgd",
        budget_bytes=BUDGET_BYTES,
        device=device,
        features=[feature_names(FEATURES)],
    )
    startup = time.perf_counter() - started
    say(f"    built in {startup:.1f} s; the memory alone {sum(memory.values()):.1f} s")
    model = EmbeddingAlone(embedding, 1e-3 * torch.randn(BATCH, FEATURES * DIM, device=device))
    training = trainer(
        model, None, loss=predictions_are_losses, device=device, compile=False, graphs=True
    )
    steps = training.run(trace.batches(0, trace.steps))
    try:
        timing = time_steps(
            steps, warmup=arguments.warmup, timed=arguments.timed, device=device, deadline=deadline
        )
        facts = facts_of(embedding, steps, arguments.counted)
    finally:
        steps.close()
    used, parts = hbm(device), embedding.memory()
    slots = parts.get("slots", parts.get("rows", 0))
    return {
        "rows": num_rows,
        "step_ms": asdict(timing),
        "samples_per_second": BATCH / timing.whole.mean * 1000,
        "hbm_bytes": {
            "tables": sum(parts.values()),
            "slots": slots,
            "beside_slots": used.get("allocated_peak", sum(parts.values())) - slots,
            **used,
        },
        "startup_seconds": startup,
        **memory,
        "facts": facts,
    }


def startup_ratio(measured: dict[str, Any]) -> float:
    """Start-up over what touching and page-locking the rows' memory takes."""
    alone = measured["touch_seconds"] + measured.get("lock_seconds", 0)
    return float(measured["startup_seconds"] / alone)


def one_line(measured: dict[str, Any]) -> str:
    facts = measured["facts"]
    return (
        f"{measured['step_ms']['p50']:8.3f} ms, "
        f"{measured['hbm_bytes']['beside_slots'] / 2**20:7.1f} MiB beside the slots, "
        f"{facts['bytes_per_slot']:.1f} bytes per slot, start-up "
        f"{measured['startup_seconds']:.1f} s, {startup_ratio(measured):.2f} times the memory "
        f"alone; {facts['fetched_rows_per_step']:,.0f} rows fetched per step"
    )


def main() -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--rows", type=int, nargs="+", default=ROWS)
    made.add_argument("--strategy", default="lookahead")
    made.add_argument("--warmup", type=int, default=WARMUP, help="steps before the timed ones")
    made.add_argument("--timed", type=int, default=300, help="steps that are timed")
    made.add_argument("--counted", type=int, default=COUNTED_STEPS, help="steps after those")
    arguments = made.parse_args()
    tail = TAIL
    if arguments.smoke:
        arguments.rows, tail = (1_000_000, 2_000_000), 20
        arguments.warmup, arguments.timed, arguments.counted = 2, LEAST_STEPS, 2
    device, session = device_for(arguments), Session("scale", arguments)
    trace = Trace(
        [DISTINCT],
        steps=arguments.warmup + arguments.timed + tail,
        batch=BATCH,
        skew=SKEW,
        table_of=[0] * FEATURES,
        lock=device.type == "cuda",
    )
    ids = trace.ids.clone()
    for num_rows in arguments.rows:
        say(f"{num_rows:,} rows, {session.deadline.minutes_left:.1f} minutes left")
        trace.ids.copy_(spread(num_rows)[ids])
        run, system = f"rows-{num_rows}", f"hotrow-{arguments.strategy}"
        seconds = 0 if arguments.smoke else 5 + 0.5 * 4 * DIM * num_rows / 2**30
        measuring = _measuring(num_rows, trace, arguments, session.deadline)
        session.attempt(run, system, measuring, one_line, seconds=seconds)
        clean_up()
    trace.close()
    session.print_again()
    raise SystemExit(int(session.failed > 0))


def _measuring(
    num_rows: int, trace: Trace, arguments: argparse.Namespace, deadline: Deadline
) -> Callable[[], dict[str, Any]]:
    return lambda: measure(num_rows, trace, arguments, deadline)


if __name__ == "__main__":
    main()
