"""What every test shares: Triton's interpreter where there is no GPU, one thread per worker, a
fixed seed, and poisoned new memory."""

import gc
import os
import signal
import sys
import zlib
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import interpreter
from poison import poisoned

if not torch.cuda.is_available():
    # Triton reads this once, when it is first imported; no test module has been loaded yet.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpreter.install()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background so, and tests that press Ctrl-C would fail.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup; tests close terminals
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: more threads than cores makes small operations many times slower.
    # The variable is for the processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# The same examples every time: what a commit breaks is then known to be that commit's.
# No health check and no deadline depends on how busy the machine is.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="K/N",
        help="run only the tests whose names hash to K modulo N, such as 2/6",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Search for no garbage while tests are found, which takes a third of the time: what is made
    stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is `thinned(n)`, every n-th case is run; the others are slow. What needs a GPU
    is skipped where there is none. Of several workers, one begins with the tests on ranks."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        mark = item.get_closest_marker("thinned")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
    if part := config.getoption("--part"):
        number, _, parts = part.partition("/")
        if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
            raise pytest.UsageError(f"--part={part}: give K/N with K from 0 to N - 1, such as 2/6")
        other = {x for x in items if zlib.crc32(x.nodeid.encode()) % int(parts) != int(number)}
        config.hook.pytest_deselected(items=list(other))
        items[:] = [x for x in items if x not in other]
    if "PYTEST_XDIST_WORKER" in os.environ:
        # These run one at a time. Two workers with such tests would wait for each other, and each
        # would start its own processes.
        items.sort(key=lambda item: not _runs_on_ranks(item))


def _runs_on_ranks(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    names = vars(module.obj).values() if module is not None else ()
    return any(getattr(x, "__module__", None) == "rank_processes" for x in names)


def pytest_collection_finish() -> None:
    """What every test finds is no garbage: tests that collect garbage need not look through it."""
    import torch._dynamo  # noqa: F401  (the first collection imports it: 200,000 objects)

    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Stop the processes of ranks, if a test has started any."""
    if (processes := sys.modules.get("rank_processes")) is not None:
        processes.stop()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before every test, so that a test alone and in company sees the same numbers."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new memory, which is often zero by luck, so that reading it before writing shows."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture(autouse=True)
def _in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few batches are known ahead in a test, and yet rows are to leave in bulk."""
    from hotrow.engine.tuning import Tuning  # now that Triton's variable is set

    monkeypatch.setattr("hotrow.engine.tuning.DEFAULT", Tuning(least_certain=0))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets collections on a CPU use the engine of GPUs, with Triton's interpreter."""
    if not torch.cuda.is_available():
        from hotrow.engine.gpu.rows import gpu_rows

        monkeypatch.setattr("hotrow.embedding.collection._engine", lambda device: gpu_rows)


@pytest.fixture
def seen() -> Any:
    """Captures steps without a GPU, and counts what they do."""
    from graph_replays import Replays  # imports hotrow

    return Replays()
