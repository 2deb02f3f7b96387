"""Budgets are read as users write them, and nothing handed out exceeds them."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotrow
from hotrow.store.budget import HASH_BYTES, SLOT_STATE_BYTES, share_out, smallest_budget
from hotrow.support.messages import apart, settings_written
from hotrow.support.units import parse_bytes, show_bytes, write_budget

# -- what users write --------------------------------------------------------------------


READ = {
    4_000_000: 4_000_000, 1: 1, 1e6: 1_000_000, "4000000": 4_000_000, "4_000_000": 4_000_000,
    "512 B": 512, "5B": 5, "  2 kB ": 2000, "1.5 k": 1500, "512M": 512 * 10**6, "1e6": 1_000_000,
    "2.5E+3 kB": 2_500_000, "4GB": 4 * 10**9, "10G": 10 * 10**9, "2T": 2 * 10**12,
    "1.5 MiB": 3 * 2**19, "4GiB": 4 * 2**30, "4gib": 4 * 2**30, "10Gi": 10 * 2**30,
    "0.5TiB": 2**39, "10%": 200, "12.5 %": 250, "100%": 2000,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), READ.items())
def test_a_budget_is_read_as_written(text: Any, value: int) -> None:
    assert parse_bytes(text, total=2000) == value


UNREAD = "cannot read {!r} as a number of bytes; write .*'512MiB', '4GB'.*'4GiB'"
REFUSED: list[tuple[Any, str]] = [
    *((text, UNREAD.format(text)) for text in ("4 gigs", "", " ", "GiB", "-1", "4Gb/s", "four")),
    *((text, UNREAD.format(text)) for text in ("4GiB extra", "1.2.3", "1e", "1e400", True, None)),
    (0.05, "write '5%'"),
    (1.0, "write '100%'"),
    (1.5, "1.5 is not a whole number of bytes; write"),
    (float("inf"), "inf is not a whole number of bytes"),
    (float("nan"), "nan is not a whole number of bytes"),
    *((x, f"must be above zero bytes, got {x!r}") for x in (0, -1, "0", "0 GiB", "0.4", "0%")),
    *(
        (text, rf"'{text}' has no unit; write '{text.strip()}GB' .*'{text.strip()}%'")
        for text in ("5", " 10 ", "512", "1.5", "8_192", "99999")
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_no_number_of_bytes_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text, total=2000)


def test_without_a_total_no_share_is_read_or_advised() -> None:
    with pytest.raises(ValueError, match="cannot read '10%'"):
        parse_bytes("10%")
    with pytest.raises(ValueError, match=r"'5GiB' \(5 \* 2\*\*30\), or '5B'"):
        parse_bytes("5")


def test_different_numbers_of_bytes_look_different() -> None:
    sizes = [1000, 1536, 2**30 - 1, 2**30, 5 * 2**40]
    for one, other in [(3 * 2**30, 4 * 2**30), *((size, size + 1) for size in sizes)]:
        assert show_bytes(one, beside=other) != show_bytes(other, beside=one)
        assert show_bytes(one, beside=one) == show_bytes(one)
    assert show_bytes(3 * 2**30, beside=4 * 2**30) == "3.0 GiB"


def test_different_numbers_look_different() -> None:
    assert apart(0.5, 0.25) == ["0.5", "0.25"]
    assert apart(1e-3, 1e-3 + 1e-9, digits=2) == ["0.001", "0.001000001"]
    assert apart(0.95, 0.946, digits=0, kind="%") == ["95.0%", "94.6%"]
    assert apart(0.7, 0.7, digits=4, kind="f") == ["0.7000", "0.7000"]
    assert len(set(apart(1.0, 1.0 + 2**-52))) == 2
    assert apart(float("nan"), float("nan")) == ["nan", "nan"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.00 TiB")],
)
def test_bytes_are_shown_for_people(value: int, text: str) -> None:
    assert show_bytes(value) == text


# -- sharing out -------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Groups of tables and a budget that is at least the smallest for them."""
    groups = draw(st.integers(1, 4))
    row_bytes = [4 * draw(st.integers(1, 400)) for _ in range(groups)]
    num_rows = [draw(st.sampled_from([1, 7, 33, 1000, 10**6, 10**9])) for _ in range(groups)]
    weights = [draw(st.integers(1, 1000)) for _ in range(groups)]
    smallest = smallest_budget(row_bytes)
    return {
        "budget_bytes": smallest + draw(st.integers(0, 10) | st.integers(0, 10**11)),
        "row_bytes": row_bytes,
        "num_rows": num_rows,
        "parts": [weight / sum(weights) for weight in weights],
        "buffer_part": draw(st.sampled_from([1 / 16, 1 / 4])),
    }


