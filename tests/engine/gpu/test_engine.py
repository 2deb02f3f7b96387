"""Rows on a device train to the bit like the same engine with every row in fast memory.

Where there is no GPU, the engine runs on the CPU with Triton's interpreter, which is slow: few
steps of tiny batches, and a small choice of what tests/test_gpu.py tries in full.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
import hotrow.embedding.collection
import test_seam
from builders import (
    CASES,
    RULES,
    Case,
    Outcome,
    PlainRows,
    PlainTables,
    assert_close,
    budget_with_pins,
    drifting_batches,
    outcome,
    pairwise,
    readout,
    tight_budget,
    train,
    variant,
)
from hotrow.engine.gpu import planner as device_planner
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import cpu_rows
from hotrow.engine.strategy import Strategy, as_listed
from hotrow.inputs.tree import to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 5
ONE_HOT, MULTI_HOT, TWO_WIDTHS = CASES["one-hot"], CASES["multi-hot"], CASES["two-widths"]


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections on DEVICE are kept by the device's engine, also where that is the CPU."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: gpu_rows)


def build(
    case: Case, rule: str = "sgd", strategy: str | Strategy = "all-fast", **options: Any
) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        case.tables, RULES[rule], strategy=strategy, seed=3, device=DEVICE, **options
    )


def tight(
    case: Case = MULTI_HOT,
    rule: str = "adagrad",
    name: str = "lookahead",
    victims: str = "random",
    *,
    steps: int = STEPS,
    part: float = 1.0,
    **options: Any,
) -> hotrow.EmbeddingBagCollection:
    """As few slots as the batches in flight need, and victims that show every mistake."""
    strategy = replace(variant(name, victims=victims), order=as_listed)
    budget = tight_budget(case, case.batches(steps), strategy.hold, part=part)
    return build(case, rule, strategy, budget=budget, **options)


def on_device(batches: list[Any]) -> list[Any]:
    return [to_device(batch, DEVICE) for batch in batches]


def look_up(embedding: Any, batch: Any) -> Tensor:
    return readout(embedding(batch))


# -- strategies ----------------------------------------------------------------------------

CHOICES = list(
    pairwise(
        {
            "strategy": ["lookahead", "lru", "uncached", "static"],
            "victims": ["own", "random", "most-recent"],
            "budget": ["tight", "chunked", "roomy"],
        }
    )
)
# The rest takes turns, so that each of them is there.
CHOICES = [
    {**choice, "case": case, "rule": rule, "map": layout}
    for choice, case, rule, layout in zip(
        CHOICES,
        itertools.cycle(CASES),
        itertools.cycle(RULES),
        itertools.cycle(["dense", "hash", "dense"]),
        strict=False,
    )
]


@cache
def all_fast(case: str, rule: str) -> Outcome:
    return train(build(CASES[case], rule), CASES[case].batches(STEPS))


def budget_of(case: Case, batches: list[Any], strategy: Strategy, size: str, layout: str) -> Any:
    part = 0.6 if size == "chunked" else 1.0
    budget = tight_budget(case, batches, strategy.hold, part=part, dense_map=layout == "dense")
    if size != "roomy":
        return budget
    shares = [replace(share, slots=3 * share.slots) for share in budget.shares]
    return replace(budget, shares=tuple(shares))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(choice.values()))
def test_a_strategy_gives_the_bits_of_all_fast(choice: dict[str, str]) -> None:
    case = CASES[choice["case"]]
    batches = case.batches(STEPS)
    strategy = variant(choice["strategy"], victims=choice["victims"])
    budget = budget_of(case, batches, strategy, choice["budget"], choice["map"])
    embedding = build(case, choice["rule"], strategy, budget=budget)
    found = train(embedding, batches, depth=3 if strategy.overlapped else None)
    assert found.same_bits(all_fast(choice["case"], choice["rule"]))
    chunked = embedding.traffic().chunked_batches
    if choice["budget"] == "chunked":
        assert chunked > 0
    if choice["budget"] == "tight" and not strategy.pinned_part:
        assert chunked == 0
    if choice["budget"] == "tight":
        assert embedding.traffic().evicted_rows > 0


@pytest.mark.parametrize("victims", ["own", "most-recent"])
def test_learned_pins_that_are_released_lose_no_update(
    victims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_planner, "_EARLY_RELEARN", (6, 12))
    batches, strategy = drifting_batches(6), variant("static", "five", victims)
    budget = budget_with_pins(batches, strategy.hold, pins=2)
    embedding = build(ONE_HOT, "adagrad", strategy, budget=budget)
    result = train(embedding, batches)
    planner: Any = embedding.groups[0].planner
    pinned = planner.pad.row_of_slot[planner.last_use == device_planner.PINNED]
    assert set(pinned.tolist()) == {1, 61}
    assert embedding.traffic().chunked_batches == 0
    assert result.same_bits(train(build(ONE_HOT, "adagrad"), batches))


def test_the_choices_have_everything_once() -> None:
    for axis, values in (("case", CASES), ("rule", RULES), ("map", ("dense", "hash"))):
        assert {choice[axis] for choice in CHOICES} == set(values)


@pytest.mark.parametrize("case", CASES)
def test_all_fast_is_close_to_the_engine_of_the_cpu(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = list(RULES)[list(CASES).index(case) % len(RULES)]
    found = all_fast(case, rule)
    monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: cpu_rows)
    tables = CASES[case].tables
    host = hotrow.EmbeddingBagCollection(tables, RULES[rule], strategy="all-fast", seed=3)
    expected = train(host, CASES[case].batches(STEPS))
    assert found.state.keys() == expected.state.keys()
    for mine, theirs in ((found.weights, expected.weights), (found.state, expected.state)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        [loss.cpu() for loss in found.losses], expected.losses, rtol=1e-5, atol=1e-5
    )


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there it depends on who is faster")
def test_a_hold_shorter_than_computed_gives_wrong_bits() -> None:
    """Or this file could not tell right from wrong."""
    batches = ONE_HOT.batches(8)
    expected = train(build(ONE_HOT), batches)
    for past, is_right in ((1, True), (0, False)):
        embedding = tight(ONE_HOT, "sgd", victims="most-recent", steps=8)
        embedding.groups[0].planner.hold = hotrow.engine.planner.Hold(past, 0)
        assert train(embedding, batches, depth=4).same_bits(expected) is is_right


def test_traffic_is_counted_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = TWO_WIDTHS.batches(STEPS)
    embedding = tight(TWO_WIDTHS, name="lru", victims="own")
    train(embedding, batches)
    monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: cpu_rows)
    strategy = variant("lru")
    host = hotrow.EmbeddingBagCollection(
        TWO_WIDTHS.tables, RULES["adagrad"], strategy=strategy,
        budget=tight_budget(TWO_WIDTHS, batches, strategy.hold), seed=3,
    )  # fmt: skip
    train(host, batches)
    # Where two rows are equally old, the engines may choose differently.
    for found, expected in zip(
        embedding.traffic().per_table.values(), host.traffic().per_table.values(), strict=True
    ):
        assert (found.lookups, found.unique_rows) == (expected.lookups, expected.unique_rows)
        assert found.fetched_rows == pytest.approx(expected.fetched_rows, rel=0.1)
    moved = [sum(column) for column in zip(*(g.moved for g in embedding.groups), strict=True)]
    traffic = embedding.traffic()
    assert moved == [
        traffic.lookups, traffic.unique_rows, traffic.fetched_rows, traffic.evicted_rows,
    ]  # fmt: skip


# -- the seam ------------------------------------------------------------------------------


def compare(
    loop: Callable[[Any, list[Any]], list[Tensor]],
    plain_loop: Callable[[PlainTables, PlainRows, list[Any]], None] | None,
) -> None:
    """As test_seam's, for this engine."""
    batches = MULTI_HOT.batches(test_seam.STEPS)
    reference = build(MULTI_HOT, "adagrad")
    plain = PlainTables(reference)
    expected = outcome(reference, loop(reference, on_device(batches)))
    if plain_loop is not None:
        plain_loop(plain, PlainRows(plain, reference.optimizer.rule), batches)
        assert_close(reference, plain)
    embedding = tight(steps=test_seam.STEPS)
    found = outcome(embedding, loop(embedding, on_device(batches)))
    assert found.same_bits(expected)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("losses_summed_over_several_batches_are_one_step", 6),
        ("batches_pulled_together_and_trained_later_still_find_their_rows", 5),
        ("accumulate_joins_several_backward_passes_into_one_step", 6),
        ("two_calls_in_one_forward_are_one_step", 6),
        ("two_backward_passes_over_one_graph_are_two_steps", 4),
        ("forward_without_backward_changes_nothing_and_holds_nothing", 4),
        ("activation_checkpointing_recomputes_the_same_vectors", 3),
    ],
)
# Of batches that were pulled long before they are trained, the device forgets the plans.
@pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")
def test_the_seam_holds(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_seam's own loops."""
    monkeypatch.setattr(test_seam, "compare", compare)
    monkeypatch.setattr(test_seam, "STEPS", steps if DEVICE.type == "cpu" else 30)
    options = {"reentrant": True} if "checkpointing" in name else {}
    getattr(test_seam, f"test_{name}")(**options)


@pytest.mark.parametrize("part", [1.0, 0.5], ids=["tight", "chunked"])
def test_weights_get_their_gradient_from_rows_before_the_update(part: float) -> None:
    def loop(embedding: Any) -> list[Tensor]:
        scale, found = torch.tensor(1.5, device=DEVICE, requires_grad=True), []
        batches = on_device(MULTI_HOT.batches(4))
        for batch in hotrow.ahead(batches, embedding, ids=lambda b: (b.values(), b.offsets())):
            weights = batch.weights_or_none() * scale
            loss = look_up(embedding, (batch.values(), batch.offsets(), weights))
            loss.backward()
            assert scale.grad is not None
            found += [loss.detach(), scale.grad.clone()]
            scale.grad = None
        return found

    reference = build(MULTI_HOT, "adagrad")
    plain = PlainTables(reference)
    rows = PlainRows(plain, reference.optimizer.rule)
    expected = loop(reference)
    embedding = tight(part=part, steps=4)
    assert all(map(torch.equal, loop(embedding), expected))
    assert outcome(embedding, []).same_bits(outcome(reference, []))
    assert (embedding.traffic().chunked_batches > 0) is (part < 1)
    scale, wanted = torch.tensor(1.5, requires_grad=True), []
    for batch in MULTI_HOT.batches(4):
        weighted = hotrow.KeyedJaggedTensor(
            batch.keys(), batch.values(), offsets=batch.offsets(),
            weights=batch.weights_or_none() * scale,
        )  # fmt: skip
        loss = look_up(plain, weighted)
        loss.backward()
        assert scale.grad is not None
        wanted += [loss.detach(), scale.grad.clone()]
        scale.grad = None
        rows.step()
    torch.testing.assert_close([each.cpu() for each in expected], wanted, rtol=1e-4, atol=1e-4)


def test_a_step_that_is_not_finite_is_left_out() -> None:
    """Somebody looks at the sums between backward and update: they take another way."""
    batches = ONE_HOT.batches(5)
    expected = train(build(ONE_HOT, "adam"), batches[:2] + batches[3:])
    embedding = tight(ONE_HOT, "adam", steps=5, on_nonfinite="skip")
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        loss = look_up(embedding, batch)
        (loss * float("nan") if place == 2 else loss).backward()
    assert outcome(embedding, expected.losses).same_bits(expected)


def test_settings_of_each_table_reach_its_rows() -> None:
    def run(embedding: Any) -> Outcome:
        embedding.optimizer.param_groups[1]["lr"] = 0.02
        schedule = torch.optim.lr_scheduler.ExponentialLR(embedding.optimizer, 0.5)
        for batch in hotrow.ahead(ONE_HOT.batches(4), embedding):
            look_up(embedding, batch).backward()
            schedule.step()
        return outcome(embedding, [])

    expected = run(build(ONE_HOT, "adagrad"))
    assert run(tight(ONE_HOT, steps=4)).same_bits(expected)
    plain_schedule = train(build(ONE_HOT, "adagrad"), ONE_HOT.batches(4))
    assert not plain_schedule.same_bits(replace(expected, losses=plain_schedule.losses))


# -- the stream ----------------------------------------------------------------------------


def spoiled(batch: Any, feature: int) -> Any:
    """The batch with an id that the feature's table does not have."""
    if isinstance(batch, Tensor):
        batch = batch.clone()
        batch[1, feature] = 77
        return batch
    size = (batch.offsets().numel() - 1) // len(batch.keys())
    values = batch.values().clone()
    values[batch.offsets()[feature * size]] = 77
    return hotrow.KeyedJaggedTensor(batch.keys(), values, offsets=batch.offsets())


@pytest.mark.parametrize(
    ("case", "feature", "message"),
    [
        ("one-hot", 1, r"feature 'g', sample 1: id 77 is outside table 'b'.* 39 \(batch 4 of"),
        ("two-widths", 0, r"feature 'f', position \d+, sample \d+: id 77 is outside table 'a'"),
        ("two-widths", 1, r"feature 'g', position \d+, sample \d+: id 77 is outside table 'b'"),
    ],
)
def test_a_bad_id_is_told_in_its_turn_and_leaves_the_bits_of_the_steps_before(
    case: str, feature: int, message: str
) -> None:
    good = CASES[case].batches(7)
    batches = [*good[:4], spoiled(good[4], feature), *good[5:]]
    embedding = tight(CASES[case], steps=7)
    losses: list[Tensor] = []

    def loop() -> None:
        for batch in hotrow.ahead(batches, embedding):
            loss = look_up(embedding, batch)
            loss.backward()
            losses.append(loss.detach())

    with pytest.raises(ValueError, match=message):
        loop()
    reference = build(CASES[case], "adagrad")
    expected = train(reference, good[:4])
    assert len(losses) == 4
    assert outcome(embedding, losses).same_bits(expected)
    # And it goes on.
    assert train(embedding, good[5:]).same_bits(train(reference, good[5:]))


def test_a_bad_id_that_nobody_announced_is_told_and_changes_nothing() -> None:
    embedding = tight(ONE_HOT)
    good = on_device(ONE_HOT.batches(3))
    look_up(embedding, good[0]).backward()
    before = outcome(embedding, [])
    with pytest.raises(ValueError, match="feature 'f', sample 1: id 77"):
        embedding(spoiled(good[1], 0))
    assert outcome(embedding, []).same_bits(before)
    look_up(embedding, good[2]).backward()
    reference = build(ONE_HOT, "adagrad")
    for batch in (good[0], good[2]):
        look_up(reference, batch).backward()
    assert outcome(embedding, []).same_bits(outcome(reference, []))


def test_a_batch_too_large_for_the_slots_among_others_that_fit() -> None:
    """The batches behind it were planned already, and are planned again."""
    rows = torch.arange(50)
    small = [torch.stack([rows[i : i + 4], rows[i : i + 4] % 40], dim=1) for i in range(8)]
    large = torch.stack([rows[:40], rows[:40].flip(0) % 40], dim=1)
    batches = [*small[:4], large, *small[4:]]
    budget = hotrow.Budget((hotrow.Share(24, 32, False),), window_bytes=1 << 14)
    embedding = build(
        ONE_HOT, "adagrad", variant("lookahead", victims="most-recent"), budget=budget
    )
    with pytest.warns(UserWarning, match="a batch of 80 different rows does not fit the 24 slots"):
        found = train(embedding, batches)
    assert found.same_bits(train(build(ONE_HOT, "adagrad"), batches))
    assert embedding.traffic().chunked_batches == 1


def test_leaving_a_loop_early_keeps_what_was_trained_and_goes_on() -> None:
    batches = MULTI_HOT.batches(9)
    embedding, reference = tight(steps=9), build(MULTI_HOT, "adagrad")
    for begin, end in ((0, 3), (3, 4), (4, 9)):
        for place, batch in enumerate(hotrow.ahead(batches[begin:], embedding)):
            look_up(embedding, batch).backward()
            if begin + place + 1 == end:
                break
        embedding.check()
    expected = train(reference, batches)
    assert outcome(embedding, expected.losses).same_bits(expected)


def test_skipped_batches_are_not_trained_and_disturb_nothing() -> None:
    batches = MULTI_HOT.batches(STEPS)
    embedding = tight()
    for place, batch in enumerate(hotrow.ahead(batches, embedding)):
        if place % 2 == 0:
            look_up(embedding, batch).backward()
    expected = train(build(MULTI_HOT, "adagrad"), batches[::2])
    assert outcome(embedding, expected.losses).same_bits(expected)


@pytest.mark.slow
def test_victims_are_ranked_anew_when_the_window_has_grown() -> None:
    """So many slots that one ranking would serve all batches; its queue goes with the growth."""
    tables = [hotrow.EmbeddingBagConfig("t", 60_000, 4, ["f"])]
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(60_000, (size, 1), generator=generator) for size in [16] * 8 + [64] * 4
    ]
    budget = hotrow.Budget((hotrow.Share(40_000, 64, True),), window_bytes=1 << 20)
    found = []
    for strategy, options in (("all-fast", {}), ("lookahead", {"budget": budget})):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(), strategy=strategy, seed=3, device=DEVICE, **options
        )
        found.append(train(embedding, batches, depth=2))
    assert found[1].same_bits(found[0])


