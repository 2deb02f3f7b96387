"""Reads a loader ahead of planning: batches, when they are planned, and when they are uploaded."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hotrow.distributed.exchange import is_told
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.module_ids import ServedModules
from hotrow.embedding.pipeline import PlannedBatch
from hotrow.engine.schedule import Ticket
from hotrow.engine.split_batch import Parted, Split
from hotrow.engine.stages import hold_of, sequential
from hotrow.engine.strategy import Strategy
from hotrow.inputs.batch import BadId
from hotrow.inputs.held_batches import Held, Kept, gives_new_memory
from hotrow.inputs.tree import tensors_in, to_device
from hotrow.support.clock import Clock
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import few, many, warn
from hotrow.support.streams import Lanes, Mark, Name

PlannedBatches = Sequence[tuple[EmbeddingBagCollection, PlannedBatch]]

_MOST_AHEAD = 256  # beyond this the batches themselves take more memory than hits are worth
_WATCHED_BATCHES = 64  # of a pass, for which draws of random numbers are compared
_REFILLED = (
    "The loader fills memory again that it gave for a batch which was still to be trained, after "
    "many batches with memory of their own. Let it give new tensors for each batch, such as "
    "batch.clone(), or read none ahead: depth=0"
)
_NO_BATCH = object()
# Batches of iterators that were read ahead and dropped, because a loop was left early.
_dropped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Landing(Protocol):
    """Copies batches to fixed addresses, where a captured step reads them."""

    def begin(self, lane: Name) -> None:
        """Begin a pass whose batches are copied in a lane."""

    def land(self, batch: Any, planned: PlannedBatches) -> Any:
        """Return the batch at its fixed address; None if it has none."""

    def arrived(self, batch: Any, planned: PlannedBatches) -> None:
        """Note that a batch is yielded."""


class _Draws:
    """Notices a loader and training steps that draw from one generator, in a pass's first batches.

    Reading ahead changes the order of such draws. Comparing states takes microseconds, so only the
    first batches of a pass are watched.
    """

    def __init__(self, device: torch.device, *, watches: bool) -> None:
        self._left = _WATCHED_BATCHES if watches else 0  # batches
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._in_reading = self._in_training = False
        self._begun: list[Tensor] | None = None

    @property
    def are_mixed(self) -> bool:
        return self._in_reading and self._in_training

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

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


class ReadBatch(Ticket):
    """A batch that was read."""

    def __init__(
        self,
        batch: Any,
        planned: PlannedBatches = (),
        names: Sequence[str] = (),
        error: Exception | None = None,
        is_foreign: bool = False,
    ) -> None:
        """`is_foreign`: other ranks train a batch, and this one has none left."""
        self.is_foreign = is_foreign
        works = [work.moving for _, part in planned for work in part.works]
        super().__init__(batch, works, error)
        self.by_collection, self.names = planned, names
        self.loader_state: Any = None
        self.number = 0  # in its pass
        self.held: Held | None = None  # as the loader gave it, until it is yielded
        self.is_landed = False  # at a fixed address, whose memory stays
        self.parted: Parted | None = None  # its first samples need no rows that are to arrive
        self.uploaded: Mark | None = None  # when the batch itself is on the device
        self.is_split = False  # it is trained in two parts
        self.is_shared = False  # several ranks train it, each a part of its own

    def named(self) -> list[tuple[EmbeddingBagCollection, PlannedBatch, str]]:
        pairs = zip(self.by_collection, self.names, strict=True)
        return [(collection, planned, name) for (collection, planned), name in pairs]

    def begin(self, lanes: Lanes) -> None:
        """Wait for the batch alone, not for its rows, if the rows of its first samples are surely
        in place: the step waits for the other rows."""
        parted = self.parted
        # Ranks begin to exchange rows in one order, also where one has no first part.
        is_whole = parted is not None and not (parted.first and parted.holds() and not self.alone)
        if parted is None or (is_whole and not self.is_shared):
            super().begin(lanes)
        else:
            self.is_split = True
            lanes.after("train", self.uploaded)

    def fetch(self, *, waits: bool = True) -> None:
        """Get the vectors of several ranks' rows, or begin to."""
        for collection, planned in self.by_collection:
            collection.pipeline.fetch(planned, waits=waits)

    def wait_for_rows(self, lanes: Lanes) -> None:
        """What training is given from now on comes after the arrival of all rows."""
        self.needless = lanes.mark_here()
        lanes.after("train", self.mark)
        if self.is_shared:
            self.fetch()


