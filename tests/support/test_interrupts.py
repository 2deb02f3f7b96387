"""Ctrl-C, wherever it falls, leaves every update made and nothing half-moved."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch

import hotrow
from builders import CASES, build, outcome, readout, tight_budget, variant
from hotrow.support.interrupts import uninterrupted

CASE = CASES["two-widths"]
INSIDE = ("planner.py", "rows.py", "stages.py", "schedule.py", "scratchpad.py", "step.py")


class PressAt:
    """Ctrl-C, or another signal, at the n-th line that hotrow's own moving parts run."""

    def __init__(self, place: int, number: int) -> None:
        self.place, self.lines, self.number = place, 0, number

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(INSIDE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.place:
                signal.raise_signal(self.number)
        return self


def train_until_pressed(embedding: Any, batches: list[Any], place: int, number: int) -> int:
    """Steps whose backward pass has ended when the interrupt is heard."""
    press = PressAt(place, number)
    before = max(embedding.optimizer.steps)
    sys.settrace(press)
    try:
        for batch in hotrow.ahead(batches, embedding):
            readout(embedding(batch)).backward()
    except (KeyboardInterrupt, ChildProcessError):
        pass
    finally:
        sys.settrace(None)
    return max(embedding.optimizer.steps) - before


def check_at(place: int, batches: list[Any], number: int, **options: Any) -> int:
    """Train until a signal comes at a line; return how many steps were made, all of them whole."""
    torch.manual_seed(0)
    embedding = build(CASE, "adagrad", **options)
    done = train_until_pressed(embedding, batches, place, number)
    reference = build(CASE, "adagrad")
    for batch in batches[:done]:
        readout(reference(batch)).backward()
    assert outcome(embedding, []).same_bits(outcome(reference, [])), place
    return done


def prepared(schedule: str, steps: int) -> tuple[list[Any], dict[str, Any]]:
    batches, strategy = CASE.batches(steps), variant("lookahead", schedule, "random")
    return batches, {"strategy": strategy, "budget": tight_budget(CASE, batches, strategy.hold)}


@pytest.mark.parametrize("schedule", ["sequential", "fused", "five-shuffled"])
def test_an_interrupt_at_any_line_loses_no_row(schedule: str) -> None:
    batches, options = prepared(schedule, 6)
    pressed = 0
    for place in range(5, 4000, 97):
        done = check_at(place, batches, signal.SIGINT, **options)
        pressed += done < len(batches)
        if done == len(batches):
            break
    assert pressed > 10


def test_a_worker_that_dies_at_any_line_loses_no_row() -> None:
    """torch's DataLoader raises in a handler of SIGCHLD when one of its workers was killed."""

    def tell(number: int, frame: FrameType | None) -> None:
        raise ChildProcessError("a worker was killed")

    batches, options = prepared("fused", 4)
    before = signal.signal(signal.SIGCHLD, tell)
    try:
        for place in range(5, 1100, 23):
            check_at(place, batches, signal.SIGCHLD, **options)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    finished = False

    def block() -> None:
        nonlocal finished
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            finished = True

    with pytest.raises(KeyboardInterrupt):
        block()
    assert finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone() -> None:
    ran = []

    def run() -> None:
        with uninterrupted():
            ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran == [True]


def test_an_interrupt_while_garbage_is_collected_is_raised() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def collect() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        gc.collect()
        time.sleep(1)  # where it was faster

    many: list[list[int]] = [[] for _ in range(300_000)]
    # Functions of Python that others have added, such as hypothesis, do lose interrupts.
    added = [x for x in gc.callbacks if isinstance(x, FunctionType)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        gc.callbacks[:] = [x for x in gc.callbacks if x not in added]
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                collect()
    finally:
        gc.callbacks += added
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(many) == 300_000