def test_a_larger_batch_makes_the_window_grow() -> None:
    """Which moves what waits in it, and replaces the buffers of plans."""
    rows = torch.arange(40)
    sizes = [2, 3, 2, 3, 12, 3, 30, 2, 3]
    batches = [
        torch.stack([rows[i : i + size], (rows[i : i + size] * 7) % 40], dim=1)
        for i, size in enumerate(sizes)
    ]
    embedding = build(
        ONE_HOT, "adam", variant("lookahead", victims="random"),
        budget=tight_budget(ONE_HOT, batches, variant("lookahead").hold),
    )  # fmt: skip
    found = train(embedding, batches, depth=4)
    assert found.same_bits(train(build(ONE_HOT, "adam"), batches))
    assert embedding.traffic().chunked_batches == 0


def test_batches_that_nobody_announced_are_planned_on_the_spot() -> None:
    batches = on_device(MULTI_HOT.batches(STEPS))
    found = []
    for embedding in (tight(), build(MULTI_HOT, "adagrad")):
        losses = []
        for batch in batches:
            loss = look_up(embedding, batch)
            loss.backward()
            losses.append(loss.detach())
        found.append(outcome(embedding, losses))
    assert found[0].same_bits(found[1])


@pytest.mark.parametrize("announced", [True, False], ids=["ahead", "on the spot"])
def test_ids_need_not_lie_side_by_side(announced: bool) -> None:
    """Columns cut out of a wider tensor, and the transpose of features by samples."""
    ids = ONE_HOT.batches(2)
    wide = torch.cat([ids[0], ids[0] * 0 + 99, ids[0]], dim=1)
    batches = on_device([wide])[0][:, 4:], on_device([ids[1].T.contiguous()])[0].T
    assert not any(batch.is_contiguous() for batch in batches)
    embedding = build(ONE_HOT, "adagrad")
    for batch in hotrow.ahead(batches, embedding) if announced else batches:
        look_up(embedding, batch).backward()
    expected = train(build(ONE_HOT, "adagrad"), ids)
    assert outcome(embedding, expected.losses).same_bits(expected)


