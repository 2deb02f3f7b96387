"""The samples of a run: generated, or prepared before. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol

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
from hotrow.data.sources import numbers_of
from hotrow.data.synthetic import SyntheticConfig
from hotrow.engine.profile import Profile
from hotrow.inputs.tree import map_tensors
from hotrow.run.config import DataSection
from hotrow.support.files import FileRecord
from hotrow.support.messages import few, warn

# Rows of each, and the features that read it. With sequences the last row is padding.
Tables = dict[str, tuple[int, list[str]]]
AnyBatch = ClickBatch | SequenceBatch
_READ_TOGETHER = 1 << 15  # samples as they lie: of few batches no more than needed shall be read


@dataclass(frozen=True)
class Split:
    """Samples that belong together, in the order in which they lie."""

    batches: Iterable[AnyBatch]
    samples: int  # in these batches
    total: int  # in all of the split


class Samples(Protocol):
    """What a run needs to know of its data."""

    tables: Tables
    num_dense: int
    lookups: dict[str, int] | None  # of each feature in a sample, where all have as many

    @property
    def batches_per_epoch(self) -> int: ...

    def batches(self, steps: int, start: int = 0) -> Iterator[AnyBatch]:
        """So many batches of the training samples, epoch after epoch, without the first `start`."""

    @property
    def validation(self) -> Iterable[AnyBatch]:
        """What is evaluated on the way."""

    @property
    def test(self) -> Iterable[AnyBatch]:
        """What is evaluated at the end."""

    @property
    def profile(self) -> Profile | None:
        """How often rows are read in training, where that was counted."""

    def split(self, name: str, *, whole: bool = False) -> Split:
        """One of SPLITS: what is evaluated of it, or all."""

    def described(self) -> dict[str, Any]:
        """What a model that is trained on it can read, in plain values; and "samples": by which a
        folder that was made anew is recognized."""


def open_samples(section: DataSection, *, pin_memory: bool, steps: int | None = None) -> Samples:
    """Clicks, or with `steps` sequences of so many steps before their targets."""
    if steps is None and section.constant:
        raise ValueError(
            f"constant = {list(section.constant)} is for sequences, and this model learns from "
            'clicks; "tbsm" learns from sequences'
        )
    if section.kind == "prepared":
        return FromFolder(section, pin_memory=pin_memory, steps=steps)
    return Generated(section, pin_memory=pin_memory, steps=steps)


class Generated:
    """Clicks or sequences with a known truth; rows are read by a power law, or as often as those of
    a folder are."""

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
        each = config.lookups_per_table if steps is None else [steps + 1] * len(names)
        self.lookups: dict[str, int] | None = dict(zip(names, each, strict=True))

    def batches(self, steps: int, start: int = 0) -> Iterator[AnyBatch]:
        for step in range(start, steps):
            batch = self.drawn.batch(step % self.batches_per_epoch)
            yield map_tensors(batch, Tensor.pin_memory) if self._pins else batch

    @cached_property
    def validation(self) -> list[AnyBatch]:
        """Batches that follow the training data, kept because every evaluation reads them."""
        first, count = self.batches_per_epoch, self._section.eval_batches or 8
        return list(self.drawn.batches(first, first + count))

    @property
    def test(self) -> list[AnyBatch]:
        """The same: nothing was chosen by them."""
        return self.validation

    @property
    def profile(self) -> Profile | None:
        return None if self._data is None else self._data.profile()

    def split(self, name: str, *, whole: bool = False) -> Split:
        _check_split(name)
        held_back = None if name == "train" else self.validation
        count = self.batches_per_epoch if held_back is None else len(held_back)
        samples = count * self._section.batch_size
        batches = self.drawn.batches(0, count) if held_back is None else held_back
        return Split(batches, samples, samples)

    def described(self) -> dict[str, Any]:
        tables = {
            name: {"rows": rows, "features": features, "values": "generated"}
            for name, (rows, features) in self.tables.items()
        }
        found = {"dense": [f"dense_{i}" for i in range(self.num_dense)], "tables": tables}
        if self._data is None:
            return found
        return found | {"samples": _sum_of(each.counts for each in self._data.manifest.tables)}


def _like(
    data: Prepared, config: SyntheticConfig, steps: int | None, *, num_dense: int
) -> SyntheticConfig:
    """Tables as a folder has them. A sample reads each as often as the folder's do, on average."""
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
    """The tables that no history reads."""
    tables = {each.name: each.table for each in data.schema.features}
    changing = {tables[past] for past in _histories(data).values() if past is not None}
    return tuple(name for name in data.table_rows if name not in changing)


