"""A few steps of a run as a Chrome trace: named stages, and the operations of torch in them.

chrome://tracing and ui.perfetto.dev open the file. The profiler slows these steps down.
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
_DEFAULT_FIRST = 68  # step of a long run: caches are filled, graphs are captured
_WARM_UP = 2  # steps before, in which the profiler gets ready


@dataclass(frozen=True)
class Traced:
    """Which steps are traced."""

    steps: int
    first: int | None = None  # None: the middle of the run, at most step 68

    def within(self, total: int) -> Traced:
        """Return the steps to trace in a run of `total` steps."""
        first = self.first or max(1, min(_DEFAULT_FIRST, (total - self.steps) // 2))
        if first > total:
            raise ValueError(f"--trace steps={self.steps},from={first}: the run has {total} steps")
        return replace(self, first=first)


def parse_traced(text: str) -> Traced:
    """Read "steps=20" or "steps=20,from=500"."""
    options = dict(part.strip().partition("=")[::2] for part in text.split(","))
    wrong = ValueError(f"--trace takes steps=20 or steps=20,from=500, not {text!r}")
    if "steps" not in options or options.keys() - {"steps", "from"}:
        raise wrong
    if not all(value.isdecimal() and int(value) > 0 for value in options.values()):
        raise wrong
    return Traced(int(options["steps"]), int(options["from"]) if "from" in options else None)


class ChromeTrace:
    """Writes the trace to `folder` after its steps, or at the end of the run."""

    def __init__(self, folder: Path, traced: Traced, *, device: str) -> None:
        first = traced.first or 1
        self._path, self._first, self._last = folder / TRACE_FILE, first, first + traced.steps - 1
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print when it starts and ends
        activities = [ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities)
        self._is_ready = self._is_on = False

    def step(self, done: int) -> None:
        """Note that `done` steps have been taken."""
        if self._profile is None:
            return
        if not self._is_ready and done + 1 + _WARM_UP >= self._first:
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
            self._profile.start_trace()  # a profiler that is ready must start before it can stop
        self._finish()


def read_trace(path: Path) -> list[Span]:
    """Return the named stages of a trace, in order of time."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Without this file the run can be drawn"
        ) from error
    places = {"user_annotation": "host", "gpu_user_annotation": "GPU"}
    spans = [
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
    return sorted(spans, key=lambda span: span.start)
