"""Does it matter whether Adam moves rows that no batch looks up?

    python benchmarks/idle_quality.py --criteo train.txt --movielens ml-1m.zip

trains DLRM by Adam on a sample of Criteo's clicks and on MovieLens-1M (prepared as by real.py) with
several seeds: once with rows that rest while no batch looks them up (`idle="frozen"`), and once
with rows that move in every step as torch's (`idle="decay"`). Seeds change starting rows, dense
weights and the order of samples. Shows AUC and log-loss of the test samples, and differences by
seed with 95 % t-intervals.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean, stdev

from harness import RESULTS, results_for, say
from real import CONFIGS, RUNS, prepared

from hotrow.kernels.dense_rules import DenseAdam
from hotrow.run.config import ROW_RULES, load
from hotrow.run.job import build
from hotrow.systems.calibrate import student_t

LR = 1e-3  # torch's default, and recbole's
RULES = {"frozen": "adam", "decay": "dense-adam"}
ROW_RULES["dense-adam"] = DenseAdam


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--criteo", type=Path, help="a log that `prepare criteo` reads")
    options.add_argument("--movielens", type=Path, help="ml-1m.zip as GroupLens publishes it")
    options.add_argument("--seeds", type=int, nargs="*", default=range(5))
    options.add_argument("--set", action="append", default=[], help="a setting of all runs")
    options.add_argument("--threads", type=int, default=1, help="of torch")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options.add_argument("--commit", help="of the code measured; else what git says")
    asked = options.parse_args()
    results = results_for("idle_quality", asked)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in RUNS:
            path = getattr(asked, kind)
            if path is not None:
                folder = prepared(kind, path, Path(scratch))
                for name, facts in study(kind, folder, asked).items():
                    results.write(kind, name, {"setting": {"lr": LR}, "facts": facts})


def study(kind: str, folder: Path, asked: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Train with every seed, idle rows frozen and moving, and return what came of it."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    for seed in asked.seeds:
        for name, rule in RULES.items():
            settings = [
                "data.kind=prepared", f"data.folder={folder}", f"data.seed={seed}",
                f"run.seed={seed}",
                f"run.threads={asked.threads}", *RUNS[kind], "embedding.strategy=all-fast",
                f"embedding.optimizer.name={rule}", f"embedding.optimizer.lr={LR}",
                "training.optimizer.name=adam", f"training.optimizer.lr={LR}", *asked.set,
            ]  # fmt: skip
            job = build(load(CONFIGS / "rm2-kaggle.toml", overrides=settings))
            for _ in job.train():
                pass
            record = job.evaluate(at_end=True)
            found[name].append((record.auc, record.log_loss))
            say(f"{kind}, seed {seed}, {name}: AUC {record.auc:.5f}, {record.log_loss:.5f}")
    more: dict[str, dict[str, object]] = {"decay minus frozen": {}}
    for place, what in enumerate(("auc", "log_loss")):
        pairs = zip(found["decay"], found["frozen"], strict=True)
        differences = [one[place] - other[place] for one, other in pairs]
        mean, spread = fmean(differences), stdev(differences)
        half = student_t(0.975, len(differences) - 1) * spread / len(differences) ** 0.5
        say(f"{kind}: {what} with moving rows minus frozen ones: {mean:+.5f} ± {half:.5f}")
        more["decay minus frozen"][what] = {"mean": mean, "half_width": half}
    seeds = list(asked.seeds)
    for name, of_rule in found.items():
        aucs, losses = zip(*of_rule, strict=True)
        more[name] = {"seeds": seeds, "auc": list(aucs), "log_loss": list(losses)}
    return more


if __name__ == "__main__":
    main()
