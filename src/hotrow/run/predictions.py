"""Scores of a model as a Parquet file: `row`, `score` and `label` of every sample of a split."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.data.prepared.arrow import pyarrow
from hotrow.run.job import Job
from hotrow.run.source import AnyBatch
from hotrow.support.files import PARTIAL, make_durable

_GROUP = 1 << 20  # samples of a row group, which are kept until it is written


def check_arrow() -> Any:
    """Return Arrow and its Parquet; a ValueError says what to install where it is missing."""
    what = "scores are written"
    return pyarrow(what=what), pyarrow("parquet", what=what)


def write_scores(job: Job, batches: Iterable[AnyBatch], out: Path) -> int:
    """Write the probability of a click for every sample; return how many there were.

    The file has its name when it is whole: it is written beside, and renamed.
    """
    arrow, parquet = check_arrow()
    kinds = {"row": arrow.int64(), "score": arrow.float64(), "label": arrow.int8()}
    beside, done = out.with_name(out.name + PARTIAL), 0
    try:
        with parquet.ParquetWriter(beside, arrow.schema(list(kinds.items()))) as writer:
            for scores, labels in _groups(job, batches):
                rows = torch.arange(done, done + len(scores))
                columns = (each.numpy() for each in (rows, scores, labels))
                writer.write_table(arrow.table(dict(zip(kinds, columns, strict=True))))
                done += len(scores)
        make_durable(beside)
        os.replace(beside, out)
        make_durable(out.parent)
    finally:
        beside.unlink(missing_ok=True)
    return done


def _groups(job: Job, batches: Iterable[AnyBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scores and labels, as many as make a row group."""
    scores: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        # In double precision, as evaluation ranks them.
        scores.append(job.trainer.predict(batch).double().sigmoid().cpu())
        labels.append(batch.label.cpu().to(torch.int8))
        if sum(map(len, scores)) >= _GROUP:
            yield torch.cat(scores), torch.cat(labels)
            scores, labels = [], []
    if scores:
        yield torch.cat(scores), torch.cat(labels)
