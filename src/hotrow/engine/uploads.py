"""A few numbers that the host computes, at one place on the device: any, and a rule's settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.engine.settings import Settings
from hotrow.support.streams import Lanes, Mark

_PLACES = 32  # as many may be under way before the host waits


class Upload:
    """Sent in the lane that is on, without a wait: from page-locked memory, or the host would have
    to. The places it is sent from take turns, because to lock new memory takes longer than all
    else."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, lanes: Lanes) -> None:
        self.there = torch.zeros(shape, dtype=dtype, device=lanes.device)
        self._lanes, self._sent = lanes, 0
        on_gpu = lanes.device.type == "cuda"
        self._here = torch.zeros(_PLACES, *shape, dtype=dtype, pin_memory=on_gpu)
        self._arrays = self._here.numpy()
        self._marks: list[Mark | None] = [None] * _PLACES

    def send(self, values: Any) -> Tensor:
        """Numbers of this shape, or one that is broadcast to it."""
        place = self._sent % _PLACES
        mark = self._marks[place]
        if mark is not None:
            mark.wait()
        self._arrays[place] = values
        self.there.copy_(self._here[place], non_blocking=True)
        self._marks[place] = self._lanes.mark_here()
        self._sent += 1
        return self.there


class TableScalars:
    """An optimizer's numbers for each table, [T, K]; one tensor for ever, so that a captured step
    follows a schedule."""

    def __init__(self, settings: Settings) -> None:
        self._optimizer, self._names = settings.optimizer, settings.table_names
        self._lanes = settings.lanes
        self._values: Any = None
        self._upload: Upload | None = None
        self._are_equal = True  # all tables have those of the first

    def push(self) -> None:
        """Bring them up to date."""
        values = self._optimizer.table_scalars(self._names)
        if values is self._values:  # nothing has changed
            return
        self._are_equal = all(each == values[0] for each in values)
        if self._upload is None:
            self._upload = Upload((len(values), len(values[0])), torch.float32, self._lanes)
        self._upload.send(values[0] if self._are_equal else values)
        self._values = values  # now that they are there

    @property
    def are_alike(self) -> bool:
        """Whether all tables have the same numbers, and will have."""
        return self._are_equal and not self._optimizer.counts_apart

    def now(self, bases: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the numbers, and `bases`, where tables begin, if tables differ."""
        if self._lanes.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.push()
        assert self._upload is not None, "push() comes before a capture"
        return self._upload.there, None if self.are_alike else bases
