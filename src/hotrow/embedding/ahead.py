"""Batches that are known before they are needed, handed out when their rows have arrived."""

from __future__ import annotations

import copy
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.pipeline import PlannedBatch
from hotrow.engine import schedule
from hotrow.engine.schedule import Ticket
from hotrow.engine.split_batch import Parted, Split
from hotrow.engine.stages import FUSED, SPLIT, hold_of, sequential
from hotrow.engine.strategy import Strategy, as_listed
from hotrow.inputs.batch import BadId, KeyedJaggedTensor
from hotrow.inputs.held_batches import Held, Kept, gives_new_memory
from hotrow.support.clock import Clock
from hotrow.support.forks import bind_to_this_process
from hotrow.support.interrupts import Standing, uninterrupted
from hotrow.support.messages import few, many, warn
from hotrow.support.random_states import random_states, restore_random_states
from hotrow.support.streams import Lanes, Mark, Name
from hotrow.support.threads import may_wait

Arrivals = Sequence[tuple[EmbeddingBagCollection, PlannedBatch]]

_NO_ACCIDENT = 3  # batches in the wrong mode
_MOST_AHEAD = 256  # beyond this the batches themselves take more memory than hits are worth
_LOOKED_AT = 64  # batches of a pass for which draws of random numbers are looked at
_NO_BATCH = object()
_MIXED_DRAWS = (
    "the loader draws from torch's global random generator while batches are read, and so does the "
    "training step, as dropout does. hotrow.ahead reads batches early, so these draws come in "
    "another order than in a plain loop, and results depend on how many batches are read ahead. "
    "Give the loader a generator of its own, such as DataLoader(..., generator=torch.Generator()), "
    "and let its data set draw from that; depth=0 reads no batch ahead"
)
_told_of_draws: WeakSet[nn.Module] = WeakSet()
# Batches of iterators that were read ahead and dropped, because a loop was left early.
_dropped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Landing(Protocol):
    """Where batches go that a captured step reads at fixed places."""

    def begin(self, lane: Name) -> None:
        """A pass begins, whose batches land in a lane."""

    def land(self, batch: Any, arrivals: Arrivals) -> Any:
        """The batch at such a place; None if it cannot be there."""

    def arrived(self, batch: Any, arrivals: Arrivals) -> None:
        """The batch is yielded."""


def ahead(
    loader: Iterable[Any],
    model: nn.Module,
    ids: Callable[[Any], Any] | None = None,
    *,
    depth: int | str | None = None,
    step: Any = None,
) -> Ahead:
    """Iterate over `loader`; rows have arrived, and the batch is on the device, when yielded.

    `ids` tells which part of a batch holds the ids: whatever `model` hands to its collection, or
    a dict from the collections' names in `model.named_modules()` to theirs. Without it the batch
    itself is taken. `depth` is how many batches may be known beyond those whose rows are on their
    way; by default ("auto", or None) as many as pay and fit the budget. With 0 no batch is read
    before the one before it was trained; nothing overlaps then, uploads to a GPU included. `step`
    is what `hotrow.graphed` gave, if that trains them.

    A loader may fill the same buffers for each batch: its batches are then copied as they are read.

        for batch in hotrow.ahead(loader, model, ids=lambda b: b.sparse):
            model(batch).backward()
    """
    return Ahead(loader, model, ids, depth=depth, step=step)


