"""The specification of every operation, in plain PyTorch.

Promise behind "exact": what these functions compute for a row, or for a bag, depends on that row
or bag alone, never on its slot, its place in a tensor or the rows beside it. Nothing promises
that PyTorch's vector loops and scalar tails round a fused multiply and add alike, so only single,
correctly rounded operations are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 32  # gradients of one row are summed in chunks of this many, then chunk by chunk
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SortedIds:
    """The lookups of a batch sorted by id, stably; padding is left out."""

    ids: Tensor  # [U] int64, each once, ascending
    order: Tensor  # [L - padding] int64: positions in the batch, sorted by id
    starts: Tensor  # [U + 1] int64: where each id's run begins in `order`
    inverse: Tensor  # [L] int64: the id's place in `ids`; U for padding


def sort_ids(ids: Tensor, num_rows: int) -> SortedIds:
    """Sort once per batch; planning, lookup and update all read from the result."""
    # A radix sort of 32-bit keys is three times as fast as one of 64-bit keys.
    keys = ids.int() if num_rows <= _INT32_MAX else ids
    keys, order = torch.sort(keys, stable=True)
    num_padding = int(torch.searchsorted(keys, keys.new_zeros(())))
    keys, order = keys[num_padding:], order[num_padding:]
    # One entry more: the last run ends where another would begin.
    is_first = torch.ones(keys.numel() + 1, dtype=torch.bool, device=keys.device)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:-1])
    starts = is_first.nonzero().squeeze(1)
    unique = keys[starts[:-1]].long()
    inverse = torch.full_like(ids, unique.numel())
    inverse[order] = is_first[:-1].cumsum(0) - 1
    return SortedIds(unique, order, starts, inverse)


def places(ids: Tensor, keys: Tensor) -> Tensor:
    """Where each id stands among distinct `keys`, -1 if it does not."""
    ordered, order = keys.sort()
    place = torch.searchsorted(ordered, ids).clamp_(max=ordered.numel() - 1)
    return torch.where(ordered[place] == ids, order[place], -1)


def take(rows: Tensor, index: Tensor, dim: int) -> Tensor:
    """The first `dim` columns of the rows at `index`, contiguous."""
    return rows[:, :dim].index_select(0, index)


def pool(
    vectors: Tensor,  # [R, dim] contiguous
    index: Tensor,  # [L] int64 into vectors
    offsets: Tensor | None,  # [bags + 1]; None: one lookup per bag
    weights: Tensor | None,  # [L]
    divisor: Tensor | None,  # [bags, 1]
) -> Tensor:
    """One vector per bag: the (weighted) sum of its lookups, divided where a mean is asked."""
    if offsets is None:
        return vectors.index_select(0, index)
    sums = _bag_sum(vectors, index, offsets, weights)
    return sums if divisor is None else sums / divisor


def _bag_sum(vectors: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    if index.numel() == 0:  # embedding_bag wants at least one index in some builds
        return vectors.new_zeros(offsets.numel() - 1, vectors.shape[1])
    return functional.embedding_bag(
        index,
        vectors,
        offsets,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )


def sum_by_row(
    grads: Tensor,  # [bags, dim]: the gradient of each bag's vector, divided where it was a mean
    bag_of: Tensor,  # [L] int64
    weights: Tensor | None,  # [L]
    ids: SortedIds,
) -> Tensor:
    """The gradient of each unique row, [U, dim].

    Two levels, so that a row with thousands of lookups keeps its precision, in an order that
    depends on the row's own positions alone: chunks counted from the run's start, then chunks.
    """
    bags = bag_of[ids.order]
    ordered = None if weights is None else weights[ids.order]
    counts = ids.starts.diff()
    if counts.numel() == 0 or int(counts.max()) <= CHUNK:
        return _bag_sum(grads, bags, ids.starts, ordered)
    chunks = (counts + CHUNK - 1) // CHUNK
    ends = chunks.cumsum(0)
    owner = torch.repeat_interleave(chunks)
    place = torch.arange(owner.numel(), device=owner.device) - (ends - chunks)[owner]
    chunk_starts = torch.cat([ids.starts[:-1][owner] + place * CHUNK, ids.starts[-1:]])
    partial = _bag_sum(grads, bags, chunk_starts, ordered)
    every = torch.arange(owner.numel(), device=owner.device)
    return _bag_sum(partial, every, functional.pad(ends, (1, 0)), None)


def sum_pairs(grads: Tensor, ids: SortedIds) -> Tensor:
    """Join gradients of several batches, already summed by row, in the order they were given."""
    return _bag_sum(grads, ids.order, ids.starts, None)


def weight_grads(vectors: Tensor, index: Tensor, bag_of: Tensor, grads: Tensor) -> Tensor:
    """The gradient of each per-sample weight, [L]: its row times its bag's gradient."""
    return row_sum(vectors.index_select(0, index) * grads.index_select(0, bag_of)).squeeze(1)


def row_sum(values: Tensor) -> Tensor:
    """Sums over the columns, [n, 1], halving: one rounding per addition, the same for any n."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        rest = values[:, 2 * half :]
        values = values[:, :half] + values[:, half : 2 * half]
        if rest.shape[1]:
            values = torch.cat([values[:, :1] + rest, values[:, 1:]], dim=1)
    return values


def bits_of(ids: Tensor, size: int, out: Tensor | None = None) -> Tensor:
    """Which of `size` ids are among `ids`, given once each: 32 of them in a word of int32."""
    if out is None:
        out = torch.empty(-(-size // 32), dtype=torch.int32, device=ids.device)
    bit = torch.ones_like(ids).bitwise_left_shift_(ids & 31)
    return out.zero_().index_add_(0, ids >> 5, bit.int())


def in_bits(bits: Tensor, ids: Tensor) -> Tensor:
    """Whether each id, of at least 0, has its bit set."""
    return ((bits[ids >> 5] >> (ids & 31)) & 1).bool()


@dataclass(frozen=True)
class Moves:
    """What a fill does: per slot the id that leaves and the id that enters, -1 for none."""

    slots: Tensor  # [M] int64
    leaving: Tensor  # [M] int64
    entering: Tensor  # [M] int64


def fill(slots: Tensor, store: Tensor, moves: Moves) -> None:
    """Write leaving rows to the store and read entering rows from it."""
    leaving, from_slots = _present(moves.leaving, moves.slots)
    store.index_copy_(0, leaving, slots.index_select(0, from_slots))
    entering, to_slots = _present(moves.entering, moves.slots)
    slots.index_copy_(0, to_slots, store.index_select(0, entering))


def _present(ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    there = ids >= 0
    return ids[there], slots[there]
