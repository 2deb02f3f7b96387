"""The reference kernels mean what they say, and a row's bits depend on that row alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hotrow.kernels import reference
from hotrow.kernels.reference import CHUNK, Moves

SMALL, LARGE = 1000, 2**41  # tables that fit 32-bit keys, and tables that do not


def ids_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_ids(count: int, rows: int) -> Tensor:
    """Ids with repeats and padding among them."""
    few = torch.randint(rows, (max(1, count // 3),))
    ids = few[torch.randint(few.numel(), (count,))]
    return ids.masked_fill(torch.rand(count) < 0.2, -1)


# -- sort_ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [SMALL, LARGE])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 500])
def test_ids_come_once_ascending_with_their_positions_in_the_batchs_order(
    count: int, rows: int
) -> None:
    ids = random_ids(count, rows)
    found = reference.sort_ids(ids, rows)
    assert found.ids.tolist() == sorted(set(ids.tolist()) - {-1})
    for place, row in enumerate(found.ids.tolist()):
        run = found.order[found.starts[place] : found.starts[place + 1]]
        assert run.tolist() == (ids == row).nonzero().squeeze(1).tolist()
    # Every lookup leads back to its id, and padding to the end.
    assert torch.equal(torch.cat([found.ids, ids_of(-1)])[found.inverse], ids)


def test_ids_beyond_32_bits_are_not_cut_and_padding_has_none() -> None:
    ids = ids_of(2**40 + 5, 5, 2**40 + 5, 2**32 + 5)
    assert reference.sort_ids(ids, LARGE).ids.tolist() == [5, 2**32 + 5, 2**40 + 5]
    found = reference.sort_ids(ids_of(-1, -1, -1), SMALL)
    assert (found.ids.numel(), found.order.numel(), found.starts.tolist()) == (0, 0, [0])


# -- pool --------------------------------------------------------------------------------


def bags(count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets with empty bags among them, and weights."""
    lengths = torch.randint(0, 6, (count,))
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    return torch.randint(rows, (total,)), offsets, torch.rand(total)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 8, 33, 64])
def test_a_bag_is_the_sum_of_its_lookups_with_bits_that_depend_on_it_alone(
    dim: int, weighted: bool
) -> None:
    vectors = torch.randn(50, dim)
    index, offsets, weights = bags(40, 50)
    given = weights if weighted else None
    together = reference.pool(vectors, index, offsets, given, None)
    terms = vectors.double()[index] * (weights.double()[:, None] if weighted else 1)
    right = [terms[low:high].sum(0) for low, high in pairwise(offsets.tolist())]
    torch.testing.assert_close(together, torch.stack(right).float())
    for bag in range(40):
        part = slice(int(offsets[bag]), int(offsets[bag + 1]))
        own = ids_of(0, part.stop - part.start)
        alone = reference.pool(vectors, index[part], own, weights[part] if weighted else None, None)
        assert torch.equal(alone[0], together[bag])
    moved = torch.randperm(50)  # wherever its rows lie
    elsewhere = torch.empty_like(vectors)
    elsewhere[moved] = vectors
    assert torch.equal(reference.pool(elsewhere, moved[index], offsets, given, None), together)


def test_means_single_lookups_empty_bags_and_columns() -> None:
    vectors, divisor = torch.randn(50, 5), torch.randint(1, 4, (40, 1)).float()
    index, offsets, _ = bags(40, 50)
    sums = reference.pool(vectors, index, offsets, None, None)
    assert torch.equal(reference.pool(vectors, index, offsets, None, divisor), sums / divisor)
    assert torch.equal(reference.pool(vectors, index, None, None, None), vectors[index])
    empty = reference.pool(vectors, ids_of(), ids_of(0, 0, 0), None, None)
    assert torch.equal(empty, torch.zeros(2, 5))
    columns = reference.take(vectors, ids_of(7, 2, 7), 4)
    assert torch.equal(columns, vectors[[7, 2, 7], :4])
    assert columns.is_contiguous()


# -- sum_by_row --------------------------------------------------------------------------


def summed(grads: Tensor, ids: Tensor, weights: Tensor | None = None) -> dict[int, Tensor]:
    """The gradient of each row, with one bag for each lookup."""
    found = reference.sort_ids(ids, SMALL)
    sums = reference.sum_by_row(grads, torch.arange(ids.numel()), weights, found)
    return dict(zip(found.ids.tolist(), sums, strict=True))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_a_rows_gradient_is_the_sum_over_its_lookups(dim: int, weighted: bool) -> None:
    # Row 3 receives 5,000 gradients, others a few.
    ids = torch.cat([torch.full((5000,), 3), torch.randint(10, 20, (100,)), ids_of(-1, -1)])
    ids = ids[torch.randperm(ids.numel())]
    bag_of = torch.arange(ids.numel()) // 2
    grads = torch.rand(int(bag_of[-1]) + 1, dim)
    weights = torch.rand(ids.numel()) if weighted else None
    found = reference.sort_ids(ids, SMALL)
    sums = reference.sum_by_row(grads, bag_of, weights, found)
    terms = grads.double()[bag_of] * (1 if weights is None else weights.double()[:, None])
    right = torch.stack([terms[ids == row].sum(0) for row in found.ids])
    torch.testing.assert_close(sums.double(), right, rtol=2e-6, atol=0)


