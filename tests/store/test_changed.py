"""Rows that were written are told, by whichever device; frozen rows are those named last."""

from __future__ import annotations

import torch

from hotrow.store.changed import ChangedRows, FrozenRows

CPU = torch.device("cpu")
ALL = torch.arange(100)


def test_bits_of_a_device_are_joined_with_those_of_the_host() -> None:
    rows = ChangedRows(100)
    rows.there = rows.bits.clone()  # as on a GPU
    rows.note(torch.tensor([3, 31, 32, 99]))
    rows.bits, rows.there = rows.there, rows.bits
    rows.note(torch.tensor([3, 40]))
    copied = rows.copy()
    for changed in (rows, copied):
        assert changed.between(0, 100).tolist() == [3, 31, 32, 40, 99]
        assert changed.between(31, 40).tolist() == [31, 32]
    rows.clear()
    assert rows.between(0, 100).tolist() == []
    assert copied.between(0, 100).tolist() == [3, 31, 32, 40, 99]


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
