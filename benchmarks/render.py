"""Writes benchmarks/README.md from the results: the newest line of each run and system.

python benchmarks/render.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bars import SYSTEMS, ratios
from harness import link_floor_ms, link_rates, read_results
from svg import Drawing

HERE = Path(__file__).parent
GIB, MIB = 2**30, 2**20

INTRO = """\
# Benchmarks

One command each; results are appended to `results/<suite>.jsonl` as they come, and
`python benchmarks/render.py` writes this page from them.

| command | what it measures |
|---|---|
| `python benchmarks/ceilings.py` | what the machine can do at best |
| `python benchmarks/terabyte.py` | a DLRM with MLPerf's tables, beside FBGEMM and plain PyTorch |
| `python benchmarks/session.py target eager` | many of these in one call with a limit |
| `python benchmarks/dcnv2.py` | MLPerf's DLRM-DCNv2: 214 lookups per sample, rows of 1 KiB |
| `python benchmarks/sequences.py` | a million lookups without pooling, of rows of 2 KiB |
| `python benchmarks/stalls.py --cold` | the longest of 10,000 steps, and what was compiled when |
| `python benchmarks/multihot.py` | the embedding part alone with a million lookups per step |
| `python benchmarks/published.py` | four published systems beside their bars |
| `python benchmarks/scratchpipe.py` | ScratchPipe's own experiment, from random to local access |
| `python benchmarks/steps.py` | steps of torch's optimizers, and converted modules |
| `python benchmarks/scale.py` | the same lookups in tables of 1 M to 500 M rows |
| `python benchmarks/kernels.py` | each kernel against the bytes it must move |
| `python benchmarks/belady.py` | misses of look-ahead over the fewest possible; needs no GPU |
| `python benchmarks/timeline.py --record t.json.gz` | draws what runs beside training |
| `python benchmarks/loader.py` | samples per second out of prepared files |
| `python benchmarks/system_quality.py` | AUC of Slipstream beside random-drop and all-fast |
| `python benchmarks/skip_control.py` | the same on three systems and data sets; needs no GPU |
| `python benchmarks/systems_on_ranks.py` | systems on several ranks, and what they send |
| `python benchmarks/criteo_sample.py train.txt` | equality to the bit on real clicks |
| `python benchmarks/quality.py --criteo train.txt` | AUC on real samples, beside plain PyTorch |
| `python benchmarks/watched.py` | what watching a loader for refilled buffers costs |
| `python benchmarks/counted.py counts.csv` | generated clicks beside the counts they are to have |
| `python benchmarks/drift.py clicks.parquet` | popular samples while a click log drifts |
| `python benchmarks/real.py --criteo train.txt` | every system on real clicks |
| `python benchmarks/rounding.py` | where two trainings part that differ by rounding alone |
| `python benchmarks/skew.py --globo clicks.parquet` | profiles beside plain counting |
| `python benchmarks/bound.py --globo clicks.parquet` | look-ahead over the bound on real logs |
| `python benchmarks/predicted.py` | predicted steps beside measured ones; needs no GPU |
| `python benchmarks/ranks.py` | what several ranks send per step, by formula and counted |
| `python benchmarks/overlap.py` | several ranks beside one, and what they send while they train |
| `python benchmarks/house.py` | packages, layers and lengths of the source; needs no GPU |
| `make clients` | [public models](clients/README.md), plain beside converted; needs no GPU |

All but the last fourteen take `--minutes 8` (start nothing that would end later), `--results`,
`--commit` and `--smoke` (tiny, on a CPU, with TRITON_INTERPRET=1; it keeps no results, unless
`--results` names a folder for them). Some take other options:

- `--only NAME ...` (terabyte, multihot, published, scratchpipe, steps, kernels, belady, ceilings):
  only these runs, such as `target` or `'target/hotrow-*'`; for ceilings, parts.
