"""`hotrow profile` tells how data are, and its counts pin rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotrow
from commands import refused, succeeds
from hotrow.report.profiled import coverage
from hotrow.run.config import load
from hotrow.run.job import build

RUN = "[data]\nrows = [2000, 300, 10]\nbatch_size = 64\nsamples = 1280\n"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_people_get_tables(run_file: Path) -> None:
    output = succeeds("profile", run_file, "--slots", "90,10%").output
    for words in (
        "1,280 samples in 20 batches of 64",
        "cat_0",
        "all tables",
        "all-hot samples",
        "Different rows of consecutive batches",
        "Accesses to the 23 hottest rows",
        "does not fit",
        "different rows: a smaller --batch-size, or --slots 97 or more",
        "static holds the rows that these batches read most, from the start",
        "belady",
        "Counted exactly, in 108.3 KiB at most",
    ):
        assert words in output


def test_a_file_keeps_no_trace_of_progress(run_file: Path) -> None:
    for command in ("profile", "simulate"):
        words = [command, str(run_file), "--batches", "4", "--warm-up", "2"]
        assert succeeds(*words).stderr == ""


def test_machines_get_the_same_facts(run_file: Path, tmp_path: Path) -> None:
    output = succeeds(
        "profile", run_file, "--json", "--out", tmp_path / "p", "--warm-up", "4"
    ).output
    facts = json.loads(output)
    assert facts["samples"] == 1280
    assert facts["total"]["accesses"] == 3 * 1280
    assert [each["name"] for each in facts["tables"]] == ["cat_0", "cat_1", "cat_2"]
    assert facts["tables"][2]["distinct"] == {"value": 10.0, "error": 0.0}
    assert facts["total"]["top"]["1.0%"]["value"] < facts["total"]["top"]["10.0%"]["value"]
    assert [each["batches"] for each in facts["curves"]] == [16, 16, 16]
    # NaN is no JSON: slots in which no batch fits have no figure.
    assert facts["curves"][0]["misses"][0] is None
    assert json.loads((tmp_path / "p" / "profile.json").read_text())["facts"] == facts


def test_of_tables_read_as_often_the_largest_are_drawn() -> None:
    def table(name: str, rows: int) -> dict[str, Any]:
        curve = {"num_rows": rows, "rows": [1], "share": [1.0], "error": [0.0]}
        return {"name": name, "accesses": 5, "rows": rows, "coverage": curve}

    tables = [table(f"cat_{rows}", rows) for rows in range(1, 13)]
    drawn = coverage({"tables": tables, "total": table("all tables", 78)}).series
    assert [each.name for each in drawn][:3] == ["all tables", "cat_12", "cat_11"]


def test_the_counts_pin_rows(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    succeeds("profile", run_file, "--out", folder)
    counts = hotrow.load_profile(folder)
    assert sum(int(uses.sum()) for _, uses in counts.values()) == 3 * 1280
    settings = [f"embedding.profile={folder}", "embedding.strategy=static"]
    with_profile, without = (
        build(load(run_file, overrides=each)) for each in (settings, settings[1:])
    )
    fetched = []
    for job in (with_profile, without):
        for batch in hotrow.ahead(job.samples.batches(6), job.embedding, ids=lambda b: b.sparse):
            job.embedding(batch.sparse).values().sum().backward()
        fetched.append(job.embedding.traffic().fetched_rows)
    assert fetched[0] < fetched[1]


def test_little_memory_gives_estimates_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_text("[data]\nrows = [40000, 9000]\nbatch_size = 512\nsamples = 10240\n")
    output = succeeds("profile", path, "--memory", "512KiB", "--slots", "100,700").output
    assert "Estimated from 4,778 rows" in output
    few, enough = (line.split() for line in output.splitlines() if line[:4] in ("100 ", "700 "))
    assert few[1:] == ["does", "not", "fit"] * 3
    assert "±" in enough[2]
    assert enough[-2:] == ["not", "known"]


def test_a_parquet_file_needs_its_columns(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    columns = {"item": draw.integers(0, 40, 500), "when": np.arange(500), "label": [0] * 500}
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table(columns), path)
    (tmp_path / "columns.toml").write_text('label = "label"\ncategories = ["item"]\n')
    given = [
        ["--categories", "item"],
        ["--columns", tmp_path / "columns.toml"],
        ["--categories", "item", "--time", "when", "--period", "100"],
    ]
    for words in given:
        output = succeeds(
            "profile", path, *words, "--batch-size", "50", "--json", "--hot", "10%"
        ).output
        facts = json.loads(output)
        assert (facts["batches"], facts["total"]["rows"]) == (10, 40)
    assert len(facts["total"]["drift"]["own"]) == 5
    assert "give one of --columns and --categories" in refused("profile", path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hot", "0"], "--hot must be a share of the rows"),
        (["--periods", "0"], "--periods must be at least 1, not 0"),
        (["--batches", "0"], "--batches must be at least 1, not 0"),
        (["--warm-up", "20"], "--warm-up must leave batches to count, of 20; not 20"),
        (["--slots", "many"], "--slots: cannot read 'many'"),
        (["--categories", "a"], "--columns, --categories and --time are for Parquet files"),
        (["--split", "test"], "--split is for prepared folders"),
        (["--out", "/proc/counts"], "--out /proc/counts cannot be written"),
        (["--html", "/proc/page.html"], "--html /proc/page.html cannot be written"),
        (["--memory", "lots"], "--memory: cannot read 'lots' as a number of bytes"),
        (["--set", "data.rovs=3"], "did you mean 'rows'"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(run_file: Path, words: list[str], message: str) -> None:
    assert message in refused("profile", run_file, *words)


def test_what_is_no_data_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "manifest.json").write_text("{")
    for name, message in (
        ("nothing", "there is no such file or folder"),
        ("log.txt", "is no prepared folder, no .parquet and no .toml"),
        (".", "has no manifest.json"),
        ("made/manifest.json", "manifest.json is not valid JSON"),  # which stands for its folder
    ):
        assert message in refused("profile", tmp_path / name)
