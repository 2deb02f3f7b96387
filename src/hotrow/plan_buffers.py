"""Room for plans on a device, used again and again. Knows no decisions."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from hotrow.kernels.triton import words
from hotrow.lanes import Lanes, Mark


class PlanBuffers:
    """The tensors of one plan, for at most `capacity` lookups; used again and again."""

    def __init__(
        self, capacity: int, id_type: torch.dtype, device: torch.device, *, tells: bool = False
    ) -> None:
        self.capacity = capacity

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        self.order, self.rank = ints(capacity), ints(capacity)
        self.starts = ints(capacity + 1)
        self.ids = ints(capacity, id_type)
        self.row_slots, self.lookup_slots = ints(capacity), ints(capacity)
        self.move_slots = ints(capacity)
        self.leaving, self.entering = ints(capacity, id_type), ints(capacity, id_type)
        self.counts = torch.zeros(words.COUNT_WORDS, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.status = torch.zeros(16, dtype=torch.int32, pin_memory=pinned)
        self.told: Tensor | None = None  # what enters, for a host that gathers it
        if tells:
            self.told = torch.zeros(capacity, dtype=id_type, pin_memory=pinned)

    @property
    def num_bytes(self) -> int:
        return self.capacity * (28 + 3 * self.ids.element_size())


class BufferPool:
    """Buffers of plans that nobody reads any more, used again when the device has caught up."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._returned: deque[tuple[PlanBuffers, int | None]] = deque()
        self._free: dict[int | None, deque[tuple[PlanBuffers, list[Mark | None]]]] = {}
        self.num_bytes = 0

    def give_back(self, buffers: PlanBuffers, berth: int | None) -> None:
        # From whichever thread dropped the plan: no stream is known here.
        self._returned.append((buffers, berth))

    def take(
        self,
        capacity: int,
        id_type: torch.dtype,
        device: torch.device,
        berth: int | None,
        *,
        tells: bool,
    ) -> PlanBuffers:
        """For the plan lane, which waits until others have done with them."""
        if self._returned:
            # Training is marked when a turn begins, and what moves rows when it is launched.
            marks = [self._lanes.newest("train"), self._lanes.newest("rows")]
            while self._returned:
                buffers, place = self._returned.popleft()
                self._free.setdefault(place, deque()).append((buffers, marks))
        free = self._free.get(berth)
        while free:
            buffers, marks = free.popleft()
            if buffers.capacity >= capacity:
                for mark in marks:
                    self._lanes.after("plan", mark)
                return buffers
            self.num_bytes -= buffers.num_bytes
        buffers = PlanBuffers(capacity, id_type, device, tells=tells)
        self.num_bytes += buffers.num_bytes
        return buffers
