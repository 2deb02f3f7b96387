"""What models learn from real samples, within a budget, in fast memory and in plain PyTorch.

    python benchmarks/quality.py --criteo train.txt.zst --avazu train.csv --taobao UserBehavior.csv

prepares each file that is given, trains RM2, RM4 or RM1 (configs/) on it with three seeds, and
prints AUC and log-loss on the test split. Every run is compared, bit by bit, with one that has all
rows in fast memory. On Criteo's clicks the same DLRM is also written in plain PyTorch, with
nn.EmbeddingBag and torch.optim, which draws its own starting weights and reads the same batches.
Some starts of a TBSM get stuck, for which its reference trains five and keeps the one that is best
on the validation split; that one is named, too.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from hotrow.data import ClickBatch
from hotrow.run.config import RunConfig, load
from hotrow.run.job import Job, all_fast, build, differences

CONFIGS = Path(__file__).parents[1] / "configs"
ALLOWED = 0.005  # of AUC, between two ways to train one model
# What a small sample needs: a batch of the published size would leave few steps.
RUNS = {
    "criteo": ("rm2-kaggle", ["embedding.budget=10%"]),
    "avazu": ("rm4-avazu", ["embedding.budget=40%", "data.batch_size=128", "training.epochs=3"]),
    "taobao": ("rm1-taobao", ["embedding.budget=10%", "data.batch_size=64"]),
}


@dataclass(frozen=True)
class Outcome:
    """Quality on the test split after training, and AUC on the validation split."""

    auc: float
    log_loss: float
    chosen_by: float
    seconds: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind in RUNS:
        options.add_argument(f"--{kind}", type=Path, help=f"a log that `prepare {kind}` reads")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument(
        "--same-start", action="store_true", help="PyTorch begins with hotrow's weights"
    )
    options.add_argument("--set", action="append", default=[], help="a setting of all runs")
    options.add_argument("--folder", type=Path, help="keep prepared data here")
    asked = options.parse_args()
    given = {kind: getattr(asked, kind) for kind in RUNS if getattr(asked, kind) is not None}
    if not given:
        options.error(f"give one of {', '.join(f'--{kind}' for kind in RUNS)}")
    torch.set_num_threads(1)
    is_good = True
    with tempfile.TemporaryDirectory() as scratch:
        for kind, path in given.items():
            folder = prepared(kind, path, asked.folder or Path(scratch))
            is_good &= measure(
                kind, folder, seeds=asked.seeds, settings=asked.set, same_start=asked.same_start
            )
    raise SystemExit(not is_good)


def prepared(kind: str, path: Path, under: Path) -> Path:
    folder = under / kind
    if not (folder / "manifest.json").exists():
        words = ["prepare", kind, str(path), "--out", str(folder)]
        done = subprocess.run([sys.executable, "-m", "hotrow", *words], stdout=subprocess.PIPE)
        if done.returncode:  # what is wrong has been said
            raise SystemExit(done.returncode)
    return folder


def measure(
    kind: str, folder: Path, *, seeds: int, settings: Sequence[str] = (), same_start: bool = False
) -> bool:
    """Whether all was as promised: equal to the bit, and PyTorch's AUC as good."""
    name, own = RUNS[kind]
    changed = [*own, *settings]
    print(f"{name} on {kind}: {', '.join(changed)}", flush=True)
    ours, plain, is_equal = [], [], True
    for seed in range(seeds):
        config = config_of(name, folder, changed, seed)
        found, unlike = trained(config)
        ours.append(found)
        is_equal &= not unlike
        show(f"hotrow, seed {seed}", found, "not " * bool(unlike) + "equal to all-fast, to the bit")
        if kind == "criteo":
            plain.append(trained_plainly(config, same_start=same_start))
            show(f"PyTorch, seed {seed}", plain[-1], "")
    show("hotrow, mean", average(ours), "")
    best = max(range(seeds), key=lambda seed: ours[seed].chosen_by)
    show("hotrow, best", ours[best], f"seed {best}, by validation AUC {ours[best].chosen_by:.5f}")
    if not plain:
        return is_equal
    apart = average(ours).auc - average(plain).auc
    show("PyTorch, mean", average(plain), f"hotrow's AUC is {apart:+.5f} of that")
    return is_equal and abs(apart) <= ALLOWED


def config_of(name: str, folder: Path, settings: Iterable[str], seed: int) -> RunConfig:
    where = ["data.kind=prepared", f"data.folder={folder}", f"run.seed={seed}"]
    return load(CONFIGS / f"{name}.toml", overrides=[*where, f"data.seed={seed}", *settings])


