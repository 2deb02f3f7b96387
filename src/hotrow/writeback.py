"""Leaving rows back to the store in bulk, by way of the copy engine and the CPU.

A GPU that writes single rows to host memory slows down what runs beside it; its copy engines do
not. So leaving rows are packed side by side in the GPU's memory, those of several batches together.
A full packet is copied at once, and the CPU puts its rows in their places, in a thread of its own.

Until then the store has old bits of them, so no batch may read them there. Whoever evicts says for
how many batches that is certain; a batch beyond waits, which looking far ahead makes rare.

```
    batch     7    8    9   10   11   12
    packet   [a    a    a] [b    b    b]
    engine                  a              b     one copy each
    CPU                       a              b   rows to their places
```
Knows bytes and ids; not why rows leave.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from hotrow.kernels.triton import fill
from hotrow.kernels.triton.start import Unwritten
from hotrow.lanes import Lanes
from hotrow.staged import finish, shared_worker, write_rows
from hotrow.store import Store

_PACKETS = 3  # one that is filled, one on its way, one that is written


class Packet:
    """Room for rows on their way to the host."""

    def __init__(
        self, number: int, most: int, width: int, id_type: torch.dtype, device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self.number = number
        self.rows = torch.zeros(most, width, device=device)
        self.ids = torch.zeros(most, dtype=id_type, device=device)
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)  # what the host counts, too
        self.host_rows = torch.zeros(most, width, pin_memory=on_gpu)
        self.host_ids = torch.zeros(most, dtype=id_type, pin_memory=on_gpu)
        self.filled = 0
        self.certain = -1  # the last batch that reads none of its rows
        self.written: Future[None] | None = None


class WriteBack:
    """Packets of up to `most` rows, filled and sent in turn.

    What is launched runs in the lane `rows`, where whoever calls has to be.
    """

    def __init__(
        self, store: Store, slots: Tensor, *, most: int, id_type: torch.dtype, lanes: Lanes
    ) -> None:
        self._store, self._slots, self.most, self._lanes = store, slots, most, lanes
        width, device = slots.shape[1], slots.device
        self._packets = [Packet(n, most, width, id_type, device) for n in range(_PACKETS)]
        self._current = self._packets[0]
        self._worker = shared_worker()

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return sum(each.rows.numel() * 4 + each.ids.nbytes for each in self._packets)

    def take(self, count: int, certain: int) -> Packet:
        """Where the rows of the next `count` moves go; no batch up to `certain` reads them."""
        packet = self._current
        if packet.filled + count > self.most:
            self._send(packet)
            packet = self._current = self._packets[(packet.number + 1) % _PACKETS]
            finish(packet.written)
            packet.written = None
        if packet.filled == 0:
            packet.taken.zero_()
            packet.certain = certain
        packet.filled += count
        packet.certain = min(packet.certain, certain)
        return packet

    def pack(
        self,
        packet: Packet,
        move_slots: Tensor,
        leaving: Tensor,
        count: Tensor,
        unwritten: Unwritten | None,
    ) -> None:
        """Launch the packing of leaving rows; the same launches every time for one packet."""
        written = None if unwritten is None else unwritten.written
        fill.pack_more(
            self._slots, move_slots, leaving, count, packet.rows, packet.ids, packet.taken, written
        )

    def let_read(self, batch: int) -> None:
        """A batch may read the store when this returns: its rows are there."""
        for packet in self._packets:
            if packet.certain < batch:
                self._finish(packet)

    def forget(self) -> None:
        """Nothing is certain any more about the batches to come."""
        for packet in self._packets:
            packet.certain = -1

    def wait(self) -> None:
        """Every row that left is in its place when this returns."""
        for packet in self._packets:
            self._finish(packet)

    def _finish(self, packet: Packet) -> None:
        if packet.filled:
            self._send(packet)
        finish(packet.written)

    def _send(self, packet: Packet) -> None:
        """What was packed so far: to the host, and there to its places."""
        here = slice(packet.filled)
        packet.filled = 0
        self._lanes.after("back", self._lanes.mark("rows"))
        with self._lanes.on("back"):
            packet.host_ids[here].copy_(packet.ids[here], non_blocking=True)
            packet.host_rows[here].copy_(packet.rows[here], non_blocking=True)
            there = self._lanes.mark("back")
        packet.written = self._worker.ask(
            write_rows, self._store, packet.host_ids[here], packet.host_rows[here], (there,)
        )
