"""Several ranks of one command: they are started, share the cores, and fail in one sentence."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from uuid import uuid4

import torch
import typer

from hotrow.cli._process import INTERRUPTED, LOST_RANK, USER_ERROR
from hotrow.distributed.ranks import RankError
from hotrow.embedding.row_verifier import CorruptRows
from hotrow.run.config import RunConfig, RunSection
from hotrow.run.ranks import REPORTS, Place, RunRanks
from hotrow.run.stopping import leave_closed_terminal
from hotrow.support.files import Disk
from hotrow.support.messages import many
from hotrow.support.toml import flat

_SENTENCES = (ValueError, OSError, RankError, CorruptRows)  # whose text says enough
_MOST = 1024
_MOST_WARNINGS = 3  # of ranks that show nothing themselves
_LAUNCHER = "HOTROW_RANK_LAUNCHER"  # set by `launch`: its process id
_PR_SET_PDEATHSIG = 1  # of Linux: a signal to this process when its parent ends
_SECONDS_TO_STOP = 10.0  # after a second signal; a rank that waits for another one hears none


@dataclass(frozen=True)
class _End:
    """How a rank has ended."""

    code: int
    text: str = ""  # why it failed
    reason: str = ""  # the same without the rank
    is_lost: bool = False  # it failed because another rank was gone
    at: float = 0.0


# -- in each rank --------------------------------------------------------------------------


def share_cores(run: RunSection, place: Place, variables: Mapping[str, str] = os.environ) -> None:
    """Set the number of threads of a rank: that of the run, else that of the user, else its share
    of the machine's cores. torchrun sets OMP_NUM_THREADS=1 where the user has not set it."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
        return
    given = variables.get("OMP_NUM_THREADS")
    is_of_torchrun = given == "1" and REPORTS not in variables and "RANK" in variables
    if given is None or is_of_torchrun:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))


@contextmanager
def ending_together(ranks: RunRanks) -> Iterator[None]:
    """Inside, a rank trains with the others. An error is shown by the first rank that has one; the
    others are silent."""
    if ranks.size == 1:
        ranks.connect()
        yield
        return
    reports = os.environ.get(REPORTS)
    if reports is not None:
        Disk(Path(reports)).write(f"{ranks.rank}.pid", [str(os.getpid()).encode()])
        _end_with_launcher()
    try:
        ranks.connect()
        yield
        ranks.close()
    except typer.Exit as exited:
        with suppress(RankError):  # the exit code says more
            ranks.close()
        _report(reports, ranks.rank, _End(exited.exit_code))
        raise
    except (KeyboardInterrupt, Exception) as error:
        end = _end_of(error, ranks)
        is_silent = reports is not None or not ranks.failed_first
        _report(reports, ranks.rank, end)
        if not end.is_lost:
            _report_to_torch(end.text if ranks.failed_first else "another rank has failed before")
        ranks.close(has_failed=True)
        if is_silent:
            raise typer.Exit(end.code) from None
        if isinstance(error, _SENTENCES):
            typer.echo(f"error: {end.text}", err=True)
            raise typer.Exit(end.code) from error
        raise
    _report(reports, ranks.rank, _End(0))


def _end_with_launcher() -> None:
    """Let this rank get SIGTERM when the launcher ends: it then stops after a step, and saves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if str(os.getppid()) != os.environ.get(_LAUNCHER):  # it has ended before
            signal.raise_signal(signal.SIGTERM)


def _end_of(error: BaseException, ranks: RunRanks) -> _End:
    is_lost = isinstance(error, RankError)
    if isinstance(error, KeyboardInterrupt):
        text = "; ".join(["interrupted", *map(str, error.args)])
        return _End(INTERRUPTED, text, text, at=time.time())
    text, code = ranks.described(error), LOST_RANK if is_lost else USER_ERROR
    if not isinstance(error, _SENTENCES):
        lines = "".join(traceback.format_exception(error))
        text, code = f"{lines}rank {ranks.rank}: {type(error).__name__}: {error}", 1
    return _End(code, text, str(error), is_lost, time.time())


def _report(reports: str | None, rank: int, end: _End) -> None:
    if reports is not None:
        with suppress(OSError):  # the launcher has gone
            Disk(Path(reports)).write(f"{rank}.json", [json.dumps(asdict(end)).encode()])


def _report_to_torch(text: str) -> None:
    """Let the table that torchrun prints have a sentence in the place of a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        facts = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))


class Warner(Protocol):
    """Shows warnings, or keeps them for the first rank."""

    warned: list[str]

    def warn(self, message: str) -> None: ...


def check_settings(team: RunRanks, command: str, config: RunConfig) -> None:
    """Raise on all ranks if they were given different settings; where data and devices are may
    differ."""
    facts = {
        key: repr(value)
        for key, value in flat(asdict(config))
        if key not in ("run.device", "run.threads", "data.folder")
    }
    team.check_equal(command, [json.loads(x) for x in team.do(lambda: json.dumps(facts))])


def show_warnings_of_others(team: RunRanks, observer: Warner) -> None:
    """Let the first rank show what only others have warned of, but not all. Each has numbers of its
    own."""
    every = [json.loads(text) for text in team.do(lambda: json.dumps(observer.warned))]
    if not team.is_first:
        return
    shown = {_without_numbers(message) for message in observer.warned}
    others: dict[str, str] = {}
    for rank, messages in enumerate(every):
        for message in messages:
            kind = _without_numbers(message)
            if kind not in shown:
                others.setdefault(kind, f"rank {rank}: {message}")
    for message in list(others.values())[:_MOST_WARNINGS]:
        observer.warn(message)
    if (more := len(others) - _MOST_WARNINGS) > 0:
        observer.warn(f"other ranks have {many(more, 'more warning')}")


