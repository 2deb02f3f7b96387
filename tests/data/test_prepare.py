"""`prepare`: what comes out is what a plain reading of the lines says, however it was stopped."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clicks import (
    Line,
    assert_same_grouping,
    counts_of,
    criteo_dense,
    criteo_lines,
    files_of,
    held_back,
    taobao_lines,
    write,
)
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.job import Disk, Settings, needed, share
from preparing import (
    IN_ORDER,
    ONE_COLUMN,
    SMALL_LOG,
    Full,
    Heard,
    Stops,
    all_of,
    prepared,
    small_log,
    total,
)


def criteo(out: Path, *paths: Path, **options: Any) -> Prepared:
    return prepared("criteo", out, *paths, **options)


def small(out: Path, path: Path, **options: Any) -> Prepared:
    """A run of many pieces and stretches, and few files."""
    return prepared("csv", out, path, toml=SMALL_LOG, **{"piece_bytes": 500, **options})


def assert_as_never_stopped(out: Path, path: Path, **options: Any) -> None:
    whole = small(out.with_name("whole"), path, **options)
    assert files_of(out) == files_of(whole.folder)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return small_log(tmp_path / "log.csv")


def assert_holds(data: Prepared, splits: dict[str, list[Line]], category: int = 14) -> None:
    """Every split has these lines, in this order."""
    for name, lines in splits.items():
        assert data.samples(name) == len(lines)
        label, dense = all_of(data, "label", name), all_of(data, "dense", name)
        np.testing.assert_array_equal(label, [int(line[0]) for line in lines])
        np.testing.assert_array_equal(dense, np.array([criteo_dense(each) for each in lines], "f"))
    every = [line for lines in splits.values() for line in lines]
    ids = all_of(data, "ids", *splits)
    for place in range(26):
        texts = [line[category + place] or "00000000" for line in every]
        assert_same_grouping(ids[:, place], texts)
        assert data.table_rows[f"C{place + 1}"] == len(set(texts)) + 1


def test_every_line_is_there_as_the_reference_reads_it(tmp_path: Path) -> None:
    lines = criteo_lines(700)
    data = criteo(tmp_path / "out", write(tmp_path / "train.txt", lines))
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


def test_the_last_of_several_days_is_halved(tmp_path: Path) -> None:
    days = [criteo_lines(n, seed=n) for n in (120, 80, 101)]
    paths = [write(tmp_path / f"day_{i}", lines) for i, lines in enumerate(days)]
    splits = {"train": days[0] + days[1], "test": days[2][:51], "validation": days[2][51:]}
    assert_holds(criteo(tmp_path / "out", *paths), splits)
    write(paths[0], [["junk"]])
    with pytest.raises(ValueError, match="of 102 lines none is left for training"):
        criteo(tmp_path / "none", paths[0], paths[2], bad_rows="skip")


def test_a_random_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = small_log(tmp_path / "log.csv", 1000)
    folders = []
    for number, (seed, workers) in enumerate([(5, 2), (5, 1), (6, 2)]):
        data = small(tmp_path / f"{number}", path, split="random", seed=seed, workers=workers)
        folders.append(files_of(data.folder))
        parts = [data.samples(name) for name in IN_ORDER]
        assert sum(parts) == 1000
        assert 60 < parts[1] < 140
        assert 60 < parts[2] < 140
    assert folders[0] == folders[1] != folders[2]


def test_compressed_files_give_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", criteo_lines(300))
    text = path.read_bytes()
    middle = text.index(b"\n", len(text) // 2) + 1
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    (tmp_path / "parts.gz").write_bytes(gzip.compress(text[:middle]) + gzip.compress(text[middle:]))
    with pa.CompressedOutputStream(str(tmp_path / "a.zst"), "zstd") as file:
        file.write(text)
    plain = criteo(tmp_path / "plain", path)
    for name in ("a.gz", "parts.gz", "a.zst"):
        data = criteo(tmp_path / f"{name}-out", tmp_path / name)
        assert data.manifest.splits == plain.manifest.splits


def test_short_lines_make_shorter_stretches(tmp_path: Path) -> None:
    """What a stretch takes in memory does not depend on how much a line says."""
    path = write(tmp_path / "train.txt", [["0"] + [""] * 39] * 3000)
    with pytest.raises(SystemExit):
        criteo(tmp_path / "out", path, disk=Stops(tmp_path / "out", 30), stretch_bytes=12_000)
    sizes = [each.stat().st_size for each in (tmp_path / "out" / ".work").glob("*.keys")]
    assert len(sizes) > 9, "a stretch of 3 pieces would make 5"
    assert max(sizes) < 12_000 + 9000 // 41 * 200
    data = criteo(tmp_path / "out", path, stretch_bytes=12_000)
    assert data.samples("train") == 3000 - held_back(3000)


@pytest.mark.parametrize(
    ("rows", "room"), [(1000, None), (1000, 8 * 300), (1000, 8 * 1700), (70_000, None)]
)
def test_counts_are_those_of_the_training_split(
    tmp_path: Path, rows: int, room: int | None
) -> None:
    """However many passes they take, because the counts of all rows exceed the memory."""
    path = small_log(tmp_path / "log.csv", 300)
    data = small(tmp_path / "out", path, hash=True, max_rows=rows, values_bytes=room)
    ids = all_of(data, "ids", "train")
    seen = np.concatenate([shard.jagged["seen"].values for shard in data.shards("train")])
    for table, used in (("user", ids[:, 0]), ("item", np.concatenate([ids[:, 1], seen]))):
        np.testing.assert_array_equal(data.counts(table), np.bincount(used, minlength=rows))
    assert {each.ids for each in data.manifest.tables} == {"hash"}


def test_rare_values_share_row_0_and_the_most_frequent_keep_rows(tmp_path: Path) -> None:
    lines = criteo_lines(600, values=300)
    path = write(tmp_path / "train.txt", lines)
    rare = all_of(criteo(tmp_path / "rare", path, min_frequency=4), "ids")
    most = criteo(tmp_path / "most", path, max_rows=9)
    for place in (0, 7, 25):
        uses = counts_of(lines, 14 + place)
        frequent = [uses[line[14 + place]] >= 4 for line in lines]
        np.testing.assert_array_equal(rare[:, place] > 0, frequent)
        assert 0 < sum(frequent) < 600
        rows = all_of(most, "ids")[:, place]
        kept = {line[14 + place] for line, row in zip(lines, rows, strict=True) if row}
        assert (len(kept), most.table_rows[f"C{place + 1}"]) == (8, 9)
        assert min(uses[v] for v in kept) >= max(uses[v] for v in uses.keys() - kept)


def test_hashed_values_have_one_row_each(tmp_path: Path) -> None:
    lines = criteo_lines(400)
    path = write(tmp_path / "train.txt", lines)
    data = criteo(tmp_path / "out", path, hash=True, max_rows=10_000)
    ids = all_of(data, "ids")
    assert set(data.table_rows.values()) == {10_000}
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
    data = criteo(tmp_path / "out", path, values_bytes=room, watch=heard, max_rows=700)
    (text,) = [each for each in heard.texts if "do not fit" in each]
    assert text.startswith("table C3 has more than")
    assert "hashed into 700 rows" in text
    kinds = {each.name: each.ids for each in data.manifest.tables}
    assert kinds.pop("C3") == "hash"
    assert set(kinds.values()) == {"vocabulary"}


def test_what_tables_get_of_the_memory_does_not_depend_on_the_cores() -> None:
    """Or the same command would hash other tables on another machine."""
    shares = [share(4 << 30, None, cores=cores) for cores in (1, 8, 64)]
    assert [each.workers for each in shares] == [1, 8, 16]
    assert [each.idle for each in shares] == [0, 0, 48]
    assert {each.values_bytes for each in shares} == {1696 << 20}
    assert share(needed(17), 17).workers == 17
    with pytest.raises(ValueError, match="17 --workers need"):
        share(needed(17) - 1, 17)
    with pytest.raises(ValueError, match=r"1.0 MiB is too small: 2 --workers need 1.2 GiB"):
        share(1 << 20, 2)


def test_files_whose_numbers_do_not_ascend_are_pointed_out(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"day_{i}", criteo_lines(40, seed=i)) for i in (0, 10, 2)]
    heard = Heard()
    criteo(tmp_path / "1", *paths, watch=heard)
    assert "day_2 is the last one, and by its number that would be day_10" in heard.texts[0]
    heard = Heard()
    criteo(tmp_path / "2", paths[0], paths[2], paths[1], watch=heard)
    criteo(tmp_path / "3", *paths, watch=heard, split="random")
    assert heard.texts == []


def write_parquet(folder: Path) -> list[Path]:
    paths = [folder / "a.parquet", folder / "b.parquet"]
    for path, rows in zip(paths, (170, 230), strict=True):
        user = pa.array([f"user number {i % 30}" for i in range(rows)])
        columns = {"y": [i % 2 for i in range(rows)], "user": user}
        pq.write_table(pa.table(columns), path, row_group_size=95)
    return paths


STOPPED: dict[str, dict[str, Any]] = {
    "time": {},
    "random": {"split": "random"},
    "hashed": {"values_bytes": 24 * 35, "max_rows": 20},  # the larger of both tables
    "parquet": {"kind": "parquet", "toml": ONE_COLUMN, "split": "random"},
    "taobao": {"kind": "taobao", "seed": 3, "event_bytes": 4000, "piece_bytes": 2000},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "random" else n for n in STOPPED]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bytes(
    tmp_path: Path, log: Path, name: str
) -> None:
    options = {"kind": "csv", "toml": SMALL_LOG, "piece_bytes": 500, **STOPPED[name]}
    kind, paths = options.pop("kind"), [log]
    if kind == "parquet":
        paths = write_parquet(tmp_path)
    elif kind == "taobao":
        del options["toml"]
        paths = [write(tmp_path / "events.csv", taobao_lines(40), separator=",")]
    whole = prepared(kind, tmp_path / "whole", *paths, **options)
    assert len(whole.manifest.splits["train"]) > 1
    assert {each.ids for each in whole.manifest.tables} == (
        {"hash", "vocabulary"} if name == "hashed" else {"vocabulary"}
    )
    files = files_of(whole.folder)
    for after in itertools.count():
        out = tmp_path / f"out{after}"
        try:
            prepared(kind, out, *paths, disk=Stops(out, after), **options)
            break  # it was not stopped any more
        except SystemExit:
            prepared(kind, out, *paths, **options)
        assert files_of(out) == files, f"stopped after {after} writes"
    assert after > len(files), "every file was stopped once"


def test_a_run_stopped_again_and_again_ends_with_the_same_bytes(tmp_path: Path, log: Path) -> None:
    out, draw = tmp_path / "out", random.Random(0)
    for _ in range(200):
        try:
            small(out, log, disk=Stops(out, draw.randrange(1, 12)))
            break
        except SystemExit:
            continue
    assert_as_never_stopped(out, log)


@pytest.mark.parametrize(
    ("what", "after", "message"),
    [("shards/*.bin", 22, "it is made again"), (".work/0*.keys", 6, "not whole: reading from")],
)
def test_what_was_damaged_after_a_stop_is_made_again(
    tmp_path: Path, log: Path, what: str, after: int, message: str
) -> None:
    out, heard = tmp_path / "out", Heard()
    with pytest.raises(SystemExit):
        small(out, log, disk=Stops(out, after))
    path = sorted(out.glob(what))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    small(out, log, watch=heard)
    assert any(message in each for each in heard.texts)
    assert_as_never_stopped(out, log)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("after", [2, 11, 21])
def test_kill_9_loses_nothing(tmp_path: Path, log: Path, after: int) -> None:
    out = tmp_path / "out"
    child = os.fork()
    if not child:
        try:
            small(out, log, disk=Stops(out, after, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    small(out, log)
    assert_as_never_stopped(out, log)


@pytest.mark.parametrize(
    "name", ["00001.keys", "001.keys", "train-00001.bin", "001.counts", "manifest.json"]
)
def test_a_full_disk_says_so_and_the_run_can_be_resumed(
    tmp_path: Path, log: Path, name: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(OSError, match=rf"^the disk is full: .*{name} was not written"):
        small(out, log, disk=Full(out, name))
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob(f"{name}*"))
    with pytest.raises(ValueError, match="not finished"):
        Prepared(out)
    small(out, log)
    assert_as_never_stopped(out, log)


def test_other_settings_or_files_are_not_mixed_with_a_stopped_run(
    tmp_path: Path, log: Path
) -> None:
    out, heard = tmp_path / "out", Heard()
    with pytest.raises(SystemExit):
        small(out, log, disk=Stops(out, 5))
    with pytest.raises(ValueError, match="stopped run with other min_frequency"):
        small(out, log, min_frequency=2)
    small_log(log, 121)
    with pytest.raises(ValueError, match="stopped run with other files"):
        small(out, log)
    assert small(out, log, restart=True).samples("train") == 121 - held_back(121)
    with pytest.raises(ValueError, match="data prepared with other seed"):
        small(out, log, seed=1)
    small(out, log, watch=heard)
    assert "already prepared (all checksums are right); nothing to do" in heard.texts[0]


def test_a_run_that_met_a_bad_line_goes_on_if_bad_lines_may_be_skipped(
    tmp_path: Path, log: Path
) -> None:
    log.write_text(log.read_text() + "junk\n")
    with pytest.raises(ValueError, match="line 122: 1 column"):
        small(tmp_path / "out", log)
    assert list((tmp_path / "out" / ".work").glob("*.keys")), "something was read before"
    assert total(small(tmp_path / "out", log, bad_rows="skip")) == 120
    assert_as_never_stopped(tmp_path / "out", log, bad_rows="skip")
    with pytest.raises(ValueError, match="prepared with other bad_rows"):
        small(tmp_path / "out", log)


def test_a_run_that_another_version_left_unfinished_is_not_resumed(
    tmp_path: Path, log: Path
) -> None:
    with pytest.raises(SystemExit):
        small(tmp_path / "out", log, disk=Stops(tmp_path / "out", 3))
    noted = tmp_path / "out" / ".work" / "settings.json"
    settings = json.loads(noted.read_text())
    del settings["work_format"]
    noted.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"another version of hotrow.*--restart begins anew"):
        small(tmp_path / "out", log)


def test_a_folder_of_another_program_is_left_alone(tmp_path: Path, log: Path) -> None:
    out = tmp_path / "site"
    (out / "tables").mkdir(parents=True)
    (out / ".work").mkdir()
    for others in (
        {"schema": "a page", "splits": 1},
        {"made_by": "another 0.1.0", "schema": {}, "splits": {}},
        {"made_by": "hotrow 0.1.0", "dense": {}},
    ):
        (out / "manifest.json").write_text(json.dumps(others))
        before = files_of(out)
        for restart in (False, True):
            with pytest.raises(ValueError, match="holds other files"):
                small(out, log, restart=restart)
    assert files_of(out) == before
    assert (out / "tables").exists()
    with pytest.raises(ValueError, match="is a file; --out is the folder"):
        small(log, log)
    with pytest.raises(ValueError, match="out cannot be made: Not a directory; choose another"):
        criteo(log / "out", write(tmp_path / "a.txt", criteo_lines(3)))


def test_two_processes_do_not_share_a_folder(tmp_path: Path, log: Path) -> None:
    refused = []

    class Second(Disk):
        def append(self, name: str, record: object) -> None:
            if not refused:
                with pytest.raises(ValueError, match="another process is preparing") as error:
                    small(tmp_path / "out", log)
                refused.append(error)
            super().append(name, record)

    small(tmp_path / "out", log, disk=Second(tmp_path / "out"))
    assert refused


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
