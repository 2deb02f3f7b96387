"""Where the rows of one width are on a machine with a GPU: in its memory, and in the host's.

Knows bytes and maps; not batches, and not when rows move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hotrow.engine.gpu.bulk import PACKETS
from hotrow.engine.gpu.mover_choice import FillChoice, choose
from hotrow.engine.gpu.scratchpad import DeviceScratchpad, refuse_too_many
from hotrow.engine.memory import AllRows, Buffer, InFlight, locate
from hotrow.engine.settings import Settings
from hotrow.engine.stages import SPLIT, in_transit_of
from hotrow.engine.strategy import Strategy
from hotrow.inputs.tables import Constant, EmbeddingBagConfig, Normal, Uniform, WidthGroup
from hotrow.kernels.triton import fill, start
from hotrow.store.budget import Share
from hotrow.store.pinned import locked_group
from hotrow.store.ram import Store, host_rows, initialise, seed_words
from hotrow.store.writer import why_not
from hotrow.support.messages import warn
from hotrow.support.progress import bytes_bar
from hotrow.support.streams import synchronize

_WRITTEN_PART = 1 / 16  # of the slots' bytes, at most, for a bit per row of the tables


class HostStore:
    """All rows in host memory, and how a GPU moves rows between there and its own memory.

    Before slots are allocated, all reads and writes go to it.
    """

    def __init__(self, settings: Settings, share: Share) -> None:
        layout, device = settings.layout, settings.device
        state, seed, left = settings.state_start, settings.seed, list(layout.tables)
        # Page-locked: the device reads and writes rows by itself.
        self.is_locked = settings.page_locked
        if device.type == "cuda" and self.is_locked:
            with bytes_bar("page-locking rows") as advance:
                memory, left = locked_group(layout, settings.width, state, seed, progress=advance)
            rows, self.is_locked = memory.rows, memory.locked
            if not memory.locked:
                warn(memory.reason)
        else:  # kernels run in Triton's interpreter
            rows = host_rows(layout.num_rows, settings.width)
        self.store = Store(rows, device=device, untrained=layout.untrained)
        self.fill_choice = self._choose_fill(settings)
        self.strategy, self.packets, self.share = self._share_out(settings, share)
        on_gpu = device.type == "cuda" and self.is_locked
        if on_gpu:
            initialise_on_gpu(rows, layout, state, seed, device, tables=left)
        else:
            initialise(rows, layout, state, seed, tables=left)
        # Rows that were never written need not be read: the device knows how they start.
        self.unwritten: start.Unwritten | None = None
        if self._notes_written:
            self.unwritten = unwritten_rows(layout, state, seed, device, on_gpu=on_gpu)

    def _choose_fill(self, settings: Settings) -> FillChoice:
        strategy, wanted = settings.strategy, settings.fill
        if not self.is_locked:
            return FillChoice("staged", "the store is not page-locked")
        if wanted == "bulk" and (reason := _why_not_bulk(strategy)):
            return FillChoice("zero-copy", reason)
        if wanted != "auto":
            return FillChoice(wanted, "asked for")
        if strategy.staged:
            return FillChoice("staged", f"{strategy.name} moves rows in stages")
        if not strategy.overlapped:
            return FillChoice("zero-copy", f"{strategy.name} waits for its rows")
        if settings.device.type != "cuda":
            return FillChoice("zero-copy", "one memory serves both")
        return choose(bulk=not _why_not_bulk(strategy))

    def _share_out(self, settings: Settings, share: Share) -> tuple[Strategy, int, Share]:
        """Return the strategy with the stages that the form needs, packets, and what is left."""
        strategy, form, row_bytes = settings.strategy, self.fill_choice.form, 4 * settings.width
        num_rows, self._notes_written = settings.layout.num_rows, False
        if form == "staged":
            if not strategy.staged:
                strategy = replace(strategy, stages=SPLIT)
            # One more than may be in transit, so that none waits for its last row to be written.
            packets = 1 + in_transit_of(strategy.timed_stages)
            if share.slots < num_rows:
                share = share.with_packets(packets, row_bytes)
            return strategy, packets, share
        bits = num_rows // 8
        self._notes_written = bits <= _WRITTEN_PART * share.slots * row_bytes
        by_bytes = share.packet_rows > 0  # slots given by hand are as many as were asked for
        if self._notes_written and by_bytes and share.slots < num_rows:
            share = share.with_room(bits, row_bytes)
        if form == "bulk" and by_bytes and share.slots >= num_rows:
            self.fill_choice = FillChoice("zero-copy", "every row has a slot")
        elif form == "bulk" and by_bytes:
            # Batches with more leaving rows fill several packets.
            packet_rows = min(share.packet_rows, max(1, settings.tuning.packet_bytes // row_bytes))
            share = replace(share, packet_rows=packet_rows).with_packets(PACKETS, row_bytes)
        return strategy, 0, share

    def read(self, ids: Tensor, out: Tensor) -> None:
        """Copy rows to the device; -1: leave that row of `out` as it is."""
        if self.is_locked:
            fill.gather(self.store.rows, ids, out)
            return
        away = ids >= 0
        out[away] = self.store.rows[ids[away].cpu()].to(out.device)

    def to_change(self, ids: Tensor) -> Tensor | None:
        """Return all rows, of which a kernel changes those of `ids`, -1 for none; None: kernels
        cannot reach them."""
        if not self.is_locked:
            return None
        if self.unwritten is not None:
            self.unwritten.note(ids)
        self.store.will_write(ids)
        return self.store.rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows by rows on the device; -1: skip the row."""
        if self.unwritten is not None:
            self.unwritten.note(ids)
        if self.is_locked:
            self.store.will_write(ids)
            fill.scatter(self.store.rows, ids, rows.contiguous())
            return
        away = ids >= 0
        self.store.write(ids[away].cpu(), rows[away].cpu())