def _without_numbers(message: str) -> str:
    """Return what kind of warning it is."""
    return re.sub(r"\d[\d.,]*( ?(%|[KMGTP]iB|B\b|ms\b|s\b))?", "", message)


# -- in the process that starts them -------------------------------------------------------


def read_ranks(text: str, place: Place) -> int:
    """Return the number of `--ranks`."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise ValueError(f"--ranks {text}: give a number of ranks from 1 to {_MOST:,}")
    if place.is_started:
        raise ValueError(
            "--ranks starts ranks on this machine, and torchrun has started this one already "
            f"(RANK is {place.rank} of {place.size}): leave out --ranks, or torchrun"
        )
    return int(text)


def launch(words: Sequence[str], ranks: int) -> int:
    """Start `hotrow WORDS` on several ranks of this machine; return the exit code when all have
    ended. What failed first is shown on stderr."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="hotrow-ranks-") as folder:
        reports = Path(folder)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(reports / "torch")),
            signals_to_handle="",  # `_Forwarding` has them
        )
        failures: Mapping[int, Any] = {}
        variables = {REPORTS: folder, _LAUNCHER: str(os.getpid()), **_network()}
        with _variables(variables), _without_log(), _Forwarding(reports, ranks) as signals:
            try:
                elastic_launch(config, sys.executable)("-m", "hotrow", *words)
            except ChildFailedError as error:
                failures = error.failures
        ends = _ends(reports, ranks)
    if killed := [str(rank) for rank in sorted(signals.killed) if rank not in ends]:
        ranks_have = "rank" if len(killed) == 1 else "ranks"
        typer.echo(f"{ranks_have} {', '.join(killed)} did not stop, and had to be killed", err=True)
    return _conclude(ends, failures, was_interrupted=signals.received > 1)


def _conclude(
    ends: Mapping[int, _End], failures: Mapping[int, Any], *, was_interrupted: bool
) -> int:
    """Show why ranks have failed, once; return the exit code."""
    failed = sorted((end for end in ends.values() if end.text), key=lambda end: end.at)
    own = [end for end in failed if not end.is_lost]
    if was_interrupted or any(end.code == INTERRUPTED for end in own):
        said = [end.text for end in own if end.code == INTERRUPTED]
        typer.echo(max(said, key=len, default="interrupted"), err=True)
        return INTERRUPTED
    if own:
        is_same = len(own) > 1 and len({end.reason for end in own}) == 1
        text = own[0].reason if is_same else own[0].text
        typer.echo(own[0].text if own[0].code == 1 else f"error: {text}", err=True)
        return own[0].code
    for rank, failure in sorted(failures.items()):
        if rank not in ends:  # it could not say how it ended
            typer.echo(f"error: rank {rank} {_how(failure.exitcode)}", err=True)
            return LOST_RANK
    if failed:
        typer.echo(f"error: {failed[0].text}", err=True)
        return failed[0].code
    return ends[0].code if 0 in ends else 0


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}, and did not say why"
    name = signal.Signals(-exit_code).name
    why = ", as a system does whose memory is full" if name == "SIGKILL" else ""
    return f"was killed by {name}{why}; if the run has a checkpoint, --resume goes on from it"


def _ends(reports: Path, ranks: int) -> dict[int, _End]:
    ends = {}
    for rank in range(ranks):
        with suppress(OSError):
            ends[rank] = _End(**json.loads((reports / f"{rank}.json").read_text()))
    return ends


class _Forwarding:
    """Passes Ctrl-C and SIGTERM on to the ranks, which have sessions of their own; SIGHUP of a
    closed terminal as SIGTERM. After a second signal ranks have some seconds, after a third none.
    """

    _signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, reports: Path, ranks: int) -> None:
        self.received = 0
        self.killed: set[int] = set()  # ranks
        self._reports, self._ranks = reports, ranks
        self._timer = threading.Timer(_SECONDS_TO_STOP, self._send, [signal.SIGKILL])
        self._timer.daemon = True

    def __enter__(self) -> _Forwarding:
        self._before: dict[signal.Signals, Any] = {}
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                self._before[number] = signal.signal(number, self._forward)
        return self

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received += 1
        if number == signal.SIGHUP:
            leave_closed_terminal()
            number = signal.SIGTERM
        if len(list(self._reports.glob("*.pid"))) < self._ranks:  # torch ends those there are
            raise KeyboardInterrupt
        self._send(number if self.received < 3 else signal.SIGKILL)
        if self.received == 2:
            self._timer.start()

    def _send(self, number: int) -> None:
        for path in self._reports.glob("*.pid"):
            with suppress(OSError):  # it has ended
                os.kill(int(path.read_text()), number)
                if number == signal.SIGKILL:
                    self.killed.add(int(path.stem))

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, the environment has these variables, which ranks inherit."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _network() -> dict[str, str]:
    """Return what lets ranks of one machine meet, whether or not its name can be resolved."""
    names = [name for _, name in socket.if_nameindex()]
    if "GLOO_SOCKET_IFNAME" in os.environ or "lo" not in names:
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo"}


@contextmanager
def _without_log() -> Iterator[None]:
    """Inside, torch's launcher logs nothing: ranks say themselves what happens."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
