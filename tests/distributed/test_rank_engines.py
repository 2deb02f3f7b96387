"""One store on each rank, two engines in turn: rows in slots, or rows that the CPU updates.

On a CPU every bit is that of all-fast. rank_cases.py has the batches and the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hotrow
import rank_programs
from builders import readout
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import saved_in
from hotrow.embedding import replicating
from hotrow.embedding.row_groups import RowGroups
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.host.rows import HostRows
from hotrow.run.job import same_bits
from rank_cases import (
    STEPS,
    TABLES,
    TOLERANCE,
    build,
    few_shards,
    form_of,
    parts,
    replicas_of,
    tables_of,
    train,
)
from rank_processes import run
from rank_training import OWN, Everything, RankLoop, small_files

CASES: list[dict[str, str]] = [
    {"strategy": "static", "rule": "adagrad", "tables": "bags", "form": "kjt", "ids": "uneven",
     "replicate": "hot rows"},
    {"strategy": "static", "rule": "adam", "tables": "bags", "form": "dense", "ids": "hot",
     "replicate": "nothing"},
    {"strategy": "static", "rule": "sgd", "tables": "weighted", "form": "kjt", "ids": "uneven",
     "replicate": "hot rows"},
    {"strategy": "lookahead", "rule": "row-wise", "tables": "mixed", "form": "kjt", "ids": "few",
     "replicate": "one table"},
    {"strategy": "lru", "rule": "adamw", "tables": "unpooled", "form": "kjt",
     "ids": "one rank without", "replicate": "nothing"},
    {"strategy": "scratchpipe", "rule": "adam", "tables": "mixed", "form": "dense",
     "ids": "uneven", "replicate": "hot rows"},
    {"strategy": "uncached", "rule": "adagrad", "tables": "unpooled", "form": "dense",
     "ids": "same", "replicate": "one table"},
]  # fmt: skip
BATCHES = {"tables": "bags", "form": "kjt", "ids": "uneven"}


def with_slots(choice: dict[str, str], strategy: str = "static", **options: Any) -> Any:
    widths = {table.embedding_dim for table in TABLES[choice["tables"]]}
    budget = hotrow.Budget((hotrow.Share(90, 64, True),) * len(widths), 1 << 13)
    return build(choice, strategy, budget=budget, **options)


def pin(embedding: Any, part: int) -> Any:
    """Keep other rows on every rank than before."""
    tables = embedding.tables
    return embedding.pin_rows({x.name: torch.arange(part, x.num_embeddings, 3) for x in tables})


def batches_of(choice: dict[str, str], rank: int, world: int, count: int = STEPS) -> list[Any]:
    every = [parts(choice, number, world)[rank] for number in range(count)]
    return [part.features(form_of(choice)) for part in every]


def change(embedding: Any, on_host: bool) -> int:
    moved: int = embedding.train_on_host() if on_host else embedding.train_in_slots()
    return moved


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether values are equal; of a GPU up to rounding, as the CPU's sums are in another order."""
    if found.device.type == "cpu" and not torch.cuda.is_available():
        return torch.equal(found, expected)
    return torch.allclose(found.float(), expected.float(), **TOLERANCE)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, x in found.items() if not alike(x, expected[name])]


def in_turn(
    rank: int, world: int, choices: Sequence[dict[str, str]], device: str = "cpu"
) -> list[str]:
    """Say what differs from all-fast on this rank."""
    said = []
    for choice in choices:
        with few_shards():
            fast = build(choice, device=device)
            options = {"device": device, **replicas_of(choice, world)}
            slow = with_slots(choice, choice["strategy"], **options)
            losses = train(fast, batches_of(choice, rank, world), "ahead")
            found, batches = [], batches_of(choice, rank, world)
            for place, first in enumerate(range(0, len(batches), 3)):
                change(slow, on_host=place % 2 == 1)
                if choice["replicate"] == "hot rows" and slow.strategy.name == "static":
                    pin(slow, place)
                found += train(slow, batches[first : first + 3], "ahead")
            pairs = list(zip(found, losses, strict=True))
            said += [f"{choice}: loss {x} instead of {y}" for x, y in pairs if not alike(x, y)]
            if not slow.traffic().evicted_rows:
                said.append(f"{choice}: no row has left its slot")
            unlike = differing(tables_of(slow), tables_of(fast))
            said += [f"{choice}: {name} differs" for name in unlike]
    return said


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_engines_in_turn_give_the_bits_of_all_fast(world: int) -> None:
    for said in run(world, in_turn, CASES, timeout=200):
        assert not said, "\n".join(said)