class DeviceMemory:
    """Slots on a GPU, the map from rows to slots, a buffer, and the store in host memory."""

    def __init__(self, host: HostStore, pad: DeviceScratchpad, buffer: Buffer) -> None:
        self.host, self.store, self.pad, self.buffer = host, host.store, pad, buffer
        self.slots = pad.slots
        self.read_store, self.write_store = host.read, host.write

    @property
    def null_slot(self) -> int:
        return self.pad.null_slot

    def locate(self, ids: Tensor, in_flight: InFlight) -> Tensor:
        moves = list(in_flight())  # waits for plans, which change the map
        return locate(ids, self.pad.map.lookup(ids.to(self.pad.id_type)).long(), moves)

    def resident(self) -> Tensor:
        # A copy, also where ids have 64 bits: callers undo moves in it.
        return self.pad.row_of_slot.to(torch.int64, copy=True)

    def read_slots(self, slots: Tensor, out: Tensor) -> None:
        fill.gather(self.slots, slots, out)

    def write_slots(self, slots: Tensor, rows: Tensor) -> None:
        fill.scatter(self.slots, slots, rows.contiguous())

    def put_slots(self, slots: Tensor, rows: Tensor) -> None:
        self.slots.index_copy_(0, slots, rows)

    def expect_changes(self) -> None:
        if self.host.unwritten is not None:
            self.host.unwritten.written.fill_(-1)  # every bit: all rows have to be read

    def num_bytes(self) -> dict[str, int]:
        unwritten, changed = self.host.unwritten, self.store.changed
        parts = {
            **self.pad.num_bytes,
            "buffer": self.buffer.num_bytes,
            "which rows were written": 0 if unwritten is None else unwritten.written.nbytes,
        }
        return parts if changed is None else parts | {"which rows changed": changed.device_bytes}


