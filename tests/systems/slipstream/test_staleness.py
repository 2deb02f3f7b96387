"""Rows' movement is that of the rows wherever they are; stale samples and thresholds are those of
the plain definition."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
import hotrow.embedding.collection
from builders import CASES, build, outcome, readout, tight_budget, variant
from hotrow.engine.strategy import as_listed
from hotrow.inputs.tree import to_device
from hotrow.systems.slipstream.staleness import Snapshot, StaleSamples, Threshold, find_threshold

Table = hotrow.EmbeddingBagConfig
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# -- snapshots -------------------------------------------------------------------------------

ROWS = {"a": torch.tensor([50, 0, 3, 1, 7]), "b": torch.arange(30)}


def trained(steps: int, look: bool, **options: Any) -> tuple[Any, Any, list[dict[str, Tensor]]]:
    """Few slots, random victims; with a look at some rows at every step, in the midst of it."""
    torch.manual_seed(0)  # of victims
    case, moved, losses = CASES["one-hot"], [], []
    strategy = replace(variant("lookahead", victims="random"), order=as_listed)
    budget = tight_budget(case, case.batches(steps), strategy.hold)
    embedding = build(case, "adagrad", strategy, budget=budget, **options)
    for batch in hotrow.ahead(case.batches(steps), embedding, depth=3):
        snapshot = Snapshot(embedding, ROWS) if look else None
        loss = readout(embedding(batch))
        loss.backward()
        losses.append(loss.detach())
        if snapshot is not None:
            moved.append(snapshot.moved())
    traffic = embedding.traffic()
    return outcome(embedding, losses), traffic, moved


def test_a_snapshot_sees_the_newest_rows_and_changes_nothing(engine: str) -> None:
    steps, device = 12, CPU
    if engine == "device-rows":
        steps, device = 3, DEVICE
    plain, traffic, _ = trained(steps, look=False, device=device)
    found, same_traffic, moved = trained(steps, look=True, device=device)
    assert found.same_bits(plain)
    assert same_traffic == traffic
    # The same where every row is at hand.
    embedding = build(CASES["one-hot"], "adagrad", device=device)
    for batch, seen in zip(CASES["one-hot"].batches(steps), moved, strict=True):
        before = embedding.state_dict()
        readout(embedding(to_device(batch, device))).backward()
        after = embedding.state_dict()
        for table, rows in ROWS.items():
            key = embedding.key_of(table)
            right = (after[key][rows] - before[key][rows]).abs().amax(1)
            assert torch.equal(seen[table], right)
    assert any(bool(each["a"].any()) for each in moved)


def test_rows_are_read_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.embedding.row_access._chunk_of", lambda group: 7)
    embedding = build(CASES["one-hot"])
    pieces = list(embedding.weights_at("b", ROWS["b"]))
    assert [len(each) for _, each in pieces] == [7, 7, 7, 7, 2]
    whole = embedding.state_dict()[embedding.key_of("b")][:30]
    assert torch.equal(torch.cat([each for _, each in pieces]), whole)
    snapshot = Snapshot(embedding, ROWS)
    assert snapshot.num_bytes == 4 * 4 * (5 + 30)
    assert not any(bool(each.any()) for each in snapshot.moved().values())


def test_a_row_of_nan_has_moved_but_not_by_less_than_any_threshold() -> None:
    embedding = build(CASES["one-hot"])
    snapshot = Snapshot(embedding, {"a": torch.tensor([4, 5])})
    embedding.load_weights("a", 5, torch.full((1, 4), torch.nan))
    assert (snapshot.moved()["a"] < torch.inf).tolist() == [True, False]


# -- samples ---------------------------------------------------------------------------------

TABLES = [Table("a", 12, 4, ["f", "g"], padding_idx=2), Table("b", 9, 2, ["h"])]
STALE = {"a": torch.tensor([0, 1, 2, 5, 6, 7]), "b": torch.tensor([8, 0, 3])}
Bags = list[dict[str, list[int]]]


def dense(draw: torch.Generator) -> tuple[Any, Bags]:
    ids = torch.stack([torch.randint(n, (9,), generator=draw) for n in (12, 12, 9)], 1)
    return ids, [dict(zip("fgh", ([each] for each in line), strict=True)) for line in ids.tolist()]


def jagged(draw: torch.Generator) -> tuple[Any, Bags]:
    """In another order, with a feature that no table reads, whose ids no table has."""
    keys, sizes = ["h", "other", "g", "f"], [9, 1000, 12, 12]
    lengths = torch.randint(0, 4, (4, 9), generator=draw)
    values = [
        torch.randint(n, (int(each.sum()),), generator=draw)
        for n, each in zip(sizes, lengths, strict=True)
    ]
    bags: Bags = [{} for _ in range(9)]
    for key, mine, each in zip(keys, values, lengths, strict=True):
        for sample, bag in zip(bags, mine.split(each.tolist()), strict=True):
            sample[key] = bag.tolist()
    return hotrow.KeyedJaggedTensor(keys, torch.cat(values), lengths=lengths.flatten()), bags


def is_stale(sample: dict[str, list[int]], least: int | str, each_table: bool) -> bool:
    """Row by row; padding reads none."""
    looked = {"a": [r for r in sample["f"] + sample["g"] if r != 2], "b": sample["h"]}
    stale = {t: sum(r in STALE[t].tolist() for r in rows) for t, rows in looked.items()}
    if least == "all":
        total = sum(map(len, looked.values()))
        return 0 < total == sum(stale.values())
    assert isinstance(least, int)
    return all(n >= least for n in stale.values()) if each_table else sum(stale.values()) >= least


@pytest.mark.parametrize("make", [dense, jagged])
@pytest.mark.parametrize(
    ("least", "each_table"), [("all", False), ("all", True), (1, False), (2, False), (1, True)]
)
def test_stale_samples_are_those_of_the_definition(
    least: int | str, each_table: bool, make: Callable[[torch.Generator], tuple[Any, Bags]]
) -> None:
    rule, draw, found = stale_rule(least, each_table), torch.Generator().manual_seed(1), set()
    for _ in range(20):
        ids, bags = make(draw)
        stale = (~rule.kept(ids)).tolist()
        assert stale == [is_stale(sample, least, each_table) for sample in bags]
        found |= set(stale)
    assert found == {True, False}


def stale_rule(least: int | str = "all", each_table: bool = False) -> StaleSamples:
    """With all rows hot."""
    rule = StaleSamples(TABLES, CPU, least, each_table=each_table)
    rule.set_stale(rule.number(STALE))
    rule.set_hot(torch.arange(rule.num_rows))
    return rule


def test_an_id_that_no_table_has_reads_no_row_and_nor_does_an_empty_bag() -> None:
    """The lookup refuses it later."""
    rule = stale_rule()
    assert rule.kept(torch.tensor([[99, 5, 0], [99, 11, 0]])).tolist() == [False, True]
    lengths = torch.tensor([1, 0, 0, 0, 0, 0])  # the second sample looks up nothing
    ids = hotrow.KeyedJaggedTensor("fgh", torch.tensor([0]), lengths=lengths)
    assert rule.kept(ids).tolist() == [False, True]


@pytest.mark.parametrize("each_table", [False, True])
@pytest.mark.parametrize("jagged", [False, True])
def test_a_batch_without_samples(jagged: bool, each_table: bool) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    ids: Any = nothing.view(0, 3)
    if jagged:
        ids = hotrow.KeyedJaggedTensor("fgh", nothing, lengths=nothing)
    assert stale_rule(1 if each_table else "all", each_table).kept(ids).shape == (0,)


def test_numbers_and_rows_belong_together() -> None:
    numbering = StaleSamples(TABLES, CPU)
    numbers = numbering.number({"b": torch.tensor([3, 0, 3]), "a": torch.tensor([11, 4])})
    assert numbers.tolist() == [4, 11, 12, 15]
    found = {name: rows.tolist() for name, rows in numbering.by_table(numbers).items()}
    assert found == {"a": [4, 11], "b": [0, 3]}
    assert numbering.by_table(numbers[:2]).keys() == {"a"}
    with pytest.raises(ValueError, match="no table 'c'; there are a, b"):
        numbering.number({"c": torch.tensor([0])})


# -- the threshold ---------------------------------------------------------------------------


def search(moved: Tensor, **changes: Any) -> Threshold:
    """Of samples that look up one row each."""
    options = {"target": 0.3, "tolerance": 0.01, "within": (0.0, 0.1), "iterations": 25}

    def share_at(tau: float) -> float:
        return float((moved < tau).double().mean())

    return find_threshold(share_at, **{**options, **changes})


@pytest.mark.parametrize("target", [0.05, 0.3, 0.9])
def test_bisection_reaches_the_target_on_a_known_distribution(target: float) -> None:
    found = search(torch.arange(10_000) / 100_000, target=target)  # uniform from 0 to 0.1
    assert found.converged
    assert abs(found.tau - 0.1 * target) <= 0.1 * 0.01
    assert abs(found.share - target) <= 0.01
    assert 1 <= found.iterations <= 7  # halves of the range, until they are as small
    assert "did not reach" not in found.said


def test_it_goes_the_way_of_halves() -> None:
    found = search(torch.arange(1000) / 10_000, target=0.3, tolerance=0.03)
    assert found.iterations == 4  # 0.05, 0.025, 0.0375, 0.03125
    assert found.tau == 0.03125
    assert (found.low, found.high) == pytest.approx((0.025, 0.0375))


def test_the_range_grows_to_where_the_target_is() -> None:
    found = search(torch.arange(10_000) / 1000)  # uniform from 0 to 10
    assert found.converged
    assert abs(found.tau - 3) <= 0.1
    assert "[0.0, 0.1] did not reach it, [0.0, 3.2] does" in found.said
    found = search(torch.arange(10_000) / 100_000, within=(0.05, 0.1))
    assert found.converged
    assert "[0.05, 0.1] did not reach it, [0.0, 0.1] does" in found.said


def test_a_target_that_no_threshold_reaches() -> None:
    moved = torch.cat([torch.rand(20), torch.full((80,), torch.inf)])
    found = search(moved, target=0.5, tolerance=0.1)
    assert not found.converged
    assert found.share == float((moved < found.tau).double().mean())
    assert abs(found.share - 0.5 * 0.2) <= 0.1 * 0.2  # of those that can be told
    assert "50.0% ± 10.0% were asked for, but 80.0% are of rows that are not hot" in found.said
    found = search(torch.full((80,), torch.inf))
    assert (found.converged, found.tau, found.share, found.iterations) == (False, 0, 0, 0)
    assert found.said.startswith("none of the sampled hot inputs can be stale")


def test_a_target_that_is_jumped_over() -> None:
    moved = torch.cat([torch.zeros(50), torch.ones(50)])
    found = search(moved)
    assert not found.converged
    assert (found.tau, found.share, found.iterations) == (0, 0, 25)
    assert "no threshold in 25 iterations makes 30.0% ± 1.0%" in found.said
    assert "Nothing is skipped; a target of 0.5 would" in found.said
    moved = torch.cat([torch.zeros(20), torch.full((50,), 0.05), torch.ones(30)])
    found = search(moved)
    assert (found.converged, found.share) == (False, 0.2)
    assert 0 < found.tau < 0.05 + 1e-6
    thresholds = re.search(r"stale: (\S+) makes 20\.0%, and (\S+) 70\.0%\. The smaller", found.said)
    assert thresholds is not None
    low, high = map(float, thresholds.groups())
    assert low < high
