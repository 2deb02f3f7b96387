"""Draws what runs at the same time: a few training steps of a profiler's trace, by lanes.

    python benchmarks/timeline.py --record steps.json.gz      # on a GPU; then draws it, too
    python benchmarks/timeline.py steps.json.gz --out docs/timeline.svg

A trace is what torch's profiler exports for Chrome. Streams become lanes by the kernels that run in
them: plans, rows that cross the link, rows on their way back, training.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from svg import Drawing

HERE = Path(__file__).parent
STEPS, RECORDED = 3, 60
LANES = ("plan", "rows", "back", "train")
SUBTITLES = {
    "plan": "which slots, which moves",
    "rows": "rows in and out",
    "back": "rows on their way back",
    "train": "lookup, dense part, update",
}
# What a kernel does, by its name; the first that matches. Then its colour and its lane, where the
# name alone tells.
KINDS = (
    ("rows over the link", "orange", "rows", r"^_(fill|copy|pack|pack_more|take|start_moves)\b"),
    (
        "plan",
        "blue",
        "plan",
        r"^_(globalise|classify|segment|count_\w+|take_victims|let_leave|let_enter|resolve|enter_window|"
        r"leave_window|step_on|expect|hold|rank_keys|nothing_moves|lookup|insert_all)\b",
    ),
    ("lookup", "green", "train", r"^_(gather|pool_bags)\b"),
    ("update of rows", "purple", "train", r"^_(chunks|long_rows|short_rows|update_rows)\b"),
    ("matrix products", "red", "train", r"gemm|cutlass|nvjet|cublas|wgmma|_(forward|backward)_ker"),
    ("copies", "yellow", None, r"Memcpy (HtoD|DtoH)"),
    ("sort", "blue", None, r"[sS]ort|[rR]adix|Onesweep|topk|TopK"),
    ("other", "grey", None, r""),
)
LEFT, WIDTH, TOP, LANE, BAR = 200, 1000, 64, 58, 34


@dataclass(frozen=True)
class Span:
    """A kernel or a copy; times in microseconds."""

    name: str
    stream: int
    start: float
    end: float

    @property
    def kind(self) -> int:
        return next(i for i, (*_, names) in enumerate(KINDS) if re.search(names, self.name))


def read(path: Path) -> list[Span]:
    """What ran on the GPU, in order of time."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = [
        Span(event["name"], _stream(event), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(spans, key=lambda span: span.start)


def _stream(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("stream", event["tid"]))


def lanes_of(spans: Iterable[Span]) -> dict[int, str]:
    """The lane of each stream, by the time that kernels of a known lane take in it.

    What is on its way back are copies alone, to the host; other streams have no lane.
    """
    spans, votes, copies = list(spans), dict[int, Counter[str]](), Counter[int]()
    for span in spans:
        lane = KINDS[span.kind][2]
        votes.setdefault(span.stream, Counter())
        if lane is not None:
            votes[span.stream][lane] += span.end - span.start
        if "DtoH" in span.name:
            copies[span.stream] += 1
    found = {stream: lanes.most_common(1)[0][0] for stream, lanes in votes.items() if lanes}
    if "train" not in found.values():
        raise SystemExit(
            "the trace has no stream with lookups of hotrow (_gather, _pool_bags): "
            f"{len(spans)} kernels and copies in {len(votes)} streams"
        )
    for stream in votes:
        if stream not in found and copies[stream]:
            found[stream] = "back"
    return found


def step_edges(spans: Sequence[Span], lanes: dict[int, str]) -> list[float]:
    """Where steps begin: a lookup is the first thing a step does with rows."""
    lookup = next(i for i, kind in enumerate(KINDS) if kind[0] == "lookup")
    edges: list[float] = []
    before = -1
    for span in spans:
        if lanes.get(span.stream) == "train":
            if span.kind == lookup and before != lookup:
                edges.append(span.start)
            before = span.kind
    return edges


def busy(spans: Iterable[Span], start: float, end: float) -> float:
    """Time in which at least one of the spans runs."""
    total, until = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, min(span.end, end) - max(span.start, until))
        until = max(until, min(span.end, end))
    return total


def draw(spans: Sequence[Span], *, steps: int = STEPS, note: str = "") -> Drawing:
    """The shortest steps in a row: a profiler slows the host down, and the GPU waits for it."""
    lanes = lanes_of(spans)
    edges = step_edges(spans, lanes)
    if len(edges) < steps + 1:
        raise SystemExit(f"the trace has {len(edges)} steps; {steps + 1} are needed at least")
    first = min(range(len(edges) - steps), key=lambda at: edges[at + steps] - edges[at])
    edges = edges[first : first + steps + 1]
    start, end = edges[0], edges[-1]
    scale = (WIDTH - LEFT - 20) / (end - start)
    shown = [span for span in spans if span.end > start and span.start < end]
    present = [lane for lane in LANES if any(lanes.get(s.stream) == lane for s in shown)]
    height = TOP + LANE * len(present) + 92
    drawing = Drawing(WIDTH, height, f"{steps} training steps by lanes")
    bottom = TOP + LANE * len(present)
    for number, (edge, after) in enumerate(pairwise(edges), start=1):
        x, middle = (LEFT + (each - start) * scale for each in (edge, (edge + after) / 2))
        drawing.line([(x, TOP - 14), (x, bottom)], "dash")
        drawing.text(middle, TOP - 22, f"step {number}: {after - edge:,.0f} µs", anchor="middle")
    for place, lane in enumerate(present):
        mine = [span for span in shown if lanes.get(span.stream) == lane]
        _draw_lane(drawing, lane, mine, TOP + LANE * place, start, end, scale)
        share = busy(mine, start, end) / steps
        drawing.text(18, TOP + LANE * place + 33, f"{SUBTITLES[lane]}", style="small")
        drawing.text(18, TOP + LANE * place + 48, f"{share:,.0f} µs per step", style="small")
    drawing.line([(WIDTH - 20, TOP - 14), (WIDTH - 20, bottom)], "dash")
    _draw_axis(drawing, bottom, end - start, scale)
    _draw_legend(drawing, {span.kind for span in shown}, bottom + 52)
    if note:
        drawing.text(18, bottom + 80, note, style="small")
    return drawing


