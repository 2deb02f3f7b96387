"""Samples put in order on a GPU, beside training: those that a rule names come first.

How many they are is read when it has long been known. For batches that look alike launches are
captured, since a dozen small kernels cost the host more than a training step does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow import samples
from hotrow.ahead import map_tensors, only_tensors_in, tensors_in, to_device
from hotrow.lanes import Lanes, Mark, Recorder
from hotrow.samples import Take

MOST_WAITING = 8  # batches that may be sorted before the numbers of the first are asked for
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

    def __init__(self, batch: Any, device: torch.device) -> None:
        self.batch = map_tensors(batch, lambda each: torch.empty_like(each, device=device))
        self.tensors = tensors_in(self.batch)
        self.taken: Any = None
        self.told: Tensor | None = None


class Sorter:
    """Sorts batches in a lane that waits for no plan; a rule tells `numbers` numbers of each."""

    def __init__(self, lanes: Lanes, *, numbers: int, take: Take | None = None) -> None:
        """`take` is for batches that hotrow.samples does not know how to cut."""
        self._lanes, self._take = lanes, take
        self._recorder = Recorder(lanes.device)
        self._refused = False
        self._shapes: dict[Any, _Shape] = {}
        # Page-locked, and used in turn.
        self._told = torch.zeros(
            MOST_WAITING, numbers, dtype=torch.int64, pin_memory=lanes.device.type == "cuda"
        )
        self._next = 0

    def sort(self, batch: Any, rule: Rule) -> Sorting:
        """By a rule, always the same one; no device is waited for, but for ids in an order of
        features not seen before."""
        lanes = self._lanes
        lanes.read_in("sort", tensors_in(batch))
        with lanes.on("sort"):
            taken, told = self._captured(batch, rule)
            if told is None:
                taken, told = self._sorted(to_device(batch, lanes.device), rule)
            place = self._told[self._next % MOST_WAITING]
            self._next += 1
            place.copy_(told, non_blocking=True)
            return Sorting(taken, lanes.mark("sort"), place)

    def _captured(self, batch: Any, rule: Rule) -> tuple[Any, Tensor | None]:
        """None where such a batch is launched kernel by kernel."""
        shape = self._shape_of(batch)
        if shape is None:
            return None, None

        def launch() -> None:
            # A new one each time: what a class makes of its tensors is made of these.
            batch = map_tensors(shape.batch, Tensor.detach)
            shape.taken, shape.told = self._sorted(batch, rule)

        torch._foreach_copy_(shape.tensors, tensors_in(batch), non_blocking=True)
        try:
            self._recorder.run(id(shape), launch)
        except RuntimeError:  # the program's way to a batch's ids waits for the device
            self._refused = True
            return None, None
        # Of its own: the next batch goes the same way.
        return map_tensors(shape.taken, torch.clone), shape.told

    def _shape_of(self, batch: Any) -> _Shape | None:
        tensors = only_tensors_in(batch) if self._take is None and not self._refused else None
        if not tensors:
            return None  # what is no tensor may change, and a graph would not see it
        key = samples.outline(batch), tuple((each.shape, each.dtype) for each in tensors)
        if key not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes[key] = _Shape(batch, self._lanes.device)
        return self._shapes.get(key)

    def _sorted(self, batch: Any, rule: Rule) -> tuple[Any, Tensor]:
        is_first, told = rule(batch)
        order = is_first.logical_not().to(torch.uint8).argsort(stable=True)
        if self._take is not None:
            return self._take(batch, order), told
        return samples.take(batch, order, size=len(order)), told
