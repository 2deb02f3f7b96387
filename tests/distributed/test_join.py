"""Ranks with different numbers of batches, and ranks that fail."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow.distributed.shared_rows import SharedWork
from rank_processes import KILLED, Failed, run, started

SIZES, DIMS = (3000, 200, 5), (8, 8, 4)


def collection(strategy: str, **options: Any) -> hotrow.EmbeddingBagCollection:
    tables = [
        hotrow.EmbeddingBagConfig(f"t{k}", rows, dim, [f"f{k}"])
        for k, (rows, dim) in enumerate(zip(SIZES, DIMS, strict=True))
    ]
    budget = None if strategy == "all-fast" else "25%"
    rule = options.pop("optimizer", hotrow.Adagrad(lr=0.1))
    return hotrow.EmbeddingBagCollection(tables, rule, budget, strategy=strategy, seed=3, **options)


def batches(rank: int, count: int, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    columns = [torch.randint(rows, (count, size), generator=generator) for rows in SIZES]
    return list(torch.stack(columns, 2) // 3)


class Model(nn.Module):
    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding, self.norm = embedding, nn.BatchNorm1d(sum(DIMS))
        self.linear = nn.Linear(sum(DIMS), 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(self.norm(self.embedding(batch).values()))


def rows_of(embedding: hotrow.EmbeddingBagCollection) -> Tensor:
    embedding.check()
    tables = [torch.cat([rows for _, rows in embedding.rows(x.name)]) for x in embedding.tables]
    return torch.cat([table.flatten() for table in tables])


# -- hotrow.join ---------------------------------------------------------------------------


def train_rows(embedding: hotrow.EmbeddingBagCollection, batch: Tensor) -> None:
    """A step without a dense part; an empty batch has no gradient."""
    vectors = embedding(batch).values()
    if len(batch):
        (vectors - 0.3).square().sum().backward()


def joined(rank: int, world: int, counts: Sequence[int]) -> list[bool]:
    """Return for each way of training whether rows are those of training with empty batches."""
    mine = batches(rank, counts[rank])
    empty = [mine[0][:0] if mine else torch.empty(0, 3, dtype=torch.int64)]
    padded = mine + empty * (max(counts) - len(mine))
    embedding = collection("all-fast")
    schedule = torch.optim.lr_scheduler.StepLR(embedding.optimizer, 2, 0.5)
    for batch in padded:
        train_rows(embedding, batch)
        schedule.step()
    expected, equal = rows_of(embedding), []
    # On a CPU the rows of "hybrid" are those of all-fast to the bit.
    for strategy in ("all-fast", "lookahead", "lru", "static", "uncached", "scratchpipe", "hybrid"):
        for is_ahead in (True, False):
            embedding = collection(strategy)
            schedule = torch.optim.lr_scheduler.StepLR(embedding.optimizer, 2, 0.5)
            trained = 0
            with hotrow.join(embedding):
                source: Any = hotrow.ahead(mine, embedding) if is_ahead else mine
                for batch in source:
                    train_rows(embedding, batch)
                    schedule.step()  # ranks that serve follow the rate of the others
                    trained += 1
            assert trained == len(mine)
            equal.append(torch.equal(rows_of(embedding), expected))
            # Afterwards all ranks train together again.
            train_rows(embedding, padded[0])
            rows_of(embedding)
    return equal


@pytest.mark.parametrize("counts", [(9, 4), (2, 6), (0, 4), (4, 4, 2, 0)], ids=str)
def test_ranks_without_batches_serve_the_others(counts: tuple[int, ...]) -> None:
    for equal in run(len(counts), joined, counts):
        assert all(equal), equal


def left_early(rank: int, world: int) -> bool:
    """One rank leaves its loop while batches that it has announced are still to be trained."""
    found = []
    for strategy in ("all-fast", "lookahead"):
        embedding = collection(strategy)
        with hotrow.join(embedding):
            for number, batch in enumerate(hotrow.ahead(batches(rank, 20), embedding)):
                if rank == 1 and number == 5:
                    break
                train_rows(embedding, batch)
        found.append(rows_of(embedding))
    return torch.equal(*found)


def test_a_rank_may_leave_its_loop_inside_of_join() -> None:
    assert all(run(2, left_early))


def joined_with_ddp(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for strategy in ("all-fast", "lookahead", "scratchpipe"):
        torch.manual_seed(0)
        model = Model(collection(strategy))
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD([*model.norm.parameters(), *model.linear.parameters()], lr=0.1)
        with hotrow.join(wrapped):
            for batch in hotrow.ahead(batches(rank, 9 - 4 * rank), wrapped):
                wrapped(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((rows_of(model.embedding), model.linear.weight.detach().clone()))
    return found


def test_the_dense_part_is_joined_by_torch() -> None:
    for found in run(2, joined_with_ddp):
        rows, weights = found[0]
        for other_rows, other_weights in found[1:]:
            assert torch.equal(rows, other_rows)
            assert torch.equal(weights, other_weights)


def refused_join(rank: int, world: int) -> None:
    embedding = collection("all-fast", update="step", optimizer=None)
    with hotrow.join(embedding):
        if rank == 0:
            embedding(batches(rank, 1)[0])


def test_rows_that_wait_for_an_optimizer_cannot_be_joined() -> None:
    for failed in run(2, refused_join, expect_errors=True, alone=True, timeout=30):
        assert "update='backward'" in failed.message


def left_with_steps(rank: int, world: int) -> None:
    embedding = collection("lookahead", update="step")
    with hotrow.join(embedding):
        for number, batch in enumerate(hotrow.ahead(batches(rank, 20), embedding)):
            if rank == 1 and number == 5:
                break
            embedding.optimizer.zero_grad()
            train_rows(embedding, batch)
            embedding.optimizer.step()


def test_a_batch_that_one_rank_has_left_is_an_error_on_all() -> None:
    for failed in run(2, left_with_steps, expect_errors=True, group_timeout=20):
        assert failed.message.startswith("rank 1 of 2 ran out of batches before the others")


def skipped(rank: int, world: int) -> list[int]:
    """Return how many batches are known after some that were trained, and every second was not."""
    embedding, counts = collection("lookahead"), []
    with hotrow.join(embedding):
        for number, batch in enumerate(hotrow.ahead(batches(rank, 150), embedding, depth=2)):
            if number % 2:
                train_rows(embedding, batch)
            if number in (90, 140):  # the newest 64 are remembered
                counts.append(sum(type(x) is SharedWork for x in gc.get_objects()))
    return counts


def test_batches_that_no_rank_looks_up_are_forgotten() -> None:
    for before, after in run(2, skipped):
        assert after <= before


def calls_alone(rank: int, world: int) -> None:
    embedding = collection("all-fast")
    with hotrow.join(embedding):
        if rank == 1:
            embedding.load_weights("t1", 0, torch.zeros(3, 8))


def test_a_method_that_one_rank_calls_in_join_is_an_error_on_all() -> None:
    for failed in run(2, calls_alone, expect_errors=True, group_timeout=20):
        assert failed.message.startswith("all ranks have to call load_weights('t1', 0, 3 rows); ")
        assert failed.message.endswith("rank 0 has no batch left and serves the others")


def joined_in_groups(rank: int, world: int) -> list[bool]:
    """A rank without a batch serves its rows of both process groups at the same time."""
    found = []
    for strategy in ("all-fast", "lookahead"):
        groups = [None, torch.distributed.new_group()]
        model = nn.ModuleList([collection(strategy, process_group=group) for group in groups])
        with hotrow.join(model):
            for batch in hotrow.ahead(batches(rank, 3 + 2 * rank), model):
                torch.stack([x(batch).values().square().sum() for x in model]).sum().backward()
        found.append([rows_of(x) for x in model])  # type: ignore[arg-type]
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]


def test_collections_of_several_process_groups_are_joined() -> None:
    for equal in run(2, joined_in_groups, group_timeout=20):
        assert all(equal)


def evaluated(rank: int, world: int) -> bool:
    """Evaluate another number of batches on each rank, before an exchange of the user's own."""
    equal = []
    for update in ("backward", "step"):
        optimizer = hotrow.Adagrad(lr=0.1) if update == "backward" else None
        embedding = collection("lookahead", update=update, optimizer=optimizer)
        total = torch.zeros(1)
        with hotrow.join(embedding), torch.no_grad():
            for batch in batches(0, 3)[rank:]:
                total += embedding(batch).values().abs().sum()
        torch.distributed.all_reduce(total)
        equal.append(total)
    return bool(equal[0]) and torch.equal(*equal)


