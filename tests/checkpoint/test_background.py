"""A checkpoint that is written while training goes on is that of the moment of its begin."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
from hotrow.checkpoint import Checkpoint, Save
from hotrow.checkpoint.folder import latest_in, saved_in
from hotrow.run.job import same_bits
from hotrow.store.changed import ChangedRows
from hotrow.store.ram import Store
from hotrow.store.snapshot import Snapshot
from hotrow.support.files import Disk
from saved_training import BATCHES, DEVICE, OpenFile, is_whole, names_in, on_gpu, rows_of
from saved_training import Loop as AnyLoop

FILE_SIZES = (8_000, 500)
STEPS = len(BATCHES)


class Gate:
    """Lets parts of rows be written as permits come."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.seconds = 0.0
        self.fails_after: int | None = None

    def open_all(self) -> None:
        self.permits.release(9_999)


gate = Gate()


class Slow(Disk):
    def open(self, path: Path) -> Any:
        file = super().open(path)
        return _SlowFile(file) if path.parent.name == "rows" else file


class _SlowFile(OpenFile):
    def write(self, part: Any) -> int:
        gate.permits.acquire()
        time.sleep(gate.seconds)
        if gate.fails_after is not None:
            gate.fails_after -= 1
            if gate.fails_after < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(self._file.write(part))


@pytest.fixture(autouse=True)
def _slow(use_disk: Callable[[type[Disk]], None]) -> Iterator[None]:
    gate.__init__()  # type: ignore[misc]
    use_disk(Slow)
    yield
    gate.open_all()


class Loop(AnyLoop):
    def __init__(self, rule: str = "adagrad", **options: Any) -> None:
        super().__init__(rule, **{"strategy": "lookahead", "budget": "40%", **options})

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        gate.open_all()
        return super().save(folder, step, **options)


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
    loop.train(0, step, lambda at: at == step and loop.save(folder, step))
    return files_of(latest_in(folder) or folder)


def behind(folder: Path, step: int, each_step: int, **options: Any) -> Save:
    """A save from `step` on, of which so many parts are written in each step."""
    loop = Loop(**options)
    if loop.embedding.row_access.why_no_snapshot() is None:
        gate.permits = threading.Semaphore(0)
    saves = []

    def after(at: int) -> None:
        if at == step:
            saves.append(loop.begin(folder, step, log="100%"))
        elif saves and each_step:
            gate.permits.release(each_step)

    loop.train(0, len(loop.batches), after)
    if saves[0].why_at_once is None:
        assert not saves[0].done  # all of the steps went by meanwhile
        assert any(
            g.store.snapshot._kept.bits.any() for g in loop.embedding.groups if g.store.snapshot
        )
    gate.open_all()
    saves[0].wait()
    assert saves[0].waited == 0
    loop.embedding.check()
    return saves[0]


@pytest.mark.parametrize(
    ("strategy", "each_step"),
    [*((name, 4) for name in hotrow.STRATEGIES), ("lru", 0), ("lru", 15)],
)
def test_every_strategy_saves_the_rows_of_its_begin(
    strategy: str, each_step: int, tmp_path: Path
) -> None:
    """However fast rows are read."""
    expected = at_once(tmp_path / "at once", 4, strategy=strategy)
    save = behind(tmp_path / "behind", 4, each_step, strategy=strategy)
    assert save.why_at_once is None
    assert files_of(save.wait()) == expected


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "hybrid"])
def test_rows_that_move_while_they_are_saved_are_those_of_the_begin(
    strategy: str, tmp_path: Path
) -> None:
    """Those that no batch looks up move as well, and are stored as of their last gradient."""
    options = {"rule": "dense-adam", "strategy": strategy}
    expected = at_once(tmp_path / "at once", 4, **options)
    assert files_of(behind(tmp_path / "behind", 4, 4, **options).wait()) == expected


FIRST, *OTHERS = [
    ("lookahead", "bulk"),
    ("static", "zero-copy"),
    ("lookahead", "staged"),
    ("lookahead", "zero-copy"),
    ("scratchpipe", "auto"),
    ("all-fast", "auto"),
]
ON_A_DEVICE = [
    FIRST,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    *(on_gpu(*case) for case in (FIRST, *OTHERS)),
]


