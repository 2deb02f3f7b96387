"""Compares trained systems, with the tables of one system in memory at a time.

Checksums of a system's final values tell equal bits. For distances, the values of one system, the
reference, are kept in an unnamed file that ends with the process. Everything is read in chunks.
"""

from __future__ import annotations

import hashlib
import math
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotrow.study.systems import System


@dataclass(frozen=True)
class Tolerance:
    """How far a system that is exact up to rounding may be from all-fast.

    Rounding stays small until it turns one unit of a network on or off; then two trainings part at
    once. So a system beyond the tolerance is compared with all-fast itself in another order of
    sums, and may be `times_as_far` as far away, but not within `early_steps`.
    """

    relative: float = 1e-4  # tests of hybrid strategies use the same values
    absolute: float = 1e-5
    outliers: float = 0.01  # share of the unequal weights, rows and row state
    times_as_far: float = 2
    early_steps: int = 8  # rounding cannot have grown yet

    def holds(self, distance: Distance) -> bool:
        """Return whether every loss, and nearly all unequal values, are within the tolerance.

        Adaptive optimizers divide small gradients by their own size: of some they make large steps
        whose direction is rounding's.
        """
        return not distance.losses.beyond and distance.outliers <= self.outliers

    def is_as_near(self, distance: Distance, controls: Sequence[Distance]) -> bool:
        """Return whether trainings that differ by rounding only are about as far away."""
        if distance.first_beyond is not None and distance.first_beyond <= self.early_steps:
            return False
        loss = max(control.losses.largest for control in controls)
        outliers = max(control.outliers for control in controls)
        return (
            distance.losses.largest <= self.times_as_far * loss
            and distance.outliers <= self.times_as_far * outliers
        )

    def compare(self, values: Tensor, wanted: Tensor) -> Apart:
        values, wanted = values.double(), wanted.double()
        difference = (values - wanted).abs()
        difference[(values == wanted) | (values.isnan() & wanted.isnan())] = 0.0  # infinities, too
        difference[difference.isnan()] = math.inf
        beyond = difference > self.absolute + self.relative * wanted.abs()
        return Apart(
            values=values.numel(),
            unlike=int(difference.count_nonzero()),
            beyond=int(beyond.sum()),
            largest=float(difference.max()) if difference.numel() else 0.0,
        )


# SHA-256 sums of losses, of each dense weight and of each table's rows with their state, by name.
Bits = Mapping[str, str]


def unlike(bits: Bits, others: Bits) -> list[str]:
    """Return the names that differ, with those that only one of them has."""
    return [name for name in {**bits, **others} if bits.get(name) != others.get(name)]


@dataclass(frozen=True)
class Apart:
    """How far values are from others."""

    values: int = 0
    unlike: int = 0  # unequal values
    beyond: int = 0  # those further away than the tolerance
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
    def outliers(self) -> float:
        """Share of the unequal values that is beyond the tolerance."""
        return self.values.beyond / max(1, self.values.unlike)

    def __str__(self) -> str:
        since = "" if self.first_beyond is None else f" (beyond it from step {self.first_beyond:,})"
        return (
            f"losses differ by up to {self.losses.largest:.1e}{since}; {self.values.unlike:,} of "
            f"{self.values.values:,} values by up to {self.values.largest:.1e}, "
            f"{self.values.beyond:,} of them by more than the tolerance"
        )


def bits_of(system: System, losses: Sequence[float], *, copy: Reference | None = None) -> Bits:
    """Return the bits a system ended with; `copy` gets its values in the same pass."""
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
    return sums


class Reference:
    """The values one system ended with: rows in a file, everything else in memory."""

    def __init__(self, folder: Path | None, tolerance: Tolerance) -> None:
        """`folder`: of the file; None: in the system's own."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._tolerance = tolerance
        self._starts: dict[str, int] = {}
        self._dense: dict[str, Tensor] = {}
        self._losses: list[float] = []

    def close(self) -> None:
        self._file.close()

    def add(self, table: str, rows: Tensor) -> None:
        """Add the next rows of a table, table by table."""
        self._starts.setdefault(table, self._file.tell())
        self._file.write(_array(rows).data)

    def finish(self, system: System, losses: Sequence[float]) -> None:
        self._file.flush()
        self._losses = list(losses)
        self._dense = {name: dense.detach().cpu().clone() for name, dense in system.dense().items()}

    def distance(self, system: System, losses: Sequence[float]) -> Distance | None:
        """Return how far another system is; None: it has other losses, weights or tables."""
        dense, compare = system.dense(), self._tolerance.compare
        if (
            len(losses) != len(self._losses)
            or dense.keys() != self._dense.keys()
            or set(system.tables()) != self._starts.keys()
        ):
            return None
        total = Apart()
        for name, weight in dense.items():
            total += compare(weight.detach().cpu(), self._dense[name])
        for table in system.tables():
            self._file.seek(self._starts[table])
            # Systems read in chunks of their own sizes, all from the first row on.
            for _, rows in system.rows(table):
                total += compare(rows, self._rows_like(rows))
        steps = [
            compare(torch.tensor(loss), torch.tensor(wanted_loss))
            for loss, wanted_loss in zip(losses, self._losses, strict=True)
        ]
        first = next((number for number, step in enumerate(steps, 1) if step.beyond), None)
        return Distance(sum(steps, start=Apart()), total, first)

    def _rows_like(self, rows: Tensor) -> Tensor:
        """Return the next rows of the file, as many as these."""
        wanted = np.empty(rows.shape, dtype=np.float32)
        self._file.readinto(wanted.data)
        return torch.from_numpy(wanted)


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
