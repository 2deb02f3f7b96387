"""All rows, in slow memory. Knows ids and bytes; decides nothing.

A row is its weights followed by its optimizer state.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hotrow.inputs.tables import (
    Constant,
    Copied,
    EmbeddingBagConfig,
    Init,
    InPlace,
    Normal,
    Uniform,
    WidthGroup,
)
from hotrow.store.changed import ChangedRows, FrozenRows, TouchedRows
from hotrow.store.init_fn import check_init_fn, filled, rows_of_chunk
from hotrow.store.snapshot import Snapshot
from hotrow.support.hashing import mixed
from hotrow.support.host_memory import check_fits
from hotrow.support.threads import bind_to_this_process

_CHUNK_FLOATS = 1 << 20


class Store:
    """All rows, with two verbs (`read` and `write`), and what is known of every row.

    Two engines can train the rows of one store, so what outlives either of them is kept here:
    which rows are frozen, which were changed, and snapshots.
    """

    snapshot: Snapshot | None = None  # rows as they were, read while others write
    touched: TouchedRows | None = None  # whether each of a few rows was written
    changed: ChangedRows | None = None  # the rows written since a checkpoint; None: not noted
    why_no_snapshot: str | None = None  # why not every write goes through `will_write`

    def __init__(
        self, rows: Tensor, *, device: torch.device | None = None, untrained: Sequence[int] = ()
    ) -> None:
        """`device`: where steps change rows, the CPU if None; `untrained`: padding rows."""
        self.rows = rows  # [num_rows, width] float32
        self._device = device or torch.device("cpu")
        self.frozen = FrozenRows(len(rows), self._device, untrained)

    def note_changes(self) -> None:
        """Remember which rows are written from now on."""
        if self.changed is None:
            self.changed = ChangedRows(len(self.rows), self._device)
        self.changed.clear()  # at their address, where captured steps note

    def note_changed(self, ids: Tensor) -> None:
        """Rows, each given once, get other bits by a step or a caller."""
        if self.changed is not None:
            self.changed.note(ids)

    def read(self, ids: Tensor, out: Tensor) -> Tensor:
        """Copy the rows of `ids` into `out`."""
        return torch.index_select(self.rows, 0, ids, out=out)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of `ids`, each given once."""
        self.will_write(ids)
        self.rows.index_copy_(0, ids, rows)

    def will_write(self, ids: Tensor) -> None:
        """Call this before writing to `rows` directly; -1 in `ids` is no row."""
        self.note(ids)
        snapshot = self.snapshot  # read once: another thread may end it meanwhile
        if snapshot is not None:
            snapshot.keep(ids)

    def note(self, ids: Tensor) -> None:
        """Note that rows get other bits, here or in slots."""
        touched = self.touched
        if touched is not None:
            touched.note(ids)

    @property
    def is_watched(self) -> bool:
        return self.snapshot is not None or self.touched is not None

    def write_alone(self, ids: Tensor, rows: Tensor) -> None:
        """`write` on the host, in the calling thread; ids of -1 are skipped.

        Rows are single items, which numpy copies several times as fast as one thread of torch.
        """
        self.will_write(ids)
        places, items = ids.numpy(), _as_items(rows)
        present = places >= 0
        if not present.all():
            places, items = places[present], items[present]
        _as_items(self.rows)[places] = items


def _as_items(rows: Tensor) -> np.ndarray:
    array = rows.numpy()
    return array.view(np.dtype((np.void, array.strides[0]))).reshape(-1)


def host_rows(num_rows: int, width: int) -> Tensor:
    """Return rows of zeros in a mapping of their own; no page is touched."""
    return torch.from_numpy(own_memory(num_rows, width)).view(-1, width)


def own_memory(num_rows: int, width: int) -> np.ndarray:
    """Return the floats of rows in a mapping that forked children have no part in.

    The kernel would otherwise copy every locked page for every child, and every page that a child
    of a data loader meets. An array, since weak references to it are called before its memory goes;
    those to a mapping are called after.
    """
    check_fits(num_rows, width)
    # Private pages are made faster than shared ones, which are those of an unnamed file.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, num_rows * width * 4), flags=flags)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
        bind_to_this_process(memory)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            # Measured: touched and locked in half the time.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.float32, count=num_rows * width)


