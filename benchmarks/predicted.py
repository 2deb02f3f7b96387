"""Step times that the cost model predicts beside those that were measured, for docs/size.md.

    python benchmarks/predicted.py
    python benchmarks/predicted.py --rows target budget-2    # minutes each, on a CPU

Every line of results/terabyte.jsonl and results/multihot.jsonl with rows that move is judged, of
every visit to the machine. Given are the line's own counts of rows, and what all-fast took in the
same visit and setting: only measuring says how long the model's own part takes. The machine's
ceilings come from other measurements, which src/hotrow/sizing/machines.toml names. Two lines
of terabyte.jsonl are among them (FITTED); they are left out here, and so are those of scratchpipe
that were measured when threads of Python moved its rows (BY_PYTHON).

`--rows` runs the planner over the same batches of ids, as `hotrow simulate` does, with the slots
and the depth that the GPU had, and keeps how many rows it fetches in results/predicted.jsonl.
`--settled` does so for rows in the long run, told from a short trace as `hotrow size` does.
`--cpu` sizes small runs for the machine at hand, without a GPU, and trains what was found.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import multihot
import numpy as np
import terabyte
import torch
from harness import Results, parser, read_results, results_for
from traces import Trace

from hotrow.engine.strategy import STRATEGIES
from hotrow.run.config import RunConfig, load
from hotrow.run.job import build
from hotrow.sizing.cost import Work, step_time
from hotrow.sizing.machines import Machine, find_machine
from hotrow.sizing.simulator import simulate
from hotrow.study.sizing import Sizing, machine_of, size

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "size.md"
FITTED = {
    ("3510a81", "target", "hotrow-lookahead-written"),
    ("c9ec046", "target", "hotrow-lookahead"),
}
BY_PYTHON = {(commit, "target", "hotrow-scratchpipe") for commit in ("3510a81", "aa9a180")}
NEWEST = "aa9a180"
# Measured when the machine's figures had been taken, in shapes that none of them comes from.
LATER = ("scratchpipe", "published")
COUNTED = 50  # steps
DEPTHS = (50, 200, 400)  # of rows in the long run
SETTLED = ("kaggle-2-settled", "kaggle-5-settled")
CLICKS = ["run.threads=1", "data.rows=[200000,3000,10]", "data.batch_size=512"]
CPU = {
    "clicks": CLICKS,
    "adam": [*CLICKS, "embedding.optimizer.name=adam"],
    "deepfm": [*CLICKS, "model.kind=deepfm"],
    "multihot": [*CLICKS, "data.lookups=[20,5,1]", "model.embedding_dim=64"],
    "sequences": ["run.threads=1", "model.kind=tbsm", "data.batch_size=64"],
}
CPU_REACH = 0.8
CPU_WARM_UP, CPU_STEPS = 200, 60
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
        if each["system"].removeprefix("hotrow-") == "all-fast"
    }
    found = []
    for each in lines:
        suite, commit, run, system = (each[key] for key in ("suite", "commit", "run", "system"))
        strategy = STRATEGIES.get(system.removeprefix("hotrow-").removesuffix("-written"))
        fast = base.get((suite, commit, SAME_MODEL.get(run, run)))
        if fast is None and suite == "scratchpipe":  # whose all-fast has no budget
            fast = base.get((suite, commit, run.rpartition("-")[0]))
        if strategy is None or strategy.everything or fast is None:
            continue
        if (commit, run, system) in FITTED | BY_PYTHON:
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


# -- rows --------------------------------------------------------------------------------


SETTINGS = {"terabyte": terabyte.SETTINGS, "multihot": multihot.SETTINGS}


def simulated(line: dict[str, Any]) -> dict[str, Any]:
    """Rows that look-ahead fetches by the planner, in about the steps that were counted."""
    setting = next(each for each in SETTINGS[line["suite"]] if each.name == line["run"])
    facts, lookups = line["facts"], line["setting"]["batch"] * len(setting.rows) * setting.hotness
    depth = facts["memory"]["look-ahead ids"] // (4 * lookups) - 2
    warm_up = line["warmup_steps"] + line["step_ms"]["steps"]
    steps = warm_up + COUNTED + depth
    trace = Trace(
        setting.rows, steps=steps, batch=setting.batch, skew=setting.skew, hotness=setting.hotness,
        lock=False,
    )  # fmt: skip
    bases = torch.tensor([0, *setting.rows[:-1]]).cumsum(0)
    bases = bases if setting.hotness == 1 else bases[:, None]
    (found,) = simulate(
        ((ids + bases).view(-1) for ids in trace.ids),
        num_rows=sum(setting.rows),
        choices=[(replace(STRATEGIES["lookahead"], look_ahead=depth), facts["slots"])],
        warm_up=warm_up,
        counted=COUNTED,
    )
    trace.close()
    return {
        "visit": line["commit"],
        "slots": facts["slots"],
        "depth": depth,
        "warm_up": warm_up,
        "counted_on_gpu": facts["fetched_rows_per_step"],
        "simulated": found.rows_per_batch,
    }


def add_rows(runs: Sequence[str], results: Results) -> None:
    for line in read():
        is_newest = line["commit"] == NEWEST and line["system"] == "hotrow-lookahead"
        if is_newest and line["run"] in runs:
            results.write(f"{line['suite']}, {line['run']}", "planner", {"facts": simulated(line)})


def add_settled(results: Results) -> None:
    """Rows in the long run, as `hotrow size` tells them from 150 batches, beside belady.py's."""
    config = load(
        HERE.parent / "configs" / "traffic-study.toml", overrides=["data.batch_size=2048"]
    )
    sizing = Sizing(
        config, find_machine("h200"), batches=50, warm_up=100, depths=DEPTHS, dense_ms=0.5
    )
    slots = np.log(sizing.slots)
    fair = [each for each in sizing.slots if each <= sizing.fair_slots]
    told = {"lru": sizing.least_recent()}
    told |= {
        f"lookahead-{each.depth}": each.fetched
        for each in sizing.planned(fair[-5::2])
        if each.strategy.name == "lookahead"
    }
    for line in read_results(HERE / "results" / "belady.jsonl"):
        if line["run"] in SETTLED and line["system"] in told:
            rows = float(np.interp(np.log(line["slots"]), slots, told[line["system"]]))
            facts = {
                "slots": line["slots"],
                "warm_up": line["warmup_batches"],
                "settled": line["missing_rows_per_batch"],
                "predicted": rows,
            }
            results.write(line["run"], line["system"], {"facts": facts})