def test_ranks_may_evaluate_different_numbers_of_batches() -> None:
    assert all(run(2, evaluated))


def ends_early(rank: int, world: int) -> list[str]:
    errors = []
    for strategy in ("all-fast", "lookahead"):
        embedding, trained = collection(strategy), 0
        try:
            for batch in hotrow.ahead(batches(rank, 9 - 4 * rank), embedding):
                train_rows(embedding, batch)
                trained += 1
        except RuntimeError as error:
            errors.append(str(error))
        assert trained == 5  # all that both ranks have
    return errors


def test_a_rank_that_ends_before_the_others_is_an_error_on_all() -> None:
    for errors in run(2, ends_early):
        assert len(errors) == 2
        for error in errors:
            assert "rank 1 of 2 ran out of batches" in error
            assert "hotrow.join(model)" in error


# -- ranks that fail -----------------------------------------------------------------------


def failing_loader(rank: int, world: int) -> tuple[int, str]:
    def loader() -> Iterator[Tensor]:
        for number, batch in enumerate(batches(rank, 9)):
            if rank == 1 and number == 6:
                raise OSError("the disk is gone")
            yield batch

    embedding, trained = collection("lookahead"), 0
    try:
        for batch in hotrow.ahead(loader(), embedding):
            train_rows(embedding, batch)
            trained += 1
    except (OSError, RuntimeError) as error:
        return trained, str(error)
    return trained, "no error"


