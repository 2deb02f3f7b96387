"""Mistakes of a first use, and rows that a table does not have: each gets one clear sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.inputs.hotset import HotSet
from hotrow.kernels.rules import RowRule

Table = hotrow.EmbeddingBagConfig
TABLES = [Table("a", 10, 3, ["f"]), Table("b", 8, 3, ["g"]), Table("c", 6, 3, ["h"])]
STRATEGIES = ["all-fast", "static", "lookahead", "hybrid", "static-hybrid"]


def collection(strategy: str = "all-fast", **options: Any) -> hotrow.EmbeddingBagCollection:
    budget = hotrow.Budget((hotrow.Share(12, 8, True),), window_bytes=1 << 12)
    return hotrow.EmbeddingBagCollection(
        TABLES, hotrow.SGD(lr=0.1), budget, strategy=strategy, seed=0, **options
    )


def weights(embedding: hotrow.EmbeddingBagCollection) -> Tensor:
    return torch.cat([chunk for table in TABLES for _, chunk in embedding.weights(table.name)])


# -- rows that are not there -------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("first", "count"), [(-1, 1), (-8, 8), (-9, 2), (7, 2), (8, 1), (0, 9)])
def test_weights_go_to_rows_of_their_table_alone(strategy: str, first: int, count: int) -> None:
    embedding = collection(strategy)
    before = weights(embedding)
    with pytest.raises(ValueError, match=f"'b' has 8 rows of 3 weights; .* from row {first} on"):
        embedding.load_weights("b", first, torch.full((count, 3), 9.0))
    assert torch.equal(weights(embedding), before)


@pytest.mark.parametrize("first", [0.5, "1", None])
def test_a_first_row_is_a_whole_number(first: Any) -> None:
    with pytest.raises(ValueError, match="first must be a whole number"):
        collection().load_weights("b", first, torch.zeros(1, 3))


def test_the_first_and_the_last_row_can_be_loaded() -> None:
    embedding = collection()
    before = weights(embedding)
    embedding.load_weights("b", 0, torch.full((1, 3), 9.0))
    embedding.load_weights("b", torch.tensor(7), torch.full((1, 3), 9.0))  # type: ignore[arg-type]
    embedding.load_weights("b", 8, torch.zeros(0, 3))  # nothing, behind the last
    changed = (weights(embedding) != before).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [10, 17]


@pytest.mark.parametrize("row", [-1, 8, 100])
def test_other_methods_check_both_bounds(row: int) -> None:
    """Row -1 of table b would be the last one of table a."""
    rows = torch.tensor([0, row])
    said = f"table 'b' has rows 0 to 7, and no row {row}"
    static = collection("static")
    static.reserve(1)
    with pytest.raises(ValueError, match=said):
        static.weights_at("b", rows)
    with pytest.raises(ValueError, match=said):
        static.freeze_rows({"b": rows})
    with pytest.raises(ValueError, match=said):
        static.pin_rows({"b": rows})
    with pytest.raises(ValueError, match="table 'b' has rows 0 to 7, not all of these"):
        HotSet.of(TABLES, {"b": rows})
    with pytest.raises(ValueError, match="profile of table 'b'"):
        collection("lookahead", profile={"b": (rows, torch.ones(2))})


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (0, 9), (5, 4), (-3, -1), (9, 9)])
def test_changed_rows_are_of_one_table(first: int, last: int) -> None:
    embedding = collection()
    assert embedding.row_access.note_changes()
    embedding.load_weights("a", 0, torch.ones(10, 3))
    assert embedding.row_access.changed_rows("b", 0, 8).tolist() == []
    assert embedding.row_access.changed_rows("a", 2, 4).tolist() == [2, 3]
    with pytest.raises(ValueError, match="table 'b' has rows 0 to 7, and not all from"):
        embedding.row_access.changed_rows("b", first, last)


# -- a first use -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [hotrow.EmbeddingBagCollection, hotrow.EmbeddingCollection])
@pytest.mark.parametrize(
    ("tables", "got"),
    [
        (TABLES[0], "one EmbeddingBagConfig"),
        (hotrow.EmbeddingConfig("a", 10, 3, ["f"]), "one EmbeddingConfig"),
        ({"a": TABLES[0]}, "str"),
        ("a", "str"),
        ([("a", 10, 3, ["f"])], "tuple"),
        (None, "NoneType"),
    ],
)
def test_tables_are_a_list(kind: Any, tables: Any, got: str) -> None:
    message = (
        r"tables must be a list of hotrow.EmbeddingBagConfig, such as "
        rf"tables=\[hotrow.EmbeddingBagConfig\(...\)\]; got {got}$"
    )
    with pytest.raises(TypeError, match=message):
        kind(tables, hotrow.SGD(), strategy="all-fast")


def test_any_iterable_of_tables_will_do() -> None:
    embedding = hotrow.EmbeddingCollection(iter(TABLES), hotrow.SGD(), strategy="all-fast")  # type: ignore[arg-type]
    assert [table.name for table in embedding.tables] == ["a", "b", "c"]


@pytest.mark.parametrize("ids", [torch.rand(2, 3), torch.ones(2, 3).double(), torch.rand(2, 3) > 0])
def test_ids_are_whole_numbers(ids: Tensor) -> None:
    message = (
        rf"ids must be int64 \(or int32\), not {ids.dtype}; if they are whole numbers, "
        r".long\(\) makes them so"
    )
    with pytest.raises(TypeError, match=message):
        collection()(ids)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [list, tuple, lambda ids: (*ids, None), lambda _: ()])
def test_ids_in_a_list_are_refused_beside_planned_batches_as_well(strategy: str, wrap: Any) -> None:
    embedding = collection(strategy)
    for ids in hotrow.ahead([torch.zeros(2, 3, dtype=torch.int64)] * 3, embedding):
        with pytest.raises(TypeError, match=r"^(ids|offsets) must be an? (int64 )?tensor"):
            embedding(wrap([ids]))


def test_momentum_is_refused_with_a_reason() -> None:
    rule: Any = hotrow.SGD
    message = (
        "hotrow.SGD has no momentum=: it would move rows that no batch reads; hotrow.Adam keeps "
        "moments"
    )
    with pytest.raises(TypeError, match=message):
        rule(lr=0.1, momentum=0.9)


@pytest.mark.parametrize("rule", [hotrow.SGD, hotrow.Adagrad, hotrow.Adam, hotrow.AdamW])
def test_settings_that_are_not_there_are_named(rule: Any) -> None:
    with pytest.raises(TypeError, match=rf"hotrow.{rule.__name__} has no nesterov=: it has lr, "):
        rule(0.1, nesterov=True)


def test_rules_can_be_copied() -> None:
    import copy
    import pickle
    from dataclasses import replace

    rule: RowRule = hotrow.AdamW(lr=0.5, weight_decay=0.25)
    assert copy.deepcopy(rule) == pickle.loads(pickle.dumps(rule)) == replace(rule) == rule


def test_what_a_lookup_gives_is_no_tensor() -> None:
    out: Any = collection()(torch.tensor([[1, 2, 3]]))
    message = (
        r"torch's {}\(\) takes tensors, and embedding\(ids\) holds vectors by feature; take "
        r"embedding\(ids\).values\(\), all features side by side, or embedding\(ids\)\['feature'\]"
    )
    x = torch.ones(1, 9)
    with pytest.raises(TypeError, match=message.format("cat")):
        torch.cat([out, x], dim=1)
    with pytest.raises(TypeError, match=message.format("stack")):
        torch.stack([x, out])
    with pytest.raises(TypeError, match=message.format("linear")):
        torch.nn.Linear(9, 1)(out)
    with pytest.raises(TypeError, match=message.format("mul")):
        torch.mul(x, out)
    assert torch.cat([out.values(), x], dim=1).shape == (1, 18)
