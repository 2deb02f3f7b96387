"""What ranks and their launcher agree on, without processes that train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrow.cli import _ranks
from hotrow.cli._ranks import _Forwarding, show_warnings_of_others
from hotrow.distributed.ranks import first_sentence
from hotrow.run.ranks import RunRanks, find_place
from hotrow.run.stopping import Request, StopAfterStep, leave_closed_terminal

ALONE = {
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job",
}  # fmt: skip


# -- the name of a launch ------------------------------------------------------------------


def launch_of(store: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hotrow.run.ranks.rendezvous", lambda address: iter([(store, 0, 1)]))
    ranks = RunRanks(find_place())
    ranks.connect()
    assert ranks.facts() == {"launch": ranks.launch}
    return ranks.launch


def test_restarts_have_the_name_of_their_launch_which_no_other_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, other = torch.distributed.HashStore(), torch.distributed.HashStore()
    first = launch_of(store, monkeypatch)
    assert first is not None
    assert first.startswith("job/")
    assert launch_of(store, monkeypatch) == first  # a restart
    assert launch_of(other, monkeypatch) != first  # of the same --rdzv-id


def test_only_ranks_of_the_option_are_resumed_with_it() -> None:
    variables = ALONE | {"RANK": "1", "WORLD_SIZE": "3"}
    assert RunRanks(find_place(variables)).option == ""
    started = variables | {"HOTROW_RANK_REPORTS": "folder"}
    assert RunRanks(find_place(started)).option == " --ranks 3"


# -- signals -------------------------------------------------------------------------------


@contextmanager
def deaf_rank(reports: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank that reacts to no signal."""
    words = ["sh", "-c", "trap '' INT TERM; echo ready; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (reports / "1.pid").write_text(str(process.pid))
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_that_hears_no_signal_is_killed_some_seconds_after_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ranks, "_SECONDS_TO_STOP", 0.2)
    with deaf_rank(tmp_path) as process, _Forwarding(tmp_path, 1) as signals:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.4)
        assert process.poll() is None
        signal.raise_signal(signal.SIGINT)
        assert process.poll() is None
        assert process.wait(20) == -signal.SIGKILL
    assert signals.killed == {1}


def test_a_third_signal_kills_at_once(tmp_path: Path) -> None:
    with deaf_rank(tmp_path) as process, _Forwarding(tmp_path, 1) as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert process.wait(5) == -signal.SIGKILL
    assert signals.received == 3


def test_a_closed_terminal_asks_ranks_to_terminate(tmp_path: Path) -> None:
    (tmp_path / "0.pid").write_text(str(os.getpid()))
    got: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    forwarding = _Forwarding(tmp_path, 1)
    with forwarding:
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        signal.raise_signal(signal.SIGHUP)
        assert got == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) == before
    assert forwarding.killed == set()


def test_a_rank_takes_the_signals_of_a_killed_launcher_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with StopAfterStep(ranks=2) as stop:
        for _ in range(3):  # one for each of its threads
            signal.raise_signal(signal.SIGTERM)
        assert stop.requests() == Request.TERMINATE
        monkeypatch.setattr("hotrow.run.stopping._SECONDS_ALIKE", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    with StopAfterStep(ranks=2):  # not of Ctrl-C
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_nohup_stays(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _Forwarding(tmp_path, 1):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_printed_to_a_terminal_that_is_gone() -> None:
    kept, (master, terminal) = os.dup(1), os.openpty()
    try:
        os.dup2(terminal, 1)
        leave_closed_terminal()
        assert os.isatty(1)  # it is still there
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(1, b"lost")
        leave_closed_terminal()
        assert os.write(1, b"to nowhere") == 10
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(terminal)


# -- what is said --------------------------------------------------------------------------


class _Team:
    """The first of several ranks, which have warned of these."""

    is_first = True

    def __init__(self, *others: list[str]) -> None:
        self._others = others

    def do(self, work: Any) -> list[str]:
        return [work(), *map(json.dumps, self._others)]


class _Shown:
    def __init__(self, *warned: str) -> None:
        self.warned = list(warned)

    def warn(self, message: str) -> None:
        self.warned.append(message)


def test_warnings_of_other_ranks_are_shown_once_and_few() -> None:
    shown = _Shown("the budget of 10 B holds 3 rows")
    others = ["one knows", "the budget of 1.2 KiB holds 7 rows", "1.5% is much", "30 MiB is much"]
    team: Any = _Team(others, [*others, "two", "three", "four"])
    show_warnings_of_others(team, shown)
    assert shown.warned[1:] == [
        "rank 1: one knows", "rank 1: 1.5% is much", "rank 2: two",
        "other ranks have 2 more warnings",
    ]  # fmt: skip


def test_torch_is_cited_with_one_sentence() -> None:
    said = (
        "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:54469: Connection reset by peer. "
        "This is typically caused by a remote worker hanging. GLHF!\nmore lines"
    )
    text = (
        "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:54469: Connection reset by peer"
    )
    assert first_sentence(RuntimeError(said)) == text
    assert first_sentence(RuntimeError("")) == ""