class Ahead:
    """An iterator over a loader's batches; `iter()` of a finished one starts over."""

    def __init__(
        self,
        loader: Iterable[Any],
        model: nn.Module,
        ids: Callable[[Any], Any] | None,
        *,
        depth: int | str | None,
        step: Any = None,
        is_kept: bool = False,
    ) -> None:
        """`step.landing` puts a batch on the device, instead of `to_device`. `is_kept`: batches of
        this loader stay as they are however long they are held."""
        if not isinstance(loader, Iterable):
            raise TypeError(f"loader must be iterable, got {type(loader).__name__}")
        if ids is not None and not callable(ids):
            raise TypeError(f"ids must be a function of a batch, got {type(ids).__name__}")
        if isinstance(depth, str) and depth == "auto":
            depth = None
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise ValueError(
                f"depth must be a whole number of batches, at least 0, or 'auto', not {depth!r}"
            )
        if step is not None and not hasattr(step, "landing"):
            raise TypeError(
                f"step must be what hotrow.graphed gave, got {type(step).__name__}; a step of your "
                "own needs no mention"
            )
        self._loader, self._ids, self._depth, self._is_kept = loader, ids, depth, is_kept
        self._step = step
        self._landing: Landing | None = None if step is None else step.landing
        self._standing = Standing()
        self._owner = os.getpid()
        bind_to_this_process(self)
        self.clock = Clock()
        self._running: Generator[Ticket, None, None] | None = None
        self._model, self._unplanned = model, 0  # batches one after the other, in eval() mode
        self._collections = _collections_in(model)
        self._strategy = _common_strategy(list(self._collections.values()))
        self._reader: _Reader | None = None
        self._last: _Read | None = None
        self._resumed: Mapping[str, Any] | None = None  # where the next pass goes on
        self._began: Any = None  # all random states as they were when the pass began

    def __iter__(self) -> Ahead:
        if self._running is None:
            self._start()
        return self

    def __next__(self) -> Any:
        if self._running is None:
            if self._reader is not None:
                raise StopIteration
            self._start()
        else:
            for collection in self._collections.values():
                collection.pipeline.take_next()
        assert self._running is not None
        assert self._reader is not None
        draws = self._reader.draws
        draws.end_step()
        try:
            ticket = next(self._running)
            assert isinstance(ticket, _Read)
            self._reader.check(ticket)
            self._refuse_changed_ids()
        except StopIteration:
            self.close()
            raise
        except BadId as error:
            self._close()
            where = f"batch {self.position():,} of this pass, counted from 0"
            raise BadId(f"{error} ({where})") from None
        except BaseException:
            self._close()
            raise
        self._last = ticket
        self._note_mode()
        self._reader.yielded += 1
        if not ticket.is_landed:
            self._reader.lanes.hand_over(tensors_in(ticket.batch))
        for collection, arrival in ticket.arrivals:
            collection.pipeline.arrive(arrival, ticket.number)
        if self._landing is not None:
            self._landing.arrived(ticket.batch, ticket.arrivals)
        if ticket.is_split:
            self._step.split(self._reader.split(ticket))
        if draws.are_mixed and self._model not in _told_of_draws:
            _told_of_draws.add(self._model)
            warn(_MIXED_DRAWS)
        draws.begin_step()
        return ticket.batch

    def _note_mode(self) -> None:
        """Say so if a training loop seems to have left `eval()` on."""
        collections = self._collections.values()
        # The model's mode alone does not tell: `eval()` in another thread changes it for all.
        trains = any(collection.training for collection in collections) or (
            self._model.training
            and not any(collection.pipeline.evaluates_alone for collection in collections)
        )
        if trains or not torch.is_grad_enabled():
            self._unplanned = 0
            return
        self._unplanned += 1
        if self._unplanned == _NO_ACCIDENT:
            warn(
                f"{_NO_ACCIDENT} batches of hotrow.ahead came while the model was in eval() mode, "
                "in which no row is updated, with gradients on. To train, call model.train(); to "
                "evaluate, torch.no_grad() leaves this warning out"
            )

    def __len__(self) -> int:
        """As many batches as the loader says it has."""
        return len(self._loader)  # type: ignore[arg-type]

    def position(self) -> int:
        """How many batches of the current pass have been yielded."""
        return 0 if self._reader is None else self._reader.yielded

    def state_dict(self) -> Any:
        """Return where the loader is after the last batch yielded; batches read ahead do not count.

        For a loader with a `state_dict()` that is its own. For any other it is the number of
        batches yielded in this pass, and the random states with which the pass began.
        """
        if self._last is None:
            raise RuntimeError("no batch has been yielded yet, so there is no position to save")
        if hasattr(self._loader, "state_dict"):
            return self._last.loader_state
        return {"batches": self.position(), "random": self._began}

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass go on after the batch where a `state_dict()` was saved.

        A loader without a state of its own is read again from the beginning of its pass, with the
        random states of then, so that it shuffles as it did; batches that were yielded are dropped,
        and random states are put back as they are now.
        """
        if self._running is not None:
            raise RuntimeError("load_state_dict() while batches are read: call close() before")
        self._reader = self._last = None  # a pass that has ended begins again
        if hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state)
            return
        count = state.get("batches") if isinstance(state, Mapping) else None
        if type(count) is not int or count < 0 or "random" not in state:
            raise ValueError(
                "this is no state of hotrow.ahead over a loader without a state_dict() of its own"
            )
        self._resumed = state

    def close(self) -> None:
        """Finish what was planned; batches read ahead are dropped. In a forked child, which has
        neither rows nor threads, nothing is done.

        Raises if a GPU has found that ids of a batch were changed after they were planned."""
        if self._close():
            self._refuse_changed_ids(waits=True)

    def _refuse_changed_ids(self, *, waits: bool = False) -> None:
        for collection in self._collections.values():
            collection.pipeline.refuse_changed_ids(waits=waits)

    def _close(self, *, waits: bool = True) -> bool:
        """Return whether a pass was ended. Collections end it later where this must not wait."""
        if os.getpid() != self._owner:
            return False
        running, self._running = self._running, None
        if running is None:
            return False
        # Also close() may be called by a finalizer, as that of a generator which wraps the loop.
        waits = waits and may_wait()
        with ExitStack() as last:  # every callback runs, even if one raises
            last.callback(self._standing.take_down if waits else self._standing.let_go)
            for collection in self._collections.values():
                last.callback(collection.pipeline.leave, self, waits=waits)
            if self._reader is not None:
                last.callback(self._reader.end)
            running.close()
        return waits

    def __del__(self) -> None:
        if getattr(self, "_running", None) is None or sys.is_finalizing():
            return
        # The thread that trains may be reading what other threads must not change then.
        is_foreign = any(each.pipeline.is_trained_elsewhere for each in self._collections.values())
        if not self._close(waits=not is_foreign):
            return
        try:
            self._refuse_changed_ids(waits=True)
        except RuntimeError as error:  # a loop was left, so there is no caller to raise it to
            warn(str(error))

    def _start(self) -> None:
        entered = []
        resumed, self._resumed = self._resumed, None
        # Anew for each pass: a collection may have changed its stages, or its engine.
        self._strategy = _common_strategy(list(self._collections.values()))
        try:
            for collection in self._collections.values():
                collection.pipeline.enter(self)
                entered.append(collection)
            # A loader may draw the order of its samples when it begins.
            self._began = None if self._is_kept else random_states()
            with _as_it_began(resumed):
                # The reader must not know this object: leaving a loop drops the last reference to
                # it, and that has to close it at once.
                self._reader = _Reader(
                    self._loader,
                    self._collections,
                    self._ids,
                    self._strategy,
                    self._depth,
                    self._landing,
                    self._step,
                    self.clock,
                    self._is_kept,
                )
                if resumed is not None:
                    self._began = resumed["random"]
                    self._reader.skip(resumed["batches"])
            if self._landing is not None:
                self._landing.begin(self._reader.lane)
        except BaseException:
            for collection in entered:
                collection.pipeline.leave(self)
            raise
        self._last = None
        self._running = schedule.run(
            self._reader.stages,
            self._reader.admit,
            as_listed if self._reader.is_serial else self._strategy.order_in_cycle,
            self._reader.lanes,
            self.clock,
        )
        self._standing.put_up()


@contextmanager
def _as_it_began(resumed: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, random states are those with which a pass began that goes on; outside as before."""
    if resumed is None:
        yield
        return
    now = random_states()
    restore_random_states(resumed["random"])
    try:
        yield
    finally:
        restore_random_states(now)


