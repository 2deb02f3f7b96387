"""Lanes and steps of a trace are found by the names of kernels, and drawn."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"


def event(name: str, stream: int, ts: float, dur: float, cat: str = "kernel") -> dict:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 0,
        "tid": stream,
        "args": {"stream": stream},
    }


def a_trace(steps: int = 5) -> list[dict]:
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
    return events


@pytest.fixture
def timeline(load):
    return load("timeline")


def write(path: Path, events: list[dict]) -> Path:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_streams_become_lanes_and_steps_begin_with_a_lookup(timeline, tmp_path, name) -> None:
    spans = timeline.read(write(tmp_path / name, a_trace()))
    assert {span.stream for span in spans} == {7, 13, 17, 21}
    lanes = timeline.lanes_of(spans)
    assert lanes == {7: "train", 13: "plan", 17: "rows", 21: "back"}
    assert timeline.step_edges(spans, lanes) == [1000 + 700 * step for step in range(5)]
    fill = [span for span in spans if span.name == "_fill"]
    assert timeline.busy(fill, 1000, 1700) == 500
    assert timeline.busy(spans, 1000, 1700) == 680


def test_the_drawing_shows_three_steps_and_says_how_long_they_take(timeline, tmp_path) -> None:
    spans = timeline.read(write(tmp_path / "trace.json", a_trace()))
    drawing = timeline.draw(spans, note="one H200 & more")
    timeline_svg = tmp_path / "out" / "timeline.svg"
    drawing.write(timeline_svg)
    root = ElementTree.parse(timeline_svg).getroot()
    texts = [each.text for each in root.iter(f"{SVG}text")]
    for wanted in ("plan", "rows", "back", "train", "step 3: 700 µs", "500 µs per step"):
        assert wanted in texts, texts
    assert "one H200 & more" in texts
    boxes = [each for each in root.iter(f"{SVG}rect") if each.get("class") == "orange"]
    assert len(boxes) == 3 + 1  # a fill in each step, and the legend's
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= drawing.width
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_a_trace_without_lookups_or_with_few_steps_is_refused(timeline, tmp_path) -> None:
    without = [each for each in a_trace() if each["name"] != "_gather"]
    without = [each for each in without if each.get("args", {}).get("stream") != 7]
    spans = timeline.read(write(tmp_path / "trace.json", without))
    with pytest.raises(SystemExit, match="no stream with lookups"):
        timeline.draw(spans)
    short = timeline.read(write(tmp_path / "short.json", a_trace(steps=2)))
    with pytest.raises(SystemExit, match="has 2 steps; 4 are needed"):
        timeline.draw(short)


def test_the_command_draws_a_file(timeline, tmp_path, monkeypatch) -> None:
    trace = write(tmp_path / "trace.json.gz", a_trace())
    monkeypatch.setattr("sys.argv", ["timeline.py", str(trace), "--out", str(tmp_path / "a.svg")])
    timeline.main()
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
