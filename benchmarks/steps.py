"""When rows are updated: in backward(), or when a torch optimizer steps.

    python benchmarks/steps.py

The target of benchmarks/terabyte.py (204 M rows of 64, 5 % of the bytes in HBM, batch 8192, SGD)
with a DLRM in float32, captured and eager. "accumulated" is four batches and one step; it stands
beside four steps of "backward, eager".
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
from traces import NUM_DENSE, Trace, feature_names

import hotrow
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


def captured(clip: float | None) -> Loop:
    def loop(model: DLRM, optimizer: Any, batches: Any) -> Iterator[object]:
        loss_fn = F.binary_cross_entropy_with_logits
        step = hotrow.graphed(model, loss_fn, optimizer, clip_norm=clip)
        for batch in hotrow.ahead(batches, model, ids=lambda b: b.sparse, step=step):
            yield step(batch)

    return loop


def eager(clip: float | None) -> Loop:
    def loop(model: DLRM, optimizer: Any, batches: Any) -> Iterator[object]:
        for batch in hotrow.ahead(batches, model, ids=lambda b: b.sparse):
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
}


def measure(
    name: str, trace: Trace, session: Session, device: torch.device, size: dict[str, Any]
) -> dict[str, Any]:
    update, loop, micro = RUNS[name]
    model = model_of(size["rows"], size["dim"], device, update)
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
    traffic = model.embedding.traffic()
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
    steps = size["warmup"] + size["timed"] + 320
    trace = Trace(size["rows"], steps=steps, batch=size["batch"], skew=1.05, lock=not given.smoke)
    for name in given.only:
        session.attempt(
            name, "hotrow", lambda name=name: measure(name, trace, session, device, size), one_line
        )
    session.print_again()
    raise SystemExit(1 if session.failed else 0)


if __name__ == "__main__":
    main()
