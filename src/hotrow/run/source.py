"""The samples of a run: generated, or read from a prepared folder. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, Protocol

import msgspec
from torch import Tensor

from hotrow.data import (
    ClickBatch,
    Counted,
    Loader,
    PreparedSource,
    SequenceBatch,
    SequenceLoader,
    SyntheticClicks,
    SyntheticSequences,
)
from hotrow.data.loader import MIXED, BatchReader, check_histories, histories_of
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import SPLITS
from hotrow.data.ranks import PartReader, RankPart, current_part
from hotrow.data.sources import numbers_of
from hotrow.data.synthetic import SyntheticConfig
from hotrow.engine.profile import Profile
from hotrow.inputs.rank_part import HeldBatches
from hotrow.inputs.tree import map_tensors
from hotrow.run.config import DataSection
from hotrow.support.files import FileRecord
from hotrow.support.manifests import in_words
from hotrow.support.messages import few, warn

# The rows of each table, and the features that read it. With sequences the last row is padding.
Tables = dict[str, tuple[int, list[str]]]
AnyBatch = ClickBatch | SequenceBatch
_READ_TOGETHER = 1 << 15  # samples in stored order: few batches must not read much more


@dataclass(frozen=True)
class Split:
    """Samples of one split, in stored order."""

    batches: Iterable[AnyBatch]
    samples: int  # in these batches
    total: int  # in the whole split


class Samples(Protocol):
    """The data of a run."""

    tables: Tables
    num_dense: int
    lookups: dict[str, int] | None  # of each feature in a sample; None: samples differ

    @property
    def batches_per_epoch(self) -> int: ...

    def batches(self, steps: int, start: int = 0) -> PartReader[AnyBatch]:
        """Return batches `start` to `steps` of the training samples, epoch after epoch."""

    @property
    def profile(self) -> Profile | None:
        """How often training reads each row, if that was counted."""

    def split(self, name: str, *, whole: bool = False) -> Split:
        """Return one of SPLITS: the batches that are evaluated, or the whole split."""

    def described(self) -> dict[str, Any]:
        """Return a `Description` in plain values."""


def open_samples(section: DataSection, *, pin_memory: bool, steps: int | None = None) -> Samples:
    """Open clicks, or with `steps` sequences of that many steps before their targets."""
    if steps is None and section.constant:
        raise ValueError(
            f"constant = {list(section.constant)} is for sequences, and this model learns from "
            'clicks; "tbsm" learns from sequences'
        )
    if section.kind == "prepared":
        return FromFolder(section, pin_memory=pin_memory, steps=steps)
    return Generated(section, pin_memory=pin_memory, steps=steps)


class Generated:
    """Clicks or sequences with a known truth. Rows are read by a power law, or as often as in a
    folder."""

    def __init__(self, section: DataSection, *, pin_memory: bool, steps: int | None = None) -> None:
        self._section, self._pins, self._data = section, pin_memory, None
        config, counts, constant = section.clicks, None, section.constant
        if section.kind == "counted":
            assert section.folder is not None
            self._data = Prepared(section.folder)
            numbers = numbers_of(self._data, section.dense)
            config = _like(self._data, config, steps, num_dense=len(numbers))
            counts = {name: Counted(self._data.counts(name)) for name in config.names}
            constant = _constant(self._data) if steps is not None else ()
        self.drawn: SyntheticClicks | SyntheticSequences
        if steps is None:
            self.drawn = SyntheticClicks(config, counts=counts)
        else:
            self.drawn = SyntheticSequences(config, steps=steps, constant=constant, counts=counts)
        names, is_sequence = config.table_names, steps is not None
        self.tables: Tables = {
            name: (rows + is_sequence, [name])
            for name, rows in zip(names, config.rows, strict=True)
        }
        self.num_dense = config.num_dense + is_sequence
        self.batches_per_epoch = section.samples // section.batch_size
        lookups = config.lookups_per_table if steps is None else [steps + 1] * len(names)
        self.lookups: dict[str, int] | None = dict(zip(names, lookups, strict=True))

    def batches(self, steps: int, start: int = 0) -> PartReader[AnyBatch]:
        return PartReader(partial(self._read, steps, start), current_part())

    def _read(self, steps: int, start: int, part: RankPart) -> Iterator[AnyBatch]:
        for step in range(start, steps):
            batch = part.cut(self.drawn.batch(step % self.batches_per_epoch))
            yield map_tensors(batch, Tensor.pin_memory) if self._pins else batch

    @cached_property
    def _held_back(self) -> dict[str, HeldBatches[AnyBatch]]:
        """The batches after the training data, for test and then for validation; every evaluation
        reads them."""
        first, count = self.batches_per_epoch, self._section.eval_batches or 8
        held: list[AnyBatch] = [self.drawn.batch(x) for x in range(first, first + 2 * count)]
        return {"test": HeldBatches(held[:count]), "validation": HeldBatches(held[count:])}

    @property
    def profile(self) -> Profile | None:
        return None if self._data is None else self._data.profile()

    def split(self, name: str, *, whole: bool = False) -> Split:
        _check_split(name)
        if name == "train":
            count = self.batches_per_epoch
            batches: Iterable[AnyBatch] = self.drawn.batches(0, count)
        else:
            batches = held = self._held_back[name]
            count = len(held)
        samples = count * self._section.batch_size
        return Split(batches, samples, samples)

    def described(self) -> dict[str, Any]:
        tables = {
            name: {"rows": rows, "features": features, "values": "generated"}
            for name, (rows, features) in self.tables.items()
        }
        facts = {"dense": [f"dense_{i}" for i in range(self.num_dense)], "tables": tables}
        if self._data is None:
            return facts
        return facts | {"samples": _sum_of(table.counts for table in self._data.manifest.tables)}


def _like(
    data: Prepared, config: SyntheticConfig, steps: int | None, *, num_dense: int
) -> SyntheticConfig:
    """Return tables as in a folder. A sample reads a table as often as the folder's samples do."""
    rows, samples = data.table_rows, max(1, data.samples("train"))
    lookups = [max(1, round(int(data.counts(name).sum()) / samples)) for name in rows]
    return replace(
        config,
        rows=tuple(rows.values()),
        names=tuple(rows),
        lookups=1 if steps is not None else tuple(lookups),
        skew=0.0,
        num_dense=num_dense,
    )


