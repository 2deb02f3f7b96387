"""Which rows are hot, by counts that users give or by a guess."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
from hotrow.engine.profile import byte_parts, check_profile, hottest, small_tables
from hotrow.inputs.tables import WidthGroup, group_by_width

Table = hotrow.EmbeddingBagConfig


def group(*sizes: int) -> WidthGroup:
    (only,) = group_by_width([Table(f"t{i}", n, 4, [f"f{i}"]) for i, n in enumerate(sizes)])
    return only


def two_widths(
    rows: tuple[int, int] = (1000, 1000),
    dims: tuple[int, int] = (8, 8 + 1),
    features: tuple[int, int] = (1, 1),
) -> list[WidthGroup]:
    """A table of each width, t0 and t1."""
    return group_by_width(
        [
            Table(f"t{i}", rows[i], dims[i], [f"f{i}.{n}" for n in range(features[i])])
            for i in range(2)
        ]
    )


def ids_of(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# -- hottest -----------------------------------------------------------------------------


HOTTEST: dict[str, tuple[dict[str, Any], tuple[int, ...], int, list[int]]] = {
    "of all tables": ({"t0": ids_of(5, 0, 9), "t1": ids_of(7, 1)}, (3, 2), 4, [2, 3, 0, 4]),
    "no more than the limit": ({"t0": torch.arange(100)}, (100,), 3, [99, 98, 97]),
    "not those never used": ({"t0": ids_of(0, 3, 0, 2)}, (4,), 10, [1, 3]),
    "used alike, in order": ({"t0": torch.ones(50)}, (50,), 50, list(range(50))),
    "only some named": ({"t1": (ids_of(40, 7, 9), ids_of(2, 8, 0))}, (10, 50), 10, [17, 50]),
    # Neighbours in int64 that are one number in float32.
    "large counts": ({"t0": ids_of(2**40, 2**40 + 1)}, (2,), 1, [1]),
    "a table without counts": ({"t1": ids_of(1, 1)}, (3, 2), 10, [3, 4]),
}


@pytest.mark.parametrize("name", HOTTEST)
def test_the_hottest_rows_come_first(name: str) -> None:
    profile, sizes, limit, expected = HOTTEST[name]
    assert hottest(profile, group(*sizes), limit=limit).tolist() == expected


@pytest.mark.parametrize(("limit", "ids"), [(5, [4, 5, 6, 7, 8]), (4, [4, 5]), (1, []), (0, [])])
def test_small_tables_are_taken_whole_and_smallest_first(limit: int, ids: list[int]) -> None:
    found = small_tables(group(4, 2, 3), limit=limit)
    assert (found.tolist(), found.dtype) == (ids, torch.int64)


# -- sharing a budget --------------------------------------------------------------------


def counts(hot: float, rows: int = 1000) -> torch.Tensor:
    return hot / torch.arange(1, rows + 1)


ALIKE = {"t0": torch.ones(1000), "t1": torch.ones(1000)}
USED = {"t0": counts(10), "t1": counts(1000)}
NARROW = two_widths(dims=(8, 64))
SMALL = two_widths(rows=(10, 10**6))
PARTS: dict[str, tuple[Any, Any, int, Any, Callable[[float, float], bool]]] = {
    "used more": (two_widths(), [32, 36], 5000, USED, lambda cold, hot: hot > 5 * cold),
    "used alike, and narrower": (NARROW, [32, 256], 5000, ALIKE, lambda x, wide: x > 5 * wide),
    "with more features": (
        two_widths(features=(1, 8)), [32, 36], 5000, None, lambda few, many: many > 4 * few
    ),
    "narrower, in rows": (
        NARROW, [32, 256], 20_000, None, lambda narrow, wide: narrow / 32 > 4 * wide / 256
    ),
    "no more than its rows": (SMALL, [32, 36], 1_000_000, None, lambda x, large: x < 0.03),
    "a little though never used": (
        two_widths(), [32, 36], 5000, {"t0": counts(100)}, lambda used, rest: 0.01 < rest < used
    ),
    "no counts at all": (two_widths(), [32, 36], 5000, {}, lambda one, other: one > 0 < other),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_width_gets_the_part_that_its_rows_are_worth(name: str) -> None:
    groups, sizes, budget, profile, is_right = PARTS[name]
    parts = byte_parts(groups, sizes, budget, profile)
    assert sum(parts) == pytest.approx(1)
    assert is_right(*parts)
    assert byte_parts([group(10, 20)], [16], 1000, None) == [1.0]


def test_a_hotter_width_gets_more_slots_in_a_collection() -> None:
    tables = [Table("a", 2000, 8, ["f"]), Table("b", 2000, 9, ["g"])]
    profile = {"a": counts(1, 2000), "b": counts(500, 2000)}
    embedding = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(), 30_000, profile=profile)
    cold, hot = (each.memory.pad.num_slots for each in embedding.groups)
    assert hot > 2 * cold


def test_the_hottest_rows_are_pinned_before_the_first_batch() -> None:
    uses = torch.zeros(2000)
    uses[[7, 1900, 30]] = ids_of(3, 2, 1).float()
    embedding = hotrow.EmbeddingBagCollection(
        [Table("a", 2000, 8, ["f"])], hotrow.SGD(), 30_000, profile={"a": uses}, strategy="static"
    )
    embedding(ids_of(5)[:, None])
    (rows,) = embedding.groups
    assert rows.memory.pad.row_of_slot[rows.planner.pinned_slots].tolist() == [7, 1900, 30]


# -- bad profiles ------------------------------------------------------------------------

TABLES = [Table("a", 10, 4, ["f"]), Table("b", 20, 4, ["g"])]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({"c": torch.ones(10)}, "the profile names table 'c'; there are a, b"),
        ({"b": torch.ones(10)}, r"profile of table 'b': \[10\] counts for 20 rows"),
        ({"a": torch.ones(10, 1)}, r"profile of table 'a': \[10, 1\] counts for 10 rows"),
        ({"a": (ids_of(1, 2), ids_of(1))}, "profile of table 'a': .* of one length"),
        ({"a": (ids_of(1, 10), ids_of(1, 1))}, "profile of table 'a': .* each of its 10 rows"),
        # A row given twice would be pinned twice, a negative one would pin another table's row.
        ({"a": (ids_of(-1, 2), ids_of(1, 1))}, "profile of table 'a'"),
        ({"a": (ids_of(2, 2), ids_of(1, 1))}, "profile of table 'a'"),
        ({"a": [1.0] * 10}, "profile of table 'a'"),
    ],
)
def test_a_profile_of_other_tables_is_refused(profile: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_profile(profile, TABLES)


@pytest.mark.parametrize("profile", [[torch.ones(10), torch.ones(20)], torch.ones(10), "hot"])
def test_a_profile_that_is_no_dict_is_refused(profile: Any) -> None:
    with pytest.raises(TypeError, match="profile must be a dict from a table's name to a tensor"):
        hotrow.EmbeddingBagCollection(TABLES, hotrow.SGD(), 9000, profile=profile)


def test_a_collection_refuses_a_bad_profile() -> None:
    with pytest.raises(ValueError, match="the profile names table 'c'"):
        hotrow.EmbeddingBagCollection(TABLES, hotrow.SGD(), 9000, profile={"c": torch.ones(10)})


def test_a_good_profile_in_both_forms_is_accepted() -> None:
    check_profile({"a": torch.ones(10), "b": (ids_of(0, 19), ids_of(4, 2))}, TABLES)


# -- on disk -----------------------------------------------------------------------------


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    given = {
        "a": torch.tensor([0, 5, 0, 2.5]),
        "b": (torch.tensor([7, 3]), torch.tensor([0, 2**40])),
        "never read": torch.zeros(3),
    }
    hotrow.save_profile(tmp_path / "p", given, facts={"made": "by hand"})
    found = hotrow.load_profile(tmp_path / "p")
    plain = {name: (rows.tolist(), uses.tolist()) for name, (rows, uses) in found.items()}
    assert plain == {"a": ([1, 3], [5, 2.5]), "b": ([3], [2**40]), "never read": ([], [])}
    check_profile(found, [Table(name, 8, 4, [name]) for name in given])


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no profile.json; `hotrow profile DATA --out`"):
        hotrow.load_profile(tmp_path)
    hotrow.save_profile(tmp_path, {"a": torch.ones(4)})
    counts, manifest = tmp_path / "counts.bin", tmp_path / "profile.json"
    text, whole = manifest.read_text(), counts.read_bytes()
    counts.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(ValueError, match="its SHA-256 differs; profile the data again"):
        hotrow.load_profile(tmp_path)
    counts.write_bytes(whole)
    for old, new, message in (
        ('"entries": 4', '"entries": 5', "5 counts are not 64 bytes"),
        ('"entries": 4', '"entries": -4', "entries: expected a whole number"),
        ('"format": 1', '"format": 9', "not a profile of format 1"),
        ("counts.bin", "../counts.bin", "is no file inside the folder"),
    ):
        manifest.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            hotrow.load_profile(tmp_path)
