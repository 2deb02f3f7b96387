"""A collection is used as TorchRec's are, with the same results as plain torch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from hotrow import KeyedJaggedTensor, KeyedTensor

Table = hotrow.EmbeddingBagConfig
LENGTHS = [2, 0, 1, 1, 1, 3]  # f1, then f2
VALUES = list(range(8))


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def batch(weights: Tensor | None = None, keys: tuple[str, str] = ("f1", "f2")) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(keys), long(*VALUES), weights, long(*LENGTHS))


def bags(tables: list[Table], **options: Any) -> hotrow.EmbeddingBagCollection:
    options = {"strategy": "all-fast", "seed": 0, **options}
    return hotrow.EmbeddingBagCollection(tables, hotrow.SGD(lr=0.5), **options)


def weight_of(embedding: nn.Module, table: str) -> Tensor:
    (weight,) = (w for k, w in embedding.state_dict().items() if k.split(".")[1] == table)
    return weight.clone()


TABLES = [Table("t1", 10, 3, ["f1"]), Table("t2", 10, 4, ["f2"])]


# -- what a lookup returns ---------------------------------------------------------------


def test_pooled_vectors_are_a_keyed_tensor() -> None:
    embedding = bags(TABLES)
    out = embedding(batch())
    assert (out.keys(), out.length_per_key(), out.offset_per_key()) == (
        ["f1", "f2"], [3, 4], [0, 3, 7]
    )  # fmt: skip
    assert (out.key_dim(), out.device()) == (1, torch.device("cpu"))
    for key, table, part in (("f1", "t1", slice(3)), ("f2", "t2", slice(3, 6))):
        ids = long(*VALUES).split([3, 5])[key == "f2"]
        lengths = long(*LENGTHS)[part]
        right = torch.nn.functional.embedding_bag(
            ids, weight_of(embedding, table), lengths.cumsum(0) - lengths, mode="sum"
        )
        torch.testing.assert_close(out[key], right)
        torch.testing.assert_close(out.to_dict()[key], right)
    assert torch.equal(out.values(), torch.cat([out["f1"], out["f2"]], dim=1))


def test_widths_are_known_without_taking_values_apart() -> None:
    out = bags([Table("t1", 10, 3, ["f1"]), Table("t2", 10, 3, ["f2"])])(long(1, 2).view(1, 2))
    whole = out.values()
    assert (out.length_per_key(), out.offset_per_key()) == ([3, 3], [0, 3, 6])
    assert out.device() == torch.device("cpu")
    assert out.values() is whole


def test_outputs_of_several_collections_are_regrouped() -> None:
    first = bags(TABLES)(batch())
    second = bags([Table("t3", 10, 2, ["g1", "g2"])])(batch(keys=("g1", "g2")))
    dense = KeyedTensor(["d"], [1], torch.ones(3, 1))
    groups = [["g2", "f1", "d"], ["f2"], ["f1"]]
    found = hotrow.Embedded.regroup([first, second, dense], groups)
    assert torch.equal(found[0], torch.cat([second["g2"], first["f1"], torch.ones(3, 1)], 1))
    assert torch.equal(found[1], first["f2"])
    assert torch.equal(found[2], first["f1"])
    named = KeyedTensor.regroup_as_dict([first, second, dense], groups, ["x", "y", "z"])
    assert list(named) == ["x", "y", "z"]
    assert torch.equal(named["x"], found[0])
    with pytest.raises(KeyError, match="no key 'h'; there are f1, f2"):
        hotrow.Embedded.regroup([first], [["h"]])
    with pytest.raises(ValueError, match="key 'f1' is in two of the keyed tensors"):
        hotrow.Embedded.regroup([first, first], [["f1"]])
    with pytest.raises(ValueError, match="3 groups need as many keys, not 1"):
        KeyedTensor.regroup_as_dict([first, second, dense], groups, ["x"])


def test_regrouped_vectors_train_their_rows() -> None:
    embedding, plain = bags(TABLES), bags(TABLES)
    for each, take in ((embedding, True), (plain, False)):
        out = each(batch())
        part = hotrow.Embedded.regroup([out], [["f2"]])[0] if take else out["f2"]
        part.square().sum().backward()
    assert torch.equal(weight_of(embedding, "t2"), weight_of(plain, "t2"))
    assert not torch.equal(weight_of(embedding, "t2"), weight_of(bags(TABLES), "t2"))
    assert torch.equal(weight_of(embedding, "t1"), weight_of(bags(TABLES), "t1"))


def test_a_keyed_tensor_holds_tensors_side_by_side() -> None:
    tensors = [torch.tensor([[1, 1]] * 3), torch.tensor([[2, 1, 2]] * 3)]
    keyed = KeyedTensor.from_tensor_list(["a", "b"], tensors)
    assert keyed.values().tolist() == [[1, 1, 2, 1, 2]] * 3
    assert (keyed.keys(), keyed.length_per_key(), keyed.offset_per_key(), keyed.key_dim()) == (
        ["a", "b"], [2, 3], [0, 2, 5], 1
    )  # fmt: skip
    assert keyed["b"].tolist() == keyed.to_dict()["b"].tolist() == [[2, 1, 2]] * 3
    assert keyed.to("meta").device() == torch.device("meta")
    assert str(KeyedTensor.from_tensor_list(["a"], [torch.ones(1, 2)])) == (
        'KeyedTensor({\n    "a": [[1.0, 1.0]]\n})\n'
    )
    with pytest.raises(KeyError, match="no key 'c'; there are a, b"):
        keyed["c"]
    with pytest.raises(ValueError, match="2 keys need as many lengths that sum to 5"):
        KeyedTensor(["a", "b"], [2, 2], keyed.values())


def test_vectors_without_pooling_are_jagged_tensors() -> None:
    tables = [
        hotrow.EmbeddingConfig("t1", 10, 3, ["f1"]),
        hotrow.EmbeddingConfig("t2", 10, 3, ["f2"]),
    ]
    embedding = hotrow.EmbeddingCollection(tables, hotrow.SGD(lr=0.1), strategy="all-fast", seed=0)
    out = embedding(batch())
    found = out.to_jagged_dict()
    assert list(found) == ["f1", "f2"]
    right = weight_of(embedding, "t2")[long(3, 4, 5, 6, 7)]
    assert torch.equal(found["f2"].values(), right)
    assert torch.equal(out["f2"], right)  # hotrow's own way
    assert found["f2"].lengths().tolist() == out.lengths("f2").tolist() == [1, 1, 3]
    assert found["f1"].offsets().tolist() == [0, 2, 2, 3]
    padded = torch.nn.utils.rnn.pad_sequence(list(right.split([1, 1, 3])), batch_first=True)
    assert torch.equal(out.jagged("f2").to_padded_dense(), padded)
    found["f2"].to_padded_dense().sum().backward()
    torch.testing.assert_close(weight_of(embedding, "t2")[3:8], right - 0.1)
    column = embedding(long(1, 2, 3, 4).view(2, 2))
    assert column.jagged("f2").lengths().tolist() == [1, 1]
    with pytest.raises(ValueError, match="feature 'f1' is pooled, so each sample has one vector"):
        bags(TABLES)(batch()).jagged("f1")
    mixed = bags([TABLES[0], Table("t2", 10, 3, ["f2"], pooling="none")])(batch())
    assert len(mixed.jagged("f2").to_dense()[2]) == 3
    with pytest.raises(ValueError, match="feature 'f1' is pooled"):
        mixed.jagged("f1")


# -- one feature in several tables -------------------------------------------------------

SHARED = [
    Table("wide", 400, 4, ["f", "g"]),
    Table("same", 300, 4, ["f"], pooling="mean", padding_idx=2),
    Table("thin", 300, 2, ["g", "h"]),
]
NAMES = ["f@wide", "g@wide", "f@same", "g@thin", "h"]
READS = [("f", "wide"), ("g", "wide"), ("f", "same"), ("g", "thin"), ("h", "thin")]


class Plain(nn.Module):
    """The same bags of plain torch."""

    def __init__(self, embedding: nn.Module, tables: list[Table] = SHARED) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag.from_pretrained(
                    weight_of(embedding, table.name), freeze=False, mode=table.pooling,
                    padding_idx=table.padding_idx, include_last_offset=True,
                )
                for table in tables
            }
        )  # fmt: skip

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        parts, weights = kjt.to_dict(), kjt.weights_or_none()
        return torch.cat(
            [
                self.bags[table](
                    parts[key].values(), parts[key].offsets(),
                    None if weights is None else parts[key].weights(),
                )
                for key, table in READS
            ],
            dim=1,
        )  # fmt: skip


def shared_batches(count: int, *, size: int = 24) -> Iterator[KeyedJaggedTensor]:
    for _ in range(count):
        lengths = torch.randint(0, 4, (4 * size,))
        ids = torch.randint(300, (int(lengths.sum()),))
        yield KeyedJaggedTensor(["h", "other", "g", "f"], ids, lengths=lengths)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("strategy", ["all-fast", "lookahead", "lru", "hybrid", "cpu", "uncached"])
def test_a_feature_may_feed_several_tables(strategy: str, ahead: bool) -> None:
    torch.manual_seed(0)
    embedding = bags(SHARED, strategy=strategy, budget="50%")
    plain = Plain(embedding)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    batches = list(shared_batches(8))
    scale = torch.randn(4 + 4 + 4 + 2 + 2)
    for kjt in hotrow.ahead(batches, embedding) if ahead else batches:
        out, right = embedding(kjt), plain(kjt)
        assert out.keys() == NAMES
        torch.testing.assert_close(out.values(), right)
        (out.values() * scale).square().sum().backward()
        (right * scale).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert strategy not in ("lookahead", "lru") or embedding.num_slots < embedding.num_rows
    for table in ("wide", "same", "thin"):
        mine, right = weight_of(embedding, table), plain.bags[table].weight
        torch.testing.assert_close(mine, right)
    assert not torch.equal(weight_of(embedding, "same"), weight_of(bags(SHARED), "same"))


def test_a_dense_input_has_one_column_for_a_shared_feature() -> None:
    embedding = bags(SHARED)
    assert embedding.features == ("f", "g", "h")
    ids = torch.randint(9, (5, 3))
    out, right = (
        embedding(ids),
        Plain(embedding)(KeyedJaggedTensor.of({"f": ids[:, 0], "g": ids[:, 1], "h": ids[:, 2]})),
    )
    torch.testing.assert_close(out.values(), right)
    for name, (key, table) in zip(NAMES, READS, strict=True):
        if table != "same":
            column = ids[:, "fgh".index(key)]
            assert torch.equal(out[name], weight_of(embedding, table)[column])
    assert out.offsets("f@same").tolist() == [0, 1, 2, 3, 4, 5]


def test_as_many_columns_as_outputs_are_not_taken_for_the_same() -> None:
    # The first width has two outputs of one feature, and the batch has two features.
    tables = [Table("a", 9, 4, ["f"]), Table("b", 9, 4, ["f"]), Table("c", 9, 3, ["g"])]
    embedding = bags(tables)
    ids = torch.randint(9, (5, 2))
    out = embedding(ids)
    assert out.keys() == ["f@a", "f@b", "g"]
    for name, table, column in (("f@a", "a", 0), ("f@b", "b", 0), ("g", "c", 1)):
        assert torch.equal(out[name], weight_of(embedding, table)[ids[:, column]])


def test_weights_of_a_shared_feature_get_the_gradients_of_all_its_tables() -> None:
    tables = [Table("a", 9, 4, ["f"]), Table("b", 9, 4, ["f"]), Table("c", 9, 3, ["f"])]
    embedding, ids = bags(tables), torch.randint(9, (8,))
    mine, right = (torch.ones(8, requires_grad=True) for _ in range(2))
    rows = torch.cat([weight_of(embedding, table) for table in "abc"], dim=1)
    scale = torch.randn(3, 11)
    offsets = long(0, 2, 5, 8)
    (embedding((ids, offsets, mine)).values() * scale).sum().backward()
    pooled = (right[:, None] * rows[ids]).split([2, 3, 3])
    (torch.stack([part.sum(0) for part in pooled]) * scale).sum().backward()
    torch.testing.assert_close(mine.grad, right.grad)


def test_a_bad_id_of_a_shared_feature_names_feature_and_table() -> None:
    with pytest.raises(ValueError, match=r"feature 'f', sample 1: id 300 is outside table 'same'"):
        bags(SHARED)(long(1, 2, 3, 300, 2, 3).view(2, 3))


def test_outputs_that_are_not_there_are_refused() -> None:
    out = bags(SHARED)(torch.randint(9, (5, 3)))
    with pytest.raises(KeyError, match="no feature 'f'; there are f@wide, g@wide"):
        out["f"]
    unpooled = hotrow.EmbeddingCollection(
        [hotrow.EmbeddingConfig("a", 9, 2, ["f"]), hotrow.EmbeddingConfig("b", 9, 2, ["f"])],
        hotrow.SGD(lr=0.1), strategy="all-fast",
    )  # fmt: skip
    found = unpooled(KeyedJaggedTensor(["x", "f"], long(1, 2, 3), lengths=long(1, 0, 2, 0)))
    assert found.jagged("f@b").lengths().tolist() == [2, 0]


def test_systems_that_pick_samples_refuse_shared_features() -> None:
    places = hotrow.inputs.hotset.Places(SHARED)  # type: ignore[attr-defined]
    parsed = hotrow.inputs.batch.parse(torch.ones(2, 3).long(), ("f", "g", "h"), None)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="features of one table each, and 'f' feeds wide, same"):
        places.of(parsed)


# -- weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_weights_are_needed_used_or_ignored(mode: str, ahead: bool) -> None:
    weights = torch.rand(8)

    def look(kjt: KeyedJaggedTensor, **options: Any) -> Tensor:
        embedding = bags(TABLES, **options).train(mode == "training")
        (taken,) = list(hotrow.ahead([kjt], embedding)) if ahead else [kjt]
        return embedding(taken).values().detach()

    plain, weighted = look(batch()), look(batch(weights))
    assert not torch.equal(plain, weighted)
    assert torch.equal(look(batch(weights), is_weighted=True), weighted)
    assert torch.equal(look(batch(weights), is_weighted=False), plain)
    assert torch.equal(look(batch(), is_weighted=False), plain)
    with pytest.raises(ValueError, match="is_weighted=True and the batch has no weights; give"):
        look(batch(), is_weighted=True)


def test_ignored_weights_may_be_of_any_pooling_and_get_no_gradient() -> None:
    tables = [Table("t1", 10, 3, ["f1"], pooling="mean"), TABLES[1]]
    weights = torch.rand(8, requires_grad=True)
    with pytest.raises(ValueError, match="pooling='mean'; per-sample weights work with"):
        bags(tables)(batch(weights))
    bags(tables, is_weighted=False)(batch(weights)).values().sum().backward()
    assert weights.grad is None


def test_a_collection_tells_what_torchrecs_tell() -> None:
    embedding = bags(SHARED, is_weighted=True)
    assert embedding.is_weighted()
    assert not bags(SHARED).is_weighted()
    assert embedding.embedding_bag_configs() == embedding.embedding_configs() == SHARED
    assert embedding.embedding_names_by_table() == [
        ["f@wide", "g@wide"], ["f@same"], ["g@thin", "h"]
    ]  # fmt: skip


# -- how rows start ----------------------------------------------------------------------


def started(rows: int = 3000, dim: int = 512, *, name: str = "t", **fields: Any) -> Tensor:
    options = {key: fields.pop(key) for key in ("strategy", "budget", "seed") if key in fields}
    embedding = bags([Table(name, rows, dim, ["f"], **fields)], **options)
    return weight_of(embedding, name)


def test_init_fn_fills_chunks_of_rows_under_the_collections_seed() -> None:
    shapes: list[tuple[int, ...]] = []

    def fill(chunk: Tensor) -> None:
        assert (chunk.device.type, chunk.dtype) == ("cpu", torch.float32)
        shapes.append(tuple(chunk.shape))
        nn.init.normal_(chunk, mean=2.0, std=0.5)

    before = torch.get_rng_state()
    rows = started(init_fn=fill)
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(shapes) == [(952, 512), (2048, 512)]
    assert abs(float(rows.mean()) - 2) < 0.01
    assert abs(float(rows.std()) - 0.5) < 0.01
    assert not torch.equal(rows[:952], rows[2048:])  # chunks differ
    for same in ({"strategy": "cpu"}, {"strategy": "lookahead", "budget": "50%"}):
        assert torch.equal(started(init_fn=fill, **same), rows)
    assert torch.equal(started(rows=2048, init_fn=fill), rows[:2048])
    assert not torch.equal(started(init_fn=fill, seed=1), rows)
    assert not torch.equal(started(init_fn=fill, name="u"), rows)


def test_rows_that_init_fn_starts_do_not_depend_on_the_optimizers_state() -> None:
    table = Table("t", 3000, 512, ["f"], init_fn=nn.init.normal_, padding_idx=7)
    made = [
        weight_of(hotrow.EmbeddingBagCollection([table], rule, strategy="all-fast", seed=0), "t")
        for rule in (hotrow.SGD(lr=0.1), hotrow.Adam(lr=0.1))
    ]
    assert torch.equal(*made)
    assert not made[0][7].any()


def test_an_init_fn_that_leaves_numbers_or_needs_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="table 't': init_fn left numbers of its chunk unset"):
        started(init_fn=lambda chunk: torch.ones_like(chunk))
    small = started(rows=20, dim=4, init_fn=nn.init.xavier_uniform_)
    assert 0.3 < float(small.abs().max()) <= (6 / 24) ** 0.5
    fan_out = functools.partial(nn.init.kaiming_uniform_, mode="fan_out")
    for needs_all in (nn.init.xavier_uniform_, functools.partial(nn.init.orthogonal_), fan_out):
        with pytest.raises(ValueError, match="depends on the number of rows, and init_fn gets ch"):
            started(init_fn=needs_all)
    assert started(init_fn=nn.init.kaiming_uniform_).std() > 0


def test_the_bounds_of_a_start_can_be_given() -> None:
    both = started(weight_init_min=0.25, weight_init_max=0.5)
    assert 0.25 <= float(both.min()) < 0.26 < 0.49 < float(both.max()) <= 0.5
    above = started(weight_init_max=0.5)
    assert -(3000**-0.5) <= float(above.min()) < -0.018
    assert 0.49 < float(above.max()) <= 0.5


class DataType(enum.Enum):
    """As TorchRec writes it."""

    FP32 = "FP32"
    FP16 = "FP16"


def test_fields_that_do_not_go_together_are_refused() -> None:
    uniform = hotrow.Uniform(0.0, 1.0)
    for fields in (
        {"init": uniform, "init_fn": nn.init.normal_},
        {"init": uniform, "weight_init_min": 0.0},
        {"init_fn": nn.init.normal_, "weight_init_max": 1.0},
    ):
        with pytest.raises(ValueError, match="table 't': give one of init, init_fn, and weight_in"):
            Table("t", 10, 4, ["f"], **fields)
    with pytest.raises(TypeError, match="table 't': init_fn must be a function, not 'normal'"):
        Table("t", 10, 4, ["f"], init_fn="normal")  # type: ignore[arg-type]
    assert Table("t", 10, 4, ["f"], data_type=DataType.FP32) == Table("t", 10, 4, ["f"])
    for kind in (DataType.FP16, torch.bfloat16):
        with pytest.raises(ValueError, match="table 't': rows are float32; data_type='"):
            Table("t", 10, 4, ["f"], data_type=kind)
    with pytest.raises(TypeError, match=r"must be text, not 10; .* TorchRec has them in another"):
        Table(10, 4, "t", ["f"])  # type: ignore[arg-type]