def bytes_of(request: dict[str, Any], budget: hotrow.Budget) -> int:
    """Slots with their state and map, buffers, and the window of ids."""
    total = budget.window_bytes
    for share, row, rows in zip(
        budget.shares, request["row_bytes"], request["num_rows"], strict=True
    ):
        map_bytes = 4 * rows if share.dense_map else HASH_BYTES * share.slots
        total += share.slots * (row + SLOT_STATE_BYTES) + map_bytes + share.buffer_rows * row
    return total


@settings(deadline=None, max_examples=100)
@given(requests())
def test_what_is_shared_out_is_within_the_budget(request: dict[str, Any]) -> None:
    budget = share_out(**request)
    assert bytes_of(request, budget) <= request["budget_bytes"]
    for share, rows in zip(budget.shares, request["num_rows"], strict=True):
        assert min(24, rows) <= share.slots <= rows  # of 32, the buffer takes a quarter at most
        assert share.buffer_rows >= 32


@settings(deadline=None, max_examples=40)
@given(requests())
def test_with_room_for_all_rows_every_row_gets_a_slot(request: dict[str, Any]) -> None:
    need = sum(
        rows * (2 * size + SLOT_STATE_BYTES + HASH_BYTES)
        for rows, size in zip(request["num_rows"], request["row_bytes"], strict=True)
    )
    request["budget_bytes"] = 2 * need + smallest_budget(request["row_bytes"])
    shares = share_out(**request).shares
    assert [share.slots for share in shares] == request["num_rows"]


def test_what_a_small_group_leaves_reaches_the_others() -> None:
    # The first group has ten rows; half of the budget would be far more than it needs.
    both = share_out(
        1_000_000, row_bytes=[64, 64], num_rows=[10, 10**6], parts=[0.5, 0.5], buffer_part=1 / 16
    )
    alone = share_out(1_000_000, row_bytes=[64], num_rows=[10**6], parts=[1.0], buffer_part=1 / 16)
    assert both.shares[0].slots == 10
    assert both.shares[1].slots > 0.98 * alone.shares[0].slots


def test_a_larger_part_gives_more_slots() -> None:
    shares = share_out(
        1_000_000, row_bytes=[64, 64], num_rows=[10**6] * 2, parts=[0.8, 0.2], buffer_part=1 / 16
    ).shares
    assert shares[0].slots > 3 * shares[1].slots


# -- budgets of collections --------------------------------------------------------------

TABLES = [
    hotrow.EmbeddingBagConfig("a", 3000, 8, ["f"]),
    hotrow.EmbeddingBagConfig("b", 40, 8, ["g"]),
    hotrow.EmbeddingBagConfig("c", 2000, 3, ["h"]),
]


def collection(budget: Any, strategy: str = "lookahead") -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(TABLES, hotrow.Adagrad(), budget, strategy=strategy)


@pytest.mark.parametrize("strategy", ["lookahead", "scratchpipe"])  # a small buffer, and a large
@pytest.mark.parametrize("budget", [9000, 40_000, "10%", "60%", "300%"])
def test_a_collections_memory_is_within_its_budget(budget: Any, strategy: str) -> None:
    embedding = collection(budget, strategy)
    granted = parse_bytes(budget, total=embedding.bytes_total)
    assert sum(embedding.memory().values()) <= granted


@pytest.mark.parametrize("budget", [9000, "10%", "60%"])
def test_memory_counts_what_lies_in_fast_memory(budget: Any) -> None:
    embedding = collection(budget)
    for batch in hotrow.ahead([torch.randint(40, (9, 3)) for _ in range(40)], embedding):
        embedding(batch).values().sum().backward()
    held = embedding._rows.window_bytes
    for group in embedding.groups:
        planner, pad = group.planner, group.memory.pad
        tensors = [pad.slots, pad.row_of_slot, planner.last_use, planner.next_use, planner.uses]
        tensors += [planner.pinned_slots, planner._queue, planner._queue_use, planner._queue_next]
        tensors += [group.memory.buffer.memory]
        held += pad.map.num_bytes + sum(each.numel() * each.element_size() for each in tensors)
    counted = sum(embedding.memory().values())
    assert held <= counted <= held + 6 * embedding.num_slots  # as if all that may be pinned were


