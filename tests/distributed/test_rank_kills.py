"""Ranks that are killed while they save leave a whole checkpoint, from which others go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from hotrow.checkpoint import Checkpoint, Save
from hotrow.checkpoint.folder import latest_in, named_latest, saved_in, step_of
from hotrow.run.job import same_bits
from rank_processes import KILLED, Failed, run, started
from rank_training import OWN, TABLES, Everything, RankLoop, small_files

STEPS = 12
KILLS = [
    0,  # rank 0, which saves in the foreground; others go on
    5,  # rank 1, which saves in the background
    *(pytest.param(n, marks=pytest.mark.slow) for n in range(10) if n not in (0, 5)),
]


def trains(
    rank: int, world: int, folder: Path, background: bool, resumes: bool, keeps: bool
) -> list[Everything]:
    """Train to the end with a checkpoint after every step; return all bits of what was resumed, of
    each step (only with `keeps`), and of the end."""
    with small_files(4_000, 500):
        loop, step, kept = RankLoop(rank, world), 0, []
        saves: list[Save] = []
        if resumes:
            step = loop.load(folder).step
            kept.append(loop.everything())

        def after(step: int) -> None:
            if keeps:
                kept.append(loop.everything())
            if saves:
                saves.pop().wait()  # raises its error
            if background:
                saves.append(loop.begin(folder, step, full_every=3, keep=2, log="100%"))
            else:
                loop.save(folder, step, full_every=3, keep=2)

        loop.train(step, STEPS, after)
        return [*kept, loop.everything()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Everything]], float]:
    """By rank the bits of each step, and about how many seconds all steps take."""
    expected = run(2, trains, tmp_path_factory.mktemp("kept"), False, False, True)
    begun = time.monotonic()
    run(2, trains, tmp_path_factory.mktemp("timed"), False, False, False)
    return expected, time.monotonic() - begun


@pytest.mark.parametrize("number", KILLS)
def test_a_kill_leaves_a_whole_checkpoint(
    number: int, tmp_path: Path, undisturbed: tuple[list[list[Everything]], float]
) -> None:
    expected, seconds = undisturbed
    draw, killed, background = random.Random(number), number % 2, number % 3 == 2
    with started(2, trains, tmp_path, background, False, False) as running:
        step = draw.randrange(1, STEPS - 3)
        while (latest := named_latest(tmp_path)) is None or step_of(latest) < step:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 2 * seconds / STEPS))
        os.kill(running.pids[killed], signal.SIGKILL)
        results = running.results(expect_errors=True)
    assert results[killed] == KILLED
    other = results[1 - killed]
    assert isinstance(other, Failed)
    assert other.kind in ("RankError", "RuntimeError"), other.traceback  # hotrow's, or torch's
    assert "another rank has ended" in other.message or "onnection" in other.message
    for path in saved_in(tmp_path):
        Checkpoint(path).verify()
    last = Checkpoint(latest_in(tmp_path) or "")
    state = expected[0][last.step - 1]
    for table in TABLES:
        rows = last.rows(f"embedding.embedding_bags.{table.name}.weight")
        assert same_bits(torch.cat([x for _, x in rows]), state[f"rows {table.name}"])
    if number == 0:
        others_go_on(tmp_path, last.step, expected)


def others_go_on(folder: Path, step: int, expected: list[list[Everything]]) -> None:
    """As many ranks end with the bits of the undisturbed run. Another number of ranks begins with
    the same rows, and goes on."""
    other = shutil.copytree(folder, folder.with_name("other"))
    for (loaded, *_, end), of_rank in zip(
        run(2, trains, folder, False, True, False), expected, strict=True
    ):
        assert all(same_bits(loaded[key], of_rank[step - 1][key]) for key in loaded)
        assert all(same_bits(end[key], of_rank[-1][key]) for key in end)
    for loaded, *_ in run(3, trains, other, False, True, False):
        for key, tensor in expected[0][step - 1].items():
            assert key in OWN or same_bits(loaded[key], tensor)
    last = Checkpoint(latest_in(other) or "")
    last.verify()
    assert (last.step, last.manifest.ranks) == (STEPS, 3 if step < STEPS else 2)
