"""A few steps of a run as a Chrome trace: stages by their names, and what torch does inside them.

chrome://tracing and ui.perfetto.dev open the file. A profiler slows down what it looks at.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch.profiler import ProfilerActivity, profile

from hotrow.support.clock import PREFIX
from hotrow.support.messages import warn
from hotrow.support.records import Span

TRACE_FILE = "trace.json.gz"
_USUAL_FIRST = 68  # step, where a run is long enough: caches have filled, graphs are captured
_PREPARING = 2  # steps before, in which a profiler gets ready


@dataclass(frozen=True)
class Traced:
    """Which steps are traced."""

    steps: int
    first: int | None = None  # None: in the middle of the run, the 68th at most

    def within(self, total: int) -> Traced:
        """The same, of a run of so many steps."""
        first = self.first or max(1, min(_USUAL_FIRST, (total - self.steps) // 2))
        if first > total:
            raise ValueError(f"--trace steps={self.steps},from={first}: the run has {total} steps")
        return replace(self, first=first)


def parse_traced(text: str) -> Traced:
    """ "steps=20", or "steps=20,from=500"."""
    found = dict(each.strip().partition("=")[::2] for each in text.split(","))
    wrong = ValueError(f"--trace takes steps=20 or steps=20,from=500, not {text!r}")
    if "steps" not in found or found.keys() - {"steps", "from"}:
        raise wrong
    if not all(value.isdecimal() and int(value) > 0 for value in found.values()):
        raise wrong
    return Traced(int(found["steps"]), int(found["from"]) if "from" in found else None)


class Tracing:
    """What looks at a run's steps. This one does not."""

    def step(self, done: int) -> None:
        """Note that so many steps have been taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...


class ChromeTrace(Tracing):
    """Writes the trace into `folder` when its steps have been taken, or when the run ends."""

    def __init__(self, folder: Path, traced: Traced, *, device: str) -> None:
        first = traced.first or 1
        self._path, self._first, self._last = folder / TRACE_FILE, first, first + traced.steps - 1
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say when it starts, and ends
        activities = [ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities)
        self._is_ready = self._is_on = False

    def step(self, done: int) -> None:
        if self._profile is None:
            return
        if not self._is_ready and done + 1 + _PREPARING >= self._first:
            self._profile.prepare_trace()
            self._is_ready = True
        if not self._is_on and done + 1 >= self._first:
            self._profile.start_trace()
            self._is_on = True
        if done >= self._last:
            self._finish()

    def _finish(self) -> None:
        done, self._profile = self._profile, None
        done.stop_trace()
        try:
            done.export_chrome_trace(str(self._path))
        except OSError as error:
            warn(f"the trace was not written: {error}. Training goes on")

    def __enter__(self) -> Self:
        self.step(0)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._profile is None or not self._is_ready:
            return
        if not self._is_on:
            self._profile.start_trace()  # one that got ready can only be stopped
        self._finish()


def read_trace(path: Path) -> list[Span]:
    """The named stages of a trace, in order of time."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Without this file the run can be drawn"
        ) from error
    places = {"user_annotation": "host", "gpu_user_annotation": "GPU"}
    found = [
        Span(
            place=places[event["cat"]],
            name=event["name"].removeprefix(PREFIX),
            start=event["ts"] / 1e6,
            seconds=event["dur"] / 1e6,
        )
        for event in events
        if event.get("ph") == "X"
        and event.get("cat") in places
        and event["name"].startswith(PREFIX)
    ]
    return sorted(found, key=lambda span: span.start)
