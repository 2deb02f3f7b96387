"""Rows of which some are in fast memory and the others where the CPU updates them train like rows
that are all in fast memory: up to rounding, since a bag's hot and cold rows are summed apart.

Where a table's rows are all hot, or all cold, every sum is the one of all-fast: on a CPU the bits
are, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import ALL_RULES, CASES, RULES, Case, Outcome, build, outcome, readout, train
from contracts import (
    TOLERANCE,
    all_fast,
    as_on_gpu,
    assert_like,
    hot,
    learning,
    on_device,
    room_for,
)
from hotrow.engine.host.hot import HotRows
from hotrow.engine.host.rows import HostRows
from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.simulator import simulate

MULTI_HOT = CASES["multi-hot"]
FORMS = ["rows", "bags"]
STEPS = 4  # Triton's interpreter is slow
Table = hotrow.EmbeddingBagConfig
each_rule = pytest.mark.parametrize("rule", RULES)


def by_kernels(
    case: Case, rule: str = "sgd", form: str = "rows", **options: Any
) -> hotrow.EmbeddingBagCollection:
    """Hot rows are read and written by the GPU's kernels, which the interpreter runs."""
    return as_on_gpu(hot(case, rule, **options), form, late=False, by_kernels=True)


# -- against every row in fast memory ------------------------------------------------------


@pytest.mark.thinned(7)  # each rule with another case
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", ALL_RULES)
def test_it_trains_like_all_fast(case: str, rule: str) -> None:
    embedding = hot(CASES[case], rule)
    assert_like(train(embedding, CASES[case].batches(40)), all_fast(case, rule, 40))
    traffic = embedding.traffic()
    assert 0 < traffic.fetched_rows < traffic.unique_rows


@pytest.mark.thinned(7)  # each rule with another case
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_by_a_gpus_kernels_it_trains_like_all_fast(case: str, rule: str) -> None:
    found = train(by_kernels(CASES[case], rule), CASES[case].batches(STEPS))
    assert_like(found, all_fast(case, rule, STEPS))


@each_rule
def test_whole_tables_that_are_hot_change_no_bit(rule: str) -> None:
    embedding = as_on_gpu(hot(MULTI_HOT, rule, profile={"b": torch.ones(30)}), "bags")
    found = train(embedding, MULTI_HOT.batches(8))
    assert found.same_bits(all_fast("multi-hot", rule, 8))


@pytest.mark.parametrize("rule", RULES)
def test_where_nothing_is_hot_it_is_hybrid(rule: str) -> None:
    embedding = hot(MULTI_HOT, rule, profile={})
    expected = train(build(MULTI_HOT, rule, "hybrid"), MULTI_HOT.batches(8))
    assert train(embedding, MULTI_HOT.batches(8)).same_bits(expected)
    assert embedding.num_slots == 0


@pytest.mark.parametrize("rule", ALL_RULES)
def test_where_everything_is_hot_nothing_moves(rule: str) -> None:
    embedding = hot(MULTI_HOT, rule, part=1.1)
    found = train(embedding, MULTI_HOT.batches(8))
    assert found.same_bits(all_fast("multi-hot", rule, 8))
    traffic = embedding.traffic()
    assert traffic.fetched_rows == traffic.evicted_rows == 0
    assert traffic.hit_rate == 1
    assert embedding.num_slots == 110


@pytest.mark.thinned(13)
@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor([[7], [3], [3], [7], [9]]),
        torch.empty(0, 1, dtype=torch.int64),
        hotrow.KeyedJaggedTensor(["f"], torch.tensor([7, 7]), lengths=torch.tensor([2, 0])),
        hotrow.KeyedJaggedTensor(
            ["f"], torch.tensor([3] * 200 + [7, 9, 3]), lengths=torch.tensor([150, 0, 50, 3])
        ),
        hotrow.KeyedJaggedTensor(
            ["f"], torch.empty(0, dtype=torch.int64), lengths=torch.tensor([0, 0])
        ),
    ],
    ids=["one each", "no samples", "padding alone", "a row 201 times", "empty bags"],
)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("hot_rows", [[3], [9], [3, 9], []])
@pytest.mark.parametrize("form", FORMS)
def test_odd_batches_train_like_all_fast(
    batch: Any, pooling: str, hot_rows: list[int], form: str
) -> None:
    table = Table("t", 50, 4, ["f"], padding_idx=7, pooling=pooling)
    case = Case([table], lambda _: batch)
    counts = torch.tensor(hot_rows, dtype=torch.int64), torch.ones(len(hot_rows))
    found = by_kernels(case, "adam", form, profile={"t": counts})
    assert found.num_slots == len(hot_rows)
    results = [train(each, [batch] * 2) for each in (found, build(case, "adam"))]
    assert_like(*results)


