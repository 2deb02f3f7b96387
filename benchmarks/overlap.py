"""What several ranks send while a batch trains, and what it costs beside one rank.

    python benchmarks/overlap.py                                  two ranks on this CPU
    python benchmarks/overlap.py --device cuda --batch 8192       on one GPU, over gloo

Lines: one rank with the batch of a rank, and every rank alone with it at the same time; ranks
that share rows, with rows that travel early and without; and messages of as many bytes alone.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from svg import Drawing
from torch import Tensor, nn
from traces import draw

import hotrow
from hotrow.distributed.early_rows import EarlyRows
from hotrow.distributed.exchange import Exchange
from hotrow.distributed.ranks import Channel, Ranks

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "overlap.jsonl"
# Of the drawing, from its top: kind, colour, what it is.
LANES = (
    ("ids", "blue", "of a batch read ahead"),
    ("early rows", "green", "of the next batch"),
    ("train", "red", "dense part"),
    ("late rows", "orange", "changed by the last batch"),
    ("gradients", "purple", "to owners, and their update"),
)
SHOWN = 3  # steps in the drawing
WARM_UP = 10
LEFT, WIDTH, TOP, LANE, BAR = 200, 1000, 64, 58, 34


@dataclass(frozen=True)
class Span:
    kind: str
    start: float  # seconds
    end: float


@dataclass
class Measured:
    """Of one rank."""

    name: str
    seconds: list[float] = field(default_factory=list)  # of each step
    sent: dict[str, int] = field(default_factory=dict)  # bytes of all steps together
    steps: int = 0
    spans: list[Span] = field(default_factory=list)


class Model(nn.Module):
    def __init__(self, embedding: Any, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = embedding
        sizes = [width, hidden, hidden, 1]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.dense = nn.Sequential(*layers[:-1])


class Recorder:
    """Notes when what was sent and trained; knows the methods of an exchange."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.trains_since: float | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        perform_batch, perform_grads = Exchange._perform_batch, Exchange._perform_grads
        begin = Ranks.begin_exchange

        def batch(*args: Any) -> Any:
            return self._timed("ids", perform_batch, *args)

        def grads(*args: Any) -> Any:
            if self.trains_since is not None:
                self.spans.append(Span("train", self.trains_since, time.perf_counter()))
                self.trains_since = None
            return self._timed("gradients", perform_grads, *args)

        def begun(ranks: Ranks, values: Tensor, sent: Any, received: Any, channel: Channel) -> Any:
            kind = "early rows" if channel is ranks.early else "late rows"
            start = time.perf_counter()
            pending = begin(ranks, values, sent, received, channel)
            pending._work.get_future().then(
                lambda _: self.spans.append(Span(kind, start, time.perf_counter()))
            )
            return pending

        with (
            patch.object(Exchange, "_perform_batch", batch),
            patch.object(Exchange, "_perform_grads", grads),
            patch.object(Ranks, "begin_exchange", begun),
        ):
            yield

    def _timed(self, kind: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.spans.append(Span(kind, start, time.perf_counter()))


def train(given: argparse.Namespace, name: str, batches: Sequence[Tensor]) -> Measured:
    """Train by an ordinary loop; the ranks of the process group share rows, if there is one."""
    device = torch.device(given.device)
    tables = [
        hotrow.EmbeddingBagConfig(f"t{k}", given.rows, given.dim, [f"t{k}"])
        for k in range(given.features)
    ]
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.RowWiseAdagrad(lr=0.05), given.budget, seed=0, device=device
    )
    model = Model(embedding, given.features * given.dim, given.hidden).to(device)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.01)
    recorder, found, before = Recorder(), Measured(name), 0.0
    with recorder.recording():
        for number, ids in enumerate(hotrow.ahead(batches, model)):
            if number == WARM_UP:
                start = embedding.sent_bytes()
            if number >= WARM_UP:
                found.seconds.append(time.perf_counter() - before)
            before = time.perf_counter()
            vectors = embedding(ids).values()
            recorder.trains_since = time.perf_counter()
            loss = model.dense(vectors).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    sent, found.steps = embedding.sent_bytes(), len(batches) - WARM_UP
    found.sent = {kind: sent[kind] - start[kind] for kind in sent}
    found.spans = recorder.spans
    return found


