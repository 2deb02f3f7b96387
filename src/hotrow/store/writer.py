"""Rows to their places in the store and from there, by a few threads of C.

Threads of Python would do: numpy copies rows without Python's lock. But they take it in between,
and whoever launches kernels then waits for it, some two tenths of a millisecond a step
(benchmarks/LOG.md). Where Triton runs there is a C compiler, since it needs one itself.
Knows bytes and ids; not why rows move.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_MOST_THREADS = 3  # and a quarter of the cores at the most: others load data and launch
_SOURCE = Path(__file__).with_name("writer.c")
_FLAGS = ("-O3", "-shared", "-fPIC", "-pthread")
_SECONDS = 60


class Writer:
    """Does one job after the other; whoever asks does not wait."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = max(1, min(_MOST_THREADS, torch.get_num_threads() // 4))
        code = _code()
        self._code = code
        self._writer = code.hotrow_begin(threads)
        if not self._writer:
            raise RuntimeError(f"the system gives no {threads} more threads")
        # Jobs know addresses only: what lies there must stay until they are done.
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self.owner = os.getpid()  # a forked child has none of the threads
        # Not at the end of the program: whoever is taken down later may still write.
        weakref.finalize(self, _end, code, self._writer, self.owner).atexit = False

    def write(self, store: Tensor, ids: Tensor, rows: Tensor) -> int:
        """Replace the rows of `ids` (each given once, -1 for none); the number of the job.

        Nobody may change ids or rows until it is done.
        """
        return self._move(store, ids, rows, reads=False)

    def read(self, store: Tensor, ids: Tensor, out: Tensor) -> int:
        """Copy the rows of `ids` (-1 for none) into `out`, after all that was asked for before; the
        number of the job.

        Nobody may change ids, or look at `out`, until it is done.
        """
        return self._move(store, ids, out, reads=True)

    def _move(self, store: Tensor, ids: Tensor, rows: Tensor, *, reads: bool) -> int:
        if ids.dtype not in (torch.int64, torch.int32) or len(ids) != len(rows):
            raise ValueError(f"{len(rows)} rows for {len(ids)} ids of {ids.dtype}")
        if store.shape[1:] != rows.shape[1:] or store.dtype != rows.dtype:
            raise ValueError(f"rows of {rows.shape[1:]} do not fit a store of {store.shape[1:]}")
        if not all(each.is_contiguous() and not each.is_cuda for each in (store, ids, rows)):
            raise ValueError("rows move within the host's memory, where they lie side by side")
        self._let_go()
        if not len(ids):
            return 0
        number = int(
            self._code.hotrow_move(
                self._writer, reads, store.data_ptr(), len(store), store[0].nbytes, ids.data_ptr(),
                ids.dtype == torch.int64, rows.data_ptr(), len(ids),
            )
        )  # fmt: skip
        self._kept[number] = (store, ids, rows)
        return number

    def wait(self, number: int) -> None:
        """The job of that number is done when this returns, and all before it."""
        bad = self._finish(number)
        if bad != -1:
            raise RuntimeError(
                f"a row {bad} was to be moved, which the store does not have: its rows can no "
                "longer be trusted. Start again from what was saved last, and report this"
            )

    def wait_for_all(self) -> None:
        """For whoever is going: of a bad row nobody would hear any more."""
        self._finish(max(list(self._kept), default=0))

    def _finish(self, number: int) -> int:
        if os.getpid() != self.owner:
            return -1
        bad = int(self._code.hotrow_wait(self._writer, number))
        self._let_go()
        return bad

    def _let_go(self) -> None:
        if self._kept:
            finished = self._code.hotrow_finished(self._writer)
            for number in list(self._kept):  # whose tensors' end may bring us here again
                if number <= finished:
                    self._kept.pop(number, None)


def add_at(counts: Tensor, places: Tensor, times: int) -> None:
    """`times` more at each place, by the thread that calls; int64, and places are there."""
    if counts.device.type != "cpu" or why_not() is not None:
        counts.index_add_(0, places, torch.full_like(places[:1], times).expand_as(places))
        return
    assert counts.dtype == places.dtype == torch.int64
    assert counts.is_contiguous()
    assert places.is_contiguous()
    _code().hotrow_count(counts.data_ptr(), places.data_ptr(), places.numel(), times)


@cache
def why_not() -> str | None:
    """Why there can be no writer here; None if there can. Asked once: compilers take long."""
    try:
        _code()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return None


_known: weakref.ref[Writer] | None = None


def shared_writer() -> Writer:
    """One for all that writes rows, so that they do not take each other's cores."""
    global _known
    found = None if _known is None else _known()
    if found is None or found.owner != os.getpid():
        found = Writer()
        _known = weakref.ref(found)
    return found


def _end(code: ctypes.CDLL, writer: int, owner: int) -> None:
    if os.getpid() == owner:
        code.hotrow_end(writer)


@cache
def _code() -> ctypes.CDLL:
    """The compiled code, from the user's cache or anew."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("there is no C compiler (gcc or clang, or the one that CC names)")
    source = _SOURCE.read_bytes()
    facts = (compiler, *_FLAGS, platform.machine(), platform.system())
    name = f"writer-{hashlib.sha256(source + repr(facts).encode()).hexdigest()[:16]}.so"
    cached = _cache_folder() / name
    if not cached.exists():
        _build(compiler, cached)
    code = ctypes.CDLL(str(cached))
    number, address = ctypes.c_uint64, ctypes.c_void_p
    code.hotrow_begin.argtypes, code.hotrow_begin.restype = [ctypes.c_int], address
    code.hotrow_end.argtypes, code.hotrow_end.restype = [address], None
    yes_or_no = ctypes.c_int
    code.hotrow_move.argtypes = [
        address, yes_or_no, address, number, number, address, yes_or_no, address, number,
    ]  # fmt: skip
    code.hotrow_move.restype = number
    code.hotrow_count.argtypes = [address, address, number, ctypes.c_int64]
    code.hotrow_count.restype = None
    code.hotrow_finished.argtypes, code.hotrow_finished.restype = [address], number
    code.hotrow_wait.argtypes, code.hotrow_wait.restype = [address, number], ctypes.c_int64
    return code


def _cache_folder() -> Path:
    """Of this user alone: what lies there is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        folder = base / "hotrow"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        is_private = about.st_uid == os.getuid() and not about.st_mode & 0o022
        if is_private and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # a home that cannot be written to
    return Path(tempfile.mkdtemp(prefix="hotrow-"))


def _build(compiler: str, target: Path) -> None:
    """Beside its place, and then there: another process may be at the same."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [*compiler.split(), *_FLAGS, "-o", str(made), str(_SOURCE)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode != 0:
            first = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
            raise RuntimeError(f"{compiler} does not compile {_SOURCE.name}: {first}")
        made.replace(target)
