"""The parts that already run on a GPU: the reference kernels and the planner."""

from __future__ import annotations

import pytest
import torch

import hotrow
from builders import CASES, skewed
from hotrow.evict import EVICTIONS
from hotrow.kernels import reference
from hotrow.planner import Hold, Planner
from hotrow.scratchpad import Scratchpad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_reference_kernels_agree_on_both_devices() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (500,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = skewed(generator, 300, int(offsets[-1]))
    weights = torch.rand(ids.numel(), generator=generator)
    vectors = torch.randn(300, 33, generator=generator)
    grads = torch.randn(500, 33, generator=generator)
    bag_of = torch.repeat_interleave(torch.arange(500), lengths)

    def run(device: str) -> list[torch.Tensor]:
        on = [x.to(device) for x in (ids, offsets, weights, vectors, grads, bag_of)]
        ids_, offsets_, weights_, vectors_, grads_, bag_of_ = on
        order = reference.sort_ids(ids_, 300)
        pooled = reference.pool(vectors_, ids_, offsets_, weights_, None)
        summed = reference.sum_by_row(grads_, bag_of_, weights_, order)
        return [x.cpu() for x in (order.ids, order.order, order.inverse, pooled, summed)]

    torch.testing.assert_close(run("cuda"), run("cpu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense_map", [True, False], ids=["dense", "hash"])
@pytest.mark.parametrize("order", EVICTIONS)
def test_the_planner_stays_consistent_on_a_gpu(order: str, dense_map: bool) -> None:
    device = torch.device("cuda")
    pad = Scratchpad(400, 0, 5000, device, dense_map=dense_map)
    planner = Planner(pad, hold=Hold(1, 0), eviction=EVICTIONS[order])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = reference.sort_ids(skewed(generator, 5000, 200).to(device), 5000)
        plan = planner.plan(ids)
        assert plan is not None
        assert torch.equal(pad.row_of_slot[plan.row_slots[:-1]], ids.ids)
        planner.check()


def test_a_collection_on_a_gpu_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="device 'cuda' is not supported by this version"):
        hotrow.EmbeddingBagCollection(
            CASES["one-hot"].tables, hotrow.SGD(), budget=4000, device="cuda"
        )
