"""What this machine can do at best: the figures that every other suite is read against.

    python benchmarks/ceilings.py

Large copies over the host link and inside the GPU, rows that kernels read and write in page-locked
host memory, rows that CPU threads gather and scatter, and how long host memory takes to touch and
to page-lock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from harness import Deadline, OutOfTime, Results, need_gpu, parser, results_for, say
from hostmem import HostMemory
from torch import Tensor

GIB = 2**30
COPY_BYTES = GIB
HOST_BYTES = 16 * GIB
NUM_ROWS = 1 << 20  # moved at once
DIMS = (32, 64, 128)
BLOCKS = (2, 4, 16, 64, 264)
REPEATS = 10


@triton.jit
def _move_rows(
    host,  # [N, DIM] float32, page-locked
    rows,  # [count, DIM] float32, on the GPU
    index,  # [count] int64
    count,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    READS: tl.constexpr,
):
    column = tl.arange(0, DIM)[None, :]
    first = tl.program_id(0) * TILE
    while first < count:
        place = first + tl.arange(0, TILE)
        mask = place < count
        row = tl.load(index + place, mask=mask, other=0)
        outside = host + row[:, None] * DIM + column
        inside = rows + place.to(tl.int64)[:, None] * DIM + column
        if READS:
            tl.store(inside, tl.load(outside, mask=mask[:, None]), mask=mask[:, None])
        else:
            tl.store(outside, tl.load(inside, mask=mask[:, None]), mask=mask[:, None])
        first += tl.num_programs(0) * TILE


class Ceilings:
    def __init__(self, results: Results, deadline: Deadline) -> None:
        self.results, self.deadline, self.lines = results, deadline, list[str]()

    def note(self, name: str, value: float, unit: str, **facts: Any) -> None:
        self.deadline.check()
        self.results.write(name, "machine", {"value": value, "unit": unit, "facts": facts})
        self.lines.append(f"{name:44} {value:10.3g} {unit}")
        say(self.lines[-1])

    def run(self) -> None:
        memory = self.host_memory()
        try:
            self.copies(memory)
            self.zero_copy(memory)
            self.cpu_rows(memory)
        except OutOfTime:
            self.lines.append("the minutes are over")
        memory.close()
        print("\n" + "\n".join(self.lines), flush=True)

    def host_memory(self) -> HostMemory:
        memory = HostMemory(HOST_BYTES)
        self.note("touch host memory", memory.touch() * GIB / HOST_BYTES, "s/GiB")
        self.note("page-lock host memory", memory.lock() * GIB / HOST_BYTES, "s/GiB")
        return memory

    def copies(self, memory: HostMemory) -> None:
        there = memory.tensor((COPY_BYTES,), torch.uint8)
        back = memory.tensor((COPY_BYTES,), torch.uint8, first_byte=COPY_BYTES)
        a, b = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

        def to_device() -> None:
            a.copy_(there, non_blocking=True)

        def to_host() -> None:
            back.copy_(b, non_blocking=True)

        gigabytes = COPY_BYTES / 1e9
        self.note("copy host to device", gigabytes / seconds(to_device), "GB/s")
        self.note("copy device to host", gigabytes / seconds(to_host), "GB/s")
        self.note("copy both ways at once", 2 * gigabytes / seconds(to_device, to_host), "GB/s")
        big = [torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
        rate = 8 * GIB / 1e12 / seconds(lambda: big[0].copy_(big[1]))
        self.note("copy inside the device, read + written", rate, "TB/s")

    def zero_copy(self, memory: HostMemory) -> None:
        """Random rows; two kernels at once share the blocks."""
        for dim in DIMS:
            num_rows = HOST_BYTES // (4 * dim)
            host = memory.tensor((num_rows, dim), torch.float32)
            index = torch.randint(num_rows, (2, NUM_ROWS), device="cuda")
            rows = torch.zeros(2, NUM_ROWS, dim, device="cuda")
            for name, ways in (("read", (True,)), ("write", (False,)), ("both", (True, False))):
                rates = {
                    blocks: len(ways)
                    * NUM_ROWS
                    / 1e6
                    / seconds(*_moves(host, rows, index, ways, max(1, blocks // len(ways))))
                    for blocks in BLOCKS
                }
                self.note(
                    f"zero-copy {name}, rows of {4 * dim} bytes",
                    max(rates.values()),
                    "M rows/s",
                    by_blocks=rates,
                )

    def cpu_rows(self, memory: HostMemory) -> None:
        cores = os.cpu_count() or 1
        torch.set_num_threads(1)  # the threads are ours
        with ThreadPoolExecutor(cores) as pool:
            for dim in DIMS:
                num_rows = HOST_BYTES // (4 * dim)
                host = memory.tensor((num_rows, dim), torch.float32)
                index = torch.randint(num_rows, (NUM_ROWS,)).chunk(cores)
                rows = torch.zeros(NUM_ROWS, dim).chunk(cores)
                for name, work in (("gather", _gather), ("scatter", _scatter)):
                    taken = []
                    for _ in range(REPEATS):
                        started = time.perf_counter()
                        list(pool.map(partial(work, host), index, rows))
                        taken.append(time.perf_counter() - started)
                    rate = NUM_ROWS / 1e6 / statistics.median(taken)
                    what = f"CPU {name}, rows of {4 * dim} bytes"
                    self.note(what, rate, "M rows/s", threads=cores)
        torch.set_num_threads(cores)


def _gather(host: Tensor, index: Tensor, rows: Tensor) -> None:
    torch.index_select(host, 0, index, out=rows)


def _scatter(host: Tensor, index: Tensor, rows: Tensor) -> None:
    host.index_copy_(0, index, rows)


def _moves(
    host: Tensor, rows: Tensor, index: Tensor, ways: Sequence[bool], blocks: int
) -> list[Callable[[], None]]:
    def move(place: int, reads: bool) -> Callable[[], None]:
        dim = host.shape[1]

        def launch() -> None:
            _move_rows[(blocks,)](
                host,
                rows[place],
                index[place],
                NUM_ROWS,
                DIM=dim,
                TILE=(1 << 13) // dim,
                READS=reads,
                num_warps=8,
            )

        return launch

    return [move(place, reads) for place, reads in enumerate(ways)]


def seconds(*works: Callable[[], object]) -> float:
    """Median time of the works at once, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in works]
    main = torch.cuda.current_stream()
    taken = []
    for repeat in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for stream, work in zip(streams, works, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                work()
            main.wait_stream(stream)
        end.record()
        end.synchronize()
        if repeat >= 2:  # the first compile and warm up
            taken.append(start.elapsed_time(end) / 1000)
    return statistics.median(taken)


def main() -> None:
    arguments = parser(__doc__.split("\n")[0]).parse_args()
    need_gpu()
    Ceilings(results_for("ceilings", arguments), Deadline(arguments.minutes)).run()


if __name__ == "__main__":
    main()
