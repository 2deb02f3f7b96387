"""What fails on one rank raises on all ranks, names it, and leaves the previous checkpoint."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import hotrow
import hotrow.checkpoint.together as together
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import latest_in
from hotrow.checkpoint.manifest import checksum_of
from hotrow.support.files import Disk
from rank_processes import run
from rank_training import RankLoop, RankModel, small_files
from saved_training import OpenFile, names_in

Raised = tuple[str, str]
Call = Callable[[RankLoop, Path], Any]


class Full(OpenFile):
    def write(self, part: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk(Disk):
    """Full for files that have this in their names."""

    name = ""

    def open(self, path: Path) -> Any:
        file = super().open(path)
        return Full(file) if self.name in path.name else file


def raised_by(call: Callable[[], Any]) -> Raised:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def with_full_disk(
    rank: int, world: int, folder: Path, faulty: int, name: str, background: bool
) -> tuple[list[Raised], list[str], list[str]]:
    """Save, save on a disk that is full for one rank, and save again."""
    with small_files():
        loop = RankLoop(rank, world)
        loop.train(0, 1, lambda step: loop.save(folder, step))
        kind = type("Faulty", (FullDisk,), {"name": name if rank == faulty else "no such file"})

        def save(step: int) -> Any:
            return loop.begin(folder, step).wait() if background else loop.save(folder, step)

        with mock.patch("hotrow.checkpoint.writing.Disk", kind):
            errors = [raised_by(lambda: save(2))]
        with mock.patch("hotrow.checkpoint.model.Disk", kind):
            errors.append(raised_by(lambda: hotrow.save_model(folder / "model", loop.model)))
        dist.barrier()
        after = names_in(folder)
        dist.barrier()
        loop.train(1, 2, save)
        hotrow.save_model(folder / "model", loop.model)
        return errors, after, names_in(folder)


FAULTS = [(1, "001-", False), (0, "000-", True), (1, "00001.safetensors", True), (0, "json", False)]


@pytest.mark.parametrize(("faulty", "name", "background"), FAULTS)
def test_a_full_disk_of_one_rank_raises_on_all(
    faulty: int, name: str, background: bool, tmp_path: Path
) -> None:
    results = run(2, with_full_disk, tmp_path, faulty, name, background)
    for rank, (errors, after, at_end) in enumerate(results):
        for kind, text in errors:
            assert kind == "OSError", text
            assert "the disk is full" in text
            assert text.startswith(f"rank {faulty} of 2: ") == (rank != faulty)
        assert after == ["00001-step-1", "latest"]
        assert at_end == ["00001-step-1", "00002-step-2", "latest", "model"]
    Checkpoint(latest_in(tmp_path) or "").verify()


class Broken:
    """A part of a checkpoint."""

    def __init__(self, is_broken: bool) -> None:
        self.is_broken = is_broken

    def state_dict(self) -> dict[str, int]:
        if self.is_broken:
            raise ValueError("it has lost its state")
        return {"steps": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"steps": 1}


def with_broken_part(rank: int, world: int, folder: Path) -> list[Raised]:
    """One rank fails before tensors that are cut among ranks are joined."""
    from torch.distributed.fsdp import fully_shard

    model, errors = RankModel("adam"), []
    fully_shard(model.dense)
    for faulty in (1, 0, 2):  # the last one is no rank
        save = partial(hotrow.save_checkpoint, folder, model, part=Broken(rank == faulty))
        errors.append(raised_by(partial(save, step=1)))
    hotrow.load_checkpoint(folder, model, part=Broken(False))
    return errors


def test_a_rank_that_fails_does_not_keep_others_waiting(tmp_path: Path) -> None:
    why = "it has lost its state"
    first, second = run(2, with_broken_part, tmp_path, group_timeout=20)
    assert first == [("ValueError", f"rank 1 of 2: {why}"), ("ValueError", why), ("", "")]
    assert second == [("ValueError", why), ("ValueError", f"rank 0 of 2: {why}"), ("", "")]
    assert names_in(tmp_path) == ["00001-step-1", "latest"]


def in_own_folder(rank: int, world: int, folder: Path) -> tuple[list[Raised], list[str]]:
    together.SECONDS_TO_SEE = 0.2
    try:
        own, loop = folder / str(rank), RankLoop(rank, world)
        loop.train(0, 1)
        calls: list[Callable[[], Any]] = [
            lambda: loop.save(own, 1),
            lambda: loop.begin(own, 1).wait(),
            lambda: hotrow.save_model(own / "model", loop.model),
            lambda: loop.save(folder / "shared", 1),
            lambda: loop.load(folder / "shared" if rank == 0 else own),
        ]
        errors = [raised_by(call) for call in calls]
        loop.load(folder / "shared")
        return errors, names_in(own) if own.exists() else []
    finally:
        together.SECONDS_TO_SEE = 10.0


def test_folders_that_not_all_ranks_see_are_refused(tmp_path: Path) -> None:
    (rank_0, left), (rank_1, none) = run(2, in_own_folder, tmp_path)
    assert left == none == []
    for own, other in zip(rank_1[:3], rank_0[:3], strict=True):
        assert own[0] == other[0] == "OSError"
        assert other[1] == f"rank 1 of 2: {own[1]}"
        assert str(tmp_path / "1") in own[1]
        assert "all ranks must see the folder" in own[1]
    assert rank_0[3] == rank_1[3] == ("", "")
    assert rank_0[4] == (rank_1[4][0], f"rank 1 of 2: {rank_1[4][1]}")
    assert "is no checkpoint" in rank_1[4][1]


def called_differently(rank: int, world: int, folder: Path) -> list[Raised]:
    loop, other = RankLoop(rank, world), RankLoop(rank, world, "adagrad")
    is_first = rank == 0
    part: Any = object() if is_first else loop.optimizer
    parts = {"a": loop.optimizer} if is_first else {}
    calls: list[Callable[[], Any]] = [
        lambda: loop.save(folder, 1 if is_first else 2),
        lambda: loop.save(folder, 1) if is_first else loop.begin(folder, 1),
        lambda: loop.save(folder, 1) if is_first else loop.load(folder),
        lambda: hotrow.save_checkpoint(folder, loop.model, step=1, **parts),
        lambda: hotrow.save_checkpoint(folder, loop.model, step=1, a=part),
        lambda: loop.save(folder, 1) if is_first else loop.save(folder, -1),
    ]
    errors = [raised_by(call) for call in calls]
    loop.save(folder, 1)
    errors.append(raised_by(lambda: other.load(folder)))
    return errors


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    first, second = run(2, called_differently, tmp_path)
    says = [
        "ranks call save_checkpoint with different arguments: step is 1 on rank 0 and 2 on rank 1",
        "rank 0 calls save_checkpoint, and rank 1 calls begin_checkpoint",
        "rank 0 calls save_checkpoint, and rank 1 calls load_checkpoint",
        "parts is ['a'] on rank 0 and [] on rank 1",
        "which has no state_dict() and load_state_dict()",
        "step must be at least 0, got -1",
        "has rows that Adam has trained",
    ]
    for (kind, text), (other_kind, other), part in zip(first, second, says, strict=True):
        assert part in text
        assert part in other
        assert kind == other_kind
    assert second[4][1] == f"rank 0 of 2: {first[4][1]}"


def damaged_for_one(rank: int, world: int, folder: Path) -> tuple[Raised, Raised]:
    """A shard of rank 1's rows has a wrong bit, and so has a file of its own state."""
    with small_files():
        loop = RankLoop(rank, world)
        loop.train(0, 1, lambda step: loop.save(folder, step))
        errors = []
        for pattern in ("rows/000-00001-*", "state-00001.safetensors"):
            path = sorted((latest_in(folder) or folder).glob(pattern))[-1]
            whole = path.read_bytes()
            dist.barrier()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            errors.append(raised_by(lambda: loop.load(folder)))
            dist.barrier()
            path.write_bytes(whole)
            dist.barrier()
        loop.load(folder)
        return errors[0], errors[1]


