"""Avazu, Taobao, CSV and Parquet: what their files say is what the shards hold."""

from __future__ import annotations

import random
from collections import Counter
from datetime import date
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clicks import assert_same_grouping, taobao_lines, write
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.arrow import column_keys
from hotrow.data.prepared.columns import Columns
from hotrow.data.prepared.pieces import BadLines
from hotrow.data.prepared.sources import POINTS, STEPS, Avazu, make_samples
from hotrow.data.prepared.stages import AtRandom
from hotrow.support.hashing import mixed
from preparing import IN_ORDER, ONE_COLUMN, Full, Heard, all_of, lists_of, prepared, total


def run(kind: str, out: Path, *paths: Path, **options: Any) -> Prepared:
    return prepared(kind, out, *paths, **{"piece_bytes": 4000, **options})


def write_csv(path: Path, columns: dict[str, Any], quoted: bool = False) -> Path:
    """A CSV file of these columns; lists are not for it."""
    rows = [list(map(str, row)) for row in zip(*columns.values(), strict=True)]
    if quoted:
        rows = [['"' + each.replace('"', '""') + '"' for each in row] for row in rows]
    return write(path, [list(columns), *rows], separator=",", end="\r\n" if quoted else "\n")


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def run_parquet(out: Path, toml: str, *tables: dict[str, Any], **options: Any) -> Prepared:
    """A file for each table: a.parquet, b.parquet."""
    names = zip("ab", tables, strict=False)
    paths = [write_parquet(out.parent / f"{name}.parquet", table) for name, table in names]
    return run("parquet", out, *paths, toml=toml, **options)


def avazu_lines(count: int) -> list[list[str]]:
    draw = random.Random(0)
    return [
        [str(i), str(draw.randrange(2)), f"141021{draw.randrange(24):02}"]
        + [f"{draw.randrange(30):08x}" if c % 2 else str(draw.randrange(-1, 9)) for c in range(21)]
        for i in range(count)
    ]


def test_avazu(tmp_path: Path) -> None:
    lines = avazu_lines(300)
    path = write(tmp_path / "train.csv", [list(Avazu.columns), *lines], separator=",")
    data = run("avazu", tmp_path / "out", path)
    assert total(data) == 300
    np.testing.assert_array_equal(all_of(data, "label"), [int(line[1]) for line in lines])
    hours = np.array([int(line[2]) % 100 / 24 for line in lines], "f")
    np.testing.assert_array_equal(all_of(data, "dense")[:, 0], hours)
    ids = all_of(data, "ids")
    for place in range(21):
        assert_same_grouping(ids[:, place], [line[3 + place] for line in lines])


def test_avazu_with_another_header_or_a_bad_hour_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.csv", avazu_lines(3), separator=",")
    with pytest.raises(ValueError, match=r"train\.csv begins with '0,.*expected is the header"):
        run("avazu", tmp_path / "out", path)
    lines = avazu_lines(3)
    lines[1][2] = "14102125"
    write(path, [list(Avazu.columns), *lines], separator=",")
    with pytest.raises(ValueError, match=r"train\.csv, line 3: hour is '14102125', not YYMMDDHH"):
        run("avazu", tmp_path / "out2", path)


CSV = """
label = "clicked"
dense = ["price", "age"]
log = ["price"]
categories = ["user", "item", "last"]
[tables]
last = "item"
"""


def table(count: int) -> dict[str, list[Any]]:
    draw = random.Random(1)
    return {
        "extra": [f"{i}" for i in range(count)],
        "item": [draw.choice("abcde") + "-item-of-some-length" for _ in range(count)],
        "user": [draw.randrange(20) for _ in range(count)],
        "price": [draw.choice([0.5, 3.0, -2.0, 1e3]) for _ in range(count)],
        "age": [draw.randrange(90) for _ in range(count)],
        "last": [draw.choice("cdefg") + "-item-of-some-length" for _ in range(count)],
        "clicked": [draw.randrange(2) for _ in range(count)],
    }


