"""Which stage of which batch runs when.

One loop serves both schedules: the sequential one is the overlapped one with all stages in one
cycle. Knows batches as tickets; what a stage does is not its business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Any

from hotrow.engine.stages import FUSED, Stage
from hotrow.engine.work import Work
from hotrow.support.clock import Clock
from hotrow.support.streams import Lanes, Mark
from hotrow.support.threads import writing

Order = Callable[[Sequence[Stage], int], Sequence[Stage]]

_LOOK_EVERY = 4  # trainings: to look at each would cost the host more than it tells


class Ticket:
    """A batch on its way: the user's object, and its work in every width group."""

    def __init__(
        self, batch: Any, works: Sequence[Work] = (), error: Exception | None = None
    ) -> None:
        self.batch, self.works, self.error = batch, works, error
        self.age = 0  # cycles since it was admitted
        self.planned = self.confirmed = False
        self.mark: Mark | None = None  # what has to be done before its next stage
        self.needless: Mark | None = None  # until when training was given what needs no rows

    def run(self, stage: Stage, lanes: Lanes) -> None:
        with self.writing(), lanes.on(stage.lane):
            try:
                for work in self.works:
                    stage.run(work)
            finally:  # where one fails, those before it have been launched
                self.mark = lanes.mark(stage.lane)
                if not self.planned:  # the first stage is the plan
                    self.planned = True
                    for work in self.works:
                        work.group.planning.mark_planned(work, self.mark)

    def writing(self) -> writing:
        """Inside, no other thread reads or changes rows."""
        return writing([work.group.lock for work in self.works])

    def begin(self, lanes: Lanes) -> None:
        """It is handed to training, which waits for its rows."""
        lanes.after("train", self.mark)

    def confirm(self) -> bool:
        """Learn what became of the plans; False if plans behind them were halted."""
        with self.writing():
            self.confirmed = True
            for work in self.works:  # all of them, since the others' maps have changed
                try:
                    self.confirmed &= work.group.confirm(work)
                except Exception as error:
                    self.error = self.error or error
                    self.confirmed = False
            return self.confirmed

    def take_back(self) -> None:
        """To be planned again: a batch before it could not be."""
        with self.writing():
            for work in self.works:
                work.group.planning.take_back(work)
        self.age, self.planned, self.confirmed = 0, False, False

    @property
    def alone(self) -> bool:
        """Nothing behind it may move: it goes the direct way, or is the end."""
        if self.error is not None or not self.planned:
            return self.error is not None
        return None in [work.plan for work in self.works]


class Pace:
    """Tells groups for which part of a step training waited for rows.

    ```
    train    batch 6 |               | batch 7            |
    rows          fill for batch 7   |
                     [--- waited ----]
                     [-------------- step ----------------]
    ```
    Where training was given work that needs no rows first, what counts is the wait after it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock, self._trainings = clock or Clock(), 0
        self._ticket: Ticket | None = None  # what began last, if it is looked at
        self._before: Mark | None = None
        self._unread: deque[tuple[set[Any], list[Mark]]] = deque()

    def begins(self, ticket: Ticket, before: Mark) -> None:
        """Training will wait for a ticket's mark; `before`: what it did until now."""
        self._trainings += 1
        if self._trainings % _LOOK_EVERY == 0 and ticket.mark is not None:
            self._ticket, self._before = ticket, before

    def ended(self, mark: Mark) -> None:
        """What began last has been launched as a whole."""
        ticket, before = self._ticket, self._before
        if ticket is None or before is None or ticket.mark is None:
            return
        groups = {work.group for work in ticket.works}
        self._unread.append((groups, [before, ticket.needless or before, ticket.mark, mark]))
        self._ticket = self._before = None
        while self._unread and all(each.passed() for each in self._unread[0][1]):
            groups, (before, waits_from, rows, after) = self._unread.popleft()
            step = after.since(before)
            if step > 0:
                share = min(max(rows.since(waits_from), 0.0) / step, 1.0)
                self._clock.note_wait(share)
                for group in groups:
                    group.mover.note_wait(share, step)


def run(
    stages: Sequence[Stage],
    admit: Callable[[], Ticket | None],
    order: Order,
    lanes: Lanes,
    clock: Clock | None = None,
) -> Generator[Ticket, None, None]:
    """Yield each ticket when it is its turn to train, with other tickets' stages around it.

    ```
    cycle      0      1      2      3
    plan       b0     b1     b2     b3
    fill                     b0     b1
    train                           b0
    ```
    What became of a plan is asked when the next stage is due. If it failed, the batches behind it
    are planned again, when it has been trained. If the caller leaves before the end, it has to let
    groups `finish_planned()`: their maps already count on it. It is not done here, because a
    garbage collection may close a generator at any place.
    """
    line: deque[Ticket] = deque()
    again: deque[Ticket] = deque()
    clock = clock or Clock()
    pace = Pace(clock)
    try:
        for cycle in count():
            lanes.take_turn()
            trained = lanes.mark("train")  # in the cycles before
            pace.ended(trained)
            alone = False
            for ticket in line:
                ticket.age += 1
                alone = alone or ticket.alone
            if not alone and (new := again.popleft() if again else admit()):
                line.append(new)
            if not line:
                return
            for stage in order(stages, cycle):
                for ticket in [each for each in line if each.age == stage.cycle]:
                    asks = ticket.planned and not ticket.confirmed and ticket.error is None
                    if asks:
                        with clock.part("confirm"):
                            confirmed = ticket.confirm()
                        while not confirmed and line[-1] is not ticket:
                            line[-1].take_back()
                            again.appendleft(line.pop())
                    if stage.trains:
                        if ticket.error is not None:
                            raise ticket.error
                        line.remove(ticket)
                        ticket.begin(lanes)
                        pace.begins(ticket, trained)
                        lanes.give_turn()
                        yield ticket
                        lanes.take_turn()
                    elif ticket.error is None:
                        if stage.lane == "rows":
                            lanes.after("rows", trained)
                            lanes.after("rows", ticket.mark)
                        with clock.part(stage.name):
                            ticket.run(stage, lanes)
    finally:
        lanes.give_turn()


def at_once(works: Sequence[Work], lanes: Lanes) -> None:
    """Plan a batch that was not announced, and fetch its rows; training waits for them."""
    ticket = Ticket(None, works)
    with ticket.writing():
        lanes.join()
        try:
            ticket.run(FUSED[0], lanes)
        finally:  # whatever was planned is fetched: the maps already count on it
            ticket.confirm()
            lanes.join()
            ticket.run(FUSED[1], lanes)
            lanes.join()
    if ticket.error is not None:
        raise ticket.error
