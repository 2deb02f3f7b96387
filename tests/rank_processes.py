"""Functions on several ranks: processes with a gloo process group, kept from test to test.

    def gathered(rank: int, world: int, start: int) -> list[int]:
        numbers = [None] * world
        torch.distributed.all_gather_object(numbers, start + rank)
        return numbers

    def test_all_ranks_gather_the_same() -> None:
        assert run(2, gathered, 10) == [[10, 11], [10, 11]]

The function must be at module level. Its arguments and results are pickled, tensors by value.
Every call has a process group of its own. Groups that the function makes are destroyed after it.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import torch
import torch.distributed

ROOT = Path(__file__).parents[1]
KILLED = "killed"  # the result of a rank that SIGKILL or SIGTERM ended
LONGEST_START = 180.0  # seconds until all processes have started
LONGEST_END = 10.0  # seconds for destroying the process groups of a call
_READY = b"ready"
# Without a GPU, processes are forked from one that has imported these, which takes seconds.
_PRELOADED = ["hotrow.cli", "torch._dynamo", "triton.runtime.interpreter", "pytest", "hypothesis"]


@dataclass(frozen=True)
class Failed:
    """The result of a rank that raised, exited, or did not answer in time."""

    kind: str  # the exception's type, "exit", a signal's name, or "timeout"
    message: str
    traceback: str = ""  # where it was raised; after a timeout, the stacks of all threads


@dataclass(frozen=True)
class _Call:
    """What one rank is asked to do."""

    module: str
    file: str | None
    function: str
    arguments: bytes  # can be unpickled once the module is loaded
    world: int
    store: str
    group_timeout: float
    alone: bool


# -- in the tests' process ---------------------------------------------------------------


class Running:
    """A function that runs on several ranks."""

    def __init__(self, processes: list[_Process], timeout: float, grace: float) -> None:
        self._processes, self._grace, self._timeout = processes, grace, timeout
        self._deadline = time.monotonic() + timeout
        self._answers: dict[int, Any] = {}
        self.is_whole = False  # whether all ranks have answered and can be used again

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def results(self, *, expect_errors: bool = False) -> list[Any]:
        """Wait for all ranks, and return their results in rank order.

        Ranks that have not answered in time are stopped. If a rank fails, the others have the
        grace time to end. With `expect_errors` the result of a rank that fails is `Failed` or
        `KILLED`; otherwise any failure raises.
        """
        answers = self._answers
        self._wait()
        if late := [rank for rank in range(len(self._processes)) if rank not in answers]:
            for rank, stacks in zip(late, _stacks(self._processes, late), strict=True):
                message = f"no answer within {self._timeout:g} s, or {self._grace:g} s after a"
                answers[rank] = Failed("timeout", f"{message} failure", stacks)
        results = [answers[rank] for rank in range(len(self._processes))]
        lost = (result == KILLED or _is_lost(result) for result in results)
        self.is_whole = not any(lost)
        if not expect_errors:
            _raise_failures(results)
        return results

    def _wait(self) -> None:
        answers, deadline = self._answers, self._deadline
        while len(answers) < len(self._processes):
            waited = {}
            for rank, process in enumerate(self._processes):
                if rank not in answers:
                    waited |= {process.connection: rank, process.sentinel: rank}
            answered = wait(list(waited), max(0, deadline - time.monotonic()))
            if not answered:
                return
            for rank in {waited[each] for each in answered}:
                answers[rank] = self._processes[rank].answer()
                if isinstance(answers[rank], Failed) or answers[rank] == KILLED:
                    deadline = min(deadline, time.monotonic() + self._grace)


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    grace: float | None = None,
    group_timeout: float = 60,
    expect_errors: bool = False,
    alone: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(rank, world, *args, **kwargs)` on all ranks at once, and return the results
    in rank order.

    If ranks fail, one AssertionError has the traceback of each. With `expect_errors` the result of
    such a rank is `Failed` or `KILLED` instead. After the first failure the others may go on for
    `grace` seconds: 5, or until the timeout with `expect_errors`. `group_timeout` is the timeout
    of the process group. With `alone` new processes are used for this call only, and one that
    fails exits at once, as a script does.
    """
    if grace is None:
        grace = timeout if expect_errors else 5.0
    options = {"timeout": timeout, "grace": grace, "group_timeout": group_timeout, "alone": alone}
    with started(world, function, *args, **options, **kwargs) as running:
        return running.results(expect_errors=expect_errors)