def assert_holds_table(data: Prepared, found: dict[str, list[Any]]) -> None:
    count = len(found["user"])
    assert all_of(data, "label").tolist() == found["clicked"]
    prices = np.log1p(np.maximum(np.array(found["price"]), 0)).astype("f")
    np.testing.assert_array_equal(all_of(data, "dense")[:, 0], prices)
    np.testing.assert_array_equal(all_of(data, "dense")[:, 1], np.array(found["age"], "f"))
    ids = all_of(data, "ids")
    assert_same_grouping(ids[:, 0], [str(each) for each in found["user"]])
    # One table for both: equal items have equal rows in either column.
    assert_same_grouping(ids[:, 1:].T.reshape(-1), found["item"] + found["last"])
    assert data.table_rows == {"user": len(set(found["user"])) + 1, "item": 8}
    assert total(data) == count
    train = data.samples("train")
    expected = np.bincount(ids[:train, 1:].reshape(-1), minlength=8)
    np.testing.assert_array_equal(data.counts("item"), expected)


@pytest.mark.parametrize("quoted", [False, True])
def test_csv(tmp_path: Path, quoted: bool) -> None:
    found = table(300)
    if quoted:
        for name in ("item", "last"):
            found[name] = [f'{each}, "nice"' for each in found[name]]
    path = write_csv(tmp_path / "a.csv", found, quoted)
    assert_holds_table(run("csv", tmp_path / "out", path, toml=CSV), found)


@pytest.mark.parametrize(("price", "said"), [("-2000.5", True), ("999", False)])
def test_large_numbers_are_pointed_out(tmp_path: Path, price: str, said: bool) -> None:
    rows = [["y", "user", "price", "age"], *(["0", str(i), "1", "5000"] for i in range(30))]
    rows[9][2] = price
    path, heard = write(tmp_path / "a.csv", rows, separator=","), Heard()
    toml = ONE_COLUMN + 'dense = ["price", "age"]\nlog = ["age"]'
    run("csv", tmp_path / "out", path, toml=toml, split="random", watch=heard)
    assert [each for each in heard.texts if "large numbers" in each] == said * [
        "large numbers, from which a model learns little or nothing: price (up to 2,000); "
        "name them in log, or scale them in the files"
    ]


CSV_LISTS = """
label = "y"
categories = ["user", "seen", "tags"]
[tables]
seen = "user"
[lists]
seen = "|"
tags = " "
"""


@pytest.mark.parametrize("quoted", [False, True])
def test_csv_lists_become_jagged(tmp_path: Path, quoted: bool) -> None:
    """With bad lines among them, empty lists, and empty values, which do not count."""
    draw = random.Random(3)
    long = "a-user-of-some-length-"
    rows, bags, tags = [["tags", "y", "seen", "user"]], [], []
    for number in range(300):
        bags.append([draw.choice(["", long]) + str(draw.randrange(9)) for _ in range(number % 4)])
        tags.append([str(draw.randrange(5)) for _ in range(draw.randrange(3))])
        written = "|".join(bags[-1]) + "|" * (number % 5 == 0)
        row = ["  ".join(tags[-1]), str(number % 2), written, long + str(number % 9)]
        rows += [[f'"{each}"' for each in row] if quoted else row]
        if number % 50 == 7:
            rows += [["1 2", "7", "8|9", "bad"], ["too", "few|columns"]]
    path = write(tmp_path / "a.csv", rows, separator=",", end="\r\n" if quoted else "\n")
    data = run("csv", tmp_path / "out", path, toml=CSV_LISTS, bad_rows="skip")
    data.verify()
    assert data.manifest.source["bad_rows"] == 12
    for name, expected in (("seen", bags), ("tags", tags)):
        assert list(map(len, lists_of(data, name))) == [len(each) for each in expected]
    users = [long + str(number % 9) for number in range(300)]
    # One table for both: a user has one row, in lists and alone.
    ids = [*all_of(data, "ids")[:, 0], *chain(*lists_of(data, "seen"))]
    assert_same_grouping(ids, [*users, *chain(*bags)])
    assert_same_grouping([*chain(*lists_of(data, "tags"))], [*chain(*tags)])


def test_csv_without_samples_says_why(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [["y", "user"]], separator=",")
    with pytest.raises(ValueError, match=r"a\.csv: a header, and no lines below it"):
        run("csv", tmp_path / "1", path, toml=ONE_COLUMN)
    write(path, [["y", "user"], ["2", "7"]], separator=",")
    with pytest.raises(ValueError, match="no good line in the files; the first of 1 bad ones"):
        run("csv", tmp_path / "2", path, toml=ONE_COLUMN, bad_rows="skip")


TRUTHS = ["True", "False", "true", "FALSE", "1", "0", "1.0"]


def write_any(kind: str, path: Path, columns: dict[str, Any]) -> Path:
    return (write_csv if kind == "csv" else write_parquet)(path, columns)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("labels", [TRUTHS, TRUTHS[:2]])
