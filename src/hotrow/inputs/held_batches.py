"""Batches that are held while their loader goes on.

A loader may refill the same buffers. A batch that is still held then turns into a later one, labels
included, so batches of such a loader are copied as they are read. Most loaders give new memory
every time and should not pay for copies. The first batches, which are always copied, show which
kind a loader is:

    read 0 .. 63      copies; if an original changes while its batch is held, copies for good
    read 64 ..        the loader's own batches, except parts in memory of a batch that is held

So a part that all batches share, such as constant offsets, is copied every time, and no other part
is. A later change of other parts can only be noticed, not undone, so it is an error. This module
does not know rows or ids.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import itemgetter
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

Part = Any  # a tensor or a numpy array
Piece = tuple[Part, Part, int]  # a part, what the batch has in its place, and the part's version
Span = tuple[int, int, list[Any]]  # first address, one past the last, owners

_FIRST = 64  # batches of a loader that are always copied
_FIRST_OF_MANY = 256  # the same where it is not known how many batches are held
_MOST_HELD = 512  # batches that may be held where that is not known
_MARGIN = 4  # batches that count as held after their time: a GPU may still be reading them
_MOST_OWNERS = 4  # remembered owners of memory that many batches share
_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None)})
_start = itemgetter(0)  # of a span
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Held:
    """A batch that was read. `batch` is the loader's own object, or a copy of it."""

    __slots__ = ("_origin", "_pieces", "batch", "is_copy")

    def __init__(
        self,
        origin: Any,
        pieces: list[Piece] | None = None,
        copy: Any = None,
        is_copy: bool = False,
    ) -> None:
        """Without `pieces` nothing is checked. `is_copy`: all parts were copied."""
        self.batch = origin if copy is None else copy
        self._origin, self._pieces, self.is_copy = origin, pieces, is_copy

    def note_computed(self) -> None:
        """Note tensors that the batch has computed and kept since it was read, as TorchRec's jagged
        tensors and cached properties do when `ids=` asks for them."""
        if self._pieces is not None and not self.is_copy:
            known = {id(piece[0]): piece for piece in self._pieces}
            parts = parts_in(self._origin)
            self._pieces = [known.get(id(part), (part, part, _version(part))) for part in parts]

    def changed(self) -> str | None:
        """Name what the loader changed in its own batch since; None: nothing was noticed.

        Where all was copied, values in host memory are compared. Otherwise versions of what was not
        copied are compared, which do not see writes by numpy or through `.data`.
        """
        if not self._pieces:
            return None
        if [*map(id, parts_in(self._origin))] != [id(part) for part, _, _ in self._pieces]:
            return "the object that holds its tensors"
        for part, clone, version in self._pieces:
            if self.is_copy:
                is_other = not _same_bits(part, clone)
            else:
                is_other = clone is part and _version(part) != version and _is_whole(part)
            if is_other:
                return f"batch{_path(self._origin, part) or ''}"
        return None


def _pieces(parts: Sequence[Part], clones: Sequence[Part]) -> list[Piece]:
    return [(part, clone, _version(part)) for part, clone in zip(parts, clones, strict=True)]


class Kept:
    """An iterator over a loader whose batches are held while it goes on."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.source = iter(loader)
        self._given = None if gives_new_memory(loader) else _Given(_habits_of(loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch, which may be held for any time."""
        batch = next(self.source)
        if self._given is None:
            return batch
        return self._given.take(batch, None).batch

    @property
    def may_change(self) -> bool:
        """Return whether the loader might change batches that it gave."""
        return self._given is not None

    def read(self, held: int) -> Held:
        """Return the next batch while `held` batches before it are held."""
        batch = next(self.source)
        if self._given is None:
            return Held(batch)
        return self._given.take(batch, held)

    def end(self) -> None:
        """Release all batches."""
        if self._given is not None:
            self._given.forget()

    def check(self, held: Held) -> str | None:
        """Name what changed in a batch since it was read, unless a copy of it was made."""
        given = self._given
        if given is None or (held.is_copy and given.habits.reuses):
            return None
        what = held.changed()
        given.habits.reuses = given.habits.reuses or (held.is_copy and what is not None)
        return None if held.is_copy else what