def send_alone(given: argparse.Namespace, sent: dict[str, float], ranks: int) -> Measured:
    """Send messages of as many bytes as a step has, one after the other, with nothing else."""
    found, device = Measured("messages alone"), torch.device(given.device)
    headers = [torch.zeros(ranks, 64, dtype=torch.int64) for _ in range(3)]
    floats = [torch.zeros(ranks * int(sent[kind] / 4 / (ranks - 1))) for kind in ("rows", "grads")]
    ids = torch.zeros(ranks * int(sent["ids"] / 4 / (ranks - 1)), dtype=torch.int32)
    messages = [*headers, ids, *(x.to(device) for x in floats)]
    messages = [x[: len(x) // ranks * ranks] for x in messages]
    results = [torch.empty_like(x) for x in messages]
    for _ in range(given.steps):
        before = time.perf_counter()
        for result, message in zip(results, messages, strict=True):
            dist.all_to_all_single(result, message)
        found.seconds.append(time.perf_counter() - before)
    return found


def work(rank: int, port: int, given: argparse.Namespace, command: str) -> None:
    ranks = given.ranks
    threads = max(1, torch.get_num_threads() // ranks)
    torch.set_num_threads(threads)
    steps, samples = given.steps + WARM_UP, ranks * given.batch
    ids = torch.empty(steps, samples, given.features, dtype=torch.int64)
    sizes = [given.rows] * given.features
    draw(ids.unbind(2), sizes, range(given.features), skew=given.skew, seed=0)
    batches = list(ids.view(steps, ranks, given.batch, -1)[:, rank].contiguous())
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    alone = [dist.new_group([r]) for r in range(ranks)]
    found = []
    with in_group(alone[rank]):
        if rank == 0:
            found.append(train(given, "one rank", batches))
        dist.barrier()
        found.append(train(given, "each rank alone, at the same time", batches))
    dist.barrier()
    found.append(train(given, "ranks that share rows", batches))
    with patch.object(EarlyRows, "can_send", lambda self, works: False):
        found.append(train(given, "the same, no row early", batches))
    shared = found[-2]
    sent = {kind: count / shared.steps for kind, count in shared.sent.items()}
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, sent)
    most = {kind: max(x[kind] for x in every) for kind in sent}
    found.append(send_alone(given, most, ranks))
    if rank == 0:
        report(found, given, command)
        if given.out is not None:
            note = f"{ranks} ranks over gloo on {given.device}"
            drawing_of(shared.spans, note).write(given.out)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def in_group(group: Any) -> Iterator[None]:
    """Inside, collections are built over a process group of this rank alone."""
    build = hotrow.EmbeddingBagCollection.__init__

    def built(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options, process_group=group)

    with patch.object(hotrow.EmbeddingBagCollection, "__init__", built):
        yield


def drawing_of(spans: Sequence[Span], note: str) -> Drawing:
    """Draw the steps in the middle; a step begins when its vectors are there."""
    edges = [span.start for span in spans if span.kind == "train"]
    first = len(edges) // 2
    edges = edges[first : first + SHOWN + 1]
    start, end = edges[0], edges[-1]
    scale = (WIDTH - LEFT - 20) / (end - start)
    bottom = TOP + LANE * len(LANES)
    title = f"{SHOWN} training steps of one rank"
    picture = Drawing(WIDTH, bottom + 60, title)
    for number, edge in enumerate(edges):
        x = LEFT + (edge - start) * scale
        picture.line([(x, TOP - 14), (x, bottom)], "dash")
        if edge < end:
            picture.text(
                x + 4, TOP - 22, f"batch {number + 1}: {(edges[number + 1] - edge) * 1e3:.1f} ms"
            )
    for place, (kind, colour, what) in enumerate(LANES):
        top = TOP + LANE * place
        picture.text(18, top + 16, kind)
        picture.text(18, top + 33, what, style="small")
        picture.line([(LEFT, top + BAR + 4), (WIDTH - 20, top + BAR + 4)], "rule")
        for span in spans:
            if span.kind == kind and span.end > start and span.start < end:
                left, right = max(span.start, start), min(span.end, end)
                picture.box(
                    LEFT + (left - start) * scale,
                    top,
                    max(1.0, (right - left) * scale),
                    BAR,
                    colour,
                )
    picture.text(18, bottom + 40, note, style="small")
    return picture


def report(found: Sequence[Measured], given: argparse.Namespace, command: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE)
    facts = {"commit": commit.stdout.decode().strip(), "torch": torch.__version__}
    options = {k: v for k, v in vars(given).items() if k not in ("out", "results")}
    given.results.parent.mkdir(exist_ok=True)
    with given.results.open("a") as results:
        for line in found:
            times = sorted(line.seconds)
            figures = {
                "mean": statistics.mean(times), "p50": statistics.median(times),
                "p99": times[len(times) * 99 // 100], "longest": times[-1],
            }  # fmt: skip
            text = f"{line.name:36}" + "".join(
                f"{k} {v * 1e3:8.2f} ms  " for k, v in figures.items()
            )
            if line.sent.get("rows"):
                share = line.sent["early rows"] / line.sent["rows"]
                total = line.sent["ids"] + line.sent["rows"] + line.sent["grads"]
                text += f"{total / line.steps / 1e6:.2f} MB, {share:.0%} of the rows early"
            print(text, flush=True)
            what = {"suite": "overlap", "system": line.name, "sent": line.sent, "steps": line.steps}
            results.write(
                json.dumps(what | figures | options | facts | {"command": command}) + "\n"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048, help="samples of each rank")
    parser.add_argument("--hidden", type=int, default=512, help="width of the dense part")
    parser.add_argument("--skew", type=float, default=1.05)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="a drawing of some steps")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = " ".join(["python", "benchmarks/overlap.py", *map(str, arguments or sys.argv[1:])])
    torch.multiprocessing.spawn(work, (port, given, command), nprocs=given.ranks)


if __name__ == "__main__":
    main()
