"""What ranks send each other per step, by formula and as counted in real processes.

    python benchmarks/ranks.py                         formulas, and runs with 2, 4 and 8 processes
    python benchmarks/ranks.py --criteo train.txt.zst  the same on real clicks
    python benchmarks/ranks.py --no-runs               formulas alone

A rank r looks up U_r different rows in a step, of which O_r are its own. With W bytes for an id (4
below 2^31 rows) and rows of d floats, all ranks together send

    (W + 8 d) * sum over r of (U_r - O_r)  bytes:  ids, vectors there and gradients back.

Headers come on top: 512 bytes to each rank, four times a step. Without removing duplicates, each
lookup would take 8 d bytes instead of each different row. A replicated row sends no vector, and its
gradient and id go to every other rank: (W + 4 d)(ranks - 1) for each of U_r instead.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from criteo_sample import read_clicks
from terabyte import MLPERF, capped
from torch import Tensor
from traces import draw

import hotrow
from hotrow.distributed.owners import GroupOwners
from hotrow.distributed.replicas import choose_replicas
from hotrow.inputs.tables import group_by_width

RESULTS = Path(__file__).parent / "results" / "ranks.jsonl"
ID_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """Tables of one width, and how a rank looks them up."""

    name: str
    rows: tuple[int, ...]
    dim: int
    batch: int  # samples of a rank
    skew: float = 1.05
    is_measured: bool = True  # its rows fit the memory of this machine

    def tables(self) -> list[hotrow.EmbeddingBagConfig]:
        return [
            hotrow.EmbeddingBagConfig(f"t{k}", rows, self.dim, [f"t{k}"])
            for k, rows in enumerate(self.rows)
        ]


SHAPES = (
    Shape("target row", MLPERF, 64, 8192, is_measured=False),
    Shape("target row, tables of at most 100,000 rows", capped(100_000), 64, 2048),
    # 4,096 unpooled lookups of a rank, of which about 3 % are of different rows.
    Shape("sequences", (1_000_000,), 512, 4096, skew=2.0, is_measured=False),
    Shape("sequences, 10,000 rows", (10_000,), 512, 4096, skew=2.0),
)


@dataclass(frozen=True)
class Predicted:
    """Of one step, the mean over steps; bytes are those of all ranks together."""

    shape: str
    ranks: int
    lookups: int  # of a rank
    different: float
    ids: float
    rows: float
    grads: float
    without_sharing: float  # bytes if every lookup's vector and gradient crossed
    load: float  # the largest number of rows that are asked of an owner, over the mean
    replicated_rows: int = 0


def drawn(shape: Shape, ranks: int, steps: int) -> Tensor:
    """Return ids [steps, ranks, batch, features]."""
    ids = torch.empty(steps, ranks * shape.batch, len(shape.rows), dtype=torch.int64)
    draw(ids.unbind(2), shape.rows, range(len(shape.rows)), skew=shape.skew, seed=0)
    return ids.view(steps, ranks, shape.batch, len(shape.rows))


def predict(shape: Shape, ids: Tensor, replicate: int = 0) -> Predicted:
    steps, ranks = ids.shape[:2]
    (layout,) = group_by_width(shape.tables())
    owners = GroupOwners(layout, ranks)
    (copied,) = choose_replicas([layout], [4 * shape.dim], replicate, None)
    bases = torch.tensor(layout.bases)
    different, away, copies = np.zeros(ranks), np.zeros(ranks), 0
    loads = []
    for step in ids:
        asked = np.zeros(ranks)
        for rank, batch in enumerate(step):
            unique = (batch + bases).flatten().unique()
            here = torch.isin(unique, copied)
            route = owners.route(unique[~here])
            counts = np.array(route.counts)
            asked += counts
            different[rank] += len(unique)
            away[rank] += counts.sum() - counts[rank]
            copies += int(here.sum())
        loads.append(asked.max() / max(1, asked.mean()))
    crossing = away.sum() / steps
    copied_grads = copies / steps * (ranks - 1)
    lookups = shape.batch * len(shape.rows)
    return Predicted(
        shape.name,
        ranks,
        lookups,
        float(different.mean() / steps),
        ID_BYTES * (crossing + copied_grads),
        4 * shape.dim * crossing,
        4 * shape.dim * (crossing + copied_grads),
        (ranks - 1) * lookups * (ID_BYTES + 8 * shape.dim),
        float(np.mean(loads)),
        len(copied),
    )


def measure(shape: Shape, ids: Tensor, replicate: int) -> dict[str, float]:
    """Train in real processes; return the bytes that all of them sent per step, by kind."""
    ranks = ids.shape[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(
        _train, (ranks, port, shape, ids.numpy(), replicate, queue), nprocs=ranks
    )
    sent = [queue.get() for _ in range(ranks)]
    return {kind: sum(x[kind] for x in sent) / len(ids) for kind in ("ids", "rows", "grads")}


def _train(rank: int, ranks: int, port: int, shape: Shape, ids: np.ndarray, replicate: int,
           queue: object) -> None:  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    embedding = hotrow.EmbeddingBagCollection(
        shape.tables(), hotrow.SGD(lr=0.01), "10%", seed=0, replicate=replicate
    )
    batches = list(torch.from_numpy(ids[:, rank]))
    for batch in hotrow.ahead(batches, embedding):
        embedding(batch).values().sum().backward()
    queue.put(dict(embedding._rows.exchange.wire.sent))  # type: ignore
    dist.barrier()
    dist.destroy_process_group()


def report(found: Predicted, counted: dict[str, float] | None) -> None:
    sent = found.ids + found.rows + found.grads
    text = (
        f"{found.shape:44} {found.ranks} ranks  {found.lookups:8,} lookups, {found.different:9,.0f} "
        f"different  {sent / 1e6:8.2f} MB (ids {found.ids / 1e6:.2f}, rows {found.rows / 1e6:.2f}, "
        f"gradients {found.grads / 1e6:.2f})  1/{found.without_sharing / max(1, sent):.1f} of all "
        f"lookups  load {found.load:.3f}"
    )
    if found.replicated_rows:
        text += f"  {found.replicated_rows:,} rows replicated"
    if counted is not None:
        is_equal = all(abs(counted[k] - getattr(found, k)) < 1 for k in counted)
        text += "  counted: " + ("equal" if is_equal else str(counted))
    print(text, flush=True)


def versions() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE)
    return {"torch": torch.__version__, "commit": commit.stdout.decode().strip()}


def clicks_of(path: Path) -> tuple[Shape, Tensor]:
    ids = read_clicks(path).sparse
    shape = Shape("Criteo sample", tuple((ids.amax(0) + 1).tolist()), 16, 2048)
    return shape, ids


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--criteo", type=Path, help="clicks in the format of Criteo's challenge")
    parser.add_argument("--no-runs", action="store_true", help="formulas alone")
    parser.add_argument("--replicate", type=int, default=1 << 20, help="bytes of each rank")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    work: list[tuple[Shape, Tensor | None]] = [(shape, None) for shape in SHAPES]
    if given.criteo is not None:
        work.append(clicks_of(given.criteo))
    command = " ".join(["python", "benchmarks/ranks.py", *map(str, arguments or sys.argv[1:])])
    given.results.parent.mkdir(exist_ok=True)
    with given.results.open("a") as results:
        for shape, clicks in work:
            for ranks in given.ranks:
                steps = given.steps
                ids = drawn(shape, ranks, steps) if clicks is None else clicks
                if clicks is not None:
                    size = ranks * shape.batch
                    steps = min(steps, len(clicks) // size)
                    ids = clicks[: steps * size].view(steps, ranks, shape.batch, -1)
                for replicate in (0, given.replicate):
                    found, counted = predict(shape, ids, replicate), None
                    if shape.is_measured and not given.no_runs:
                        counted = measure(shape, ids, replicate)
                    report(found, counted)
                    line = {"suite": "ranks", **asdict(found), "counted": counted}
                    line |= {"command": command, **versions()}
                    results.write(json.dumps(line) + "\n")
                    results.flush()


if __name__ == "__main__":
    main()
