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
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.arrow import column_keys, floats, none_if_empty, texts_of, whole_numbers
from hotrow.data.prepared.pieces import Piece, Place
from hotrow.data.prepared.sources import Criteo
from hotrow.data.prepared.text import TextFiles
from preparing import IN_ORDER, all_of, prepared, total


def run(out: Path, *paths: Path, **options: Any) -> Prepared:
    return prepared("criteo", out, *paths, **options)


def changed(column: int, value: str) -> Any:
    return lambda line: [*line[:column], value, *line[column + 1 :]]


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
    "return inside": (changed(5, "1\r"), r"I5 is '1\r', not a whole number"),
    "hex": (changed(14, "0000000g"), "C1 is '0000000g', not up to 8 hexadecimal digits"),
    "long hex": (changed(39, "012345678"), "C26 is '012345678', not up to 8 hexadecimal digits"),
    "control": (changed(20, "\x10\x11aaaaaa"), "not up to 8 hexadecimal digits"),
    "colon": (changed(20, "::::::::"), "not up to 8 hexadecimal digits"),
    "backtick": (changed(20, "`aaaaaaa"), "not up to 8 hexadecimal digits"),
    "utf-8": (changed(20, "äöüß"), "C7 is 'äöüß', not up to 8 hexadecimal digits"),
    "nul": (changed(20, "\0" * 8), "not up to 8 hexadecimal digits"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_left_out_with_its_place_and_reason(tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    lines = criteo_lines(30)
    lines[23] = change(lines[23])
    source = Criteo([write(tmp_path / "train.txt", lines)])
    (piece,) = source.pieces()
    samples = source.parse(piece)
    assert samples.lines.tolist() == [*range(23), *range(24, 30)]
    (bad,) = samples.bad.first
    assert (samples.bad.count, bad.line) == (1, 23)
    assert message in bad.reason


def test_bad_lines_are_an_error_or_left_out_and_counted(tmp_path: Path) -> None:
    good = criteo_lines(400)
    lines: list[Line] = []
    for number, line in enumerate(good):
        lines.append(line)
        if number % 20 == 0:
            change, _ = list(BAD.values())[number // 20]
            lines.append(change(line))
    path = write(tmp_path / "a.txt", lines)
    with pytest.raises(ValueError, match=r"a\.txt, line 2: 39 columns .*\. --bad-rows skip leaves"):
        run(tmp_path / "error", path)
    data = run(tmp_path / "out", path, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 20
    assert data.manifest.source["lines"] == 420
    examples = data.manifest.source["bad_examples"]
    assert len(examples) == 5
    assert examples[1].endswith("a.txt, line 23: 41 columns instead of 40")
    assert all_of(data, "label").tolist() == [int(line[0]) for line in good]
    without = run(tmp_path / "good", write(tmp_path / "b.txt", good))
    assert data.table_rows == without.table_rows


def test_a_long_run_of_bad_lines_is_left_out(tmp_path: Path) -> None:
    """Several pieces, and a whole stretch of them, without a good line."""
    good = criteo_lines(200)
    path = write(tmp_path / "a.txt", [*good[:100], *[["junk" * 50]] * 500, *good[100:]])
    data = run(tmp_path / "out", path, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 500
    assert total(data) == 200
    write(path, [["junk"]] * 30)
    with pytest.raises(ValueError, match=r"no good line in the files; the first of 30 bad ones"):
        run(tmp_path / "none", path, bad_rows="skip")


def test_lines_may_end_in_any_way(tmp_path: Path) -> None:
    """Mixed, without an end, and after the mark of UTF-8."""
    lines = criteo_lines(200)
    path = write(tmp_path / "a.txt", lines)
    plain = run(tmp_path / "1", path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert run(tmp_path / "2", path).manifest.splits == plain.manifest.splits  # every checksum
    ends = [b"\r\n" if number % 3 else b"\n" for number in range(200)]
    text = b"".join("\t".join(line).encode() + end for line, end in zip(lines, ends, strict=True))
    path.write_bytes(text.rstrip(b"\r\n"))
    mixed = run(tmp_path / "3", path)
    for split in IN_ORDER:
        for name in ("ids", "dense", "label"):
            ours, theirs = (all_of(data, name, split) for data in (mixed, plain))
            np.testing.assert_array_equal(ours, theirs)
    path.write_bytes(text[: text.index(b"\n")])
    assert run(tmp_path / "4", path).samples("train") == 1


REFUSED = {
    "empty": (b"", "train.txt is empty"),
    "gzip": (gzip.compress(b"0\t1\n"), r"compressed; give it a name that ends in \.gz"),
    "zip": (b"PK\x03\x04....", r"is a \.zip archive: unpack it first"),
    "bzip2": (bz2.compress(b"x"), "is compressed by bzip2"),
    "xz": (lzma.compress(b"x"), "is compressed by xz"),
    "parquet": (b"PAR1....", "is a Parquet file, and no text"),
    "no lines": (b"x" * 20_000, "line 1: no end of line within 9,000 bytes"),
    "old Mac": (b"0\t1\r0\t2\r", r"line 1: lines end in \\r alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "day_0"
    with pytest.raises(ValueError, match="day_0 does not exist"):
        run(tmp_path / "out", path)
    with pytest.raises(ValueError, match="is no file"):
        run(tmp_path / "out", tmp_path)
    with pytest.raises(ValueError, match=r"train\.gz is not compressed by gzip"):
        run(tmp_path / "out", write(tmp_path / "train.gz", criteo_lines(3)))
    (tmp_path / "a.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match="no good line"):
        run(tmp_path / "out", tmp_path / "a.gz")
    write(path, criteo_lines(3))
    (tmp_path / "day_1").symlink_to(path)
    # The last one is held back: a test on samples of the training would be worth nothing.
    with pytest.raises(ValueError, match="day_1 is given twice"):
        run(tmp_path / "out", path, tmp_path / "day_1")


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_damaged_compressed_file_is_an_error_not_a_shorter_one(tmp_path: Path, kind: str) -> None:
    """Wherever it was cut, also within its first or last bytes, and if bad lines are skipped."""
    text = write(tmp_path / "a.txt", criteo_lines(100)).read_bytes()
    path = tmp_path / f"a.{kind}"
    with pa.CompressedOutputStream(str(path), "gzip" if kind == "gz" else "zstd") as file:
        file.write(text)
    whole = path.read_bytes()
    for size in (5, 20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"a\.{kind} cannot be uncompressed beyond byte"):
            run(tmp_path / f"{size}", path, bad_rows="skip")
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 255
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=rf"a\.{kind}(, line| cannot be uncompressed beyond)"):
        run(tmp_path / "changed", path)


def test_a_compressed_file_that_became_shorter_is_noticed_when_going_on(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"short\n"))
    files = TextFiles([path])
    with pytest.raises(ValueError, match=r"a\.gz ends 94 bytes of text before the place"):
        next(files.pieces(Place(0, 100, 3, 3)))


def test_bad_lines_take_no_memory(tmp_path: Path) -> None:
    """A piece of nothing but short bad lines, as another kind of file is."""
    source = Criteo([write(tmp_path / "a.txt", [["x"]])])
    source.parse(Piece(Place(), Place(), b"\n", 0))  # imports
    tracemalloc.start()
    samples = source.parse(Piece(Place(), Place(), b"\n" * 20_000, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples.bad.count == 20_000
    assert [each.line for each in samples.bad.first] == [0, 1, 2, 3, 4]
    assert peak < 150 * 20_000  # bytes; what is said about five lines is kept


LONG = "\t".join(["0", *[""] * 38, "x" * 9000])  # in pieces of 9,000 bytes


@pytest.mark.parametrize(("place", "end"), [(0, "\n"), (37, "\r\n"), (99, "\n"), (100, "\r\n")])
def test_a_line_that_is_too_long_is_left_out_and_counted(
    tmp_path: Path, place: int, end: str
) -> None:
    good = criteo_lines(100)
    lines = ["\t".join(line) for line in good]
    lines[place:place] = [LONG, LONG + "y" * 30_000]
    path = tmp_path / "train.txt"
    path.write_bytes((end.join(lines) + end).encode())
    data = run(tmp_path / "out", path, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 2
    assert data.manifest.source["lines"] == 102
    first, second = data.manifest.source["bad_examples"]
    assert first.endswith(f"line {place + 1:,}: longer than 9,000 bytes, the most that is read")
    assert f"line {place + 2:,}: longer" in second
    assert all_of(data, "label").tolist() == [int(line[0]) for line in good]
    with pytest.raises(ValueError, match=rf"line {place + 1}: longer than 9,000 .*--bad-rows skip"):
        run(tmp_path / "error", path)
    pieces = list(TextFiles([path], piece_bytes=9000).pieces())
    for number, piece in enumerate(pieces):  # as a resumed run reads them
        assert list(TextFiles([path], piece_bytes=9000).pieces(piece.place)) == pieces[number:]


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
    words += ["x" * n for n in (9, 16, 17, 400, 3001)]
    words += [each[:-1] + "y" for each in words[-5:]] + ["y" + each[1:] for each in words[-5:]]
    keys = column_keys(pa.array(words + words)).keys.tolist()
    assert len(set(keys)) == len(words)
    assert keys[: len(words)] == keys[len(words) :]
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


def test_only_texts_that_are_no_numbers_pass_through_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times have ten digits, prices a point, and labels are words, in every line."""
    prices, parsed = [i + 0.25 for i in range(100)], []
    monkeypatch.setattr("hotrow.data.prepared.arrow._float", lambda text: parsed.append(text) or 0)
    texts = [*map(str, prices), "NaN", None, "cheap"]
    np.testing.assert_array_equal(floats(pa.array(texts))[:100], prices)
    labels = pa.array(["True", "FALSE", "true", "1.0"] * 9)
    assert floats(labels, truths=True).tolist() == [1, 0, 1, 1] * 9
    assert parsed == [b"cheap"]


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
