"""Rows that an optimizer moves in every step: as of now when they are read, and stored again when
they have a gradient. Knows rows and steps; not where rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.settings import Settings
from hotrow.kernels.dense_rules import LAST, DenseRule, step_bits
from hotrow.kernels.idle import catch_up
from hotrow.store.ram import Store

_NONE = torch.empty(0, dtype=torch.int64)
_LEAST_CHUNK = 1024


class IdleRows:
    """Catches rows of one width up with the steps that had no gradient for them."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._optimizer, self._layout = settings.optimizer, settings.layout
        self._names, self._dim, self._store = settings.table_names, settings.dim, store
        state = dict(settings.state_columns)
        self._last = state.pop(LAST)
        self._places = [slice(0, settings.dim), *state.values()]

    def now(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the vectors of rows as of now, [n, dim]; `rows` are as they are stored."""
        histories = self._optimizer.histories(self._names, steps_now=False)
        if len(histories) == 1 and self._store.frozen.bits is None:
            return self._caught_up(rows, histories[0][0])[0]
        rows = rows.clone()
        self.catch_up(rows, ids)
        return rows[:, : self._dim].contiguous()

    def catch_up(self, rows: Tensor, ids: Tensor, *, steps_now: bool = False) -> None:
        """Move rows in a buffer from the step of their last gradient to the newest one, or to the
        one before while that one updates them (`steps_now`). Frozen rows rest."""
        histories = self._optimizer.histories(self._names, steps_now=steps_now)
        frozen = self._store.frozen.bits
        moves = None if frozen is None else ~self._store.frozen.among(ids)
        if len(histories) == 1 and moves is None:
            self._write(self._caught_up(rows, histories[0][0]), rows)
            return
        tables = self._layout.table_of(ids)
        for history, places in histories:
            mine = torch.isin(tables, torch.tensor(places, device=ids.device))
            if moves is not None:
                mine &= moves
            index = mine.nonzero().squeeze(1)
            if len(index):
                part = rows[index]
                self._write(self._caught_up(part, history), part)
                rows[index] = part

    def _caught_up(self, rows: Tensor, history: Any) -> list[Tensor]:
        """Return copies of the weights and the state of rows, as of the end of a history."""
        copies = [
            rows[:, place].clone(memory_format=torch.contiguous_format) for place in self._places
        ]
        rule: Any = self._optimizer.rule
        last = step_bits(rows[:, self._last])[:, 0]
        catch_up(rule, copies[0], copies[1:], last, history.tables())
        return copies

    def _write(self, values: list[Tensor], rows: Tensor) -> None:
        for place, piece in zip(self._places, values, strict=True):
            rows[:, place] = piece

    def note_now(self, rows: Tensor, ids: Tensor, step: int | None = None) -> None:
        """Let rows in a buffer be as of a step; None: of the newest."""
        steps = torch.tensor(self.steps, dtype=torch.int32)
        if step is not None:
            steps.fill_(step)
        last = steps[self._layout.table_of(ids).cpu()].to(rows.device)
        step_bits(rows[:, self._last]).copy_(last.unsqueeze(1))

    @property
    def steps(self) -> Sequence[int]:
        return [self._optimizer.steps_of(name) for name in self._names]


def rows_now(group: Any, ids: Tensor) -> Tensor:
    """Return rows of a group with their state, each given once, as of the newest step."""
    rows: Tensor = group.gather(ids, out=torch.empty(len(ids), group.width))
    if group.idle is not None:
        group.idle.catch_up(rows, ids)
        group.idle.note_now(rows, ids)
    return rows


def freeze(group: Any, ids: Any) -> None:
    """Freeze these rows of a group, and no others; None: none, and forget the bits."""
    if group.idle is not None:
        _store(group, torch.cat([group.store.frozen.ids(), _NONE if ids is None else ids]))
    group.freeze(ids)


def advance(groups: Sequence[Any]) -> None:
    """Store all rows as of the newest step."""
    for group in groups:
        if group.idle is not None and any(group.idle.steps):
            _store(group, torch.arange(group.layout.num_rows))


def advance_frozen(groups: Sequence[Any]) -> None:
    """Store frozen rows as of the newest step: who loads them elsewhere has frozen none."""
    for group in groups:
        if group.idle is not None:
            _store(group, group.store.frozen.ids())


def _store(group: Any, ids: Tensor) -> None:
    """Store rows as of the newest step."""
    for part in ids.unique().split(max(int(group.chunk_rows), _LEAST_CHUNK)):
        if len(part):
            group.scatter(part, rows_now(group, part))


def idle_rows(settings: Settings, store: Store) -> IdleRows | None:
    """Return what catches rows up; None: the rule moves no row that has no gradient."""
    return IdleRows(settings, store) if isinstance(settings.optimizer.rule, DenseRule) else None
