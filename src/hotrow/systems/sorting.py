"""Sorts the samples of batches on a GPU, beside training: those that a rule chooses come first.

Their number is read later, without waiting. Launches are captured for batches that look alike,
since a dozen small kernels cost the host more than a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs import samples
from hotrow.inputs.samples import Take
from hotrow.inputs.tree import map_tensors, only_tensors_in, tensors_in, to_device
from hotrow.support.streams import Lanes, Mark, Recorder

MOST_WAITING = 16  # calls of `sort` before the numbers of the first must be read
_MOST_SHAPES = 4  # of batches whose launches are captured

# A batch on the device -> which samples come first, [B] bool, and numbers for the host, int64. It
# launches the same kernels for batches that look alike, and reads from memory that stays in place.
Rule = Callable[[Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sorting:
    """A sorted batch on the device, and the rule's numbers."""

    batch: Any
    made: Mark
    _told: Tensor

    def told(self) -> list[int]:
        """Return the rule's numbers; wait for them if necessary."""
        self.made.wait()
        numbers: list[int] = self._told.tolist()
        return numbers


class _Shape:
    """Memory for batches that look alike: captured launches read and write it."""

    def __init__(self, batch: Any, count: int, device: torch.device) -> None:
        def room(tensor: Tensor) -> Tensor:
            return tensor.new_empty((count * len(tensor), *tensor.shape[1:]), device=device)

        self.batch = map_tensors(batch, room)
        chunks = [tensor.chunk(count) for tensor in tensors_in(self.batch)]
        self.places = [place for places in zip(*chunks, strict=True) for place in places]
        self.taken: Any = None
        self.told: Tensor | None = None


class Sorter:
    """Sorts batches in a stream that waits for no plan. A rule has at most `numbers` numbers."""

    def __init__(self, lanes: Lanes, *, numbers: int, take: Take | None = None) -> None:
        """`take` is for batches that inputs/samples.py cannot cut."""
        self._lanes, self._take = lanes, take
        self._recorder = Recorder(lanes.device)
        self._refused = False
        self._shapes: dict[Any, _Shape] = {}
        # Page-locked, and used round-robin.
        self._told = torch.zeros(
            MOST_WAITING, numbers, dtype=torch.int64, pin_memory=lanes.device.type == "cuda"
        )
        self._next = 0

    def alike(self, batch: Any) -> Any:
        """Return a key that batches share which can be sorted together; None: sort it alone."""
        tensors = None if self._take is not None else only_tensors_in(batch)
        if not tensors or not tensors[0].ndim:
            return None  # other objects may differ between batches
        size = len(tensors[0])
        if not size or not all(tensor.ndim and len(tensor) == size for tensor in tensors):
            return None
        return samples.outline(batch), size

    def sort(self, batches: Sequence[Any], rule: Rule) -> Sorting:
        """Sort one batch, or several that are `alike` as one, always by the same rule for as many.

        No device is synchronized, except for ids in an order of features not seen before.
        """
        lanes = self._lanes
        tensors = [tensor for batch in batches for tensor in tensors_in(batch)]
        lanes.read_in("sort", tensors)
        with lanes.on("sort"):
            taken, told = self._captured(batches, tensors, rule)
            if told is None:
                moved = [to_device(batch, lanes.device) for batch in batches]
                taken, told = self._sorted(samples.join(moved), rule)
            place = self._told[self._next % MOST_WAITING][: len(told)]
            self._next += 1
            place.copy_(told, non_blocking=True)
            return Sorting(taken, lanes.mark("sort"), place)

    def _captured(
        self, batches: Sequence[Any], tensors: list[Tensor], rule: Rule
    ) -> tuple[Any, Tensor | None]:
        """Sort by a captured launch; return None where that is not possible."""
        shape = self._shape_of(batches)
        if shape is None:
            return None, None

        def launch() -> None:
            # A new object each time, since a class may compute and keep tensors of these.
            batch = map_tensors(shape.batch, Tensor.detach)
            shape.taken, shape.told = self._sorted(batch, rule)

        torch._foreach_copy_(shape.places, tensors, non_blocking=True)
        try:
            self._recorder.run(id(shape), launch)
        except RuntimeError:  # the caller's `ids` function synchronizes the device
            self._refused = True
            return None, None
        # A copy, since the next launch writes to the same memory.
        return map_tensors(shape.taken, torch.clone), shape.told

    def _shape_of(self, batches: Sequence[Any]) -> _Shape | None:
        batch, count = batches[0], len(batches)
        key = None if self._refused else self.alike(batch)
        if key is None:
            return None
        if (key, count) not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes[key, count] = _Shape(batch, count, self._lanes.device)
        return self._shapes.get((key, count))

    def _sorted(self, batch: Any, rule: Rule) -> tuple[Any, Tensor]:
        is_first, told = rule(batch)
        order = is_first.logical_not().to(torch.uint8).argsort(stable=True)
        return samples.take(batch, order, size=len(order), by=self._take), told
