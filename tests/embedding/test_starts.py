"""Where rows start: by seed, table name and row, whatever lies beside the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.inputs.tables import Constant, Normal, Uniform

Table = hotrow.EmbeddingBagConfig


def collection(*tables: Table, **options: Any) -> hotrow.EmbeddingBagCollection:
    settings: dict[str, Any] = {"strategy": "all-fast", **options}
    return hotrow.EmbeddingBagCollection(list(tables), hotrow.Adagrad(), **settings)


def weights(embedding: hotrow.EmbeddingBagCollection, table: str) -> Tensor:
    return torch.cat([chunk for _, chunk in embedding.weights(table)])


USER = Table("user", 2000, 8, ["user"], init=Uniform(-1.0, 1.0))
ITEM = Table("item", 2000, 8, ["item"], init=Uniform(-1.0, 1.0))


# -- the seed ----------------------------------------------------------------------------


def test_two_collections_without_a_seed_start_apart() -> None:
    first, second = weights(collection(USER), "user"), weights(collection(USER), "user")
    assert not bool((first == second).all(1).any())


def test_tables_of_one_shape_in_two_collections_are_not_correlated() -> None:
    users, items = weights(collection(USER), "user"), weights(collection(ITEM), "item")
    # The mean of 16,000 products, each of variance 1/9, has a standard deviation of 0.0026.
    assert abs(float((users * items).mean())) < 0.02


def test_torchs_generator_governs_the_start() -> None:
    torch.manual_seed(7)
    first = collection(USER)
    second = collection(USER)
    torch.manual_seed(7)
    again = collection(USER)
    assert torch.equal(weights(first, "user"), weights(again, "user"))
    assert first.seed == again.seed != second.seed
    torch.manual_seed(8)
    assert not torch.equal(weights(collection(USER), "user"), weights(first, "user"))


def test_a_seed_of_ones_own_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    embedding = collection(USER, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert embedding.seed == 5
    assert torch.equal(weights(collection(USER, seed=5), "user"), weights(embedding, "user"))


def test_a_drawn_seed_can_be_given_again() -> None:
    drawn = collection(USER)
    again = collection(USER, seed=drawn.seed)
    assert torch.equal(weights(again, "user"), weights(drawn, "user"))


def test_the_default_device_does_not_matter_for_the_draw() -> None:
    torch.manual_seed(3)
    first = collection(USER)
    torch.manual_seed(3)
    with torch.device("meta"):
        drawn = hotrow.embedding.arguments.drawn_seed()
    assert drawn == first.seed


# -- a table alone and in company --------------------------------------------------------

INITS: dict[str, Any] = {
    "uniform": Uniform(-0.3, 0.7),
    "normal": Normal(0.1, 0.5),
    "default": None,
    "constant": Constant(0.25),
    "function": lambda rows: rows[:, None].float() * torch.tensor([1.0, -2.0, 0.5]),
}
BESIDE = [Table("before", 70, 3, ["x"]), Table("wide", 40, 5, ["y"]), Table("after", 9, 3, ["z"])]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *((x, {}) for x in ("all-fast", "lookahead", "static", "hybrid", "static-hybrid", "cpu")),
        *((x, {"engine": gpu_rows}) for x in ("all-fast", "lookahead")),
        *(
            pytest.param(x, {"device": "cuda"}, marks=pytest.mark.gpu)
            for x in ("all-fast", "lookahead", "hybrid")
        ),
    ],
)
def test_a_table_starts_alike_alone_and_beside_others(
    strategy: str, options: dict[str, Any], init: str
) -> None:
    mine = Table("mine", 150, 3, ["m"], init=INITS[init], padding_idx=4)
    first, wide, last = BESIDE

    def starts(*tables: Table) -> dict[str, Tensor]:
        widths = len({table.embedding_dim for table in tables})
        budget = hotrow.Budget((hotrow.Share(8, 8, True),) * widths, window_bytes=1 << 12)
        embedding = collection(*tables, seed=11, strategy=strategy, budget=budget, **options)
        return {table.name: weights(embedding, table.name) for table in tables}

    alone = {table.name: starts(table)[table.name] for table in (mine, *BESIDE)}
    for tables in ([mine, last], [first, mine], [last, wide, mine, first]):
        for name, rows in starts(*tables).items():
            assert torch.equal(rows, alone[name])


@pytest.mark.parametrize("init", ["uniform", "normal", "default"])
def test_tables_of_one_shape_start_apart(init: str) -> None:
    both = [Table(name, 300, 3, [name], init=INITS[init]) for name in ("a", "b")]
    beside = collection(*both, seed=1)
    first, second = weights(beside, "a"), weights(beside, "b")
    assert not bool((first == second).all(1).any())
    assert not bool((first[1:] == second[:-1]).all(1).any())


def test_a_row_starts_alike_however_many_follow_it() -> None:
    few, many = (Table("t", rows, 4, ["t"], init=Normal()) for rows in (10, 5000))
    assert torch.equal(
        weights(collection(few, seed=2), "t"), weights(collection(many, seed=2), "t")[:10]
    )


def test_names_that_share_bytes_start_apart() -> None:
    """The seed, the width and the name are told apart where they are hashed together."""
    tables = [Table(name, 20, 4, [name]) for name in ("t", "4 t", "1", "11", "t ", "tt", "ü", "u")]
    starts = [weights(collection(each, seed=1), each.name) for each in tables]
    starts.append(weights(collection(tables[2], seed=11), "1"))
    for place, one in enumerate(starts):
        assert not any(torch.equal(one, other) for other in starts[:place])


def test_starts_stay_what_they_are() -> None:
    """The same bits in every process and version: run files fix their results by a seed."""
    uniform = weights(collection(Table("item", 3, 2, ["f"]), seed=0), "item")
    normal = weights(collection(Table("item", 3, 2, ["f"], init=Normal()), seed=0), "item")
    assert uniform.tolist() == UNIFORM
    torch.testing.assert_close(normal, torch.tensor(NORMAL))


UNIFORM = [
    [0.12501215934753418, 0.36640846729278564],
    [-0.21936851739883423, -0.09846240282058716],
    [-0.11587244272232056, -0.18512824177742004],
]
NORMAL = [
    [-1.221677541732788, -1.2573606967926025],
    [-0.8626120090484619, 0.15609827637672424],
    [-2.1954307556152344, 0.9027842879295349],
]
