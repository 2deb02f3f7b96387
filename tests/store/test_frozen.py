"""Frozen rows are those that were named last, at an address that captured steps may keep."""

from __future__ import annotations

import torch

from hotrow.store.frozen import FrozenRows

CPU = torch.device("cpu")
ALL = torch.arange(100)


def frozen_in(rows: FrozenRows) -> list[int]:
    moves = rows.moving(ALL)
    return [] if moves is None else ALL[~moves].tolist()


def test_rows_are_frozen_until_others_are_named() -> None:
    rows = FrozenRows(100, CPU)
    assert rows.moving(ALL) is None
    rows.freeze(torch.tensor([0, 31, 32, 99]))
    assert frozen_in(rows) == [0, 31, 32, 99]
    bits = rows.bits
    rows.freeze(torch.tensor([5]))
    assert frozen_in(rows) == [5]
    rows.freeze(torch.tensor([], dtype=torch.int64))
    assert frozen_in(rows) == []
    assert rows.bits is bits
    rows.freeze(None)
    assert rows.bits is None
    assert rows.moving(ALL) is None


def test_padding_rows_never_move() -> None:
    rows = FrozenRows(100, CPU, untrained=[7, 40])
    assert frozen_in(rows) == [7, 40]
    rows.freeze(torch.tensor([7, 8]))
    assert frozen_in(rows) == [7, 8, 40]
    trained = rows.trained(ALL)
    assert trained is not None
    assert ALL[~trained].tolist() == [7, 40]
