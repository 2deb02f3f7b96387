"""Which thread may read or change the rows of a collection, and when; what a forked child keeps.

Knows locks, threads and processes; not what rows are.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from hotrow.support.interrupts import uninterrupted

_MOST_READERS = 8  # threads that read at the same time; each one costs a writer a lock
# Reads of fewer lookups take turns. Each of their calls of torch takes less than some 10 us, which
# is what handing over Python's lock takes. Near this number it makes little difference.
_FEW_LOOKUPS = 8192


class _ThreadNumber(threading.local):
    """Numbers threads in the order in which they first read, so that few share a place."""

    _next = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._next)


_this_thread = _ThreadNumber()


class RowLock:
    """Several threads may read rows at the same time; one may change them while no other reads.

    A reader holds one of a few places, a writer holds all of them. A writer closes the door first,
    so that readers who come and go cannot keep it waiting. All locks are reentrant. A thread that
    reads must not start to write: two of those would wait for each other. Finalizers ask
    `may_wait` first.

    With `shared=False` readers exclude each other, too.
    """

    _serials = itertools.count()
    _every: ClassVar[weakref.WeakValueDictionary[int, RowLock]] = weakref.WeakValueDictionary()

    def __init__(self, *, shared: bool) -> None:
        self.serial, self._shared = next(self._serials), shared
        self._turn = threading.RLock()
        self._door = threading.RLock()
        self._places = [threading.RLock() for _ in range(_MOST_READERS if shared else 1)]
        self._every[self.serial] = self

    def reading(self) -> AbstractContextManager[object]:
        """Inside, no other thread changes rows."""
        place = self._places[_this_thread.number % len(self._places)]
        if not self._is_held:
            with self._door:
                pass  # a writer waits, or writes
        return place

    @property
    def _is_held(self) -> bool:
        """Whether the current thread reads or writes."""
        place = self._places[_this_thread.number % len(self._places)]
        return bool(place._is_owned())  # type: ignore[attr-defined]

    def turn(self, lookups: int, *, beside_training: bool) -> AbstractContextManager[object]:
        """Held by a thread around all of a read that would only compete with others.

        Every call of torch lets go of Python's own lock and takes it again. A thread that waits
        for its turn does not compete for that lock.

        Where readers exclude each other, several read no faster than one, and they slow training
        down: beside four, captured steps took 61 ms instead of 1.4 ms. Where they do not, reads of
        few lookups take turns: four threads without turns read a third of what one reads.
        """
        takes_turns = lookups < _FEW_LOOKUPS if self._shared else beside_training
        # A thread that holds the lock must not wait for a thread that may wait for the lock.
        return self._turn if takes_turns and not self._is_held else nullcontext()

    def writing(self) -> AbstractContextManager[object]:
        """Inside, no other thread reads or changes rows, and Ctrl-C waits."""
        return writing([self])

    def acquire(self) -> None:
        self._door.acquire()
        for place in self._places:
            place.acquire()

    def release(self) -> None:
        for place in self._places:
            place.release()
        self._door.release()

    @property
    def is_held_here(self) -> bool:
        """Whether the current thread reads or writes, or is about to."""
        locks: list[Any] = [self._door, *self._places]
        return any(lock._is_owned() for lock in locks)

    @classmethod
    def is_any_held_here(cls) -> bool:
        """Whether the current thread holds any lock of any collection."""
        locks = [reference() for reference in cls._every.valuerefs()]
        return any(lock is not None and lock.is_held_here for lock in locks)


class writing:
    """Inside, no other thread reads or changes the rows of any of these locks."""

    def __init__(self, locks: Sequence[RowLock]) -> None:
        # One order for all threads, so that no two wait for each other.
        self._locks = locks if len(locks) < 2 else sorted(set(locks), key=lambda x: x.serial)
        self._signals = uninterrupted()

    def __enter__(self) -> None:
        self._signals.__enter__()  # an interrupt between two locks would leave one locked
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()
        self._signals.__exit__()


# The newest phase of Python's garbage collection comes last; what all threads were told of each
# phase last, and what this thread was.
_phases = OrderedDict[str, None](start=None, stop=None)
_told: dict[str, object] = {}
_told_here = threading.local()
# Functions of C, which keep what they are called with. Python would handle a signal that came
# during a collection at the beginning of one of its own, and drop what the handler raises: Ctrl-C.
_noted: Any = (_phases.move_to_end, _told.__setitem__, _told_here.__setattr__)
gc.callbacks += _noted


def _collects_here() -> bool:
    """Return whether the current thread collects garbage now."""
    is_any = next(reversed(_phases)) == "start"
    return is_any and getattr(_told_here, "start", None) is _told["start"]


def may_wait() -> bool:
    """Return whether a finalizer may wait for a lock in the current thread.

    A thread that holds a lock could wait for itself, and is perhaps in the midst of a change. A
    garbage collection may come at any allocation, so a finalizer that it calls may be inside of
    anything: a loop over what the finalizer would change, or the capture of a CUDA graph.
    """
    return not _collects_here() and not RowLock.is_any_held_here()


class Call:
    """A lookup whose gradients have not come yet."""

    __slots__ = ("__weakref__",)


class TrainingThread:
    """The thread that trains a collection. A second one that trains at the same time is refused.

    A thread trains while it iterates over `hotrow.ahead`, and between a lookup and its backward
    pass. Then another thread may take over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._iterates = False  # over hotrow.ahead
        self._open: weakref.WeakSet[Call] = weakref.WeakSet()
        self._modes = threading.local()
        self._mode = True

    def begin_here(self) -> None:
        """Take the current thread for the one that trains until another one does."""
        self._thread = threading.current_thread()

    def look_up(self) -> None:
        """The current thread is about to look rows up to train them."""
        # A recomputation inside of a backward pass may run in a thread of autograd's own.
        if torch._C._current_graph_task_id() == -1:
            self._claim("looks up a batch to train it")

    def open_call(self) -> Call:
        """The current thread looks rows up to train them."""
        call = Call()
        self._open.add(call)
        return call

    def close_call(self, call: Call) -> None:
        """Gradients of a lookup have come."""
        self._open.discard(call)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread trains, or has trained and is alive."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return False
        return thread.is_alive()

    def is_among(self, threads: Collection[threading.Thread]) -> bool:
        """Whether the thread that trains is one of these; when it has ended, any other may be."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return bool(threads)
        return thread in threads

    def iterate(self) -> None:
        """The current thread takes a batch from `hotrow.ahead`."""
        self._claim("takes a batch from hotrow.ahead")
        self._iterates = True

    def end_iteration(self) -> None:
        self._iterates = False

    def _claim(self, what: str) -> None:
        if self._thread is not threading.current_thread():
            with self._lock:
                self.check(what)
                self._thread = threading.current_thread()

    def check(self, what: str) -> None:
        """Refuse what the current thread is about to do if another one trains."""
        if self.is_elsewhere and (self._iterates or len(self._open)):
            assert self._thread is not None
            does = "waits for its gradients"
            if self._iterates:
                does = "iterates over hotrow.ahead, until the loop ends or its close() is called"
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} {what}, but thread "
                f"{self._thread.name!r} trains the same collection and {does}. Do it in the thread "
                "that trains, or afterwards; to read vectors meanwhile, use torch.no_grad() or "
                "torch.inference_mode(), which hold for one thread"
            )

    # -- train() and eval() ------------------------------------------------------------

    @property
    def mode(self) -> bool:
        """Whether the current thread is in training mode."""
        own: bool = getattr(self._modes, "own", self._mode)
        return own

    @mode.setter
    def mode(self, training: bool) -> None:
        """`eval()` in another thread must not end training: there it holds for that thread."""
        if self.is_elsewhere:
            self._modes.own = training
        else:
            self._mode = training
            self._modes.__dict__.pop("own", None)


# -- forked children -------------------------------------------------------------------

# A store's memory is no child's, and whatever a child has mapped there since would go with it. Nor
# has it the threads that read ahead: to finish what they were at would write to that memory.
_bound: weakref.WeakSet[Any] = weakref.WeakSet()


def bind_to_this_process(each: Any) -> None:
    """Children that are forked from now on keep it until their end, and so all that it holds."""
    _bound.add(each)


def _keep() -> None:
    # Not by a list, which goes at the end of the interpreter.
    for each in list(_bound):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(after_in_child=_keep)
