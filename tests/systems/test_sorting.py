"""Samples that a rule names come first, whatever a batch is made of and however often it comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.support.streams import Lanes, lanes_of
from hotrow.systems.sorting import MOST_WAITING, Sorter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Item = dict[str, Tensor]


def batch_of(seed: int, size: int = 50) -> Item:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(10, (size, 3), generator=generator),
        "label": torch.rand(size, generator=generator),
    }


def small_first(batch: Item) -> tuple[Tensor, Tensor]:
    is_small = batch["ids"][:, 0] < 4
    return is_small, torch.stack([is_small.sum(), batch["ids"].sum()])


def sorter_on(device: str, **options: Any) -> Sorter:
    return Sorter(lanes_of(torch.device(device)), numbers=2, **options)


def check(found: Any, batch: Item) -> None:
    is_small = batch["ids"][:, 0] < 4
    assert found.told() == [int(is_small.sum()), int(batch["ids"].sum())]
    order = torch.cat([is_small.nonzero(), (~is_small).nonzero()]).squeeze(1)
    for name, each in batch.items():
        assert torch.equal(found.batch[name].cpu(), each[order])


@pytest.mark.parametrize("device", DEVICES)
def test_batches_that_wait_are_not_overwritten_by_those_behind(device: str) -> None:
    sorter, batches = sorter_on(device), [batch_of(seed) for seed in range(30)]
    for first in range(0, 30, MOST_WAITING):
        mine = batches[first : first + MOST_WAITING]
        for sorting, batch in zip([sorter.sort([b], small_first) for b in mine], mine, strict=True):
            check(sorting, batch)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_that_look_alike_are_sorted_as_one(device: str) -> None:
    sorter = sorter_on(device)
    for first in range(0, 24, 4):
        mine = [batch_of(seed) for seed in range(first, first + 4)]
        assert len({str(sorter.alike(batch)) for batch in mine}) == 1
        whole = {name: torch.cat([each[name] for each in mine]) for name in mine[0]}
        check(sorter.sort(mine, small_first), whole)


def test_batches_that_do_not_look_alike_are_told_apart() -> None:
    sorter, batch = sorter_on("cpu"), batch_of(0)
    others = [
        batch_of(0, size=49),
        {"label": batch["label"], "ids": batch["ids"]},
        {"ids": batch["ids"].int(), "label": batch["label"]},
        {"ids": batch["ids"][:, :2], "label": batch["label"]},
    ]
    assert sorter.alike(batch) not in [sorter.alike(other) for other in others]
    alone = [batch | {"name": "a"}, batch | {"scale": torch.tensor(1.0)}, batch_of(0, size=0), {}]
    assert [sorter.alike(each) for each in alone] == [None] * 4
    assert sorter_on("cpu", take=lambda batch, places: batch).alike(batch) is None


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_more_sizes_than_are_captured(device: str) -> None:
    sorter = sorter_on(device)
    for seed in range(24):
        batch = batch_of(seed, size=20 + seed % 6)
        check(sorter.sort([batch], small_first), batch)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_from_the_device_and_with_more_than_tensors(device: str) -> None:
    sorter = sorter_on(device)
    for seed in range(6):
        batch = batch_of(seed)
        there = {name: each.to(device) for name, each in batch.items()}
        check(sorter.sort([there], small_first), batch)

    def take(batch: Any, places: Tensor) -> Any:
        tensors, name = batch
        return {each: value[places] for each, value in tensors.items()}, name

    def rule(batch: Any) -> tuple[Tensor, Tensor]:
        return small_first(batch[0])

    sorter = sorter_on(device, take=take)
    for seed in range(4):
        batch = batch_of(seed)
        found = sorter.sort([(batch, f"{seed}")], rule)
        found.told()
        assert found.batch[1] == f"{seed}"


@dataclass
class Derived:
    """Ids that the batch makes of its columns."""

    left: Tensor
    right: Tensor
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ids = torch.stack([self.left, self.right], 1)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_batch_makes_of_its_tensors_is_made_anew(device: str) -> None:
    def rule(batch: Derived) -> tuple[Tensor, Tensor]:
        is_small = batch.ids[:, 0] < 4
        return is_small, torch.stack([is_small.sum(), batch.ids.sum()])

    sorter = sorter_on(device)
    for seed in range(5):
        batch = Derived(*batch_of(seed)["ids"][:, :2].unbind(1))
        found = sorter.sort([batch], rule)
        is_small = batch.left < 4
        assert found.told() == [int(is_small.sum()), int(batch.ids.sum())]
        order = torch.cat([is_small.nonzero(), (~is_small).nonzero()]).squeeze(1)
        assert torch.equal(found.batch.ids.cpu(), batch.ids[order])


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_the_same_tensors_by_other_names_are_not_mixed_up(device: str) -> None:
    def rule(batch: Item) -> tuple[Tensor, Tensor]:
        return small_first({"ids": batch["ids"].unsqueeze(1), "label": batch["other"]})

    sorter = sorter_on(device)
    for seed in range(6):
        ids, other = batch_of(seed)["ids"][:, :2].unbind(1)
        batch = {"ids": ids, "other": other} if seed % 2 else {"other": other, "ids": ids}
        found = sorter.sort([batch], rule)
        assert found.told() == [int((ids < 4).sum()), int(ids.sum())]
        assert sorted(found.batch["other"].tolist()) == sorted(other.tolist())


@pytest.mark.gpu
def test_a_rule_that_waits_for_the_device_is_not_captured() -> None:
    def reads_back(batch: Item) -> tuple[Tensor, Tensor]:
        assert int(batch["ids"].max()) < 10
        return small_first(batch)

    sorter = sorter_on("cuda")
    for seed in range(6):
        batch = batch_of(seed)
        check(sorter.sort([batch], reads_back), batch)


def test_what_is_sorted_comes_after_no_plan() -> None:
    marked: list[str] = []

    class Noting(Lanes):
        def mark(self, name: Any) -> Any:
            marked.append(name)
            return super().mark(name)

    Sorter(Noting(torch.device("cpu")), numbers=2).sort([batch_of(0)], small_first)
    assert marked == ["sort"]
