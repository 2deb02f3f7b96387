"""Rows that several ranks pin are on each of them; no bit changes when other rows are pinned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hotrow
from builders import Case, tight_budget, variant
from hotrow.checkpoint import Checkpoint
from hotrow.distributed.shared_rows import SharedRows
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.run.job import same_bits
from rank_cases import (
    STEPS,
    TABLES,
    build,
    few_shards,
    form_of,
    parts,
    tables_of,
    train,
)
from rank_processes import run
from rank_training import OWN, Everything, RankLoop, small_files

BASE = {"tables": "bags", "form": "kjt", "ids": "uneven", "room": "tight", "rule": "adagrad",
        "victims": "random", "loader": "ahead"}  # fmt: skip
QUICK = [
    BASE,
    {**BASE, "rule": "adam", "victims": "most-recent", "tables": "unpooled"},
    {**BASE, "rule": "adam", "tables": "weighted", "ids": "hot", "loader": "depth 5"},
    {**BASE, "tables": "mixed", "ids": "one rank without", "loader": "direct", "room": "chunked"},
]
SLOW = [
    {**BASE, "rule": rule, "victims": victims, "tables": tables, "ids": ids, "loader": loader}
    for rule, victims in (("adagrad", "random"), ("adam", "most-recent"), ("row-wise", "own"))
    for tables in TABLES
    for ids, loader in (("uneven", "ahead"), ("few", "direct"), ("same", "depth 5"))
]


def rows_of_choice(tables: list[hotrow.EmbeddingBagConfig], number: int) -> dict[str, Tensor]:
    """Other rows for each number; some stay. The third choice is no row, and the fourth many."""
    if number == 2:
        return {}
    draw = torch.Generator().manual_seed(number)
    part = 1.0 if number == 3 else 0.4
    chosen = {}
    for table in tables:
        hot = torch.arange(table.num_embeddings // 8)
        others = torch.randperm(table.num_embeddings, generator=draw)
        chosen[table.name] = torch.cat([hot, others])[: int(part * table.num_embeddings)]
    return chosen


def segments(count: int) -> Iterator[range]:
    size = -(-count // 4)
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def differences(rank: int, world: int, choices: list[dict[str, str]]) -> list[str]:
    found = []
    for choice in choices:
        with few_shards():
            found += [f"{choice}: {said}" for said in _differences(rank, world, choice)]
    return found


def _differences(rank: int, world: int, choice: dict[str, str]) -> list[str]:
    tables, form = TABLES[choice["tables"]], form_of(choice)
    mine = [parts(choice, number, world)[rank] for number in range(STEPS)]
    fast = build(choice)
    strategy = variant("static", victims=choice["victims"])
    case = Case(tables, lambda generator: None)
    room = 0.5 if choice["room"] == "chunked" else 1.0
    budget = tight_budget(case, [x.features(form) for x in mine], strategy.hold, part=room)
    budget = replace(budget, shares=tuple(replace(x, slots=max(x.slots, 2)) for x in budget.shares))
    pinned = build(choice, strategy, budget=budget, replicate="12KiB")
    room_for_pins, found = pinned.room_for_pins(), []
    for number, steps in enumerate(segments(STEPS)):
        before, version = tables_of(pinned), pinned.pins_version
        hot = pinned.pin_rows(rows_of_choice(tables, number))
        if pinned.pins_version == version or pinned.pins.gave_way:
            found.append(f"choice {number}: the version of pins says otherwise")
        if (hot.num_rows > 0) != (number != 2 or choice["tables"] == "unpooled"):
            found.append(f"choice {number}: {hot.num_rows} rows are pinned")
        if hot.num_rows > sum(room_for_pins.values()) or pinned.room_for_pins() != room_for_pins:
            found.append(f"choice {number}: more rows are pinned than there is room for")
        found += _unlike(tables_of(pinned), before, f"choice {number}: pinning changed")
        features = [mine[step].features(form) for step in steps]
        same = train(pinned, features, choice["loader"])
        features = [mine[step].features(form) for step in steps]
        for one, other in zip(same, train(fast, features, "direct"), strict=True):
            if not torch.equal(one, other):
                found.append(f"choice {number}: a loss or gradient differs from all-fast")
        found += _unlike(tables_of(pinned), tables_of(fast), f"choice {number}: not all-fast:")
    return found


def _unlike(some: dict[str, Tensor], others: dict[str, Tensor], what: str) -> list[str]:
    return [f"{what} {name}" for name in some if not torch.equal(some[name], others[name])]


def check(results: list[list[str]]) -> None:
    found = [said for of_rank in results for said in of_rank]
    assert not found, "\n".join(found)


def test_pins_change_no_bit_on_two_ranks() -> None:
    check(run(2, differences, QUICK, timeout=120))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_pins_change_no_bit_whatever_is_trained(world: int) -> None:
    check(run(world, differences, [*QUICK, *SLOW], timeout=600))


# -- what is sent ------------------------------------------------------------------------------


def one_table(rank: int, world: int, **options: Any) -> Any:
    table = hotrow.EmbeddingBagConfig("a", 400, 4, ["f"])
    settings = {"strategy": "static", "budget": "5KiB", "replicate": "4KiB", "seed": 1, **options}
    return hotrow.EmbeddingBagCollection([table], hotrow.Adagrad(lr=0.1), **settings)


def sent(rank: int, world: int) -> tuple[list[dict[str, int]], dict[str, int]]:
    embedding, found = one_table(rank, world), []
    hot = torch.arange(40, 80)
    embedding.pin_rows({"a": hot})
    draw = torch.Generator().manual_seed(rank)
    for rows in (hot, hot, torch.arange(400)):
        ids = rows[torch.randint(len(rows), (16, 1), generator=draw)]
        before = embedding.sent_bytes()
        for batch in hotrow.ahead([ids], embedding):
            embedding(batch).values().sum().backward()
        found.append({kind: n - before[kind] for kind, n in embedding.sent_bytes().items()})
    return found, embedding.memory()


def test_a_batch_of_pinned_rows_sends_gradients_alone() -> None:
    for (first, second, other), memory in run(2, sent):
        for said in (first, second):
            assert said["grads"] > 0
            assert said == {"ids": 0, "rows": 0, "early rows": 0, "grads": said["grads"], "pins": 0}
        assert other["ids"] > 0
        assert other["rows"] > 0
        assert memory["replicated rows"] == 4 * 8 * (40 + 1)


def pins_sent(rank: int, world: int) -> list[int]:
    """Rows that stay do not travel, and those that are pinned no longer do not, either."""
    embedding, found = one_table(rank, world), []
    for first, last in ((0, 60), (20, 60), (20, 70), (0, 0)):
        before = embedding.sent_bytes()["pins"]
        embedding.pin_rows({"a": torch.arange(first, last)})
        found.append(embedding.sent_bytes()["pins"] - before)
    return found


def test_only_rows_that_are_pinned_newly_travel() -> None:
    row = 4 * (8 + 1)  # with its state, and whether it is frozen
    results = run(2, pins_sent)
    # A rank sends those of its rows that the other does not have.
    assert [sum(x) for x in zip(*results, strict=True)] == [60 * row, 0, 10 * row, 0]


# -- refusals ----------------------------------------------------------------------------------


def refused(rank: int, world: int) -> dict[str, str]:
    said = {}
    for kind in REFUSALS:
        try:
            _pin(rank, world, kind)
            said[kind] = "nothing"
        except (RuntimeError, ValueError) as error:
            said[kind] = str(error)
    return said


def _pin(rank: int, world: int, kind: str) -> None:
    options: dict[str, Any] = {"replicate": 0} if kind == "no room" else {}
    embedding = one_table(rank, world, **options)
    rows = {"a": torch.arange(10)}
    if kind == "others" and rank == 1:
        rows = {"a": torch.arange(1, 11)}
    if kind == "another order" and rank == 1:
        rows = {"a": torch.arange(9, -1, -1)}
    if kind == "bad row" and rank == 1:
        rows = {"a": torch.tensor([400])}
    if kind == "one rank" and rank == 1:
        embedding(torch.zeros(2, 1, dtype=torch.int64))
    embedding.pin_rows(rows)


REFUSALS = {
    "others": ("all ranks have to pin the same rows", "all ranks have to pin the same rows"),
    "another order": ("in the same order; rank 1 pins", "in the same order; rank 1 pins"),
    "bad row": ("rank 1: table 'a' has rows 0 to 399", "table 'a' has rows 0 to 399"),
    "one rank": ("rank 1 brings its next batch", "rank 0 calls a method that all ranks"),
    "no room": ("such as replicate='64MiB'", "such as replicate='64MiB'"),
}


def test_ranks_that_do_not_pin_alike_raise_on_all() -> None:
    for rank, said in enumerate(run(2, refused, group_timeout=20)):
        for kind, texts in REFUSALS.items():
            assert texts[rank] in said[kind], kind


# -- beside everything else --------------------------------------------------------------------


def frozen(rank: int, world: int) -> list[str]:
    """Rows that are frozen stay so when they become replicas, and when they are none any more."""
    embedding, fast = one_table(rank, world), one_table(rank, world, strategy="all-fast")
    found = []
    choices = [(0, 60), (30, 90), (90, 120), (0, 30)]
    still = torch.cat([torch.arange(20, 40), torch.arange(85, 95)])
    for number, (first, last) in enumerate(choices):
        embedding.pin_rows({"a": torch.arange(first, last)})
        if number == 1:
            for each in (embedding, fast):
                each.freeze_rows({"a": still})
        kept = torch.cat([x for _, x in embedding.weights("a")])[still]
        draw = torch.Generator().manual_seed(10 * number + rank)
        for _ in range(3):
            ids = torch.randint(130, (24, 2), generator=draw)
            ids = [(ids[:, 0], torch.arange(25)), ids[:, :1]][number % 2]
            for each in (embedding, fast):
                each(ids).values().square().sum().backward()
        now = torch.cat([x for _, x in embedding.weights("a")])[still]
        if torch.equal(kept, now) != (number > 0):
            found.append(f"choice {number}: frozen rows have moved, or others have not")
        found += _unlike(tables_of(embedding), tables_of(fast), f"choice {number}:")
    return found


def test_frozen_rows_stay_frozen_while_pins_change() -> None:
    check(run(2, frozen))


def together(rank: int, world: int) -> list[str]:
    """accumulate(), join(), evaluation, and weights that a caller replaces, between two choices."""
    embedding, fast = one_table(rank, world), one_table(rank, world, strategy="all-fast")
    draw, found = torch.Generator().manual_seed(rank), []
    for number in range(4):
        embedding.pin_rows({"a": torch.arange(20 * number, 20 * number + 50)})
        every = [torch.randint(150, (8, 1), generator=draw) for _ in range(4 + rank)]
        for each in (embedding, fast):
            with each.accumulate():
                for ids in every[:2]:
                    each(ids).values().square().sum().backward()
            with hotrow.join(each):
                for ids in hotrow.ahead(every[2:], each):
                    each(ids).values().square().sum().backward()
            each.load_weights("a", 30 + number, torch.full((30, 4), 0.1 * number))
            each.eval()
        ids = torch.arange(rank, 160, 2 + rank).unsqueeze(1)
        if not torch.equal(embedding(ids).values(), fast(ids).values()):
            found.append(f"choice {number}: evaluation reads other rows")
        for each in (embedding, fast):
            each.train()
        found += _unlike(tables_of(embedding), tables_of(fast), f"choice {number}:")
    return found


def test_pins_beside_accumulation_joining_evaluation_and_loading() -> None:
    check(run(2, together))


def by_kernels(rank: int, world: int, device: str, steps: int) -> list[str]:
    """Pins change, and rows are frozen, with the engine of a GPU."""
    options: dict[str, Any] = {"device": device, "engine": gpu_rows}
    embedding = one_table(rank, world, budget="20KiB", **options)
    fast, found = one_table(rank, world, strategy="all-fast", **options), []
    draw = torch.Generator().manual_seed(rank)
    for number, (first, last) in enumerate([(0, 60), (30, 90), (0, 0), (200, 290)]):
        embedding.pin_rows({"a": torch.arange(first, last)})
        batches = [torch.randint(300, (20, 1), generator=draw).to(device) for _ in range(steps)]
        for each in (embedding, fast):
            for ids in hotrow.ahead(batches, each):
                each(ids).values().square().sum().backward()
            each.freeze_rows({"a": torch.arange(10 * number, 60 + 10 * number)})
        found += _unlike(tables_of(embedding), tables_of(fast), f"choice {number}:")
    return found


def test_interpreted_kernels_train_pinned_rows() -> None:
    check(run(2, by_kernels, "cpu", 2, timeout=170))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_pins_of_ranks_on_one_gpu(world: int) -> None:
    check(run(world, by_kernels, "cuda", 20, timeout=280))


def read_beside(rank: int, world: int) -> tuple[int, list[str]]:
    """A thread evaluates while other rows are pinned, and rows are trained."""
    embedding = one_table(rank, world)
    with torch.no_grad():
        embedding.load_weights("a", 0, torch.ones(400, 4))
    found: list[str] = []
    ended, reads = threading.Event(), []

    def read() -> None:
        try:
            ids = torch.arange(400).unsqueeze(1)
            for number in range(60):
                with torch.no_grad():
                    vectors = embedding.eval()(ids).values()
                # Every row has had the same gradients, so all are alike in one finished step.
                if not torch.equal(vectors, vectors[:1].expand_as(vectors)):
                    found.append(f"read {number}: rows of different steps")
                reads.append(float(vectors[0, 0]))
        except BaseException as error:
            found.append(repr(error))
        ended.set()

    thread = threading.Thread(target=read)
    embedding.train()
    thread.start()
    draw, step = torch.Generator().manual_seed(4), 0
    count = torch.zeros(1)
    while True:  # until the threads of all ranks have ended
        count[0] = float(ended.is_set())
        dist.all_reduce(count)
        if count[0] == world:
            break
        embedding.pin_rows({"a": torch.randperm(400, generator=draw)[:100]})
        for _ in range(2):
            embedding(torch.arange(400).unsqueeze(1)).values().sum().backward()
            step += 1
    thread.join()
    return len(set(reads)), found


def test_threads_read_rows_of_one_step_while_pins_change() -> None:
    for different, found in run(2, read_beside, timeout=120):
        assert not found, found
        assert different > 1


def read_across(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Other rows are pinned, and trained, after a thread has found its way to the rows it reads."""
    embedding = one_table(rank, world)
    embedding.pin_rows({"a": torch.arange(60)})
    ids, route = torch.arange(0, 400, 3).unsqueeze(1), SharedRows.route
    has_route, is_changed, found = threading.Event(), threading.Event(), []

    def routed(self: SharedRows, ids: Tensor) -> Any:
        way = route(self, ids)
        if threading.current_thread() is thread and not has_route.is_set():
            has_route.set()
            assert is_changed.wait(20)
        return way

    def read() -> None:
        with torch.no_grad():
            found.append(embedding.eval()(ids).values())

    thread = threading.Thread(target=read)
    embedding.train()
    with patch.object(SharedRows, "route", routed):
        thread.start()
        assert has_route.wait(20)
        embedding.pin_rows({"a": torch.arange(40, 110)})
        embedding(torch.arange(400).unsqueeze(1)).values().square().sum().backward()
        is_changed.set()
        thread.join()
    return found[0], torch.cat([x for _, x in embedding.weights("a")])[ids.squeeze(1)]


