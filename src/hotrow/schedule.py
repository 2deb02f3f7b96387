"""Which stage of which batch runs when.

One loop serves both schedules: the sequential one is the overlapped one with all stages in one
cycle. Knows batches as tickets; what a stage does is not its business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Any

from hotrow.interrupt import uninterrupted
from hotrow.stages import Stage, Work

Order = Callable[[Sequence[Stage], int], Sequence[Stage]]


class Ticket:
    """A batch on its way: the user's object, and its work in every width group."""

    def __init__(
        self, batch: Any, works: Sequence[Work] = (), error: Exception | None = None
    ) -> None:
        self.batch, self.works, self.error = batch, works, error
        self.age = 0  # cycles since it was admitted
        self.planned = False

    def run(self, stage: Stage) -> None:
        self.planned = True  # the first stage is the plan
        with uninterrupted():
            for work in self.works:
                stage.run(work)

    @property
    def alone(self) -> bool:
        """Nothing behind it may move: it goes the direct way, or is the end."""
        too_large = self.planned and any(work.plan is None for work in self.works)
        return self.error is not None or too_large


def run(
    stages: Sequence[Stage], admit: Callable[[], Ticket | None], order: Order
) -> Generator[Ticket, None, None]:
    """Yield each ticket when it is its turn to train, with other tickets' stages around it.

    ```
    cycle      0      1      2      3
    plan       b0     b1     b2     b3
    fill                     b0     b1
    train                           b0
    ```
    However the caller leaves, planned batches are finished up to training: the maps already
    count on it.
    """
    line: deque[Ticket] = deque()
    try:
        for cycle in count():
            for ticket in line:
                ticket.age += 1
            if not any(ticket.alone for ticket in line) and (new := admit()):
                line.append(new)
            if not line:
                return
            for stage in order(stages, cycle):
                for ticket in [each for each in line if each.age == stage.cycle]:
                    if stage.trains:
                        line.remove(ticket)
                        if ticket.error is not None:
                            raise ticket.error
                        yield ticket
                    elif ticket.error is None:
                        ticket.run(stage)
    finally:
        with uninterrupted():
            for ticket in line:
                for stage in stages[1:]:
                    if ticket.planned and not stage.trains:
                        ticket.run(stage)