@contextmanager
def started(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    grace: float = 5.0,
    group_timeout: float = 60,
    alone: bool = False,
    **kwargs: Any,
) -> Iterator[Running]:
    """Start a function as `run` does, for tests that do something while it runs: kill a rank by
    its pid, for example. All ranks have their process group then. Ranks that still run at the end
    are stopped."""
    with _only_one(), tempfile.TemporaryDirectory(prefix="hotrow-store-") as folder:
        call = _Call(
            function.__module__,
            getattr(sys.modules[function.__module__], "__file__", None),
            function.__qualname__,
            pickle.dumps((args, kwargs)),
            world,
            str(Path(folder, "store")),
            group_timeout,
            alone,
        )
        processes = _fresh(range(world)) if alone else _kept(world)
        running = Running(processes, timeout, grace)
        try:
            for process in processes:
                process.send(pickle.dumps(call))
            for process in processes:  # one that ends here shows in the results
                process.is_ready(time.monotonic() + timeout)
            yield running
        finally:
            if alone or not running.is_whole or not _cleaned(processes):
                for process in processes:
                    process.stop()
                    if _processes.get(process.rank) is process:
                        del _processes[process.rank]


def stop() -> None:
    """Stop all kept processes; the next call starts new ones."""
    for process in _processes.values():
        process.stop()
    _processes.clear()


class _Process:
    """The process of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        handle, self._stacks = tempfile.mkstemp(prefix="hotrow-stacks-")
        os.close(handle)
        # A process cannot use CUDA if the one it was forked from has.
        context = multiprocessing.get_context(
            "spawn" if torch.cuda.is_available() else "forkserver"
        )
        context.set_forkserver_preload(_PRELOADED)
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(rank, theirs, self._stacks), name=f"rank {rank}", daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, message: bytes) -> None:
        self.connection.send_bytes(message)

    def answer(self) -> Any:
        """Return what the process sent, or how it ended."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            pass
        self._process.join(5)
        code = self._process.exitcode
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return KILLED
        if code is not None and code < 0:
            return Failed(signal.Signals(-code).name, "the process was ended by a signal")
        return Failed("exit", f"the process exited with code {code} before it answered")

    def is_ready(self, deadline: float) -> bool:
        """Wait until the process can take the next call."""
        try:
            return (
                self.connection.poll(max(0, deadline - time.monotonic()))
                and self.connection.recv_bytes() == _READY
            )
        except (EOFError, OSError):
            return False

    def dump(self) -> None:
        """Let the process write the stacks of its threads."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        return Path(self._stacks).read_text(errors="replace")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()
        Path(self._stacks).unlink(missing_ok=True)


_processes: dict[int, _Process] = {}  # by rank; a smaller world uses the first of them
atexit.register(stop)


def _fresh(ranks: Sequence[int]) -> list[_Process]:
    processes = [_Process(rank) for rank in ranks]
    deadline = time.monotonic() + LONGEST_START
    for process in processes:
        if not process.is_ready(deadline):
            for started in processes:
                started.stop()
            raise RuntimeError(f"the process of rank {process.rank} did not start; see its output")
    return processes


def _kept(world: int) -> list[_Process]:
    for rank, process in list(_processes.items()):
        if not process.is_alive:
            process.stop()
            del _processes[rank]
    missing = [rank for rank in range(world) if rank not in _processes]
    _processes.update(zip(missing, _fresh(missing), strict=True))
    return [_processes[rank] for rank in range(world)]


def _cleaned(processes: Sequence[_Process]) -> bool:
    """Let all ranks destroy their process groups, now that no rank needs them. Return whether all
    can be used again."""
    for process in processes:
        process.send(_READY)
    deadline = time.monotonic() + LONGEST_END
    return all(process.is_ready(deadline) for process in processes)


_is_running = False


@contextmanager
def _only_one() -> Iterator[None]:
    """Let one call run at a time on this machine: workers of pytest share the cores, and timeouts
    must not depend on each other's tests."""
    global _is_running
    if _is_running:
        raise RuntimeError("a call on several ranks cannot be made during another one")
    path = Path(tempfile.gettempdir(), f"hotrow-ranks-{os.getuid()}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _is_running = True
        try:
            yield
        finally:
            _is_running = False


def _stacks(processes: Sequence[_Process], ranks: Sequence[int]) -> list[str]:
    for rank in ranks:
        processes[rank].dump()
    time.sleep(0.5)
    return [processes[rank].stacks() for rank in ranks]


def _is_lost(result: Any) -> bool:
    """Return whether a rank has no process that can be used again."""
    names = {"exit", "timeout", *(number.name for number in signal.Signals)}
    return isinstance(result, Failed) and result.kind in names


def _raise_failures(results: Sequence[Any]) -> None:
    parts = []
    for rank, result in enumerate(results):
        if isinstance(result, Failed):
            parts.append(f"rank {rank}: {result.kind}: {result.message}\n{result.traceback}")
        elif isinstance(result, str) and result == KILLED:
            parts.append(f"rank {rank}: killed\n")
    if parts:
        raise AssertionError("\n".join([f"{len(parts)} of {len(results)} ranks failed", *parts]))


# -- in the processes of ranks -----------------------------------------------------------


def _serve(rank: int, connection: Connection, stacks: str) -> None:
    """Answer calls until the tests' process ends."""
    import faulthandler

    # A shell starts background jobs with SIGINT ignored; tests press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Thread(target=_end_with_tests, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's name may not resolve
    torch.set_num_threads(1)
    _prepare()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        gc.collect()
        gc.freeze()  # so that collecting after each call is fast
        connection.send_bytes(_READY)
        while True:
            try:
                call: _Call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            answer, failed = _answer(rank, call, lambda: connection.send_bytes(_READY))
            connection.send_bytes(answer)
            if failed and call.alone:
                return
            connection.recv_bytes()  # all ranks have answered
            _clean()
            connection.send_bytes(_READY)


def _end_with_tests() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _prepare() -> None:
    """Do what conftest.py and pytest do in the tests' process."""
    import hotrow.engine.tuning as tuning
    import interpreter
    from poison import poisoned

    if "TRITON_INTERPRET" in os.environ:
        interpreter.install()
    tuning.DEFAULT = tuning.Tuning(least_certain=0)
    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)


