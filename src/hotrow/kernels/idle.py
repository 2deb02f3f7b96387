"""Catching up: what rows are now, from what they were at their last gradient.

`catch_up` is the specification. What it computes for a row depends on the row, the step of its
last gradient and the tables alone. Only single, correctly rounded operations are used, on fresh
contiguous tensors: see kernels/reference.py for why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.dense_rules import DenseRule
from hotrow.kernels.idle_history import BLOCK, IdleTables
from hotrow.kernels.idle_recursions import Series
from hotrow.support.messages import warn

LONG_REPLAY = 1000  # steps of one row, beyond which a warning names a remedy
_AT_ONCE = 1 << 15  # weights: temporaries stay in a core's cache
_TINY = torch.finfo(torch.float32).tiny
_warned: set[str] = set()  # names of rules


def catch_up(
    rule: DenseRule,
    weight: Tensor,  # [U, dim] float32
    state: list[Tensor],  # without `last`
    last: Tensor,  # [U] int32: the step of each row's last gradient, 0 for none
    tables: IdleTables,
) -> None:
    """Take rows in place from their last gradient to `tables.now`; `last` stays as it is."""
    assert not bool((last > tables.now).any()), "rows have a gradient in a step to come"
    idle = (last < tables.now).nonzero().squeeze(1)
    if tables.still or not idle.numel():
        return
    if tables.kind == "replay":
        _replay(rule, weight, state, last, idle, tables)
        return
    for index in idle.split(max(_AT_ONCE // weight.shape[1], 1)):
        rows = [piece.index_select(0, index) for piece in (weight, *state)]
        _apply(rule, rows, last.index_select(0, index).long() - tables.start, tables)
        for piece, values in zip((weight, *state), rows, strict=True):
            piece.index_copy_(0, index, values)


def _apply(rule: DenseRule, rows: list[Tensor], last: Tensor, tables: IdleTables) -> None:
    """Take rows to the end of their blocks, and those of earlier blocks from there to now."""
    _move(rule, rows, tables.near.index_select(0, last), tables.eps)
    block = last // BLOCK
    earlier = (block < (tables.now - tables.start) // BLOCK).nonzero().squeeze(1)
    if earlier.numel():
        moved = [piece.index_select(0, earlier) for piece in rows]
        _move(rule, moved, tables.far.index_select(0, block[earlier]), tables.eps)
        for piece, values in zip(rows, moved, strict=True):
            piece.index_copy_(0, earlier, values)


def _move(rule: DenseRule, rows: list[Tensor], entries: Tensor, eps: float) -> None:
    columns = list(entries.split(1, dim=1))
    if rule.closed_form == "series":
        _move_series(rows, columns, eps)
    else:
        _move_linear(rule, rows, columns)


def _move_linear(rule: DenseRule, rows: list[Tensor], entries: list[Tensor]) -> None:
    ww, wb, bw, bb, factor = entries
    pieces = dict(zip(("weight", *rule.kept_states()), rows, strict=True))
    weight, buffer = pieces.pop("weight"), pieces.pop("momentum_buffer", None)
    before = weight.clone()
    weight.mul_(ww)
    if buffer is not None:
        weight.add_(buffer * wb)
        buffer.mul_(bb).add_(before.mul_(bw))
    for piece in pieces.values():
        piece.mul_(factor)


def _move_series(rows: list[Tensor], entries: list[Tensor], eps: float) -> None:
    """w becomes shrink * w - m / (y * e0 + eps) * sum, as docs/numerics.md derives."""
    weight, mean, square = rows
    size = square.sqrt().mul_(entries[Series.CENTRE]).add_(eps)
    moved = (mean / size).masked_fill_(mean == 0, 0)  # without eps, 0 / 0 is no movement
    k = (2 * eps / size.clamp_(min=_TINY)).neg_().add_(1).mul_(entries[Series.WIDTH])
    root = (1 - k).mul_(1 + k).sqrt_()
    p = k.div_(1 + root).neg_()
    first, *others = entries[Series.FIRST_TERM :]
    total = p * others[-1]
    for term in reversed(others[:-1]):
        total.add_(term).mul_(p)
    total.mul_(2).add_(first)
    weight.mul_(entries[Series.SHRINK]).sub_(moved.mul_(total).div_(root))
    mean.mul_(entries[Series.KEPT1])
    square.mul_(entries[Series.KEPT2])


def _replay(
    rule: DenseRule,
    weight: Tensor,
    state: list[Tensor],
    last: Tensor,
    idle: Tensor,
    tables: IdleTables,
) -> None:
    """Make each step on the rows that are idle in it."""
    ordered, order = last.index_select(0, idle).long().sort(stable=True)
    index = idle.index_select(0, order)
    rows = [piece.index_select(0, index) for piece in (weight, *state)]
    first = int(ordered[0])
    _warn_of(rule, tables.now - first)
    steps = torch.arange(first + 1, tables.now + 1, device=last.device)
    counts = torch.searchsorted(ordered, steps).tolist()  # rows that are idle in each step
    scalars = tables.steps[first + 1 - tables.start :].unsqueeze(2).unsqueeze(3)  # [steps, S, 1, 1]
    zeros = torch.zeros_like(rows[0])
    for numbers, count in zip(scalars.unbind(), counts, strict=True):
        own, *kept = [piece[:count] for piece in rows]
        s = dict(zip(tables.scalar_names, numbers.unbind(), strict=True))
        rule.dense_step(own, zeros[:count], kept, s)
    for piece, values in zip((weight, *state), rows, strict=True):
        piece.index_copy_(0, index, values)


def _warn_of(rule: DenseRule, gap: int) -> None:
    name = type(rule).__name__
    if gap > LONG_REPLAY and name not in _warned:
        _warned.add(name)
        warn(
            f"{name} has no closed form for rows without a gradient with these settings, so a row "
            f"makes up for its last {gap:,} steps one by one; use DenseAdamW (hotrow.AdamW), whose "
            "decay acts on the weights and takes the same time for any number of steps."
        )
