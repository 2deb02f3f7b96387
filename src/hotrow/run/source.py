"""The samples of a run: generated, or prepared before. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from torch import Tensor

from hotrow.ahead import map_tensors
from hotrow.data import ClickBatch, Loader, SyntheticClicks
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import SPLITS
from hotrow.run.config import DataSection

Tables = dict[str, tuple[int, list[str]]]  # rows of each, and the features that read it


@dataclass(frozen=True)
class Split:
    """Samples that belong together, in the order in which they lie."""

    batches: Iterable[ClickBatch]
    samples: int  # in these batches
    total: int  # in all of the split


class Samples(Protocol):
    """What a run needs to know of its data."""

    tables: Tables
    num_dense: int
    lookups: dict[str, int] | None  # of each feature in a sample, where all have as many

    @property
    def batches_per_epoch(self) -> int: ...

    def batches(self, steps: int) -> Iterator[ClickBatch]:
        """So many batches of the training samples, epoch after epoch."""

    @property
    def validation(self) -> Iterable[ClickBatch]:
        """What is evaluated on the way."""

    @property
    def test(self) -> Iterable[ClickBatch]:
        """What is evaluated at the end."""

    def split(self, name: str, *, whole: bool = False) -> Split:
        """One of SPLITS: what is evaluated of it, or all."""

    def described(self) -> dict[str, Any]:
        """What a model that is trained on it can read, in plain values."""


def open_samples(section: DataSection, *, pin_memory: bool) -> Samples:
    if section.kind == "prepared":
        return FromFolder(section, pin_memory=pin_memory)
    return Generated(section, pin_memory=pin_memory)


class Generated:
    """Clicks with a known truth."""

    def __init__(self, section: DataSection, *, pin_memory: bool) -> None:
        self._section, self._pins = section, pin_memory
        self._clicks = SyntheticClicks(section.clicks)
        names = section.clicks.table_names
        self.tables: Tables = {
            name: (rows, [name]) for name, rows in zip(names, section.scaled_rows, strict=True)
        }
        self.num_dense = section.num_dense
        self.batches_per_epoch = section.samples // section.batch_size
        self.lookups: dict[str, int] | None = dict(
            zip(names, section.clicks.lookups_per_table, strict=True)
        )

    def batches(self, steps: int) -> Iterator[ClickBatch]:
        for step in range(steps):
            batch = self._clicks.batch(step % self.batches_per_epoch)
            yield map_tensors(batch, Tensor.pin_memory) if self._pins else batch

    @cached_property
    def validation(self) -> list[ClickBatch]:
        """Batches that follow the training data, kept because every evaluation reads them."""
        first, count = self.batches_per_epoch, self._section.eval_batches or 8
        return list(self._clicks.batches(first, first + count))

    @property
    def test(self) -> list[ClickBatch]:
        """The same: nothing was chosen by them."""
        return self.validation

    def split(self, name: str, *, whole: bool = False) -> Split:
        _check_split(name)
        held_back = None if name == "train" else self.validation
        count = self.batches_per_epoch if held_back is None else len(held_back)
        samples = count * self._section.batch_size
        batches = self._clicks.batches(0, count) if held_back is None else held_back
        return Split(batches, samples, samples)

    def described(self) -> dict[str, Any]:
        tables = {
            name: {"rows": rows, "features": features, "values": "generated"}
            for name, (rows, features) in self.tables.items()
        }
        return {"dense": [f"dense_{i}" for i in range(self.num_dense)], "tables": tables}


class FromFolder:
    """What `hotrow prepare` has made."""

    def __init__(self, section: DataSection, *, pin_memory: bool) -> None:
        self._section, self._pins = section, pin_memory
        assert section.folder is not None
        self._data = Prepared(section.folder)
        schema, rows = self._data.schema, self._data.table_rows
        features: dict[str, list[str]] = {table: [] for table in schema.tables}
        for feature in schema.features:
            features[feature.table].append(feature.name)
        self.tables: Tables = {table: (rows[table], names) for table, names in features.items()}
        self._order = [name for names in features.values() for name in names]
        self.num_dense = len(schema.dense)
        self.lookups = None if schema.jagged else dict.fromkeys(self._order, 1)

    @cached_property
    def batches_per_epoch(self) -> int:
        return self._loader(epochs=1).batches_per_epoch

    def _loader(self, *, epochs: int) -> Loader:
        section = self._section
        return Loader(
            self._data,
            "train",
            features=self._order,
            batch_size=section.batch_size,
            seed=section.seed if section.shuffle else None,
            epochs=epochs,
            drop_last=True,
            pin_memory=self._pins,
        )

    def batches(self, steps: int) -> Iterator[ClickBatch]:
        epochs = -(-steps // self.batches_per_epoch)
        batches = self._loader(epochs=epochs).batches()
        for _, batch in zip(range(steps), batches, strict=False):
            yield batch

    @property
    def validation(self) -> Iterable[ClickBatch]:
        return self.split("validation").batches

    @property
    def test(self) -> Iterable[ClickBatch]:
        return self.split("test").batches

    def split(self, name: str, *, whole: bool = False) -> Split:
        _check_split(name)
        loader = Loader(
            self._data,
            name,
            features=self._order,
            batch_size=self._section.batch_size,
            pin_memory=self._pins,
        )
        most = None if whole or name == "train" else self._section.eval_batches
        samples = loader.samples if most is None else most * loader.batch_size
        return Split(islice(loader, most), min(samples, loader.samples), loader.samples)

    def described(self) -> dict[str, Any]:
        records = {each.name: each for each in self._data.manifest.tables}
        tables = {}
        for name, (rows, features) in self.tables.items():
            keys = records[name].keys
            values = records[name].ids if keys is None else f"vocabulary {keys.sha256}"
            tables[name] = {"rows": rows, "features": features, "values": values}
        return {"dense": list(self._data.schema.dense), "tables": tables}


def _check_split(name: str) -> None:
    if name not in SPLITS:
        raise ValueError(f"there is no split {name!r}; there are {', '.join(SPLITS)}")


def why_other(trained: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions so that a model of the one cannot read the other."""
    found = []
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
    return ", ".join(names) or "none"
