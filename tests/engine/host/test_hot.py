"""Rows of which some are in fast memory and the others where the CPU updates them train like rows
that are all in fast memory: up to rounding, since a bag's hot and cold rows are summed apart.

Where a table's rows are all hot, or all cold, every sum is the one of all-fast: on a CPU the bits
are, too.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import hotrow.engine.static_hybrid
import pytest
import torch
from test_hybrid import (
    FORMS,
    TOLERANCE,
    all_fast,
    assert_like,
    clicks,
    cross,
    here,
    interleaved,
    make_late,
    on_a_gpu,
    on_gpu,
)
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

import hotrow
import test_freeze
import test_seam
from builders import CASES, RULES, Case, Outcome, build, outcome, readout, train
from hotrow.engine.host.hot import HotRows
from hotrow.engine.host.rows import HostRows
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.tree import to_device
from hotrow.sizing.simulator import simulate

MULTI_HOT = CASES["multi-hot"]
STEPS = 5  # Triton's interpreter is slow
Table = hotrow.EmbeddingBagConfig


def room_for(case: Case, slots: int = 1000) -> hotrow.Budget:
    """So many slots for each width, or all its rows."""
    widths = {table.embedding_dim for table in case.tables}
    rows = {
        dim: sum(t.num_embeddings for t in case.tables if t.embedding_dim == dim) for dim in widths
    }
    shares = [hotrow.Share(min(slots, rows[dim]), 64, dense_map=True) for dim in sorted(widths)]
    return hotrow.Budget(tuple(shares), window_bytes=0)


def some_of(case: Case, part: float) -> dict[str, Tensor]:
    """A profile by which a part of the rows of every table is used, at random."""
    draw = torch.Generator().manual_seed(5)
    sizes = {table.name: table.num_embeddings for table in case.tables}
    return {name: (torch.rand(n, generator=draw) < part).long() for name, n in sizes.items()}


def hot(
    case: Case, rule: str = "sgd", part: float = 0.5, **options: Any
) -> hotrow.EmbeddingBagCollection:
    profile = options.pop("profile", some_of(case, part))
    options = {"budget": room_for(case), "profile": profile, **options}
    return build(case, rule, "static-hybrid", **options)


def one_table_hot(rule: str = "adagrad", **options: Any) -> hotrow.EmbeddingBagCollection:
    """Of the multi-hot case; updates are as late as a GPU's."""
    embedding = hot(MULTI_HOT, rule, profile={"b": torch.ones(30)}, **options)
    make_late(embedding)
    return embedding


def by_kernels(embedding: hotrow.EmbeddingBagCollection) -> hotrow.EmbeddingBagCollection:
    """Hot rows are read and written by the GPU's kernels, which the interpreter runs."""
    for group in embedding.groups:
        assert isinstance(group.hot, HotRows)
        group._by_kernels = True
    return embedding


@pytest.fixture
def learn_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotrow.engine.static_hybrid, "_LEARN_AFTER", (2, 4, 8))


# -- against every row in fast memory ------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_it_trains_like_all_fast(case: str, rule: str) -> None:
    embedding = hot(CASES[case], rule)
    assert_like(train(embedding, CASES[case].batches(40)), all_fast(case, rule, 40))
    traffic = embedding.traffic()
    assert 0 < traffic.fetched_rows < traffic.unique_rows


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_by_a_gpus_kernels_it_trains_like_all_fast(
    case: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, "rows")
    embedding = by_kernels(hot(CASES[case], rule))
    assert_like(train(embedding, CASES[case].batches(STEPS)), all_fast(case, rule, STEPS))


@pytest.mark.parametrize("rule", RULES)
def test_whole_tables_that_are_hot_change_no_bit(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, "bags")
    found = train(one_table_hot(rule), MULTI_HOT.batches(40))
    assert found.same_bits(all_fast("multi-hot", rule, 40))


@pytest.mark.parametrize("rule", RULES)
def test_where_nothing_is_hot_it_is_hybrid(rule: str) -> None:
    embedding = hot(MULTI_HOT, rule, profile={})
    expected = train(build(MULTI_HOT, rule, "hybrid"), MULTI_HOT.batches(20))
    assert train(embedding, MULTI_HOT.batches(20)).same_bits(expected)
    assert embedding.num_slots == 0


