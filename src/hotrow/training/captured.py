"""A training step as CUDA graphs: the host launches it at once, instead of kernel by kernel.

A graph reads its batch from a static input. What a graph cannot do (another shape, a batch that
goes the direct way) runs eagerly, with the same kernels and the same bits.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.embedding.in_models import collections_in
from hotrow.embedding.reader import PlannedBatches
from hotrow.engine.split_batch import Split
from hotrow.inputs.batch import parts_of
from hotrow.inputs.room import Room
from hotrow.inputs.tree import only_tensors, only_tensors_in
from hotrow.support.messages import warn
from hotrow.support.streams import PRIORITIES, Lanes, Name, capture, is_spoiled
from hotrow.support.threads import writing
from hotrow.training.capture_guard import CaptureGuard
from hotrow.training.rank_turn import RankTurn
from hotrow.training.static_inputs import (
    InputForm,
    InputShape,
    PendingLoss,
    StaticInput,
    can_land,
    engines_of,
    growing_ids,
    has_size,
    works_of,
)

_MOST_SHAPES = 4
_MOST_SPOILED = 20  # captures that other threads may spoil before steps run kernel by kernel

# A step in two phases: each yields the loss so far when it is asked for.
Phases = Callable[[Any, Any], Generator[Tensor]]


@dataclass(frozen=True)
class GraphSettings:
    """How steps are captured; tests set other values."""

    capture: Callable[..., Any] = capture
    eager_first: int = 3  # steps of a shape before it is captured: kernels are compiled by then
    inputs: int = 6  # per shape: three batches between plan and training, one in training, spare
    forgotten: int = 64  # batches after which a shape that did not come again gives way to another


def run_phases(phases: Generator[Tensor], split: Split | RankTurn) -> Tensor:
    """Run both phases of a step, the second when its rows have arrived; return its loss."""
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
        settings: GraphSettings,
    ) -> None:
        """`phases` are those of a step in two parts. Batches of other sizes than `batch_size`, or
        with more lookups, are not captured."""
        # Weak references: the step owns this object, and both hold memory that must be freed soon.
        self._step, self._phases = weakref.WeakMethod(step), weakref.WeakMethod(phases)
        self._model, self._optimizer, self._lanes = model, optimizer, lanes
        self._batch_size, self._max_lookups = batch_size, max_lookups
        self._settings = settings
        self._shapes: dict[Any, InputShape] = {}
        self._rooms: dict[int, Room] = {}  # by the place of a tensor in the batch
        self._inputs: dict[int, StaticInput] = {}  # by the identity of the batch that was yielded
        self._past: deque[Any] = deque(maxlen=8 * settings.inputs)  # overwritten batches
        self._landed = 0
        self._known: dict[tuple[type, ...], Any] = {}  # settings of rows, by the engines of a step
        self._guard: CaptureGuard | None = None
        self._loss = torch.zeros((), device=lanes.device)
        self.pending_loss: PendingLoss | None = None
        self._trained: list[StaticInput] = []  # in the turn before, so not marked yet
        self._lane: Name = "plan"
        self._pool: Any = None
        self._stale = 0
        self._refused = False
        self._spoiled = 0  # captures
        for collection in collections_in(self._model).values():
            for group in collection.every_group:
                group.capture.inputs = settings.inputs
        if max_lookups is not None:
            self._make_room(max_lookups)

    @property
    def num_graphs(self) -> int:
        return sum(len(static.graphs) for static in self._inputs.values())

    def _make_room(self, max_lookups: int) -> None:
        """Fix the room of a collection with one width; several widths share the lookups."""
        for module in collections_in(self._model).values():
            if len(module.groups) == 1:
                module.groups[0].capture.fix_lookups(max_lookups)

    # -- batches that arrive -----------------------------------------------------------

    def begin(self, lane: Name) -> None:
        """Begin a pass over a loader: nothing of the pass before is in flight.

        Batches are copied in a lane that training waits for.
        """
        self._lane = lane
        for static in self._inputs.values():
            static.waits = False

    def land(self, batch: Any, planned: PlannedBatches) -> Any:
        """Copy a batch to a static input; None if its shape is new, or changes too often."""
        self._landed += 1
        self._note_trained()
        form = None if self._refused else self._form_of(batch, planned)
        shape = None if form is None else self._shape_of(form)
        if form is None or shape is None:
            return None
        shape.seen, shape.newest = shape.seen + 1, self._landed
        if shape.seen <= self._settings.eager_first:
            return None
        static = shape.next_input(batch, form, self._landed, self._lanes)
        if static is None:
            return None
        self._empty(static)
        self._lanes.after(self._lane, static.trained)
        self._lanes.keep_for(self._lane, form.tensors)
        static.take(form, self._landed)
        for work in works_of(planned):
            work.berth = static.number
            if work.batch.offsets is not None:
                work.group.planning.columns(work.batch.keys)
        self._inputs[id(static.handed)] = static
        return static.handed

    def arrived(self, batch: Any, planned: PlannedBatches) -> None:
        """Note that a batch is yielded; its rows have been planned."""
        self._note_trained()
        static = self._inputs.get(id(batch))
        if static is not None:
            static.planned = planned

    def _note_trained(self) -> None:
        """Mark trained inputs: a turn has begun, so the loop has read its batch as well."""
        if self._trained:
            mark = self._lanes.newest("train")
            for static in self._trained:
                if mark is not None:
                    static.trained = mark
                if static.pending_loss is not None:
                    static.pending_loss.copied = static.trained
            self._trained.clear()

    def _empty(self, static: StaticInput) -> None:
        if static.handed is not None:
            del self._inputs[id(static.handed)]
            self._past.append(static.handed)
            static.empty()

    def _form_of(self, batch: Any, planned: PlannedBatches) -> InputForm | None:
        """Return how a batch lies in a static input; None if it cannot."""
        if not all(can_land(collection, part) for collection, part in planned):
            return None
        tensors = only_tensors_in(batch)
        if not tensors:
            return None  # anything else may change, and a graph would not see it
        size = self._batch_size
        if any(
            has_size(part, 0) or not (size is None or has_size(part, size)) for _, part in planned
        ):
            return None
        room: dict[int, int] = {}  # of tensors with an element per lookup
        jagged = [part for _, part in planned if part.batch.offsets is not None]
        if not jagged:
            return InputForm(tensors, room, (), engines_of(planned))
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        facts = tuple(InputForm.facts_of(work) for part in jagged for work in part.works)
        calls = [part.features for part in jagged if part.batch.calls]
        jagged = [part for part in jagged if not part.batch.calls]
        by_input = {id(x): x.numel() for x in (parts_of(part.features)[0] for part in jagged)}
        lookups = sum(by_input.values()) + sum(joined.num_ids for joined in calls)
        if self._max_lookups is not None and lookups > self._max_lookups:
            return None
        if any(not call.ids.numel() for joined in calls for call in joined.calls):
            return None
        counted = {place for joined in calls for place in growing_ids(joined, places)}
        for place in counted:
            size, known = tensors[place].numel(), self._rooms.setdefault(place, Room())
            if self._max_lookups is not None and len(counted) == 1:
                known.fix(self._max_lookups - lookups + size)
            room[place] = known(size)
        for part in jagged:
            values, offsets, weights = parts_of(part.features)
            given = [tensor for tensor in (values, offsets, weights) if tensor is not None]
            if any(id(tensor) not in places for tensor in given):
                return None  # ids= makes new tensors, at new places
            if not values.numel() or not only_tensors(part.features):
                return None
            works = [w for x in jagged if parts_of(x.features)[0] is values for w in x.works]
            size = self._room_for(values, works, places[id(values)])
            room |= {places[id(x)]: size for x in (values, weights) if x is not None}
        return InputForm(tensors, room, facts, engines_of(planned), frozenset(counted))

    def _room_for(self, values: Tensor, works: Sequence[Any], place: int) -> int:
        if not all(work.group.planning.is_pooled for work in works):
            return values.numel()
        if sum(work.num_lookups for work in works) == values.numel():
            return sum(work.size for work in works)
        return self._rooms.setdefault(place, Room())(values.numel())

    def _shape_of(self, form: InputForm) -> InputShape | None:
        shape = self._shapes.get(form.key)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                oldest = min(self._shapes, key=lambda key: self._shapes[key].newest)
                if not self._forget(oldest):
                    return None
            shape = self._shapes[form.key] = InputShape(self._settings.inputs)
        if form.room:  # a jagged shape that has grown does not come again
            for key in [key for key in self._shapes if key[1] and key != form.key]:
                self._forget(key)
        return shape

    def _forget(self, key: Any) -> bool:
        """Free a shape's static inputs unless it came recently; return whether they are freed."""
        shape = self._shapes[key]
        is_new = self._landed - shape.newest < self._settings.forgotten
        if is_new or any(static.waits for static in shape.inputs):
            return False
        del self._shapes[key]
        for static in shape.inputs:
            self._lanes.after(self._lane, static.trained)  # before its memory is used again
            self._empty(static)
            for module in collections_in(self._model).values():
                for group in module.every_group:
                    group.planning.free_berth(static.number)
        if not any(static.graphs for shape in self._shapes.values() for static in shape.inputs):
            self._pool = None  # torch has freed it with the last graph
        return True

    # -- steps -------------------------------------------------------------------------

    def run(self, batch: Any, split: Split | RankTurn | None = None) -> Tensor:
        """Run one step, captured where that is possible. The loss lasts until the next one.

        After a captured step, `pending_loss()` returns its loss on the host.
        """
        self.pending_loss = None
        static = self._inputs.get(id(batch))
        if static is None:
            if any(batch is past for past in self._past):
                raise RuntimeError(
                    "this batch has been overwritten: batches after it were trained, and its place "
                    "was taken by a later one. Train a batch before those after it, or copy it"
                )
            return self._run_eagerly(batch, split)
        graph, shape = None, self._shapes[static.key]
        is_new = split is not None and not shape.can_split(split.first, static)
        # A graph of several ranks has one backward pass, between two exchanges.
        is_new |= isinstance(split, RankTurn) and split.split is not None
        if is_new or self._refused or not static.can_be_replayed(batch):
            loss = self._run_eagerly(batch, split)
        elif static.needs_try and not shape.is_tried:
            loss = self._try(static)
        elif (graph := self._graph_for(static, split)) is None:
            # Autograd's threads may still hold what a failed capture made on its own stream. Torch
            # waits where it must; users can do nothing about its warning.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
                loss = self._run_eagerly(batch, split)
        else:
            self._replay(graph, static, split)
            loss = self._loss
        self._leave(static)
        if graph is not None:
            self.pending_loss = static.pending_loss = PendingLoss(static.loss, self._lanes)
        return loss

    def _replay(self, graph: _Graph, static: StaticInput, split: Split | RankTurn | None) -> None:
        if static.pending_loss is not None:
            static.pending_loss()  # its memory is written now
        if isinstance(split, RankTurn):
            self._replay_in_turn(graph, static, split)
            return
        around = list(zip(works_of(static.planned), graph.boundaries, strict=True))
        # Under one lock, or rows might miss an update that the dense part has had.
        with writing([collection.lock for collection, _ in static.planned]):
            for work, boundary in around:
                boundary.load(work)
            for collection, tables in graph.updated:
                collection.optimizer.count_step(tables)
                collection.row_access.note_step()
                if collection.optimizer.rule.uses_step:
                    for group in collection.groups:
                        group.capture.push_scalars()
            if split is not None:
                graph.replay_first()
                split.wait()
            graph.replay()
            for work, boundary in around:
                boundary.apply(work)

    def _replay_in_turn(self, graph: _Graph, static: StaticInput, turn: RankTurn) -> None:
        """Ranks exchange vectors, then the first graph runs, then they exchange gradients. While
        one of them waits for another, it holds no lock."""
        boundaries = deque(graph.boundaries)
        around = []
        for collection, planned in static.planned:
            around.append([(work, boundaries.popleft()) for work in planned.works])
            collection.pipeline.fetch(planned)
            with writing([collection.lock]):
                for work, boundary in around[-1]:
                    boundary.load(work)
        turn.begin_replay()
        graph.replay_first()
        for (collection, _), of_batch in zip(static.planned, around, strict=True):
            collection.pipeline.end_captured(of_batch)
        if turn.end_replay(graph.split):
            graph.replay()
        else:
            turn.update()
            self._loss.copy_(turn.mean)
            static.loss.copy_(self._loss, non_blocking=True)

    def _leave(self, trained: StaticInput) -> None:
        """Free a static input, and those of earlier batches that were not trained."""
        for static in self._inputs.values():
            if static is trained or (static.waits and static.landed <= trained.landed):
                static.waits = False
                self._trained.append(static)
        for collection, planned in trained.planned:
            collection.pipeline.done_with(planned)

    def _run_eagerly(self, batch: Any, split: Split | RankTurn | None = None) -> Tensor:
        if split is not None:
            return run_phases(self._phases_of(batch, split), split)
        step = self._step()
        assert step is not None
        return step(batch)

    def _phases_of(self, batch: Any, split: Split | RankTurn) -> Generator[Tensor]:
        phases = self._phases()
        assert phases is not None
        return phases(batch, split)

    def _try(self, static: StaticInput) -> Tensor:
        """Run eagerly what will be captured: this compiles kernels, and finds models that cannot
        handle padding."""
        updates = [collection.optimizer.steps for collection, _ in static.planned]
        try:
            with static.with_padding():
                loss = self._run_eagerly(static.batch)
        except Exception as error:
            if updates != [collection.optimizer.steps for collection, _ in static.planned]:
                raise  # rows have been updated, and must not be updated twice
            loss = self._run_eagerly(static.handed)  # raises again if padding is not the reason
            self._refuse(f"padding behind the lookups leads to {_short(error)}")
            return loss
        self._shapes[static.key].is_tried = True
        return loss

    def _graph_for(
        self, static: StaticInput, split: Split | RankTurn | None = None
    ) -> _Graph | None:
        self._drop_if_stale(static.planned)
        if self._refused:
            return None
        first = 0 if split is None else split.first
        works = works_of(static.planned)
        key = (first, *(id(work.group.capture.memory_of(work)) for work in works))
        if key not in static.graphs:
            try:
                graph = self._capture(static, split)
            except RuntimeError as error:
                if is_spoiled(error) and self._spoiled < _MOST_SPOILED:
                    self._spoiled += 1  # it is tried again with the next batch
                    self._pool = None  # it may still be recording
                    return None
                self._refuse(f"{_short(error)}. {_hint_for(error)}")
                return None
            alike = [known for known in static.graphs if known[0] == first]
            if len(alike) > 1:  # buffers that were replaced do not come again
                del static.graphs[alike[0]]
            static.graphs[key] = graph
        found: _Graph = static.graphs[key]
        return found

    def _refuse(self, reason: str) -> None:
        self._refused = True
        warn(
            "this training step cannot be captured as a CUDA graph, so it runs kernel by kernel, "
            f"with the same result but slower: {reason}; Trainer(graphs=False), or a loop without "
            "hotrow.graphed, says so beforehand"
        )

    def _launch(self, static: StaticInput, phases: Generator[Tensor] | None) -> None:
        loss = self._run_eagerly(static.batch) if phases is None else next(phases)
        self._loss.copy_(loss)
        static.loss.copy_(self._loss, non_blocking=True)

    def _capture(self, static: StaticInput, split: Split | RankTurn | None = None) -> _Graph:
        phases = None if split is None else self._phases_of(static.batch, split)
        launch, capture = partial(self._launch, static, phases), self._settings.capture
        first = None
        collections = [collection for collection, _ in static.planned]
        for collection in collections:
            collection.optimizer.in_graph = None
        works = works_of(static.planned)
        boundaries = [work.group.capture.boundary(work) for work in works]
        counters = _host_state(self._optimizer)
        before = [counter.clone() for counter in counters]
        with writing([collection.lock for collection in collections]), static.with_padding():
            try:
                if phases is not None:
                    # What the second phase needs of it stays alive, and so keeps its address.
                    first = capture(partial(next, phases), self._pool, PRIORITIES["train"])
                    self._pool = first.pool()
                graph = capture(launch, self._pool, PRIORITIES["train"])
            finally:
                if phases is not None:
                    phases.close()
                # Nothing has run yet: only the host has counted.
                counted = [
                    (counter, value)
                    for counter, value in zip(counters, before, strict=True)
                    if not torch.equal(counter, value)
                ]
                for counter, value in counted:
                    counter.copy_(value)
        self._pool = graph.pool()
        kept = [*(work.group.capture.memory_of(work) for work in works), *static.constants]
        # Frozen collections, and those without a part in the loss, are not updated.
        updated = [
            (collection, collection.optimizer.in_graph)
            for collection in collections
            if collection.optimizer.in_graph is not None
        ]
        counters = [counter for counter, _ in counted]
        return _Graph(graph, counters, kept, updated, boundaries, first, split)

    def drop(self) -> None:
        """Capture again: the step has changed."""
        self._guard = None

    def _drop_if_stale(self, planned: PlannedBatches) -> None:
        """Forget graphs if settings have changed; graphs read tensors on the device anew."""
        collections = [collection for collection, _ in planned]
        settings = (
            [group.capture.settings() for module in collections for group in module.groups],
            [collection.grad_scale for collection in collections],
            [collection.requires_grad for collection in collections],
        )
        engines, is_first = engines_of(planned), not self._known
        known = self._known.setdefault(engines, settings)  # nothing is captured before that
        if self._guard is not None and not self._guard.has_changed() and settings == known:
            return
        self._guard = CaptureGuard(self._model, self._optimizer)
        reason = _why_not(self._optimizer)
        if reason is not None:
            self._refuse(reason)
        if not is_first:
            for static in self._inputs.values():
                static.graphs.clear()
            self._pool = None  # torch has freed it with the last graph
            self._stale += 1
            if self._stale == 3:
                warn(
                    "the dense optimizer's settings change from step to step, and each change "
                    "captures the step anew, which is slow. Give it its learning rate as a tensor "
                    "on the device (torch.optim.SGD(..., lr=torch.tensor(0.1, device='cuda'), "
                    "fused=True); Adam also wants capturable=True), which graphs follow"
                )
        self._known = {engines: settings}


