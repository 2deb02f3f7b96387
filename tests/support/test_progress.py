"""A bar appears where somebody looks, and only for what takes long."""

from __future__ import annotations

import io
import sys

import pytest

from hotrow.support import progress
from hotrow.support.progress import bytes_bar

GIB = 2**30


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")
    return now


def shown(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, *, seconds: float, is_terminal: bool = True
) -> str:
    terminal = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with bytes_bar("page-locking rows") as advance:
        for done in range(1, 5):
            clock[0] += seconds / 4
            advance(done * 12 * GIB, 48 * GIB)
    return terminal.getvalue()


def test_long_work_shows_how_far_it_is(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(clock, monkeypatch, seconds=8.0)
    assert "page-locking rows" in text
    assert "48.0 GiB" in text


def test_short_work_shows_nothing(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(clock, monkeypatch, seconds=0.9) == ""


def test_a_file_gets_no_bar(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(clock, monkeypatch, seconds=8.0, is_terminal=False) == ""


@pytest.mark.parametrize("is_closed", [False, True])
def test_where_nobody_can_look_work_goes_on(
    is_closed: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    terminal.close()
    monkeypatch.setattr(sys, "stderr", terminal if is_closed else None)
    with bytes_bar("page-locking rows") as advance:
        clock[0] = 5.0
        advance(1 * GIB, 48 * GIB)


def test_a_failure_takes_the_bar_away(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with bytes_bar("page-locking rows") as advance:
            clock[0] = 5.0
            advance(1 * GIB, 48 * GIB)
            raise MemoryError

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(MemoryError):
        fail()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back