def test_a_budget_far_beyond_the_tables_is_not_taken() -> None:
    embedding = collection("10GiB")
    assert embedding.num_slots == embedding.num_rows
    # Beside rows: slot state, a map, a buffer that holds all of them at most, ids.
    assert sum(embedding.memory().values()) < 4 * embedding.bytes_total
    for batch in hotrow.ahead([torch.randint(40, (9, 3)) for _ in range(40)], embedding):
        embedding(batch).values().sum().backward()
    embedding.check()


WIDE = hotrow.EmbeddingBagConfig("wide", 700, 40, ["w"])
LONG = hotrow.EmbeddingBagConfig("long", 5000, 16, ["l"])


@pytest.mark.thinned(5)
@pytest.mark.parametrize("strategy", ["lru", "lookahead"])
@pytest.mark.parametrize("budget", [20, 55, 101])
@pytest.mark.parametrize("rows", [600, 2_000, 5_000])
@pytest.mark.parametrize("tables", [[LONG], [WIDE, LONG]], ids=["one width", "two widths"])
def test_the_budget_that_would_hold_a_batch_holds_it(
    tables: list[Any], rows: int, budget: float, strategy: str
) -> None:
    ids = torch.arange(rows).unsqueeze(1)
    batch = torch.cat([ids % 50, ids], dim=1) if len(tables) == 2 else ids

    def told(given: str) -> list[str]:
        embedding = hotrow.EmbeddingBagCollection(tables, hotrow.AdamW(), given, strategy=strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each in hotrow.ahead([batch, batch + 0, batch + 0], embedding):
                embedding(each).values().sum().backward()
        return [str(each.message) for each in caught]

    first = told(f"{budget}%")
    if not first:
        return  # it fits as it is
    if first[0].endswith(" strategy='all-fast' would hold it"):
        assert told("80%") != []
        return
    found = re.search(r" budget='(\d+)%' would hold it$", first[0])
    assert found is not None, first
    assert budget < int(found[1]) < 90
    assert told(f"{found[1]}%") == []
    assert told(f"{int(found[1]) * 0.9}%") != []  # and not much less would


def learn(embedding: Any, batches: list[torch.Tensor]) -> int:
    """Gives the batches that were known when the last one was trained."""
    planner = embedding.groups[0].planner
    for each in (source := hotrow.ahead(batches, embedding)):
        embedding(each).values().sum().backward()
        known = len(planner.window)
        if source.position() == 40:
            break
    return known


def test_batches_in_flight_that_share_rows_need_no_room_twice() -> None:
    """Of 1,000 rows nine in ten are in every batch."""
    draw = torch.Generator().manual_seed(0)

    def batch() -> torch.Tensor:
        others = torch.randperm(4000, generator=draw)[:100] + 1000
        return torch.cat([torch.arange(900), others]).unsqueeze(1)

    embedding = hotrow.EmbeddingBagCollection([LONG], hotrow.SGD(), "10%")
    with pytest.warns(UserWarning, match="would hold it") as caught:
        learn(embedding, [batch() for _ in range(5)])
    assert embedding.traffic().chunked_batches == 5
    found = re.search(r"budget='(\d+)%' would", str(caught[0].message))
    assert found is not None
    assert int(found[1]) < 42  # two batches without a common row would take 56
    last = re.fullmatch(r"budget='(\d+)%' would hold them", embedding.remedy_for_chunks())
    assert last is not None
    assert int(last[1]) < 42  # though no batch comes after the last one
    larger = hotrow.EmbeddingBagCollection([LONG], hotrow.SGD(), f"{found[1]}%")
    learn(larger, [batch() for _ in range(20)])
    assert larger.remedy_for_chunks() == ""


def test_a_budget_is_advised_as_it_was_given() -> None:
    embedding = hotrow.EmbeddingBagCollection([LONG], hotrow.SGD(), "60kB", strategy="lru")
    with pytest.warns(UserWarning, match=r"\. budget='\d+KiB' would hold it$"):
        embedding(torch.arange(2000).unsqueeze(1))
    embedding = hotrow.EmbeddingBagCollection([LONG], hotrow.SGD(), "20%", strategy="lru")
    with (
        settings_written(lambda name, value: f"--set embedding.{name}={value}"),
        pytest.warns(UserWarning, match=r"--set embedding\.budget=\d+% would hold it$"),
    ):
        embedding(torch.arange(2000).unsqueeze(1))


@pytest.mark.parametrize(
    ("size", "total", "text"),
    [
        (100, None, "0.098KiB"), (5000, None, "4.9KiB"), (3 << 20, None, "3MiB"),
        ((641 << 20) - 5, None, "641MiB"), (3 << 29, None, "1.5GiB"), (3 << 40, None, "3072GiB"),
        (311, 1000, "32%"), (31, 1000, "3.1%"), (1, 3000, "0.034%"),
    ],
)  # fmt: skip
def test_a_budget_that_was_written_is_read_as_no_fewer_bytes(
    size: int, total: int | None, text: str
) -> None:
    assert write_budget(size, total=total) == text
    assert size - 1 <= parse_bytes(text, total=total) <= 1.1 * size


def test_many_batches_in_chunks_are_not_looked_far_ahead_for() -> None:
    """A plan of each would rank all that is known, and in vain."""
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(5000, (900, 1), generator=draw) for _ in range(60)]
    embedding = hotrow.EmbeddingBagCollection([LONG], hotrow.SGD(), "10%")
    with pytest.warns(UserWarning, match="in chunks"):
        known = learn(embedding, batches)
    assert embedding.traffic().chunked_batches >= 40
    assert known <= 3


