"""Rows on a GPU: strategies in every form, and what the GPU's engine has of its own.

tests/engine/test_contract.py has what holds for all engines. Where there is no GPU, Triton's
interpreter runs the kernels, which is slow: tests/engine/gpu/test_on_gpu.py tries more.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts
import hotrow
from builders import (
    CASES,
    RULES,
    budget_with_pins,
    build,
    check_chunks,
    collection_of,
    drifting_batches,
    outcome,
    pairwise,
    readout,
    tight_budget,
    train,
    variant,
)
from contracts import (
    DEVICE,
    ENGINES,
    GpuEngine,
    assert_like,
    by_gpu,
    looking_ahead,
    on_device,
)
from hotrow.engine.gpu import planner, scratchpad
from hotrow.engine.gpu.planner import DevicePlanner
from hotrow.engine.gpu.planning import DevicePlanning
from hotrow.engine.rules import PINNED
from hotrow.engine.stages import FUSED
from hotrow.engine.tuning import Tuning
from hotrow.kernels.triton import words

STEPS = 6
ONE_HOT, TWO_WIDTHS = CASES["one-hot"], CASES["two-widths"]
PLAIN = ENGINES["zero-copy"]
all_fast = partial(contracts.all_fast, steps=STEPS, device="gpu")

# -- strategies --------------------------------------------------------------------------

CHOICES = [
    {**choice, "case": case, "rule": rule, "map": layout}
    for choice, case, rule, layout in zip(
        pairwise(
            {
                "strategy": ["lookahead", "lru", "uncached", "static", "scratchpipe"],
                "fill": ["zero-copy", "bulk", "staged"],
                "victims": ["own", "random", "most-recent"],
                "budget": ["tight", "chunked", "roomy"],
            }
        ),
        itertools.cycle(CASES),
        itertools.cycle(RULES),
        itertools.cycle(["dense", "hash", "dense"]),
        strict=False,
    )
]


def all_of(case: str, rule: str) -> hotrow.EmbeddingBagCollection:
    return build(CASES[case], rule, **by_gpu())


@pytest.mark.thinned(5)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(choice.values()))
def test_a_strategy_gives_the_bits_of_all_fast(choice: dict[str, str]) -> None:
    batches, staged = CASES[choice["case"]].batches(STEPS), choice["fill"] == "staged"
    is_split = staged and variant(choice["strategy"]).stages is FUSED
    choice = {**choice, "schedule": "split" if is_split else ""}
    embedding = collection_of(choice, batches, fill=choice["fill"], **by_gpu())
    found = train(embedding, batches, depth=3 if embedding.strategy.overlapped else None)
    assert found.same_bits(all_fast(choice["case"], choice["rule"]))
    check_chunks(choice, embedding)
    assert embedding.traffic().evicted_rows > 0 or choice["budget"] != "tight"


def test_the_choices_have_everything_once() -> None:
    for axis, values in (("case", CASES), ("rule", RULES), ("map", ("dense", "hash"))):
        assert {choice[axis] for choice in CHOICES} == set(values)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES)
def test_all_fast_is_close_to_the_engine_of_the_cpu(case: str) -> None:
    rule = list(RULES)[list(CASES).index(case) % len(RULES)]
    assert_like(all_fast(case, rule), train(build(CASES[case], rule), CASES[case].batches(STEPS)))


def test_traffic_is_counted_as_on_the_cpu() -> None:
    batches = TWO_WIDTHS.batches(STEPS)
    budget = tight_budget(TWO_WIDTHS, batches, variant("lru").hold)
    embedding, on_cpu = (
        build(TWO_WIDTHS, "adagrad", "lru", budget=budget, **options) for options in (by_gpu(), {})
    )
    for each in (embedding, on_cpu):
        train(each, batches)
    # Where two rows are equally old, the engines may choose differently.
    for name, expected in on_cpu.traffic().per_table.items():
        found = embedding.traffic().per_table[name]
        assert (found.lookups, found.unique_rows) == (expected.lookups, expected.unique_rows)
        assert found.fetched_rows == pytest.approx(expected.fetched_rows, rel=0.1)
    counts = (group.counters.moved for group in embedding.groups)
    traffic = embedding.traffic()
    assert [sum(column) for column in zip(*counts, strict=True)] == [
        traffic.lookups, traffic.unique_rows, traffic.fetched_rows, traffic.evicted_rows,
    ]  # fmt: skip


# -- pins --------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [pytest.param("own", marks=pytest.mark.slow), "most-recent"])
def test_learned_pins_that_are_released_lose_no_update(victims: str) -> None:
    batches, strategy = drifting_batches(6), variant("static", "five", victims)
    budget = budget_with_pins(batches, strategy.hold, pins=2)
    options = by_gpu(tuning=Tuning(early_relearn=(6, 12), least_certain=0))
    embedding = build(ONE_HOT, "adagrad", strategy, budget=budget, **options)
    result = train(embedding, batches)
    planner: Any = embedding.groups[0].planner
    assert set(planner.pad.row_of_slot[planner.last_use == PINNED].tolist()) == {1, 61}
    assert embedding.traffic().chunked_batches == 0
    assert result.same_bits(train(all_of("one-hot", "adagrad"), batches))


@pytest.mark.parametrize("name", ["static", pytest.param("lookahead", marks=pytest.mark.slow)])
def test_a_profile_pins_its_hottest_rows_with_the_same_bits(name: str) -> None:
    profile = {t.name: torch.arange(t.num_embeddings, 0, -1) for t in ONE_HOT.tables}
    budget = hotrow.Budget((hotrow.Share(64, 32, True),), window_bytes=1 << 14)
    options = {"budget": budget, "profile": profile, **by_gpu()}
    embedding = build(ONE_HOT, "adagrad", name, **options)
    assert train(embedding, ONE_HOT.batches(STEPS)).same_bits(all_fast("one-hot", "adagrad"))
    assert (embedding.groups[0].planner.last_use == PINNED).any()


# -- the window of known ids -------------------------------------------------------------


@pytest.mark.slow
def test_victims_are_ranked_anew_when_the_window_has_grown() -> None:
    """So many slots that one ranking would serve all batches; its queue goes with the growth."""
    tables = [hotrow.EmbeddingBagConfig("t", 60_000, 4, ["f"])]
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(60_000, (size, 1), generator=generator) for size in [16] * 8 + [64] * 4
    ]
    budget = hotrow.Budget((hotrow.Share(40_000, 64, True),), window_bytes=1 << 20)
    results = []
    for strategy, options in (("all-fast", {}), ("lookahead", {"budget": budget})):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(), strategy=strategy, seed=3, **by_gpu(), **options
        )
        results.append(train(embedding, batches, depth=2))
    assert results[1].same_bits(results[0])


def test_the_width_that_gains_least_says_how_far_to_look_ahead() -> None:
    """A width whose rows are all in slots would have hundreds of batches read for nothing."""
    embedding = build(
        TWO_WIDTHS, budget=hotrow.Budget((hotrow.Share(64, 8, True),) * 2, window_bytes=1 << 20),
        strategy="lookahead", **by_gpu(),
    )  # fmt: skip
    embedding.reserve(8)
    for group, missing in zip(embedding.groups, (1, 16), strict=True):
        group.planner.note_missing(10 * missing)
    assert embedding.pipeline.useful_depth() == 2 + 3 * 64 // (2 * 16)


def test_a_larger_batch_makes_the_window_shorter_and_training_goes_on() -> None:
    table = hotrow.EmbeddingBagConfig("a", 5000, 4, ["a"])
    window = 8 * 8 * 4  # room for 8 of the smaller ones
    budget = hotrow.Budget((hotrow.Share(1000, 64, True),), window_bytes=window)
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(lr=0.1), budget, **by_gpu())
    batches = [torch.arange(size)[:, None] * 200 + 7 for size in [8] * 8 + [24] * 9]
    done = 0
    for batch in hotrow.ahead(batches, embedding):
        embedding(batch).values().sum().backward()
        done += 1
    assert done == len(batches)


@pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")
def test_ids_of_a_batch_in_chunks_that_are_changed_are_looked_up_anew() -> None:
    """Ids that were sorted when the batch did not fit must not be taken for those of now."""
    budget = hotrow.Budget((hotrow.Share(3, buffer_rows=4, dense_map=True),), window_bytes=1 << 14)
    embedding = build(ONE_HOT, "adagrad", "lru", budget=budget, **by_gpu())
    twin = all_of("one-hot", "adagrad")
    for batch in hotrow.ahead(on_device([x.clone() for x in ONE_HOT.batches(3)]), embedding):
        batch[:, 0] = (batch[:, 0] + 1) % 60
        for each in (embedding, twin):
            readout(each(batch)).backward()
    assert embedding.traffic().chunked_batches
    for name, weight in twin.state_dict().items():
        assert torch.equal(embedding.state_dict()[name], weight)


# -- tables of more than 2**31 rows --------------------------------------------------------


@pytest.mark.parametrize("fill", ["zero-copy", "bulk", "staged"])
def test_ids_of_64_bits_give_the_same_bits(fill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is also brought up to date while batches are in flight, as a checkpoint does."""
    expected = all_fast("one-hot", "adagrad")
    monkeypatch.setattr(scratchpad, "id_type_of", lambda num_rows: torch.int64)
    batches, hold = ONE_HOT.batches(STEPS), variant("lookahead", victims="random").hold
    options = {"budget": tight_budget(ONE_HOT, batches, hold), "fill": fill, **by_gpu()}
    embedding = build(ONE_HOT, "adagrad", variant("lookahead", victims="random"), **options)
    losses = []
    for batch in hotrow.ahead(batches, embedding, depth=3):
        embedding.row_access.flush()
        embedding.check()
        losses.append(readout(embedding(batch)))
        losses[-1].backward()
    assert outcome(embedding, losses).same_bits(expected)