def test_an_error_of_one_loader_is_raised_on_all_ranks() -> None:
    (trained, other), (mine, error) = run(2, failing_loader)
    assert trained == mine == 6  # the batches before it are trained
    assert (other, error) == ("rank 1: the disk is gone", "the disk is gone")


def train_until(rank: int, world: int, what: str) -> None:
    embedding = collection("lookahead")
    for number, batch in enumerate(hotrow.ahead(batches(rank, 4000), embedding)):
        vectors = embedding(batch).values()
        if rank == 1 and number == 5:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            raise ValueError("a bug in the model")
        vectors.sum().backward()


@pytest.mark.parametrize("what", ["raise", "kill", "interrupt"])
def test_a_rank_that_ends_is_an_error_on_the_others(what: str) -> None:
    begun = time.monotonic()
    first, second = run(2, train_until, what, expect_errors=True, alone=True, timeout=50)
    assert time.monotonic() - begun < 40, "they end long before the timeout of 60 s"
    assert first.kind == "RankError"
    assert "lost the others" in first.message
    kinds = {"raise": "ValueError", "interrupt": "KeyboardInterrupt"}
    assert second == KILLED if what == "kill" else second.kind == kinds[what]


def train_for_long(rank: int, world: int) -> None:
    embedding = collection("scratchpipe")
    for batch in hotrow.ahead(batches(rank, 100_000), embedding):
        embedding(batch).values().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_a_rank_can_be_killed_at_any_moment(number: int) -> None:
    # A rank that waits for process groups with one that is gone waits for their timeout.
    options = {"alone": True, "timeout": 50, "group_timeout": 15, "grace": 40}
    with started(2, train_for_long, **options) as running:
        time.sleep(0.3 + 0.37 * number)
        os.kill(running.pids[number % 2], signal.SIGKILL)
        results = running.results(expect_errors=True)
    other = results[1 - number % 2]
    assert results[number % 2] == KILLED
    assert isinstance(other, Failed)
    assert other.kind == "RankError"


