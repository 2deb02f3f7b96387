"""Every benchmark runs in small and writes its results; tests over a second are slow."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clicks import criteo_lines, taobao_lines, write

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def lines_of(folder: Path, suite: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{suite}.jsonl").read_text().splitlines()]


def test_belady(run: Any, tmp_path: Path) -> None:
    words = ["--smoke", "--only", "kaggle-2", "--depths", "1", "20", "--counted", "5"]
    output = run("belady", *words, "--results", tmp_path)
    lines = lines_of(tmp_path, "belady")
    assert [line["system"] for line in lines] == ["belady", "lookahead-1", "lookahead-20", "lru"]
    over = [line["over_belady"] for line in lines]
    assert over[0] == 1 <= over[2] < over[1]
    assert "kaggle-2   lru" in output


def test_bound(load: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, draw = load("bound"), np.random.default_rng(0)
    columns = {name: draw.integers(0, 4, 3000) for name in script.GLOBO[2:]}
    columns |= {"user_id": draw.geometric(0.004, 3000), "article_id": draw.geometric(0.02, 3000)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    monkeypatch.setitem(script.BATCH, "globo", 40)
    words = ["--globo", tmp_path / "clicks.parquet", "--parts", "1", "20", "--results", tmp_path]
    output = run("bound", *words, "--depths", "2", "60").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output[2:]]
    assert "do not fit" in cells[0][3]
    names = ["belady", "belady, 2 batches held", "lookahead-2", "lookahead-60", "lru"]
    assert [cell[3] for cell in cells[1:]] == names
    over = [float(cell[5]) for cell in cells[1:]]
    assert over[0] == 1 <= over[1] <= over[3] <= over[2] < over[4]
    written = lines_of(tmp_path, "bound")
    assert [line["run"] for line in written] == ["globo-1"] + ["globo-20"] * 5
    assert written[0]["missing_rows_per_batch"] is None


def test_loader(run: Any, tmp_path: Path) -> None:
    run("loader", "--smoke", "--results", tmp_path)
    assert [line["workers"] for line in lines_of(tmp_path, "loader")] == [1, 2]


def test_skew(run: Any, load: Any, tmp_path: Path) -> None:
    write(tmp_path / "train.txt", criteo_lines(400))
    draw = np.random.default_rng(0)
    seconds = np.sort(draw.integers(0, 4 * 86_400, 5000))
    articles = draw.geometric(0.01, 5000) + seconds // 86_400 * 30
    clicks = pa.table({"timestamp": seconds, "article_id": articles})
    pq.write_table(clicks, tmp_path / "clicks.parquet")
    files = ["--criteo", tmp_path / "train.txt", "--globo", tmp_path / "clicks.parquet"]
    output = run("skew", *files)
    assert "accesses of the hottest 1 % and 10 %" in output
    assert "clicks on the hottest of the day before" in output
    with pytest.raises(SystemExit, match=r"shares should be \[0.5\]"):
        load("skew").same("shares", [0.4], [0.5], within=1e-3)


def test_render(run: Any, tmp_path: Path) -> None:
    run("render", "--results", BENCHMARKS / "results", "--out", tmp_path / "README.md")
    assert "## Misses over Belady's bound" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "belady.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_a_suite(load: Any, run: Any, tmp_path: Path) -> None:
    suite, multihot = load("suite"), load("multihot").SUITE
    only = ["--only", "sgd/hotrow-lookahead", "sgd/hotrow-all-fast", "adam-single/hotrow-lookahead"]
    words = [*only, "--smoke", "--results", tmp_path]
    run("multihot", *words, main=lambda: suite.main(multihot))
    lines = lines_of(tmp_path, "multihot")
    assert [line["run"] for line in lines] == ["sgd", "sgd", "adam-single"]
    assert [line["facts"]["hit_rate"] < 1 for line in lines] == [True, False, True]
    assert run("multihot", *words, "--list", main=lambda: suite.main(multihot)).count("sgd") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # few batches: nothing to mix, or to skip
def test_published(run: Any, tmp_path: Path) -> None:
    only = ["kaggle", "cpu", "hybrid*", "static-hybrid", "fae", "*fae", "*-hotline", "random-drop"]
    output = run("published", "--only", *only, "--smoke", "--results", tmp_path)
    found = {
        line["system"].removeprefix("hotrow-"): line for line in lines_of(tmp_path, "published")
    }
    assert set(found) == {
        "cpu", "hybrid", "hybrid-plain", "static-hybrid", "fae", "slipstream-fae",
        "slipstream-hotline", "random-drop",
    }  # fmt: skip
    assert 0 < found["fae"]["facts"]["hot_share"] < 1
    assert found["slipstream-hotline"]["facts"]["hot_share"] > 0
    assert "times hybrid-plain, published 1.52" in output


@pytest.mark.slow
def test_scratchpipe(run: Any, tmp_path: Path) -> None:
    words = ["--only", "static-hybrid", "scratchpipe", "--budgets", "10", "--localities", "uniform"]
    output = run("scratchpipe", *words, "high", "--smoke", "--results", tmp_path)
    found = {(each["run"], each["system"]): each for each in lines_of(tmp_path, "scratchpipe")}
    assert len(found) == 4
    low, high = (found[f"{run}-10", "hotrow-static-hybrid"]["facts"] for run in ("uniform", "high"))
    assert high["hit_rate"] > low["hit_rate"] + 0.3
    assert "scratchpipe over static-hybrid on the mean" in output


@pytest.mark.slow
def test_skip_control(run: Any, tmp_path: Path) -> None:
    words = ["--smoke", "--results", tmp_path, "--seeds", "0", "--bases", "lookahead"]
    words += ["--ways", "none", "slipstream:watched=0.2"]
    run("skip_control", *words)
    lines = {line["system"]: line for line in lines_of(tmp_path, "skip_control")}
    ways = ("slipstream", "random-drop", "random-hot")
    assert lines.keys() == {"none", *(f"{way}:watched=0.2" for way in ways)}
    (dropped,) = {line["dropped"] for name, line in lines.items() if name != "none"}
    assert dropped > 0
    assert "0 of 2 tasks" in run("skip_control", *words)  # nothing is measured twice


@pytest.mark.slow
def test_systems_on_ranks(run: Any, tmp_path: Path) -> None:
    output = run("systems_on_ranks", "--smoke", "--results", tmp_path)
    lines = {(line["name"], line["ranks"]): line for line in lines_of(tmp_path, "systems_on_ranks")}
    assert len(lines) == 10
    for (name, ranks), line in lines.items():
        sent = {kind: x["ids"] + x["rows"] + x["grads"] for kind, x in line["sent"].items()}
        assert all((total > 0) == (ranks > 1) for total in sent.values())
        if ranks > 1:
            assert line["same"], name
            assert line["apart"] < 1e-4
    hot = lines["fae", 2]["sent"]["hot"]
    assert (hot["ids"], hot["rows"], hot["early rows"]) == (0, 0, 0)
    assert "AUC - one rank" in output


@pytest.mark.slow
def test_system_quality(load: Any, run: Any, tmp_path: Path) -> None:
    words = ["--smoke", "--targets", "0.5", "--results", tmp_path, "--systems", "random-drop"]
    outputs = [run("system_quality", "--seeds", seed, *words) for seed in "01"]
    lines = {(line["run"], line["system"]): line for line in lines_of(tmp_path, "system_quality")}
    pairs = []
    for seed in ("seed 0", "seed 1"):
        ours, plain = lines[seed, "slipstream samples 0.5"], lines[seed, "all-fast"]
        control, rows = (
            lines[seed, "random-drop as samples 0.5"],
            lines[seed, "slipstream rows 0.5"],
        )
        assert ours["dropped"] == control["dropped"] > 0.01
        assert (rows["dropped"], rows["more"]["stale_rows"] > 0) == (0, True)
        pairs.append(ours["auc"] - plain["auc"])
    # The second part's table has the first part's seed in it.
    found = load("system_quality").Interval.of(pairs)
    assert f"{found.mean:+.5f} ± {found.half:.5f}" in outputs[1]


def movielens(path: Path, ratings: int = 1500) -> None:
    torch.manual_seed(0)
    users, films, stars = (torch.randint(1, n, (ratings,)).tolist() for n in (40, 60, 6))
    lines = {
        "users.dat": [f"{n}::{'FM'[n % 2]}::{18 + n % 3}::{n % 5}::{n % 7}" for n in range(1, 40)],
        "movies.dat": [f"{n}::Film {n}::{'Drama|War' if n % 2 else 'War'}" for n in range(1, 60)],
        "ratings.dat": [
            f"{user}::{film}::{star}::{time}"
            for time, (user, film, star) in enumerate(zip(users, films, stars, strict=True))
        ],
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in lines.items():
            archive.writestr(f"ml-1m/{name}", "\n".join(text) + "\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:validation loss rose")  # which ends skipping, late enough
@pytest.mark.filterwarnings("ignore:no threshold")  # some are left out all the same
def test_real(run: Any, tmp_path: Path) -> None:
    movielens(tmp_path / "ml-1m.zip")
    small = (
        "training.steps=60", "data.batch_size=16", "embedding.budget=95%", "model.top=[4]",
        "system.target=0.5",
    )  # fmt: skip
    words = ["--movielens", tmp_path / "ml-1m.zip", "--results", tmp_path, "--strategies"]
    words += ["all-fast,reordered-1,lookahead,lookahead+slipstream"]
    run("real", *words, *(f"--set={each}" for each in small))
    facts = {line["system"]: line["facts"] for line in lines_of(tmp_path, "real")}
    assert facts["all-fast"]["samples"] == facts["reordered-1"]["samples"] == 960
    assert facts["lookahead"]["equal"] == "bits"
    assert facts["reordered-1"]["equal"] == "tolerance"
    left = facts["lookahead+slipstream"]["samples"]
    assert 640 < left < 960
    assert facts["lookahead+random-drop"]["samples"] == pytest.approx(left, abs=16)


@pytest.mark.slow
def test_quality_of_sequences(load: Any, tmp_path: Path, capsys: Any) -> None:
    script = load("quality")
    path = write(tmp_path / "UserBehavior.csv", taobao_lines(60), separator=",")
    folder = script.prepared("taobao", path, tmp_path)
    small = ["data.batch_size=32", "embedding.budget=90%", "model.num_steps=4"]
    assert script.measure("taobao", folder, seeds=1, settings=small)
    assert "seed 0, by validation AUC" in capsys.readouterr().out


@pytest.mark.slow
def test_watched(run: Any) -> None:
    sizes = {"batch": 4, "rows": 4000, "steps": 70, "rounds": 1, "depth": 1}
    output = run("watched", "--device=cpu", *(f"--{name}={size}" for name, size in sizes.items()))
    kinds = [line.split()[:2] for line in output.splitlines()[2:]]
    assert ["watched", "on"] in kinds
    assert ["watched", "off"] in kinds


@pytest.mark.slow
def test_kill() -> None:
    """A process that is killed again and again ends with the same bits."""
    words = [sys.executable, str(BENCHMARKS / "kill.py"), "--kills", "5", "--steps", "48"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["equal"], report["kills"]) == (True, 5)


@pytest.mark.slow
def test_overlap(run: Any, tmp_path: Path) -> None:
    sizes = {"features": 3, "rows": 3000, "dim": 4, "batch": 32, "hidden": 8, "steps": 12}
    words = [f"--{name}={size}" for name, size in sizes.items()]
    run("overlap", *words, "--budget=60%", f"--results={tmp_path / 'overlap.jsonl'}",
        f"--out={tmp_path / 'ranks.svg'}")  # fmt: skip
    lines = lines_of(tmp_path, "overlap")
    early = {line["system"]: line["sent"].get("early rows") for line in lines}
    assert early["ranks that share rows"] > 0 == early["the same, no row early"]
    assert {"one rank", "messages alone"} <= early.keys()
    assert "early rows" in (tmp_path / "ranks.svg").read_text()
