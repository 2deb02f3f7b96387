"""Rows between the store and the slots by way of the copy engine and the CPU's cores.

A GPU reads and writes single rows of host memory at one rate for both together, and only of memory
that is page-locked; and while it does, every kernel beside it takes a little longer. Here entering
rows are gathered by the CPU, copied by the copy engine and put into their slots. Leaving rows are
packed side by side, copied and put in their places by the CPU. Its part is done in a thread of its
own, in the order in which it was asked for. Knows bytes and ids; not why rows move.

```
              slots -pack-> rows -copy-> out -write-> store       collect, depart, write
              slots <unpack rows <copy-- into <gather store       insert,  arrive, collect
    done by         GPU          engine       CPU
```
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill
from hotrow.store.ram import Store
from hotrow.store.writer import Writer, why_not
from hotrow.support.streams import Lanes, Mark

# Launches a kernel: its name, the number of the packet it reads or writes, and what to call.
Replay = Callable[[str, int, Callable[[], None]], None]

# At most half of the cores: the thread that launches kernels needs one to itself.
_MOST_THREADS = 2  # of Python, which take its lock in between
_MOST_IN_C = 6
_LEAST_PART = 4096  # rows for which one more thread of Python is worth asking


def at_once(kind: str, number: int, launch: Callable[[], None]) -> None:
    """A `Replay` that captures nothing."""
    launch()


class Packet:
    """Room for the rows that one batch moves, and how far they have come."""

    def __init__(
        self, number: int, most: int, width: int, id_type: torch.dtype, device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self.number = number
        # One place serves both ways: rows go out of it before others come in.
        self.rows = torch.zeros(most, width, device=device)
        self.into = torch.zeros(most, width, pin_memory=on_gpu)
        self.out = torch.zeros(most, width, pin_memory=on_gpu)
        self.leaving = torch.zeros(most, dtype=id_type, pin_memory=on_gpu)
        self.in_use = False
        self.left: Mark | None = None  # the copy engine has read `into`
        self.written: Future[None] | None = None

    def begin(self, moves: Moves, counted: Tensor, count: int) -> None:
        self.moves, self.counted, self.count = moves, counted, count
        self.in_use = True
        self.packed: Mark | None = None  # None: no row leaves
        self.there: Mark | None = None
        self.gathered: Future[None] | None = None
        self.arrived = False
        self.written = None


class Staged:
    """Moves up to `most` rows per batch each way, for as many batches at once as it has packets.

    The device's part is launched in the lane `rows`, which the caller has switched to, and `back`.
    """

    def __init__(
        self,
        store: Store,
        slots: Tensor,
        *,
        most: int,
        packets: int,
        id_type: torch.dtype,
        lanes: Lanes,
        worker: Worker | None = None,
    ) -> None:
        """`worker`: threads of its own."""
        self._store, self._slots, self.most, self._lanes = store, slots, most, lanes
        width, device = slots.shape[1], slots.device
        self._packets = [Packet(n, most, width, id_type, device) for n in range(packets)]
        self._begun = 0
        self._changed: list[Mark] = []
        self._worker = worker or shared_worker()

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return sum(packet.rows.numel() * 4 for packet in self._packets)

    def collect(
        self,
        moves: Moves,
        counted: Tensor,
        entering: Tensor,
        *,
        evicts: bool,
        replay: Replay = at_once,
    ) -> Packet:
        """Leaving rows set out; `entering` ones are gathered after all writes asked for so far.

        As many move as `entering` names, on the host; `counted` says so on the device.
        """
        packet = self._packets[self._begun % len(self._packets)]
        assert not packet.in_use, "more batches in transit than packets"
        finish(packet.written)
        count = entering.numel()
        packet.begin(moves, counted, count)
        self._begun += 1
        after = [*self._changed, *([] if packet.left is None else [packet.left])]
        self._changed = []
        packet.gathered = self._worker.ask(
            _gather, self._store, entering, packet.into[:count], after
        )
        if evicts:
            replay(
                "pack",
                packet.number,
                lambda: fill.pack(self._slots, moves.slots, counted, packet.rows),
            )
            packet.packed = self._lanes.mark("rows")
            with self._lanes.on("back"):  # in `rows` it would wait for training
                packet.leaving[:count].copy_(moves.leaving[:count], non_blocking=True)
        return packet

    def rehearse(self, moves: Moves, count: Tensor) -> None:
        """Launch the packing and unpacking of no row."""
        rows = self._packets[0].rows
        fill.pack(self._slots, moves.slots, count, rows)
        fill.unpack(self._slots, moves.slots, moves.leaving, moves.entering, count, rows)

    def changed(self, mark: Mark) -> None:
        """The device has written to the store by itself: what is gathered from now on waits."""
        # No batch is gathered where each is too large for a packet: marks must not pile up.
        self._changed = [*(each for each in self._changed if not each.passed()), mark]

    def depart(self, packet: Packet) -> None:
        """Leaving rows, packed, to the host."""
        if packet.packed is not None and packet.there is None:
            self._lanes.after("back", packet.packed)
            with self._lanes.on("back"):
                here = slice(packet.count)
                packet.out[here].copy_(packet.rows[here], non_blocking=True)
                packet.there = self._lanes.mark("back")

    def write(self, packet: Packet) -> None:
        """Have leaving rows written to the store, before all that is asked for later."""
        self.depart(packet)
        if packet.there is not None and packet.written is None:
            here = slice(packet.count)
            packet.written = self._worker.ask(
                write_rows, self._store, packet.leaving[here], packet.out[here], (packet.there,)
            )

    def arrive(self, packet: Packet) -> None:
        """Entering rows, gathered, to the device; waits for the CPU if it is late."""
        if packet.arrived:
            return
        self.depart(packet)
        finish(packet.gathered)
        self._lanes.after("rows", packet.there)
        here = slice(packet.count)
        packet.rows[here].copy_(packet.into[here], non_blocking=True)
        packet.arrived = True

    def insert(self, packet: Packet, replay: Replay = at_once) -> None:
        """Put entering rows into their slots; leaving ones are on their way to the store."""
        self.write(packet)
        self.arrive(packet)
        moves, counted = packet.moves, packet.counted
        replay(
            "unpack",
            packet.number,
            lambda: fill.unpack(
                self._slots, moves.slots, moves.leaving, moves.entering, counted, packet.rows
            ),
        )
        packet.left = self._lanes.mark("rows")
        packet.in_use = False

    def wait(self) -> None:
        """Every row that was to be written is in its place when this returns."""
        for packet in self._packets:
            finish(packet.written)


def finish(job: Future[None] | None) -> None:
    if job is None:
        return
    try:
        job.result()
    except Exception as error:
        raise RuntimeError(
            f"moving rows between the store and the device failed in the background "
            f"({type(error).__name__}: {error}). The rows of a batch are lost or incomplete: start "
            "again from what was saved last"
        ) from error


def _gather(
    store: Store, ids: Tensor, rows: Tensor, after: Sequence[Mark], writer: Writer | None = None
) -> None:
    _wait_for(after)
    if writer is None:
        store.read(ids, out=rows)
    else:
        writer.wait(writer.read(store.rows, ids, rows))


def write_rows(
    store: Store, ids: Tensor, rows: Tensor, after: Sequence[Mark], writer: Writer | None = None
) -> None:
    """Without those whose id is -1: a free slot had none."""
    _wait_for(after)
    if writer is None:
        store.write_alone(ids, rows)
    else:
        store.will_write(ids)
        writer.wait(writer.write(store.rows, ids, rows))


def _wait_for(marks: Sequence[Mark]) -> None:
    for mark in marks:
        mark.wait()


_Job = Callable[..., None]  # of a store, ids, rows, marks to wait for, and a writer if there is one


class Worker(ThreadPoolExecutor):
    """Moves rows of the store in a few threads, one job after the other.

    Where there is a C compiler a thread of Python waits for marks, and threads of C move rows. Else
    each thread works alone, with few and long operations. The threads of torch's own would go on
    spinning for a while after each one, and threads that ask for Python's lock often would have it
    when the thread that launches kernels needs it.
    """

    def __init__(self, *, in_c: bool | None = None) -> None:
        """`in_c`: whether threads of C move rows; by default where there is a compiler."""
        cores = torch.get_num_threads()
        self._writer: Writer | None = None
        if why_not() is None if in_c is None else in_c:
            self._writer = Writer(max(1, min(_MOST_IN_C, cores // 2)))
        most = _MOST_THREADS if self._writer is None else 1
        count = max(1, min(most, cores // 2))
        ready = Barrier(count + 1)

        def begin() -> None:
            torch.set_num_threads(1)
            ready.wait()

        super().__init__(1, "hotrow-rows", begin)
        self._others = ThreadPoolExecutor(max(1, count - 1), "hotrow-rows", begin)
        self._count = count
        try:
            for each in (self, *[self._others] * (count - 1)):
                each.submit(int)
        except RuntimeError:  # the system gives no more threads
            ready.abort()
            raise
        ready.wait()
        # torch takes the number that was set last for threads that it has not seen yet.
        torch.set_num_threads(cores)

    def ask(
        self, job: _Job, store: Store, ids: Tensor, rows: Tensor, after: Sequence[Mark]
    ) -> Future[None]:
        """Do it after the marks, and after all that was asked for before."""
        try:
            return self.submit(self._do, job, store, ids, rows, after)
        except RuntimeError:  # the program is ending, and its threads have ended
            done: Future[None] = Future()
            job(store, ids, rows, after)
            done.set_result(None)
            return done

    def _do(
        self, job: _Job, store: Store, ids: Tensor, rows: Tensor, after: Sequence[Mark]
    ) -> None:
        _wait_for(after)
        if self._writer is not None:
            job(store, ids, rows, (), self._writer)
            return
        if self._count == 1:
            job(store, ids, rows, ())
            return
        size = max(_LEAST_PART, -(-len(ids) // self._count))
        first, *rest = zip(ids.split(size), rows.split(size), strict=True)
        try:
            done = [self._others.submit(job, store, *part, ()) for part in rest]
        except RuntimeError:  # as above
            job(store, ids, rows, ())
            return
        job(store, *first, ())
        for each in done:
            each.result()


_known_worker: weakref.ref[Worker] | None = None


def shared_worker() -> Worker:
    """One for all that moves rows, so that they do not take each other's cores."""
    global _known_worker
    found = None if _known_worker is None else _known_worker()
    if found is None:
        found = Worker()
        _known_worker = weakref.ref(found)
    return found
