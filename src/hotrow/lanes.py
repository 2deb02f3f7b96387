"""Where work is queued: beside training, ahead of it, or with it. The only place that knows streams.

On a GPU every lane is a stream and marks are events. On a CPU everything runs at once, in order,
and marks say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Name = Literal["plan", "rows", "train"]


class Mark(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """The host waits until the lane has come there."""

    def passed(self) -> bool:
        """Whether the lane has come there."""


class _Passed:
    def wait(self) -> None: ...

    def passed(self) -> bool:
        return True


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return self.event.query()


class Lanes:
    """`plan` and `rows` run beside `train`, the lane of whoever calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda":
            # First in line for the few multiprocessors they need: training waits for them.
            self._streams = {
                name: torch.cuda.Stream(device, priority=-1) for name in ("plan", "rows")
            }

    def _stream(self, name: Name) -> torch.cuda.Stream:
        return self._streams.get(name) or torch.cuda.current_stream(self.device)

    @contextmanager
    def on(self, name: Name) -> Iterator[None]:
        """What is launched inside runs in a lane."""
        if not self._streams or name == "train":
            yield
            return
        with torch.cuda.stream(self._streams[name]):
            yield

    def mark(self, name: Name) -> Mark:
        """What has been launched in a lane so far."""
        if not self._streams:
            return _Passed()
        event = torch.cuda.Event()
        event.record(self._stream(name))
        return _Event(event)

    def after(self, name: Name, mark: Mark | None) -> None:
        """What a lane is given from now on waits for a mark; the host does not."""
        if isinstance(mark, _Event):
            self._stream(name).wait_event(mark.event)

    def join(self) -> None:
        """What training does next waits for all lanes, and they for what it has done so far."""
        marks = {name: self.mark(name) for name in ("plan", "rows", "train")}  # type: ignore[arg-type]
        for name in marks:
            for mark in marks.values():
                self.after(name, mark)  # type: ignore[arg-type]

    def hand_over(self, tensors: list[Tensor]) -> None:
        """Tensors made in another lane are used by training: their memory lives that long."""
        if self._streams:
            stream = torch.cuda.current_stream(self.device)
            for tensor in tensors:
                tensor.record_stream(stream)


@cache
def lanes_of(device: Any) -> Lanes:
    """The lanes of a device, shared by all that runs on it."""
    if device.type == "cuda" and device.index is None:
        return lanes_of(torch.device("cuda", torch.cuda.current_device()))  # type: ignore[no-any-return]
    return Lanes(device)
