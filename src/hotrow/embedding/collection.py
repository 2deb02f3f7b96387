"""Collections: embedding tables that look like torch modules.

Knows inputs, outputs and manners; where rows are is the row groups' business.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from itertools import islice
from types import FrameType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from hotrow.embedding import dense_steps
from hotrow.embedding.optimizer import RowOptimizer
from hotrow.embedding.step import Lookup, PendingStep, by_feature
from hotrow.engine.gpu.plan_room import make_room
from hotrow.engine.hybrid import HostRows
from hotrow.engine.profile import Profile, byte_parts, check_profile
from hotrow.engine.rows import RowGroup
from hotrow.engine.schedule import at_once
from hotrow.engine.stages import SPLIT, Stage, Work
from hotrow.engine.static_hybrid import StaticHybridRows
from hotrow.engine.strategy import STRATEGIES, Strategy, find_strategy
from hotrow.inputs.batch import (
    Batch,
    Room,
    compared,
    count_ids,
    elsewhere,
    identity,
    lookups_of,
    parse,
    raw_weights,
    versions_of,
    weights_of,
)
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.tables import EmbeddingBagConfig, WidthGroup, feature_order, group_by_width
from hotrow.kernels.rules import RowRule
from hotrow.sizing.budgets import AUTO, auto_budget, buffer_part_of
from hotrow.store.budget import Budget, larger_budget, share_out
from hotrow.store.snapshot import Snapshot
from hotrow.store.traffic import TableTraffic, Traffic
from hotrow.support.messages import few, setting, warn
from hotrow.support.numbers import plain, whole
from hotrow.support.streams import capturing, lanes_of, synchronize
from hotrow.support.threads import RowLock, TrainingThread
from hotrow.support.units import parse_bytes, show_bytes, write_budget

ON_NONFINITE = ("propagate", "error", "skip")
# How a GPU moves rows: by itself, those that leave by way of the copy engine and the CPU, or both
# ways so. "auto" measures.
FILLS = ("auto", "zero-copy", "bulk", "staged")
_OLDEST_CAPABILITY = (8, 0)
_LEAST_CHUNK = 1024
_NEARLY_ALL = 0.9  # of the bytes of all rows: a budget that large saves nothing
_NO_ACCIDENT = 3  # steps in the wrong mode
_UPDATES = "row_updates"  # in a state dict's metadata: the number of updates so far
_RECENT = 8  # batches among which ids that were built anew are looked for


@dataclass(frozen=True, eq=False)
class Arrival:
    """One batch as one collection knows it."""

    features: Any
    compared: tuple[
        Tensor, ...
    ]  # its tensors when it was planned; kept, so that memory stays theirs
    versions: tuple[Any, ...]  # of them
    batch: Batch
    works: tuple[Work, ...]  # one per width group
    copies: tuple[Tensor, ...] = ()  # of the tensors; none where a device compares ids

    @property
    def identity(self) -> tuple[Any, ...]:
        return identity(self.features, self.compared, self.versions)

    @property
    def is_unchanged(self) -> bool:
        """Nobody has written to its ids since, as far as tensors tell."""
        return all(
            now == then or each.is_inference()
            for each, now, then in zip(
                self.compared, versions_of(self.compared), self.versions, strict=True
            )
        )

    @property
    def is_as_read(self) -> bool:
        """Whether the ids are those that were planned, by value: numpy, and `.data`, change a
        tensor without a new version."""
        return not self.copies or all(map(torch.equal, self.compared, self.copies))

    def reads_like(self, other: Arrival) -> bool:
        """Whether both look up the same; reads the ids, so it waits for a device."""
        pairs = zip(self.works, other.works, strict=True)
        return all(mine.reads_like(theirs) for mine, theirs in pairs)


@dataclass(frozen=True)
class _Side:
    """One of two ways to train the same rows."""

    groups: list[RowGroup]
    strategy: Strategy
    budget_bytes: int


class Embedded:
    """The vectors of one batch, by feature.

    They can be changed in place. If features are taken by name first, `values()` copies them as
    they are then. If `values()` is called first, features are views of its result, and only that
    can be changed in place.
    """

    def __init__(
        self,
        columns: tuple[str, ...],
        vectors: Mapping[str, Tensor],
        batch: Batch,
        whole: Tensor | None = None,
        *,
        jagged: bool = False,
    ) -> None:
        self._columns, self._batch = columns, batch
        self._vectors: Mapping[str, Tensor] | None = vectors  # None: `values()` was asked first
        # All features side by side, if they lie so, in the memory of `vectors`. Either this or
        # those are handed out: autograd does not know that a change of one changes the other.
        self._whole, self._whole_is_out = whole, False
        self._jagged = jagged  # some feature has one vector per lookup, any number per sample

    def keys(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, feature: str) -> Tensor:
        """[batch, dim]; without pooling [lookups, dim]."""
        vectors = self._by_name()
        if feature not in vectors:
            raise KeyError(f"no feature {feature!r}; there are {few(self._columns)}")
        return vectors[feature]

    def __setitem__(self, feature: str, vectors: Tensor) -> None:
        """Take what Python assigns after `embedded[feature] *= 2`; other vectors are refused."""
        if self[feature] is not vectors:
            raise TypeError(
                f"vectors of feature {feature!r} can be changed in place, but not replaced; keep "
                "other vectors in a variable of your own"
            )

    def to_dict(self) -> dict[str, Tensor]:
        vectors = self._by_name()
        return {name: vectors[name] for name in self._columns}

    def _by_name(self) -> Mapping[str, Tensor]:
        if self._vectors is None:
            assert self._whole is not None
            width = self._whole.shape[1] // len(self._columns)
            parts = self._whole.split(width, dim=1)
            self._vectors = dict(zip(self._columns, parts, strict=True))
        elif not self._whole_is_out:
            self._whole = None
        return self._vectors

    def values(self) -> Tensor:
        """All features side by side, [batch, sum of dims].

        A loss of it uses all tables, also those whose columns it leaves out.
        """
        if self._whole is not None:
            if not self._whole_is_out:
                self._whole_is_out, self._vectors = True, None
            return self._whole
        vectors = list(self.to_dict().values())
        if self._jagged:
            raise ValueError(
                "values() needs one vector per sample; features without pooling have one per "
                "lookup: take them by name"
            )
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"torch's {name}() takes tensors, and embedding(ids) holds vectors by feature; take "
            "embedding(ids).values(), all features side by side, or embedding(ids)['feature']"
        )

    def offsets(self, feature: str) -> Tensor:
        """Where each sample's lookups begin among a feature's vectors, [batch + 1]."""
        size, batch = self._batch.num_samples, self._batch
        if batch.offsets is None:
            return torch.arange(size + 1, device=batch.values.device)
        place = batch.keys.index(feature)
        mine = batch.offsets[place * size : (place + 1) * size + 1].long()
        return mine - mine[0]


class EmbeddingBagCollection(nn.Module):
    """Embedding tables larger than fast memory, trained with `budget` bytes of it.

    `budget` is "4GiB", "512MB", a number of bytes, or "10%" of the rows with their optimizer
    state; "auto" takes what is enough by `profile`, and at most 70 % of what is free of a GPU's
    memory. Strategies that keep every row in fast memory, or none, leave it aside. `strategy` and
    its contract: see the README. Rows are updated in `backward()`, by `optimizer`;
    `embedding.optimizer.param_groups` has the settings of each table. On a GPU,
    `output_dtype=torch.bfloat16` gives vectors half as wide, summed in float32.

    A row starts as a function of (`seed`, name of its table, row). Without `seed` one is drawn from
    torch's default generator, so `torch.manual_seed` fixes it and two collections differ;
    `embedding.seed` has it.
    """

    _prefix = "embedding_bags"
    # The checkpoint for which `note_changes` was called, and the collection's name in its model.
    changed_since: tuple[Any, str] | None = None
    being_saved: Any = None  # with `join()`: who reads the snapshots

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowRule,
        budget: str | float | Budget | None = None,
        *,
        strategy: str | Strategy = "lookahead",
        device: str | torch.device = "cpu",
        seed: int | None = None,
        profile: Profile | None = None,
        on_nonfinite: str = "propagate",
        output_dtype: torch.dtype = torch.float32,
        fill: str = "auto",
    ) -> None:
        self._thread = TrainingThread()
        super().__init__()
        _refuse_replicas()
        _leave_out_of_graphs()
        _hear_of_freezing()
        dense_steps.watch()
        self.device = usable_device(torch.device(device))
        self.seed = _drawn_seed() if seed is None else plain(seed)
        _check_arguments(self.seed, optimizer, on_nonfinite, output_dtype)
        if fill not in FILLS:
            raise ValueError(f"fill must be one of {', '.join(FILLS)}, not {fill!r}")
        self.tables = _listed(tables)
        self.strategy = find_strategy(strategy)
        if self.strategy.on_cpu_alone and self.device.type != "cpu":
            raise ValueError(
                f"strategy {self.strategy.name!r} trains on the CPU alone; give device='cpu', or "
                f"take 'hybrid', whose dense part is on {self.device}"
            )
        self.features = feature_order(self.tables)
        layouts = group_by_width(self.tables)
        if profile is not None:
            check_profile(profile, self.tables)
        self.optimizer = RowOptimizer(optimizer, self.tables)
        self.optimizer.belongs_to(self)
        row_bytes = [4 * (each.dim + optimizer.state_width(each.dim)) for each in layouts]
        self.num_rows = sum(each.num_rows for each in layouts)
        self.bytes_total = sum(
            size * each.num_rows for size, each in zip(row_bytes, layouts, strict=True)
        )
        shared = self._share(budget, row_bytes, layouts, profile)
        if self.device.type == "cuda" and (shared is not None or self.strategy.everything):
            wanted = self.bytes_total
            if shared is not None:
                sizes = zip(row_bytes, shared.shares, strict=True)
                by_hand = sum(size * (each.slots + each.buffer_rows) for size, each in sizes)
                wanted = shared.total_bytes or by_hand
            _check_room(self.device, wanted)
        self.window_bytes = 0 if shared is None else shared.window_bytes
        self.lanes = lanes_of(self.device)
        # On a GPU the host only launches: there threads take turns.
        self.lock = RowLock(shared=self.device.type == "cpu")
        engine = _engine(self.device)
        if self.strategy.on_host:
            engine = StaticHybridRows if self.strategy.pinned_part else HostRows
        if engine is RowGroup and output_dtype != torch.float32:
            raise ValueError(
                f"output_dtype={output_dtype} needs a GPU; on a CPU vectors are float32"
            )
        self.groups = [
            engine(
                layout,
                optimizer=self.optimizer,
                strategy=self.strategy,
                share=None if shared is None else shared.shares[g],
                device=self.device,
                seed=self.seed,
                profile=profile,
                window_bytes=self.window_bytes * len(layout.features) // len(self.features),
                output_dtype=output_dtype,
                fill=fill,
                lock=self.lock,
            )
            for g, layout in enumerate(layouts)
        ]
        if shared is not None and shared.total_bytes:
            for g, group in enumerate(self.groups):
                group.setting_for = partial(
                    _setting_for, self._share_of, shared.total_bytes, self.bytes_total,
                    isinstance(budget, str) and "%" in budget, g,
                )  # fmt: skip
        # Rows that are staged need more stages, with which others can go along.
        split = [group.strategy for group in self.groups if group.strategy.stages is SPLIT]
        self.strategy = split[0] if split else self.strategy
        self._plans_later = any(group.plans_later for group in self.groups)
        # Of a budget in bytes, plans get their part when it is known how large batches are.
        makes_room = shared is not None and self._plans_later and self.strategy.has_slots
        self._budget_bytes = shared.total_bytes if shared is not None and makes_room else 0
        self._step = PendingStep(self.groups, self.optimizer, on_nonfinite, self.lock, self._thread)
        self._anchor = torch.empty(0, requires_grad=True)  # makes autograd call us back
        self._arrivals: deque[Arrival] = deque(maxlen=self._most_recent)
        self._aside: _Side | None = None  # the engine that does not train
        self._places: dict[Any, Tensor] = {}
        self._place_of_values: Tensor | None = None
        self._room = Room()
        self._ahead: Callable[[], Any] | None = None  # a weak reference to the iterator
        self._warned = False
        self._apart = False
        # The module whose `train()` or `eval()` has set the mode of this one.
        self._mode_set_on: Callable[[], nn.Module | None] = lambda: None
        # Lookups in eval() mode since the last in train() mode, with an optimizer step between any
        # two, and the number of steps at the first and at the last of them.
        self._evaluated = self._first_steps = self._last_steps = 0
        self._warned_of_eval = False

    # As torch's attribute, but `eval()` in a thread that does not train holds for that thread.
    @property
    def training(self) -> bool:
        return self._thread.mode

    @training.setter
    def training(self, mode: bool) -> None:
        self._thread.mode = mode

    @property
    def evaluates_alone(self) -> bool:
        """Whether `eval()` was called in the current thread and holds for it alone."""
        return self._thread.evaluates_alone

    def _share(
        self,
        budget: str | float | Budget | None,
        row_bytes: list[int],
        layouts: Sequence[WidthGroup],
        profile: Profile | None,
    ) -> Budget | None:
        if not self.strategy.needs_budget:
            return None
        if isinstance(budget, Budget):
            if len(budget.shares) != len(layouts):
                raise ValueError(
                    f"the budget has {len(budget.shares)} shares; the tables have {len(layouts)} "
                    f"widths ({', '.join(str(each.dim) for each in layouts)}), one share for each"
                )
            return budget
        if budget is None:
            raise ValueError(
                f"strategy {self.strategy.name!r} needs a budget: the bytes of fast memory it may "
                f"use, such as budget='10%' of the {self.bytes_total:,} bytes of rows"
            )
        buffer_part = buffer_part_of(self.strategy, self.device)
        parts: Callable[[int], list[float]] = partial(
            byte_parts, layouts, row_bytes, profile=profile
        )
        total = 0 if budget == AUTO else parse_bytes(budget, total=self.bytes_total)
        if profile is not None:  # it takes long to rank, so other budgets are shared out alike
            parts = partial(_always, parts(total or self.bytes_total // 10))
        self._share_of = partial(_share_of, layouts, row_bytes, parts, buffer_part)
        if budget == AUTO:
            total = auto_budget(
                self._share_of,
                layouts,
                row_bytes,
                strategy=self.strategy,
                device=self.device,
                profile=profile,
            )
        return self._share_of(total)

    # -- lookup ------------------------------------------------------------------------

    def forward(self, features: Any) -> Embedded:
        """Look up a batch; in training mode `backward()` will update its rows."""
        if not (self.training and torch.is_grad_enabled()):
            return self._evaluate(features)
        self._finish_abandoned()
        self._thread.look_up()
        self._evaluated = 0
        arrival = self._find(features) or self._unplanned(features)
        vectors = []
        for work in arrival.works:
            weights = weights_of(features, work.lookups, work.group.layout)
            vectors.append(Lookup.apply(self._anchor, weights, work, self._step))  # type: ignore[no-untyped-call]
        return self._embedded(arrival.batch, vectors)

    def _evaluate(self, features: Any) -> Embedded:
        """Read rows where they are; no map, hold or counter changes. From any thread: all
        vectors are those of one finished step."""
        if torch.is_grad_enabled():
            self._note_evaluation()
        turn = self.lock.turn(count_ids(features), beside_training=self._thread.is_elsewhere)
        with turn, torch.no_grad():
            batch = parse(features, self.features, self.device)
            lookups = [lookups_of(batch, group.layout) for group in self.groups]
            if raw_weights(features) is not None:
                lookups = [
                    replace(x, weights=weights_of(features, x, group.layout))
                    for group, x in zip(self.groups, lookups, strict=True)
                ]
            while True:
                groups = self.groups
                parts = [group.parts_of(x) for group, x in zip(groups, lookups, strict=True)]
                with self.reading():
                    if self.groups is groups:  # and not those of another engine since
                        vectors = [
                            group.read_parts(mine)
                            for group, mine in zip(groups, parts, strict=True)
                        ]
                        break
            pairs = zip(vectors, lookups, strict=True)
            split = [by_feature(found, x) for found, x in pairs]
        return self._embedded(batch, split)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, no other thread changes rows, and each can be found."""
        while True:
            with self.lock.reading():
                if all(group.is_settled for group in self.groups):
                    self.lanes.join()  # others have launched what this thread has to wait for
                    try:
                        yield
                    finally:
                        self.lanes.read_here()
                    return
            with self.lock.writing():
                for group in self.groups:
                    group.settle()

    def _embedded(self, batch: Batch, vectors: Sequence[tuple[Any, ...]]) -> Embedded:
        """`vectors` of each group, as `by_feature` gives them."""
        named: dict[str, Tensor] = {}
        for group, (_, *parts) in zip(self.groups, vectors, strict=True):
            names = [feature.name for feature in group.layout.features]
            named.update(zip(names, parts, strict=True))
        whole = vectors[0][0] if len(vectors) == 1 else None
        jagged = batch.offsets is not None and any(t.pooling == "none" for t in self.tables)
        return Embedded(self.features, named, batch, whole, jagged=jagged)

    def _note_evaluation(self) -> None:
        """Warn once if a training loop has left the model in `eval()` mode.

        That is so if an optimizer of the module that was put into this mode steps again and again
        between lookups. `hotrow.ahead` warns by itself.
        """
        steps = dense_steps.count()
        if self._evaluated and self._last_steps == steps:
            return
        if not self._evaluated:
            self._first_steps = steps
        self._evaluated, self._last_steps = self._evaluated + 1, steps
        is_running = self._ahead is not None and self._ahead() is not None
        if self._evaluated <= _NO_ACCIDENT or self._warned_of_eval or is_running:
            return
        model = self._mode_set_on()
        if model is None or not self.requires_grad:
            return
        trained = {id(weight) for weight in dense_steps.weights_since(self._first_steps)}
        if any(id(weight) in trained for weight in model.parameters()):
            self._warned_of_eval = True
            warn(
                f"{_NO_ACCIDENT} optimizer steps followed lookups in eval() mode, in which no row "
                "is updated. To train, call model.train(); to leave the rows as they are, call "
                "embedding.requires_grad_(False)"
            )

    def _find(self, features: Any) -> Arrival | None:
        if not self._arrivals:
            return None
        try:
            tensors = compared(features)
            wanted = identity(features, tensors, versions_of(tensors))
        except (AttributeError, TypeError):
            return None  # not ids at all; parsing says so in the user's words
        # The newest first: a loader may hand out the same tensors again.
        found = next((each for each in reversed(self._arrivals) if each.identity == wanted), None)
        if found is None or not found.is_as_read:
            return None
        for work in found.works:
            work.group.compare(work)
        return found

    def _unplanned(self, features: Any) -> Arrival:
        """Ids nobody announced: planned on the spot, or read directly if others are planned."""
        _refuse_replicas()
        arrival = self.prepare(features, self.device)
        # The model may have built the same ids anew; a loop may have pulled several batches.
        for recent in islice(reversed(self._arrivals), _RECENT):
            if arrival.reads_like(recent):
                return recent
        running = self._finish_abandoned() is not None
        if running and not self._warned:
            self._warned = True
            warn(
                "these ids are not the ones hotrow.ahead planned for this batch; ids= gave others, "
                "or they were changed in place since. They are looked up directly, which is right "
                "but slower; let ids= return what the model looks up"
            )
        self.lanes.trains_here()
        direct = [work for work in arrival.works if running and not work.group.everything]
        with self.lock.writing():
            for work in direct:
                work.group.count_direct(work)
            self._make_room(arrival)
        at_once([work for work in arrival.works if work not in direct], self.lanes)
        return arrival

    # -- what hotrow.ahead asks for ----------------------------------------------------

    def prepare(
        self, features: Any, device: torch.device | None = None, *, held: bool = False
    ) -> Arrival:
        """Check a batch of ids, which is on `device` or anywhere; nothing moves.

        If it is `held` until it is looked up, its ids are compared then with what they are now.
        """
        batch = parse(features, self.features, device if self._plans_later else self.device)
        tensors = compared(features)
        if held:
            batch = replace(batch, given=tensors)
        works = tuple(group.work(batch) for group in self.groups)
        if raw_weights(features) is not None:
            for work in works:
                weights_of(features, work.lookups, work.group.layout)  # or refuses
        later = any(group.compares_later for group in self.groups)
        copies = tuple(map(torch.clone, tensors)) if held and not later else ()
        return Arrival(features, tensors, versions_of(tensors), batch, works, copies)

    def expect(self, arrival: Arrival) -> None:
        """A batch that will be planned after those already expected."""
        if self.strategy.on_host:
            return
        with self.lock.writing():
            self._make_room(arrival)
            with self.lanes.on("plan"):
                values = self._staged(arrival.batch.values)
                for work in arrival.works:
                    work.group.expect(work, values)

    def reserve(self, batch_size: int, lookups: Mapping[str, int] | None = None) -> None:
        """Batches will have so many samples; `lookups` per sample of a feature, 1 if not named.

        Nobody has to say so: the first batch does. Before that, `num_slots` and `memory()` do not
        know what plans will take of the budget on a GPU. Where many lookups are of the same rows,
        the first batch gives some of that back to slots.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 sample, not {batch_size}")
        each = dict.fromkeys(self.features, 1) | dict(lookups or {})
        if unknown := each.keys() - set(self.features):
            raise ValueError(
                f"no feature {min(unknown)!r}; there are {few(map(repr, self.features))}"
            )
        sizes = [sum(each[f.name] for f in group.layout.features) for group in self.groups]
        lookups_of_batch = [batch_size * size for size in sizes]
        with self.lock.writing():
            if self._budget_bytes and not self._has_begun():
                self._make_room_for(lookups_of_batch)
        for group, size in zip(self.groups, lookups_of_batch, strict=True):
            group.expected_rows = size

    def reserve_like(self, features: Any) -> None:
        """Batches will be about as large as this one, which is looked at and not trained."""
        arrival = self.prepare(features)
        with self.lock.writing():
            self._make_room(arrival)
        works: Sequence[Any] = arrival.works
        for work in works:
            # What plans later takes ids from anywhere, and counts them there.
            later = work.group.plans_later
            work.group.expected_rows = work.count_distinct() if later else work.ids.ids.numel()

    def _make_room(self, first: Arrival) -> None:
        if self._budget_bytes and not self._has_begun():
            works: Sequence[Any] = first.works
            # Where sizes change, larger ones will come, and `Room` rounds them up.
            spare = 0.0 if first.batch.offsets is None else 1 / 3
            sizes = []
            for work in works:
                work.group.expect_uniques(work.count_distinct(), work.size)
                told = work.group.planner.capacity  # by `reserve`
                sizes.append(max(told, work.size) if told else int(work.size * (1 + spare)))
            self._make_room_for(sizes)

    def _has_begun(self) -> bool:
        groups: Sequence[Any] = self.groups
        if any(group.has_begun for group in groups):
            self._budget_bytes = 0  # slots stay as they are
        return not self._budget_bytes

    def _make_room_for(self, lookups: Sequence[int]) -> None:
        """Give up slots for the plans of batches, before any row has a slot."""
        groups: Sequence[Any] = self.groups
        sizes = [max(1, each) for each in lookups]
        last = max(stage.cycle for stage in self.strategy.timed_stages)
        make_room(groups, sizes, self._budget_bytes, self.lanes, last_cycle=last)

    def _staged(self, values: Tensor) -> Tensor:
        """Indices on the device, at the same place for the same shape; read before the next."""
        if values.device == self.device:
            self.lanes.keep_for("plan", [values])
            return values.contiguous()
        if values.dim() == 1:  # any number of them: one place, with room for more
            if self._place_of_values is None or len(self._place_of_values) < len(values):
                room = torch.zeros(self._room(len(values)), dtype=values.dtype, device=self.device)
                self._place_of_values = room
            self._place_of_values[: len(values)].copy_(values, non_blocking=True)
            return self._place_of_values
        key = (values.shape, values.dtype)
        if key not in self._places:
            if len(self._places) >= 8:  # shapes that change all the time
                return values.to(self.device, non_blocking=True)
            self._places[key] = torch.empty(*key[:1], dtype=key[1], device=self.device)
        return self._places[key].copy_(values, non_blocking=True)

    def upload(self, arrival: Arrival, features: Any) -> Arrival:
        """The same batch, of which `features` are the ids on the device now."""
        batch = elsewhere(features, arrival.batch)
        for work in arrival.works:
            work.arrive(batch)
        tensors = compared(features)
        return Arrival(features, tensors, versions_of(tensors), batch, arrival.works)

    def part(self, arrival: Arrival, features: Any, first: int) -> Arrival:
        """Samples of a planned batch from `first` on, of which `features` are the ids."""
        part = parse(features, self.features, self.device)
        works = tuple(work.group.part(work, arrival.batch, part, first) for work in arrival.works)
        tensors = compared(features)
        return Arrival(features, tensors, versions_of(tensors), part, works)

    def arrive(self, arrival: Arrival, number: int | None = None) -> None:
        """The batch that `forward` will see next; its `number` in the pass."""
        self._arrivals.append(arrival)
        if number is not None:
            for work in arrival.works:
                work.group.note_number(work, number)

    def refuse_changed_ids(self, *, waits: bool = False) -> None:
        """Raise if a device has found ids that are not those which were planned, so far."""
        if waits and any(group.compares_later for group in self.every_group):
            self.lanes.mark("train").wait()
        numbers = [group.take_changed() for group in self.every_group]
        number = min((each for each in numbers if each is not None), default=None)
        if number is not None:
            raise RuntimeError(
                f"batch {number:,} of this pass, counted from 0: its ids were changed after they "
                "were read, in a way that torch's versions do not see (.data, numpy, or a loader "
                "that fills its buffers again), so its step looked up and updated the rows of the "
                "ids before. Change ids where batches are made, by operations that torch sees, or "
                "in a copy (ids.clone()), and train again from before that batch"
            )

    @property
    def updates_at_once(self) -> bool:
        """Nobody looks at gradients between backward and update."""
        return self._step.at_once

    @property
    def is_accumulating(self) -> bool:
        """Backward passes are being joined into one step."""
        return self._step.is_accumulating

    def done_with(self, arrival: Arrival) -> None:
        """`forward` will not see it again."""
        if arrival in self._arrivals:
            self._arrivals.remove(arrival)

    def enter(self, stream: Any) -> None:
        running = self._finish_abandoned()
        if running is stream:  # its close() was interrupted
            self.leave(stream)
        elif running is not None:
            raise RuntimeError(
                "another hotrow.ahead iterator is running on this collection; two would move "
                "each other's rows. For validation inside its loop call the model directly, "
                "without ahead; else finish the first one's loop, or call its close()"
            )
        _refuse_replicas()
        self._thread.iterate()
        for group in self.every_group:
            group.take_changed()  # of a pass that ended with an error
        self._ahead = weakref.ref(stream)

    def take_next(self) -> None:
        """The current thread takes a batch; refused while another one trains."""
        self._thread.iterate()

    def leave(self, stream: Any, *, waits: bool = True) -> None:
        """End the pass of an iterator; nothing is done if another one has entered since.

        Where the caller must not wait for the lock, the next call that trains ends it.
        """
        entered = self._ahead
        if entered is None or entered() is not stream:
            return
        if waits:
            self._end_pass(entered)
        else:
            self._ahead = _gone

    def _finish_abandoned(self) -> Any:
        """End the pass of an iterator that is gone; return the one that is running, if any.

        A garbage collection takes an iterator away without `leave`. Until its pass is ended, rows
        are found as while it was running.
        """
        entered = self._ahead
        if entered is None:
            return None
        running = entered()
        if running is None and not capturing():
            self._end_pass(entered)
            try:
                self.refuse_changed_ids(waits=True)
            except RuntimeError as error:  # about an earlier batch, not about this call
                warn(str(error))
        return running

    def _end_pass(self, entered: Callable[[], Any]) -> None:
        """Move the rows of planned batches, and forget those that were expected."""
        with self.lock.writing():
            if self._ahead is not entered:
                return  # another thread was first
            self._thread.end_iteration()
            self._arrivals = deque(maxlen=self._most_recent)  # a thread may be reading the old one
            self._ahead = None
            if not sys.is_finalizing():  # else no step follows, and threads that move rows are gone
                self.lanes.join()
                for group in self.groups:
                    group.finish_planned()
                self.lanes.join()
            with self.lanes.on("plan"):
                for group in self.groups:
                    group.forget_window()
        self.lanes.join()  # or whoever gets the memory of a collection that is gone meets this

    def move_in(self, stages: tuple[Stage, ...]) -> None:
        """From the next batch on, rows move in other stages that hold the same batches' rows."""
        other = replace(self.strategy, stages=stages, overlapped=True)
        if other.hold != self.strategy.hold:
            raise ValueError(
                f"rows of {other.hold} would have to stay in these stages; the slots were planned "
                f"for {self.strategy.hold}"
            )
        self.strategy = other

    def useful_depth(self) -> int:
        """How many batches ahead are worth knowing, within the budget's bytes for ids."""
        planners = [group.planner for group in self.groups if not group.everything]
        if not planners:
            return 0
        if self._plans_later:
            return int(min(planner.useful_depth() for planner in planners))
        bytes_per_batch = 8 * sum(planner.largest_batch for planner in planners)
        affordable = self.window_bytes // max(1, bytes_per_batch)
        return int(min(affordable, max(planner.useful_depth() for planner in planners)))

    # -- training ----------------------------------------------------------------------

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all rows and their state (False), or train them again (True), from the next
        forward pass on.

        `requires_grad_` of any module that holds this one does the same. A loop over
        `parameters()` does not: there are no parameters here. Rows that `freeze_rows` names stay
        frozen in either case.
        """
        self._anchor.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    @property
    def requires_grad(self) -> bool:
        """Whether rows are trained, as `requires_grad_` has set it."""
        return self._anchor.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`. Remembers the module whose `train()` or `eval()` was called."""
        module: nn.Module = self
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is nn.Module.train.__code__:
            module, frame = frame.f_locals["self"], frame.f_back
        self._mode_set_on = weakref.ref(module)
        return super().train(mode)

    def accumulate(self) -> Any:
        """`with embedding.accumulate():` joins all backward passes inside into one step."""
        return self._step.accumulate()

    @property
    def grad_scale(self) -> Any:
        """What losses were multiplied by: a number, a tensor or the torch GradScaler itself.

        Gradients are divided by it. With a GradScaler, an update that is not finite is skipped,
        as the scaler does for the dense part.
        """
        return self._step.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self._step.grad_scale = scale

    def freeze_rows(self, rows: Mapping[str, Tensor] | None) -> None:
        """From the next step on, leave some rows and their state as they are; None: no row.

        By table: row numbers, or a mask with a bool for each row. What was frozen before no longer
        is; nothing by name ({}) keeps the bits that tell, so that a captured step need not be
        captured anew when rows are frozen again. Lookups read frozen rows as ever, gradients of
        other rows do not change by a bit, and steps are counted alike.
        """
        ids: list[list[Tensor]] = [[] for _ in self.groups]
        for table, given in ({} if rows is None else rows).items():
            group, base, size = self._place(table)
            ids[self.groups.index(group)].append(row_numbers(table, given, size).cpu() + base)
        with self.lock.writing():
            for group, mine in zip(self.groups, ids, strict=True):
                every = torch.cat([torch.empty(0, dtype=torch.int64), *mine])
                group.freeze(None if rows is None else every.unique())

    # -- two engines over one store ----------------------------------------------------

    def train_on_host(self) -> int:
        """From the next batch on the CPU reads and updates rows, as with strategy 'hybrid'.

        No `hotrow.ahead` may be running. Rows in fast memory go to the store first, with their
        state, and stay in their slots until `train_in_slots()`. Gives the bytes of them.
        """
        self._refuse_if_running("train_on_host()")
        if self.is_on_host:
            return 0
        if not self.strategy.has_slots:
            raise ValueError(
                f"strategy {self.strategy.name!r} has no rows that come and go, so there is "
                "nothing to change: train_on_host() is for those with a budget, such as 'static'"
            )
        if self._aside is None:
            strategy = STRATEGIES["hybrid"]
            groups: list[RowGroup] = [HostRows.over(group, strategy) for group in self.groups]
            self._aside = _Side(groups, strategy, 0)
        with self.lock.writing():
            for group in self.groups:
                group.flush()
                group.expect_changes()
            return self._change_sides()

    def train_in_slots(self) -> int:
        """After `train_on_host()`: from the next batch on rows are trained in fast memory again.

        No `hotrow.ahead` may be running. All rows that have slots are read once more, with their
        state. Gives the bytes of them.
        """
        self._refuse_if_running("train_in_slots()")
        if not self.is_on_host:
            return 0
        assert self._aside is not None
        with self.lock.writing():
            for group in self.groups:
                group.flush()
            for group in self._aside.groups:
                group.reload()
            return self._change_sides()

    @property
    def is_on_host(self) -> bool:
        """Between `train_on_host()` and `train_in_slots()`."""
        return self._aside is not None and self._aside.strategy.has_slots

    @property
    def every_group(self) -> list[RowGroup]:
        """Of both engines, where there are two."""
        return [*self.groups, *([] if self._aside is None else self._aside.groups)]

    @property
    def _slot_groups(self) -> list[RowGroup]:
        """Those with slots, where there are two engines."""
        return self._aside.groups if self._aside is not None and self.is_on_host else self.groups

    def _change_sides(self) -> int:
        assert self._aside is not None
        before, now = _Side(self.groups, self.strategy, self._budget_bytes), self._aside
        for mine, other in zip(now.groups, before.groups, strict=True):
            mine.freeze_like(other)
            mine.aside, other.aside = False, True
        self.groups, self.strategy, self._budget_bytes = now.groups, now.strategy, now.budget_bytes
        self._aside, self._step.groups = before, now.groups
        self._plans_later = any(group.plans_later for group in self.groups)
        self._arrivals = deque(maxlen=self._most_recent)
        return sum(4 * group.width * group.count_resident() for group in self._slot_groups)

    @property
    def _most_recent(self) -> int:
        """Batches that can be found; on a device their plans keep buffers for as long."""
        return _RECENT if self._plans_later else 64

    # -- pinned rows -------------------------------------------------------------------

    def pin_rows(self, rows: Mapping[str, Tensor]) -> HotSet:
        """Empty fast memory and pin these rows alone, by table, hottest first, until the next call.

        No `hotrow.ahead` may be running. Rows that are not pinned pass through what is left, which
        has to hold a batch: `room_for_pins()` says how many can be pinned. Of more than that, every
        table of the width keeps the same share of its rows, the first ones. Padding rows of tables
        without pooling are pinned, too, since most samples read them. Gives what is pinned.
        """
        self._refuse_if_running("pin_rows()")
        if self.is_on_host:
            raise RuntimeError("pin_rows() while the CPU trains: call train_in_slots() before")
        if not (self.strategy.has_slots and self.strategy.pinned_part and self.strategy.refetch):
            raise ValueError(
                f"pin_rows() needs strategy='static', which keeps pinned rows and fetches all "
                f"others; this collection has {self.strategy.name!r}, which chooses by itself"
            )
        room, pinned = self.room_for_pins(), {}
        given: dict[int, dict[str, Tensor]] = {group.dim: {} for group in self.groups}
        for table, numbers in rows.items():
            group, _, size = self._place(table)
            given[group.dim][table] = _first_of_each(row_numbers(table, numbers, size).cpu())
        with self.lock.writing():
            self._arrivals.clear()
            for group in self.groups:
                mine = _with_padding(given[group.dim], group.layout)
                every = sum(map(len, mine.values()))
                share = min(1.0, room[group.dim] / max(1, every))
                mine = {name: each[: int(share * len(each))] for name, each in mine.items()}
                group.pin_rows(
                    _interleaved([each + self._place(name)[1] for name, each in mine.items()])
                )
                pinned.update(mine)
        return HotSet.of(self.tables, pinned)

    def room_for_pins(self) -> dict[int, int]:
        """How many rows `pin_rows` can pin, by width, when it is known how large batches are."""
        room = {group.dim: group.room_for_pins for group in self._pinning}
        if None in room.values():
            raise RuntimeError(
                "how many rows can be pinned depends on how large batches are, which nobody has "
                "said yet: embedding.reserve(batch_size), or embedding.reserve_like(ids of a batch)"
            )
        return {dim: count for dim, count in room.items() if count is not None}

    @property
    def pins_version(self) -> int:
        """Another number whenever other rows are pinned, or fewer: a larger batch than was
        expected makes room for itself."""
        return sum(group.planner.pins_version for group in self._pinning)

    @property
    def pins_gave_way(self) -> int:
        """How often there were fewer, for such a batch; not where somebody has pinned others."""
        return sum(group.planner.pins_gave_way for group in self._pinning)

    @property
    def _pinning(self) -> list[RowGroup]:
        return [group for group in self._slot_groups if not group.everything]

    def _refuse_if_running(self, what: str) -> None:
        running = self._finish_abandoned()
        self._thread.check(f"calls {what}" if what.endswith("()") else f"is {what}")
        if running is not None:
            raise RuntimeError(
                f"{what} while hotrow.ahead is running: rows are on their way to where batches "
                "were planned to find them. Finish its loop, or call its close()"
            )
        if self._step.is_open:
            raise RuntimeError(f"{what} inside of accumulate(), whose rows are not updated yet")

    # -- rows in and out ---------------------------------------------------------------

    def flush(self) -> None:
        """Bring slow memory up to date with fast memory."""
        with self.lock.writing():
            for group in self.groups:
                group.flush()

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        """The rows of a table with their state, in chunks: (first row, [n, dim + state]).

        Each chunk is of one finished step. If another thread trains meanwhile, later chunks may be
        of later steps; `state_dict()` reads a whole table, and all tables, between two steps.
        """
        group, _, size = self._place(table)  # a wrong name is refused at once
        step = _chunk_of(group)

        def chunks() -> Iterator[tuple[int, Tensor]]:
            for first in range(0, size, step):
                yield first, self._gather(table, torch.arange(first, min(first + step, size)))

        return chunks()

    def _gather(self, table: str, rows: Tensor) -> Tensor:
        """Rows of a table with their state, each given once, as of one finished step."""
        with self.reading():
            group, base, _ = self._place(table)
            return group.gather(rows + base, out=torch.empty(len(rows), group.width))

    def weights(self, table: str) -> Iterator[tuple[int, Tensor]]:
        """The weights of a table in chunks: (first row, [n, dim])."""
        dim, rows = self._place(table)[0].dim, self.rows(table)
        return ((first, chunk[:, :dim].clone()) for first, chunk in rows)

    def weights_at(self, table: str, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The weights of some rows of a table, each given once, in chunks: (places, [n, dim]).

        Read where they are: no map, hold or counter changes.
        """
        group, _, size = self._place(table)
        rows = row_numbers(table, rows, size)
        step, dim = _chunk_of(group), group.dim

        def chunks() -> Iterator[tuple[slice, Tensor]]:
            for first in range(0, len(rows), step):
                mine = rows[first : first + step].cpu()
                yield slice(first, first + len(mine)), self._gather(table, mine)[:, :dim].clone()

        return chunks()

    def load_weights(self, table: str, first: int, weights: Tensor) -> None:
        """Replace the weights of rows `first`, `first + 1`, ...; their state stays."""
        group, _, size = self._place(table)
        first = whole("first", first)
        fits = weights.dim() == 2 and weights.shape[1] == group.dim
        if not fits or first < 0 or first + len(weights) > size:
            raise ValueError(
                f"table {table!r} has {size:,} rows of {group.dim} weights; "
                f"{list(weights.shape)} from row {first:,} on do not fit"
            )
        self._load(table, first, weights, slice(0, group.dim))

    def _load(self, table: str, first: int, values: Tensor, columns: slice) -> None:
        with self.lock.writing():
            group, base, _ = self._place(table)
            for chunk in torch.arange(len(values)).split(_chunk_of(group)):
                ids = chunk + first + base
                rows = group.gather(ids, out=torch.empty(ids.numel(), group.width))
                rows[:, columns] = values[chunk].detach().to(rows)
                group.scatter(ids, rows)
            self.lanes.read_here()  # who trains in another stream waits for these

    def _place(self, table: str) -> tuple[RowGroup, int, int]:
        for group in self.groups:
            for config, base in zip(group.layout.tables, group.layout.bases, strict=True):
                if config.name == table:
                    return group, base, config.num_embeddings
        raise KeyError(f"no table {table!r}; there are {few(t.name for t in self.tables)}")

    def copy_state(self, table: str) -> dict[str, Tensor]:
        """The optimizer state of a table's rows, a tensor for each piece."""
        group, _, size = self._place(table)
        state = {
            name: torch.empty(size, columns.stop - columns.start)
            for name, columns in group.state.items()
        }
        with self.reading():
            for first, rows in self.rows(table):
                for name, columns in group.state.items():
                    state[name][first : first + len(rows)] = rows[:, columns]
        return state

    def check_state(self, table: str, state: Mapping[str, Any]) -> None:
        group, _, size = self._place(table)
        foreign = [name for name in state if name != "step" and name not in group.state]
        if foreign:
            raise ValueError(
                f"table {table!r}: {type(self.optimizer.rule).__name__} has no state "
                f"{foreign[0]!r}; this state belongs to another optimizer"
            )
        for name, columns in group.state.items():
            shape = (size, columns.stop - columns.start)
            if name not in state or state[name].shape != shape:
                got = list(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"optimizer state {name!r} of table {table!r} must have shape "
                    f"{list(shape)}, got {got}"
                )

    def load_state(self, table: str, state: Mapping[str, Tensor]) -> None:
        for name, columns in self._place(table)[0].state.items():
            self._load(table, 0, state[name], columns)

    def check_thread(self, what: str) -> None:
        """Refuse what the current thread is about to do if another one trains."""
        self._finish_abandoned()
        self._thread.check(what)

    @property
    def is_trained_elsewhere(self) -> bool:
        """Whether another thread trains, or has trained and is alive."""
        return self._thread.is_elsewhere

    def settle(self) -> None:
        """`flush()`, and let the device come to rest: whoever reads `stored` need not ask it."""
        self.flush()
        if self.device.type == "cuda":
            synchronize(self.device)

    def stored(self, table: str) -> Tensor:
        """All rows of a table with their state where they lie, [rows, dim + state]: after
        `settle()` the newest ones, until the next step."""
        group, base, size = self._place(table)
        return group.store.rows[base : base + size]

    def state_widths(self, table: str) -> dict[str, int]:
        """How many numbers of each piece of optimizer state a row has behind its weights."""
        columns = self._place(table)[0].state
        return {name: each.stop - each.start for name, each in columns.items()}

    def why_no_snapshot(self) -> str | None:
        """Why rows cannot be read as they were while training goes on; None: they can."""
        reasons = (group.why_no_snapshot for group in self.every_group)
        return next((each for each in reasons if each is not None), None)

    def take_snapshots(self, log_bytes: int, *, only_changed: bool) -> list[Snapshot]:
        """After `settle()`: until `end_snapshots()`, `snapshot(table)` reads rows as they are now.
        Those that are replaced before go to logs of so many bytes together."""
        made = []
        for group in self.groups:
            store, changed = group.store, group.changed
            part = log_bytes * store.rows.nbytes // max(1, self.bytes_total)
            store.snapshot = Snapshot(
                store.rows,
                most=part // max(1, store.rows[:1].nbytes),
                only=changed.copy() if only_changed and changed is not None else None,
            )
            made.append(store.snapshot)
        return made

    def snapshot(self, table: str) -> tuple[Snapshot, int]:
        """What a table's rows are read from, and the id of its first."""
        group, base, _ = self._place(table)
        if group.store.snapshot is None:
            raise RuntimeError("take_snapshots() comes before snapshot()")
        return group.store.snapshot, base

    def end_snapshots(self) -> None:
        for group in self.groups:
            if group.store.snapshot is not None:
                group.store.snapshot.end()
                group.store.snapshot = None

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, what is written to `stored(table)` replaces rows with their state.

        No `hotrow.ahead` may be running.
        """
        self._refuse_if_running("replacing rows")
        if self.being_saved is not None:
            self.being_saved.join()
        with self.lock.writing():
            self.settle()
            try:
                yield
            finally:
                if self.device.type == "cuda":
                    synchronize(self.device)  # others may have written in their streams
                self._arrivals.clear()
                self.changed_since = None
                for group in self.every_group:
                    group.changed = group.store.touched = None
                    group.replaced()

    def note_changes(self) -> bool:
        """From now on remember, in a bit for each row, which were written, and forget what was
        remembered; False: this engine cannot."""
        if not all(group.notes_changes for group in self.every_group):
            return False
        with self.lock.writing():
            slots = self._slot_groups  # of two engines, the one that may write from a device
            for group in slots:
                group.note_changes()
            if self.device.type == "cuda":
                synchronize(self.device)  # whoever notes may do so in another stream
            if self._aside is not None:
                others = self.groups if self.is_on_host else self._aside.groups
                for group, other in zip(slots, others, strict=True):
                    other.changed = group.changed
        return True

    @property
    def notes_changes(self) -> bool:
        return all(group.changed is not None for group in self.groups)

    def changed_rows(self, table: str, first: int, last: int) -> Tensor:
        """Those of the rows first..last-1 that were written since `note_changes()`."""
        group, base, size = self._place(table)
        if not 0 <= first <= last <= size:
            raise ValueError(
                f"table {table!r} has rows 0 to {size - 1:,}, and not all from {first:,} to "
                f"{last - 1:,}"
            )
        if group.changed is None:
            raise RuntimeError("note_changes() comes before changed_rows()")
        return group.changed.between(base + first, base + last) - base

    def key_of(self, table: str) -> str:
        """What a table's weights are called in the state dict."""
        return f"{self._prefix}.{table}.weight"

    @contextmanager
    def rows_apart(self) -> Iterator[None]:
        """Inside, state dicts neither hold rows nor load any: they come by `weights`."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self.reading():  # all of one finished step
            for table in () if self._apart else self.tables:
                copy = torch.empty(table.num_embeddings, table.embedding_dim)
                for first, weights in self.weights(table.name):
                    copy[first : first + len(weights)] = weights
                destination[prefix + self.key_of(table.name)] = copy
        if self.tables and not self._apart and hasattr(destination, "_metadata"):
            # Weights that no update has changed can be loaded without row state.
            destination._metadata[prefix[:-1]][_UPDATES] = max(self.optimizer.steps)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tables = () if self._apart else self.tables
        names = {prefix + self.key_of(table.name): table for table in tables}
        for key, table in names.items():
            shape = (table.num_embeddings, table.embedding_dim)
            if key not in state_dict:
                missing_keys.append(key)
            elif tuple(state_dict[key].shape) != shape:
                error_msgs.append(
                    f"{key}: its shape is {list(state_dict[key].shape)}, the table's {list(shape)}"
                )
            else:
                self.load_weights(table.name, 0, state_dict[key])
                if local_metadata.get(_UPDATES) != 0:
                    self.optimizer.weights_loaded()
        unexpected_keys.extend(
            key for key in state_dict if key.startswith(prefix) and key not in names
        )

    # -- what it is, and what it did ---------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Rows that fit fast memory."""
        return sum(len(group.slots) - 1 for group in self.every_group)

    def memory(self) -> dict[str, int]:
        """Bytes of fast memory by part."""
        parts: dict[str, int] = {}
        for group in self.every_group:
            for name, size in group.memory().items():
                parts[name] = parts.get(name, 0) + size
            if group.frozen is not None and group.frozen.device == self.device:
                name = "which rows are frozen"
                parts[name] = parts.get(name, 0) + group.frozen.nbytes
        if self.window_bytes and not any(g.plans_later for g in self._slot_groups):
            parts["look-ahead ids"] = self.window_bytes
        return parts

    def fills(self) -> dict[int, Any]:
        """How rows move on a GPU, by width: the form, why, and what was measured."""
        found = {group.dim: group.fill_choice for group in self._slot_groups}
        return {dim: choice for dim, choice in found.items() if choice is not None}

    def traffic(self) -> Traffic:
        """What was looked up and moved so far, in training; waits for the device."""
        self.lanes.join()
        counted = {table.name: TableTraffic() for table in self.tables}
        for group in self.every_group:
            each_of = (group.layout.tables, group.traffic.tolist(), group.loaded.tolist())
            for table, (lookups, unique, fetched, evicted), loaded in zip(*each_of, strict=True):
                came, left = group.bytes_of(fetched, evicted, loaded)
                more = TableTraffic(lookups, unique, fetched, evicted, came, left, loaded)
                counted[table.name] += more
        chunked = max(group.direct_batches for group in self.every_group)
        made = sum(group.made_rows() for group in self.every_group)
        return Traffic.of(counted, chunked, made)

    def chunk_seconds(self) -> float:
        """What the host has spent on lookups and updates of batches that passed in chunks."""
        return sum(group.chunk_time.seconds for group in self.every_group)

    def remedy_for_chunks(self) -> str:
        """What would have held the batches that passed in chunks; empty if none did."""
        short = [group for group in self.every_group if group.needed_slots]
        if not short:
            return ""
        return max(short, key=lambda x: x.needed_slots / x.pad.num_slots).remedy("them")

    def check(self) -> None:
        """Prove the maps consistent; for tests and long runs."""
        for group in self.every_group:
            group.check()

    def extra_repr(self) -> str:
        return (
            f"tables={[table.name for table in self.tables]}, rows={self.num_rows:,}, "
            f"slots={self.num_slots:,}, strategy={self.strategy.name!r}"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            "a collection cannot be copied: its tables may fill the machine's memory, and the "
            "copy would train on its own. Build a second one, or pass weights by state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a collection cannot be pickled; save state_dict() or stream weights(table)"
        )


class EmbeddingCollection(EmbeddingBagCollection):
    """One vector per lookup, without pooling: what sequence models need."""

    _prefix = "embeddings"

    def __init__(self, tables: Sequence[EmbeddingBagConfig], *args: Any, **kwargs: Any) -> None:
        unpooled = [replace(table, pooling="none") for table in _listed(tables)]
        super().__init__(unpooled, *args, **kwargs)


def _gone() -> None:
    """Stand in for the weak reference to an iterator that has left."""


def _listed(tables: Any) -> tuple[EmbeddingBagConfig, ...]:
    listed = tuple(tables) if isinstance(tables, Iterable) else (tables,)
    wrong = [each for each in listed if not isinstance(each, EmbeddingBagConfig)]
    if wrong or not isinstance(tables, Iterable):
        kind = type(wrong[0] if wrong else tables).__name__
        raise TypeError(
            "tables must be a list of hotrow.EmbeddingBagConfig, such as "
            f"tables=[hotrow.EmbeddingBagConfig(...)]; got {'' if wrong else 'one '}{kind}"
        )
    return listed


def _setting_for(
    share: Callable[[int], Budget],
    budget_bytes: int,
    all_rows: int,
    as_share: bool,
    group: int,
    slots: int,
    instead_of: int,
) -> str:
    """What gives a group so many slots, as its user would write it."""
    wanted = larger_budget(share, budget_bytes, group, slots, instead_of)
    if wanted > _NEARLY_ALL * all_rows:
        return setting("strategy", "all-fast")
    return setting("budget", write_budget(wanted, total=all_rows if as_share else None))


def row_numbers(table: str, given: Tensor, size: int) -> Tensor:
    """Row numbers, from those or from a mask; refuses what a table of so many rows has not."""
    if given.dtype == torch.bool and given.shape == (size,):
        return given.nonzero().squeeze(1)
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"table {table!r}: rows must be row numbers (one dimension, int64) or a mask with a "
            f"bool for each of its {size:,} rows; got {given.dtype} of shape {list(given.shape)}"
        )
    if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < size:
        bad = given[(given < 0) | (given >= size)][0]
        raise ValueError(f"table {table!r} has rows 0 to {size - 1:,}, and no row {int(bad):,}")
    return given.long()


