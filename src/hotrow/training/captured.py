"""A training step as CUDA graphs: the host launches it at once, instead of kernel by kernel.

A graph reads its inputs at fixed places: a few berths, each with room for a batch and its plans,
which are used in turn; each has a graph of its own. Jagged batches leave a part of their berth
empty, which the graph alone sees. What a graph cannot do (another shape, a batch that goes the
direct way) runs eagerly, with the same kernels and the same bits.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.pipeline import PlannedBatch
from hotrow.engine.split_batch import Split
from hotrow.inputs.batch import Room, parts_of
from hotrow.inputs.tree import map_tensors, only_tensors, only_tensors_in, tensors_in
from hotrow.support.messages import warn
from hotrow.support.streams import PRIORITIES, Lanes, Mark, Name, capture, is_spoiled
from hotrow.support.threads import writing
from hotrow.training.capture_guard import Watch

_EAGER_FIRST = 3  # steps of a shape before it is captured: kernels are compiled, memory is there
_MOST_SHAPES = 4
_FORGOTTEN = 64  # batches after which a shape that did not come again gives way to another
_MOST_SPOILED = 20  # captures that other threads may spoil before steps run kernel by kernel
_BERTHS = 6  # three batches between plan and training, the one in training, and some room

Arrivals = Sequence[tuple[EmbeddingBagCollection, PlannedBatch]]
# A step in two phases: each gives the loss so far when it is asked for.
Phases = Callable[[Any, Split], Generator[Tensor]]


def run_phases(phases: Generator[Tensor], split: Split) -> Tensor:
    """Both phases of a step, the second when its rows have arrived; its loss."""
    try:
        next(phases)
        split.wait()
        return next(phases)
    finally:
        phases.close()


class CapturedStep:
    """Runs `step(batch) -> loss`, captured where that is possible."""

    def __init__(
        self,
        step: Callable[[Any], Tensor],
        phases: Phases,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lanes: Lanes,
        *,
        batch_size: int | None = None,
        max_lookups: int | None = None,
    ) -> None:
        """`phases` are those of a step in two parts. Of other sizes than `batch_size`, or with
        more lookups, no batch is captured."""
        # Weakly: it belongs to whoever owns this, and both hold memory that must go in time.
        self._step, self._phases = weakref.WeakMethod(step), weakref.WeakMethod(phases)
        self._model, self._optimizer, self._lanes = model, optimizer, lanes
        self._batch_size, self._max_lookups = batch_size, max_lookups
        self._shapes: dict[Any, _Shape] = {}
        self._rooms: dict[int, Room] = {}  # by the place of a tensor in the batch
        self._berths: dict[int, _Berth] = {}  # by the identity of the batch that was handed out
        self._past: deque[Any] = deque(maxlen=8 * _BERTHS)  # batches that were overwritten
        self._landed = 0
        self._settings: dict[tuple[bool, ...], Any] = {}  # by the engines of a step
        self._watch: Watch | None = None
        self._loss = torch.zeros((), device=lanes.device)
        self.late: Late | None = None
        self._trained: list[_Berth] = []  # in the turn before, so not marked yet
        self._lane: Name = "plan"
        self._pool: Any = None
        self._stale = 0
        self._refused = False
        self._spoiled = 0  # captures
        for module in self._collections():
            for group in module.every_group:
                group.berths = _BERTHS
        if max_lookups is not None:
            self._make_room(max_lookups)

    def _collections(self) -> list[EmbeddingBagCollection]:
        modules = self._model.modules()
        return [each for each in modules if isinstance(each, EmbeddingBagCollection)]

    def _make_room(self, max_lookups: int) -> None:
        """Where one width has all lookups; several widths share them as batches will show."""
        for module in self._collections():
            if len(module.groups) == 1:
                group: Any = module.groups[0]
                if group.can_be_captured:
                    group.planning.room.fix(max_lookups)

    # -- batches that arrive -----------------------------------------------------------

    def begin(self, lane: Name) -> None:
        """A pass over a loader begins: of the one before, nothing is in flight.

        Batches land in a lane that training waits for.
        """
        self._lane = lane
        for berth in self._berths.values():
            berth.waits = False

    def land(self, batch: Any, arrivals: Arrivals) -> Any:
        """Copy a batch to where graphs read it; None if its shape is new, or changes too often."""
        self._landed += 1
        self._note_trained()
        form = None if self._refused else self._form_of(batch, arrivals)
        shape = None if form is None else self._shape_of(form)
        if form is None or shape is None:
            return None
        shape.seen, shape.newest = shape.seen + 1, self._landed
        if shape.seen <= _EAGER_FIRST:
            return None
        berth = shape.next_berth(batch, form, self._landed, self._lanes)
        if berth is None:
            return None
        self._empty(berth)
        self._lanes.after(self._lane, berth.trained)
        self._lanes.keep_for(self._lane, form.tensors)
        berth.take(form, self._landed)
        for work in _works(arrivals):
            work.berth = berth.number
            if work.batch.offsets is not None:
                work.group.planning.columns(work.batch.keys)
        self._berths[id(berth.handed)] = berth
        return berth.handed

    def arrived(self, batch: Any, arrivals: Arrivals) -> None:
        """A batch is handed out; its rows have been planned for."""
        self._note_trained()
        berth = self._berths.get(id(batch))
        if berth is not None:
            berth.arrivals = arrivals

    def _note_trained(self) -> None:
        """A turn has begun, with a mark in training's lane: the loop, too, has read its batch."""
        if self._trained:
            mark = self._lanes.newest("train")
            for berth in self._trained:
                if mark is not None:
                    berth.trained = mark
                if berth.late is not None:
                    berth.late.there = berth.trained
            self._trained.clear()

    def _empty(self, berth: _Berth) -> None:
        if berth.handed is not None:
            del self._berths[id(berth.handed)]
            self._past.append(berth.handed)
            for embedding, arrival in berth.arrivals:
                embedding.pipeline.done_with(arrival)  # its plan's buffers are the berth's again
            berth.handed, berth.shown, berth.arrivals = None, [], ()

    def _form_of(self, batch: Any, arrivals: Arrivals) -> _Form | None:
        """How a batch is to lie in a berth; None if it cannot."""
        if not all(_can_land(embedding, arrival) for embedding, arrival in arrivals):
            return None
        tensors = only_tensors_in(batch)
        if not tensors:
            return None  # what is no tensor may change, and a graph would not see it
        sizes = {arrival.batch.num_samples for _, arrival in arrivals}
        if 0 in sizes or (self._batch_size is not None and sizes != {self._batch_size}):
            return None
        room: dict[int, int] = {}  # of tensors with a place for each lookup
        jagged = [arrival for _, arrival in arrivals if arrival.batch.offsets is not None]
        if not jagged:
            return _Form(tensors, room, (), _engines(arrivals))
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        lookups = {id(x): x.numel() for x in (parts_of(each.features)[0] for each in jagged)}
        if self._max_lookups is not None and sum(lookups.values()) > self._max_lookups:
            return None
        for arrival in jagged:
            values, offsets, weights = parts_of(arrival.features)
            mine = [each for each in (values, offsets, weights) if each is not None]
            if any(id(each) not in places for each in mine):
                return None  # ids= makes new tensors, at new places
            if not values.numel() or not only_tensors(arrival.features):
                return None
            works = [w for x in jagged if parts_of(x.features)[0] is values for w in x.works]
            size = self._room_for(values, works, places[id(values)])
            room |= {places[id(each)]: size for each in (values, weights) if each is not None}
        facts = tuple(_facts(work) for each in jagged for work in each.works)
        return _Form(tensors, room, facts, _engines(arrivals))

    def _room_for(self, values: Tensor, works: Sequence[Any], place: int) -> int:
        if not all(work.group.planning.is_pooled for work in works):
            return values.numel()
        if sum(work.num_lookups for work in works) == values.numel():
            return sum(work.size for work in works)
        return self._rooms.setdefault(place, Room())(values.numel())

    def _shape_of(self, form: _Form) -> _Shape | None:
        shape = self._shapes.get(form.key)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                oldest = min(self._shapes, key=lambda key: self._shapes[key].newest)
                if not self._forget(oldest):
                    return None
            shape = self._shapes[form.key] = _Shape()
        if form.room:  # one that changes its size grows out of it, and does not come again
            for key in [each for each in self._shapes if each[1] and each != form.key]:
                self._forget(key)
        return shape

    def _forget(self, key: Any) -> bool:
        """Give up a shape's berths, if it did not come for long; False if it did."""
        shape = self._shapes[key]
        is_new = self._landed - shape.newest < _FORGOTTEN
        if is_new or any(berth.waits for berth in shape.berths):
            return False
        del self._shapes[key]
        for berth in shape.berths:
            self._lanes.after(self._lane, berth.trained)  # before its memory is used again
            self._empty(berth)
            for module in self._collections():
                for group in module.every_group:
                    group.free_berth(berth.number)
        if not any(berth.graphs for each in self._shapes.values() for berth in each.berths):
            self._pool = None  # it went with the last of them
        return True

    # -- steps -------------------------------------------------------------------------

    def run(self, batch: Any, split: Split | None = None) -> Tensor:
        """One step, captured where that is possible. The loss lasts until the next one.

        `late` is that of a captured step for the host, which waits for it when it asks.
        """
        self.late = None
        berth = self._berths.get(id(batch))
        if berth is None:
            if any(batch is each for each in self._past):
                raise RuntimeError(
                    "this batch has been overwritten: batches after it were trained, and its place "
                    "was taken by a later one. Train a batch before those after it, or copy it"
                )
            return self._run_eagerly(batch, split)
        graph = None
        is_new = split is not None and not self._shapes[berth.key].can_split(split.first, berth)
        if is_new or self._refused or not berth.can_be_replayed(batch):
            loss = self._run_eagerly(batch, split)
        elif berth.taken and not self._shapes[berth.key].is_tried:
            loss = self._try(berth)
        elif (graph := self._graph_for(berth, split)) is None:
            # Autograd's threads may still hold what a failed capture made on its own stream. Torch
            # then waits where it must, and warns of nothing that anybody could mend.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
                loss = self._run_eagerly(batch, split)
        else:
            self._replay(graph, berth, split)
            loss = self._loss
        self._leave(berth)
        if graph is not None:
            self.late = berth.late = Late(berth.loss, self._lanes)
        return loss

    def _replay(self, graph: _Graph, berth: _Berth, split: Split | None) -> None:
        if berth.late is not None:
            berth.late()  # its place is taken now
        cuts = list(zip(berth.cut, graph.cuts, strict=True))
        # Whole, or rows might miss an update that the dense part has had.
        with writing([embedding.lock for embedding, _ in berth.arrivals]):
            for work, cut in cuts:
                work.group.load_vectors(work, cut)
            for embedding, tables in graph.updated:
                embedding.optimizer.count_step(tables)
                if embedding.optimizer.rule.uses_step:
                    for group in embedding.groups:
                        if group.can_be_captured:
                            group.arithmetic.scalars.push()
            if split is not None:
                graph.replay_first()
                split.wait()
            graph.replay()
            for work, cut in cuts:
                work.group.apply_gradients(work, cut)

    def _leave(self, trained: _Berth) -> None:
        """Its place is free again, as are those of batches before it that nobody trained."""
        for berth in self._berths.values():
            if berth is trained or (berth.waits and berth.landed <= trained.landed):
                berth.waits = False
                self._trained.append(berth)
        for embedding, arrival in trained.arrivals:
            embedding.pipeline.done_with(arrival)

    def _run_eagerly(self, batch: Any, split: Split | None = None) -> Tensor:
        if split is not None:
            return run_phases(self._phases_of(batch, split), split)
        step = self._step()
        assert step is not None
        return step(batch)

    def _phases_of(self, batch: Any, split: Split) -> Generator[Tensor]:
        phases = self._phases()
        assert phases is not None
        return phases(batch, split)

    def _try(self, berth: _Berth) -> Tensor:
        """Run eagerly what will be captured: kernels are compiled, and a model that cannot do
        with padding shows."""
        updates = [embedding.optimizer.steps for embedding, _ in berth.arrivals]
        try:
            with berth.as_it_lies():
                loss = self._run_eagerly(berth.batch)
        except Exception as error:
            if updates != [embedding.optimizer.steps for embedding, _ in berth.arrivals]:
                raise  # the rows have been updated, and must not be twice
            loss = self._run_eagerly(berth.handed)  # raises again what is no matter of padding
            self._refuse(f"padding behind the lookups leads to {_short(error)}")
            return loss
        self._shapes[berth.key].is_tried = True
        return loss

    def _graph_for(self, berth: _Berth, split: Split | None = None) -> _Graph | None:
        self._drop_if_stale(berth.arrivals)
        if self._refused:
            return None
        first = 0 if split is None else split.first
        key = (first, *(id(work.plan.buffers) for work in berth.captured))
        if key not in berth.graphs:
            try:
                graph = self._capture(berth, split)
            except RuntimeError as error:
                if is_spoiled(error) and self._spoiled < _MOST_SPOILED:
                    self._spoiled += 1  # it is tried again with the next batch
                    self._pool = None  # it may still be recording
                    return None
                self._refuse(
                    f"{_short(error)}. A step that reads values back (.item(), prints, branches "
                    "on a tensor) cannot"
                )
                return None
            alike = [each for each in berth.graphs if each[0] == first]
            if len(alike) > 1:  # buffers that were replaced do not come again
                del berth.graphs[alike[0]]
            berth.graphs[key] = graph
        return berth.graphs[key]

    def _refuse(self, reason: str) -> None:
        self._refused = True
        warn(
            "this training step cannot be captured as a CUDA graph, so it runs kernel by kernel, "
            f"with the same result but slower: {reason}; Trainer(graphs=False), or a loop without "
            "hotrow.graphed, says so beforehand"
        )

    def _capture(self, berth: _Berth, split: Split | None = None) -> _Graph:
        phases = None if split is None else self._phases_of(berth.batch, split)

        def launch() -> None:
            loss = self._run_eagerly(berth.batch) if phases is None else next(phases)
            self._loss.copy_(loss)
            berth.loss.copy_(self._loss, non_blocking=True)

        first = None
        embeddings = [embedding for embedding, _ in berth.arrivals]
        for embedding in embeddings:
            embedding.optimizer.in_graph = None
        cuts = [work.group.make_boundary(work) for work in berth.cut]
        counters = _host_state(self._optimizer)
        before = [each.clone() for each in counters]
        with writing([embedding.lock for embedding in embeddings]), berth.as_it_lies():
            try:
                if phases is not None:
                    # What the second phase needs of it stays alive, and so keeps its place.
                    first = capture(partial(next, phases), self._pool, PRIORITIES["train"])
                    self._pool = first.pool()
                graph = capture(launch, self._pool, PRIORITIES["train"])
            finally:
                if phases is not None:
                    phases.close()
                # Nothing has run yet: only the host has counted.
                counted = [
                    (each, was)
                    for each, was in zip(counters, before, strict=True)
                    if not torch.equal(each, was)
                ]
                for each, was in counted:
                    each.copy_(was)
        self._pool = graph.pool()
        buffers = [work.plan.buffers for work in berth.captured]
        # Not those that are frozen, or have no part in the loss.
        updated = [
            (embedding, embedding.optimizer.in_graph)
            for embedding in embeddings
            if embedding.optimizer.in_graph is not None
        ]
        return _Graph(graph, [each for each, _ in counted], buffers, updated, cuts, first)

    def _forget_graphs(self) -> None:
        for berth in self._berths.values():
            berth.graphs.clear()
        self._pool = None  # it went with the last of them

    def drop(self) -> None:
        """The step is another one now."""
        self._watch = None

    def _drop_if_stale(self, arrivals: Arrivals) -> None:
        """A graph knows the settings as they were, but for those that are tensors."""
        every: list[Any] = [group for each, _ in arrivals for group in each.groups]
        groups = [group for group in every if group.can_be_captured]
        for group in groups:
            group.arithmetic.scalars.push()
        settings = (
            [group.arithmetic.scalars.are_alike for group in groups],
            [_address(group.store.frozen.bits) for group in groups],
            [_address(x and x.there) for x in (group.store.changed for group in groups)],
            [each.grad_scale for each, _ in arrivals],
            [each.requires_grad for each, _ in arrivals],
        )
        engines, is_first = _engines(arrivals), not self._settings
        known = self._settings.setdefault(engines, settings)  # nothing is captured before that
        if self._watch is not None and not self._watch.changed() and settings == known:
            return
        self._watch = Watch(self._model, self._optimizer)
        reason = _why_not(self._optimizer)
        if reason is not None:
            self._refuse(reason)
        if not is_first:
            self._forget_graphs()
            self._stale += 1
            if self._stale == 3:
                warn(
                    "the dense optimizer's settings change from step to step, and each change "
                    "captures the step anew, which is slow. Give it its learning rate as a tensor "
                    "on the device (torch.optim.SGD(..., lr=torch.tensor(0.1, device='cuda'), "
                    "fused=True); Adam also wants capturable=True), which graphs follow"
                )
        self._settings = {engines: settings}


