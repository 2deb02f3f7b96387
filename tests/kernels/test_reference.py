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
def test_ids_come_once_and_ascending(count: int, rows: int) -> None:
    ids = random_ids(count, rows)
    assert reference.sort_ids(ids, rows).ids.tolist() == sorted(set(ids.tolist()) - {-1})


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_each_run_of_the_order_lists_an_ids_positions_in_the_batchs_order(rows: int) -> None:
    ids = random_ids(200, rows)
    found = reference.sort_ids(ids, rows)
    for place, row in enumerate(found.ids.tolist()):
        run = found.order[found.starts[place] : found.starts[place + 1]]
        assert run.tolist() == (ids == row).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_the_inverse_leads_every_lookup_back_to_its_id_and_padding_to_the_end(rows: int) -> None:
    ids = random_ids(200, rows)
    found = reference.sort_ids(ids, rows)
    assert torch.equal(torch.cat([found.ids, ids_of(-1)])[found.inverse], ids)


def test_ids_beyond_32_bits_are_not_cut() -> None:
    ids = ids_of(2**40 + 5, 5, 2**40 + 5, 2**32 + 5)
    assert reference.sort_ids(ids, LARGE).ids.tolist() == [5, 2**32 + 5, 2**40 + 5]


def test_a_batch_of_padding_has_no_ids_and_no_runs() -> None:
    found = reference.sort_ids(ids_of(-1, -1, -1), SMALL)
    assert (found.ids.numel(), found.order.numel(), found.starts.tolist()) == (0, 0, [0])


# -- pool --------------------------------------------------------------------------------