class _Graph:
    """A captured step. Counters on the host, such as Adagrad's step, are advanced at a replay."""

    def __init__(
        self,
        graph: Any,
        counted: list[Tensor],
        kept: Any,
        updated: list[tuple[Any, tuple[str, ...]]],
        boundaries: list[Any],
        first: Any = None,
        split: Any = None,
    ) -> None:
        """`updated`: the collections whose rows it updates, and which tables. `boundaries`: what
        the host does around it. `first`: the graph of the first phase, if there are two, as of the
        `split` that was captured."""
        self._graph, self._counted, self._kept = graph, counted, kept
        self.updated, self.boundaries, self._first = updated, boundaries, first
        self.split = split

    def replay_first(self) -> None:
        self._first.replay()

    def replay(self) -> None:
        if self._counted:
            torch._foreach_add_(self._counted, 1)
        self._graph.replay()


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _hint_for(error: Exception) -> str:
    if "uncaptured work" in str(error):  # autograd waits for the stream of an older graph
        return (
            "A model that keeps tensors of an earlier step, such as self.x = output, keeps its "
            "autograd graph alive: keep output.detach(), or drop it"
        )
    return "A step that reads values back (.item(), prints, branches on a tensor) cannot"


def _host_state(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the optimizer's state on the host, which a replay does not change."""
    state = () if optimizer is None else optimizer.state.values()
    values = (value for values in state for value in values.values())
    return [x for x in values if isinstance(x, Tensor) and x.device.type == "cpu"]


def _why_not(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return why an optimizer's step cannot be replayed; None if it can."""
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
