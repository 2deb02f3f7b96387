"""Checksums of whole batches wait for no device."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.distributed.whole_batches import checksum_of
from hotrow.engine.split_batch import Parted
from hotrow.inputs.rank_part import RankPart
from hotrow.systems.hotline.split import Splitter
from hotrow.training.whole_batches import WholeBatches
from rank_systems import SIZE, clicks, model

ON_HOST = torch.arange(12).view(6, 2)
ON_DEVICE = ON_HOST.to("meta")  # whose values cannot be read, as if they were on their way


def checksum(batch: Any) -> int:
    found: deque[int] = deque()
    assert list(WholeBatches(RankPart(), len, None).parts([batch], found)) == [batch]
    return found.pop()


def parted(batch: Tensor, given: Tensor | None = None) -> Parted:
    return Parted(batch, 2, 6, lambda x, low, high: x[low:high], lambda: True, given=given)


def test_a_batch_that_a_device_sorts_has_the_checksum_of_the_given_one() -> None:
    assert checksum(parted(ON_DEVICE, ON_HOST)) == checksum_of([ON_HOST])
    assert checksum(parted(ON_DEVICE, ON_HOST + 1)) != checksum_of([ON_HOST])
    assert checksum(parted(ON_HOST)) == checksum(ON_HOST) == checksum_of([ON_HOST])


def test_tensors_of_a_device_are_told_apart_by_their_shapes() -> None:
    assert checksum(ON_DEVICE) == checksum(ON_DEVICE.clone())
    others = (ON_DEVICE[:5], ON_DEVICE.float(), ON_DEVICE.T)
    assert len({checksum(ON_DEVICE), *map(checksum, others)}) == 4


@pytest.mark.gpu
def test_a_gpu_that_sorts_a_batch_leaves_the_given_one() -> None:
    embedding = model("static", device="cuda").embedding
    splitter = Splitter({"": embedding}, lambda batch: batch.sparse)
    embedding.reserve(SIZE)
    hot = embedding.pin_rows({"cat_0": torch.arange(50)})
    splitter.pin({"": hot})
    batch = clicks().batch(0)
    found = splitter.sort(batch)().parted
    assert found.batch.sparse.is_cuda
    assert found.given is batch
