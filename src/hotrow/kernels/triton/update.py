"""Writing rows: the gradient of each row, and the optimizer's step on it.

Knows sorted lookups, row addresses and formulas; nothing of where a step's settings come from
or of how rows came to their slots. A row's bits depend on its own bytes and its own gradients
alone: every sum has an order counted from the row's first lookup, every operation rounds by
itself, and tile sizes follow from the dimension, not from the batch.

A row's lookups lie side by side once sorted. Short rows, of at most CHUNK lookups, are summed
one lookup after the other. Long rows are cut into chunks; drawn with a CHUNK of 4:

    windows   |0  |1  |2  |3  |4
    rows      aabccccccccccccccdde
    chunks       0   1   2   3        of c: where each of them starts

Later chunks of one row start CHUNK apart, and those of the next long row more than CHUNK after
them. So at most one later chunk starts in a window, it belongs to the row that is there at the
window's beginning, and one place for a partial sum per window is enough: no list, no scan, and
nothing that the host would have to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.reference import CHUNK
from hotrow.kernels.triton.lookup import EXACT, sum_columns, tile_rows, tile_warps
from hotrow.kernels.triton.segments import Segments

if TYPE_CHECKING:
    from hotrow.kernels.rules import RowRule

# What `scalars` holds per table, in the order of each rule's own dict.
NUM_SCALARS = {"SGD": 2, "Adagrad": 2, "RowWiseAdagrad": 2, "Adam": 4, "AdamW": 5}
MOST_PROGRAMS = 16384  # for tiles of rows, whose number only the GPU knows: no army of idle ones


# -- what kernels are given ----------------------------------------------------------------


class Place(NamedTuple):
    """Where the unique rows lie, and which of them no step changes."""

    rows: Any  # [., width] float32
    width: Any
    row_slots: Any  # of each unique row; None: row i is the i-th
    ids: Any
    frozen: Any  # a bit for each id, or None
    untrained: Any  # ids, or None


class Runs(NamedTuple):
    """Lookups sorted by id, as `Segments` has them."""

    order: Any
    rank: Any
    starts: Any


class Terms(NamedTuple):
    """What lookups add to the gradients of their rows."""

    grads: Any  # [bags, dim] float32 or bfloat16
    bag_of: Any  # [L]; None: the position is the bag
    weights: Any  # [L] float32, or None
    divisor: Any  # [bags, 1] float32, or None


class Settings(NamedTuple):
    """What a rule needs, by table."""

    scalars: Any  # [T, K] float32
    bases: Any  # [T] int64: the first id of each table; None: scalars[0] is for all
    num_tables: Any


class Tables(NamedTuple):
    """What was done to the gradients of each table of a collection since they were summed."""

    bases: Any  # [T] int64: the first id of each table of the group
    num_tables: Any
    num_rows: Any  # ids from there on are padding
    places: Any  # [T] int64: where each table stands among all of the collection
    factors: Any  # by that place, float32
    kept: Any  # by that place, bool: others have no gradient, or are not stepped


def sum_by_row(
    grads: Tensor,  # [bags, dim] float32 or bfloat16
    bag_of: Tensor | None,  # [L]; None: the position is the bag
    weights: Tensor | None,  # [L] float32
    divisor: Tensor | None,  # [bags, 1] float32
    segments: Segments,
    padding: int | None = None,
    most: int | None = None,
) -> Tensor:
    """The gradient of each unique row, [R, dim] float32; only the first U are written.

    The id `padding` has none: its lookups may lie behind those that have a bag. `most`: R, if it
    is known that U is no larger.
    """
    dim = grads.shape[1]
    rows = segments.ids.numel() if most is None else most
    out = torch.empty(rows, dim, dtype=torch.float32, device=grads.device)
    place = None
    if padding is not None:
        place = torch.arange(segments.ids.numel(), dtype=torch.int32, device=grads.device)
        place = torch.where(segments.ids == padding, -1, place)
    _reduce(out, place, segments, Terms(grads, bag_of, weights, divisor), _NO_STEP, -1, dim)
    return out


def update_slots(
    rows: Tensor,  # [C + 1, width] float32
    row_slots: Tensor,  # [L] int32: where each unique row lies
    segments: Segments,
    grads: Tensor,  # [bags, dim] float32 or bfloat16
    bag_of: Tensor | None,  # [L]; None: the position is the bag
    weights: Tensor | None,  # [L] float32
    divisor: Tensor | None,  # [bags, 1] float32
    rule: RowRule,
    scalars: Tensor,  # [T, K] float32, the values of `rule.scalars`
    bases: Tensor | None,  # [T] int64: the first id of each table; None: scalars[0] is for all
    null_slot: int,
    dim: int,
    frozen: Tensor | None = None,  # a bit for each id: int32 words
    untrained: Tensor | None = None,  # [P] int64: ids of few rows that are skipped, too
) -> None:
    """One optimizer step on every unique row but those at the null slot, and frozen ones."""
    terms = Terms(grads, bag_of, weights, divisor)
    step = _step_of(rule, scalars, bases)
    _reduce(rows, row_slots, segments, terms, step, null_slot, dim, frozen, untrained)


def update_rows(
    rows: Tensor,  # [R, width] float32
    index: Tensor | None,  # [n]; None: row i
    ids: Tensor,  # [n]: of which only the table matters, and the bit of `frozen`
    count: Tensor | None,  # [1] int32: how many of the n; None: all
    row_grads: Tensor,  # [n, dim] float32, summed
    rule: RowRule,
    scalars: Tensor,  # [T, K] float32
    bases: Tensor | None,  # [T] int64
    dim: int,
    null_slot: int = -1,  # entries of `index` that are skipped
    frozen: Tensor | None = None,  # a bit for each id that is skipped: int32 words
    untrained: Tensor | None = None,  # [P] int64: ids of few rows that are skipped, too
    tables: Tables | None = None,  # whose gradients are scaled, or not stepped
    valid: Tensor | None = None,  # [n] bool: others are skipped
) -> None:
    """One optimizer step on some rows, each at most once, from gradients already summed."""
    num_rows = row_grads.shape[0]
    if num_rows == 0:
        return
    columns = triton.next_power_of_2(dim)
    tile = tile_rows(columns)
    place = Place(rows, rows.stride(0), index, ids, frozen, untrained)
    search = 0 if tables is None else tables.num_tables.bit_length()
    _update_rows[(min(triton.cdiv(num_rows, tile), MOST_PROGRAMS),)](
        place, null_slot, 0 if untrained is None else untrained.numel(), count, num_rows,
        row_grads.contiguous(), valid, tables, search, *_step_of(rule, scalars, bases),
        dim, columns, tile, num_warps=tile_warps(columns), **EXACT,
    )  # fmt: skip


def _step_of(rule: RowRule, scalars: Tensor, bases: Tensor | None) -> tuple[Any, ...]:
    """Return what kernels need for a step: settings, and constants SEARCH and RULE."""
    name = type(rule).__name__
    assert scalars.shape[1] == NUM_SCALARS[name]
    num_tables = scalars.shape[0]
    search_steps = 0 if bases is None else (num_tables - 1).bit_length()
    return Settings(scalars.contiguous(), bases, num_tables), search_steps, name


_NO_STEP = (Settings(None, None, 0), 0, None)  # the sum itself is stored


def _reduce(
    rows: Tensor,
    row_slots: Tensor | None,  # None: row i of `rows` is the i-th unique one
    segments: Segments,
    terms: Terms,
    step: tuple[Any, ...],
    null_slot: int,
    dim: int,
    frozen: Tensor | None = None,
    untrained: Tensor | None = None,
) -> None:
    num_lookups = segments.order.numel()
    if num_lookups == 0:
        return
    terms = terms._replace(grads=terms.grads.contiguous())
    columns = triton.next_power_of_2(dim)
    part, chunk_warps = chunk_part(columns)
    chunk_shape = (dim, columns, part, CHUNK)
    num_windows = triton.cdiv(num_lookups, CHUNK)
    partial = torch.empty(num_windows, dim, dtype=torch.float32, device=rows.device)
    runs = Runs(segments.order, segments.rank, segments.starts)
    place = Place(rows, rows.stride(0), row_slots, segments.ids, frozen, untrained)
    # Kernels take their number as a constant: 0 costs nothing.
    common = (place, null_slot, 0 if untrained is None else untrained.numel(), runs, terms)
    _chunks[(num_windows,)](partial, *common, *chunk_shape, num_warps=chunk_warps, **EXACT)
    _long_rows[(num_windows,)](
        partial, *common, *step, *chunk_shape, num_warps=chunk_warps, **EXACT
    )
    tile = tile_rows(columns)
    _short_rows[(min(triton.cdiv(num_lookups, tile), MOST_PROGRAMS),)](
        segments.count, *common, *step, dim, columns, tile, CHUNK,
        num_warps=tile_warps(columns), **EXACT,
    )  # fmt: skip


def chunk_part(columns: int) -> tuple[int, int]:
    """How much of a chunk is loaded at once, and by how many warps: what their registers hold."""
    part = max(1, min(CHUNK, 4096 // columns))
    return part, max(1, min(8, part * columns // 1024))


# -- sums --------------------------------------------------------------------------------


@triton.jit
def _find(order, bag_of, at, is_there):
    """Position and bag of the sorted lookups `at`; 0 where there is none."""
    position = tl.load(order + at, mask=is_there, other=0)
    bag = position
    if bag_of is not None:
        bag = tl.load(bag_of + position, mask=is_there, other=0)
    return position, bag.to(tl.int64)


@triton.jit
def _values(found, is_there, terms, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """What lookups add to the gradients of their rows, 0 where there is none: [n, COLUMNS]."""
    position, bag = found
    column = tl.arange(0, COLUMNS)[None, :]
    mask = is_there[:, None] & (column < DIM)
    values = tl.load(terms.grads + bag[:, None] * DIM + column, mask=mask, other=0.0).to(tl.float32)
    if terms.divisor is not None:
        values = tl.div_rn(values, tl.load(terms.divisor + bag, mask=is_there, other=1.0)[:, None])
    if terms.weights is not None:
        values = values * tl.load(terms.weights + position, mask=is_there, other=0.0)[:, None]
    return values


@triton.jit
def _sum_tile(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] -> [1, COLUMNS] by halving: tl.sum would add in an order of its own."""
    for half in tl.static_range(ROWS.bit_length() - 1):
        values = tl.sum(tl.reshape(values, [2, ROWS >> (half + 1), COLUMNS]), axis=0)
    return tl.reshape(values, [1, COLUMNS])


