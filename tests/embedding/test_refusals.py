"""Mistakes of a first use, and rows that a table does not have: each gets one clear sentence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    version = static.pins_version
    with pytest.raises(ValueError, match=said):
        static.pin_rows({"b": rows})
    assert static.pins_version == version
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


class Towers(nn.Module):
    """Collections by name."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, collection("lookahead"))


def state_with(**weights: Tensor | None) -> dict[str, Tensor]:
    """Return a state dict of a collection with other weights of some tables; None: without them."""
    state: dict[str, Any] = dict(collection().state_dict())
    state |= {f"embedding_bags.{table}.weight": weight for table, weight in weights.items()}
    return {name: weight for name, weight in state.items() if weight is not None}


def build(**options: Any) -> Any:
    options = {"tables": TABLES, "optimizer": hotrow.SGD(), "strategy": "lru", **options}
    return hotrow.EmbeddingBagCollection(**options)


def ahead_of(loader: Any, model: Any = None, **options: Any) -> None:
    next(hotrow.ahead(loader, collection("lookahead") if model is None else model, **options))


IDS = torch.ones(8, 3).long()
ASKS_FOR_IDS = r"say which: hotrow\.ahead\(loader, model, ids="
NOT_A_LIST = (
    r"tables must be a list of hotrow.EmbeddingBagConfig, such as "
    r"tables=\[hotrow.EmbeddingBagConfig\(...\)\]; got "
)
ONE_SHARE = hotrow.Budget((hotrow.Share(12, 8, True),), window_bytes=1 << 12)
TWO_WIDTHS = [TABLES[0], Table("wide", 10, 6, ["w"])]
DENSE = torch.optim.SGD([torch.ones(1)], lr=1.0)