def _filter_warnings() -> None:
    """Treat warnings as tests do. Threads of an earlier call may have left other filters."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    warnings.resetwarnings()
    for entry in settings["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        action, message, category = (*entry.split(":"), "", "")[:3]
        warnings.filterwarnings(action, message, getattr(builtins, category or "Warning"))


def _answer(rank: int, call: _Call, begin: Callable[[], None]) -> tuple[bytes, bool]:
    """Return the pickled result of a call, and whether it failed. `begin` is called once."""
    begun = False
    try:
        _filter_warnings()
        function = _function(call)
        args, kwargs = pickle.loads(call.arguments)
        torch.manual_seed(0)
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(call.store, call.world),
            rank=rank,
            world_size=call.world,
            timeout=timedelta(seconds=call.group_timeout),
        )
        begin()
        begun = True
        return pickle.dumps(function(rank, call.world, *args, **kwargs)), False
    except BaseException as error:
        if not begun:
            begin()
        text = "".join(traceback.format_exception(error))
        # Frames hold what the function made; it must be freed before groups are destroyed.
        traceback.clear_frames(error.__traceback__)
        return pickle.dumps(Failed(type(error).__name__, str(error), text)), True


def _function(call: _Call) -> Callable[..., Any]:
    """Return the function of a call. Test modules are not importable by name, so they are loaded
    from their file under the name that pytest gave them."""
    if call.module not in sys.modules:
        try:
            importlib.import_module(call.module)
        except ModuleNotFoundError:
            if call.file is None:
                raise
            _load(call.module, call.file)
    found: Any = sys.modules[call.module]
    for name in call.function.split("."):
        found = getattr(found, name)
    return found


def _load(name: str, file: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    parent = name.rpartition(".")[0]
    while parent and parent not in sys.modules:
        sys.modules[parent] = ModuleType(parent)
        parent = parent.rpartition(".")[0]
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def _clean() -> None:
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # with all groups made from it
