"""Threads of C that put rows in their places."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hotrow
import hotrow.store.writer
from hotrow.store.writer import Writer, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no writer: {why_not()}")


@pytest.fixture
def _code_anew() -> Iterator[None]:
    for cached in (hotrow.store.writer._code, hotrow.store.writer.why_not):
        cached.cache_clear()
    yield
    for cached in (hotrow.store.writer._code, hotrow.store.writer.why_not):
        cached.cache_clear()


def some(count: int, width: int, *, num_rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(num_rows, generator=generator)[:count]
    return ids, torch.randn(count, width, generator=generator)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 3, 64, 129])
def test_rows_are_where_they_belong(threads: int, width: int) -> None:
    store = torch.zeros(9000, width)
    expected = store.clone()
    writer = Writer(threads)
    jobs = []
    for seed, count in enumerate((0, 1, 7, 1023, 1024, 1025, 5000)):
        ids, rows = some(count, width, num_rows=9000, seed=seed)
        ids[::3] = -1
        expected[ids[ids >= 0]] = rows[ids >= 0]
        jobs.append(writer.write(store, ids, rows))
    writer.wait(jobs[0])  # of nothing
    writer.wait(jobs[-1])
    assert torch.equal(store, expected)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 1024, 5000])
def test_rows_are_read_after_what_was_written_before(count: int, id_type: torch.dtype) -> None:
    store, writer = torch.zeros(9000, 5), Writer(3)
    ids, rows = some(count, 5, num_rows=9000)
    out = torch.full((count, 5), -1.0)
    writer.write(store, ids.to(id_type), rows)
    asked = ids.clone()
    asked[::3] = -1
    last = writer.read(store, asked.to(id_type), out)
    writer.write(store, ids, torch.zeros(count, 5))
    writer.wait(last)
    rows[::3] = -1
    assert torch.equal(out, rows)


def test_jobs_are_done_in_the_order_in_which_they_were_asked_for() -> None:
    """More of them than the writer remembers at once, all of the same rows."""
    store, writer = torch.zeros(3000, 8), Writer(3)
    ids = torch.arange(3000)
    for job in range(200):
        last = writer.write(store, ids, torch.full((3000, 8), float(job)))
        if job == 150:
            writer.wait(last - 20)
            assert bool((store >= last - 20 - 1).all())
    writer.wait(last)
    assert bool((store == 199).all())


@pytest.mark.parametrize("count", [0, 1, 15, 16, 5000])
@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.usefixtures("_code_anew")
def test_counts_at_places_that_come_often(
    count: int, has_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        assert "there is no C compiler" in str(why_not())
    places = torch.randint(300, (count,), generator=torch.Generator().manual_seed(0))
    counts = torch.arange(300)
    hotrow.store.writer.add_at(counts, places, 7)
    assert torch.equal(counts, torch.arange(300) + 7 * places.bincount(minlength=300))


@pytest.mark.parametrize("bad", [10, -2, 2**62])
def test_a_row_that_the_store_does_not_have_is_told_and_nothing_else_changes(bad: int) -> None:
    store, writer = torch.zeros(12, 4)[1:-1], Writer(2)
    job = writer.write(store, torch.tensor([3, bad]), torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=rf"a row {bad} .* the store does not have"):
        writer.wait(job)
    assert store.nonzero()[:, 0].unique().tolist() == [3]


def test_what_does_not_fit_is_refused() -> None:
    writer, store = Writer(1), torch.zeros(10, 4)
    ids = torch.arange(3)
    for wrong, rows, message in (
        (ids, torch.ones(2, 4), "2 rows for 3 ids"),
        (ids.short(), torch.ones(3, 4), "torch.int16"),
        (ids, torch.ones(3, 5), "do not fit a store"),
        (ids, torch.ones(4, 3).t(), "side by side"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.write(store, wrong, rows)


def test_memory_stays_until_the_job_is_done_and_goes_then() -> None:
    writer = Writer(1)
    store = torch.zeros(50_000, 64)
    gone = []
    for seed in range(8):
        ids, rows = some(40_000, 64, num_rows=50_000, seed=seed)
        gone.append(weakref.ref(rows))
        writer.write(store, ids, rows)
        del ids, rows
    there = weakref.ref(store)
    del store
    writer.wait_for_all()
    assert there() is None
    assert [each() for each in gone] == [None] * 8


@pytest.mark.slow
def test_neither_a_child_nor_the_end_of_a_program_waits_for_ever() -> None:
    """What is taken down after the last line still has its writer."""
    script = """
        import os, torch, hotrow, hotrow.embedding.collection, hotrow.engine.tuning
        from hotrow.engine.gpu.rows import gpu_rows
        from hotrow.store.writer import Writer
        writer = Writer(2)
        store, ids = torch.zeros(100_000, 32), torch.arange(100_000)
        for _ in range(9):
            writer.write(store, ids, torch.ones(100_000, 32))
        child = os.fork()
        if child == 0:
            writer.wait_for_all()  # by threads that are not there
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.write(store, ids, torch.ones(100_000, 32))

        hotrow.embedding.collection._engine = lambda device: gpu_rows
        hotrow.engine.tuning.DEFAULT = hotrow.engine.tuning.Tuning(least_certain=0)
        table = hotrow.EmbeddingBagConfig("t", 100, 4, ["f"])
        budget = hotrow.Budget((hotrow.Share(16, 32, True),), window_bytes=4096)
        embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget=budget, fill="bulk")
        loop = hotrow.ahead([torch.arange(i, i + 4)[:, None] for i in range(30)], embedding)
        for step, batch in enumerate(loop):
            embedding(batch).values().sum().backward()
            if step == 12:
                break
        torch.held = loop, embedding
        print(embedding.traffic().evicted_rows > 0, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.usefixtures("_code_anew")
class TestTheCompiler:
    def test_it_is_asked_once_for_all_programs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        hotrow.store.writer._code()
        (made,) = (tmp_path / "hotrow").iterdir()
        assert made.suffix == ".so"
        hotrow.store.writer._code.cache_clear()
        built = made.stat().st_mtime_ns
        hotrow.store.writer._code()
        assert [path.stat().st_mtime_ns for path in (tmp_path / "hotrow").iterdir()] == [built]

    def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "hotrow").write_text("a file where a folder should be")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert why_not() is None

    @pytest.mark.parametrize(
        ("compiler", "said"),
        [("/bin/false", "/bin/false does not compile writer.c"), ("/no/such/cc", "No such file")],
    )
    @pytest.mark.usefixtures("device_engine")
    def test_without_one_rows_move_zero_copy(
        self, compiler: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CC", compiler)
        assert said in str(why_not())
        assert os.listdir(tmp_path / "hotrow") == []  # nothing half done
        table = hotrow.EmbeddingBagConfig("t", 1000, 4, ["f"])
        embedding = hotrow.EmbeddingBagCollection(
            [table], hotrow.SGD(), budget="50%", strategy="lookahead", fill="bulk"
        )
        choice = embedding.fills()[4]
        assert choice.form == "zero-copy"
        assert said in choice.why