@pytest.mark.parametrize("rule", RULES)
def test_where_everything_is_hot_nothing_moves(rule: str) -> None:
    embedding = hot(MULTI_HOT, rule, part=1.1)
    found = train(embedding, MULTI_HOT.batches(20))
    assert found.same_bits(all_fast("multi-hot", rule, 20))
    traffic = embedding.traffic()
    assert traffic.fetched_rows == traffic.evicted_rows == 0
    assert traffic.hit_rate == 1
    assert embedding.num_slots == 110


@pytest.mark.thinned(2)
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
def test_odd_batches_train_like_all_fast(
    batch: Any, pooling: str, hot_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, "rows")
    table = Table("t", 50, 4, ["f"], padding_idx=7, pooling=pooling)
    case = Case([table], lambda _: batch)
    counts = torch.tensor(hot_rows, dtype=torch.int64), torch.ones(len(hot_rows))
    found = by_kernels(hot(case, "adam", profile={"t": counts}))
    assert found.num_slots == len(hot_rows)
    results = [train(each, [batch] * 3) for each in (found, build(case, "adam"))]
    assert_like(*results)


# -- loops, and whoever looks --------------------------------------------------------------


def compare(loop: test_seam.Loop, plain_loop: Any) -> None:
    batches = MULTI_HOT.batches(test_seam.STEPS)
    reference = build(MULTI_HOT, "adagrad")
    expected = outcome(reference, loop(reference, batches))
    embedding = hot(MULTI_HOT, "adagrad")
    make_late(embedding)
    assert_like(outcome(embedding, loop(embedding, batches)), expected)


