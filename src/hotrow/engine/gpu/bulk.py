"""Leaving rows back to the store in bulk, by way of the copy engine and the CPU.

A GPU that writes single rows to host memory slows down what runs beside it; its copy engines do
not. So leaving rows are packed side by side in the GPU's memory: those of several batches together,
or those of a large batch in several packets. A packet is copied to a load on the host, and threads
of the CPU put a load's rows in their places.

Until then the store has old bits of them, so no batch may read them there. The plan says for how
many batches that is certain; a later batch waits, which looking far ahead makes rare. There are
many loads, so that the CPU always has one to write; while none is free, it is slower than the
device, which may then write rows by itself.

```
    batch     7    8    9   10   11   12   13   14
    packet   [a    a    a] [b    b    b]  [a    a
    engine                  a              b        one copy each, to a load
    CPU                           a              b  rows to their places
```
Knows bytes and ids; not why rows leave.
"""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice

import torch
from torch import Tensor

from hotrow.kernels.reference import places
from hotrow.kernels.triton import fill
from hotrow.kernels.triton.start import Unwritten
from hotrow.store.ram import Store
from hotrow.store.writer import Writer, shared_writer
from hotrow.support.clock import named
from hotrow.support.streams import Lanes, Mark

PACKETS = 2  # one that is filled, one on its way
_FULL = 3 / 4  # of a packet: it is sent, and not kept for the next batch


class Packet:
    """Room for rows that leave, on the device."""

    def __init__(self, number: int, most: int, width: int, device: torch.device) -> None:
        self.number = number
        self.rows = torch.zeros(most, width, device=device)
        self.ids = torch.zeros(most, dtype=torch.int64, device=device)
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)  # what the host counts, too
        self.filled = 0
        self.certain = -1  # the last batch that reads none of its rows
        self.left: Mark | None = None  # the copy engine has read it


class Load:
    """Room for the rows of a packet, on the host."""

    def __init__(self, most: int, width: int, *, pinned: bool) -> None:
        self.rows = torch.zeros(most, width, pin_memory=pinned)
        self.ids = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        self.filled = 0
        self.certain = -1
        self.there: Mark | None = None
        self.job = 0  # the writer's number of it


