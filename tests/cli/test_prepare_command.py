"""`hotrow prepare` makes folders that training can read, and tells of mistakes in a sentence."""

from __future__ import annotations

import glob
import gzip
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clicks import criteo_lines, write
from commands import hotrow, refused, succeeds
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.job import needed
from hotrow.data.prepared.sources import Avazu


def test_a_log_becomes_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", [*criteo_lines(100), ["junk"]])
    options = ["--out", tmp_path / "out", "--bad-rows", "skip"]
    output = succeeds("prepare", "criteo", path, *options).output
    for words in ("1 bad row left out", "line 101: 1 column ", "C26", "vocabulary", "written to"):
        assert words in output
    assert Prepared(tmp_path / "out").samples("train") == 87
    output = succeeds("prepare", "criteo", path, *options, "--restart", "--json").output
    events = [json.loads(line) for line in output.splitlines()]
    stages = [event["stage"] for event in events if event["event"] == "stage"]
    assert stages == ["reading", "encoding", "verifying"]
    assert events[-1]["event"] == "end"
    assert events[-1]["samples"] == {"train": 87, "validation": 6, "test": 7}
    assert events[-1]["bad_rows"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["criteo", "none.txt"], "none.txt does not exist"),
        (["critero", "none.txt"], "did you mean 'criteo'?"),
        (["parquet", "none.parquet"], "parquet needs --columns"),
        (["criteo", "none.txt", "--memory", "much"], "cannot read 'much' as a number of bytes"),
        (["criteo", "none.txt", "--bad-rows", "keep"], "--bad-rows must be skip or error"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    error = refused("prepare", *words, "--out", tmp_path / "out")
    assert message in error
    assert "Traceback" not in error


def _words(line: str) -> list[str]:
    """What a shell makes of it."""
    words: list[str] = []
    for word in shlex.split(line):
        if found := re.fullmatch(r"(.*)\{0\.\.([0-9]+)\}(.*)", word):
            words += [f"{found[1]}{i}{found[3]}" for i in range(int(found[2]) + 1)]
        else:
            words += sorted(glob.glob(word)) if "*" in word else [word]
    return words


def test_the_examples_of_the_docs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    log = write(tmp_path / "train.txt", criteo_lines(40)).read_bytes()
    for day in range(24):
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(log))
    avazu = [list(Avazu.columns), *([str(i), "0", "14102100", *["a"] * 21] for i in range(40))]
    with pa.CompressedOutputStream("train.csv.zst", "zstd") as file:
        file.write("".join(",".join(line) + "\n" for line in avazu).encode())
    write(Path("UserBehavior.csv"), [["1", str(i), "2", "pv", str(i)] for i in range(9)],
          separator=",")  # fmt: skip
    table: dict[str, Any] = {n: [f"{i}" for i in range(20)] for n in ("user", "item", "last")}
    table["tags"] = [["a", "b"]] * 20
    numbers = {"clicked": [0, 1] * 10, "price": [0.5] * 20, "age": [30] * 20}
    for part in range(2):
        pq.write_table(pa.table(table | numbers), f"part-{part}.parquet")
    (toml,) = re.findall(r"```toml\n(# columns.toml.*?)```", page, re.DOTALL)
    Path("columns.toml").write_text(toml)
    blocks = re.findall(r"^```\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^hotrow (prepare [^#\n]*)", "".join(blocks), re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        succeeds("prepare", *_words(command)[1:])
    blocks = re.findall(r"^    from hotrow.*?(?=\n\n\S|\Z)", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(textwrap.dedent(block).replace("2048", "8"), names)  # there are few lines here
    assert len(next(names["rest"])) == 8


def test_a_finished_folder_is_checked_instead_of_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("criteo", write(tmp_path / "train.txt", criteo_lines(100)), "--out", "out")
    assert "written to" in succeeds("prepare", *words).output
    output = succeeds("prepare", *words).output
    assert output.strip() == "out is already prepared (all checksums are right); nothing to do"
    assert "out: prepared data, 55 files" in hotrow("verify", "out").output
    verified = json.loads(hotrow("verify", "out", "--json").output)
    assert (verified["event"], verified["files"]) == ("verified", 55)
    shard = tmp_path / "out" / "shards" / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    assert f"has 100 bytes instead of {len(whole):,}" in refused("prepare", *words)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    train = ["train", "--set", "data.kind=prepared", "--set", "data.folder=out"]
    for command in (["verify", "out"], train, ["prepare", *words]):
        result = hotrow(*command)
        assert result.exit_code == 2
        assert "train-00000.bin has changed since it was written" in result.output
        assert "--restart" in result.output
    assert not Path("runs").exists()
    assert not (tmp_path / "out" / ".work").exists()
    succeeds("prepare", *words, "--restart")
    assert shard.read_bytes() == whole


def test_ctrl_c_tells_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hotrow.cli.prepare.prepare_files", stopped)
    path = write(tmp_path / "train.txt", criteo_lines(10))
    result = hotrow("prepare", "criteo", path, "--out", tmp_path / "out")
    assert (result.exit_code, result.output.strip()) == (
        130, "interrupted; what is finished is kept: give the same command again to resume",
    )  # fmt: skip


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    block = write(tmp_path / "block.txt", criteo_lines(4000, values=3000)).read_bytes()
    peaks = []
    for megabytes in (100, 220):
        path = tmp_path / "train.txt"
        with path.open("wb") as file:
            for _ in range(megabytes * 10**6 // len(block)):
                file.write(block)
        script = """
            import resource, sys
            from hotrow.cli import make_app
            make_app()(["prepare", *sys.argv[1:]], standalone_mode=False)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
        """
        command = [sys.executable, "-c", textwrap.dedent(script), "criteo", str(path)]
        options = ["--out", str(tmp_path / f"{megabytes}"), "--workers", "2", "--json"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert max(peaks) < needed(2)
    assert peaks[1] - peaks[0] < 64 << 20