def not_written_back(self: RowGroups) -> None:
    """Owners do not get the rows that every rank had."""


def weights_alone(shared: Any, new: Any) -> None:
    """Replicas come back without their state."""
    new.values[:, shared.dim :] = 0
    shared.replicas.scatter(torch.arange(len(new.ids)), new.values)


MISTAKES = {
    "not_written_back": (RowGroups, "write_back_replicas", not_written_back),
    "weights_alone": (replicating, "_fill", weights_alone),
}


def with_mistake(rank: int, world: int, name: str) -> list[str]:
    with patch.object(*MISTAKES[name]):
        return in_turn(rank, world, CASES[:1])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    assert any(run(2, with_mistake, name))


def by_kernels(rank: int, world: int) -> list[str]:
    """The same with a GPU's engine, whose kernels are interpreted; each engine trains one batch."""
    choice = {**CASES[0], "tables": "mixed", "ids": "few"}
    batches, said = batches_of(choice, rank, world, 3), []
    profile = {x.name: torch.arange(x.num_embeddings, 0, -1) for x in TABLES["mixed"]}
    slow = with_slots(choice, engine=gpu_rows, replicate=1500, profile=profile)
    fast, replicas = build(choice), len(slow.groups)
    for number, batch in enumerate(batches):
        change(slow, on_host=number == 1)
        losses = [train(embedding, [batch], "ahead")[0] for embedding in (slow, fast)]
        tables = [tables_of(embedding) for embedding in (slow, fast)]
        pairs = {"loss": losses, **{name: [x[name] for x in tables] for name in tables[0]}}
        close = {
            name: torch.allclose(*map(Tensor.float, x), **TOLERANCE) for name, x in pairs.items()
        }
        said += [f"{name} in batch {number}" for name, is_close in close.items() if not is_close]
    return said if replicas > 1 else ["no row is on every rank"]


@pytest.mark.slow
def test_engines_in_turn_with_interpreted_kernels() -> None:
    assert run(2, by_kernels, timeout=120) == [[], []]


@pytest.mark.gpu
def test_engines_in_turn_on_a_gpu_train_like_all_fast() -> None:
    cases = [case for case in CASES if case["tables"] != "weighted"]  # whose gradients are here
    for said in run(2, in_turn, cases, "cuda", timeout=200):
        assert not said, "\n".join(said)


def moved(rank: int, world: int) -> list[str]:
    """Both engines have one store on each rank, and say what this rank has copied."""
    embedding = with_slots({**BATCHES, "rule": "adagrad"}, replicate=1500)
    pinned, version = pin(embedding, 0), embedding.pins_version
    train(embedding, batches_of(BATCHES, rank, world, 3), "ahead")
    slots = embedding.groups[:2]
    size = sum(4 * group.width * group.count_resident() for group in slots)
    size += sum(4 * 2 * x.embedding_dim * len(pinned.rows(x.name)) for x in embedding.tables)
    facts = {
        "rows are in slots": size > 0,
        "bytes to the host": embedding.train_on_host() == size,
        "nothing the second time": embedding.train_on_host() == 0,
        "the host": all(isinstance(group, HostRows) for group in embedding.groups),
        "strategy": embedding.strategy.name == "hybrid",
        "stores": [x.store for x in embedding.groups] == [x.store for x in slots],
    }
    host = list(embedding.groups)
    train(embedding, batches_of(BATCHES, rank, world, 2), "ahead")
    facts |= {
        "bytes to slots": embedding.train_in_slots() == size,
        "nothing again": embedding.train_in_slots() == 0,
        "slots": embedding.groups[:2] == slots,
        "replicas": len(embedding.groups) == 4,
        "pins": embedding.pins_version == version,
    }
    embedding.train_on_host()
    facts["not made anew"] = list(embedding.groups) == host
    return [name for name, holds in facts.items() if not holds]


