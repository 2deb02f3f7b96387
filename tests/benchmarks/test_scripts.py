"""What scripts compute, on invented data."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clicks import criteo_lines, write
from commands import hotrow
from hotrow.run.job import build


def test_what_fails_or_has_no_time_hinders_nothing_after_it(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = load("harness")
    given = argparse.Namespace(minutes=5, results=tmp_path, commit="abc", smoke=False)
    session = harness.Session("tried", given)

    def broken() -> dict:
        raise RuntimeError("a kernel is ill")

    def absent() -> dict:
        raise harness.Unavailable("no such library")

    session.attempt("a", "x", broken, str)
    session.attempt("b", "x", absent, str)
    session.attempt("c", "x", lambda: {"value": 1}, lambda found: f"{found['value']} ms")
    session.attempt("d", "x", broken, str, seconds=10**6)
    session.print_again()
    end = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    assert [line.split(maxsplit=1)[1] for line in end] == [
        "FAILED: a kernel is ill",
        "left out: no such library",
        "1 ms",
        "not measured: the minutes are over",
    ]
    assert session.failed == 1
    (line,) = harness.read_results(tmp_path / "tried.jsonl")
    assert (line["run"], line["value"], line["commit"]) == ("c", 1, "abc")


def test_rows_come_as_often_as_they_were_counted(load: Any, tmp_path: Path) -> None:
    script, path = load("counted"), tmp_path / "counts.csv"
    lines = ["a,x,60", "a,y,40", "b,p,50", "b,q,30"]
    path.write_text("Field,Value,Total\n" + "\n".join(lines) + "\n")
    counts = script.read_counts(path)
    assert {name: each.tolist() for name, each in counts.items()} == {"a": [60, 40], "b": [50, 30]}
    whole, part = script.compare(counts, {"a": 3, "b": 200}, batches=2)
    assert (whole.counted, part.counted) == (2, 2)
    assert whole.share == whole.drawn_share == 1.0
    assert part.share == 0.8  # the other 198 rows have the rest of 100
    assert part.drawn_share == pytest.approx(0.8, abs=0.01)
    assert part.drawn_top_share == pytest.approx(part.top_share, abs=0.01)
    assert whole.drawn_top_share == pytest.approx(0.6, abs=0.02)
    assert part.chi_squared < 6
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="has no columns Field and Total"):
        script.read_counts(path)


def test_both_ways_of_training_on_criteo_end_equal(load: Any, tmp_path: Path) -> None:
    script, path = load("criteo_sample"), tmp_path / "train.txt"

    def written(samples: list[tuple[int, list[str], list[str]]]) -> Any:
        lines = ["\t".join([str(label), *numbers, *words]) for label, numbers, words in samples]
        path.write_text("\n".join(lines) + "\n")
        return script.read_clicks(path)

    clicks = written(
        [
            (0, ["", "-2", "7"] + ["1"] * 10, ["5bd1", "aa"] + ["x"] * 24),
            (1, ["3", "0", ""] + ["1"] * 10, ["0fe3", "aa"] + ["x"] * 23 + [""]),
            (0, ["0", "1", "2"] + ["1"] * 10, ["5bd1", ""] + ["x"] * 24),
        ]
    )
    assert clicks.label.tolist() == [0, 1, 0]
    assert clicks.dense[:, 0].tolist() == pytest.approx([0, math.log(4), 0])
    assert clicks.sparse[:, 25].tolist() == [0, 1, 0]
    assert script.rows_of(clicks) == [2, 2] + [1] * 23 + [2]
    random = torch.randint(40, (900, 40), generator=torch.Generator().manual_seed(0)).tolist()
    clicks = written(
        [(row[0] % 2, list(map(str, row[1:14])), [f"{x:08x}" for x in row[14:]]) for row in random]
    )
    fast = script.train(clicks, strategy="all-fast", budget=None)
    cached = script.train(clicks, strategy="lookahead", budget="50%")
    assert script.differences(fast, cached) == []
    other = script.Outcome(**{**vars(fast), "losses": fast.losses + 1, "auc": 0.0})
    assert script.differences(fast, other) == ["losses", "auc"]


@pytest.mark.slow
def test_plain_pytorch_is_the_same_model_and_learns_the_same(load: Any, tmp_path: Path) -> None:
    script = load("quality")
    path = write(tmp_path / "train.txt", criteo_lines(800))
    assert hotrow("prepare", "criteo", path, "--out", tmp_path / "criteo").exit_code == 0
    small = ["data.batch_size=32", "embedding.budget=60%", "model.bottom=[8]", "model.top=[8]"]
    config = script.config_of("rm2-kaggle", tmp_path / "criteo", small, seed=0)
    job = build(config)
    plain = script.PlainDLRM(job)
    batch = next(job.samples.batches(1))
    job.model.eval()
    assert not torch.allclose(plain(batch), job.model(batch))
    plain.start_like(job)
    torch.testing.assert_close(plain(batch), job.model(batch))
    ours, unlike = script.trained(config)
    outcome = script.trained_plainly(config, same_start=True)
    assert unlike == []
    assert outcome.auc == pytest.approx(ours.auc, abs=1e-3)
    assert outcome.log_loss == pytest.approx(ours.log_loss, abs=1e-4)


# -- drift -----------------------------------------------------------------------------


@pytest.mark.slow
def test_relearning_stays_near_an_oracle_and_learning_once_does_not(
    load: Any, tmp_path: Path
) -> None:
    """Nine of ten clicks go to five articles, five others after every fifth hour."""
    script, path, total = load("drift"), tmp_path / "clicks.parquet", 36_000
    seconds = torch.arange(total) * 3600 // 3000
    hot = 100 + 5 * (seconds // 18_000) + torch.randint(0, 5, (total,))
    articles = torch.where(torch.rand(total) < 0.9, hot, torch.randint(1000, 3000, (total,)))
    context = {
        name: torch.randint(1, 4, (total,)).numpy()
        for name in ("environment", "deviceGroup", "os", "referrer_type")
    }
    columns = {"timestamp": seconds.numpy(), "article_id": articles.numpy(), **context}
    pq.write_table(pa.table(columns), path)
    clicks = script.read(path, script.COLUMNS)
    assert [table.num_embeddings for table in clicks.tables[1:]] == [3, 3, 3, 3]
    names = (script.ORACLE, "learned once, from 5 %", script.HOTLINE, "static")
    lines = {line.name: line for line in script.compare(clicks, 0.02, 250, names)}
    oracle, once, again, static = (lines[name] for name in names)
    assert oracle.share > 0.9
    assert (oracle.below, oracle.hours_near) == (0, 1)
    assert once.below > 0.5
    assert again.below < 0.1
    assert again.times_chosen > once.times_chosen == 1
    assert again.share == pytest.approx(oracle.share - again.below)
    assert static.share is None
    assert again.hit_rate > static.hit_rate
    pq.write_table(pa.table({"timestamp": [2, 1], "article_id": [1, 2]}), path)
    with pytest.raises(SystemExit, match="has no column environment; it has timestamp, article_id"):
        script.read(path, script.COLUMNS)


def test_an_hour_is_counted_by_hand(load: Any) -> None:
    script = load("drift")
    ids = torch.tensor([[0], [0], [1], [2], [2], [1]])
    tables = (script.EmbeddingBagConfig("article_id", 3, 16, ["article_id"]),)
    clicks = script.Clicks(tables, ids, torch.tensor([0, 0, 0, 3, 3, 3]))
    own = script.chosen_by_hour(clicks, script.ROW_BYTES, ahead=True)
    assert own.is_popular.tolist() == [True, True, False, True, True, False]
    assert (own.times_chosen, own.rows_in) == (2, 2)
    before = script.chosen_by_hour(clicks, script.ROW_BYTES, ahead=False)
    assert before.is_popular.tolist() == [False] * 6
    days = script.Clicks(tables, ids, torch.tensor([0, 1, 23, 24, 25, 47]))
    assert script.next_day(days, 0.67) == pytest.approx(1 / 3)  # rows 0 and 1 were read on day 1


# -- the study of Slipstream ------------------------------------------------------------


def test_criteo_and_movielens_are_converted(load: Any, tmp_path: Path) -> None:
    script = load("skip_control")
    scores, labels = np.array([0.1, 0.5, 0.5, 0.9]), np.array([0, 0, 1, 1])
    assert script.auc_of(scores, labels) == 3.5 / 4  # ties are halved
    lines = [[str(n % 2), *["3"] * 12, "", *[f"{n % 3:x}"] * 25, ""] for n in range(70)]
    (tmp_path / "train.txt").write_text("".join("\t".join(line) + "\n" for line in lines))
    script.convert_criteo(tmp_path / "train.txt", tmp_path / "criteo.npz")
    with np.load(tmp_path / "criteo.npz") as found:
        assert found["ids"].shape == (70, 26)
        assert found["rows"].tolist() == [4] * 25 + [2]  # the first row is for rare values
        assert int(found["trained"]) == 60
        assert (found["dense"][0, 0], found["dense"][0, 12]) == (np.float32(np.log1p(3)), 0)
    with zipfile.ZipFile(tmp_path / "ml.zip", "w") as archive:
        archive.writestr("ml-1m/users.dat", "1::F::25::3::123\n2::M::50::4::456\n")
        archive.writestr("ml-1m/movies.dat", "7::A::Comedy\n9::B::Drama|War\n")
        archive.writestr("ml-1m/ratings.dat", "1::7::5::0\n2::9::3::0\n1::9::4::0\n" * 10)
    script.convert_movielens(tmp_path / "ml.zip", tmp_path / "movielens.npz")
    with np.load(tmp_path / "movielens.npz") as found:
        assert found["rows"].tolist() == [2, 2, 2, 2, 2, 2]
        assert (found["label"].sum(), int(found["trained"])) == (20, 27)


def test_what_a_host_does_for_other_ranks_is_timed(load: Any) -> None:
    script = load("rank_host")
    found = script.host_work([2, 8], script.Shape("small", (3000, 50), 4, 64))
    assert found["lookups"] == 128
    assert 0 < found["unique_rows"] <= 114
    assert found["sort_ns"] > 0
    assert found["route_ns"].keys() == found["exchange_ms"].keys() == {2, 8}


# -- timelines ---------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def event(name: str, stream: int, ts: float, dur: float, cat: str = "kernel") -> dict:
    args = {"stream": stream}
    return {
        "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": stream,
        "args": args,
    }  # fmt: skip


def a_trace(path: Path, steps: int = 5) -> Path:
    """Steps of 700 us: plan and fill lie inside training."""
    events = [event("aten::mm", 1, 0, 5000, cat="cpu_op"), {"ph": "M", "name": "process_name"}]
    for step in range(steps):
        t = 1000 + 700 * step
        events += [
            event("_gather", 7, t, 60),
            event("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 7, t + 60, 300),
            event("triton_poi_fused_relu_3", 7, t + 360, 100),
            event("_short_rows", 7, t + 460, 120),
            event("_long_rows", 7, t + 580, 100),
            event("Memcpy HtoD (Pinned -> Device)", 13, t + 5, 20, cat="gpu_memcpy"),
            event("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel", 13, t + 30, 60),
            event("_classify", 13, t + 90, 57),
            event("_resolve", 13, t + 150, 10),
            event("_fill", 17, t + 100, 500),
            event("Memcpy DtoH (Device -> Pinned)", 21, t + 600, 30, cat="gpu_memcpy"),
        ]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_a_trace_is_drawn_by_lanes_and_steps(load: Any, run: Any, tmp_path: Path) -> None:
    timeline = load("timeline")
    spans = timeline.read(a_trace(tmp_path / "trace.json.gz"))
    lanes = timeline.lanes_of(spans)
    assert lanes == {7: "train", 13: "plan", 17: "rows", 21: "back"}
    assert timeline.step_edges(spans, lanes) == [1000 + 700 * step for step in range(5)]
    assert timeline.busy([span for span in spans if span.name == "_fill"], 1000, 1700) == 500
    assert timeline.busy(spans, 1000, 1700) == 680
    without = [span for span in spans if span.stream != 7]
    with pytest.raises(SystemExit, match="no stream with lookups"):
        timeline.draw(without)
    with pytest.raises(SystemExit, match="has 2 steps; 4 are needed"):
        timeline.draw(timeline.read(a_trace(tmp_path / "short.json", steps=2)))
    # The drawing has three steps, and how long they take.
    run("timeline", tmp_path / "trace.json.gz", "--out", tmp_path / "timeline.svg")
    root = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    texts = [each.text for each in root.iter(f"{SVG}text")]
    for wanted in ("plan", "rows", "back", "train", "step 3: 700 µs", "500 µs per step"):
        assert wanted in texts, texts
    boxes = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "orange"]
    assert len(boxes) == 3 + 1  # a fill in each step, and the legend's
