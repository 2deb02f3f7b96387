"""Batches without their skipped samples: what is left of several is joined to full batches.

On a GPU a `Sifter` finds the samples to skip beside training. This module does not know which
samples those are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs import samples
from hotrow.inputs.batch import parse
from hotrow.inputs.samples import Join, Take
from hotrow.inputs.tree import map_tensors, tensors_in
from hotrow.support.streams import Lanes
from hotrow.systems.sorting import Sorter

Ids = Callable[[Any], Any]  # a batch -> what its collection looks up

SIFTED_BYTES = 32 << 20  # of batches that are sifted together; they are on the GPU until trained
_TOGETHER = 8  # batches that are sifted together at most: launches cost the host more than the GPU
_AHEAD = 2  # batches read between sifting one and asking for it, so that the host does not wait


@dataclass(frozen=True)
class Part:
    """What is left of a batch: samples `low` to `high` of `batch`, which may hold several."""

    batch: Any
    total: int  # samples of `batch`
    low: int
    high: int
    size: int  # samples before any was skipped

    @property
    def kept(self) -> int:
        return self.high - self.low


class Refill:
    """Joins what is left of batches to batches of the old size: a captured step has one size."""

    def __init__(
        self, ids: Ids, features: tuple[str, ...], take: Take | None, join: Join | None
    ) -> None:
        """A collection reads the `ids` of a batch as `features`. `take` and `join` are for batches
        that inputs/samples.py cannot cut."""
        self._ids, self._features, self._take, self._join = ids, features, take, join
        self._is_ours = take is None and join is None
        self.clear()

    def count(self, batch: Any) -> int:
        """Return a batch's number of samples."""
        return parse(self._ids(batch), self._features, None).num_samples

    def clear(self) -> None:
        """Drop waiting samples, as a run that is left drops the batches it has read ahead."""
        self._parts: list[Any] = []
        self._last: Part | None = None  # the part behind those, not cut yet
        self._count = self._size = 0  # samples that wait, and in a batch
        self._pins = False  # whether input is page-locked, so that output must be

    @property
    def is_empty(self) -> bool:
        return not self._count

    def whole(self, batch: Any) -> Iterator[Any]:
        """Yield what waits, then a batch of which nothing is skipped."""
        yield from self.flush()
        yield batch

    def keep(self, batch: Any, keep: Tensor) -> Iterator[Any]:
        """Add the samples of a batch with `keep`, [B] bool; yield the batch that is full now."""
        pins = self._is_ours and samples.tensors_of(batch)[0].is_pinned()
        places, size = keep.nonzero().squeeze(1), len(keep)
        if 0 < len(places) < size:
            batch = self._cut(batch, places, size)
        yield from self.add(Part(batch, len(places), 0, len(places), size), pins=pins)

    def add(self, part: Part, *, pins: bool = False) -> Iterator[Any]:
        """Add what is left of a batch; yield the batch that is full now."""
        self._size, self._pins = max(self._size, part.size), pins
        last = self._last
        if last is not None and last.batch is part.batch and last.high == part.low:
            self._last = replace(last, high=part.high)
        else:
            self._settle()
            self._last = part
        self._count += part.kept
        if self._count < max(1, self._size):  # an empty batch fills none
            return
        # Samples beyond a full batch begin the next one.
        end = part.high - (self._count - self._size)
        self._last, rest = replace(self._last, high=end), replace(self._last, low=end)
        # A part that is a batch alone is copied to its own memory, which the allocator gives
        # again: captured launches depend on where ids are.
        self._settle(copies=not self._parts)
        full = self._joined()
        self._last, self._count = rest, rest.kept
        yield full

    def flush(self) -> Iterator[Any]:
        """Yield what waits."""
        if self._count:
            self._settle()
            self._count = 0
            yield self._joined()

    def _settle(self, *, copies: bool | None = None) -> None:
        """Cut the last part out of its batch. By default a small part is copied, since a view
        would keep the whole batch in memory."""
        part, self._last = self._last, None
        if part is None or not part.kept:
            return
        cut = part.batch
        if part.kept < part.total:
            if self._take is None:
                cut = samples.cut(part.batch, part.low, part.high, size=part.total)
            else:
                cut = self._cut(part.batch, torch.arange(part.low, part.high), part.total)
            if 2 * part.kept < part.total if copies is None else copies:
                cut = map_tensors(cut, torch.clone)
        self._parts.append(cut)

    def _joined(self) -> Any:
        parts, self._parts = self._parts, []
        batch = samples.join(parts, by=self._join)
        return samples.pinned(batch) if self._pins else batch

    def _cut(self, batch: Any, places: Tensor, size: int) -> Any:
        cut = samples.take(batch, places, size=size, by=self._take)
        count = self.count(cut)
        if count != len(places):
            raise ValueError(
                f"of {len(places):,} samples taken out of {size:,} the ids have {count:,}; give "
                "take=, a function of a batch and places that makes a batch of the samples there"
            )
        return cut


