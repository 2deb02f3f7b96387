"""Does leaving out samples by Slipstream cost less quality than leaving out as many at random?

    python benchmarks/system_quality.py                           # the whole study, on a GPU
    python benchmarks/system_quality.py --seeds 0 1               # a part of it
    python benchmarks/system_quality.py --device cpu --seeds 0 1 2 --samples 600000

trains one DLRM per seed and system on generated clicks whose truth is known: Kaggle's tables, a
hundredth as large, no drift. A seed draws its own training samples, starting rows and dense
weights, and all systems share them; test samples are the same for all seeds. Slipstream runs at
several drop targets in both modes, each beside random-drop with as many samples left out from the
same batch on. Tables show AUC and log-loss on the test samples and differences by seed with 95 %
t-intervals. Lines of other parts of the study are read from the results, so that the table is
whole.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any

import harness
import torch
from harness import Session, Unavailable, say
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

import hotrow
from hotrow.data import KAGGLE_ROWS, ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.models import DLRM
from hotrow.systems.calibrate import student_t
from hotrow.systems.slipstream.skip import SkipRecord

PARTS = 16  # of the test samples, whose spread tells how much is their chance
SETTLED = 100  # rows: of a table that is not made smaller
RULES = {
    "sgd": hotrow.SGD,
    "adagrad": hotrow.Adagrad,
    "row-wise": hotrow.RowWiseAdagrad,
    "adam": hotrow.Adam,
}


@dataclass(frozen=True)
class Study:
    """What is trained, the same for all systems."""

    samples: int = 4_000_000
    test_samples: int = 1 << 20
    batch_size: int = 2048
    scale: int = 100  # tables are so many times smaller than Kaggle's
    skew: float = 1.05
    signal: float = 1.5
    dim: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)  # and dim
    top: tuple[int, ...] = (512, 256)  # and 1
    rule: str = "adagrad"
    lr: float = 0.05
    hot_budget: str = "12%"  # of the rows, as 256 MB are of Kaggle's
    counted: float = 0.05  # shares of the batches: whose ids choose hot rows,
    starting: float = 0.05  # before the first snapshot,
    rechecked: float = 0.1  # after which stale rows have to prove it again,
    watched: float = 0.03  # between the snapshots
    sample_rate: float = 0.01
    least_visits: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(max(min(each, SETTLED), each // self.scale) for each in KAGGLE_ROWS)

    @property
    def num_batches(self) -> int:
        return self.samples // self.batch_size


TINY = Study(
    samples=40 * 256, test_samples=16 * 1024, batch_size=256, scale=10_000, bottom=(16,), top=(16,),
    dim=4, watched=0.1, sample_rate=0.1, hot_budget="60%",
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Samples of one seed, and those that all are tested on."""

    study: Study
    seed: int
    train: list[ClickBatch]
    validation: list[ClickBatch]  # for what decides by a loss
    test: list[ClickBatch]


