"""Leaving rows back to the store by way of the copy engine and the CPU.

A GPU reads and writes single rows of host memory at one rate for both together. Rows that leave
go another way: packed side by side, copied by the copy engine, and put in their places by the
CPU's cores in a thread of their own. Knows bytes and ids; not why rows leave.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from hotrow.lanes import Lanes, Mark
from hotrow.store import Store

_AT_ONCE = 2  # packets on their way


class _Packet:
    """Room for rows on their way to the host."""

    def __init__(self, rows: int, width: int, id_type: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.rows = torch.zeros(rows, width, device=device)
        self.host_rows = torch.zeros(rows, width, pin_memory=on_gpu)
        self.host_ids = torch.zeros(rows, dtype=id_type, pin_memory=on_gpu)
        self.written: Future[None] | None = None


class WriteBack:
    """Up to `most` rows per batch."""

    def __init__(
        self, store: Store, most: int, id_type: torch.dtype, device: torch.device, lanes: Lanes
    ) -> None:
        self._store, self.most, self._lanes = store, most, lanes
        width = store.rows.shape[1]
        self._packets = [_Packet(most, width, id_type, device) for _ in range(_AT_ONCE)]
        self._next = 0
        # A new thread would use one core. It must not know this object, or neither would ever go.
        cores = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "hotrow-writeback", torch.set_num_threads, (cores,))

    @property
    def num_bytes(self) -> int:
        return sum(packet.rows.numel() * 4 for packet in self._packets)

    @property
    def place(self) -> int:
        """The number of the packet that comes next."""
        return self._next

    def next_packet(self) -> tuple[int, Tensor]:
        """A packet's number, and where rows are to be packed, side by side."""
        number, self._next = self._next, (self._next + 1) % _AT_ONCE
        return number, self._packets[number].rows

    def send(self, number: int, ids: Tensor, count: int) -> None:
        """What was packed so far in the lane `rows`: `count` rows of `ids`, -1 for none."""
        packet = self._packets[number]
        self._lanes.after("back", self._lanes.mark("rows"))
        with self._lanes.on("back"):
            packet.host_ids[:count].copy_(ids[:count], non_blocking=True)
            packet.host_rows[:count].copy_(packet.rows[:count], non_blocking=True)
            arrived = self._lanes.mark("back")
        packet.written = self._thread.submit(_write, self._store, packet, count, arrived)

    def wait(self) -> None:
        """Every row sent is in its place when this returns."""
        for packet in self._packets:
            written, packet.written = packet.written, None
            if written is not None:
                written.result()


def _write(store: Store, packet: _Packet, count: int, arrived: Mark) -> None:
    arrived.wait()
    ids, rows = packet.host_ids[:count].long(), packet.host_rows[:count]
    there = ids >= 0
    if not bool(there.all()):
        ids, rows = ids[there], rows[there]
    store.write(ids, rows)
