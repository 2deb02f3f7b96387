"""Many measurements in one call: limits, cuts, and what is kept of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# A script that writes a result and the beginning of another one, and then takes long.
SLOW = """
import json, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
whole = {"mean": 2.0, "p50": 1.9, "p99": 2.5, "longest": 3.0, "steps": 10}
line = {"suite": "s", "run": "r", "system": "hotrow-all-fast", "step_ms": {"whole": whole}}
with (folder / "s.jsonl").open("a") as file:
    file.write(json.dumps(line) + "\\n" + '{"suite": "s", "run"')
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(folder / "child").write_text(str(child.pid))
print("written", flush=True)
time.sleep(60)
"""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]


def is_running(number: int) -> bool:
    path = Path(f"/proc/{number}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_takes_too_long_is_ended_and_what_it_wrote_is_kept(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = load("session"), tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(script, "HERE", tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "quick.py").write_text("raise SystemExit(3)")
    session = script.Session(out, time.monotonic() + script.END + 30, ())
    session.run("slow", script.Measurement(("slow.py",), 2), smoke=True)
    session.run("quick", script.Measurement(("quick.py",), 2), smoke=True)
    session.run("long", script.Measurement(("quick.py",), 1000), smoke=False)
    slow, quick, late = lines_of(out)
    assert slow["ended"] == "ended after 4 s"
    (result,) = slow["results"]  # the line that was cut off is not one
    assert (result["system"], result["mean"]) == ("hotrow-all-fast", 2.0)
    assert (out / "slow.log").read_text() == "written\n"
    assert not is_running(int((out / "child").read_text()))
    assert (quick["ended"], quick["results"]) == ("failed with 3", [])
    assert late["ended"] == "not begun: the minutes are over"


def test_a_session_that_is_cut_ends_what_runs(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    program = (
        "import pathlib, session; session.HERE = pathlib.Path(session.sys.argv.pop());"
        "session.MEASUREMENTS = {'slow': session.Measurement(('slow.py',), 60)}; session.main()"
    )
    words = [sys.executable, "-c", program, "--out", str(tmp_path), "slow", str(tmp_path)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(BENCHMARKS)})
    child = tmp_path / "child"
    while not (child.exists() and child.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert not is_running(int(child.read_text()))
    assert (tmp_path / "s.jsonl").read_text().startswith('{"suite": "s"')


def test_results_are_compared_with_all_fast(load: Any) -> None:
    script = load("session")

    def result(system: str, mean: float) -> dict[str, Any]:
        whole = {"mean": mean, "p50": mean, "p99": mean, "longest": mean, "steps": 9}
        line = {"run": "target", "system": system, "step_ms": {"p50": 0.0, "whole": whole}}
        return script.shown(line)

    lines = [*script.compared([result("hotrow-all-fast", 1.0), result("hotrow-lookahead", 1.25)])]
    assert [line.partition("longest")[2] for line in lines] == [
        " 1.0",
        " 1.2, 0.800 of the speed of hotrow-all-fast",
    ]


def test_every_measurement_names_a_script_that_there_is(load: Any) -> None:
    for each in load("session").MEASUREMENTS.values():
        assert (BENCHMARKS / each.words[0]).exists()
        assert 0 < each.seconds <= 400


def test_a_run_has_settled_when_no_later_mean_differs(load: Any) -> None:
    settled = load("stalls").settled
    assert settled([1.0] * 1000) == 0
    assert settled([3.0] * 120 + [1.0] * 880) == 150
    assert settled([1.0] * 400 + [1.5] * 50 + [1.0] * 550) == 450


def test_long_steps_are_named(load: Any) -> None:
    script = load("stalls")
    ms = np.ones(1000)
    ms[[10, 700]] = 50.0, 7.0
    trained = script.Trained("x", iter(()), 1000, list(ms), [(2, "early"), (700, "late")])
    facts = script.facts_of(trained)
    assert facts["long_steps"] == [[10, 50.0], [700, 7.0]]
    assert (facts["longest / p50"], facts["num_compiled_late"]) == (7.0, 1)


@pytest.mark.slow
def test_a_session_in_small(tmp_path: Path) -> None:
    names = ["eager", "stalls", "sequences"]
    words = [sys.executable, str(BENCHMARKS / "session.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run([*words, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(tmp_path)
    assert [(line["name"], line["ended"]) for line in lines] == [(name, "done") for name in names]
    assert {each["system"] for each in lines[0]["results"]} == {
        "hotrow-loop-written",
        "dense-alone",
    }
    assert lines[1]["results"][0]["systems"].keys() == {
        "hotrow-lookahead-written",
        "hotrow-all-fast",
    }
