"""`hotrow train --ranks` and torchrun, as processes: signals, killed ranks, two machines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from commands import SMALL_SETTINGS, settings, succeeds
from hotrow.run.files import read_run, read_steps
from ranked_runs import RUN_TOML, assert_same

__all__ = ["RUN_TOML"]  # the fixture `folder` writes it
HOTROW = [sys.executable, "-m", "hotrow"]
BY_ID = [  # without an endpoint torchrun gives each launch an id of its own
    "--rdzv-id", "job", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
    "--local-addr", "localhost",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
ENDLESS = settings("training.epochs=1000000", "checkpoint.every_steps=10", "training.eval_every=99")
LATEST = Path("runs/small/checkpoints/latest")
LONGEST = 150.0  # seconds, on a busy machine
pytestmark = pytest.mark.usefixtures("folder")


@dataclass
class Started:
    """A command that runs, with its ranks."""

    process: subprocess.Popen[str]

    @property
    def pids(self) -> list[int]:
        """The processes of its ranks, in their order."""
        ranks = {}
        for pid in _children_of(self.process.pid):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            for variable in variables:
                if variable.startswith(b"RANK="):
                    ranks[int(variable[5:])] = pid
        return [pid for _, pid in sorted(ranks.items())]

    def end(self) -> tuple[int, str, str]:
        """Wait; return the exit code, and what was said on both streams."""
        out, err = self.process.communicate(timeout=LONGEST)
        return self.process.returncode, out, err


def _children_of(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended since it was listed
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_children_of(child)]
    return found


@contextmanager
def starting(*words: str, **variables: str) -> Iterator[Started]:
    """Start a command; at the end none of its processes is left."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **variables}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    started, pids = Started(process), list[int]()
    try:
        yield started
    finally:
        if process.poll() is None:
            pids = _children_of(process.pid)
            process.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_until(path: Path, started: Started) -> None:
    deadline = time.monotonic() + LONGEST
    while not path.exists():
        assert started.process.poll() is None, started.end()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(*words: str) -> tuple[int, str, str]:
    with starting(*words) as started:
        return started.end()


def ranks(count: int, *words: str) -> list[str]:
    return [*HOTROW, "train", *words, "--ranks", str(count)]


# -- hotrow train --ranks ------------------------------------------------------------------


def test_the_built_in_job_is_trained_by_two_ranks() -> None:
    given = settings(*SMALL_SETTINGS, "training.check_equality=true")
    code, out, err = ended(*ranks(2, "--json", *given))
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [x["event"] for x in lines].count("start") == 1
    assert lines[0]["ranks"] == 2
    assert lines[-1]["summary"]["equal_to_all_fast"] is True
    assert [x["rank"] for x in lines[-1]["ranks"]] == [0, 1]
    assert len(list(read_steps("runs/default"))) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["lookahead", "all-fast"])
def test_two_ranks_train_on_the_gpus_there_are(strategy: str) -> None:
    given = settings(
        *SMALL_SETTINGS, "training.check_equality=true", "run.device=cuda",
        f"embedding.strategy={strategy}", "checkpoint.every_steps=4",
    )  # fmt: skip
    code, out, err = ended(*ranks(2, *given))
    assert code == 0, err
    assert "yes, to the bit" in out
    devices = [x.device for x in read_run("runs/default").ranks]
    assert devices == ["cuda:0", f"cuda:{1 % torch.cuda.device_count()}"]
    code, out, err = ended(*ranks(2, "runs/default", "--resume", *settings("training.epochs=2")))
    assert code == 0, err
    assert "continues after step 10" in out


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint() -> None:
    with starting(*ranks(2, "run.toml", "--quiet", *ENDLESS)) as started:
        wait_until(LATEST, started)
        os.kill(started.pids[1], signal.SIGKILL)
        code, _, err = started.end()
    assert code == 5
    assert err.count("error: ") == 1
    assert "error: rank 1 was killed by SIGKILL, as a system does" in err
    assert "Traceback" not in err
    assert read_run("runs/small").outcome == "failed"
    begun = int(re.findall(r"step-(\d+)", LATEST.read_text())[0])
    steps = settings(f"training.steps={begun + 5}", "training.eval_every=99")
    code, out, err = ended(*ranks(2, "runs/small", "--resume", *steps))
    assert (code, err) == (0, "")
    assert f"continues after step {begun}" in out
    assert len(list(read_steps("runs/small"))) == begun + 5
    whole = settings("run.name=whole")
    assert ended(*ranks(2, "run.toml", "--quiet", *steps, *whole))[0] == 0
    assert_same("small", "whole", exact=False)  # other evaluations
    for name in ("small", "whole"):
        succeeds("export", name, "--to", "npz", "--out", name)
    assert _bytes_of("small") == _bytes_of("whole")


