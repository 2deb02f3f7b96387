"""Where do two trainings part that differ by rounding alone?

    python benchmarks/rounding.py                        # generated clicks
    python benchmarks/rounding.py --criteo train.txt

trains all-fast step by step beside `reordered-1` and `reordered-2` (all-fast with the samples of
each batch in another order), and beside Hotline. Told is how far dense weights are apart after some
steps; and at the first step after which one is apart by more than rounding, how many units of
which layer are.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import RESULTS, results_for
from real import CONFIGS, RUNS, prepared, register_reordered
from torch import Tensor

from hotrow.run.config import RunConfig, load
from hotrow.run.job import open_data
from hotrow.study.systems import find_system

BESIDE = ("reordered-1", "reordered-2", "hotline")
SHOWN = (10, 50, 100, 200, 400, 800)  # steps
MORE_THAN_ROUNDING = 1e-6


@dataclass(frozen=True)
class Parting:
    """How far dense weights came apart, and where they first did."""

    system: str
    steps: int  # that were compared
    apart: dict[int, float]  # by step, the largest difference
    step: int | None = None  # after which the first was larger than rounding
    before: float = 0.0  # the largest difference a step earlier
    units: dict[str, int] | None = None  # of each layer, whose weights are apart by a tenth of that

    def __str__(self) -> str:
        grown = ", ".join(f"{value:.0e} after {step}" for step, value in self.apart.items())
        said = f"{self.system:12} {grown}"
        if self.step is None:
            return f"{said}; no more in {self.steps:,} steps"
        units = ", ".join(f"{count} of {layer}" for layer, count in (self.units or {}).items())
        return f"{said}; {self.before:.0e} before step {self.step:,}, which parts units: {units}"


def part(config: RunConfig, name: str) -> Parting:
    samples = open_data(config)
    one, other = (find_system(each).build(config, samples) for each in ("all-fast", name))
    apart: dict[int, float] = {}
    before, step = 0.0, 0
    for step, _ in enumerate(zip(one.train(), other.train(), strict=True), 1):
        units = _units(one.dense(), other.dense())
        largest = max(float(each.max()) for each in units.values())
        if step in SHOWN:
            apart[step] = largest
        if largest > MORE_THAN_ROUNDING:
            counts = {layer: int((each > 0.1 * largest).sum()) for layer, each in units.items()}
            found = {layer: count for layer, count in counts.items() if count}
            return Parting(name, step, apart, step, before, found)
        before = largest
    return Parting(name, step, apart)


def _units(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The largest difference of each unit's weights, by layer."""
    return {
        name: (weight - other[name]).abs().reshape(len(weight), -1).amax(1)
        for name, weight in one.items()
        if name.endswith(".weight")
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--criteo", type=Path, help="a log that `prepare criteo` reads")
    options.add_argument("--steps", type=int, default=800)
    options.add_argument("--results", type=Path, default=RESULTS, help="folder for rounding.jsonl")
    options.add_argument("--commit", help="of the code measured; else what git says")
    asked = options.parse_args()
    results = results_for("rounding", asked)
    torch.set_num_threads(1)
    for seed in (1, 2):
        register_reordered(seed)
    with tempfile.TemporaryDirectory() as scratch:
        settings = [*RUNS["criteo"], f"training.steps={asked.steps}", "run.threads=1"]
        if asked.criteo is None:
            settings += ["data.scale=0.01"]
        else:
            folder = prepared("criteo", asked.criteo, Path(scratch))
            settings += ["data.kind=prepared", f"data.folder={folder}"]
        config = load(CONFIGS / "rm2-kaggle.toml", overrides=settings)
        for name in BESIDE:
            found = part(config, name)
            print(found, flush=True)
            run = "generated" if asked.criteo is None else "criteo"
            results.write(run, name, {"facts": asdict(found)})


if __name__ == "__main__":
    main()
