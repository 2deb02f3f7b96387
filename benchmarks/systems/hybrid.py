"""hotrow's `hybrid` strategy: rows in host memory, and all but their lookup and update captured.

Beside the figure stands what its parts take on this machine, alone and one after the other: rows
read by all cores, rows written by them, both copies, the dense part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hotrow
from systems.ours import Hotrow

if TYPE_CHECKING:
    from suite import Bench

REPEATS = 10


class Hybrid(Hotrow):
    def __init__(self, bench: Bench) -> None:
        super().__init__(bench, "hybrid")
        self.bench = bench

    def facts(self, steps: Generator[None, None, None]) -> dict[str, Any]:
        traffic = self.embedding.traffic()
        return {
            "hotrow": hotrow.__version__,
            "threads": torch.get_num_threads(),
            "slots": 0,
            "memory": self.embedding.memory(),
            "hit_rate": traffic.hit_rate,
            "floor_ms": self._floor(),
        }

    def _floor(self) -> dict[str, float]:
        """Milliseconds of each part by itself, and of all of them where rows cross."""
        self.embedding.row_access.flush()
        dim, device = self.bench.setting.dim, self.bench.device
        rows = self.embedding.groups[0].store.rows
        batches = [self._unique_ids(step) for step in range(REPEATS)]
        most = max(map(len, batches))
        whole = torch.zeros(most, rows.shape[1])
        here = torch.zeros(most, dim, pin_memory=device.type == "cuda")
        there = torch.zeros(most, dim, device=device)

        def read(ids: Tensor) -> None:
            torch.index_select(rows[:, :dim], 0, ids, out=here[: len(ids)])

        def read_whole(ids: Tensor) -> None:
            torch.index_select(rows, 0, ids, out=whole[: len(ids)])

        def write(ids: Tensor) -> None:
            rows.index_copy_(0, ids, whole[: len(ids)])

        def to_device(ids: Tensor) -> None:
            there[: len(ids)].copy_(here[: len(ids)])

        def to_host(ids: Tensor) -> None:
            here[: len(ids)].copy_(there[: len(ids)])

        taken = {
            "read": self._alone(read, batches),
            "write": self._alone(write, batches, before=read_whole),  # rows stay what they are
            "to device": self._alone(to_device, batches),
            "to host": self._alone(to_host, batches),
            "dense": self._alone(self._dense_part(), batches),
        }
        return taken | {"sum": sum(taken.values())}

    def _unique_ids(self, step: int) -> Tensor:
        """The rows of one batch, as the store numbers them."""
        trace, layout = self.bench.trace, self.embedding.groups[0].layout
        columns = trace.columns(step)
        bases = [layout.bases[feature.table] for feature in layout.features]
        parts = zip(columns, bases, strict=True)
        return torch.cat([column.unique() + base for column, base in parts])

    def _dense_part(self) -> Callable[[Tensor], None]:
        setting, device = self.bench.setting, self.bench.device
        batch = next(self.bench.trace.batches(0, 1)).to(device)
        shape = (setting.batch, len(setting.rows) * setting.dim)
        vectors = torch.zeros(shape, dtype=setting.output_dtype, device=device)
        return lambda _: self.bench.gradient(vectors, batch.dense, batch.label)

    def _alone(
        self,
        work: Callable[[Tensor], Any],
        batches: list[Tensor],
        before: Callable[[Tensor], None] = lambda _: None,
    ) -> float:
        taken = []
        for ids in batches:
            before(ids)
            self._wait()
            started = time.perf_counter()
            work(ids)
            self._wait()
            taken.append(time.perf_counter() - started)
        return 1000 * statistics.median(taken)

    def _wait(self) -> None:
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
