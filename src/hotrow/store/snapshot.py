"""All rows of a store as they were at one moment, read while other threads write.

Writers call `keep` first: it copies rows that were neither read nor kept yet to a log. While the
log is full, writers wait until some of its rows were read. Rows are read in the order of their
ids, so one number says which were read. Knows ids and bytes.
"""

from __future__ import annotations

import threading
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.reference import in_bits
from hotrow.store.changed import ChangedRows

_SECONDS = 0.5  # of waiting, after which Ctrl-C is handled


class Waits:
    """How long writers have waited. An object of its own, so that it outlives the snapshot."""

    seconds = 0.0


class Snapshot:
    """A snapshot of rows on the host, from its creation until `end()`."""

    def __init__(self, rows: Tensor, *, most: int, only: ChangedRows | None = None) -> None:
        """`most`: rows of the log. `only`: the rows that will be read; None: all."""
        self.waits = Waits()  # for room in the log
        self.only, self._rows = only, rows
        most = max(1, min(most, len(rows)))
        self._log = torch.empty(most, rows.shape[1])
        self._ids = torch.full((most,), -1)  # whose old rows the log has, by place
        self._free = torch.arange(most - 1, -1, -1)  # places; the first `_left` are free
        self._left, self._used = most, 0  # no place from `_used` on was ever taken
        self._kept = ChangedRows(len(rows))
        self._read = 0  # rows with smaller ids were read
        self._has_ended = False
        self._room = threading.Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes beside those of the rows, at most."""
        parts = (self._log, self._ids, self._free, self._kept.bits)
        return sum(part.nbytes for part in parts)

    def keep(self, ids: Tensor) -> None:
        """Keep rows, each given once (-1: none), which the caller replaces when this returns."""
        ids = ids.to("cpu", torch.int64)
        begun = None
        with self._room:
            while not self._has_ended:
                ids = self._needed(ids)
                now, ids = ids[: self._left], ids[self._left :]
                if len(now):
                    self._put(now)
                if not len(ids):
                    break
                begun = perf_counter() if begun is None else begun
                self._room.wait(_SECONDS)
            if begun is not None:
                self.waits.seconds += perf_counter() - begun

    def _needed(self, ids: Tensor) -> Tensor:
        """Return the rows that will still be read from the store and are not kept."""
        ids = ids[ids >= self._read]
        if self.only is not None:
            ids = ids[in_bits(self.only.bits, ids)]
        return ids[~in_bits(self._kept.bits, ids)]

    def _put(self, ids: Tensor) -> None:
        self._left -= len(ids)
        places = self._free[self._left : self._left + len(ids)]
        self._log[places] = self._rows.index_select(0, ids)
        self._ids[places] = ids
        self._used = max(self._used, int(places.max()) + 1)
        self._kept.note(ids)

    def read(self, ids: slice | Tensor, out: Tensor) -> Tensor:
        """Return rows as they were, a part of `out`. One thread reads, in the order of ids."""
        # Not with torch, whose threads would take the cores that train.
        rows, log, kept = (tensor.numpy() for tensor in (self._rows, self._log, self._ids))
        if isinstance(ids, slice):
            first, last, found = ids.start, ids.stop, out[: ids.stop - ids.start]
            np.copyto(found.numpy(), rows[ids])
        else:
            first, last, found = int(ids[0]), int(ids[-1]) + 1, out[: len(ids)]
            np.take(rows, ids.numpy(), axis=0, out=found.numpy(), mode="clip")
        # Rows that were replaced meanwhile were kept before: the log replaces their torn bytes.
        with self._room:
            self._read = last
        # None of these is kept from here on.
        kept = kept[: self._used]
        places = np.flatnonzero((kept >= first) & (kept < last))
        if len(places):
            old = kept[places]
            at = old - first if isinstance(ids, slice) else np.searchsorted(ids.numpy(), old)
            found.numpy()[at] = log[places]
            with self._room:
                kept[places] = -1
                self._free[self._left : self._left + len(places)] = torch.from_numpy(places)
                self._left += len(places)
                self._room.notify_all()
        return found

    def end(self) -> None:
        """End reading, so that no writer waits any more."""
        with self._room:
            self._has_ended = True
            self._room.notify_all()
