"""Rows in page-locked host memory, which a GPU can read and write by itself.

Knows bytes and the system's limits, not what the rows hold. If the system refuses to lock memory,
the rows lie in ordinary memory and move through a buffer; `reason` says why.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.tables import Copied, EmbeddingBagConfig, WidthGroup
from hotrow.store.ram import initialise, own_memory
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import synchronize
from hotrow.support.units import show_bytes

Register = Callable[[int, int], str]  # address, bytes -> why not; empty: it is locked
Unregister = Callable[[int], None]  # address

_CHUNK_BYTES = 1 << 30
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags: for every context, in the GPU's addresses


class LockedRows:
    """`rows` [num_rows, width] float32, all zero at first; locked until `close`, or until neither
    this nor any view of the rows is left."""

    def __init__(self, rows: Tensor, reason: str, release: weakref.finalize[..., Any]) -> None:
        self.rows = rows
        self.reason = reason  # why the rows are not locked; empty if they are
        self._release = release

    @property
    def locked(self) -> bool:
        return not self.reason and self._release.alive

    def close(self) -> None:
        """Unlock the rows. They stay where they are, for the CPU."""
        self._release()


def locked_rows(
    num_rows: int,
    width: int,
    *,
    fill: Callable[[Tensor], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    register: Register | None = None,
    unregister: Unregister | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> LockedRows:
    """Allocate rows and lock them chunk by chunk, calling `progress(done_bytes, total_bytes)`.

    `fill` writes rows before any is locked. A page that it has not written yet takes no memory, so
    what it copies from may be freed piece by piece. More rows than the machine has memory for are a
    ValueError before anything is allocated.
    """
    flat = own_memory(num_rows, width)
    chunks: list[int] = []  # addresses of what is registered
    release = weakref.finalize(flat, _unlock, chunks, unregister or _cuda_unregister, os.getpid())
    rows = torch.from_numpy(flat)
    try:
        if fill is not None:
            fill(rows.view(-1, width))
        is_new = fill is None
        reason = _lock(rows, chunks, register or _cuda_register, chunk_bytes, progress, is_new)
    except BaseException:
        release()
        raise
    if reason:
        release()
    return LockedRows(rows.view(-1, width), reason, release)


def locked_group(
    group: WidthGroup, width: int, state: list[float], seed: int, **options: Any
) -> tuple[LockedRows, list[EmbeddingBagConfig]]:
    """Lock the rows of a group; return them, and the tables that are still zeros. Weights that
    exist are moved first, table by table; `options` are those of `locked_rows`."""
    moved = [table for table in group.tables if isinstance(table.start, Copied)]

    def fill(rows: Tensor) -> None:
        held = [x for table in moved if isinstance(table.start, Copied) for x in table.start.held]
        if any(weights.is_cuda for weights in held):
            synchronize()  # threads read them in other streams
        held.clear()
        initialise(rows, group, state, seed, tables=moved)

    rows = locked_rows(group.num_rows, width, fill=fill if moved else None, **options)
    return rows, [table for table in group.tables if table not in moved]


def _lock(
    flat: Tensor,
    chunks: list[int],
    register: Register,
    chunk_bytes: int,
    progress: Callable[[int, int], None] | None,
    is_new: bool,  # no page exists yet
) -> str:
    """Register all of `flat` and add addresses to `chunks`; return why not if it is refused."""
    total, done = flat.numel() * 4, 0
    for part in flat.split(chunk_bytes // 4):
        # Locking is much faster where pages exist. Making them is work for all cores, which torch
        # uses in the main thread only.
        if is_new:
            part.zero_()
        with uninterrupted():  # a locked chunk must be in `chunks`, or it stays locked
            why = register(part.data_ptr(), part.numel() * 4)
            if not why:
                chunks.append(part.data_ptr())
        if why:
            return _refused(why, done, total)
        done += part.numel() * 4
        if progress is not None:
            progress(done, total)
    return ""


def _unlock(chunks: list[int], unregister: Unregister, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has neither the memory nor the GPU
    while chunks:
        unregister(chunks.pop())


def _refused(why: str, done: int, total: int) -> str:
    return (
        f"the system refused to page-lock the rows: {why}, after {show_bytes(done)} of "
        f"{show_bytes(total)}{_memlock()}. They lie in ordinary memory and move through a buffer, "
        "which is slower. Allow more locked memory (`ulimit -l unlimited`; in a container "
        "`--ulimit memlock=-1`) or free some, and start again"
    )


def _memlock() -> str:
    """Name the process's limit on locked memory, if there is one."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f" (the limit on locked memory is {show_bytes(limit)})"


# -- CUDA --------------------------------------------------------------------------------


def _cuda_register(address: int, num_bytes: int) -> str:
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
    if int(error) == 0:
        return ""
    # CUDA keeps the error for the next call that asks, which is torch's after its next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return f"CUDA error {int(error)}, {runtime.cudaGetErrorString(error)}"


def _cuda_unregister(address: int) -> None:
    # A kernel may still be reading. After an error every call fails, and the end of the process
    # unlocks the memory, so a second error is dropped.
    with contextlib.suppress(RuntimeError):
        synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)
