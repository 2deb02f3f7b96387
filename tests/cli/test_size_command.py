"""`hotrow size` finds a budget and writes it down; `hotrow simulate --machine` predicts steps."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from commands import refused, succeeds
from hotrow.run.config import load
from hotrow.support.toml import written

RUN = (
    "# kept nowhere\n[run]\nname = 'clicks'\nthreads = 1\n[data]\nrows = [20000, 300, 10]\n"
    "batch_size = 64\nsamples = 1280\n[embedding]\nbudget = '30%'\n[embedding.optimizer]\n"
    "name = 'adam'\nlr = 0.01\n"
)
FEW = ["--batches", "12", "--warm-up", "12", "--depths", "2,6"]
H200 = ["--machine", "h200", "--dense-ms", "0.5"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_people_get_a_table_and_a_file_that_can_be_trained(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "sized.toml"
    output = succeeds("size", run_file, *FEW, *H200, "--reach", "0.9999", "--out", out).output
    for words in (
        "20,310 rows, 3.7 MiB with their state",
        "On NVIDIA H200 (h200) all-fast takes 0.5 ms, with the dense part as given",
        "strategy", "lookahead", "waits for", "Take lookahead with a budget of", "settings written",
    ):  # fmt: skip
        assert words in output
    assert out.read_text().startswith("# hotrow size --machine h200 --reach 0.9999. Take lookahead")
    found, before = load(out), load(run_file)
    assert (found.data, found.model, found.training) == (before.data, before.model, before.training)
    assert found.embedding.optimizer == before.embedding.optimizer
    assert found.run.device == "cuda"
    section = found.embedding
    assert (section.strategy, section.depth, section.fill) == ("lookahead", 2, "bulk")
    assert isinstance(section.budget, int)
    assert [each.name for each in out.parent.iterdir()] == ["sized.toml"]
    words = ["--set", "run.device=cpu", "--set", "training.steps=2", "--runs", tmp_path / "runs"]
    succeeds("train", out, *words)


def test_a_file_with_all_rows_in_fast_memory_has_no_budget(tmp_path: Path) -> None:
    """Such as "auto", which needs a GPU or counts, and here is neither."""
    text = RUN.replace("'30%'", "'auto'").replace("[20000, 300, 10]", "[30, 10]")
    (tmp_path / "run.toml").write_text(text)
    words = [*FEW, *H200, "--out", tmp_path / "sized.toml"]
    assert "Take all-fast" in succeeds("size", tmp_path / "run.toml", *words).output
    words = ["--set", "run.device=cpu", "--set", "training.steps=2", "--runs", tmp_path / "runs"]
    succeeds("train", tmp_path / "sized.toml", *words)


def test_machines_get_all_that_was_tried(run_file: Path) -> None:
    output = succeeds("size", run_file, *FEW, *H200, "--json", "--reach", "0.9").output
    found = json.loads(output)
    assert found["chosen"] in found["best"]
    assert [each["strategy"] for each in found["best"]] == [
        "all-fast", "lru", "static", "lookahead",
    ]  # fmt: skip
    assert {each["depth"] for each in found["options"]} == {0, 2, 6}
    chosen = found["chosen"]
    assert chosen["of_all_fast"] >= 0.9
    assert chosen["low_samples_per_second"] < chosen["high_samples_per_second"]
    assert found["machine"]["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("reach", "title"),
    [
        ("0.5", "The smallest budget of each strategy with 50% of all-fast's speed\n"),
        ("1", "The fastest of each strategy: with fewer slots than rows, none has 100%"),
    ],
)
def test_the_title_says_whether_the_goal_is_reached(run_file: Path, reach: str, title: str) -> None:
    assert title in succeeds("size", run_file, *FEW, *H200, "--reach", reach).output


def test_this_machine_can_be_asked(run_file: Path) -> None:
    output = succeeds("size", run_file, *FEW, "--json").output
    found = json.loads(output)
    assert (found["all_fast_is"], found["machine"]["device"]) == ("measured", "cpu")
    assert all(each["fill"] == "" for each in found["best"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reach", "95"], "--reach must be above 0 and at most 1, such as 0.95, not 95"),
        (["--machine", "h100"], "there is no machine 'h100' (did you mean 'h200'?)"),
        (["--dense-ms", "-1"], "--dense-ms must be a number of at least 0"),
        (["--batches", "0"], "--batches must be at least 1"),
        (["--depths", "few"], "--depths: cannot read 'few'"),
        (["--set", "embedding.budget=5%"], "that is what `hotrow size` finds; leave it out"),
        (["--out", "."], "--out . is a folder; name a file in it: sized.toml"),
        (["--out", "/proc/sized.toml"], "--out /proc/sized.toml cannot be written"),
        (["--html", "."], "--html . is a folder; name a file in it"),
    ],
)
def test_mistakes_are_told(run_file: Path, words: list[str], message: str) -> None:
    assert message in refused("size", run_file, *words)


def test_a_page_needs_plotly(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    for command in ("size", "simulate", "profile"):
        assert "--html needs plotly" in refused(command, run_file, "--html", "page.html")


# -- hotrow simulate ---------------------------------------------------------------------


def test_a_simulation_predicts_steps_on_a_machine(run_file: Path) -> None:
    words = ["simulate", run_file, *FEW, *H200, "--slots", "2%,20%"]
    words += ["--set", "model.embedding_dim=8"]
    output = succeeds(*words, "--json").output
    lines = [json.loads(line) for line in output.splitlines()]
    for line in lines:
        assert ("step_ms" in line) == (line["strategy"] != "belady")
    by_name = {(line["strategy"], line["slots"]): line for line in lines if "step_ms" in line}
    assert by_name["lru", 406]["step_ms"] >= by_name["lru", 4062]["step_ms"]
    assert by_name["lookahead", 406]["of_all_fast"] <= 1
    assert by_name["lookahead", 406]["all_fast_ms"] == pytest.approx(0.5, rel=0.01)
    output = succeeds(*words).output
    for word in ("ms/step", "speed", "waits for", "on NVIDIA H200 all-fast takes 0.5 ms"):
        assert word in " ".join(output.split())


def test_a_simulation_tells_each_number_of_slots_once_smallest_first(run_file: Path) -> None:
    """Lines of its page would go to and fro."""
    few = ["--batches", "2", "--warm-up", "2", "--strategy", "lru,lookahead"]
    words = ["--slots", "20%,2%,406", "--depths", "6,2,6", "--json"]
    output = succeeds("simulate", run_file, *few, *words).output
    found = [json.loads(line) for line in output.splitlines()]
    told = [(each["slots"], each.get("depth")) for each in found if each["strategy"] != "lru"]
    assert told == [(406, 2), (406, 6), (406, None), (4062, 2), (4062, 6), (4062, None)]


def test_a_written_file_reads_as_it_was() -> None:
    tables = {
        "run": {"name": 'a "b" \\ ü', "device": "cuda"},
        "data": {"rows": [1, 2], "skew": 1.05, "shuffle": False, "names": ["x", "y"]},
        "embedding": {"budget": 7, "optimizer": {"lr": 1e-05, "name": "sgd"}},
        "training": {"optimizer": {"lr": 0.5}},
        "system": {},
    }
    text = written(tables, head="What " * 40)
    assert tomllib.loads(text) == tables
    assert max(map(len, text.splitlines())) <= 100