class AllSlots:
    """Stands for a scratchpad where every row is its own slot."""

    def __init__(self, slots: Tensor) -> None:
        refuse_too_many(slots.shape[0] - 1)
        self.slots = slots
        self.num_rows = self.num_slots = self.null_slot = slots.shape[0] - 1
        self.id_type = torch.int32

    @property
    def has_every_row(self) -> bool:
        return True

    def check(self) -> None:
        assert not self.slots[self.null_slot].any(), "the padding slot was written to"


class DeviceAllRows(AllRows):
    """Every row in the GPU's memory, in its own slot."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._lanes = settings.lanes
        self.pad = AllSlots(self.slots)
        self.store.why_no_snapshot = "training changes rows where they are, on the device"

    def start(self, settings: Settings) -> None:
        if settings.device.type != "cuda":
            super().start(settings)
            return
        start_of_state, layout = settings.state_start, settings.layout
        initialise_on_gpu(self.store.rows, layout, start_of_state, settings.seed, settings.device)

    def read_slots(self, slots: Tensor, out: Tensor) -> None:
        self._lanes.join()
        super().read_slots(slots, out)

    def write_slots(self, slots: Tensor, rows: Tensor) -> None:
        self._lanes.join()
        self.store.write(slots, rows)

    put_slots = write_slots

    def num_bytes(self) -> dict[str, int]:
        changed = self.store.changed
        noted = {} if changed is None else {"which rows changed": changed.device_bytes}
        return super().num_bytes() | noted


def _why_not_bulk(strategy: Strategy) -> str:
    if not (strategy.eviction.looks_ahead and strategy.overlapped):
        return f"{strategy.name} does not know which rows come again"
    if strategy.refetch:
        # Rows that are fetched anew leave and enter the same slot: one kernel keeps them apart.
        return f"{strategy.name} fetches rows that are there"
    reason = why_not()
    return f"no thread of C can write rows: {reason}" if reason else ""


# -- how rows start -----------------------------------------------------------------------


def initialise_on_gpu(
    store: Tensor,
    layout: WidthGroup,
    state: list[float],
    seed: int,
    device: torch.device,
    *,
    tables: Sequence[EmbeddingBagConfig] | None = None,
) -> None:
    """Start every row of page-locked host memory, or of some tables; a GPU fills it as fast as the
    link goes."""
    columns = torch.tensor(state, device=device)
    for table, base in zip(layout.tables, layout.bases, strict=True):
        if tables is not None and table not in tables:
            continue
        beginning = _beginning(table, on_gpu=True)
        if beginning.kind == "other":
            synchronize(device)
            initialise(store, layout, state, seed, tables=[table])
        else:
            rows = store[base : base + table.num_embeddings]
            start.start_rows(rows, columns, beginning, seed_words(seed, table.name, layout.dim))
    synchronize(device)


def unwritten_rows(
    layout: WidthGroup, state: list[float], seed: int, device: torch.device, *, on_gpu: bool
) -> start.Unwritten:
    """A bit for each row, and what it takes to start one; `on_gpu`: as the store was started."""
    return start.Unwritten(
        [*layout.bases, layout.num_rows],
        [_beginning(table, on_gpu=on_gpu) for table in layout.tables],
        [seed_words(seed, table.name, layout.dim) for table in layout.tables],
        state,
        device,
    )


def _beginning(table: EmbeddingBagConfig, *, on_gpu: bool) -> start.Beginning:
    """How a table's rows start, where a GPU makes the same bits."""
    padding = -1 if table.padding_idx is None else table.padding_idx
    begin = table.start
    if isinstance(begin, Constant):
        return start.Beginning("constant", (begin.value, 0.0), padding)
    if isinstance(begin, Uniform):
        return start.Beginning("uniform", (begin.low, begin.high - begin.low), padding)
    if isinstance(begin, Normal) and on_gpu:
        return start.Beginning("normal", (begin.mean, begin.std), padding)
    return start.Beginning("other")
