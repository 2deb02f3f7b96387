"""Which rows are hot: counts given by the user, or a guess where there are none.

Sees tables and counts, never rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.inputs.tables import EmbeddingBagConfig, WidthGroup
from hotrow.support.files import Disk, FileRecord, why_wrong
from hotrow.support.manifests import Count, check_files, converted, read_json
from hotrow.support.messages import few

# Accesses per row of a table: a count for every row, or (row numbers, their counts).
Counts = Tensor | tuple[Tensor, Tensor]
Profile = Mapping[str, Counts]

FORMAT = 1
PROFILE_FILE = "profile.json"
_COUNTS_FILE = "counts.bin"  # of each table the rows that were read, int64, and counts, float64
_REMEDY = "profile the data again"
_GUESSED_SKEW = 1.05  # Zipf exponent consistent with published skew of the Criteo data


@dataclass(frozen=True)
class _CountedTable:
    name: str
    entries: Count


@dataclass(frozen=True)
class _SavedProfile:
    counts: FileRecord
    tables: tuple[_CountedTable, ...]

    def __post_init__(self) -> None:
        check_files([self.counts.file])
        entries = sum(table.entries for table in self.tables)
        if 16 * entries != self.counts.bytes:
            raise ValueError(f"{entries:,} counts are not {self.counts.bytes:,} bytes")


def check_profile(profile: Profile, tables: Sequence[EmbeddingBagConfig]) -> None:
    """Refuse a profile that does not belong to these tables."""
    sizes = {table.name: table.num_embeddings for table in tables}
    if not isinstance(profile, Mapping):
        raise TypeError(
            "profile must be a dict from a table's name to a tensor with a count for each of its "
            f"rows, or to (row numbers, their counts); got {type(profile).__name__}"
        )
    for name, counts in profile.items():
        if name not in sizes:
            raise ValueError(f"the profile names table {name!r}; there are {few(sizes)}")
        if isinstance(counts, Tensor):
            if counts.shape != (sizes[name],):
                raise ValueError(
                    f"profile of table {name!r}: {list(counts.shape)} counts for "
                    f"{sizes[name]:,} rows"
                )
        elif not _names_rows(counts, sizes[name]):
            raise ValueError(
                f"profile of table {name!r}: give a tensor with a count for each of its "
                f"{sizes[name]:,} rows, or two tensors of one length: different row numbers, and "
                "their counts"
            )
        uses = counts if isinstance(counts, Tensor) else counts[1]
        if not bool((uses >= 0).all()):
            raise ValueError(f"profile of table {name!r}: counts must be numbers of at least 0")


def _names_rows(counts: object, size: int) -> bool:
    if not isinstance(counts, tuple | list) or len(counts) != 2:
        return False
    rows, uses = counts
    if not isinstance(rows, Tensor) or not isinstance(uses, Tensor) or rows.shape != uses.shape:
        return False
    if rows.dim() != 1 or rows.is_floating_point():
        return False
    inside = bool(((rows >= 0) & (rows < size)).all())
    return inside and rows.unique().numel() == rows.numel()


def save_profile(
    folder: str | Path, profile: Profile, *, facts: Mapping[str, Any] | None = None
) -> None:
    """Write counts to a folder, for `load_profile`; `facts`, in plain values, lie beside them."""
    entries: list[int] = []

    def parts() -> Iterator[bytes]:
        for counts in profile.values():
            rows, uses = _sparse(counts)
            entries.append(len(rows))
            for each, kind in ((rows, "<i8"), (uses, "<f8")):
                yield each.cpu().numpy().astype(kind).tobytes()

    disk = Disk(Path(folder))
    written = disk.write(_COUNTS_FILE, parts())
    found = {
        "format": FORMAT,
        "counts": {"file": written.file, "bytes": written.bytes, "sha256": written.sha256},
        "tables": [
            {"name": name, "entries": each} for name, each in zip(profile, entries, strict=True)
        ],
        "facts": facts or {},
    }
    # Last: a folder without it is not finished.
    disk.write(PROFILE_FILE, [json.dumps(found, indent=1, allow_nan=False).encode() + b"\n"])


def load_profile(folder: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The counts that `hotrow profile --out` or `save_profile` has written, for `profile=`."""
    path = Path(folder) / PROFILE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {PROFILE_FILE}; `hotrow profile DATA --out` makes one")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a profile of format {FORMAT}")
    saved = converted(_SavedProfile, found, where=str(path), remedy=_REMEDY)
    if wrong := why_wrong(Path(folder), saved.counts, contents=True):
        raise ValueError(f"{wrong}; {_REMEDY}")
    loaded, at = {}, 0
    data = np.fromfile(Path(folder) / saved.counts.file, dtype=np.uint8)
    for table in saved.tables:
        many = table.entries
        rows, uses = data[at : at + 8 * many], data[at + 8 * many : at + 16 * many]
        loaded[table.name] = (
            torch.from_numpy(rows.view("<i8").astype(np.int64)),
            torch.from_numpy(uses.view("<f8").astype(np.float64)),
        )
        at += 16 * many
    return loaded


