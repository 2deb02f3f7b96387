"""Which samples read hot rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotrow
from builders import no_synchronisation
from hotrow.inputs.batch import Batch, parse
from hotrow.inputs.hotset import HotSet, Places, popular
from hotrow.inputs.tables import feature_order

Table = hotrow.EmbeddingBagConfig
TABLES = [Table("a", 6, 4, ["f", "g"]), Table("b", 5, 8, ["h"], padding_idx=2)]
HOT = {"a": torch.tensor([1, 3]), "b": torch.tensor([0])}


def batch_of(features: Any, tables: Any = TABLES) -> Batch:
    return parse(features, feature_order(tables), None)


def plainly_popular(ids: hotrow.KeyedJaggedTensor, hot: dict[str, set[int]]) -> list[bool]:
    """The definition: a loop over samples, features and ids."""
    table_of = {name: table for table in TABLES for name in table.feature_names}
    ends, values = ids.offsets().tolist(), ids.values().tolist()
    size = (len(ends) - 1) // len(ids.keys())
    found = []
    for sample in range(size):
        lookups = [
            (table_of[key], value)
            for place, key in enumerate(ids.keys())
            if key in table_of
            for value in values[ends[place * size + sample] : ends[place * size + sample + 1]]
        ]
        found.append(all(v in hot[t.name] or v == t.padding_idx for t, v in lookups))
    return found


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_sample_is_popular_if_all_its_rows_are_hot(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 3, 0], [1, 3, 1], [0, 3, 0], [3, 3, 2], [2, 2, 2]], dtype=dtype)
    for batch in (batch_of(ids), Batch(ids, None, ("f", "g", "h"), 5)):  # int64, or as they are
        assert popular(batch, HotSet.of(TABLES, HOT)).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_bags_are_popular_as_their_definition_says(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    keys = ["h", "unused", "f", "g"]  # neither the collection's order nor its features alone
    lengths = torch.randint(0, 3, (4 * 9,), generator=draw)
    values = torch.randint(0, 5, (int(lengths.sum()),), generator=draw)
    ids = hotrow.KeyedJaggedTensor(keys, values, lengths=lengths)
    is_hot = torch.rand(11, generator=draw) < 0.7
    hot = HotSet(Places(TABLES), is_hot)
    sets = {name: set(hot.rows(name).tolist()) for name in ("a", "b")}
    assert popular(batch_of(ids), hot).tolist() == plainly_popular(ids, sets)


@pytest.mark.parametrize("size", [0, 2])
def test_empty_bags_read_nothing(size: int) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    empty = hotrow.KeyedJaggedTensor(["f", "g", "h"], nothing, lengths=torch.zeros(3 * size).long())
    assert popular(batch_of(empty), HotSet.none(TABLES)).tolist() == [True] * size
    if not size:
        assert popular(batch_of(nothing.view(0, 3)), HotSet.none(TABLES)).shape == (0,)


@pytest.mark.parametrize("bad", [-1, 6, 2**40, -(2**63)])
def test_an_id_that_no_table_has_makes_its_sample_cold(bad: int) -> None:
    """And reads neither another table's row nor other memory."""
    everything = HotSet(Places(TABLES), torch.ones(11, dtype=torch.bool))
    assert popular(batch_of(torch.tensor([[bad, 1, 0], [0, 1, 0]])), everything).tolist() == [
        False,
        True,
    ]


def test_values_behind_the_last_offset_are_nobodys() -> None:
    """As in a batch with room to spare, whose launches must not depend on how many are taken."""
    values = torch.tensor([1, 3, 0, 5, 99, -7])
    batch = Batch(values, torch.tensor([0, 1, 2, 3]), ("f", "g", "h"), 1, (0, 1, 2, 3))
    assert popular(batch, HotSet.of(TABLES, HOT)).tolist() == [True]


def test_neighbours_above_what_float32_tells_apart_are_told_apart() -> None:
    rows = 2**24 + 4
    tables = [Table("small", 3, 4, ["f"]), Table("large", rows, 4, ["g"])]
    hot = HotSet.of(tables, {"small": torch.tensor([0]), "large": torch.tensor([2**24 + 1])})
    ids = torch.tensor([[0, 2**24], [0, 2**24 + 1], [0, 2**24 + 2], [1, 2**24 + 1]])
    assert popular(batch_of(ids, tables), hot).tolist() == [False, True, False, False]
    assert hot.rows("large").tolist() == [2**24 + 1]


def test_a_hot_set_says_what_it_holds() -> None:
    hot = HotSet.of(TABLES, {"a": torch.tensor([3, 1, 3]), "b": torch.tensor([0, 2, 4])})
    assert hot.rows("a").tolist() == [1, 3]
    assert hot.rows("b").tolist() == [0, 4]  # the padding row is never read
    assert hot.mask("b").tolist() == [True, False, False, False, True]
    assert hot.num_rows == 4
    assert hot.num_bytes({"a": 10, "b": 100}) == 220
    moved = hot.to("cpu")
    assert torch.equal(moved.is_hot, hot.is_hot)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: HotSet(Places(TABLES), torch.ones(11)), "must be 11 bools, one for each row"),
        (lambda: HotSet(Places(TABLES), torch.ones(10).bool()), "must be 11 bools, one for each"),
        (lambda: HotSet.of(TABLES, {"a": torch.tensor([-1])}), "table 'a' has rows 0 to 5"),
        (lambda: HotSet.of(TABLES, {"a": torch.tensor([6])}), "table 'a' has rows 0 to 5"),
        (lambda: HotSet.none(TABLES).rows("c"), "there is no table 'c'; there are a, b"),
    ],
)
def test_rows_that_are_not_there_are_refused(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.gpu
@pytest.mark.parametrize("jagged", [False, True])
def test_a_gpu_classifies_without_being_waited_for(jagged: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    tables = [
        Table(f"t{i}", 10_000 + i, 4, [f"f{i}"], padding_idx=i if i % 2 else None)
        for i in range(26)
    ]
    hot = HotSet(Places(tables), torch.rand(Places(tables).num_rows, generator=draw) < 0.97)
    ids = torch.randint(0, 10_000, (4096, 26), generator=draw)
    features: Any = ids
    if jagged:
        lengths = torch.randint(0, 3, (26 * 4096,), generator=draw)
        values = torch.randint(0, 10_000, (int(lengths.sum()),), generator=draw)
        features = (values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    batch = batch_of(features, tables)
    on_gpu, there = batch.to("cuda"), hot.to("cuda")
    popular(on_gpu, there)  # hands the tables' numbers over, once
    with no_synchronisation():
        found = popular(on_gpu, there)
    expected = popular(batch, hot)
    assert 0 < int(expected.sum()) < len(expected)
    assert torch.equal(found.cpu(), expected)
