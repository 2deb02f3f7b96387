"""Rows in and out: what checkpoints, verifiers and state dicts need of a collection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.owners import TableOwners
from hotrow.embedding.arguments import row_numbers
from hotrow.embedding.pipeline import Pipeline
from hotrow.embedding.row_groups import Group, RowGroups
from hotrow.engine.idle import advance_frozen, rows_now
from hotrow.kernels.dense_rules import LAST
from hotrow.store.snapshot import Snapshot
from hotrow.support.messages import warn
from hotrow.support.numbers import whole

NewColumns = Sequence[tuple[slice, Tensor]]  # for rows that are named beside them, in their order
_LEAST_CHUNK = 1024
_SHARED_CHUNK = 1 << 14  # rows that ranks read together


def _chunk_of(group: Group) -> int:
    """Return how many rows to read or replace at once: what the buffer holds, but not few."""
    return max(group.chunk_rows, _LEAST_CHUNK)


def _copies_of(rows: RowGroups, table: str, numbers: Tensor) -> Iterator[tuple[Group, Tensor, Any]]:
    """Yield the groups here that have some rows of a table, their ids there, and which they are."""
    group, mine, ids = rows.ids_of(table, numbers)
    yield group, ids, slice(None) if mine is None else mine
    copies = rows.replicas_of(table, numbers)
    if copies is not None:
        yield copies[0], copies[2], copies[1]


def _replace(group: Group, ids: Tensor, new: NewColumns, places: Tensor, last: int | None) -> None:
    """Replace some columns of rows, each given once; the others are as of the newest step."""
    rows = rows_now(group, ids)
    for columns, values in new:
        rows[:, columns] = values[places].detach().to(rows)
    if last is not None and group.idle is not None:
        group.idle.note_now(rows, ids, last)
    group.scatter(ids, rows)


class RowAccess:
    """Reads and replaces rows with their optimizer state, wherever they are."""

    def __init__(self, rows: RowGroups, pipeline: Pipeline) -> None:
        self._rows, self._pipeline, self.is_shared = rows, pipeline, rows.is_shared
        # The checkpoint that called `note_changes`, and the collection's name in its model.
        self.changed_since: tuple[Any, str] | None = None
        self.being_saved: Any = None  # the job that reads the snapshots; `join()` waits for it
        self.is_apart = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, state dicts neither hold rows nor load any: rows are saved on their own."""
        before, self.is_apart = self.is_apart, True
        try:
            yield
        finally:
            self.is_apart = before

    # -- chunks ------------------------------------------------------------------------

    def rows(self, table: str, dst: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield chunks of rows. Several ranks call this together; `dst`: the one that gets them."""
        size = self._rows.size_of(table)  # a wrong name is refused before the first chunk
        step = self._step_of(table)

        def chunks() -> Iterator[tuple[int, Tensor]]:
            for first in range(0, size, step):
                rows = torch.arange(first, min(first + step, size))
                if dst is None or self._is_here(dst):
                    yield first, self._gather(table, rows)
                else:
                    self._gather(table, rows[:0])  # this rank only serves

        return chunks()

    def _is_here(self, dst: int) -> bool:
        exchange = self._rows.exchange
        return (0 if exchange is None else exchange.ranks.rank) == dst

    def _step_of(self, table: str) -> int:
        """Return how many rows to read at once: on several ranks the same number on each."""
        if self._rows.exchange is not None:
            return _SHARED_CHUNK
        return _chunk_of(self._rows.find(table)[0])

    def weights(self, table: str, dst: int | None = None) -> Iterator[tuple[int, Tensor]]:
        dim, rows = self._rows.find(table)[0].dim, self.rows(table, dst)
        return ((first, chunk[:, :dim].clone()) for first, chunk in rows)

    def weights_at(self, table: str, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        group = self._rows.find(table)[0]
        rows = row_numbers(table, rows, self._rows.size_of(table))
        step, dim = self._step_of(table), group.dim

        def chunks() -> Iterator[tuple[slice, Tensor]]:
            for first in range(0, len(rows), step):
                part = rows[first : first + step].cpu()
                yield slice(first, first + len(part)), self._gather(table, part)[:, :dim].clone()

        return chunks()

    def copy_weights(self, table: str) -> Tensor:
        """Return a copy of all weights of a table, [rows, dim]."""
        copy = torch.empty(self._rows.size_of(table), self._rows.find(table)[0].dim)
        for first, weights in self.weights(table):
            copy[first : first + len(weights)] = weights
        return copy

    def bytes_of(self, table: str) -> int:
        """Return the bytes of a table's rows with their state."""
        group, _, size = self._rows.find(table)
        return 4 * int(group.width) * size

    @property
    def whole_bytes(self) -> int:
        """The bytes of copies of whole tables."""
        return self._rows.whole_bytes

    def take_whole(self, table: str, num_bytes: int) -> None:
        """Take bytes of the budget for a copy of a table, and its gradient."""
        rows = self._rows
        rows.whole_bytes += num_bytes
        if rows.can_resize:
            rows.budget_bytes -= num_bytes
        elif rows.device.type == "cuda" and rows.strategy.needs_budget:
            warn(
                f"the weight of table {table!r} is read after slots were allocated, so its copy "
                "comes on top of the budget; read it in the first forward pass"
            )

    def _gather(self, table: str, rows: Tensor) -> Tensor:
        """Return rows of a table with their state, each listed once, as of one finished step."""
        exchange = self._rows.exchange
        if exchange is not None:
            aside = self._pipeline.thread.is_elsewhere
            place = self._rows.place_of(table)
            layout = self._rows.lookup_groups[place].layout
            base = layout.bases[[x.name for x in layout.tables].index(table)]
            ordered, order = (rows + base).sort()
            found = exchange.reads.rows(place, ordered, aside=aside).cpu()
            return found[order.argsort()]
        with self._rows.reading():
            group, base, _ = self._rows.find(table)
            return rows_now(group, rows + base)

    def load_weights(self, table: str, first: int, weights: Tensor) -> None:
        group, size = self._rows.find(table)[0], self._rows.size_of(table)
        first = whole("first", first)
        fits = weights.dim() == 2 and weights.shape[1] == group.dim
        if not fits or first < 0 or first + len(weights) > size:
            raise ValueError(
                f"table {table!r} has {size:,} rows of {group.dim} weights; "
                f"{list(weights.shape)} from row {first:,} on do not fit"
            )
        self._rows.check_call(f"load_weights({table!r}, {first}, {len(weights)} rows)")
        self.load_weights_at(table, torch.arange(len(weights)) + first, weights)

    def load_weights_at(self, table: str, rows: Tensor, weights: Tensor) -> None:
        """Replace the weights of some rows, each given once; their state stays."""
        self._load(table, rows, [(slice(0, self._rows.find(table)[0].dim), weights)])

    def note_step(self) -> None:
        """Note that rows were updated where the host did not launch it."""
        self._rows.version += 1

    def note_loaded(self) -> None:
        """Note that rows are not as their seed would start them."""
        self._rows.is_fresh = False
        self._rows.version += 1

    def _load(self, table: str, numbers: Tensor, new: NewColumns, last: int | None = None) -> None:
        """Replace columns of rows, which are as of step `last` then; None: of the newest one."""
        with self._rows.lock.writing():
            self._rows.is_fresh = False
            self._rows.version += 1
            for chunk in torch.arange(len(numbers)).split(_chunk_of(self._rows.find(table)[0])):
                for group, ids, mine in _copies_of(self._rows, table, numbers[chunk]):
                    _replace(group, ids, new, chunk[mine], last)
            self._rows.lanes.read_here()  # training in another stream waits for these rows

    def reading(self) -> AbstractContextManager[None]:
        """Inside, no other thread changes rows: chunks are of one step."""
        return self._rows.reading()

    # -- optimizer state ---------------------------------------------------------------

    def stored_widths(self, table: str) -> dict[str, int]:
        """Return how many numbers of each piece of optimizer state follow a row's weights."""
        columns = self._rows.find(table)[0].state
        return {name: piece.stop - piece.start for name, piece in columns.items()}

    def state_widths(self, table: str) -> dict[str, int]:
        """Return `stored_widths` of what torch has as well: not of the last gradient's step."""
        return {name: x for name, x in self.stored_widths(table).items() if name != LAST}

    def state_shapes(self, table: str) -> dict[str, tuple[int, int]]:
        """Return the shape of each piece of optimizer state of a table."""
        size = self._rows.size_of(table)
        return {name: (size, width) for name, width in self.state_widths(table).items()}

    def copy_state(self, table: str) -> dict[str, Tensor]:
        """Return the optimizer state of a table's rows, a tensor for each piece."""
        group, shapes = self._rows.find(table)[0], self.state_shapes(table)
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
        with self.reading():
            for first, rows in self.rows(table):
                for name in state:
                    state[name][first : first + len(rows)] = rows[:, group.state[name]]
        return state

    def check_state(self, table: str, state: Mapping[str, Any]) -> None:
        """Raise if state does not fit a table or its optimizer."""
        size, widths = self._rows.size_of(table), self.state_widths(table)
        foreign = [name for name in state if name != "step" and name not in widths]
        if foreign:
            raise ValueError(
                f"table {table!r}: {type(self._rows.optimizer.rule).__name__} has no state "
                f"{foreign[0]!r}; this state belongs to another optimizer"
            )
        for name, width in widths.items():
            if name not in state or state[name].shape != (size, width):
                got = list(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"optimizer state {name!r} of table {table!r} must have shape "
                    f"{[size, width]}, got {got}"
                )

    def load_state(self, table: str, state: Mapping[str, Tensor], step: int | None = None) -> None:
        """Replace the state of all rows of a table; their weights are of `step` then."""
        columns = self._rows.find(table)[0].state
        new = [(columns[name], state[name]) for name in self.state_widths(table)]
        self._load(table, torch.arange(self._rows.size_of(table)), new, step)

    # -- the store ---------------------------------------------------------------------

    def flush(self) -> None:
        """Bring slow memory up to date with fast memory."""
        self._rows.flush()

    def settle(self) -> None:
        """Flush, and wait for the device, so that `stored` can be read without asking it."""
        with self._rows.lock.writing():
            advance_frozen(self._rows.groups)
        self._rows.flush()
        self._rows.wait_for_device()

    def stored(self, table: str) -> Tensor:
        """Return all rows of a table that are here, with their state, where they lie:
        [rows, dim + state].

        After `settle()` they are the newest ones, until the next step.
        """
        group, base, _ = self._rows.find(table)
        return group.store.rows[base : base + self.count(table)]

    def count(self, table: str) -> int:
        """Return how many rows of a table are here: of several ranks each has its own."""
        shared = self.owners_of(table)
        return self._rows.size_of(table) if shared is None else int(shared[0].counts[shared[1]])

    def owners_of(self, table: str) -> tuple[TableOwners, int] | None:
        """Return which rank has which rows of a table, and this rank; None: all are here."""
        exchange, place = self._rows.exchange, self._rows.place_of(table)
        if exchange is None:
            return None
        owners = self._rows.lookup_groups[place].owners.tables
        return next(x for x in owners if x.name == table), exchange.ranks.rank

    def own_weights(self, table: str, first: int, last: int) -> Iterator[Tensor]:
        """Yield the weights of rows that are here, by their numbers here, in chunks."""
        group, base, _ = self._rows.find(table)
        for chunk in torch.arange(base + first, base + last).split(_chunk_of(group)):
            with self._rows.reading():
                group = self._rows.find(table)[0]  # the other engine may have begun to train
                rows = rows_now(group, chunk)
            yield rows[:, : group.dim].clone()

    def meet(self, text: str) -> list[str]:
        """Return what each rank says; all of them call this."""
        exchange = self._rows.exchange
        return [text] if exchange is None else exchange.meet(text)

    def refresh(self) -> None:
        """Read the rows that every rank has from their owners again. All ranks do this."""
        with self._rows.lock.writing():
            self._rows.refresh_replicas()

    def check_replacing(self) -> None:
        """Raise where `replacing` would: several ranks have to know before they begin."""
        self._pipeline.refuse_if_running("replacing rows")

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, what is written to `stored(table)` replaces rows with their state.

        No `hotrow.ahead` may be running. Several ranks do this together.
        """
        self.check_replacing()
        if self.being_saved is not None:
            self.being_saved.join()
        with self._rows.lock.writing():
            self._rows.is_fresh = False
            self._rows.version += 1
            self.settle()
            try:
                yield
            finally:
                self._rows.wait_for_device()
                self._pipeline.forget_planned()
                self.changed_since = None
                for group in self._rows.every_group:
                    group.store.changed = group.store.touched = None
                    group.replaced()
                self._rows.refresh_replicas()

    # -- snapshots ---------------------------------------------------------------------

    def why_no_snapshot(self) -> str | None:
        """Return why rows cannot be read as they were while training goes on; None: they can."""
        # Replicas are written back to their owners before.
        inactive = self._rows.inactive
        groups = [*self._rows.owned_groups, *([] if inactive is None else inactive.groups)]
        reasons = (group.store.why_no_snapshot for group in groups)
        return next((reason for reason in reasons if reason is not None), None)

    def take_snapshots(self, log_bytes: int, *, only_changed: bool) -> list[Snapshot]:
        """After `settle()`: until `end_snapshots()`, `snapshot(table)` reads rows as they are now.

        Rows that are replaced before they are read go to logs of `log_bytes` in all.
        """
        snapshots = []
        groups = self._rows.owned_groups
        bytes_total = sum(group.store.rows.nbytes for group in groups)
        for group in groups:
            store, changed = group.store, group.store.changed
            part = log_bytes * store.rows.nbytes // max(1, bytes_total)
            store.snapshot = Snapshot(
                store.rows,
                most=part // max(1, store.rows[:1].nbytes),
                only=changed.copy() if only_changed and changed is not None else None,
            )
            snapshots.append(store.snapshot)
        return snapshots

    def snapshot(self, table: str) -> tuple[Snapshot, int]:
        """Return the snapshot that holds a table's rows, and the id of the first one."""
        group, base, _ = self._rows.find(table)
        if group.store.snapshot is None:
            raise RuntimeError("take_snapshots() comes before snapshot()")
        return group.store.snapshot, base

    def end_snapshots(self) -> None:
        for group in self._rows.groups:
            if group.store.snapshot is not None:
                group.store.snapshot.end()
                group.store.snapshot = None

    # -- changed rows ------------------------------------------------------------------

    def note_changes(self) -> bool:
        """From now on remember which rows are written, in a bit for each; forget earlier ones.

        Return False if an engine cannot do so.
        """
        rows = self._rows
        if not all(group.notes_changes for group in rows.groups):
            return False
        with rows.lock.writing():
            for group in rows.groups:
                group.store.note_changes()
            rows.wait_for_device()  # changes may be noted in another stream
        return True

    @property
    def notes_changes(self) -> bool:
        return all(group.store.changed is not None for group in self._rows.groups)

    def changed_rows(self, table: str, first: int, last: int) -> Tensor:
        """Return those of the rows first..last-1 that were written since `note_changes()`."""
        group, base, size = self._rows.find(table)
        if not 0 <= first <= last <= size:
            raise ValueError(
                f"table {table!r} has rows 0 to {size - 1:,}, and not all from {first:,} to "
                f"{last - 1:,}"
            )
        changed = group.store.changed
        if changed is None:
            raise RuntimeError("note_changes() comes before changed_rows()")
        return changed.between(base + first, base + last) - base
