"""What this machine can do at best: the figures that every other suite is read against.

    python benchmarks/ceilings.py
    python benchmarks/ceilings.py --only zero-copy ours

Large copies over the host link and inside the GPU, rows that kernels read and write in page-locked
host memory (by thread blocks, and by how much memory they are spread over), hotrow's own kernels
beside them, rows that CPU threads gather and scatter, the dense part alone, and how long host
memory takes to touch and to page-lock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from dense import Dense, DenseOptions
from harness import Session, device_for, parser, quantiles_of
from hostmem import HostMemory
from terabyte import SETTINGS
from traces import NUM_DENSE

from hotrow.kernels.triton import fill
from hotrow.store.writer import Writer

GIB = 2**30
BLOCKS = (1, 2, 4, 16, 64)
THREADS = (1, 2, 4, 8, 16)
DIM = 64  # of the target
REPEATS = 8
PARTS = ("copies", "zero-copy", "ours", "footprint", "cpu", "dense")


class Sizes:
    """How much is moved; `--smoke` moves next to nothing."""

    def __init__(self, *, smoke: bool) -> None:
        self.host = 1 << 20 if smoke else 48 * GIB
        self.copy = 1 << 16 if smoke else GIB
        self.inside = 1 << 16 if smoke else 4 * GIB
        self.rows = 100 if smoke else 1 << 18  # moved at once
        self.footprints = (1 << 18, 1 << 19) if smoke else (4 * GIB, 16 * GIB, 48 * GIB)
        self.usual = self.footprints[-1]
        # The last two are rows of 64 and 128 floats with Adam's state.
        self.dims = (32, DIM, 128, 192, 384)


@triton.jit
def _move_rows(
    host,  # [N, DIM] float32, page-locked
    rows,  # [count, DIM] float32, on the GPU
    index,  # [count] int64
    count,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    READS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(0) * TILE
    while first < count:
        place = first + tl.arange(0, TILE)
        mask = (place < count)[:, None] & (column < DIM)
        row = tl.load(index + place, mask=place < count, other=0)
        outside = host + row[:, None] * DIM + column
        inside = rows + place.to(tl.int64)[:, None] * DIM + column
        if READS:
            tl.store(inside, tl.load(outside, mask=mask), mask=mask)
        else:
            tl.store(outside, tl.load(inside, mask=mask), mask=mask)
        first += tl.num_programs(0) * TILE


class Ceilings:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.sizes = device_for(arguments), Sizes(smoke=arguments.smoke)
        self.session = Session("ceilings", arguments)
        self.interaction, self.masters = arguments.interaction, arguments.masters
        self.compiles = not arguments.smoke
        self.best: dict[str, float] = {}  # millions of rows per second, by name

    def note(self, name: str, work: Callable[[], tuple[float, dict[str, Any]]], unit: str) -> None:
        """`work` gives a value and what belongs to it."""

        def measure() -> dict[str, Any]:
            value, facts = work()
            self.best[name] = value
            return {"value": value, "unit": unit, "facts": facts}

        def one_line(measured: dict[str, Any]) -> str:
            beside = {key: _short(each) for key, each in measured["facts"].items()}
            return f"{measured['value']:10.4g} {unit} {beside or ''}"

        self.session.attempt(name, "machine", measure, one_line)

    def run(self, parts: Sequence[str]) -> int:
        if "dense" in parts:
            self.dense()
        if set(parts) - {"dense"}:
            memory = self.host_memory()
            for part in PARTS:
                if part in parts and part != "dense":
                    getattr(self, part.replace("-", "_"))(memory)
            memory.close()
        self.session.print_again()
        return int(self.session.failed > 0)

    def seconds(self, *works: Callable[[], object]) -> float:
        return seconds(*works, device=self.device)

    def host_memory(self) -> HostMemory:
        gib = self.sizes.host / GIB
        memory = HostMemory(self.sizes.host)
        self.note("touch host memory", lambda: (memory.touch() / gib, {}), "s/GiB")
        if self.device.type == "cuda":
            self.note("page-lock host memory", lambda: (memory.lock() / gib, {}), "s/GiB")
        return memory

    def copies(self, memory: HostMemory) -> None:
        size, inside = self.sizes.copy, self.sizes.inside
        there = memory.tensor((size,), torch.uint8)
        back = memory.tensor((size,), torch.uint8, first_byte=size)
        a, b = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        big = [torch.zeros(inside, dtype=torch.uint8, device=self.device) for _ in range(2)]

        def to_device() -> None:
            a.copy_(there, non_blocking=True)

        def to_host() -> None:
            back.copy_(b, non_blocking=True)

        def rate(num_bytes: int, *works: Callable[[], object]) -> tuple[float, dict[str, Any]]:
            return num_bytes / 1e9 / self.seconds(*works), {}

        self.note("copy host to device", lambda: rate(size, to_device), "GB/s")
        self.note("copy device to host", lambda: rate(size, to_host), "GB/s")
        self.note("copy both ways at once", lambda: rate(2 * size, to_device, to_host), "GB/s")
        self.note(
            "copy inside the device, read + written",
            lambda: rate(2 * inside, lambda: big[0].copy_(big[1])),
            "GB/s",
        )

    def zero_copy(self, memory: HostMemory) -> None:
        """Random rows of several sizes; two kernels at once share the blocks."""
        for dim in self.sizes.dims:
            moves = Moves(memory, self.sizes.usual, dim, self.sizes.rows, self.device)
            for name, ways in WAYS.items():
                self.note(
                    f"zero-copy {name}, rows of {4 * dim} bytes",
                    partial(self._best_rate, moves, ways),
                    "M rows/s",
                )

    def footprint(self, memory: HostMemory) -> None:
        """The target's rows, spread over more and more memory."""
        for num_bytes in self.sizes.footprints:
            moves = Moves(memory, num_bytes, DIM, self.sizes.rows, self.device)
            for name, ways in WAYS.items():
                self.note(
                    f"zero-copy {name}, over {num_bytes / GIB:.3g} GiB",
                    partial(self._best_rate, moves, ways),
                    "M rows/s",
                )

    def _best_rate(self, moves: Moves, ways: Sequence[bool]) -> tuple[float, dict[str, Any]]:
        rates = {}
        for blocks in BLOCKS:
            works = [
                partial(moves.launch, place, reads, max(1, blocks // len(ways)))
                for place, reads in enumerate(ways)
            ]
            if blocks >= len(ways):
                rates[blocks] = len(ways) * moves.count / 1e6 / self.seconds(*works)
        return max(rates.values()), {"by_blocks": rates}

    def ours(self, memory: HostMemory) -> None:
        """hotrow's own kernels, of all rows fetched anew and of a fill, beside the best."""
        for dim in self.sizes.dims:
            moves = Moves(memory, self.sizes.usual, dim, self.sizes.rows, self.device)
            size = f"rows of {4 * dim} bytes"
            for name, ceiling in (("gather", "read"), ("scatter", "write"), ("fill", "both")):
                self.note(
                    f"hotrow {name}, {size}",
                    partial(self._our_rate, moves, name, f"zero-copy {ceiling}, {size}"),
                    "M rows/s",
                )

    def _our_rate(self, moves: Moves, name: str, ceiling: str) -> tuple[float, dict[str, Any]]:
        count = torch.tensor([moves.count], dtype=torch.int32, device=self.device)
        slots = torch.arange(moves.count, dtype=torch.int32, device=self.device)
        entering, leaving, rows = moves.index[0], moves.index[1], moves.rows[0]
        works: dict[str, Callable[[int], None]] = {
            "gather": lambda blocks: fill.gather(moves.host, entering, rows, blocks),
            "scatter": lambda blocks: fill.scatter(moves.host, leaving, rows, blocks),
            "fill": lambda blocks: fill.fill(
                rows, moves.host, slots, leaving, entering, count, blocks
            ),
        }
        moved = moves.count * (2 if name == "fill" else 1) / 1e6
        rates = {each: moved / self.seconds(partial(works[name], each)) for each in BLOCKS}
        facts: dict[str, Any] = {"by_blocks": rates}
        if ceiling in self.best:
            facts["of_ceiling"] = max(rates.values()) / self.best[ceiling]
        return max(rates.values()), facts

    def cpu(self, memory: HostMemory) -> None:
        cores = os.cpu_count() or 1
        for dim in self.sizes.dims:
            for name, reads in (("gather", True), ("scatter", False)):
                self.note(
                    f"CPU {name}, rows of {4 * dim} bytes",
                    partial(self._cpu_rate, memory, dim, cores, reads=reads),
                    "M rows/s",
                )

    def _cpu_rate(
        self, memory: HostMemory, dim: int, cores: int, *, reads: bool
    ) -> tuple[float, dict[str, Any]]:
        count, num_rows = self.sizes.rows, self.sizes.usual // (4 * dim)
        host = memory.tensor((num_rows, dim), torch.float32)
        rows, rates = torch.zeros(count, dim), {}
        for threads in (each for each in THREADS if each <= cores):
            writer, taken = Writer(threads), []
            move = writer.read if reads else writer.write
            for _ in range(REPEATS):
                index = torch.randint(num_rows, (count,))  # others each time: caches hold the last
                started = time.perf_counter()
                writer.wait(move(host, index, rows))
                taken.append(time.perf_counter() - started)
            rates[threads] = count / 1e6 / statistics.median(taken)
        return max(rates.values()), {"by_threads": rates}

    def dense(self) -> None:
        """What every system of terabyte.py's target does beside rows."""

        def measure() -> tuple[float, dict[str, Any]]:
            target = SETTINGS[0]
            batch = target.batch if self.compiles else 16
            options = DenseOptions(
                compile=self.compiles, interaction=self.interaction, masters=self.masters
            )
            part = Dense(
                batch, NUM_DENSE, len(target.rows), DIM, device=self.device, options=options
            )
            inputs = part.vectors.detach().clone(), part.dense.clone(), part.label.clone()
            p20, p50, p80 = quantiles_of(lambda: part.step(*inputs), self.device)
            return p50, {"p20": p20, "p80": p80, "batch": batch}

        self.note("dense part alone", measure, "ms")


WAYS = {"read": (True,), "write": (False,), "both": (True, False)}


class Moves:
    """Random rows of page-locked memory, none twice, and where they are copied to and from."""

    def __init__(
        self, memory: HostMemory, num_bytes: int, dim: int, count: int, device: torch.device
    ) -> None:
        self.count, num_rows = count, num_bytes // (4 * dim)
        self.host = memory.tensor((num_rows, dim), torch.float32)
        # One row from each of 2 * count equal parts, in any order.
        part = num_rows // (2 * count)
        rows = part * torch.randperm(2 * count, device=device)
        rows += torch.randint(part, (2 * count,), device=device)
        self.index = rows.view(2, count)
        self.rows = torch.zeros(2, count, dim, device=device)

    def launch(self, place: int, reads: bool, blocks: int) -> None:
        dim = self.host.shape[1]
        columns = triton.next_power_of_2(dim)
        _move_rows[(blocks,)](
            self.host,
            self.rows[place],
            self.index[place],
            self.count,
            DIM=dim,
            COLUMNS=columns,
            TILE=(1 << 14) // columns,
            READS=reads,
            num_warps=32,
        )


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: round(each, 2) for key, each in value.items()}
    return round(value, 3)


def seconds(*works: Callable[[], object], device: torch.device) -> float:
    """Median time of the works at once, each on a stream of its own."""
    if device.type == "cpu":
        started = time.perf_counter()
        for work in works:
            work()
        return time.perf_counter() - started
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
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, metavar="PART")
    made.add_argument("--interaction", choices=("plain", "fused"), default="plain")
    made.add_argument("--masters", choices=("plain", "hotrow"), default="plain")
    arguments = made.parse_args()
    raise SystemExit(Ceilings(arguments).run(arguments.only))


if __name__ == "__main__":
    main()
