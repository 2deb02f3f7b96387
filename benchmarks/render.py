"""Writes benchmarks/README.md from the results: the newest line of each run and system.

python benchmarks/render.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
| `python benchmarks/multihot.py` | the embedding part alone with a million lookups per step |
| `python benchmarks/scale.py` | the same lookups in tables of 1 M to 500 M rows |
| `python benchmarks/kernels.py` | each kernel against the bytes it must move |
| `python benchmarks/criteo_sample.py train.txt` | equality to the bit on real clicks |

`--list` names the runs, `--only target` or `--only 'target/hotrow-*'` chooses, `--minutes 8` stops
in time, `--smoke` tries a suite on a CPU. FBGEMM is left out where it cannot be imported. What was
tried and did not help is in [LOG.md](LOG.md).

How the figures are taken:

- A step's time is the distance between two events on the main stream, each recorded when a step's
  work has been launched: what overlaps with training costs nothing, what delays it counts. Shown is
  the median, with the 20th and 80th percentile; samples per second are from the mean.
- Batches come from page-locked host memory and none occurs twice. Caches are full before timing
  starts, so that every row that arrives makes another leave.
- Every system trains the same dense part on the same batches: bfloat16 weights with float32
  masters, compiled, captured as a CUDA graph. Vectors are bfloat16 (float32 where the embedding
  part runs alone), rows float32.
- FBGEMM's cached forms get the same bytes of HBM as hotrow, everything counted: 4 bytes per row for
  its index, 16 per slot, row-wise state. `cached-rows` gets as many slots as the budget is of the
  rows, which is more bytes. Its rows lie in page-locked host memory, and it does not check ids.
- The link's floor is the time the machine needs at best to read and write the rows that cross. For
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
        "rows), 20 % of the bytes in HBM. Bags of 10 ids; `-single`: one id per bag.",
    ),
}

Line = dict[str, Any]


def read(folder: Path) -> dict[str, list[Line]]:
    """The newest line of each run and system, by suite, in the order they first came."""
    suites = {}
    for path in sorted(folder.glob("*.jsonl")):
        newest: dict[tuple[str, str], Line] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            key = line["run"], line["system"]
            if key not in newest or line["date"] >= newest[key]["date"]:
                newest[key] = line
        suites[path.stem] = list(newest.values())
    return suites


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines) + "\n"


def step(line: Line) -> str:
    ms = line["step_ms"]
    return f"{ms['p50']:.3g} ({ms['p20']:.3g}-{ms['p80']:.3g})"


def environments(lines: Iterable[Line]) -> str:
    """Machines and software behind some lines, each once."""
    found = dict.fromkeys(_environment(line) for line in lines)
    return "\n".join(f"- {each}" for each in found) + "\n"


def _environment(line: Line) -> str:
    about = line["environment"]
    return (
        f"{about['gpu']}, driver {about['driver']}, CUDA {about['cuda']}, torch {about['torch']}, "
        f"triton {about['triton']}, Python {about['python']}, {about['cores']} cores, hotrow "
        f"{about['hotrow']} at {line['commit']}, {line['date'][:10]}."
    )


def ceilings(lines: list[Line]) -> str:
    rows = [(line["run"], f"{line['value']:.3g} {line['unit']}") for line in lines]
    return (
        f"## Ceilings of the machine\n\n{table(('what', 'at best'), rows)}\n{environments(lines)}"
    )


def comparison(suite: str, lines: list[Line], link_rate: float | None) -> str:
    """`link_rate`: millions of rows per second that cross the link, both ways together."""
    title, about = TITLES[suite]
    head = ("run", "system", "step, ms", "M samples/s", "of all-fast", "HBM of tables", "hit rate")
    rows = []
    for run in dict.fromkeys(line["run"] for line in lines):
        mine = [line for line in lines if line["run"] == run]
        mine.sort(key=lambda line: not line["system"].startswith("hotrow"))
        best = next((line for line in mine if line["system"] == "hotrow-all-fast"), None)
        for line in mine:
            rate, hits = line["samples_per_second"], line["facts"].get("hit_rate")
            rows.append(
                (
                    run if line is mine[0] else "",
                    line["system"],
                    step(line),
                    f"{rate / 1e6:.3g}",
                    "-" if best is None else f"{rate / best['samples_per_second']:.2f}",
                    f"{line['hbm_bytes']['tables'] / GIB:.2f} GiB",
                    "-" if hits is None else f"{hits:.1%}",
                    link_floor(line, link_rate),
                )
            )
    body = table((*head, "link's floor, ms"), rows)
    return f"## {title}\n\n{about}\n\n{body}\n{environments(lines)}"


def link_floor(line: Line, link_rate: float | None) -> str:
    facts = line["facts"]
    if "floor_ms" in facts:
        return f"{facts['floor_ms']['sum']:.2f}"
    if link_rate is None or "fetched_rows_per_step" not in facts:
        return "-"
    moved = facts["fetched_rows_per_step"] + facts["evicted_rows_per_step"]
    return f"{moved / link_rate / 1000:.2f}"


def scale(lines: list[Line]) -> str:
    head = ("rows", "step, ms", "rows fetched", "HBM beside the slots", "start-up", "memory alone")
    rows = [
        (
            f"{line['rows']:,}",
            step(line),
            f"{line['fetched_rows']:,}",
            f"{line['hbm_bytes']['beside_slots'] / MIB:.1f} MiB",
            f"{line['startup_seconds']:.1f} s",
            f"{line['touch_seconds'] + line.get('lock_seconds', 0):.1f} s",
        )
        for line in sorted(lines, key=lambda line: line["rows"])
    ]
    about = (
        "The same lookups of 1 M different ids, spread over more and more rows of dimension 16; "
        "the embedding part alone with the same budget throughout. `memory alone`: touching and "
        "page-locking as many bytes."
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
    about = "The fewest bytes a kernel must move, and the time a large copy takes for as many."
    return f"## Kernels\n\n{about}\n\n{table(head, rows)}\n{environments(lines)}"


def page(suites: dict[str, list[Line]]) -> str:
    parts, link_rate = [INTRO], None
    if "ceilings" in suites:
        parts.append(ceilings(suites["ceilings"]))
        known = {line["run"]: line["value"] for line in suites["ceilings"]}
        link_rate = known.get("zero-copy both, rows of 256 bytes")
    parts += [comparison(name, suites[name], link_rate) for name in TITLES if name in suites]
    if "scale" in suites:
        parts.append(scale(suites["scale"]))
    if "kernels" in suites:
        parts.append(kernels(suites["kernels"]))
    if len(parts) == 1:
        parts.append("No results yet.\n")
    return "\n".join(parts)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--results", type=Path, default=HERE / "results")
    made.add_argument("--out", type=Path, default=HERE / "README.md")
    arguments = made.parse_args()
    arguments.out.write_text(page(read(arguments.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