class WriteBack:
    """Packets of up to `most` rows, filled and sent in turn.

    Kernels are launched in the lane `rows`, which the caller has switched to.
    """

    def __init__(
        self,
        store: Store,
        slots: Tensor,
        *,
        most: int,
        lanes: Lanes,
        least_certain: int = 0,
        places: int = 8,
        writer: Writer | None = None,
    ) -> None:
        """`least_certain`: batches for which it must be certain that no row is read, for each batch
        that fills a packet. Rows that may be read sooner would often be waited for. `places`: for
        packets on the host. `writer`: threads of its own."""
        self._least_certain = least_certain
        self._store, self._slots, self.most, self._lanes = store, slots, most, lanes
        width, device = slots.shape[1], slots.device
        self._packets = [Packet(n, most, width, device) for n in range(PACKETS)]
        pinned = device.type == "cuda"
        self._loads = deque(Load(most, width, pinned=pinned) for _ in range(places))
        self._packet = self._packets[0]
        self._sent: deque[Load] = deque()  # loads whose rows are still on their way
        self._writer = writer or shared_writer()
        # The last rows are written before the store goes.
        weakref.finalize(self, self._writer.wait_for_all)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return sum(each.rows.numel() * 4 + each.ids.nbytes for each in self._packets)

    def is_worth(self, count: int, certain: int) -> bool:
        """Whether so many rows that leave are better kept, if that is certain for some batches."""
        batches = 1 + self.most // (2 * max(1, count))  # until a packet is sent
        return certain >= self._least_certain * batches

    def has_room(self, count: int) -> bool:
        """Whether `take` would not wait for the CPU."""
        self._pass_on()
        needed = 1 + (self._packet.filled > 0 and self._packet.filled + count > self.most)
        return all(self._is_free(load) for load in islice(self._loads, needed))

    def take(self, count: int, certain: int) -> Packet:
        """Where the rows of the next `count` moves go; no batch up to `certain` reads them."""
        self._pass_on()
        if self._packet.filled + count > self.most:
            self._send()
        packet = self._packet
        if packet.filled == 0:
            self._lanes.after("rows", packet.left)
            packet.taken.zero_()
            packet.certain = certain
        packet.filled += count
        packet.certain = min(packet.certain, certain)
        return packet

    def is_packed(self) -> None:
        """What was taken has been packed: a packet that is nearly full is sent."""
        if self._packet.filled >= _FULL * self.most:
            self._send()

    def pack(
        self,
        packet: Packet,
        move_slots: Tensor,
        leaving: Tensor,
        count: Tensor,
        unwritten: Unwritten | None,
        span: fill.Span = fill.ALL,
    ) -> None:
        """Launch the packing of leaving rows; the same launches every time for one packet."""
        written = None if unwritten is None else unwritten.written
        fill.pack_more(
            self._slots, move_slots, leaving, count, packet.rows, packet.ids, packet.taken, written,
            span=span,
        )  # fmt: skip

    def rehearse(
        self, move_slots: Tensor, leaving: Tensor, count: Tensor, unwritten: Unwritten | None
    ) -> None:
        """Launch the packing of no row."""
        self.pack(self._packets[0], move_slots, leaving, count, unwritten)

    def let_read(self, batch: int) -> None:
        """A batch may read the store when this returns: its rows are there."""
        if self._packet.certain < batch:
            self._send()
        for load in self._loads:
            if load.certain < batch:
                self._finish(load)

    def forget(self) -> None:
        """Nothing is certain any more about the batches to come."""
        for packet in self._packets:
            packet.certain = -1
        for load in self._loads:
            load.certain = -1

    def wait_for_writer(self) -> None:
        """What the CPU was given to write is in its place when this returns."""
        for load in self._loads:
            if not load.filled:
                self._writer.wait(load.job)

    def read(self, ids: Tensor, out: Tensor) -> None:
        """Copy those rows of `ids` into `out` that left and were not given to the CPU yet."""
        for load in self._loads:
            if load.filled:
                there = load.ids[: load.filled].to(ids.device, non_blocking=True)
                fill.gather(load.rows, places(ids, there), out)
        for packet in self._packets:
            if packet.filled:
                fill.gather(packet.rows, places(ids, packet.ids[: packet.filled]), out)

    def wait(self) -> None:
        """Every row that left is in its place when this returns."""
        self._send()
        for load in self._loads:
            self._finish(load)

    def _send(self) -> None:
        """What was packed so far: to the host."""
        packet, load = self._packet, self._loads[0]
        count, packet.filled = packet.filled, 0
        if not count:
            return
        self._finish(load)
        load.certain = packet.certain
        there = slice(count)
        self._lanes.after("back", self._lanes.mark("rows"))
        with self._lanes.on("back"), named("write-back"):
            load.ids[there].copy_(packet.ids[there], non_blocking=True)
            load.rows[there].copy_(packet.rows[there], non_blocking=True)
            load.there = packet.left = self._lanes.mark("back")
        load.filled = count
        self._loads.rotate(-1)
        self._sent.append(load)
        self._packet = self._packets[(packet.number + 1) % PACKETS]

    def _is_free(self, load: Load) -> bool:
        return not load.filled and self._writer.is_done(load.job)

    def _pass_on(self) -> None:
        """Give the CPU what has come to the host."""
        while self._sent and (self._sent[0].there is None or self._sent[0].there.passed()):
            self._write(self._sent.popleft())

    def _finish(self, load: Load) -> None:
        """The rows of a load are in their places when this returns, and of all before it."""
        while load.filled:
            self._write(self._sent.popleft())
        if load.job:
            self._writer.wait(load.job)
            load.job = 0  # each batch asks for every load: the writer is asked once

    def _write(self, load: Load) -> None:
        """Have the rows of a load put in their places, when they have come."""
        assert load.there is not None
        load.there.wait()
        rows = slice(load.filled)
        self._store.will_write(load.ids[rows])
        load.job = self._writer.write(self._store.rows, load.ids[rows], load.rows[rows])
        load.filled = 0