def _with_padding(rows: Mapping[str, Tensor], layout: WidthGroup) -> dict[str, Tensor]:
    """Leave out rows that bags skip; put padding that is read first, as most samples read it."""
    found = dict(rows)
    for table in layout.tables:
        mine = found.get(table.name, torch.empty(0, dtype=torch.int64))
        if table.padding_idx is not None:
            mine = mine[mine != table.padding_idx]
        if table.untrained_idx is not None:
            mine = torch.cat([torch.tensor([table.untrained_idx]), mine])
        if table.name in found or len(mine):
            found[table.name] = mine
    return found


def _first_of_each(numbers: Tensor) -> Tensor:
    """Without those that came before, in the same order."""
    order = numbers.sort(stable=True)[1]
    ordered = numbers[order]
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return numbers[order[is_first].sort()[0]]


def _interleaved(lists: Sequence[Tensor]) -> Tensor:
    """All of several lists, by their place in their own, as a part of its length."""
    if not lists:
        return torch.empty(0, dtype=torch.int64)
    places = [(torch.arange(len(each)) + 0.5) / max(1, len(each)) for each in lists]
    return torch.cat(list(lists))[torch.cat(places).sort(stable=True)[1]]


def _chunk_of(group: RowGroup) -> int:
    """Rows that are read or replaced at once: as many as the buffer holds, but not few."""
    return max(group.chunk_rows, _LEAST_CHUNK)


