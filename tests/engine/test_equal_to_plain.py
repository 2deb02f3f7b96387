"""Every exact strategy gives the bits of all-fast, and all-fast is plain PyTorch training."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import hotrow
from builders import (
    CASES,
    RULES,
    SCHEDULES,
    Outcome,
    assert_close,
    build,
    pairwise,
    tight_budget,
    train,
    train_plain,
    variant,
)
from hotrow.engine.strategy import STRATEGIES

STEPS = 40
EXACT = [
    name for name, each in STRATEGIES.items() if each.contract == "exact" and not each.everything
]

COMBINATIONS = list(
    pairwise(
        {
            "strategy": [*EXACT, "lookahead with profile", "static with profile"],
            "schedule": list(SCHEDULES),
            "victims": ["own", "random", "most-recent"],
            "budget": ["tight", "chunked", "roomy"],
            "rule": list(RULES),
            "case": list(CASES),
            "map": ["dense", "hash"],
        }
    )
)


@cache
def all_fast(case: str, rule: str) -> Outcome:
    return train(build(CASES[case], rule), CASES[case].batches(STEPS))


def run(choice: dict[str, str], *, shorten: tuple[int, int] = (0, 0)) -> tuple[Outcome, int]:
    case = CASES[choice["case"]]
    batches = case.batches(STEPS)
    strategy = variant(choice["strategy"].split()[0], choice["schedule"], choice["victims"])
    part = {"tight": 1.0, "roomy": 1.0, "chunked": 0.6}[choice["budget"]]
    budget = tight_budget(
        case, batches, strategy.hold, part=part, dense_map=choice["map"] == "dense"
    )
    if choice["budget"] == "roomy":  # room for pins
        shares = [hotrow.Share(3 * s.slots, 64, s.dense_map) for s in budget.shares]
        budget = hotrow.Budget(tuple(shares), budget.window_bytes)
    profile = None
    if "profile" in choice["strategy"]:
        profile = {t.name: torch.arange(t.num_embeddings, 0, -1) for t in case.tables}
    torch.manual_seed(0)
    embedding = build(case, choice["rule"], strategy, budget=budget, profile=profile)
    for group in embedding.groups:
        hold = group.planner.hold
        group.planner.hold = type(hold)(hold.past - shorten[0], hold.future - shorten[1])
    depth = 6 if strategy.overlapped else None
    return train(embedding, batches, depth=depth), embedding.traffic().chunked_batches


@pytest.mark.parametrize("choice", COMBINATIONS, ids=lambda c: "-".join(c.values()))
def test_a_strategy_gives_the_bits_of_all_fast(choice: dict[str, str]) -> None:
    result, chunked = run(choice)
    assert result.same_bits(all_fast(choice["case"], choice["rule"]))
    if choice["budget"] == "chunked":
        assert chunked > 0
    if choice["budget"] == "tight" and not variant(choice["strategy"].split()[0]).pinned_part:
        assert chunked == 0  # pins may have taken room from the first batches


def test_the_combinations_cover_every_strategy_with_every_schedule_and_victim() -> None:
    seen = {(c["strategy"].split()[0], c["schedule"], c["victims"]) for c in COMBINATIONS}
    assert {s for s, _, _ in seen} == set(EXACT)
    assert {(s, x) for s, x, _ in seen} == {(s, x) for s in EXACT for x in SCHEDULES}
    assert {x for _, _, x in seen} == {"own", "random", "most-recent"}


@pytest.mark.thinned(4)
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
    right, _ = run(choice)
    assert right.same_bits(all_fast("one-hot", "sgd"))
    wrong, _ = run(choice, shorten=shorten)
    assert not wrong.same_bits(all_fast("one-hot", "sgd"))


def test_the_hold_follows_from_the_stages() -> None:
    assert variant("scratchpipe").hold == hotrow.engine.planner.Hold(past=3, future=2)
    assert variant("lookahead").hold == hotrow.engine.planner.Hold(past=1, future=0)
    assert variant("lookahead", "split").hold == hotrow.engine.planner.Hold(past=2, future=0)
    assert variant("lookahead", "sequential").hold == hotrow.engine.planner.Hold(past=0, future=0)