class _Form:
    """How a batch lies in a berth; equal `key`s are launched alike."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        room: dict[int, int],  # of tensors with a place for each lookup, by place in the batch
        of_works: tuple[Any, ...],  # what else launches depend on
        engines: tuple[bool, ...] = (),  # who keeps the rows
    ) -> None:
        self.tensors, self.room = tensors, room
        shapes = tuple(
            ((room[place],) if place in room else each.shape, each.dtype)
            for place, each in enumerate(tensors)
        )
        self.key = shapes, of_works, engines


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _engines(arrivals: Arrivals) -> tuple[bool, ...]:
    """Who keeps the rows: batches of one shape are launched otherwise by another engine."""
    return tuple(work.group.can_be_captured for work in _works(arrivals))


def _facts(work: Any) -> Any:
    """What the launches of a jagged batch depend on, beside the shapes of its tensors."""
    spans = None if work.group.planning.is_pooled else work.spans
    return work.batch.keys, work.size, spans


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _can_land(embedding: EmbeddingBagCollection, arrival: PlannedBatch) -> bool:
    """Whether graphs may read a batch; where the host does the lookup, all but that."""
    if all(work.group.can_be_captured for work in arrival.works):
        return True
    return (
        all(work.group.can_be_cut for work in arrival.works)
        and arrival.batch.offsets is None
        and embedding.pipeline.updates_at_once
    )


def _works(arrivals: Arrivals) -> list[Any]:
    return [work for _, each in arrivals for work in each.works]


class Late:
    """A loss on its way to page-locked memory: asking for it waits."""

    def __init__(self, place: Tensor, lanes: Lanes, there: Mark | None = None) -> None:
        """Until it is known when it is `there`, all that training was given is waited for."""
        self._place, self._lanes, self.there = place, lanes, there
        self._stream = lanes.trained_on
        self._value: float | None = None

    def __call__(self) -> float:
        if self._value is None:
            (self.there or self._lanes.launched_on(self._stream)).wait()
            self._value = float(self._place)
        return self._value


class _Berth:
    """A place for one batch in flight, and the graphs that read it."""

    def __init__(self, key: Any, number: int, batch: Any, trained: Mark) -> None:
        self.key, self.number, self.batch, self.trained = key, number, batch, trained
        self.tensors = tensors_in(batch)
        self.taken: dict[int, int] = {}  # of tensors with a place for each lookup: how many
        self.handed: Any = None  # the batch as it was handed out
        self.shown: list[Tensor] = []  # its tensors
        self.arrivals: Arrivals = ()
        self.landed = 0  # when
        self.waits = False  # to be trained
        self.graphs: dict[Any, _Graph] = {}
        self.loss = torch.zeros((), pin_memory=self.tensors[0].is_cuda)
        self.late: Late | None = None

    @property
    def works(self) -> list[Any]:
        return _works(self.arrivals)

    def can_be_replayed(self, batch: Any) -> bool:
        """Whether the batch is still what has landed, its rows are there, and one update follows.

        A loop may change a batch's ids, or put other tensors into it: a graph would not see it.
        """
        shown = tensors_in(batch)
        return (
            len(shown) == len(self.shown)
            and all(map(is_, shown, self.shown))
            and all(each.is_unchanged for _, each in self.arrivals)
            and all(work.group.active for work in self.works)
            and all(work.group.slots_hold(work) for work in self.captured)
            and not any(embedding.is_accumulating for embedding, _ in self.arrivals)
            and (not self.cut or all(each.pipeline.updates_at_once for each, _ in self.arrivals))
        )

    @property
    def captured(self) -> list[Any]:
        """Works whose lookup and update are part of the graph."""
        return [work for work in self.works if work.group.can_be_captured]

    @property
    def cut(self) -> list[Any]:
        """Works whose lookup and update the host does, around the graph."""
        return [work for work in self.works if not work.group.can_be_captured]

    def take(self, form: _Form, landed: int) -> None:
        whole = [place for place in range(len(self.tensors)) if place not in form.room]
        if whole:  # one call for all of them takes the host less time than one for each
            torch._foreach_copy_(
                [self.tensors[place] for place in whole],
                [form.tensors[place] for place in whole],
                non_blocking=True,
            )
        for place in form.room:
            there, here = self.tensors[place], form.tensors[place]
            size, before = here.numel(), self.taken.get(place, 0)
            there[:size].copy_(here, non_blocking=True)
            if size < before:
                there[size:before].zero_()
            self.taken[place] = size
        # Without padding, and a new object each time, so that an old batch is told from the one
        # that replaced it.
        places = count()

        def cut(tensor: Tensor) -> Tensor:
            size = self.taken.get(next(places))
            return tensor.detach() if size is None else tensor[:size]

        self.handed = map_tensors(self.batch, cut)
        self.shown = tensors_in(self.handed)
        self.landed, self.waits = landed, True

    @contextmanager
    def as_it_lies(self) -> Iterator[None]:
        """Inside, collections look up the batch with its padding, and works make what they keep
        of it by launches that are the same for all batches of the shape."""
        whole = {self.tensors[place].data_ptr(): self.tensors[place] for place in self.taken}
        padded = []
        for embedding, arrival in self.arrivals:
            features = map_tensors(arrival.features, lambda x: whole.get(x.data_ptr(), x))
            embedding.pipeline.done_with(arrival)
            padded.append(embedding.pipeline.upload(arrival, features))
            embedding.pipeline.arrive(padded[-1])
        for work in self.works:
            work.is_fixed = work.batch.offsets is not None
        try:
            yield
        finally:
            for work in self.works:
                work.is_fixed = False
            for (embedding, arrival), other in zip(self.arrivals, padded, strict=True):
                embedding.pipeline.done_with(other)
                for work in arrival.works:
                    work.arrive(arrival.batch)
                embedding.pipeline.arrive(arrival)


class _Graph:
    """A captured step. What it counts on the host, such as Adagrad's step, is counted here."""

    def __init__(
        self,
        graph: Any,
        counted: list[Tensor],
        kept: Any,
        updated: list[tuple[Any, tuple[str, ...]]],
        cuts: list[Any],
        first: Any = None,
    ) -> None:
        """`updated`: the collections whose rows it updates, and which tables. `cuts`: where the
        host steps in. `first`: what comes before the rest's rows have arrived, if there is such a
        phase."""
        self._graph, self._counted, self._kept = graph, counted, kept
        self.updated, self.cuts, self._first = updated, cuts, first

    def replay_first(self) -> None:
        self._first.replay()

    def replay(self) -> None:
        if self._counted:
            torch._foreach_add_(self._counted, 1)
        self._graph.replay()