class _Habits:
    """What is known of a loader. It outlives a pass, so it keeps no batch."""

    def __init__(self) -> None:
        self.reuses = False  # every batch is copied from now on
        self.reads = self.most_held = 0
        self.num_parts = 0  # of a batch, and which of them were ever in memory of another batch
        self.shared: set[int] = set()

    def note_shared(self, parts: Sequence[Part], shared: Sequence[Part]) -> Sequence[Part]:
        """Remember which parts of batches are shared; return those to copy of this batch."""
        if shared:
            numbers = {id(part): number for number, part in enumerate(parts)}
            self.shared |= {numbers[id(part)] for part in shared}
        if not self.shared or len(parts) != self.num_parts:
            is_first, self.num_parts = not self.num_parts, len(parts)
            return parts if self.shared and not is_first else shared
        return [part for number, part in enumerate(parts) if number in self.shared]


class _Given:
    """The memory that a loader gave for its last batches in one pass."""

    def __init__(self, habits: _Habits) -> None:
        self.habits = habits
        self.forget()

    def forget(self) -> None:
        """Release all batches."""
        self._spans: list[Span] = []  # by address; those of different batches do not overlap
        self._recent: deque[list[Span]] = deque()  # by batch

    def take(self, batch: Any, held: int | None) -> Held:
        """Note a batch that was just read; copy it if it would not stay as it is.

        The last `held` batches before it are held; None: any of the last ones may be.
        """
        parts, habits = parts_in(batch), self.habits
        shared: Sequence[Part] = ()
        habits.reads += 1
        if habits.reuses:
            self.forget()
        else:
            while len(self._recent) > (_MOST_HELD if held is None else held + _MARGIN):
                for span in self._recent.popleft():
                    self._release(span)
            shared = habits.note_shared(parts, self._note(parts, weakly=held is None))
            # Nothing compares values where it is not known how many batches are held.
            habits.reuses = bool(shared) and held is None
        # A window that grows by one per step reads two: overlaps show while it grows.
        habits.most_held = max(habits.most_held, held or 0)
        first = _FIRST_OF_MANY if held is None else max(_FIRST, 2 * habits.most_held + 8)
        if habits.reuses or habits.reads <= first:
            return _copied(batch, parts, parts)
        return _copied(batch, parts, shared) if shared else Held(batch, _pieces(parts, parts))

    def _note(self, parts: Sequence[Part], *, weakly: bool) -> list[Part]:
        """Remember a batch's memory; return the parts in memory of a batch that is still held.

        Memory that was freed and is used again does not count, so held memory is kept alive here,
        or known by weak references.
        """
        spans = [(*_extent(part), [_weakly(part) if weakly else part]) for part in parts]
        if len(spans) > 1:
            spans = _joined(sorted(spans, key=_start))
        noted: list[Span] = []
        shared: list[tuple[int, int]] = []
        for start, end, owners in spans:
            low, high = start, end
            place = bisect_right(self._spans, start, key=_start)
            if place and self._spans[place - 1][1] > start:
                place -= 1
            while place < len(self._spans) and self._spans[place][0] < end:
                first, last, others = self._spans.pop(place)
                if any(_is_alive(owner) for owner in others):  # else it was freed
                    low, high = min(low, first), max(high, last)
                    owners = [*owners, *others[:_MOST_OWNERS]]
                    if not shared or shared[-1] != (start, end):
                        shared.append((start, end))
            self._spans.insert(place, (low, high, owners))
            noted.append((low, high, owners))
        self._recent.append(noted)
        if not shared:
            return []
        return [p for p in parts if any(low <= _extent(p)[0] < high for low, high in shared)]

    def _release(self, span: Span) -> None:
        place = bisect_left(self._spans, span[0], key=_start)
        if place < len(self._spans) and self._spans[place][2] is span[2]:
            del self._spans[place]