def test_thousands_of_small_gradients_survive_beside_a_large_one() -> None:
    # One after the other, every 1 would be lost: 2**24 + 1 is 2**24 in float32.
    grads = torch.ones(5000, 1)
    grads[0] = 2.0**24
    total = summed(grads, torch.full((5000,), 3))[3]
    assert abs(float(total) - (2**24 + 4999)) <= CHUNK
    assert summed(torch.randn(3, 4), ids_of()) == {}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 8, 33, 64])
@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("beside", [1, 10 * CHUNK], ids=["cold company", "hot company"])
def test_a_rows_gradient_has_the_same_bits_alone_and_in_company(
    beside: int, count: int, dim: int, weighted: bool
) -> None:
    ids = torch.cat([torch.full((count,), 5), torch.full((beside,), 2), torch.full((beside,), 9)])
    ids = ids[torch.randperm(ids.numel())]
    grads, weights = torch.randn(ids.numel(), dim), torch.rand(ids.numel())
    mine = ids == 5
    together = summed(grads, ids, weights if weighted else None)[5]
    alone = summed(grads[mine], ids[mine], weights[mine] if weighted else None)[5]
    assert torch.equal(alone, together)


def test_gradients_of_several_batches_are_joined_row_by_row_in_the_order_given() -> None:
    ids = reference.sort_ids(ids_of(4, 7, 4, 4), SMALL)
    grads = torch.tensor([[2.0**24], [5.0], [1.0], [-(2.0**24)]])
    # (2**24 + 1) - 2**24 is 0 in this order; any other order would give 1.
    assert reference.sum_pairs(grads, ids).tolist() == [[0.0], [5.0]]


# -- weight_grads and row_sum ------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 8, 33])
def test_weight_gradients_are_autograds_alone_and_in_company(dim: int) -> None:
    vectors = torch.randn(50, dim)
    index, offsets, weights = bags(40, 50)
    weights.requires_grad_()
    out = functional.embedding_bag(
        index, vectors, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    grads = torch.randn_like(out)
    out.backward(grads)
    bag_of = torch.repeat_interleave(torch.arange(40), offsets.diff())
    found = reference.weight_grads(vectors, index, bag_of, grads)
    torch.testing.assert_close(found, weights.grad)
    for place in range(0, len(index), 7):
        one = slice(place, place + 1)
        alone = reference.weight_grads(vectors, index[one], bag_of[one], grads)
        assert torch.equal(alone, found[one])


@pytest.mark.parametrize("width", [*range(1, 20), 31, 32, 33, 63, 64, 65, 70])
def test_row_sum_adds_every_column_once_with_bits_of_the_row_alone(width: int) -> None:
    values = torch.randint(-1000, 1000, (5, width)).float()  # whole numbers: no rounding
    assert torch.equal(reference.row_sum(values), values.sum(1, keepdim=True))
    values = torch.randn(200, width)
    together = reference.row_sum(values)
    for place in range(0, 200, 37):
        assert torch.equal(reference.row_sum(values[place : place + 1])[0], together[place])


# -- fill --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "leaving", "entering"),
    [((2, 0), (7, 1), (3, 8)), ((1, 3), (-1, 6), (5, -1)), ((1,), (6,), (6,)), ((), (), ())],
    ids=["exchange", "one leaves and one enters", "a row stays", "nothing"],
)
def test_fill_moves_what_leaves_and_what_enters_and_nothing_else(
    slots: tuple[int, ...], leaving: tuple[int, ...], entering: tuple[int, ...]
) -> None:
    rows, store = torch.randn(4, 3), torch.randn(10, 3)
    want_rows, want_store = rows.clone(), store.clone()
    for slot, row in zip(slots, leaving, strict=True):
        if row >= 0:
            want_store[row] = rows[slot]
    for slot, row in zip(slots, entering, strict=True):
        if row >= 0:
            want_rows[slot] = want_store[row]  # one that left at once has its newest bytes
    reference.fill(rows, store, Moves(ids_of(*slots), ids_of(*leaving), ids_of(*entering)))
    assert torch.equal(rows, want_rows)
    assert torch.equal(store, want_store)