def _histories(data: Prepared) -> dict[str, str | None]:
    found = histories_of(data.schema)
    if not found:
        raise ValueError(
            f"{data.folder} has no sequences: its features are "
            f"{few(each.name for each in data.schema.features)}. A model like tbsm needs a "
            "column x and lists of what came before, history_x, which read one table; `hotrow "
            "prepare taobao` makes them"
        )
    check_histories(data.schema, found)
    return found


class FromFolder:
    """What `hotrow prepare` has made."""

    def __init__(self, section: DataSection, *, pin_memory: bool, steps: int | None = None) -> None:
        self._section, self._pins, self._steps = section, pin_memory, steps
        assert section.folder is not None
        self._data = Prepared(section.folder)
        self._data.verify_if_small()
        schema, rows = self._data.schema, self._data.table_rows
        self._histories = {} if steps is None else _histories(self._data)
        if steps is None:
            _tell_of_pooled_histories(self._data)
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
        self._padding = {name: rows[table] for table, each in features.items() for name in each}
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

    def batches(self, steps: int, start: int = 0) -> Iterator[AnyBatch]:
        seed = self._section.seed if self._section.shuffle else None
        epochs = -(-steps // self.batches_per_epoch)
        loader = self._loader("train", seed=seed, epochs=epochs, drop_last=True)
        yield from loader.batches(start, steps)

    def loader(self, epochs: int) -> BatchReader[AnyBatch]:
        """All training samples so often, for who tells them apart by their numbers."""
        seed = self._section.seed if self._section.shuffle else None
        return self._loader("train", seed=seed, epochs=epochs, drop_last=True)

    @property
    def validation(self) -> Iterable[AnyBatch]:
        return self.split("validation").batches

    @property
    def test(self) -> Iterable[AnyBatch]:
        return self.split("test").batches

    def split(self, name: str, *, whole: bool = False) -> Split:
        _check_split(name)
        loader = self._loader(name)
        most = None if whole or name == "train" else self._section.eval_batches
        samples = loader.samples if most is None else most * loader.batch_size
        batches = loader.batches(stop=most)
        return Split(batches, min(samples, loader.samples), loader.samples)

    def described(self) -> dict[str, Any]:
        records = {each.name: each for each in self._data.manifest.tables}
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
    """What is in files, by what their folder says of them."""
    return sha256("".join(each.sha256 for each in files).encode()).hexdigest()


def _tell_of_pooled_histories(data: Prepared) -> None:
    past = [name for name in histories_of(data.schema).values() if name is not None]
    if past:
        warn(
            f"{data.folder} has sequences, of which a model of clicks sees no order: vectors of "
            f'{few(past, between=" and ")} are summed. model.kind = "tbsm" reads them step by step'
        )


def _check_split(name: str) -> None:
    if name not in SPLITS:
        raise ValueError(f"there is no split {name!r}; there are {', '.join(SPLITS)}")


def why_other(trained: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions so that a model of the one cannot read the other."""
    found = []
    layouts = trained.get("layout"), here.get("layout")
    if None not in layouts and layouts[0] != layouts[1]:
        found.append(f"it was prepared from {layouts[1]} instead of {layouts[0]}")
    if trained["dense"] != here["dense"]:
        found.append(f"numbers: {_listed(here['dense'])} instead of {_listed(trained['dense'])}")
    before, now = trained["tables"], here["tables"]
    found += [f"table {name} is missing" for name in before if name not in now]
    found += [f"table {name} is new" for name in now if name not in before]
    for name in (each for each in before if each in now):
        one, other = before[name], now[name]
        if one["features"] != other["features"]:
            found.append(
                f"table {name} is read by {_listed(other['features'])} instead of "
                f"{_listed(one['features'])}"
            )
        if one["rows"] != other["rows"]:
            found.append(f"table {name} has {other['rows']:,} rows instead of {one['rows']:,}")
        elif one["values"] != other["values"]:
            found.append(f"the rows of table {name} are of other values")
    return found


def _listed(names: Sequence[str]) -> str:
    return few(names) or "none"
