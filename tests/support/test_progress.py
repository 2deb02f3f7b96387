"""A bar appears where a user can see it, and only for what takes long."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr

import pytest

from hotrow.support.progress import bytes_bar, line_if_long

GIB = 2**30


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def work(terminal: io.StringIO | None, seconds: float, *, fails: bool = False) -> None:
    now = [0.0]
    with (
        redirect_stderr(terminal),
        bytes_bar("page-locking rows", clock=lambda: now[0]) as advance,
    ):
        for done in range(1, 5):
            now[0] += seconds / 4
            advance(done * 12 * GIB, 48 * GIB)
        if fails:
            raise MemoryError


@pytest.mark.parametrize(
    ("seconds", "is_terminal", "is_shown"),
    [(8.0, True, True), (0.9, True, False), (8.0, False, False)],
    ids=["long", "short", "file"],
)
def test_long_work_shows_how_far_it_is_on_a_terminal(
    seconds: float, is_terminal: bool, is_shown: bool
) -> None:
    terminal = Terminal(is_terminal=is_terminal)
    work(terminal, seconds)
    for text in ("page-locking rows", "48.0 GiB"):
        assert (text in terminal.getvalue()) is is_shown
    assert is_shown or terminal.getvalue() == ""


def test_without_a_console_work_goes_on() -> None:
    closed = Terminal()
    closed.close()
    for terminal in (None, closed):
        work(terminal, 8.0)


def test_a_failure_takes_the_bar_away() -> None:
    terminal = Terminal()
    with pytest.raises(MemoryError):
        work(terminal, 8.0, fails=True)
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def test_a_line_is_for_long_work_alone() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        with line_if_long("compiling kernels", seconds=0.01):
            for _ in range(200):
                if terminal.getvalue():
                    break
                time.sleep(0.05)
        with line_if_long("short work", seconds=60.0):
            pass
    assert terminal.getvalue() == "compiling kernels ...\n"
