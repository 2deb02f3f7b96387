"""How near look-ahead comes to the fewest rows that any cache could fetch.

    python benchmarks/belady.py --list
    python benchmarks/belady.py --only kaggle-5 --depths 50 200

hotrow's own planner runs over a trace of ids, without rows and without a GPU, for several depths of
look-ahead, and is counted against Belady's bound. All rows of a batch must be resident together, so
the bound is taken batch by batch: with the whole trace known, it evicts, among the rows that the
batch does not use, those whose next use is farthest, never used again first. Counting starts
when the slots are full, and ends long before the trace does.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import numpy as np
import torch
from harness import Deadline, OutOfTime, keeps_results, parser, results_for, say
from numpy.typing import NDArray
from suite import Setting
from terabyte import SETTINGS
from torch import Tensor
from traces import Trace, permutation, steps_to_fill

from hotrow.data import KAGGLE_ROWS
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.sizing.reuse import belady, next_uses_of
from hotrow.sizing.simulator import simulate

DEPTHS = (1, 10, 25, 50, 100, 200, 400)
COUNTED = 100
PROFILED_DEPTHS = (50, 200, 400)
PAST_FULL = 1.25  # warm-up, over the batches until as many rows were read as there are slots


@dataclass(frozen=True)
class Case:
    """A trace and a number of slots."""

    name: str
    setting: Setting
    slots: int
    starts_hot: bool = False  # with the truly hottest rows in the slots, else with none


KAGGLE = Setting("kaggle", KAGGLE_ROWS, batch=2048)
TARGET_SLOTS = 7_920_952  # that 5 % of the bytes hold on a GPU, everything counted

FILLED = (
    Case("kaggle-2", KAGGLE, int(0.02 * sum(KAGGLE_ROWS))),
    Case("kaggle-5", KAGGLE, int(0.05 * sum(KAGGLE_ROWS))),
    Case("kaggle-10", KAGGLE, int(0.1 * sum(KAGGLE_ROWS))),
    Case("target", SETTINGS[0], TARGET_SLOTS),
)
CASES = FILLED + tuple(
    replace(case, name=f"{case.name}-settled", starts_hot=True) for case in FILLED
)


Ids = NDArray[np.int32]


# -- the traces ------------------------------------------------------------------------


@dataclass(frozen=True)
class Lookups:
    """Batches of different rows each; rows that none of them reads are not numbered."""

    batches: list[Ids]
    hottest: Tensor  # as many as there are slots, hottest first
    num_rows: int
    first: int  # of the batches that count
    counted: int

    def tensors(self, depth: int) -> Iterator[Tensor]:
        """As far as a planner must see that knows `depth` batches ahead."""
        for ids in self.batches[: self.first + self.counted + depth]:
            yield torch.from_numpy(ids.astype(np.int64))


def lookups_of(case: Case, counted: int) -> Lookups:
    """Batches that fill the slots, `counted` ones, and as many after them as a choice can matter.

    From nothing, slots are filled by the trace itself; most misses of the next batches are then
    rows never seen before, which no choice can avoid. After days of training few rows are new: for
    that the truly hottest rows are read first, and then the trace until slots have turned over.
    """
    s = case.setting
    hot = hottest(s, case.slots)
    turnover = math.ceil(case.slots / _rows_outside(s, hot))
    warm_up = turnover
    if not case.starts_hot:
        warm_up = math.ceil(PAST_FULL * steps_to_fill(case.slots, s.rows, s.skew, s.batch))
    trace = Trace(
        s.rows,
        steps=warm_up + counted + max(turnover, *DEPTHS),
        batch=s.batch,
        skew=s.skew,
        lock=False,
    )
    bases = np.array([0, *s.rows[:-1]]).cumsum()
    batches = [np.unique(ids.numpy() + bases) for ids in trace.ids]
    trace.close()
    filling: list[NDArray[np.int64]] = []
    if case.starts_hot:  # the hottest last, as least-recent wants it
        filling = np.array_split(hot[::-1], -(-case.slots // len(batches[0])))
    return _renumbered(filling + batches, hot, sum(s.rows), len(filling) + warm_up, counted)


def _renumbered(
    batches: list[NDArray[np.int64]],
    hot: NDArray[np.int64],
    num_rows: int,
    first: int,
    counted: int,
) -> Lookups:
    number = np.zeros(num_rows, dtype=np.int32)
    for ids in (*batches, hot):
        number[ids] = 1
    np.cumsum(number, out=number)
    number -= 1
    return Lookups(
        [np.sort(number[ids]) for ids in batches],
        torch.from_numpy(number[hot]).long(),
        int(number[-1]) + 1,
        first,
        counted,
    )


def _rows_outside(setting: Setting, hot: NDArray[np.int64]) -> float:
    """Rows of a batch that are not among the hottest, on average."""
    trace = Trace(setting.rows, steps=10, batch=setting.batch, skew=setting.skew, lock=False)
    bases = np.array([0, *setting.rows[:-1]]).cumsum()
    is_hot = np.zeros(sum(setting.rows), dtype=bool)
    is_hot[hot] = True
    unique = [np.unique(ids.numpy() + bases) for ids in trace.ids]
    trace.close()
    return float(np.mean([np.count_nonzero(~is_hot[ids]) for ids in unique]))


def hottest(setting: Setting, count: int) -> NDArray[np.int64]:
    """The ids that are looked up most often in truth, hottest first."""
    ids, chances, base = [], [], 0
    power = 1 - setting.skew
    for table, num_rows in enumerate(setting.rows):
        ranks = np.arange(min(num_rows, count))
        weight = np.abs((ranks + 2.0) ** power - (ranks + 1.0) ** power)
        chances.append(weight / abs((num_rows + 1) ** power - 1))
        ids.append(permutation(num_rows, 0, table)(ranks) + base)
        base += num_rows
    order = np.argsort(-np.concatenate(chances), kind="stable")[:count]
    return np.concatenate(ids)[order]


# -- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A strategy as it is counted."""

    name: str
    strategy: Strategy
    depth: int | None = None  # of look-ahead
    profiled: bool = False  # knows which rows are hot, and pins them