def _bytes_of(folder: str) -> dict[str, bytes]:
    return {x.name: x.read_bytes() for x in Path(folder).iterdir() if x.suffix == ".npz"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times", "code"), [("SIGINT", 1, 130), ("SIGTERM", 1, 0), ("SIGINT", 2, 130)]
)
def test_a_signal_to_the_launcher_stops_all_ranks(number: str, times: int, code: int) -> None:
    with starting(*ranks(2, "run.toml", "--quiet", *ENDLESS)) as started:
        wait_until(LATEST, started)
        for _ in range(times):
            started.process.send_signal(getattr(signal, number))
            time.sleep(0.1)
        got, out, err = started.end()
    assert got == code, err
    assert "Traceback" not in err
    if times == 1:
        assert err.count("stopping after this step") == 1
        assert "checkpoint of step" in err
        assert "hotrow train runs/small --resume --ranks 2 continues from it" in err
        assert read_run("runs/small").outcome == "interrupted"
        assert out.count("interrupted after") == 1
    else:
        assert "interrupted" in err or "interrupted" in out


@pytest.mark.slow
def test_ranks_stop_and_save_when_their_launcher_is_killed() -> None:
    with starting(*ranks(2, "run.toml", "--quiet", *ENDLESS)) as started:
        wait_until(LATEST, started)
        pids = started.pids
        started.process.kill()
        try:
            assert_stopped(pids)
        finally:
            kill(pids)


