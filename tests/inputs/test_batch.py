"""Every accepted form of ids means the same, and every bad one is refused in the user's words."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import hotrow
from hotrow.inputs.batch import Batch, Lookups, keys_of, parse
from hotrow.inputs.tables import group_by_width

Table = hotrow.EmbeddingBagConfig
TABLES = [Table("a", 40, 4, ["f"]), Table("b", 30, 4, ["g"]), Table("c", 20, 3, ["h"])]
NAMES = ["f", "g", "h"]
SIZE = 5


def collection(*tables: Table, **options: Any) -> hotrow.EmbeddingBagCollection:
    options = {"strategy": "all-fast", "seed": 0, **options}
    return hotrow.EmbeddingBagCollection(tables or TABLES, hotrow.SGD(lr=0.1), **options)


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Foreign:
    """A class of another library: its methods alone."""

    def __init__(
        self, keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._parts = keys, values, offsets
        if weights is not None:  # as TorchRec's KeyedJaggedTensor has them
            self.weights_or_none = lambda: weights

    def keys(self) -> list[str]:
        return self._parts[0]

    def values(self) -> Tensor:
        return self._parts[1]

    def offsets(self) -> Tensor:
        return self._parts[2]


# -- accepted forms ----------------------------------------------------------------------


def one_hot() -> Tensor:
    """[SIZE, 3]"""
    return torch.stack([torch.randint(n, (SIZE,)) for n in (40, 30, 20)], dim=1)


def one_hot_forms(dense: Tensor) -> dict[str, Any]:
    values, offsets = dense.T.flatten(), torch.arange(dense.numel() + 1)
    lengths = torch.ones_like(values)
    turned = dense.T[[2, 0, 1]].flatten()
    extra = torch.cat([long(999, 999, 999, 999, 999), values])
    return {
        "dense": dense,
        "dense int32": dense.int(),
        "not contiguous": dense.T.contiguous().T,
        "pair": (values, offsets),
        "list": [values, offsets],
        "pair int32": (values.int(), offsets.int()),
        "own class": hotrow.KeyedJaggedTensor(NAMES, values, offsets=offsets),
        "own class by lengths": hotrow.KeyedJaggedTensor(NAMES, values, lengths=lengths),
        "foreign class": Foreign(NAMES, values, offsets),
        "another order": hotrow.KeyedJaggedTensor(["h", "f", "g"], turned, offsets=offsets),
        "more features than tables": hotrow.KeyedJaggedTensor(
            ["other", *NAMES], extra, offsets=torch.arange(extra.numel() + 1)
        ),
    }


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("form", one_hot_forms(one_hot()))
def test_every_form_of_the_same_ids_gives_the_same_vectors(form: str, mode: str) -> None:
    embedding = collection().train(mode == "training")
    dense = one_hot()
    right = {
        name: embedding.state_dict()[f"embedding_bags.{table}.weight"][dense[:, place]]
        for place, (name, table) in enumerate(zip(NAMES, "abc", strict=True))
    }
    found = embedding(one_hot_forms(dense)[form])
    assert found.keys() == NAMES
    for name in NAMES:
        assert torch.equal(found[name], right[name])


def multi_hot() -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.randint(0, 4, (3, SIZE))
    counts = lengths.sum(1).tolist()
    values = torch.cat([torch.randint(n, (c,)) for n, c in zip((40, 30, 20), counts, strict=True)])
    return values, functional.pad(lengths.flatten().cumsum(0), (1, 0)), torch.rand(len(values))


def multi_hot_forms(values: Tensor, offsets: Tensor, weights: Tensor) -> dict[str, Any]:
    ends = offsets[::SIZE].tolist()
    turn = [2, 0, 1]
    part = [values[ends[i] : ends[i + 1]] for i in turn]
    share = [weights[ends[i] : ends[i + 1]] for i in turn]
    lengths = offsets.diff().view(3, SIZE)[turn].flatten()
    return {
        "triple": (values, offsets, weights),
        "own class": hotrow.KeyedJaggedTensor(NAMES, values, offsets=offsets, weights=weights),
        "foreign class": Foreign(NAMES, values, offsets, weights),
        "another order": hotrow.KeyedJaggedTensor(
            ["h", "f", "g"], torch.cat(part), lengths=lengths, weights=torch.cat(share)
        ),
    }


@pytest.mark.parametrize("form", multi_hot_forms(*multi_hot()))
def test_every_form_of_weighted_bags_gives_torchs_vectors(form: str) -> None:
    embedding = collection()
    values, offsets, weights = multi_hot()
    found = embedding(multi_hot_forms(values, offsets, weights)[form])
    for place, (name, table) in enumerate(zip(NAMES, "abc", strict=True)):
        mine = offsets[place * SIZE : (place + 1) * SIZE + 1]
        lookups = slice(int(mine[0]), int(mine[-1]))
        right = functional.embedding_bag(
            values[lookups], embedding.state_dict()[f"embedding_bags.{table}.weight"],
            mine - mine[0], mode="sum", per_sample_weights=weights[lookups],
            include_last_offset=True,
        )  # fmt: skip
        torch.testing.assert_close(found[name], right)


def test_forms_that_mean_the_same() -> None:
    values, offsets, _ = multi_hot()
    embedding = collection()
    plain, triple = embedding((values, offsets)), embedding((values, offsets, None))
    assert torch.equal(plain.values(), triple.values())
    column = collection(Table("a", 40, 4, ["f"]))
    ids = torch.randint(40, (7,))
    assert torch.equal(column(ids)["f"], column(ids[:, None])["f"])


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_a_batch_without_lookups_gives_zeros_for_each_bag(pooling: str) -> None:
    embedding = collection(Table("a", 40, 4, ["f"], pooling=pooling))
    found = embedding((long(), long(0, 0, 0, 0)))["f"]
    assert torch.equal(found, torch.zeros(0 if pooling == "none" else 3, 4))
    for features in (long().view(0, 1), (long(), long(0))):  # and of no samples none
        assert embedding(features)["f"].shape == (0, 4)


# -- lookups -----------------------------------------------------------------------------


def lookups(tables: list[Table], features: Any) -> Lookups:
    (group,) = group_by_width(tables)
    names = tuple(name for table in tables for name in table.feature_names)
    return hotrow.inputs.batch.lookups_of(parse(features, names, torch.device("cpu")), group)


PADDED = [Table("a", 40, 4, ["f"], padding_idx=2)]


@pytest.mark.parametrize(
    ("tables", "features", "ids"),
    [
        (TABLES[:2], long(39, 0, 0, 29).view(2, 2), [39, 40, 0, 69]),  # table by table
        ([Table("a", 40, 4, ["f", "g"])], long(3, 5).view(1, 2), [3, 5]),  # of one table
        (PADDED, long(2, 3)[:, None], [-1, 3]),
        (PADDED, (long(2, 3), long(0, 1, 2)), [-1, 3]),
        ([Table("a", 40, 4, ["f"], padding_idx=-1)], long(39, 3)[:, None], [-1, 3]),
    ],
)
def test_ids_of_a_width(tables: list[Table], features: Any, ids: list[int]) -> None:
    assert lookups(tables, features).ids.tolist() == ids
    (group,) = group_by_width(tables)
    names = tuple(name for table in tables for name in table.feature_names)
    keys, is_bad = keys_of(parse(features, names, None), group, padding=-1)
    assert (keys.tolist(), bool(is_bad)) == (ids, False)


@pytest.mark.parametrize("row", [-1, 40])
@pytest.mark.parametrize("form", [lambda x: x[:, None], lambda x: (x, torch.arange(len(x) + 1))])
def test_keys_outside_a_table_are_flagged(row: int, form: Callable[[Tensor], Any]) -> None:
    (group,) = group_by_width(PADDED)
    _, is_bad = keys_of(parse(form(long(3, row)), ("f",), None), group, padding=-1)
    assert bool(is_bad)


def test_a_mean_leaves_padding_out() -> None:
    embedding = collection(Table("a", 40, 4, ["f"], pooling="mean", padding_idx=2))
    found = embedding((long(2, 7, 9, 2), long(0, 4)))["f"][0]
    weight = embedding.state_dict()["embedding_bags.a.weight"]
    torch.testing.assert_close(found, (weight[7] + weight[9]) / 2)


def test_each_lookup_knows_its_bag() -> None:
    found = lookups([TABLES[0]], (long(1, 2, 3, 4), long(0, 2, 2, 4)))
    assert found.bag_of().tolist() == [0, 0, 2, 2]


def test_the_keyed_jagged_tensor_has_torchrecs_names() -> None:
    kjt = hotrow.KeyedJaggedTensor(["f"], long(1, 2, 3), lengths=long(2, 0, 1))
    assert (kjt.keys(), kjt.weights_or_none()) == (["f"], None)
    assert (kjt.offsets().tolist(), kjt.lengths().tolist()) == ([0, 2, 2, 3], [2, 0, 1])
    kjt = hotrow.KeyedJaggedTensor(["f"], long(1), lengths=long(1), weights=torch.ones(1))
    moved = kjt.to("cpu")
    assert moved.keys() == ["f"]
    assert moved.weights_or_none() is not None


def test_what_embedding_bags_are_called_with_becomes_one_batch() -> None:
    user, seen = long(1, 2, 3), long(4, 5, 6, 7, 8, 9).view(3, 2)
    tags, ends, weights = long(1, 2, 3, 4), long(0, 3, 3, 4), torch.tensor([0.5, 2.0, 1.0, 3.0])
    kjt = hotrow.KeyedJaggedTensor.of({"user": user, "seen": seen, "tags": (tags, ends, weights)})
    assert kjt.keys() == ["user", "seen", "tags"]
    assert kjt.values().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert kjt.lengths().tolist() == [1, 1, 1, 2, 2, 2, 3, 0, 1]
    found = kjt.weights_or_none()
    assert found is not None
    assert found.tolist() == [1.0] * 9 + weights.tolist()
    short = hotrow.KeyedJaggedTensor.of({"user": user, "tags": (tags, ends[:-1])})
    assert short.lengths().tolist() == [1, 1, 1, 3, 0, 1]
    assert short.weights_or_none() is None


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"f": long(1, 2), "g": long(1)}, r"as many samples each, and have {'f': 2, 'g': 1}"),
        ({}, "as many samples each"),
        ({"f": (long(1, 2, 3), long(0, 2))}, "feature 'f' has 3 ids, and offsets for 2"),
        ({"f": (long(1, 2), long(1, 2))}, "feature 'f': offsets must begin with 0, not 1"),
        ({"f": (long(1, 2), long(0, 2), torch.ones(3))}, "feature 'f' has 2 ids and 3 weights"),
        (
            {"f": torch.ones(2, 2, 2)},
            r"feature 'f' must be a tensor of ids .* got a tensor of shape \(2, 2, 2\)",
        ),
        (
            {"f": long(1, 2, 3), "g": (long(1, 2), long(0, 2))},
            r"as many samples each, and have {'f': 3, 'g': 1}",
        ),
    ],
)
def test_features_that_do_not_go_together_are_named(features: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hotrow.KeyedJaggedTensor.of(features, include_last_offset=True)


def test_offsets_are_read_as_nn_embedding_bag_reads_them() -> None:
    bag = torch.nn.EmbeddingBag(10, 3, mode="sum")
    ended = torch.nn.EmbeddingBag(10, 3, mode="sum", include_last_offset=True, _weight=bag.weight)
    embedding = collection(Table("a", 10, 3, ["f"]))
    embedding.load_weights("a", 0, bag.weight)
    for indices, offsets in ((long(1, 2), long(0, 2)), (long(4, 4, 5), long(0, 1, 1, 3))):
        for plain, last in ((bag, False), (ended, True)):
            kjt = hotrow.KeyedJaggedTensor.of({"f": (indices, offsets)}, include_last_offset=last)
            found, expected = embedding(kjt).values(), plain(indices, offsets)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "offsets", [long(0, 2), long(0), long(0, 1)], ids=["last bag empty", "one", "last bag full"]
)
def test_offsets_that_could_be_read_in_two_ways_are_refused(offsets: Tensor) -> None:
    count = len(offsets)
    message = (
        f"feature 'f' has {count} offsets, which are {count} samples, as nn.EmbeddingBag reads "
        f"them, or {count - 1}, .* include_last_offset=False or True"
    )
    with pytest.raises(ValueError, match=message):
        hotrow.KeyedJaggedTensor.of({"f": (long(1, 2), offsets), "g": (long(1, 2), offsets)})


def test_another_feature_tells_how_offsets_are_meant() -> None:
    for size, lengths in ((1, [1, 2]), (2, [1, 1, 2, 0])):
        kjt = hotrow.KeyedJaggedTensor.of({"f": long(5, 6)[:size], "g": (long(1, 2), long(0, 2))})
        assert kjt.lengths().tolist() == lengths


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([1, 2], "list"),
        ([1, 2, 3], "list"),
        ([1, 2, 3, 4], "list"),
        ((long(1, 2), [0, 1]), "tuple"),
        ((long(1, 2).view(1, 2), long(0, 1)), "tuple"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_a_feature_that_is_no_tensor_is_told_what_to_be(given: Any, kind: str) -> None:
    message = (
        r"feature 'a' must be a tensor of ids \[B\] or \[B, n\], such as torch.tensor\(\[1, 2\]\), "
        rf"or a tuple of tensors, .*; got <class '{kind}'>"
    )
    with pytest.raises(TypeError, match=message):
        hotrow.KeyedJaggedTensor.of({"a": given})


def make(**parts: Any) -> hotrow.KeyedJaggedTensor:
    return hotrow.KeyedJaggedTensor(["f"], **{"values": long(1, 2), **parts})


def make_of(*parts: Any) -> hotrow.KeyedJaggedTensor:
    feature = parts[0] if len(parts) == 1 else parts
    return hotrow.KeyedJaggedTensor.of({"f": feature}, include_last_offset=False)


@pytest.mark.parametrize(
    ("what", "build"),
    [
        ("values", lambda bad: make(values=bad, lengths=long(1, 1))),
        ("lengths", lambda bad: make(lengths=bad)),
        ("offsets", lambda bad: make(offsets=bad)),
        ("ids of feature 'f'", make_of),
        ("indices of feature 'f'", lambda bad: make_of(bad, long(0, 1))),
        ("offsets of feature 'f'", lambda bad: make_of(long(1, 2), bad)),
    ],
)
def test_only_whole_numbers_make_a_keyed_jagged_tensor(
    what: str, build: Callable[[Any], Any]
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        said = rf"^{what} must be int64 \(or int32\), not {dtype}; if they are whole numbers, .long"
        with pytest.raises(TypeError, match=said):
            build(torch.ones(2).to(dtype))
    if "feature" not in what:
        with pytest.raises(TypeError, match=f"{what} must be a tensor, got list"):
            build([1, 2])


def test_a_key_that_is_there_twice_is_refused() -> None:
    message = "key 'f' is there twice; every feature has one place in a batch"
    with pytest.raises(ValueError, match=message):
        hotrow.KeyedJaggedTensor(["f", "g", "f"], long(1, 2, 3), lengths=long(1, 1, 1))
    embedding = collection(Table("a", 10, 3, ["f"]))
    foreign = Foreign(["g", "f", "f"], long(1, 2, 3), long(0, 1, 2, 3))
    with pytest.raises(ValueError, match=message):
        embedding(foreign)
    with pytest.raises(ValueError, match=message):
        next(iter(hotrow.ahead([foreign], embedding)))


def test_a_keyed_jagged_tensor_needs_offsets_or_lengths() -> None:
    with pytest.raises(ValueError, match=r"give lengths= or offsets=; the third .* is weights"):
        hotrow.KeyedJaggedTensor(["f"], long(1))
    with pytest.raises(ValueError, match=r"give lengths= or offsets=; the third .* is weights"):
        hotrow.KeyedJaggedTensor(["f"], long(1), long(1))  # were they lengths?


# -- bad batches -------------------------------------------------------------------------


ids = torch.zeros(3, dtype=torch.int64)
ends = torch.arange(4)  # one sample, three features
BAD_VALUES: dict[str, tuple[Any, str]] = {
    "a negative id, dense": (
        long(1, 2, 3, 4, -7, 6).view(2, 3),
        r"feature 'g', sample 1: id -7 is outside table 'b', which has rows 0 to 29",
    ),
    "an id too large, dense": (
        long(1, 2, 3, 4, 5, 20).view(2, 3),
        r"feature 'h', sample 1: id 20 is outside table 'c', which has rows 0 to 19",
    ),
    "a negative id": (
        (long(1, -1, 3), ends),
        r"feature 'g', position 1, sample 0: id -1 is outside table 'b', which has rows 0 to 29",
    ),
    "an id too large": (
        (long(1, 2, 3, 4, 5, 30), long(0, 2, 6, 6)),
        r"feature 'g', position 5, sample 0: id 30 is outside table 'b', which has rows 0 to 29",
    ),
    "an id too large behind samples without ids": (
        (long(1, 2, 30, 4), long(0, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4, 4)),
        r"feature 'g', position 2, sample 2: id 30 is outside table 'b'",
    ),
    "an id beyond 32 bits": (
        (long(2**32, 2, 3), ends),
        r"feature 'f', position 0, sample 0: id 4294967296 is outside table 'a'",
    ),
    "an id too large in a keyed jagged tensor of another order": (
        hotrow.KeyedJaggedTensor(["h", "f", "g"], long(1, 40, 3), offsets=ends),
        r"feature 'f', position 1, sample 0: id 40 is outside table 'a', which has rows 0 to 39",
    ),
    "offsets that fall": (
        (ids, long(0, 2, 1, 3)),
        r"offsets must not fall, but offsets\[1\] is 2 and offsets\[2\] is 1",
    ),
    "offsets that start late": ((ids, long(1, 1, 2, 3)), "offsets must start at 0, not 1"),
    "offsets that end early": (
        (ids, long(0, 1, 1, 2)),
        "offsets must end at the number of indices, 3, but end at 2",
    ),
    "offsets that end late": (
        (ids, long(0, 1, 2, 4)),
        "offsets must end at the number of indices, 3, but end at 4",
    ),
    "offsets in nn.EmbeddingBag's short form": (
        (long(1, 2, 3, 4, 5, 6, 7), torch.arange(6)),
        "offsets has 6 entries; 3 features need a multiple of 3 bags and one entry more",
    ),
    "no offsets": ((ids, long()), "offsets has 0 entries; 3 features need a multiple of 3 bags"),
    "a feature that is missing": (
        hotrow.KeyedJaggedTensor(["f", "h"], ids[:2], offsets=ends[:3]),
        "the batch has no feature 'g', which a table of this collection reads; it has f, h",
    ),
    "too few columns": (
        torch.zeros(2, 2, dtype=torch.int64),
        r"shape \[batch, 3\], a column for each feature \(f, g, h\); got \[2, 2\]",
    ),
    "three dimensions": (
        torch.zeros(2, 3, 1, dtype=torch.int64),
        r"shape \[batch, 3\].*got \[2, 3, 1\]",
    ),
    "one dimension for three features": (
        torch.zeros(3, dtype=torch.int64),
        r"shape \[batch, 3\].*got \[3\]",
    ),
    "indices of two dimensions": (
        (ids.view(1, 3), ends),
        r"one dimension each, got shapes \[1, 3\] and \[4\]",
    ),
    "offsets of two dimensions": (
        (ids, ends.view(2, 2)),
        r"one dimension each, got shapes \[3\] and \[2, 2\]",
    ),
    "too few weights": (
        (ids, ends, torch.ones(2)),
        r"weights must have one entry per index, 3, got shape \[2\]",
    ),
    "weights of two dimensions": (
        (ids, ends, torch.ones(3, 1)),
        r"weights must have one entry per index, 3, got shape \[3, 1\]",
    ),
}
BAD_TYPES: dict[str, tuple[Any, str]] = {
    "floating ids": (torch.zeros(2, 3), r"ids must be int64 \(or int32\), not torch.float32"),
    "boolean ids": (
        torch.zeros(2, 3, dtype=torch.bool),
        r"ids must be int64 \(or int32\), not torch.bool",
    ),
    "short ids": (
        (ids.short(), ends),
        r"indices must be int64 \(or int32\), not torch.int16; .long\(\) makes them so",
    ),
    "floating offsets": (
        (ids, ends.float()),
        r"offsets must be int64 \(or int32\), not torch.float32",
    ),
    "lists for tensors": (([0, 0, 0], [0, 1, 2, 3]), "indices must be a tensor, got list"),
    "a list of offsets": ((ids, [0, 1, 2, 3]), "offsets must be a tensor, got list"),
    "a dict": (
        {"f": ids},
        r"ids must not be a dict; hotrow\.KeyedJaggedTensor\.of\(\.\.\.\) joins ids by feature",
    ),
    "an array": (ids.numpy(), "ids must be .*; got ndarray"),
    "nothing": (None, "ids must be .*; got NoneType"),
    "a tuple of one": ((ids,), "ids must be .*; got tuple"),
    "a tuple of four": ((ids, ends, None, None), "ids must be .*; got tuple"),
    "half weights": (
        (ids, ends, torch.ones(3).half()),
        "weights must be float32, not torch.float16",
    ),
    "double weights": (
        hotrow.KeyedJaggedTensor(NAMES, ids, offsets=ends, weights=torch.ones(3).double()),
        "weights must be float32, not torch.float64",
    ),
    "a list of weights": ((ids, ends, [1.0, 1.0, 1.0]), "weights must be a tensor, got list"),
}
BAD = {
    name: (features, kind, message)
    for kind, cases in ((ValueError, BAD_VALUES), (TypeError, BAD_TYPES))
    for name, (features, message) in cases.items()
}


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_batch_is_refused_and_changes_nothing(bad: str, mode: str) -> None:
    features, kind, message = BAD[bad]
    embedding = collection(strategy="lru", budget=9000)
    embedding(one_hot()).values().sum().backward()
    before, traffic = embedding.state_dict(), embedding.traffic()
    resident = [group.memory.pad.row_of_slot.clone() for group in embedding.groups]
    with pytest.raises(kind, match=message):
        embedding.train(mode == "training")(features)
    after = embedding.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert embedding.traffic() == traffic
    assert all(map(torch.equal, resident, (g.memory.pad.row_of_slot for g in embedding.groups)))


@pytest.mark.parametrize("bad", ["a negative id", "offsets that fall", "floating ids"])
def test_a_bad_batch_is_refused_by_ahead_in_the_same_words(bad: str) -> None:
    features, kind, message = BAD[bad]
    with pytest.raises(kind, match=message):
        next(hotrow.ahead([features], collection(strategy="lru", budget=9000)))


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_weights_are_refused_where_torch_refuses_them(pooling: str, mode: str) -> None:
    embedding = collection(Table("a", 40, 4, ["f"], pooling=pooling)).train(mode == "training")
    message = f"feature 'f' has pooling='{pooling}'; per-sample weights work with pooling='sum'"
    with pytest.raises(ValueError, match=message):
        embedding((long(1, 2), long(0, 2), torch.ones(2)))


def test_many_features_are_not_all_listed() -> None:
    embedding = collection(Table("a", 40, 4, [f"f{i}" for i in range(12)]))
    with pytest.raises(ValueError, match="f0, f1, f2, f3, f4, f5, f6, f7 and 4 more"):
        embedding(torch.zeros(2, 3, dtype=torch.int64))


# -- tables ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "a table's name must be non-empty"),
        ({"name": "a.b"}, r"table 'a.b': a table's name must .* hold no '\.'"),
        ({"num_embeddings": 0}, "table 'a': num_embeddings must be a whole number of at least 1"),
        ({"num_embeddings": 2.5}, "table 'a': num_embeddings must be .* not 2.5"),
        ({"embedding_dim": -1}, "table 'a': embedding_dim must be .* not -1"),
        ({"feature_names": []}, r"feature_names must be a non-empty list, not \[\]"),
        ({"feature_names": "f"}, "feature_names must be a non-empty list, not 'f'"),
        ({"pooling": "max"}, "pooling must be one of sum, mean, none, not 'max'"),
        ({"padding_idx": 40}, "table 'a': padding_idx 40 is outside its 40 rows"),
        ({"padding_idx": -41}, "table 'a': padding_idx -41 is outside its 40 rows"),
    ],
    ids=str,
)
def test_a_bad_table_is_refused(settings: dict[str, Any], message: str) -> None:
    good = {"name": "a", "num_embeddings": 40, "embedding_dim": 4, "feature_names": ["f"]}
    with pytest.raises(ValueError, match=message):
        Table(**{**good, **settings})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            [Table("a", 4, 2, ["f"]), Table("a", 4, 3, ["g"])],
            "table 'a' is named twice; table names must be unique",
        ),
        (
            [Table("a", 4, 2, ["f", "f@b"]), Table("b", 4, 3, ["f"])],
            "feature 'f@b' is named twice",
        ),
        ([Table("a", 4, 2, ["f", "f"])], "feature 'f' is named twice"),
        ([], "a collection needs at least one table"),
    ],
    ids=["tables", "features", "features of one table", "no tables"],
)
def test_names_belong_to_one_place(tables: list[Table], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hotrow.EmbeddingBagCollection(tables, hotrow.SGD(), strategy="all-fast")


class PoolingType(enum.Enum):
    """As TorchRec writes it."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@pytest.mark.parametrize("pooling", PoolingType)
