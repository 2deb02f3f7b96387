"""The samples of a run: generated, or prepared before. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Protocol

from torch import Tensor

from hotrow.ahead import map_tensors
from hotrow.data import ClickBatch, Loader, SyntheticClicks
from hotrow.data.prepared import Prepared
from hotrow.run.config import DataSection

Tables = dict[str, tuple[int, list[str]]]  # rows of each, and the features that read it


class Samples(Protocol):
    """What a run needs to know of its data."""

    tables: Tables
    num_dense: int
    batches_per_epoch: int
    lookups: dict[str, int] | None  # of each feature in a sample, where all have as many

    def batches(self, steps: int) -> Iterator[ClickBatch]:
        """So many batches of the training samples, epoch after epoch."""

    @property
    def validation(self) -> Iterable[ClickBatch]:
        """What is evaluated on the way."""

    @property
    def test(self) -> Iterable[ClickBatch]:
        """What is evaluated at the end."""


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
        self.batches_per_epoch = self._loader(epochs=1).batches_per_epoch

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
        return self._held_back("validation")

    @property
    def test(self) -> Iterable[ClickBatch]:
        return self._held_back("test")

    def _held_back(self, split: str) -> Iterator[ClickBatch]:
        loader = Loader(
            self._data,
            split,
            features=self._order,
            batch_size=self._section.batch_size,
            pin_memory=self._pins,
        )
        for number, batch in enumerate(loader):
            if self._section.eval_batches is not None and number == self._section.eval_batches:
                return
            yield batch