@triton.jit
def _sum_chunk(
    order, start, length, terms, DIM: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The sum of up to CHUNK lookups, [1, COLUMNS]; all loads of a part are under way at once."""
    total = tl.zeros([1, COLUMNS], tl.float32)
    for first in range(0, CHUNK, PART):
        place = first + tl.arange(0, PART)
        found = _find(order, terms.bag_of, start + place, place < length)
        values = _values(found, place < length, terms, DIM, COLUMNS)
        total = total + _sum_tile(values, PART, COLUMNS)
    return total


@triton.jit
def _chunk_in(window, runs, CHUNK: tl.constexpr):
    """The chunk that starts in a window: its row, the row's run, and its number; 0 is none."""
    row = tl.load(runs.rank + window * CHUNK)
    start = tl.load(runs.starts + row)
    end = tl.load(runs.starts + row + 1)
    number = (window * CHUNK - start + CHUNK - 1) // CHUNK
    return row, start, end, tl.where(start + number * CHUNK < end, number, 0)


@triton.jit
def _address(place, row, mask, null_slot, UNTRAINED: tl.constexpr):
    """Where the unique rows lie, int64; the null slot where there is none, or it stays as it is."""
    if place.row_slots is None:
        slot = tl.where(mask, row, null_slot)
    else:
        slot = tl.load(place.row_slots + row, mask=mask, other=null_slot)
    if place.frozen is not None:
        own = tl.load(place.ids + row, mask=mask, other=0)
        word = tl.load(place.frozen + (own >> 5), mask=mask, other=0)
        is_frozen = ((word >> (own & 31).to(tl.int32)) & 1) != 0
        slot = tl.where(is_frozen, null_slot, slot)
    if UNTRAINED > 0:
        own = tl.load(place.ids + row, mask=mask, other=-1)
        for entry in tl.static_range(UNTRAINED):
            slot = tl.where(own == tl.load(place.untrained + entry), null_slot, slot)
    return slot.to(tl.int64)


@triton.jit(do_not_specialize=["null_slot"])
def _chunks(
    partial,  # [windows, DIM]
    place,
    null_slot,
    UNTRAINED: tl.constexpr,
    runs,
    terms,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums every chunk of a long row but its first."""
    window = tl.program_id(0)
    row, start, end, number = _chunk_in(window, runs, CHUNK)
    if number == 0:
        return
    # Padding may be the longest row.
    if _address(place, row, True, null_slot, UNTRAINED) == null_slot:
        return
    first = start + number * CHUNK
    total = _sum_chunk(runs.order, first, end - first, terms, DIM, COLUMNS, PART, CHUNK)
    column = tl.arange(0, COLUMNS)[None, :]
    tl.store(partial + window.to(tl.int64) * DIM + column, total, mask=column < DIM)


@triton.jit(do_not_specialize=["null_slot"])
def _long_rows(
    partial,  # [windows, DIM]
    place,
    null_slot,
    UNTRAINED: tl.constexpr,
    runs,
    terms,
    settings,
    SEARCH: tl.constexpr,
    RULE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Joins the chunks of each long row, in the program of its second chunk's window."""
    window = tl.program_id(0)
    row, start, end, number = _chunk_in(window, runs, CHUNK)
    if number != 1:
        return
    slot = _address(place, row, True, null_slot, UNTRAINED)
    if slot == null_slot:
        return
    total = _sum_chunk(runs.order, start, CHUNK, terms, DIM, COLUMNS, PART, CHUNK)
    column = tl.arange(0, COLUMNS)[None, :]
    behind = window + tl.cdiv(end - start, CHUNK) - 1  # its chunks lie in windows one by one
    first = window
    while first < behind:
        at = (first + tl.arange(0, PART))[:, None]
        mask = (at < behind) & (column < DIM)
        values = tl.load(partial + at.to(tl.int64) * DIM + column, mask=mask, other=0.0)
        total = total + _sum_tile(values, PART, COLUMNS)
        first += PART
    only = tl.zeros([1], tl.int32)
    table = _table_of(place.ids, row + only, only == 0, settings, SEARCH)
    old = _read(place, slot + only, only == 0, RULE, DIM, COLUMNS, 1)
    _write(place, slot + only, only == 0, old, total, settings, table, RULE, DIM, COLUMNS, 1)


@triton.jit(do_not_specialize=["null_slot"])
def _short_rows(
    count,
    place,
    null_slot,
    UNTRAINED: tl.constexpr,
    runs,
    terms,
    settings,
    SEARCH: tl.constexpr,
    RULE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums the rows of at most CHUNK lookups, tile by tile."""
    num_rows = tl.load(count)
    tile = tl.program_id(0)
    while tile * TILE < num_rows:
        row = tile * TILE + tl.arange(0, TILE)
        start = tl.load(runs.starts + row, mask=row < num_rows, other=0)
        end = tl.load(runs.starts + row + 1, mask=row < num_rows, other=0)
        slot = _address(place, row, row < num_rows, null_slot, UNTRAINED)
        is_short = (end - start <= CHUNK) & (slot != null_slot)
        table = _table_of(place.ids, row, is_short, settings, SEARCH)
        # Read before the sum, so that the row is on its way meanwhile.
        old = _read(place, slot, is_short, RULE, DIM, COLUMNS, TILE)
        end = tl.where(is_short, end, start)
        total = tl.zeros([TILE, COLUMNS], tl.float32)
        # Four at a time, so that their loads are under way together; added one after the other.
        # Only a number is carried along: of tensors, the layout would be changed in every round.
        longest = tl.max(end - start, axis=0)
        done = 0
        while done < longest:
            at = start + done
            found_a = _find(runs.order, terms.bag_of, at, at < end)
            found_b = _find(runs.order, terms.bag_of, at + 1, at + 1 < end)
            found_c = _find(runs.order, terms.bag_of, at + 2, at + 2 < end)
            found_d = _find(runs.order, terms.bag_of, at + 3, at + 3 < end)
            a = _values(found_a, at < end, terms, DIM, COLUMNS)
            b = _values(found_b, at + 1 < end, terms, DIM, COLUMNS)
            c = _values(found_c, at + 2 < end, terms, DIM, COLUMNS)
            d = _values(found_d, at + 3 < end, terms, DIM, COLUMNS)
            total = (((total + a) + b) + c) + d
            done += 4
        _write(place, slot, is_short, old, total, settings, table, RULE, DIM, COLUMNS, TILE)
        tile += tl.num_programs(0)


# -- the optimizer's step ----------------------------------------------------------------


@triton.jit(do_not_specialize=["null_slot", "num_rows"])
def _update_rows(
    place,
    null_slot,
    UNTRAINED: tl.constexpr,
    count,
    num_rows,
    row_grads,
    valid,  # [n], or None
    tables,
    SEARCH_TABLES: tl.constexpr,
    settings,
    SEARCH: tl.constexpr,
    RULE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    if count is not None:
        num_rows = tl.load(count)
    column = tl.arange(0, COLUMNS)[None, :]
    tile = tl.program_id(0)
    while tile * TILE < num_rows:
        row = tile * TILE + tl.arange(0, TILE)
        is_there = row < num_rows
        if valid is not None:
            is_there = is_there & (tl.load(valid + row, mask=is_there, other=0) != 0)
        if tables is not None:
            is_there, factor = factors_of(place.ids, row, is_there, tables, SEARCH_TABLES)
        slot = _address(place, row, is_there, null_slot, UNTRAINED)
        moves = slot != null_slot
        table = _table_of(place.ids, row, moves, settings, SEARCH)
        old = _read(place, slot, moves, RULE, DIM, COLUMNS, TILE)
        mask = moves[:, None] & (column < DIM)
        grad = tl.load(row_grads + row.to(tl.int64)[:, None] * DIM + column, mask=mask, other=0.0)
        if tables is not None:
            grad = grad * factor[:, None]
        _write(place, slot, moves, old, grad, settings, table, RULE, DIM, COLUMNS, TILE)
        tile += tl.num_programs(0)


@triton.jit
def factors_of(ids, row, mask, tables, SEARCH: tl.constexpr):
    """Which rows have a gradient, and its factor."""
    mask = mask & (tl.load(ids + row, mask=mask, other=0).to(tl.int64) < tables.num_rows)
    table = tl.load(tables.places + _table_of(ids, row, mask, tables, SEARCH), mask=mask, other=0)
    kept = mask & (tl.load(tables.kept + table, mask=mask, other=0) != 0)
    return kept, tl.load(tables.factors + table, mask=kept, other=1.0)


@triton.jit
def _table_of(ids, row, mask, settings, SEARCH: tl.constexpr):
    """The table of each row: the last whose first id is not above the row's, by halving."""
    table = tl.zeros_like(row)
    if settings.bases is not None:
        own = tl.load(ids + row, mask=mask, other=0)
        for half in tl.static_range(SEARCH):
            later = table + (1 << (SEARCH - 1 - half))
            base = tl.load(settings.bases + later, mask=later < settings.num_tables, other=0)
            table = tl.where((later < settings.num_tables) & (base <= own), later, table)
    return table


@triton.jit
def _read(
    place, slot, mask, RULE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Weights and up to two pieces of state of some rows; zeros stand for what is not needed."""
    column = tl.arange(0, COLUMNS)[None, :]
    at = place.rows + slot[:, None] * place.width + column
    inside = mask[:, None] & (column < DIM)
    weight = tl.zeros([TILE, COLUMNS], tl.float32)
    first = weight
    second = weight
    if RULE is not None:
        weight = tl.load(at, mask=inside, other=0.0)
    if RULE == "RowWiseAdagrad":
        first = tl.load(place.rows + slot * place.width + DIM, mask=mask, other=0.0)[:, None]
    elif RULE == "Adagrad" or RULE == "Adam" or RULE == "AdamW":
        first = tl.load(at + DIM, mask=inside, other=0.0)
    if RULE == "Adam" or RULE == "AdamW":
        second = tl.load(at + 2 * DIM, mask=inside, other=0.0)
    return weight, first, second


@triton.jit
def _write(
    place, slot, mask, old, grad, settings, table, RULE: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What a rule's `update` does, operation by operation; without a rule, stores the sum."""
    weight, first, second = old
    column = tl.arange(0, COLUMNS)[None, :]
    at = place.rows + slot[:, None] * place.width + column
    inside = mask[:, None] & (column < DIM)
    if RULE is None:
        weight = grad
    elif RULE == "SGD":
        lr = _scalar(settings, table, 0, 2)
        decay = _scalar(settings, table, 1, 2)
        weight = weight - (grad + weight * decay) * lr
    elif RULE == "Adagrad" or RULE == "RowWiseAdagrad":
        lr = _scalar(settings, table, 0, 2)
        eps = _scalar(settings, table, 1, 2)
        square = grad * grad
        if RULE == "RowWiseAdagrad":
            square = sum_columns(square, TILE, COLUMNS)
            first = first + tl.div_rn(square, tl.full([TILE, 1], DIM, tl.float32))
            to = place.rows + slot[:, None] * place.width + DIM
            tl.store(to, first, mask=mask[:, None])
        else:
            first = first + square
            tl.store(at + DIM, first, mask=inside)
        weight = weight - tl.div_rn(grad * lr, tl.sqrt_rn(first) + eps)
    else:
        NUM_SCALARS: tl.constexpr = 5 if RULE == "AdamW" else 4
        keep1 = _scalar(settings, table, 0, NUM_SCALARS)
        keep2 = _scalar(settings, table, 1, NUM_SCALARS)
        size = _scalar(settings, table, 2, NUM_SCALARS)
        eps = _scalar(settings, table, 3, NUM_SCALARS)
        if RULE == "AdamW":
            weight = weight * _scalar(settings, table, 4, NUM_SCALARS)
        first = first + (grad - first) * keep1
        second = second + (grad * grad - second) * keep2
        weight = weight - tl.div_rn(first * size, tl.sqrt_rn(second) + eps)
        tl.store(at + DIM, first, mask=inside)
        tl.store(at + 2 * DIM, second, mask=inside)
    tl.store(at, weight, mask=inside)


@triton.jit
def _scalar(settings, table, at: tl.constexpr, NUM_SCALARS: tl.constexpr):
    return tl.load(settings.scalars + table * NUM_SCALARS + at)[:, None]
