"""Samples put in order on a GPU, beside training: those that a rule names come first.

How many they are is read when it has long been known. For batches that look alike launches are
captured, since a dozen small kernels cost the host more than a training step does.
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

MOST_WAITING = 16  # times that `sort` may be called before the numbers of the first are asked for
_MOST_SHAPES = 4  # of batches whose launches are captured

# A batch on the device -> which samples come first, [B] bool, and the numbers to be told, int64.
# Launches the same every time for batches that look alike; where it reads may not change.
Rule = Callable[[Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sorting:
    """A batch in order, on the device, and what the rule says of it."""

    batch: Any
    made: Mark
    _told: Tensor

    def told(self) -> list[int]:
        """Waits for it, if it must."""
        self.made.wait()
        numbers: list[int] = self._told.tolist()
        return numbers


class _Shape:
    """Batches that look alike: where launches find them, and leave what they make of them."""

    def __init__(self, batch: Any, count: int, device: torch.device) -> None:
        def room(each: Tensor) -> Tensor:
            return each.new_empty((count * len(each), *each.shape[1:]), device=device)

        self.batch = map_tensors(batch, room)
        of_each = [each.chunk(count) for each in tensors_in(self.batch)]
        self.places = [place for places in zip(*of_each, strict=True) for place in places]
        self.taken: Any = None
        self.told: Tensor | None = None


class Sorter:
    """Sorts batches in a lane that waits for no plan; a rule tells at most `numbers` numbers."""

    def __init__(self, lanes: Lanes, *, numbers: int, take: Take | None = None) -> None:
        """`take` is for batches that hotrow.inputs.samples does not know how to cut."""
        self._lanes, self._take = lanes, take
        self._recorder = Recorder(lanes.device)
        self._refused = False
        self._shapes: dict[Any, _Shape] = {}
        # Page-locked, and used in turn.
        self._told = torch.zeros(
            MOST_WAITING, numbers, dtype=torch.int64, pin_memory=lanes.device.type == "cuda"
        )
        self._next = 0

    def alike(self, batch: Any) -> Any:
        """What batches have in common that can be sorted as one; None: this can with no other."""
        tensors = None if self._take is not None else only_tensors_in(batch)
        if not tensors or not tensors[0].ndim:
            return None  # what is no tensor may be another for each
        size = len(tensors[0])
        if not size or not all(each.ndim and len(each) == size for each in tensors):
            return None
        return samples.outline(batch), size

    def sort(self, batches: Sequence[Any], rule: Rule) -> Sorting:
        """Batches that are `alike`, as one, or a single one, by a rule that is always the same for
        as many; no device is waited for, but for ids in an order of features not seen before."""
        lanes = self._lanes
        tensors = [each for batch in batches for each in tensors_in(batch)]
        lanes.read_in("sort", tensors)
        with lanes.on("sort"):
            taken, told = self._captured(batches, tensors, rule)
            if told is None:
                there = [to_device(batch, lanes.device) for batch in batches]
                taken, told = self._sorted(_joined(there), rule)
            place = self._told[self._next % MOST_WAITING][: len(told)]
            self._next += 1
            place.copy_(told, non_blocking=True)
            return Sorting(taken, lanes.mark("sort"), place)

    def _captured(
        self, batches: Sequence[Any], tensors: list[Tensor], rule: Rule
    ) -> tuple[Any, Tensor | None]:
        """None where such batches are launched kernel by kernel."""
        shape = self._shape_of(batches)
        if shape is None:
            return None, None

        def launch() -> None:
            # A new one each time: what a class makes of its tensors is made of these.
            batch = map_tensors(shape.batch, Tensor.detach)
            shape.taken, shape.told = self._sorted(batch, rule)

        torch._foreach_copy_(shape.places, tensors, non_blocking=True)
        try:
            self._recorder.run(id(shape), launch)
        except RuntimeError:  # the program's way to a batch's ids waits for the device
            self._refused = True
            return None, None
        # Of its own: the next ones go the same way.
        return map_tensors(shape.taken, torch.clone), shape.told

    def _shape_of(self, batches: Sequence[Any]) -> _Shape | None:
        batch, count = batches[0], len(batches)
        key = None if self._refused else self.alike(batch)
        if key is None:
            return None  # what is no tensor may change, and a graph would not see it
        if (key, count) not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes[key, count] = _Shape(batch, count, self._lanes.device)
        return self._shapes.get((key, count))

    def _sorted(self, batch: Any, rule: Rule) -> tuple[Any, Tensor]:
        is_first, told = rule(batch)
        order = is_first.logical_not().to(torch.uint8).argsort(stable=True)
        if self._take is not None:
            return self._take(batch, order), told
        return samples.take(batch, order, size=len(order)), told


def _joined(batches: Sequence[Any]) -> Any:
    return batches[0] if len(batches) == 1 else samples.join(batches)