# -- jagged ids --------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("count", range(1, 13))
def test_a_jagged_index_is_read_from_its_own_table(count: int) -> None:
    """However many features a search has to tell apart."""
    names = [f"f{i}" for i in range(count)]
    tables = [
        hotrow.EmbeddingBagConfig(f"t{i}", 4, 2, [name], init=hotrow.Constant(float(i)))
        for i, name in enumerate(names)
    ]
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.SGD(lr=1.0), strategy="all-fast", **by_gpu()
    )
    lengths = torch.arange(2 * count) % 3
    values = torch.arange(int(lengths.sum())) % 4
    (ids,) = on_device([hotrow.KeyedJaggedTensor(names, values, lengths=lengths)])
    found = embedding(ids).values().view(2, count, 2)[..., 0].cpu()
    assert torch.equal(found, lengths.view(count, 2).T * torch.arange(float(count)))


def test_where_features_lie_is_uploaded_again_after_a_failure() -> None:
    class Full:
        def send(self, _: Any) -> None:
            raise MemoryError("no page-locked memory is left")

    tables = [hotrow.EmbeddingBagConfig(name, 9, 2, [name]) for name in ("a", "b")]
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.SGD(lr=1.0), strategy="all-fast", **by_gpu()
    )

    def look_up(lengths: list[int]) -> Tensor:
        ids = hotrow.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor(lengths))
        return embedding(on_device([ids])[0]).values()

    first, second = look_up([1, 4]), look_up([3, 2])
    assert not torch.equal(first, second)
    look_up([1, 4])
    inputs = embedding.groups[0].planning.inputs
    there, inputs._spans = inputs._spans, Full()
    with pytest.raises(MemoryError):
        look_up([3, 2])
    inputs._spans = there
    assert torch.equal(look_up([3, 2]), second)


