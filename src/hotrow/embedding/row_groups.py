"""The rows of a collection: one group per width, and the engine that keeps them.

Switches between two engines over one store, and finds the rows of a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.exchange import Exchange
from hotrow.distributed.ranks import Ranks
from hotrow.distributed.shared_rows import SharedRows
from hotrow.embedding.arguments import row_numbers
from hotrow.embedding.optimizer import RowOptimizer
from hotrow.engine.gpu.plan_room import make_room
from hotrow.engine.host.rows import HostRows, host_rows_engine
from hotrow.engine.idle import advance, freeze
from hotrow.engine.row_sums import WAITING
from hotrow.engine.rows import RowGroup, cpu_rows
from hotrow.engine.strategy import Strategy
from hotrow.inputs.batch import Lookups, no_lookups
from hotrow.inputs.tables import EmbeddingBagConfig
from hotrow.kernels.rules import RowRule
from hotrow.store.traffic import TableTraffic, Traffic
from hotrow.support.messages import few
from hotrow.support.streams import Lanes, synchronize
from hotrow.support.threads import RowLock

# Rows of one width. They move to fast memory, or stay on the host; both have one face.
Group = RowGroup | HostRows
Engine = Callable[..., Group]  # called as `GroupBuilder.build` calls it, once per width
_CHUNK_BYTES = 64 << 20  # of rows that are copied at once


def engine_for(device: torch.device, strategy: Strategy) -> Engine:
    """Return what keeps rows on a device. Imports Triton late: that takes a second."""
    if strategy.on_host:
        return host_rows_engine
    if device.type == "cpu":
        return cpu_rows
    try:
        from hotrow.engine.gpu.rows import gpu_rows
    except ImportError as error:
        raise RuntimeError(
            f"rows on a GPU need Triton, which cannot be imported ({error}); "
            "`pip install triton` brings it. device='cpu' works without"
        ) from error
    return gpu_rows


@dataclass(frozen=True)
class InactiveEngine:
    """The engine of two over the same rows that does not train now."""

    groups: Sequence[Group]
    strategy: Strategy
    budget_bytes: int


class RowGroups:
    """The groups of the engine that trains, and of the inactive one if there are two.

    The parts of a collection share this object. None of them refers to the collection itself, so
    that the memory of a collection is freed with the last reference to it.
    """

    groups: Sequence[Group]
    # What batches are looked up in: the groups themselves, or on several ranks the rows of all.
    lookup_groups: Sequence[Any]
    strategy: Strategy
    num_rows: int
    bytes_total: int  # of all rows with their state
    build_again: Callable[[], RowGroups]
    build_replicas: Callable[[Sequence[SharedRows]], list[Group]]  # those that are chosen now

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizer,
        device: torch.device,
        lanes: Lanes,
        lock: RowLock,
        window_bytes: int,  # of the budget, for ids of batches that are known ahead
    ) -> None:
        self.tables, self.optimizer, self.device = tables, optimizer, device
        self.lanes, self.lock, self.window_bytes = lanes, lock, window_bytes
        self.budget_bytes = 0  # of which plans take a part; 0: slots are allocated
        self.exchange: Exchange | None = None  # with other ranks
        self.is_alone = False  # the process group that was chosen has this rank only
        self.inactive: InactiveEngine | None = None
        self.is_fresh = True  # every row is as it starts; False: perhaps not
        self.version = 0  # how often rows were updated or replaced
        self.steps = 0  # how often they were updated: the same on all ranks
        self.sums_wait = False  # gradients of rows wait for an optimizer's step
        self.waiting_bytes = 0  # of them, at the most so far
        self.counts_sums = False  # the budget has room for them, which a CPU's has not
        self.whole_bytes = 0  # of the budget, for copies of whole tables and their gradients
        self.room_for_replicas: Mapping[int, int] = {}  # rows of each width that all ranks can have
        self.replica_choices = 0  # how often others were chosen

    def has_state_of(self, rule: RowRule) -> bool:
        """Whether rows have the state of a rule, as it starts."""
        rules = (rule, self.optimizer.rule)
        return len({(type(x), x.state_names, x.start_of_state()) for x in rules}) == 1

    def use_rule(self, rule: RowRule) -> None:
        """Let rows have the state of another rule, as it starts. Nothing may be in flight."""
        if not (has_state := self.has_state_of(rule)):
            advance(self.groups)
        self.optimizer.change_rule(rule)
        if has_state:
            return
        with self.lock.writing():
            self.flush()
            self.wait_for_device()
            others = self.build_again()
            if not self.is_fresh:
                for old, new in zip(self.groups, others.groups, strict=True):
                    _copy_weights(old, new)
            for old, new in zip(self.groups, others.groups, strict=True):
                new.freeze(old.store.frozen)
            shared = self.lookup_groups
            self.activate(others.groups, others.strategy)
            if self.exchange is not None:
                self.share_out(shared, self.groups)
            self.budget_bytes, self.window_bytes = others.budget_bytes, others.window_bytes
            self.bytes_total, self.build_again = others.bytes_total, others.build_again

    def activate(self, groups: Sequence[Group], strategy: Strategy) -> None:
        self.groups, self.strategy = groups, strategy
        self.lookup_groups = groups

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have a part of the rows each."""
        return self.exchange is not None

    def share_out(self, shared: Sequence[SharedRows], groups: Sequence[Group]) -> None:
        """Look batches up in rows that ranks share; `groups` are this rank's: those that it owns,
        one for each width, and then those of replicas."""
        self.groups, self.lookup_groups = groups, shared
        replicas = iter(groups[len(shared) :])
        for group, inner in zip(shared, groups, strict=False):
            group.use(inner, None if group.replicated is None else next(replicas))

    def check_call(self, call: str) -> None:
        """Raise on all ranks if they do not call a method alike."""
        if self.exchange is not None:
            self.exchange.check_call(call)

    @property
    def owned_groups(self) -> Sequence[Group]:
        """The groups of the rows that are planned: on several ranks, without replicas."""
        return self.groups[: len(self.lookup_groups)]

    def replicas_of(self, table: str, rows: Tensor) -> tuple[Group, Tensor, Tensor] | None:
        """Return the group of a table's replicated rows, the places of those among `rows`, and
        their ids in the group; None: none of the table's is replicated."""
        for shared in self.lookup_groups:
            names = [x.name for x in shared.layout.tables]
            if table in names and getattr(shared, "replicas", None) is not None:
                way = shared.route(rows + shared.layout.bases[names.index(table)])
                return shared.replicas, way.here, way.replicas
        return None

    def write_back_replicas(self) -> None:
        """Bring the owners' copies of replicated rows up to date."""
        for shared in self.lookup_groups:
            if getattr(shared, "replicas", None) is not None:
                replicas = torch.arange(len(shared.replicated))
                changed = shared.replicas.store.changed
                if changed is not None:  # the others are as they were when changes began to count
                    replicas = changed.between(0, len(replicas))
                owners, numbers = shared.owners.find(shared.replicated[replicas])
                assert self.exchange is not None
                mine = owners == self.exchange.ranks.rank
                rows = torch.empty(int(mine.sum()), shared.width)
                shared.inner.scatter(numbers[mine], shared.replicas.gather(replicas[mine], rows))

    def refresh_replicas(self) -> None:
        """Read all replicated rows from their owners, which have got others. All ranks do it."""
        for place, shared in enumerate(self.lookup_groups):
            if getattr(shared, "replicas", None) is not None:
                assert self.exchange is not None
                rows = self.exchange.reads.rows(place, shared.replicated, of_owners=True)
                shared.replicas.scatter(torch.arange(len(rows)), rows)

    def share(self, ranks: Ranks | None, process_group: Any) -> None:
        """Exchange rows with other ranks from now on, if there are any."""
        if ranks is None:
            self.is_alone = process_group is not None
            return
        names = [table.name for table in self.tables]
        groups, writing = self.lookup_groups, self.lock.writing
        self.exchange = Exchange(ranks, groups, names, self.lanes, writing, self)

    def ids_of(self, table: str, rows: Tensor) -> tuple[Group, Tensor | None, Tensor]:
        """Return the group of a table, which of some of its rows are here (None: all of them), and
        the ids of these."""
        group, base, _ = self.find(table)
        if self.exchange is None:
            return group, None, rows + base
        shared = self.lookup_groups[self.place_of(table)]
        place = [x.name for x in group.layout.tables].index(table)
        mine, ids = shared.owners.own_numbers(self.exchange.ranks.rank, place, rows)
        return group, mine, ids

    def size_of(self, table: str) -> int:
        """Return the number of rows of a table, on all ranks."""
        self.find(table)  # raises if there is none
        return next(x.num_embeddings for x in self.tables if x.name == table)

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has sent to others, by kind."""
        sent = {} if self.exchange is None else self.exchange.wire.sent
        return {kind: sent.get(kind, 0) for kind in ("ids", "rows", "early rows", "grads", "pins")}

    def switch(self) -> int:
        """Let the inactive engine train; return the bytes of the rows that are in slots."""
        other = self.inactive
        assert other is not None
        self.inactive = InactiveEngine(self.groups, self.strategy, self.budget_bytes)
        for group, before in zip(other.groups, self.groups, strict=True):
            group.active, before.active = True, False
        self.budget_bytes = other.budget_bytes
        if self.exchange is None:
            self.activate(other.groups, other.strategy)
        else:  # other threads go on looking up in the rows of all ranks
            self.strategy = other.strategy
            self.share_out(self.lookup_groups, other.groups)
        return sum(4 * group.width * group.count_resident() for group in self.slot_groups)

    @property
    def can_resize(self) -> bool:
        """Whether slots can still become more or fewer: they are not allocated."""
        if self.budget_bytes and not all(group.plan_room.is_open for group in self.owned_groups):
            self.budget_bytes = 0
        return bool(self.budget_bytes)

    def make_room(self, lookups: Sequence[int]) -> None:
        """Let slots give way to the plans of batches with so many lookups in each group."""
        if self.can_resize:
            rooms: list[Any] = [group.plan_room for group in self.owned_groups]
            last = max(stage.cycle for stage in self.strategy.timed_stages)
            sizes = [max(1, count) for count in lookups]
            make_room(rooms, sizes, self.budget_bytes, last_cycle=last, sums_wait=self.sums_wait)
            self.counts_sums = self.sums_wait

    def allocate_slots(self) -> None:
        for group in self.groups:
            group.plan_room.allocate()

    def useful_depth(self) -> int:
        """Return how many batches ahead are worth knowing, within the budget's bytes for ids."""
        every = [group.planning.depth() for group in self.owned_groups]
        depths = [depth for depth in every if depth is not None]
        limits = [depth.limit for depth in depths if depth.limit is not None]
        if limits:  # planners of a device, which keep ids themselves and look through all of them
            return int(max(0, min(*limits, *(depth.useful for depth in depths))))
        bytes_per_batch = sum(depth.bytes_per_batch for depth in depths)
        affordable = self.window_bytes // max(1, bytes_per_batch)
        return int(min(affordable, max((depth.useful for depth in depths), default=0)))

    @property
    def is_on_host(self) -> bool:
        """Whether the CPU trains rows that have slots: after `train_on_host()`."""
        return self.inactive is not None and self.inactive.strategy.has_slots

    @property
    def every_group(self) -> list[Group]:
        """The groups of both engines."""
        return [*self.groups, *([] if self.inactive is None else self.inactive.groups)]

    @property
    def num_slots(self) -> int:
        """The slots of both engines, without those of replicas."""
        replicas = self.groups[len(self.lookup_groups) :]
        slots = sum(group.num_slots for group in self.every_group)
        return slots - sum(group.num_slots for group in replicas)

    @property
    def slot_groups(self) -> Sequence[Any]:
        """The groups of the engine that has slots, if there are two; without replicas."""
        if self.inactive is not None and self.inactive.strategy.has_slots:
            return self.inactive.groups
        return self.owned_groups

    def find(self, table: str) -> tuple[Group, int, int]:
        """Return the group of a table, the id of its first row in the group, and its size."""
        for group in self.groups:
            for config, base in zip(group.layout.tables, group.layout.bases, strict=True):
                if config.name == table:
                    return group, base, config.num_embeddings
        raise KeyError(f"no table {table!r}; there are {few(t.name for t in self.tables)}")

    def place_of(self, table: str) -> int:
        """Return the place of a table's width. Other threads may ask while engines change."""
        self.find(table)  # raises if there is none
        names = [[config.name for config in group.layout.tables] for group in self.lookup_groups]
        return next(place for place, of_width in enumerate(names) if table in of_width)

    def turn(self, lookups: int, *, beside_training: bool) -> AbstractContextManager[object]:
        """Return `RowLock.turn`; of ranks none, as it could wait for one held on another rank."""
        if self.is_shared:
            return nullcontext()
        return self.lock.turn(lookups, beside_training=beside_training)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, no other thread changes rows, and every row can be found."""
        while True:
            with self.lock.reading():
                if all(group.is_settled for group in self.groups):
                    self.lanes.join()  # this thread waits for what others have launched
                    try:
                        yield
                    finally:
                        self.lanes.read_here()
                    return
            with self.lock.writing():
                for group in self.groups:
                    group.settle()

    def read_vectors(self, lookups: Sequence[Lookups], *, aside: bool = False) -> list[Tensor]:
        """Read the bags of each group as of one finished step; change no map, hold or counter.
        `aside`: from a thread beside the one that trains."""
        if self.exchange is not None:
            return self.exchange.reads.vectors(lookups, aside=aside)
        while True:
            groups = self.groups
            parts = [group.parts_of(x) for group, x in zip(groups, lookups, strict=True)]
            with self.reading():
                if self.groups is groups:  # the other engine may have begun to train
                    pairs = zip(groups, parts, strict=True)
                    return [group.read_parts(part) for group, part in pairs]

    def read_table(self, table: str, lookups: Callable[[Group], Lookups], *, aside: bool) -> Tensor:
        """Read bags of one table as `read_vectors` does."""
        if self.exchange is not None:
            place = self.place_of(table)
            every = [no_lookups(len(x.layout.features), x.device) for x in self.lookup_groups]
            every[place] = lookups(self.lookup_groups[place])
            return self.exchange.reads.vectors(every, aside=aside)[place]
        while True:
            groups, group = self.groups, self.find(table)[0]
            parts = group.parts_of(lookups(group))
            with self.reading():
                if self.groups is groups:
                    return group.read_parts(parts)

    def freeze(self, rows: Mapping[str, Tensor] | None) -> None:
        """Freeze rows by table, and no others; None: forget the bits as well."""
        ids: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int64)] for _ in self.groups]
        for table, numbers in ({} if rows is None else rows).items():
            numbers = row_numbers(table, numbers, self.size_of(table)).cpu()
            group, _, mine = self.ids_of(table, numbers)
            ids[self.groups.index(group)].append(mine)
            copies = self.replicas_of(table, numbers)
            if copies is not None:
                ids[self.groups.index(copies[0])].append(copies[2])
        with self.lock.writing():
            for group, frozen in zip(self.groups, ids, strict=True):
                freeze(group, None if rows is None else torch.cat(frozen).unique())

    def memory(self) -> dict[str, int]:
        """Return the bytes of fast memory by part."""
        parts: Counter[str] = Counter()
        replicas = self.groups[len(self.lookup_groups) :]
        for group in self.every_group:
            held = group.num_bytes()
            parts.update({"replicated rows": sum(held.values())} if group in replicas else held)
        for shared in self.lookup_groups if self.is_shared else ():
            parts.update(shared.capture.num_bytes())
        for frozen in {id(group.store): group.store.frozen.bits for group in self.groups}.values():
            if frozen is not None and frozen.device == self.device:
                parts["which rows are frozen"] += frozen.nbytes
        if self.counts_sums:
            parts[WAITING] = max(parts[WAITING], self.waiting_bytes)
        if self.whole_bytes:
            parts["copies of whole tables"] += self.whole_bytes
        return dict(parts)

    def traffic(self) -> Traffic:
        """Return what was looked up and moved so far; waits for the device."""
        self.lanes.join()
        counted = {table.name: TableTraffic() for table in self.tables}
        for group in self.every_group:
            counters = group.counters
            loads = counters.loaded_by_table.tolist()
            counts = (group.layout.tables, counters.by_table.tolist(), loads)
            for table, (lookups, unique, fetched, evicted), loaded in zip(*counts, strict=True):
                came, left = counters.bytes_of(fetched, evicted, loaded)
                more = TableTraffic(lookups, unique, fetched, evicted, came, left, loaded)
                counted[table.name] += more
        chunked = max(group.counters.direct_batches for group in self.every_group)
        made = sum(group.counters.made_rows() for group in self.every_group)
        return Traffic.of(counted, chunked, made)

    def flush(self) -> None:
        """Bring slow memory up to date with fast memory."""
        with self.lock.writing():
            self.write_back_replicas()
            for group in self.groups:
                group.flush()

    def wait_for_device(self) -> None:
        """Wait for all streams of a GPU: rows may have been written in any of them."""
        if self.device.type == "cuda":
            synchronize(self.device)


def _copy_weights(old: Group, new: Group) -> None:
    """Copy the weights of all rows from one engine to another."""
    step = max(1, _CHUNK_BYTES // (4 * new.width))
    for first in range(0, old.layout.num_rows, step):
        ids = torch.arange(first, min(first + step, old.layout.num_rows))
        rows = new.gather(ids, out=torch.empty(len(ids), new.width))
        rows[:, : old.dim] = old.gather(ids, out=torch.empty(len(ids), old.width))[:, : old.dim]
        new.scatter(ids, rows)
