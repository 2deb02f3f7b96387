"""What a step costs when idle rows move (`idle="decay"`), beside one that lets them rest.

    python benchmarks/idle_speed.py --rows 1000000 --dim 16 --batch 2048 --features 8

trains one table by Adam with skewed ids, without a dense part, so that rows are all of the work.
Both collections take turns, a hundred steps each, so that they meet the same machine. Shows the
mean of all steps, p50, p99 and the longest step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from harness import RESULTS, results_for, say

import hotrow

TURN = 100  # steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--dim", type=int, default=16)
    options.add_argument("--batch", type=int, default=2048)
    options.add_argument("--features", type=int, default=8)
    options.add_argument("--budget", default="20%")
    options.add_argument("--strategy", default="lookahead")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--threads", type=int, default=1, help="of torch")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options.add_argument("--commit", help="of the code measured; else what git says")
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    turns = 2 + asked.steps // TURN  # the first two let rows come in
    collections = {idle: collection_of(asked, idle) for idle in ("frozen", "decay")}
    times: dict[str, list[float]] = {idle: [] for idle in collections}
    for turn in range(turns):
        for idle, embedding in collections.items():
            seconds = train(embedding, batches(asked, seed=turn))
            if turn >= 2:
                times[idle] += seconds
    setting = {
        name: getattr(asked, name)
        for name in ("rows", "dim", "batch", "features", "budget", "strategy", "threads")
    }
    results, means = results_for("idle_speed", asked), {}
    for idle, seconds in times.items():
        every = torch.tensor(seconds, dtype=torch.float64) * 1e3
        means[idle] = float(every.mean())
        facts = {"mean_ms": means[idle], "longest_ms": float(every.max())}
        facts |= {f"p{p}_ms": float(every.quantile(p / 100)) for p in (50, 99)}
        facts["steps"] = len(seconds)
        results.write("adam", idle, {"setting": setting, "facts": facts})
        say(f"{idle}: " + ", ".join(f"{name} {value:.2f}" for name, value in facts.items()))
    say(f"decay over frozen: {means['decay'] / means['frozen']:.3f}")


def collection_of(asked: argparse.Namespace, idle: str) -> hotrow.EmbeddingBagCollection:
    names = [f"f{place}" for place in range(asked.features)]
    table = hotrow.EmbeddingBagConfig("t", asked.rows, asked.dim, names)
    return hotrow.EmbeddingBagCollection(
        [table], hotrow.Adam(lr=1e-3), asked.budget, idle=idle, strategy=asked.strategy, seed=0
    )


def batches(asked: argparse.Namespace, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (asked.batch, asked.features)
    return [
        (torch.rand(shape, generator=draw) ** 4 * asked.rows).long().clamp_(max=asked.rows - 1)
        for _ in range(TURN)
    ]


def train(embedding: Any, listed: list[torch.Tensor]) -> list[float]:
    """Return the seconds of each step."""
    seconds, begun = [], perf_counter()
    for batch in hotrow.ahead(listed, embedding):
        embedding(batch).values().square().sum().backward()
        now = perf_counter()
        seconds.append(now - begun)
        begun = now
    return seconds


if __name__ == "__main__":
    main()