def test_a_thread_finds_rows_that_were_pinned_after_it_looked_for_them() -> None:
    for read, trained in run(2, read_across):
        assert torch.equal(read, trained)


def changed_and_saved(rank: int, world: int, folder: Path, background: bool) -> list[Everything]:
    """A whole checkpoint, and two with what has changed since, with other pins before each."""
    with small_files():
        loop = RankLoop(rank, world, strategy="static", replicate="80KiB")
        kept = []
        for step in range(1, 4):
            rows = {"item": torch.arange(100 * step, 100 * step + 800), "tag": torch.arange(3)}
            loop.embedding.pin_rows(rows)
            loop.train(step - 1, step)
            kept.append(loop.everything())
            if background:
                save = loop.begin(folder, step, log="100%", full_every=9)
                loop.embedding.pin_rows({"user": torch.arange(300)})  # while it is written
                save.wait()
            else:
                loop.embedding.pin_rows({"user": torch.arange(300)})
                loop.save(folder, step, full_every=9)
        return kept


def opened(rank: int, world: int, folder: Path, step: int) -> list[Everything]:
    with small_files():
        loop = RankLoop(rank, world, seed=7, strategy="static", replicate="60KiB")
        loop.embedding.pin_rows({"item": torch.arange(0, 2_600, 4)})
        loop.train(50, 52)
        loop.load(folder / f"{step:05}-step-{step}")
        found = [loop.everything()]
        loop.embedding.pin_rows({"item": torch.arange(0, 2_600, 3)})
        return [*found, loop.everything()]


@pytest.mark.parametrize(("before", "after", "background"), [(2, 3, False), (3, 2, True)])
def test_checkpoints_after_a_change_of_pins(
    before: int, after: int, background: bool, tmp_path: Path
) -> None:
    (kept, *_) = run(before, changed_and_saved, tmp_path, background)
    assert Checkpoint(tmp_path / "00003-step-3").manifest.parent is not None
    for step in (1, 3):
        for states in run(after, opened, tmp_path, step):
            for state in states:
                unlike = [key for key in state if not same_bits(state[key], kept[step - 1][key])]
                assert [key for key in unlike if key not in OWN] == []