class _Draws:
    """Notices a loader and training steps that draw from one generator, in a pass's first batches.

    Reading ahead changes the order of such draws. To look costs microseconds, so it ends soon.
    """

    def __init__(self, device: torch.device, *, looks: bool) -> None:
        self._left = _LOOKED_AT if looks else 0  # batches
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._in_reading = self._in_training = False
        self._begun: list[Tensor] | None = None

    @property
    def are_mixed(self) -> bool:
        return self._in_reading and self._in_training

    def _states(self) -> list[Tensor]:
        return [each.get_state() for each in self._generators]

    def _have_moved(self, before: list[Tensor]) -> bool:
        return not all(map(torch.equal, before, self._states()))

    def read(self, source: Callable[[], Any]) -> Any:
        """Read a batch that a plain loop would read after a training step."""
        if not self._left:
            return source()
        before = self._states()
        batch = source()
        self._in_reading = self._in_reading or self._have_moved(before)
        return batch

    def begin_step(self) -> None:
        if self._left:
            self._left -= 1
            self._begun = self._states()

    def end_step(self) -> None:
        if self._begun is not None:
            self._in_training = self._in_training or self._have_moved(self._begun)
            self._begun = None


class _Read(Ticket):
    """A batch that was read."""

    def __init__(
        self,
        batch: Any,
        arrivals: Sequence[tuple[EmbeddingBagCollection, PlannedBatch]] = (),
        names: Sequence[str] = (),
        error: Exception | None = None,
    ) -> None:
        super().__init__(batch, [w for _, each in arrivals for w in each.works], error)
        self.arrivals, self.names = arrivals, names
        self.loader_state: Any = None
        self.number = 0  # in its pass
        self.held: Held | None = None  # as the loader gave it, until it is yielded
        self.is_landed = False  # at a place of its own, which nobody frees
        self.parted: Parted | None = None  # its first samples need no rows that are to arrive
        self.there: Mark | None = None  # when the batch itself is on the device
        self.is_split = False  # it is trained in two parts

    def begin(self, lanes: Lanes) -> None:
        """Where the first samples' rows surely are in place, only the others' are to be waited
        for, by whoever trains them."""
        parted = self.parted
        if parted is None or not parted.first or not parted.holds() or self.alone:
            super().begin(lanes)
        else:
            self.is_split = True
            lanes.after("train", self.there)


