"""Batches of one width group between planning and training. Knows no bytes."""

from __future__ import annotations

from hotrow.engine.work import Work


class Flight:
    """Which planned batches have not moved their rows yet, and which rows may have left.

    The maps describe the state after all planned batches. `uncollected` and `in_transit` tell how
    far the bytes are behind.
    """

    rows_move = True

    def __init__(self, past: int) -> None:
        """`past`: how many later batches may be collected before a batch's rows may leave."""
        self.past = past
        self.newest_collected = -1  # number of the last plan whose leaving rows were read
        self.uncollected: list[Work] = []  # planned; no byte has moved
        self.in_transit: list[Work] = []  # collected, and not inserted

    def begin(self, work: Work) -> None:
        """A batch was planned."""
        self.uncollected.append(work)

    def collect(self, work: Work, *, inserted: bool) -> None:
        """The leaving rows of a batch were read; `inserted`: its rows are in their slots."""
        self.uncollected.remove(work)
        work.collected, work.inserted = True, inserted
        self.newest_collected = work.plan.number
        if not inserted:
            self.in_transit.append(work)

    def insert(self, work: Work) -> None:
        """The rows of a batch that was in transit are in their slots."""
        self.in_transit.remove(work)
        work.inserted = True

    def drop(self, work: Work) -> None:
        """A plan failed: the batch takes the direct path, or is planned again."""
        work.plan = None
        if work in self.uncollected:
            self.uncollected.remove(work)

    def holds(self, work: Work) -> bool:
        """Whether a batch's rows are in the slots that were planned for it."""
        if work.plan is None or not work.inserted:
            return False
        return self.newest_collected <= int(work.plan.number) + self.past

    def end(self, number: int) -> None:
        """No batch up to this number has its rows in slots: late gradients take the direct path."""
        self.newest_collected = number


class AtRest(Flight):
    """The flight of rows that never move: every row is in its own slot."""

    rows_move = False

    def __init__(self) -> None:
        super().__init__(past=0)

    def holds(self, work: Work) -> bool:
        return work.plan is not None