- `--list` (terabyte, multihot, published, scratchpipe, kernels, belady): print the runs; the first
  four also estimate their seconds.
- `--tuning NAME=NUMBER` (suites, stalls): other numbers of `hotrow.engine.tuning`, such as
  `places_on_host=16`.
- `session.py` names measurements, each a command of this folder: `--list` prints them, `--minutes`
  is for all together, and results, output and `session.jsonl` go to `--out` as they come. A cut
  leaves what was finished.
- `--localities uniform low medium high`, `--budgets 10 2` (scratchpipe): a part of the experiment.
- `--batches 400` (published): length of a run that is timed as a whole.
- `--missing`, `--systems`, `--all`, `--isolate` (terabyte, multihot): runs without a result; only
  some systems; every system in every setting; one process per run.
- `--timed`, `--warmup` (terabyte, multihot, published, scratchpipe, scale, timeline): number of
  timed steps, and of steps before them.
- `--fill`, `--no-compile`, `--no-graphs` (terabyte, multihot, published, scratchpipe, timeline):
  how hotrow's rows move; a dense part without torch.compile; steps without CUDA graphs.
- `--interaction`, `--masters` (terabyte, published, scratchpipe, ceilings, timeline): forms of the
  dense part, the same for all systems. `--interaction plain` multiplies all vectors by PyTorch's
  batched matrix product, `fused` by hotrow's kernel. `--masters plain` updates the float32 masters
  of the bfloat16 weights by compiled SGD, `hotrow` by `masters.MasterWeights`. The
  default of both is `plain`.

`hotrow-lookahead-written` is `hotrow-lookahead` in which all rows count as written: every miss is
read over the link, as after an epoch of training. Otherwise rows that were never written are
computed in their slots, and cross no link when they come for the first time.

`python benchmarks/systems_page.py` fills the tables of [docs/systems.md](../docs/systems.md) from
`published`, `scratchpipe`, `system_quality`, `real`, `rounding` and `drift`.

FBGEMM is left out where it cannot be imported. [LOG.md](LOG.md) has what was tried and did not
help.

How the figures are taken:

- **Step time** is the time between two events on the main stream, each recorded when the work of a
  step has been launched. Work that overlaps with training costs nothing; work that delays it
  counts. The tables show the median, with the 20th and 80th percentile. Samples per second are from
  the mean.
- **Windows.** Steps are timed in three windows with pauses between them, and the fastest window
  counts, for every system alike. The reason: a core of the measured machine runs at half its speed
  for seconds or minutes, which slows every system that launches kernels from Python. So threads
  that launch use cores that were fast at the start of the window ([cores.py](cores.py)).
- **Compare figures of one commit.** At 3510a81 the system chose the cores. The tables show the
  newest result of each run; the files keep all. In three runs of the target `lookahead` took 0.736
  (3510a81), 0.632 (164d727) and 0.630 ms (aa9a180), `all-fast` 0.621, 0.589 and 0.583, FBGEMM in
  HBM 1.216, 1.080 and 1.047, cached 2.368, 1.833 and 1.767; `lookahead` alone with `all-fast` and
  `hybrid`, at c9ec046, 0.718 beside 0.590.
- **Batches** come from page-locked host memory, and none occurs twice. Caches are full before
  timing starts, so that every row that arrives makes another leave.
- **Dense part.** Every system trains the same dense part on the same batches: bfloat16 weights with
  float32 masters, compiled, captured as a CUDA graph. Vectors are bfloat16 (float32 where the
  embedding part runs alone), rows float32.
- **FBGEMM's cached forms** get the same bytes of HBM as hotrow, everything counted: 4 bytes per row
  for its index, 16 per slot, row-wise state. Its rows lie in page-locked host memory, and it does
  not check ids. `torch-hybrid` is `nn.EmbeddingBag` on the CPU with sparse gradients.
- **`HBM of tables`** is everything that belongs to them, also buffers and the gradients of a batch.
  The share of `all-fast` is by the median step.
