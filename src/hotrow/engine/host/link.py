"""Between host memory and a device: page-locked buffers, and columns of rows read by all cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hotrow.support.streams import Lanes, Mark


class HostBuffer:
    """Host memory that is used again and again; page-locked, the link is twice as fast."""

    def __init__(self, width: int, *, locked: bool) -> None:
        self._width, self._locked = width, locked
        self._memory = torch.empty(0, width)

    def take(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [count, width], at the place of the last one if that was as large."""
        if len(self._memory) < count or self._memory.dtype != dtype:
            size = (count + count // 8, self._width)
            with torch.inference_mode(False):  # it serves training as well
                self._memory = torch.empty(size, dtype=dtype, pin_memory=self._locked)
        return self._memory[:count]


class RowColumns:
    """Some columns of all rows, read and written by all cores."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        # torch writes element by element, so larger elements are faster.
        width, stride, first = rows.shape[1], rows.stride(0), rows.storage_offset()
        is_even = all(size % 4 == 0 for size in (width, stride, first))
        self._element = torch.complex128 if is_even else rows.dtype
        self._to = rows.view(self._element)

    def read(self, ids: Tensor, out: Tensor) -> None:
        torch.index_select(self._rows, 0, ids, out=out)

    def write(self, ids: Tensor, values: Tensor) -> None:
        self._to.index_copy_(0, ids, values.view(self._element))


class Link:
    """Copies between a device and the host, without a wait where there is a link between them.

    `exists` is False where one memory serves both: then nothing is copied.
    """

    def __init__(self, lanes: Lanes, dim: int) -> None:
        self._lanes, self._device = lanes, lanes.device
        self.exists = lanes.device.type == "cuda"
        self._bags = HostBuffer(dim, locked=self.exists)
        self._bags_sent = lanes.mark("train")

    def start_to_host(
        self, *tensors: Tensor | None, buffer: HostBuffer | None = None
    ) -> tuple[list[Tensor | None], Mark]:
        """Start copies to the host, the first into `buffer`; return them and when they end."""
        copies: list[Tensor | None] = list(tensors)
        if self.exists:
            locked = self._device.type == "cuda"
            for place, tensor in enumerate(tensors):
                if tensor is None:
                    continue
                if buffer is not None and place == 0:
                    out = buffer.take(len(tensor), tensor.dtype)
                else:  # torch keeps page-locked memory, and knows when it may be used again
                    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=locked)
                copies[place] = out.copy_(tensor, non_blocking=True)
        return copies, self._lanes.mark("train")

    def to_device(self, pooled: Tensor, dtype: torch.dtype) -> Tensor:
        """Return vectors of bags on the device."""
        if not self.exists:
            return pooled.to(dtype)
        self._bags_sent.wait()
        here = self._bags.take(len(pooled), dtype).copy_(pooled)
        there = torch.empty(here.shape, dtype=dtype, device=self._device)
        there.copy_(here, non_blocking=True)
        self._bags_sent = self._lanes.mark("train")
        return there


@contextmanager
def in_any_order() -> Iterator[None]:
    """Every row is written once, so all cores may write: torch's deterministic form takes one."""
    mode = torch.get_deterministic_debug_mode()
    if mode:
        torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.set_deterministic_debug_mode(mode)