@pytest.mark.parametrize("announced", [True, False], ids=["ahead", "on the spot"])
def test_a_batch_without_lookups_may_come_first(announced: bool) -> None:
    empty = hotrow.KeyedJaggedTensor(
        ["f", "g"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(4, dtype=torch.int64)
    )
    batches = [empty, *MULTI_HOT.batches(2)]
    batches[1:] = [
        hotrow.KeyedJaggedTensor(each.keys(), each.values(), offsets=each.offsets())
        for each in batches[1:]
    ]
    found = []
    for embedding in (tight(), build(MULTI_HOT, "adagrad")):
        stream = hotrow.ahead(batches, embedding) if announced else on_device(batches)
        losses = []
        for batch in stream:
            loss = look_up(embedding, batch)
            loss.backward()
            losses.append(loss.detach())
        found.append(outcome(embedding, losses))
    assert found[0].same_bits(found[1])


def test_a_loader_that_repeats_one_tensor_stays_on_the_planned_way() -> None:
    batch = on_device(ONE_HOT.batches(1))[0]
    embedding = tight(ONE_HOT)
    group = embedding.groups[0]
    for each in hotrow.ahead([batch] * 5, embedding):
        look_up(embedding, each).backward()
        assert group.slots_hold(embedding.pipeline.planned[-1].works[0])
    assert embedding.traffic().chunked_batches == 0


@pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")
def test_ids_changed_after_planning_are_looked_up_anew() -> None:
    embedding, twin = tight(ONE_HOT), build(ONE_HOT, "adagrad")
    for batch in hotrow.ahead(on_device([x.clone() for x in ONE_HOT.batches(4)]), embedding):
        batch[:, 0] = (batch[:, 0] + 1) % 60
        look_up(embedding, batch).backward()
        look_up(twin, batch).backward()
    assert outcome(embedding, []).same_bits(outcome(twin, []))


@pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")
def test_ids_of_a_batch_in_chunks_that_are_changed_are_looked_up_anew() -> None:
    """Ids that were sorted when the batch did not fit must not be taken for those of now."""
    share = hotrow.Share(3, buffer_rows=4, dense_map=True)
    budget = hotrow.Budget((share,), window_bytes=1 << 14)
    embedding, twin = build(ONE_HOT, "adagrad", "lru", budget=budget), build(ONE_HOT, "adagrad")
    for batch in hotrow.ahead(on_device([x.clone() for x in ONE_HOT.batches(4)]), embedding):
        batch[:, 0] = (batch[:, 0] + 1) % 60
        look_up(embedding, batch).backward()
        look_up(twin, batch).backward()
    assert embedding.traffic().chunked_batches
    assert outcome(embedding, []).same_bits(outcome(twin, []))


def test_several_collections_train_side_by_side() -> None:
    def run(left: Any, right: Any) -> list[Outcome]:
        model = nn.ModuleDict({"left": left, "right": right})
        for batch in hotrow.ahead(
            list(zip(MULTI_HOT.batches(4), ONE_HOT.batches(4), strict=True)),
            model,
            ids=lambda b: {"left": b[0], "right": b[1]},
        ):
            (look_up(left, batch[0]) + look_up(right, batch[1])).backward()
        return [outcome(left, []), outcome(right, [])]

    found = run(tight(steps=4), tight(ONE_HOT, steps=4))
    expected = run(build(MULTI_HOT, "adagrad"), build(ONE_HOT, "adagrad"))
    assert all(mine.same_bits(theirs) for mine, theirs in zip(found, expected, strict=True))


def test_a_profile_pins_its_hottest_rows_with_the_same_bits() -> None:
    batches = ONE_HOT.batches(3)
    profile = {t.name: torch.arange(t.num_embeddings, 0, -1) for t in ONE_HOT.tables}
    budget = hotrow.Budget((hotrow.Share(64, 32, True),), window_bytes=1 << 14)
    expected = train(build(ONE_HOT, "adagrad"), batches)
    for name in ("static", "lookahead"):
        embedding = build(ONE_HOT, "adagrad", name, budget=budget, profile=profile)
        assert train(embedding, batches).same_bits(expected)
        pinned = embedding.groups[0].planner.last_use == hotrow.engine.planner.PINNED
        assert pinned.any()


# -- evaluation, rows in and out -----------------------------------------------------------


def test_evaluating_inside_the_loop_changes_no_bit_and_reads_the_newest() -> None:
    batches, held_out = MULTI_HOT.batches(4), on_device(MULTI_HOT.batches(2, seed=9))

    def run(embedding: Any, evaluate: bool) -> tuple[Outcome, list[Tensor], Any]:
        torch.manual_seed(0)
        losses, scores = [], []
        for batch in hotrow.ahead(batches, embedding):
            loss = look_up(embedding, batch)
            loss.backward()
            losses.append(loss.detach())
            if evaluate:
                with torch.no_grad():
                    scores += [look_up(embedding, each) for each in held_out]
        return outcome(embedding, losses), scores, embedding.traffic()

    quiet, _, traffic = run(tight(steps=4), evaluate=False)
    found, scores, same_traffic = run(tight(steps=4), evaluate=True)
    expected, wanted, _ = run(build(MULTI_HOT, "adagrad"), evaluate=True)
    assert found.same_bits(quiet)
    assert found.same_bits(expected)
    assert all(map(torch.equal, scores, wanted))
    assert same_traffic == traffic


def test_rows_are_read_and_replaced_while_batches_are_in_flight() -> None:
    batches = MULTI_HOT.batches(8)
    source = build(MULTI_HOT, "adagrad")
    train(source, MULTI_HOT.batches(3, seed=5))
    embedding, reference = tight(steps=8), build(MULTI_HOT, "adagrad")
    stream = hotrow.ahead(batches, embedding)
    for batch in itertools.islice(stream, 4):
        look_up(embedding, batch).backward()
    expected = train(reference, batches[:4])
    assert outcome(embedding, expected.losses).same_bits(expected)  # batches are in flight here
    embedding.load_state_dict(source.state_dict())
    embedding.optimizer.load_state_dict(source.optimizer.state_dict())
    for batch in stream:
        look_up(embedding, batch).backward()
    expected = train(source, batches[4:])
    assert outcome(embedding, expected.losses).same_bits(expected)


def test_flush_brings_the_store_up_to_date() -> None:
    embedding = tight()
    train(embedding, MULTI_HOT.batches(STEPS))
    stored = embedding.groups[0].store.rows[:80, :5].cpu().clone()
    newest = embedding.state_dict()["embedding_bags.a.weight"]
    assert not torch.equal(stored, newest)
    embedding.row_access.flush()
    assert torch.equal(embedding.groups[0].store.rows[:80, :5].cpu(), newest)


def test_memory_is_given_back_with_the_last_reference() -> None:
    gc.collect()
    embedding = tight()
    train(embedding, MULTI_HOT.batches(3))
    gone = weakref.ref(embedding.groups[0])
    del embedding
    assert gone() is None


def test_output_in_half_precision_trains_rows_in_full() -> None:
    batches = ONE_HOT.batches(3)
    halves = [
        train(each, batches)
        for each in (
            tight(ONE_HOT, steps=3, output_dtype=torch.bfloat16),
            build(ONE_HOT, "adagrad", output_dtype=torch.bfloat16),
        )
    ]
    assert halves[0].losses[0].dtype == torch.bfloat16
    assert halves[0].same_bits(halves[1])
    whole = train(build(ONE_HOT, "adagrad"), batches)
    torch.testing.assert_close(halves[0].weights, whole.weights, rtol=0.1, atol=0.05)
    assert not torch.equal(*(x.weights["embedding_bags.a.weight"] for x in (halves[0], whole)))


@pytest.mark.parametrize("count", range(1, 13))
def test_a_jagged_index_is_read_from_its_own_table(count: int) -> None:
    """However many features a search has to tell apart."""
    names = [f"f{i}" for i in range(count)]
    tables = [
        hotrow.EmbeddingBagConfig(f"t{i}", 4, 2, [name], init=hotrow.Constant(float(i)))
        for i, name in enumerate(names)
    ]
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.SGD(lr=1.0), strategy="all-fast", device=DEVICE
    )
    lengths = torch.arange(2 * count) % 3
    values = torch.arange(int(lengths.sum())) % 4
    ids = hotrow.KeyedJaggedTensor(names, values, lengths=lengths)
    found = embedding(to_device(ids, DEVICE)).values().view(2, count, 2)[..., 0].cpu()
    expected = lengths.view(count, 2).T * torch.arange(float(count))
    assert torch.equal(found, expected)


