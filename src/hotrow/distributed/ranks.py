"""Messages between ranks: fixed headers, then values of uneven size. Knows no rows.

Before anything of uneven size crosses, all ranks say what they are about to do: `Ranks.agree`. A
rank that only serves others learns what they do; ranks that do different things raise.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from threading import RLock
from time import perf_counter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.support.messages import many


class Op(IntEnum):
    """What ranks do together. The numbers travel."""

    BATCH = 1  # the ids of a batch go to the owners of their rows
    ROWS = 2  # vectors come back
    GRADS = 3  # gradients go to owners, which update their rows
    READ = 4  # rows are read, outside of training
    CHECK = 5  # ranks compare what each of them was called with
    SERVE = 6  # none: this rank has no batch left and helps the others
    BUILD = 7  # ranks compare what they are about to build
    PART = 8  # ranks say how many samples of a batch each of them trains


_WHAT = {
    Op.BATCH: "brings its next batch",
    Op.ROWS: "looks up a batch",
    Op.GRADS: "ends a backward pass, or was asked for its next batch without one",
    Op.READ: "reads rows",
    Op.CHECK: "calls a method that all ranks have to call",
    Op.SERVE: "has no batch left",
    Op.BUILD: "builds a collection, or saves or loads one",
    Op.PART: "begins a step of hotrow.Trainer",
}
# Words of a header that are the same for all ranks it goes to.
OP, COLLECTION, SERIAL, STATUS, DEPTH, SAME, FIRST_FREE = range(7)
FEWEST = 2  # ranks that exchange anything; tests let one exchange with itself
_WIDTH = 64  # words of most headers: if ranks differ in collections, messages have one size
# Bits of STATUS.
ERROR, ENDED, JOINS, HAS_GRADS, READS_AHEAD, HAS_EARLY, SENDS_EARLY = (1 << k for k in range(7))
CALLS, SETTLES = 1 << 7, 1 << 8


class RankError(RuntimeError):
    """Ranks do different things, or one of them is gone."""


@dataclass(frozen=True)
class Header:
    """What a rank says before it sends anything: to all ranks, and to each of them."""

    op: Op
    collection: int = 0
    serial: int = 0
    status: int = 0
    depth: int = 0
    same: int = 0
    words: Sequence[int] = ()  # of the operation, to all
    counts: Sequence[Sequence[int]] = ()  # by rank: what it will get


class Headers:
    """The headers of all ranks, by rank."""

    def __init__(self, words: Tensor) -> None:
        self._rows: list[list[int]] = words.tolist()

    def column(self, word: int) -> list[int]:
        return [row[word] for row in self._rows]

    def words(self, rank: int, first: int, count: int) -> list[int]:
        """Return words of the operation that a rank has sent, from its `first` on."""
        return self._rows[rank][FIRST_FREE + first : FIRST_FREE + first + count]

    def op_of(self, rank: int) -> Op:
        return Op(self._rows[rank][OP])

    def doers(self, key: tuple[int, ...]) -> list[bool]:
        """Return which ranks do an operation; the others help."""
        return [tuple(row[: len(key)]) == key for row in self._rows]

    def with_status(self, bit: int) -> list[int]:
        """Return the ranks that have set a bit of their status."""
        return [rank for rank, row in enumerate(self._rows) if row[STATUS] & bit]

    def all_have(self, bit: int) -> bool:
        """Return whether all ranks have set a bit of their status."""
        return len(self.with_status(bit)) == len(self._rows)


class Channel:
    """A pair of process groups for the messages of one thread in each rank: one for numbers of
    the host, and one for rows, which may be on a device.

    torch owns the groups. A reference of ours would let them outlive `destroy_process_group()`,
    and their threads abort the process when it ends.
    """

    def __init__(self, members: list[int], timeout: Any, backend: str) -> None:
        self.turn = RLock()  # of another thread that uses it all the same
        self.wait_seconds = 0.0  # in calls that wait for messages of other ranks
        # Of some ranks alone, the others take no part in opening a group.
        options: dict[str, Any] = {"timeout": timeout}
        options["use_local_synchronization"] = len(members) < dist.get_world_size()
        self._numbers = self._rows = weakref.ref(dist.new_group(members, backend="gloo", **options))
        if backend != "gloo":
            self._rows = weakref.ref(dist.new_group(members, backend=backend, **options))

    def group_for(self, values: Tensor) -> Any:
        """Return the process group in which values cross."""
        group = (self._numbers if values.device.type == "cpu" else self._rows)()
        if group is None:
            raise RankError("the process group was destroyed, and rows of other ranks with it")
        return group


@dataclass(frozen=True)
class Pending:
    """Values that are on their way from other ranks."""

    values: Tensor  # what will be there
    _sent: Tensor  # kept until it has left
    _work: Any  # of torch
    _waiting: Callable[[], AbstractContextManager[None]]

    def wait(self) -> Tensor:
        """Return the values when they are there; on a device its stream waits, where it can."""
        with self._waiting():
            self._work.wait()
        return self.values


class Ranks:
    """The ranks of a process group that share rows."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.members = dist.get_process_group_ranks(group)
        self.rank, self.size, self.device = dist.get_rank(group), len(self.members), device
        timeout = _timeout_of(group)
        is_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend(group))
        backend = "nccl" if is_nccl else "gloo"
        self.training = Channel(self.members, timeout, backend)
        self.early = Channel(self.members, timeout, backend)  # beside training
        self.aside = Channel(self.members, timeout, backend)  # another thread that reads
        self.saving: Channel | None = None  # a thread that saves; see `open_saving`
        self._timeout = timeout
        self._width = _WIDTH
        self._collections: list[weakref.ref[Any]] = []

    # -- collections -------------------------------------------------------------------

    def add(self, collection: Any, words: int) -> int:
        """Number a collection's exchange; headers get room for so many words of its own."""
        self._collections.append(weakref.ref(collection))
        self._width = max(self._width, -(-(FIRST_FREE + words) // _WIDTH) * _WIDTH)
        return len(self._collections) - 1

    def _collection(self, number: int) -> Any:
        collection = self._collections[number]()
        if collection is None:
            raise RankError("another rank uses a collection that is gone on this one")
        return collection

    # -- messages ----------------------------------------------------------------------

    def swap(self, header: Header, channel: Channel) -> Headers:
        """Send a header to every rank, and return what all of them sent."""
        fixed = [header.op, header.collection, header.serial, header.status, header.depth]
        words = torch.zeros(self.size, self._width, dtype=torch.int64)
        words[:, :SAME] = torch.tensor(fixed)
        words[:, SAME] = header.same
        first = FIRST_FREE + len(header.words)
        if header.words:
            words[:, FIRST_FREE:first] = torch.tensor(header.words)
        if header.counts:
            counts = torch.tensor(header.counts)
            words[:, first : first + counts.shape[1]] = counts
        return Headers(self._all_to_all(words, None, None, channel).view_as(words))

    def exchange(
        self, values: Tensor, sent: list[int], received: list[int], channel: Channel
    ) -> Tensor:
        """Send `sent[r]` items of `values` to each rank `r`; return what came, by rank."""
        return self._all_to_all(values, sent, received, channel)

    def begin_exchange(
        self, values: Tensor, sent: list[int], received: list[int], channel: Channel
    ) -> Pending:
        """Begin what `exchange` does, without waiting for it."""
        out, values = values.new_empty(sum(received), *values.shape[1:]), values.contiguous()
        with self._together():
            group = channel.group_for(values)
            work = dist.all_to_all_single(out, values, received, sent, group=group, async_op=True)
        return Pending(out, values, work, partial(self._waiting, channel))

    def _all_to_all(
        self, values: Tensor, sent: list[int] | None, received: list[int] | None, channel: Channel
    ) -> Tensor:
        count = len(values) if received is None else sum(received)
        out = values.new_empty(count, *values.shape[1:])
        with self._waiting(channel):
            group = channel.group_for(values)
            dist.all_to_all_single(out, values.contiguous(), received, sent, group=group)
        return out

    def add_up(self, values: Tensor, channel: Channel) -> None:
        """Replace values by their sums over all ranks, which have the same bits on each."""
        with self._waiting(channel):
            dist.all_reduce(values, group=channel.group_for(values))

    def follow(self, values: Tensor, source: int, channel: Channel) -> None:
        """Replace values by those of one rank."""
        with self._waiting(channel):
            group = channel.group_for(values)
            dist.broadcast(values, self.members[source], group=group)

    @property
    def wait_seconds(self) -> float:
        """The seconds that the thread which trains has spent in calls that wait for messages of
        other ranks: headers, ids, rows, gradients, and averages. What such a call itself sends and
        copies is part of them. Over NCCL a call only launches, so waiting of a GPU is not."""
        return self.training.wait_seconds + self.early.wait_seconds

    @contextmanager
    def _waiting(self, channel: Channel) -> Iterator[None]:
        """Inside, this rank waits for others: note how long."""
        started = perf_counter()
        try:
            with self._together():
                yield
        finally:
            channel.wait_seconds += perf_counter() - started

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, errors of torch are of ranks that do not answer."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} lost the others: another rank has ended, or did "
                f"not answer in time; its own error says why. torch says: {first_sentence(error)}"
            ) from error

    def open_saving(self) -> None:
        """Open a channel for a thread that saves beside training; all ranks call this together."""
        self.saving = Channel(self.members, self._timeout, "gloo")

    def numbers(self, number: int, channel: Channel) -> list[int]:
        """Return the number that each rank gives."""
        every = self._all_to_all(torch.full((self.size,), number), None, None, channel)
        return [int(x) for x in every.tolist()]

    def texts(self, text: str, channel: Channel) -> list[str]:
        """Return what each rank says."""
        mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lengths = torch.full((self.size,), len(mine), dtype=torch.int64)
        theirs = self._all_to_all(lengths, None, None, channel).tolist()
        sent = [len(mine)] * self.size
        every = self._all_to_all(mine.repeat(self.size), sent, theirs, channel)
        return [bytes(x.numpy()).decode().strip() for x in every.split(theirs)]

    # -- agreement ---------------------------------------------------------------------

    def run(self, mine: Header, task: Any, channel: Channel | None = None) -> Any:
        """Do an operation together with all ranks; return what it gives this rank.

        Ranks that do something else meanwhile serve those that read; a rank that serves does
        whatever the others do, until all serve. `task`: what the operation needs of this rank.
        """
        channel = channel or self.training
        with channel.turn:
            return self._run(mine, task, channel)

    def _run(self, mine: Header, task: Any, channel: Channel) -> Any:
        while True:
            headers = self.swap(mine, channel)
            key = self._chosen(headers)
            op = Op(key[0])
            if op is Op.SERVE:  # all of them
                return None
            is_mine = (mine.op, mine.collection, mine.serial)[: len(key)] == key
            if op is Op.BUILD:
                texts = self.texts(task if is_mine else "", channel)
                if is_mine:
                    return texts
                continue
            collection = self._collection(key[1])
            doers = headers.doers(key)
            result = collection.perform(op, headers, doers, task if is_mine else None, channel)
            if is_mine:
                return result

    def _chosen(self, headers: Headers) -> tuple[int, ...]:
        """Return what is done now: operation, collection and, where it counts, serial number."""
        keys = [
            (headers.column(OP)[r], headers.column(COLLECTION)[r], headers.column(SERIAL)[r])
            for r in range(self.size)
        ]
        reads = [key for key in keys if key[0] == Op.READ]
        if reads:  # of several collections, or kinds: one after the other
            return min(reads)
        others = {key for key in keys if key[0] != Op.SERVE}
        if not others:
            return (Op.SERVE,)
        if len(others) > 1:
            self._refuse(keys)
        return others.pop()

    def _refuse(self, keys: Sequence[tuple[int, int, int]]) -> NoReturn:
        first = keys[0]
        other = next(rank for rank, key in enumerate(keys) if key != first)

        def what(rank: int) -> str:
            op, collection, serial = keys[rank]
            return f"rank {rank} {_WHAT[Op(op)]} (number {serial} of collection {collection})"

        raise RankError(
            f"ranks do different things: {what(0)}, {what(other)}. All {many(self.size, 'rank')} "
            "have to call the same collections, backward() and methods in the same order"
        )

    def settle_grads(self) -> None:
        """Take part where other ranks have gradients of the last batch, and this one has none."""
        for reference in self._collections:
            collection = reference()
            if collection is not None:
                collection.settle_grads()

    def compared(self, text: str) -> list[str]:
        """Return what each rank says; ranks that do something else raise."""
        self.settle_grads()
        texts: list[str] = self.run(Header(Op.BUILD), text)
        return texts

    def serve(self) -> None:
        """Serve other ranks until none has a batch left."""
        self.run(Header(Op.SERVE), None)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of torch's text; the others say what may be typical."""
    line = (str(error).splitlines() or [""])[0]
    return re.split(r"[.!?]\s", line, maxsplit=1)[0].rstrip(".")


def _timeout_of(group: dist.ProcessGroup) -> Any:
    """Return the timeout that the user chose for a process group; None: torch's default."""
    try:
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


# By process group, so that collections share what they open. Weakly: a group may be destroyed.
_known: weakref.WeakKeyDictionary[Any, dict[str, Ranks]] = weakref.WeakKeyDictionary()


def count_ranks(group: Any = None) -> int:
    """Return how many ranks a process group has; opens none, so one rank may ask alone."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def ranks_of(group: Any, device: torch.device) -> Ranks | None:
    """Return the ranks that share rows; None: this process has them alone.

    Every rank has to call it in the same order, as it opens process groups.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError("process_group= needs torch.distributed.init_process_group() before")
        return None
    group = group or dist.group.WORLD
    if dist.get_world_size(group) < FEWEST:
        return None
    if dist.get_rank(group) < 0:
        raise ValueError("this process is no member of process_group")
    known = _known.setdefault(group, {})
    if device.type not in known:
        try:
            known[device.type] = Ranks(group, device)
        except RuntimeError as error:
            raise RankError(
                "process groups with the other ranks could not be opened: one of them has ended, "
                f"or builds no collection. torch says: {first_sentence(error)}"
            ) from error
    return known[device.type]
