"""All rows of a store as they were at one moment, read while others go on writing.

Whoever is about to write says so (`keep`): rows that were neither read nor kept yet are copied to
a log first. It has room for so many; where it is full, whoever writes waits until some were read.
Rows are read in the order of their ids, so that what was read is told by one number.

Knows ids and bytes; not who writes, nor where rows that were read go.
"""

from __future__ import annotations

import threading
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.reference import in_bits
from hotrow.store.changed import ChangedRows

_SECONDS = 0.5  # after which whoever waits looks whether somebody has pressed Ctrl-C


class Waits:
    """How long others have waited; whoever asks need not keep what they waited for."""

    seconds = 0.0


class Snapshot:
    """Of rows on the host, from when this is made until `end()`."""

    def __init__(self, rows: Tensor, *, most: int, only: ChangedRows | None = None) -> None:
        """A log of `most` rows. `only`: those that will be read, which nobody adds to any more;
        None: all will."""
        self.waits = Waits()  # for room in the log
        self.only, self._rows = only, rows
        most = max(1, min(most, len(rows)))
        self._log = torch.empty(most, rows.shape[1])
        self._ids = torch.full((most,), -1)  # whose old rows the log has, by place
        self._free = torch.arange(most - 1, -1, -1)  # places; the first `_left` are none's
        self._left, self._used = most, 0  # no place from `_used` on was ever taken
        self._kept = ChangedRows(len(rows))
        self._read = 0  # rows with smaller ids were read
        self._has_ended = False
        self._room = threading.Condition()

    @property
    def num_kept(self) -> int:
        """Rows in the log."""
        return len(self._ids) - self._left

    @property
    def num_bytes(self) -> int:
        """What it takes beside the rows, at most."""
        parts = (self._log, self._ids, self._free, self._kept.bits)
        return sum(each.nbytes for each in parts)

    def keep(self, ids: Tensor) -> None:
        """These rows, each given once (-1: none), are about to be replaced: when this returns they
        may be."""
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
        """Those that will be read from the store, unless they are kept."""
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
        """Rows as they were, in the order of their ids: a part of `out`. By one thread, and none
        before those with smaller ids."""
        # Not by torch, whose threads would take the cores that train.
        rows, log, kept = (each.numpy() for each in (self._rows, self._log, self._ids))
        if isinstance(ids, slice):
            first, last, found = ids.start, ids.stop, out[: ids.stop - ids.start]
            np.copyto(found.numpy(), rows[ids])
        else:
            first, last, found = int(ids[0]), int(ids[-1]) + 1, out[: len(ids)]
            np.take(rows, ids.numpy(), axis=0, out=found.numpy(), mode="clip")
        # Whatever was replaced meanwhile was kept before, so that bytes torn here do not stay.
        with self._room:
            self._read = last
        # None of these is kept from here on.
        kept = kept[: self._used]
        places = np.flatnonzero((kept >= first) & (kept < last))
        if len(places):
            mine = kept[places]
            at = mine - first if isinstance(ids, slice) else np.searchsorted(ids.numpy(), mine)
            found.numpy()[at] = log[places]
            with self._room:
                kept[places] = -1
                self._free[self._left : self._left + len(places)] = torch.from_numpy(places)
                self._left += len(places)
                self._room.notify_all()
        return found

    def end(self) -> None:
        """Nothing is read any more, and nobody waits."""
        with self._room:
            self._has_ended = True
            self._room.notify_all()