def _share_of(
    layouts: Sequence[WidthGroup],
    row_bytes: list[int],
    parts: Callable[[int], list[float]],
    buffer_part: float,
    total: int,
) -> Budget:
    return share_out(
        total,
        row_bytes=row_bytes,
        num_rows=[each.num_rows for each in layouts],
        parts=parts(total),
        buffer_part=buffer_part,
    )


def _always(parts: list[float], total: int) -> list[float]:
    return parts


def usable_device(device: torch.device) -> torch.device:
    """The device with its number, if rows can live there."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device '{device}' is not supported; use 'cuda' or 'cpu'")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device '{device}': torch {torch.__version__} sees no CUDA device; `hotrow doctor` "
            "says what this machine has. device='cpu' works anywhere"
        )
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}': there are {torch.cuda.device_count()} CUDA devices, from 0 on"
        )
    capability = torch.cuda.get_device_capability(number)
    if capability < _OLDEST_CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name(number)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need "
            f"{_OLDEST_CAPABILITY[0]}.{_OLDEST_CAPABILITY[1]} or later. device='cpu' works anywhere"
        )
    return torch.device("cuda", number)


def _check_room(device: torch.device, wanted: int) -> None:
    free, total = torch.cuda.mem_get_info(device)
    # What torch keeps for itself can be used again.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted > free:
        raise ValueError(
            f"{show_bytes(wanted)} of rows and what belongs to them do not fit {device}: "
            f"{show_bytes(free)} of its {show_bytes(total)} are free. Give a smaller budget, such "
            f"as budget='{max(1, int(free * 0.8 / 2**20))}MiB', or free memory"
        )


def _engine(device: torch.device) -> Any:
    """What keeps rows on a device. Not at import: Triton takes as long as all of hotrow."""
    if device.type == "cpu":
        return RowGroup
    try:
        from hotrow.engine.gpu.rows import DeviceRows
    except ImportError as error:
        raise RuntimeError(
            f"rows on a GPU need Triton, which cannot be imported ({error}); "
            "`pip install triton` brings it. device='cpu' works without"
        ) from error
    return DeviceRows


def _drawn_seed() -> int:
    """Draw a seed from torch's default generator, as nn.Embedding draws its weights."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _check_arguments(
    seed: object,
    optimizer: object,
    on_nonfinite: str,
    output_dtype: torch.dtype,
) -> None:
    if output_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"output_dtype must be torch.float32 or torch.bfloat16, not {output_dtype}"
        )
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, not {seed!r}")
    if not isinstance(optimizer, RowRule):
        is_class = isinstance(optimizer, type)
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(
            "optimizer must be one of hotrow's, such as hotrow.Adam(lr=0.001); got "
            f"{'the class ' if is_class else ''}{kind.__module__}.{kind.__qualname__}"
        )
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(
            f"on_nonfinite must be one of {', '.join(ON_NONFINITE)}, not {on_nonfinite!r}"
        )


