"""`hotrow report` draws what runs have left behind, and says in one sentence what is wrong."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from commands import SMALL_SETTINGS, refused, succeeds
from commands import settings as as_options
from hotrow.run.files import read_run, read_steps
from hotrow.run.tracing import read_trace

SMALL = (*SMALL_SETTINGS, "data.samples=640", "training.eval_every=10", "run.save=false")


def train(name: str, *settings: str, options: tuple[str, ...] = ()) -> Result:
    return succeeds("train", *as_options(*SMALL, f"run.name={name}", *settings), *options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of 40 steps: `first`, with a trace of four of them, and `second`."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("first", options=("--trace", "steps=4"))
        train("second", "embedding.strategy=lru", "embedding.budget=50%")
    return folder


@pytest.fixture(autouse=True)
def _there(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)


def charts(page: str) -> dict[str, list[dict[str, Any]]]:
    """The traces of each chart by its title."""
    found = re.findall(
        r"<h3>(.*?)</h3>.*?<script type=\"application/json\">(.*?)</script>", page, re.DOTALL
    )
    return {title: json.loads(data)["data"] for title, data in found}


def test_one_run_is_drawn_beside_its_records() -> None:
    result = succeeds("report", "first")
    page = Path("runs/first/report.html")
    assert f"written to {page}" in result.stdout
    found, steps = charts(page.read_text()), list(read_steps("runs/first"))
    (loss,) = found["Training loss"]
    assert loss["x"] == [step.step for step in steps]
    assert loss["y"] == pytest.approx([step.loss for step in steps], rel=1e-5)
    (auc,) = found["AUC"]
    # No line leads from validation samples to the test's.
    assert auc["x"] == [10, 20, 30, 40, 40]
    assert [value is None for value in auc["y"]] == [False, False, False, True, False]
    run = read_run("runs/first")
    (hits,) = found["Hit rate by table"]
    assert dict(zip(hits["y"], hits["x"], strict=True)) == pytest.approx(
        {name: each.hit_rate for name, each in run.tables.items()}, rel=1e-5
    )
    assert sum(each.lookups for each in run.tables.values()) == run.summary.lookups
    memory = {trace["name"]: trace["x"][0] * 2**20 for trace in found["By part"]}
    assert memory == pytest.approx(dict(run.memory), rel=1e-5)
    assert {trace["name"] for trace in found["first: 4 steps"]} >= {"plan", "fill", "train"}


def test_several_runs_lie_over_each_other_and_what_differs_comes_first() -> None:
    succeeds("report", "first", "runs/second", "--out", "both.html")
    page = Path("both.html").read_text()
    for title, count in (("Training loss", 2), ("Samples per second", 2), ("Hit rate", 2)):
        assert [trace["name"] for trace in charts(page)[title]] == ["first", "second"][:count]
    marked = re.findall(r'<tr class="differs"><td data-label="setting">(.*?)</td>', page)
    assert marked == ["run.name", "embedding.strategy", "embedding.budget"]


def test_text_and_json_say_the_same() -> None:
    text = succeeds("report", "first", "second", "--text").stdout
    found = json.loads(succeeds("report", "first", "second", "--json").stdout)
    assert [run["name"] for run in found["runs"]] == ["first", "second"]
    for run in found["runs"]:
        assert len(run["curve"]["loss"]) == 40
        assert f"{run['summary']['hit_rate']:.1%}" in text
        assert run["limit"]["message"] in text
    assert re.search(r"embedding.strategy +lookahead +lru", text)


def test_a_run_that_did_not_end_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    lines = Path("runs/first/steps.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "steps.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
    result = succeeds("report", str(tmp_path / "killed"), "--json")
    (run,) = json.loads(result.stdout)["runs"]
    assert (run["outcome"], run["summary"]["steps"]) == ("not ended", 7)
    succeeds("report", "killed", "--runs", str(tmp_path))
    assert (tmp_path / "killed" / "report.html").is_file()


def test_a_run_that_did_not_end_tells_what_it_began_with(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "runs" / "second", tmp_path / "killed")
    ended = read_run(tmp_path / "killed")
    (tmp_path / "killed" / "run.json").unlink()
    result = succeeds("report", "first", str(tmp_path / "killed"), "--json")
    killed = json.loads(result.stdout)["runs"][1]
    assert killed["outcome"] == "not ended"
    for name in ("started", "settings", "environment", "memory"):
        assert killed[name] == getattr(ended, name)
    text = succeeds("report", "first", str(tmp_path / "killed"), "--text").stdout
    assert re.search(r"embedding.strategy +lookahead +lru", text)
    (tmp_path / "killed" / "start.json").write_text('{"format": 1, "settings": []}')
    assert "start.json is damaged: settings: expected a table, got a list" in refused(
        "report", str(tmp_path / "killed"), "--json"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["third"], "there is no run third; in runs there are first, second"),
        (["first", "runs/first"], "run runs/first is named twice"),
        (["first", "--text", "--json"], "--text or --json, not both"),
        (["."], "has neither run.json nor steps.jsonl"),
        (["first", "--out", "runs"], "--out runs is a folder; name a file in it: runs/report.html"),
        (["first", "--out", "taken/new/page.html"], "taken/new/page.html: taken is no folder"),
        (["first", "--out", "/proc/x/page.html"], "--out /proc/x/page.html cannot be written"),
    ],
)
def test_mistakes_end_in_a_sentence(words: list[str], said: str) -> None:
    Path("taken").write_text("")
    assert said in refused("report", *words)


def test_many_runs_are_told_a_few_at_a_time(trained: Path, tmp_path: Path) -> None:
    for number in range(12):
        shutil.copytree(trained / "runs" / "second", tmp_path / f"run-{number}")
    for file in ("run.json", "start.json"):  # as of an earlier version, without settings
        (tmp_path / "run-3" / file).unlink()
    result = succeeds("report", str(tmp_path), "--text")
    assert "…" not in result.stdout
    assert all(f"run-{number}" in result.stdout for number in range(12))
    assert "data.rows" not in result.stdout


def test_damaged_records_are_named_and_hide_no_other_run(trained: Path, tmp_path: Path) -> None:
    for name in ("good", "half", "bad", "cut"):
        shutil.copytree(trained / "runs" / "first", tmp_path / name)
    (tmp_path / "notes").mkdir()  # no run
    (tmp_path / "half" / "run.json").write_text("{half")
    lines = (tmp_path / "bad" / "steps.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "bad" / "steps.jsonl").write_text("".join([*lines[:2], "{half\n", *lines[3:]]))
    trace = tmp_path / "cut" / "trace.json.gz"
    trace.write_bytes(trace.read_bytes()[:500])
    for name, said in (
        ("half", "run.json is not valid JSON"),
        ("bad", "steps.jsonl is damaged: line 3 is no step"),
        ("cut", "trace.json.gz is damaged"),
    ):
        assert said in refused("report", str(tmp_path / name), "--json")
    result = succeeds("report", str(tmp_path), "--json")
    assert [run["name"] for run in json.loads(result.stdout)["runs"]] == ["good"]
    assert result.stderr.count("is left out") == 3
    shutil.rmtree(tmp_path / "good")
    refused("report", str(tmp_path), "--json")  # nothing is left to draw


def test_without_plotly_texts_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "pip install plotly" in refused("report", "first")
    succeeds("report", "first", "--text")


def test_a_trace_has_the_steps_asked_for_in_their_order() -> None:
    spans = read_trace(Path("runs/first/trace.json.gz"))
    assert sum(span.name == "train" for span in spans) == 4
    assert {span.place for span in spans} == {"host"}
    assert all(a.start <= b.start for a, b in pairwise(spans))


def test_stages_of_a_gpu_have_lanes_of_their_own(tmp_path: Path) -> None:
    def event(kind: str, name: str, start: int, length: int) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}

    launched = [("plan", 0, 20), ("fill", 25, 10), ("train", 40, 50)]
    events = [
        event(kind, f"hotrow: {name}", 1000 * step + start + late, length)
        for step in range(6)
        for name, start, length in launched
        for kind, late in (("user_annotation", 0), ("gpu_user_annotation", 300))
    ]
    others = [event("kernel", "gemm", 0, 5), event("user_annotation", "another's", 0, 5)]
    (tmp_path / "gpu").mkdir()
    shutil.copy("runs/first/steps.jsonl", tmp_path / "gpu" / "steps.jsonl")
    with gzip.open(tmp_path / "gpu" / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": others + events}, file)
    succeeds("report", str(tmp_path / "gpu"))
    found = charts((tmp_path / "gpu" / "report.html").read_text())["gpu: 4 steps"]
    assert [trace["name"] for trace in found] == ["plan", "fill", "train"]
    for trace in found:
        assert sorted(set(trace["y"])) == [f"{place}: {trace['name']}" for place in ("GPU", "host")]
        assert trace["y"].count(f"GPU: {trace['name']}") == 4
    assert found[2]["base"][:2] == [0, 0.3]  # milliseconds since the first shown
    assert found[2]["x"][:2] == [0.05, 0.05]


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("20", "--trace takes steps=20 or steps=20,from=500, not '20'"),
        ("steps=0", "--trace takes"),
        ("steps=2,to=3", "--trace takes"),
        ("steps=2,from=41", "--trace steps=2,from=41: the run has 40 steps"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_before_training(trace: str, said: str) -> None:
    assert said in refused("train", *as_options(*SMALL, "run.name=refused"), "--trace", trace)
    assert not Path("runs/refused").exists()


def test_a_trace_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--trace", "steps=9,from=38")
    output = train("traced", "training.eval_every=100", options=options).stdout
    assert "trace in runs/traced/trace.json.gz; https://ui.perfetto.dev" in output
    spans = read_trace(Path("runs/traced/trace.json.gz"))
    assert sum(span.name == "train" for span in spans) == 3


def test_quiet_leaves_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("training.eval_every=100", "training.steps=2")
    said = train("quiet", *short, options=("--quiet",)).stdout
    assert said.split()[0] == "outcome"
    assert "samples/s" in said
    options = ("--quiet", "--json")
    (line,) = train("quiet", "training.eval_every=100", options=options).stdout.splitlines()
    end = json.loads(line)
    assert end["event"] == "end"
    assert end["times"]["steps"] == 40 - 16
    assert end["limit"]["part"] in ("loader", "planning", "link", "dense part")
