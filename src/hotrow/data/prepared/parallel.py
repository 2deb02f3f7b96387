"""Work on several cores, with results in order and a bounded number of items in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Cores:
    """Threads, because numpy and Arrow release Python's lock while they work."""

    def __init__(self, workers: int) -> None:
        self.workers, self._pool = workers, ThreadPoolExecutor(workers)
        self._behind = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._behind.shutdown(wait=True)

    def behind(self, work: Callable[[], None]) -> None:
        """Run something while the caller goes on, after what was given before. Its error is raised
        by the next call, or by `catch_up`."""
        self.catch_up()
        self._last = self._behind.submit(work)

    def catch_up(self) -> None:
        """Wait for what was given to `behind`."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results of all items, in their order."""
        return list(self._pool.map(work, items))

    def in_order(
        self, work: Callable[[Item], Result], items: Iterable[Item], *, ahead: int | None = None
    ) -> Iterator[tuple[Item, Result]]:
        """Yield results in the order of the items; at most `ahead` are in flight."""
        most = ahead or 2 * self.workers
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
