"""Trains with a checkpoint every 30 s and random kills: memory stays flat, and no row is lost.

    python benchmarks/soak.py --minutes 20

One run, in processes of its own that go on from each other. Some get SIGKILL at moments drawn by a
seed, others end by themselves; each saves itself by the clock, in the background, whole and
incremental checkpoints in turn, and verifies rows while it trains. Meanwhile the resident memory of
the process is read every second: once it has settled, from the first third of its time to the last,
it may grow by what its records take and slots that are used for the first time. At the end the run
is trained once more, by a process that is not killed and that saves nothing but its end, up to the
step of the last checkpoint: rows with their state, dense weights and losses must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from kill import import_everything

from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import latest_in
from hotrow.cli import train as command
from hotrow.run.files import read_steps
from hotrow.run.job import same_bits

RUN = """
[run]
name = "{name}"
threads = {threads}
save = false
[data]
rows = [{rows}, 20000, 300]
batch_size = 512
samples = 200000
eval_batches = 1
[model]
embedding_dim = 16
bottom = [16]
top = [16]
[embedding]
budget = "20%"
[embedding.optimizer]
name = "adagrad"
[training]
steps = {steps}
verify_every = 500
[checkpoint]
{every}
full_every = 4
keep = 2
resume = "auto"
"""
_GROWS = 24 << 20  # bytes: records of steps, first uses of slots, what an allocator holds
_SAVES = 24 << 20  # bytes: a piece of rows, the log and bits, which the first save brings along
_SETTLING, _LEAST_THIRD = 20, 10  # seconds


@dataclass
class Process:
    killed: bool = False
    was_saving: bool = False
    seconds: float = 0.0
    resident: list[int] = field(default_factory=list)

    def growth(self, settling: float) -> int | None:
        """Bytes, from the first third of its time to the last; None: it was too short to tell."""
        settled = self.resident[int(settling) :]
        third = len(settled) // 3
        if third < _LEAST_THIRD:
            return None
        return int(median(settled[-third:]) - median(settled[:third]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--save-seconds", type=float, default=30.0)
    parser.add_argument(
        "--kill-seconds", type=float, default=90.0, help="between kills, on average"
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    import_everything()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            report = soak(options)
        finally:
            os.chdir("/")
    print(json.dumps(report))
    return 0 if report["passed"] else 1


def soak(options: argparse.Namespace) -> dict[str, object]:
    write_run("soaked", options, f"every_seconds = {options.save_seconds}")
    draw, begun, processes = random.Random(options.seed), time.monotonic(), []
    while (left := 60 * options.minutes - (time.monotonic() - begun)) > 1:
        until = draw.expovariate(1 / options.kill_seconds)
        processes.append(run("soaked", min(left, until), signal.SIGKILL))
    # The last one is asked to end, and saves what it has.
    processes.append(run("soaked", 2 * options.save_seconds, signal.SIGTERM))
    last = Checkpoint(latest_in(Path("runs/soaked/checkpoints")) or "")
    write_run("alone", options, f"every_steps = {last.step}", steps=last.step)
    alone = run("alone", None, None)
    unlike = differences(last)
    # From behind the first save on.
    growths = [each.growth(_SETTLING + options.save_seconds) for each in processes]
    grown = [each for each in growths if each is not None]
    growth = max(grown, default=0)
    most, most_alone = max(max(each.resident, default=0) for each in processes), max(alone.resident)
    return {
        "passed": not unlike and growth <= _GROWS and most <= most_alone + _GROWS + _SAVES,
        "unlike": unlike,
        "steps": last.step,
        "minutes": sum(each.seconds for each in processes) / 60,
        "processes": len(processes),
        "kills": sum(each.killed for each in processes),
        "kills_while_saving": sum(each.was_saving for each in processes),
        "most_growth_MiB": growth / 2**20,
        "growth_alone_MiB": (alone.growth(_SETTLING) or 0) / 2**20,
        "processes_long_enough_to_grow": len(grown),
        "most_resident_MiB": most >> 20,
        "most_resident_alone_MiB": most_alone >> 20,
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def write_run(name: str, options: argparse.Namespace, every: str, steps: int = 10**9) -> None:
    facts = {"threads": options.threads, "rows": options.rows, "steps": steps, "every": every}
    Path(f"{name}.toml").write_text(RUN.format(name=name, **facts))


def run(name: str, seconds: float | None, how: signal.Signals | None) -> Process:
    """Train in a process of its own, which gets a signal after so many seconds."""
    found, begun, folder = Process(), time.monotonic(), Path("runs") / name / "checkpoints"
    if latest_in(folder) is None:  # killed before it had one: from the start, under the same name
        shutil.rmtree(folder.parent, ignore_errors=True)
    child = os.fork()
    if child == 0:
        with open("output.txt", "ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = 1
        try:
            command.train(Path(f"{name}.toml"), as_json=True, quiet=True, runs=Path("runs"))
            code = 0
        except BaseException as error:
            code = getattr(error, "exit_code", 1)
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    asked = False
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        found.resident.append(resident(child))
        passed = time.monotonic() - begun
        if how is not None and seconds is not None and passed >= seconds and not asked:
            asked = True
            os.kill(child, how)
            found.was_saving = how == signal.SIGKILL and any(folder.glob("*.partial"))
        time.sleep(0.05 if seconds is not None and seconds - passed < 1 else 1)
    _, status = os.waitpid(child, 0)
    found.killed, found.seconds = os.WIFSIGNALED(status), time.monotonic() - begun
    if not found.killed and os.WEXITSTATUS(status):
        sys.exit(f"{name} failed: {Path('output.txt').read_text()[-3000:]}")
    return found


def resident(process: int) -> int:
    """Anonymous bytes."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 0


def differences(soaked: Checkpoint) -> list[str]:
    """In what the soaked run differs from the one that was left alone."""
    alone = Checkpoint(latest_in(Path("runs/alone/checkpoints")) or "")
    soaked.verify()
    alone.verify()
    found = [key for key in alone.dense if not same_bits(alone.dense[key], soaked.dense[key])]
    for table in alone.tables:
        pieces = zip(alone.rows(table.key), soaked.rows(table.key), strict=True)
        if not all(same_bits(one, other) for (_, one), (_, other) in pieces):
            found.append(table.key)
    steps = [[(s.step, s.loss) for s in read_steps(f"runs/{n}")] for n in ("alone", "soaked")]
    return found + ([] if steps[0] == steps[1] else ["steps"])


if __name__ == "__main__":
    sys.exit(main())
