"""Is Slipstream better than dropping as many samples at random, and on which system?

    python benchmarks/skip_control.py --data build/skip --criteo train.txt.zst --movielens ml-1m.zip
    python benchmarks/skip_control.py --data build/skip --jobs 16 --minutes 8
    PYTHONPATH=/other/tree/src python benchmarks/skip_control.py ... --when before --seeds 0 1

The first command converts the data sets and trains nothing. The second trains one small DLRM per
data set, system and seed in each of these ways, for one epoch:

    none         all samples
    slipstream   without the samples that Slipstream drops
    random-drop  without as many samples, drawn from all of them (fae: from the hot ones)
    random-hot   without as many samples, drawn from the hot ones

All ways share the start, the order of samples and the test samples. `random-hot` separates two
effects: Slipstream drops hot samples only, and among those the stale ones. A way such as
`slipstream:least_visits=4` changes settings; each such way gets its own controls.

Runs are spread over `--jobs` processes with one thread each. Every result is appended to
skip_control.jsonl as soon as it is known, and results that are there are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import sys
import tempfile
import time
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import harness
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from hotrow.data import KAGGLE_ROWS, ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.inputs.batch import parse
from hotrow.inputs.hotset import HotSet, popular
from hotrow.models import DLRM
from hotrow.systems.calibrate import student_t
from hotrow.systems.slipstream.skip import SkipRecord, rows_of
from hotrow.systems.slipstream.staleness import Rows, StaleSamples

SUITE = "skip_control"
BASES = ("fae", "hotline", "lookahead")
CONTROLS = ("random-drop", "random-hot")
RARE = 4  # a value of Criteo that the training samples hold less often shares a row with others
VALIDATION = 16  # batches for FAE's scheduler; no way trains on them


@dataclass(frozen=True)
class Setting:
    """How one data set is trained."""

    batch_size: int
    dim: int = 16
    bottom: tuple[int, ...] = (64,)  # and dim
    top: tuple[int, ...] = (128, 64)  # and 1
    budget: str = "40%"  # of the bytes of rows
    row_lr: float = 0.05
    dense_lr: float = 0.02


SETTINGS = {
    "criteo": Setting(batch_size=128),
    "movielens": Setting(batch_size=256, bottom=(), top=(64, 32)),
    "generated": Setting(batch_size=512),
}


@dataclass(frozen=True)
class Data:
    """The samples of one data set and seed; `rows` are the tables' sizes."""

    name: str
    seed: int
    rows: tuple[int, ...]
    train: list[ClickBatch]
    validation: list[ClickBatch]
    test: list[ClickBatch]

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.name]


# -- data --------------------------------------------------------------------------------


def convert_criteo(path: Path, out: Path) -> None:
    """Write the samples as arrays. The last seventh in time is for testing."""
    import pyarrow as pa
    from pyarrow import csv

    numbers, values = [f"i{k}" for k in range(13)], [f"c{k}" for k in range(26)]
    kinds = dict.fromkeys(numbers, pa.float32()) | dict.fromkeys(values, pa.string())
    with pa.input_stream(str(path), compression="detect") as file:
        table = csv.read_csv(
            file,
            read_options=csv.ReadOptions(column_names=["label", *numbers, *values]),
            parse_options=csv.ParseOptions(delimiter="\t"),
            convert_options=csv.ConvertOptions(column_types=kinds),
        )
    trained = len(table) * 6 // 7
    dense = [np.log1p(np.maximum(_numpy(table[name].fill_null(0)), 0)) for name in numbers]
    columns, rows = [], []
    for name in values:
        coded = table[name].combine_chunks().dictionary_encode()
        codes = _numpy(coded.indices.fill_null(len(coded.dictionary))).astype(np.int64)
        known = np.bincount(codes[:trained], minlength=codes.max() + 1) >= RARE
        columns.append(np.where(known, known.cumsum(), 0)[codes].astype(np.int32))
        rows.append(int(known.sum()) + 1)
    _save(out, np.stack(columns, 1), np.stack(dense, 1), _numpy(table["label"]), rows, trained)


