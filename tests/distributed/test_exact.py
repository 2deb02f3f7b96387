"""On several ranks every exact strategy has the bits of all-fast, and all-fast those of one process
up to rounding.

rank_cases.py has the batches and the loop, rank_programs.py random programs, and rank_steps.py the
programs of tests/embedding that step torch's optimizers. Each call of `run` runs many cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hotrow
import rank_programs
import rank_steps
from builders import RULES, pairwise
from hotrow.distributed import owners
from hotrow.distributed.exchange import Exchange, Grads
from hotrow.distributed.owners import TableOwners
from hotrow.distributed.ranks import Ranks
from rank_cases import AXES, TOLERANCE, few_shards, run_cases
from rank_processes import run

CHOICES = list(pairwise({name: list(values) for name, values in AXES.items()}))
KNOWN_AHEAD = {
    "strategy": "lookahead", "victims": "random", "rule": "adagrad", "tables": "bags",
    "form": "kjt", "room": "tight", "ids": "uneven", "loader": "depth 5",
    "replicate": "nothing",
}  # fmt: skip
# Each pair of factors on some number of ranks.
QUICK = {1: CHOICES[3::4], 2: [KNOWN_AHEAD, *CHOICES[::2]], 4: CHOICES[1::4]}


def check(results: list[list[str]]) -> None:
    found = [said for of_rank in results for said in of_rank]
    assert not found, "\n".join(found)


def checked(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    check(run(world, function, *args, timeout=300, **options))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_strategies_have_the_bits_of_all_fast(world: int) -> None:
    checked(world, run_cases, QUICK[world])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_pairs_of_factors(world: int) -> None:
    checked(world, run_cases, [x for x in CHOICES if x not in QUICK[world]])


@pytest.mark.slow
def test_every_strategy_with_every_rule_and_victim() -> None:
    others = [name for name in AXES if name not in ("strategy", "victims", "rule")]
    first = product(AXES["strategy"], AXES["victims"], AXES["rule"])
    choices = [
        dict(zip(("strategy", "victims", "rule"), three, strict=True))
        | {name: AXES[name][(number + k * (number // 7)) % len(AXES[name])]
           for k, name in enumerate(others)}
        for number, three in enumerate(first)
    ]  # fmt: skip
    checked(2, run_cases, choices)


# Programs that have each of the things that ranks can do twice, where so many of the first 36 do.
PROGRAMS = [0, 1, 4, 5, 6, 9, 14, 16, 17, 22, 23, 26, 35]


@pytest.mark.parametrize(("world", "seeds"), [(2, PROGRAMS), (4, PROGRAMS[::4])])
def test_programs_train_like_torch_and_like_all_fast(world: int, seeds: list[int]) -> None:
    checked(world, rank_programs.differences, seeds)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "seeds"), [(1, range(100, 110)), (2, range(90)),
                                              (4, range(24))])  # fmt: skip
def test_further_programs(world: int, seeds: range) -> None:
    checked(world, rank_programs.differences, list(seeds))


def test_the_quick_programs_have_what_ranks_can_do() -> None:
    programs = [rank_programs.shared(seed) for seed in PROGRAMS]
    found = set().union(*(program.ingredients for program in programs))
    assert found == rank_programs.ON_RANKS
    ranks = [rank_programs.of_rank(x, r, 2) for x in programs for r in range(2)]
    assert any(step.silent for program in ranks for step in program.steps)
    assert {program.strategy for program in programs} >= set(AXES["strategy"])
    assert {type(program.rule) for program in programs} == {type(x) for x in RULES.values()}


@pytest.mark.parametrize("of", ["torch", "convert"])
def test_steps_of_optimizers(of: str) -> None:
    checked(2, rank_steps.differences, rank_steps.cases(of, every=False)[::4])


@pytest.mark.slow
@pytest.mark.parametrize("of", ["torch", "convert"])
def test_further_steps_of_optimizers(of: str) -> None:
    cases = rank_steps.cases(of, every=False)
    checked(2, rank_steps.differences, cases[2::4])
    checked(4, rank_steps.differences, cases[1::2])


# -- equal to one process, to the bit --------------------------------------------------------


def of_constants(rank: int, world: int, rules: list[str]) -> list[str]:
    """Gradients are constants and every row is used by one rank, so one process has equal sums."""
    alone, found = dist.new_group([rank], use_local_synchronization=True), []
    tables = [hotrow.EmbeddingBagConfig("a", 300, 4, ["f"]),
              hotrow.EmbeddingBagConfig("b", 200, 6, ["g"], pooling="mean")]  # fmt: skip
    slopes = {"f": torch.tensor([0.3, -0.7, 1.1, 0.05]), "g": torch.linspace(-1, 1, 6)}

    def batches(r: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(r)
        ids = [torch.randint(200 // world, (12, 2), generator=draw) for _ in range(6)]
        return [x * world + r for x in ids]

    def loss(embedding: Any, ids: Tensor) -> Tensor:
        out = embedding(ids)
        total: Any = sum((out[name] * slope).sum() for name, slope in slopes.items())
        return total

    for rule in rules:
        shared = hotrow.EmbeddingBagCollection(tables, RULES[rule], strategy="all-fast", seed=3)
        single = hotrow.EmbeddingBagCollection(
            tables, RULES[rule], strategy="all-fast", seed=3, process_group=alone
        )
        for ids in batches(rank):
            loss(shared, ids).backward()
        for parts in zip(*map(batches, range(world)), strict=True):
            (loss(single, torch.cat(parts)) / world).backward()
        for table in ("a", "b"):
            whole = torch.cat([chunk for _, chunk in shared.rows(table)])
            if not torch.equal(whole, torch.cat([chunk for _, chunk in single.rows(table)])):
                found.append(f"{rule}: rows of table {table} differ from one process")
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_constant_gradients_of_rows_of_one_rank_each_give_the_bits_of_one_process(
    world: int,
) -> None:
    checked(world, of_constants, list(RULES))


def in_rank_order(rank: int, world: int) -> list[str]:
    """Sums of float32 depend on their order: large numbers that cancel leave what came last."""
    values, found = [3e7, 1.0, -3e7, 0.25], []
    tables = [hotrow.EmbeddingBagConfig("a", 40, 1, ["f"], init=hotrow.Constant(0.0))]
    for alike in (True, False):  # all ranks have the same batch, or one has another row as well
        embedding = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(lr=1.0), strategy="all-fast")
        ids = torch.tensor([[7]] if alike or rank else [[7], [8]])
        out = embedding(ids)["f"]
        (out[0] * values[rank]).sum().backward()
        total = torch.tensor(0.0)
        for value in values[:world]:
            total = total + torch.tensor(value) / world
        (weights,) = [chunk for _, chunk in embedding.weights("a")]
        if weights[7, 0] != -total:
            found.append(f"{-weights[7, 0]} instead of {total}: not in rank order")
    return found


def test_gradients_of_ranks_are_added_in_rank_order() -> None:
    checked(4, in_rank_order)


# -- mistakes are found ----------------------------------------------------------------------


@contextmanager
def another_order() -> Iterator[None]:
    """Owners add the gradients of the last rank first."""
    exchange, perform, inside = Ranks.exchange, Exchange._perform_grads, []

    def flipped(self: Any, values: Tensor, sent: Any, received: Any, channel: Any) -> Tensor:
        came = exchange(self, values, sent, received, channel)
        if not inside:
            return came
        parts = came.split(received)
        return torch.cat(parts[::-1]) if len({len(x) for x in parts}) == 1 else came

    def performed(self: Any, *args: Any) -> None:
        inside.append(True)
        try:
            perform(self, *args)
        finally:
            inside.pop()

    with patch.object(Ranks, "exchange", flipped), \
            patch.object(Exchange, "_perform_grads", performed):  # fmt: skip
        yield


@contextmanager
def no_division() -> Iterator[None]:
    """Gradients are summed over ranks, not averaged."""
    send = Exchange.send_grads

    def sent(self: Exchange, grads: dict[int, Grads], tables: Any) -> None:
        size = self.ranks.size
        send(self, {k: Grads(x.ids, x.sums * size, x.work) for k, x in grads.items()}, tables)

    with patch.object(Exchange, "send_grads", sent):
        yield


@contextmanager
def old_vectors() -> Iterator[None]:
    """Vectors come with the ids, and not again when rows were updated since."""
    announce, fetch = Exchange.announce, Exchange.fetch

    def announced(self: Exchange, *args: Any, **options: Any) -> Any:
        shared = announce(self, *args, **options)
        if shared is not None:
            owes = self.owes_grads
            fetch(self, shared, -2, 0)
            self.owes_grads = owes
        return shared

    def fetched(self: Exchange, shared: Any, version: int, replaced: int, **_: Any) -> None:
        self.owes_grads = True

    with patch.object(Exchange, "announce", announced), patch.object(Exchange, "fetch", fetched):
        yield


@contextmanager
def wrong_owner() -> Iterator[None]:
    """One row is taken for its neighbour at the owner."""
    find = TableOwners.find

    def found(self: TableOwners, rows: Any) -> Any:
        rank, numbers = find(self, rows)
        return rank, numbers - ((rows == 5) & (numbers > 0))

    with patch.object(owners.TableOwners, "find", found):
        yield


@contextmanager
def late_updates() -> Iterator[None]:
    """The last rank's gradients are lost when its batch differs from those of the others."""
    way = Exchange._way_of

    def other(self: Exchange, place: int, x: Grads) -> Any:
        form, route = way(self, place, x)
        if self.ranks.rank == self.ranks.size - 1:
            x.sums.zero_()
        return form, route

    with patch.object(Exchange, "_way_of", other):
        yield