def test_both_engines_have_one_store_and_say_what_moved() -> None:
    assert run(2, moved) == [[], []]


def with_changes(rank: int, world: int, replicate: int) -> list[str]:
    """Evaluation, replaced weights and frozen rows hold on either engine."""
    said: list[str] = []
    choice = {**BATCHES, "rule": "adam"}
    slow, fast = with_slots(choice, replicate=replicate), build(choice)
    some, few = {"a": torch.arange(60)}, {"a": torch.arange(9)}
    for place, rows in enumerate([some, None, {"b": torch.arange(90)}, few]):
        if place % 2:
            change(slow, on_host=False)
        for embedding in (slow, fast):
            embedding.freeze_rows(rows)
        if place % 2 == 0:
            change(slow, on_host=True)
        if place % 2 and replicate:
            pin(slow, place)
        batches = batches_of(choice, rank, world, 3 * place + 3)[3 * place :]
        for embedding in (slow, fast):
            train(embedding, batches, "ahead")
            embedding.load_weights("a", 5, torch.full((30, 4), 0.1 * place))
        with torch.no_grad():
            vectors = [embedding(batches[0]).values() for embedding in (slow, fast)]
        if not torch.equal(*vectors):
            said.append(f"vectors of turn {place}")
        said += [f"{name} in turn {place}" for name in differing(tables_of(slow), tables_of(fast))]
    return said


@pytest.mark.parametrize("replicate", [0, 1500])
def test_rows_are_the_newest_on_either_engine(replicate: int) -> None:
    assert run(2, with_changes, replicate) == [[], []]


CHANGE = ["another engine"]
PROGRAMS = [
    seed
    for seed in range(200)
    if "another engine" in rank_programs.shared(seed, more=CHANGE).ingredients
]


def test_programs_that_change_engines() -> None:
    for said in run(2, rank_programs.differences, PROGRAMS[:4], plain=False, more=CHANGE):
        assert not said, "\n".join(said)


@pytest.mark.slow
def test_further_programs_that_change_engines() -> None:
    options = {"plain": False, "more": CHANGE}
    for said in run(2, rank_programs.differences, PROGRAMS[4:20], timeout=300, **options):
        assert not said, "\n".join(said)


# -- what ranks do together ------------------------------------------------------------------


def one_rank_changes(rank: int, world: int, on_host: bool, other: str) -> str:
    embedding = with_slots({**BATCHES, "rule": "sgd"})
    train(embedding, batches_of(BATCHES, rank, world, 1), "direct")
    if not on_host:
        embedding.train_on_host()
    try:
        if rank == 1:
            change(embedding, on_host)
        elif other == "the opposite":
            change(embedding, not on_host)
        elif other == "trains":
            train(embedding, batches_of(BATCHES, rank, world, 1), "direct")
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("on_host", "other"), [(True, "the opposite"), (True, "trains"),
                                                (False, "trains"), (False, "ends")])  # fmt: skip
def test_a_rank_that_changes_engines_alone_is_refused(on_host: bool, other: str) -> None:
    expected = {
        "the opposite": "all ranks have to call train_in_slots(); rank 1 calls train_on_host()",
        "trains": "ranks do different things: ",
        "ends": "another rank has ended, or did not answer in time",
    }
    said = run(2, one_rank_changes, on_host, other, expect_errors=True, group_timeout=4)
    assert expected[other] in said[1]
    assert other == "ends" or said[0] == said[1]


def late_backward(rank: int, world: int, to_host: bool) -> list[str]:
    embedding = with_slots({**BATCHES, "rule": "adagrad"})
    batch = batches_of(BATCHES, rank, world, 1)[0]
    change(embedding, not to_host)
    loss = readout(embedding(batch))
    change(embedding, to_host)
    before = tables_of(embedding)
    said = []
    try:
        loss.backward()
        said.append("nothing was raised")
    except RuntimeError as error:
        said += [] if "call backward() before these" in str(error) else [str(error)]
    said += differing(tables_of(embedding), before)
    train(embedding, [batch], "ahead")  # training goes on
    said += [] if differing(tables_of(embedding), before) else ["no row was trained"]
    return said


