"""A device compares ids that are looked up with those that were planned, and nobody waits for it.

Where there is no GPU, the kernel runs with Triton's interpreter, and the device's engine on a CPU.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import CASES, build, readout, train
from contracts import DEVICE, by_gpu
from hotrow.engine.gpu.id_check import IdCheck
from hotrow.kernels.triton.segments import segments_of

NUM_ROWS = 100
# Base, limit, padding index, column of two features.
FEATURES = torch.tensor([[0, 60, -1, 1], [60, 40, 5, 0]], device=DEVICE)


def found(given: tuple[Tensor, ...], planned: list[int], *, jagged: bool = False) -> int | None:
    """What a check finds, by segments and by ids in the order of lookups."""
    ids = torch.tensor(planned, device=DEVICE)
    segments = segments_of(ids)
    places = torch.tensor([1, 0], device=DEVICE) if jagged else None
    samples = (len(given[1]) - 1) // 2 if jagged else len(given[0])
    check = IdCheck(FEATURES, NUM_ROWS)
    check.note(3, 17)
    seen = []
    for by, sorted_by in ((segments.ids, (segments.order, segments.rank)), (ids, None)):
        check.launch(given, places, samples, by, sorted_by, 3)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seen.append(check.take())
        assert check.take() is None
    assert seen[0] == seen[1]
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_dense_ids(dtype: torch.dtype) -> None:
    # Columns (b, a) of three samples; 5 is the padding of b, and 100 stands for it.
    ids = torch.tensor([[3, 59], [5, 0], [39, 7]], dtype=dtype, device=DEVICE)
    planned = [59, 63, 0, 100, 7, 99]
    assert found((ids,), planned) is None
    assert found((torch.stack([ids, ids], 2)[:, :, 0],), planned) is None  # columns apart
    for place in range(6):
        other = ids.clone()
        other.view(-1)[place] = 1
        assert found((other,), planned) == 17


def test_dense_ids_of_one_feature() -> None:
    check = IdCheck(torch.tensor([[0, 9, -1, 0]], device=DEVICE), 9)
    ids = torch.tensor([4, 8], device=DEVICE)
    check.launch((ids,), None, 2, ids.clone(), None, 0)
    assert check.take() is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_jagged_ids(dtype: torch.dtype) -> None:
    # Keys (b, a): b has [1], [5, 2]; a has [10, 11], [].
    values = torch.tensor([1, 5, 2, 10, 11], dtype=dtype, device=DEVICE)
    offsets = torch.tensor([0, 1, 3, 5, 5], dtype=dtype, device=DEVICE)
    planned = [10, 11, 61, 100, 62]
    assert found((values, offsets), planned, jagged=True) is None
    assert found((values, offsets), [*planned, 100, 100], jagged=True) is None  # filled up
    for place in range(5):
        other = values.clone()
        other[place] = 3
        assert found((other, offsets), planned, jagged=True) == 17
    for place, value in ((2, 2), (2, 4), (4, 4), (4, 6), (0, -4), (2, 1 << 20)):
        other = offsets.clone()
        other[place] = value
        assert found((values, other), planned, jagged=True) == 17
    other = offsets.clone()
    other[1] = 2  # another bag: the lookup goes by the offsets as they are
    assert found((values, other), planned, jagged=True) is None


def test_no_ids() -> None:
    empty = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert found((empty,), []) is None


# -- in training ---------------------------------------------------------------------------


def by_data(ids: Any) -> None:
    values = ids if isinstance(ids, Tensor) else ids.values()
    values.data.copy_(torch.where(values == 3, 2, 3))


def tight(case: str, strategy: str = "lookahead") -> hotrow.EmbeddingBagCollection:
    return build(CASES[case], strategy=strategy, budget=20_000, **by_gpu())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", ["one-hot", "multi-hot", "unpooled", "two-widths"])
@pytest.mark.parametrize("strategy", ["lookahead", "all-fast"])
def test_ids_that_are_as_they_were_are_no_error(case: str, strategy: str) -> None:
    train(tight(case, strategy), CASES[case].batches(4), depth=2)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", ["one-hot", "multi-hot"])
@pytest.mark.parametrize("at", [1, 6])
def test_a_write_that_no_version_shows_is_an_error_that_names_the_batch(case: str, at: int) -> None:
    embedding = tight(case)

    def run() -> None:
        for number, batch in enumerate(hotrow.ahead(CASES[case].batches(7), embedding)):
            if number == at:
                by_data(batch)
            readout(embedding(batch)).backward()

    with pytest.raises(RuntimeError, match=rf"batch {at} of this pass, .* ids were changed"):
        run()
    train(embedding, CASES[case].batches(3))  # what follows is no error


def test_a_loop_that_is_left_warns() -> None:
    embedding = tight("one-hot")

    def leave() -> None:
        for batch in hotrow.ahead(CASES["one-hot"].batches(4), embedding):
            by_data(batch)
            readout(embedding(batch)).backward()
            break

    with pytest.warns(UserWarning, match=r"batch 0 of this pass, .* ids were changed"):
        leave()


def test_a_write_that_a_version_shows_is_looked_up_as_it_is() -> None:
    embedding = tight("one-hot")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="these ids are not the ones hotrow.ahead")
        for batch in hotrow.ahead([x.clone() for x in CASES["one-hot"].batches(4)], embedding):
            batch.clamp_(max=2)
            readout(embedding(batch)).backward()
