"""What ranks send each other per step, by formula and as counted in real processes.

    python benchmarks/ranks.py                         formulas, and runs with 2, 4 and 8 processes
    python benchmarks/ranks.py --criteo train.txt.zst  the same on real clicks
    python benchmarks/ranks.py --no-runs               formulas alone

A rank r looks up U_r different rows in a step, of which O_r are its own. With W bytes for an id (4
below 2^31 rows) and rows of d floats, all ranks together send

    (W + 1/8 + 8 d) * sum over r of (U_r - O_r)  bytes:  ids, vectors there and gradients back.

The eighth is one bit for each id that is read ahead: whether its vector comes early, while the
batch before trains, or late, because that batch may change it. Between two ranks it is rounded up.

Headers come on top: 512 bytes to each rank, three times a step. Without removing duplicates, each
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
KINDS = ("ids", "rows", "grads")
COUNTED = (*KINDS, "early rows")


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
    early_rows: float  # bytes of rows that travel while the batch before trains
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
    loads, marks, early = [], 0, 0
    before: Tensor | None = None  # all rows of the step before
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
            marks += (-(-counts // 8)).sum() - -(-counts[rank] // 8)
            copies += int(here.sum())
            if before is not None:
                asks = unique[~here][route.order].split(route.counts)
                others = torch.cat([x for owner, x in enumerate(asks) if owner != rank])
                early += int((~torch.isin(others, before)).sum())
        before = (step + bases).unique()
        loads.append(asked.max() / max(1, asked.mean()))
    crossing = away.sum() / steps
    copied_grads = copies / steps * (ranks - 1)
    lookups = shape.batch * len(shape.rows)
    return Predicted(
        shape.name,
        ranks,
        lookups,
        float(different.mean() / steps),
        ID_BYTES * (crossing + copied_grads) + marks / steps,
        4 * shape.dim * crossing,
        4 * shape.dim * (crossing + copied_grads),
        (ranks - 1) * lookups * (ID_BYTES + 8 * shape.dim),
        float(np.mean(loads)),
        4 * shape.dim * early / max(1, steps - 1),
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
    steps = dict.fromkeys(KINDS, len(ids)) | {"early rows": len(ids) - 1}
    return {kind: sum(x[kind] for x in sent) / steps[kind] for kind in COUNTED}


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
        shape.tables(), hotrow.SGD(lr=0.01), "20%", seed=0, replicate=replicate
    )
    batches = list(torch.from_numpy(ids[:, rank]))
    for batch in hotrow.ahead(batches, embedding):
        embedding(batch).values().sum().backward()
    queue.put(embedding.sent_bytes())  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()


def report(found: Predicted, counted: dict[str, float] | None) -> None:
    sent = found.ids + found.rows + found.grads
    parts = ", ".join(f"{kind} {getattr(found, kind) / 1e6:.2f}" for kind in KINDS)
    fewer = found.without_sharing / max(1, sent)
    text = (
        f"{found.shape:44} {found.ranks} ranks  {found.lookups:8,} lookups, "
        f"{found.different:9,.0f} different  {sent / 1e6:8.2f} MB ({parts})  "
        f"1/{fewer:.1f} of all lookups  load {found.load:.3f}  "
        f"early {found.early_rows / max(1, found.rows):.0%}"
    )
    if found.replicated_rows:
        text += f"  {found.replicated_rows:,} rows replicated"
    if counted is not None:
        is_equal = all(abs(counted[k] - getattr(found, k.replace(" ", "_"))) < 1 for k in counted)
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
