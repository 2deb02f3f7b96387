"""What the ranks of one collection exchange: ids ahead of training, vectors, gradients.

```
rank    sort, route -> |ids|                  |vectors| -> pool, train, sum by row -> |sums|
owner                  |ids| -> plan, fill -> |vectors|                               |sums| -> step
```
A row crosses once per rank and batch, however often the rank looks it up. Gradients of a row are
added in the order of ranks, so their sum depends on neither strategy nor budget.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from hotrow.distributed.early_rows import EarlyRows
from hotrow.distributed.owners import Route
from hotrow.distributed.ranks import (
    CALLS,
    DEPTH,
    ENDED,
    ERROR,
    HAS_EARLY,
    HAS_GRADS,
    JOINS,
    READS_AHEAD,
    SAME,
    SENDS_EARLY,
    SERIAL,
    SETTLES,
    STATUS,
    Channel,
    Header,
    Headers,
    Op,
    RankError,
    Ranks,
)
from hotrow.distributed.reads import Reads, Rows
from hotrow.distributed.shared_rows import SharedRows, SharedWork
from hotrow.distributed.whole_batches import check_equal
from hotrow.distributed.wire import Wire, swap_copied
from hotrow.engine.schedule import at_once
from hotrow.inputs.batch import BadId, no_lookups
from hotrow.kernels import reference
from hotrow.kernels.reference import SortedIds, sort_ids
from hotrow.support.streams import Lanes

_BITS = 62  # tables in a word of a header
_KEPT = 8  # batches whose vectors are kept after they came
# What a rank says of its gradients: the number of a batch if they are those of all its rows, -1
# less that number if of some of its rows, or one of these. A rank that only serves says nothing,
# which is the former.
_OTHER_ROWS, _NO_ROWS = 0, -1
_TOLD = "is known on all ranks"


OnGrads = Callable[[Sequence["OwnGrads"], Collection[str], Sequence[int]], None]


class RuleSettings(Protocol):
    """The settings of an optimizer's rule, table by table, as plain values."""

    def numbers(self) -> list[dict[str, Any]]: ...

    def used(self, numbers: list[dict[str, Any]] | None) -> AbstractContextManager[None]: ...


class Shared(NamedTuple):
    """A batch as all ranks know it: its serial number, and the work of each width."""

    serial: int
    works: tuple[SharedWork, ...]


@dataclass(frozen=True)
class _Announced:
    """A rank's part in an exchange of ids."""

    works: Sequence[SharedWork]
    places: Sequence[int]  # of their groups
    error: Exception | None
    ended: bool
    same_as: int


@dataclass(frozen=True)
class Grads:
    """Gradients of the rows of one width."""

    ids: Tensor  # each once, ascending
    sums: Tensor  # [n, dim]
    work: Any = None  # the batch, if all rows are of one


@dataclass(frozen=True)
class OwnGrads:
    """Gradients of the rows that this rank owns, from all ranks."""

    place: int  # of the group
    work: Any  # the engine's work whose lookups have these gradients; None: rows have them
    ids: Tensor  # of rows, each once; empty with a work
    grads: Tensor