def test_labels_may_be_true_or_false(tmp_path: Path, kind: str, labels: list[str]) -> None:
    values, bad = labels * 10, ["truer", "t", "NaN", "", "0.5"]
    every = [*values, *bad, *values]
    path = write_any(kind, tmp_path / "a", {"y": every, "user": [7] * len(every)})
    data = run(kind, tmp_path / "1", path, toml=ONE_COLUMN, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == len(bad)
    assert "the label is 'NaN', neither 0 nor 1" in data.manifest.source["bad_examples"][2]
    expected = [int(each.lower() in ("true", "1", "1.0")) for each in values]
    assert all_of(data, "label").tolist() == expected * 2
    write_any(kind, path, {"y": values, "user": [7] * len(values)})
    assert all_of(run(kind, tmp_path / "2", path, toml=ONE_COLUMN), "label").tolist() == expected


@pytest.mark.parametrize("kind", ["csv", "parquet", "parquet texts"])
def test_numbers_that_are_nan_are_missing(tmp_path: Path, kind: str) -> None:
    prices: list[Any] = ["1.5", "NaN", "", "nan", "2"] * 8
    if kind != "csv":
        prices = [each or None for each in prices]
    if kind == "parquet":
        prices = [None if each is None else float(each) for each in prices]
    zeros = [0] * len(prices)
    columns = {"y": zeros, "user": zeros, "price": prices, "logged": prices}
    path = write_any(kind, tmp_path / "a", columns)
    toml = ONE_COLUMN + 'dense = ["price", "logged"]\nlog = ["logged"]\n'
    dense = all_of(run(kind.split()[0], tmp_path / "out", path, toml=toml), "dense")
    expected = np.array([1.5, 0, 0, 0, 2] * 8)
    np.testing.assert_array_equal(dense.T, np.array([expected, np.log1p(expected)], "f"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_too_large_for_32_bits_are_refused(tmp_path: Path, kind: str) -> None:
    prices = [0.5] * 40
    prices[7] = 1e300
    columns = {"y": [0] * 40, "price": prices, "user": ["a"] * 40}
    path = write_any(kind, tmp_path / "log", columns)
    with pytest.raises(ValueError, match=r"price.*1e\+?300"):
        run(kind, tmp_path / "out", path, toml=ONE_COLUMN + 'dense = ["price"]')


def test_csv_names_what_is_wrong(tmp_path: Path) -> None:
    found = table(30)
    found["price"][20] = "cheap"
    path = write_csv(tmp_path / "a.csv", found)
    with pytest.raises(ValueError, match=r"a\.csv, line 22: price is 'cheap', not a number"):
        run("csv", tmp_path / "out", path, toml=CSV)
    with pytest.raises(ValueError, match=r"no column 'shop'; it has extra, item.*is to name the"):
        run("csv", tmp_path / "out", path, toml=CSV.replace('"user"', '"shop"'))
    path.write_text("y; user\n1;2\n")
    with pytest.raises(ValueError, match=r"no column 'y'; it has y; user; .* or what `separator`"):
        run("csv", tmp_path / "out", path, toml=ONE_COLUMN)
    with pytest.raises(ValueError, match=r"no column 'user'; .*; ' user' has blanks: name it"):
        run("csv", tmp_path / "out", path, toml='separator = ";"\n' + ONE_COLUMN)
    write(path, [["y", "user", "user"], ["0", "1", "2"]], separator=",")
    with pytest.raises(ValueError, match="has 2 columns 'user'"):
        run("csv", tmp_path / "out", path, toml=ONE_COLUMN)


def test_csv_with_quotes_that_do_not_close_is_refused(tmp_path: Path) -> None:
    """The last field of a line could otherwise be half of one that goes on in the next."""
    lines = ["clicked,user,item", '1,2,"good, too"', '0,3,"goes', 'on"', '1,4,"more" text', "0,5,x"]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n")
    toml = 'label = "clicked"\ncategories = ["user", "item"]\n'
    with pytest.raises(ValueError, match=r"line 3: its quotes .*a line end within quotes is"):
        run("csv", tmp_path / "1", path, toml=toml, split="random")
    data = run("csv", tmp_path / "2", path, toml=toml, split="random", bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 3
    assert "line 4: 1 column instead of 3" in data.manifest.source["bad_examples"][1]
    assert data.table_rows == {"user": 3, "item": 3}


def test_a_line_that_is_too_long_is_left_out_of_csv_and_taobao(tmp_path: Path) -> None:
    rows = [["y", "user"], *(["1", str(i % 7)] for i in range(90)), ["1", "x" * 5000], ["0", "1"]]
    path = write(tmp_path / "a.csv", rows, separator=",")
    data = run("csv", tmp_path / "1", path, toml=ONE_COLUMN, bad_rows="skip", split="random")
    assert data.manifest.source["bad_rows"] == 1
    assert "a.csv, line 92: longer than 4,000 bytes" in data.manifest.source["bad_examples"][0]
    assert total(data) == 91
    write(path, [["y" * (5 << 20), "user"], ["1", "2"]], separator=",")
    with pytest.raises(ValueError, match=r"a\.csv, line 1: longer than"):
        run("csv", tmp_path / "2", path, toml=ONE_COLUMN, bad_rows="skip")
    lines = taobao_lines(30)
    lines[50:50] = [["1", "2", "3", "pv" * 3000, "1511658000"]]
    path = write(tmp_path / "events.csv", lines, separator=",")
    with pytest.raises(ValueError, match=r"events\.csv, line 51: longer than 4,000 bytes"):
        run("taobao", tmp_path / "3", path)
    data = run("taobao", tmp_path / "4", path, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 1


WRONG = [
    ("", "csv needs --columns"),
    ('categories = ["a"]', "say which column is the label"),
    ('label = "a"', "say which columns are categories"),
    ('label = "a"\ncategories = ["a"]', "'a' is named twice"),
    ('label = "a"\ncategories = ["b"]\nlog = ["c"]', "log names 'c'"),
    ('label = "a"\ncategories = ["b"]\n[tables]\nc = "d"', r"\[tables\] names 'c'"),
    ('label = "a"\ncategories = "b"', "categories: expected a list, got text"),
    ('label = 3\ncategories = ["b"]', "label: expected text, got a whole number"),
    ('label = "a"\ncategory = ["b"]', "unknown key 'category'"),
    ('label = "a"\ncategories = ["b"]\n[lists]\nb = ","', "',' stands between columns already"),
    ('label = "a"\ncategories = ["b"]\n[lists]\nc = "|"', "lists. names 'c', which is none"),
    (
        'label = "a"\ncategories = ["b"]\n[lists]\nb = 3',
        "lists.*: expected text, got a whole",
    ),
    ('label = "a"\ncategories = ["b"]\nseparator = "::"', "separator: one character separates"),
    ('label = "a"\ncategories = ["b.c"]', "'b.c' does; give column 'b.c' another"),
]


@pytest.mark.parametrize(("toml", "message"), WRONG)
def test_columns_that_cannot_be_are_refused(tmp_path: Path, toml: str, message: str) -> None:
    path = write(tmp_path / "a.csv", [["a", "b"], ["0", "1"]], separator=",")
    with pytest.raises(ValueError, match=message):
        run("csv", tmp_path / "out", path, toml=toml)
    assert Columns(label="y", categories=("item.id",), tables={"item.id": "item"})


def test_parquet(tmp_path: Path) -> None:
    found = table(330)
    whole = pa.table(found)
    pq.write_table(whole.slice(0, 200), tmp_path / "a.parquet", row_group_size=90)
    pq.write_table(whole.slice(200), tmp_path / "b.parquet", use_dictionary=False)
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    data = run("parquet", tmp_path / "out", *paths, toml=CSV)
    assert_holds_table(data, found)
    assert data.samples("train") == 200


@pytest.mark.parametrize("split", ["random", "time"])
@pytest.mark.parametrize("cuts", [[], [150], [40, 200]])
def test_parquet_and_csv_split_the_same_samples_alike(
    tmp_path: Path, split: str, cuts: list[int]
) -> None:
    """The samples' places among all lines decide, however many files they lie in; where the last
    file is held back, both have the same files."""
    found = table(300)
    found["age"] = list(range(300))
    texts, parts = [], []
    for number, (first, last) in enumerate(zip([0, *cuts], [*cuts, 300], strict=True)):
        part = {name: values[first:last] for name, values in found.items()}
        texts.append(write_csv(tmp_path / f"{number}.csv", part))
        parts.append(write_parquet(tmp_path / f"{number}.parquet", part, row_group_size=70))
    if split == "random":
        parts = [write_parquet(tmp_path / "all.parquet", found)]
    one = run("csv", tmp_path / "1", *texts, toml=CSV, split=split)
    other = run("parquet", tmp_path / "2", *parts, toml=CSV, split=split)
    for name in IN_ORDER:
        ages = [all_of(data, "dense", name)[:, 1].tolist() for data in (one, other)]
        assert len(ages[0]) > 15
        assert ages[0] == ages[1]


@pytest.mark.parametrize("kind", ["avazu", "csv"])
def test_random_splits_of_one_file_with_a_header_stay_as_they_were(
    tmp_path: Path, kind: str
) -> None:
    lines = avazu_lines(200)
    for number, line in enumerate(lines):
        line[1] = str(number % 2)
    path = write(tmp_path / "a.csv", [list(Avazu.columns), *lines], separator=",")
    toml = 'label = "click"\ncategories = ["C1"]' if kind == "csv" else ""
    data = run(kind, tmp_path / "out", path, toml=toml, split="random", seed=3)
    codes = AtRandom(3)(np.arange(1, 201))  # the header is line 0
    for code, name in enumerate(("train", "validation", "test")):
        expected = (np.flatnonzero(codes == code) % 2).tolist()
        assert all_of(data, "label", name).tolist() == expected


def test_parquet_and_csv_give_texts_the_same_rows(tmp_path: Path) -> None:
    found = table(200)
    found["user"] = [f"user {each}" for each in found["user"]]
    one = run("csv", tmp_path / "1", write_csv(tmp_path / "a.csv", found), toml=CSV)
    other = run_parquet(tmp_path / "2", CSV, found)
    np.testing.assert_array_equal(all_of(one, "ids"), all_of(other, "ids"))


NULS = ["", "\0", "\0" * 8, "\0" * 20, "\0a", "a", "a\0", "a\0\0"]
NULS += ["abcdefg", "abcdefg\0", "abcdefgh", "abcdefgh\0"]


def uses_of_rows(tmp_path: Path, *parts: Any, **options: Any) -> list[int]:
    """How often each row is used by values that lie in Parquet files, a file for each part."""
    tables = [{"y": [0] * len(part), "user": part} for part in parts]
    data = run_parquet(tmp_path / "out", ONE_COLUMN, *tables, split="random", **options)
    return sorted(Counter(all_of(data, "ids")[:, 0].tolist()).values())


@pytest.mark.parametrize("kind", ["csv", "list", "string", "binary", "dictionary"])
def test_values_that_end_in_nul_bytes_have_rows_of_their_own(tmp_path: Path, kind: str) -> None:
    if kind in ("csv", "list"):
        values = [each for each in NULS for _ in range(20) if each or kind == "csv"]
        rows = [["y", "user"], *(["0", each + "|" * (kind == "list")] for each in values)]
        path = write(tmp_path / "a.csv", rows, separator=",")
        toml = ONE_COLUMN + ('[lists]\nuser = "|"' if kind == "list" else "")
        data = run("csv", tmp_path / "out", path, toml=toml)
        is_list = kind == "list"
        ids = [*chain(*lists_of(data, "user"))] if is_list else all_of(data, "ids")[:, 0]
        assert_same_grouping(ids, values)
        return
    column = pa.array([*NULS, None] * 20, pa.string())
    column = {
        "string": column,
        "binary": column.cast(pa.binary()),
        "dictionary": column.dictionary_encode(),
    }[kind]
    assert uses_of_rows(tmp_path, column) == [20] * (len(NULS) + 1)


def test_negative_and_large_numbers_of_two_files_have_rows_of_their_own(tmp_path: Path) -> None:
    numbers = [*range(-9, 9), -(2**63), 2**63 - 1] * 5
    large = [0, 5, 2**63 - 1, 2**63, *(2**64 - each for each in range(1, 10))] * 5
    signed, unsigned = pa.array(numbers, pa.int64()), pa.array(large, pa.uint64())
    expected = sorted(Counter(numbers + large).values())
    assert uses_of_rows(tmp_path, signed, unsigned) == expected
    assert column_keys(unsigned).keys.tolist() == large  # alone they keep their keys


@pytest.mark.parametrize("kind", ["int64", "uint64", "binary"])
def test_no_value_shares_the_row_of_what_is_missing(tmp_path: Path, kind: str) -> None:
    bits = np.array([0x9D39247E33776D41], np.uint64)
    value = {"int64": bits.astype(np.int64)[0], "uint64": bits[0], "binary": bits.tobytes()}[kind]
    column = pa.array([value, None, value, None, None] * 8, getattr(pa, kind)())
    assert uses_of_rows(tmp_path, column) == [16, 24]


def same_hash() -> list[bytes]:
    """Two texts of 16 bytes with one hash of 64 bits."""
    first, second = np.array([7], np.uint64), np.array([8], np.uint64)
    start = mixed(np.array([16], np.uint64))
    last = mixed(start ^ first) ^ mixed(start ^ second)
    return [first.tobytes() + bytes(8), second.tobytes() + last.tobytes()]


def test_texts_with_the_same_hash_are_refused(tmp_path: Path) -> None:
    others = [f"a text of some length {number}".encode() for number in range(400)]
    one, other = same_hash()
    message = "two different values of table 'user' have the same 64-bit hash"
    for number, values in enumerate(([*others, one, other], [one, *others, other] * 3)):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(ValueError, match=message):
            uses_of_rows(folder, pa.array(values, pa.binary()))
    (folder := tmp_path / "hash").mkdir()
    shared = uses_of_rows(folder, pa.array([one, other] * 9, pa.binary()), hash=True, max_rows=9)
    assert shared == [18]


def test_a_resumed_run_refuses_texts_with_the_same_hash(tmp_path: Path) -> None:
    """One of them is in shards that are finished already."""
    one, other = same_hash()
    values = [one, *(f"a text of some length {number}".encode() for number in range(900)), other]
    columns = {"y": [0] * len(values), "user": pa.array(values, pa.binary())}
    out = tmp_path / "out"
    with pytest.raises(OSError, match="the disk is full"):
        run_parquet(out, ONE_COLUMN, columns, split="random", disk=Full(out, "train-00002"))
    assert (out / "shards" / "train-00000.bin").exists()
    with pytest.raises(ValueError, match="two different values of table 'user'"):
        run("parquet", out, tmp_path / "a.parquet", toml=ONE_COLUMN, split="random")


LISTS = 'label = "y"\ncategories = ["user", "seen"]\n'


def lists(count: int) -> dict[str, list[Any]]:
    draw = random.Random(2)
    return {
        "y": [draw.randrange(2) for _ in range(count)],
        "user": [draw.choice([None, 3, 4]) for _ in range(count)],
        "seen": [
            draw.choice([None, [draw.randrange(9) for _ in range(draw.randrange(5))]])
            for _ in range(count)
        ],
    }


def test_parquet_lists_become_jagged(tmp_path: Path) -> None:
    found = lists(300)
    data = run_parquet(tmp_path / "out", LISTS, found)
    bags, expected = lists_of(data, "seen"), [each or [] for each in found["seen"]]
    assert list(map(len, bags)) == list(map(len, expected))
    assert_same_grouping([*chain(*bags)], [str(each) for each in chain(*expected)])
    assert_same_grouping(all_of(data, "ids")[:, 0], [str(each) for each in found["user"]])
    used = np.bincount([*chain(*bags[: data.samples("train")])], minlength=10)
    np.testing.assert_array_equal(data.counts("seen"), used)
    data.verify()


def test_parquet_at_random_keeps_lists_with_their_samples(tmp_path: Path) -> None:
    found = lists(300)
    found["user"] = list(range(300))
    data = run_parquet(tmp_path / "out", LISTS, found, split="random")
    keys = np.fromfile(tmp_path / "out" / data.manifest.tables[0].keys.file, "uint64")  # type: ignore[union-attr]
    back = pow(0x9E3779B97F4A7C15, -1, 2**64)
    for row, bag in zip(all_of(data, "ids")[:, 0], lists_of(data, "seen"), strict=True):
        user = int(keys[row - 1]) * back % 2**64
        assert len(bag) == len(found["seen"][user] or [])


def test_parquet_leaves_out_bad_samples_with_their_lists(tmp_path: Path) -> None:
    found = lists(100)
    found["y"][60:62] = [7, None]
    with pytest.raises(ValueError, match=r"line 61: the label is 7, neither 0 nor 1"):
        run_parquet(tmp_path / "1", LISTS, found)
    data = run_parquet(tmp_path / "2", LISTS, found, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 2
    expected = [len(each or []) for i, each in enumerate(found["seen"]) if i not in (60, 61)]
    assert list(map(len, lists_of(data, "seen"))) == expected


def test_parquet_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(ValueError, match="does not exist"):
        run("parquet", tmp_path / "out", path, toml=LISTS)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="is no whole Parquet file"):
        run("parquet", tmp_path / "out", path, toml=LISTS)
    toml = LISTS + '[lists]\nseen = "|"'
    with pytest.raises(ValueError, match="'seen' must hold lists"):
        run_parquet(tmp_path / "out", toml, lists(10) | {"seen": ["1|2"] * 10})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("user", pa.array([0.5, 1.5]), "column 'user' of double cannot be a category"),
        ("user", pa.array([Decimal("1.5")] * 2), r"'user' of decimal128\(2, 1\) cannot be"),
        ("user", pa.array([date(2020, 1, 1)] * 2), r"'user' of date32\[day\] cannot be"),
        ("user", pa.array([[[1]], []]), "'user' of list<.*list<.* cannot be a category"),
        ("user", pa.array([{"a": 1}] * 2), "'user' of struct<a: int64> cannot be a category"),
        ("user", pa.array([Decimal(2**64)] * 2), "'user' of decimal128.* values that are too"),
        (
            "price",
            pa.array([date(2020, 1, 1)] * 2),
            r"'price' of date32\[day\] does not hold",
        ),
        ("price", pa.array([[1], [2]]), "'price' holds lists; only categories may"),
        ("price", pa.array(["1.5", "much"]), "line 2: price is 'much', not a number, or too"),
        ("price", pa.array(["1.5", "1_0"]), "line 2: price is '1_0', not a number, or too"),
        ("y", pa.array([{"a": 1}] * 2), "'y' of struct<a: int64> does not hold numbers"),
    ],
)
def test_parquet_types_that_cannot_be_are_refused(
    tmp_path: Path, name: str, values: Any, message: str
) -> None:
    columns = {"y": [0, 1], "price": [0.5, 1.5], "user": [1, 2], name: values}
    with pytest.raises(ValueError, match=message):
        run_parquet(tmp_path / "out", ONE_COLUMN + 'dense = ["price"]', columns)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([Decimal(i % 7) for i in range(42)], pa.decimal128(38, 0)),
        pa.array([i % 7 for i in range(42)], pa.uint8()),
        pa.array([2**63 + i % 7 for i in range(42)], pa.uint64()),
        pa.array([-(i % 7) for i in range(42)], pa.int64()),
        pa.array([str(i % 7) for i in range(42)]).dictionary_encode(),
        pa.array([b"%d" % (i % 7) for i in range(42)], pa.large_binary()),
    ],
    ids=lambda values: str(values.type),
)
def test_parquet_categories_of_any_width_have_a_row_for_each_value(
    tmp_path: Path, values: Any
) -> None:
    data = run_parquet(tmp_path / "out", ONE_COLUMN, {"y": [0, 1] * 21, "user": values})
    assert data.table_rows == {"user": 8}
    ids = data.shards("train")[0].ids[:, 0]
    assert len(set(ids[:7].tolist())) == 7
    assert ids[7:14].tolist() == ids[:7].tolist()


def test_parquet_columns_of_one_table_must_hold_one_kind_of_values(tmp_path: Path) -> None:
    """The text "1" and the number 49 would be one value; 7 and "7" would be two of one table."""
    numbers, texts = list(range(40)), [str(i) for i in range(40)]
    columns = {"y": [0, 1] * 20, "item": numbers, "last": texts}
    apart = 'label = "y"\ncategories = ["item", "last"]\n'
    toml = apart + '[tables]\nlast="item"'
    with pytest.raises(ValueError, match="'item' holds whole numbers and 'last' texts, so one"):
        run_parquet(tmp_path / "1", toml, columns)
    run_parquet(tmp_path / "2", apart, columns)
    columns["last"] = [[i] for i in range(40)]
    assert run_parquet(tmp_path / "3", toml, columns).table_rows == {"item": 41}
    one, other = {"y": [0, 1] * 20, "user": numbers}, {"y": [0, 1], "user": ["7", "8"]}
    with pytest.raises(ValueError, match=r"'user' .* whole numbers in .*a\.parquet and texts in"):
        run_parquet(tmp_path / "4", ONE_COLUMN, one, other)
    other["user"] = pa.nulls(2)
    assert run_parquet(tmp_path / "5", ONE_COLUMN, one, other).table_rows == {"user": 42}


def test_parquet_lists_of_one_length_and_none_at_all_are_lists(tmp_path: Path) -> None:
    pairs = pa.array([[i, i + 1] for i in range(20)], pa.list_(pa.int64(), 2))
    tables = {"y": [0, 1] * 10, "user": pairs}, {"y": [0, 1], "user": pa.nulls(2)}
    data = run_parquet(tmp_path / "out", ONE_COLUMN, *tables)
    assert list(map(len, lists_of(data, "user"))) == [2] * 20 + [0, 0]


def test_taobao_samples_are_what_came_before_and_what_came_next() -> None:
    lines = taobao_lines(60)
    events = np.array([[int(line[i]) for i in (0, 1, 2, 4)] for line in lines])
    found = make_samples(events, np.random.default_rng(0), BadLines())
    by_user: dict[int, list[tuple[int, int]]] = {}
    for line in lines:
        by_user.setdefault(int(line[0]), []).append((int(line[4]), int(line[1])))
    for each in by_user.values():
        each.sort(key=lambda event: event[0])  # stable, as the events of one second are
    ends = np.cumsum(found.lengths["history_item"])
    points: dict[int, int] = {}
    for i, end in enumerate(ends):
        user, time = int(found.keys["user"][i]), int(found.lines[i])
        history = found.keys["history_item"][end - found.lengths["history_item"][i] : end].tolist()
        mine = by_user[user]
        (place,) = [
            at
            for at, event in enumerate(mine)
            if event[0] == time and [e[1] for e in mine[max(0, at - STEPS) : at]] == history
        ]
        assert place > 0
        item = int(found.keys["item"][i])
        assert (item == mine[place][1]) == bool(found.label[i])
        assert int(found.keys["category"][i]) == item % 7 + 500
        gap = np.log1p(np.float32(time - mine[place - 1][0]))
        np.testing.assert_allclose(found.dense[i, 0], gap, rtol=1e-6)
        points[user] = points.get(user, 0) + 1
    assert points == {u: min(POINTS, len(e) - 1) for u, e in by_user.items() if len(e) > 1}
    assert 0.4 < found.label.mean() < 0.6


def test_taobao_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "UserBehavior.csv", taobao_lines(300), separator=",")
    data = run("taobao", tmp_path / "out", path, seed=3)
    sizes = [data.samples(name) for name in ("train", "validation", "test")]
    assert abs(sizes[0] / sum(sizes) - 0.7) < 0.05
    assert abs(sizes[1] / sizes[2] - 1) < 0.2
    assert list(data.table_rows) == ["user", "item", "category"]
    assert data.table_rows["category"] == 8
    assert max(map(len, lists_of(data, "history_item"))) == STEPS


