"""A few numbers that the host computes, at one place on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.lanes import Lanes, Mark

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