def _warn_of_dropped(loader: Iterator[Any]) -> None:
    """Warn if an earlier loop over an iterator has read batches that it did not yield."""
    with suppress(TypeError):
        count = _dropped.pop(loader, 0)
        if count:
            warn(
                "an earlier hotrow.ahead over this iterator was left early and has dropped "
                f"{many(count, 'batch', 'batches')} that it had read ahead; this loop goes on "
                "behind them. Use one hotrow.ahead for the whole iterator and take batches "
                "from it with next(), or read none ahead with depth=0"
            )


class _Reader:
    """Reads the loader ahead of planning."""

    def __init__(
        self,
        loader: Iterable[Any],
        collections: Mapping[str, EmbeddingBagCollection],
        ids: Callable[[Any], Any] | None,
        strategy: Strategy,
        depth: int | None,
        landing: Landing | None,
        step: Any,
        clock: Clock,
        is_kept: bool,
    ) -> None:
        self._loader, self._collections, self._ids = loader, collections, ids
        if isinstance(loader, Iterator):
            _warn_of_dropped(loader)
        self._can_split = hasattr(step, "split")
        self._reading = clock.part("read")
        self._strategy, self._landing = strategy, landing
        self.lanes = next(iter(collections.values())).lanes
        self._depth = strategy.look_ahead if depth is None else depth
        self.stages = strategy.timed_stages
        if depth == 0 or not strategy.reads_ahead_on(self.lanes.device):
            self._depth, self.stages = 0, sequential(strategy.stages)
        # Whether a batch has been trained when the next is read.
        self.is_serial = self._depth == 0 and all(stage.cycle == 0 for stage in self.stages)
        self._least = 1 + hold_of(self.stages).future
        # Training waits for whatever comes last before it, and so for all in the same lane.
        self.lane = self.stages[-2].lane
        self._iterator: Iterator[Any] = iter(loader) if is_kept or self.is_serial else Kept(loader)
        # A GPU may still read a batch in page-locked memory when the loader is to fill it again.
        self._may_refill = self.is_serial and not gives_new_memory(loader)
        self._sent: list[Mark] = []  # until when it does
        self.draws = _Draws(self.lanes.device, looks=not self.is_serial)
        self._skipped = 0  # batches of a pass that goes on
        self._known: deque[_Read] = deque()
        self._exhausted = False
        self._count = 0
        self.yielded = 0
        self._groups = [group for each in collections.values() for group in each.groups]
        self._asked = self._last_useful = 0

    def admit(self) -> _Read | None:
        """The next batch to plan; reads on, so that what the plan must know is known."""
        least = self._least
        if self.yielded > self._skipped:
            # Two are read for each one that leaves, until the window is full.
            wanted = max(least, self._wanted())
            news = max(2, least - len(self._known))
        else:
            # Training starts with as few batches as can overlap, and does not wait for more.
            wanted = max(least, min(2, self._wanted()))
            news = wanted + self._skipped - self._count
        for _ in range(news):
            if len(self._known) < wanted and not self._exhausted:
                self._read()
                # A larger batch than any before makes the window shorter.
                wanted = min(wanted, max(least, self._wanted()))
        if len(self._known) < least and not self._exhausted:
            return None
        return self._upload(self._known.popleft()) if self._known else None

    def _upload(self, read: _Read) -> _Read:
        """Move the batch itself to the device: only its ids went there before."""
        device, landing = self.lanes.device, self._landing
        if (device.type != "cpu" or landing is not None) and read.error is None:
            read.error = self._why_changed(read)
        if (device.type != "cpu" or landing is not None) and read.error is None:
            is_locked = self._may_refill and any(x.is_pinned() for x in tensors_in(read.batch))
            with self.lanes.on(self.lane):
                landed = None if landing is None else landing.land(read.batch, read.arrivals)
                read.is_landed = landed is not None
                read.batch = to_device(read.batch, device) if landed is None else landed
                features = read.batch if self._ids is None else self._ids(read.batch)
                read.arrivals = [
                    (
                        each,
                        each.pipeline.upload(
                            arrival, features_of(features, name, self._collections)
                        ),
                    )
                    for (each, arrival), name in zip(read.arrivals, read.names, strict=True)
                ]
                if read.parted is not None:
                    read.there = self.lanes.mark(self.lane)
            if is_locked:
                self._sent = [self.lanes.mark("plan"), self.lanes.mark(self.lane)]
        return read

    def check(self, read: _Read) -> None:
        """Raise if a batch that is about to be yielded is no longer what was read."""
        # A batch that is on a GPU now was looked at before it was uploaded.
        if self.lanes.device.type == "cpu" or (read.held is not None and read.held.is_copy):
            error = self._why_changed(read)
            if error is not None:
                raise error
        read.held = None

    def _why_changed(self, read: _Read) -> Exception | None:
        """Return the error of a batch that its loader has changed; None: it is as it was."""
        held, source = read.held, self._iterator
        if held is None or not isinstance(source, Kept):
            return None
        what = source.check(held)
        # Ids may lie in an object that Kept does not look into.
        if what is None and source.may_change and not all(x.is_as_read for _, x in read.arrivals):
            what = "its ids"
        if what is None:
            return None
        return RuntimeError(
            f"batch {read.number:,} of this pass, counted from 0, was changed between reading and "
            f"training: {what}. The loader fills memory again that it gave for a batch which was "
            "still to be trained, after many batches with memory of their own. Let it give new "
            "tensors for each batch, such as batch.clone(), or read none ahead: depth=0"
        )

    def split(self, read: _Read) -> Split:
        """What a step has to know to train a batch in two parts."""
        parted = read.parted
        assert parted is not None

        def arrivals(part: Any, first: int) -> list[tuple[EmbeddingBagCollection, PlannedBatch]]:
            features = part if self._ids is None else self._ids(part)
            return [
                (
                    each,
                    each.pipeline.part(
                        arrival, features_of(features, name, self._collections), first
                    ),
                )
                for (each, arrival), name in zip(read.arrivals, read.names, strict=True)
            ]

        def wait() -> None:
            read.needless = self.lanes.mark_here()
            self.lanes.after("train", read.mark)

        collections = [each for each, _ in read.arrivals]
        return Split(read.batch, parted.first, parted.size, parted.cut, arrivals, collections, wait)

    def skip(self, count: int) -> None:
        """Drop the first batches, which were trained before."""
        source = self._iterator.source if isinstance(self._iterator, Kept) else self._iterator
        for number in range(count):
            if next(source, _NO_BATCH) is _NO_BATCH:
                raise ValueError(
                    f"the loader has {number:,} batches, and this pass is to go on after {count:,}"
                )
        self._count = self._skipped = self.yielded = count

    def end(self) -> None:
        """Drop the batches that were read ahead."""
        self._known.clear()
        if self._count > self.yielded and isinstance(self._loader, Iterator):
            with suppress(TypeError):  # it has no weak references
                _dropped[self._loader] = self._count - self.yielded
        if isinstance(self._iterator, Kept):
            self._iterator.end()

    def _wanted(self) -> int:
        """How many batches are to be known."""
        most = [group.most_ahead for group in self._groups]
        return 1 + int(min([self._useful(), *(each for each in most if each is not None)]))

    def _useful(self) -> int:
        if self._depth is not None:
            return self._depth
        # It changes slowly once the slots are full, so it is not asked every time.
        if self.yielded < 64 or self.yielded >= self._asked + 16:
            self._asked = self.yielded
            moving = [c for c in self._collections.values() if not c.strategy.everything]
            useful = min((each.pipeline.useful_depth() for each in moving), default=0)
            self._last_useful = min(useful, _MOST_AHEAD)
        return self._last_useful

    def _read(self) -> None:
        while self._sent:
            self._sent.pop().wait()
        source, held = self._iterator, None
        take = partial(next, source)
        if isinstance(source, Kept):
            take = partial(source.read, self._count - self.yielded)
        try:
            with self._reading:
                # Before the first batch a plain loop has trained nothing, either.
                batch = self.draws.read(take) if self._count > self._skipped else take()
            if isinstance(batch, Held):
                held, batch = batch, batch.batch
            self._count += 1
        except StopIteration:
            self._exhausted = True
            if self._count == 0:
                raise ValueError(
                    "the loader yielded no batch; is its data set smaller than a batch, or is it "
                    "an iterator that was already used up?"
                ) from None
            return
        except Exception as error:
            # It is raised in its turn, when the batches before it have been trained.
            self._end_with(error)
            return
        parted = batch if isinstance(batch, Parted) else None
        try:
            read = self._prepare(batch if parted is None else parted.batch, parted)
        except Exception as error:
            self._end_with(error)
            return
        if hasattr(self._loader, "state_dict"):
            # A copy: it may give what it goes on counting in.
            read.loader_state = copy.deepcopy(self._loader.state_dict())
        if held is not None:
            held.note_computed()
        read.held, read.number = held, self._count - 1
        self._known.append(read)

    def _end_with(self, error: Exception) -> None:
        self._exhausted = True
        self._known.append(_Read(None, error=error))

    def _prepare(self, batch: Any, parted: Parted | None = None) -> _Read:
        features = batch if self._ids is None else self._ids(batch)
        arrivals, names = [], []
        try:
            for name, collection in self._collections.items():
                if collection.training:
                    mine = features_of(features, name, self._collections)
                    arrivals.append((collection, collection.pipeline.prepare(mine, held=True)))
                    names.append(name)
        except (TypeError, ValueError) as error:
            if self._ids is not None or isinstance(error, BadId):
                raise
            raise type(error)(
                f"{error} (the whole batch, a {type(batch).__name__}, was taken as ids; if they "
                "are a part of it, say which: hotrow.ahead(loader, model, ids=lambda b: ...))"
            ) from None
        if self.lanes.device.type == "cuda":
            self._wait_for(batch, arrivals, None if parted is None else parted.made)
        with uninterrupted():
            for collection, arrival in arrivals:
                collection.pipeline.expect(arrival)
        read = _Read(batch, arrivals, names)
        read.parted = parted if self._can_split else None
        return read

    def _wait_for(self, batch: Any, arrivals: Arrivals, made: Mark | None) -> None:
        """Whoever made what is on the device may still be at it."""
        lanes, device = self.lanes, self.lanes.device.type
        there = [each for each in tensors_in(batch) if each.device.type == device]
        if there:
            made = made or lanes.made_by(there)
            for lane in ("plan", self.lane):
                lanes.after(lane, made)
        memory = {each.untyped_storage().data_ptr() for each in there}
        ids = [x.batch.values for _, x in arrivals if x.batch.values.device.type == device]
        if any(each.untyped_storage().data_ptr() not in memory for each in ids):
            # What ids= has computed just now, or int64 of int32, is training's, whoever made those.
            lanes.after("plan", lanes.mark("train"))