_known: weakref.WeakKeyDictionary[Any, _Habits] = weakref.WeakKeyDictionary()


def _habits_of(loader: Any) -> _Habits:
    """Return what earlier epochs showed of a loader."""
    try:
        return _known.setdefault(loader, _Habits())
    except TypeError:  # it has no hash, or no weak references
        return _Habits()


def gives_new_memory(loader: Any) -> bool:
    """Return whether no batch of a loader can change an earlier one."""
    if isinstance(loader, DataLoader):
        return loader.num_workers > 0  # batches come from other processes
    return isinstance(loader, list | tuple)


# -- parts of a batch ----------------------------------------------------------------------


def parts_in(batch: Any) -> list[Part]:
    """Return every tensor and numpy array of a batch.

    The search covers lists, tuples, deques, mappings, dataclasses, jagged tensors and attributes of
    other objects, but not objects inside of those, which may be a whole data set.
    """
    found: list[Part] = []
    _find(batch, found, inside=False)
    return found


def _find(value: Any, found: list[Part], *, inside: bool) -> None:
    if type(value) in _PLAIN:
        return
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.numel():
            found.append(value)
    elif isinstance(value, np.ndarray):
        if value.size and not value.dtype.hasobject:
            found.append(value)
    else:
        members, inside = _members(value, inside)
        for _, member in members:
            _find(member, found, inside=inside)


def _members(value: Any, inside: bool) -> tuple[Iterable[tuple[Any, Any]], bool]:
    """Return what an object holds, by index, key or name, and whether that is inside of an opaque
    object. Opaque objects inside of others are not looked into."""
    if isinstance(value, list | tuple | deque):
        return enumerate(value), inside
    if isinstance(value, dict | MappingProxyType):
        return value.items(), inside
    attributes, is_opaque = _attributes(value)
    return () if inside and is_opaque else attributes.items(), inside or is_opaque


