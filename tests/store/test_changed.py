"""Rows that were written are told, by whichever device they were noted."""

from __future__ import annotations

import torch

from hotrow.store.changed import ChangedRows

CPU = torch.device("cpu")


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
