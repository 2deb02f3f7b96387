"""A few threads of C that copy rows to and from the store.

Python threads could do it, since numpy copies rows without Python's lock. But they take the lock
in between, and the thread that launches kernels waits for it: 0.2 ms a step (benchmarks/LOG.md).
Triton needs a C compiler itself. Knows bytes and ids; not why rows move.
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

_MOST_THREADS = 8  # and half of the cores at the most: others load data and launch
_SOURCE = Path(__file__).with_name("writer.c")
_FLAGS = ("-O3", "-shared", "-fPIC", "-pthread")
_SECONDS = 60


class Writer:
    """Does one job after the other; callers do not wait."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:
            threads = max(1, min(_MOST_THREADS, torch.get_num_threads() // 2))
        code = _code()
        self._code = code
        self._writer = code.hotrow_begin(threads)
        if not self._writer:
            raise RuntimeError(f"the system cannot start {threads} more threads")
        # Jobs know addresses only: these tensors must live until their jobs are done.
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self.owner = os.getpid()  # a forked child has none of the threads
        # Not at the end of the program: objects that are finalized later may still write.
        weakref.finalize(self, _end, code, self._writer, self.owner).atexit = False

    def write(self, store: Tensor, ids: Tensor, rows: Tensor) -> int:
        """Replace the rows of `ids` (each given once, -1 for none); return the job's number.

        Do not change ids or rows until it is done.
        """
        return self._move(store, ids, rows, reads=False)

    def read(self, store: Tensor, ids: Tensor, out: Tensor) -> int:
        """Copy the rows of `ids` (-1 for none) into `out` after all earlier jobs; return the
        job's number.

        Do not change ids or read `out` until it is done.
        """
        return self._move(store, ids, out, reads=True)

    def _move(self, store: Tensor, ids: Tensor, rows: Tensor, *, reads: bool) -> int:
        if ids.dtype not in (torch.int64, torch.int32) or len(ids) != len(rows):
            raise ValueError(f"{len(rows)} rows for {len(ids)} ids of {ids.dtype}")
        if store.shape[1:] != rows.shape[1:] or store.dtype != rows.dtype:
            raise ValueError(f"rows of {rows.shape[1:]} do not fit a store of {store.shape[1:]}")
        if not all(x.is_contiguous() and not x.is_cuda for x in (store, ids, rows)):
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

    def is_done(self, number: int) -> bool:
        """Return whether a job and all before it are done; does not wait."""
        return os.getpid() != self.owner or int(self._code.hotrow_finished(self._writer)) >= number

    def wait(self, number: int) -> None:
        """Wait until a job and all before it are done."""
        bad = self._finish(number)
        if bad != -1:
            raise RuntimeError(
                f"a row {bad} was to be moved, which the store does not have: its rows can no "
                "longer be trusted. Start again from what was saved last, and report this"
            )

    def wait_for_all(self) -> None:
        """Finalizer path: errors are dropped because no caller remains."""
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
    """Add `times` at each place, in the calling thread; int64, and places are valid."""
    if counts.device.type != "cpu" or why_not() is not None:
        counts.index_add_(0, places, torch.full_like(places[:1], times).expand_as(places))
        return
    assert counts.dtype == places.dtype == torch.int64
    assert counts.is_contiguous()
    assert places.is_contiguous()
    _code().hotrow_count(counts.data_ptr(), places.data_ptr(), places.numel(), times)


@cache
def why_not() -> str | None:
    """Return why there can be no writer here, or None. Cached: compilers take long."""
    try:
        _code()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error)
    return None


_known: weakref.ref[Writer] | None = None


def shared_writer() -> Writer:
    """Return the writer that all share, so that they do not take each other's cores."""
    global _known
    writer = None if _known is None else _known()
    if writer is None or writer.owner != os.getpid():
        writer = Writer()
        _known = weakref.ref(writer)
    return writer


def _end(code: ctypes.CDLL, writer: int, owner: int) -> None:
    if os.getpid() == owner:
        code.hotrow_end(writer)


@cache
def _code() -> ctypes.CDLL:
    """Return the compiled code, from the user's cache or compiled now."""
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
    """Return a folder that only this user can write: its files are executed."""
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
    """Compile beside the target and rename: another process may do the same."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [*compiler.split(), *_FLAGS, "-o", str(built), str(_SOURCE)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode != 0:
            first = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
            raise RuntimeError(f"{compiler} does not compile {_SOURCE.name}: {first}")
        built.replace(target)