def add_cpu(results: Results) -> None:
    """Steps with what `hotrow size` finds on this machine, and as long as they take."""
    torch.set_num_threads(1)
    for name, settings in CPU.items():
        config = load(overrides=settings)
        machine = machine_of("this", config)
        sizing = Sizing(config, machine, batches=20, warm_up=40, depths=(2, 20))
        for each in size(sizing, reach=CPU_REACH).best:
            section = replace(
                config.embedding,
                strategy=each.strategy,
                budget=each.budget_bytes,
                depth=each.depth if each.strategy == "lookahead" else "auto",
            )
            facts = {
                "slots": each.slots,
                "predicted_ms": each.step_ms,
                "measured_ms": trained_ms(replace(config, embedding=section)),
            }
            results.write(f"cpu, {name}", each.strategy, {"facts": facts})


def trained_ms(config: RunConfig) -> float:
    steps = CPU_WARM_UP + CPU_STEPS
    job = build(replace(config, training=replace(config.training, steps=steps)))
    marks = [perf_counter() for _ in job.train()]
    return 1e3 * float(np.median(np.diff(marks[-CPU_STEPS:])))


def cpu_table(found: Sequence[Judged]) -> str:
    lines = ["| run | strategy | slots | predicted, ms | measured, ms | error |"]
    lines.append("|---|---|---|---|---|---|")
    for line in read_results(HERE / "results" / "predicted.jsonl"):
        each = line["facts"]
        if "measured_ms" in each:
            error = each["predicted_ms"] / each["measured_ms"] - 1
            lines.append(
                f"| {line['run'].removeprefix('cpu, ')} | {line['system']} | {each['slots']:,} | "
                f"{each['predicted_ms']:.2f} | {each['measured_ms']:.2f} | {error:+.0%} |"
            )
    return "\n".join(lines) + "\n"


def settled_table(found: Sequence[Judged]) -> str:
    lines = ["| run | strategy | slots | settled after | rows fetched | by 150 batches | apart |"]
    lines.append("|---|---|---|---|---|---|---|")
    for line in read_results(HERE / "results" / "predicted.jsonl"):
        each = line["facts"]
        if "settled" in each:
            apart = each["predicted"] / each["settled"] - 1
            lines.append(
                f"| {line['run']} | {line['system']} | {each['slots']:,} | {each['warm_up']:,} "
                f"batches | {each['settled']:,.0f} | {each['predicted']:,.0f} | {apart:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def traffic_table(found: Sequence[Judged]) -> str:
    lines = ["| run | slots | batches ahead | rows fetched on the GPU | by the planner | apart |"]
    lines.append("|---|---|---|---|---|---|")
    for line in read_results(HERE / "results" / "predicted.jsonl"):
        each = line["facts"]
        if "simulated" not in each:
            continue
        apart = each["simulated"] / each["counted_on_gpu"] - 1
        lines.append(
            f"| {line['run']} | {each['slots']:,} | {each['depth']} | "
            f"{each['counted_on_gpu']:,.0f} | {each['simulated']:,.0f} | {apart:+.1%} |"
        )
    return "\n".join(lines) + "\n"


# -- the page ----------------------------------------------------------------------------


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
    tables = {
        "rows": rows_table,
        "summary": summary_table,
        "traffic": traffic_table,
        "settled": settled_table,
        "cpu": cpu_table,
        "later": later_table,
        "laterrows": later_rows_table,
    }
    return _PLACE.sub(lambda place: place[1] + tables[place[2]](found) + place[3], text)


def read(
    suites: Sequence[str] = ("terabyte", "multihot"), results: Path = HERE / "results"
) -> list[dict[str, Any]]:
    """All lines, not the newest alone: visits differ, and so do predictions."""
    found = []
    for suite in suites:
        path = results / f"{suite}.jsonl"
        found += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def later() -> list[Judged]:
    """Steps that are alike, of what moves rows by a plan."""
    lines = [each for each in read(LATER) if "unique_rows_per_step" in each["facts"]]
    return [each for each in judged(lines, find_machine("h200")) if each.form]


def later_rows_table(found: Sequence[Judged]) -> str:
    return rows_table(later())


def later_table(found: Sequence[Judged]) -> str:
    return summary_table(later())


def main() -> None:
    made = parser((__doc__ or "").split("\n")[0])
    made.add_argument("--rows", nargs="+", default=(), metavar="RUN", help="of the newest visit")
    made.add_argument("--settled", action="store_true", help="rows in the long run, too")
    made.add_argument("--cpu", action="store_true", help="small runs on this machine, too")
    arguments = made.parse_args()
    results = results_for("predicted", arguments)
    add_rows(arguments.rows, results)
    if arguments.settled:
        add_settled(results)
    if arguments.cpu:
        add_cpu(results)
    found = judged(read(), find_machine("h200"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(f"{PAGE}: {len(found)} lines, median error {median_error(found):.1%}")


if __name__ == "__main__":
    main()