# -- rows are the newest for every reader -------------------------------------------------


LOOKS: dict[str, Callable[..., Tensor]] = {
    "weights": lambda embedding, _: embedding.state_dict()["embedding_bags.a.weight"],
    "rows": lambda embedding, _: next(iter(embedding.rows("a")))[1],
    "some rows": lambda embedding, _: next(iter(embedding.weights_at("a", torch.arange(40))))[1],
    "state": lambda embedding, _: embedding.optimizer.state_dict()["state"]["a"]["sum"],
    "lookup": lambda embedding, batch: embedding(batch)["f"],
    "store": lambda embedding, _: (
        embedding.row_access.flush() or embedding.groups[0].store.rows.clone()
    ),
    "evaluation": lambda embedding, batch: embedding.eval()(batch)["f"],
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("part", [0.0, 0.5, 1.1])
def test_every_reader_sees_what_backward_has_done(look: str, part: float) -> None:
    batch, seen = MULTI_HOT.batches(1)[0], []
    late = as_on_gpu(hot(MULTI_HOT, "adagrad", part))
    for embedding in (build(MULTI_HOT, "adagrad"), late):
        before = LOOKS[look](embedding, batch).clone()
        embedding.train()
        readout(embedding(batch)).backward()
        seen.append(LOOKS[look](embedding, batch))
        assert not torch.equal(seen[-1], before)
    torch.testing.assert_close(*seen, **TOLERANCE)


@pytest.mark.parametrize("rule", ["adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_gpus_kernels_keep_settings_of_tables_and_frozen_rows(rule: str) -> None:
    case, results = CASES["shared"], []
    for embedding in (by_kernels(case, rule), build(case, rule), build(case, rule)):
        if len(results) < 2:
            embedding.optimizer.param_groups[1]["lr"] = 0.7
            embedding.freeze_rows({"a": torch.arange(0, 60, 2), "b": torch.arange(5)})
        results.append(train(embedding, case.batches(3)))
    assert_like(*results[:2])
    with pytest.raises(AssertionError):
        assert_like(results[0], results[2])


# -- which rows are hot --------------------------------------------------------------------


def test_the_hottest_rows_of_a_profile_are_hot_and_padding_is_not() -> None:
    case = Case([Table("t", 50, 4, ["f"], padding_idx=7)], lambda _: torch.tensor([[1]]))
    counts = torch.zeros(50)
    counts[[3, 7, 20, 41]] = torch.tensor([5.0, 9.0, 2.0, 8.0])
    embedding = hot(case, profile={"t": counts}, budget=room_for(case, 2))
    (group,) = embedding.groups
    assert isinstance(group.hot, HotRows)
    assert group.hot.ids.tolist() == [3, 41]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rule", ALL_RULES)
def test_other_rows_can_be_pinned_between_two_runs(rule: str) -> None:
    embedding = build(MULTI_HOT, rule, "static-hybrid", budget=room_for(MULTI_HOT, 40))
    (group,) = as_on_gpu(embedding, "bags").groups
    assert isinstance(group.hot, HotRows)
    batches, losses = MULTI_HOT.batches(40), list[Tensor]()
    for first in range(0, 40, 10):
        rows = torch.randperm(110, generator=torch.Generator().manual_seed(first))
        group.pin_rows(rows)
        assert group.hot.ids.tolist() == sorted(rows[:40].tolist())
        losses += train(embedding, batches[first : first + 10]).losses
    assert_like(outcome(embedding, losses), all_fast("multi-hot", rule, 40))
    assert group.hot._version == 5  # nothing was learned


@pytest.mark.thinned(2)
@each_rule
def test_without_a_profile_it_learns_and_changes_nothing_by_it(rule: str) -> None:
    embedding = as_on_gpu(learning(rule, 60), "bags")
    (group,) = embedding.groups
    assert isinstance(group.hot, HotRows)
    assert group.hot.ids.tolist() == list(range(80, 110))  # a small table is hot as a whole
    batches = MULTI_HOT.batches(40)
    found = train(embedding, batches)
    assert_like(found, all_fast("multi-hot", rule, 40))
    assert group.hot._seen is None
    assert group.hot._version >= 3  # two times at least
    firsts = [each.values()[: each.offsets()[len(each.offsets()) // 2]] for each in batches[:8]]
    uses = torch.bincount(torch.cat([ids.unique() for ids in firsts]), minlength=80)
    learned = group.hot.ids[group.hot.ids < 80]
    assert torch.equal(learned, (uses > 1).nonzero().squeeze(1))
    before = embedding.traffic()
    train(embedding, MULTI_HOT.batches(20, seed=1))
    after = embedding.traffic()
    lookups, moved = after.lookups - before.lookups, after.fetched_rows - before.fetched_rows
    assert moved < 0.4 * lookups


def test_gradients_of_before_find_rows_that_became_hot_since() -> None:
    def run(embedding: hotrow.EmbeddingBagCollection) -> Outcome:
        first, *others = MULTI_HOT.batches(6)
        late = readout(embedding(first))
        losses = [late.detach()]
        for batch in others:
            loss = readout(embedding(batch))
            loss.backward()
            losses.append(loss.detach())
        late.backward()
        return outcome(embedding, losses)

    embedding = as_on_gpu(learning("adam", 80))
    assert_like(run(embedding), run(build(MULTI_HOT, "adam")))
    assert len(embedding.groups[0].hot.ids) > 30


def test_frozen_rows_stay_when_they_become_hot() -> None:
    embedding = learning("adagrad", 80)
    embedding.freeze_rows({"a": torch.arange(20), "b": torch.arange(5)})
    before = embedding.state_dict()
    train(embedding, MULTI_HOT.batches(12))
    after = embedding.state_dict()
    assert embedding.memory()["which slots are frozen"] > 0
    assert len(embedding.groups[0].hot.ids) > 30
    for table, count in (("a", 20), ("b", 5)):
        key = f"embedding_bags.{table}.weight"
        assert torch.equal(after[key][:count], before[key][:count])
        assert not torch.equal(after[key], before[key])


# -- what it is ----------------------------------------------------------------------------


def test_only_cold_rows_count_as_moved() -> None:
    case = CASES["unpooled"]  # has padding
    embedding, twin = hot(case, "adam"), build(case, "adam")
    for each in (embedding, twin):
        train(each, case.batches(6))
    (group,) = embedding.groups
    is_hot = torch.zeros(group.layout.num_rows, dtype=torch.bool)
    is_hot[group.hot.ids] = True
    moved = 0
    for batch in case.batches(6):
        moved += int((~is_hot[twin.pipeline.prepare(batch).works[0].ids.ids]).sum())
    found, expected = embedding.traffic(), twin.traffic()
    assert found.fetched_rows == found.evicted_rows == moved > 0
    assert found.bytes_fetched == moved * 3 * 4 + found.loaded_rows * 9 * 4  # with their state
    for name, each in expected.per_table.items():
        mine = found.per_table[name]
        assert (mine.lookups, mine.unique_rows) == (each.lookups, each.unique_rows)
    assert group.counters.moved == [found.lookups, found.unique_rows, moved, moved]


@pytest.mark.parametrize("rule", RULES)
def test_hot_rows_are_counted_and_within_the_budget(rule: str) -> None:
    tables = [Table("a", 20_000, 64, ["f"]), Table("b", 30_000, 32, ["g"])]
    ids = torch.randint(20_000, (64, 2), generator=torch.Generator().manual_seed(0))
    profile = {"a": torch.ones(20_000), "b": torch.ones(30_000)}
    embedding = hotrow.EmbeddingBagCollection(
        tables, RULES[rule], "20%", strategy="static-hybrid", profile=profile
    )
    train(embedding, [ids] * 2)
    memory, budget = embedding.memory(), embedding.bytes_total // 5
    sizes = [4 * group.width * (len(group.hot.slots)) for group in embedding.groups]
    assert memory["slots"] == sum(sizes)
    assert 0.65 * budget < memory["slots"] < sum(memory.values()) <= budget


def test_it_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="strategy 'static-hybrid' needs a budget"):
        build(MULTI_HOT, strategy="static-hybrid")


def test_its_traffic_is_that_of_static() -> None:
    strategy = STRATEGIES["static-hybrid"]
    with pytest.raises(ValueError, match="as with static, which can be simulated"):
        simulate([torch.tensor([1])], num_rows=9, choices=[(strategy, 3)])


def test_a_cut_step_reads_hot_rows_too() -> None:
    """The places where a captured step is cut are filled from both."""
    embedding = hot(CASES["one-hot"])
    (group,) = embedding.groups
    (batch,) = on_device(CASES["one-hot"].batches(1), embedding.device)
    arrival = embedding.pipeline.prepare(batch)
    (work,) = arrival.works
    work.berth = 0
    assert isinstance(group, HostRows)
    boundary = group.capture.boundary(work)
    boundary.load(work)
    expected = build(CASES["one-hot"])(batch)
    torch.testing.assert_close(
        boundary.vectors.view(len(batch), 2, 4)[:, 0], expected["f"].detach(), **TOLERANCE
    )
