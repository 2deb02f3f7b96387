"""Row -> slot, in both forms, says what a dict would say, however rows come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.engine.scratchpad import FREE, HashMap, Scratchpad

CPU = torch.device("cpu")
SLOTS = 50
FEW_ROWS = 400


def pad_of(kind: str, slots: int = SLOTS, rows: int = FEW_ROWS) -> Scratchpad:
    return Scratchpad(slots, 2, rows, CPU, dense_map=kind == "dense")


def alike(count: int, *, stride: int = 1) -> Tensor:
    """Ids, `stride` apart, that a hash of SLOTS slots wants to put into one place."""
    ids = torch.arange(0, 4 * SLOTS * stride * (count + 60), stride)
    return ids[PROBE._probes(ids)[0] == 7][:count]


PROBE = HashMap(torch.full((SLOTS,), FREE))
PLACES = PROBE.num_bytes // 4

# Families of ids that a hash may find hard, as many as a churn needs.
FAMILIES: dict[str, Callable[[int], Tensor]] = {
    "consecutive": lambda n: torch.arange(n),
    "scattered": lambda n: torch.randperm(10 * n)[:n] * 997,
    "multiples of the size": lambda n: torch.arange(n) * PLACES,
    "multiples of 2**20": lambda n: torch.arange(n) << 20,
    "near 2**40": lambda n: 2**40 - n // 2 + torch.arange(n),
    "equal in 32 bits": lambda n: (torch.arange(n) << 32) + 5,
    "one home for all": alike,
    "one home and one stride for all": lambda n: alike(n, stride=PLACES - 1),
}


def churn(pad: Scratchpad, ids: Tensor, steps: int) -> dict[int, int]:
    """Replace random slots' rows; compare every lookup with a dict on the way."""
    twin: dict[int, int] = {}
    for _ in range(steps):
        slots = torch.randperm(pad.num_slots)[: int(torch.randint(1, pad.num_slots, ()))]
        absent = ids[torch.tensor([row not in twin for row in ids.tolist()])]
        entering = absent[torch.randperm(absent.numel())[: slots.numel()]]
        slots = slots[: entering.numel()]
        leaving = pad.replace(slots, entering)
        held = {slot: row for row, slot in twin.items()}
        assert leaving.tolist() == [held.get(slot, FREE) for slot in slots.tolist()]
        for row in leaving.tolist():
            twin.pop(row, None)
        twin.update(zip(entering.tolist(), slots.tolist(), strict=True))
        assert pad.map.lookup(ids).tolist() == [twin.get(row, FREE) for row in ids.tolist()]
    return twin


CHURNS = {name: ("hash", SLOTS, lambda ids=ids: ids(150), 80) for name, ids in FAMILIES.items()}
CHURNS["dense"] = ("dense", SLOTS, lambda: torch.randperm(FEW_ROWS)[:150], 80)
for few in (2, 3, 4, 5):
    CHURNS[f"{few} slots"] = ("hash", few, lambda: torch.arange(9), 200)


@pytest.mark.parametrize("name", CHURNS)
def test_a_map_agrees_with_a_dict_through_long_churn(name: str) -> None:
    kind, slots, ids, steps = CHURNS[name]
    pad = pad_of(kind, slots=slots)
    churn(pad, ids(), steps)
    pad.check()


@pytest.mark.parametrize("family", ["consecutive", "one home and one stride for all"])
def test_a_full_hash_whose_rows_are_all_replaced_again_and_again_stays_right(family: str) -> None:
    pad = pad_of("hash")
    ids = FAMILIES[family](2 * SLOTS)
    halves = (ids[:SLOTS], ids[SLOTS:])
    for turn in range(20):
        pad.replace(torch.randperm(SLOTS), halves[turn % 2])
        pad.check()
        assert bool((pad.map.lookup(halves[(turn + 1) % 2]) == FREE).all())


def test_tombstones_never_pass_a_tenth_of_the_places_for_longer_than_one_insert() -> None:
    pad = pad_of("hash")
    pad.replace(torch.arange(SLOTS), torch.arange(SLOTS))
    most = 0
    for row in range(SLOTS, 6 * SLOTS):
        pad.replace(torch.tensor([row % SLOTS]), torch.tensor([row]))
        places = pad.map._places
        most = max(most, int((places == HashMap.TOMBSTONE).sum()))
        assert int((places == HashMap.EMPTY).sum()) > 0, "a lookup of an absent row would not end"
    assert 0 < most <= PLACES // 10 + 1


def test_a_rebuild_forgets_no_row() -> None:
    pad = pad_of("hash")
    pad.replace(torch.arange(SLOTS), torch.arange(SLOTS) * 3)
    pad.map._rebuild()
    assert torch.equal(pad.map.lookup(torch.arange(SLOTS) * 3), torch.arange(SLOTS))
    assert not bool((pad.map._places == HashMap.TOMBSTONE).any())


@pytest.mark.parametrize("kind", ["dense", "hash"])
def test_nothing_looked_up_or_replaced_changes_nothing(kind: str) -> None:
    pad, none = pad_of(kind), torch.empty(0, dtype=torch.int64)
    assert bool((pad.map.lookup(torch.arange(FEW_ROWS)) == FREE).all())
    assert pad.map.lookup(none).shape == (0,)
    pad.replace(torch.arange(5), torch.arange(5))
    assert pad.replace(none, none).numel() == 0
    assert pad.map.lookup(torch.arange(6)).tolist() == [0, 1, 2, 3, 4, FREE]


@pytest.mark.parametrize("slots", [50, 1000, 100_000])
def test_a_map_costs_four_bytes_for_every_row_or_eight_for_every_slot(slots: int) -> None:
    assert pad_of("dense").map.num_bytes == 4 * FEW_ROWS
    assert 7.5 * slots < pad_of("hash", slots=slots).map.num_bytes <= 8 * slots


# -- check() notices ---------------------------------------------------------------------


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a row the map has lost": (lambda pad: pad.map.remove(torch.tensor([8])), "disagree"),
    "an exchanged row": (lambda pad: pad.row_of_slot[3].fill_(399), "disagree"),
    "a row in two slots": (lambda pad: pad.row_of_slot[3].copy_(pad.row_of_slot[4]), "two slots"),
    "a padding slot written to": (lambda pad: pad.slots[pad.null_slot, 1].fill_(0.5), "padding"),
    "a map that leads to another slot": (lambda pad: pad.map._slots[8].fill_(5), "disagree"),
    # An entry that outlived its row would be a hit that reads another row's slot.
    "an entry of a row in no slot": (lambda pad: pad.map._slots[399].fill_(5), "disagree"),
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [*(("dense", each) for each in FAULTS), *(("hash", f) for f in [*FAULTS][:4])],
)
def test_check_notices(kind: str, fault: str) -> None:
    (break_it, said), pad = FAULTS[fault], pad_of(kind)
    pad.replace(torch.arange(SLOTS), torch.arange(SLOTS) * 2)
    pad.check()
    break_it(pad)
    with pytest.raises(AssertionError, match=said):
        pad.check()