MISTAKES: dict[str, Any] = {
    x.__name__: x for x in (another_order, no_division, old_vectors, wrong_owner, late_updates)
}


def with_mistake(rank: int, world: int, name: str) -> list[str]:
    with MISTAKES[name]():
        if name == "another_order":
            return in_rank_order(rank, world)
        return run_cases(rank, world, [KNOWN_AHEAD])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    world = 4 if name == "another_order" else 2
    results = run(world, with_mistake, name, timeout=60, group_timeout=20)
    assert any(results), name


# -- start values ----------------------------------------------------------------------------


def filled(weights: Tensor) -> None:
    torch.nn.init.normal_(weights, std=0.3)


def by_number(rows: Tensor) -> Tensor:
    return rows.unsqueeze(1) * torch.tensor([1.0, -0.5, 2.0])


def starts(rank: int, world: int) -> list[str]:
    alone, found = dist.new_group([rank], use_local_synchronization=True), []
    table = hotrow.EmbeddingBagConfig
    tables = [
        table("a", 3000, 4, ["f"]), table("b", 70, 4, ["g"], padding_idx=7),
        table("c", 2100, 3, ["h"], init=by_number, pooling="none", padding_idx=2099),
        table("d", 1500, 3, ["i"], init_fn=filled), table("e", 1025, 2, ["j"], weight_init_min=0.5,
                                                          weight_init_max=0.75),
        table("k", 1, 3, ["l"], init=hotrow.Constant(0.5)), table("m", 1300, 4, ["n"],
                                                                  init=hotrow.Normal(std=0.1)),
    ]  # fmt: skip
    rule = hotrow.Adagrad(initial_accumulator_value=0.25)
    budget = hotrow.Budget((hotrow.Share(8, 64, True),) * 3, 1 << 12)
    shared = hotrow.EmbeddingBagCollection(tables, rule, budget, seed=11)
    single = hotrow.EmbeddingBagCollection(
        tables, rule, strategy="all-fast", seed=11, process_group=alone
    )
    for each in tables:
        rows = [torch.cat([x for _, x in e.rows(each.name)]) for e in (shared, single)]
        if not torch.equal(*rows):
            found.append(f"rows of table {each.name} start otherwise")
    # A seed that is drawn is the first rank's.
    torch.manual_seed(rank)
    drawn = hotrow.EmbeddingBagCollection(tables, rule, strategy="all-fast")
    torch.manual_seed(0)
    first = int(torch.randint(2**63 - 1, ()))
    if drawn.seed != first:
        found.append(f"the drawn seed is {drawn.seed}, the first rank's {first}")
    torch.manual_seed(rank)
    module = hotrow.Embedding(1500, 4, strategy="all-fast")
    weights = torch.cat([x for _, x in module.weights()])
    every: list[Any] = [None] * world
    dist.all_gather_object(every, weights)
    if any(not torch.equal(x, weights) for x in every):
        found.append("a module's rows start otherwise on another rank")
    if module.collection.seed != first:
        found.append("a module's seed is not the first rank's")
    room = hotrow.Budget((hotrow.Share(16, 64, True),), 1 << 12)
    given = torch.randn(1400, 4, generator=torch.Generator().manual_seed(2))
    kept = hotrow.Embedding.from_pretrained(given.clone(), freeze=False, padding_idx=5, budget=room)
    if not torch.equal(torch.cat([x for _, x in kept.weights()]), given):
        found.append("from_pretrained has other rows")
    bag = hotrow.EmbeddingBag.from_pretrained(given.clone(), mode="sum", budget=room)
    ids = torch.arange(rank, 1400, 97).view(1, -1)
    if not torch.allclose(bag(ids)[0], given[ids[0]].sum(0), **TOLERANCE):
        found.append("from_pretrained looks up other rows")
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_rows_start_as_on_one_process(world: int) -> None:
    checked(world, starts)


def spread(rank: int, world: int) -> list[str]:
    with few_shards():
        return starts(rank, world)


def test_rows_start_alike_however_they_are_spread() -> None:
    checked(2, spread)
