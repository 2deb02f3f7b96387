"""Threads that read a collection beside one that trains it: right vectors, and how fast.

    python benchmarks/threads.py --minutes 10                   # on a CPU, every strategy
    python benchmarks/threads.py --minutes 10 --device cuda     # eager and captured steps

Every strategy is trained alone first, and what a few probe batches read after each step is kept.
Then it is trained again beside 1, 2 and 4 threads that read the probes: each read must equal, to
the bit, what was read alone after a step that ended between the call and its return, and all rows
with their state must end as they did alone. This is repeated until the minutes are over. The
command fails if a vector or a row differs.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, Deadline, results_for, say
from torch import Tensor, nn
from torch.nn import functional

import hotrow
from hotrow.data import ClickBatch

BUDGETED = ["lookahead", "scratchpipe", "lru", "static", "uncached", "static-hybrid"]
CPU = [*BUDGETED, "all-fast", "hybrid", "cpu"]
GPU = [*BUDGETED, "all-fast", "hybrid"]
CAPTURED = ["lookahead", "all-fast"]
READERS = (1, 2, 4)


@dataclass(frozen=True)
class Size:
    """Of tables, batches and a run."""

    rows: int
    features: int
    batch: int
    probe: int
    steps: int
    warmup: int  # steps that are trained and checked, and not timed

    def tables(self) -> list[hotrow.EmbeddingBagConfig]:
        return [
            hotrow.EmbeddingBagConfig(f"t{n}", self.rows, 32 if n % 4 == 3 else 16, [f"f{n}"])
            for n in range(self.features)
        ]


SIZES = {
    "cpu": Size(rows=20_000, features=8, batch=256, probe=64, steps=120, warmup=20),
    "cuda": Size(rows=400_000, features=16, batch=4096, probe=512, steps=400, warmup=150),
    "smoke": Size(rows=300, features=4, batch=16, probe=4, steps=12, warmup=2),
}


def batches(size: Size) -> Iterator[ClickBatch]:
    generator = torch.Generator().manual_seed(5)
    while True:
        shape = (size.batch, size.features)
        yield ClickBatch(
            dense=torch.rand(size.batch, 13, generator=generator),
            sparse=(torch.rand(shape, generator=generator) ** 3 * size.rows).long(),
            label=torch.randint(0, 2, (size.batch,), generator=generator).float(),
        )


class Model(nn.Module):
    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = embedding
        width = sum(table.embedding_dim for table in embedding.tables)
        self.top = nn.Sequential(nn.Linear(width + 13, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, batch: ClickBatch) -> Tensor:
        vectors = self.embedding(batch.sparse).values()
        logits: Tensor = self.top(torch.cat([vectors, batch.dense], dim=1)).squeeze(1)
        return logits


class Job:
    """A model that is trained from its start."""

    def __init__(self, strategy: str, captured: bool, size: Size, device: str) -> None:
        self.size = size
        self.embedding = hotrow.EmbeddingBagCollection(
            size.tables(), hotrow.Adagrad(lr=0.05), "20%", strategy=strategy, device=device, seed=2
        )
        self.model = Model(self.embedding).to(device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self._step = hotrow.graphed(
            self.model, functional.binary_cross_entropy_with_logits, optimizer
        )
        if not captured:
            self._step.landing = None

    def train(self, after_step: Callable[[int], None]) -> list[float]:
        """Milliseconds of each step."""
        data = islice(batches(self.size), self.size.steps)
        times = []
        begun = time.perf_counter()
        stream = hotrow.ahead(data, self.model, ids=lambda batch: batch.sparse, step=self._step)
        for step, batch in enumerate(stream):
            self._step(batch)
            after_step(step)
            now = time.perf_counter()
            times.append(1000 * (now - begun))
            begun = now
        return times

    def rows(self) -> list[Tensor]:
        return [rows for t in self.embedding.tables for _, rows in self.embedding.rows(t.name)]

    def read(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.embedding(ids).values().cpu()


@dataclass
class Counted:
    """What threads have read beside one training."""

    reads: int = 0
    vectors: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Alone:
    """A training without readers, and what probes read after each of its steps."""

    def __init__(self, strategy: str, captured: bool, size: Size, device: str) -> None:
        self._make = lambda: Job(strategy, captured, size, device)
        generator = torch.Generator().manual_seed(9)
        shape = (size.probe, size.features)
        self.probes = [
            (torch.rand(shape, generator=generator) ** 2 * size.rows).long().to(device)
            for _ in range(3)
        ]
        self.size = size
        self.rows = self._keep_history()
        self.times = self._make().train(lambda step: None)

    def _keep_history(self) -> list[Tensor]:
        job = self._make()
        self.history = [self._read(job)]
        job.train(lambda step: self.history.append(self._read(job)))
        return job.rows()

    def _read(self, job: Job) -> list[Tensor]:
        return [job.read(ids) for ids in self.probes]

    def beside(self, readers: int) -> tuple[list[float], Counted]:
        """Train beside threads that read; a step's milliseconds, and what was read."""
        job, counted, ended, stop = self._make(), Counted(), 0, threading.Event()
        lock = threading.Lock()

        def end(step: int) -> None:
            nonlocal ended
            ended = step + 1

        def read(number: int) -> None:
            turn = number
            while not stop.is_set():
                place, first = turn % len(self.probes), ended
                turn += 1
                try:
                    found = job.read(self.probes[place])
                    last = min(ended + 1, self.size.steps)  # one may have ended since `ended`
                    steps = range(first, last + 1)
                    right = any(torch.equal(found, self.history[n][place]) for n in steps)
                    problem = "" if right else f"vectors of no step from {first} to {last}"
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                with lock:
                    counted.reads += 1
                    counted.vectors += self.probes[place].numel()
                    counted.wrong += [problem] if problem else []

        threads = [threading.Thread(target=read, args=(n,)) for n in range(readers)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        try:
            times = job.train(end)
        finally:
            counted.seconds = time.perf_counter() - begun
            stop.set()
            for thread in threads:
                thread.join()
        if not all(map(torch.equal, job.rows(), self.rows)):
            counted.wrong.append("rows differ from those of the training without readers")
        return times, counted

    def serve(self, readers: int, seconds: float) -> float:
        """Vectors per second that threads read while nothing is trained."""
        job, read, stop = self._make(), [0] * readers, threading.Event()
        job.read(self.probes[0])

        def run(number: int) -> None:
            while not stop.is_set():
                job.read(self.probes[number % len(self.probes)])
                read[number] += self.probes[0].numel()

        threads = [threading.Thread(target=run, args=(n,)) for n in range(readers)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        return sum(read) / (time.perf_counter() - begun)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--minutes", type=float, default=10)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--only", nargs="*", default=[], help="strategies, such as lookahead")
    made.add_argument("--smoke", action="store_true", help="tiny; keeps no results")
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--commit")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    device, deadline = arguments.device, Deadline(arguments.minutes)
    size = SIZES["smoke" if arguments.smoke else device]
    captures = [(name, True) for name in CAPTURED] if device == "cuda" else []
    jobs = captures + [(name, False) for name in (GPU if device == "cuda" else CPU)]
    jobs = [job for job in jobs if not arguments.only or job[0] in arguments.only]
    known = {}
    wrong = reads = vectors = rounds = 0
    while deadline.minutes_left > 0 or not rounds:
        for strategy, captured in jobs:
            name = f"{strategy}, {'captured' if captured else 'eager'}"
            if rounds and deadline.minutes_left <= 0:
                break
            if (strategy, captured) not in known:
                known[strategy, captured] = Alone(strategy, captured, size, device)
            alone = known[strategy, captured]
            line: dict[str, Any] = {"alone_ms": _milliseconds(alone.times, size)}
            said = f"{name:24} step {line['alone_ms']['p50']:6.2f} ms alone"
            for readers in READERS:
                times, counted = alone.beside(readers)
                mine = _milliseconds(times, size) | {
                    "vectors_per_second": counted.vectors / counted.seconds,
                    "reads": counted.reads,
                    "wrong": len(counted.wrong),
                }
                line[f"beside_{readers}"] = mine
                reads, vectors = reads + counted.reads, vectors + counted.vectors
                wrong += len(counted.wrong)
                for problem in counted.wrong[:3]:
                    say(f"WRONG, {name} beside {readers}: {problem}")
                said += (
                    f"; beside {readers}: {mine['p50']:6.2f} ms, "
                    f"{mine['vectors_per_second'] / 1e3:7.1f} k vectors/s"
                )
            if not rounds:
                line["serving"] = {
                    n: alone.serve(n, 0.3 if arguments.smoke else 1) for n in READERS
                }
                served = ", ".join(f"{x / 1e3:.0f}" for x in line["serving"].values())
                said += f"; serving alone by 1, 2, 4 threads {served} k/s"
                if not arguments.smoke:
                    results_for("threads", arguments).write(f"{device}/{name}", strategy, line)
            say(said)
        rounds += 1
    say(f"{rounds} rounds, {reads:,} reads, {vectors:,} vectors, {wrong} wrong")
    sys.exit(1 if wrong else 0)


def _milliseconds(times: list[float], size: Size) -> dict[str, float]:
    timed = times[size.warmup :]
    p50, p99 = (float(each) for each in np.percentile(timed, (50, 99)))
    return {"mean": float(np.mean(timed)), "p50": p50, "p99": p99, "longest": max(timed)}


if __name__ == "__main__":
    main()