def features_of(features: Any, name: str, collections: Mapping[str, EmbeddingBagCollection]) -> Any:
    if not isinstance(features, Mapping):
        return features
    if name not in features:
        given = f"a dict with {few(map(repr, features))}"
        if not name:
            raise TypeError(f"{given} is not ids; the model is one collection: give its ids alone")
        if len(collections) == 1:
            raise ValueError(
                f"{given} lacks the collection {name!r}, which is the model's only one; give its "
                f"ids alone, or a dict {{{name!r}: ids}}"
            )
        raise ValueError(
            f"ids= gave {given}, which lacks the collection {name!r}; the model's collections are "
            f"{few(map(repr, collections))}"
        )
    return features[name]


def _collections_in(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no hotrow collection; give the model that calls it"
        )
    # torch.compile wraps a model under this name, which no user wrote.
    return {name.removeprefix("_orig_mod."): module for name, module in found.items()}


def _common_strategy(collections: Sequence[EmbeddingBagCollection]) -> Strategy:
    """The strategy whose stages serve all collections; all-fast ones go along with any."""
    moving = [each.strategy for each in collections if not each.strategy.everything]
    if any(each.stages is SPLIT for each in moving):
        # Rows that move at once can do so in the second of two stages.
        moving = [replace(x, stages=SPLIT) if x.stages is FUSED else x for x in moving]
    for other in moving[1:]:
        if (other.timed_stages, other.look_ahead) != (moving[0].timed_stages, moving[0].look_ahead):
            raise ValueError(
                f"one model cannot mix strategies {moving[0].name!r} and {other.name!r}: their "
                "batches move in different stages; give all collections one of them"
            )
    return moving[0] if moving else collections[0].strategy


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in tuples, lists, dicts, dataclasses and objects with `to`."""
    return _map(batch, lambda each: each.to(device, non_blocking=True), has_to=True)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with every tensor changed."""
    return _map(batch, change, has_to=False)