class Exchange:
    """What one collection exchanges with its copies on other ranks."""

    def __init__(
        self,
        ranks: Ranks,
        groups: Sequence[SharedRows],
        tables: Sequence[str],
        lanes: Lanes,
        writing: Callable[[], AbstractContextManager[object]],
        rows: Rows,
    ) -> None:
        """`writing`: inside, no other thread changes rows. `rows` own this object."""
        self.ranks, self.groups, self._tables = ranks, tuple(groups), tuple(tables)
        self._lanes, self._writing = lanes, writing
        if len(self.groups) > _BITS:
            raise ValueError(
                f"several ranks share tables of at most {_BITS} widths in a collection"
            )
        self.wire = Wire(ranks, self.groups)
        self.early = EarlyRows(self.wire, lanes, writing)
        self.reads = Reads(self.wire, rows, self.settle_before_reading)
        self._mask_words = -(-len(tables) // _BITS)
        words = 1 + self._mask_words + 3 * len(self.groups)
        self.number = self.reads.number = ranks.add(self, words)
        self._serial = 0  # of batches
        self._steps = 0  # of exchanges of gradients
        self.passes = 0  # those in which some rank had any
        self.agreed_depth = 0
        # Weak references: their objects own this one.
        self._propose_depth: Callable[[], Callable[[], int] | None] = lambda: None
        self._on_grads: Callable[[], OnGrads | None] = lambda: None
        self._settings: Callable[[], RuleSettings | None] = lambda: None
        self.owes_grads = False  # vectors came, and gradients were not exchanged since
        self.is_accumulating = False  # gradients will be exchanged at the end of accumulate()
        self.is_joined = False  # inside of hotrow.join
        # Batches that other ranks train without this one, by their serial numbers.
        self._foreign: dict[int, Shared] = {}
        self._fetched: deque[Shared] = deque()
        # Batches that were read ahead, whose early rows can be sent, by their serial numbers.
        self._ahead: dict[int, Shared] = {}

    def serve(self, propose_depth: Callable[[], int]) -> None:
        """Take the method that says how many batches are worth knowing ahead."""
        self._propose_depth = weakref.WeakMethod(propose_depth)

    def update_by(self, on_grads: OnGrads, settings: RuleSettings) -> None:
        """Take the method that updates rows from gradients of all ranks, and what has the settings
        of these updates."""
        self._on_grads, self._settings = weakref.WeakMethod(on_grads), weakref.ref(settings)

    def join(self, joins: bool) -> None:
        """Let ranks have different numbers of batches from now on, or no longer."""
        self.is_joined = joins
        self._foreign.clear()
        self.forget_ahead()

    def _run(self, header: Header, task: Any, channel: Channel | None = None) -> Any:
        return self.ranks.run(header, task, channel)

    def perform(
        self, op: Op, headers: Headers, doers: list[bool], task: Any, channel: Channel
    ) -> Any:
        """Take part in what ranks do together; `task` is None where this rank only serves."""
        if op is Op.BATCH:
            return self._perform_batch(headers, doers, task)
        if op is Op.ROWS:
            return self._perform_rows(headers, doers, task)
        if op is Op.GRADS:
            return self._perform_grads(headers, task)
        if op is Op.READ:
            return self.reads.perform(headers, doers, task, channel)
        if op is Op.PART:
            return _samples_of(headers, doers), headers.column(STATUS)
        return self._perform_check(headers, task, channel)

    # -- ids ---------------------------------------------------------------------------

    def announce(
        self,
        works: Sequence[SharedWork] = (),
        *,
        error: Exception | None = None,
        ended: bool = False,
        same_as: int = 0,
        is_ahead: bool = False,
    ) -> Shared | None:
        """Send the ids of a batch to the owners of their rows, and get what ranks ask of this one.
        `is_ahead`: it will be in its slots while the one before trains.

        Raises on all ranks if one of them has an error. None: all ranks have `ended`, or all look
        up the batch `same_as` again.
        """
        self.settle_grads()
        places = [self.groups.index(work.group) for work in works]
        status = ERROR * (error is not None) | ENDED * ended | JOINS * self.is_joined
        status |= READS_AHEAD * is_ahead
        counts = [[0] * len(self.groups) for _ in range(self.ranks.size)]
        for place, work in zip(places, works, strict=True):
            for rank, count in enumerate(work.route.counts):
                counts[rank][place] = count
        propose_depth = self._propose_depth()
        depth = 0 if propose_depth is None else propose_depth()
        header = Header(
            Op.BATCH, self.number, self._serial + 1, status, depth, same_as,
            words=[sum(1 << place for place in places)], counts=counts,
        )  # fmt: skip
        task = _Announced(works, places, error, ended, same_as)
        try:
            result: Shared | None = self._run(header, task)
        except Exception as raised:
            raised.__dict__[_TOLD] = True
            raise
        return result

    def _perform_batch(
        self, headers: Headers, doers: list[bool], task: _Announced | None
    ) -> Shared | None:
        self._serial += 1
        self.agreed_depth = min(
            depth for depth, does in zip(headers.column(DEPTH), doers, strict=True) if does
        )
        if headers.with_status(ERROR):
            error = None if task is None else task.error
            _raise_first(error, headers.with_status(ERROR)[0], self.ranks)
        ended = {*headers.with_status(ENDED), *_others(doers)}
        if len(ended) == self.ranks.size:
            return None
        same = {value for value, does in zip(headers.column(SAME), doers, strict=True) if does}
        if len(same) == 1 and 0 not in same:
            return None
        if ended and len(headers.with_status(JOINS)) + doers.count(False) < self.ranks.size:
            _raise_ended(sorted(ended), self.ranks.size)
        return self._swap_ids(headers, doers, task)

    def _swap_ids(self, headers: Headers, doers: list[bool], task: _Announced | None) -> Shared:
        groups, size = self.groups, self.ranks.size
        masks = {headers.words(r, 0, 1)[0] for r in range(size) if doers[r]}
        masks -= {0} if len(masks) > 1 else set()  # a rank without a batch looks nothing up
        if len(masks) != 1:
            raise RankError("ranks look up modules of different widths at the same time")
        mask = masks.pop()
        places = [place for place in range(len(groups)) if mask >> place & 1]
        theirs = [headers.words(r, 1, len(groups)) for r in range(size)]
        by_place = {} if task is None else dict(zip(task.places, task.works, strict=True))
        routes = {place: work.route for place, work in by_place.items()}
        numbers = self.wire.send_numbers(places, routes, theirs)
        works = []
        for place in places:
            work = by_place.get(place) or _nothing(groups[place], size)
            work.received, work.serial = [counts[place] for counts in theirs], self._serial
            work.inner = groups[place].work_of(numbers[place])
            works.append(work)
        shared = Shared(self._serial, tuple(works))
        if self.is_joined:  # this rank may serve it, also if it leaves its loop early
            self._foreign[shared.serial] = shared
        elif headers.all_have(READS_AHEAD) and not headers.with_status(JOINS):
            by_place = dict(zip(places, works, strict=True))
            self.early.find_late(shared.serial, by_place, numbers, theirs)
            self._ahead[shared.serial] = shared
        return shared

    # -- vectors -----------------------------------------------------------------------

    def fetch(self, shared: Shared, version: int, replaced: int, *, waits: bool = True) -> None:
        """Get the vectors of a batch, unless they came since rows were changed last. `version` says
        how often they were, and `replaced` how often otherwise than by an update. Without `waits`,
        only begin to: replicated rows alone are there, until this is called again."""
        if not all(work.version == version for work in shared.works):
            self._begin_to_fetch(shared, version, replaced, waits=waits)
        for work in shared.works if waits else ():
            work.take_arrived()

    def _begin_to_fetch(self, shared: Shared, version: int, replaced: int, *, waits: bool) -> None:
        # What is late was found beside the batch before: both have to be known ahead.
        is_ahead = shared.serial in self._ahead
        for serial in [x for x in self._ahead if x <= shared.serial]:
            del self._ahead[serial]
        following = self._ahead.get(shared.serial + 1) if is_ahead else None
        works = None if following is None else following.works
        status = HAS_EARLY * self.early.holds(shared.serial, replaced)
        status |= SENDS_EARLY * self.early.can_send(works)
        header = Header(Op.ROWS, self.number, shared.serial, status, words=[self.reads.steps])
        self._run(header, (shared, version, replaced, waits))
        self.owes_grads = True

    def _perform_rows(
        self, headers: Headers, doers: list[bool], task: tuple[Shared, int, int, bool] | None
    ) -> None:
        if not (all(doers) or self.is_joined):  # a rank has left its loop early
            _raise_ended(_others(doers), self.ranks.size)
        _check_steps(headers, doers)
        serial = max(headers.column(SERIAL))
        shared, version, replaced, waits = task or (self._foreign[serial], -1, 0, True)
        inner = [work.inner for work in shared.works]
        if task is None:
            at_once([work for work in inner if work.plan is None], self._lanes)
        has_early = headers.all_have(HAS_EARLY)
        every = self.early.arrivals_of(shared.works, has_early=has_early, beside=not waits)
        for work, arrival in zip(shared.works, every, strict=True):
            self.wire.batches.note(work)  # not before: what is read ahead may never be trained
            work.expect(arrival, version)
            if waits:
                work.take_arrived()
        if headers.all_have(SENDS_EARLY):
            self.early.send(serial + 1, self._ahead[serial + 1].works, replaced)
        for old in [x for x in self._foreign if x <= serial - _KEPT]:  # some are never looked up
            del self._foreign[old]
        self._fetched.append(shared)
        if len(self._fetched) > _KEPT:
            oldest = self._fetched.popleft()
            if not any(oldest is other for other in self._fetched):
                for work in oldest.works:
                    work.forget_vectors()

    def forget_ahead(self) -> None:
        """Forget batches that were read ahead: none of them will be trained."""
        self._ahead.clear()
        self.early.drop()

    # -- gradients ---------------------------------------------------------------------

    def settle_grads(self) -> None:
        """Take part in the exchange of gradients that other ranks may have, without any."""
        if self.owes_grads:
            self.send_grads({}, (), settles=True)

    def settle_before_reading(self) -> None:
        """As `settle_grads`; but inside of accumulate() others may go on meanwhile."""
        if not self.is_accumulating:
            self.settle_grads()

    def send_grads(
        self, grads: dict[int, Grads], tables: Collection[str], *, settles: bool = False
    ) -> None:
        """Send gradients, by the place of a group, to the owners of their rows, who update them;
        `tables` have a gradient. `settles`: this rank had no backward pass."""
        self.owes_grads = False
        size, groups = self.ranks.size, self.groups
        ways = {place: self._way_of(place, x) for place, x in grads.items()}
        forms, counts = [_NO_ROWS] * len(groups), [[0] * len(groups) for _ in range(size)]
        copied = [0] * len(groups)
        for place, (form, route) in ways.items():
            forms[place] = form
            copied[place] = 0 if route.replicas is None else len(route.replicas)
            for rank, count in enumerate(route.counts):
                counts[rank][place] = count
        words = [*_mask_of(tables, self._tables), *forms, *copied]
        status = HAS_GRADS * bool(tables) | SETTLES * settles
        header = Header(Op.GRADS, self.number, self._steps + 1, status, words=words, counts=counts)
        self._run(header, (grads, ways))

    def _way_of(self, place: int, x: Grads) -> tuple[int, Route]:
        """Return which rows these are, and the way of the gradients."""
        if x.work is None:
            return _OTHER_ROWS, self.groups[place].route(x.ids.cpu())
        if len(x.ids) == len(x.work.ids.ids) and self.groups[place].is_current(x.work.route):
            return x.work.serial, x.work.route
        return -1 - x.work.serial, self.groups[place].route(x.ids.cpu())

    def _perform_grads(self, headers: Headers, task: Any) -> None:
        self._steps += 1
        grads: dict[int, Grads] = {}
        ways: dict[int, tuple[int, Route]] = {}
        if task is not None:
            grads, ways = task
        first, count = self._mask_words, len(self.groups)
        masks = [headers.words(r, 0, first) for r in range(self.ranks.size)]
        tables = _tables_of(masks, self._tables)
        if not headers.with_status(HAS_GRADS):
            return
        self.passes += 1
        came, batches = [], set[int]()
        for place, group in enumerate(self.groups):
            forms = {headers.words(r, first, count)[place] for r in range(self.ranks.size)}
            batches |= {max(form, -1 - form) for form in forms - {_NO_ROWS}}
            every = [headers.words(r, first + count, 2 * count) for r in range(len(masks))]
            received, copied = [x[count + place] for x in every], [x[place] for x in every]
            route = ways[place][1] if place in ways else None
            if any(copied):
                own = grads[place].sums if place in grads else None
                pair = swap_copied(self.wire, group, route, own, copied)
                before = sum(x.replicated is not None for x in self.groups[:place])
                came.append(OwnGrads(count + before, None, *pair))
            if forms == {_NO_ROWS}:
                continue
            sums = torch.empty(0, group.dim, device=group.device)
            if route is not None:
                sums = grads[place].sums[route.order.to(group.device)] / self.ranks.size
            counts = [0] * self.ranks.size if route is None else route.counts
            self.wire.count("grads", sums, counts)
            theirs = self.ranks.exchange(sums, counts, received, self.ranks.training)
            if len(forms) == 1 and min(forms) > _OTHER_ROWS:  # all ranks have those of one batch
                work = grads[place].work
                assert work is not None
                none = torch.empty(0, dtype=torch.int64)
                if len(theirs):
                    came.append(OwnGrads(place, work.inner, none, theirs))
                continue
            routes = {} if route is None else {place: route}
            by_rank = [[0] * place + [n] + [0] * (count - place - 1) for n in received]
            numbers = self.wire.send_numbers([place], routes, by_rank)[place].to(group.device)
            ids = sort_ids(numbers, group.inner.layout.num_rows)
            came.append(OwnGrads(place, None, ids.ids, reference.sum_pairs(theirs, ids)))
        on_grads, settings = self._on_grads(), self._settings()
        assert on_grads is not None
        assert settings is not None
        numbers = _numbers_of(settings, headers.with_status(HAS_GRADS), self.ranks)
        with settings.used(numbers), self.early.applying(batches):
            on_grads(came, tables, headers.with_status(SETTLES))

    # -- agreement ---------------------------------------------------------------------

    def meet(self, text: str) -> list[str]:
        """Return what each rank says, where all of them call one method; "" of one that serves."""
        self.settle_grads()
        texts: list[str] = self._run(Header(Op.CHECK, self.number), text)
        return texts

    def check_call(self, call: str) -> None:
        """Raise on all ranks if they do not call a method alike."""
        self.settle_grads()
        self._run(Header(Op.CHECK, self.number, status=CALLS), call)

    def first_of(self, text: str) -> tuple[int, str] | None:
        """Return the first rank that says something, and what; None: all are silent."""
        texts = self._run(Header(Op.CHECK, self.number), text)
        return next(((rank, other) for rank, other in enumerate(texts) if other), None)

    def norms(self, own: Tensor) -> Tensor:
        """Return norms over all ranks, from those of each; squares are added in rank order."""
        squares = own.cpu().double().square().repeat(self.ranks.size, 1)
        ones = [1] * self.ranks.size
        came = self.ranks.exchange(squares, ones, ones, self.ranks.training)
        total = came[0]
        for other in came[1:]:
            total = total + other
        return total.sqrt()

    def _perform_check(self, headers: Headers, task: str | None, channel: Channel) -> list[str]:
        texts = self.ranks.texts(task or "", channel)
        if callers := headers.with_status(CALLS):
            _check_calls(texts, texts[callers[0]])
        return texts


def _samples_of(headers: Headers, doers: Sequence[bool]) -> list[int]:
    """Return how many samples of a batch each rank trains."""
    if not all(doers):
        raise RuntimeError(
            f"{listed(_others(doers))} of {len(doers)} ran out of batches before the others, which "
            "hotrow.Trainer does not allow, inside of hotrow.join either: give all ranks equally "
            "many batches; those of a rank may have 0 samples"
        )
    samples, checksums = zip(*(headers.words(r, 0, 2) for r in range(len(doers))), strict=True)
    check_equal(checksums, f"a batch for step {headers.column(SERIAL)[0]:,}")
    return list(samples)


def _check_steps(headers: Headers, doers: Sequence[bool]) -> None:
    """Raise on all ranks if the optimizer of one has updated its rows more often."""
    steps = {r: headers.words(r, 0, 1)[0] for r, does in enumerate(doers) if does}
    fewest, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if steps[fewest] != steps[most]:
        raise RankError(
            f"rank {most} has updated its rows {steps[most]:,} times, and rank {fewest} "
            f"{steps[fewest]:,} times: all {len(doers)} ranks have to step their optimizers for "
            "the same batches, or rows of one are not trained as those of others"
        )


def _check_calls(texts: Sequence[str], call: str) -> None:
    """Raise on all ranks if one of them calls something else."""
    for rank, other in enumerate(texts):
        if other != call:
            what = f"calls {other}" if other else "has no batch left and serves the others"
            raise RankError(f"all ranks have to call {call}; rank {rank} {what}")


def _nothing(group: SharedRows, size: int) -> SharedWork:
    """Return the work of a rank that looks nothing up, of so many ranks."""
    none = torch.empty(0, dtype=torch.int64)
    ids = SortedIds(none, none, torch.zeros(1, dtype=torch.int64), none)
    lookups = no_lookups(len(group.layout.features))
    return SharedWork(group, lookups, ids, Route(none, none, [0] * size))


def _numbers_of(settings: RuleSettings, with_grads: Sequence[int], ranks: Ranks) -> Any:
    """Return the settings of a rank that has gradients, for one that has none: it takes part late,
    when a schedule may have moved on, or its schedules rest. None: its own."""
    if len(with_grads) == ranks.size:
        return None
    has_grads = ranks.rank in with_grads
    mine = json.dumps(settings.numbers()) if has_grads else ""
    texts = ranks.texts(mine, ranks.training)
    return None if has_grads else json.loads(texts[with_grads[0]])


def _mask_of(tables: Collection[str], names: Sequence[str]) -> list[int]:
    """Return words with a bit for each of the tables."""
    words = [0] * -(-len(names) // _BITS)
    for number, name in enumerate(names):
        if name in tables:
            words[number // _BITS] |= 1 << number % _BITS
    return words


def _tables_of(masks: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[str, ...]:
    """Return the tables that have a bit in some mask."""
    return tuple(
        name
        for number, name in enumerate(names)
        if any(mask[number // _BITS] >> number % _BITS & 1 for mask in masks)
    )


def _raise_first(error: Exception | None, rank: int, ranks: Ranks) -> NoReturn:
    """Raise this rank's error, or that of the first rank that has one."""
    is_bad_id = isinstance(error, BadId)
    text = "" if error is None else f"{int(is_bad_id)}{error}"
    texts = ranks.texts(text, ranks.training)
    if error is not None and not is_bad_id:
        raise error
    kind: Any = BadId if texts[rank][0] == "1" else RuntimeError
    raise kind(f"rank {rank}: {texts[rank][1:]}") from error


def _raise_ended(ended: Sequence[int], size: int) -> NoReturn:
    raise RuntimeError(
        f"{listed(ended)} of {size} ran out of batches before the others. Give all ranks equally "
        "many batches, or train inside `with hotrow.join(model):` with update='backward', where "
        "ranks without a batch go on serving their rows"
    )


def is_told(error: Exception) -> bool:
    """Return whether an error is known on all ranks."""
    return _TOLD in error.__dict__


def _others(doers: Sequence[bool]) -> list[int]:
    """Return the ranks that do not do an operation."""
    return [rank for rank, does in enumerate(doers) if not does]


def listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