@pytest.mark.parametrize("to_host", [True, False])
def test_a_backward_pass_from_before_a_change_is_refused(to_host: bool) -> None:
    assert run(2, late_backward, to_host, group_timeout=20) == [[], []]


def beside_threads(rank: int, world: int, replicate: int) -> list[str]:
    """Each vector that a thread reads is of some finished step, whichever engine trains."""
    choice = {**BATCHES, "rule": "adagrad"}
    slow, fast = with_slots(choice, replicate=replicate), build(choice)
    probe = torch.arange(40).repeat(4, 1).T.contiguous()
    history, read, errors, ended = [], list[Tensor](), list[BaseException](), threading.Event()

    def watch() -> None:
        try:
            with torch.no_grad():
                for _ in range(60):  # of all ranks together
                    read.append(slow(probe)["f"])
        except BaseException as error:
            errors.append(error)
        ended.set()

    def note() -> None:
        with torch.no_grad():
            history.append(fast(probe)["f"])

    note()
    if replicate:
        pin(slow, 2)
    thread, turn = threading.Thread(target=watch), 0
    dist.barrier()
    thread.start()
    while turn < 8:
        change(slow, on_host=turn % 2 == 0)
        if replicate and turn % 2:
            pin(slow, turn // 2 % 3)
        for embedding in (fast, slow):
            train(embedding, batches_of(choice, rank, world, turn + 1)[turn:], "direct")
            if embedding is fast:
                note()
        turn += 1
    thread.join()
    said = [repr(error) for error in errors]
    for vectors in read:
        steps = torch.stack([(vectors == past).all(1) for past in history])
        if not bool(steps.any(0).all()):
            said.append("a thread has read a vector of no finished step")
    return [*said, *differing(tables_of(slow), tables_of(fast))]


@pytest.mark.parametrize("replicate", [0, 1500])
def test_threads_read_while_engines_change(replicate: int) -> None:
    assert run(2, beside_threads, replicate, timeout=120, group_timeout=30) == [[], []]


# -- checkpoints -----------------------------------------------------------------------------


def saved_in_turn(rank: int, world: int, folder: Path) -> list[Everything]:
    """A whole checkpoint of rows in slots, and what has changed since on the host, and in slots."""
    with small_files():
        loop, kept = RankLoop(rank, world, strategy="static", replicate="80KiB"), []
        assert loop.has_replicas
        for turn in range(3):
            change(loop.embedding, on_host=turn == 1)
            loop.train(2 * turn, 2 * turn + 2)
            loop.save(folder, 2 * turn + 2, full_every=9)
            kept.append(loop.everything())
        return kept


def loaded_on_host(rank: int, world: int, folder: Path, strategy: str) -> list[Everything]:
    """What is loaded while either engine trains, and what the other one has then."""
    found = []
    with small_files():
        for path in saved_in(folder):
            options = {"replicate": "80KiB"} if strategy == "static" else {}
            loop = RankLoop(rank, world, seed=7, strategy=strategy, **options)
            loop.train(50, 52)
            if strategy == "static":
                change(loop.embedding, on_host=len(found) % 4 == 0)
            loop.load(path)
            found.append(loop.everything())
            if strategy == "static":
                change(loop.embedding, on_host=len(found) % 4 == 3)
            found.append(loop.everything())
    return found


@pytest.mark.parametrize(("world", "strategy"), [(2, "static"), (1, "lookahead")])
def test_checkpoints_of_either_engine(world: int, strategy: str, tmp_path: Path) -> None:
    kept = run(2, saved_in_turn, tmp_path)[0]
    manifests = [Checkpoint(path).manifest for path in saved_in(tmp_path)]
    assert [manifest.parent is None for manifest in manifests] == [True, False, False]
    for found in run(world, loaded_on_host, tmp_path, strategy):
        for state, expected in zip(found, [x for x in kept for _ in range(2)], strict=True):
            for key in (key for key in expected if key not in OWN):
                assert same_bits(state[key], expected[key]), key