# -- how rows move -----------------------------------------------------------------------


@pytest.mark.slow  # by the interpreter
def test_collections_with_other_forms_train_side_by_side() -> None:
    """Rows that move at once go along with the stages of those that do not."""
    batches = list(zip(CASES["multi-hot"].batches(STEPS), ONE_HOT.batches(STEPS), strict=True))

    def run(left: Any, right: Any) -> list[dict[str, Tensor]]:
        model = torch.nn.ModuleDict({"left": left, "right": right})
        for batch in hotrow.ahead(batches, model, ids=lambda b: {"left": b[0], "right": b[1]}):
            (readout(left(batch[0])) + readout(right(batch[1]))).backward()
        return [left.state_dict(), right.state_dict()]

    cases = (CASES["multi-hot"], ONE_HOT)
    expected = run(*(PLAIN.all_fast(case) for case in cases))
    for forms in (("zero-copy", "staged"), ("bulk", "zero-copy"), ("staged", "bulk")):
        pair = [ENGINES[form].tight(case) for case, form in zip(cases, forms, strict=True)]
        found = run(*pair)
        assert tuple(x.form for each in pair for x in each.fills().values()) == forms
        for mine, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_the_engines_of_the_contract_suite_are_what_they_say() -> None:
    forms = {name: e.fill for name, e in ENGINES.items() if isinstance(e, GpuEngine)}
    for name, form in forms.items():
        embedding = ENGINES[name].tight(ONE_HOT)
        assert embedding.fills()[4].form == form
        (group,) = embedding.groups
        assert group.memory.host.is_locked == (name != "not-locked")
        assert group.device == DEVICE