def _warn_of_dropped(loader: Iterator[Any]) -> None:
    """Warn if an earlier loop over an iterator has read batches that it did not yield."""
    with suppress(TypeError):
        count = _dropped.pop(loader, 0)
        if count:
            warn(
                "an earlier hotrow.ahead over this iterator was left early and has dropped "
                f"{many(count, 'batch', 'batches')} that it had read ahead; this loop "
                "continues after them. Use one hotrow.ahead for the whole iterator and take "
                "batches from it with next(), or read none ahead with depth=0"
            )


class LoaderEnds:
    """Tells other ranks that this one's loader has ended, or failed, where they have a batch."""

    def __init__(
        self, collections: Iterable[EmbeddingBagCollection], served: ServedModules
    ) -> None:
        self._collections = [c for c in collections if c.ranks is not None]
        self._served = served

    @property
    def is_shared(self) -> bool:
        return bool(self._collections)

    def tell(self, error: Exception | None) -> bool:
        """Tell other ranks of an error, or None: of the end. Return whether no rank has a batch."""
        ended = True
        for collection in self._collections:
            if collection.training and not self._served.is_learning:
                try:
                    ended &= collection.pipeline.end_batches(error)
                except Exception:
                    if error is None:
                        raise
                    break  # the same error, which all ranks know now
        return ended


class Window:
    """How many batches are to be known."""

    def __init__(
        self, collections: Iterable[EmbeddingBagCollection], depth: int | None, last_cycle: int
    ) -> None:
        every = list(collections)
        self._moving = [c.pipeline for c in every if not c.strategy.everything]
        self._plannings = [group.planning for c in every for group in c.groups]
        # Plans may be late on some rank, while all ranks read equally many batches.
        self._late = last_cycle if any(c.ranks is not None for c in every) else 0
        self._depth, self._asked, self._last_useful = depth, 0, 0

    def wanted(self, yielded: int) -> int:
        """Return how many batches are to be known when so many were yielded."""
        limits = [x.most_ahead for x in self._plannings if x.most_ahead is not None]
        useful = self._useful(yielded)
        if limits and self._late:  # what ranks have agreed on has their limits
            return 1 + min([useful, *(x.useful_depth() for x in self._moving)]) - self._late
        return 1 + int(min([useful, *limits]))

    def _useful(self, yielded: int) -> int:
        if self._depth is not None:
            return self._depth
        # It changes slowly once the slots are full, so it is not computed every time.
        if yielded < 64 or yielded >= self._asked + 16:
            self._asked = yielded
            useful = min((x.useful_depth() for x in self._moving), default=0)
            self._last_useful = min(useful, _MOST_AHEAD)
        return self._last_useful