def _constant(data: Prepared) -> tuple[str, ...]:
    """Return the tables that no history reads."""
    tables = {feature.name: feature.table for feature in data.schema.features}
    changing = {tables[past] for past in _histories(data).values() if past is not None}
    return tuple(name for name in data.table_rows if name not in changing)


def _histories(data: Prepared) -> dict[str, str | None]:
    histories = histories_of(data.schema)
    if not histories:
        raise ValueError(
            f"{data.folder} has no sequences: its features are "
            f"{few(feature.name for feature in data.schema.features)}. A model like tbsm needs a "
            "column x and lists of what came before, history_x, which read one table; `hotrow "
            "prepare taobao` makes them"
        )
    check_histories(data.schema, histories)
    return histories


class FromFolder:
    """A folder of `hotrow prepare`."""

    def __init__(self, section: DataSection, *, pin_memory: bool, steps: int | None = None) -> None:
        self._section, self._pins, self._steps = section, pin_memory, steps
        assert section.folder is not None
        self._data = Prepared(section.folder)
        self._data.verify_if_small()
        schema, rows = self._data.schema, self._data.table_rows
        self._histories = {} if steps is None else _histories(self._data)
        if steps is None:
            _warn_of_pooled_histories(self._data)
        features: dict[str, list[str]] = {table: [] for table in schema.tables}
        for feature in schema.features:
            if steps is None or feature.name in self._histories:
                features[feature.table].append(feature.name)
        self.tables: Tables = {
            table: (rows[table] + (steps is not None), names)
            for table, names in features.items()
            if names
        }
        self._order = [name for names in features.values() for name in names]
        self._padding = {name: rows[table] for table, names in features.items() for name in names}
        numbers = numbers_of(self._data, section.dense)
        self._numbers = list(numbers)
        self.num_dense = len(numbers) + (steps is not None)
        self.lookups: dict[str, int] | None = None
        if steps is not None or not schema.jagged:
            self.lookups = dict.fromkeys(self._order, 1 if steps is None else steps + 1)

    @cached_property
    def batches_per_epoch(self) -> int:
        return self._loader("train", drop_last=True).batches_per_epoch

    def _loader(
        self, split: str, *, seed: int | None = None, epochs: int = 1, drop_last: bool = False
    ) -> BatchReader[AnyBatch]:
        options: dict[str, Any] = {
            "batch_size": self._section.batch_size,
            "seed": seed,
            "epochs": epochs,
            "drop_last": drop_last,
            "pin_memory": self._pins,
            "mixed": MIXED if seed is not None else _READ_TOGETHER,
        }
        if not self._data.samples(split):
            raise ValueError(
                f"{self._data.folder} holds no sample back for {split}; prepare more of them"
                if split != "train"
                else f"{self._data.folder} has no sample to train on"
            )
        source = PreparedSource(self._data, split, dense=self._section.dense)
        if self._steps is None:
            return Loader(source, features=self._order, **options)
        return SequenceLoader(
            source,
            steps=self._steps,
            histories={name: self._histories[name] for name in self._order},
            padding=self._padding,
            **options,
        )

    def batches(self, steps: int, start: int = 0) -> PartReader[AnyBatch]:
        return self.loader(-(-steps // self.batches_per_epoch)).batches(start, steps)

    def loader(self, epochs: int) -> BatchReader[AnyBatch]:
        """Read all training samples `epochs` times; FAE sorts them by their numbers."""
        seed = self._section.seed if self._section.shuffle else None
        return self._loader("train", seed=seed, epochs=epochs, drop_last=True)

    def split(self, name: str, *, whole: bool = False) -> Split:
        _check_split(name)
        loader = self._loader(name)
        most = None if whole or name == "train" else self._section.eval_batches
        samples = loader.samples if most is None else most * loader.batch_size
        batches = loader.batches(stop=most)
        return Split(batches, min(samples, loader.samples), loader.samples)

    def described(self) -> dict[str, Any]:
        records = {table.name: table for table in self._data.manifest.tables}
        tables = {}
        for name, (rows, features) in self.tables.items():
            keys = records[name].keys
            values = records[name].ids if keys is None else f"vocabulary {keys.sha256}"
            tables[name] = {"rows": rows, "features": features, "values": values}
        prepared = self._data.manifest.settings
        columns = prepared.get("columns", {})
        logs = set(columns.get("log", ()) if isinstance(columns, Mapping) else ())
        numbers = [f"log of {name}" if name in logs else name for name in self._numbers]
        samples = _sum_of(self._data.manifest.splits["train"])
        layout = prepared.get("layout")
        return {"layout": layout, "dense": numbers, "tables": tables, "samples": samples}

    @property
    def profile(self) -> Profile | None:
        return self._data.profile()


def _sum_of(files: Iterable[FileRecord]) -> str:
    """Return one checksum of the checksums of files."""
    return sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def _warn_of_pooled_histories(data: Prepared) -> None:
    past = [name for name in histories_of(data.schema).values() if name is not None]
    if past:
        warn(
            f"{data.folder} has sequences, of which a model of clicks sees no order: vectors of "
            f'{few(past, between=" and ")} are summed. model.kind = "tbsm" reads them step by step'
        )


def _check_split(name: str) -> None:
    if name not in SPLITS:
        raise ValueError(f"there is no split {name!r}; there are {', '.join(SPLITS)}")


@dataclass(frozen=True)
class _TableDescription:
    rows: int
    features: list[str]
    values: Any


@dataclass(frozen=True)
class Description:
    """What a model trained on some samples can read. `samples` is a checksum of those for training:
    it tells whether a folder was made again."""

    dense: list[str]
    tables: dict[str, _TableDescription]
    layout: str | None = None
    samples: str | None = None

    @classmethod
    def read(cls, values: Any, *, where: str) -> Description:
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{where} is damaged: data: {in_words(error)}") from None

    @classmethod
    def of(cls, samples: Samples) -> Description:
        return cls.read(samples.described(), where="this run")

    def differences(self, other: Description) -> list[str]:
        """Return why a model that was trained on these data cannot read others."""
        texts = []
        if None not in (self.layout, other.layout) and self.layout != other.layout:
            texts.append(f"it was prepared from {other.layout} instead of {self.layout}")
        if self.dense != other.dense:
            texts.append(f"numbers: {_listed(other.dense)} instead of {_listed(self.dense)}")
        texts += [f"table {name} is missing" for name in self.tables if name not in other.tables]
        texts += [f"table {name} is new" for name in other.tables if name not in self.tables]
        for name in (name for name in self.tables if name in other.tables):
            then, now = self.tables[name], other.tables[name]
            if then.features != now.features:
                texts.append(
                    f"table {name} is read by {_listed(now.features)} instead of "
                    f"{_listed(then.features)}"
                )
            if then.rows != now.rows:
                texts.append(f"table {name} has {now.rows:,} rows instead of {then.rows:,}")
            elif then.values != now.values:
                texts.append(f"the rows of table {name} are of other values")
        return texts


def _listed(names: Sequence[str]) -> str:
    return few(names) or "none"