def by_hand(slots: int, buffer: int, strategy: str, **options: Any) -> Any:
    budget = hotrow.Budget((hotrow.Share(slots, buffer, True),), window_bytes=1000)
    return hotrow.EmbeddingBagCollection([LONG], hotrow.SGD(), budget, strategy=strategy, **options)


def test_pinned_rows_that_are_in_the_way_are_named() -> None:
    hot = {"long": (torch.arange(100), torch.ones(100))}
    embedding = by_hand(200, 200, "static", profile=hot)
    embedding(torch.arange(4000, 4020).unsqueeze(1))  # pins the hundred
    with pytest.warns(UserWarning, match="Pinned rows give way to the next ones of its size"):
        embedding(torch.arange(4000, 4190).unsqueeze(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedding(torch.arange(4200, 4390).unsqueeze(1))
    assert embedding.traffic().chunked_batches == 1


def test_slots_given_by_hand_get_advice_in_slots() -> None:
    with pytest.warns(UserWarning, match=r"correct but slow\. 100 slots would hold it$") as caught:
        by_hand(80, 32, "lru")(torch.arange(100).unsqueeze(1))
    assert caught[0].filename == __file__
    embedding = by_hand(100, 200, "lookahead")  # a larger batch in flight counts
    batches = [torch.arange(0, 90).unsqueeze(1), torch.arange(90, 130).unsqueeze(1)]
    with pytest.warns(UserWarning, match=r"a batch of 40 .* 130 slots would hold it"):
        list(hotrow.ahead(batches, embedding))


def smallest_in(error: BaseException) -> int:
    found = re.search(r"\(([0-9,]+) bytes\)", str(error))
    assert found is not None
    return int(found[1].replace(",", ""))


def test_the_error_names_the_smallest_budget_and_that_one_trains() -> None:
    with pytest.raises(ValueError, match="too small") as caught:
        collection(100)
    smallest = smallest_in(caught.value)
    embedding = collection(smallest)
    for _ in range(3):
        embedding(torch.randint(40, (50, 3))).values().sum().backward()
    embedding.check()
    with pytest.raises(ValueError, match="too small") as caught:
        collection(smallest - 1)
    sizes = re.search(r"budget of (.+) is too small; .* here is (.+) \(", str(caught.value))
    assert sizes is not None
    assert sizes[1] != sizes[2]  # though they differ by a byte


def test_what_a_collection_takes_for_a_budget() -> None:
    embedding = collection("10%")
    assert embedding.bytes_total == 4 * (3040 * 16 + 2000 * 6)  # rows with their state
    used = sum(embedding.memory().values())
    assert 0.09 * embedding.bytes_total < used < 0.11 * embedding.bytes_total
    assert collection(None, "all-fast").num_slots == 5040
    for budget, message in (
        (None, r"strategy 'lookahead' needs a budget.*budget='10%'"),
        ("5", "'5' has no unit; write '5GB'"),
        ("4 gigs", "cannot read"),
        (True, "cannot read"),
    ):
        with pytest.raises(ValueError, match=message):
            collection(budget)