MISTAKES: list[tuple[Any, str]] = [
    (lambda: build(tables=TABLES[0]), NOT_A_LIST + "one EmbeddingBagConfig$"),
    (lambda: hotrow.EmbeddingCollection(TABLES[0], hotrow.SGD()), NOT_A_LIST + "one Emb"),
    (lambda: build(tables=hotrow.EmbeddingConfig("a", 9, 3, ["f"])), "got one EmbeddingConfig$"),
    (lambda: build(tables={"a": TABLES[0]}), NOT_A_LIST + "str$"),
    (lambda: build(tables="a"), NOT_A_LIST + "str$"),
    (lambda: build(tables=[("a", 10, 3, ["f"])]), NOT_A_LIST + "tuple$"),
    (lambda: build(tables=None), NOT_A_LIST + "NoneType$"),
    (lambda: build(optimizer=torch.optim.Adam), r"got the class torch\.optim\.adam\.Adam"),
    (lambda: build(optimizer=hotrow.Adam), r"got the class hotrow\.kernels\.rules\.Adam"),
    (lambda: build(optimizer=DENSE), r"one of hotrow's, .* got torch\.optim\.sgd\.SGD"),
    (lambda: build(budget=0.1), "write '10%'"),
    (lambda: build(budget="100%"), "strategy='all-fast'"),
    (lambda: build(budget=4000, strategy="LRU"), "did you mean 'lru'"),
    (
        lambda: build(tables=TWO_WIDTHS, budget=ONE_SHARE),
        r"1 shares; the tables have 2 widths \(3, 6\)",
    ),
    (
        lambda: build(budget=4000, on_nonfinite="ignore"),
        "on_nonfinite must be one of propagate, error, skip",
    ),
    (
        lambda: build(budget=4000, device="gpu"),
        "^device 'gpu' is not known to torch; did you mean 'cuda'\\?$",
    ),
    (lambda: build(budget=4000, device="x:y"), "^device 'x:y' .* use 'cuda' or 'cpu'$"),
    (lambda: build(budget=4000, seed=-1), "seed must be a whole number of at least 0, not -1"),
    (lambda: build(budget=4000, seed=0.5), "seed must be a whole number of at least 0, not 0.5"),
    (lambda: build(budget=4000, seed="1"), "seed must be a whole number of at least 0, not '1'"),
    (lambda: ahead_of([]), "the loader yielded no batch"),
    (lambda: ahead_of(5), "loader must be iterable, got int"),
    (lambda: ahead_of([], ids="x"), "ids must be a function of a batch, or .* got str"),
    (lambda: ahead_of([IDS], depth=-1), "depth must be a whole number .* 'auto', not -1"),
    (lambda: ahead_of([IDS], depth=2.5), "depth must be a whole number .* 'auto', not 2.5"),
    (lambda: ahead_of([IDS], depth="many"), "depth must be a whole number .* 'auto', not 'many'"),
    (lambda: ahead_of([(torch.ones(8, 3), IDS, torch.ones(8))]), ASKS_FOR_IDS),
    (lambda: ahead_of([[IDS, torch.ones(8).long()]]), ASKS_FOR_IDS),
    (lambda: ahead_of([{"ids": IDS}]), r"KeyedJaggedTensor\.of.*" + ASKS_FOR_IDS),
    (
        lambda: ahead_of([IDS], Towers("a"), ids=lambda b: {"b": b}),
        r"a dict with 'b' lacks the collection 'a', .* only one; .* a dict \{'a': ids\}",
    ),
    (
        lambda: ahead_of([IDS], Towers("a", "c"), ids=lambda b: {"b": b}),
        r"a dict with 'b', which lacks the collection 'a'; .* are 'a', 'c'",
    ),
    (
        lambda: ahead_of([IDS], ids=lambda b: {"b": b}),
        r"a dict with 'b' is not ids; the model is one collection: .*KeyedJaggedTensor\.of",
    ),
    (lambda: collection().rows("typo"), "no table 'typo'; there are a, b"),
    (lambda: collection().weights("typo"), "no table 'typo'; there are a, b"),
    (
        lambda: collection().load_state_dict(state_with(a=torch.zeros(3, 5))),
        r"embedding_bags\.a\.weight: its shape is \[3, 5\], the table's \[10, 3\]",
    ),
    (lambda: collection().load_state_dict(state_with(b=None)), "Missing key"),
    (lambda: collection().load_state_dict(state_with(z=torch.zeros(1))), "Unexpected key"),
    (lambda: copy.deepcopy(nn.Sequential(collection())), "cannot be copied"),
    (lambda: pickle.dumps(collection()), "cannot be pickled"),
    (
        lambda: hotrow.SGD(lr=0.1, momentum=0.9),  # type: ignore[call-arg]
        "hotrow.SGD has no momentum=: it would move rows that no batch reads; hotrow.Adam keeps",
    ),
    (
        lambda: hotrow.AdamW(0.1, nesterov=True),  # type: ignore[call-arg]
        "hotrow.AdamW has no nesterov=: it has lr, ",
    ),
    *(
        (
            lambda ids=ids: collection()(ids),
            rf"ids must be int64 \(or int32\), not {ids.dtype}; .* \.long\(\) makes them so",
        )
        for ids in (torch.rand(2, 3), torch.ones(2, 3).double(), torch.rand(2, 3) > 0)
    ),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_mistake_gets_one_clear_sentence(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((KeyError, RuntimeError, TypeError, ValueError), match=message):
        call()


def test_any_iterable_of_tables_will_do() -> None:
    embedding = hotrow.EmbeddingCollection(iter(TABLES), hotrow.SGD(), strategy="all-fast")  # type: ignore[arg-type]
    assert [table.name for table in embedding.tables] == ["a", "b", "c"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", [list, tuple, lambda ids: (*ids, None), lambda _: ()])
def test_ids_in_a_list_are_refused_beside_planned_batches_as_well(strategy: str, wrap: Any) -> None:
    embedding = collection(strategy)
    for ids in hotrow.ahead([torch.zeros(2, 3, dtype=torch.int64)] * 3, embedding):
        with pytest.raises(TypeError, match=r"^(ids|offsets) must be an? (int64 )?tensor"):
            embedding(wrap([ids]))


def test_rules_can_be_copied() -> None:
    rule: RowRule = hotrow.AdamW(lr=0.5, weight_decay=0.25)
    assert copy.deepcopy(rule) == pickle.loads(pickle.dumps(rule)) == replace(rule) == rule
    with pytest.raises(AttributeError):
        rule.lr = 0.1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cat", lambda out, x: torch.cat([out, x], dim=1)),
        ("stack", lambda out, x: torch.stack([x, out])),
        ("linear", lambda out, x: nn.Linear(9, 1)(out)),
        ("mul", lambda out, x: torch.mul(x, out)),
    ],
)
def test_what_a_lookup_gives_is_no_tensor(name: str, call: Any) -> None:
    out: Any = collection()(torch.tensor([[1, 2, 3]]))
    message = (
        rf"torch's {name}\(\) takes tensors, and embedding\(ids\) holds vectors by feature; take "
        r"embedding\(ids\).values\(\), all features side by side, or embedding\(ids\)\['feature'\]"
    )
    with pytest.raises(TypeError, match=message):
        call(out, torch.ones(1, 9))
    assert torch.cat([out.values(), torch.ones(1, 9)], dim=1).shape == (1, 18)