class Sifter:
    """Finds the samples to keep on a GPU, in a stream beside training, for dense ids.

    Batches are added one by one. Those that look alike are sifted together.
    """

    def __init__(
        self,
        lanes: Lanes,
        ids: Ids,
        keep: Callable[[Any], Tensor],
        *,
        most_bytes: int = SIFTED_BYTES,
    ) -> None:
        """`keep` says which samples of some ids are kept, [B] bool. It is captured, so what it
        reads must stay where it is."""
        self._lanes, self._ids, self._keep, self._most_bytes = lanes, ids, keep, most_bytes
        self._sorter = Sorter(lanes, numbers=_TOGETHER)
        self.clear()

    def clear(self) -> None:
        """Drop all batches."""
        self.waiting = 0  # batches that were added and not asked for
        self._gathered: list[Any] = []  # not launched yet
        self._look: Any = None  # of those
        self._together = 1  # the most that are launched together
        self._launched: deque[Iterator[Part]] = deque()

    def takes(self, batch: Any) -> bool:
        return isinstance(self._ids(batch), Tensor)

    def add(self, batch: Any) -> None:
        look = self._sorter.alike(batch)
        if self._gathered and (look is None or look != self._look):
            self._launch()
        if not self._gathered:
            self._look, self._together = look, 1
            if look is not None:
                num_bytes = max(1, sum(tensor.nbytes for tensor in tensors_in(batch)))
                self._together = min(_TOGETHER, max(1, self._most_bytes // num_bytes))
        self._gathered.append(batch)
        self.waiting += 1
        if len(self._gathered) == self._together:
            self._launch()

    @property
    def is_full(self) -> bool:
        """Return whether the next part was launched long enough ago."""
        return self.waiting >= self._together + _AHEAD

    def next(self) -> Part:
        """Return what is left of the oldest batch."""
        self.waiting -= 1
        while True:
            if not self._launched:
                self._launch()
            part = next(self._launched[0], None)
            if part is not None:
                return part
            self._launched.popleft()

    def _launch(self) -> None:
        batches, self._gathered = self._gathered, []
        size, count = len(self._ids(batches[0])), len(batches)
        sorting = self._sorter.sort(batches, partial(self._rule, count))

        def parts() -> Iterator[Part]:
            low = 0
            for kept in sorting.told():
                yield Part(sorting.batch, count * size, low, low + kept, size)
                low += kept

        self._launched.append(parts())

    def _rule(self, count: int, batch: Any) -> tuple[Tensor, Tensor]:
        """Return which samples of `count` joined batches are kept, and how many of each batch."""
        keep = self._keep(self._ids(batch))
        return keep, keep.view(count, -1).sum(1)

    def beside_training(self, batches: Iterable[Any], of: Any) -> list[Any]:
        """Make batches in the stream "sort", from sifted parts or `of` another batch.

        Training waits for them, since the caller may read them at once. Plans do not: they wait
        for steps before.
        """
        self._lanes.read_in("sort", tensors_in(of))
        with self._lanes.on("sort"):
            made = list(batches)
            mark = self._lanes.mark("sort")
        self._lanes.after("train", mark)
        on_gpu = [tensor for batch in made for tensor in tensors_in(batch) if tensor.is_cuda]
        self._lanes.hand_over(on_gpu, mark)
        return made


class BatchStream:
    """Batches, of which the next ones can be looked at. An error is raised after all before it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source, self._read = iter(batches), deque[Any]()
        self._error: Exception | None = None

    def peek(self, count: int) -> Sequence[Any]:
        """Return the next batches, or as many as there are, without taking them."""
        while len(self._read) < count and self._error is None:
            try:
                self._read.append(next(self._source))
            except StopIteration:
                break
            except Exception as error:
                self._error = error
        return list(self._read)[:count]

    def has_more(self) -> bool:
        return bool(self.peek(1))

    def next(self) -> Any:
        self.peek(1)
        return self._read.popleft()

    def end(self) -> None:
        """Raise the error that ended the batches, if one did."""
        if self._error is not None:
            raise self._error