def bags(count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets with empty bags among them, and weights."""
    lengths = torch.randint(0, 6, (count,))
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    return torch.randint(rows, (total,)), offsets, torch.rand(total)


def pooled_in_float64(
    vectors: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    terms = vectors.double()[index]
    if weights is not None:
        terms = terms * weights.double()[:, None]
    ends = offsets.tolist()
    return torch.stack([terms[low:high].sum(0) for low, high in pairwise(ends)]).float()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_a_bag_is_the_sum_of_its_lookups(dim: int, weighted: bool) -> None:
    vectors = torch.randn(50, dim)
    index, offsets, weights = bags(40, 50)
    given = weights if weighted else None
    found = reference.pool(vectors, index, offsets, given, None)
    torch.testing.assert_close(found, pooled_in_float64(vectors, index, offsets, given))


def test_a_bag_is_divided_where_a_mean_is_asked() -> None:
    vectors, divisor = torch.randn(50, 5), torch.randint(1, 4, (40, 1)).float()
    index, offsets, _ = bags(40, 50)
    whole = reference.pool(vectors, index, offsets, None, None)
    assert torch.equal(reference.pool(vectors, index, offsets, None, divisor), whole / divisor)


def test_without_offsets_every_lookup_is_its_own_vector() -> None:
    vectors, index = torch.randn(9, 4), torch.randint(9, (20,))
    assert torch.equal(reference.pool(vectors, index, None, None, None), vectors[index])


def test_bags_without_any_lookup_are_zero() -> None:
    found = reference.pool(torch.randn(3, 4), ids_of(), ids_of(0, 0, 0), None, None)
    assert torch.equal(found, torch.zeros(2, 4))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 8, 33])
def test_a_bags_bits_do_not_depend_on_the_bags_beside_it(dim: int, weighted: bool) -> None:
    vectors = torch.randn(50, dim)
    index, offsets, weights = bags(40, 50)
    given = weights if weighted else None
    together = reference.pool(vectors, index, offsets, given, None)
    for bag in range(40):
        mine = slice(int(offsets[bag]), int(offsets[bag + 1]))
        own = ids_of(0, mine.stop - mine.start)
        alone = reference.pool(vectors, index[mine], own, weights[mine] if weighted else None, None)
        assert torch.equal(alone[0], together[bag])


@pytest.mark.parametrize("dim", [1, 3, 8, 33])
def test_a_bags_bits_do_not_depend_on_where_its_rows_lie(dim: int) -> None:
    vectors = torch.randn(50, dim)
    index, offsets, weights = bags(40, 50)
    moved = torch.randperm(50)
    elsewhere = torch.empty_like(vectors)
    elsewhere[moved] = vectors
    assert torch.equal(
        reference.pool(vectors, index, offsets, weights, None),
        reference.pool(elsewhere, moved[index], offsets, weights, None),
    )


def test_take_gives_the_first_columns_of_the_chosen_rows() -> None:
    rows = torch.randn(10, 6)
    found = reference.take(rows, ids_of(7, 2, 7), 4)
    assert torch.equal(found, rows[[7, 2, 7], :4])
    assert found.is_contiguous()


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


def test_a_batch_without_lookups_has_no_gradients() -> None:
    found = reference.sort_ids(ids_of(), SMALL)
    assert reference.sum_by_row(torch.randn(3, 4), ids_of(), None, found).shape == (0, 4)


def test_gradients_of_several_batches_are_joined_row_by_row_in_the_order_given() -> None:
    ids = reference.sort_ids(ids_of(4, 7, 4, 4), SMALL)
    grads = torch.tensor([[2.0**24], [5.0], [1.0], [-(2.0**24)]])
    # (2**24 + 1) - 2**24 is 0 in this order; any other order would give 1.
    assert reference.sum_pairs(grads, ids).tolist() == [[0.0], [5.0]]


# -- weight_grads and row_sum ------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 8, 33])
def test_weight_gradients_are_autograds(dim: int) -> None:
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


def test_a_weights_gradient_has_the_same_bits_alone_and_in_company() -> None:
    vectors, grads = torch.randn(300, 33), torch.randn(300, 33)
    every = torch.arange(300)
    together = reference.weight_grads(vectors, every, every, grads)
    for place in range(0, 300, 37):
        one = every[place : place + 1]
        assert torch.equal(reference.weight_grads(vectors, one, one, grads), together[one])


@pytest.mark.parametrize("width", range(1, 71))
def test_row_sum_adds_every_column_once(width: int) -> None:
    values = torch.randint(-1000, 1000, (5, width)).float()  # whole numbers: no rounding
    assert torch.equal(reference.row_sum(values), values.sum(1, keepdim=True))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 33, 64, 70])
def test_a_rows_sum_has_the_same_bits_alone_and_in_company(width: int) -> None:
    values = torch.randn(1000, width)
    together = reference.row_sum(values)
    for place in range(0, 1000, 111):
        assert torch.equal(reference.row_sum(values[place : place + 1])[0], together[place])


def test_row_sum_rounds_no_worse_than_a_tree() -> None:
    values = torch.rand(200, 70)
    error = (reference.row_sum(values).double() - values.double().sum(1, keepdim=True)).abs()
    depth = 8  # of halvings of 70 columns, one rounding each, and one more for an odd column
    bound = 2 * depth * torch.finfo(torch.float32).eps / 2 * values.double().sum(1, keepdim=True)
    assert bool((error <= bound).all())


# -- fill --------------------------------------------------------------------------------


def test_fill_writes_leaving_rows_back_and_fetches_entering_ones() -> None:
    slots, store = torch.randn(4, 3), torch.randn(10, 3)
    old_slots, old_store = slots.clone(), store.clone()
    reference.fill(slots, store, Moves(ids_of(2, 0), ids_of(7, 1), ids_of(3, 8)))
    assert torch.equal(store[[7, 1]], old_slots[[2, 0]])
    assert torch.equal(slots[[2, 0]], old_store[[3, 8]])


def test_fill_touches_no_other_slot_and_no_other_row() -> None:
    slots, store = torch.randn(4, 3), torch.randn(10, 3)
    old_slots, old_store = slots.clone(), store.clone()
    reference.fill(slots, store, Moves(ids_of(2, 0), ids_of(7, 1), ids_of(3, 8)))
    assert torch.equal(slots[[1, 3]], old_slots[[1, 3]])
    others = [0, 2, 3, 4, 5, 6, 8, 9]
    assert torch.equal(store[others], old_store[others])


def test_fill_leaves_out_what_is_marked_as_none() -> None:
    slots, store = torch.randn(4, 3), torch.randn(10, 3)
    old_slots, old_store = slots.clone(), store.clone()
    reference.fill(slots, store, Moves(ids_of(1, 3), ids_of(-1, 6), ids_of(5, -1)))
    assert torch.equal(slots[1], old_store[5])
    assert torch.equal(slots[3], old_slots[3])
    assert torch.equal(store[6], old_slots[3])
    assert int((store != old_store).any(1).sum()) == 1


def test_a_row_that_leaves_and_enters_at_once_keeps_its_newest_bytes() -> None:
    slots, store = torch.randn(4, 3), torch.randn(10, 3)
    newest = slots[1].clone()
    reference.fill(slots, store, Moves(ids_of(1), ids_of(6), ids_of(6)))
    assert torch.equal(slots[1], newest)
    assert torch.equal(store[6], newest)