def convert_movielens(path: Path, out: Path) -> None:
    """Write the samples as arrays: a rating of 4 or 5 is a click. A random tenth is for testing."""

    def lines(name: str) -> list[list[str]]:
        with zipfile.ZipFile(path) as archive:
            text = archive.read(f"ml-1m/{name}").decode("latin-1")
        return [line.split("::") for line in text.splitlines()]

    users = {user: rest for user, *rest in lines("users.dat")}
    genres = {film: genre for film, _, genre in lines("movies.dat")}
    ratings = lines("ratings.dat")
    of_user = list(zip(*(users[rating[0]] for rating in ratings), strict=True))
    gender, age, occupation, code = of_user
    texts = [
        [rating[0] for rating in ratings],
        [rating[1] for rating in ratings],
        [genres[rating[1]] for rating in ratings],
        gender,
        occupation,
        code,
    ]
    columns = [np.unique(text, return_inverse=True)[1].astype(np.int32) for text in texts]
    liked = np.array([rating[2] >= "4" for rating in ratings], dtype=np.float32)
    dense = np.array(age, dtype=np.float32)[:, None] / 100
    order = np.random.default_rng(0).permutation(len(ratings))
    rows = [int(column.max()) + 1 for column in columns]
    ids = np.stack(columns, 1)[order]
    _save(out, ids, dense[order], liked[order], rows, len(ratings) * 9 // 10)


def _numpy(column: Any) -> NDArray[Any]:
    """An Arrow column as an array."""
    import pyarrow as pa

    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found: NDArray[Any] = whole.to_numpy(zero_copy_only=False)
    return found


def _save(
    out: Path, ids: NDArray[Any], dense: NDArray[Any], label: NDArray[Any], rows: Sequence[int],
    trained: int,
) -> None:  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out, ids=ids, dense=dense.astype(np.float32), label=label.astype(np.float32),
        rows=np.array(rows), trained=np.array(trained),
    )  # fmt: skip


CONVERTERS = {"criteo": convert_criteo, "movielens": convert_movielens}


def read(name: str, seed: int, folder: Path, share: float) -> Data:
    """The data set in the order of a seed; `share` of the training samples."""
    return generated(seed, share) if name == "generated" else _from_file(name, seed, folder, share)