@pytest.mark.usefixtures("device_engine")
@pytest.mark.parametrize(("strategy", "fill"), ON_A_DEVICE)
def test_rows_on_a_device_are_those_of_the_begin(strategy: str, fill: str, tmp_path: Path) -> None:
    # So few slots that rows leave, and so few in a packet that they go back, while it is saved.
    shares = (
        hotrow.Share(64, 128, True, 16 if fill == "bulk" else 0),
        hotrow.Share(30, 64, True),
    )
    options = {
        "strategy": strategy,
        "fill": fill,
        "device": DEVICE,
        "budget": hotrow.Budget(shares, window_bytes=1 << 14),
        # Where Triton is interpreted, a lookup takes as long as a batch otherwise.
        "batches": [batch[:8] for batch in BATCHES[:6]],
    }
    expected = at_once(tmp_path / "at once", 3, **options)
    save = behind(tmp_path / "behind", 3, 4, **options)
    assert (save.why_at_once is not None) == (strategy == "all-fast")
    assert files_of(save.wait()) == expected


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast", "hybrid"])
def test_a_full_log_makes_training_wait_and_says_how_long(strategy: str, tmp_path: Path) -> None:
    expected = at_once(tmp_path / "at once", 3, strategy=strategy)
    gate.open_all()
    gate.seconds = 0.0005
    loop = Loop(strategy=strategy)
    saves: list[Save] = []
    loop.train(
        0, 6, lambda at: at == 3 and saves.append(loop.begin(tmp_path / "behind", 3, log=100))
    )
    assert files_of(saves[0].wait()) == expected
    assert 0 < saves[0].waited < saves[0].seconds


@pytest.mark.parametrize("background", [False, True])
def test_an_optimizer_may_come_after_the_first_checkpoint(background: bool, tmp_path: Path) -> None:
    """Rows get its state then, which a save under way does not have, and no parent has."""
    gate.open_all()
    gate.seconds = 0.005
    plain = torch.nn.Sequential(torch.nn.Embedding(500, 8))
    model: Any = hotrow.convert(plain, "40%", seed=1, show=False)
    weights = model.state_dict()["0.weight"]
    save = hotrow.begin_checkpoint if background else hotrow.save_checkpoint
    saved = save(tmp_path, model, step=0, full_every=9)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    if isinstance(saved, Save):
        assert saved.why_at_once is None
        saved = saved.wait()
    assert same_bits(torch.cat([rows for _, rows in Checkpoint(saved).rows("0.weight")]), weights)
    parents = []
    for step in (1, 2):
        model(torch.arange(3) * step).sum().backward()
        optimizer.step()
        found = hotrow.save_checkpoint(tmp_path, model, step=step, full_every=9, rows=optimizer)
        parents.append(Checkpoint(found).manifest.parent)
        rows = torch.cat([rows for _, rows in Checkpoint(found).rows("0.weight")])
        assert same_bits(rows[:, :8], model.state_dict()["0.weight"])
        assert same_bits(rows[:, 8:], optimizer.state_dict()["state"][0]["sum"])
    assert [parent and parent.name for parent in parents] == [None, "00002-step-1"]


@pytest.mark.parametrize(
    "strategy", ["lookahead", "all-fast", "cpu", *map(on_gpu, ("lookahead", "scratchpipe", "lru"))]
)
def test_incremental_ones_hold_what_had_changed_at_their_begin(
    strategy: str, tmp_path: Path
) -> None:
    def run(folder: Path, *, background: bool) -> None:
        loop = Loop(strategy=strategy, device=DEVICE)

        def after(at: int) -> None:
            if at in (2, 5, 8) and background:
                gate.open_all()  # the one before comes to its end
                if loop.embedding.row_access.being_saved is not None:
                    loop.embedding.row_access.being_saved.wait()
                gate.permits = threading.Semaphore(3)
                loop.begin(folder, at, full_every=9, log="100%")
            elif at in (2, 5, 8):
                loop.save(folder, at, full_every=9)

        loop.train(0, STEPS, after)
        gate.open_all()
        if background:
            loop.embedding.row_access.being_saved.wait()

    run(tmp_path / "at once", background=False)
    run(tmp_path / "behind", background=True)
    pairs = zip(saved_in(tmp_path / "at once"), saved_in(tmp_path / "behind"), strict=True)
    for number, (one, other) in enumerate(pairs):
        assert is_whole(other) == (number == 0)
        assert files_of(one) == files_of(other)


def test_a_save_that_fails_leaves_the_one_before_and_training_alone(tmp_path: Path) -> None:
    plain = Loop()
    plain.train(0, STEPS)
    loop = Loop()
    saves: list[Save] = []

    def after(at: int) -> None:
        if at == 2:
            loop.save(tmp_path, 2, full_every=9)
        elif at == 4:
            gate.fails_after = 20
            saves.append(loop.begin(tmp_path, 4, full_every=1))

    loop.train(0, STEPS, after)
    with pytest.raises(OSError, match="Input/output error"):
        saves[0].wait()
    assert names_in(tmp_path) == ["00001-step-2", "latest"]
    for group in loop.embedding.groups:
        assert group.store.snapshot is None
    assert all(map(same_bits, rows_of(plain.embedding), rows_of(loop.embedding)))
    gate.fails_after = None
    loop.begin(tmp_path, 12).wait()
    assert Checkpoint(latest_in(tmp_path) or "").step == 12