def hottest(profile: Profile, group: WidthGroup, limit: int) -> Tensor:
    """The ids of the `limit` most used rows of a group, hottest first; rows never used are out."""
    ids, uses = [], []
    for table, base in zip(group.tables, group.bases, strict=True):
        rows, counts = _sparse(profile.get(table.name))
        ids.append(rows + base)
        uses.append(counts)
    every_id, every_use = torch.cat(ids), torch.cat(uses)
    order = torch.sort(every_use, descending=True, stable=True)[1]
    return _without_skipped(every_id[order], group)[:limit]


def small_tables(group: WidthGroup, limit: int) -> Tensor:
    """The ids of whole small tables, smallest first, `limit` rows at the most."""
    ids: list[Tensor] = []
    for position in sorted(range(len(group.tables)), key=lambda t: group.tables[t].num_embeddings):
        size = group.tables[position].num_embeddings
        if size > limit:
            break
        limit -= size
        ids.append(torch.arange(size) + group.bases[position])
    return _without_skipped(torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64), group)


def _without_skipped(ids: Tensor, group: WidthGroup) -> Tensor:
    skipped = group.skipped
    return ids[~torch.isin(ids, ids.new_tensor(skipped))] if skipped else ids


def table_counts(profile: Profile, table: str) -> tuple[Tensor, Tensor]:
    """Of one table: the rows that were read, and how often."""
    return _sparse(profile.get(table))


def _sparse(counts: Counts | None) -> tuple[Tensor, Tensor]:
    if counts is None:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    if isinstance(counts, Tensor):
        rows = counts.nonzero().squeeze(1)
        return rows, counts[rows].double()
    rows, uses = counts
    return rows[uses > 0].long(), uses[uses > 0].double()


def byte_parts(
    groups: Sequence[WidthGroup],
    row_bytes: Sequence[int],
    budget_bytes: int,
    profile: Profile | None,
) -> list[float]:
    """How much of the budget each group gets, so that a byte brings the most expected hits."""
    if len(groups) == 1:
        return [1.0]
    rows = (
        _rows_worth_keeping_guessed(groups, row_bytes, budget_bytes)
        if profile is None
        else _rows_worth_keeping(groups, row_bytes, budget_bytes, profile)
    )
    # Never starve a group: what has no expected hit still passes through its slots.
    bytes_ = [max(1.0, n) * size for n, size in zip(rows, row_bytes, strict=True)]
    parts = [each / sum(bytes_) for each in bytes_]
    floor = 0.05 / len(parts)
    parts = [max(floor, part) for part in parts]
    return [part / sum(parts) for part in parts]


def _rows_worth_keeping(
    groups: Sequence[WidthGroup], row_bytes: Sequence[int], budget_bytes: int, profile: Profile
) -> list[float]:
    gains, sizes, owners = [], [], []
    for g, (group, size) in enumerate(zip(groups, row_bytes, strict=True)):
        for table in group.tables:
            uses = _sparse(profile.get(table.name))[1]
            gains.append(uses / size)
            sizes.append(torch.full_like(uses, float(size)))
            owners.append(torch.full_like(uses, g, dtype=torch.int64))
    order = torch.sort(torch.cat(gains), descending=True)[1]
    kept = order[torch.cat(sizes)[order].cumsum(0) <= budget_bytes]
    return torch.bincount(torch.cat(owners)[kept], minlength=len(groups)).double().tolist()


def _rows_worth_keeping_guessed(
    groups: Sequence[WidthGroup], row_bytes: Sequence[int], budget_bytes: int
) -> list[float]:
    """As if every table were accessed by a Zipf law, once per feature and sample."""

    def rows_at(gain: float) -> list[float]:
        return [
            sum(_ranks_above(gain * size, table) for table in group.tables)
            for group, size in zip(groups, row_bytes, strict=True)
        ]

    low, high = -60.0, 1.0  # log of the smallest worthwhile gain per byte
    for _ in range(60):
        middle = (low + high) / 2
        cost = sum(n * s for n, s in zip(rows_at(math.exp(middle)), row_bytes, strict=True))
        low, high = (middle, high) if cost > budget_bytes else (low, middle)
    return rows_at(math.exp(high))


def _ranks_above(rate: float, table: EmbeddingBagConfig) -> float:
    """How many rows of a table are expected to be used at least `rate` times per sample."""
    n, s = table.num_embeddings, _GUESSED_SKEW
    mass = 1 + (1 - n ** (1 - s)) / (s - 1)  # of the ranks 1..n, by the integral
    top = len(table.feature_names) / mass
    return min(float(n), (top / rate) ** (1 / s)) if rate < top else 0.0