def assert_stopped(pids: list[int]) -> None:
    """Assert that ranks end, and that a checkpoint has the last step of their run."""
    deadline = time.monotonic() + LONGEST
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record = read_run("runs/small")
    assert record.outcome == "interrupted"
    assert LATEST.read_text().strip().endswith(f"step-{record.summary.steps}")
    assert Path("runs/small/model/manifest.json").is_file()


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_terminal_that_closes_stops_ranks_which_save() -> None:
    master, terminal = os.openpty()
    words = ranks(2, "run.toml", *ENDLESS)
    process = subprocess.Popen(  # the terminal's session, which gets SIGHUP when it closes
        ["setsid", "--ctty", *words], stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    started, pids, deadline = Started(process), list[int](), time.monotonic() + LONGEST
    os.set_blocking(master, False)
    try:
        while not LATEST.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            with suppress(BlockingIOError):
                os.read(master, 4096)
            time.sleep(0.02)
        pids = started.pids
        assert len(pids) == 2
        os.close(master)
        assert process.wait(LONGEST) == 0
        assert_stopped(pids)
    finally:
        if process.poll() is None:
            pids = [*_children_of(process.pid), process.pid]
        kill(pids)
        process.wait()


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_after_the_second_signal() -> None:
    with starting(*ranks(2, "run.toml", "--quiet", *ENDLESS)) as started:
        wait_until(LATEST, started)
        os.kill(started.pids[1], signal.SIGSTOP)
        begun = time.monotonic()
        for _ in range(2):
            started.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        code, _, err = started.end()
    assert code == 130, err
    assert time.monotonic() - begun < 60
    assert "rank 1 did not stop, and had to be killed" in err or "ranks 0, 1 did not stop" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_errors_of_ranks_are_shown_once() -> None:
    given = settings("embedding.budget=1KiB")
    code, out, err = ended(*ranks(2, "run.toml", *given))
    assert (code, out) == (2, "")
    assert err.startswith("error: the budget of 1.0 KiB of each rank is too small")
    assert err.count("\n") == 1


# -- torchrun ------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_trains_one_run() -> None:
    given = settings("training.check_equality=true")
    code, out, err = ended(*TORCHRUN, "2", "-m", "hotrow", "train", "run.toml", *given)
    assert code == 0, err
    assert out.count("yes, to the bit") == 1
    assert sorted(x.name for x in Path("runs").iterdir()) == ["small"]
    assert len(read_run("runs/small").ranks) == 2


@pytest.mark.slow
def test_torchrun_shows_a_mistake_once_beside_its_table() -> None:
    given = settings("training.stpes=2")
    code, out, err = ended(*TORCHRUN, "2", "-m", "hotrow", "train", "run.toml", *given)
    assert (code, out) == (1, "")
    assert err.count("error: --set training.stpes=2") == 1
    assert "another rank has failed before" in err
    assert "hotrow/cli" not in err  # no traceback of ours


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["default", "c10d"])
def test_torchrun_restarts_ranks_which_end_in_the_same_bits(backend: str) -> None:
    given = settings("training.steps=600", "training.eval_every=200", "checkpoint.every_steps=30")
    options = ["--max-restarts", "2", *(BY_ID if backend == "c10d" else ())]
    words = [*TORCHRUN, "2", *options, "-m", "hotrow", "train", "run.toml", *given]
    assert ended(*words, *settings("run.name=whole"))[0] == 0
    with starting(*words) as started:
        wait_until(LATEST, started)
        os.kill(started.pids[0], signal.SIGKILL)
        code, _, err = started.end()
    assert code == 0, err
    assert len(read_run("runs/small").resumed_after) == 1
    assert_same("small", "whole", exact=True)


@pytest.mark.slow
def test_a_restart_does_not_take_a_run_of_an_earlier_launch_for_its_own(tmp_path: Path) -> None:
    given = settings("training.steps=20", "checkpoint.every_steps=5")
    words = [*TORCHRUN, "2", "--max-restarts", "1", *BY_ID, "-m", "hotrow", "train", "run.toml"]
    words += given
    assert ended(*words)[0] == 0
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n"
        "    import hotrow.run.session as session\n"
        "    def open_data(config):\n"
        "        raise ValueError('the fault of a test')\n"
        "    session.open_data = open_data\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with starting(*words, PYTHONPATH=path) as started:  # its first attempt makes no folder
        code, out, err = started.end()
    assert code == 0, err
    assert "finished after 20 steps" in out
    record = read_run("runs/small-2")
    assert record.resumed_after == ()
    assert record.environment["launch"].startswith("job/")


@pytest.mark.slow
def test_two_launchers_train_one_run_as_two_machines_do() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = settings("training.steps=600", "training.eval_every=200", "checkpoint.every_steps=30")
    words = [
        *TORCHRUN, "1", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "1", "--local-addr", "127.0.0.1",
        "-m", "hotrow", "train", "run.toml", *given,
    ]  # fmt: skip
    with starting(*words) as first, starting(*words) as second:
        wait_until(LATEST, first)
        os.kill(first.pids[0], signal.SIGKILL)
        ends = [first.end(), second.end()]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sum("finished after 600 steps" in out for _, out, _ in ends) == 1
    record = read_run("runs/small")
    assert len(record.ranks) == 2
    assert len(record.resumed_after) == 1
    assert sorted(x.name for x in Path("runs").iterdir()) == ["small"]
    assert ended(*ranks(2, "run.toml", *given, *settings("run.name=whole")))[0] == 0
    assert_same("small", "whole", exact=True)
