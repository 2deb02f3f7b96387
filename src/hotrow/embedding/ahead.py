"""Batches that are known before they are needed, yielded when their rows have arrived."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torch import nn

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import some_collections_in
from hotrow.embedding.module_ids import served_modules
from hotrow.embedding.reader import ReadBatch, Reader, features_of
from hotrow.engine import schedule
from hotrow.engine.schedule import Ticket
from hotrow.engine.stages import FUSED, SPLIT
from hotrow.engine.strategy import Strategy, as_listed
from hotrow.inputs.batch import BadId
from hotrow.support.clock import Clock
from hotrow.support.interrupts import Standing
from hotrow.support.messages import warn
from hotrow.support.random_states import random_states, restore_random_states
from hotrow.support.threads import bind_to_this_process, may_wait

Ids = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None

__all__ = ["Ahead", "ahead", "features_of"]

_MIXED_DRAWS = (
    "the loader draws from torch's global random generator while batches are read, and so does the "
    "training step, as dropout does. hotrow.ahead reads batches early, so these draws come in "
    "another order than in a plain loop, and results depend on how many batches are read ahead. "
    "Give the loader a generator of its own, such as DataLoader(..., generator=torch.Generator()), "
    "and let its data set draw from that; depth=0 reads no batch ahead"
)
_warned_of_draws: WeakSet[nn.Module] = WeakSet()


def ahead(
    loader: Iterable[Any],
    model: nn.Module,
    ids: Ids = None,
    *,
    depth: int | str | None = None,
    step: Any = None,
) -> Ahead:
    """Iterate over `loader`; rows have arrived, and the batch is on the device, when yielded.

    `ids(batch)` returns what `model` passes to its collection, or a dict of that by the names of
    collections in `model.named_modules()`. Without it the batch itself is taken. What converted
    modules look up is learned from the first batch; for a module whose ids the model computes in
    another way, `ids={"path.of.module": function of a batch}` returns them. `depth` is how
    many batches may be known beyond those whose rows are on their way; by default ("auto", or None)
    as many as pay and fit the budget. With 0 a batch is read when the one before it was trained:
    nothing overlaps, not even uploads to a GPU. `step` is what `hotrow.graphed` returned, if that
    trains the batches.

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
        ids: Ids,
        *,
        depth: int | str | None,
        step: Any = None,
        is_kept: bool = False,
    ) -> None:
        """`step.landing` puts a batch on the device, instead of `to_device`. `is_kept`: this loader
        never changes the memory of a batch that is held."""
        if not isinstance(loader, Iterable):
            raise TypeError(f"loader must be iterable, got {type(loader).__name__}")
        if not (ids is None or callable(ids) or isinstance(ids, Mapping)):
            raise TypeError(
                "ids must be a function of a batch, or functions by the names of modules, got "
                f"{type(ids).__name__}"
            )
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
        self._loader, self._depth, self._is_kept = loader, depth, is_kept
        self._ids = ids if callable(ids) else None
        self._step = step
        if hasattr(step, "fetch_by"):
            step.fetch_by(self.fetch_vectors)
        self._standing = Standing()
        self._owner = os.getpid()
        bind_to_this_process(self)
        self.clock = Clock()
        self._running: Generator[Ticket, None, None] | None = None
        self._model = model
        self._collections = some_collections_in(model)
        self._served = served_modules(model, ids if isinstance(ids, Mapping) else None)
        if callable(ids) and all(name in self._served for name in self._collections):
            raise TypeError(
                "the modules of this model look rows up one by one, so ids= must say which one a "
                'function is for: ids={"path.of.module": function of a batch}; without ids= it is '
                "learned from the first batch"
            )
        self._strategy = _common_strategy(list(self._collections.values()))
        self._reader: Reader | None = None
        self._last: ReadBatch | None = None
        self._resumed: Mapping[str, Any] | None = None  # where the next pass goes on
        self._began: Any = None  # all random states as they were when the pass began

    def __iter__(self) -> Ahead:
        # The pass goes on, also where all batches were yielded: islice() in a loop calls this, too.
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
                collection.pipeline.thread.iterate()
                collection.pipeline.settle_grads()
        assert self._running is not None
        assert self._reader is not None
        draws = self._reader.draws
        draws.end_step()
        try:
            ticket = next(self._running)
            assert isinstance(ticket, ReadBatch)
            if ticket.is_foreign:
                raise StopIteration  # hotrow.join serves the other ranks
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
        self._reader.hand_over(ticket)
        if draws.are_mixed and self._model not in _warned_of_draws:
            _warned_of_draws.add(self._model)
            warn(_MIXED_DRAWS)
        draws.begin_step()
        return ticket.batch

    def __len__(self) -> int:
        """Return the loader's own length."""
        return len(self._loader)  # type: ignore[arg-type]

    def fetch_vectors(self) -> bool:
        """Take part where other ranks look the newest batch up and this one does not. Return
        whether its ids were known ahead: else this rank cannot."""
        planned = () if self._last is None else self._last.by_collection
        for collection, batch in planned:
            collection.pipeline.fetch(batch)
        return bool(planned)

    def position(self) -> int:
        """Return how many batches of the current pass have been yielded."""
        return 0 if self._reader is None else self._reader.yielded

    def state_dict(self) -> Any:
        """Return where the loader is after the last batch yielded; batches read ahead do not count.

        For a loader with a `state_dict()` that is its own. For any other it is the number of
        batches yielded in this pass, and the random states with which the pass began.
        """
        if self._last is None:
            raise RuntimeError("no batch has been yielded yet, so there is no position to save")
        if self._reader is not None and self._reader.saves_loader:
            return self._last.loader_state
        return {"batches": self.position(), "random": self._began}

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass go on after the batch where a `state_dict()` was saved.

        A loader without a state of its own is read again from the beginning of its pass, with the
        random states of that time, so that it shuffles alike. Batches that were already yielded are
        dropped, and the present random states are restored.
        """
        if self._running is not None:
            raise RuntimeError("load_state_dict() while batches are read: call close() before")
        self._reader = self._last = None  # a pass that has ended begins again
        is_ours = isinstance(state, Mapping) and state.keys() == {"batches", "random"}
        if hasattr(self._loader, "load_state_dict") and not is_ours:
            self._loader.load_state_dict(state)
            return
        count = state.get("batches") if isinstance(state, Mapping) else None
        if type(count) is not int or count < 0 or "random" not in state:
            raise ValueError(
                "this is no state of hotrow.ahead over a loader without a state_dict() of its own"
            )
        self._resumed = state

    def close(self) -> None:
        """Finish what was planned and drop batches read ahead. Do nothing in a forked child, which
        has neither rows nor threads.

        Raises if a GPU has found that ids of a batch were changed after they were planned."""
        if self._close():
            self._refuse_changed_ids(waits=True)

    def _refuse_changed_ids(self, *, waits: bool = False) -> None:
        for collection in self._collections.values():
            collection.pipeline.refuse_changed_ids(waits=waits)
            collection.calls.refuse_changed(waits=waits)

    def _close(self, *, waits: bool = True) -> bool:
        """Return whether a pass was ended. If this must not wait, collections end it later."""
        if os.getpid() != self._owner:
            return False
        running, self._running = self._running, None
        if running is None:
            return False
        # A finalizer may call close(), such as that of a generator around the loop.
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
        # Another thread may be training, and reading what this one must not change.
        threads = [collection.pipeline.thread for collection in self._collections.values()]
        if not self._close(waits=not any(thread.is_elsewhere for thread in threads)):
            return
        try:
            self._refuse_changed_ids(waits=True)
        except RuntimeError as error:  # a loop was left, so there is no caller to raise it to
            warn(str(error))

    def _start(self) -> None:
        entered = []
        resumed, self._resumed = self._resumed, None
        # For each pass: a collection may have changed its stages, or its engine.
        self._strategy = _common_strategy(list(self._collections.values()))
        try:
            for collection in self._collections.values():
                collection.pipeline.enter(self)
                entered.append(collection)
                collection.calls.begin_pass()
            # A loader may draw the order of its samples when it begins.
            self._began = None if self._is_kept else random_states()
            with _as_it_began(resumed):
                # The reader must not refer to this object: leaving a loop drops the last reference
                # to it, which must close it at once.
                self._reader = Reader(
                    self._loader,
                    self._collections,
                    self._served,
                    self._ids,
                    self._strategy,
                    self._depth,
                    self._step,
                    self.clock,
                    self._is_kept,
                )
                if resumed is not None:
                    self._began = resumed["random"]
                    self._reader.skip(resumed["batches"])
        except BaseException:
            for collection in entered:
                collection.pipeline.leave(self)
            raise
        self._last = None
        order = as_listed if self._reader.is_serial else self._strategy.order_in_cycle
        self._running = _tickets(self._reader, order, self.clock)
        self._standing.put_up()


def _tickets(reader: Reader, order: schedule.Order, clock: Clock) -> Generator[Ticket, None, None]:
    """Yield batches that nothing is known of, while there is something to learn; then others when
    their rows have arrived."""
    while (read := reader.read_to_learn()) is not None:
        yield read
        reader.learn(read)
    with closing(schedule.run(reader.stages, reader.admit, order, reader.lanes, clock)) as tickets:
        reader.read_ahead()
        for ticket in tickets:
            yield ticket
            reader.read_ahead()


@contextmanager
def _as_it_began(resumed: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, restore the random states with which a resumed pass began."""
    if resumed is None:
        yield
        return
    now = random_states()
    restore_random_states(resumed["random"])
    try:
        yield
    finally:
        restore_random_states(now)


def _common_strategy(collections: Sequence[EmbeddingBagCollection]) -> Strategy:
    """Return the strategy whose stages serve all collections; all-fast ones fit any."""
    moving = [c.strategy for c in collections if not c.strategy.everything]
    if any(strategy.stages is SPLIT for strategy in moving):
        # Rows that move in one stage can do so in the second of two.
        moving = [replace(x, stages=SPLIT) if x.stages is FUSED else x for x in moving]
    for other in moving[1:]:
        if (other.timed_stages, other.look_ahead) != (moving[0].timed_stages, moving[0].look_ahead):
            raise ValueError(
                f"one model cannot mix strategies {moving[0].name!r} and {other.name!r}: their "
                "batches move in different stages; give all collections one of them"
            )
    return moving[0] if moving else collections[0].strategy