def _map(batch: Any, change: Callable[[Any], Any], *, has_to: bool) -> Any:
    if isinstance(batch, Tensor) or (has_to and hasattr(batch, "to")):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(each, change, has_to=has_to) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map(each, change, has_to=has_to) for each in batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change, has_to=has_to) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        given, _ = _fields_of(type(batch))
        changed = {name: _map(getattr(batch, name), change, has_to=has_to) for name in given}
        return replace(batch, **changed)
    if isinstance(batch, KeyedJaggedTensor):
        return batch.map(change)
    return batch


@cache
def _fields_of(kind: Any) -> tuple[list[str], list[str]]:
    """Of a dataclass: those it is given, and those it makes itself."""
    every = fields(kind)
    return [x.name for x in every if x.init], [x.name for x in every if not x.init]


def only_tensors(batch: Any) -> bool:
    """Whether a batch holds nothing but tensors that `map_tensors` finds."""
    return _find(batch, [])


def tensors_in(batch: Any) -> list[Tensor]:
    """Every tensor in a batch."""
    found: list[Tensor] = []
    _find(batch, found)
    return found


def only_tensors_in(batch: Any) -> list[Tensor] | None:
    """Every tensor in a batch; None if it holds anything else."""
    found: list[Tensor] = []
    return found if _find(batch, found) else None


def _find(batch: Any, found: list[Tensor]) -> bool:
    """In the order in which `map_tensors` changes them; False if there is anything else."""
    if isinstance(batch, Tensor):
        found.append(batch)
        return True
    if isinstance(batch, list | tuple | Mapping):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        alone = [_find(each, found) for each in parts]  # also behind one that is not
        return all(alone)
    if is_dataclass(batch) and not isinstance(batch, type):
        given, made = _fields_of(type(batch))
        alone = [_find(getattr(batch, name), found) for name in given]
        return all(alone) and all(_find(getattr(batch, name), []) for name in made)
    if isinstance(batch, KeyedJaggedTensor):
        batch.map(lambda each: found.append(each) or each)  # type: ignore[func-returns-value]
        return True
    return False