def test_torchrecs_pooling_types_are_understood(pooling: PoolingType) -> None:
    assert Table("a", 4, 2, ["f"], pooling=pooling).pooling == pooling.name.lower()


def test_tables_of_one_width_stand_together_in_the_order_given() -> None:
    tables = [Table("a", 4, 2, ["f"]), Table("b", 5, 3, ["g"]), Table("c", 6, 2, ["h"])]
    groups = group_by_width(tables)
    assert [[table.name for table in group.tables] for group in groups] == [["a", "c"], ["b"]]
    assert [group.bases for group in groups] == [(0, 4), (0,)]


def test_an_id_is_described_by_its_table() -> None:
    (group,) = group_by_width(TABLES[:2])
    assert [group.describe(row) for row in (0, 39, 40)] == [
        "row 0 of table 'a'",
        "row 39 of table 'a'",
        "row 0 of table 'b'",
    ]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([3] * 32, True), ([3] * 16 + [2] * 16, True), ([3] * 31 + [2], False), ([3] * 30, False)],
)
def test_equal_numbers_of_ids_per_sample_are_noticed(sizes: list[int], expected: bool) -> None:
    """Of each feature; and a few samples may be alike by chance."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    values = torch.zeros(int(offsets[-1]), dtype=torch.int64)
    batch = Batch(values, offsets, ("f", "g"), len(sizes) // 2)
    assert batch.has_one_size() == expected
    by_calls = Batch(values, offsets, ("f",), 2, calls=((len(sizes) - 1, 1),))
    assert by_calls.has_one_size() == (len(set(sizes)) == 1)