def test_a_damaged_file_raises_on_all(tmp_path: Path) -> None:
    for rows, state in run(2, damaged_for_one, tmp_path):
        assert rows[0] == "RowsReplaced"
        assert "its checksum is another" in rows[1]
        assert state[0] == "ValueError"
        assert "its SHA-256 differs" in state[1]


def test_numbers_of_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    run(2, in_steps_saved, tmp_path)
    path = (latest_in(tmp_path) or tmp_path) / "checkpoint.json"
    whole = json.loads(path.read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"ranks": 1}, "shard|is of rank"),
        ({"ranks": 3}, "rows at rank"),
        ({"ranks": 1 << 40}, "ranks cannot have saved it"),
        ({"format": 1}, "its format is 1, and 2 ranks have saved it"),
    ]
    for change, message in changes:
        record = whole | change
        path.write_text(json.dumps(record | {"checksum": checksum_of(record)}))
        with pytest.raises(ValueError, match=message):
            Checkpoint(path.parent)
    path.write_text(json.dumps(whole))
    Checkpoint(path.parent).verify()


def in_steps_saved(rank: int, world: int, folder: Path) -> None:
    RankLoop(rank, world).save(folder, 0)


def saved_inside_join(rank: int, world: int, folder: Path) -> list[Raised]:
    """Rank 1 has no batch left when rank 0 saves."""
    loop, errors = RankLoop(rank, world), []
    batches = [loop.batch(step) for step in range(3 - rank)]
    with hotrow.join(loop.model):
        for step, ids in enumerate(hotrow.ahead(batches, loop.model)):
            loop.model(ids).sum().backward()
            if step == 2:
                errors.append(raised_by(lambda: loop.save(folder, 1)))
    loop.save(folder, 2)
    return errors


def test_a_rank_without_batches_saves_after_the_others(tmp_path: Path) -> None:
    (error,), none = run(2, saved_inside_join, tmp_path)
    assert error[0] == "RankError"
    assert "rank 1 has no batch left and serves the others inside hotrow.join" in error[1]
    assert none == []
    assert names_in(tmp_path) == ["00001-step-2", "latest"]
