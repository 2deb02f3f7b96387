"""Norms of the gradients of tables, and what was done to them since, in Triton as on the host."""

from __future__ import annotations

import math

import pytest
import torch

from hotrow.kernels.triton.norms import judge, table_norms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARK = 2.0**-40
BASES = (0, 40, 45, 100)  # three tables; 100 is padding


@pytest.mark.parametrize("count", [0, 1, 70])
@pytest.mark.parametrize("masked", [False, True])
def test_norms_are_those_of_each_tables_rows(count: int, masked: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randperm(100, generator=draw)[:count].sort()[0]
    ids = torch.cat([ids, torch.full((2,), 100)])[: count + 2] if count else ids
    grads = torch.randn(len(ids), 5, generator=draw)
    valid = torch.rand(len(ids), generator=draw) < 0.7 if masked else ids < 100
    norms, marked = torch.full((4,), -1.0), torch.full((4, 1, 2), -1.0)
    places = [3, 0, 2]
    there = [x.to(DEVICE) for x in (norms, marked)]
    table_norms(
        ids.int().to(DEVICE),
        grads.to(DEVICE),
        valid.to(DEVICE),
        torch.tensor(BASES, device=DEVICE),
        *there,
        MARK,
        torch.tensor(places, device=DEVICE),
    )
    for table, place in enumerate(places):
        mine = (ids >= BASES[table]) & (ids < BASES[table + 1]) & valid
        expected = float(grads[mine].double().norm())
        assert there[0][place].item() == pytest.approx(expected, rel=1e-6, abs=0)
        assert there[1][place, 0].tolist() == [there[0][place].item(), MARK]
    assert there[0][1].item() == -1.0  # another group's table


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of infinity
def test_only_multiplications_are_what_may_have_happened_to_a_norm() -> None:
    inf, nan = math.inf, math.nan
    norms = torch.tensor([2.0, 2.0, 2.0, 0.0, 2.0, 2.0], device=DEVICE)
    marked = torch.tensor(
        [[1.0, MARK / 2], [2.0, MARK], [0.0, 0.0], [0.0, MARK], [inf, inf], [nan, nan]]
    ).to(DEVICE)
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    factors, kept = judge(marked, norms, MARK, 1e-4, bad)
    assert factors[:5].tolist() == [0.5, 1.0, 0.0, 1.0, inf]
    assert kept.tolist() == [True, True, False, True, True, True]
    assert bad.item() == 0
    marked[1, 0] = 1.5  # clipped by value
    judge(marked, norms, MARK, 1e-4, bad)
    assert bad.item() == 1