class Generated:
    """Samples are made once and kept: of a seed to train on, and to test on."""

    def __init__(self, study: Study, device: torch.device) -> None:
        self._study, self._device = study, device
        config = SyntheticConfig(
            rows=study.rows, batch_size=study.batch_size, skew=study.skew, signal=study.signal
        )
        self._clicks = SyntheticClicks(config)
        tested = SyntheticClicks(replace(config, batch_size=min(study.test_samples, 16_384)))
        size = tested.config.batch_size
        # Any seed's own batches come behind these, which have other sizes and so other draws.
        self.test = self._kept(tested.batch(i) for i in range(study.test_samples // size))
        labels, scores = self.labels, torch.cat([tested.logits(b) for b in self._on_host()])
        self.best = float(binary_auroc(scores, labels.long()))

    def _on_host(self) -> Iterable[ClickBatch]:
        return (batch.to("cpu") for batch in self.test)

    @property
    def labels(self) -> Tensor:
        return torch.cat([batch.label for batch in self._on_host()])

    def of(self, seed: int) -> Data:
        count = self._study.num_batches
        first = (1 + seed) * 1_000_000
        batches = (self._clicks.batch(first + each) for each in range(count))
        on_gpu = self._device.type == "cuda"
        train = [each.pin_memory() if on_gpu else each for each in batches]
        held_back = self._kept(self._clicks.batch(first + count + each) for each in range(8))
        return Data(self._study, seed, train, held_back, self.test)

    def _kept(self, batches: Iterable[ClickBatch]) -> list[ClickBatch]:
        return [each.to(self._device) for each in batches]


# -- one run -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What came of one system with one seed."""

    auc: float
    log_loss: float
    part_aucs: tuple[float, ...]
    trained: int  # samples
    dropped: float  # share of all samples
    seconds: float
    more: dict[str, Any]


System = Any  # of a trainer; None: batches as they come


def build(data: Data, device: torch.device, strategy: str, system: System) -> hotrow.Trainer[Any]:
    study = data.study
    embedding = hotrow.EmbeddingBagCollection(
        [
            hotrow.EmbeddingBagConfig(f"cat_{table}", rows, study.dim, [f"cat_{table}"])
            for table, rows in enumerate(study.rows)
        ],
        RULES[study.rule](lr=study.lr),
        budget=None if strategy == "all-fast" else "40%",  # hot rows, and room for a batch
        strategy=strategy,
        device=device,
        seed=data.seed,
    )
    draw = torch.Generator().manual_seed(data.seed)
    bottom = (*study.bottom, study.dim)
    num_dense = data.train[0].dense.shape[1]
    model = DLRM(embedding, num_dense, bottom=bottom, top=(*study.top, 1), generator=draw).to(
        device
    )
    return hotrow.Trainer(
        model,
        binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ids=lambda batch: batch.sparse,
        device=device,
        system=system,
    )


def trained(
    data: Data, device: torch.device, deadline: harness.Deadline, *, strategy: str = "all-fast",
    system: System = None, curve: int = 0,
) -> Trained:  # fmt: skip
    """Trains one epoch and tests."""
    trainer = build(data, device, strategy, system)
    started, count, said = time.perf_counter(), 0, time.monotonic()
    for record in trainer.run(data.train):
        count += record.samples
        deadline.check()
        if curve and record.step % curve == 0:
            say(f"    after {record.step:,} steps AUC {tested(trainer, data.test).auc:.5f}")
        if time.monotonic() - said > 10:
            said = time.monotonic()
            say(f"    {record.step:,} of {len(data.train):,} steps")
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, total = time.perf_counter() - started, sum(map(len, data.train))
    found = tested(trainer, data.test)
    return replace(found, trained=count, dropped=1 - count / total, seconds=seconds)


def tested(trainer: hotrow.Trainer[Any], batches: Sequence[ClickBatch]) -> Trained:
    scores = torch.cat([trainer.predict(batch).double() for batch in batches])
    labels = torch.cat([batch.label for batch in batches])
    chances = scores.sigmoid()
    pairs = zip(chances.chunk(PARTS), labels.chunk(PARTS), strict=True)
    return Trained(
        auc=float(binary_auroc(chances, labels.long())),
        log_loss=float(binary_cross_entropy_with_logits(scores, labels.double())),
        part_aucs=tuple(float(binary_auroc(some, mine.long())) for some, mine in pairs),
        trained=0,
        dropped=0.0,
        seconds=0.0,
        more={},
    )


def by_slipstream(study: Study, target: float, mode: str) -> hotrow.Slipstream:
    changes: dict[str, Any] = {"mode": mode}
    make: Callable[..., hotrow.Slipstream] = hotrow.Slipstream
    if mode == "published":
        changes, make = {}, hotrow.Slipstream.as_published
    else:
        changes |= {
            "least_visits": study.least_visits,
            "recheck_every": round(study.rechecked * study.num_batches),
        }
    return make(
        target=target,
        tolerance=min(0.08, target / 2),
        starting_batch=round(study.starting * study.num_batches),
        watched=study.watched,
        sample_rate=study.sample_rate,
        counted=study.counted,
        hot_budget=study.hot_budget,
        validate_every=0,  # all of the target is to be seen, whatever it does
        **changes,
    )


def fae(data: Data) -> System:
    made = getattr(hotrow, "FAE", None)
    if made is None:
        raise Unavailable("there is no hotrow.FAE")
    return made(
        hot_budget=data.study.hot_budget, sample_rate=data.study.counted, test=data.validation
    )


# -- the study ---------------------------------------------------------------------------


def measure(session: Session, generated: Generated, asked: argparse.Namespace) -> None:
    """All systems with one seed, then with the next."""
    for seed in asked.seeds:
        say(f"seed {seed}: making {asked.study.samples:,} samples")
        data = generated.of(seed)
        attempt = partial(_attempt, session, data, asked)
        attempt("all-fast", lambda: None, "all-fast")
        if "fae" in asked.systems:
            attempt("fae", partial(fae, data), "static")
        for target, mode in product(asked.targets, asked.modes):
            make = partial(by_slipstream, asked.study, target, mode)
            made = attempt(f"slipstream {mode} {target:g}", make, asked.strategy)
            if made is not None and made.record.dropped and "random-drop" in asked.systems:
                control = partial(hotrow.RandomDrop, like=made.record, seed=seed)
                attempt(f"random-drop as {mode} {target:g}", control, asked.strategy)


def _attempt(
    session: Session, data: Data, asked: argparse.Namespace, name: str,
    make: Callable[[], System], strategy: str,
) -> System:  # fmt: skip
    """Gives the system, if it has trained."""
    used: list[System] = []

    def run() -> dict[str, Any]:
        system = make()
        found = trained(
            data, asked.device, session.deadline, strategy=strategy, system=system,
            curve=asked.curve,
        )  # fmt: skip
        used.append(system)
        record = getattr(system, "record", None)
        more = said_of(record) if isinstance(record, SkipRecord) else {}
        return asdict(replace(found, more=more)) | {"study": asdict(asked.study)}

    session.attempt(f"seed {data.seed}", name, run, one_line, name=f"seed {data.seed} {name}")
    return used[0] if used else None


def said_of(record: SkipRecord) -> dict[str, Any]:
    return {
        "first_batch": record.first_batch,
        "offered": record.offered,
        "dropped_samples": record.dropped,
        "hot_rows": sum(record.hot_rows.values()),
        "stale_rows": sum(record.stale_rows.values()),
        "seldom_rows": sum(record.seldom_rows.values()),
        "rechecks": record.rechecks,
        "moving_again": record.moving_again,
        "threshold": None if record.threshold is None else record.threshold.said,
    }


def one_line(found: dict[str, Any]) -> str:
    return (
        f"AUC {found['auc']:.5f}, log-loss {found['log_loss']:.5f}, {found['dropped']:.1%} left "
        f"out, {found['seconds']:.1f} s"
    )


# -- the table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % t-interval."""

    mean: float
    half: float  # NaN: one seed alone
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        count = len(values)
        if count < 2:
            return cls(fmean(values), math.nan, count)
        half = student_t(0.975, count - 1) * stdev(values) / math.sqrt(count)
        return cls(fmean(values), half, count)

    def __str__(self) -> str:
        return f"{self.mean:+.5f} ± {self.half:.5f}"


Runs = dict[str, dict[int, dict[str, Any]]]  # by system, by seed


def differences(runs: Runs, system: str, other: str, key: str) -> Interval | None:
    """Of two systems, by seeds that both have."""
    both = sorted(runs.get(system, {}).keys() & runs.get(other, {}).keys())
    if not both:
        return None
    return Interval.of([runs[system][s][key] - runs[other][s][key] for s in both])


def chance_of_test(runs: Runs, system: str, other: str) -> float:
    """Standard error of a difference in AUC that comes from which samples are tested on."""
    seeds = runs[system].keys() & runs[other].keys()
    parts = [
        [a - b for a, b in zip(*(runs[s][seed]["part_aucs"] for s in (system, other)), strict=True)]
        for seed in seeds
    ]
    return fmean(stdev(each) / math.sqrt(len(each)) for each in parts)


def table(runs: Runs) -> list[str]:
    head = (
        "AUC",
        "log-loss",
        "left out",
        "AUC - all-fast",
        "AUC - random-drop",
        "log-loss - r.-d.",
    )
    lines = [f"{'':30}  " + "  ".join(f"{each:>20}" for each in head)]
    for system, by_seed in runs.items():
        control = system.replace("slipstream", "random-drop as")
        cells = [
            f"{fmean(run['auc'] for run in by_seed.values()):.5f}",
            f"{fmean(run['log_loss'] for run in by_seed.values()):.5f}",
            f"{fmean(run['dropped'] for run in by_seed.values()):.1%}",
        ]
        for other, key in (("all-fast", "auc"), (control, "auc"), (control, "log_loss")):
            found = None if other == system else differences(runs, system, other, key)
            cells.append("" if found is None else str(found))
        lines.append(f"{system:30}  " + "  ".join(f"{each:>20}" for each in cells))
    errors = [chance_of_test(runs, s, "all-fast") for s in runs if s != "all-fast"]
    alone = [
        stdev(run["part_aucs"]) / math.sqrt(PARTS) for run in runs.get("all-fast", {}).values()
    ]
    if alone and errors:
        lines.append(
            f"standard error from the choice of test samples: {fmean(alone):.5f} of an AUC, "
            f"{max(errors):.5f} of a difference at most"
        )
    return lines


def read_runs(results: harness.Results, study: Study) -> Runs:
    """All runs of this study that are on file."""
    runs: Runs = defaultdict(dict)
    written = json.loads(json.dumps(asdict(study)))  # which knows no tuples
    for line in harness.read_results(results.folder / f"{results.suite}.jsonl"):
        if line["study"] == written:
            runs[line["system"]][int(line["run"].removeprefix("seed "))] = line
    return dict(runs)


# -- the command line --------------------------------------------------------------------


def main() -> None:
    options = harness.parser(__doc__.splitlines()[0])
    options.set_defaults(minutes=9)
    options.add_argument("--device", help="'cuda' where there is one, else 'cpu'")
    options.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    options.add_argument("--targets", type=float, nargs="*", default=[0.1, 0.2, 0.3, 0.5])
    options.add_argument(
        "--modes", nargs="+", default=["samples", "rows"], choices=["samples", "rows", "published"]
    )
    options.add_argument("--systems", nargs="*", default=["fae", "random-drop"])
    options.add_argument("--strategy", default="all-fast", help="of Slipstream's collection")
    options.add_argument("--curve", type=int, default=0, help="test every so many steps")
    for name in ("samples", "test_samples", "batch_size", "scale", "least_visits"):
        options.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in (
        "skew",
        "signal",
        "lr",
        "watched",
        "counted",
        "starting",
        "rechecked",
        "sample_rate",
    ):
        options.add_argument(f"--{name.replace('_', '-')}", type=float)
    for name in ("bottom", "top"):
        options.add_argument(f"--{name}", type=int, nargs="+")
    for name in ("rule", "hot_budget"):
        options.add_argument(f"--{name.replace('_', '-')}")
    asked = options.parse_args()
    given = {name: getattr(asked, name, None) for name in asdict(Study())}
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    asked.study = replace(TINY if asked.smoke else Study(), **given)
    chosen = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked.device = torch.device("cpu" if asked.smoke else chosen)
    if asked.device.type == "cpu":
        torch.set_num_threads(1)
    session = Session("system_quality", asked)
    generated = Generated(asked.study, asked.device)
    say(
        f"{sum(asked.study.rows):,} rows, {asked.study.num_batches:,} batches; the truth's own AUC "
        f"on {asked.study.test_samples:,} test samples is {generated.best:.5f}"
    )
    measure(session, generated, asked)
    if harness.keeps_results(asked):
        for line in table(read_runs(session.results, asked.study)):
            session.say(line)
    session.print_again()
    raise SystemExit(bool(session.failed))


if __name__ == "__main__":
    main()
