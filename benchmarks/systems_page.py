"""Fills the tables of docs/systems.md from the results.

    python benchmarks/systems_page.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced,
and everything else is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from bars import BARS, Ratio, ratios
from render import HERE, Line, environments, median, read, step, table
from svg import Drawing

PAGE = HERE.parent / "docs" / "systems.md"
Suites = dict[str, list[Line]]
_PLACE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, suites: Suites) -> str:
    return _PLACE.sub(lambda found: found[1] + TABLES[found[2]](suites) + found[3], text)


def named(lines: Iterable[Line]) -> dict[str, Line]:
    return {line["system"].removeprefix("hotrow-"): line for line in lines}


def of(suites: Suites, suite: str, run: str) -> list[Line]:
    return [line for line in suites.get(suite, []) if line["run"] == run]


def whence(lines: list[Line]) -> str:
    """The commands behind some lines, and where they ran."""
    # A command that measured a part names it; without that, all is measured.
    part = re.compile(r" --(only|strategies) .*")
    commands = dict.fromkeys(part.sub("", line["command"]) for line in lines)
    said = "".join(f"- `{each}`\n" for each in commands)
    return f"\n{said}{environments(lines)}" if lines else ""


# -- speeds --------------------------------------------------------------------------------


def targets(suites: Suites) -> str:
    """Every ratio of the page, measured or not."""
    rows, lines = [], suites.get("published", [])
    for run in ("terabyte", "kaggle"):
        mine = named(of(suites, "published", run))
        found = {(each.system, each.over): each for each in ratios(mine)}
        for system, bars in BARS.items():
            for over, published in bars:
                ratio = found.get((system, over))
                if ratio is not None or published is not None:
                    rows.append((run, *_cells(ratio, system, over, published)))
    head = ("shape", "system", "over", "published", "ours", "bound")
    return table(head, rows) + whence(lines)


def _cells(ratio: Ratio | None, system: str, over: str, published: float | None) -> tuple[str, ...]:
    said = "-" if published is None else f"{published:g}"
    if ratio is None:
        return system, over, said, "not measured yet", "-"
    bound = "-" if ratio.bound is None else f"{ratio.bound:.2f}"
    return system, over, said, f"{ratio.value:.2f}", bound


def scratchpipe(suites: Suites) -> str:
    """Each system over static-hybrid, and what the rows that cross would allow."""
    lines = suites.get("scratchpipe", [])
    if not lines:
        return "Not measured yet.\n"
    rows = []
    for run in sorted({line["run"] for line in lines}):
        mine = named(of(suites, "scratchpipe", run))
        bar = mine.get("static-hybrid")
        if bar is None:
            continue
        # All-fast knows no budget, and its run is the locality alone.
        mine |= named(of(suites, "scratchpipe", run.rpartition("-")[0]))
        cells = [run, step(bar)]
        for name in ("scratchpipe", "lookahead", "all-fast"):
            cells.append(f"{median(bar) / median(mine[name]):.2f}" if name in mine else "-")
        floor = mine["scratchpipe"]["facts"]["bound_ms"] if "scratchpipe" in mine else None
        if floor and "all-fast" in mine:
            floor = max(floor, median(mine["all-fast"]))
        rows.append((*cells, f"{median(bar) / floor:.2f}" if floor else "-"))
    head = (
        "access, budget", "static-hybrid, ms", "scratchpipe", "lookahead", "all-fast",
        "bound of scratchpipe",
    )  # fmt: skip
    return table(head, rows) + whence(lines)


# -- quality -------------------------------------------------------------------------------


def quality(suites: Suites) -> str:
    """Of the study as it is by default; others are not shown."""
    found = suites.get("system_quality", [])
    if not found:
        return "Not measured yet.\n"
    from system_quality import Runs, Study, differences

    study = json.loads(json.dumps(asdict(Study())))
    lines = [line for line in found if line["study"] == study]
    runs: Runs = {}
    for line in lines:
        seed = int(line["run"].removeprefix("seed "))
        runs.setdefault(line["system"], {})[seed] = line
    rows = []
    for system, by_seed in runs.items():
        control = system.replace("slipstream", "random-drop as")
        cells = [
            f"{fmean(run['auc'] for run in by_seed.values()):.5f}",
            f"{fmean(run['log_loss'] for run in by_seed.values()):.5f}",
            f"{fmean(run['dropped'] for run in by_seed.values()):.1%}",
        ]
        for other in ("all-fast", control):
            apart = None if other == system else differences(runs, system, other, "auc")
            cells.append("-" if apart is None else str(apart))
        rows.append((system, f"{len(by_seed)}", *cells))
    head = (
        "system", "seeds", "AUC", "log-loss", "left out", "AUC - all-fast", "AUC - random-drop",
    )  # fmt: skip
    return table(head, rows) + whence(lines)


def skip_control(suites: Suites) -> str:
    """Slipstream beside its controls, on each data set and system."""
    lines = suites.get("skip_control", [])
    if not lines:
        return "Not measured yet.\n"
    from skip_control import HEAD
    from skip_control import table as rows_of

    return table(HEAD, rows_of(lines)) + whence(lines)


def on_ranks(suites: Suites) -> str:
    """Systems on several ranks beside one."""
    lines = suites.get("systems_on_ranks", [])
    if not lines:
        return "Not measured yet.\n"
    from systems_on_ranks import HEAD
    from systems_on_ranks import table as rows_of

    return table(HEAD, rows_of(lines)) + whence(lines)


# -- real clicks ---------------------------------------------------------------------------


def real(run: str) -> Callable[[Suites], str]:
    def made(suites: Suites) -> str:
        lines = of(suites, "real", run)
        if not lines:
            return "Not measured yet.\n"
        setting = lines[0]["setting"]
        about = (
            f"{setting['steps']:,} steps of {setting['batch']:,} samples, "
            f"{setting['rows_bytes'] / 2**20:.1f} MiB of rows, a budget of {setting['budget']}.\n\n"
        )
        notes = "".join(
            # What rounding alone does stands in the lines of those that are in another order.
            f"- {line['system']}: {line['facts']['equal_note'].split('. Rounding alone')[0]}.\n"
            for line in lines
            if line["facts"]["contract"] == "exact up to rounding" and line["facts"]["equal_note"]
        )
        head = (
            "system", "contract", "hit rate", "rows per sample", "samples", "AUC", "log-loss",
            "equal to all-fast",
        )  # fmt: skip
        return about + table(head, map(_real_cells, lines)) + "\n" + notes + whence(lines)

    return made


def _real_cells(line: Line) -> tuple[str, ...]:
    facts = line["facts"]
    if facts["outcome"] == "failed":
        return line["system"], facts["contract"], *(["-"] * 5), f"failed: {facts['message']}"
    words = {"bits": "bits", "tolerance": "within tolerance", "no": "no"}
    equal = "-" if line["system"] == "all-fast" else words.get(facts["equal"], "not compared")
    return (
        line["system"],
        facts["contract"],
        f"{facts['hit_rate']:.1%}",
        f"{facts['rows_per_sample']:.2f}",
        f"{facts['samples']:,}",
        f"{facts['auc']:.4f}",
        f"{facts['log_loss']:.4f}",
        equal,
    )


def rounding(suites: Suites) -> str:
    lines = suites.get("rounding", [])
    if not lines:
        return "Not measured yet.\n"
    rows = []
    for line in lines:
        facts = line["facts"]
        steps = {int(step): apart for step, apart in facts["apart"].items()}
        parts = ", ".join(f"{count} of `{name}`" for name, count in (facts["units"] or {}).items())
        rows.append(
            (
                line["run"],
                line["system"],
                ", ".join(f"{apart:.0e} ({step})" for step, apart in sorted(steps.items())),
                f"none in {facts['steps']:,}" if facts["step"] is None else f"{facts['step']:,}",
                parts or "-",
            )
        )
    head = (
        "clicks", "beside all-fast", "dense weights differ by (after step)",
        "step that parts them", "units apart then",
    )  # fmt: skip
    return table(head, rows) + whence(lines)


def drift(suites: Suites) -> str:
    lines = of(suites, "drift", "globo")
    if not lines:
        return "Not measured yet.\n"

    def percent(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else f"{100 * value:{form}} %"

    def points(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    rows = []
    for line in lines:
        facts = line["facts"]
        rows.append(
            (
                line["system"],
                percent(facts["share"]),
                points(facts["below"]),
                percent(facts["hours_near"], ".0f"),
                points(facts["p95_below"]),
                f"{facts['times_chosen']:,}" if facts["times_chosen"] else "-",
                percent(facts["hit_rate"]),
            )
        )
    head = (
        "hot rows, or strategy", "popular samples", "points below the oracle",
        "hours within 5 points", "95 % of hours within", "times chosen", "hit rate",
    )  # fmt: skip
    setting = lines[0]["setting"]
    about = (
        f"{setting['clicks']:,} clicks in batches of {setting['batch']:,}; {setting['hot_rows']:,} "
        f"of {setting['rows']:,} rows are hot; {setting['slots']:,} slots where rows move. The "
        f"most clicked articles of day 1 have {setting['next_day']:.1%} of the clicks of day 2.\n\n"
    )
    figure = "![Popular samples, hour by hour](drift.svg)\n\n"
    return about + table(head, rows) + "\n" + figure + whence(lines).lstrip("\n")


CURVES = {
    "oracle: the hour's own counts": "grey",
    "hotline, counts halved by drift": "blue",
    "hotline, as it is by default": "orange",
    "the whole log's counts": "green",
}


def drift_figure(lines: list[Line]) -> Drawing:
    """Popular samples, hour by hour."""
    drawing = Drawing(900, 330, "Popular samples of the Globo.com click log, by hour")
    left, right, top, bottom = 60, 880, 50, 270
    curves = {line["system"]: line["facts"]["by_hour"] for line in lines}
    count = max((len(each) for each in curves.values()), default=0)

    def at(hour: int, share: float) -> tuple[float, float]:
        return left + (right - left) * hour / max(1, count - 1), bottom - (bottom - top) * share

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.line([at(0, tick), at(count - 1, tick)], "rule")
        drawing.text(left - 8, at(0, tick)[1] + 5, f"{tick:.0%}", style="small", anchor="end")
    for hour in range(0, count, 50):
        drawing.text(at(hour, 0)[0], bottom + 20, f"{hour}", style="small", anchor="middle")
    about = "hours of 100 clicks or more, after the first learning phase"
    drawing.text((left + right) / 2, bottom + 44, about, anchor="middle")
    place: float = left
    for name, colour in CURVES.items():
        if name in curves:
            drawing.line([at(hour, share) for hour, share in enumerate(curves[name])], colour)
            drawing.box(place, 20, 12, 12, colour)
            drawing.text(place + 18, 31, name, style="small")
            place += 34 + 6 * len(name)
    return drawing


TABLES: dict[str, Callable[[Suites], str]] = {
    "targets": targets,
    "scratchpipe": scratchpipe,
    "quality": quality,
    "skip_control": skip_control,
    "on_ranks": on_ranks,
    "criteo": real("criteo"),
    "movielens": real("movielens"),
    "rounding": rounding,
    "drift": drift,
}


def main(page: Path = PAGE, results: Path = HERE / "results") -> None:
    suites = read(results)
    page.write_text(filled(page.read_text(encoding="utf-8"), suites), encoding="utf-8")
    drift_figure(of(suites, "drift", "globo")).write(page.parent / "drift.svg")
    print(f"{page} shows {', '.join(TABLES)}")


if __name__ == "__main__":
    main()
