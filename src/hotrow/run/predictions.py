"""Scores of a model as a Parquet file: `row`, `score` and `label` of every sample of a split."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from hotrow.data.prepared.arrow import pyarrow
from hotrow.run.job import Job
from hotrow.run.source import AnyBatch
from hotrow.support.files import PARTIAL, make_durable

_GROUP = 1 << 20  # samples of a row group, which are kept until it is written


def write_scores(job: Job, batches: Iterable[AnyBatch], out: Path) -> int:
    """Writes the probability of a click for every sample, and says how many there were."""
    done = 0
    with ParquetScores(out) as file:
        for batch in batches:
            # In double precision, as evaluation ranks them.
            file.add(job.trainer.predict(batch).double().sigmoid(), batch.label)
            done += len(batch)
    return done


def check_arrow() -> Any:
    """Arrow and its Parquet; refuses, in a sentence, where the package is missing."""
    what = "scores are written"
    return pyarrow(what=what), pyarrow("parquet", what=what)


class ParquetScores:
    """A file that is there when it is whole: written beside, and renamed."""

    def __init__(self, out: Path) -> None:
        self._arrow, self._parquet = check_arrow()
        self._out, self._beside = out, out.with_name(out.name + PARTIAL)
        self._next = self._waiting = 0
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def __enter__(self) -> Self:
        kinds = {"row": "int64", "score": "float64", "label": "int8"}
        schema = self._arrow.schema(
            [(name, getattr(self._arrow, k)()) for name, k in kinds.items()]
        )
        try:
            self._writer = self._parquet.ParquetWriter(self._beside, schema)
        except BaseException:
            self._beside.unlink(missing_ok=True)
            raise
        return self

    def add(self, scores: Tensor, labels: Tensor) -> None:
        self._scores.append(scores.cpu())
        self._labels.append(labels.cpu().to(torch.int8))
        self._waiting += len(scores)
        if self._waiting >= _GROUP:
            self._write()

    def _write(self) -> None:
        if not self._scores:
            return
        scores, labels = torch.cat(self._scores), torch.cat(self._labels)
        rows = torch.arange(self._next, self._next + len(scores))
        columns = {"row": rows, "score": scores, "label": labels}
        self._writer.write_table(
            self._arrow.table({name: each.numpy() for name, each in columns.items()})
        )
        self._next += len(scores)
        self._waiting = 0
        self._scores, self._labels = [], []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._write()
            self._writer.close()
            if error is None:
                make_durable(self._beside)
                os.replace(self._beside, self._out)
                make_durable(self._out.parent)
        finally:
            self._beside.unlink(missing_ok=True)
