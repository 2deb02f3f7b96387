"""A run's smallest budget is the smallest of all that were tried; simulations of its trace."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import hotrow
from hotrow.engine.profile import save_profile
from hotrow.engine.strategy import STRATEGIES
from hotrow.report.page import page_of
from hotrow.report.predicted import size_document
from hotrow.run.config import RunConfig, load
from hotrow.run.job import build
from hotrow.sizing.budgets import budget_for
from hotrow.sizing.cost import Work
from hotrow.sizing.machines import Machine
from hotrow.study.lookups import OfRun
from hotrow.study.simulation import Simulation
from hotrow.study.sizing import Sizing, StepModel, _timed, base_of, machine_of, size
from hotrow.support.records import SizeRecord

SMALL = ["data.rows=[20000,3000,50]", "data.batch_size=64", "data.samples=640", "run.threads=1"]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(overrides=SMALL)


@pytest.fixture(scope="module")
def this(config: RunConfig) -> Machine:
    return machine_of("this", config)


@pytest.fixture(scope="module")
def sizing(config: RunConfig) -> Sizing:
    return Sizing(
        config, machine_of("h200", config), batches=15, warm_up=30, depths=(2, 12), dense_ms=0.45
    )


@pytest.fixture(scope="module")
def found(sizing: Sizing) -> SizeRecord:
    return size(sizing, reach=0.999)


def test_the_budget_of_each_strategy_is_the_smallest_that_reaches_it(found: SizeRecord) -> None:
    for best in found.best[1:]:
        tried = [each for each in found.options if each.strategy == best.strategy]
        reaching = [each.budget_bytes for each in tried if each.of_all_fast >= 0.999]
        if reaching:
            assert (best.budget_bytes, best.reaches) == (min(reaching), True)
        else:
            assert best.step_ms <= 1.02 * min(each.step_ms for each in tried)


@pytest.mark.parametrize("reach", [0.5, 0.95, 0.999])
def test_no_smaller_budget_that_was_tried_reaches_it(sizing: Sizing, reach: float) -> None:
    found = size(sizing, reach=reach)
    reaching = [each for each in (*found.options, found.best[0]) if each.of_all_fast >= reach]
    least = min(each.budget_bytes for each in reaching)
    chosen = found.chosen
    assert (chosen.budget_bytes, chosen.reaches) == (least, True)
    steps = [each.step_ms for each in reaching if each.budget_bytes == least]
    assert chosen.step_ms <= 1.01 * min(steps)
    low, high = chosen.low_samples_per_second, chosen.high_samples_per_second
    assert low < chosen.samples_per_second == 64e3 / chosen.step_ms < high
    assert found.best[0].strategy == "all-fast"
    largest = max(each.budget_bytes for each in found.options)
    assert 0.5 * found.rows_bytes < largest < found.rows_bytes == found.best[0].budget_bytes


def test_in_the_long_run_a_slot_for_each_row_fetches_nothing(sizing: Sizing) -> None:
    curve = sizing.profile.curve("lru").per_batch
    assert curve[-1] > 0  # the trace is short
    fetched = sizing.least_recent()
    assert fetched[-1] == 0
    fits = ~np.isnan(curve)
    assert (np.diff(fetched[fits]) <= 1e-9).all()
    settled = fits & (np.array(sizing.slots) <= sizing.settled_slots)
    assert settled.any()
    assert (fetched[settled] == curve[settled]).all()


@pytest.mark.slow
def test_a_short_trace_tells_what_a_long_one_does(config: RunConfig) -> None:
    """Up to the slots that the long one has settled."""
    machine = machine_of("h200", config)
    short, long = (
        Sizing(config, machine, batches=20, warm_up=warm_up, depths=(2,), dense_ms=0.5)
        for warm_up in (30, 300)
    )
    slots = np.array(long.slots)
    told = (slots > 2 * short.settled_slots) & (slots <= long.settled_slots)
    assert told.sum() >= 3
    apart = short.least_recent()[told] / long.least_recent()[told]
    assert (abs(np.log(apart)) < np.log(1.35)).all(), apart


def test_what_is_planned_lies_between_nothing_and_all_rows(sizing: Sizing) -> None:
    recent, slots = sizing.least_recent(), sizing.slots[-13:-7:2]
    planned = list(sizing.planned(slots))
    names = ["lru", "static", "lookahead", "lookahead"]
    assert [each.strategy.name for each in planned] == names
    assert [each.depth for each in planned] == [0, 0, 2, 12]
    place = sizing.slots.index(slots[0])
    lru, static, near, far = (each.fetched for each in planned)
    np.testing.assert_allclose(lru, recent, rtol=0.01)  # the planner fetches what the curve tells
    assert 0 < far[place] < near[place] < recent[place]  # who sees more fetches less
    assert far[-1] == near[-1] == static[-1] == 0
    # With more slots than batches ahead can tell of, it is hardly better than lru.
    assert far[place] / recent[place] < far[-4] / recent[-4] <= 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("skew", [1.05, 0.6, 1.4])
def test_more_slots_never_fetch_more(skew: float) -> None:
    config = load(overrides=[*SMALL, f"data.skew={skew}"])
    machine = machine_of("h200", config)
    sizing = Sizing(config, machine, batches=10, warm_up=40, depths=(1, 20), dense_ms=0.0)
    fair = [each for each in sizing.slots if sizing.profile.floors[1] <= each]
    planned = list(sizing.planned(fair[:5:2]))
    for near, far in pairwise(planned[2:]):
        assert not (far.fetched > near.fetched).any(), far.depth
    for each in planned:
        fetched = each.fetched[~np.isnan(each.fetched)]
        assert (np.diff(fetched) <= 1e-9).all(), (each.strategy.name, each.depth)
        assert fetched[-1] == 0


def test_tables_smaller_than_batches_are_all_fast(config: RunConfig) -> None:
    config = replace(config, data=replace(config.data, rows=(50, 5)))
    machine = machine_of("h200", config)
    sizing = Sizing(config, machine, batches=4, warm_up=4, depths=(2,), dense_ms=0.5)
    record = size(sizing, reach=0.9)
    assert (record.chosen, record.best) == (record.best[0], (record.chosen,))
    assert record.chosen.strategy == "all-fast"
    assert "slots that are enough for batches need at least as much" in record.notes[0]
    assert "Take all-fast" in page_of(size_document(record))


def test_no_budget_is_larger_than_the_memory(config: RunConfig, sizing: Sizing) -> None:
    """Of which the model has its part."""
    wanted = size(sizing, reach=0.9999).chosen
    assert wanted.strategy == "lookahead"
    memory = wanted.budget_bytes / 0.7 - 1
    few = replace(sizing.machine, memory_gib=memory / 2**30)
    small = Sizing(config, few, batches=15, warm_up=30, depths=(2, 12), dense_ms=0.45)
    record = size(small, reach=0.9999)
    assert max(each.budget_bytes for each in record.options) <= 0.7 * memory
    assert not record.chosen.reaches
    assert "nearest is lookahead" in record.notes[0]
    assert "all rows do not fit 70% of the" in record.notes[0]
    small.machine = replace(few, memory_gib=8000 / 2**30)
    with pytest.raises(ValueError, match=r"no budget leaves .* lower data.batch_size"):
        size(small, reach=0.9)


def test_what_a_plan_takes_on_a_cpu_is_measured_of_every_strategy(
    config: RunConfig, this: Machine
) -> None:
    sizing = Sizing(config, this, batches=4, warm_up=4, depths=(2,), dense_ms=1.0)
    times = {each.strategy.name: each.planning_ms for each in sizing.planned(sizing.slots[-2:])}
    assert set(times) == {"lru", "static", "lookahead"}
    assert None not in times.values()


def test_who_orders_samples_is_told_that_this_is_not_predicted() -> None:
    fae = load(overrides=[*SMALL, "embedding.strategy=fae", "training.check_equality=false"])
    sizing = Sizing(fae, machine_of("h200", fae), batches=4, warm_up=4, depths=(2,), dense_ms=0.5)
    assert "fae orders samples, or leaves some out" in size(sizing, reach=0.9).notes[0]


def test_budgets_hold_their_slots_and_batches(sizing: Sizing, found: SizeRecord) -> None:
    width = sizing.work.row_bytes
    for each in found.options[::7]:
        budget = budget_for(each.slots, row_bytes=width, num_rows=23_050, buffer_part=1 / 64)
        assert each.budget_bytes >= budget
    least = {each.strategy: each.slots for each in reversed(found.options)}
    assert least["lru"] >= sizing.profile.floors[0]
    assert least["lookahead"] >= sizing.profile.floors[1]


def test_all_fast_is_timed_here_and_guessed_elsewhere(
    config: RunConfig, this: Machine, sizing: Sizing
) -> None:
    work = sizing.work
    here = base_of(config, this, work)
    assert here.how == "measured"
    assert here.ms > 0
    guessed = base_of(config, sizing.machine, work)
    assert (guessed.how, guessed.ms) == ("guessed", sizing.machine.host_ms)  # a small model
    assert base_of(config, sizing.machine, work, given_ms=2.0).ms > 2


@pytest.mark.parametrize("setting", ["embedding.budget=auto", "embedding.profile={folder}"])
def test_all_fast_is_timed_whatever_the_run_has_for_other_strategies(
    tmp_path: Path, setting: str, this: Machine
) -> None:
    """With tables made smaller, counts are of others."""
    save_profile(tmp_path / "p", {"cat_0": torch.arange(20_000)})
    config = load(overrides=[*SMALL, setting.format(folder=tmp_path / "p")])
    work = Work(lookups=192, unique_rows=100, row_bytes=68, table_bytes=23_050 * 68)
    assert base_of(config, this, work, most_bytes=1 << 18).how == "measured"


def test_tables_of_a_folder_are_not_made_smaller() -> None:
    """Neither where data are generated by its counts."""
    data = replace(load().data, kind="counted", folder="anywhere")
    config = replace(load(), data=data)
    work = Work(lookups=192, unique_rows=100, row_bytes=68, table_bytes=5e9)
    assert _timed(config, work, 1 << 30) is None


def test_models_of_sequences_have_a_size_too() -> None:
    config = load(overrides=["model.kind=tbsm", "data.batch_size=16", "data.samples=320"])
    sizing = Sizing(config, machine_of("h200", config), batches=4, warm_up=4, depths=(2,))
    assert size(sizing, reach=0.9).chosen.reaches


def test_where_nothing_reaches_it_the_nearest_is_told(config: RunConfig, sizing: Sizing) -> None:
    record = size(sizing, reach=1.0)
    assert record.chosen.strategy == "all-fast"
    said = r"no strategy has (100\S*%) of all-fast's speed; nearest is lookahead with (\S+%) in"
    shares = re.search(said, record.notes[0])
    assert shares is not None
    assert shares[1] != shares[2]
    assert STRATEGIES[record.best[-1].strategy].has_slots


def test_a_run_takes_auto_with_a_profile(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[data]\nrows=[2000, 30]\nbatch_size=16\nsamples=320\n")
    assert hotrow("profile", tmp_path / "run.toml", "--out", tmp_path / "p").exit_code == 0
    options = ["embedding.budget=auto", f"embedding.profile={tmp_path / 'p'}", "training.steps=3"]
    job = build(load(tmp_path / "run.toml", overrides=options))
    assert len(list(job.train())) == 3
    assert isinstance(job.config.embedding.budget, int)
    with pytest.raises(ValueError, match="budget='auto'"):
        build(load(tmp_path / "run.toml", overrides=options[:1]))


# -- simulations -------------------------------------------------------------------------


@pytest.mark.parametrize("most", [464, 465])
def test_tables_too_large_to_track_have_no_bound(most: int) -> None:
    """The trace has 465 rows."""
    config = load(overrides=["data.rows=[400, 60, 5]", "data.batch_size=16"])
    simulation = Simulation(
        config,
        OfRun(config.data, repeats=False),
        strategies=[STRATEGIES["lru"]],
        slots=[200],
        depths=[2],
        batches=4,
        warm_up=2,
        bound_rows=most,
    )
    facts, conditions = simulation.run(pins_ranks=False)
    names = [line["strategy"] for line in facts]
    assert names == (["lru"] if most == 464 else ["lru", "belady"])
    assert (facts[0]["fits_from_slots"] is None) == (most == 464)
    assert ("Slots needed" in conditions) == (most > 464)


def test_rows_that_do_not_leave_take_no_time() -> None:
    config = load()
    model = StepModel(
        config,
        machine_of("h200", config),
        lookups=2e5,
        unique_rows=5e4,
        num_rows=10**8,
        dense_ms=0.5,
    )
    lru = STRATEGIES["lru"]
    assert model.time(lru, 1e4, 0.0).ms < model.time(lru, 1e4).ms == model.time(lru, 1e4, 1e4).ms
