"""Step times that the cost model predicts beside those that were measured, for docs/size.md.

    python benchmarks/predicted.py

Every line of results/terabyte.jsonl and results/multihot.jsonl with rows that move is judged, of
every visit to the machine. Given are the line's own counts of rows, and what all-fast took in the
same visit and setting: how long the model's own part takes, nobody can tell but who measures it.
The machine's ceilings come from other measurements, which src/hotrow/machines.toml names. Two lines
of terabyte.jsonl are among them (FITTED); they are left out here.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotrow.cost import Work, step_time
from hotrow.machine import Machine, find_machine
from hotrow.strategy import STRATEGIES

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "size.md"
FITTED = {
    ("3510a81", "target", "hotrow-lookahead-written"),
    ("c9ec046", "target", "hotrow-lookahead"),
}
# Where tables have as many rows and the model is the same, all-fast is.
SAME_MODEL = {"budget-2": "target", "budget-10": "target"}
STATE = {"sgd": lambda dim: 0, "rowwise-adagrad": lambda dim: 1, "adam": lambda dim: 2 * dim}
_PLACE = re.compile(r"(<!-- predicted: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Judged:
    suite: str
    run: str
    strategy: str
    commit: str
    form: str
    moved_rows: float
    all_fast_ms: float
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Of the measured time, what the prediction is above it."""
        return self.predicted_ms / self.measured_ms - 1


def judged(lines: Iterable[dict[str, Any]], machine: Machine) -> list[Judged]:
    lines = list(lines)
    base = {
        (each["suite"], each["commit"], each["run"]): each["step_ms"]["p50"]
        for each in lines
        if each["system"] == "hotrow-all-fast"
    }
    found = []
    for each in lines:
        suite, commit, run, system = (each[key] for key in ("suite", "commit", "run", "system"))
        strategy = STRATEGIES.get(system.removeprefix("hotrow-").removesuffix("-written"))
        fast = base.get((suite, commit, SAME_MODEL.get(run, run)))
        is_used = strategy is None or strategy.everything or (commit, run, system) in FITTED
        if is_used or fast is None:
            continue
        work = work_of(each)
        time = step_time(machine, strategy, work, all_fast_ms=fast, form=form_of(each))
        name = system.removeprefix("hotrow-")
        found.append(
            Judged(
                suite, run, name, commit, time.form, work.moved_rows, fast, time.ms,
                each["step_ms"]["p50"],
            )
        )  # fmt: skip
    return found


def work_of(line: dict[str, Any]) -> Work:
    setting, facts = line["setting"], line["facts"]
    dim = setting["dim"]
    row_bytes = 4 * (dim + STATE[setting["optimizer"]](dim))
    lookups = setting["batch"] * setting["tables"] * setting["hotness"]
    unique = facts.get("unique_rows_per_step") or lookups * (1 - facts["hit_rate"])
    return Work(
        lookups=lookups,
        unique_rows=unique,
        row_bytes=row_bytes,
        table_bytes=setting["rows"] * row_bytes,
        fetched_rows=facts.get("fetched_rows_per_step") or 0.0,
        evicted_rows=facts.get("evicted_rows_per_step") or 0.0,
        made_rows=facts.get("made_rows_per_step") or 0.0,
        vector_bytes=2 * dim if setting["output"] == "bfloat16" else 4 * dim,
    )


def form_of(line: dict[str, Any]) -> str:
    """The one that the collection chose in that visit, by rates that differ from day to day."""
    fills = line["facts"].get("fills") or {}
    return next((text.split(" ")[0] for text in fills.values()), "auto")


def median_error(found: Sequence[Judged]) -> float:
    return statistics.median(abs(each.error) for each in found)


def error_of_most(found: Sequence[Judged], part: float = 0.8) -> float:
    """Of `part` of them, the largest."""
    ordered = sorted(abs(each.error) for each in found)
    return ordered[max(0, round(part * len(ordered)) - 1)]


def rows_table(found: Sequence[Judged]) -> str:
    head = (
        "run", "strategy", "visit", "fill", "rows moved", "all-fast, ms", "predicted, ms",
        "measured, ms", "error",
    )  # fmt: skip
    rows = [
        (
            f"{each.suite}, {each.run}", each.strategy, each.commit, each.form or "-",
            f"{each.moved_rows:,.0f}", f"{each.all_fast_ms:.3f}", f"{each.predicted_ms:.3f}",
            f"{each.measured_ms:.3f}", f"{each.error:+.0%}",
        )
        for each in found
    ]  # fmt: skip
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def summary_table(found: Sequence[Judged]) -> str:
    kinds: dict[str, Sequence[Judged]] = {"all": found}
    for name in dict.fromkeys(each.strategy for each in found):
        kinds[name] = [each for each in found if each.strategy == name]
    lines = ["| strategy | lines | median error | four in five within |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {len(some)} | {median_error(some):.1%} | {error_of_most(some):.0%} |"
        for name, some in kinds.items()
    ]
    plain = [replace(each, predicted_ms=each.all_fast_ms) for each in found]
    said = f"{median_error(plain):.1%} | {error_of_most(plain):.0%}"
    lines.append(f"| all, had all-fast's own time been the prediction | {len(plain)} | {said} |")
    return "\n".join(lines) + "\n"


def filled(text: str, found: Sequence[Judged]) -> str:
    tables = {"rows": rows_table, "summary": summary_table}
    return _PLACE.sub(lambda place: place[1] + tables[place[2]](found) + place[3], text)


def read(results: Path = HERE / "results") -> list[dict[str, Any]]:
    """All lines, not the newest alone: visits differ, and so do predictions."""
    found = []
    for suite in ("terabyte", "multihot"):
        path = results / f"{suite}.jsonl"
        found += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def main(page: Path = PAGE) -> None:
    found = judged(read(), find_machine("h200"))
    page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"{page}: {len(found)} lines, median error {median_error(found):.1%}")


if __name__ == "__main__":
    main()
