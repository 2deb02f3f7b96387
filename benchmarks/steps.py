"""What switching costs: steps of torch's optimizers, and converted modules.

    python benchmarks/steps.py

The target of benchmarks/terabyte.py (204 M rows of 64, 5 % of the bytes in HBM, batch 8192, SGD)
with a DLRM in float32, captured and eager. "backward" and "step" say when rows are updated.
"accumulated" is four batches and one step; it stands beside four steps of "backward, eager".
"modules" has one nn.Embedding for each table, changed by hotrow.convert(), and "collection" is the
same model with one collection; both have as many rows as fit RAM twice, all of them written.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from harness import Session, device_for, parser, time_steps
from terabyte import MLPERF
from torch import Tensor, nn
from traces import NUM_DENSE, Trace, feature_names

import hotrow
from hotrow.embedding.in_models import collections_in
from hotrow.models import DLRM

LR = 0.01
MICRO = 4
Loop = Callable[[Any, Any, Any], Iterator[object]]


def model_of(rows: tuple[int, ...], dim: int, device: torch.device, update: str) -> DLRM:
    names = feature_names(len(rows))
    tables = [
        hotrow.EmbeddingBagConfig(f"t{name}", count, dim, [name])
        for name, count in zip(names, rows, strict=True)
    ]
    rule = hotrow.SGD(lr=LR) if update == "backward" else None
    embedding = hotrow.EmbeddingBagCollection(
        tables, rule, "5%" if device.type == "cuda" else "60%", update=update, device=device, seed=0
    )
    generator = torch.Generator().manual_seed(0)
    return DLRM(embedding, NUM_DENSE, (512, 256, dim), generator=generator).to(device)


class Fields(nn.Module):
    """One module for each table, called with a column each."""

    def __init__(self, rows: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.fields = nn.ModuleList(
            [nn.Embedding(count, dim, _weight=torch.zeros(count, dim)) for count in rows]
        )

    def forward(self, ids: Tensor) -> Side:
        return Side([field(ids[:, k]) for k, field in enumerate(self.fields)])


class Side:
    """Vectors of all modules, side by side; none outlives its step, or it could not be captured."""

    def __init__(self, vectors: list[Tensor]) -> None:
        self._vectors = vectors

    def values(self) -> Tensor:
        return torch.cat(self._vectors, 1)


def modules_of(rows: tuple[int, ...], dim: int, device: torch.device) -> DLRM:
    generator = torch.Generator().manual_seed(0)
    widths = (512, 256, dim)
    model = DLRM(Fields(rows, dim), NUM_DENSE, widths, num_features=len(rows), generator=generator)
    model.bottom.to(device), model.top.to(device)
    budget = "5%" if device.type == "cuda" else "60%"
    return hotrow.convert(model, budget, device=device, seed=0, show=False)


def written(model: DLRM) -> DLRM:
    """Let every row of a collection count as written, as those of a converted model do."""
    for table in model.embedding.tables:
        zeros = torch.zeros(table.num_embeddings, table.embedding_dim)
        model.embedding.load_weights(table.name, 0, zeros)
    return model


def captured(clip: float | None) -> Loop:
    def loop(model: DLRM, optimizer: Any, batches: Any) -> Iterator[object]:
        loss_fn = F.binary_cross_entropy_with_logits
        step = hotrow.graphed(model, loss_fn, optimizer, clip_norm=clip)
        for batch in hotrow.ahead(batches, model, ids=ids_for(model), step=step):
            yield step(batch)

    return loop


def eager(clip: float | None) -> Loop:
    def loop(model: DLRM, optimizer: Any, batches: Any) -> Iterator[object]:
        for batch in hotrow.ahead(batches, model, ids=ids_for(model)):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            yield optimizer.step()

    return loop


def accumulated(model: DLRM, optimizer: Any, batches: Any) -> Iterator[object]:
    for number, batch in enumerate(hotrow.ahead(batches, model, ids=lambda b: b.sparse)):
        F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        if number % MICRO == MICRO - 1:
            optimizer.step()
            yield optimizer.zero_grad()


RUNS: dict[str, tuple[str, Loop, int]] = {
    "backward, captured": ("backward", captured(None), 1),
    "step, captured": ("step", captured(None), 1),
    "step with clip_norm, captured": ("step", captured(1.0), 1),
    "backward, eager": ("backward", eager(None), 1),
    "step, eager": ("step", eager(None), 1),
    "step with clip_grad_norm_, eager": ("step", eager(1.0), 1),
    "accumulated, eager": ("step", accumulated, MICRO),
    "collection, captured": ("collection", captured(None), 1),
    "modules, captured": ("modules", captured(None), 1),
    "collection, eager": ("collection", eager(None), 1),
    "modules, eager": ("modules", eager(None), 1),
}


def ids_for(model: DLRM) -> Callable[[Any], Any] | None:
    """Return what says what a model looks up; that of modules is learned."""
    return None if isinstance(model.embedding, Fields) else lambda batch: batch.sparse


class Traces:
    """The ids of a run, over all rows or over half as many."""

    def __init__(self, size: dict[str, Any], *, lock: bool) -> None:
        self.size, self._lock = size, lock
        self._newest: tuple[bool, Trace] | None = None

    def of(self, is_halved: bool) -> Trace:
        if self._newest is None or self._newest[0] != is_halved:
            if self._newest is not None:
                self._newest[1].close()
            size, part = self.size, 2 if is_halved else 1
            rows = tuple(-(-count // part) for count in size["rows"])
            steps = size["warmup"] + size["timed"] + 320
            trace = Trace(rows, steps=steps, batch=size["batch"], skew=1.05, lock=self._lock)
            self._newest = is_halved, trace
        return self._newest[1]


def measure(name: str, traces: Traces, session: Session, device: torch.device) -> dict[str, Any]:
    kind, loop, micro = RUNS[name]
    size, is_halved = traces.size, kind in ("modules", "collection")
    trace = traces.of(is_halved)
    if kind == "modules":
        model = modules_of(trace.rows, size["dim"], device)
    elif kind == "collection":
        model = written(model_of(trace.rows, size["dim"], device, "step"))
    else:
        model = model_of(trace.rows, size["dim"], device, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, foreach=True)
    batches = trace.batches(0, trace.steps)
    steps = loop(model, optimizer, batches)
    timing = time_steps(
        steps,
        warmup=size["warmup"] // micro,
        timed=size["timed"] // micro,
        device=device,
        deadline=session.deadline,
    )
    steps.close()  # type: ignore[attr-defined]
    traffic = next(iter(collections_in(model).values())).traffic()
    del model, optimizer, steps
    gc.collect()
    return {"step_ms": asdict(timing), "batches": micro, "evicted": traffic.evicted_rows}


def one_line(measured: dict[str, Any]) -> str:
    whole = measured["step_ms"]["whole"]
    return (
        f"{whole['mean']:.3f} ms on the mean of {whole['steps']:,} steps (p50 {whole['p50']:.3f}, "
        f"p99 {whole['p99']:.3f}, longest {whole['longest']:.1f}); evicted {measured['evicted']:,}"
    )


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--only", nargs="+", default=list(RUNS))
    given = arguments.parse_args()
    device = device_for(given)
    size: dict[str, Any] = {"rows": MLPERF, "dim": 64, "warmup": 960, "timed": 1200, "batch": 8192}
    if given.smoke:
        size = {"rows": (2000,) * 3, "dim": 8, "warmup": 8, "timed": 24, "batch": 32}
    session = Session("steps", given)
    traces = Traces(size, lock=not given.smoke)
    for name in given.only:
        session.attempt(
            name, "hotrow", lambda name=name: measure(name, traces, session, device), one_line
        )
    session.print_again()
    raise SystemExit(1 if session.failed else 0)


if __name__ == "__main__":
    main()