- **`random rows`** is the time the machine needs to read and write as many rows of that size at
  random places of 48 GiB, at the measured rate. It is not a bound: over 4 GiB the machine moves 1.6
  times as many (see the ceilings), and shorter steps were seen; the reason was not examined. For
  `hybrid` it is the sum of its parts, each measured alone: rows read and written by all cores, both
  copies, the dense part.
"""

TITLES = {
    "terabyte": (
        "DLRM with MLPerf's tables",
        "204 M rows in 26 tables; the target is dimension 64, batch 8192, SGD, power law 1.05, 5 % "
        "of the bytes in HBM. Other runs differ in what their name says; `adam` has 54 M rows.",
    ),
    "multihot": (
        "Embedding part alone",
        "10 tables of 1 M rows, dimension 128, about 104,857 ids each per step (330 k different "
        "rows), 20 % of the bytes in HBM. Bags of 10 ids.",
    ),
}

Line = dict[str, Any]


def read(folder: Path) -> dict[str, list[Line]]:
    """The newest line of each run and system, by suite, in the order they first came."""
    return {path.stem: read_results(path) for path in sorted(folder.glob("*.jsonl"))}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines) + "\n"


def step(line: Line) -> str:
    ms = line["step_ms"]
    return f"{ms['p50']:.3g} ({ms['p20']:.3g}-{ms['p80']:.3g})"


def median(line: Line) -> float:
    return float(line["step_ms"]["p50"])


def environments(lines: Iterable[Line]) -> str:
    """Machines and software behind some lines, each once."""
    peers = {line.get("facts", {}).get("fbgemm_gpu") for line in lines} - {None}
    found = dict.fromkeys(_environment(line) for line in lines)
    found |= dict.fromkeys(f"FBGEMM {each} (`fbgemm_gpu` on PyPI)." for each in sorted(peers))
    return "\n".join(f"- {each}" for each in found) + "\n"


def _environment(line: Line) -> str:
    about = line["environment"]
    gpu = f"{about['gpu']}, driver {about['driver']}, CUDA {about['cuda']}"
    return (
        f"{gpu if about['gpu'] else 'No GPU'}, torch {about['torch']}, "
        f"triton {about['triton']}, Python {about['python']}, {about['cores']} cores, hotrow "
        f"{about['hotrow']} at {line['commit']}, {line['date'][:10]}."
    )


def ceilings(lines: list[Line]) -> str:
    head = ("what", "at best", "by thread blocks or threads", "of the ceiling")
    rows = []
    for line in lines:
        facts = line["facts"]
        by = facts.get("by_blocks") or facts.get("by_threads") or {}
        share = facts.get("of_ceiling")
        rows.append(
            (
                line["run"],
                f"{line['value']:.3g} {line['unit']}",
                ", ".join(f"{count}: {rate:.3g}" for count, rate in by.items()) or "-",
                "-" if share is None else f"{share:.0%}",
            )
        )
    about = (
        "Random rows, none twice, over 48 GiB unless it says otherwise. `hotrow` are its own "
        "kernels beside the plainest ones; a fill moves as many rows out as in."
    )
    return f"## Ceilings of the machine\n\n{about}\n\n{table(head, rows)}\n{environments(lines)}"


def comparison(suite: str, lines: list[Line], rates: dict[int, float]) -> str:
    """`rates`: rows per second that cross the link, both ways together, by bytes of a row."""
    title, about = TITLES[suite]
    head = (
        "run", "system", "step, ms", "M samples/s (mean)", "of all-fast (median)", "HBM of tables",
        "hit rate",
    )  # fmt: skip
    rows = []
    for run in dict.fromkeys(line["run"] for line in lines):
        mine = [line for line in lines if line["run"] == run]
        mine.sort(key=lambda line: not line["system"].startswith("hotrow"))
        best = all_fast(mine[0], lines)
        for line in mine:
            rate, hits = line["samples_per_second"], line["facts"].get("hit_rate")
            rows.append(
                (
                    run if line is mine[0] else "",
                    line["system"],
                    step(line),
                    f"{rate / 1e6:.3g}",
                    "-" if best is None else f"{median(best) / median(line):.2f}",
                    f"{line['hbm_bytes']['tables'] / GIB:.2f} GiB",
                    "-" if hits is None else f"{hits:.1%}",
                    link_floor(line, rates),
                    line["commit"],
                )
            )
    body = table((*head, "random rows, ms", "commit"), rows)
    return f"## {title}\n\n{about}{options(lines)}\n\n{body}\n{environments(lines)}"


def options(lines: Iterable[Line]) -> str:
    """The options that all lines share and that are not the defaults."""
    names = ("interaction", "masters")
    found = {tuple(line.get("options", {}).get(each, "plain") for each in names) for line in lines}
    if len(found) != 1 or found == {("plain", "plain")}:
        return ""
    given = " ".join(f"--{name} {value}" for name, value in zip(names, *found, strict=True))
    return f" Measured with `{given}`."


def all_fast(line: Line, lines: Iterable[Line]) -> Line | None:
    """Where every row is in HBM, the same tables and batches; a budget makes no difference."""

    def shape(line: Line) -> dict[str, Any]:
        apart = ("name", "budget", "budget_bytes")
        return {key: value for key, value in line["setting"].items() if key not in apart}

    fast = (each for each in lines if each["system"] == "hotrow-all-fast")
    return next((each for each in fast if shape(each) == shape(line)), None)


def link_floor(line: Line, rates: dict[int, float]) -> str:
    floor = link_floor_ms(line, rates)
    if not floor:
        return "-"
    return f"{floor:.2f} (step: {line['step_ms']['p50'] / floor:.2f} times)"


SCRATCHPIPE = """\
8 tables of 10 M rows, dimension 128, 20 ids per table and sample, batch 2048, SGD, the DLRM's dense
part; 10 % or 2 % of the bytes in HBM. Ranks follow a power law of 0 (`uniform`), 0.80, 0.95 and
1.05 (`high`). `hottest` is the share of lookups that go to as many rows as the budget is of them.
All rows count as written before. `rows` is the least time for the rows that cross, by the ceilings:
those that the CPU reads and writes (`hybrid`, `static-hybrid`, `scratchpipe`), or those that cross
the link by themselves. Multi-hot steps of `hybrid` and `static-hybrid` are not captured.
"""


def scratchpipe(lines: list[Line]) -> str:
    head = (
        "run", "system", "step, ms", "times static-hybrid", "hit rate", "hottest", "rows, ms",
        "commit",
    )  # fmt: skip
    by_key = {(line["run"], line["system"]): line for line in lines}
    rows = []
    for line in sorted(lines, key=lambda line: line["run"]):
        facts, bar = line["facts"], by_key.get((line["run"], "hotrow-static-hybrid"))
        bound = facts["bound_ms"]
        rows.append(
            (
                line["run"],
                line["system"],
                step(line),
                "-" if bar is None else f"{median(bar) / median(line):.2f}",
                f"{facts['hit_rate']:.1%}",
                f"{facts['hottest_have']:.1%}",
                "-" if bound is None else f"{bound:.2f} (step: {median(line) / bound:.2f} times)",
                line["commit"],
            )
        )
    body = f"{table(head, rows)}\n{environments(lines)}"
    return f"## ScratchPipe's experiment\n\n{SCRATCHPIPE}\n{body}"


PUBLISHED = """\
`terabyte` is the target above, `kaggle` has the tables of Criteo Kaggle, dimension 16 and batches
of 2048; 5 % of the bytes in HBM. Samples per second are by the median step, or by whole runs where
batches differ (`fae`, `hotline`, `slipstream`), with the spread of steps or runs; samples that
were left out count. A bound is what arithmetic allows: of `fae` over a bar, the bar's time over hot
samples at the speed of `all-fast` and cold ones at that of `hybrid`; of `slipstream`, one over the
share of samples trained; of `scratchpipe`, the bar's time over that of the rows that cross.
"""


def published(lines: list[Line]) -> str:
    head = ("run", "system", "M samples/s", "over its bars", "commit")
    rows = []
    for run in dict.fromkeys(line["run"] for line in lines):
        mine = {
            line["system"].removeprefix("hotrow-"): line for line in lines if line["run"] == run
        }
        found = ratios(mine)
        for name in (each for each in SYSTEMS if each in mine):
            line = mine[name]
            batch, ms = line["setting"]["batch"], line["step_ms"]
            p50, least, most = (batch / ms[key] / 1000 for key in ("p50", "p80", "p20"))
            beside = "; ".join(str(each) for each in found if each.system == name)
            shown = f"{p50:.3g} ({least:.3g}-{most:.3g})"
            rows.append((run, name, shown, beside or "-", line["commit"]))
    body = f"{table(head, rows)}\n{environments(lines)}"
    return f"## Published systems\n\n{PUBLISHED}\n{body}"


def scale(lines: list[Line]) -> str:
    head = (
        "rows", "step, ms", "rows fetched per step", "HBM beside the slots", "bytes per slot",
        "start-up", "over the memory alone",
    )  # fmt: skip
    rows = []
    for line in sorted(lines, key=lambda line: line["rows"]):
        alone = line["touch_seconds"] + line.get("lock_seconds", 0)
        rows.append(
            (
                f"{line['rows']:,}",
                step(line),
                f"{line['facts']['fetched_rows_per_step']:,.0f}",
                f"{line['hbm_bytes']['beside_slots'] / MIB:.1f} MiB",
                f"{line['facts']['bytes_per_slot']:.1f}",
                f"{line['startup_seconds']:.1f} s",
                f"{line['startup_seconds'] / alone:.2f}",
            )
        )
    about = (
        "The same lookups of 1 M different ids, spread over more and more rows of dimension 16; "
        "the embedding part alone with the same budget throughout. Bytes per slot are maps and "
        "counters; beside the slots lie buffers and the ids of batches to come, too. `over the "
        "memory alone`: start-up over touching and page-locking as many bytes; the first one "
        "compiles kernels, too. Launching decides the time of such small steps: at 164d727 "
        "they took 0.334, 0.329, 0.403 and 0.375 ms."
    )
    return f"## Larger tables\n\n{about}\n\n{table(head, rows)}\n{environments(lines)}"


def kernels(lines: list[Line]) -> str:
    head = ("kernel", "microseconds", "MB", "at copy rate", "share of copy rate")
    rows = []
    for line in lines:
        ms = line["step_ms"]
        where = "link" if line["over_link"] else "HBM"
        rows.append(
            (
                line["run"],
                f"{1000 * ms['p50']:.1f} ({1000 * ms['p20']:.1f}-{1000 * ms['p80']:.1f})",
                f"{line['bytes'] / 1e6:.1f}",
                f"{1000 * line['least_ms']:.1f} ({where})",
                f"{line['share_of_copy_rate']:.0%}",
            )
        )
    about = (
        "The fewest bytes a kernel must move, and the time a large copy takes for as many, for a "
        "batch of the target: 8,000 rows of 256 bytes leave and enter, over 4 GiB. `fill` has the "
        "two blocks that training can spare, `fill-alone` the 16 it gets while training waits. "
        "Each kernel repeats the same rows, so `fetch-rows` and `evict-rows` say little of rows at "
        "random places: the ceilings do."
    )
    return f"## Kernels\n\n{about}\n\n{table(head, rows)}\n{environments(lines)}"


def loader(lines: list[Line]) -> str:
    head = ("threads", "M samples/s", "a batch of 8192, ms", "page-locked", "commit")
    rows = [
        (
            f"{line['workers']}",
            f"{line['samples_per_second'] / 1e6:.1f}",
            step(line),
            "yes" if line["page_locked"] else "no",
            line["commit"],
        )
        for line in sorted(lines, key=lambda line: line["workers"])
    ]
    about = (
        "`hotrow.data.Loader` on files of Criteo's layout that lie in memory: shuffled batches of "
        "26 ids, 13 numbers and a label, of which nothing is made."
    )
    return f"## Loader\n\n{about}\n\n{table(head, rows)}\n{environments(lines)}"


BELADY = """\
Rows fetched per batch by hotrow's planner, over the fewest that any choice of victims could fetch
with all rows of a batch resident together (Belady's bound for batches: evict what is used again
last). A simulation on a CPU, of ids alone; the planner on a GPU follows the same rules, but knows
262 batches ahead at most. `target` is terabyte.py's, `kaggle` has the tables of Criteo Kaggle and
batches of 2048, with slots for 2, 5 or 10 % of the rows. Slots are filled by the trace itself, and
counted from then on: most misses are rows never seen before. `-settled` starts with the truly
hottest rows in the slots and lets them turn over once, as after days of training; there `profile`
is told what is hot, as `static` is, and pins it. `target` was counted by an older planner, whose
rows left by uses alone and which pinned half of the slots by them.
"""


def belady(lines: list[Line]) -> str:
    rows = []
    for run, group in groupby(sorted(lines, key=_by_run), key=lambda line: line["run"]):
        for place, line in enumerate(sorted(group, key=_by_depth)):
            useful = f"{line['slots']:,} slots, {line['useful_depth']:,.0f}"
            rows.append(
                (
                    "" if place else run,
                    "" if place else useful,
                    line["system"],
                    f"{line['missing_rows_per_batch']:,.0f}",
                    f"{line['over_belady']:.3f}",
                )
            )
    head = ("trace", "slots, and slots / misses", "system", "rows per batch", "over the bound")
    figure = "![Misses over Belady's bound, by batches known ahead](belady.svg)\n"
    body = f"{figure}\n{table(head, rows)}\n{environments(lines)}"
    return f"## Misses over Belady's bound\n\n{BELADY}\n{body}"


def _by_run(line: Line) -> tuple[bool, str]:
    return line["run"].endswith("-settled"), line["run"]


def _by_depth(line: Line) -> tuple[int, int]:
    kinds = ("belady", "lookahead", "lookahead-profile", "static", "lru")
    kind = line["system"].rpartition("-")[0] if line["depth"] else line["system"]
    return kinds.index(kind), line["depth"] or 0


def belady_figure(lines: list[Line]) -> Drawing:
    """Misses over the bound, by depth, for slots that the trace has filled."""
    drawing = Drawing(640, 330, "Misses over Belady's bound, by batches known ahead")
    left, right, top, bottom, most = 70, 520, 40, 270, 1.16
    curves = [line for line in lines if not line["run"].endswith("-settled")]
    depths = sorted({line["depth"] for line in curves if line["depth"]})

    def x(depth: float) -> float:
        return left + (right - left) * math.log(depth / depths[0]) / math.log(
            depths[-1] / depths[0]
        )

    def y(over: float) -> float:
        return bottom - (bottom - top) * (over - 1) / (most - 1)

    for tick in (1.0, 1.05, 1.10, 1.15):
        drawing.line([(left, y(tick)), (right, y(tick))], "rule")
        drawing.text(left - 10, y(tick) + 5, f"{tick:.2f}", style="small", anchor="end")
    for depth in depths:
        drawing.text(x(depth), bottom + 20, f"{depth}", style="small", anchor="middle")
    drawing.text((left + right) / 2, bottom + 44, "batches known ahead", anchor="middle")
    drawing.text(left - 52, top - 16, "misses over Belady's bound; dashed: least recent leaves")
    colours = ("blue", "orange", "green", "purple", "red")
    for colour, run in zip(colours, dict.fromkeys(line["run"] for line in curves), strict=False):
        mine = [line for line in curves if line["run"] == run]
        known = sorted((line["depth"], line["over_belady"]) for line in mine if line["depth"])
        drawing.line([(x(depth), y(over)) for depth, over in known], colour)
        for depth, over in known:
            drawing.dot(x(depth), y(over), colour)
        for line in mine:
            if line["system"] == "lru":
                height = y(line["over_belady"])
                drawing.line([(left, height), (right, height)], f"dash {colour}")
                drawing.text(right + 10, height + 5, f"{run}")
                drawing.box(right + 90, height - 5, 12, 12, colour)
    return drawing


BOUND = """\
The same on real logs in the order of time, `criteo` (a sample of 0.3 %) and `globo` with batches of
1024, `movielens` (1M) with 64, beside the generated Kaggle trace, with 2, 5 and 10 % of all rows in
slots. All of a line is counted over the same batches: up to 2,000 (Kaggle: 100) after slots were
filled. Rows of the batch in training may not leave for the next one's, which is what `held` costs,
even with the whole trace known. On a GPU rankings are made less often than here.
"""


def bound(lines: list[Line]) -> str:
    depths = (50, 200, 400)
    systems = ("belady, 2 batches held", *(f"lookahead-{depth}" for depth in depths), "lru")
    rows = []
    for run, group in groupby(lines, key=lambda line: line["run"]):
        found = {line["system"]: line for line in group}
        least = found["belady"]
        if least["missing_rows_per_batch"] is None:
            why = f"a batch of {least['largest_batch']:,} rows does not fit"
            rows.append([run, f"{least['slots']:,}", "-", why, *["-"] * len(systems)])
            continue
        over = [f"{found[each]['over_belady']:.3f}" if each in found else "-" for each in systems]
        fewest = f"{least['missing_rows_per_batch']:,.0f}"
        rows.append([run, f"{least['slots']:,}", f"{least['useful_depth']:,.0f}", fewest, *over])
    head = ["trace", "slots", "slots / misses", "fewest rows per batch", "held"]
    head += [f"{depth} ahead" for depth in depths] + ["lru"]
    title = "### Real logs, as multiples of the fewest"
    return f"{title}\n\n{BOUND}\n{table(head, rows)}\n{environments(lines)}"


def page(suites: dict[str, list[Line]]) -> str:
    parts, rates = [INTRO], link_rates(suites.get("ceilings", []))
    if "ceilings" in suites:
        parts.append(ceilings(suites["ceilings"]))
    parts += [comparison(name, suites[name], rates) for name in TITLES if name in suites]
    sections = (
        ("published", published), ("scratchpipe", scratchpipe), ("scale", scale),
        ("kernels", kernels), ("loader", loader), ("belady", belady),
    )  # fmt: skip
    for name, section in sections:
        if name in suites:
            parts.append(section(suites[name]))
    if "bound" in suites:
        generated = ("kaggle-2", "kaggle-5", "kaggle-10")
        filled = [line for line in suites.get("belady", []) if line["run"] in generated]
        parts.append(
            bound(sorted(filled, key=lambda line: generated.index(line["run"])) + suites["bound"])
        )
    if len(parts) == 1:
        parts.append("No results yet.\n")
    return "\n".join(parts)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--results", type=Path, default=HERE / "results")
    made.add_argument("--out", type=Path, default=HERE / "README.md")
    arguments = made.parse_args()
    suites = read(arguments.results)
    arguments.out.write_text(page(suites), encoding="utf-8")
    print(f"{arguments.out} shows {sum(map(len, suites.values()))} results")
    if "belady" in suites:
        belady_figure(suites["belady"]).write(arguments.out.parent / "belady.svg")


if __name__ == "__main__":
    main()
