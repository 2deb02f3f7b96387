"""Two lists of gradients by row are joined in Triton as the host joins them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotrow.kernels.triton.merge import Pairs, merge
from hotrow.kernels.triton.update import Tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS = 90


def pairs(count: int, padding: int, seed: int, *, masked: bool, dtype: torch.dtype) -> Pairs:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(NUM_ROWS, generator=draw)[:count].sort()[0]
    ids = torch.cat([ids, torch.full((padding,), NUM_ROWS)]).to(dtype)
    grads = torch.randn(len(ids), 5, generator=draw)
    grads[count:] = torch.nan  # those of padding were never written
    valid = torch.rand(len(ids), generator=draw) < 0.6 if masked else None
    there = [None if x is None else x.to(DEVICE) for x in (ids, grads, valid)]
    return Pairs(*there)  # type: ignore[arg-type]


def by_row(given: Pairs) -> dict[int, Tensor]:
    valid = torch.ones(len(given.ids), dtype=torch.bool) if given.valid is None else given.valid
    found = zip(given.ids.tolist(), given.grads.cpu(), valid.tolist(), strict=True)
    return {row: grad for row, grad, is_valid in found if is_valid and row < NUM_ROWS}


@pytest.mark.parametrize("masked", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (7, 0), (1, 1), (40, 33), (90, 90), (3, 90)])
@pytest.mark.parametrize("padding", [(0, 0), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_are_joined_by_row(
    masked: tuple[bool, bool], counts: tuple[int, int], padding: tuple[int, int], dtype: torch.dtype
) -> None:
    given = [pairs(counts[k], padding[k], k, masked=masked[k], dtype=dtype) for k in range(2)]
    first, second = map(by_row, given)
    joined, count = merge(given[0], given[1], NUM_ROWS)
    expected = {
        row: first[row] + second[row] if row in first and row in second else grad
        for row, grad in {**second, **first}.items()
    }
    ids = joined.ids.tolist()
    assert ids[: int(count)] == sorted(expected)  # no row without a gradient
    assert set(ids[int(count) :]) <= {NUM_ROWS}
    found = by_row(joined)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[row], expected[row]) for row in expected)


def test_what_was_done_to_the_first_list_is_done_before_it_is_joined() -> None:
    given = [pairs(40, 2, k, masked=k == 1, dtype=torch.int32) for k in range(2)]
    tables = Tables(
        torch.tensor([0, 30, 60], device=DEVICE),
        3,
        NUM_ROWS,
        torch.tensor([3, 0, 1], device=DEVICE),  # where they stand among four
        torch.tensor([0.5, 7.0, torch.nan, 3.0], device=DEVICE),
        torch.tensor([True, False, True, True], device=DEVICE),
    )
    first, second = map(by_row, given)
    factors = [3.0, 0.5, None]  # of the three tables; None: their gradients were dropped
    scaled = {row: grad * factors[row // 30] for row, grad in first.items() if row < 60}
    for other in (given[1], Pairs(given[1].ids[:0], given[1].grads[:0])):
        rows = second if other is given[1] else {}
        found = by_row(merge(given[0], other, NUM_ROWS, tables)[0])
        assert found.keys() == scaled.keys() | rows.keys()
        for row, grad in found.items():
            parts = [x[row] for x in (scaled, rows) if row in x]
            assert torch.equal(grad, sum(parts[1:], parts[0]))


def test_a_row_of_the_whole_table_has_a_place() -> None:
    given = pairs(NUM_ROWS, 3, 0, masked=False, dtype=torch.int64)
    joined, count = merge(given, given, NUM_ROWS)
    assert count.item() == NUM_ROWS
    assert joined.ids.tolist() == [*range(NUM_ROWS), NUM_ROWS]
    assert torch.equal(joined.grads[:NUM_ROWS].cpu(), 2 * given.grads[:NUM_ROWS].cpu())
