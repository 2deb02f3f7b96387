"""A checkpoint that is written while training goes on is that of the moment of its begin."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotrow
import hotrow.checkpoint.saving as saving
import hotrow.checkpoint.shards as shards
import hotrow.checkpoint.tensors as tensors
import hotrow.embedding.collection
from hotrow.checkpoint import Checkpoint, Save
from hotrow.checkpoint.folder import latest_in, saved_in
from hotrow.engine.gpu.rows import DeviceRows
from hotrow.run.job import same_bits
from hotrow.store.changed import ChangedRows
from hotrow.store.ram import Store
from hotrow.store.snapshot import Snapshot
from hotrow.support.files import Disk

Bag = hotrow.EmbeddingBagConfig
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Two widths, and one of them with tables on both sides of the other.
TABLES = (
    Bag("item", 900, 8, ["item", "last"]),
    Bag("tag", 30, 4, ["tag"]),
    Bag("user", 400, 8, ["user"]),
)
draw = torch.Generator().manual_seed(0)
BATCHES = [
    torch.stack([torch.randint(n, (32,), generator=draw) for n in (900, 900, 30, 400)], dim=1)
    for _ in range(12)
]


class Slow(Disk):
    """Rows are written part by part, as `permits` come."""

    permits = threading.Semaphore(0)
    seconds = 0.0
    fails_after: int | None = None

    def open(self, path: Path) -> Any:
        file = super().open(path)
        return _SlowFile(file) if path.parent.name == "rows" else file


class _SlowFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, part: Any) -> int:
        Slow.permits.acquire()
        time.sleep(Slow.seconds)
        if Slow.fails_after is not None:
            Slow.fails_after -= 1
            if Slow.fails_after < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(self._file.write(part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _SlowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several shards to a table, and several pieces to a shard."""
    monkeypatch.setattr("os.fsync", lambda file: None)  # no machine is lost here
    monkeypatch.setattr(shards, "SHARD_BYTES", 15_000)
    monkeypatch.setattr(tensors, "PIECE_BYTES", 500)
    monkeypatch.setattr(saving, "Disk", Slow)
    monkeypatch.setattr(Slow, "permits", threading.Semaphore(0))
    monkeypatch.setattr(Slow, "seconds", 0.0)
    monkeypatch.setattr(Slow, "fails_after", None)
    yield
    let_all()


def let_all() -> None:
    Slow.permits.release(9_999)


class Loop:
    def __init__(self, **options: Any) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        options = {"strategy": "lookahead", "budget": "40%", "seed": 0, **options}
        self.embedding = hotrow.EmbeddingBagCollection(TABLES, hotrow.Adagrad(lr=0.1), **options)
        dense = torch.nn.Sequential(torch.nn.Linear(28, 6), torch.nn.Dropout(0.3))
        self.model = torch.nn.ModuleDict({"embedding": self.embedding, "dense": dense})
        self.model.to(self.embedding.device)
        self.optimizer = torch.optim.Adam(dense.parameters(), lr=0.01)

    def train(self, after: Any = lambda step: None, *, last: int = len(BATCHES)) -> None:
        # Where Triton is interpreted, a lookup takes as long as a batch otherwise.
        few = type(self.embedding.groups[0]) is DeviceRows and self.embedding.device.type == "cpu"
        batches = [batch[:6] for batch in BATCHES[:10]] if few else BATCHES
        for step, batch in enumerate(hotrow.ahead(batches[:last], self.model), 1):
            self.model["dense"](self.embedding(batch).values()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            after(step)

    def begin(self, folder: Path, step: int, **options: Any) -> Save:
        return hotrow.begin_checkpoint(
            folder, self.model, step=step, optimizer=self.optimizer, **options
        )

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        let_all()
        return hotrow.save_checkpoint(
            folder, self.model, step=step, optimizer=self.optimizer, **options
        )


def files_of(folder: Path) -> dict[str, bytes]:
    """All that a checkpoint holds; its manifest has a time in it."""
    Checkpoint(folder).verify()
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.name != "checkpoint.json"
    }