def initialise(
    rows: Tensor,
    group: WidthGroup,
    state: list[float],
    seed: int,
    *,
    tables: Sequence[EmbeddingBagConfig] | None = None,
    chunk_floats: int = _CHUNK_FLOATS,
) -> None:
    """Start rows as a function of (seed, table name, row), chunk by chunk on all cores.

    `state` holds the starting value of each state column; `tables`: only the rows of these.
    """
    step = max(1, chunk_floats // rows.shape[1])

    def start(table: EmbeddingBagConfig, base: int, part: range) -> None:
        first, last = part.start, part.stop
        chunk = start_weights(table.start, group.dim, first, last, table=table.name, seed=seed)
        is_copied = isinstance(table.start, Copied) or getattr(table.start, "is_copied", False)
        if not is_copied and table.padding_idx is not None and first <= table.padding_idx < last:
            chunk[table.padding_idx - first] = 0  # as in torch, for those who export the table
        rows[base + first : base + last, : group.dim] = chunk.to(rows.device)
        for column, value in enumerate(state, start=group.dim):
            rows[base + first : base + last, column] = value

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for table, base in zip(group.tables, group.bases, strict=True):
            if tables is None or table in tables:
                for _ in pool.map(partial(start, table, base), _chunks(table, step)):
                    pass
                if isinstance(table.start, Copied):
                    table.start.held.clear()  # so that memory has one table more, not all


def _chunks(table: EmbeddingBagConfig, step: int) -> list[range]:
    if isinstance(table.start, InPlace):
        check_init_fn(table)
        step = rows_of_chunk(table.embedding_dim)
    count = table.num_embeddings
    return [range(first, min(first + step, count)) for first in range(0, count, step)]


def start_weights(
    init: Init, dim: int, first: int, last: int, *, table: str = "", seed: int = 0
) -> Tensor:
    """Return the starting weights of the rows first..last-1 of the table with this name."""
    if isinstance(init, Copied):
        return init.take(first, last, dim)
    if isinstance(init, InPlace):
        function, count, word = init.function, init.num_rows, seed_words(seed, table, dim)[0]
        return filled(function, dim, first, last, count, word=word, table=table)
    return start_of_rows(init, dim, torch.arange(first, last), table=table, seed=seed)


def start_of_rows(init: Init, dim: int, rows: Tensor, *, table: str = "", seed: int = 0) -> Tensor:
    """Return the starting weights of some rows of the table with this name."""
    if isinstance(init, Copied | InPlace):
        if not len(rows):
            return torch.empty(0, dim)
        first = int(rows.min())
        part = start_weights(init, dim, first, int(rows.max()) + 1, table=table, seed=seed)
        return part[rows - first]
    if isinstance(init, Constant):
        return torch.full((len(rows), dim), init.value)
    if isinstance(init, Uniform | Normal):
        words, numbers = seed_words(seed, table, dim), rows.numpy().astype(np.uint64)
        if isinstance(init, Uniform):
            unit = _unit_floats(numbers, dim, words[0])
            return torch.from_numpy(init.low + unit * np.float32(init.high - init.low)).float()
        radius = np.sqrt(-2 * np.log1p(-_unit_floats(numbers, dim, words[1])))
        angle = np.float32(2 * np.pi) * _unit_floats(numbers, dim, words[2])
        return torch.from_numpy(init.mean + init.std * radius * np.cos(angle)).float()
    with torch.no_grad():  # a function may read another module's parameters
        chunk = init(rows)
    if not isinstance(chunk, Tensor) or chunk.shape != (len(rows), dim):
        raise ValueError(
            f"init must return a tensor of shape [{len(rows)}, {dim}] for that many row "
            f"numbers, got {getattr(chunk, 'shape', type(chunk).__name__)}"
        )
    return chunk.float()


def _unit_floats(rows: np.ndarray, dim: int, word: int) -> np.ndarray:
    """Return uniform floats in [0, 1), [n, dim], hashed from (word, row, column)."""
    key = mixed(rows ^ np.uint64(word))
    low = key.astype(np.uint32)[:, None]
    stride = (key >> np.uint64(32)).astype(np.uint32)[:, None] | np.uint32(1)
    x = low + stride * np.arange(dim, dtype=np.uint32)[None, :]
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def seed_words(seed: int, table: str, dim: int) -> list[int]:
    """Return three 64-bit words for a table's starts: uniform, then normal radius and angle.

    They depend on the table's name, so a table starts alike whatever tables lie beside it.
    """
    digest = hashlib.blake2b(f"{seed} {dim} {table}".encode(), digest_size=24).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8, 16)]