@pytest.mark.parametrize(
    "name",
    [
        "losses_summed_over_several_batches_are_one_step",
        "accumulate_joins_several_backward_passes_into_one_step",
        "two_calls_in_one_forward_are_one_step",
        "two_backward_passes_over_one_graph_are_two_steps",
        "forward_without_backward_changes_nothing_and_holds_nothing",
        "batches_pulled_together_and_trained_later_still_find_their_rows",
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_users_loops_give_what_all_fast_gives(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, form)
    monkeypatch.setattr(test_seam, "compare", compare)
    monkeypatch.setattr(test_seam, "STEPS", 10 if form == "rows" else 30)
    getattr(test_seam, f"test_{name}")()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("activation_checkpointing_recomputes_the_same_vectors", {"reentrant": False}),
        ("per_sample_weights_get_their_gradient_from_rows_before_the_update", {}),
        ("an_exception_inside_accumulate_changes_no_row", {}),
        ("a_grad_scaler_is_served_and_its_skipped_steps_are_skipped", {}),
        ("leaving_a_loop_early_keeps_what_was_trained_and_starts_anew", {}),
        ("skipped_batches_are_not_trained_and_disturb_nothing", {}),
        ("a_backward_pass_that_fails_changes_no_row", {}),
        ("a_bad_id_at_step_100_leaves_exactly_the_bits_of_step_99", {}),
        ("state_dict_has_torchrecs_keys_and_the_newest_rows", {}),
        ("loading_a_state_dict_in_mid_flight_replaces_every_weight", {}),
        ("flush_brings_the_store_up_to_date", {}),
        ("a_gradient_that_is_not_finite_can_be_skipped", {}),
        ("a_gradient_that_is_not_finite_is_an_error_that_names_table_and_step", {}),
    ],
)
def test_what_holds_for_slots_holds_here(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of test_seam, to the bit."""

    def with_hot_rows(*_: str, rule: str = "adagrad", **settings: Any) -> Any:
        return one_table_hot(rule, **settings)

    cross(monkeypatch, "bags")
    monkeypatch.setattr(test_seam, "tight", with_hot_rows)
    getattr(test_seam, f"test_{name}")(**options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_updates_start_from_the_newest_rows(
    rule: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross(monkeypatch, form)
    embedding = hot(MULTI_HOT, rule)
    make_late(embedding)
    assert_like(interleaved(embedding), interleaved(build(MULTI_HOT, rule)))


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
def test_whoever_looks_sees_what_backward_has_done(look: str, part: float) -> None:
    batch, seen = MULTI_HOT.batches(1)[0], []
    late = hot(MULTI_HOT, "adagrad", part)
    make_late(late)
    for embedding in (build(MULTI_HOT, "adagrad"), late):
        before = LOOKS[look](embedding, batch).clone()
        embedding.train()
        readout(embedding(batch)).backward()
        seen.append(LOOKS[look](embedding, batch))
        assert not torch.equal(seen[-1], before)
    torch.testing.assert_close(*seen, **TOLERANCE)


def test_weights_that_are_loaded_reach_hot_rows_and_cold_ones() -> None:
    embedding, twin = hot(MULTI_HOT, "adam"), build(MULTI_HOT, "adam")
    first, second = MULTI_HOT.batches(10), MULTI_HOT.batches(10, seed=1)
    for each in (embedding, twin):
        train(each, first)
        each.load_weights("a", 7, torch.linspace(0, 1, 250).view(50, 5))
    assert torch.equal(
        embedding.state_dict()["embedding_bags.a.weight"][7:57],
        torch.linspace(0, 1, 250).view(50, 5),
    )
    assert_like(train(embedding, second), train(twin, second))


def test_evaluation_in_between_changes_nothing() -> None:
    batches, others = MULTI_HOT.batches(20), MULTI_HOT.batches(20, seed=9)
    results = []
    for looks in (False, True):
        embedding = hot(MULTI_HOT, "adagrad")
        make_late(embedding)
        losses = []
        for batch, other in zip(hotrow.ahead(batches, embedding), others, strict=True):
            loss = readout(embedding(batch))
            if looks:
                embedding.eval()
                with torch.no_grad():
                    embedding(other)
                embedding.train()
            loss.backward()
            losses.append(loss.detach())
        results.append(outcome(embedding, losses))
    assert results[0].same_bits(results[1])


def test_tables_keep_their_own_settings() -> None:
    results = []
    for embedding in (hot(CASES["one-hot"], "adamw"), build(CASES["one-hot"], "adamw")):
        schedule = ExponentialLR(embedding.optimizer, 0.8)
        embedding.optimizer.param_groups[1]["lr"] = 0.07
        losses = []
        for batch in hotrow.ahead(CASES["one-hot"].batches(10), embedding):
            loss = readout(embedding(batch))
            loss.backward()
            losses.append(loss.detach())
            schedule.step()
        results.append(outcome(embedding, losses))
    assert_like(*results)


def test_a_gpus_kernels_keep_the_settings_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotrow.engine.static_hybrid, "_CHUNK_ROWS", 7)
    case = CASES["shared"]
    results = []
    for embedding in (by_kernels(hot(case, "adagrad")), build(case, "adagrad")):
        embedding.optimizer.param_groups[1]["lr"] = 0.7
        results.append(train(embedding, case.batches(3)))
    assert_like(*results)
    others = build(case, "adagrad")
    with pytest.raises(AssertionError):
        assert_like(results[0], train(others, case.batches(3)))


@pytest.mark.parametrize("rule", RULES)
def test_frozen_rows_stay_whether_hot_or_cold(rule: str) -> None:
    case = CASES["two-widths"]
    right = test_freeze.put_back(hot(case, rule), case)
    embedding = hot(case, rule)
    assert test_freeze.trained(embedding, case).same_bits(right)
    assert embedding.memory()["which slots are frozen"] > 0
    assert not right.same_bits(train(hot(case, rule), case.batches(test_freeze.STEPS)))


def test_a_gpus_kernels_leave_frozen_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cross(monkeypatch, "rows")
    case = CASES["one-hot"]
    right = test_freeze.put_back(by_kernels(hot(case, "adam")), case)
    assert test_freeze.trained(by_kernels(hot(case, "adam")), case).same_bits(right)


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
@pytest.mark.parametrize("rule", RULES)
def test_other_rows_can_be_pinned_between_two_runs(rule: str) -> None:
    embedding = build(MULTI_HOT, rule, "static-hybrid", budget=room_for(MULTI_HOT, 40))
    (group,) = embedding.groups
    assert isinstance(group.hot, HotRows)
    make_late(embedding)
    batches, losses = MULTI_HOT.batches(40), list[Tensor]()
    for first in range(0, 40, 10):
        rows = torch.randperm(110, generator=torch.Generator().manual_seed(first))
        group.pin_rows(rows)
        assert group.hot.ids.tolist() == sorted(rows[:40].tolist())
        losses += train(embedding, batches[first : first + 10]).losses
    assert_like(outcome(embedding, losses), all_fast("multi-hot", rule, 40))
    assert group.hot.version == 5  # nothing was learned


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("learn_early")
@pytest.mark.parametrize("rule", RULES)
def test_without_a_profile_it_learns_and_changes_nothing_by_it(rule: str) -> None:
    embedding = build(MULTI_HOT, rule, "static-hybrid", budget=room_for(MULTI_HOT, 60))
    (group,) = embedding.groups
    assert isinstance(group.hot, HotRows)
    make_late(embedding)
    assert group.hot.ids.tolist() == list(range(80, 110))  # a small table is hot as a whole
    batches = MULTI_HOT.batches(40)
    found = train(embedding, batches)
    assert_like(found, all_fast("multi-hot", rule, 40))
    assert group.hot._seen is None
    assert group.hot.version >= 3  # two times at least
    firsts = [each.values()[: each.offsets()[len(each.offsets()) // 2]] for each in batches[:8]]
    uses = torch.bincount(torch.cat([ids.unique() for ids in firsts]), minlength=80)
    learned = group.hot.ids[group.hot.ids < 80]
    assert torch.equal(learned, (uses > 1).nonzero().squeeze(1))
    before = embedding.traffic()
    train(embedding, MULTI_HOT.batches(20, seed=1))
    after = embedding.traffic()
    lookups, moved = after.lookups - before.lookups, after.fetched_rows - before.fetched_rows
    assert moved < 0.4 * lookups


@pytest.mark.usefixtures("learn_early")
def test_gradients_of_before_find_rows_that_became_hot_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hotrow.engine.static_hybrid, "_CHUNK_ROWS", 7)

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

    embedding = build(MULTI_HOT, "adam", "static-hybrid", budget=room_for(MULTI_HOT, 80))
    make_late(embedding)
    assert_like(run(embedding), run(build(MULTI_HOT, "adam")))
    assert len(embedding.groups[0].hot.ids) > 30


@pytest.mark.usefixtures("learn_early")
def test_frozen_rows_stay_when_they_become_hot() -> None:
    embedding = build(MULTI_HOT, "adagrad", "static-hybrid", budget=room_for(MULTI_HOT, 80))
    embedding.freeze_rows({"a": torch.arange(20), "b": torch.arange(5)})
    before = embedding.state_dict()
    train(embedding, MULTI_HOT.batches(12))
    after = embedding.state_dict()
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
    sizes = [4 * group.width * (len(group.slots)) for group in embedding.groups]
    assert memory["slots"] == sum(sizes)
    assert 0.65 * budget < memory["slots"] < sum(memory.values()) <= budget


def test_it_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="strategy 'static-hybrid' needs a budget"):
        build(MULTI_HOT, strategy="static-hybrid")


def test_its_contract_is_stated_and_its_traffic_is_that_of_static() -> None:
    strategy = STRATEGIES["static-hybrid"]
    assert strategy.contract == "exact up to rounding"
    assert strategy.keeps_rows
    assert not strategy.has_slots
    with pytest.raises(ValueError, match="as with static, which can be simulated"):
        simulate([torch.tensor([1])], num_rows=9, choices=[(strategy, 3)])


def test_memory_is_given_back_with_the_last_reference() -> None:
    embedding = hot(MULTI_HOT)
    make_late(embedding)
    train(embedding, MULTI_HOT.batches(3))
    readout(embedding(MULTI_HOT.batches(1)[0])).backward()  # an update is owed
    gone = weakref.ref(embedding.groups[0])
    gc.collect()
    gc.disable()
    try:
        del embedding
        assert gone() is None
    finally:
        gc.enable()


def test_vectors_are_as_wide_as_asked_for() -> None:
    batch = MULTI_HOT.batches(1)[0]
    wide, narrow = build(MULTI_HOT), hot(MULTI_HOT, output_dtype=torch.bfloat16)
    expected, found = wide(batch), narrow(batch)
    for name in ("f", "g"):
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].float(), expected[name], rtol=2e-2, atol=2e-2)


# -- on a GPU ------------------------------------------------------------------------------


@on_a_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", ["fewer bytes", *FORMS])
def test_on_a_gpu_it_trains_like_all_fast(
    case: str, rule: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what in FORMS:
        cross(monkeypatch, what)
    found = train(hot(CASES[case], rule, device="cuda"), CASES[case].batches(40))
    assert_like(here(found), here(all_fast(case, rule, 40, "cuda")))


@on_a_gpu
@pytest.mark.usefixtures("learn_early")
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_it_learns_and_changes_nothing_by_it(rule: str) -> None:
    options = {"budget": room_for(MULTI_HOT, 60), "device": "cuda"}
    embedding = build(MULTI_HOT, rule, "static-hybrid", **options)
    found = train(embedding, MULTI_HOT.batches(40))
    assert_like(here(found), here(all_fast("multi-hot", rule, 40, "cuda")))
    assert embedding.groups[0].hot.version >= 3


@on_a_gpu
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_loops_of_all_kinds_give_what_all_fast_gives(rule: str) -> None:
    def run(embedding: hotrow.EmbeddingBagCollection) -> Outcome:
        first, second, third = on_gpu(MULTI_HOT.batches(3))
        one, two = readout(embedding(first)), readout(embedding(second))
        one.backward(retain_graph=True)
        two.backward()
        with embedding.accumulate():
            readout(embedding(third)).backward()
            readout(embedding(first)).backward()
        one.backward()
        return here(outcome(embedding, [one.detach(), two.detach()]))

    assert_like(
        run(hot(MULTI_HOT, rule, device="cuda")), run(build(MULTI_HOT, rule, device="cuda"))
    )


@on_a_gpu
@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_on_a_gpu_frozen_rows_stay_whether_hot_or_cold(rule: str) -> None:
    case = CASES["two-widths"]
    right = test_freeze.put_back(hot(case, rule, device="cuda"), case)
    assert test_freeze.trained(hot(case, rule, device="cuda"), case).same_bits(right)


@on_a_gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("learns", [False, True])
def test_on_a_gpu_large_batches_keep_their_rows_apart(
    form: str, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So large that copies are still under way when the next thing is launched."""
    cross(monkeypatch, form)
    monkeypatch.setattr(hotrow.engine.static_hybrid, "_LEARN_AFTER", (3, 6, 9))
    rows, size, features = 200_000, 8192, 8
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.rand(size, features, generator=draw) for _ in range(12)]
    batches = [(each**4 * rows).long().pin_memory() for each in drawn]
    tables = [Table(f"t{i}", rows, 64, [f"f{i}"]) for i in range(features)]
    counts = torch.zeros(rows)
    counts[: rows // 20] = torch.arange(rows // 20, 0, -1).float()
    profile = None if learns else {table.name: counts for table in tables}
    results = []
    for options in (
        {"strategy": "all-fast"},
        {"strategy": "static-hybrid", "budget": "5%", "profile": profile},
    ):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.RowWiseAdagrad(lr=0.05), device="cuda", seed=0, **options
        )
        for ids in hotrow.ahead(batches, embedding):
            vectors = embedding(ids).values()
            vectors.backward((vectors.detach().sin() + 0.01) / 256)
        embedding.check()
        results.append(embedding.state_dict())
    torch.testing.assert_close(*results, **TOLERANCE)
    assert embedding.traffic().hit_rate > 0.2