def at_once(folder: Path, step: int, **options: Any) -> dict[str, bytes]:
    """What a save that nothing goes on beside has written after a step."""
    loop = Loop(**options)
    loop.train(lambda at: at == step and loop.save(folder, step), last=step)
    return files_of(latest_in(folder) or folder)


def behind(folder: Path, step: int, each_step: int, **options: Any) -> Save:
    """A save from `step` on, of which so many parts are written in each step."""
    loop = Loop(**options)
    Slow.permits = threading.Semaphore(
        0 if loop.embedding.row_access.why_no_snapshot() is None else 9_999
    )
    saves = []

    def after(at: int) -> None:
        if at == step:
            saves.append(loop.begin(folder, step, log="100%"))
        elif saves and each_step:
            Slow.permits.release(each_step)

    loop.train(after)
    if saves[0].why_at_once is None:
        assert not saves[0].done  # all of the steps went by meanwhile
        assert any(g.store.snapshot.num_kept for g in loop.embedding.groups if g.store.snapshot)
    let_all()
    saves[0].wait()
    assert saves[0].waited == 0
    loop.embedding.check()
    return saves[0]


@pytest.mark.parametrize("strategy", hotrow.STRATEGIES)
def test_every_strategy_saves_the_rows_of_its_begin(strategy: str, tmp_path: Path) -> None:
    expected = at_once(tmp_path / "at once", 4, strategy=strategy)
    save = behind(tmp_path / "behind", 4, 4, strategy=strategy)
    assert save.why_at_once is None
    assert files_of(save.wait()) == expected


@pytest.mark.parametrize("each_step", [0, 15])
def test_rows_are_those_of_the_begin_however_fast_they_are_read(
    each_step: int, tmp_path: Path
) -> None:
    expected = at_once(tmp_path / "at once", 2, strategy="lru")
    assert files_of(behind(tmp_path / "b", 2, each_step, strategy="lru").wait()) == expected


ON_A_DEVICE = [
    ("lookahead", "bulk"),
    ("static", "zero-copy"),
    ("lookahead", "staged"),
    ("lookahead", "zero-copy"),
    ("scratchpipe", "auto"),
    ("all-fast", "auto"),
]


@pytest.mark.parametrize(
    ("device", "strategy", "fill"),
    [
        *[pytest.param("cuda", *each, marks=on_gpu) for each in ON_A_DEVICE],
        *[("cpu", *each) for each in ON_A_DEVICE[:1]],
        *[pytest.param("cpu", *each, marks=pytest.mark.slow) for each in ON_A_DEVICE[1:]],
    ],
)
def test_rows_on_a_device_are_those_of_the_begin(
    device: str, strategy: str, fill: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: DeviceRows)
    monkeypatch.setattr("hotrow.engine.gpu.bulk._LEAST_CERTAIN", 0)
    monkeypatch.setattr("hotrow.engine.gpu.bulk._PACKETS_IN_LOAD", 1)
    # So few slots that rows leave, and so few in a packet that they go back, while it is saved.
    slots, packed, others = (80, 20, 60) if device == "cpu" else (500, 100, 30)
    shares = (
        hotrow.Share(slots, 128, True, packed if fill == "bulk" else 0),
        hotrow.Share(others, 64, True),
    )
    budget = hotrow.Budget(shares, window_bytes=1 << 14)
    options = {"strategy": strategy, "fill": fill, "device": device, "budget": budget}
    expected = at_once(tmp_path / "at once", 4, **options)
    save = behind(tmp_path / "behind", 4, 4, **options)
    assert (save.why_at_once is not None) == (strategy == "all-fast")
    assert files_of(save.wait()) == expected


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "hybrid"])
def test_a_full_log_makes_training_wait_and_says_how_long(strategy: str, tmp_path: Path) -> None:
    expected = at_once(tmp_path / "at once", 3, strategy=strategy)
    let_all()
    Slow.seconds = 0.0005
    loop = Loop(strategy=strategy)
    saves: list[Save] = []
    loop.train(
        lambda at: at == 3 and saves.append(loop.begin(tmp_path / "behind", 3, log=100)), last=6
    )
    assert files_of(saves[0].wait()) == expected
    assert 0 < saves[0].waited < saves[0].seconds


