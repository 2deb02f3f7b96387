"""What several ranks cost the host of each: preparing ids, and sending messages by gloo.

    python benchmarks/rank_host.py        this machine; one line in results/rank_host.jsonl

The shape is the target's: 26 tables of MLPerf's sizes, 8192 samples of one lookup each, power law
1.05. Everything runs on one thread of Python, as in training. `sort_ns` (parse and sort) and
`route_ns` are nanoseconds per lookup of a rank. `exchange_ms` is what the host does around the
messages of a step: headers, ids, late rows; here the messages themselves are answered in place.
`swap_us` is the time of a swap of headers, 512 bytes to each rank, over the loopback interface by
the number of processes, and `swap_cpu_us` the processor time that a rank spends on it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import parser, results_for
from ranks import SHAPES, Shape, drawn
from torch import Tensor

from hotrow.distributed.early_rows import EarlyRows
from hotrow.distributed.owners import GroupOwners
from hotrow.distributed.ranks import Headers
from hotrow.distributed.wire import Wire
from hotrow.inputs.batch import lookups_of, parse
from hotrow.inputs.tables import group_by_width
from hotrow.kernels.reference import sort_ids

HEADER_WORDS = 64
HEADERS = 3  # of a step: BATCH, ROWS, GRADS
SWAPS = 200


def seconds(work: Callable[[], object], repeats: int = 7) -> float:
    taken = []
    for _ in range(repeats):
        started = perf_counter()
        work()
        taken.append(perf_counter() - started)
    return median(taken)


class Answered:
    """Ranks of which this process is the first; what it sends comes back at once."""

    rank, training = 0, None

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(
        self, values: Tensor, sent: list[int], received: list[int], channel: Any
    ) -> Tensor:
        return values.repeat(-(-sum(received) // max(1, len(values))))[: sum(received)]


def host_work(counts: Sequence[int], shape: Shape) -> dict[str, Any]:
    """Return the times of preparing a batch's ids, by ranks where these matter."""
    (layout,) = group_by_width(shape.tables())
    batch = drawn(shape, 1, 1)[0, 0]
    keys = [feature.key for feature in layout.features]
    device = torch.device("cpu")

    def sort() -> Any:
        x = lookups_of(parse(batch, tuple(keys), device), layout)
        return sort_ids(x.ids, layout.num_rows)

    unique, lookups = sort().ids, batch.numel()
    routing, exchange = {}, {}
    for size in counts:
        owners = GroupOwners(layout, size)
        route = owners.route(unique)  # the first call builds what later ones use
        routing[size] = 1e9 * seconds(lambda: owners.route(unique)) / lookups  # noqa: B023
        own = owners.owned(0, 0)
        group = SimpleNamespace(layout=layout, inner=SimpleNamespace(layout=own))
        ranks: Any = Answered(size)
        wire = Wire(ranks, [group])  # type: ignore[list-item]
        early = EarlyRows(wire, None, nullcontext)  # type: ignore[arg-type]
        theirs = [[route.counts[0]]] * size
        words = torch.zeros(size, HEADER_WORDS, dtype=torch.int64)
        work: Any = SimpleNamespace(route=route)

        def step() -> None:
            for _ in range(HEADERS):
                Headers(words)  # noqa: B023
            numbers = wire.send_numbers([0], {0: route}, theirs)  # noqa: B023
            early.find_late(1, {0: work}, {0: numbers[0] % own.num_rows}, theirs)  # noqa: B023

        exchange[size] = 1e3 * seconds(step)
    return {
        "lookups": lookups,
        "unique_rows": len(unique),
        "sort_ns": 1e9 * seconds(sort) / lookups,
        "route_ns": routing,
        "exchange_ms": exchange,
    }


def swaps(worlds: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return microseconds of a swap of headers by the number of processes."""
    found: dict[str, dict[int, float]] = {"swap_us": {}, "swap_cpu_us": {}}
    for world in worlds:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(_swap, (world, port, queue), nprocs=world)
        came = [queue.get() for _ in range(world)]
        found["swap_us"][world] = median(us for us, _ in came)
        found["swap_cpu_us"][world] = median(us for _, us in came)
    return found


def _swap(rank: int, world: int, port: int, queue: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    words = torch.zeros(world, HEADER_WORDS, dtype=torch.int64)
    out, taken = torch.empty_like(words), []
    for _ in range(SWAPS // 4):
        dist.all_to_all_single(out, words)
    spent = process_time()
    for _ in range(SWAPS):
        started = perf_counter()
        dist.all_to_all_single(out, words)
        taken.append(perf_counter() - started)
    spent = process_time() - spent
    queue.put((1e6 * median(taken), 1e6 * spent / SWAPS))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = parser("What several ranks cost the host of each")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 1024])
    options.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16])
    given = options.parse_args()
    torch.set_num_threads(1)
    measured = host_work(given.ranks, SHAPES[0]) | swaps(given.worlds)
    print(json.dumps(measured), flush=True)
    results_for("rank_host", given).write("target", "host", measured)


if __name__ == "__main__":
    main()
