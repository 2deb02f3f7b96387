"""Static inputs of CUDA graphs: memory at fixed addresses that batches are copied to.

Each shape of batches has a few static inputs, used in turn; each has graphs of its own. A jagged
batch leaves a part of its memory unused, which only the graph sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import is_
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.pipeline import PlannedBatch
from hotrow.embedding.reader import PlannedBatches
from hotrow.inputs.calls import JoinedCalls
from hotrow.inputs.tree import map_tensors, tensors_in
from hotrow.support.streams import Lanes, Mark


def works_of(planned: PlannedBatches) -> list[Any]:
    return [work for _, batch in planned for work in batch.works]


def engines_of(planned: PlannedBatches) -> tuple[type, ...]:
    """Return how each engine's rows are captured: the launches depend on it."""
    return tuple(type(work.group.capture) for work in works_of(planned))


def can_land(collection: EmbeddingBagCollection, planned: PlannedBatch) -> bool:
    """Whether graphs may read a batch. If the host looks rows up, the graph reads the rest."""
    at_once = collection.pipeline.updates_at_once
    return all(
        work.group.capture.accepts(planned.batch, updates_at_once=at_once) for work in planned.works
    )


def has_size(planned: PlannedBatch, size: int) -> bool:
    """Whether a batch has so many samples. Modules are called with several tensors; some, such as
    positions, may have another length."""
    features = planned.features
    sizes = features.sizes if isinstance(features, JoinedCalls) else {planned.batch.num_samples}
    return size in sizes


def growing_ids(features: JoinedCalls, places: Mapping[int, int]) -> set[int]:
    """Return the places of the tensors that have another number of ids in each batch: those of bags
    with offsets. Calls of another form would read the padding of such a tensor."""
    growing, fixed = {}, set()  # several tensors may be parts of one memory
    for call in features.calls:
        memory = call.ids.untyped_storage().data_ptr()
        if call.offsets is None or id(call.ids) not in places:
            fixed.add(memory)
        else:
            growing[places[id(call.ids)]] = memory
    return {place for place, memory in growing.items() if memory not in fixed}


class PendingLoss:
    """A loss that is being copied to page-locked memory; a call waits for it."""

    def __init__(self, memory: Tensor, lanes: Lanes, copied: Mark | None = None) -> None:
        """Without the mark when it is `copied`, a call waits for all training so far."""
        self._memory, self._lanes, self.copied = memory, lanes, copied
        self._stream = lanes.here.trained_on
        self._value: float | None = None

    def __call__(self) -> float:
        if self._value is None:
            (self.copied or self._lanes.launched_on(self._stream)).wait()
            self._value = float(self._memory)
        return self._value