@pytest.mark.parametrize(
    ("device", "strategy"),
    [
        *[("cpu", each) for each in ("lookahead", "all-fast", "cpu")],
        *[pytest.param("cuda", each, marks=on_gpu) for each in ("lookahead", "scratchpipe", "lru")],
    ],
)
def test_incremental_ones_hold_what_had_changed_at_their_begin(
    device: str, strategy: str, tmp_path: Path
) -> None:
    def run(folder: Path, *, background: bool) -> None:
        loop = Loop(strategy=strategy, device=device)

        def after(at: int) -> None:
            if at in (2, 5, 8) and background:
                let_all()  # the one before comes to its end
                if loop.embedding.row_access.being_saved is not None:
                    loop.embedding.row_access.being_saved.wait()
                Slow.permits = threading.Semaphore(3)
                loop.begin(folder, at, full_every=9, log="100%")
            elif at in (2, 5, 8):
                loop.save(folder, at, full_every=9)

        loop.train(after)
        let_all()
        if background:
            loop.embedding.row_access.being_saved.wait()

    run(tmp_path / "at once", background=False)
    run(tmp_path / "behind", background=True)
    pairs = zip(saved_in(tmp_path / "at once"), saved_in(tmp_path / "behind"), strict=True)
    for number, (one, other) in enumerate(pairs):
        assert (Checkpoint(other).manifest.parent is None) == (number == 0)
        assert files_of(one) == files_of(other)


def test_a_save_that_fails_leaves_the_one_before_and_training_alone(tmp_path: Path) -> None:
    plain = Loop()
    plain.train()
    loop = Loop()
    saves: list[Save] = []

    def after(at: int) -> None:
        if at == 2:
            loop.save(tmp_path, 2, full_every=9)
        elif at == 4:
            Slow.fails_after = 20
            saves.append(loop.begin(tmp_path, 4, full_every=1))

    loop.train(after)
    with pytest.raises(OSError, match="Input/output error"):
        saves[0].wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00001-step-2", "latest"]
    for group in loop.embedding.groups:
        assert group.store.snapshot is None
    for table in TABLES:
        rows = [torch.cat([r for _, r in x.embedding.rows(table.name)]) for x in (plain, loop)]
        assert same_bits(*rows)
    Slow.fails_after = None
    loop.begin(tmp_path, 12).wait()
    assert Checkpoint(latest_in(tmp_path) or "").step == 12


def test_a_failure_that_nobody_asked_for_is_told_by_the_next(tmp_path: Path) -> None:
    loop = Loop()
    Slow.fails_after = 1
    let_all()
    loop.begin(tmp_path, 1).join()
    Slow.fails_after = None
    with pytest.warns(UserWarning, match=r"step 1 was not saved: \[Errno 5\]"):
        loop.begin(tmp_path, 2).wait()
    assert [path.name for path in saved_in(tmp_path)] == ["00001-step-2"]


def test_a_failure_is_told_at_the_end_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    loop = Loop()
    Slow.fails_after = 0
    with monkeypatch.context() as patch:
        patch.setattr("atexit.register", at_exit.append)
        save = loop.begin(tmp_path, 7)
    let_all()
    (end,) = [each for each in at_exit if getattr(each, "__self__", None) is save]
    with pytest.warns(UserWarning, match="the checkpoint of step 7 was not saved: "):
        end()


def test_a_parent_that_failed_has_no_children(tmp_path: Path) -> None:
    loop = Loop()
    Slow.fails_after = 9
    let_all()
    loop.begin(tmp_path, 1, full_every=9).join()
    Slow.fails_after = None
    with pytest.warns(UserWarning, match="step 1 was not saved"):
        assert Checkpoint(loop.save(tmp_path, 2, full_every=9)).manifest.parent is None
    assert Checkpoint(loop.save(tmp_path, 3, full_every=9)).manifest.parent is not None


