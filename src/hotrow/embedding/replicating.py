"""Rows that every rank has: others are chosen while training stands still.

Rows that are replicated no longer are written to their owners, which every rank does for its own
without a message. Rows that stay are copied here, and the others come from their owners. No bit
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.shared_rows import SharedRows
from hotrow.embedding.row_groups import RowGroups
from hotrow.kernels.reference import places


@dataclass
class _Rows:
    """Rows of one width that will be on every rank."""

    ids: Tensor  # ascending
    values: Tensor  # [n, width], on the host
    is_frozen: Tensor


def replicate(rows: RowGroups, chosen: Mapping[int, Tensor]) -> None:
    """Keep these rows on every rank, by width, and no others. All ranks call this together with the
    same ids, while nothing is in flight."""
    exchange = rows.exchange
    assert exchange is not None
    exchange.forget_ahead()
    with rows.lock.writing():
        rows.write_back_replicas()  # from now on owners have the newest bytes of all rows
    # Without the lock: threads that read hold it while they wait for other ranks.
    found = [
        _found(rows, place, shared, chosen[shared.dim].sort()[0])
        for place, shared in enumerate(rows.lookup_groups)
    ]
    with rows.lock.writing():
        rows.wait_for_device()
        owned = list(rows.owned_groups)
        for shared, new in zip(rows.lookup_groups, found, strict=True):
            shared.replicate(new.ids)
        rows.groups = owned  # the memory of the replicas before is free
        replicas = rows.build_replicas(rows.lookup_groups)
        rows.groups = [*owned, *replicas]
        built = iter(replicas)
        for shared, new in zip(rows.lookup_groups, found, strict=True):
            if shared.replicated is not None:
                shared.use_replicas(next(built))
                _fill(shared, new)
        rows.lanes.read_here()  # training in another stream waits for these rows


def _found(rows: RowGroups, place: int, shared: SharedRows, ids: Tensor) -> _Rows:
    """Return the rows of one width: those that are here already, and others from their owners."""
    exchange = rows.exchange
    assert exchange is not None
    values = torch.empty(len(ids), shared.width)
    is_frozen = torch.zeros(len(ids), dtype=torch.bool)
    at = torch.full_like(ids, -1)
    if shared.replicated is not None:
        at = places(ids, shared.replicated)
    stays, is_new = at >= 0, at < 0
    if bool(stays.any()):
        with rows.reading():
            here = at[stays]
            values[stays] = shared.replicas.gather(here, torch.empty(len(here), shared.width))
            is_frozen[stays] = shared.replicas.store.frozen.among(here)
    if bool(is_new.any()):  # of the same rows on all ranks
        came, frozen = exchange.reads.rows_to_replicate(place, ids[is_new])
        values[is_new], is_frozen[is_new] = came.cpu(), frozen.cpu()
    return _Rows(ids, values, is_frozen)


def _fill(shared: SharedRows, new: _Rows) -> None:
    """Give replicas their rows, and what is known of these."""
    group: Any = shared.replicas
    group.scatter(torch.arange(len(new.ids)), new.values)
    owned = shared.inner.store
    if owned.frozen.bits is not None or bool(new.is_frozen.any()):
        group.freeze(new.is_frozen.nonzero().squeeze(1))
    if owned.changed is not None:  # owners have noted what had changed before
        group.store.note_changes()
