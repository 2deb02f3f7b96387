"""Kills a training process at random moments, lets it go on each time, and compares its end.

    python benchmarks/kill.py --kills 50

A run saves itself every few steps, whole and incremental checkpoints in turn. Its process gets
SIGKILL at moments drawn by a seed: while it takes steps, while it saves, while it loads. The last
process may end. Then rows with their state, dense weights and losses must have the bits of a run
that was not killed, no step may be missing or recorded twice, and memory must not have grown.

Processes are forks of one that has imported everything, so that a round takes as long as its work.
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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import hotrow
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import latest_in
from hotrow.cli import train as command
from hotrow.run.files import read_run, read_steps
from hotrow.run.job import same_bits

RUN = """
[run]
name = "{name}"
threads = 1
save = false
[data]
rows = [{rows}, 300, 40]
batch_size = 64
samples = {samples}
eval_batches = 1
[model]
embedding_dim = 8
bottom = [8]
top = [8]
[embedding]
budget = "40%"
strategy = "{strategy}"
[embedding.optimizer]
name = "adam"
lr = 0.01
[training]
epochs = 2
eval_every = 40
[training.schedule]
warmup_steps = 30
[training.optimizer]
name = "adam"
[checkpoint]
every_steps = 6
full_every = 3
keep = 2
resume = "auto"
"""


@dataclass(frozen=True)
class Ended:
    killed: bool
    seconds: float
    most_bytes: int  # that were resident
    was_saving: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--strategy", default="lookahead")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    import_everything()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            report = rounds(options)
        finally:
            os.chdir("/")
    print(json.dumps(report))
    return 0 if report["equal"] else 1


def import_everything() -> None:
    """What a run imports when it comes to it."""
    import torchmetrics.functional.classification  # noqa: F401

    table = hotrow.EmbeddingBagConfig("t", 10, 4, ["f"])
    hotrow.EmbeddingBagCollection([table], hotrow.SGD(), strategy="all-fast")


def rounds(options: argparse.Namespace) -> dict[str, object]:
    for name in ("whole", "killed"):
        Path(f"{name}.toml").write_text(
            RUN.format(
                name=name,
                rows=options.rows,
                samples=options.steps // 2 * 64,
                strategy=options.strategy,
            )
        )
    whole = run("whole", None)
    draw = random.Random(options.seed)
    kills = saving = resumed = 0
    ended: list[Ended] = []
    while kills < options.kills:
        # Most rounds get further than the last checkpoint, some do not get there.
        ended.append(run("killed", draw.uniform(0.02, 2.5 * whole.seconds / options.kills + 0.3)))
        if not ended[-1].killed:  # it came to its end before its time: once more from the start
            if unlike := differences():
                return {"equal": False, "kills": kills, "unlike": unlike}
            resumed += len(read_run("runs/killed").resumed_after)
            Path("runs/killed").rename(f"runs/done-{kills}-{len(ended)}")
            continue
        kills, saving = kills + 1, saving + ended[-1].was_saving
    ended.append(run("killed", None))
    unlike = differences()
    return {
        "equal": not unlike,
        "unlike": unlike,
        "kills": kills,
        "kills_while_saving": saving,
        "runs_completed": 1 + sum(not each.killed for each in ended[:-1]),
        "resumed": resumed + len(read_run("runs/killed").resumed_after),
        "seconds_uninterrupted": whole.seconds,
        "most_resident_MiB": max(each.most_bytes for each in ended) >> 20,
        "most_resident_uninterrupted_MiB": whole.most_bytes >> 20,
    }


def run(name: str, seconds: float | None) -> Ended:
    """Train in a process of its own, which is killed after so many seconds."""
    if latest_in(Path("runs") / name / "checkpoints") is None:
        shutil.rmtree(Path("runs") / name, ignore_errors=True)
    begun = time.perf_counter()
    child = os.fork()
    if child == 0:
        with open("output.txt", "ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = 1
        try:
            command.train(Path(f"{name}.toml"), as_json=True, runs=Path("runs"))
            code = 0
        finally:
            os._exit(code)
    was_saving = False
    if seconds is not None:
        while time.perf_counter() - begun < seconds and not _has_ended(child):
            time.sleep(0.002)
        if not _has_ended(child):
            os.kill(child, signal.SIGKILL)
            was_saving = any(Path("runs").glob(f"{name}/checkpoints/*.partial"))
    _, status, usage = os.wait4(child, 0)
    killed = os.WIFSIGNALED(status)
    if not killed and os.WEXITSTATUS(status):
        sys.exit(f"{name} failed: {Path('output.txt').read_text()[-3000:]}")
    return Ended(killed, time.perf_counter() - begun, 1024 * usage.ru_maxrss, was_saving)


def _has_ended(child: int) -> bool:
    """Without taking its status away."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def differences() -> list[str]:
    """In what the two runs differ."""
    one, other = (
        Checkpoint(latest_in(Path("runs") / name / "checkpoints") or "")
        for name in ("whole", "killed")
    )
    one.verify()
    other.verify()
    found = [key for key in one.dense if not same_bits(one.dense[key], other.dense[key])]
    for table in one.tables:
        rows = [torch.cat([rows for _, rows in each.rows(table.key)]) for each in (one, other)]
        found += [] if same_bits(*rows) else [table.key]
    steps = [
        [(s.step, s.loss, s.samples) for s in read_steps(f"runs/{n}")] for n in ("whole", "killed")
    ]
    found += [] if steps[0] == steps[1] else ["steps"]
    records = [read_run(f"runs/{name}") for name in ("whole", "killed")]
    found += [] if records[0].evaluations == records[1].evaluations else ["evaluations"]
    found += [] if [s[0] for s in steps[1]] == list(range(1, len(steps[0]) + 1)) else ["numbers"]
    return found


if __name__ == "__main__":
    sys.exit(main())