def _draw_lane(
    drawing: Drawing,
    lane: str,
    spans: Sequence[Span],
    top: float,
    start: float,
    end: float,
    scale: float,
) -> None:
    drawing.text(18, top + 16, lane)
    drawing.line([(LEFT, top + BAR + 4), (WIDTH - 20, top + BAR + 4)], "rule")
    for span in _merged(spans, gap=0.4 / scale):
        first, last = max(span.start, start), min(span.end, end)
        colour = KINDS[span.kind][1]
        width = max(0.6, (last - first) * scale - 0.3)
        drawing.box(LEFT + (first - start) * scale, top, width, BAR, colour)


def _merged(spans: Sequence[Span], *, gap: float) -> list[Span]:
    """Neighbours of one kind whose distance is too small to see are drawn as one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last and last.kind == span.kind and span.start - last.end < gap:
            found[-1] = Span(last.name, last.stream, last.start, max(last.end, span.end))
        else:
            found.append(span)
    return found


def _draw_axis(drawing: Drawing, top: float, length: float, scale: float) -> None:
    tick = next(each for each in (10, 20, 50, 100, 200, 500, 1000, 10**9) if length / each <= 14)
    for place in range(0, int(length) + 1, tick):
        x = LEFT + place * scale
        drawing.line([(x, top), (x, top + 5)], "rule")
        drawing.text(x, top + 19, f"{place:,}", style="small", anchor="middle")
    drawing.text(18, top + 19, "microseconds", style="small")


def _draw_legend(drawing: Drawing, kinds: set[int], y: float) -> None:
    x = 100.0
    names = {KINDS[kind][1]: KINDS[kind][0] for kind in sorted(kinds, reverse=True)}
    for colour, name in reversed(names.items()):
        drawing.box(x, y - 11, 14, 14, colour)
        drawing.text(x + 20, y + 1, name)
        x += 44 + 7.6 * len(name)


# -- recording -------------------------------------------------------------------------


def record(path: Path, arguments: argparse.Namespace) -> None:
    """Train a setting of terabyte.py until caches are full, then profile some steps."""
    import torch
    from cores import on_fast_cores
    from suite import bench_for
    from terabyte import SETTINGS
    from torch.profiler import ProfilerActivity, profile, schedule

    from systems import SYSTEMS

    settings = {setting.name: setting for setting in SETTINGS}
    if arguments.setting not in settings:
        raise SystemExit(f"no setting {arguments.setting!r}; there are {', '.join(settings)}")
    bench = bench_for(settings[arguments.setting], arguments)
    on_gpu = bench.device.type == "cuda"
    steps = SYSTEMS[arguments.system].build(bench).steps(bench.trace.batches(0, bench.trace.steps))
    for _ in range(bench.warmup):
        next(steps)
    warm, active = 5, RECORDED if on_gpu else STEPS + 2
    with (
        on_fast_cores(),
        profile(
            activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=warm, active=active),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler,
    ):
        for _ in range(warm + active):
            next(steps)
            profiler.step()
        if on_gpu:
            torch.cuda.synchronize()
    steps.close()
    bench.close()


def main() -> None:
    from harness import parser
    from suite import add_bench_options

    made = parser(__doc__.split("\n")[0])
    made.add_argument("trace", type=Path, nargs="?", help="as exported for Chrome, or .gz of it")
    made.add_argument("--record", type=Path, metavar="FILE", help="make a trace first; needs a GPU")
    made.add_argument("--setting", default="target", help="of terabyte.py, that is recorded")
    made.add_argument("--system", default="hotrow-lookahead", help="what is recorded")
    made.add_argument("--steps", type=int, default=STEPS, help="that are drawn")
    made.add_argument("--note", default="", help="one line below the drawing: machine, setting")
    made.add_argument("--out", type=Path, default=HERE.parent / "docs" / "timeline.svg")
    add_bench_options(made)
    arguments = made.parse_args()
    if arguments.record:
        record(arguments.record, arguments)
    path = arguments.record or arguments.trace
    if path is None:
        made.error("name a trace, or --record one")
    if arguments.smoke:
        return  # a CPU has no lanes to draw
    draw(read(path), steps=arguments.steps, note=arguments.note).write(arguments.out)


if __name__ == "__main__":
    main()
