"""Bad input: a clear word about where and what, or left out and counted; never a wrong number."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clicks import Line, criteo_lines, write
from hotrow.data.prepared import Prepared, arrow
from hotrow.data.prepared.arrow import column_keys, floats, none_if_empty, texts_of, whole_numbers
from hotrow.data.prepared.job import Settings
from hotrow.data.prepared.layouts import LAYOUTS
from hotrow.data.prepared.pieces import Piece, Place
from hotrow.data.prepared.sources import TextSource
from hotrow.data.prepared.spool import Spool
from hotrow.data.prepared.text import TextFiles
from hotrow.data.prepared.work import prepare


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "PIECES", 3)
    monkeypatch.setattr("os.fsync", lambda handle: None)  # nobody switches the machine off


def run(out: Path, *paths: Path, kind: str = "criteo", **options: Any) -> Prepared:
    source = TextSource(LAYOUTS[kind], paths, piece_bytes=9000)
    prepare(source, out, Settings(**options), workers=2)
    return Prepared(out)


def changed(column: int, value: str) -> Any:
    def change(line: Line) -> Line:
        return [*line[:column], value, *line[column + 1 :]]

    return change


BAD: dict[str, tuple[Any, str]] = {
    "short": (lambda line: line[:-1], "39 columns instead of 40"),
    "long": (lambda line: [*line, "x"], "41 columns instead of 40"),
    "empty": (lambda line: [], "an empty line instead of 40 columns"),
    "label": (changed(0, "2"), "the label is '2', neither 0 nor 1"),
    "negative label": (changed(0, "-1"), "the label is '-1', neither 0 nor 1"),
    "large label": (changed(0, "2147483648"), "the label is '2147483648', neither 0 nor 1"),
    "no label": (changed(0, ""), "the label is '', neither 0 nor 1"),
    "number": (changed(3, "1x"), "I3 is '1x', not a whole number"),
    "float": (changed(13, "1.5"), "I13 is '1.5', not a whole number"),
    "minus": (changed(1, "-"), "I1 is '-', not a whole number"),
    "two minus": (changed(1, "--3"), "I1 is '--3', not a whole number"),
    "long number": (changed(1, "1234567x90"), "I1 is '1234567x90', not a whole number"),
    "endless number": (changed(1, "9" * 19), "not a whole number"),
    "two minus and long": (changed(1, "--123456789"), "not a whole number"),
    "spaces": (changed(2, " 7"), "I2 is ' 7', not a whole number"),
    "return inside": (changed(5, "1\r"), r"I5 is '1\\r', not a whole number"),
    "hex": (changed(14, "0000000g"), "C1 is '0000000g', not up to 8 hexadecimal digits"),
    "long hex": (changed(39, "012345678"), "C26 is '012345678', not up to 8 hexadecimal digits"),
    "control": (changed(20, "\x10\x11aaaaaa"), "not up to 8 hexadecimal digits"),
    "colon": (changed(20, "::::::::"), "not up to 8 hexadecimal digits"),
    "backtick": (changed(20, "`aaaaaaa"), "not up to 8 hexadecimal digits"),
    "utf-8": (changed(20, "äöüß"), "C7 is 'äöüß', not up to 8 hexadecimal digits"),
    "nul": (changed(20, "\0" * 8), "not up to 8 hexadecimal digits"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_an_error_that_says_where_and_what(tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    lines = criteo_lines(150)
    lines[123] = change(lines[123])
    path = write(tmp_path / "train.txt", lines)
    with pytest.raises(ValueError, match=rf"train\.txt, line 124: .*{message}") as error:
        run(tmp_path / "out", path)
    assert "--bad-rows skip" in str(error.value)


def test_bad_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    good = criteo_lines(400)
    lines: list[Line] = []
    for number, line in enumerate(good):
        lines.append(line)
        if number % 20 == 0:
            change, _ = list(BAD.values())[number // 20]
            lines.append(change(line))
    data = run(tmp_path / "out", write(tmp_path / "a.txt", lines), bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 20
    assert data.manifest.source["lines"] == 420
    examples = data.manifest.source["bad_examples"]
    assert len(examples) == 5
    assert examples[1].endswith("a.txt, line 23: 41 columns instead of 40")
    labels = [
        label
        for split in ("train", "test", "validation")  # in the order of time
        for shard in data.shards(split)
        for label in shard.label
    ]
    assert labels == [int(line[0]) for line in good]


def test_bad_lines_change_nothing_about_the_good_ones(tmp_path: Path) -> None:
    good = criteo_lines(200)
    lines = [*good[:100], ["junk"], *good[100:]]
    with_junk = run(
        tmp_path / "1", write(tmp_path / "a.txt", lines), bad_rows="skip", split="random"
    )
    assert with_junk.manifest.source["bad_rows"] == 1
    without = run(tmp_path / "2", write(tmp_path / "b.txt", good), split="random")
    assert with_junk.table_rows == without.table_rows
    assert sum(map(with_junk.samples, ("train", "validation", "test"))) == 200


def test_a_long_run_of_bad_lines_is_left_out(tmp_path: Path) -> None:
    """Several pieces, and a whole stretch of them, without a good line."""
    good = criteo_lines(200)
    path = write(tmp_path / "a.txt", [*good[:100], *[["junk" * 50]] * 500, *good[100:]])
    data = run(tmp_path / "out", path, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 500
    assert sum(map(data.samples, ("train", "validation", "test"))) == 200


def test_only_bad_lines_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", [["junk"]] * 30)
    with pytest.raises(ValueError, match=r"no good line in the files; the first of 30 bad ones"):
        run(tmp_path / "out", path, bad_rows="skip")


def test_line_ends_of_all_kinds_may_be_mixed(tmp_path: Path) -> None:
    lines = criteo_lines(200)
    plain = run(tmp_path / "1", write(tmp_path / "a.txt", lines))
    text = b"".join(
        "\t".join(line).encode() + (b"\r\n" if number % 3 else b"\n")
        for number, line in enumerate(lines)
    )
    (tmp_path / "b.txt").write_bytes(text.rstrip(b"\r\n"))  # the last line has no end
    mixed = run(tmp_path / "2", tmp_path / "b.txt")
    for split in ("train", "validation", "test"):
        for name in ("ids", "dense", "label"):
            ours, theirs = (
                np.concatenate([getattr(shard, name) for shard in data.shards(split)])
                for data in (mixed, plain)
            )
            np.testing.assert_array_equal(ours, theirs)


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    with pytest.raises(ValueError, match=r"train\.txt does not exist"):
        run(tmp_path / "out", path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train\.txt is empty"):
        run(tmp_path / "out", path)
    with pytest.raises(ValueError, match="is no file"):
        run(tmp_path / "out", tmp_path)


def test_a_compressed_file_of_nothing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match="no good line"):
        run(tmp_path / "out", path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_damaged_compressed_file_is_an_error_not_a_shorter_one(
    tmp_path: Path, kind: str, how: str
) -> None:
    text = write(tmp_path / "a.txt", criteo_lines(400)).read_bytes()
    path = tmp_path / f"a.{kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress(text))
    else:
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(text)
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[-len(data) // 3 :]
    else:
        data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.{kind}(, line| cannot be uncompressed beyond)"):
        run(tmp_path / "out", path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_file_that_was_cut_off_is_an_error_even_if_bad_lines_are_skipped(
    tmp_path: Path, kind: str
) -> None:
    """Wherever it was cut, also within its first or last bytes."""
    text = write(tmp_path / "a.txt", criteo_lines(100)).read_bytes()
    path = tmp_path / f"a.{kind}"
    with pa.CompressedOutputStream(str(path), "gzip" if kind == "gz" else "zstd") as file:
        file.write(text)
    whole = path.read_bytes()
    for size in (5, 20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"a\.{kind} cannot be uncompressed beyond byte"):
            run(tmp_path / f"{size}", path, bad_rows="skip")


def test_compressed_files_may_have_several_parts(tmp_path: Path) -> None:
    lines = criteo_lines(100)
    halves = [write(tmp_path / "a.txt", each).read_bytes() for each in (lines[:50], lines[50:])]
    (tmp_path / "a.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    data = run(tmp_path / "out", tmp_path / "a.gz")
    assert sum(map(data.samples, ("train", "validation", "test"))) == 100


def test_a_compressed_file_that_became_shorter_is_noticed_when_going_on(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"short\n"))
    files = TextFiles([path])
    with pytest.raises(ValueError, match=r"a\.gz ends 94 bytes of text before the place"):
        next(files.pieces(Place(0, 100, 3, 3)))


def test_bad_lines_take_no_memory(tmp_path: Path) -> None:
    """A piece of nothing but short bad lines, as another kind of file is."""
    text = b"\n" * 500_000
    source = TextSource(LAYOUTS["criteo"], [write(tmp_path / "a.txt", [["x"]])], piece_bytes=9000)
    tracemalloc.start(8)
    found = source.parse(Piece(Place(), Place(), text, 0))
    # Threads that tests before have left may allocate meanwhile.
    mine = tracemalloc.Filter(True, "*/prepared/text.py", all_frames=True)
    kept = sum(each.size for each in tracemalloc.take_snapshot().filter_traces([mine]).traces)
    tracemalloc.stop()
    assert found.bad.count == 500_000
    assert [each.line for each in found.bad.first] == [0, 1, 2, 3, 4]
    assert kept < 1 << 20


def test_a_file_whose_name_hides_that_it_is_compressed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(gzip.compress(b"0\t1\n"))
    with pytest.raises(ValueError, match=r"compressed; give it a name that ends in \.gz"):
        run(tmp_path / "out", path)
    path.write_bytes(b"PK\x03\x04....")
    with pytest.raises(ValueError, match=r"is a \.zip archive: unpack it first"):
        run(tmp_path / "out", path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (bz2.compress(b"x"), "is compressed by bzip2"),
        (lzma.compress(b"x"), "is compressed by xz"),
        (b"PAR1....", "is a Parquet file, and no text"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(start)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", path)


def test_a_name_that_promises_gzip_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.gz", criteo_lines(3))
    with pytest.raises(ValueError, match=r"train\.gz is not compressed by gzip"):
        run(tmp_path / "out", path)


def test_the_mark_of_utf_8_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(300))
    expected = run(tmp_path / "1", path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = run(tmp_path / "2", path)
    assert found.manifest.splits == expected.manifest.splits  # with every checksum


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    """The last one is held back: a test on samples of the training would be worth nothing."""
    path = write(tmp_path / "day_0", criteo_lines(30))
    (tmp_path / "day_1").symlink_to(path)
    with pytest.raises(ValueError, match="day_1 is given twice"):
        run(tmp_path / "out", path, tmp_path / "day_1")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(30))
    with pytest.raises(ValueError, match="out cannot be made: Not a directory; choose another"):
        run(path / "out", path)


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"x" * 20_000)
    with pytest.raises(ValueError, match=r"line 1: no end of line within 9,000 bytes"):
        run(tmp_path / "out", path)


LONG = "\t".join(["0", *[""] * 38, "x" * 9000])  # in pieces of 9,000 bytes


@pytest.mark.parametrize("place", [0, 37, 99, 100])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_that_is_too_long_is_left_out_and_counted(
    tmp_path: Path, place: int, end: str
) -> None:
    good = criteo_lines(100)
    lines = ["\t".join(line) for line in good]
    lines[place:place] = [LONG, LONG + "y" * 30_000]
    path = tmp_path / "train.txt"
    path.write_bytes((end.join(lines) + end).encode())
    data = run(tmp_path / "out", path, bad_rows="skip", split="random")
    assert data.manifest.source["bad_rows"] == 2
    assert data.manifest.source["lines"] == 102
    first, second = data.manifest.source["bad_examples"]
    assert first.endswith(f"line {place + 1:,}: longer than 9,000 bytes, the most that is read")
    assert f"line {place + 2:,}: longer" in second
    assert sum(map(data.samples, ("train", "validation", "test"))) == 100
    without = run(
        tmp_path / "other", write(tmp_path / "b.txt", good), bad_rows="skip", split="random"
    )
    assert data.table_rows == without.table_rows
    with pytest.raises(ValueError, match=rf"line {place + 1}: longer than 9,000 .*--bad-rows skip"):
        run(tmp_path / "error", path)


def test_a_header_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_bytes(b"x" * 9500 + b"\n" + b"1,2\n")
    with pytest.raises(ValueError, match=r"train\.csv, line 1: longer than 9,000 bytes"):
        run(tmp_path / "out", path, kind="avazu", bad_rows="skip")


def test_a_run_stopped_behind_a_line_that_is_too_long_goes_on(tmp_path: Path) -> None:
    lines = ["\t".join(line) for line in criteo_lines(300)]
    lines[200:200] = [LONG * 3]
    path = tmp_path / "train.txt"
    path.write_text("\n".join(lines) + "\n")
    pieces = list(TextFiles([path], piece_bytes=9000).pieces())
    for number, piece in enumerate(pieces):
        assert list(TextFiles([path], piece_bytes=9000).pieces(piece.place)) == pieces[number:]
    assert sum(piece.lines for piece in pieces) == 301


def test_lines_that_end_as_on_old_macs_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(3))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(ValueError, match=r"line 1: lines end in \\r alone"):
        run(tmp_path / "out", path)


def test_one_line_may_be_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(1))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert run(tmp_path / "out", path).samples("train") == 1


def test_counts_that_no_disk_has_room_for_are_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "train.txt", criteo_lines(50))
    with pytest.raises(ValueError, match=r"of 28,587,302,322,176 rows take 208.* lower --max-rows"):
        run(tmp_path / "out", path, hash=True, max_rows=2**40)
    assert not list((tmp_path / "out").rglob("*.keys"))


def test_numbers_and_texts_are_read_as_python_reads_them() -> None:
    numbers = [0, 9, 10, 12345678, 99999999, 100000000, -1, -99999999, -123456789, 10**17, 3]
    found, empty, wrong = whole_numbers(pa.array(map(str, numbers)))
    assert found.tolist() == numbers
    assert not empty.any()
    assert not wrong.any()
    words = ["a", "", "12345678", "123456789", "abcdefghijklmnop", "abcdefghijklmnoq", "ä", "b"]
    keys = column_keys(pa.array(words + words[:3])).keys.tolist()
    assert len(set(keys[:8])) == 8
    assert keys[8:] == keys[:3]
    found, wrong = texts_of(pa.array(f"{i:x}" for i in range(40))).hexadecimal()
    assert found.tolist() == list(range(40))
    assert not wrong.any()


NUMBERS = [
    "0.1", "3.14159", "-2.5", "1e5", "-1.5e-3", "12345678.9", "0.000001", ".5", "5.", "-0.25",
    "123456789012345678", "-123456789012345678", "12345678901234567890", "9007199254740993",
    "90071992547409.93", "0.1234567890123456789", "1" * 60, "0." + "3" * 70, "7", "-8",
]  # fmt: skip
NO_NUMBERS = [
    "-", ".", "-.", "1.2.3", "1-2", "--1.5", "1,5", "0x10", "1.5f", "-nan", "nano", "inf", "1_0.5",
    "1" * 45 + "x", "0." + "3" * 45 + "x",
]  # fmt: skip


def test_numbers_with_a_point_are_those_of_python() -> None:
    missing = ["nan", "", "NaN", "NAN"]
    found = floats(none_if_empty(pa.array([*NUMBERS, *NO_NUMBERS, *missing])))
    assert found[: len(NUMBERS)].tolist() == [float(each) for each in NUMBERS]
    assert np.isinf(found[len(NUMBERS) : -4]).all()
    assert np.isnan(found[-4:]).all()


def test_no_number_takes_a_turn_of_python_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times have ten digits, and prices a point, in every line."""
    monkeypatch.setattr(arrow, "_float", None)
    times, prices = [1511658000 + i for i in range(100)], [i + 0.25 for i in range(100)]
    assert whole_numbers(pa.array(map(str, times)))[0].tolist() == times
    texts = [*map(str, prices), "cheap"]
    monkeypatch.setattr(arrow, "_float", lambda text: {b"cheap": 0.0}[text])
    assert floats(pa.array(texts)).tolist() == [*prices, 0.0]


def test_long_texts_have_numbers_of_their_own_wherever_they_differ() -> None:
    texts = ["x" * n for n in (9, 16, 17, 400, 3001)]
    texts += [each[:-1] + "y" for each in texts] + ["y" + each[1:] for each in texts[:5]]
    keys = column_keys(pa.array(texts + texts)).keys.tolist()
    assert len(set(keys)) == len(texts)
    assert keys[: len(texts)] == keys[len(texts) :]


def test_hexadecimal_digits_and_nothing_else_are_digits() -> None:
    digits = set(b"0123456789abcdefABCDEF")
    words = []
    for place in range(8):
        for byte in range(256):
            word = bytearray(b"05db9164")
            word[place] = byte
            words.append(bytes(word))
    found, wrong = texts_of(pa.array(words, pa.binary())).hexadecimal()
    assert wrong.tolist() == [not set(word) <= digits for word in words]
    right = [int(word, 16) for word, bad in zip(words, wrong, strict=True) if not bad]
    assert found[~wrong].tolist() == right