class Reader:
    """Reads a loader ahead of planning. Refers to no `Ahead`, so that one can be freed at once."""

    def __init__(
        self,
        loader: Iterable[Any],
        collections: Mapping[str, EmbeddingBagCollection],
        served: ServedModules,
        ids: Callable[[Any], Any] | None,
        strategy: Strategy,
        depth: int | None,
        step: Any,
        clock: Clock,
        is_kept: bool,
    ) -> None:
        self._loader, self._collections, self._ids = loader, collections, ids
        self._served = served
        self.saves_loader = hasattr(loader, "state_dict")  # else batches are counted
        if isinstance(loader, Iterator):
            _warn_of_dropped(loader)
        self._can_split = hasattr(step, "split")
        self._reading = clock.part("read")
        self._strategy, self._step = strategy, step
        self._landing: Landing | None = None if step is None else step.landing
        self.lanes = next(iter(collections.values())).lanes
        self._depth = strategy.look_ahead if depth is None else depth
        self.stages = strategy.timed_stages
        if depth == 0 or not strategy.reads_ahead_on(self.lanes.device):
            self._depth, self.stages = 0, sequential(strategy.stages)
        # Whether a batch has been trained when the next is read.
        self.is_serial = self._depth == 0 and all(stage.cycle == 0 for stage in self.stages)
        self._least = 1 + hold_of(self.stages).future
        # Training waits for the last stage before it, and so for all in the same lane.
        self.lane = self.stages[-2].lane
        self._iterator: Iterator[Any] = iter(loader) if is_kept or self.is_serial else Kept(loader)
        # A GPU may still read a batch in page-locked memory when the loader is to fill it again.
        self._may_refill = self.is_serial and not gives_new_memory(loader)
        self._sent: list[Mark] = []  # when it has read them
        self.draws = _Draws(self.lanes.device, watches=not self.is_serial)
        self._skipped = 0  # batches of a pass that goes on
        self._known: deque[ReadBatch] = deque()
        self._exhausted = False
        self._count = 0
        self.yielded = 0
        self._ends = LoaderEnds(collections.values(), served)
        self._window = Window(collections.values(), self._depth, self.stages[-1].cycle)
        if self._landing is not None:
            self._landing.begin(self.lane)

    # -- what modules look up ----------------------------------------------------------

    def read_to_learn(self) -> ReadBatch | None:
        """Return a batch that is not planned, to learn what modules look up; None: all is known."""
        if not self._served.begin():
            return None
        self._let_learn(True)
        self._read()
        if not self._known:
            return None
        read = self._known.popleft()
        if read.error is not None:
            raise read.error
        if self.lanes.device.type == "cuda":
            with self.lanes.on(self.lane):
                read.batch = to_device(read.batch, self.lanes.device)
            self.lanes.after("train", self.lanes.mark(self.lane))
        return read

    def learn(self, read: ReadBatch) -> None:
        """Learn from the forward pass of a batch."""
        self._let_learn(False)
        self._served.learn(read.batch)

    def _let_learn(self, learns: bool) -> None:
        """Let other collections of the model look a batch up that they were not told of."""
        for collection in self._collections.values():
            collection.pipeline.is_learning = learns

    def admit(self) -> ReadBatch | None:
        """Return the next batch to plan; read on, so that the plan knows what it must."""
        least = self._least
        if self._ends.is_shared:
            wanted = news = 0  # `read_ahead` has read
        elif self.yielded > self._skipped:
            # Two are read for each one that leaves, until the window is full.
            wanted = max(least, self._window.wanted(self.yielded))
            news = max(2, least - len(self._known))
        else:
            # Training starts with as few batches as can overlap, and does not wait for more.
            wanted = max(least, min(2, self._window.wanted(self.yielded)))
            news = wanted + self._skipped - self._count
        for _ in range(news):
            if len(self._known) < wanted and not self._exhausted:
                self._read()
                # A larger batch than any before makes the window shorter.
                wanted = min(wanted, max(least, self._window.wanted(self.yielded)))
        if len(self._known) < least and not self._exhausted:
            return None
        return self._upload(self._known.popleft()) if self._known else None

    def read_ahead(self) -> None:
        """On several ranks, read before a batch is yielded: equally many batches on each rank,
        whatever became of a rank's own plans."""
        if not self._ends.is_shared:
            return
        wanted = max(self._least, self._window.wanted(self.yielded))
        planned = self.yielded + self.stages[-1].cycle
        few = planned + max(self._least, min(2, wanted))
        # Two are read for each one that leaves, until the window is full.
        end = max(few, min(planned + wanted, self._count + 2))
        while self._count < end and not self._exhausted:
            self._read()

    def _upload(self, read: ReadBatch) -> ReadBatch:
        """Move the batch itself to the device: only its ids went there before."""
        device, landing = self.lanes.device, self._landing
        if (device.type == "cpu" and landing is None) or read.is_foreign:
            return read
        read.error = read.error or self._why_changed(read)
        if read.error is None:
            is_locked = self._may_refill and any(x.is_pinned() for x in tensors_in(read.batch))
            with self.lanes.on(self.lane):
                landed = None if landing is None else landing.land(read.batch, read.by_collection)
                read.is_landed = landed is not None
                read.batch = to_device(read.batch, device) if landed is None else landed
                features = read.batch if self._ids is None else self._ids(read.batch)
                read.by_collection = [
                    (
                        collection,
                        collection.pipeline.upload(
                            planned, self._features(features, name, read.batch)
                        ),
                    )
                    for (collection, planned), name in zip(
                        read.by_collection, read.names, strict=True
                    )
                ]
                if read.parted is not None:
                    read.uploaded = self.lanes.mark(self.lane)
            if is_locked:
                self._sent = [self.lanes.mark("plan"), self.lanes.mark(self.lane)]
        return read

    def check(self, read: ReadBatch) -> None:
        """Raise if a batch that is about to be yielded is no longer what was read."""
        # A batch that is on a GPU now was looked at before it was uploaded.
        if self.lanes.device.type == "cpu" or (read.held is not None and read.held.is_copy):
            error = self._why_changed(read)
            if error is not None:
                raise error
        read.held = None

    def hand_over(self, read: ReadBatch) -> None:
        """Note that a batch is yielded, and let lookups and captured steps find it."""
        self.yielded += 1
        if not read.is_landed:
            self.lanes.hand_over(tensors_in(read.batch))
        for collection, planned in read.by_collection:
            collection.pipeline.arrive(planned, read.number)
        if self._landing is not None:
            self._landing.arrived(read.batch, read.by_collection)
        if read.is_split:
            self._step.split(self._split(read))

    def _why_changed(self, read: ReadBatch) -> Exception | None:
        """Return the error of a batch that its loader has changed; None: it is as it was."""
        held, source = read.held, self._iterator
        if held is None or not isinstance(source, Kept):
            return None
        what = source.check(held)
        # Ids may lie in an object that Kept does not look into.
        if (
            what is None
            and source.may_change
            and not all(x.is_as_read for _, x in read.by_collection)
        ):
            what = "its ids"
        if what is None:
            return None
        return RuntimeError(
            f"batch {read.number:,} of this pass, counted from 0, was changed between reading and "
            f"training: {what}. {_REFILLED}"
        )

    def _split(self, read: ReadBatch) -> Split:
        """Return what a step must know to train a batch in two parts."""
        parted = read.parted
        assert parted is not None

        def planned_part(part: Any, first: int) -> PlannedBatches:
            ids = part if self._ids is None else self._ids(part)
            return [
                (
                    collection,
                    collection.pipeline.part(planned, self._features(ids, name, part), first),
                )
                for collection, planned, name in read.named()
            ]

        return Split(
            read.batch,
            0 if read.is_shared and not parted.holds() else parted.first,
            parted.size,
            parted.cut,
            planned_part,
            [collection for collection, _ in read.by_collection],
            partial(read.wait_for_rows, self.lanes),
            partial(read.fetch, waits=False),
        )

    def _features(self, features: Any, name: str, batch: Any) -> Any:
        """Return what a collection looks up, of what `ids=` has returned for a batch."""
        if name in self._served:
            return self._served.joined(name, batch)
        return features_of(features, name, self._collections)

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
        self._let_learn(False)
        if self._count > self.yielded and isinstance(self._loader, Iterator):
            with suppress(TypeError):  # it has no weak references
                _dropped[self._loader] = self._count - self.yielded
        if isinstance(self._iterator, Kept):
            self._iterator.end()

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
            if self._ends.is_shared and not self._ends_everywhere():
                return
            self._exhausted = True
            if self._count == 0:
                raise ValueError(
                    "the loader yielded no batch; is its data set smaller than a batch, or is it "
                    "an iterator that was already used up?"
                ) from None
            return
        except Exception as error:
            # It is raised when the batches before it have been trained.
            self._ends.tell(error)
            self._end_with(error)
            return
        parted = batch if isinstance(batch, Parted) else None
        try:
            read = self._prepare(batch if parted is None else parted.batch, parted)
        except Exception as error:
            if not is_told(error):
                self._ends.tell(error)
            self._end_with(error)
            return
        if self.saves_loader:
            try:  # a copy: it may give what it goes on counting in
                loader: Any = self._loader
                read.loader_state = copy.deepcopy(loader.state_dict())
            except AttributeError:  # a wrapper of a loader that has none
                self.saves_loader = False
        if held is not None:
            held.note_computed()
        read.held, read.number = held, self._count - 1
        self._known.append(read)

    def _ends_everywhere(self) -> bool:
        """Whether no rank has a batch. Inside of hotrow.join others may: this one takes part."""
        try:
            ended = self._ends.tell(None)
        except Exception as error:
            self._end_with(error)
            return False
        if not ended:
            self._count += 1
            self._known.append(ReadBatch(None, is_foreign=True))
        return ended

    def _end_with(self, error: Exception) -> None:
        self._exhausted = True
        self._known.append(ReadBatch(None, error=error))

    def _prepare(self, batch: Any, parted: Parted | None = None) -> ReadBatch:
        features = batch if self._ids is None else self._ids(batch)
        planned, names = [], []
        try:
            for name, collection in self._collections.items():
                if self._served.is_learning or not collection.training:
                    continue
                try:
                    ids = self._features(features, name, batch)
                    if ids is None:
                        continue
                    planned.append((collection, collection.pipeline.prepare(ids, held=True)))
                except (ValueError, TypeError, IndexError, RuntimeError):
                    if not self._served.is_guess(name) or collection.ranks is not None:
                        raise  # ranks plan a batch together
                    continue  # ids of another batch layout; if they are wrong, the lookup raises
                names.append(name)
        except (TypeError, ValueError) as error:
            if self._ids is not None or self._served or isinstance(error, BadId):
                raise
            raise type(error)(
                f"{error} (the whole batch, a {type(batch).__name__}, was taken as ids; if they "
                "are a part of it, say which: hotrow.ahead(loader, model, ids=lambda b: ...))"
            ) from None
        if self.lanes.device.type == "cuda":
            self._wait_for(batch, planned, None if parted is None else parted.made)
        with uninterrupted():
            for collection, part in planned:
                collection.pipeline.expect(part)
        read = ReadBatch(batch, planned, names)
        read.parted = parted if self._can_split else None
        read.is_shared = self._ends.is_shared
        return read

    def _wait_for(self, batch: Any, planned: PlannedBatches, made: Mark | None) -> None:
        """Let planning and uploads wait for the launches that make tensors of this batch."""
        lanes, device = self.lanes, self.lanes.device.type
        on_device = [tensor for tensor in tensors_in(batch) if tensor.device.type == device]
        if on_device:
            made = made or lanes.made_by(on_device)
            for lane in ("plan", self.lane):
                lanes.after(lane, made)
        memory = {tensor.untyped_storage().data_ptr() for tensor in on_device}
        ids = [x.batch.values for _, x in planned if x.batch.values.device.type == device]
        if any(tensor.untyped_storage().data_ptr() not in memory for tensor in ids):
            # ids= has computed these just now, or int64 of int32, in the stream that trains.
            lanes.after("plan", lanes.mark("train"))


def features_of(features: Any, name: str, collections: Mapping[str, EmbeddingBagCollection]) -> Any:
    if not isinstance(features, Mapping):
        return features
    if name not in features:
        given = f"a dict with {few(map(repr, features))}"
        if not name:
            raise TypeError(
                f"{given} is not ids; the model is one collection: give its ids alone, joined by "
                "hotrow.KeyedJaggedTensor.of(...) where they are separate features"
            )
        if len(collections) == 1:
            raise ValueError(
                f"{given} lacks the collection {name!r}, which is the model's only one; give its "
                f"ids alone, or a dict {{{name!r}: ids}}; hotrow.KeyedJaggedTensor.of(...) joins "
                "ids of separate features"
            )
        raise ValueError(
            f"ids= gave {given}, which lacks the collection {name!r}; the model's collections are "
            f"{few(map(repr, collections))}"
        )
    return features[name]
