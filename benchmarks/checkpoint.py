"""Saving and loading beside `cp` of the same bytes on the same disk, and beside training.

    python benchmarks/checkpoint.py --gib 2
    python benchmarks/checkpoint.py --device cuda --gib 20 --repeat 0 --turns 1

One collection with row-wise Adagrad, on the host or with a tenth of its rows on a GPU. In turns, so
that whatever else the machine does meets all alike: save a checkpoint (all of it is on the disk
when that ends), `cp -r` it and wait for the disk, load it, `cp -r` it without waiting. The first
round is left out where there are others. Then 1 % of the rows change and are saved incrementally;
a collection of another seed loads both and trains on beside the first: how many rows differ?
At last rows are trained with a tenth of them in fast memory, and steps are timed while nothing is
saved and while checkpoints are written in the background, one after the other; the pause at a
checkpoint's begin counts as a part of its step. What is read was written just before, so that
neither waits for the disk if it fits the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import hotrow
import hotrow.checkpoint
from hotrow.run.job import same_bits

TENTH = {"budget": "10%"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="timed with a save, and without")
    parser.add_argument("--turns", type=int, default=4, help="that those steps are timed in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measure(options, Path(folder))))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    rows = int(options.gib * 2**30 / (4 * (options.dim + 1)))
    table = hotrow.EmbeddingBagConfig("item", rows, options.dim, ["item"])

    def build(seed: int = 0, **fast: str) -> hotrow.EmbeddingBagCollection:
        fast = fast or ({"strategy": "all-fast"} if options.device == "cpu" else TENTH)
        rule = hotrow.RowWiseAdagrad(lr=0.1)
        return hotrow.EmbeddingBagCollection(
            [table], rule, **fast, device=options.device, seed=seed
        )

    model = build()
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    extra: list[int] = []

    def note(name: str, work: Callable[[], object]) -> None:
        begun, used = time.perf_counter(), sum(os.times()[:4])
        work()
        times.setdefault(name, []).append(time.perf_counter() - begun)
        print(f"{name}: {times[name][-1]:.2f} s", file=sys.stderr)
        cpu.setdefault(name, []).append(sum(os.times()[:4]) - used)

    for turn in range(1 + options.repeat):
        if turn == 1:  # there are others
            for each in (times, cpu, extra):
                each.clear()  # a virtual machine's memory is slow when it is first touched
        root, copy = folder / f"saved-{turn}", folder / f"copied-{turn}"

        def save(root: Path = root) -> None:
            hotrow.save_checkpoint(root, model, step=1)

        with Resident() as resident:
            note("save", save)
        extra.append(resident.most)
        note("cp and sync", lambda root=root, copy=copy: copied(root, copy, sync=True))
        shutil.rmtree(copy)
        note("load", lambda root=root: hotrow.load_checkpoint(root, model))
        note("cp", lambda root=root, copy=copy: copied(root, copy, sync=False))
        shutil.rmtree(copy)
        shutil.rmtree(root)
    size = 4 * rows * (options.dim + 1)
    middle = {name: statistics.median(each) for name, each in times.items()}
    return {
        "bytes": size,
        "rows": rows,
        "repeat": options.repeat,
        "seconds": times,
        "cpu_seconds": {name: statistics.median(each) for name, each in cpu.items()},
        "GB_per_s": {name: size / 1e9 / each for name, each in middle.items()},
        "save_over_cp_and_sync": middle["cp and sync"] / middle["save"],
        "save_over_cp": middle["cp"] / middle["save"],
        "load_over_cp": middle["cp"] / middle["load"],
        "extra_resident_MiB_while_saving": max(extra) / 2**20,
        "incremental": incremental(model, build, folder / "incremental"),
        "beside_training": beside_training(build(**TENTH), options, folder / "beside"),
        "device": options.device,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def incremental(
    model: hotrow.EmbeddingBagCollection,
    build: Callable[[int], hotrow.EmbeddingBagCollection],
    root: Path,
) -> dict[str, float]:
    """One after 1 % of the rows have changed, at random; another collection goes on from it."""
    (table,) = model.tables
    rows = table.num_embeddings
    draw = torch.Generator().manual_seed(0)
    changed = torch.randperm(rows, generator=draw)[: rows // 100]
    hotrow.save_checkpoint(root, model, step=1, full_every=2)
    train(model, changed)
    begun = time.perf_counter()
    saved = hotrow.save_checkpoint(root, model, step=2, full_every=2)
    seconds = time.perf_counter() - begun
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    other = build(1)
    begun = time.perf_counter()
    hotrow.load_checkpoint(root, other)
    loaded = time.perf_counter() - begun
    more = torch.randint(rows, (rows // 100,), generator=draw)
    for each in (model, other):
        train(each, more)
    differing = 0
    for (_, mine), (_, others) in zip(model.rows("item"), other.rows("item"), strict=True):
        if not same_bits(mine, others):
            differing += int((mine.view(torch.int32) != others.view(torch.int32)).any(1).sum())
    shutil.rmtree(root)
    found = {
        "seconds": seconds,
        "MiB": size / 2**20,
        "load_of_both_seconds": loaded,
        "rows_trained_on": 2 * (rows // 100),
        "rows_that_differ_after_going_on": differing,
    }
    print(f"incremental: {found}", file=sys.stderr)
    return found


def train(model: hotrow.EmbeddingBagCollection, rows: torch.Tensor) -> None:
    for ids in rows.split(65_536):
        model(ids[:, None].to(model.device)).values().square().sum().backward()


def beside_training(
    model: hotrow.EmbeddingBagCollection, options: argparse.Namespace, root: Path
) -> dict[str, object]:
    """Steps of 4,096 skewed lookups, with and without a save under way, in turns."""
    (table,) = model.tables
    steps = options.steps
    draw = torch.Generator().manual_seed(0)
    turn = max(1, steps // options.turns)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            ids = torch.rand(4096, 1, generator=draw, dtype=torch.float64) ** 4
            yield (ids * table.num_embeddings).long()

    times: dict[bool, list[float]] = {False: [], True: []}
    saves: list[hotrow.checkpoint.Save] = []
    stream = hotrow.ahead(batches(), model, depth=16)
    begun = time.perf_counter()
    for step, ids in enumerate(stream, -turn):
        model(ids).values().square().mean().backward()
        saving = step >= 0 and step // turn % 2 == 1
        if saving and (not saves or saves[-1].done):
            saves.append(hotrow.begin_checkpoint(root, model, step=step, keep=1))
        elif not saving and saves and not saves[-1].done:
            saves[-1].wait()  # between two turns
            begun = time.perf_counter()
            continue
        if options.device != "cpu":
            torch.cuda.synchronize()  # a step's time, not its launch's
        now = time.perf_counter()
        if step >= 0:  # slots are full
            times[saving].append(1000 * (now - begun))
        begun = now
        if min(len(each) for each in times.values()) >= steps:
            break
    stream.close()
    for each in saves:
        each.wait()
    return {
        "step_ms_without": _percentiles(times[False]),
        "step_ms_with": _percentiles(times[True]),
        "pause_ms": _percentiles([1000 * each.pause for each in saves]),
        "save_seconds": _percentiles([each.seconds for each in saves]),
        "waited_for_the_log_seconds": sum(each.waited for each in saves),
        "saves": len(saves),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    found = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99)}
    return {**found, "most": ordered[-1]}


def copied(source: Path, target: Path, *, sync: bool) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    if sync:
        files = [path for path in target.rglob("*") if path.is_file()]
        subprocess.run(["sync", *files], check=True)


class Resident:
    """The most anonymous memory that this process has inside, above what it had before."""

    most = 0

    def __enter__(self) -> Resident:
        self._before, self._ended = _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, _resident() - self._before)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise OSError("this system does not tell how much memory is resident")


if __name__ == "__main__":
    main()