@on_a_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_on_a_gpu_the_trainer_trains_it_in_cut_steps(compiled: bool) -> None:
    from hotrow.models import DLRM

    results = []
    for strategy in ("static-hybrid", "all-fast"):
        tables = [Table(f"t{i}", n, 16, [f"f{i}"]) for i, n in enumerate((5000, 300, 20000, 40))]
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.RowWiseAdagrad(lr=0.05), "10%", strategy=strategy, device="cuda", seed=0
        )
        model = DLRM(embedding, 13, (64, 16), (64, 1), generator=torch.Generator().manual_seed(3))
        model.to("cuda")
        trainer: hotrow.Trainer[Any] = hotrow.Trainer(
            model,
            torch.nn.functional.binary_cross_entropy_with_logits,
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            ids=lambda batch: batch.sparse,
            device="cuda",
            compile=compiled,
        )
        losses = [record.loss for record in trainer.run(clicks())]
        results.append((losses, {key: each.cpu() for key, each in model.state_dict().items()}))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-3)


def test_a_cut_step_reads_hot_rows_too() -> None:
    """The places where a captured step is cut are filled from both."""
    embedding = hot(CASES["one-hot"])
    (group,) = embedding.groups
    batch = to_device(CASES["one-hot"].batches(1)[0], embedding.device)
    arrival = embedding.pipeline.prepare(batch)
    (work,) = arrival.works
    work.berth = 0
    assert isinstance(group, HostRows)
    cut = group.make_boundary(work)
    group.load_vectors(work, cut)
    expected = build(CASES["one-hot"])(batch)
    torch.testing.assert_close(
        cut.vectors.view(len(batch), 2, 4)[:, 0], expected["f"].detach(), **TOLERANCE
    )
