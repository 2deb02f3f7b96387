"""`prepare`: what comes out is what a plain reading of the lines says, however it was stopped."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clicks import (
    Line,
    assert_same_grouping,
    counts_of,
    criteo_dense,
    criteo_lines,
    files_of,
    held_back,
    write,
)
from hotrow.data.prepared import Prepared, encoding, work
from hotrow.data.prepared.job import NoWatch, Settings, Share, needed, share
from hotrow.data.prepared.layouts import LAYOUTS
from hotrow.data.prepared.sources import TextSource
from hotrow.data.prepared.spool import Disk, Spool
from hotrow.data.prepared.work import prepare


class Heard(NoWatch):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "PIECES", 3)
    monkeypatch.setattr("os.fsync", lambda handle: None)  # nobody switches the machine off
    monkeypatch.setattr(encoding, "CHUNK", 50)


IN_ORDER = ("train", "test", "validation")  # of the lines, in Criteo's splits


def run(
    out: Path, *paths: Path, kind: str = "criteo", piece_bytes: int = 9000, **options: Any
) -> Prepared:
    """`room`: bytes for the values of tables, instead of what --memory leaves for them."""
    options.setdefault("workers", 2)
    room = options.pop("room", None)
    others = {
        key: options.pop(key) for key in ("workers", "restart", "watch", "disk") if key in options
    }
    source = TextSource(LAYOUTS[kind], paths, piece_bytes=piece_bytes)
    with pytest.MonkeyPatch.context() as patch:
        if room is not None:
            patch.setattr(work, "share", lambda memory, workers: Share(workers, 0, room))
        prepare(source, out, Settings(**options), **others)
    return Prepared(out)


def together(data: Prepared, split: str) -> tuple[Any, Any, Any]:
    shards = data.shards(split)
    columns = ([s.ids for s in shards], [s.dense for s in shards], [s.label for s in shards])
    ids, dense, label = (np.concatenate(each) for each in columns)
    return ids, dense, label


def assert_holds(data: Prepared, splits: dict[str, list[Line]], category: int = 14) -> None:
    """Every split has these lines, in this order."""
    for name, lines in splits.items():
        assert data.samples(name) == len(lines)
        _, dense, label = together(data, name)
        np.testing.assert_array_equal(label, [int(line[0]) for line in lines])
        np.testing.assert_array_equal(dense, np.array([criteo_dense(each) for each in lines], "f"))
    every = [line for lines in splits.values() for line in lines]
    ids = np.concatenate([together(data, name)[0] for name in splits])
    for place in range(26):
        texts = [line[category + place] or "00000000" for line in every]
        assert_same_grouping(ids[:, place], texts)
        assert data.table_rows[f"C{place + 1}"] == len(set(texts)) + 1


def test_every_line_is_there_as_the_reference_reads_it(tmp_path: Path) -> None:
    lines = criteo_lines(700)
    data = run(tmp_path / "out", write(tmp_path / "train.txt", lines))
    last = held_back(700)
    train, test = 700 - last, last - last // 2
    assert len(data.manifest.splits["train"]) > 3
    assert_holds(
        data,
        {
            "train": lines[:train],
            "test": lines[train : train + test],
            "validation": lines[train + test :],
        },
    )
    data.verify()
    assert not (tmp_path / "out" / ".work").exists()


def test_of_several_days_the_last_is_halved(tmp_path: Path) -> None:
    days = [criteo_lines(n, seed=n) for n in (120, 80, 101)]
    paths = [write(tmp_path / f"day_{i}", lines) for i, lines in enumerate(days)]
    data = run(tmp_path / "out", *paths)
    assert_holds(
        data, {"train": days[0] + days[1], "test": days[2][:51], "validation": days[2][51:]}
    )


def test_too_few_lines_to_train_on_are_an_error(tmp_path: Path) -> None:
    days = [write(tmp_path / "day_0", [["junk"]]), write(tmp_path / "day_1", criteo_lines(3))]
    with pytest.raises(ValueError, match="of 4 lines none is left for training"):
        run(tmp_path / "out", *days, bad_rows="skip")


def test_a_random_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(1000))
    one = run(tmp_path / "1", path, split="random", seed=5)
    other = run(tmp_path / "2", path, split="random", seed=5, workers=1)
    third = run(tmp_path / "3", path, split="random", seed=6)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    assert files_of(tmp_path / "1") != files_of(tmp_path / "3")
    for data in (one, other, third):
        parts = [data.samples(name) for name in IN_ORDER]
        assert sum(parts) == 1000
        assert 60 < parts[1] < 140
        assert 60 < parts[2] < 140


def test_compressed_files_give_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", criteo_lines(300))
    (tmp_path / "a.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pa.CompressedOutputStream(str(tmp_path / "a.zst"), "zstd") as file:
        file.write(path.read_bytes())
    plain = run(tmp_path / "plain", path)
    for name in ("a.gz", "a.zst"):
        data = run(tmp_path / f"{name}-out", tmp_path / name)
        assert data.manifest.splits == plain.manifest.splits


def test_short_lines_make_shorter_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stretch takes in memory does not depend on how much a line says."""
    monkeypatch.setattr(Spool, "BYTES", 12_000)
    lines = [["0"] + [""] * 39] * 3000
    path = write(tmp_path / "train.txt", lines)
    disk = Stops(tmp_path / "out", 30)
    with pytest.raises(SystemExit):
        run(tmp_path / "out", path, disk=disk)
    sizes = [each.stat().st_size for each in (tmp_path / "out" / ".work").glob("*.keys")]
    assert len(sizes) > 9, "a stretch of 3 pieces would make 5"
    assert max(sizes) < 12_000 + 9000 // 41 * 200
    assert run(tmp_path / "out", path).samples("train") == 3000 - held_back(3000)