class InputForm:
    """How a batch lies in a static input; batches with equal `key` are launched alike."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        room: dict[int, int],  # size of tensors with an element per lookup, by place in the batch
        facts: tuple[Any, ...],  # what else launches depend on
        engines: tuple[type, ...] = (),  # as `engines_of` returns them
        counted: frozenset[int] = frozenset(),
    ) -> None:
        """`counted`: places in `room` of which a graph must know the sizes."""
        self.tensors, self.room, self.counted = tensors, room, counted
        shapes = tuple(
            (("room", room[place]) if place in room else tensor.shape, tensor.dtype)
            for place, tensor in enumerate(tensors)
        )
        self.key = shapes, (*facts, *sorted(counted)), engines

    @staticmethod
    def facts_of(work: Any) -> Any:
        """Return what launches of a jagged batch depend on, beside the shapes of its tensors."""
        calls = work.batch.calls
        has_room = work.batch.varies if calls else work.group.planning.is_pooled
        return work.batch.keys, work.size, None if has_room else work.spans, calls


class StaticInput:
    """Memory for one batch in flight, and the graphs that read it."""

    def __init__(self, key: Any, number: int, batch: Any, trained: Mark) -> None:
        self.key, self.number, self.batch, self.trained = key, number, batch, trained
        self.tensors = tensors_in(batch)
        self._device = self.tensors[0].device
        self.taken: dict[int, int] = {}  # lookups in tensors with an element per lookup, by place
        self._counts: dict[int, Tensor] = {}  # some of these, on the device
        self.handed: Any = None  # the batch as it was yielded
        self.shown: list[Tensor] = []  # its tensors
        self.planned: PlannedBatches = ()
        self.landed = 0  # when
        self.waits = False  # to be trained
        self.graphs: dict[Any, Any] = {}
        self.loss = torch.zeros((), pin_memory=self.tensors[0].is_cuda)
        self.pending_loss: PendingLoss | None = None

    @property
    def needs_try(self) -> bool:
        """Whether a graph launches something else than an eager step does."""
        return bool(self.taken) or any(planned.batch.calls for _, planned in self.planned)

    @property
    def constants(self) -> list[Tensor]:
        """What graphs read of other batches' memory."""
        joined = [x.features for _, x in self.planned if isinstance(x.features, JoinedCalls)]
        return [tensor for features in joined for tensor in features.constants]

    def can_be_replayed(self, batch: Any) -> bool:
        """Whether the batch is unchanged, its rows are in place, and one update follows.

        A loop may change a batch's ids, or put other tensors into it: a graph would not see it.
        """
        shown = tensors_in(batch)
        return (
            len(shown) == len(self.shown)
            and all(map(is_, shown, self.shown))
            and all(planned.is_unchanged for _, planned in self.planned)
            and not any(collection.is_accumulating for collection, _ in self.planned)
            and all(self._can_replay(*planned) for planned in self.planned)
        )

    @staticmethod
    def _can_replay(collection: EmbeddingBagCollection, planned: PlannedBatch) -> bool:
        at_once = collection.pipeline.updates_at_once
        return all(
            work.group.capture.can_replay(work, updates_at_once=at_once) for work in planned.works
        )

    def take(self, form: InputForm, landed: int) -> None:
        """Copy a batch to this memory."""
        full = [place for place in range(len(self.tensors)) if place not in form.room]
        if full:  # one call for all of them takes the host less time than one for each
            torch._foreach_copy_(
                [self.tensors[place] for place in full],
                [form.tensors[place] for place in full],
                non_blocking=True,
            )
        for place in form.room:
            memory, tensor = self.tensors[place], form.tensors[place]
            size, before = tensor.numel(), self.taken.get(place, 0)
            memory[:size].copy_(tensor, non_blocking=True)
            if size < before:
                memory[size:before].zero_()
            self.taken[place] = size
        for place in form.counted:
            if place not in self._counts:
                self._counts[place] = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._counts[place].fill_(form.tensors[place].numel())
        # Without padding. A new object each time: an old batch differs from the one that
        # replaced it.
        places = count()

        def without_padding(tensor: Tensor) -> Tensor:
            size = self.taken.get(next(places))
            return tensor.detach() if size is None else tensor[:size]

        self.handed = map_tensors(self.batch, without_padding)
        self.shown = tensors_in(self.handed)
        self.landed, self.waits = landed, True

    def empty(self) -> None:
        """Forget the batch: the buffers of its plan can be used again."""
        for collection, planned in self.planned:
            collection.pipeline.done_with(planned)
        self.handed, self.shown, self.planned = None, [], ()

    @contextmanager
    def with_padding(self) -> Iterator[None]:
        """Inside, collections look up the batch with its padding, and works compute what they keep
        of it by launches that are the same for all batches of the shape."""
        padded = {self.tensors[place].data_ptr(): self.tensors[place] for place in self.taken}
        counted = {
            self.tensors[place].data_ptr(): (self.tensors[place], count)
            for place, count in self._counts.items()
        }
        longer = []
        works = works_of(self.planned)
        for collection, planned in self.planned:
            features: Any = planned.features
            if isinstance(features, JoinedCalls):
                features = features.padded(counted)
            else:
                features = map_tensors(features, lambda x: padded.get(x.data_ptr(), x))
            collection.pipeline.done_with(planned)
            longer.append(collection.pipeline.upload(planned, features))
            collection.pipeline.arrive(longer[-1])
        for work in works:
            work.is_fixed = work.batch.offsets is not None
        try:
            yield
        finally:
            for work in works:
                work.is_fixed = False
            for (collection, planned), other in zip(self.planned, longer, strict=True):
                collection.pipeline.done_with(other)
                for work in planned.works:
                    work.arrive(planned.batch)
                collection.pipeline.arrive(planned)


class InputShape:
    """Batches of one shape, and their static inputs, used in turn."""

    _numbers = count()

    def __init__(self, most: int) -> None:
        self._most = most  # static inputs
        self.seen = self.newest = 0
        self.is_tried = False  # by an eager step, with padding
        self.splits: set[int] = set()  # sizes of first parts that an eager step has tried
        self.inputs: deque[StaticInput] = deque()

    def can_split(self, first: int, static: StaticInput) -> bool:
        """Whether a step in two parts can be captured: not of jagged ids, nor at its first try."""
        if static.needs_try:
            return False
        is_known = first in self.splits
        self.splits.add(first)
        return is_known

    def next_input(
        self, batch: Any, form: InputForm, landed: int, lanes: Lanes
    ) -> StaticInput | None:
        """Return a free static input; None if batches that were not trained yet use them all."""
        is_free = bool(self.inputs) and not self.inputs[0].waits
        # A rare shape needs only one.
        is_rare = is_free and landed - self.inputs[0].landed > 2 * self._most
        if len(self.inputs) < self._most and not is_rare:
            places = count()

            def allocate(tensor: Tensor) -> Tensor:
                size = form.room.get(next(places))
                if size is None:
                    return torch.empty_like(tensor, device=lanes.device)
                return torch.zeros(size, dtype=tensor.dtype, device=lanes.device)

            memory = map_tensors(batch, allocate)
            trained = lanes.mark("train")
            self.inputs.append(StaticInput(form.key, next(self._numbers), memory, trained))
        elif not is_free:
            return None
        else:
            self.inputs.rotate(-1)
        return self.inputs[-1]