def _attributes(value: Any) -> tuple[Mapping[str, Any], bool]:
    """Return an object's attributes, and whether it might be anything, such as a data set."""
    if isinstance(value, type | nn.Module | FunctionType | MethodType):
        return {}, True
    kind: Any = type(value)
    if hasattr(kind, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in _field_names(kind)}, False
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    is_jagged = all(callable(getattr(value, name, None)) for name in ("keys", "values", "offsets"))
    attributes = {**getattr(value, "__dict__", {}), **slots}
    return attributes, not (is_jagged or isinstance(value, Mapping))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of attributes that a class keeps in `__slots__`."""
    members = (vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base))
    return tuple(
        name for each in members for name, at in each if isinstance(at, MemberDescriptorType)
    )


def copy_of(batch: Any) -> Any:
    """Return a batch of the same classes with copies of its tensors and arrays.

    An object that cannot be copied is returned as it is.
    """
    parts = parts_in(batch)
    return _copied(batch, parts, parts).batch


def _copied(batch: Any, parts: Sequence[Part], chosen: Sequence[Part]) -> Held:
    """Copy the chosen parts of a batch, or none where its structure is unknown."""
    uncopied = Held(batch, _pieces(parts, parts))
    if not parts:
        return uncopied
    clones = {id(part): part for part in parts} | {id(part): _clone(part) for part in chosen}
    try:
        made = _rebuilt(batch, clones, inside=False)
    except Exception:  # a class may do anything when it is copied
        return uncopied
    copies = parts_in(made)
    if [*map(id, copies)] != [id(clones[id(part)]) for part in parts]:
        return uncopied  # a class that is copied in another way
    return Held(batch, _pieces(parts, copies), made, is_copy=len(chosen) == len(parts))


def _rebuilt(value: Any, clones: Mapping[int, Part], *, inside: bool) -> Any:
    if type(value) in _PLAIN:
        return value
    if (clone := clones.get(id(value))) is not None:
        return clone
    members, inside = _members(value, inside)
    old = dict(members)
    new = {name: _rebuilt(member, clones, inside=inside) for name, member in old.items()}
    made: Any
    if isinstance(value, tuple):
        parts = new.values()
        made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if attributes := getattr(value, "__dict__", None):
            made.__dict__.update(attributes)
        return made
    if type(value) is MappingProxyType:
        return MappingProxyType(new)
    is_container = isinstance(value, list | deque | dict)
    if not is_container and all(member is old[name] for name, member in new.items()):
        return value
    made = copy.copy(value)
    if made is value:
        raise TypeError(f"{type(value).__name__} cannot be copied")
    if isinstance(value, list | deque):
        made.clear()
        made.extend(new.values())
    elif isinstance(value, dict):
        made.update(new)
    else:
        for name, member in new.items():
            object.__setattr__(made, name, member)
    return made


def _clone(part: Part) -> Part:
    if isinstance(part, np.ndarray):
        return part.copy()
    if part.requires_grad:  # a copy would not get its gradient
        return part
    locked = torch.cuda.is_initialized() and part.is_pinned()
    is_plain = type(part) is Tensor and part.device.type == "cpu" and part.is_contiguous()
    if not is_plain or part.is_conj() or part.is_neg() or part._is_zerotensor():
        return torch.empty_like(part, pin_memory=True).copy_(part) if locked else part.clone()
    # Not by torch, whose threads would then spin on the cores that others need.
    made = torch.empty_like(part, pin_memory=locked)
    ctypes.memmove(made.data_ptr(), part.data_ptr(), part.nbytes)
    return made


def _same_bits(one: Part, other: Part) -> bool:
    """Compare values in host memory; tensors on a GPU would need a synchronization."""
    if one is other:
        return True
    if isinstance(one, np.ndarray):
        return bool(one.tobytes() == other.tobytes())
    if one.device.type != "cpu" or torch.equal(one, other):
        return True
    words = _WORDS.get(one.element_size())
    return words is not None and torch.equal(one.view(words), other.view(words))  # NaN


def _version(part: Part) -> int:
    """Return how often torch saw a tensor change; inference tensors and arrays do not count."""
    return part._version if isinstance(part, Tensor) and not part.is_inference() else 0


def _is_whole(part: Part) -> bool:
    """Whether a tensor has its memory for itself: views of one tensor share their version."""
    return bool(part.untyped_storage().nbytes() == part.nbytes)


def _path(value: Any, part: Part, *, inside: bool = False) -> str | None:
    """Return how a program would write where a part is in a batch; None: it is not there."""
    if value is part:
        return ""
    members, inside = _members(value, inside)
    is_container = isinstance(value, list | tuple | deque | dict | MappingProxyType)
    for name, member in members:
        if type(member) in _PLAIN:
            continue
        if (rest := _path(member, part, inside=inside)) is not None:
            return (f"[{name!r}]" if is_container else f".{name}") + rest
    return None


# -- memory --------------------------------------------------------------------------------


def _weakly(part: Part) -> Any:
    if isinstance(part, np.ndarray):
        return weakref.ref(part)
    return StorageWeakRef(part.untyped_storage())


def _extent(part: Part) -> tuple[int, int]:
    """Return the first address of a part, and one past its last."""
    if isinstance(part, np.ndarray):
        low = high = part.__array_interface__["data"][0]
        for count, stride in zip(part.shape, part.strides, strict=True):
            low, high = low + min(0, (count - 1) * stride), high + max(0, (count - 1) * stride)
        return low, high + part.itemsize
    start, size = part.data_ptr(), part.nbytes
    if not part.is_contiguous():
        last = sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
        size = (last + 1) * part.element_size()
    return start, start + size


def _joined(spans: list[Span]) -> list[Span]:
    """Join spans that overlap: tensors of one batch may share memory. They come by address."""
    made: list[Span] = []
    for start, end, owners in spans:
        if made and start < made[-1][1]:
            first, last, others = made.pop()
            start, end, owners = first, max(last, end), [*others, *owners]
        made.append((start, end, owners))
    return made


def _is_alive(owner: Any) -> bool:
    if isinstance(owner, StorageWeakRef):
        return not owner.expired()
    return not isinstance(owner, weakref.ref) or owner() is not None