def test_counts_are_those_of_the_training_split(tmp_path: Path) -> None:
    lines = criteo_lines(500)
    data = run(tmp_path / "out", write(tmp_path / "train.txt", lines))
    ids, _, _ = together(data, "train")
    for place in range(26):
        counts = data.counts(f"C{place + 1}")
        np.testing.assert_array_equal(counts, np.bincount(ids[:, place], minlength=len(counts)))


def test_counts_of_a_table_larger_than_the_memory_come_in_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(300))
    for room in (8 * 300, 8 * 1700, 8 * 10**6):
        data = run(tmp_path / f"{room}", path, hash=True, max_rows=1000, room=room)
        ids, _, _ = together(data, "train")
        for place in (0, 1, 25):
            counts = data.counts(f"C{place + 1}")
            np.testing.assert_array_equal(counts, np.bincount(ids[:, place], minlength=1000))


def test_rare_values_share_row_0(tmp_path: Path) -> None:
    lines = criteo_lines(600, values=300)
    data = run(tmp_path / "out", write(tmp_path / "train.txt", lines), min_frequency=4)
    ids = np.concatenate([together(data, name)[0] for name in IN_ORDER])
    for place in (0, 7, 25):
        uses = counts_of(lines, 14 + place)
        frequent = [uses[line[14 + place]] >= 4 for line in lines]
        np.testing.assert_array_equal(ids[:, place] > 0, frequent)
        assert 0 < sum(frequent) < 600


def test_the_most_frequent_values_keep_rows(tmp_path: Path) -> None:
    lines = criteo_lines(600, values=300)
    data = run(tmp_path / "out", write(tmp_path / "train.txt", lines), max_rows=9)
    ids = np.concatenate([together(data, name)[0] for name in IN_ORDER])
    for place in (0, 11):
        uses = counts_of(lines, 14 + place)
        assert data.table_rows[f"C{place + 1}"] == 9
        kept = {line[14 + place] for line, row in zip(lines, ids[:, place], strict=True) if row}
        assert len(kept) == 8
        assert min(uses[v] for v in kept) >= max(uses[v] for v in uses.keys() - kept)


def test_hashing_needs_no_vocabulary(tmp_path: Path) -> None:
    lines = criteo_lines(400)
    data = run(tmp_path / "out", write(tmp_path / "train.txt", lines), hash=True, max_rows=10_000)
    ids = np.concatenate([together(data, name)[0] for name in IN_ORDER])
    assert set(data.table_rows.values()) == {10_000}
    assert {each.ids for each in data.manifest.tables} == {"hash"}
    for place in range(26):
        by_text: dict[str, set[int]] = {}
        for line, row in zip(lines, ids[:, place].tolist(), strict=True):
            by_text.setdefault(line[14 + place], set()).add(row)
        assert all(len(rows) == 1 for rows in by_text.values())
        assert len(set().union(*by_text.values())) >= len(by_text) - 2


def test_a_table_that_does_not_fit_the_memory_is_hashed_and_said_so(tmp_path: Path) -> None:
    lines = criteo_lines(900, values=2000)
    for number, line in enumerate(lines):
        line[16] = f"{number:08x}"  # C3: a new value in every line
    heard = Heard()
    room = 16 * (sum(len(counts_of(lines, c)) for c in range(14, 40)) - 100)
    path = write(tmp_path / "train.txt", lines)
    data = run(tmp_path / "out", path, room=room, watch=heard, max_rows=700)
    (text,) = [each for each in heard.texts if "do not fit" in each]
    assert text.startswith("table C3 has more than")
    assert "hashed into 700 rows" in text
    kinds = {each.name: each.ids for each in data.manifest.tables}
    assert kinds.pop("C3") == "hash"
    assert set(kinds.values()) == {"vocabulary"}


