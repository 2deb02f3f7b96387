"""The kinds of files that `hotrow prepare` reads, by name; and the public logs among them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.arrow import Values, column_keys, texts_of, whole_numbers
from hotrow.data.prepared.columns import Csv, ParquetSource, read_columns
from hotrow.data.prepared.format import Feature, Schema, as_bytes
from hotrow.data.prepared.job import SIZES, WORK, Disk, Settings, Sizes, Watch
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.pieces import BadLine, BadLines, Piece, Place, Rows, Samples, Source
from hotrow.data.prepared.text import TextFiles, TextSource, read_rows
from hotrow.support.hashing import mixed
from hotrow.support.messages import did_you_mean

STEPS = 20
POINTS = 10
_COMPRESSION = 5  # how much larger text becomes, about, when it is decompressed
_COLUMNS = {"user": 0, "item": 1, "category": 2, "behaviour": 3, "time": 4}
_BEHAVIOURS = ["pv", "buy", "cart", "fav"]

Events = NDArray[np.int64]  # [events, 4]: user, item, category, time


class Criteo(TextSource):
    """Criteo's Kaggle and Terabyte logs: label, 13 whole numbers, 26 hexadecimal categories.

    As in the DLRM reference, a missing number is 0, a negative one becomes 0, and then all become
    log(x + 1); a missing category is the category 0.
    """

    name, key_dtype, separator = "criteo", "uint32", "\t"
    dense = tuple(f"I{i}" for i in range(1, 14))
    categories = tuple(f"C{i}" for i in range(1, 27))
    schema = Schema("label", dense, tuple(Feature(name, name) for name in categories))
    places: Mapping[str, int] = {
        name: place for place, name in enumerate(("label", *dense, *categories))
    }
    width = len(places)

    def samples(self, rows: Rows) -> Samples:
        label = rows.labels("label")
        dense = np.empty((len(rows), len(self.dense)), np.float32)
        for place, name in enumerate(self.dense):
            values, _, wrong = whole_numbers(rows.columns[name])
            rows.refuse(wrong, name, "not a whole number")
            np.maximum(values, 0, out=dense[:, place], casting="unsafe")
        dense += 1
        np.log(dense, out=dense)
        for name in self.categories:
            keys, wrong = texts_of(rows.columns[name]).hexadecimal()
            rows.refuse(wrong, name, "not up to 8 hexadecimal digits")
            rows.add_keys(name, Values(keys))
        return rows.samples(label, dense)


class Avazu(TextSource):
    """Avazu's log: a CSV file with a header, 21 categories, and the hour as the one number.

    The hour becomes a fraction of the day: 0, 1/24, ... 23/24. The column `id` names the sample
    and is left out.
    """

    name, key_dtype = "avazu", "uint64"
    columns = (
        "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category",
        "app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model",
        "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
    )  # fmt: skip
    header = ",".join(columns).encode()
    schema = Schema("click", ("hour",), tuple(Feature(name, name) for name in columns[3:]))
    places: Mapping[str, int] = {name: place for place, name in enumerate(columns) if name != "id"}
    width = len(columns)

    def samples(self, rows: Rows) -> Samples:
        label = rows.labels("click")
        hours, empty, wrong = whole_numbers(rows.columns["hour"])
        wrong = wrong | empty | (hours % 100 > 23) | (hours < 0)
        rows.refuse(wrong, "hour", "not YYMMDDHH")
        for name in self.columns[3:]:
            rows.add_keys(name, column_keys(rows.columns[name]))
        return rows.samples(label, (hours % 100 / 24).astype(np.float32)[:, None])


class Taobao(Source):
    """Taobao's UserBehavior.csv as sequences: what a user has touched, and what comes next.

    Lines are events (user, item, category, behaviour, time), in no order. Before there are pieces,
    they are distributed by user to files that fit in memory; each file is sorted by user and time
    and cut into samples.

    A sample is an event with up to 20 events of the same user before it, as in TBSM. At most 10
    samples of a user are drawn. In half of the samples the item is another one, drawn from all
    different items of the same file, with its category; those have label 0. `gap` is the time since
    the event before, as log(seconds + 1), the same for both labels. Every kind of behaviour counts
    as an event. A user with one event has no sample.
    """

    name, key_dtype, times = "taobao", "uint32", True
    schema = Schema(
        "next",
        ("gap",),
        (
            Feature("user", "user"),
            Feature("item", "item"),
            Feature("category", "category"),
            Feature("history_item", "item", jagged=True),
            Feature("history_category", "category", jagged=True),
        ),
    )

    def __init__(
        self, paths: list[Path], out: Path, *, seed: int, skip_bad: bool, sizes: Sizes = SIZES
    ) -> None:
        if len(paths) != 1:
            raise ValueError(f"taobao is one file of events, UserBehavior.csv; not {len(paths)}")
        self._files = TextFiles(paths, piece_bytes=sizes.piece_bytes)
        self.paths = self._files.paths
        self._out, self._seed, self._skip_bad = out, seed, skip_bad
        size = paths[0].stat().st_size
        text = size * (_COMPRESSION if paths[0].suffix in (".gz", ".zst") else 1)
        self._count = max(1, -(-text // sizes.event_bytes))
        self.describes = {"steps": STEPS, "points": POINTS, "files_of": sizes.event_bytes}

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        """Yield a piece for each file of events; `offset` is its number."""
        every_bad = msgspec.json.decode(self._noted.read_bytes(), type=BadLines)
        size = self.paths[0].stat().st_size
        place = start or Place()
        for number in range(place.offset, self._count):
            events = np.fromfile(self._path(number), np.int64).reshape(-1, 4)
            bad = BadLines() if number else every_bad
            # The line over all files stays 0: samples have times in place of lines.
            after = Place(0, number + 1, place.file_line + len(events) + bad.count, 0)
            yield Piece(place, after, (events, bad), size * (number + 1) // self._count)
            place = after

    def _path(self, number: int) -> Path:
        return self._out / WORK / f"events-{number:04}"

    @property
    def _noted(self) -> Path:
        return self._out / WORK / "events.json"

    def ready(self, disk: Disk, cores: Cores, watch: Watch) -> None:
        """Write every event to the file of its user."""
        if self._noted.exists():
            return
        for number in range(self._count):
            disk.write(f"{WORK}/{self._path(number).name}", [], durable=False)
        watch.stage("distributing events", self.paths[0].stat().st_size)
        bad, count = BadLines(), 0
        for piece, (events, bad_lines) in cores.in_order(_events, self._files.pieces()):
            bad_lines = bad_lines.later(piece.place.file_line)
            if bad_lines.count and not self._skip_bad:
                first = bad_lines.first[0]
                raise ValueError(
                    f"{self.paths[0]}, line {first.line + 1:,}: {first.reason}. --bad-rows skip "
                    "leaves such lines out and counts them"
                )
            bad = BadLines.joined([bad, bad_lines])
            self._append(events, disk)
            count += len(events)
            watch.advance(piece.read_bytes, count)
        disk.write(f"{WORK}/{self._noted.name}", [json.dumps(asdict(bad)).encode()])

    def _append(self, events: Events, disk: Disk) -> None:
        to = mixed(events[:, 0].astype(np.uint64)) % np.uint64(self._count)
        order = np.argsort(to, kind="stable")
        bounds = np.searchsorted(to[order], np.arange(self._count + 1, dtype=np.uint64))
        for number in range(self._count):
            if bounds[number] < bounds[number + 1]:
                of_file = events[order[bounds[number] : bounds[number + 1]]]
                disk.extend(f"{WORK}/{self._path(number).name}", as_bytes(of_file))

    def parse(self, piece: Piece) -> Samples:
        events, bad = piece.data
        seed = mixed(mixed(np.array([self._seed], np.uint64)) ^ np.uint64(piece.place.offset))
        return make_samples(events, np.random.default_rng(int(seed[0])), bad)


def _events(piece: Piece) -> tuple[Events, BadLines]:
    """Return the events of a piece. Runs on workers."""
    if piece.bad:
        return np.empty((0, 4), np.int64), BadLines(1, (BadLine(0, piece.bad),))
    rows = read_rows(piece.data, _COLUMNS, separator=",", width=len(_COLUMNS))
    columns = []
    for name in ("user", "item", "category", "time"):
        values, empty, wrong = whole_numbers(rows.columns[name])
        wrong = wrong | empty | (values < 0) | (values >= 2**32)
        rows.refuse(wrong, name, "not a whole number below 2**32")
        columns.append(values)
    known = np.isin(rows.columns["behaviour"].to_numpy(zero_copy_only=False), _BEHAVIOURS)
    rows.refuse(~known, "behaviour", "not pv, buy, cart, fav")
    return np.stack(columns, axis=1)[rows.good], rows.bad


def make_samples(events: Events, draw: np.random.Generator, bad: BadLines) -> Samples:
    """Return the samples of some users, given all their events."""
    events = events[np.lexsort((events[:, 3], events[:, 0]))]  # stable: equal times keep order
    user, item, category, time = events.T
    starts = np.flatnonzero(np.diff(user, prepend=-1))  # users are at least 0
    sizes = np.diff(np.append(starts, len(user)))
    position = np.arange(len(user)) - np.repeat(starts, sizes)
    targets = _some_of_each(user, position, draw)
    lengths = np.minimum(position[targets], STEPS)
    # The events before each target, oldest first.
    ends = np.cumsum(lengths)
    history = np.arange(ends[-1] if len(ends) else 0)
    history += np.repeat(targets - lengths - (ends - lengths), lengths)
    label = draw.integers(0, 2, len(targets)).astype(np.uint8)
    chosen = np.where(label == 1, targets, _others(item, targets, draw))
    gap = np.log1p((time[targets] - time[targets - 1]).astype(np.float32))
    keys = {
        "user": user[targets],
        "item": item[chosen],
        "category": category[chosen],
        "history_item": item[history],
        "history_category": category[history],
    }
    return Samples(
        lines=time[targets].copy(),
        label=label,
        dense=gap[:, None],
        keys={name: values.astype(np.uint32) for name, values in keys.items()},
        bad=bad,
        lengths={"history_item": lengths, "history_category": lengths},
    )


def _some_of_each(
    user: NDArray[np.int64], position: NDArray[np.int64], draw: np.random.Generator
) -> NDArray[np.int64]:
    """Draw up to POINTS events of each user that have one before them; return them in order."""
    later = np.flatnonzero(position > 0)
    order = later[np.lexsort((draw.random(len(later)), user[later]))]
    users = user[order]
    first = np.flatnonzero(np.diff(users, prepend=-1))
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    return np.sort(order[rank < POINTS])


def _others(
    item: NDArray[np.int64], targets: NDArray[np.int64], draw: np.random.Generator
) -> NDArray[np.int64]:
    """Return for each target an event with another item; all different items are as likely."""
    different, places = np.unique(item, return_index=True)
    if len(different) < 2:
        return targets
    drawn = draw.integers(0, len(different) - 1, len(targets))
    own = np.searchsorted(different, item[targets])
    result: NDArray[np.int64] = places[drawn + (drawn >= own)]
    return result


KINDS = ("criteo", "avazu", "taobao", "parquet", "csv")


def open_source(
    kind: str,
    files: list[Path],
    *,
    out: Path,
    columns: Path | None,
    settings: Settings,
    sizes: Sizes = SIZES,
) -> Source:
    """Open files of a kind as samples."""
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise ValueError(f"unknown kind of files {kind!r}{hint}; there are {', '.join(KINDS)}")
    is_described = kind in ("parquet", "csv")
    if columns is not None and not is_described:
        raise ValueError(f"the columns of {kind} are known; --columns is for parquet and csv")
    if kind == "taobao":
        skip = settings.bad_rows == "skip"
        return Taobao(files, out, seed=settings.seed, skip_bad=skip, sizes=sizes)
    if kind in ("criteo", "avazu"):
        known = Criteo if kind == "criteo" else Avazu
        return known(files, piece_bytes=sizes.piece_bytes)
    if columns is None:
        raise ValueError(
            f"{kind} needs --columns: a TOML file that says which column is the label, which are "
            "dense and which are categories"
        )
    if kind == "parquet":
        return ParquetSource(read_columns(columns), files, piece_samples=sizes.piece_samples)
    return Csv(read_columns(columns), files, piece_bytes=sizes.piece_bytes)
