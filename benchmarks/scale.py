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
import traceback
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from harness import (
    RESULTS,
    Deadline,
    OutOfTime,
    hbm,
    parser,
    reset_hbm,
    results_for,
    say,
    time_steps,
)
from hostmem import HostMemory
from suite import TAIL, clean_up
from systems.ours import (
    COUNTED_STEPS,
    EmbeddingAlone,
    collection,
    predictions_are_losses,
    trainer,
)
from torch import Tensor
from traces import Trace, feature_names

from hotrow.data.scatter import Scatter, key_of

DISTINCT = 1_000_000
ROWS = (1_000_000, 10_000_000, 100_000_000, 500_000_000)
DIM, BATCH, FEATURES, SKEW = 16, 2048, 26, 1.05
BUDGET_BYTES = 32 * 2**20
WARMUP = 400


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
    device = torch.device("cpu" if arguments.smoke else "cuda")
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
        before = embedding.traffic()
        for _ in range(COUNTED_STEPS):
            next(steps)
        after = embedding.traffic()
    finally:
        steps.close()
    used, parts = hbm(device), embedding.memory()
    slots = parts.get("slots", parts.get("rows", 0))
    return {
        "rows": num_rows,
        "step_ms": asdict(timing),
        "samples_per_second": BATCH / timing.mean * 1000,
        "hbm_bytes": {
            "tables": sum(parts.values()),
            "slots": slots,
            "beside_slots": used.get("allocated_peak", sum(parts.values())) - slots,
            **used,
        },
        "startup_seconds": startup,
        **memory,
        "fetched_rows": after.fetched_rows - before.fetched_rows,
        "unique_rows": after.unique_rows - before.unique_rows,
    }


def one_line(measured: dict[str, Any]) -> str:
    memory = measured["touch_seconds"] + measured.get("lock_seconds", 0)
    return (
        f"{measured['rows']:>13,} rows {measured['step_ms']['p50']:8.3f} ms, "
        f"{measured['hbm_bytes']['beside_slots'] / 2**20:8.1f} MiB beside the slots, start-up "
        f"{measured['startup_seconds']:6.1f} s (memory alone {memory:.1f}), "
        f"{measured['fetched_rows']:,} rows fetched in {COUNTED_STEPS} steps"
    )


def main() -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--rows", type=int, nargs="+", default=ROWS)
    made.add_argument("--strategy", default="lookahead")
    made.add_argument("--warmup", type=int, default=WARMUP, help="steps before the timed ones")
    made.add_argument("--timed", type=int, default=200, help="steps that are timed")
    made.add_argument("--smoke", action="store_true", help="tiny, on the CPU: does it run at all?")
    arguments = made.parse_args()
    if arguments.smoke:
        arguments.rows, arguments.warmup, arguments.timed = (1_000_000, 2_000_000), 5, 10
    elif not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --smoke tries the suite on the CPU")
    deadline, results = Deadline(arguments.minutes), results_for("scale", arguments)
    trace = Trace(
        [DISTINCT],
        steps=arguments.warmup + arguments.timed + TAIL,
        batch=BATCH,
        skew=SKEW,
        table_of=[0] * FEATURES,
        lock=not arguments.smoke,
    )
    ids, lines, failed = trace.ids.clone(), [], False
    for num_rows in arguments.rows:
        say(f"{num_rows:,} rows, {deadline.minutes_left:.1f} minutes left")
        trace.ids.copy_(spread(num_rows)[ids])
        try:
            deadline.check()
            measured = measure(num_rows, trace, arguments, deadline)
        except OutOfTime:
            lines.append(f"{num_rows:>13,} rows not measured: the minutes are over")
        except Exception as error:
            failed = True
            traceback.print_exc()
            lines.append(f"{num_rows:>13,} rows FAILED: {error}")
        else:
            if not arguments.smoke or arguments.results != RESULTS:
                results.write(f"rows-{num_rows}", f"hotrow-{arguments.strategy}", measured)
            lines.append(one_line(measured))
        say(lines[-1])
        clean_up()
    trace.close()
    print("\n" + "\n".join(lines), flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