def test_too_little_memory_says_how_much_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(10))
    with pytest.raises(ValueError, match=r"1.0 MiB is too small: 2 --workers need 1.2 GiB"):
        run(tmp_path / "out", path, memory_bytes=1 << 20)


def test_what_tables_get_of_the_memory_does_not_depend_on_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the same command would hash other tables on another machine."""
    found = []
    for cores in (1, 8, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)))
        found.append(share(4 << 30, None))
    assert [each.workers for each in found] == [1, 8, 16]
    assert [each.idle for each in found] == [0, 0, 48]
    assert {each.values_bytes for each in found} == {1696 << 20}
    assert share(needed(17), 17).workers == 17
    with pytest.raises(ValueError, match="17 --workers need"):
        share(needed(17) - 1, 17)


def test_files_whose_numbers_do_not_ascend_are_pointed_out(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"day_{i}", criteo_lines(40, seed=i)) for i in (0, 10, 2)]
    heard = Heard()
    run(tmp_path / "1", *paths, watch=heard)
    assert "day_2 is the last one, and by its number that would be day_10" in heard.texts[0]
    heard = Heard()
    run(tmp_path / "2", paths[0], paths[2], paths[1], watch=heard)
    run(tmp_path / "3", *paths, watch=heard, split="random")
    assert heard.texts == []


class Stops(Disk):
    """Fails after so many files, as if the machine had been switched off."""

    def __init__(self, folder: Path, after: int) -> None:
        super().__init__(folder)
        self._left = after

    def write(self, name: str, parts: Any, *, durable: bool = True) -> Any:
        self._left -= 1
        if self._left < 0:
            path = self.folder / f"{name}.partial"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
            raise SystemExit("stopped")
        return super().write(name, parts, durable=durable)

    def append(self, name: str, line: str) -> None:
        self._left -= 1
        if self._left < 0:
            with (self.folder / name).open("ab") as file:
                file.write(b"\n" + line.encode()[: len(line) // 2])
            raise SystemExit("stopped")
        super().append(name, line)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("split", ["time", "random"])
def test_a_run_stopped_anywhere_ends_with_the_same_bytes(tmp_path: Path, split: str) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(500))
    run(tmp_path / "whole", path, split=split)
    whole = files_of(tmp_path / "whole")
    writes = 0
    for after in (0, 1, 2, 5, 11, 14, 15, 30, 43, 45, 47, 60, 75):
        out = tmp_path / f"out{after}"
        try:
            run(out, path, split=split, disk=Stops(out, after))
            break  # it was not stopped any more
        except SystemExit:
            writes = after
        run(out, path, split=split)
        assert files_of(out) == whole, f"stopped after {after} writes"
    assert writes >= 60, "the last stages were stopped, too"


def test_a_run_stopped_again_and_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(500))
    run(tmp_path / "whole", path)
    out, draw = tmp_path / "out", random.Random(0)
    for _ in range(200):
        try:
            run(out, path, disk=Stops(out, draw.randrange(1, 60)))
            break
        except SystemExit:
            continue
    assert files_of(out) == files_of(tmp_path / "whole")


def test_tables_that_were_hashed_stay_so_after_a_stop(tmp_path: Path) -> None:
    lines = criteo_lines(900, values=4000)
    path = write(tmp_path / "train.txt", lines)
    distinct = sum(len(counts_of(lines, c)) for c in range(14, 40))
    settings: dict[str, Any] = {"room": 16 * distinct // 2, "max_rows": 50}
    whole = run(tmp_path / "whole", path, **settings)
    assert 1 <= sum(each.ids == "hash" for each in whole.manifest.tables) < 26
    for after in (7, 13, 19, 33):
        out = tmp_path / f"out{after}"
        with pytest.raises(SystemExit):
            run(out, path, disk=Stops(out, after), **settings)
        run(out, path, **settings)
        assert files_of(out) == files_of(tmp_path / "whole")


def test_a_finished_shard_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(500))
    run(tmp_path / "whole", path)
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        run(out, path, disk=Stops(out, 48))
    shard = sorted((out / "shards").glob("*.bin"))[0]
    data = bytearray(shard.read_bytes())
    data[5] ^= 255
    shard.write_bytes(data)
    heard = Heard()
    run(out, path, watch=heard)
    assert any("it is made again" in each for each in heard.texts)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_spool_that_was_damaged_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(500))
    run(tmp_path / "whole", path)
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        run(out, path, disk=Stops(out, 8))
    spool = sorted((out / ".work").glob("*.keys"))[1]
    spool.write_bytes(spool.read_bytes()[:-1])
    heard = Heard()
    run(out, path, watch=heard)
    assert any("not whole: reading from there" in each for each in heard.texts)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("seconds", [0.05, 0.4])
def test_kill_9_loses_nothing(tmp_path: Path, seconds: float) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(3000))
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from hotrow.data.prepared.job import Settings
        from hotrow.data.prepared.layouts import LAYOUTS
        from hotrow.data.prepared.sources import TextSource
        from hotrow.data.prepared.spool import Disk, Spool
        from hotrow.data.prepared.work import prepare
        class Slow(Disk):
            def append(self, name, line):
                time.sleep(0.02)
                super().append(name, line)
        Spool.PIECES = 3
        path, out = map(Path, sys.argv[1:])
        print("ready", flush=True)
        prepare(TextSource(LAYOUTS["criteo"], [path], piece_bytes=9000), out,
                Settings(), workers=2, disk=Slow(out))
    """)
    out = tmp_path / "out"
    command = [sys.executable, "-c", script, str(path), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    run(out, path)
    run(tmp_path / "whole", path)
    assert files_of(out) == files_of(tmp_path / "whole")


class Full(Disk):
    """No room for one file."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._name = name

    def open(self, path: Path) -> Any:
        file = super().open(path)
        if self._name in path.name:
            file.close()
            return Path("/dev/full").open("wb", buffering=0)
        return file


@pytest.mark.parametrize(
    "name", ["00002.keys", "003.keys", "train-00001.bin", "004.counts", "manifest.json"]
)
def test_a_full_disk_says_so_and_the_run_can_be_resumed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(500))
    out = tmp_path / "out"
    with pytest.raises(OSError, match=rf"^the disk is full: .*{name} was not written"):
        run(out, path, disk=Full(out, name))
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob(f"{name}*"))
    with pytest.raises(ValueError, match="not finished"):
        Prepared(out)
    run(out, path)
    run(tmp_path / "whole", path)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_other_settings_or_files_are_not_mixed_with_a_stopped_run(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(300))
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        run(out, path, disk=Stops(out, 5))
    with pytest.raises(ValueError, match="stopped run with other min_frequency"):
        run(out, path, min_frequency=2)
    write(path, criteo_lines(301))
    with pytest.raises(ValueError, match="stopped run with other files"):
        run(out, path)
    assert run(out, path, restart=True).samples("train") == 301 - held_back(301)
    with pytest.raises(ValueError, match="data prepared with other seed"):
        run(out, path, seed=1)
    heard = Heard()
    run(out, path, watch=heard)
    assert "already prepared (all checksums are right); nothing to do" in heard.texts[0]


def test_a_run_that_met_a_bad_line_goes_on_if_bad_lines_may_be_skipped(tmp_path: Path) -> None:
    lines = criteo_lines(300)
    lines[250] = ["junk"]
    path = write(tmp_path / "train.txt", lines)
    with pytest.raises(ValueError, match="line 251: 1 column"):
        run(tmp_path / "out", path)
    assert list((tmp_path / "out" / ".work").glob("*.keys")), "something was read before"
    run(tmp_path / "out", path, bad_rows="skip")
    run(tmp_path / "whole", path, bad_rows="skip")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    with pytest.raises(ValueError, match="prepared with other bad_rows"):
        run(tmp_path / "out", path)


def test_a_folder_with_somebody_elses_manifest_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(10))
    out = tmp_path / "site"
    (out / "tables").mkdir(parents=True)
    (out / ".work").mkdir()
    for others in ('{"name": "a page"}', '{"made_by": "hotrow 0.1.0", "dense": {}}'):
        (out / "manifest.json").write_text(others)
        with pytest.raises(ValueError, match="holds other files"):
            run(out, path, restart=True)
    assert (out / "tables").exists()
    assert (out / "manifest.json").exists()
    with pytest.raises(ValueError, match="is a file; --out is the folder"):
        run(path, path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(10))
    with pytest.raises(ValueError, match="holds other files"):
        run(tmp_path, path)
    with pytest.raises(ValueError, match="holds other files"):
        run(tmp_path, path, restart=True)
    assert path.exists()


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(100))
    found = []

    class Second(Disk):
        def append(self, name: str, line: str) -> None:
            if not found:
                with pytest.raises(ValueError, match="another process is preparing") as error:
                    run(tmp_path / "out", path)
                found.append(error)
            super().append(name, line)

    run(tmp_path / "out", path, disk=Second(tmp_path / "out"))
    assert found


SETTINGS = [
    ({"min_frequency": 0}, "--min-frequency must be at least 1"),
    ({"max_rows": 1}, "--max-rows must be at least 2"),
    ({"hash": True}, "--hash needs --max-rows"),
    ({"hash": True, "max_rows": 9, "min_frequency": 2}, "takes no --min-frequency"),
    ({"split": "day"}, "--split must be time or random"),
    ({"bad_rows": "keep"}, "--bad-rows must be skip or error"),
    ({"seed": -1}, "--seed must be at least 0"),
]


@pytest.mark.parametrize(("options", "message"), SETTINGS)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)