def different_things(rank: int, world: int) -> None:
    embedding = collection("all-fast")
    batch = batches(rank, 1)[0]
    embedding(batch).values().sum().backward()
    if rank == 0:
        with embedding.accumulate():
            pass
    else:
        embedding(batch + 1)


def test_ranks_that_do_different_things_are_an_error() -> None:
    for failed in run(2, different_things, expect_errors=True, alone=True, timeout=30):
        assert failed.kind == "RankError"
        assert "rank 0 ends a backward pass" in failed.message
        assert "rank 1 brings its next batch" in failed.message


def several_models(rank: int, world: int) -> bool:
    """Several collections in one model, and several models in turns."""
    first, second = nn.Module(), collection("lookahead")
    first.one, first.two = collection("lru"), collection("all-fast")
    mine = batches(rank, 6)
    for batch in mine:
        (first.one(batch).values() * first.two(batch).values()).sum().backward()
    for batch in hotrow.ahead(mine, second):
        train_rows(second, batch)
    for batch in hotrow.ahead(mine, first):
        (first.one(batch).values() * first.two(batch).values()).sum().backward()
    return torch.equal(rows_of(first.one), rows_of(first.two))


def test_several_collections_share_the_ranks() -> None:
    assert all(run(2, several_models))


# -- what ranks have to do alike -----------------------------------------------------------


def freed(rank: int, world: int) -> bool:
    """Whether the rows of a collection are freed with the last reference to it."""
    embedding = collection("lookahead", replicate="2KiB")
    for batch in hotrow.ahead(batches(rank, 4), embedding):
        train_rows(embedding, batch)
    kept = [weakref.ref(x) for x in (embedding, *embedding.groups)]
    gc.collect()
    gc.disable()
    try:
        del embedding, batch
        return all(x() is None for x in kept)
    finally:
        gc.enable()


def test_a_collection_is_freed_without_a_garbage_collection() -> None:
    assert all(run(2, freed))


def unlike(rank: int, world: int, what: str) -> None:
    if what == "profile":
        counts = torch.zeros(SIZES[0])
        counts[rank] = 1
        collection("all-fast", replicate="2KiB", profile={"t0": counts})
    embedding = collection("all-fast")
    if what == "load" and rank == 0:
        embedding.load_weights("t0", 0, torch.zeros(5, 8))
    embedding(batches(rank, 1)[0])


@pytest.mark.parametrize("what", ["profile", "load"])
def test_ranks_that_differ_in_what_they_must_share_are_refused(what: str) -> None:
    for failed in run(2, unlike, what, expect_errors=True, alone=True, timeout=30):
        assert failed.kind == "RankError"


def not_finite(rank: int, world: int) -> bool:
    table = hotrow.EmbeddingBagConfig("a|b", 50, 4, ["f"])
    embedding = hotrow.EmbeddingBagCollection(
        [table], hotrow.SGD(lr=1.0), strategy="all-fast", on_nonfinite="skip", seed=1
    )
    before = rows_of(embedding)
    (embedding(torch.tensor([[rank]])).values() * (float("nan") if rank else 1)).sum().backward()
    return torch.equal(rows_of(embedding), before)


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    assert all(run(2, not_finite))


def evaluated_beside(rank: int, world: int) -> int:
    """Read in a thread after another number of loads on each rank."""
    embedding = collection("lookahead")
    for _ in range(2):
        embedding.load_weights("t1", 0, torch.ones(5, 8))
    embedding.row_access.note_loaded() if rank else None
    batch, found = batches(0, 1)[0], []

    def read() -> None:
        with torch.no_grad():
            found.append(embedding(batch).values())

    thread = Thread(target=read)
    thread.start()
    thread.join(20)
    return len(found)


def test_a_thread_reads_whatever_was_loaded_before() -> None:
    assert run(2, evaluated_beside) == [1, 1]