@pytest.mark.parametrize(
    ("name", "fill", "case"),
    [
        ("lookahead", "bulk", "two-widths"),
        ("lookahead", "staged", "multi-hot"),
        ("scratchpipe", "auto", "one-hot"),
        ("static", "zero-copy", "one-hot"),
    ],
)
def test_what_is_launched_to_be_compiled_changes_nothing(
    name: str, fill: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed, rehearse = [], DevicePlanning.rehearse

    def noted(self: DevicePlanning, mover: Any, *launches: Any) -> None:
        rehearsed.append(mover)
        rehearse(self, mover, *launches)
        self.check()

    found = []
    for rehearses_on in (DEVICE.type, "no device"):
        monkeypatch.setattr(DevicePlanning, "rehearses_on", (rehearses_on,))
        monkeypatch.setattr(DevicePlanning, "rehearse", noted)
        strategy = variant(name)
        budget = tight_budget(CASES[case], CASES[case].batches(8), strategy.hold)
        options = {"budget": budget, "fill": fill, **by_gpu()}
        embedding = build(CASES[case], "adam", strategy, **options)
        found.append((train(embedding, CASES[case].batches(8), depth=3), embedding.traffic()))
        assert len(rehearsed) == len(embedding.groups)
    assert found[0][0].same_bits(found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("victims", ["random", "own"])
def test_no_plan_fails_by_it_after_batches_that_were_not_announced(
    victims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were planned, so there are rows in slots, uses that are kept, and a ranking."""
    tables = [hotrow.EmbeddingBagConfig("t", 1500, 4, ["f"])]
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.rand(24, 1, generator=generator) ** 3 * 1500).long() for _ in range(40)]
    batches = on_device(batches)
    budget = hotrow.Budget((hotrow.Share(360, 64, False),), window_bytes=1 << 16)
    found, failed, resume = [], list[int](), DevicePlanner.resume

    def noted(self: DevicePlanner, *given: Any, **options: Any) -> bool:
        failed.append(self.number)
        return resume(self, *given, **options)

    monkeypatch.setattr(DevicePlanner, "resume", noted)
    for rehearses_on in (DEVICE.type, "no device"):
        monkeypatch.setattr(DevicePlanning, "rehearses_on", (rehearses_on,))
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.Adagrad(), strategy=looking_ahead(victims), seed=3, budget=budget,
            **by_gpu(tuning=Tuning(spare_victims=0)),
        )  # fmt: skip
        torch.manual_seed(0)
        losses = []
        for batch in itertools.chain(batches[:5], hotrow.ahead(batches[5:], embedding, depth=7)):
            loss = readout(embedding(batch))
            loss.backward()
            losses.append(loss.detach())
        assert not failed
        found.append(outcome(embedding, losses))
        assert embedding.traffic().evicted_rows > len(batches)
    assert found[0].same_bits(found[1])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("slots", [52, 56])
def test_rankings_are_made_before_a_plan_finds_too_few_slots(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches in flight hold most slots, and what became of a plan is known two batches later."""
    monkeypatch.setattr(planner, "_is_done", lambda plan: plan.outcome is not None)
    failed, resume = list[int](), DevicePlanner.resume

    def noted(self: DevicePlanner, *given: Any, **options: Any) -> bool:
        failed.append(self.number)
        return resume(self, *given, **options)

    monkeypatch.setattr(DevicePlanner, "resume", noted)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.rand(24, 1, generator=generator) ** 3 * 1500).long() for _ in range(30)]
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("t", 1500, 4, ["f"])],
        hotrow.SGD(),
        strategy=looking_ahead("own"),
        budget=hotrow.Budget((hotrow.Share(slots, 64, False),), window_bytes=1 << 16),
        **by_gpu(tuning=Tuning(spare_victims=0)),
    )
    for batch in hotrow.ahead(on_device(batches), embedding, depth=7):
        readout(embedding(batch)).backward()
    assert embedding.traffic().evicted_rows > len(batches)
    assert len(failed) <= 1


def test_a_read_of_plans_in_flight_forgets_no_victim_that_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The direct path asks for the newest plan first."""
    monkeypatch.setattr(planner, "_is_done", lambda plan: plan.outcome is not None)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.rand(24, 1, generator=generator) ** 3 * 1500).long() for _ in range(15)]
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("t", 1500, 4, ["f"])],
        hotrow.SGD(),
        strategy=looking_ahead("own"),
        budget=hotrow.Budget((hotrow.Share(300, 64, False),), window_bytes=1 << 16),
        **by_gpu(tuning=Tuning(spare_victims=0)),
    )
    for batch in hotrow.ahead(on_device(batches), embedding, depth=7):
        readout(embedding(batch)).backward()
        with torch.no_grad():
            embedding(batch.clone())
        plans = embedding.groups[0].planner
        left = plans.state[words.END] - plans.state[words.HEAD]
        assert plans._queue_left == int(left)
