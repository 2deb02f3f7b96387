"""Samples with a history keep what they are given, feature by feature."""

import pytest
import torch
from torch import Tensor

from hotrow.data import SequenceBatch
from hotrow.inputs.tree import only_tensors, to_device

IDS = {"user": torch.arange(6).view(2, 3), "item": 10 + torch.arange(6).view(2, 3)}


def make(lengths: Tensor | None = None, **changes: Tensor) -> SequenceBatch:
    return SequenceBatch.from_ids(torch.rand(2, 3, 1), {**IDS, **changes}, torch.ones(2), lengths)


def test_ids_stand_feature_by_feature_and_sample_by_sample() -> None:
    batch = make()
    assert batch.sparse.keys() == ["user", "item"]
    assert batch.sparse.values().tolist() == [*range(6), *range(10, 16)]
    assert batch.sparse.offsets().tolist() == [0, 3, 6, 9, 12]
    assert len(batch) == 2


def test_without_lengths_nothing_is_padding() -> None:
    assert make().lengths.tolist() == [2, 2]


def test_a_batch_is_nothing_but_tensors_so_that_its_step_can_be_captured() -> None:
    assert only_tensors(make())
    assert only_tensors(make(torch.tensor([0, 1])))


def test_a_batch_moves_with_all_it_has() -> None:
    moved = to_device(make(torch.tensor([0, 1])), torch.device("meta"))
    tensors = (moved.dense, moved.sparse.values(), moved.sparse.offsets(), moved.lengths)
    assert all(each.device.type == "meta" for each in (*tensors, moved.label))


def test_ids_of_another_shape_are_named() -> None:
    with pytest.raises(ValueError, match=r"'item' has ids \[2, 2\]; dense has 2 samples of 3"):
        make(item=torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(("length", "sample"), [(3, 1), (-1, 1)])
def test_a_length_that_cannot_be_is_named(length: int, sample: int) -> None:
    with pytest.raises(ValueError, match=f"sample {sample} has a history of {length} steps.* 2 "):
        make(torch.tensor([0, length]))


def test_lengths_are_one_per_sample() -> None:
    with pytest.raises(ValueError, match="one number for each of 2 samples"):
        make(torch.tensor([1]))


def test_dense_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dense must be \[batch, steps, features\]"):
        SequenceBatch.from_ids(torch.rand(2, 3), IDS, torch.ones(2))
