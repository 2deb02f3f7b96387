"""Work on several cores, with results in order and a bounded number under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Cores:
    """Threads: numpy lets others run while it works."""

    def __init__(self, workers: int) -> None:
        self._pool, self._ahead = ThreadPoolExecutor(workers), 2 * workers
        self._behind = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._behind.shutdown(wait=True)

    def behind(self, work: Callable[[], None]) -> None:
        """Does something while the caller goes on: one after the other, and one at a time. What
        goes wrong is raised by the next call, or by `catch_up`."""
        self.catch_up()
        self._last = self._behind.submit(work)

    def catch_up(self) -> None:
        """Returns when what was left behind is done."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def each(self, work: Callable[[Item], None], items: Iterable[Item]) -> None:
        """Returns when all is done."""
        for _ in self._pool.map(work, items):
            pass

    def in_order(
        self,
        work: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        ahead: int | None = None,
    ) -> Iterator[tuple[Item, Result]]:
        """Results in the order of the items, of which `ahead` are under way at the most."""
        most = ahead or self._ahead
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, self._pool.submit(work, item)))
                if len(waiting) >= most:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