@cache
def _hear_of_freezing() -> None:
    """Let `requires_grad_` of any module reach the collections in it.

    torch's own reaches parameters only, and a collection has none, so that
    `model.requires_grad_(False)` would silently leave the rows unfrozen. Other modules are
    handled as before.
    """
    of_torch = nn.Module.requires_grad_

    @wraps(of_torch)
    def requires_grad_(self: nn.Module, requires_grad: bool = True) -> nn.Module:
        for module in self.modules():
            if isinstance(module, EmbeddingBagCollection) and module is not self:
                module.requires_grad_(requires_grad)
        return of_torch(self, requires_grad)

    nn.Module.requires_grad_ = requires_grad_  # type: ignore[assignment, method-assign]


@cache
def _leave_out_of_graphs() -> None:
    """torch.compile runs lookups as they are. Not at import: it would double the time of that."""
    untraced = torch.compiler.disable(EmbeddingBagCollection.forward)
    EmbeddingBagCollection.forward = untraced  # type: ignore[method-assign]
    # What torch imports here leaves a ring of frames, up to whoever builds this process's first
    # collection: that one, and with it all of its rows, would stay for as long as nobody collects.
    gc.collect()


def _refuse_replicas() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise RuntimeError(
                f"a process group of {size} ranks is running; each rank would train its own "
                "copy of the rows and they would silently diverge. This version trains on one "
                "device: run one process"
            )