def trained(config: RunConfig) -> tuple[Outcome, list[str]]:
    """What comes of a run, and in what it differs from one that has all rows in fast memory."""
    job, other = build(config), build(all_fast(config))
    started = time.perf_counter()
    losses = [record.loss for record in job.train()]
    seconds = time.perf_counter() - started
    same = repr(losses) == repr([record.loss for record in other.train()])
    found = job.evaluate(at_end=True)
    unlike = ([] if same else ["losses"]) + differences(job, other)
    return Outcome(found.auc, found.log_loss, job.evaluate().auc, seconds), unlike


class PlainDLRM(nn.Module):
    """The model of a run in torch's own words; starts like the DLRM reference."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        shape, dim = job.config.model.arguments, job.config.model.embedding_dim
        rows = [num_rows for num_rows, _ in job.samples.tables.values()]
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in rows)
        for n, table in zip(rows, self.tables, strict=True):
            nn.init.uniform_(table.weight, -math.sqrt(1 / n), math.sqrt(1 / n))
        pairs = len(rows) * (len(rows) + 1) // 2
        self.bottom = layers([job.samples.num_dense, *shape["bottom"]])
        self.top = layers([dim + pairs, *shape["top"]])[:-1]  # the last ReLU left out
        self.places = torch.tril_indices(len(rows) + 1, len(rows) + 1, offset=-1)

    def start_like(self, job: Job) -> None:
        given = job.model.state_dict()
        for table, weights in zip(job.samples.tables, self.tables, strict=True):
            rows = given.pop(f"embedding.embedding_bags.{table}.weight")
            weights.load_state_dict({"weight": rows})
        found = self.load_state_dict(given, strict=False)  # the layers
        assert not found.unexpected_keys

    def forward(self, batch: ClickBatch) -> Tensor:
        dense = self.bottom(batch.dense)
        ids = zip(self.tables, batch.sparse.long().T, strict=True)
        vectors = torch.stack([dense, *(table(column[:, None]) for table, column in ids)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        joined = torch.cat([dense, products[:, self.places[0], self.places[1]]], dim=1)
        return self.top(joined).squeeze(1)


def layers(widths: Sequence[int]) -> nn.Sequential:
    found: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        linear = nn.Linear(width_in, width_out)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (width_in + width_out)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / width_out))
        found += [linear, nn.ReLU()]
    return nn.Sequential(*found)


def trained_plainly(config: RunConfig, *, same_start: bool) -> Outcome:
    """The same batches in the same order, by SGD of torch.optim on all parameters."""
    job = build(all_fast(config))  # for its data and shape; it is not trained
    rates = {config.embedding.optimizer.lr, config.training.optimizer.lr}
    names = {config.embedding.optimizer.name, config.training.optimizer.name}
    if names != {"sgd"} or len(rates) != 1:
        raise SystemExit("plain PyTorch is trained by SGD with one learning rate")
    torch.manual_seed(config.run.seed)
    model = PlainDLRM(job)
    if same_start:
        model.start_like(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=rates.pop())
    started = time.perf_counter()
    for batch in job.samples.batches(job.total_steps):
        loss = binary_cross_entropy_with_logits(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - started
    auc, log_loss = quality(model, job.samples.split("test").batches)
    return Outcome(
        auc, log_loss, quality(model, job.samples.split("validation").batches)[0], seconds
    )


def quality(model: nn.Module, batches: Iterable[ClickBatch]) -> tuple[float, float]:
    """AUC and log-loss."""
    model.eval()
    with torch.no_grad():
        scored = [(model(batch).double(), batch.label.double()) for batch in batches]
    logits, labels = (torch.cat(parts) for parts in zip(*scored, strict=True))
    loss = float(binary_cross_entropy_with_logits(logits, labels))
    return float(binary_auroc(logits.sigmoid(), labels.long())), loss


def average(found: Sequence[Outcome]) -> Outcome:
    return Outcome(*(mean(getattr(each, name) for each in found) for name in vars(found[0])))


def show(who: str, found: Outcome, more: str) -> None:
    print(
        f"{who:>16}: test AUC {found.auc:.5f}, log-loss {found.log_loss:.5f}, "
        f"{found.seconds:.1f} s{'; ' * bool(more)}{more}",
        flush=True,
    )


if __name__ == "__main__":
    main()