def _from_file(name: str, seed: int, folder: Path, share: float) -> Data:
    size = SETTINGS[name].batch_size
    with np.load(folder / f"{name}.npz") as file:
        ids, dense = torch.from_numpy(file["ids"]).long(), torch.from_numpy(file["dense"])
        label, trained = torch.from_numpy(file["label"]), int(file["trained"])
        rows = tuple(file["rows"].tolist())

    def batches(places: Tensor, size: int) -> list[ClickBatch]:
        return [ClickBatch(dense[each], ids[each], label[each]) for each in places.split(size)]

    # The samples held back are the same for all seeds; only the order of the others differs.
    held = torch.randperm(trained, generator=torch.Generator().manual_seed(0))
    count = VALIDATION * size
    order = torch.randperm(trained - count, generator=torch.Generator().manual_seed(seed + 1))
    order = held[count:][order][: int(share * (trained - count)) // size * size]
    test = torch.arange(trained, len(label))
    return Data(
        name, seed, rows, batches(order, size), batches(held[:count], size), batches(test, 8192)
    )


def generated(seed: int, share: float) -> Data:
    """Clicks with Kaggle's tables, a thousandth as large; a seed draws its own training samples."""
    size, tested = SETTINGS["generated"].batch_size, max(2048, int(share * 16_384))
    rows = tuple(max(min(count, 100), count // 1000) for count in KAGGLE_ROWS)
    config = SyntheticConfig(rows=rows, batch_size=size)
    clicks = SyntheticClicks(config)
    # Another batch size gives other draws, so no training sample is among the test samples.
    test = SyntheticClicks(dataclasses.replace(config, batch_size=tested))
    first, count = (1 + seed) * 1_000_000, int(share * 1200)
    return Data(
        "generated", seed, rows, list(clicks.batches(first, first + count)),
        list(clicks.batches(0, VALIDATION)), list(test.batches(0, max(1, round(12 * share)))),
    )  # fmt: skip


# -- ways to train -----------------------------------------------------------------------


class _CountsClicks:
    """Counts the clicks among the samples that a skip drops, and keeps the hot rows."""

    clicks = 0.0
    hot: Rows | None = None

    def bound(self, embedding: EmbeddingBagCollection, hot: Any, *rest: Any, **options: Any) -> Any:
        skip = super().bound(embedding, hot, *rest, **options)  # type: ignore[misc]
        self.hot, segments = rows_of(hot), skip.segments

        def count(batches: Iterable[ClickBatch], sign: int) -> Iterator[ClickBatch]:
            for batch in batches:
                self.clicks += sign * float(batch.label.sum())
                yield batch

        def counted(batches: Iterable[ClickBatch]) -> Iterator[Iterable[ClickBatch]]:
            return (count(segment, -1) for segment in segments(count(batches, 1)))

        skip.segments = counted
        return skip


class NotedSlipstream(_CountsClicks, hotrow.Slipstream):
    """Slipstream, watched."""


class NotedRandomDrop(_CountsClicks, hotrow.RandomDrop):
    """Random-drop, watched."""


class _RandomHot(hotrow.RandomDrop):
    """Random-drop that draws from hot samples only. `known` is for bases without hot rows."""

    def __init__(self, known: Rows, **options: Any) -> None:
        super().__init__(**options)
        self._known = known

    def bound(self, embedding: EmbeddingBagCollection, hot: Any, *rest: Any, **options: Any) -> Any:
        self._tables, self._features = embedding.tables, embedding.features
        self._read = options["ids"]
        self.renew(rows_of(hot) or self._known)
        return super().bound(embedding, hot, *rest, **options)

    def renew(self, hot: Any) -> None:
        self._drawn_from = HotSet.of(self._tables, rows_of(hot))

    def _keep(self, batch: Any) -> Tensor:
        parsed, r = parse(self._read(batch), self._features, None), self._random
        size, places = parsed.num_samples, popular(parsed, self._drawn_from).nonzero().squeeze(1)
        due = (r.offered + size) * self._like.dropped // self._like.offered - r.dropped
        chosen = places[torch.randperm(len(places), generator=self._draw)[:due]]
        self._random = dataclasses.replace(
            r, offered=r.offered + size, dropped=r.dropped + len(chosen)
        )
        keep = torch.ones(size, dtype=torch.bool)
        keep[chosen] = False
        return keep


class NotedRandomHot(_CountsClicks, _RandomHot):
    """Random-drop of hot samples, watched."""


def slipstream_of(way: str, target: float) -> NotedSlipstream:
    """`slipstream`, or with settings: `slipstream:least_visits=4,recheck_every=0`."""
    changes: dict[str, Any] = {}
    for text in filter(None, way.partition(":")[2].split(",")):
        name, _, value = text.partition("=")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    # The guard stays silent, so that the whole effect is seen.
    options: dict[str, Any] = {"target": target, "patience": 1_000_000, "validate_every": 0}
    return NotedSlipstream(hot_budget="40%", **(options | changes))


def trainer_of(data: Data, base: str, skip: Any) -> hotrow.Trainer[ClickBatch]:
    setting = data.setting
    names = [f"cat_{table}" for table in range(len(data.rows))]
    embedding = hotrow.EmbeddingBagCollection(
        [
            hotrow.EmbeddingBagConfig(name, rows, setting.dim, [name])
            for name, rows in zip(names, data.rows, strict=True)
        ],
        hotrow.RowWiseAdagrad(lr=setting.row_lr),
        budget=setting.budget,
        strategy="lookahead" if base == "lookahead" else "static",
        seed=data.seed,
    )
    model = DLRM(
        embedding, data.train[0].dense.shape[1], bottom=(*setting.bottom, setting.dim),
        top=(*setting.top, 1), generator=torch.Generator().manual_seed(data.seed),
    )  # fmt: skip
    system = skip
    if base == "fae":
        system = hotrow.FAE(test=data.validation, seed=data.seed, skip=skip)
    elif base == "hotline":
        system = hotrow.Hotline(skip=skip)
    return hotrow.Trainer(
        model,
        binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.Adagrad(model.parameters(), lr=setting.dense_lr),
        ids=lambda batch: batch.sparse,
        system=system,
    )


def auc_of(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """The area under the ROC curve; equal scores share their ranks."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[places]
    clicks = labels > 0
    wins = ranks[clicks].sum() - clicks.sum() * (clicks.sum() + 1) / 2
    return float(wins / (clicks.sum() * (~clicks).sum()))


def _clicks(batches: Iterable[ClickBatch]) -> float:
    return sum(float(batch.label.sum()) for batch in batches)


def stale_samples(slipstream: NotedSlipstream, batches: Iterable[ClickBatch]) -> Tensor:
    """Which samples look up none but the rows that are stale at the end, [B] bool."""
    skip: Any = slipstream._skip  # what is stale is not public
    rows = torch.empty(0, dtype=torch.int64) if skip._stale is None else skip._stale
    rule = StaleSamples(skip._embedding.tables, torch.device("cpu"))
    rule.set_stale(rows)
    return ~torch.cat([rule.kept(batch.sparse) for batch in batches])


def measured(
    data: Data, base: str, skip: Any, deadline: float, slipstream: NotedSlipstream | None
) -> dict[str, Any]:
    """Train one epoch and test; `slipstream` is the one that `skip` is or follows."""
    trainer, started = trainer_of(data, base, skip), time.perf_counter()
    for _ in trainer.run(data.train):
        if time.time() > deadline:
            raise harness.OutOfTime
    scores = torch.cat([trainer.predict(batch).double() for batch in data.test])
    labels = torch.cat([batch.label for batch in data.test]).double()
    total = sum(map(len, data.train))
    record = getattr(skip, "record", None)
    losses = binary_cross_entropy_with_logits(scores, labels, reduction="none")
    found = {
        "auc": auc_of(scores.numpy(), labels.numpy()),
        "log_loss": float(losses.mean()),
        "bias": float(scores.sigmoid().mean() - labels.mean()),
        "click_rate": _clicks(data.train) / total,
        "samples": total,
        "dropped": 0,
        "seconds": time.perf_counter() - started,
    }
    if slipstream is not None:
        stale = stale_samples(slipstream, data.test)
        found |= {
            "stale_share": float(stale.double().mean()),
            "stale_log_loss": float(losses[stale].mean()),
            "other_log_loss": float(losses[~stale].mean()),
        }
    if isinstance(record, SkipRecord):
        threshold = record.threshold
        found |= {
            "dropped": record.dropped,
            "dropped_click_rate": skip.clicks / max(1, record.dropped),
            "offered": record.offered,
            "first_batch": record.first_batch,
            "hot_rows": sum(record.hot_rows.values()),
            "stale_rows": sum(record.stale_rows.values()),
            "seldom_rows": sum(record.seldom_rows.values()),
            "rechecks": record.rechecks,
            "moving_again": record.moving_again,
            "threshold": None if threshold is None else threshold.said,
        }
    return found


# -- the study ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A way with its controls, on one data set, system and seed; measured by one process."""

    data: str
    base: str
    seed: int
    way: str
    target: float
    share: float
    when: str

    @property
    def run(self) -> str:
        return f"{self.data}, {self.base}, seed {self.seed}, {self.when}"

    @property
    def systems(self) -> tuple[str, ...]:
        """`none`, or a way followed by its controls."""
        if self.way == "none":
            return ("none",)
        suffix = self.way.removeprefix("slipstream")
        controls = CONTROLS[:1] if self.base == "fae" else CONTROLS
        return (self.way, *(control + suffix for control in controls))


def perform(task: Task, folder: Path, results: harness.Results, deadline: float) -> list[str]:
    """Measure a task in this process; returns what to print."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _perform(task, folder, results, deadline)


def _perform(task: Task, folder: Path, results: harness.Results, deadline: float) -> list[str]:
    said: list[str] = []
    data, slipstream = _kept_data(task.data, task.seed, folder, task.share), None
    for system in task.systems:
        skip: Any = None
        if system == task.way != "none":
            skip = slipstream = slipstream_of(task.way, task.target)
        elif slipstream is not None:
            if not slipstream.record.dropped:
                said.append(f"{task.run}: {task.way} dropped nothing, so there is no control")
                break
            like, seed = slipstream.record, task.seed
            if system.startswith("random-hot"):
                assert slipstream.hot is not None
                skip = NotedRandomHot(slipstream.hot, like=like, seed=seed)
            else:
                skip = NotedRandomDrop(like=like, seed=seed)
        try:
            found = measured(data, task.base, skip, deadline, slipstream)
        except harness.OutOfTime:
            said.append(f"{task.run}: {system} not measured, the minutes are over")
            break
        facts = dataclasses.asdict(task) | {"setting": dataclasses.asdict(data.setting)} | found
        results.write(task.run, system, facts)
        said.append(
            f"{task.run}: {system} AUC {found['auc']:.5f}, {found['dropped']:,} of "
            f"{found['samples']:,} dropped, {found['seconds']:.0f} s"
        )
    return said


@cache
def _kept_data(name: str, seed: int, folder: Path, share: float) -> Data:
    return read(name, seed, folder, share)


def missing(tasks: Iterable[Task], lines: Iterable[dict[str, Any]]) -> list[Task]:
    """The tasks of which some result is not there."""
    known = {
        (line["run"], line["system"]) for line in lines
    }  # a way that dropped nothing has no controls, and is measured again
    return [
        task for task in tasks if any((task.run, system) not in known for system in task.systems)
    ]


def study(tasks: Sequence[Task], asked: argparse.Namespace, results: harness.Results) -> bool:
    """Measure all tasks; returns whether all went well."""
    deadline, failed = time.time() + 60 * asked.minutes, 0
    do = partial(perform, folder=asked.data, results=results, deadline=deadline)
    if asked.jobs == 1:
        for task in tasks:
            for line in do(task):
                harness.say(line)
        return True
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        futures = [pool.submit(do, task) for task in tasks]
        for done, future in enumerate(as_completed(futures), start=1):
            error = future.exception()
            failed += error is not None
            for line in future.result() if error is None else [f"FAILED: {error!r}"]:
                harness.say(f"[{done}/{len(tasks)}] {line}")
    return not failed


# -- the table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % t-interval, and in how many seeds it was above 0."""

    mean: float
    half: float  # NaN: one seed
    above: int
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        count, half = len(values), math.nan
        if count > 1:
            half = student_t(0.975, count - 1) * stdev(values) / math.sqrt(count)
        return cls(fmean(values), half, sum(value > 0 for value in values), count)

    def __str__(self) -> str:
        return f"{self.mean:+.5f} ± {self.half:.5f} ({self.above}/{self.seeds})"


Lines = Iterable[dict[str, Any]]


HEAD = (
    "data", "system", "code", "way", "seeds", "dropped", "AUC - random-drop", "AUC - random-hot",
    "AUC - all samples",
)  # fmt: skip


def table(lines: Lines) -> list[tuple[str, ...]]:
    """Rows under HEAD: differences in AUC of Slipstream from its controls, by seed."""
    runs: dict[tuple[str, ...], dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        runs[line["data"], line["base"], line["when"], line["system"]][line["seed"]] = line
    rows = []
    for (data, base, when, way), mine in sorted(runs.items()):
        if not way.startswith("slipstream"):
            continue
        suffix = way.removeprefix("slipstream")
        share = fmean(line["dropped"] / line["samples"] for line in mine.values())
        cells = [data, base, when, way, f"{len(mine)}", f"{share:.1%}"]
        for control in (f"random-drop{suffix}", f"random-hot{suffix}", "none"):
            others = runs.get((data, base, when, control), {})
            apart = [mine[seed]["auc"] - others[seed]["auc"] for seed in mine if seed in others]
            cells.append(str(Interval.of(apart)) if apart else "-")
        rows.append(tuple(cells))
    return rows


def main() -> None:
    options = harness.parser(__doc__.splitlines()[0])
    options.set_defaults(minutes=8)
    options.add_argument(
        "--data", type=Path, default=Path("build/skip"), help="folder of the converted data"
    )
    options.add_argument("--criteo", type=Path, help="Criteo's train.txt, to be converted")
    options.add_argument("--movielens", type=Path, help="ml-1m.zip, to be converted")
    options.add_argument("--sets", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    options.add_argument("--bases", nargs="+", default=list(BASES), choices=BASES)
    options.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    options.add_argument("--ways", nargs="+", default=["none", "slipstream"])
    options.add_argument("--target", type=float, default=0.3, help="share of hot samples to drop")
    options.add_argument("--share", type=float, default=1.0, help="of the training samples")
    options.add_argument("--jobs", type=int, default=1, help="processes")
    options.add_argument("--when", default="now", help="name of this state of the code")
    asked = options.parse_args()
    if asked.smoke:
        asked.sets, asked.seeds, asked.share = ["generated"], asked.seeds[:1], 0.03
        if not harness.keeps_results(asked):
            asked.results = Path(tempfile.mkdtemp())
    given = {name: getattr(asked, name) for name in CONVERTERS if getattr(asked, name) is not None}
    for name, path in given.items():
        CONVERTERS[name](path, asked.data / f"{name}.npz")
        harness.say(f"wrote {asked.data / f'{name}.npz'}")
    if given:
        return
    results = harness.results_for(SUITE, asked)
    kept = results.folder / f"{SUITE}.jsonl"
    tasks = [
        Task(data, base, seed, way, asked.target, asked.share, asked.when)
        for seed in asked.seeds
        for data in asked.sets
        for base in asked.bases
        for way in asked.ways
    ]
    left = missing(tasks, harness.read_results(kept))
    harness.say(f"{len(left)} of {len(tasks)} tasks are to be measured in {asked.jobs} processes")
    is_fine = study(left, asked, results)
    print("\n".join(" | ".join(row) for row in (HEAD, *table(harness.read_results(kept)))))
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