class _Shape:
    """Batches of one shape, and their berths, used in turn."""

    _numbers = count()

    def __init__(self) -> None:
        self.seen = self.newest = 0
        self.is_tried = False  # by an eager step, with padding
        self.splits: set[int] = set()  # first parts of so many samples, tried by an eager step
        self.berths: deque[_Berth] = deque()

    def can_split(self, first: int, berth: _Berth) -> bool:
        """Whether a step in two parts can be captured: jagged ids cannot, what is new is tried."""
        if berth.taken:
            return False
        is_known = first in self.splits
        self.splits.add(first)
        return is_known

    def next_berth(self, batch: Any, form: _Form, landed: int, lanes: Lanes) -> _Berth | None:
        """None if batches that were not trained yet have them all."""
        is_free = bool(self.berths) and not self.berths[0].waits
        # A shape that comes seldom needs one alone.
        is_seldom = is_free and landed - self.berths[0].landed > 2 * _BERTHS
        if len(self.berths) < _BERTHS and not is_seldom:
            places = count()

            def make(tensor: Tensor) -> Tensor:
                size = form.room.get(next(places))
                if size is None:
                    return torch.empty_like(tensor, device=lanes.device)
                return torch.zeros(size, dtype=tensor.dtype, device=lanes.device)

            there = map_tensors(batch, make)
            self.berths.append(_Berth(form.key, next(self._numbers), there, lanes.mark("train")))
        elif not is_free:
            return None
        else:
            self.berths.rotate(-1)
        return self.berths[-1]


def _host_state(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """State that a replay does not change."""
    state = () if optimizer is None else optimizer.state.values()
    every = (each for one in state for each in one.values())
    return [each for each in every if isinstance(each, Tensor) and each.device.type == "cpu"]


def _why_not(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Why an optimizer's step cannot be replayed; None if it can."""
    if optimizer is None or not _host_state(optimizer):
        return None
    inner = getattr(optimizer, "inner", optimizer)
    if isinstance(inner, torch.optim.Adagrad) and not any(
        group["lr_decay"] for group in inner.param_groups
    ):
        return None  # it counts its steps, and only lr_decay would ask how many
    return (
        f"{type(inner).__name__} counts its steps on the host, and what it does depends on them; "
        "capturable=True lets the device count, where it has that option"
    )