def test_a_failure_is_reported_by_the_next_save_or_at_the_end(tmp_path: Path) -> None:
    loop, registered = Loop(), atexit._ncallbacks()
    gate.fails_after = 1
    save = loop.begin(tmp_path, 7, full_every=9)
    assert atexit._ncallbacks() == registered + 1
    gate.open_all()
    with pytest.warns(UserWarning, match=r"the checkpoint of step 7 was not saved: \[Errno 5\]"):
        save._at_exit()
    loop.begin(tmp_path, 1, full_every=9).join()
    gate.fails_after = None
    with pytest.warns(UserWarning, match=r"step 1 was not saved: \[Errno 5\]"):
        assert is_whole(loop.save(tmp_path, 2, full_every=9))  # it is no child of one that failed
    assert not is_whole(loop.save(tmp_path, 3, full_every=9))
    assert names_in(tmp_path) == ["00001-step-2", "00002-step-3", "latest"]


def test_one_comes_after_the_other_and_before_rows_are_loaded(tmp_path: Path) -> None:
    loop = Loop()
    first = loop.begin(tmp_path, 1)
    threading.Timer(0.05, gate.open_all).start()
    second = loop.begin(tmp_path, 2)
    assert first.done
    loop.load(first.wait())
    assert second.done
    assert [path.name for path in saved_in(tmp_path)] == ["00001-step-1", "00002-step-2"]


@pytest.mark.parametrize("has_rows", [True, False])
def test_two_models_take_turns_in_a_folder(has_rows: bool, tmp_path: Path) -> None:
    """The second would take away what the first has not finished."""
    first = Loop().begin(tmp_path, 1)
    threading.Timer(0.05, gate.open_all).start()
    other = Loop().model if has_rows else torch.nn.Linear(2, 2)
    second = hotrow.begin_checkpoint(tmp_path, other, step=2)
    assert first.done
    assert hotrow.load_checkpoint(tmp_path, other).step == 2
    assert [first.wait(), second.wait()] == saved_in(tmp_path)


def test_one_that_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    loop = Loop()
    save = loop.begin(tmp_path, 1)
    save.abandon()
    gate.open_all()
    save.join()
    assert list(tmp_path.iterdir()) == []
    assert loop.embedding.groups[0].store.snapshot is None


def test_a_process_killed_meanwhile_has_the_one_before(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the child, whose sums are then the same
    expected = at_once(tmp_path / "at once", 2)
    torch.set_num_threads(threads)
    gate.permits = threading.Semaphore(0)
    child = os.fork()
    if child == 0:
        gc.disable()  # what others have left is bound to threads, of which a fork has none
        torch.set_num_threads(1)
        loop = Loop()

        def after(at: int) -> None:
            if at == 2:
                loop.save(tmp_path / "killed", 2)
                gate.permits = threading.Semaphore(40)
            if at == 4:
                loop.begin(tmp_path / "killed", 4, log="100%")
            if at == 8:
                os.kill(os.getpid(), signal.SIGKILL)

        loop.train(0, STEPS, after)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    root = tmp_path / "killed"
    assert names_in(root) == ["00001-step-2", "00002-step-4.partial", "latest"]
    assert files_of(latest_in(root) or root) == expected
    Loop().save(root, 9)
    assert not list(root.glob("*.partial"))


def test_ctrl_c_while_waiting_ends_the_wait_alone(tmp_path: Path) -> None:
    loop = Loop()
    loop.train(0, 2)
    save = loop.begin(tmp_path, 2)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        save.wait()
    assert not save.done
    gate.open_all()
    assert save.wait() == latest_in(tmp_path)
    assert files_of(save.wait()) == at_once(tmp_path / "other", 2)


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
    snapshot.keep(torch.arange(1000))  # does not wait any more


def test_a_snapshot_may_end_while_a_thread_is_about_to_write() -> None:
    class Ends(Store):
        """The second access finds that the snapshot has ended."""

        asked = 0

        @property
        def snapshot(self) -> Snapshot | None:  # type: ignore[override]
            self.asked += 1
            return Snapshot(self.rows, most=2) if self.asked == 1 else None

    Ends(torch.zeros(4, 2)).will_write(torch.tensor([1]))