def test_one_comes_after_the_other_and_before_rows_are_loaded(tmp_path: Path) -> None:
    loop = Loop()
    first = loop.begin(tmp_path, 1)
    threading.Timer(0.05, let_all).start()
    second = loop.begin(tmp_path, 2)
    assert first.done
    hotrow.load_checkpoint(first.wait(), loop.model, optimizer=loop.optimizer)
    assert second.done
    assert [path.name for path in saved_in(tmp_path)] == ["00001-step-1", "00002-step-2"]


@pytest.mark.parametrize("has_rows", [True, False])
def test_two_models_take_turns_in_a_folder(has_rows: bool, tmp_path: Path) -> None:
    """The second would take away what the first has not finished."""
    first = Loop().begin(tmp_path, 1)
    threading.Timer(0.05, let_all).start()
    other = Loop().model if has_rows else torch.nn.Linear(2, 2)
    second = hotrow.begin_checkpoint(tmp_path, other, step=2)
    assert first.done
    assert hotrow.load_checkpoint(tmp_path, other).step == 2
    assert [first.wait(), second.wait()] == saved_in(tmp_path)


def test_one_that_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    loop = Loop()
    save = loop.begin(tmp_path, 1)
    save.abandon()
    let_all()
    save.join()
    assert list(tmp_path.iterdir()) == []
    assert loop.embedding.groups[0].store.snapshot is None


def test_a_process_killed_meanwhile_has_the_one_before(tmp_path: Path) -> None:
    expected = at_once(tmp_path / "at once", 2)
    Slow.permits = threading.Semaphore(0)
    child = os.fork()
    if child == 0:
        gc.disable()  # what others have left is bound to threads, of which a fork has none
        torch.set_num_threads(1)
        loop = Loop()

        def after(at: int) -> None:
            if at == 2:
                loop.save(tmp_path / "killed", 2)
                Slow.permits = threading.Semaphore(40)
            if at == 4:
                loop.begin(tmp_path / "killed", 4, log="100%")
            if at == 8:
                os.kill(os.getpid(), signal.SIGKILL)

        loop.train(after)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    root = tmp_path / "killed"
    assert sorted(path.name for path in root.iterdir()) == [
        "00001-step-2",
        "00002-step-4.partial",
        "latest",
    ]
    assert files_of(latest_in(root) or root) == expected
    Loop().save(root, 9)
    assert not list(root.glob("*.partial"))


@pytest.mark.parametrize("most", [1, 7, 1000])
@pytest.mark.parametrize("some", [False, True])
def test_a_snapshot_is_not_changed_by_who_writes(most: int, some: bool) -> None:
    rows = torch.rand(1000, 3)
    before, only = rows.clone(), None
    ids = torch.arange(1000)
    if some:
        only = ChangedRows(1000)
        ids = torch.randperm(1000)[:600].sort()[0]
        only.note(ids)
    snapshot = Snapshot(rows, most=most, only=only)
    found = torch.zeros(len(ids), 3)

    def read() -> None:
        out = torch.empty(40, 3)
        for first in range(0, len(ids), 40):
            part = ids[first : first + 40]
            what = part if some else slice(int(part[0]), int(part[-1]) + 1)
            found[first : first + len(part)] = snapshot.read(what, out)
            time.sleep(0.001)
        snapshot.end()

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        written = torch.randperm(1000)[:50]
        written[:3] = -1
        snapshot.keep(written)
        written = written[written >= 0]
        rows[written] = torch.rand(len(written), 3)
    assert same_bits(found, before[ids])
    assert (snapshot.waits.seconds > 0) == (most < 1000)
    snapshot.keep(torch.arange(1000))  # nobody waits any more


def test_a_snapshot_may_end_while_somebody_is_about_to_write() -> None:
    class Ends(Store):
        """Whoever asks a second time finds that nobody reads any more."""

        asked = 0

        @property
        def snapshot(self) -> Snapshot | None:  # type: ignore[override]
            self.asked += 1
            return Snapshot(self.rows, most=2) if self.asked == 1 else None

    Ends(torch.zeros(4, 2)).will_write(torch.tensor([1]))
