"""Samples taken out of batches and joined again are the same samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.inputs.samples import cut, join, outline, take, tensors_of, with_tensors

SIZE = 7


@dataclass(frozen=True)
class Clicks:
    dense: Tensor
    sparse: Any
    label: Tensor


class Named(NamedTuple):
    ids: Tensor
    rest: Any


def jagged(*, weighted: bool, seed: int = 0, size: int = SIZE) -> hotrow.KeyedJaggedTensor:
    """Bags of 0 to 3 ids of three features; an id says which feature and sample it is of."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * size,), generator=draw)
    bags = torch.arange(3 * size).repeat_interleave(lengths)
    values = 1000 * seed + 10 * bags + torch.randint(0, 10, bags.shape, generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return hotrow.KeyedJaggedTensor(["f", "g", "h"], values, lengths=lengths, weights=weights)


def bags_of(ids: hotrow.KeyedJaggedTensor) -> list[list[list[tuple[int, float]]]]:
    """By sample and feature: ids with their weights."""
    weights = ids.weights_or_none()
    pairs = list(
        zip(
            ids.values().tolist(),
            [1.0] * len(ids.values()) if weights is None else weights.tolist(),
            strict=True,
        )
    )
    ends, size = ids.offsets().tolist(), len(ids.lengths()) // 3
    return [
        [pairs[ends[f * size + s] : ends[f * size + s + 1]] for f in range(3)] for s in range(size)
    ]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("places", [[2, 0, 6], [], [3, 3, 1], list(range(SIZE))])
def test_jagged_samples_keep_their_bags(weighted: bool, places: list[int]) -> None:
    ids = jagged(weighted=weighted)
    found = take(ids, torch.tensor(places, dtype=torch.int64), size=SIZE)
    assert found.keys() == ids.keys()
    assert bags_of(found) == [bags_of(ids)[place] for place in places]


@pytest.mark.parametrize("weighted", [False, True])
def test_joined_batches_hold_the_samples_of_all(weighted: bool) -> None:
    parts = [
        jagged(weighted=weighted, seed=seed, size=size) for seed, size in ((1, 4), (2, 1), (3, 6))
    ]
    assert bags_of(join(parts)) == [bag for part in parts for bag in bags_of(part)]


def test_every_kind_of_batch_is_walked_through() -> None:
    dense, label = torch.rand(SIZE, 3), torch.arange(SIZE)
    ids = jagged(weighted=True)
    batch = {
        "clicks": Clicks(dense, ids, label),
        "more": [Named(label + 10, (dense[:, 0],)), "text"],
    }
    places = torch.tensor([5, 1])
    found = take(batch, places, size=SIZE)
    assert torch.equal(found["clicks"].dense, dense[places])
    assert found["clicks"].label.tolist() == [5, 1]
    assert bags_of(found["clicks"].sparse) == [bags_of(ids)[5], bags_of(ids)[1]]
    assert found["more"][0].ids.tolist() == [15, 11]
    assert torch.equal(found["more"][0].rest[0], dense[places, 0])
    assert found["more"][1] == "text"
    rest = take(batch, torch.tensor([0, 2, 3, 4, 6]), size=SIZE)
    whole = join([found, rest])
    assert whole["clicks"].label.tolist() == [5, 1, 0, 2, 3, 4, 6]
    assert bags_of(whole["clicks"].sparse) == [bags_of(ids)[each] for each in (5, 1, 0, 2, 3, 4, 6)]


def test_a_batch_is_made_of_its_tensors_again() -> None:
    dense, ids = torch.rand(SIZE, 3), jagged(weighted=True)
    batch = {"clicks": Clicks(dense, ids, torch.arange(SIZE)), "more": [Named(dense, None), "text"]}
    tensors = tensors_of(batch)
    assert [tuple(each.shape) for each in tensors] == [
        (SIZE, 3), ids.values().shape, ids.values().shape, (3 * SIZE + 1,), (SIZE,), (SIZE, 3)
    ]  # fmt: skip
    found = with_tensors(batch, [each.clone() for each in tensors])
    assert bags_of(found["clicks"].sparse) == bags_of(ids)
    assert torch.equal(found["clicks"].dense, dense)
    assert torch.equal(found["more"][0].ids, dense)
    assert found["more"][0].rest is None
    assert found["more"][1] == "text"
    assert outline(found) == outline(batch) != outline({**batch, "more": [Named(dense, None), ""]})


def test_a_tensor_that_is_not_by_samples_is_named() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\), whose first dimension.* give take="):
        take({"label": torch.rand(7), "odd": torch.rand(3, 2)}, torch.tensor([0]), size=7)


def test_a_text_for_each_sample_is_not_left_whole() -> None:
    batch = {"label": torch.rand(3), "name": ["a", "b", "c"]}
    for taken in (partial(take, places=torch.tensor([0])), partial(cut, low=0, high=1)):
        with pytest.raises(ValueError, match=r"as many texts \('a', ...\).* give take="):
            taken(batch, size=3)
    one, other = {**batch, "name": ["a", "b"]}, batch  # as many features, say
    assert take(one, torch.tensor([0]), size=3)["name"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"of different lengths, 2, 3; .* join="):
        join([one, other])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [jagged(weighted=False), hotrow.KeyedJaggedTensor.of({"f": torch.tensor([1])})],
            "feature",
        ),
        ([jagged(weighted=False), jagged(weighted=True)], "weights"),
        ([], "no batch"),
    ],
    ids=["features", "weights", "nothing"],
)
def test_batches_that_do_not_look_alike_are_not_joined(parts: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join(parts)


@pytest.mark.parametrize("one", [{"a": torch.ones(2)}, (torch.ones(2),), [torch.ones(2)]])
@pytest.mark.parametrize("other", [None, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_a_part_that_only_some_batches_have_is_not_joined(
    one: Any, other: Any, turned: bool
) -> None:
    batches = [{"x": torch.ones(2), "part": part} for part in (one, other)]
    with pytest.raises(ValueError, match=r"in the same place; .* join="):
        join(batches[::-1] if turned else batches)


def test_a_tensor_that_the_first_batch_lacks_is_not_dropped() -> None:
    with pytest.raises(ValueError, match=r"hold NoneType and Tensor in the same place"):
        join([{"x": torch.ones(2), "weight": part} for part in (None, torch.ones(2))])


@pytest.mark.parametrize(
    "odd", [torch.rand(7).numpy(), object(), {1, 2}], ids=lambda x: type(x).__name__
)
def test_what_is_no_tensor_is_not_left_as_it_is(odd: Any) -> None:
    with pytest.raises(TypeError, match=f"holds a {type(odd).__name__}.* give take="):
        take({"label": torch.rand(7), "odd": odd}, torch.tensor([0]), size=7)


def test_jagged_ids_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="3 features have 21 bags, and 8 samples would have 24"):
        take(jagged(weighted=False), torch.tensor([0]), size=8)
