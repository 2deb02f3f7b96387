"""Every exact strategy gives the bits of all-fast, and all-fast is plain PyTorch training."""

from __future__ import annotations

from functools import cache

import pytest

import hotrow
from builders import (
    CASES,
    COMBINATIONS,
    EXACT,
    RULES,
    SCHEDULES,
    Outcome,
    assert_close,
    build,
    check_chunks,
    collection_of,
    train,
    train_plain,
    variant,
)

STEPS = 24


@cache
def all_fast(case: str, rule: str) -> Outcome:
    return train(build(CASES[case], rule), CASES[case].batches(STEPS))


def run(choice: dict[str, str], *, shorten: tuple[int, int] = (0, 0)) -> Outcome:
    batches = CASES[choice["case"]].batches(STEPS)
    embedding = collection_of(choice, batches)
    for group in embedding.groups:
        hold = group.planner.hold
        group.planner.hold = type(hold)(hold.past - shorten[0], hold.future - shorten[1])
    found = train(embedding, batches, depth=6 if embedding.strategy.overlapped else None)
    check_chunks(choice, embedding)
    return found


@pytest.mark.parametrize("choice", COMBINATIONS, ids=lambda c: "-".join(c.values()))
def test_a_strategy_gives_the_bits_of_all_fast(choice: dict[str, str]) -> None:
    assert run(choice).same_bits(all_fast(choice["case"], choice["rule"]))


def test_the_combinations_cover_every_strategy_with_every_schedule_and_victim() -> None:
    seen = {(c["strategy"].split()[0], c["schedule"], c["victims"]) for c in COMBINATIONS}
    assert {s for s, _, _ in seen} == set(EXACT)
    assert {(s, x) for s, x, _ in seen} == {(s, x) for s in EXACT for x in SCHEDULES}
    assert {x for _, _, x in seen} == {"own", "random", "most-recent"}


@pytest.mark.thinned(7)  # each rule with another case
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", [*RULES, "plain-sgd"])
def test_all_fast_trains_like_plain_pytorch_for_200_steps(case: str, rule: str) -> None:
    batches = CASES[case].batches(200, seed=1)
    rules = {**RULES, "plain-sgd": hotrow.SGD(lr=0.1)}
    embedding = hotrow.EmbeddingBagCollection(
        CASES[case].tables, rules[rule], strategy="all-fast", seed=3
    )
    plain = train_plain(embedding, batches)
    train(embedding, batches)
    assert_close(embedding, plain)


@pytest.mark.parametrize("victims", ["random", "most-recent"])
@pytest.mark.parametrize(
    ("schedule", "shorten"),
    [
        ("fused", (1, 0)),
        ("split", (1, 0)),
        ("five", (1, 0)),
        ("five", (0, 1)),
        ("five", (1, 1)),
    ],
    ids=str,
)
def test_a_hold_shorter_than_computed_gives_wrong_bits(
    schedule: str, shorten: tuple[int, int], victims: str
) -> None:
    choice = {
        "strategy": "lru", "schedule": schedule, "victims": victims, "budget": "tight",
        "rule": "sgd", "case": "one-hot", "map": "dense",
    }  # fmt: skip
    assert run(choice).same_bits(all_fast("one-hot", "sgd"))
    assert not run(choice, shorten=shorten).same_bits(all_fast("one-hot", "sgd"))


def test_the_hold_follows_from_the_stages() -> None:
    assert variant("scratchpipe").hold == hotrow.engine.planner.Hold(past=3, future=2)
    assert variant("lookahead").hold == hotrow.engine.planner.Hold(past=1, future=0)
    assert variant("lookahead", "split").hold == hotrow.engine.planner.Hold(past=2, future=0)
    assert variant("lookahead", "sequential").hold == hotrow.engine.planner.Hold(past=0, future=0)
