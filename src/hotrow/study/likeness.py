"""How like two trained systems are, with the tables of one of them in memory at a time.

What a system ended with is kept as checksums, which tell equal bits. To tell how far apart values
are, those of one system, the reference, lie in a file that has no name and goes with its process.
Everything is read in chunks.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotrow.study.systems import System
from hotrow.support.units import show_bytes

# As tests/test_hybrid.py holds strategies to that are exact up to rounding.
RELATIVE, ABSOLUTE = 1e-4, 1e-5
OUTLIERS = 0.01  # of the weights, rows and row state that are not the same
# Rounding stays small until it turns one unit of a network on or off, and then parts two trainings
# at a stroke. So where one is beyond the tolerance at its end, it is compared with all-fast itself
# in another order of sums, and may be so many times as far away.
TIMES_AS_FAR = 2
EARLY_STEPS = 8  # in which nothing has come of rounding yet
_SPARE_BYTES = 1 << 28  # of the disk, for everybody else


@dataclass(frozen=True)
class Bits:
    """SHA-256 sums of losses, of each dense weight and of each table's rows with their state."""

    sums: Mapping[str, str]

    def unlike(self, other: Bits) -> list[str]:
        """What differs; what only one of them has does, too."""
        names = {**self.sums, **other.sums}
        return [name for name in names if self.sums.get(name) != other.sums.get(name)]


@dataclass(frozen=True)
class Apart:
    """How far values are from others."""

    values: int = 0
    unlike: int = 0  # of them, those that are not the same
    beyond: int = 0  # of those, further away than the tolerance
    largest: float = 0.0  # difference

    def __add__(self, other: Apart) -> Apart:
        return Apart(
            self.values + other.values,
            self.unlike + other.unlike,
            self.beyond + other.beyond,
            max(self.largest, other.largest),
        )


@dataclass(frozen=True)
class Distance:
    """How far a system is from the reference."""

    losses: Apart
    values: Apart  # dense weights, rows and row state
    first_beyond: int | None  # step whose loss is further away than the tolerance

    @property
    def is_tolerable(self) -> bool:
        """Every loss, and nearly all of what is not the same. Adaptive optimizers divide small
        gradients by their own size: of some they make large steps that rounding has chosen."""
        return not self.losses.beyond and self.outliers <= OUTLIERS

    def is_as_near(self, controls: Sequence[Distance]) -> bool:
        """Whether it is not much further away than trainings that differ by rounding alone."""
        if self.first_beyond is not None and self.first_beyond <= EARLY_STEPS:
            return False
        loss = max(each.losses.largest for each in controls)
        outliers = max(each.outliers for each in controls)
        return (
            self.losses.largest <= TIMES_AS_FAR * loss and self.outliers <= TIMES_AS_FAR * outliers
        )

    @property
    def outliers(self) -> float:
        """Of the values that are not the same, the share beyond the tolerance."""
        return self.values.beyond / max(1, self.values.unlike)

    def __str__(self) -> str:
        since = "" if self.first_beyond is None else f" (beyond it from step {self.first_beyond:,})"
        return (
            f"losses differ by up to {self.losses.largest:.1e}{since}; {self.values.unlike:,} of "
            f"{self.values.values:,} values by up to {self.values.largest:.1e}, "
            f"{self.values.beyond:,} of them by more than the tolerance"
        )


def bits_of(system: System, losses: Sequence[float], *, copy: Reference | None = None) -> Bits:
    """The bits a system ended with; `copy` gets its values in the same pass."""
    sums = {"losses": hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest()}
    for name, weight in system.dense().items():
        sums[name] = hashlib.sha256(_array(weight).tobytes()).hexdigest()
    for table in system.tables():
        digest = hashlib.sha256()
        for _, rows in system.rows(table):
            digest.update(_array(rows).data)
            if copy is not None:
                copy.add(table, rows)
        sums[f"rows of table {table}"] = digest.hexdigest()
    if copy is not None:
        copy.finish(system, losses)
    return Bits(sums)


class Reference:
    """The values one system ended with: rows in a file, everything else in memory."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._starts: dict[str, int] = {}
        self._dense: dict[str, Tensor] = {}
        self._losses: list[float] = []

    def close(self) -> None:
        self._file.close()

    def add(self, table: str, rows: Tensor) -> None:
        """The next rows of a table; tables come one after the other."""
        self._starts.setdefault(table, self._file.tell())
        self._file.write(_array(rows).data)

    def finish(self, system: System, losses: Sequence[float]) -> None:
        self._file.flush()
        self._losses = list(losses)
        self._dense = {name: each.detach().cpu().clone() for name, each in system.dense().items()}

    def distance(self, system: System, losses: Sequence[float]) -> Distance | None:
        """How far another system is from it; None where they have not the same things."""
        dense = system.dense()
        if (
            len(losses) != len(self._losses)
            or dense.keys() != self._dense.keys()
            or set(system.tables()) != self._starts.keys()
        ):
            return None
        total = Apart()
        for name, weight in dense.items():
            total += _apart(weight.detach().cpu(), self._dense[name])
        for table in system.tables():
            for part in self._apart_in(table, system.rows(table)):
                total += part
        steps = [
            _apart(torch.tensor(mine), torch.tensor(theirs))
            for mine, theirs in zip(losses, self._losses, strict=True)
        ]
        first = next((step for step, each in enumerate(steps, 1) if each.beyond), None)
        return Distance(sum(steps, start=Apart()), total, first)

    def _apart_in(self, table: str, chunks: Iterator[tuple[int, Tensor]]) -> Iterator[Apart]:
        self._file.seek(self._starts[table])
        for _, rows in chunks:
            # Systems read in chunks of their own sizes, but all from the first row on.
            wanted = np.empty(rows.shape, dtype=np.float32)
            self._file.readinto(wanted.data)
            yield _apart(rows, torch.from_numpy(wanted))


def room_for_reference(folder: Path, num_bytes: int) -> str | None:
    """Why a reference of so many bytes cannot be kept; None: it can."""
    free = shutil.disk_usage(folder).free
    if num_bytes + _SPARE_BYTES <= free:
        return None
    return (
        f"to tell how far apart values are, {show_bytes(num_bytes)} of all-fast's rows must lie on "
        f"the disk of {folder}, which has {show_bytes(free)} free"
    )


def _apart(found: Tensor, wanted: Tensor) -> Apart:
    found, wanted = found.double(), wanted.double()
    difference = (found - wanted).abs()
    difference[(found == wanted) | (found.isnan() & wanted.isnan())] = 0.0  # infinities, too
    difference[difference.isnan()] = math.inf
    beyond = difference > ABSOLUTE + RELATIVE * wanted.abs()
    return Apart(
        values=found.numel(),
        unlike=int(difference.count_nonzero()),
        beyond=int(beyond.sum()),
        largest=float(difference.max()) if difference.numel() else 0.0,
    )


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