def test_where_features_lie_is_uploaded_again_after_a_failure() -> None:
    class Full:
        def send(self, _: Any) -> None:
            raise MemoryError("no page-locked memory is left")

    tables = [hotrow.EmbeddingBagConfig(name, 9, 2, [name]) for name in ("a", "b")]
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.SGD(lr=1.0), strategy="all-fast", device=DEVICE
    )

    def look_up(lengths: list[int]) -> Tensor:
        ids = hotrow.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor(lengths))
        return embedding(to_device(ids, DEVICE)).values()

    first, second = look_up([1, 4]), look_up([3, 2])
    assert not torch.equal(first, second)
    look_up([1, 4])
    (group,) = embedding.groups
    there, group._spans_there = group._spans_there, Full()
    with pytest.raises(MemoryError):
        look_up([3, 2])
    group._spans_there = there
    assert torch.equal(look_up([3, 2]), second)


def test_a_larger_batch_makes_the_window_shorter_and_training_goes_on() -> None:
    table = hotrow.EmbeddingBagConfig("a", 5000, 4, ["a"])
    embedding = hotrow.EmbeddingBagCollection(
        [table], hotrow.SGD(lr=0.1), budget=60_000, device=DEVICE
    )
    embedding.groups[0].planner.window_bytes = 16 * 8 * 4  # room for 16 of the smaller ones
    sizes = [8] * 16 + [24] * 20
    batches = [torch.arange(size)[:, None] * 200 + 7 for size in sizes]
    done = 0
    for batch in hotrow.ahead(batches, embedding):
        embedding(batch).values().sum().backward()
        done += 1
    assert done == len(batches)


@pytest.mark.parametrize("name", ["lookahead", "scratchpipe", "lru"])
def test_a_depth_of_zero_gives_the_bits_of_all_fast(name: str) -> None:
    """Stages that were made to overlap then come one after the other."""
    embedding = tight(ONE_HOT, "sgd", name)
    assert train(embedding, ONE_HOT.batches(STEPS), depth=0).same_bits(all_fast("one-hot", "sgd"))