def choices(case: Case, depths: Sequence[int]) -> list[Choice]:
    ahead = STRATEGIES["lookahead"]
    found = [Choice(f"lookahead-{depth}", ahead, depth) for depth in depths]
    if case.starts_hot:  # else they would have rows that were never fetched
        found += [
            Choice(f"lookahead-profile-{depth}", ahead, depth, profiled=True)
            for depth in depths
            if depth in PROFILED_DEPTHS
        ]
        found.append(Choice("static", STRATEGIES["static"], profiled=True))
    return [*found, Choice("lru", STRATEGIES["lru"])]


def planned(case: Case, lookups: Lookups, choice: Choice) -> tuple[float, float]:
    """Rows fetched per batch by hotrow's planner, and the seconds that took."""
    started, depth = time.perf_counter(), choice.depth or 0
    (found,) = simulate(
        lookups.tensors(depth),
        num_rows=lookups.num_rows,
        choices=[(choice.strategy, case.slots)],
        depth=depth,
        warm_up=lookups.first,
        counted=lookups.counted,
        hottest=(lambda n: lookups.hottest[:n]) if choice.profiled else None,
    )
    assert found.batches == lookups.counted
    assert found.chunked_batches == 0
    return found.rows_per_batch, time.perf_counter() - started


def run(case: Case, arguments: argparse.Namespace, deadline: Deadline) -> list[str]:
    results, lines = results_for("belady", arguments), list[str]()
    say(f"{case.name}: {case.slots:,} slots of {sum(case.setting.rows):,} rows")
    lookups = lookups_of(case, arguments.counted)
    say(f"  {len(lookups.batches):,} batches, {lookups.first:,} of them before the counted ones")
    uses = next_uses_of(lookups.batches, num_rows=lookups.num_rows)
    bound = belady(uses, [case.slots], first=lookups.first, counted=lookups.counted)
    least = float(bound.per_batch[0])
    shared = {
        "setting": case.setting.facts(),
        "slots": case.slots,
        "warmup_batches": lookups.first,
        "counted_batches": lookups.counted,
        "unique_rows_per_batch": bound.unique_rows / bound.batches,
        "useful_depth": case.slots / least,
    }

    def note(system: str, depth: int | None, rows: float, seconds: float) -> None:
        measured = {"depth": depth, "missing_rows_per_batch": rows, "over_belady": rows / least}
        if keeps_results(arguments):
            results.write(case.name, system, shared | measured | {"seconds": seconds})
        lines.append(f"{case.name:10} {system:22} {rows:9,.0f} rows per batch, {rows / least:.3f}")
        say("  " + lines[-1])

    note("belady", None, least, 0.0)
    for choice in choices(case, arguments.depths):
        deadline.check()
        rows, seconds = planned(case, lookups, choice)
        note(choice.name, choice.depth, rows, seconds)
    return lines


def tiny(case: Case) -> Case:
    rows = tuple(min(each, 2000) for each in case.setting.rows)
    setting = replace(case.setting, rows=rows, batch=64)
    return replace(case, setting=setting, slots=math.ceil(0.2 * sum(rows)))


def main() -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", default=["*"], metavar="NAME")
    made.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    made.add_argument("--counted", type=int, default=COUNTED, help="batches that are counted")
    made.add_argument("--list", action="store_true", help="say what would run, and end")
    arguments = made.parse_args()
    cases = [case for case in CASES if any(fnmatch(case.name, each) for each in arguments.only)]
    if arguments.list:
        for case in cases:
            print(f"{case.name:12} {case.slots:12,} slots of {sum(case.setting.rows):,} rows")
        return
    if max(arguments.depths) > max(DEPTHS):
        raise SystemExit(f"depths may be {max(DEPTHS)} at most: the traces end there")
    torch.set_num_threads(1)
    deadline, lines = Deadline(arguments.minutes), list[str]()
    for case in cases:
        try:
            lines += run(tiny(case) if arguments.smoke else case, arguments, deadline)
        except OutOfTime:
            lines.append(f"{case.name}: the minutes are over")
    print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
