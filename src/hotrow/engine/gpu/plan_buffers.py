"""Room for plans on a device, used again and again. Knows no decisions."""

from __future__ import annotations

from collections import deque
from itertools import count
from weakref import WeakSet

import torch
from torch import Tensor

from hotrow.kernels.triton import words
from hotrow.support.streams import Lanes, Mark


class PlanBuffers:
    """The tensors of one plan, used again and again.

    For at most `capacity` lookups of `uniques` different rows; a plan of more fails.
    """

    _numbers = count()

    def __init__(
        self,
        capacity: int,
        id_type: torch.dtype,
        device: torch.device,
        *,
        uniques: int | None = None,
        tells: bool = False,
    ) -> None:
        self.capacity = capacity
        self.uniques = uniques = capacity if uniques is None else uniques
        # Unlike `id()`, never another's: what was captured for these is not replayed for others.
        self.number = next(self._numbers)

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        self.order, self.rank, self.lookup_slots = (ints(capacity) for _ in range(3))
        self.starts = ints(uniques + 1)
        self.ids, self.row_slots = ints(uniques, id_type), ints(uniques)
        self.move_slots = ints(uniques)
        self.leaving, self.entering = ints(uniques, id_type), ints(uniques, id_type)
        self.counts = torch.zeros(words.COUNT_WORDS, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.status = torch.zeros(16, dtype=torch.int32, pin_memory=pinned)
        self.told: Tensor | None = None  # what enters, for a host that gathers it
        if tells:
            self.told = torch.zeros(uniques, dtype=id_type, pin_memory=pinned)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory; `status` and `told` are the host's."""
        hosts = (self.status, self.told)
        here = [each for each in vars(self).values() if isinstance(each, Tensor)]
        return sum(each.nbytes for each in here if all(each is not other for other in hosts))


def plan_bytes(capacity: int, uniques: int, id_type: torch.dtype) -> int:
    """What `PlanBuffers` take of the device's memory."""
    return 12 * capacity + uniques * (12 + 3 * id_type.itemsize) + 4 + 4 * words.COUNT_WORDS


class BufferPool:
    """Buffers of plans that are no longer read, used again when the device has caught up.

    A berth (an input of captured steps) gets the same buffers each time, because graphs read them.
    Batches without a berth share the others, and new berths take from those.
    """

    def __init__(self, lanes: Lanes, id_type: torch.dtype, *, tells: bool = False) -> None:
        """`tells`: plans tell the host which rows enter."""
        self._lanes, self._id_type, self._tells = lanes, id_type, tells
        self._returned: deque[tuple[PlanBuffers, int | None]] = deque()
        self._free: dict[int | None, deque[tuple[PlanBuffers, list[Mark | None]]]] = {}
        self._gone: set[int] = set()
        self._all: WeakSet[PlanBuffers] = WeakSet()

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._all)

    @property
    def num_sets(self) -> int:
        return len(self._all)

    def give_back(self, buffers: PlanBuffers, berth: int | None) -> None:
        # From whichever thread dropped the plan: no stream is known here.
        self._returned.append((buffers, berth))

    def free_berth(self, berth: int) -> None:
        """It will not ask again."""
        self._gone.add(berth)
        self._free.setdefault(None, deque()).extend(self._free.pop(berth, ()))

    def take(self, capacity: int, uniques: int, berth: int | None) -> PlanBuffers:
        """For the plan lane, which waits until others have done with them."""
        if self._returned:
            # Training is marked when a turn begins, and what moves rows when it is launched.
            marks = [self._lanes.newest("train"), self._lanes.newest("rows")]
            while self._returned:
                buffers, place = self._returned.popleft()
                place = None if place in self._gone else place
                self._free.setdefault(place, deque()).append((buffers, marks))
        for free in (self._free.get(berth), self._free.get(None)):
            while free:
                buffers, marks = free.popleft()
                for mark in marks:  # also if they go: the next to have that memory is in this lane
                    self._lanes.after("plan", mark)
                if buffers.capacity >= capacity and buffers.uniques >= uniques:
                    return buffers
        return self.make(capacity, uniques)

    def make(self, capacity: int, uniques: int) -> PlanBuffers:
        """New ones."""
        buffers = PlanBuffers(
            capacity, self._id_type, self._lanes.device, uniques=uniques, tells=self._tells
        )
        self._all.add(buffers)
        return buffers