def test_taobao_bad_lines(tmp_path: Path) -> None:
    lines = taobao_lines(50)
    lines[7][1] = "item"
    lines[9] = ["1", "2"]
    path = write(tmp_path / "a.csv", lines, separator=",")
    with pytest.raises(ValueError, match=r"a\.csv, line 8: item is 'item', not a whole number"):
        run("taobao", tmp_path / "1", path)
    lines[12][3] = "click"
    write(path, lines, separator=",")
    data = run("taobao", tmp_path / "2", path, bad_rows="skip")
    assert data.manifest.source["bad_rows"] == 3
    assert data.manifest.source["lines"] == len(lines)
    assert "line 13: behaviour is 'click', not pv" in data.manifest.source["bad_examples"][2]
    assert "line 10: 2 columns instead of 5" in data.manifest.source["bad_examples"][1]
    with pytest.raises(ValueError, match="taobao is one file of events"):
        run("taobao", tmp_path / "3", path, path)


def test_taobao_users_of_one_event_make_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    path.write_text("".join(f"{user},5,5,pv,{user}\n" for user in range(30)))
    with pytest.raises(ValueError, match="30 good lines make no sample: no user has two of them"):
        run("taobao", tmp_path / "out", path)
    write(path, [*taobao_lines(50), *([["junk"]] * 10_001)], separator=",")
    data = run("taobao", tmp_path / "junk", path, bad_rows="skip", seed=2**63 - 1)
    assert data.manifest.source["bad_rows"] == 10_001
    assert len(data.manifest.source["bad_examples"]) == 5


def test_an_unknown_kind_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown kind of files 'critero' .did you mean 'criteo'"):
        run("critero", tmp_path / "out", tmp_path)
    with pytest.raises(ValueError, match="--columns is for parquet and csv"):
        run("criteo", tmp_path / "out", tmp_path, toml=CSV)
