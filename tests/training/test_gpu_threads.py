"""Threads that read a collection on a GPU beside one that trains it, eagerly and captured."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_multi_hot import Found, Run, batches, same_bits
from hotrow.support import streams as lanes
from hotrow.training import captured
from thread_checks import (
    STRATEGIES,
    Steps,
    check_beside_training,
    check_training_goes_on,
    collection,
    every_row,
    readers,
    train,
)

pytestmark = pytest.mark.gpu

ON_GPU = [strategy for strategy in STRATEGIES if strategy != "cpu"]
FILLS = [("lookahead", fill) for fill in ("zero-copy", "bulk", "staged")]
WAYS = [*((strategy, "auto") for strategy in ON_GPU), *FILLS]


@pytest.mark.parametrize(("strategy", "fill"), WAYS)
def test_threads_read_finished_steps_beside_training(strategy: str, fill: str) -> None:
    check_beside_training(lambda: collection(strategy, "cuda", fill=fill), "cuda")


@pytest.mark.parametrize(("strategy", "fill"), WAYS)
def test_training_goes_on_after_an_iterator_that_was_not_closed(strategy: str, fill: str) -> None:
    check_training_goes_on(lambda: collection(strategy, "cuda", fill=fill), device="cuda")


@pytest.mark.parametrize("strategy", ["lookahead", "hybrid", "static-hybrid", "all-fast"])
def test_threads_read_on_streams_of_their_own(strategy: str) -> None:
    """What was launched on other streams has to be waited for by events."""

    def make() -> Any:
        return collection(strategy, "cuda")

    class OnStream:
        """Reads on a stream of the thread's own."""

        def __init__(self, embedding: Any) -> None:
            self._embedding, self._local = embedding, threading.local()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._embedding, name)

        def __call__(self, ids: Tensor) -> Any:
            if not hasattr(self._local, "stream"):
                self._local.stream = torch.cuda.Stream()
            with torch.cuda.stream(self._local.stream):
                return self._embedding(ids)

    alone, shared = make(), make()
    steps = Steps(alone, "cuda")
    apart = OnStream(shared)
    with readers(3, lambda: steps.check(apart)):  # type: ignore[arg-type]
        train(shared, steps.end, device="cuda")
    assert torch.equal(every_row(shared), steps.rows)


def captured_run(strategy: str = "lookahead") -> Run:
    return Run("two-widths", "adam", strategy, "60%").captured()


def train_captured(run: Run, steps: int, after: Callable[[int], None] = lambda step: None) -> Found:
    for step, batch in enumerate(run.stream(batches(steps=steps))):
        run.train(batch)
        after(step)
    assert not run.step.landing._refused
    return run.found()


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "hybrid"])
def test_threads_read_beside_captured_steps(strategy: str) -> None:
    steps = 120
    probe: Any = next(batches(steps=1)).sparse
    probe = probe.to("cuda")
    history: list[Tensor] = []

    def read(run: Run) -> Tensor:
        with torch.no_grad():
            return run.embedding(probe).values().cpu()

    alone = captured_run(strategy)
    history.append(read(alone))
    wanted = train_captured(alone, steps, lambda step: history.append(read(alone)))
    shared, ended = captured_run(strategy), 0

    def end(step: int) -> None:
        nonlocal ended
        ended = step + 1

    def check() -> None:
        first = ended
        found = read(shared)
        last = min(ended + 1, steps)
        assert any(torch.equal(found, history[step]) for step in range(first, last + 1)), (
            f"vectors of no step from {first} to {last}"
        )

    with readers(3, check):
        found = train_captured(shared, steps, end)
    assert same_bits(found, wanted)


def _synchronize() -> None:
    """Wait for the device, which would spoil the capture of another thread."""
    torch.cuda.synchronize()
    time.sleep(0.002)


def _spoil() -> None:
    """Wait for the device by a function that hotrow does not know."""
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_synchronize()


def _allocate() -> None:
    torch.empty(1 << 22, device="cuda").fill_(1.0)
    torch.cuda.empty_cache()


OTHERS: dict[str, Callable[[], Any]] = {
    "synchronize": _synchronize,
    "allocate and free": _allocate,
    "read a value": lambda: torch.ones(3, device="cuda").sum().item(),
    "lock memory": lambda: torch.empty(1 << 20).pin_memory(),
    "copy from locked memory": lambda: (
        torch.ones(1 << 16).pin_memory().to("cuda", non_blocking=True).cpu()
    ),
    "events": lambda: torch.cuda.Event().record(),
    "another stream": lambda: torch.cuda.Stream().synchronize(),
}


@pytest.mark.parametrize("call", OTHERS)
def test_captures_survive_what_other_threads_ask_of_cuda(call: str) -> None:
    wanted = train_captured(captured_run(), 40)
    with readers(2, OTHERS[call]):
        found = train_captured(captured_run(), 40)
    assert same_bits(found, wanted)


def test_a_capture_that_another_thread_spoils_leaves_nothing_open() -> None:
    """The next capture into the same pool works, memory is freed, and random numbers go on."""
    values = torch.zeros(8, device="cuda")

    def launch() -> None:
        values.add_(torch.ones(8, device="cuda"))

    def spoiled() -> None:
        launch()
        other = threading.Thread(target=_spoil)
        other.start()
        other.join()

    launch()
    pool = lanes.capture(launch, None, 0).pool()
    torch.cuda.synchronize()
    for place in (None, pool):
        torch.cuda.manual_seed(3)
        wanted = torch.rand(4, device="cuda")
        torch.cuda.manual_seed(3)
        with pytest.raises(RuntimeError) as caught:
            lanes.capture(spoiled, place, 0)
        assert lanes.is_spoiled(caught.value)
        assert torch.equal(torch.rand(4, device="cuda"), wanted)
    before = values.clone()
    lanes.capture(launch, pool, 0).replay()
    assert torch.equal(values, before + 1)


def test_a_step_whose_capture_was_spoiled_is_captured_later() -> None:
    """Three captures of the whole step are spoiled; the bits stay, and later ones succeed."""
    wanted = train_captured(captured_run(), 40)
    spoiled = iter(range(3))
    capture = captured.capture

    def spoil(launch: Callable[[], None], pool: Any, priority: int) -> Any:
        def launch_and_spoil() -> None:
            launch()
            if next(spoiled, None) is not None:
                other = threading.Thread(target=_spoil)
                other.start()
                other.join()

        return capture(launch_and_spoil, pool, priority)

    run = captured_run()
    run.step.landing._settings = captured.GraphSettings(capture=spoil)
    assert same_bits(train_captured(run, 40), wanted)
    assert next(spoiled, None) is None
    assert run.num_graphs
