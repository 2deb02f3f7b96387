"""Where the lookups of a width group lie among a user's values. Launches alone: a captured step
reads other places at every replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotrow.inputs.tables import WidthGroup


@dataclass(frozen=True)
class Columns:
    """Which of a batch's keys are a group's features, on the device."""

    places: Tensor  # [F] int64: place of each feature among the keys
    # [keys] int64: place of each key among the group's features; -1: none. One for each time that a
    # key can be among them, as it is where it feeds several tables.
    ranks: tuple[Tensor, ...]
    is_all: bool  # the group has all keys, in the same order


def columns_of(keys: tuple[str, ...], group: WidthGroup, device: torch.device) -> Columns:
    places = torch.tensor([keys.index(key) for key in group.keys], device=device)
    by_key = [[rank for rank, name in enumerate(group.keys) if name == key] for key in keys]
    times = max(1, *(len(ranks) for ranks in by_key))
    padded = [ranks + [-1] * (times - len(ranks)) for ranks in by_key]
    ranks = torch.tensor(padded, device=device).t().contiguous().unbind()
    return Columns(places, ranks, group.keys == keys)


@dataclass(frozen=True)
class Spread:
    """Where a group's lookups are among the user's values; only the device knows it."""

    edges: Tensor  # [keys + 1] int64: where each key's values begin
    starts: Tensor  # [F] int64: where each feature's lookups begin in the group
    ends: Tensor  # [F] int64
    columns: Columns

    def take(self, weights: Tensor, size: int) -> Tensor:
        """Return the weights of the group's lookups, [size]; differentiable."""
        place = torch.arange(size, device=weights.device)
        rank = torch.searchsorted(self.ends, place, right=True)
        is_real, rank = rank < self.ends.numel(), rank.clamp_(max=self.ends.numel() - 1)
        firsts = self.edges.index_select(0, self.columns.places)
        source = place + (firsts - self.starts).index_select(0, rank)
        source = source.masked_fill_(~is_real, -1)

        value = torch.arange(weights.numel(), device=weights.device)
        key = torch.searchsorted(self.edges[1:].contiguous(), value, right=True)
        count = self.edges.numel() - 1
        is_real, key = key < count, key.clamp_(max=count - 1)
        backs = [self._back(ranks, value, key, is_real) for ranks in self.columns.ranks]
        taken: Tensor = _Rearranged.apply(weights, source, *backs)  # type: ignore[no-untyped-call]
        return taken

    def _back(self, ranks: Tensor, value: Tensor, key: Tensor, is_real: Tensor) -> Tensor:
        """Return where each value was taken to, -1: nowhere."""
        rank = ranks.index_select(0, key)
        is_real, rank = is_real & (rank >= 0), rank.clamp_(min=0)
        back = value - self.edges.index_select(0, key) + self.starts.index_select(0, rank)
        return back.masked_fill_(~is_real, -1)


class _Rearranged(torch.autograd.Function):
    """Takes values at some places, zero at -1. `backs` say where each value was taken to, so the
    backward pass takes as well; it adds only for values that several tables take."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, *backs: Tensor) -> Tensor:
        ctx.save_for_backward(*backs)
        return _taken(values, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        total, *others = [_taken(grads, back) for back in ctx.saved_tensors]
        for part in others:
            total += part
        return total, *[None] * (2 + len(others))


def _taken(values: Tensor, place: Tensor) -> Tensor:
    return values.index_select(0, place.clamp(min=0)).masked_fill_(place < 0, 0.0)
